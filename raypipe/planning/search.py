"""Local search over layouts of one stage per worker; equal problems give equal plans.

Dynamic programs give starts, annealing improves the estimates, simulation decides and improves further.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from raypipe import stopping
from raypipe.planning.device_order import orders
from raypipe.planning.enumeration import all_layouts
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.extrapolation import short_lengths
from raypipe.planning.group_pipelines import GroupPipelines
from raypipe.planning.layout import Layout
from raypipe.planning.levels import node_pipelines
from raypipe.planning.moves import Moves
from raypipe.planning.partition import MOST_UNITS, Partition
from raypipe.planning.problem import Devices, Problem

# Limits on the busiest stage or channel, as multiples of the least possible.
_LIMITS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
_NUM_RANDOM = 24  # Number of random device orders, and most devices for which they are tried.
_MOST_FOR_RANDOM = 16
_ENUMERATED = 8  # Part of the estimates, as a divisor, that all layouts of a small problem may take.
_TABLES_PART = 0.6  # Part of the work of programs after which no further device order is begun.
_TEMPERATURE = 0.2  # Average relative slowdown that is accepted at first.
_POOL = 6  # Number of simulated layouts around which the search continues.
_NUM_CLIMBED = 3  # Pipelines of groups whose workers change places, by each of two ranks.
_SPLIT_RAMP = 0.4  # Part of the time besides the busiest worker's that remains where backwards are split.
_ESTIMATE_WORK = 9.0  # Work of the estimate of 8 devices: stages, and devices by eight.
_SUMMED = 256  # Devices beyond which what changed workers sum takes most of an estimate, in proportion to the devices.
_LEAST_SIMULATIONS = 6
_DEVICE_WORK_S = 0.025  # For each device, what tables of pairs, quick baselines and the bound take besides the search.
_BASELINE_WORK_S = 0.5  # For each device, what the programs of the other baselines take, of as many devices as have them.
_LEAST_EFFORT = 0.32  # that work is allowed for: the numbers above bound smaller searches, and parts of one must not starve
_LEAST_WORK_S = 20.0
_SIMULATION_WORK = 512.0  # Microbatches x workers of a simulation that counts as one.
_USUAL_WORKERS = 32  # Most workers that count: with many devices, layouts of more are seldom good.
_STARTS_SHARE = 0.7  # Of the work of a search.
_ANNEALING_SHARE = 0.4  # Of the rest.
_SIMULATIONS_SHARE = 0.6  # Of the rest, before the search goes on around the best.


@dataclass(frozen=True)
class SearchBudget:
    """How much a search may try.

    Attributes:
        num_estimates: Layouts that annealing estimates.
        num_simulations: Layouts that are simulated.
        num_starts: Layouts from which annealing starts.
        program_work: Entries of dynamic programs.
        num_swaps: Exchanges of workers of pipelines of groups.
        work_s: Nominal seconds after which the search ends, wherever it is.
    """

    num_estimates: int = 48_000
    num_simulations: int = 320
    num_starts: int = 24
    program_work: float = 3e8
    num_swaps: int = 1_200
    work_s: float = 66.0

    @classmethod
    def usual(cls, problem: Problem, *, effort: float = 1.0) -> SearchBudget:
        """Return the usual budget times `effort`; numbers shrink as a layout takes longer to estimate and to simulate."""
        num_stages = min(problem.num_devices, problem.num_layers)
        num_used = min(problem.num_devices, problem.num_layers * problem.microbatch_size)
        num_workers = min(num_stages, _USUAL_WORKERS)
        lengths = short_lengths(problem.num_microbatches, num_workers) or (0, problem.num_microbatches)
        estimate = max((num_stages + num_used / 8) / _ESTIMATE_WORK, 1.0)
        simulation = max(sum(lengths) * num_workers / _SIMULATION_WORK, 1.0)
        device_work_s = _DEVICE_WORK_S + (_BASELINE_WORK_S if problem.num_devices <= MOST_UNITS else 0.0)
        return cls(
            num_estimates=max(round(cls.num_estimates * effort / estimate / max(num_used / _SUMMED, 1.0)), 1),
            num_simulations=max(round(cls.num_simulations * effort / simulation), _LEAST_SIMULATIONS),
            program_work=cls.program_work * effort,
            num_swaps=max(round(cls.num_swaps * effort / estimate), 1),
            work_s=max(cls.work_s - device_work_s * problem.num_devices, _LEAST_WORK_S) * max(effort, _LEAST_EFFORT),
        )


@dataclass
class LayoutSearch:
    """Local search over layouts of one stage per worker, which begins with `others`, too."""

    evaluator: LayoutEvaluator
    schedules: tuple[str, ...] = ("1f1b", "list")
    budget: SearchBudget = SearchBudget()
    others: Sequence[Layout] = ()
    moves: Moves = field(init=False, repr=False)
    _estimates: dict[Layout, float] = field(default_factory=dict, repr=False)
    _splits: dict[Layout, float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.moves = Moves(self.evaluator.estimator, self.schedules, self.estimate_s)

    def run(self) -> Evaluation | None:
        """Return the best layout; `None` where there is none. One that lacks memory is returned only if all do."""
        with stopping.part(share=_STARTS_SHARE):
            for layout in self.starts():
                self.estimate_s(layout)
        if not self._estimates:
            return None
        rng = random.Random(0)
        starts = self._different(self.budget.num_starts)
        with stopping.part(share=_ANNEALING_SHARE):
            for start in starts:
                self._anneal(start, rng, self.budget.num_estimates // len(starts))
        return self._simulate()

    def starts(self) -> Iterator[Layout]:
        """Yield the layouts of other planners, of pipelines of groups, all of small problems, and those of the dynamic programs."""
        for layout in self.others:
            yield layout if layout.order in self.schedules else replace(layout, order=self.schedules[0])
        if self.evaluator.problem.num_devices > 1:
            yield from self._of_groups()
        yield from all_layouts(self.evaluator.problem, self.schedules[0], most=self.budget.num_estimates // _ENUMERATED)
        if self.evaluator.problem.num_devices <= MOST_UNITS:
            yield from self._of_programs()

    def _of_groups(self) -> Iterator[Layout]:
        groups = GroupPipelines(self.evaluator.estimator, self.schedules[0])
        fitting: list[Layout] = []
        best_s = math.inf

        def promising() -> Iterator[Layout]:
            for workers in groups.workers():
                if groups.least_s(workers) <= best_s and (layout := groups.dealt(workers)) is not None:
                    yield layout

        for layout in chain(node_pipelines(self.evaluator.estimator, orders=self.schedules[:1]), promising()):
            yield layout
            if math.isfinite(self.estimate_s(layout)):
                best_s = min(best_s, self.estimate_s(layout))
                fitting.append(layout)
                if len(fitting) == 1:
                    self.evaluator.simulate(layout)  # Whenever the search is stopped, there is a plan.
        if len(fitting) > 1:
            self.evaluator.simulate(min(fitting, key=self.estimate_s))
        begin = [*sorted(fitting, key=self.estimate_s)[:_NUM_CLIMBED], *sorted(fitting, key=self.split_s)[:_NUM_CLIMBED]]
        for layout in dict.fromkeys(begin):
            seconds = self.estimate_s if layout in begin[:_NUM_CLIMBED] else self.split_s
            for better in groups.improved(layout, seconds=seconds, num_steps=self.budget.num_swaps // len(begin)):
                yield from (replace(better, order=order) for order in self.schedules)

    def _of_programs(self) -> Iterator[Layout]:
        """Yield the plans of the dynamic programs: of as many device orders as may be tried, the best ones under most limits."""
        problem, left = self.evaluator.problem, self.budget.program_work
        rng = random.Random(2)
        num_random = _NUM_RANDOM if problem.num_devices <= _MOST_FOR_RANDOM else 0  # For networks without structure.
        shuffled = (tuple(rng.sample(range(problem.num_devices), problem.num_devices)) for _ in range(num_random))
        ranked: list[tuple[float, int, str, Partition]] = []
        for order in (*(order for _, order in orders(problem)), *shuffled):
            if left < (1 - _TABLES_PART) * self.budget.program_work:
                break
            partition = Partition(self.evaluator.estimator, order)
            left -= partition.work_of_tables
            # Schedules differ in what fits: where all fits, one stands for the others.
            for schedule in self.schedules if partition.limited else self.schedules[:1]:
                left -= partition.work
                ranked.append((partition.least_limit_s(schedule), len(ranked), schedule, partition))
        for least_s, _, schedule, partition in sorted(ranked):
            if not math.isfinite(least_s):
                return
            for factor in _LIMITS:
                left -= partition.work
                for best in partition.least_sum(least_s * factor * (1 + 1e-9), schedule):
                    yield best.layout
                    yield from (replace(best.layout, order=other) for other in self.schedules if other != schedule)
                if left <= 0:
                    return

    def estimate_s(self, layout: Layout) -> float:
        """Return the estimated seconds of an update; infinite where memory is short."""
        estimate = self._estimates.get(layout)
        if estimate is None:
            estimate = math.inf if self.evaluator.estimator.missing_bytes(layout) > 0 else self.evaluator.estimator.estimate_s(layout)
            self._estimates[layout] = estimate
        return estimate

    def split_s(self, layout: Layout) -> float:
        """Return a rank among layouts for orders with split backwards: these fill and drain in less time."""
        rank = self._splits.get(layout)
        if rank is None:
            busy_s = self.evaluator.problem.num_microbatches * max(self.evaluator.estimator.busy_s(layout))
            rank = self._splits[layout] = busy_s + (self.estimate_s(layout) - busy_s) * _SPLIT_RAMP
        return rank

    def best_layouts(self, count: int) -> list[Layout]:
        """Return the layouts with the best estimates that differ in their workers."""
        by_workers: dict[tuple[Devices, ...], Layout] = {}
        for layout in self._ranked():
            by_workers.setdefault(layout.workers, layout)
            if len(by_workers) == count:
                break
        return list(by_workers.values())

    def split_layouts(self, count: int) -> list[Layout]:
        """Return the layouts that rank best for orders with split backwards, those that fit."""
        by_workers: dict[tuple[Devices, ...], Layout] = {}
        for layout in sorted((layout for layout, estimate in self._estimates.items() if estimate < math.inf), key=self.split_s):
            by_workers.setdefault(layout.workers, layout)
        return list(by_workers.values())[:count]

    def _different(self, count: int) -> list[Layout]:
        """Return layouts with the best estimates, those first that are best of all with as many devices on each worker."""
        by_sizes: dict[tuple[int, ...], Layout] = {}
        for layout in self._ranked():
            by_sizes.setdefault(tuple(map(len, layout.workers)), layout)
        return list(dict.fromkeys((*list(by_sizes.values())[: 3 * count // 4], *self.best_layouts(count))))[:count]

    def _ranked(self) -> list[Layout]:
        return sorted(self._estimates, key=lambda layout: (self._estimates[layout], str(layout)))

    def _anneal(self, start: Layout, rng: random.Random, num_steps: int) -> None:
        current, current_s = start, self.estimate_s(start)
        best, best_s = current, current_s
        for step in range(num_steps):
            temperature = _TEMPERATURE * (1 - step / num_steps) ** 2
            changed = self.moves.changed(current, rng)
            if changed is None:
                continue
            changed_s = self.estimate_s(changed)
            if changed_s <= current_s * (1 + temperature * rng.expovariate(1.0)):
                current, current_s = changed, changed_s
                if current_s < best_s:
                    best, best_s = current, current_s
            elif step % 500 == 499:
                current, current_s = best, best_s

    def _simulate(self) -> Evaluation | None:
        evaluated: dict[Layout, Evaluation] = {}
        variants = [layout for layout in self.others if layout.order in self.schedules]
        most = self.budget.num_simulations // 2 + len(variants)
        # Rings in another order often have equal estimates: one stands for them all, others are neighbors of the best.
        different: dict[object, Layout] = {}
        for layout in self._ranked():
            different.setdefault((layout.cuts, layout.order, layout.max_in_flight, *map(frozenset, layout.workers)), layout)
        for layout in islice(different.values(), most):
            variants += [layout if layout.order == order else replace(layout, order=order, max_in_flight=None) for order in self.schedules]
        with stopping.part(share=_SIMULATIONS_SHARE):
            for variant in variants:
                if variant not in evaluated and len(evaluated) < most and (evaluation := self.evaluator.simulate(variant)) is not None:
                    evaluated[variant] = evaluation
        if not evaluated:
            return None
        return self.improved(evaluated.values(), self.budget.num_simulations - len(evaluated))

    def improved(
        self, begin: Iterable[Evaluation], num_simulations: int, *, seconds: Callable[[Layout], float] | None = None, slack: float = 1.0
    ) -> Evaluation:
        """Return the best layout of a search around at least one simulated layout.

        Only layouts of which the estimate is below the best time are simulated; or with `seconds`, those of which these say so within
        `slack`, scaled as for the best layout.
        """
        pool = sorted(begin, key=lambda evaluation: (evaluation.rank, str(evaluation.layout)))
        seen = {replace(evaluation.layout, recomputed=None) for evaluation in pool}
        pool = pool[:_POOL]
        with stopping.part():
            self._improve(pool, seen, num_simulations, seconds=seconds, slack=slack)
        return pool[0]

    def _improve(
        self,
        pool: list[Evaluation],
        seen: set[Layout],
        num_simulations: int,
        *,
        seconds: Callable[[Layout], float] | None,
        slack: float,
    ) -> None:
        """Search around a pool of simulated layouts, which always has the best ones."""
        rng = random.Random(1)
        if seconds is None:
            seconds = self.estimate_s
        else:
            best_s = pool[0].update_s
            slack *= seconds(pool[0].layout) / best_s if best_s else 1.0
        for _ in range(20 * num_simulations):
            if num_simulations <= 0:
                break
            # Mostly around the best, sometimes around others: the best may lie in a narrow valley.
            changed = self.moves.changed(pool[min(int(rng.expovariate(1.0)), len(pool) - 1)].layout, rng)
            # While plans lack memory that estimates leave out, such as that of sums, slower ones are better if they fit.
            most_s = math.inf if pool[-1].missing_bytes else pool[-1].update_s * slack
            if changed is None or changed in seen or seconds(changed) >= most_s:
                continue
            seen.add(changed)
            num_simulations -= 1
            if (evaluation := self.evaluator.simulate(changed)) is not None:
                pool[:] = sorted((*pool, evaluation), key=lambda evaluation: evaluation.rank)[:_POOL]
