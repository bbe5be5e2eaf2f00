"""The pattern of a sum that is quickest on some links.

A sum's time is that of all its shares, then that of all its totals, and the latencies of the longest way of a slice. In each phase the
busiest link decides, or the busiest member: what a member sends to others of its node goes one after the other, and so does what it
sends to other nodes by one way, such as a port. Members of one node that do the latter use its wires in the same order, one wire at a time.

The tree of the best links needs no bad one, over which a circle may have to close. There, totals of some slices pass a link one way while
shares of others pass it the other way, and all members pass one slice after the other, in chunks, of which others fill a port while one
passes a slow link. The busiest link decides: a leaf sends, and takes, the bytes of the sum once. Where other links are as busy, shares wait
for each other: each link for three chunks, or in a small sum, whose slices are not cut, for half of the seconds by which two phases over
the other links would take longer. Members of whom some cannot communicate, both ways, have no other way; where links do not join them all,
they cannot sum at all. Where links differ, each slice may also have a tree of its own (`raypipe.simulation.packing`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from raypipe.communication.paths import LinkPath, PathOf
from raypipe.communication.patterns import MOST_MESHED, Hop, Pattern, direct, ring, tree
from raypipe.communication.policy import CHUNK_S
from raypipe.communication.shards import Loads, gather_loads, reduce_loads
from raypipe.communication.ways import ways

LEAST_GAIN = 1.05
"""How much quicker than the ring in the order of the members another pattern must be for a run to begin with it."""
_WAITING_CHUNKS = 3
"""For which each link waits in a sum along a tree, in the mean."""
_ALL_ORDERS = 5
"""Of so many members or groups all orders are tried; of more, for each the one that goes on over the quickest link."""


NEVER = (math.inf, 0.0)
"""The `SumTime` of members whom links do not join."""


class SumTime(NamedTuple):
    """Seconds of a sum alone on its links: latencies, and seconds for each byte that a member contributes.

    Attributes:
        waiting_s_per_byte: Seconds for which no link decides, but shares wait for each other.
        waiting_s: The most that these are.
    """

    latency_s: float
    s_per_byte: float
    waiting_s_per_byte: float = 0.0
    waiting_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a sum of so many bytes a member."""
        return self.late_s(num_bytes) + (num_bytes * self.s_per_byte if self.s_per_byte else 0.0)

    def late_s(self, num_bytes: float) -> float:
        """Return the seconds by which a sum of so many bytes takes longer than its busiest link."""
        return self.latency_s + min(num_bytes * self.waiting_s_per_byte, self.waiting_s)


def sum_time(pattern: Pattern, nodes: Sequence[Hashable], path: PathOf) -> SumTime:
    """Return the seconds of a pattern; `nodes` are those of the members."""
    if pattern.is_ring:
        order = [member for (member,) in pattern.groups]
        return ring_time([nodes[member] for member in order], lambda source, target: path(order[source], order[target]))
    return SumTime(_latency_s(pattern, path), *_phases_s(pattern, pattern.loads, nodes, path, pipelined=True))


def reduce_time(pattern: Pattern, owners: tuple[int, ...], nodes: Sequence[Hashable], path: PathOf) -> SumTime:
    """Return the seconds of a sum of which each of some members gets a part, each as much."""
    return SumTime(_latencies_s(pattern, path)[0], *_phases_s(pattern, reduce_loads(pattern, owners), nodes, path, pipelined=False))


def gather_time(pattern: Pattern, owners: tuple[int, ...], nodes: Sequence[Hashable], path: PathOf) -> SumTime:
    """Return the seconds in which each of some members sends its part to all, each as much."""
    return SumTime(_latencies_s(pattern, path)[1], _phase_s(gather_loads(pattern, owners), nodes, path))


