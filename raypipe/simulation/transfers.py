"""The messages and sums of an order as flows, where they share links with what other devices send."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Self

from raypipe.artifacts.topology import Path
from raypipe.communication.patterns import Hop
from raypipe.communication.policy import Traffic
from raypipe.communication.shards import gather_needs
from raypipe.communication.ways import entrances, ways
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
    # Along one tree chunks go to some neighbors while another one's link is busy; along several, the order of the slices prevents that.
    collective: Collective
    phases: list[list[_Hop]]
    latency_s: float
    deadlines: dict[int, int]
    fills_ports: bool
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
        phases = [[*phases[0], *from_all]] if pattern.trees else [*phases, from_all]
    elif totals:
        phases.append(hops(totals, gather_needs(pattern, cost.owners(collective)).__getitem__))
    return _Sum(collective, phases, cost.sum_latency_s(collective), {}, len(pattern.trees) == 1)


def _ways(pairs: Iterable[tuple[int, int]], cost: Cost) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return the number of the way of each pair's messages, and of its sums; those of one device with the same one take turns.

    Sums leave by a port one after the other. The messages of its wires begin beside each other, and sums make way for them.
    """
    peers: dict[int, list[int]] = {}
    for source, target in pairs:
        peers.setdefault(source, []).append(target)
    of_messages: dict[tuple[int, int], int] = {}
    of_sums: dict[tuple[int, int], int] = {}
    for source, targets in peers.items():
        paths = {target: cost.path(source, target) for target in targets}
        if not cost.communication.across_peers:
            of_messages |= {(source, target): target for target in targets}
            of_sums |= {(source, target): target for target in targets}
            continue
        wires = ways(paths, by_port=False)
        outlets = ways(paths)
        ports = {outlets[target] for target, path in paths.items() if path.port is not None}
        for target in targets:
            # Both by their first peer. Without a port they have the same way.
            of_messages[source, target] = min(other for other in targets if wires[other] == wires[target])
            first = min(other for other in targets if outlets[other] == outlets[target])
            of_sums[source, target] = -1 - first if outlets[target] in ports else first
    return of_messages, of_sums


