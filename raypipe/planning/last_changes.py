"""Changes of the best layout that the simulator alone judges, with the work that a search has left.

Where three workers are equally busy, each cut alone makes one of its two workers busier, whichever way it moves: cuts also move together,
so that stages between them keep their number of layers, and the first and the last one gain and give one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from raypipe import stopping
from raypipe.planning import hidden_sums
from raypipe.planning.ahead import with_forwards_ahead
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator, better
from raypipe.planning.layout import Layout
from raypipe.planning.moves import Moves

_ALIKE = (("1f1b", "list"), ("zb-h1", "zb-h2"))
_MOST_TOGETHER = 4
_MOST_STEPS = 8
_NUM_SIMULATED = 240  # Layouts after random changes.
_MOST_CHANGES = 40  # For each of them; most are of no use, as estimates say.
_SIMULATION_WORK_S = 30e-3  # Of each simulated change, besides its simulation: patterns for the sums of new workers are chosen.
_SLACK = 1.05  # Of estimates, whose ratio is not that of simulated layouts.
_LEAST_GAIN = 1.002  # Of another order, which may hold more activations.
_TEMPERATURE = 0.02  # Average relative slowdown that is accepted at first.


def changed_at_last(evaluator: LayoutEvaluator, evaluation: Evaluation, *, effort: float) -> Evaluation:
    """Return a layout of one run of layers for each worker after all changes that the simulator finds better; any other as it is."""
    best = evaluation
    if best.layout.worker_cuts is None:
        return best
    with stopping.part():
        best = _with_shifted_cuts(evaluator, best)
    with stopping.part():
        for found in _better_ones(evaluator, best, round(_NUM_SIMULATED * effort)):
            best = found
    if best is not evaluation:
        with stopping.part():
            best = _with_shifted_cuts(evaluator, best)
    with stopping.part():
        best = _in_other_orders(evaluator, best)
    return best


def _in_other_orders(evaluator: LayoutEvaluator, evaluation: Evaluation) -> Evaluation:
    """Return the layout in the best of the orders that split backwards as its own does, each with forwards ahead."""
    layout = evaluation.layout
    if not layout.has_estimate or len(layout.workers) < 2:
        return evaluation
    for order in next((alike for alike in _ALIKE if layout.order in alike), ()):
        if order != layout.order:
            other = evaluator.simulate(Layout(layout.cuts, layout.workers, order))
            other = with_forwards_ahead(evaluator, other, most_steps=_MOST_STEPS)
            if other is not None and (other.missing_bytes, other.loss_s * _LEAST_GAIN) < evaluation.rank:
                evaluation = other
    return evaluation


def _with_shifted_cuts(evaluator: LayoutEvaluator, evaluation: Evaluation) -> Evaluation:
    for _ in range(_MOST_STEPS):
        found = evaluation
        for whole in _shifted(hidden_sums.whole(evaluation.layout)):
            found = better(found, evaluator.simulate(_as(evaluator, whole, evaluation.layout))) or found
        if found is evaluation:
            break
        evaluation = found
    return evaluation


def _better_ones(evaluator: LayoutEvaluator, evaluation: Evaluation, num_simulations: int) -> Iterator[Evaluation]:
    """Yield ever better layouts, which annealing passes."""
    estimate_s = evaluator.estimator.estimate_s
    moves, rng = Moves(evaluator.estimator, (), estimate_s), random.Random(5)
    current, best = evaluation, evaluation
    tried: dict[Layout, Evaluation | None] = {}
    for _ in range(_MOST_CHANGES * num_simulations):
        if len(tried) >= num_simulations:
            break
        now = hidden_sums.whole(current.layout)
        changed = moves.changed(now, rng)
        if changed is None or estimate_s(changed) > _SLACK * estimate_s(now):
            continue
        if changed not in tried:
            stopping.spend(_SIMULATION_WORK_S)
            tried[changed] = evaluator.simulate(_as(evaluator, changed, current.layout))
        found = tried[changed]
        temperature = _TEMPERATURE * (1 - len(tried) / num_simulations) ** 2
        worse = 1 + temperature * rng.expovariate(1.0)
        if found is None or (found.missing_bytes, found.loss_s) > (current.missing_bytes, current.loss_s * worse):
            continue
        current = found
        if current.rank < best.rank:
            best = current
            yield best


def _as(evaluator: LayoutEvaluator, whole: Layout, layout: Layout) -> Layout:
    """Return a layout of whole stages, divided and ordered as another one is."""
    ahead = layout.ahead if len(whole.workers) == len(layout.workers) else ()
    if layout.divided:
        return replace(hidden_sums.division_of(layout).of(evaluator.problem, whole), ahead=ahead)
    # Other stages may lack memory after a change: which forwards run again is left open.
    return replace(layout, cuts=whole.cuts, workers=whole.workers, recomputed=None, ahead=ahead)


def _shifted(layout: Layout) -> Iterator[Layout]:
    return (replace(layout, cuts=cuts) for cuts in shifts(layout.cuts))


def shifts(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of them moved by one, or a few consecutive ones together."""
    for first in range(1, len(cuts) - 1):
        for end in range(first + 1, min(first + _MOST_TOGETHER, len(cuts) - 1) + 1):
            for step in (-1, 1):
                moved = (*cuts[:first], *(cut + step for cut in cuts[first:end]), *cuts[end:])
                if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
                    yield moved