def ring_time(nodes: Sequence[Hashable], path: PathOf) -> SumTime:
    """Return `sum_time` of the ring in the order of the members, in less time."""
    num_members = len(nodes)
    hops = [Hop(member, (member + 1) % num_members) for member in range(num_members)]
    if any(path(*hop).latency_s == math.inf for hop in hops):
        return SumTime(*NEVER)
    phase_s = _phase_s(dict.fromkeys(hops, (num_members - 1) / num_members), nodes, path)
    latencies_s = [path(*hop).latency_s for hop in hops]
    if num_members > MOST_MESHED:
        return SumTime(2 * (num_members - 1) * max(latencies_s), 2 * phase_s)
    # Each slice goes twice around the circle, but for two hops in a row.
    left_out_s = min(one + other for one, other in zip(latencies_s, [*latencies_s[1:], *latencies_s[:1]], strict=True))
    return SumTime(2 * math.fsum(latencies_s) - left_out_s, 2 * phase_s)


def _phases_s(
    pattern: Pattern, loads: tuple[Loads, Loads], nodes: Sequence[Hashable], path: PathOf, *, pipelined: bool
) -> tuple[float, float, float]:
    """Return for each byte the seconds of shares and totals, those for which shares wait for each other, and the most that these are."""
    if not pattern.trees:
        return math.fsum(_phase_s(of_phase, nodes, path) for of_phase in loads), 0.0, 0.0
    shares, totals = loads
    both = {hop: shares.get(hop, 0.0) + totals.get(hop, 0.0) for hop in {**shares, **totals}}
    fills_ports = len(pattern.trees) == 1
    busiest_s = _phase_s(both, nodes, path, fills_ports=fills_ports)
    busiest = max(both, key=lambda hop: both[hop] / path(*hop).bandwidth_bytes_per_s)
    others = ({hop: part for hop, part in of_phase.items() if {*hop} != {*busiest}} for of_phase in loads)
    waiting_s = max(math.fsum(_phase_s(of_phase, nodes, path, fills_ports=fills_ports) for of_phase in others) - busiest_s, 0.0) / 2
    if not pipelined:
        return busiest_s, waiting_s, math.inf
    limited = {edge for edge in pattern.edges if any(path(*hop).resources for hop in (edge, edge[::-1]))}
    most = max(len(limited.intersection(tree.edges)) for tree in pattern.trees)
    return busiest_s, waiting_s, _WAITING_CHUNKS * CHUNK_S * most


def _phase_s(loads: dict[Hop, float], nodes: Sequence[Hashable], path: PathOf, *, fills_ports: bool = False) -> float:
    """Return the seconds for each byte of what passes at once; `fills_ports` says that a port is never idle for a slow link behind it."""
    sent: dict[int, dict[int, tuple[float, float]]] = {}  # By source and target, the part and the bandwidth.
    for (source, target), part in loads.items():
        sent.setdefault(source, {})[target] = part, path(source, target).bandwidth_bytes_per_s
    senders_s = list(_ports_s(sent, path))
    # Members of one node that send to several others by one way take these in the same order: they share each wire in turn.
    in_turn: dict[tuple[Hashable, Hashable], str] = {}
    for source, to in sent.items():
        for targets in _by_way(source, to, nodes, path) if len(to) > 1 else [list(to)]:
            if fills_ports:
                senders_s.append(math.fsum(to[target][0] for target in targets) / max(to[target][1] for target in targets))
                continue
            senders_s.append(math.fsum(part / bandwidth for part, bandwidth in map(to.__getitem__, targets)))
            if len({nodes[target] for target in targets} - {nodes[source]}) > 1:
                name = min(name for target in targets for name in path(source, target).bottlenecks)
                in_turn |= {(nodes[source], nodes[target]): name for target in targets}
    nodes_s = dict.fromkeys(((one, name) for (one, _), name in in_turn.items()), 0.0)
    for between, of_pair in _by_nodes(loads, nodes, in_turn).items():
        nodes_s[between[0], in_turn[between]] += _busiest_s(of_pair, path)
    return max([_busiest_s(loads, path), *senders_s, *nodes_s.values()])


