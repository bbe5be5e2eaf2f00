"""Transfers that share links, as flows of bytes: at what rate each passes, and when it has.

Flows that pass a link at the same time share it max-min fairly, as TCP does (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).
Where transfers are scheduled, each way out of a device carries one at a time, which the policy chooses, and which another one
interrupts at the end of a chunk only: there are as many events as interruptions, however small the chunks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from raypipe.artifacts.topology import Path
from raypipe.communication.policy import HOLD_S, Communication, Traffic, Transfer, chunk_bytes, next_chunk

_TO_BEGIN = -1
"""Stands for an epoch where a flow joins its way's queue."""


@dataclass(eq=False, slots=True)
class Flow:
    """A transfer on its way.

    Attributes:
        way: Device that sends it and its way out.
        on_end: Called with the time at which the last byte has left.
        begun_s: Time at which the first byte left.
        left: Bytes that have not left; it leaves its links when these are `stop`.
        holding: Links that sums leave to it if it is a message, and that it leaves to messages if it is of a sum.
        entrance: What messages to one device share, of which the one that is due first goes first; `None` if nothing.
        due: See `CompiledOrder.due`.
    """

    way: Hashable
    path: Path
    transfer: Transfer
    on_end: Callable[[float, float], None]
    number: int = -1
    begun_s: float | None = None
    left: float = 0.0
    stop: float = 0.0
    resumed: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    epoch: int = 0
    holding: Sequence[str] = ()
    entrance: Hashable = None
    due: int = 0


@dataclass(eq=False, slots=True)
class _Way:
    current: Flow | None = None
    queue: list[Flow] = field(default_factory=list)


