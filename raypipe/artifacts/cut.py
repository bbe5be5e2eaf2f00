"""The cut of a model: which layers form which stage, and which outputs cross stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from raypipe.errors import PlanError
from raypipe.schedules.ir import StageGraph


@dataclass(frozen=True)
class Cut:
    """The layers of each stage, with edges (producer, consumer) and ties between layers; `names` of layers are for messages.

    Raises:
        PlanError: A layer is in no stage or in two, a stage is empty, or two stages feed each other.
    """

    stages: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        stage_of: dict[int, int] = {}
        for stage, layers in enumerate(self.stages):
            if not layers:
                raise PlanError(f"stage {stage} has no layers; use fewer stages")
            if list(layers) != sorted(layers):
                raise PlanError(f"stage {stage}: its layers {list(layers)} are not in ascending order")
            for layer in layers:
                if layer in stage_of:
                    raise PlanError(f"layer {layer} is in stage {stage_of[layer]} and in stage {stage}; a layer has one stage")
                stage_of[layer] = stage
        missing = sorted({layer for pair in (*self.edges, *self.ties) for layer in pair} - stage_of.keys())
        if missing or sorted(stage_of) != list(range(len(stage_of))):
            raise PlanError(f"layers {missing or sorted(set(range(len(stage_of))) - stage_of.keys())} are in no stage")
        for source, target in self.edges:
            if stage_of[source] > stage_of[target]:
                self._check_circles(stage_of)
                raise PlanError(
                    f"{self._layer(source)} in stage {stage_of[source]} feeds {self._layer(target)} in the earlier stage "
                    f"{stage_of[target]}; number the stages in topological order"
                )

    def _layer(self, layer: int) -> str:
        return f"layer {self.names[layer]!r}" if self.names else f"layer {layer}"

    def _check_circles(self, stage_of: Mapping[int, int]) -> None:
        sorter = TopologicalSorter[int]()
        crossing = [(source, target) for source, target in self.edges if stage_of[source] != stage_of[target]]
        for source, target in crossing:
            sorter.add(stage_of[target], stage_of[source])
        try:
            sorter.prepare()
        except CycleError as error:
            circle: list[int] = error.args[1]
        else:
            return
        # Of each stage of the circle, what it reads from the one before and what it feeds the next.
        for before, stage, behind in zip(circle, circle[1:], (*circle[2:], circle[1]), strict=True):
            read = [target for source, target in crossing if (stage_of[source], stage_of[target]) == (before, stage)]
            fed = [source for source, target in crossing if (stage_of[source], stage_of[target]) == (stage, behind)]
            # Layers are in topological order: what is fed first cannot need what is read later.
            if min(fed) < max(read):
                raise PlanError(
                    f"the stages {' -> '.join(map(str, circle))} wait for each other: {self._layer(min(fed))} of stage {stage} feeds stage "
                    f"{behind}, and {self._layer(max(read))} of stage {stage} reads stage {before}; cut stage {stage} between these layers"
                )

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], edges: tuple[tuple[int, int], ...], ties: tuple[tuple[int, ...], ...] = ()) -> Cut:
        """Return consecutive stages with the given numbers of layers."""
        stages: list[tuple[int, ...]] = []
        first = 0
        for size in sizes:
            stages.append(tuple(range(first, first + size)))
            first += size
        return cls(tuple(stages), edges, ties)

    @classmethod
    def equal(cls, num_layers: int, num_stages: int, edges: tuple[tuple[int, int], ...], ties: tuple[tuple[int, ...], ...] = ()) -> Cut:
        """Return consecutive stages whose sizes differ by at most one, the larger first; raise `PlanError` if layers are too few."""
        if num_stages > num_layers:
            raise PlanError(f"{num_layers} layers cannot be cut into {num_stages} stages; use at most {num_layers} stages")
        small, larger = divmod(num_layers, num_stages)
        return cls.of_sizes([small + (stage < larger) for stage in range(num_stages)], edges, ties)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Return the stage of each layer."""
        stage_of = {layer: stage for stage, layers in enumerate(self.stages) for layer in layers}
        return tuple(stage_of[layer] for layer in range(len(stage_of)))

    @cached_property
    def crossing(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return for each edge (source, target) of the stage graph the layers whose outputs cross it."""
        producers: dict[tuple[int, int], set[int]] = {}
        for source, target in self.edges:
            ends = (self.stage_of[source], self.stage_of[target])
            if ends[0] != ends[1]:
                producers.setdefault(ends, set()).add(source)
        return {ends: tuple(sorted(layers)) for ends, layers in sorted(producers.items())}

    @cached_property
    def parted_ties(self) -> tuple[int, ...]:
        """Return the numbers of the ties that span several stages."""
        return tuple(number for number, tie in enumerate(self.ties) if len({self.stage_of[layer] for layer in tie}) > 1)

    @cached_property
    def graph(self) -> StageGraph:
        """Return the stage graph; all tied stages form one tie, since no two workers can be out of order in one collective."""
        tied = tuple(sorted({self.stage_of[layer] for number in self.parted_ties for layer in self.ties[number]}))
        return StageGraph(len(self.stages), tuple(self.crossing), (tied,) if tied else ())


def joined(ties: Iterable[Sequence[int]]) -> frozenset[tuple[int, ...]]:
    """Return the groups of layers that share weights, merged where they overlap, without groups of one layer."""
    groups: list[set[int]] = []
    for tie in ties:
        met = [group for group in groups if not group.isdisjoint(tie)]
        groups = [group for group in groups if group not in met] + [set(tie).union(*met)]
    return frozenset(tuple(sorted(group)) for group in groups if len(group) > 1)
