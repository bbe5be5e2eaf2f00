"""Weights of which a stage reads rows only, and the rows that an update reads.

The rows follow from the data. So every copy of a stage knows those of all copies, and copies exchange nothing but gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypipe.actors.stage.module import StageModule
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Batch

Rows = Mapping[int, Tensor]
"""By the position of a weight, the rows that may have a gradient, ascending."""


class _Lookup(NamedTuple):
    fields: tuple[str, ...]
    rows: Callable[..., Tensor]


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
        self._lookups: dict[int, list[_Lookup]] = {}
        declared: dict[int, list[tuple[str, str, _Lookup]]] = {}
        others: dict[int, tuple[str, str]] = {}
        for index, spec in module.specs.items():
            weights = dict(module.layers[str(index)].named_parameters(remove_duplicate=False))
            if unknown := spec.looked_up.keys() - weights.keys():
                name = min(unknown)
                near = f"{suggestion(name, weights)}; it has {', '.join(weights) or 'none'}"
                raise ConfigError(f"layer {spec.name!r} looks up its weight {name!r}, but has no such weight{near}")
            for name, weight in weights.items():
                if name in spec.looked_up:
                    lookup = _Lookup(spec.batch, spec.looked_up[name])
                    declared.setdefault(id(weight), []).append((spec.name, name, lookup))
                else:
                    others[id(weight)] = (spec.name, name)
        trained = {id(module.get_parameter(name)): at for at, name in enumerate(names)}
        for weight_id, lookups in declared.items():
            if weight_id in others and weight_id in trained:
                (layer, name, _), (other, called) = lookups[0], others[weight_id]
                self.refusal = (
                    f"layer {layer!r} looks up rows of {name!r}, but on stage {module.stage} this is also the weight {called!r} of layer "
                    f"{other!r}, which reads all rows, so that all have a gradient. Leave {name!r} out of `looked_up`, or cut the model "
                    "between the two layers: then the first stage's part of the gradient goes as rows"
                )
            elif weight_id in trained:
                self._lookups[trained[weight_id]] = [lookup for _, _, lookup in lookups]

    def __bool__(self) -> bool:
        return bool(self._lookups)

    @property
    def num_rows(self) -> dict[int, int]:
        """Rows of each weight, by its position."""
        return {at: len(self._masters[at]) for at in self._lookups}

    def rows(self, batches: Iterable[Batch]) -> dict[int, Tensor]:
        """Return the rows that some microbatches look up, for the weights of which this is not all."""
        found: dict[int, list[Tensor]] = {at: [] for at in self._lookups}
        for batch in batches:
            for at, lookups in self._lookups.items():
                found[at] += [lookup.rows(*(batch[field] for field in lookup.fields)).reshape(-1).long() for lookup in lookups]
        rows = {at: torch.unique(torch.cat(parts)) for at, parts in found.items()}
        return {at: of_weight for at, of_weight in rows.items() if len(of_weight) < len(self._masters[at])}

    def check(self, gradients: Sequence[Tensor | None], rows: Rows) -> None:
        """Refuse rows that leave out some with a gradient.

        Raises:
            ConfigError: Names the layer and its weight.
        """
        for at, of_weight in rows.items():
            gradient = gradients[at]
            if gradient is None:
                continue
            inside = gradient.index_select(0, of_weight.to(gradient.device))
            if int(torch.count_nonzero(gradient)) != int(torch.count_nonzero(inside)):
                raise ConfigError(
                    f"`looked_up` of {self._names[at]!r} leaves out rows that have a gradient; return all rows that the layer reads, or "
                    "leave the weight out of `looked_up`"
                )
