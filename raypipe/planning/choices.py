"""Choices between which a run can switch, evaluated in the current state of the cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from raypipe.errors import InputError, PlanError
from raypipe.planning import chunks
from raypipe.planning.cluster_state import ClusterState
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.late import with_hidden_transfers
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import PlanCheck, ScheduleCache, layout_schedule, window_updates
from raypipe.planning.own_times import with_own_times
from raypipe.planning.planners import AUTO
from raypipe.planning.problem import Problem
from raypipe.planning.schedule_search import climbed
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import solve
from raypipe.schedules.ir import UpdateScope
from raypipe.simulation.plan_cost import STATE_BYTES_PER_PARAMETER_BYTE

_STEPS = 3
_MOST_SWAPS = 60  # Most changes of one choice that ran, and most swaps of workers among the candidates of each.


@dataclass(frozen=True)
class Choice:
    """Configuration of a run, with the rows of each worker's devices."""

    num_microbatches: int
    microbatch_size: int
    layout: Layout
    rows: tuple[tuple[int, ...], ...]

    @property
    def division(self) -> tuple[int, int]:
        """Number of microbatches of an update, rows of each."""
        return self.num_microbatches, self.microbatch_size


class ChoicePlanner:
    """Evaluates and searches choices in the current state, by division (microbatches of an update, rows of each)."""

    def __init__(self, problem: Problem, schedules: Sequence[str], divisions: Sequence[tuple[int, int]], check: PlanCheck | None) -> None:
        self.problem = problem
        self.schedules = tuple(schedules) or (AUTO,)
        self.divisions = tuple(dict.fromkeys([(problem.num_microbatches, problem.microbatch_size), *divisions]))
        self.problems: dict[tuple[int, int], Problem] = {}
        self.observe(ClusterState(problem.profile, problem.topology))
        # Schedules do not depend on the state of the cluster.
        self._caches = {division: ScheduleCache(check) for division in self.divisions}

    @property
    def now(self) -> Problem:
        """Current problem in the configured division."""
        return self.problems[self.divisions[0]]

    def observe(self, state: ClusterState, *, runs: Choice | None = None) -> None:
        """Plan with another cluster state from now on, in which a choice runs."""
        self._runs, self._patterns = runs, state.patterns
        self.problems = {
            (num_microbatches, microbatch_size): replace(
                self.problem,
                profile=state.profile,
                topology=state.topology,
                num_microbatches=num_microbatches,
                microbatch_size=microbatch_size,
            )
            for num_microbatches, microbatch_size in self.divisions
        }

    def keep_scope(self, scope: UpdateScope) -> None:
        """Plan with one update scope from now on."""
        self._change(lambda problem: replace(problem, update_scope=scope))
        for cache in self._caches.values():
            cache.clear()

    def keep_devices(self, names: Sequence[str]) -> None:
        """Plan with some devices alone from now on."""
        self._change(lambda problem: only(problem, names))

    def _change(self, change: Callable[[Problem], Problem]) -> None:
        self.problem = change(self.problem)
        self.problems = {division: change(problem) for division, problem in self.problems.items()}

    def evaluator(self, division: tuple[int, int]) -> LayoutEvaluator:
        """Return the evaluator of one division now."""
        return LayoutEvaluator(self.problems[division], self._caches[division].without_refusals())

    def evaluator_of(self, choice: Choice) -> LayoutEvaluator:
        """Return the evaluator of a choice, whose devices keep their rows whatever their current speeds."""
        rows = dict(zip(choice.layout.workers, choice.rows, strict=True))
        patterns = self._patterns if choice == self._runs else {}
        return replace(self.evaluator(choice.division), problem=self.problems[choice.division].with_rows(rows), patterns=patterns)

    def choice_of(self, division: tuple[int, int], layout: Layout) -> Choice:
        """Return a layout as a choice, with rows divided by current speeds."""
        rows = [self.problems[division].rows(group) for group in layout.workers]
        return Choice(*division, layout, tuple(worker_rows for worker_rows in rows if worker_rows is not None))

    def predicted(self, choice: Choice) -> Evaluation | None:
        """Simulate a choice in the current state; `None` where it does not fit."""
        evaluation = self.evaluator_of(choice).simulate(choice.layout)
        return None if evaluation is None or evaluation.missing_bytes else evaluation

    def best(self, effort: float, errors: Callable[[Choice], float], ran: Iterable[Choice]) -> tuple[Choice, Evaluation]:
        """Return the choice that reaches a loss soonest now, improving also those that ran.

        `errors` returns measured over predicted seconds of a choice; predictions are multiplied by it.

        Raises:
            PlanError: Nothing fits.
        """
        failures: list[str] = []
        candidates: list[tuple[float, int, Choice, Evaluation]] = []
        budget = SearchBudget.usual(self.now, effort=effort)
        for division in self.divisions:
            for schedule in self.schedules:
                try:
                    evaluation = solve(self.evaluator(division), schedule=schedule, budget=budget)
                except InputError as error:
                    if division == self.divisions[0]:  # the configured one
                        failures.append(str(error))
                    continue
                choice = self.choice_of(division, evaluation.layout)
                candidates.append((evaluation.loss_s * errors(choice), len(candidates), choice, evaluation))
        for choice in ran:
            if (known := self.predicted(choice)) is not None:
                candidates.append((known.loss_s * errors(choice), len(candidates), choice, known))
                evaluator = self.evaluator(choice.division)
                near = climbed(evaluator, known, most_steps=_STEPS, neighbors=_neighbors)
                near = with_own_times(evaluator, near)
                near = with_hidden_transfers(evaluator, near, most_steps=_STEPS)
                if near is not None and near is not known and not near.missing_bytes:
                    improved = self.choice_of(choice.division, near.layout)
                    candidates.append((near.loss_s * errors(improved), len(candidates), improved, near))
        if not candidates:
            raise PlanError("no plan was found: " + "; ".join(failures))
        _, _, choice, evaluation = min(candidates)
        return choice, evaluation

    def moved_s(self, before: Choice, after: Choice) -> float:
        """Return the seconds in which layers move one by one over the slowest link."""
        problem = self.now
        moved = self._held(after) - self._held(before)
        num_bytes = sum(problem.profile.layers[layer].parameter_bytes for _, layer in moved) * STATE_BYTES_PER_PARAMETER_BYTE
        slowest = float(problem.bandwidth[problem.joined].min())
        return num_bytes / slowest if math.isfinite(slowest) else 0.0

    def difference(self, one: Choice, other: Choice) -> str:
        """Describe what a switch changes."""
        parts: list[str] = []
        if one.layout.order != other.layout.order:
            parts.append(f"{one.layout.order} -> {other.layout.order}")
        counts = [self.num_pipelines(choice) for choice in (one, other)]
        if counts[0] != counts[1]:
            parts.append(f"{counts[0]} -> {counts[1]} pipelines")
        if one.num_microbatches != other.num_microbatches:
            parts.append(f"{one.num_microbatches} -> {other.num_microbatches} microbatches")
        if one.layout.workers != other.layout.workers:
            names = self.problem.names
            parts.append(f"stages on {', '.join('+'.join(names[device] for device in group) for group in other.layout.workers)}")
        if one.rows != other.rows and one.layout.workers == other.layout.workers:
            parts.append("other rows for the devices of a stage")
        if one.layout.ahead != other.layout.ahead:
            counts = other.layout.forwards_ahead
            parts.append(f"{', '.join(map(str, counts))} forwards ahead" if any(counts) else "no forwards ahead")
        if not parts:
            stages = [choice.layout.cut(self.problem).stages for choice in (one, other)]
            parts.append("other cuts" if stages[0] != stages[1] else "another limit on activations or recomputation")
        return ", ".join(parts)

    def num_pipelines(self, choice: Choice) -> int:
        """Count the pipelines of a choice."""
        return len(self._pipelines(choice))

    def _pipelines(self, choice: Choice) -> tuple[tuple[int, ...], ...]:
        problem = self.evaluator_of(choice).problem
        return layout_schedule(problem, choice.layout, num_updates=window_updates(problem, choice.layout)).pipelines

    def _held(self, choice: Choice) -> set[tuple[int, int]]:
        layout = choice.layout
        stages = layout.cut(self.problem).stages
        return {
            (device, layer)
            for workers in self._pipelines(choice)
            for stage, worker in enumerate(workers)
            for device in layout.workers[worker]
            for layer in stages[stage]
        }


def only(problem: Problem, names: Sequence[str]) -> Problem:
    """Restrict a problem to some devices."""
    return replace(problem, topology=problem.topology.only(names))


def _neighbors(layout: Layout) -> Iterator[Layout]:
    yield from chunks.neighbors(layout)
    places = [(worker, at) for worker, group in enumerate(layout.workers) for at in range(len(group))]
    swaps = (pair for pair in combinations(places, 2) if pair[0][0] != pair[1][0])
    for (one, at), (other, other_at) in islice(swaps, _MOST_SWAPS):
        workers = [list(group) for group in layout.workers]
        workers[one][at], workers[other][other_at] = workers[other][other_at], workers[one][at]
        yield replace(layout, workers=tuple(map(tuple, workers)))
