"""Copies of a run's state behind a window, from which the run goes on after a failure.

Each device puts the layers that it exports into the object store of its node, where they outlive its process. An actor of another node
keeps a copy of them in the store of that node, as in Gemini (Wang et al., SOSP 2023), which outlives the first node. Ray knows where the
copies of an object are, and takes the one that is left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray

from raypipe.cluster.stage_actors import COPIES, StageActors
from raypipe.cluster.states import States, all_parts, by_layer


@dataclass(frozen=True)
class StateCopy:
    """The state of all layers behind an update."""

    update: int
    states: States


class StateCopies:
    """Takes copies between windows, and says which is the newest that can be had."""

    def __init__(self, actors: StageActors, *, share: float) -> None:
        self._actors = actors
        self._share = share
        self._kept: list[StateCopy] = []  # from old to new; of the last, nodes may still fetch their parts
        self._fetching: list[Any] = []  # calls of actors that keep layers of others, not answered yet
        self._taken_at_s = -float("inf")
        self._took_s = 0.0
        self.seconds = 0.0  # for which the run has waited for copies

    def take(self, update: int) -> bool:
        """Copy the state behind an update, unless the last copies are still on their way or would take too much of the run's time."""
        is_early = self._share < 1 and time.monotonic() - self._taken_at_s < self._took_s / self._share
        if self._is_fetching() or is_early:
            return False
        since_s = time.monotonic()
        parts = all_parts(self._actors)
        oldest = self._kept[-1].update if self._kept else update
        self._kept = [*self._kept[-1:], StateCopy(update, by_layer(parts))]
        self._fetching = []
        for device, keeper in self._keepers().items():
            if of_device := parts.get(device):
                hold = self._actors.members[keeper].handle.hold.options(concurrency_group=COPIES)
                self._fetching.append(hold.remote(update, oldest, *(state for _, state in of_device)))
        self._taken_at_s = time.monotonic()
        self._took_s = self._taken_at_s - since_s
        self.seconds += self._took_s
        return True

    def _is_fetching(self) -> bool:
        if self._fetching:
            _, self._fetching = ray.wait(self._fetching, num_returns=len(self._fetching), timeout=0)
        if not self._fetching:
            self._kept = self._kept[-1:]
        return bool(self._fetching)

    def _keepers(self) -> dict[int, int]:
        """Return the device that keeps the layers of each other device: the next one on another node."""
        nodes = [member.slot.node.node_id for member in self._actors.members]
        count = len(nodes)
        keepers: dict[int, int] = {}
        for device in range(count):
            others = ((device + step) % count for step in range(1, count))
            if (keeper := next((other for other in others if nodes[other] != nodes[device]), None)) is not None:
                keepers[device] = keeper
        return keepers

    def candidates(self) -> list[StateCopy]:
        """Return the copies from which a run may go on, from new to old; parts of one may be lost."""
        return self._kept[::-1]

    def drop_after(self, update: int) -> None:
        """Forget the copies of states behind a later update, which a run that goes on will reach again."""
        self._kept = [copy for copy in self._kept if copy.update <= update]
