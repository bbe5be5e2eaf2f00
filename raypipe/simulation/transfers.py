"""The messages and sums of an order as flows, where sums of gradients take time on links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Self

from raypipe.artifacts.topology import Path
from raypipe.communication.patterns import Hop
from raypipe.communication.policy import Traffic
from raypipe.communication.shards import gather_needs
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
    """What one member of a sum passed on to another one, as shares or as totals."""

    collective: int
    source: int
    target: int
    num_bytes: float
    departure_s: float
    arrival_s: float


class _Hop(NamedTuple):
    # `needs` are the devices whose numbers pass.
    source: int
    target: int
    path: Path
    num_bytes: float
    needs: frozenset[int]


@dataclass
class _Sum:
    # First all shares pass, then all totals, if there are both and they go along no tree; of `phases`, those that have not begun.
    collective: Collective
    phases: list[list[_Hop]]
    latency_s: float
    deadlines: dict[int, int]
    started: set[int] = field(default_factory=set)
    left: int = 0

    @property
    def hops(self) -> Iterator[_Hop]:
        return chain(*self.phases)


def _sum_of(collective: Collective, cost: Cost) -> _Sum:
    members, num_bytes = collective.devices, cost.collective_bytes(collective)
    shares, totals = cost.loads(collective)
    pattern = cost.pattern(collective)

    def hops(loads: Mapping[Hop, float], needed: Callable[[Hop], Iterable[int]]) -> list[_Hop]:
        found: list[_Hop] = []
        for hop, part in loads.items():
            source, target = members[hop.source], members[hop.target]
            of_devices = frozenset(members[position] for position in needed(hop))
            found.append(_Hop(source, target, cost.link(source, target), part * num_bytes, of_devices))
        return found

    phases = [hops(shares, pattern.needs.__getitem__)] if shares else []
    if shares and totals:
        from_all = hops(totals, lambda _: range(len(members)))
        phases = [[*phases[0], *from_all]] if pattern.edges else [*phases, from_all]
    elif totals:
        phases.append(hops(totals, gather_needs(pattern, cost.owners(collective)).__getitem__))
    return _Sum(collective, phases, cost.sum_latency_s(collective), {})


def _port(source: int, of_way: Mapping[int, int], cost: Cost) -> str | None:
    # Where all peers on other nodes are behind one bottleneck, that one is the port.
    wires = {way for peer, way in of_way.items() if cost.node(peer) != cost.node(source)}
    return f"the port of {source}" if len(wires) > 1 else None


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
        pairs |= {(hop.source, hop.target) for total in sums.values() for hop in total.hops}
        names: dict[int, dict[int, list[str]]] = {}
        for source, target in sorted(pairs):
            names.setdefault(source, {})[target] = [resource for resource, _ in cost.path(source, target).resources]
        together = cost.communication.across_peers
        self._ways = {source: ways(of_peers) if together else {peer: peer for peer in of_peers} for source, of_peers in names.items()}
        self._ports = {source: _port(source, of_way, cost) for source, of_way in self._ways.items() if together}
        self._paths: dict[tuple[int, int], Path] = {}
        self._left_s: dict[str, float] = {}
        """When messages out of a port, which left while no flow was under way, have passed their wires."""

    @classmethod
    def of(cls, order: CompiledOrder, cost: Cost, push: Callable[[float, int, int], None], free_s: Mapping[str, float]) -> Self | None:
        """Return the transfers of an order, or `None` if no sum takes time on a link, so that messages alone pass.

        `free_s` says when messages that left while no flow was under way leave each link.
        """
        sums: dict[int, _Sum] = {}
        for number, collective in enumerate(order.collectives):
            if len(collective.devices) == 1 or cost.takes_latency_alone(collective) or not cost.collective_bytes(collective):
                continue
            total = _sum_of(collective, cost)
            if any(hop.path.resources for hop in total.hops):
                sums[number] = total
        for (program, number), position in order.deadlines.items() if sums else ():
            if number in sums:
                sums[number].deadlines[order.devices[program]] = position
        return cls(order, cost, sums, push, free_s) if sums else None

    @property
    def take_messages(self) -> bool:
        """Whether a message that leaves now may share a link with a flow; in turns, none does while no flow is under way."""
        return self._network.num_under_way > 0 or not self.cost.communication.holds

    def left(self, number: int, end_s: float) -> None:
        """Note that a message that leaves while no flow is under way has passed its wires at that time."""
        source, target, _ = self.order.transfers[self.order.transfer_of[number]]
        if port := self._port_to(source, target):
            self._left_s[port] = max(self._left_s.get(port, 0.0), end_s)

    def send(self, number: int, now_s: float, on_arrival: OnArrival) -> None:
        """Send a message."""
        source, target, message = self.order.transfers[self.order.transfer_of[number]]
        path = self.cost.path(source, target)

        def end(begun_s: float, end_s: float) -> None:
            on_arrival(number, begun_s, end_s + path.latency_s)

        self._network.submit(
            (source, self._ways[source][target]),
            self._out_of_port(source, target, path),
            self.cost.message_bytes(message),
            now_s,
            traffic=Traffic.MESSAGE,
            deadline=0,
            on_end=end,
            not_before_s=self._behind_messages_s(path),
        )

    def _port_to(self, source: int, target: int) -> str | None:
        """Return what all that leaves a device for other nodes passes, if it leaves over several wires of their own."""
        return self._ports.get(source) if self.cost.node(source) != self.cost.node(target) else None

    def _out_of_port(self, source: int, target: int, path: Path) -> Path:
        """Return a path with the port that it leaves by: messages on wires of their own pass at once, sums make way for them."""
        known = self._paths.get((source, target))
        if known is None:
            port = self._port_to(source, target)
            known = path if port is None else replace(path, resources=(*path.resources, (port, math.inf)))
            self._paths[source, target] = known
        return known

    def _behind_messages_s(self, path: Path) -> float:
        """Return when the messages that left while no flow was under way have passed."""
        return max((self._free_s.get(resource, 0.0) for resource, _ in path.resources), default=0.0)

    def start(self, program: int, number: int, now_s: float, on_end: OnEnd) -> bool:
        """Take part in a sum; return whether it takes time on links, and so ends by `on_end`."""
        total = self._sums.get(number)
        if total is None:
            return False
        total.started.add(self.order.devices[program])
        self._go_on(number, total, now_s, on_end)
        return True

    def _go_on(self, number: int, total: _Sum, now_s: float, on_end: OnEnd) -> None:
        """Pass what those have that started: a hop of shares waits for all whose numbers it carries, totals for all shares."""
        if not total.phases:
            return
        waiting = total.phases[0]
        ready = [hop for hop in waiting if hop.needs <= total.started]
        total.phases[0] = [hop for hop in waiting if hop not in ready]
        total.left += len(ready)
        for hop in ready:
            self._pass(number, total, hop, now_s, on_end)

    def _pass(self, number: int, total: _Sum, hop: _Hop, now_s: float, on_end: OnEnd) -> None:
        if not hop.path.resources:
            self._passed(number, total, hop, on_end, now_s, now_s)
            return
        # To several nodes, one device's numbers go one after the other, also where each has a wire of its own (`ConnectOrder.ways`).
        port = self._port_to(hop.source, hop.target)
        self._network.submit(
            (hop.source, port or self._ways[hop.source][hop.target]),
            self._out_of_port(hop.source, hop.target, hop.path),
            hop.num_bytes,
            now_s,
            traffic=Traffic.SUM,
            deadline=total.deadlines.get(hop.source, 0),
            on_end=partial(self._passed, number, total, hop, on_end),
            not_before_s=max(self._behind_messages_s(hop.path), self._left_s.get(port, 0.0) if port else 0.0),
        )

    def _passed(self, number: int, total: _Sum, hop: _Hop, on_end: OnEnd, begun_s: float, now_s: float) -> None:
        self.passed.append(Passed(number, hop.source, hop.target, hop.num_bytes, begun_s, now_s + hop.path.latency_s))
        total.left -= 1
        if total.left or total.phases[0]:
            return
        del total.phases[0]
        if total.phases:
            self._go_on(number, total, now_s, on_end)
        else:
            on_end(number, now_s + total.latency_s)
