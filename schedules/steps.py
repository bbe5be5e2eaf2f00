"""Running an order: each worker takes its steps in order, each as soon as all that it needs has ended.

One runner for whoever must know how an order runs: the validator (does it hang?) and the searches (when does each Op start?).
The simulator, which knows links and memory, has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Step = TypeVar("Step", bound=Hashable)


@dataclass(frozen=True)
class StepRun(Generic[Step]):
    """How an order ran.

    Attributes:
        starts_s: For each worker, when its steps started; as many as it came to.
        ends_s: For each worker, when its last step ended.
        causes: For each worker, the step that each of its steps waited for last: the step before it, or one of another worker.
        stuck: For each worker that waits for ever, a step that it waits for.
    """

    starts_s: list[list[float]]
    ends_s: list[float]
    causes: list[list[Step | None]]
    stuck: dict[int, Step]

    @property
    def spans_s(self) -> list[float]:
        """The time of each worker from its first start to its last end."""
        return [end_s - starts_s[0] for starts_s, end_s in zip(self.starts_s, self.ends_s, strict=True)]


def run_steps(
    programs: Sequence[Sequence[Step]],
    *,
    seconds: Callable[[Step], float],
    needs: Callable[[Step], Iterable[tuple[Step, float]]],
) -> StepRun[Step]:
    """Run an order. `needs` names the steps that must have ended, each with the seconds from its end to the start that it allows.

    Time: the number of steps and of what they need.
    """
    starts_s: list[list[float]] = [[] for _ in programs]
    causes: list[list[Step | None]] = [[] for _ in programs]
    now_s = [0.0] * len(programs)
    ended_s: dict[Step, float] = {}
    waiting: dict[Step, list[int]] = {}
    stuck: dict[int, Step] = {}
    ready = list(range(len(programs)))
    while ready:
        worker = ready.pop()
        stuck.pop(worker, None)
        program, starts, reasons, at_s = programs[worker], starts_s[worker], causes[worker], now_s[worker]
        for position in range(len(starts), len(program)):
            step = program[position]
            start_s, cause = at_s, program[position - 1] if position else None
            for needed, lag_s in needs(step):
                end_s = ended_s.get(needed)
                if end_s is None:
                    waiting.setdefault(needed, []).append(worker)
                    stuck[worker] = needed
                    break
                if end_s + lag_s > start_s:
                    start_s, cause = end_s + lag_s, needed
            if worker in stuck:
                break
            starts.append(start_s)
            reasons.append(cause)
            at_s = ended_s[step] = start_s + seconds(step)
            if step in waiting:
                ready += waiting.pop(step)
        now_s[worker] = at_s
    return StepRun(starts_s, now_s, causes, stuck)