def _entrances(pairs: Iterable[tuple[int, int]], cost: Cost) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield for each pair whose messages take turns the entrance that they pass: the receiver, and the number of the way into it."""
    senders: dict[int, list[int]] = {}
    for source, target in pairs:
        senders.setdefault(target, []).append(source)
    for target, sources in senders.items():
        into = entrances({source: cost.path(source, target) for source in sources}) if len(sources) > 1 else {}
        yield from (((source, target), (target, number)) for source, number in into.items())


def _do_messages_meet(order: CompiledOrder, cost: Cost) -> bool:
    """Return whether messages of several devices pass one link, such as the port of their receiver, or of one device by several ways.

    Where a device stands for several, its messages reserve their links; so do those that block their senders.
    """
    if cost.transfers_block or cost.merged is not None:
        return False
    pairs = sorted({(source, target) for source, target, message in order.transfers if cost.message_bytes(message)})
    passing: dict[str, list[tuple[int, int]]] = {}
    for source, target in pairs:
        for name, _ in cost.path(source, target).resources:
            passing.setdefault(name, []).append((source, target))
    if any(len({source for source, _ in of_link}) > 1 for of_link in passing.values()):
        return True
    of_messages, _ = _ways(pairs, cost)
    return any(len({of_messages[pair] for pair in of_link}) > 1 for of_link in passing.values())


class OrderTransfers:
    """The messages and sums of one simulation as flows of a network."""

    def __init__(
        self,
        order: CompiledOrder,
        cost: Cost,
        sums: dict[int, _Sum],
        push: Callable[[float, int, int], None],
        free_s: Mapping[str, float],
        *,
        messages_meet: bool,
    ) -> None:
        self.order = order
        self.cost = cost
        self._messages_meet = messages_meet
        self.passed: list[Passed] = []
        self._sums = sums
        self._network = Network(cost.communication, push)
        self.fire = self._network.fire
        self._free_s = free_s
        pairs = {(source, target) for source, target, _ in order.transfers}
        pairs |= {(hop.source, hop.target) for total in sums.values() for hop in total.hops}
        self._message_ways, self._sum_ways = _ways(sorted(pairs), cost)
        self._paths: dict[tuple[int, int], Path] = {}
        self._port_rates: dict[tuple[int, str], float] = {}
        """Of each device and port, the bandwidth of the quickest path."""
        for source, target in pairs:
            if port := self._port_to(source, target):
                known = self._port_rates.get((source, port), 0.0)
                self._port_rates[source, port] = max(known, cost.path(source, target).bandwidth_bytes_per_s)
        self._holding = dict(self._links_held())
        self._entrances = dict(_entrances(self._message_ways, cost)) if cost.communication.holds else {}
        self._left_s: dict[str, float] = {}
        """When messages out of a port, which left while no flow was under way, have passed their wires."""

    @classmethod
    def of(cls, order: CompiledOrder, cost: Cost, push: Callable[[float, int, int], None], free_s: Mapping[str, float]) -> Self | None:
        """Return the transfers of an order, or `None` if neither a sum takes time on a link nor messages of several devices meet.

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
        messages_meet = _do_messages_meet(order, cost)
        return cls(order, cost, sums, push, free_s, messages_meet=messages_meet) if sums or messages_meet else None

    @property
    def takes_messages(self) -> bool:
        """Whether a message that leaves now may share a link with a flow."""
        return self._messages_meet or self._network.num_under_way > 0 or not self.cost.communication.holds

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
            (source, self._message_ways[source, target]),
            self._out_of_port(source, target, path),
            self.cost.message_bytes(message),
            now_s,
            traffic=Traffic.MESSAGE,
            deadline=0,
            on_end=end,
            not_before_s=self._behind_messages_s(path),
            holding=self._holding[source, target],
            entrance=self._entrances.get((source, target)),
            due=self.order.due[number],
        )

    def _links_held(self) -> Iterator[tuple[tuple[int, int], tuple[str, ...]]]:
        """Yield for each pair the links on which its messages and sums take turns: not the sender's port if the receiver is slow."""
        ways_on: dict[tuple[int, str], set[int]] = {}
        for (source, target), way in self._message_ways.items():
            for name in self.cost.path(source, target).bottlenecks:
                ways_on.setdefault((source, name), set()).add(way)
        for source, target in self._message_ways:
            path = self._out_of_port(source, target, self.cost.path(source, target))
            rates = {name: self._port_rates.get((source, name), rate) for name, rate in path.resources}
            has_room = {name for name, rate in rates.items() if rate >= 2 * path.bandwidth_bytes_per_s and len(ways_on[source, name]) > 1}
            yield (source, target), tuple(name for name in rates if name not in has_room)

    def _port_to(self, source: int, target: int) -> str | None:
        """Return what a device sends by to all nodes to which no link is stated."""
        return self.cost.path(source, target).port if self.cost.communication.across_peers else None

    def _out_of_port(self, source: int, target: int, path: Path) -> Path:
        """Return a path with the port that it leaves by, so that sums make way for messages there."""
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
        # What a device sends by a port goes one after the other (`ConnectOrder.ways`), but chunks are short: while one of them passes a
        # slow link, others fill the port. The port is a link then, which all that it carries shares, as what goes by several ways does.
        port = self._port_to(hop.source, hop.target)
        path, way = self._out_of_port(hop.source, hop.target, hop.path), self._sum_ways[hop.source, hop.target]
        turns: Hashable = (hop.source, way)
        if port:
            turns = (hop.source, way, hop.target) if total.fills_ports else turns
            path = replace(path, resources=(*path.resources, (f"{port}, device {hop.source}", self._port_rates[hop.source, port])))
        self._network.submit(
            turns,
            path,
            hop.num_bytes,
            now_s,
            traffic=Traffic.SUM,
            deadline=total.deadlines.get(hop.source, 0),
            on_end=partial(self._passed, number, total, hop, on_end),
            not_before_s=max(self._behind_messages_s(hop.path), self._left_s.get(port, 0.0) if port else 0.0),
            holding=self._holding[hop.source, hop.target],
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
