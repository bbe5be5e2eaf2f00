"""The costs of a model, layer by layer, as measured on one device: `raypipe.model_profile/1`."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from raypipe.artifacts import codec
from raypipe.artifacts.record import ShownName, invalid, record
from raypipe.errors import suggestion

FORMAT = "raypipe.model_profile/1"


Share = Annotated[NonNegativeFloat, Field(le=1)]


class LayerEdge(NamedTuple):
    """A tensor from one layer to a later one, by index; `bytes` per microbatch, as many for its gradient."""

    producer: int
    consumer: int
    bytes: int


@record()
class LayerTimes:
    """Compute times of one layer for one microbatch; fields as in `LayerProfile`."""

    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    weight_grad_s: NonNegativeFloat
    split_s: NonNegativeFloat | None = None
    fixed_share: Share | None = None

    def __post_init__(self) -> None:
        _check_times(self)

    def scaled(self, factor: float) -> LayerTimes:
        """Return the times multiplied by a factor."""
        return LayerTimes(
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            weight_grad_s=self.weight_grad_s * factor,
            split_s=None if self.split_s is None else self.split_s * factor,
            fixed_share=self.fixed_share,
        )

    def on_rows(self, row_ratio: float) -> LayerTimes:
        """Return the times for a microbatch of so many times as many rows."""
        if row_ratio == 1:
            return self
        factor = factor_of_rows(self.fixed_share or 0.0, row_ratio)
        return replace(self.scaled(factor), fixed_share=None if self.fixed_share is None else self.fixed_share / factor)

    @classmethod
    def of(cls, times: Iterable[LayerTimes | LayerProfile]) -> LayerTimes:
        """Return the sums of the times of several layers."""
        layers = list(times)
        splits = [layer.split_s for layer in layers if layer.split_s is not None]
        seconds = [layer.forward_s + layer.backward_s for layer in layers]
        fixed_s = [layer.fixed_share * of_layer for layer, of_layer in zip(layers, seconds, strict=True) if layer.fixed_share is not None]
        return cls(
            forward_s=sum(layer.forward_s for layer in layers),
            backward_s=sum(layer.backward_s for layer in layers),
            weight_grad_s=sum(layer.weight_grad_s for layer in layers),
            split_s=sum(splits) if splits else None,
            fixed_share=min(sum(fixed_s) / (sum(seconds) or 1.0), 1.0) if fixed_s else None,
        )


@record()
class LayerProfile:
    """The costs of one layer for one microbatch; None stands for not measured, or for no such weights.

    Attributes:
        weight_grad_s: Part of `backward_s` that computes the weight gradient; the rest computes the input gradient.
        split_s: Seconds beyond `backward_s` where input and weight gradient are computed apart.
        fixed_share: Part of all these seconds that does not depend on the number of rows (`factor_of_rows`); None counts as 0.
        saved_bytes: Bytes kept from forward to backward, the input included.
        parameter_bytes: Size of the weights, without gradients and optimizer state.
        weight_grad_saved_bytes: Bytes kept from a separate input gradient to its weight gradient.
        tied: Name of a weight that all layers with the same text here share.
        tied_bytes: Size of the shared weights; None for all weights of the layer.
        gradient_rows: Rows of the looked-up weights, such as an embedding's, that the gradient of one microbatch touches; None for all.
        looked_up_rows: All rows of the looked-up weights.
        looked_up_bytes: Size of the looked-up weights, a part of `parameter_bytes`.
        reread_share: Part of the rows touched by one half of the microbatch that the other half touches, too; None where an update has
            none that may be summed behind others, as with an optimizer that does not step each number by itself.
        update_s: Seconds of the optimizer's step, once per update.
        low_precision_bytes: Size of low-precision copies of weights that the layer computes with.
        working_bytes: Most temporary bytes beyond what is kept, such as gradients of activations.
        input_grad_working_bytes: The same for the input gradient, where the backward is split.
        frozen_bytes: Size of the weights that are not trained: no gradients, no optimizer state.
        state_bytes: Size of the optimizer's state; None for twice that of the trained weights, as with AdamW.
        branch: Name of the branch that the layer belongs to.
    """

    name: Annotated[ShownName, Field(min_length=1, json_schema_extra={"expected": "a name"})]
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    weight_grad_s: NonNegativeFloat
    output_bytes: NonNegativeInt
    saved_bytes: NonNegativeInt
    parameter_bytes: NonNegativeInt
    weight_grad_saved_bytes: NonNegativeInt | None = None
    tied: str | None = None
    tied_bytes: NonNegativeInt | None = None
    gradient_rows: NonNegativeInt | None = None
    looked_up_rows: PositiveInt | None = None
    looked_up_bytes: NonNegativeInt | None = None
    reread_share: Share | None = None
    update_s: NonNegativeFloat | None = None
    low_precision_bytes: NonNegativeInt | None = None
    working_bytes: NonNegativeInt | None = None
    input_grad_working_bytes: NonNegativeInt | None = None
    frozen_bytes: NonNegativeInt | None = None
    branch: str | None = None
    split_s: NonNegativeFloat | None = None
    fixed_share: Share | None = None
    state_bytes: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        _check_times(self)
        if (self.frozen_bytes or 0) > self.parameter_bytes:
            raise invalid(self, "frozen_bytes", f"{self.frozen_bytes} is more than parameter_bytes, {self.parameter_bytes}")
        if self.tied_bytes is not None and self.tied_bytes > self.parameter_bytes:
            raise invalid(self, "tied_bytes", f"{self.tied_bytes} is more than parameter_bytes, {self.parameter_bytes}")
        if (self.looked_up_bytes or 0) > self.trained_bytes:
            raise invalid(self, "looked_up_bytes", f"{self.looked_up_bytes} is more than the trained bytes, {self.trained_bytes}")
        if self.looked_up_rows is not None and (self.gradient_rows or 0) > self.looked_up_rows:
            raise invalid(self, "gradient_rows", f"{self.gradient_rows} is more than looked_up_rows, {self.looked_up_rows}")

    @property
    def trained_bytes(self) -> int:
        """Return the size of the trained weights."""
        return self.parameter_bytes - (self.frozen_bytes or 0)

    def untouched_bytes(self, num_microbatches: float) -> int:
        """Return the bytes of looked-up weights that no microbatch of an update touches; microbatches count in those of the profiled size.

        Each is taken to touch all rows with the same probability. If some rows are more frequent than others, microbatches have more rows
        in common, and more stay untouched.
        """
        if self.gradient_rows is None or self.looked_up_rows is None:
            return 0
        return math.floor((self.looked_up_bytes or 0) * math.pow(1 - self.gradient_rows / self.looked_up_rows, num_microbatches))

    @property
    def has_late_rows(self) -> bool:
        """Whether an update may touch rows of looked-up weights that the next update which reads them does not."""
        return self.reread_share is not None and self.reread_share < 1 and bool(self.looked_up_bytes)

    def late_bytes(self, num_microbatches: float) -> int:
        """Return the bytes of looked-up weights that an update touches, and the next update that reads them does not.

        A row is touched again because it is frequent, as `reread_share` says, or by chance, as if all rows were equally frequent.
        """
        if not self.has_late_rows or self.reread_share is None or not self.looked_up_bytes:
            return 0
        touched = self.looked_up_bytes - self.untouched_bytes(num_microbatches)
        return math.floor(touched * (1 - self.reread_share) * (1 - touched / self.looked_up_bytes))

    @property
    def shared_bytes(self) -> int:
        """Return the size of the weights shared with other layers."""
        if self.tied is None:
            return 0
        return self.parameter_bytes if self.tied_bytes is None else self.tied_bytes

    @property
    def times(self) -> LayerTimes:
        """Return the times alone."""
        return LayerTimes(
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            weight_grad_s=self.weight_grad_s,
            split_s=self.split_s,
            fixed_share=self.fixed_share,
        )


def factor_of_rows(fixed_share: float, row_ratio: float) -> float:
    """Return how many times as long an Op takes on so many times as many rows."""
    return fixed_share + (1 - fixed_share) * row_ratio


def held_once(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    """Return the layers of one device, with each shared weight counted once, and looked up by none if several layers have it."""
    with_most: dict[str, LayerProfile] = {}
    num_sharing = Counter(layer.tied for layer in layers)
    for layer in layers:
        if layer.tied is not None and (layer.tied not in with_most or layer.shared_bytes > with_most[layer.tied].shared_bytes):
            with_most[layer.tied] = layer
    return [
        layer
        if layer.tied is None or num_sharing[layer.tied] == 1
        else (_without_lookups if with_most[layer.tied] is layer else _without_shared)(layer)
        for layer in layers
    ]


def _without_lookups(layer: LayerProfile) -> LayerProfile:
    return replace(layer, gradient_rows=None, looked_up_rows=None, looked_up_bytes=None, reread_share=None)


def _without_shared(layer: LayerProfile) -> LayerProfile:
    rest_bytes = layer.parameter_bytes - layer.shared_bytes
    rest = rest_bytes / layer.parameter_bytes if layer.parameter_bytes else 1.0
    return replace(
        _without_lookups(layer),
        tied=None,
        tied_bytes=None,
        parameter_bytes=rest_bytes,
        update_s=None if layer.update_s is None else layer.update_s * rest,
        low_precision_bytes=None if layer.low_precision_bytes is None else round(layer.low_precision_bytes * rest),
        frozen_bytes=None if layer.frozen_bytes is None else min(layer.frozen_bytes, rest_bytes),
        state_bytes=None if layer.state_bytes is None else round(layer.state_bytes * rest),
    )


def most_working_bytes(layers: Sequence[LayerProfile]) -> int:
    """Return the most temporary bytes of consecutive layers beyond all they keep."""
    most = behind = 0
    for layer in reversed(layers):
        most = max(most, (layer.working_bytes or 0) - behind)
        behind += layer.saved_bytes
    return most


@record()
class NamedEdge:
    """An edge by layer names, `from` and `to` in files; `bytes` None for the producer's output."""

    producer: Annotated[str, Field(alias="from")]
    consumer: Annotated[str, Field(alias="to")]
    bytes: NonNegativeInt | None = None


