"""Copies of a run's state behind a window, from which the run goes on after a failure.

Each device puts the layers that it exports into the object store of its node, where they outlive its process. An actor of another node
keeps a copy of them in the store of that node, as in Gemini (Wang et al., SOSP 2023), which outlives the first node. Ray knows where the
copies of an object are, and takes the one that is left.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raypipe.cluster.actor_group import Member
from raypipe.cluster.copy_pace import CopyPace
from raypipe.cluster.stage_actors import COPIES, StageActors
from raypipe.cluster.states import Parts, States, by_layer, export_states, exported_layers

# Until then, or for so many times what other nodes have taken, a node may fetch copies: it may not reach the node that has them.
_SLOW_S = 60.0
_SLOW = 10.0


@dataclass(frozen=True)
class StateCopy:
    """The state of all layers behind an update."""

    update: int
    states: States


class StateCopies:
    """Takes copies between windows, and says which is the newest that can be had."""

    def __init__(self, actors: StageActors, *, share: float) -> None:
        self._actors = actors
        self._pace = CopyPace(share)
        self._kept: list[StateCopy] = []  # from old to new; of the last, nodes may still fetch their parts
        self._fetching: dict[Any, tuple[str, str]] = {}  # calls, not answered yet; node of the layers, and the node that is to keep a copy
        self._apart: set[tuple[str, str]] = set()  # nodes of which the second could not fetch copies from the first
        self._members: Sequence[Member] = ()  # of which the layers are known that they export
        self._layers: dict[int, list[int]] = {}  # by device
        self._holding: dict[int, int] = {}  # by the number of its slot, the newest update of which an actor keeps other nodes' layers
        self._usual_s = float("inf")  # for a node to fetch copies
        self._taken_at_s = -float("inf")
        self._is_beside = False  # the newest window, beside a copy
        self._is_urgent = False  # the next copy
        self._is_partial = False  # the newest copy: some layers lie on their own node alone, since another one failed to fetch them
        self.cut_links: Collection[frozenset[str]] = ()  # ids of nodes that do not reach each other

    def begin_anew(self) -> None:
        """Learn anew what copies cost: the next windows are of another plan, or of devices that have just met."""
        self._pace.begin_anew()
        self._is_beside = False

    def after_window(self, update: int, *, seconds: float, num_updates: int, mtbf_s: float) -> bool:
        """Copy the state behind a window, unless the last copies are still on their way or copies would take too much of the run's time.

        The window had so many updates and took so many seconds; `mtbf_s` is the mean time between failures. Return whether there are new
        copies.
        """
        self._pace.note_window(seconds, num_updates=num_updates, is_beside=self._is_beside)
        since_s = time.monotonic() - self._taken_at_s
        is_taken = not self._is_fetching() and (self._is_urgent or self._pace.is_due(since_s, mtbf_s=mtbf_s))
        if is_taken:
            self._take(update)
            self._is_urgent = False
        self._is_beside = bool(self._fetching)
        return is_taken

    def _take(self, update: int) -> None:
        since_s = time.monotonic()
        parts = self._export()
        whole = self._whole()[:1]
        oldest = whole[0].update if whole else update
        self._kept = [*whole, StateCopy(update, by_layer(parts))]
        self._is_partial = False
        self._fetching = {}
        members, keepers = self._actors.members, {device: keeper for device, keeper in self._keepers().items() if device in parts}
        for device, keeper in keepers.items():
            states = [state for _, state in parts[device]]
            call = members[keeper].handle.hold.options(concurrency_group=COPIES).remote(device, update, oldest, *states)
            self._fetching[call] = (members[device].slot.node.node_id, members[keeper].slot.node.node_id)
        self._drop_elsewhere({self._actors.devices[keeper] for keeper in keepers.values()}, update=update, oldest=oldest)
        self._taken_at_s = time.monotonic()
        self._pace.note_wait(self._taken_at_s - since_s)

    def _drop_elsewhere(self, keeping: Collection[int], *, update: int, oldest: int) -> None:
        """Let actors that keep no new copies drop their old ones; those that keep new ones do so by themselves."""
        alive = self._actors.alive()
        for number, last in list(self._holding.items()):
            if number not in keeping and last < oldest:
                del self._holding[number]
                if number in alive:
                    alive[number].handle.drop_held.options(concurrency_group=COPIES).remote(oldest)
        self._holding |= dict.fromkeys(keeping, update)

    def _export(self) -> Parts:
        # Which layers a device exports changes only when stages are assigned anew.
        if self._members is not self._actors.members:
            whole, stepped = exported_layers(self._actors)
            self._layers = {device: [*whole[device], *stepped[device]] for device in whole}
            self._members = self._actors.members
        return export_states(self._actors, self._layers)

    def _poll(self) -> None:
        """Forget the calls that have been answered."""
        if self._fetching:
            done, pending = ray.wait(list(self._fetching), num_returns=len(self._fetching), timeout=0)
            self._fetching = {ref: self._fetching[ref] for ref in pending}
            if any(map(_has_failed, done)):
                self._is_partial = True
            elif done:
                self._usual_s = time.monotonic() - self._taken_at_s

    def _is_fetching(self) -> bool:
        self._poll()
        seconds = time.monotonic() - self._taken_at_s
        if not self._fetching:
            self._kept = self._whole()
        elif seconds > max(_SLOW_S, _SLOW * self._usual_s):
            self._apart.update(self._fetching.values())  # the next copies go to other nodes
            self._give_up()
        elif any(frozenset(nodes) in self.cut_links for nodes in self._fetching.values()):
            self._give_up()
        return bool(self._fetching)

    def _whole(self) -> list[StateCopy]:
        """Return the copies to keep once the newest is fetched: that one alone, unless it is partial."""
        return self._kept if self._is_partial else self._kept[-1:]

    def _give_up(self) -> None:
        self._fetching = {}
        self._is_partial = False
        self._kept = self._kept[:1]
        self._pace.note_end_of_hopeless_fetch()

    def _keepers(self) -> dict[int, int]:
        """Return the device that keeps the layers of each other device: the next one on another node that could fetch copies from it."""
        nodes = [member.slot.node.node_id for member in self._actors.members]
        count = len(nodes)
        keepers: dict[int, int] = {}
        for device in range(count):
            others = [(device + step) % count for step in range(1, count)]
            others = [other for other in others if nodes[other] != nodes[device]]
            others.sort(key=lambda other, node=nodes[device]: self._is_apart(node, nodes[other]))  # type: ignore[misc]
            if others:
                keepers[device] = others[0]
        return keepers

    def _is_apart(self, node: str, other: str) -> bool:
        return (node, other) in self._apart or frozenset((node, other)) in self.cut_links

    def candidates(self) -> list[StateCopy]:
        """Return the copies from which a run may go on, from new to old; parts of one may be lost."""
        return self._kept[::-1]

    def renew(self) -> None:
        """Take copies as soon as possible, however new the last ones are."""
        self._is_urgent = True

    def drop_after(self, update: int) -> None:
        """Forget the copies of states behind a later update, which a run that goes on will reach again."""
        self._kept = [copy for copy in self._kept if copy.update <= update]
        # The window that copies were fetched beside is not told of, and is run again, perhaps beside the rest of them.
        self._poll()
        self._is_beside = bool(self._fetching)


def _has_failed(call: Any) -> bool:
    try:
        ray.get(call)
    except RayError:
        return True
    return False