class Network:
    """All flows of a simulation. `push` has `fire` called at a time with the flow's number and epoch."""

    def __init__(self, communication: Communication, push: Callable[[float, int, int], None]) -> None:
        self.communication = communication
        self._push = push
        self._flows: list[Flow] = []
        self._ways: dict[Hashable, _Way] = {}
        self._passing: dict[str, dict[Flow, None]] = {}
        """The flows that pass each resource now."""
        self._messages: Counter[str] = Counter()
        """The messages to which sums leave each resource now."""
        self._entering: dict[Hashable, dict[Flow, None]] = {}
        """The messages that pass each entrance now."""
        self._held: dict[_Way, None] = {}
        """The ways on which all that waits makes room for messages of others."""
        self._sequence = itertools.count()
        self.num_under_way = 0
        """Flows that have not ended."""

    def submit(
        self,
        way: Hashable,
        path: Path,
        num_bytes: float,
        now_s: float,
        *,
        traffic: Traffic,
        deadline: int,
        on_end: Callable[[float, float], None],
        not_before_s: float = 0.0,
        holding: Sequence[str] | None = None,
        entrance: Hashable = None,
        due: int = 0,
    ) -> None:
        """Send bytes over a path of limited bandwidth; `on_end` gets the times at which the first and the last byte left.

        Sums make way for messages on links that are `holding` for both, by default all of their paths. Of messages with the same
        `entrance`, the one with the least `due` goes first.
        """
        holding = [name for name, _ in path.resources] if holding is None else holding
        transfer = Transfer(traffic, deadline, next(self._sequence), 0, math.ceil(num_bytes))
        flow = Flow(way, path, transfer, on_end, len(self._flows), left=num_bytes, holding=holding, entrance=entrance, due=due)
        self._flows.append(flow)
        self.num_under_way += 1
        if not_before_s > now_s:
            self._push(not_before_s, flow.number, _TO_BEGIN)
        else:
            self._queue(flow, now_s)

    def _queue(self, flow: Flow, now_s: float) -> None:
        if not self.communication.scheduled:
            self._begin(flow, now_s)
            return
        of_way = self._ways.get(flow.way)
        if of_way is None:
            of_way = self._ways[flow.way] = _Way()
        of_way.queue.append(flow)
        if of_way.current is None:
            self._next(of_way, now_s)
        elif of_way.current.transfer.traffic is not Traffic.MESSAGE and flow.transfer < of_way.current.transfer:
            self._interrupt(of_way.current, now_s)
            if flow.transfer.traffic is Traffic.MESSAGE and flow.path != of_way.current.path:
                self._stop(of_way.current, now_s)

    def fire(self, number: int, epoch: int, now_s: float) -> None:
        """Let a flow leave its links: it has ended, or its chunk has."""
        flow = self._flows[number]
        if epoch == _TO_BEGIN:
            self._queue(flow, now_s)
            return
        if flow.epoch != epoch:
            return
        flow.left = flow.stop
        flow.epoch += 1
        for resource, _ in flow.path.resources:
            del self._passing[resource][flow]
        self._share(flow.path.resources, now_s)
        if self.communication.scheduled:
            of_way = self._ways[flow.way]
            of_way.current = None
            if flow.left:
                of_way.queue.append(flow)
            if self.communication.holds and flow.transfer.traffic is Traffic.MESSAGE:
                self._release(flow, now_s)
            self._next(of_way, now_s)
        if not flow.left:
            self.num_under_way -= 1
            assert flow.begun_s is not None, "it has passed"
            flow.on_end(flow.begun_s, now_s)

    def _next(self, of_way: _Way, now_s: float) -> None:
        if of_way.current is not None:
            return
        queue = [flow for flow in of_way.queue if not self._is_held(flow)]
        if queue:
            rate = queue[0].path.bandwidth_bytes_per_s
            chunk = next_chunk([flow.transfer for flow in queue], bytes_per_s=rate, chunk_s=self.communication.chunk_s)
            assert chunk is not None, "something is queued"
            of_way.current = queue[chunk.position]
            of_way.queue.remove(of_way.current)
            self._begin(of_way.current, now_s)
        elif of_way.queue:
            self._held[of_way] = None

    # Turns of those that share a link beside their own ways

    def _is_held(self, flow: Flow) -> bool:
        if flow.transfer.traffic is Traffic.MESSAGE:
            return any(other.due < flow.due for other in self._entering.get(flow.entrance, ()))
        return any(self._messages[resource] for resource in flow.holding)

    def _hold(self, message: Flow, now_s: float) -> None:
        """Have sums leave the links of a message, and messages that are due later its entrance."""
        if message.entrance is not None:
            entering = self._entering.setdefault(message.entrance, {})
            entering[message] = None
            for flow in entering:
                if flow.due > message.due:
                    self._stop(flow, now_s)
        for resource in message.holding:
            self._messages[resource] += 1
            for flow in self._passing.get(resource, ()):
                if flow.transfer.traffic is not Traffic.MESSAGE and resource in flow.holding:
                    self._stop(flow, now_s)

    def _release(self, message: Flow, now_s: float) -> None:
        if message.entrance is not None:
            del self._entering[message.entrance][message]
        self._messages.subtract(message.holding)
        for resource in message.holding:
            for flow in self._passing.get(resource, ()):
                if flow.stop and not self._is_held(flow):
                    self._advance(flow, now_s)
                    flow.stop = 0.0
                    self._schedule(flow)
                    is_message = flow.transfer.traffic is Traffic.MESSAGE
                    if not is_message and any(other.transfer < flow.transfer for other in self._ways[flow.way].queue):
                        self._interrupt(flow, now_s)
        held, self._held = self._held, {}
        for of_way in sorted(held, key=lambda of_way: min(flow.due for flow in of_way.queue)):
            self._next(of_way, now_s)

    def _begin(self, flow: Flow, now_s: float) -> None:
        if flow.begun_s is None:
            flow.begun_s = now_s
        flow.since_s, flow.rate, flow.resumed, flow.stop = now_s, 0.0, flow.left, 0.0
        if self.communication.holds and flow.transfer.traffic is Traffic.MESSAGE:
            self._hold(flow, now_s)
        for resource, _ in flow.path.resources:
            self._passing.setdefault(resource, {})[flow] = None
        self._share(flow.path.resources, now_s)

    def _interrupt(self, flow: Flow, now_s: float) -> None:
        """Have a flow leave its links at the end of the chunk that is on its way."""
        self._advance(flow, now_s)
        size = chunk_bytes(flow.rate, self.communication.chunk_s)
        num_chunks = math.floor((flow.resumed - flow.left) / size) + 1
        stop = flow.resumed - num_chunks * size
        if stop > flow.stop:
            flow.stop = stop
            self._schedule(flow)

    def _stop(self, flow: Flow, now_s: float) -> None:
        """Have a flow leave its links when what the kernel holds of it has left."""
        self._advance(flow, now_s)
        stop = max(flow.left - flow.rate * HOLD_S, 0.0)
        if stop > flow.stop:
            flow.stop = stop
            self._schedule(flow)

    @staticmethod
    def _advance(flow: Flow, now_s: float) -> None:
        flow.left = max(flow.left - flow.rate * (now_s - flow.since_s), flow.stop)
        flow.since_s = now_s

    def _schedule(self, flow: Flow) -> None:
        flow.epoch += 1
        self._push(flow.since_s + (flow.left - flow.stop) / flow.rate, flow.number, flow.epoch)

    def _alone(self, resources: Sequence[tuple[str, float]]) -> bool:
        """Return whether the flows on these resources share none with another."""
        passing = self._passing
        for resource, _ in resources:
            flows = passing[resource]
            if len(flows) > 1:
                return False
            for flow in flows:
                for other, _ in flow.path.resources:
                    if len(passing[other]) > 1:
                        return False
        return True

    def _share(self, resources: Sequence[tuple[str, float]], now_s: float) -> None:
        """Give new rates to the flows that share these resources, or share others with such flows."""
        if self._alone(resources):
            for resource, _ in resources:
                for flow in self._passing[resource]:
                    self._set_rate(flow, flow.path.bandwidth_bytes_per_s, now_s)
            return
        flows: dict[Flow, None] = {}
        seen: set[str] = set()
        reached = [resource for resource, _ in resources]
        while reached:
            resource = reached.pop()
            if resource in seen:
                continue
            seen.add(resource)
            for flow in self._passing.get(resource, ()):
                if flow not in flows:
                    flows[flow] = None
                    reached += (other for other, _ in flow.path.resources)
        for flow, rate in _max_min(flows).items():
            self._set_rate(flow, rate, now_s)

    def _set_rate(self, flow: Flow, rate: float, now_s: float) -> None:
        if rate != flow.rate:
            self._advance(flow, now_s)
            flow.rate = rate
            self._schedule(flow)


def _max_min(flows: Iterable[Flow]) -> dict[Flow, float]:
    """Return the rates at which no flow can be faster but at the cost of one that is no faster."""
    rates: dict[Flow, float] = {}
    left = dict.fromkeys(flows)
    limits: dict[str, float] = {}
    for flow in left:
        for resource, bandwidth in flow.path.resources:
            limits[resource] = max(limits.get(resource, 0.0), bandwidth)
    free = dict(limits)
    while left:
        uses: dict[str, float] = {}
        for flow in left:
            for resource, bandwidth in flow.path.resources:
                uses[resource] = uses.get(resource, 0.0) + _times(limits[resource], bandwidth)
        rate, bottleneck = min((max(free[resource], 0.0) / use, resource) for resource, use in uses.items())
        for flow in [flow for flow in left if any(resource == bottleneck for resource, _ in flow.path.resources)]:
            rates[flow] = rate
            del left[flow]
            for resource, bandwidth in flow.path.resources:
                free[resource] -= rate * _times(limits[resource], bandwidth)
    return rates


def _times(limit: float, bandwidth: float) -> float:
    """Return how often a path passes a resource, whose limit it divides by this (`ClusterTopology.path`)."""
    return 1.0 if bandwidth == limit else limit / bandwidth