def _ports_s(sent: dict[int, dict[int, tuple[float, float]]], path: PathOf) -> Iterator[float]:
    """Yield the seconds for each byte of what members send by the ports of their nodes, which are as quick as the quickest path."""
    for source, to in sent.items():
        by_port = [of_target for target, of_target in to.items() if path(source, target).port is not None]
        if len(by_port) > 1:
            yield math.fsum(part for part, _ in by_port) / max(bandwidth for _, bandwidth in by_port)


def _busiest_s(loads: dict[Hop, float], path: PathOf) -> float:
    """Return the seconds for each byte of the busiest link."""
    links: dict[str, float] = {}
    for hop, part in loads.items():
        for name, bandwidth in path(*hop).resources:
            links[name] = links.get(name, 0.0) + part / bandwidth
    return max(links.values(), default=0.0)


def _by_nodes(
    loads: dict[Hop, float], nodes: Sequence[Hashable], pairs: Collection[tuple[Hashable, Hashable]]
) -> dict[tuple[Hashable, Hashable], dict[Hop, float]]:
    """Return what passes between some pairs of different nodes, by pair."""
    found: dict[tuple[Hashable, Hashable], dict[Hop, float]] = {}
    for hop, part in loads.items() if pairs else ():
        between = nodes[hop.source], nodes[hop.target]
        if between in pairs and between[0] != between[1]:
            found.setdefault(between, {})[hop] = part
    return found


def _by_way(source: int, targets: Iterable[int], nodes: Sequence[Hashable], path: PathOf) -> Iterable[list[int]]:
    """Return the members to whom one sends, those of its node together and others by the way out of the node."""
    found: dict[int | None, list[int]] = {}
    outside = {target: path(source, target) for target in targets if nodes[target] != nodes[source]}
    way_of = ways(outside) if len(outside) > 1 else dict.fromkeys(outside, 0)
    for target in targets:
        found.setdefault(way_of.get(target), []).append(target)
    return found.values()


def _latency_s(pattern: Pattern, path: PathOf) -> float:
    num_members = pattern.num_members
    if num_members > MOST_MESHED and not pattern.trees:
        return 2 * (num_members - 1) * max(path(*hop).latency_s for hop in pattern.loads[0])
    if pattern.trees:
        return 2 * _width_s(pattern, path)
    longest_s = 0.0
    for route in pattern.routes:
        shared_s = [0.0] * num_members
        for source, target in route.shares:
            shared_s[target] = max(shared_s[target], shared_s[source] + path(source, target).latency_s)
        total_s = {route.owner: shared_s[route.owner]}
        for source, target in route.totals:
            total_s[target] = total_s[source] + path(source, target).latency_s
        longest_s = max(longest_s, *total_s.values())
    return longest_s


def _latencies_s(pattern: Pattern, path: PathOf) -> tuple[float, float]:
    """Return the latencies on the longest way of shares, and of totals."""
    if pattern.trees or pattern.num_members > MOST_MESHED:
        half_s = _latency_s(pattern, path) / 2
        return half_s, half_s
    longest_s = [0.0, 0.0]
    for route in pattern.routes:
        shared_s, total_s = [0.0] * pattern.num_members, [0.0] * pattern.num_members
        for source, target in route.shares:
            shared_s[target] = max(shared_s[target], shared_s[source] + path(source, target).latency_s)
        for source, target in route.totals:
            total_s[target] = total_s[source] + path(source, target).latency_s
        longest_s = [max(longest_s[0], *shared_s), max(longest_s[1], *total_s)]
    return longest_s[0], longest_s[1]


