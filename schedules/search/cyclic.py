"""Periodic orders by modulo scheduling, as compilers do it for loops (Rau, MICRO 1994).

Every Op of a microbatch takes the first moment that is free on its worker in every period; the next microbatch repeats this
one period later. A worker that is busy all the period has no bubble; microbatches wait where Ops do not meet in time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.search.dispatch import Started, TimedPipelines

_NOTHING = 1e-9  # share of a period that counts as no time: Ops that touch do not overlap


@dataclass(frozen=True)
class Cycle:
    """F and B of the first microbatch of each pipeline, which repeat every period."""

    line: TimedPipelines
    period_s: float
    first: tuple[Started, ...]

    @property
    def mean_held(self) -> float:
        """Return the most activations of any worker, averaged over a period."""
        by_worker = [0.0] * self.line.num_workers
        for started in self.first:
            sign = 1 if started.op.kind is OpKind.BACKWARD else -1
            at_s = started.end_s if sign > 0 else started.start_s
            by_worker[self.line.pipelines[started.op.pipeline][started.op.stage]] += sign * at_s / self.period_s
        return max(by_worker)

    def unrolled(self, turns: int) -> list[list[Started]]:
        """Return each worker's Ops for `turns` microbatches of each pipeline; m is turn m // N of pipeline m mod N."""
        pipelines = self.line.pipelines
        rows: list[list[Started]] = [[] for _ in range(self.line.num_workers)]
        for started in self.first:
            op = started.op
            for turn in range(turns):
                later_s = turn * self.period_s
                moved = op._replace(index=op.index + turn * len(pipelines))
                rows[pipelines[op.pipeline][op.stage]].append(Started(moved, started.start_s + later_s, started.end_s + later_s))
        for row in rows:
            row.sort(key=lambda started: started.start_s)
        return rows


def cycle(line: TimedPipelines, *, period_s: float, starts_s: Sequence[float]) -> Cycle | None:
    """Return the periodic order; `None` where some Op does not fit.

    `starts_s` is when the first microbatch of each pipeline arrives: it decides which Ops meet, and so how long microbatches wait.
    """
    busy: list[list[tuple[float, float]]] = [[] for _ in range(line.num_workers)]
    started: list[Started] = []
    missing = [[step.num_needed for step in steps] for steps in line.steps]
    ready_s = [[at_s] * len(steps) for at_s, steps in zip(starts_s, line.steps, strict=True)]
    arrivals = [(at_s, pipeline, at) for pipeline, at_s in enumerate(starts_s) for at, num in enumerate(missing[pipeline]) if not num]
    heapq.heapify(arrivals)
    while arrivals:
        at_s, pipeline, at = arrivals[0]
        step = line.steps[pipeline][at]
        start_s = _first_free(busy[step.worker], at_s, step.seconds, period_s)
        if start_s is None:
            return None
        if start_s > at_s:  # another may come before it
            heapq.heapreplace(arrivals, (start_s, pipeline, at))
            continue
        heapq.heappop(arrivals)
        end_s = start_s + step.seconds
        busy[step.worker].append((start_s % period_s, step.seconds))
        started.append(Started(Op(step.kind, step.stage, pipeline, pipeline), start_s, end_s))
        for follower, hop_s in step.followers:
            ready_s[pipeline][follower] = max(ready_s[pipeline][follower], end_s + hop_s)
            missing[pipeline][follower] -= 1
            if not missing[pipeline][follower]:
                heapq.heappush(arrivals, (ready_s[pipeline][follower], pipeline, follower))
    return Cycle(line, period_s, tuple(started))


def _first_free(occupied: Sequence[tuple[float, float]], at_s: float, seconds: float, period_s: float) -> float | None:
    """Return the first moment from `at_s` on that is free in every period."""
    start_s, nothing_s = at_s, _NOTHING * period_s
    while start_s <= at_s + period_s:
        for other_s, other_seconds in occupied:
            since_s = (start_s - other_s) % period_s
            if period_s - since_s < nothing_s:
                since_s = 0.0
            if since_s < other_seconds - nothing_s:
                start_s += other_seconds - since_s
                break
            if since_s + seconds > period_s + nothing_s:
                start_s += period_s - since_s + other_seconds
                break
        else:
            return start_s
    return None