@record()
class ModelProfile:
    """The measured costs of a model's layers.

    Attributes:
        name: Name of the model.
        microbatch_size: Rows of the measured microbatch.
        layers: Layers in topological order.
        named_edges: Edges by layer name, `edges` in files; None for a chain. `edges()` resolves them.
        device_kinds: By kind of device that was measured too, the times of all layers in order.
        loss_couples_rows: Whether the loss of a microbatch is not the mean of the losses of its rows, as with a contrastive loss; None
            for no. No plan then divides the rows of a microbatch where the loss is taken.

    Raises:
        FormatError: Two layers share a name, an edge names no layer or does not lead forward, branches never meet, or a kind of device
            lacks layers.
    """

    name: ShownName
    microbatch_size: PositiveInt
    layers: tuple[LayerProfile, ...]
    named_edges: Annotated[tuple[NamedEdge, ...] | None, Field(alias="edges")] = None
    device_kinds: dict[str, tuple[LayerTimes, ...]] = field(default_factory=dict, hash=False)
    loss_couples_rows: bool | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise invalid(self, "layers", "the model has no layers; list at least one")
        names: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if names.setdefault(layer.name, index) != index:
                raise invalid(self, f"layers[{index}].name", f"an earlier layer is called {layer.name!r} too; give each its own name")
        self._check_edges(names)
        for kind, times in self.device_kinds.items():
            if len(times) != len(self.layers):
                problem = f"expected times of {len(self.layers)} layers, got {len(times)}; profile all layers on this kind of device"
                raise invalid(self, f"device_kinds.{kind}", problem)

    def _check_edges(self, names: dict[str, int]) -> None:
        seen: set[tuple[str, str]] = set()
        for index, edge in enumerate(self.named_edges or ()):
            for key, name in (("from", edge.producer), ("to", edge.consumer)):
                if name not in names:
                    raise invalid(self, f"edges[{index}].{key}", f"no layer is called {name!r}{suggestion(name, names)}")
            if names[edge.producer] >= names[edge.consumer]:
                problem = f"{edge.producer!r} does not stand before {edge.consumer!r}; list the layers in topological order"
                raise invalid(self, f"edges[{index}]", problem)
            if (edge.producer, edge.consumer) in seen:
                problem = f"an earlier edge leads from {edge.producer!r} to {edge.consumer!r} too; add up their bytes in one"
                raise invalid(self, f"edges[{index}]", problem)
            seen.add((edge.producer, edge.consumer))
        if self.named_edges is not None and any(layer.branch is not None for layer in self.layers):
            consumed = {producer for producer, _ in seen}
            ends = [name for name in names if name not in consumed]
            if len(ends) > 1:
                raise invalid(self, "edges", f"branches never meet: {', '.join(ends)} have no consumer; join them in one last layer")

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def edges(self) -> tuple[LayerEdge, ...]:
        """Return the edges in the order of the file; for a chain, from the first layer on."""
        return self._edges

    def ties(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of layers that share weights."""
        return self._ties

    @cached_property
    def _ties(self) -> tuple[tuple[int, ...], ...]:
        groups: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.tied is not None:
                groups.setdefault(layer.tied, []).append(index)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def for_kind(self, kind: str) -> tuple[LayerTimes, ...]:
        """Return the times of all layers on a kind of device, else those of the profile itself."""
        return self.device_kinds.get(kind, self._times)

    def on_rows(self, kind: str, row_ratio: float) -> tuple[LayerTimes, ...]:
        """Return the times of all layers on a kind of device, for microbatches of so many times as many rows."""
        times = self._on_rows.get((kind, row_ratio))
        if times is None:
            times = self._on_rows[kind, row_ratio] = tuple(of_layer.on_rows(row_ratio) for of_layer in self.for_kind(kind))
        return times

    @cached_property
    def _on_rows(self) -> dict[tuple[str, float], tuple[LayerTimes, ...]]:
        return {}

    @cached_property
    def digest(self) -> str:
        """Return sixteen hexadecimal digits for the content."""
        return codec.digest(self, format_name=FORMAT)

    @cached_property
    def _edges(self) -> tuple[LayerEdge, ...]:
        if self.named_edges is None:
            return tuple(LayerEdge(index, index + 1, layer.output_bytes) for index, layer in enumerate(self.layers[:-1]))
        index = {layer.name: position for position, layer in enumerate(self.layers)}
        return tuple(
            LayerEdge(
                index[edge.producer],
                index[edge.consumer],
                self.layers[index[edge.producer]].output_bytes if edge.bytes is None else edge.bytes,
            )
            for edge in self.named_edges
        )

    @cached_property
    def _times(self) -> tuple[LayerTimes, ...]:
        return tuple(layer.times for layer in self.layers)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """Return the profile in a JSON file, or raise `FormatError`."""
        return codec.load_json(cls, path, format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file."""
        codec.save_json(self, path, format_name=FORMAT)

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        weight_grad_s: float | None = None,
        output_bytes: int = 0,
        saved_bytes: int = 0,
        parameter_bytes: int = 0,
        microbatch_size: int = 1,
        name: str = "uniform",
    ) -> ModelProfile:
        """Return a chain of equal layers `layer0`, `layer1` and so on; `weight_grad_s` None for half of the backward."""
        layers = (
            LayerProfile(
                name=f"layer{index}",
                forward_s=forward_s,
                backward_s=backward_s,
                weight_grad_s=backward_s / 2 if weight_grad_s is None else weight_grad_s,
                output_bytes=output_bytes,
                saved_bytes=saved_bytes,
                parameter_bytes=parameter_bytes,
            )
            for index in range(num_layers)
        )
        return cls(name=name, microbatch_size=microbatch_size, layers=tuple(layers))


def _check_times(layer: LayerTimes | LayerProfile) -> None:
    if layer.weight_grad_s > layer.backward_s:
        problem = (
            f"{layer.weight_grad_s} is more than backward_s, {layer.backward_s}, of which it is a part; backward_s is the full backward"
        )
        raise invalid(layer, "weight_grad_s", problem)
