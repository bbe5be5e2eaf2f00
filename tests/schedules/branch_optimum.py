"""The shortest order of a stage graph by an exact solver, written from the definition of the problem alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

Edge = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A stage graph on workers; all times are whole numbers.

    Attributes:
        seconds: For each stage F, I and W; a whole backward takes the last two.
        max_held: The most activations of a worker, from the start of F to the end of the backward, or of W; a stage without time has none.
    """

    edges: tuple[Edge, ...]
    workers: tuple[int, ...]
    seconds: tuple[tuple[int, int, int], ...]
    latency: int
    num_microbatches: int
    max_held: int
    splits: bool


def optimum(case: Case, *, time_limit_s: float) -> tuple[float, float]:
    """Return the shortest makespan found and the bound proved for all."""
    model = cp_model.CpModel()
    horizon = case.num_microbatches * sum(map(sum, case.seconds)) + 4 * len(case.workers) * case.latency
    end = model.new_int_var(0, horizon, "end")
    compute: list[list[cp_model.IntervalVar]] = [[] for _ in range(1 + max(case.workers))]
    held: list[list[cp_model.IntervalVar]] = [[] for _ in compute]

    def run(worker: int, seconds: int) -> tuple[cp_model.IntVar, cp_model.IntVar]:
        start, stop = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
        compute[worker].append(model.new_interval_var(start, seconds, stop, ""))
        model.add(stop <= end)
        return start, stop

    for _ in range(case.num_microbatches):
        forward: list[tuple[cp_model.IntVar, cp_model.IntVar]] = []
        backward: list[tuple[cp_model.IntVar, cp_model.IntVar]] = []
        for stage, worker in enumerate(case.workers):
            f, i, w = case.seconds[stage]
            forward.append(run(worker, f))
            backward.append(run(worker, i if case.splits else i + w))
            model.add(backward[stage][0] >= forward[stage][1])
            last = backward[stage][1]
            if case.splits:
                start, last = run(worker, w)
                model.add(start >= backward[stage][1])
            if f + i + w:  # a loss that takes no time holds nothing
                length = model.new_int_var(0, horizon, "")
                held[worker].append(model.new_interval_var(forward[stage][0], length, last, ""))
        for source, target in case.edges:
            hop = case.latency if case.workers[source] != case.workers[target] else 0
            model.add(forward[target][0] >= forward[source][1] + hop)
            model.add(backward[source][0] >= backward[target][1] + hop)
    for worker, intervals in enumerate(compute):
        model.add_no_overlap(intervals)
        model.add_cumulative(held[worker], [1] * len(held[worker]), case.max_held)
    model.minimize(end)
    return _solved(model, time_limit_s)


def _solved(model: cp_model.CpModel, time_limit_s: float) -> tuple[float, float]:
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    assert status in {cp_model.OPTIMAL, cp_model.FEASIBLE}, "every case has an order"
    return solver.objective_value, solver.best_objective_bound


def chains(lengths: Sequence[int]) -> tuple[list[Edge], list[int]]:
    """Return the edges of branches one after the other, and the last stage of each."""
    edges: list[Edge] = []
    last: list[int] = []
    first = 0
    for length in lengths:
        edges += [(stage, stage + 1) for stage in range(first, first + length - 1)]
        first += length
        last.append(first - 1)
    return edges, last