def _width_s(pattern: Pattern, path: PathOf) -> float:
    """Return the latencies of the longest way between two members of a tree, in the slower direction."""
    width_s = 0.0
    for each in pattern.trees:
        longest_s = [0.0] * pattern.num_members
        for target, source in reversed(each.outwards(0)):
            hop_s = longest_s[source] + max(path(source, target).latency_s, path(target, source).latency_s)
            width_s = max(width_s, longest_s[target] + hop_s)
            longest_s[target] = max(longest_s[target], hop_s)
    return width_s


def exchange_s(num_members: int, path: PathOf) -> float:
    """Return the seconds in which small numbers go from each member to all: latencies alone, infinite where links do not join them."""
    if are_meshed(num_members, path):
        if num_members > MOST_MESHED:  # around the ring
            return (num_members - 1) * max(path(at, (at + 1) % num_members).latency_s for at in range(num_members))
        return max((path(*pair).latency_s for pair in itertools.permutations(range(num_members), 2)), default=0.0)
    pattern = joining(num_members, path)
    return math.inf if pattern is None else _width_s(pattern, path)


def joining(num_members: int, path: PathOf) -> Pattern | None:
    """Return the tree of the best links that join members both ways, `None` where they do not join all.

    The least of its bandwidths is the largest possible (a maximum spanning tree, by Prim's algorithm). Members with the best links come
    first; of equal links that of the member that sends the least so far counts, then that of the newest.
    """
    rates = [[0.0] * num_members for _ in range(num_members)]
    for one, other in itertools.combinations(range(num_members), 2):
        between = path(one, other), path(other, one)
        if all(way.latency_s < math.inf for way in between):
            rates[one][other] = rates[other][one] = min(way.bandwidth_bytes_per_s for way in between)
    newest, *others = sorted(range(num_members), key=lambda member: -max(rates[member]))
    best = dict.fromkeys(others, 0.0)
    sends = {newest: 0.0}  # By member that the tree has, the newest last, seconds for each byte to all neighbors.
    edges: list[tuple[int, int]] = []
    while best:
        for other, known in best.items():
            best[other] = max(known, rates[newest][other])
        newest = max(best, key=best.__getitem__)
        bandwidth = best.pop(newest)
        if not bandwidth:
            return None
        neighbor = min((member for member in reversed(sends) if rates[member][newest] == bandwidth), key=sends.__getitem__)
        sends[neighbor] += 1 / bandwidth
        sends[newest] = 1 / bandwidth
        edges.append((min(neighbor, newest), max(neighbor, newest)))
    return tree(sorted(edges), is_meshed=are_meshed(num_members, path))


def are_meshed(num_members: int, path: PathOf) -> bool:
    """Return whether all members can communicate as far as patterns without a tree may ask: each pair, of many those next in the ring."""
    if num_members <= MOST_MESHED:
        return all(path(*pair).latency_s < math.inf for pair in itertools.permutations(range(num_members), 2))
    return all(path(at, (at + 1) % num_members).latency_s < math.inf for at in range(num_members))


def sum_pattern(nodes: Sequence[Hashable], path: PathOf, num_bytes: float) -> Pattern:
    """Return the pattern with which a run begins: the quickest for the members' nodes, paths and bytes.

    Among equals, and unless another one is quicker by `LEAST_GAIN`, it is the ring in the order of the members.
    """
    if 2 < len(nodes) <= MOST_MESHED and are_meshed(len(nodes), path):
        return _begun_with(*_known(nodes, path), _rounded(num_bytes))
    return best_pattern(nodes, path, num_bytes)


def best_pattern(nodes: Sequence[Hashable], path: PathOf, num_bytes: float) -> Pattern:
    """Return the quickest pattern; among equals the ring in the order of the members."""
    return quickest(nodes, path, num_bytes)[0]


