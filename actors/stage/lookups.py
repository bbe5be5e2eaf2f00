"""Weights of which a stage reads rows only, and the rows that an update reads.

The rows follow from the data. So every copy of a stage knows those of all copies, and copies exchange nothing but gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypipe.actors.stage.module import StageModule
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Batch

_LEAST_ITEM_BYTES = 4


class _Use(NamedTuple):
    layer: str
    weight: str
    fields: tuple[str, ...]
    rows: Callable[..., Tensor] | None


class Lookups:
    """The weights of a stage that its layers look up (`Layer.looked_up`); `names` and `masters` are the trained weights of the stage.

    Attributes:
        refusal: Why a weight cannot be exchanged by rows; empty if all can.

    Raises:
        ConfigError: A layer has no such weight.
    """

    def __init__(self, module: StageModule, names: Sequence[str], masters: Sequence[Tensor]) -> None:
        self.refusal = ""
        self._names = names
        self._masters = masters
        self._lookups: dict[int, list[tuple[tuple[str, ...], Callable[..., Tensor]]]] = {}
        uses = _uses(module)
        for at, name in enumerate(names):
            of_weight = uses[module.get_parameter(name)]
            looked_up = [use for use in of_weight if use.rows is not None]
            whole = [use for use in of_weight if use.rows is None]
            if looked_up and whole:
                weight = looked_up[0].weight
                self.refusal = (
                    f"layer {looked_up[0].layer!r} looks up rows of {weight!r}, but on stage {module.stage} this is also the weight "
                    f"{whole[0].weight!r} of layer {whole[0].layer!r}, which reads all rows, so that all have a gradient. Leave {weight!r} "
                    "out of `looked_up`, or cut the model between the two layers: then the first stage's part of the gradient goes as rows"
                )
            elif looked_up:
                self._lookups[at] = [(use.fields, use.rows) for use in looked_up if use.rows is not None]

    def __bool__(self) -> bool:
        return bool(self._lookups)

    @property
    def num_rows(self) -> dict[int, int]:
        """Rows of each weight, by its position."""
        return {at: len(self._masters[at]) for at in self._lookups}

    def rows(self, batches: Iterable[Batch], *, of: Collection[int] | None = None) -> dict[int, Tensor]:
        """Return the rows that some microbatches look up, for the weights, by default all, of which this is not all."""
        rows = self.all_rows(batches, of=of)
        return {at: of_weight for at, of_weight in rows.items() if len(of_weight) < len(self._masters[at])}

    def all_rows(self, batches: Iterable[Batch], *, of: Collection[int] | None = None) -> dict[int, Tensor]:
        """Return the rows that some microbatches look up, ascending, for the weights, by default all."""
        found: dict[int, list[Tensor]] = {at: [] for at in self._lookups if of is None or at in of}
        for batch in batches if found else ():
            for at, parts in found.items():
                parts += [rows_of(*(batch[field] for field in fields)).reshape(-1).long() for fields, rows_of in self._lookups[at]]
        return {at: torch.unique(torch.cat(parts)) for at, parts in found.items()}

    def reread_share(self, batch: Batch) -> float | None:
        """Return which part of the rows that one half of a microbatch looks up the other half does, too.

        `None` without a second half, and for weights of 16 bits, of which an optimizer may round a row otherwise alone than among others.
        """
        size = min((len(field) for field in batch.values()), default=0) // 2
        if not self._lookups or not size or any(self._masters[at].dtype.itemsize < _LEAST_ITEM_BYTES for at in self._lookups):
            return None
        halves = [{name: field[first : first + size] for name, field in batch.items()} for first in (0, size)]
        one, other = (self.all_rows([half]) for half in halves)
        num_common = sum(int(torch.isin(rows, other[at], assume_unique=True).sum()) for at, rows in one.items())
        return 2 * num_common / sum(len(rows) for half in (one, other) for rows in half.values())

    def check(self, gradients: Sequence[Tensor | None], rows: Mapping[int, Tensor]) -> None:
        """Refuse rows that leave out some with a gradient; `gradients` are of the same weights.

        Raises:
            ConfigError: Names the layer and its weight.
        """
        for gradient, (at, of_weight) in zip(gradients, rows.items(), strict=True):
            if gradient is None:
                continue
            inside = gradient.index_select(0, of_weight.to(gradient.device))
            if int(torch.count_nonzero(gradient)) != int(torch.count_nonzero(inside)):
                raise ConfigError(
                    f"`looked_up` of {self._names[at]!r} leaves out rows that have a gradient; return all rows that the layer reads, or "
                    "leave the weight out of `looked_up`"
                )


def _uses(module: StageModule) -> dict[nn.Parameter, list[_Use]]:
    uses: dict[nn.Parameter, list[_Use]] = {}
    for index, spec in module.specs.items():
        weights = dict(module.layers[str(index)].named_parameters(remove_duplicate=False))
        if unknown := spec.looked_up.keys() - weights.keys():
            name = min(unknown)
            near = f"{suggestion(name, weights)}; it has {', '.join(weights) or 'none'}"
            raise ConfigError(f"layer {spec.name!r} looks up its weight {name!r}, but has no such weight{near}")
        for name, weight in weights.items():
            uses.setdefault(weight, []).append(_Use(spec.name, name, spec.batch, spec.looked_up.get(name)))
    return uses
