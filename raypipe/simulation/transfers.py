"""The messages and sums of an order as flows, where sums of gradients take time on links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

from raypipe.artifacts.topology import Path
from raypipe.communication.policy import Traffic
from raypipe.communication.ways import ways
from raypipe.schedules.collectives import Collective
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost
from raypipe.simulation.flows import Network

OnArrival = Callable[[int, float, float], None]
"""Gets a message, its departure and its arrival in seconds."""
OnEnd = Callable[[int, float], None]
"""Gets a collective and the second of its end."""


class Passed(NamedTuple):
    """What one member of a sum passed on to the next, in one phase of the ring."""

    collective: int
    source: int
    target: int
    num_bytes: float
    departure_s: float
    arrival_s: float


@dataclass
class _Sum:
    # A ring has two phases, in each of which every member passes (r - 1) / r of the bytes on to the next one.
    collective: Collective
    hops: list[tuple[int, int, Path]]
    hop_bytes: float
    latency_s: float
    deadlines: dict[int, int]
    num_started: int = 0
    left: int = 0
    phase: int = 0


class OrderTransfers:
    """The messages and sums of one simulation as flows of a network."""

    def __init__(
        self, order: CompiledOrder, cost: Cost, sums: dict[int, _Sum], push: Callable[[float, int, int], None], free_s: Mapping[str, float]
    ) -> None:
        self.order = order
        self.cost = cost
        self.passed: list[Passed] = []
        self._sums = sums
        self._network = Network(cost.communication, push)
        self.fire = self._network.fire
        self._free_s = free_s
        pairs = {(source, target) for source, target, _ in order.transfers}
        pairs |= {(source, target) for total in sums.values() for source, target, _ in total.hops}
        names: dict[int, dict[int, list[str]]] = {}
        for source, target in sorted(pairs):
            names.setdefault(source, {})[target] = [resource for resource, _ in cost.path(source, target).resources]
        together = cost.communication.across_peers
        self._ways = {source: ways(of_peers) if together else {peer: peer for peer in of_peers} for source, of_peers in names.items()}

    @classmethod
    def of(cls, order: CompiledOrder, cost: Cost, push: Callable[[float, int, int], None], free_s: Mapping[str, float]) -> Self | None:
        """Return the transfers of an order, or `None` if no sum takes time on a link, so that messages alone pass.

        `free_s` says when messages that left while no flow was under way leave each link.
        """
        sums: dict[int, _Sum] = {}
        device_of = [program.device for program in order.programs]
        for number, collective in enumerate(order.collectives):
            if cost.takes_latency_alone(collective) or not cost.collective_bytes(collective):
                continue
            members = collective.devices
            hops = [(source, target, cost.path(source, target)) for source, target in zip(members, members[1:] + members[:1], strict=True)]
            if all(path.resources for _, _, path in hops):
                latency_s = 2 * (len(members) - 1) * max(path.latency_s for _, _, path in hops)
                hop_bytes = cost.collective_bytes(collective) * (len(members) - 1) / len(members)
                sums[number] = _Sum(collective, hops, hop_bytes, latency_s, {})
        for (program, number), position in order.deadlines.items() if sums else ():
            if number in sums:
                sums[number].deadlines[device_of[program]] = position
        return cls(order, cost, sums, push, free_s) if sums else None

    @property
    def take_messages(self) -> bool:
        """Whether a message that leaves now may share a link with a flow; in turns, none does while no flow is under way."""
        return self._network.num_under_way > 0 or not self.cost.communication.holds

    def send(self, number: int, now_s: float, on_arrival: OnArrival) -> None:
        """Send a message."""
        source, target, message = self.order.transfers[self.order.transfer_of[number]]
        path = self.cost.path(source, target)

        def end(begun_s: float, end_s: float) -> None:
            on_arrival(number, begun_s, end_s + path.latency_s)

        way = (source, self._ways[source][target])
        num_bytes = self.cost.message_bytes(message)
        self._network.submit(way, path, num_bytes, now_s, traffic=Traffic.MESSAGE, deadline=0, on_end=end)

    def start(self, program: int, number: int, now_s: float, on_end: OnEnd) -> bool:
        """Take part in a sum; return whether it takes time on links, and so ends by `on_end`."""
        total = self._sums.get(number)
        if total is None:
            return False
        total.num_started += 1
        members = len(total.hops)
        device = self.order.programs[program].device
        # The slices of two members are ready when they start, those of more when their neighbors have.
        if members == 2:
            total.left += 1
            self._pass(number, total, total.collective.devices.index(device), now_s, on_end)
        elif total.num_started == members:
            self._phase(number, total, now_s, on_end)
        return True

    def _phase(self, number: int, total: _Sum, now_s: float, on_end: OnEnd) -> None:
        total.left = len(total.hops)
        for hop in range(len(total.hops)):
            self._pass(number, total, hop, now_s, on_end)

    def _pass(self, number: int, total: _Sum, hop: int, now_s: float, on_end: OnEnd) -> None:
        source, target, path = total.hops[hop]
        self._network.submit(
            (source, self._ways[source][target]),
            path,
            total.hop_bytes,
            now_s,
            traffic=Traffic.SUM,
            deadline=total.deadlines.get(source, 0),
            on_end=partial(self._passed, number, total, hop, on_end),
            not_before_s=max((self._free_s.get(resource, 0.0) for resource, _ in path.resources), default=0.0),
        )

    def _passed(self, number: int, total: _Sum, hop: int, on_end: OnEnd, begun_s: float, now_s: float) -> None:
        source, target, path = total.hops[hop]
        self.passed.append(Passed(number, source, target, total.hop_bytes, begun_s, now_s + path.latency_s))
        total.left -= 1
        if total.left or total.num_started < len(total.hops):
            return
        total.phase += 1
        if total.phase == 1:
            self._phase(number, total, now_s, on_end)
        else:
            on_end(number, now_s + total.latency_s)