def quickest(nodes: Sequence[Hashable], path: PathOf, num_bytes: float) -> tuple[Pattern, SumTime]:
    """Return `best_pattern` and its time, `NEVER` where links do not join the members."""
    if 2 < len(nodes) <= MOST_MESHED and are_meshed(len(nodes), path):
        return _quickest(*_known(nodes, path), _rounded(num_bytes))
    pattern = ring(range(len(nodes))) if are_meshed(len(nodes), path) else joining(len(nodes), path)
    if pattern is None:
        return ring(range(len(nodes))), SumTime(*NEVER)
    return pattern, sum_time(pattern, nodes, path)


def _rounded(num_bytes: float) -> float:
    # Sums of about the same size have the same pattern, which need not be found again.
    return 2.0 ** round(math.log2(max(num_bytes, 1.0)))


@dataclass(frozen=True)
class _Same:
    """A path as far as it matters: resources have numbers instead of names."""

    latency_s: float
    bandwidth_bytes_per_s: float
    resources: tuple[tuple[str, float], ...]
    bottlenecks: tuple[str, ...]
    port: str | None


_Paths = tuple[tuple[_Same | None, ...], ...]


def _known(nodes: Sequence[Hashable], path: PathOf) -> tuple[tuple[int, ...], _Paths]:
    number_of: dict[str, str] = {}
    rows: list[tuple[_Same | None, ...]] = []
    for source in range(len(nodes)):
        row: list[_Same | None] = []
        for target in range(len(nodes)):
            if source == target:
                row.append(None)
                continue
            between = path(source, target)
            names = tuple(number_of.setdefault(name, str(len(number_of))) for name in between.bottlenecks)
            resources = tuple((number_of[name], bandwidth) for name, bandwidth in between.resources)
            row.append(_Same(between.latency_s, between.bandwidth_bytes_per_s, resources, names, names[-1] if between.port else None))
        rows.append(tuple(row))
    node_numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return tuple(node_numbers[node] for node in nodes), tuple(rows)


@lru_cache(maxsize=4096)
def _begun_with(nodes: tuple[int, ...], paths: _Paths, num_bytes: float) -> Pattern:
    best, time = _quickest(nodes, paths, num_bytes)
    usual_s = ring_time(nodes, _path_of(paths)).seconds(num_bytes)
    return best if usual_s > LEAST_GAIN * time.seconds(num_bytes) else ring(range(len(nodes)))


@lru_cache(maxsize=4096)
def _quickest(nodes: tuple[int, ...], paths: _Paths, num_bytes: float) -> tuple[Pattern, SumTime]:
    return min(_timed(nodes, paths), key=lambda timed: timed[1].seconds(num_bytes))


@lru_cache(maxsize=4096)
def _timed(nodes: tuple[int, ...], paths: _Paths) -> tuple[tuple[Pattern, SumTime], ...]:
    """Return the candidates with their times, without those that another one before them beats at any size."""
    path, found = _path_of(paths), list[tuple[Pattern, SumTime]]()

    def add(pattern: Pattern) -> None:
        time = sum_time(pattern, nodes, path)
        if not any(all(map(operator.le, other, time)) for _, other in found):
            found.append((pattern, time))

    for pattern in candidates(nodes, path):
        add(pattern)
    if (of_trees := _of_trees(nodes, path, min(time.s_per_byte for _, time in found))) is not None:
        add(of_trees)
    return tuple(found)


def sum_times(nodes: Sequence[Hashable], path: PathOf) -> tuple[SumTime, ...]:
    """Return the times of the patterns that may be chosen, that of the ring in the members' order first; `NEVER` where there is none."""
    if not are_meshed(len(nodes), path):
        pattern = joining(len(nodes), path)
        return (SumTime(*NEVER) if pattern is None else sum_time(pattern, nodes, path),)
    if not 2 < len(nodes) <= MOST_MESHED:
        return (sum_time(ring(range(len(nodes))), nodes, path),)
    return tuple(time for _, time in _timed(*_known(nodes, path)))


def _path_of(paths: _Paths) -> PathOf:
    def path(source: int, target: int) -> LinkPath:
        found = paths[source][target]
        assert found is not None, "no member sends to itself"
        return found

    return path


