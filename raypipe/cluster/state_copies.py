"""Copies of a run's state behind a window, from which the run goes on after a failure.

Each device copies the layers that it exports into the object store of its node, where they outlive its process, and sends them to a
process of another node while the next window runs, as in Gemini (Wang et al., SOSP 2023). A recovery moves what is left of both through
Ray's object stores.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from raypipe.actors.state_copies import CopyOrder
from raypipe.actors.transport.secret import StoreAddress
from raypipe.cluster.actor_group import Member
from raypipe.cluster.stage_actors import COPIES, StageActors
from raypipe.cluster.states import States, by_layer, exported_layers
from raypipe.errors import StateLostError

# Until then, or for so many times what other nodes have taken, a copy may be on its way: a node may not reach the one that is to keep it.
_SLOW_S = 60.0
_SLOW = 10.0
_ANSWER_S = 1.0  # for a device to say what it has sent
_NUM_NEWEST = 3


@dataclass
class StateCopy:
    """The state of all layers behind an update.

    Attributes:
        number: By which processes know the copy.
        layers: Of each device's part.
        parts: By device, the id of its node and a reference to its part in the object store there.
        states: References to the state of each layer, once they were asked for.
    """

    update: int
    number: int
    layers: Mapping[int, Sequence[int]]
    parts: Mapping[int, tuple[str, Any]] = field(default_factory=dict)
    states: States | None = None


class StateCopies:
    """Takes copies between windows, and says which is the newest that can be had."""

    def __init__(self, actors: StageActors, *, share: float) -> None:
        self._actors = actors
        self._share = share
        self._kept: list[StateCopy] = []  # from old to new; of the last, parts may still be on their way
        self._sending: dict[int, tuple[str, str]] = {}  # by device: its node, and the node that is to keep a copy
        self._apart: set[tuple[str, str]] = set()  # nodes of which the second could not get copies from the first
        self._members: Sequence[Member] = ()  # of which is known which layers they export, and where they take copies
        self._layers: dict[int, tuple[int, ...]] = {}  # by device
        self._addresses: dict[int, StoreAddress] = {}  # by device
        self._idle: dict[int, int] = {}  # by the number of its slot, the newest copy of which an actor without stages may have parts
        self._number = 0  # of the newest copy
        self._usual_s = float("inf")  # until all parts are kept twice, when it is looked at behind windows
        self._taken_at_s = -float("inf")
        self._took_s: deque[float] = deque(maxlen=_NUM_NEWEST)  # for the newest copies; one may have met a busy machine
        self.cut_links: Collection[frozenset[str]] = ()  # ids of nodes that do not reach each other
        self.seconds = 0.0  # for which the run has waited for copies

    def take(self, update: int) -> bool:
        """Copy the state behind an update, unless the last copies are still on their way or would take too much of the run's time."""
        is_early = self._share < 1 and time.monotonic() - self._taken_at_s < self._usual_wait_s / self._share
        if self._is_sending() or is_early:
            return False
        since_s = time.monotonic()
        self._look_at_members()
        self._number += 1
        self._kept = [*self._kept[-1:], self._copied(update)]
        self._taken_at_s = time.monotonic()
        self._took_s.append(self._taken_at_s - since_s)
        self.seconds += self._took_s[-1]
        return True

    @property
    def _usual_wait_s(self) -> float:
        return statistics.median(self._took_s) if self._took_s else 0.0

    def _look_at_members(self) -> None:
        # Who exports which layers changes only when stages are assigned anew.
        actors = self._actors
        if self._members is actors.members:
            return
        whole, stepped = exported_layers(actors)
        self._layers = {device: layers for device in whole if (layers := (*whole[device], *stepped[device]))}
        infos, secret = actors.infos, actors.secret
        self._addresses = actors.ask("opening copies", lambda device, actor: actor.open_copies.remote(infos[device].ip, secret))
        self._idle |= dict.fromkeys(actors.alive().keys() - set(actors.devices), self._number)
        self._members = actors.members

    def _copied(self, update: int) -> StateCopy:
        members, keepers, kept = self._actors.members, self._keepers(), tuple(one.number for one in self._kept[-1:])
        nodes = [member.slot.node.node_id for member in members]
        parts: dict[int, tuple[str, Any]] = {}
        done: dict[int, Any] = {}
        for device, layers in self._layers.items():
            keeper = keepers.get(device)
            order = CopyOrder(self._number, device, layers, kept, None if keeper is None else self._addresses[keeper])
            part, done[device] = members[device].handle.copy_layers.options(num_returns=2).remote(order)
            parts[device] = nodes[device], part
        self._actors.gather(done, "copying layers")
        self._sending = {device: (nodes[device], nodes[keepers[device]]) for device in parts if device in keepers}
        self._drop_elsewhere((*kept, self._number))
        return StateCopy(update, self._number, self._layers, parts)

    def _drop_elsewhere(self, kept: Sequence[int]) -> None:
        """Let actors without stages drop what they have of old copies; the others do so by themselves."""
        alive = self._actors.alive()
        for number, last in list(self._idle.items()):
            if last < min(kept):
                del self._idle[number]
                if number in alive:
                    alive[number].handle.drop_copies.options(concurrency_group=COPIES).remote(kept)

    def _is_sending(self) -> bool:
        are_same = self._members is self._actors.members
        if self._sending and are_same:
            self._look(self._actors.newest_copies)
        if self._sending:  # as the last window ended, in which the first copy finds its way; windows may be short
            handles = {device: self._members[device].handle for device in self._sending}
            calls = {device: handle.newest_copy.options(concurrency_group=COPIES).remote() for device, handle in handles.items()}
            self._look(dict(_answers(calls, _ANSWER_S)))
        seconds = time.monotonic() - self._taken_at_s
        if not self._sending:
            self._kept = self._kept[-1:]
        elif seconds > max(_SLOW_S, _SLOW * self._usual_s):
            self._apart.update(self._sending.values())  # the next copies go to other nodes
            self._give_up()
        elif not are_same or any(frozenset(nodes) in self.cut_links for nodes in self._sending.values()):
            self._give_up()
        return bool(self._sending)

    def _look(self, newest: Mapping[int, int]) -> None:
        self._sending = {device: nodes for device, nodes in self._sending.items() if newest.get(device, -1) < self._number}
        if not self._sending:
            self._usual_s = time.monotonic() - self._taken_at_s

    def _give_up(self) -> None:
        """Go without the newest copy, unless a recovery went on from it, so that all of it is in Ray's object stores."""
        self._sending = {}
        self._kept = self._kept[:1] if self._kept and self._kept[-1].states is None else self._kept[-1:]

    def _keepers(self) -> dict[int, int]:
        """Return the device that keeps the layers of each other device: the next one on another node that could get copies from it."""
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

    def states(self, copy: StateCopy, *, timeout_s: float | None = None) -> States:
        """Return references to the states of a copy's layers, once actors have exported them.

        Each process gets `timeout_s` seconds to answer, by default those after which one is silent.

        Raises:
            StateLostError: No actor that answers can export some part.
        """
        if copy.states is None:
            copy.states = self._moved(copy, self._actors.cluster.silence_timeout_s if timeout_s is None else timeout_s)
        return copy.states

    def _moved(self, copy: StateCopy, timeout_s: float) -> States:
        exporters = self._exporters(copy, timeout_s)
        parts: dict[int, list[tuple[int, Any]]] = {}
        while missing := [device for device in copy.layers if device not in parts]:
            calls: dict[int, Any] = {}
            states: dict[int, list[Any]] = {}
            for device in missing:
                if not exporters[device]:
                    raise StateLostError(f"nobody who is left has a copy of the layers that device {device} had")
                *states[device], calls[device] = exporters[device].pop(0)()
            for device, _ in _answers(calls, timeout_s):
                parts[device] = list(zip(copy.layers[device], states[device], strict=True))
        return by_layer(parts)

    def _exporters(self, copy: StateCopy, timeout_s: float) -> dict[int, list[Callable[[], Sequence[Any]]]]:
        """Return calls of which each lets an actor export a device's part, by device, in the order in which they are to be tried.

        An actor of a node takes the part in its object store. An object on a lost node would be awaited until Ray knows that it is lost.
        """
        alive = self._actors.alive()
        asked = {number: member.handle.kept_copies.options(concurrency_group=COPIES).remote() for number, member in alive.items()}
        keys = dict(_answers(asked, timeout_s))
        found: dict[int, list[Callable[[], Sequence[Any]]]] = {}
        for device, layers in copy.layers.items():
            node, part = copy.parts[device]
            options = {"num_returns": len(layers) + 1, "concurrency_group": COPIES}
            near = [number for number in keys if alive[number].slot.node.node_id == node]
            keepers = [number for number in keys if (copy.number, device) in keys[number]]
            export_copy = [partial(alive[number].handle.export_copy.options(**options).remote, part, layers) for number in near[:1]]
            export_kept = [
                partial(alive[number].handle.export_kept.options(**options).remote, copy.number, device, layers) for number in keepers
            ]
            elsewhere = [partial(alive[number].handle.export_copy.options(**options).remote, part, layers) for number in keys]
            found[device] = [*export_copy, *export_kept, *([] if near else elsewhere[:1])]
        return found

    def drop_after(self, update: int) -> None:
        """Forget the copies of states behind a later update, which a run that goes on will reach again."""
        self._kept = [copy for copy in self._kept if copy.update <= update]


def _answers(calls: Mapping[int, Any], timeout_s: float) -> Iterator[tuple[int, Any]]:
    """Yield the answers to calls that are answered within some seconds."""
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    for number, call in calls.items():
        try:
            yield number, ray.get(call, timeout=0)
        except RayError:
            continue
