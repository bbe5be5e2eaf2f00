"""The plans that were not chosen: the best of each kind, and in what part of the time of its busiest device it lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raypipe.analysis.idle import Cause, divide
from raypipe.artifacts.trace import Trace
from raypipe.planning.evaluator import Evaluation
from raypipe.planning.layout import Layout

PART_OF: Mapping[Cause, str] = {
    Cause.COMPUTE: "work",
    Cause.WARM_UP: "ramp",
    Cause.DRAIN: "ramp",
    Cause.ACTIVATION: "other stages",
    Cause.GRADIENT: "other stages",
    Cause.OTHER_BRANCH: "other stages",
    Cause.COLLECTIVE: "other stages",
    Cause.ACTIVATION_TRANSFER: "messages",
    Cause.GRADIENT_TRANSFER: "messages",
    Cause.COLLECTIVE_TRANSFER: "sums",
    Cause.DATA: "overhead",  # none in plans, which know nothing of data
    Cause.OVERHEAD: "overhead",
}
"""What the time of a device is divided into: its own work, filling and draining, waits for stages at work, and waits for transfers."""


@dataclass(frozen=True)
class Kind:
    """What sets plans apart: the order, whether the model is on one worker (`data-parallel`) or workers have copies, and divided stages."""

    schedule: str
    form: str

    @classmethod
    def of(cls, layout: Layout) -> Kind:
        """Return the kind of a layout."""
        if layout.num_stages == 1:
            return cls(layout.order, "data-parallel" if layout.has_copies else "one device")
        if layout.divided:
            return cls(layout.order, "data-parallel, divided" if len(layout.workers) == 1 else "copies, divided")
        return cls(layout.order, "copies" if layout.has_copies else "pipeline")


class Rivals:
    """The best layout of each kind of all that were simulated."""

    def __init__(self) -> None:
        self.best: dict[Kind, Evaluation] = {}

    def add(self, evaluation: Evaluation) -> None:
        """Keep a simulated layout if it is the best of its kind."""
        kind = Kind.of(evaluation.layout)
        if kind not in self.best or evaluation.rank < self.best[kind].rank:
            self.best[kind] = evaluation

    def by_rank(self) -> list[tuple[Kind, Evaluation]]:
        """Return the kinds, those that fit first, then the fastest."""
        return sorted(self.best.items(), key=lambda item: item[1].rank)


def parts_s(trace: Trace, update_s: float) -> dict[str, float]:
    """Return the seconds of each part of an update on the device that computes longest; they sum to `update_s`."""
    division = divide(trace)
    busiest = max(division.by_cause_s, key=lambda of_device: of_device.get(Cause.COMPUTE, 0.0))
    parts = dict.fromkeys(dict.fromkeys(PART_OF.values()), 0.0)
    for cause, seconds in busiest.items():
        parts[PART_OF[cause]] += seconds / trace.makespan_s * update_s if trace.makespan_s else 0.0
    return parts


def lost_in(parts: Mapping[str, float], chosen: Mapping[str, float]) -> tuple[str, float]:
    """Return the part in which a plan takes most seconds more than the chosen one, and how many."""
    more: Iterable[tuple[str, float]] = ((part, seconds - chosen[part]) for part, seconds in parts.items())
    return max(more, key=lambda pair: pair[1])
