"""How many forwards workers run ahead of an order, so that messages of slow hops do not hold them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout

ORDERS = ("1f1b", "zb-h1", "pipedream-2bw", "async-1f1b", "list")
"""Orders with one stage on each worker, of which forwards may run ahead."""
_LEAST_GAIN = 1.005  # Below it, activations are not worth their memory.
_LEAST_EXPOSED = 0.01  # Share of the time that devices wait for transfers.


def _update_s(evaluation: Evaluation) -> float:
    return evaluation.update_s


def with_forwards_ahead(
    evaluator: LayoutEvaluator, evaluation: Evaluation | None, *, most_steps: int, seconds: Callable[[Evaluation], float] = _update_s
) -> Evaluation | None:
    """Return the layout with as many forwards ahead at each hop as make it faster, one by one, within memory and limits on staleness.

    They take time from sums of gradients and memory from activations, so each is judged by the whole simulation: by `seconds`.
    """
    if evaluation is None or evaluation.layout.order not in ORDERS or not _is_slow(evaluation):
        return evaluation
    for _ in range(most_steps):
        tried = [other for layout in _neighbors(evaluation.layout) if (other := evaluator.simulate(layout)) is not None]
        best = min(tried, key=lambda other: (other.missing_bytes, seconds(other)), default=evaluation)
        gains = best.missing_bytes < evaluation.missing_bytes or seconds(best) * _LEAST_GAIN < seconds(evaluation)
        if best.missing_bytes > evaluation.missing_bytes or not gains:
            return evaluation
        evaluation = best
    return evaluation


def _is_slow(evaluation: Evaluation) -> bool:
    """Return whether devices wait for what is on its way: else forwards ahead cannot help."""
    timing = evaluation.timing
    exposed_s = sum(
        max(end_s - max(start_s, timing.departure_s[message]), 0.0)
        for of_program in timing.waits
        for message, _, start_s, end_s in of_program
        if message >= 0
    )
    return exposed_s > _LEAST_EXPOSED * timing.makespan_s * len(timing.waits)


def _neighbors(layout: Layout) -> Iterator[Layout]:
    num_hops = len(layout.workers) - 1
    ahead = layout.ahead or (0,) * num_hops
    layout = replace(layout, recomputed=None)  # other stages may lack memory
    if num_hops:
        yield replace(layout, ahead=tuple(count + 1 for count in ahead))
    for hop in range(num_hops if num_hops > 1 else 0):
        for count in (ahead[hop] + 1, ahead[hop] - 1):
            if count >= 0:
                yield replace(layout, ahead=(*ahead[:hop], count, *ahead[hop + 1 :]))
