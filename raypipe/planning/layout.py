"""Layouts: which layers run on which devices in which order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypipe.artifacts.cut import Cut
from raypipe.planning.problem import Devices, Problem
from raypipe.schedules.families import list_order
from raypipe.schedules.lower import Placement
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.branches import BranchSearch


@dataclass(frozen=True)
class BranchStages:
    """Stages of a model with branches.

    Attributes:
        layers: Layers of each stage, which need not be consecutive.
        search: What their order is searched for; the number of microbatches there is that of the layout's problem.
    """

    layers: tuple[tuple[int, ...], ...]
    search: BranchSearch


@dataclass(frozen=True)
class Layout:
    """Stages on workers on devices, and the name of the schedule.

    Attributes:
        cuts: First layer of each stage, and the number of layers.
        max_in_flight: Most activations that a device may hold.
        num_pipelines: 0 lets the schedule choose.
        recomputed: Stages whose forwards run again; `None` for those that do not fit into memory otherwise.
        branches: Stages of layers that are not consecutive, on workers as placed there; `cuts` is empty then.
        late: Slots by which updates of copies stand later, to wait for their sums, at most as late as the weight rule allows; `None` for
            just that where the rule fixes versions, else for none. They take memory for gradients.
        listed: The list of layers that `cuts` divides, where it is not the model's own.
        ahead: For each hop from a worker to the next, the forwards that all workers before it run ahead of the order to hide its messages;
            empty for none.
        divided: Number of consecutive stages that each stage of the order becomes, so that sums hide behind weight gradients; `cuts` has
            them all. Empty for one each.
        late_weight_grads: Microbatches of an update whose weight gradients stand last, stage by stage (`passes.divide_stages`).
        times: Times of the stages by which the order is searched for, where it is (`zb-auto`); empty for equal ones.
        hops_s: Seconds of a message of each hop, for the same search.
        queues_s: Seconds for which such a message keeps the next one from its hop, for the same search.
        sums_s: Seconds of each stage's sum behind its last backward, for the same search.
    """

    cuts: tuple[int, ...]
    workers: tuple[Devices, ...]
    order: str = "1f1b"
    max_in_flight: int | None = None
    num_pipelines: int = 0
    recomputed: tuple[int, ...] | None = None
    branches: BranchStages | None = None
    late: int | None = None
    listed: tuple[int, ...] | None = None
    ahead: tuple[int, ...] = ()
    divided: tuple[int, ...] = ()
    late_weight_grads: int = 0
    times: tuple[StageTimes, ...] = ()
    hops_s: tuple[float, ...] = ()
    queues_s: tuple[float, ...] = ()
    sums_s: tuple[float, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.cuts) - 1 if self.branches is None else len(self.branches.layers)

    @property
    def has_copies(self) -> bool:
        """Whether a worker has several devices, whose gradients are summed."""
        return any(len(group) > 1 for group in self.workers)

    @property
    def has_estimate(self) -> bool:
        """Whether estimates hold: of consecutive layers, one stage per worker."""
        return self.branches is None and self.listed is None and not self.divided and self.num_stages == len(self.workers)

    @property
    def worker_cuts(self) -> tuple[int, ...] | None:
        """First layer of each worker, and the number of layers; `None` unless workers have one stage each, which may be divided."""
        firsts = list(itertools.accumulate(self.divided or (1,) * len(self.workers), initial=0))
        has_runs = self.branches is None and self.listed is None and firsts[-1] == self.num_stages
        return tuple(self.cuts[first] for first in firsts) if has_runs else None

    @property
    def sizes(self) -> list[int]:
        """Number of layers of each stage."""
        return [end - first for first, end in itertools.pairwise(self.cuts)]

    @property
    def forwards_ahead(self) -> list[int]:
        """Number of forwards that each worker runs ahead of the order."""
        return [sum(self.ahead[worker:]) for worker in range(len(self.workers))]

    def cut(self, problem: Problem) -> Cut:
        """Return the layers of each stage."""
        if self.branches is not None:
            return Cut(self.branches.layers, problem.edges, problem.profile.ties())
        if self.listed is not None:
            return Cut(self._divided(self.listed), problem.edges, problem.profile.ties())
        return Cut.of_sizes(self.sizes, problem.edges, problem.profile.ties())

    def shares(self, problem: Problem) -> tuple[tuple[float, ...], ...] | None:
        """Return the row shares of each worker's devices; `None` where one has more devices than rows."""
        rows = [problem.rows(group) for group in self.workers]
        if any(worker_rows is None for worker_rows in rows):
            return None
        return tuple(tuple(num_rows / problem.microbatch_size for num_rows in worker_rows or ()) for worker_rows in rows)

    def placement(self, problem: Problem) -> Placement | None:
        """Return the workers on devices numbered worker by worker; `None` as in `shares`."""
        shares = self.shares(problem)
        numbers = itertools.count()
        placed = (tuple((next(numbers), share) for share in worker_shares) for worker_shares in shares or ())
        return None if shares is None else Placement(tuple(placed))

    def in_flight(self, stage: int, num_microbatches: int) -> int:
        """Return the most activations that a stage holds, for one stage per worker."""
        if self.order == "list":
            request = ScheduleRequest(self.num_stages, num_microbatches, max_in_flight=self.max_in_flight)
            return list_order.in_flight(request, stage)
        return num_microbatches if self.order == "gpipe" else min(self.num_stages - stage + sum(self.ahead[stage:]), num_microbatches)

    def renumbered(self, numbers: tuple[int, ...]) -> Layout:
        """Replace each device by its number in `numbers`."""
        return replace(self, workers=tuple(tuple(numbers[device] for device in group) for group in self.workers))

    def relisted(self, layers: tuple[int, ...]) -> Layout:
        """Replace each layer by its number in `layers`."""
        if self.branches is not None:
            stages = tuple(tuple(sorted(layers[layer] for layer in stage)) for stage in self.branches.layers)
            return replace(self, branches=replace(self.branches, layers=stages))
        stages = self._divided([layers[layer] for layer in self.listed or range(len(layers))])
        listed = tuple(itertools.chain(*stages))
        return replace(self, listed=None if listed == tuple(range(len(layers))) else listed)

    def _divided(self, listed: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each stage in ascending order."""
        return tuple(tuple(sorted(listed[first:end])) for first, end in itertools.pairwise(self.cuts))

    def __str__(self) -> str:
        again = f", forwards of stages {list(self.recomputed)} twice" if self.recomputed else ""
        pipelines = f" in {self.num_pipelines} pipelines" if self.num_pipelines else ""
        again += f", {self.forwards_ahead} forwards ahead" if any(self.ahead) else ""
        again += f", updates {self.late} slots later" if self.late else ""
        again += f", weight gradients of {self.late_weight_grads} microbatches last" if self.divided else ""
        if self.branches is None:
            given = "" if self.listed is None else f" of {list(self.listed)}"
            return f"{self.order}: layers {self.sizes}{given} on devices {[list(group) for group in self.workers]}{pipelines}{again}"
        line = self.branches.search.line
        stages = zip(self.branches.layers, line.pipelines[0], strict=True)
        placed = ", ".join(f"{list(layers)} on {list(self.workers[worker])}" for layers, worker in stages)
        parts = f", {line.num_parts} parts of each microbatch" if line.num_parts > 1 else ""
        return f"{self.order}: layers {placed}{', split backwards' if line.splits else ''}{parts}{again}"
