"""How many forwards workers run ahead of an order, so that messages of slow hops do not hold them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from raypipe import stopping
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout

ORDERS = ("1f1b", "zb-h1", "zb-h2", "zb-auto", "pipedream-2bw", "async-1f1b", "list")
"""Orders with one stage on each worker, of which forwards may run ahead."""
_LEAST_GAIN = 1.005  # Below it, activations are not worth their memory.
_NO_GAIN = 1.001
_MOST_HOPS = 8  # That are tried one by one.
_LEAST_EXPOSED = 0.01  # Share of the time that devices wait for transfers.


def _loss_s(evaluation: Evaluation) -> float:
    return evaluation.loss_s


def with_forwards_ahead(
    evaluator: LayoutEvaluator, evaluation: Evaluation | None, *, most_steps: int, seconds: Callable[[Evaluation], float] = _loss_s
) -> Evaluation | None:
    """Return the layout with as many forwards ahead at each hop as make it faster, one by one, within memory and limits on staleness.

    They take time from sums of gradients and memory from activations, so each is judged by the whole simulation: by `seconds`.
    """
    if evaluation is None or evaluation.layout.order not in ORDERS:
        return evaluation
    tried: list[Evaluation] = []
    is_done = False
    with stopping.part():
        for _ in range(most_steps):
            slow = _slow_hops(evaluation)
            best = _best(evaluator, _more(evaluation.layout, slow), seconds, tried) if slow else None
            if best is None or not _gains(best, evaluation, seconds, _LEAST_GAIN):
                break
            evaluation = best
        few = sum(map(bool, evaluation.layout.ahead)) <= _MOST_HOPS
        # What no longer gains only takes memory.
        while (
            few
            and (fewer := _best(evaluator, _fewer(evaluation.layout), seconds, tried))
            and not _gains(evaluation, fewer, seconds, _NO_GAIN)
        ):
            evaluation = fewer
        is_done = True
    if is_done:
        return evaluation
    best = min(tried, key=lambda other: (other.missing_bytes, seconds(other)), default=evaluation)
    return best if _gains(best, evaluation, seconds, _LEAST_GAIN) else evaluation


def _best(
    evaluator: LayoutEvaluator, layouts: Iterator[Layout], seconds: Callable[[Evaluation], float], tried: list[Evaluation]
) -> Evaluation | None:
    """Return the best of some layouts; `tried` has those of them that were simulated, wherever that ends."""
    tried.clear()
    for layout in layouts:
        if (evaluation := evaluator.simulate(layout)) is not None:
            tried.append(evaluation)
    return min(tried, key=lambda other: (other.missing_bytes, seconds(other)), default=None)


def _gains(other: Evaluation, evaluation: Evaluation, seconds: Callable[[Evaluation], float], least: float) -> bool:
    if other.missing_bytes != evaluation.missing_bytes:
        return other.missing_bytes < evaluation.missing_bytes
    return seconds(other) * least < seconds(evaluation)


def _slow_hops(evaluation: Evaluation) -> list[int]:
    """Return the hops whose transfers devices wait for most; none where forwards ahead cannot help.

    A wait counts from the departure of its message: before it, the sender is waited for.
    """
    layout, timing = evaluation.layout, evaluation.timing
    worker_of = [worker for worker, group in enumerate(layout.workers) for _ in group]
    if len(timing.order.devices) == len(layout.workers):
        worker_of = list(range(len(layout.workers)))  # Workers are simulated as one device each.
    exposed_s = [0.0] * max(len(layout.workers) - 1, 0)
    for of_program in timing.waits:
        for message, _, start_s, end_s in of_program:
            if message >= 0:
                source, target, _ = timing.order.transfers[timing.order.transfer_of[message]]
                hop = min(worker_of[source], worker_of[target])
                exposed_s[hop] += max(end_s - max(start_s, timing.departure_s[message]), 0.0)
    if sum(exposed_s) <= _LEAST_EXPOSED * timing.makespan_s * len(timing.waits):
        return []
    return sorted(sorted(range(len(exposed_s)), key=exposed_s.__getitem__, reverse=True)[:_MOST_HOPS])


def _more(layout: Layout, hops: Sequence[int]) -> Iterator[Layout]:
    """Yield the layout with one forward more ahead at one of these hops, and at all hops."""
    ahead = _counts(layout)
    for hop in hops:
        yield _ahead(layout, (*ahead[:hop], ahead[hop] + 1, *ahead[hop + 1 :]))
    yield _ahead(layout, tuple(count + 1 for count in ahead))


def _fewer(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with one forward less ahead at a hop."""
    ahead = _counts(layout)
    for hop, count in enumerate(ahead):
        if count:
            yield _ahead(layout, (*ahead[:hop], count - 1, *ahead[hop + 1 :]))


def _counts(layout: Layout) -> tuple[int, ...]:
    return layout.ahead or (0,) * (len(layout.workers) - 1)


def _ahead(layout: Layout, ahead: tuple[int, ...]) -> Layout:
    # Which forwards run again is left open: other stages may lack memory.
    return replace(layout, ahead=ahead, recomputed=None)