def candidates(nodes: Sequence[Hashable], path: PathOf) -> Iterator[Pattern]:
    """Yield the patterns that may be the quickest of some members; of equals the simplest is the first."""
    members = range(len(nodes))
    yield ring(members)
    yield direct(members)
    by_node = [tuple(member for member in members if nodes[member] == node) for node in dict.fromkeys(nodes)]
    if len(by_node) == 1 and _are_alike(members, path):
        return
    if 1 < len(by_node) < len(nodes):
        group_of = {group[0]: group for group in by_node}
        for number, order in enumerate(_orders(list(group_of), path)):
            groups = tuple(group_of[first] for first in order)
            yield Pattern(groups)
            if not number:  # In any order it is as quick.
                yield Pattern(groups, direct=True)
    if len(by_node) == len(nodes) and _are_alike(members, path):
        return
    for order in _orders(list(members), path):
        yield ring(order)
    if (of_best_links := joining(len(nodes), path)) is not None:
        yield of_best_links


def _of_trees(nodes: Sequence[Hashable], path: PathOf, known_s: float) -> Pattern | None:
    """Return the pattern of several trees, `None` where it cannot be quicker than some seconds for each byte."""
    if len(nodes) < 3 or _are_alike(range(len(nodes)), path) or known_s < LEAST_GAIN * _least_s(nodes, path):
        return None
    from raypipe.simulation.packing import packed  # noqa: PLC0415  # SciPy takes a while to load

    return packed(len(nodes), path, known_s / LEAST_GAIN)


def _least_s(nodes: Sequence[Hashable], path: PathOf) -> float:
    """Return seconds for each byte that no pattern beats: all numbers leave each member and each node once, and come to it."""
    members = range(len(nodes))
    of_nodes = ([member for member in members if nodes[member] == node] for node in dict.fromkeys(nodes))
    sides = [*([member] for member in members), *(side for side in of_nodes if 1 < len(side) < len(nodes))]
    least_s = 0.0
    for side in sides:
        outwards = [(member, other) for member in side for other in members if other not in side]
        for ends in (outwards, [pair[::-1] for pair in outwards]):
            # Each path is charged to one of its wires, and the wires add up.
            wires: dict[str, float] = {}
            for pair in ends:
                for name, bandwidth in sorted(path(*pair).resources, key=lambda wire: wire[1])[:1] or [("", math.inf)]:
                    wires[name] = max(wires.get(name, 0.0), bandwidth)
            least_s = max(least_s, 1 / math.fsum(wires.values()))
    return least_s


def _are_alike(members: Sequence[int], path: PathOf) -> bool:
    """Whether all links are equally quick, and as many transfers from and to each member pass each of what they share."""
    paths = [path(*ends) for ends in itertools.permutations(members, 2)]
    between = {(way.latency_s, way.bandwidth_bytes_per_s, way.port is None) for way in paths}
    if len(between) > 1:
        return False
    uses = Counter(name for ends in itertools.permutations(members, 2) for name, _ in path(*ends).resources)
    # Each link of one pair, or of all that leaves or enters one member.
    return all(count in {1, len(members) - 1} for count in uses.values())


def _orders(members: Sequence[int], path: PathOf) -> Iterator[tuple[int, ...]]:
    """Yield orders of a circle that begin with the first member; none is another one turned."""
    if len(members) <= _ALL_ORDERS:
        yield from ((members[0], *others) for others in itertools.permutations(members[1:]))
        return
    found: dict[tuple[int, ...], None] = {}
    for first in members:
        order = [first]
        left = [member for member in members if member != first]
        while left:
            nearest = max(left, key=lambda member: path(order[-1], member).bandwidth_bytes_per_s)
            left.remove(nearest)
            order.append(nearest)
        at = order.index(members[0])
        found[*order[at:], *order[:at]] = None
    yield from found
