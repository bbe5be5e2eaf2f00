"""What a user's model function returns: layers and a loss. Each actor builds only its own layers, each from its own seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

from raypipe.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "Mapping[str, Tensor]"
"""Fields of one microbatch by name; the first dimension of each is the row."""


Tie: TypeAlias = "tuple[tuple[str, str], ...]"
"""Weight that several layers share: the name of each layer and its module's name for the weight."""

_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Layer:
    """The smallest piece a model is cut at.

    Attributes:
        name: Unique name in the model; letters, digits, `_`, `-` and `.`.
        build: Function that returns a new module on every call. Actors call it with torch's generator seeded for this layer, once to
            profile the layer and again to train it.
        inputs: Layers whose outputs the module takes, in this order; `None` for the previous layer in the list, or of the same branch.
            All tensors of a tuple are passed on.
        batch: Fields of the batch that the module takes after its inputs.
        batch_if_present: Fields that the module takes by name, from batches that have them.
        branch: Name of the branch that the layer belongs to; `None` for a layer of no branch, such as one in which branches meet.
        gradients_vary: Whether its outputs have gradients, or later layers return gradients of them, in some microbatches only. Stages
            then always exchange such gradients, as zeros where there are none.
        looked_up: For each weight of the module that it reads only by rows, such as an embedding's table, the function that returns which
            rows it reads, as integers of any shape. The function takes the `batch` fields alone, and must return the same rows wherever it
            is called. Copies of a stage then exchange the gradients of these rows, and not of the whole table.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] | None = None
    batch: tuple[str, ...] = ()
    branch: str | None = None
    gradients_vary: bool = False
    looked_up: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict, hash=False)
    batch_if_present: tuple[str, ...] = ()

    @property
    def takes_batch(self) -> bool:
        """Return whether the module takes fields of the batch."""
        return bool(self.batch or self.batch_if_present)


@dataclass(frozen=True)
class Model:
    """Layers in topological order and the loss of the last one.

    Attributes:
        layers: Layers, each taking outputs of earlier ones only; exactly one has no consumer.
        loss: `loss(output, batch)`, a scalar: the mean over the rows of one microbatch, unless it couples them.
        ties: Weights that several layers share, such as `(("embedding", "token.weight"), ("head", "logits.weight"))`. The first layer
            of a tie initializes the weight. On one stage it is one parameter; on several it has equal copies.
        loss_couples_rows: Whether the loss of a microbatch is not the mean of the losses of its rows, as with a contrastive loss, which
            compares the rows with each other. raypipe then never divides the rows of a microbatch where the loss is taken, nor the rows of
            an update into other microbatches, and refuses what would.
        loss_weight: What the loss of some rows counts for, from their fields: a scalar that is the sum over the rows, such as the number
            of targets that are not ignored. `loss` is then the mean over what counts, and the loss of an update is
            sum(weight * loss) / sum(weight) over its microbatches and their rows, however these are divided. Rows of weight 0 are left
            out. `None` where each row counts for 1.
        vocabulary_size: Number of tokens that the model knows, if it reads tokens; data with more is refused.
        needs: For each thing that batches must have, the fields any of which will do, such as `(("labels", "targets"),)`, beside the
            fields that `Layer.batch` names.
        is_masked: Whether it predicts tokens that are hidden in the rows. The targets of a token file are the next tokens, with which such
            a model learns nothing; it is refused.

    Raises:
        ConfigError: Names repeat, an input is unknown or later, layers take each other's outputs in a circle, a branch is in pieces,
            several layers have no consumer, a layer looks up rows without taking fields of the batch, a tie names an unknown layer,
            fewer than two weights or a weight that is tied already, or a loss that couples rows has weights.
    """

    layers: tuple[Layer, ...]
    loss: Callable[[Tensor, Batch], Tensor]
    ties: tuple[Tie, ...] = ()
    loss_couples_rows: bool = False
    loss_weight: Callable[[Batch], Tensor] | None = None
    vocabulary_size: int | None = None
    needs: tuple[tuple[str, ...], ...] = ()
    is_masked: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("the model has no layers")
        if self.loss_couples_rows and self.loss_weight is not None:
            raise ConfigError(
                "the model has both loss_couples_rows and loss_weight: a loss that couples rows is no mean over them; leave one out"
            )
        known: list[str] = []
        for layer in self.layers:
            for name in (layer.name, *([] if layer.branch is None else [layer.branch])):
                if not _NAME.fullmatch(name):
                    raise ConfigError(f"a layer or a branch is called {name!r}; use letters, digits, `_`, `-` and `.`")
            if layer.name in known:
                raise ConfigError(f"two layers of the model are called {layer.name!r}; give each its own name")
            if layer.looked_up and not layer.batch:
                raise ConfigError(
                    f"layer {layer.name!r} looks up rows of {', '.join(layer.looked_up)}, but takes no field of the batch that says which; "
                    "name the field in `batch`, or leave out `looked_up`"
                )
            known.append(layer.name)
        self._check_inputs(known)
        self._check_branches()
        consumed = {source for source, _ in self.edges()}
        sinks = [layer.name for index, layer in enumerate(self.layers) if index not in consumed]
        if len(sinks) != 1:
            raise ConfigError(f"layers {', '.join(sinks)} have no consumer; join them in one last layer, whose output the loss takes")
        self._check_ties(known)

    def _check_inputs(self, known: Sequence[str]) -> None:
        for layer in self.layers:
            for name in layer.inputs or ():
                if name not in known:
                    raise ConfigError(f"layer {layer.name!r} takes {name!r}, but no layer is called that{suggestion(name, known)}")
        graph: TopologicalSorter[int] = TopologicalSorter()
        for source, target in self.edges():
            graph.add(target, source)
        try:
            graph.prepare()
        except CycleError as error:
            circle = " -> ".join(known[position] for position in error.args[1])
            raise ConfigError(f"layers take each other's outputs in a circle: {circle}; let one of them take an earlier layer") from None
        for source, target in self.edges():
            if source > target:
                raise ConfigError(f"layer {known[target]!r} takes {known[source]!r}, which comes after it in the list; list it before")

    def _check_branches(self) -> None:
        edges = set(self.edges())
        for branch, members in self.branches().items():
            for position in members[1:]:
                if not any((earlier, position) in edges for earlier in members):
                    problem = f"layer {self.layers[position].name!r} takes no layer of its branch {branch!r}"
                    raise ConfigError(f"{problem}; let it take one, or give it a branch of its own")

    def _check_ties(self, known: list[str]) -> None:
        seen: set[tuple[str, str]] = set()
        for number, tie in enumerate(self.ties):
            if len(tie) < 2:
                raise ConfigError(f"tie {number} of the model names {len(tie)} weights; it takes two or more that are one weight")
            for layer, weight in tie:
                if layer not in known:
                    raise ConfigError(f"tie {number} of the model: no layer is called {layer!r}{suggestion(layer, known)}")
                if (layer, weight) in seen:
                    raise ConfigError(f"the weight {weight!r} of layer {layer!r} is tied twice; write one tie with all that share it")
                seen.add((layer, weight))

    def check_fields(self, fields: Collection[str], *, where: str) -> None:
        """Refuse batches that lack a field that the model needs; `where` says which batches these are.

        Raises:
            ConfigError: Names the field and what there is.
        """
        for choices in self.needs:
            if not any(name in fields for name in choices):
                has = ", ".join(sorted(fields)) or "none"
                raise ConfigError(f"the model needs the field {' or '.join(map(repr, choices))}, but {where} has {has}; add the field")

    def tied_layers(self) -> tuple[tuple[int, ...], ...]:
        """Return the distinct layer indices of each tie, in its order."""
        index = {layer.name: position for position, layer in enumerate(self.layers)}
        return tuple(tuple(dict.fromkeys(index[layer] for layer, _ in tie)) for tie in self.ties)

    def branches(self) -> dict[str, tuple[int, ...]]:
        """Return the layer indices of each branch, in the order of the list."""
        members: dict[str, tuple[int, ...]] = {}
        for position, layer in enumerate(self.layers):
            if layer.branch is not None:
                members[layer.branch] = (*members.get(layer.branch, ()), position)
        return members

    def edges(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs (producer, consumer) of layer indices, in the order that the consumers take them."""
        index = {layer.name: position for position, layer in enumerate(self.layers)}
        last: dict[str, int] = {}
        pairs: list[tuple[int, int]] = []
        for position, layer in enumerate(self.layers):
            if layer.inputs is not None:
                sources = [index[name] for name in layer.inputs]
            elif layer.branch is None:
                sources = [position - 1] if position else []
            else:
                sources = [last[layer.branch]] if layer.branch in last else []
            pairs += [(source, position) for source in sources]
            if layer.branch is not None:
                last[layer.branch] = position
        return tuple(pairs)


def compiled(model: Model) -> Model:
    """Return the model with each layer compiled by torch when it first runs."""
    return replace(model, layers=tuple(replace(layer, build=partial(_compiled, layer.build)) for layer in model.layers))


def _compiled(build: Callable[[], nn.Module]) -> nn.Module:
    module = build()
    if type(module).forward.__module__.partition(".")[0] == "torch":
        # Torch's compiler passes over functions of torch's own, unless another one calls them.
        module.forward = MethodType(_forward_of(type(module)), module)  # type: ignore[arg-type]
    # In place, so that its weights keep their names. Microbatches of other sizes, as `predict` has them, are compiled for themselves.
    module.compile(dynamic=False)
    return module


@cache
def _forward_of(kind: Any) -> Callable[..., object]:
    def forward(module: nn.Module, *inputs: object) -> object:
        return kind.forward(module, *inputs)

    return FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
