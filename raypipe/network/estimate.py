"""Running estimates of a cluster's links: each transfer moves an estimate, a step change replaces it.

x = log((seconds - latency) / bytes) is averaged exponentially. Two one-sided sums (CUSUM; Page, 1954) watch for a step:

    up_n = max(0, up_(n-1) + w (z - k)),  down_n = max(0, down_(n-1) - w (z + k))    z = (x - mean) / deviation, at most 3 either way

Past h, the estimate restarts with the transfers since that sum was 0. With k = 0.75 and h = 9, normal noise exceeds it once in some
10^6 transfers (Siegmund, 1985, section 2.6).

A transfer counts by the square of its bytes, w = (bytes / mean bytes)^2: a burst that a shaper lets pass, and clocks that are off, change
the seconds of all by the same, so that x varies the less the larger a transfer is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from raypipe.artifacts.topology import ClusterTopology, Link, SharedLink

NodePair = tuple[str, str]
"""Two nodes by name, the sender first."""

LEAST_BYTES = 16_384
"""Fewer bytes show a link's latency, not its bandwidth."""
_WEIGHT = 0.1
_DEVIATION_WEIGHT = 0.05  # lower: a step must be seen before its first transfers make the deviation large
_TYPICAL_WEIGHT = 0.05
_MOST_COUNT = 2.0  # typical transfers: none decides alone
_SLACK = 0.75
_LIMIT = 9.0
_CLIP = 3.0
_LEAST_BEHIND = math.ceil(_LIMIT / (_CLIP - _SLACK))  # transfers that it takes to see a step of any size
_LEAST_DEVIATION = 0.03
_NUM_FIRST = 5  # transfers by whose median an estimate begins
_CONTENDED = 1.05  # Fewer bytes of others do not matter
_LIMITED = 0.9  # A link that carries so much of what its bottleneck does is limited by that
_RECENT_S = 30.0  # Before the last transfer of any link of a bottleneck: what is older does not tell what that carries now
_MAD_TO_DEVIATION = 1.4826
_ABS_TO_DEVIATION = math.sqrt(math.pi / 2)


@dataclass
class LinkEstimate:
    """The bandwidth of one link, as its transfers show it.

    Attributes:
        latency_s: Seconds subtracted from each transfer; 0 where nothing is known of it.
        num_changes: Observed step changes.
        seen_at_s: Time of the last transfer; minus infinity before the first.
        is_observed: Whether a transfer or a probe has shown it, and not a topology alone.
    """

    latency_s: float = 0.0
    num_transfers: int = 0
    num_changes: int = 0
    seen_at_s: float = -math.inf
    is_observed: bool = False
    _first: list[float] = field(default_factory=list)
    _mean: float | None = None
    _deviation: float = 0.3
    _age: float = 0.0
    _typical_bytes: float = 0.0
    _up: float = 0.0
    _down: float = 0.0
    _since_up: list[float] = field(default_factory=list)
    _since_down: list[float] = field(default_factory=list)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Return bytes per second; `None` before the first transfer."""
        if self._mean is not None:
            return math.exp(-self._mean)
        return math.exp(-statistics.median(self._first)) if self._first else None

    def set(self, *, bandwidth_bytes_per_s: float, latency_s: float, at_s: float) -> None:
        """Replace all observations by the result of a probe."""
        self.latency_s = latency_s
        self.is_observed = True
        self.seen_at_s = max(at_s, self.seen_at_s)
        self._begin([-math.log(bandwidth_bytes_per_s)])

    def observe(self, num_bytes: int, seconds: float, *, at_s: float, most_bytes: int = 0) -> bool:
        """Observe a transfer that arrived at `at_s` and return whether it shows that the link has changed.

        With `most_bytes`, the link alone would have carried from `num_bytes` to so many in that time.
        """
        self.is_observed = True
        # What is quicker than the latency is noise; a tenth of the time at least is for the bytes.
        alone_s = max(seconds - self.latency_s, 0.1 * seconds, 1e-9)
        x = math.log(alone_s / num_bytes)
        if most_bytes > num_bytes * _CONTENDED:
            if self._mean is None:
                return False
            least_x = math.log(alone_s / most_bytes)
            if least_x < self._mean < x:  # as expected
                self.seen_at_s = max(at_s, self.seen_at_s)
                self._up, self._since_up = _summed(self._up - _SLACK, self._since_up, self._mean)
                self._down, self._since_down = _summed(self._down - _SLACK, self._since_down, self._mean)
                return False
            x = max(least_x, min(self._mean, x))
        self.num_transfers += 1
        self.seen_at_s = max(at_s, self.seen_at_s)
        count = self._counts_for(num_bytes)
        if self._mean is None:
            self._first.append(x)
            if len(self._first) == _NUM_FIRST:
                self._begin(self._first)
            return False
        difference = x - self._mean
        z = max(-_CLIP, min(difference / self._deviation, _CLIP))
        told = min(count, 1.0)
        self._up, self._since_up = _summed(self._up + told * (z - _SLACK), self._since_up, x)
        self._down, self._since_down = _summed(self._down - told * (z + _SLACK), self._since_down, x)
        if max(self._up, self._down) > _LIMIT:
            self.num_changes += 1
            # The sum may have begun to grow by chance before the step: the later ones are surely behind it.
            since = self._since_up if self._up > self._down else self._since_down
            self._begin(since[-max(_LEAST_BEHIND, len(since) // 2) :])
            return True
        within = max(-_CLIP * self._deviation, min(difference, _CLIP * self._deviation))
        # An estimate that is young is the mean of all it has seen.
        self._age += count
        self._mean += count * max(_WEIGHT, 1 / self._age) * within
        self._deviation += count * _DEVIATION_WEIGHT * (_ABS_TO_DEVIATION * abs(within) - self._deviation)
        self._deviation = max(self._deviation, _LEAST_DEVIATION)
        return False

    def _counts_for(self, num_bytes: int) -> float:
        self._typical_bytes += (_TYPICAL_WEIGHT if self._typical_bytes else 1.0) * (num_bytes - self._typical_bytes)
        return min((num_bytes / self._typical_bytes) ** 2, _MOST_COUNT)

    def _begin(self, xs: list[float]) -> None:
        self._mean = statistics.median(xs)
        self._age = len(xs)
        if len(xs) >= _NUM_FIRST:
            spread = _MAD_TO_DEVIATION * statistics.median(abs(x - self._mean) for x in xs)
            # Few transfers tell little of their spread.
            self._deviation = max(spread, self._deviation / 1.5, _LEAST_DEVIATION)
        self._first = []
        self._up = self._down = 0.0
        self._since_up, self._since_down = [], []


def _summed(total: float, since: list[float], x: float) -> tuple[float, list[float]]:
    return (total, [*since, x]) if total > 0 else (0.0, [])


@dataclass(frozen=True)
class Transfer:
    """Bytes that went from one node to another; seconds until the last arrived, at `at_s`.

    Attributes:
        most_bytes: Bytes of this link and of those that it shares a bottleneck with, in that time; 0 if it had the way for itself.
    """

    source: str
    target: str
    num_bytes: int
    seconds: float
    at_s: float
    most_bytes: int = 0


@dataclass(frozen=True)
class _Bottleneck:
    """A shared link of a topology: pairs of which all (`links`) or some transfers (`members`) pass through it.

    Attributes:
        alone_bytes_per_s: Rate of the fastest of `links` alone.
        limits: Whether that rate is the bandwidth of the bottleneck.
    """

    links: frozenset[NodePair]
    members: frozenset[NodePair]
    alone_bytes_per_s: float
    limits: bool


class NetworkEstimate:
    """The current estimate of every link between some nodes; unobserved links grow old from `at_s`."""

    def __init__(self, nodes: Iterable[str], *, at_s: float = 0.0) -> None:
        names = list(dict.fromkeys(nodes))
        self.began_at_s = at_s
        self.links: dict[NodePair, LinkEstimate] = {(a, b): LinkEstimate() for a in names for b in names if a != b}
        self._bottlenecks: dict[str, _Bottleneck] = {}

    def seed(self, topology: ClusterTopology, *, names: Mapping[str, str] | None = None, at_s: float = 0.0) -> None:
        """Start with a topology's rates of pairs alone; `names` maps nodes to its names."""
        by_pair = _between_nodes(topology)
        known = {node.name for node in topology.nodes}
        called = {pair: (_called(pair[0], names), _called(pair[1], names)) for pair in self.links}
        through, through_part = _through(topology), _through(topology, whole=False)
        for pair, estimate in self.links.items():
            ends = called[pair]
            link = by_pair.get(ends, topology.default_link if known.issuperset(ends) else None)
            if link is None:
                continue
            limits = [shared.bandwidth_bytes_per_s for shared in topology.shared_links if ends in through[shared.name]]
            bandwidth = min(link.bandwidth_bytes_per_s or math.inf, *limits, math.inf)
            if bandwidth == math.inf:
                estimate.latency_s = link.latency_s
            else:
                estimate.set(bandwidth_bytes_per_s=bandwidth, latency_s=link.latency_s, at_s=at_s)
                estimate.is_observed = False
        self._bottlenecks = {}
        for shared in topology.shared_links:
            links, members = (
                frozenset(pair for pair, ends in called.items() if ends in pairs[shared.name]) for pairs in (through, through_part)
            )
            alone = self._fastest(links)
            self._bottlenecks[shared.name] = _Bottleneck(links, members, alone, alone >= _LIMITED * shared.bandwidth_bytes_per_s)

    def _fastest(self, pairs: Iterable[NodePair]) -> float:
        # Where several links show what a bottleneck carries, those that nothing passes now tell nothing. One alone may be slow by itself.
        links = [self.links[pair] for pair in pairs]
        observed = [link for link in links if link.is_observed]
        newest_s = max((link.seen_at_s for link in observed), default=0.0)
        recent = [link for link in observed if link.seen_at_s >= newest_s - _RECENT_S]
        return max((link.bandwidth_bytes_per_s or 0.0 for link in (recent if len(recent) > 1 else links)), default=0.0)

    def sharing(self, pair: NodePair) -> list[frozenset[NodePair]]:
        """Return for each bottleneck of a link all that pass it."""
        return [one.members for one in self._bottlenecks.values() if pair in one.members]

    def contending(self, pair: NodePair) -> frozenset[NodePair]:
        """Return the links that share a bottleneck with this one."""
        return frozenset[NodePair]().union(*self.sharing(pair)) - {pair}

    def suppose_latency(self, pair: NodePair, latency_s: float) -> None:
        """Take a latency for a link of which none is known."""
        link = self.links[pair]
        link.latency_s = link.latency_s or latency_s

    def observe(self, transfers: Iterable[Transfer]) -> list[NodePair]:
        """Observe transfers in any order and return the links that have changed."""
        changed: list[NodePair] = []
        for transfer in sorted(transfers, key=lambda transfer: transfer.at_s):
            pair = (transfer.source, transfer.target)
            link, size = self.links[pair], transfer.num_bytes
            if link.observe(size, transfer.seconds, at_s=transfer.at_s, most_bytes=transfer.most_bytes) and pair not in changed:
                changed.append(pair)
        return changed

    def age_s(self, pair: NodePair, *, now_s: float) -> float:
        """Return the seconds since a link was last observed, or since the estimate started."""
        return now_s - max(self.links[pair].seen_at_s, self.began_at_s)

    def idle(self, *, now_s: float, older_than_s: float) -> list[NodePair]:
        """Return the links not observed for this long: those never observed first, then the oldest."""
        ages = {pair: self.age_s(pair, now_s=now_s) for pair in self.links}
        old = [pair for pair, age_s in ages.items() if age_s > older_than_s]
        return sorted(old, key=lambda pair: (self.links[pair].seen_at_s, pair))

    def snapshot(self, topology: ClusterTopology, *, names: Mapping[str, str] | None = None) -> ClusterTopology:
        """Return the topology with the current figures of each observed link between whole nodes; `names` maps nodes to its names."""
        by_pair, node_of = _between_nodes(topology), _nodes_of(topology)
        seen: dict[NodePair, Link] = {}
        known = {node.name for node in topology.nodes}
        for (a, b), estimate in self.links.items():
            pair = (_called(a, names), _called(b, names))
            if not known.issuperset(pair):
                continue  # a node that the plan no longer uses
            before = by_pair.get(pair, topology.default_link)
            bandwidth = estimate.bandwidth_bytes_per_s
            if bandwidth is not None and (before is not None or pair not in by_pair):
                latency_s = estimate.latency_s or (before.latency_s if before is not None else 0.0)
                seen[pair] = Link(source=pair[0], target=pair[1], bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, one_way=True)
                if isinstance(before, Link) and before.via is not None:
                    # A route goes on to share the wires that it passes; its own latency comes on top of theirs.
                    via = before.via if node_of[before.source] == pair[0] else before.via[::-1]
                    seen[pair] = replace(seen[pair], via=via, latency_s=before.latency_s)
        kept: list[Link] = []
        for link in topology.links:
            left = [(a, b) for a, b in link.directions if (node_of[a], node_of[b]) not in seen]
            if len(left) == len(link.directions):
                kept.append(link)
            else:
                kept += [replace(link, source=source, target=target, one_way=True) for source, target in left]
        return replace(topology, links=(*kept, *seen.values()), shared_links=tuple(map(self._as_it_is_now, topology.shared_links)))

    def _as_it_is_now(self, shared: SharedLink) -> SharedLink:
        found = self._bottlenecks.get(shared.name)
        if found is None or not found.alone_bytes_per_s:
            return shared
        fastest, bandwidth = self._fastest(found.links), shared.bandwidth_bytes_per_s
        now = bandwidth * fastest / found.alone_bytes_per_s if found.limits else max(bandwidth, fastest)
        return replace(shared, bandwidth_bytes_per_s=now)


def _between_nodes(topology: ClusterTopology) -> dict[NodePair, Link | None]:
    """Return the links between nodes without the default; `None` where devices of one node take different links."""
    by_pair = {pair: link for link in topology.links for pair in link.directions}
    node_of, nodes = _nodes_of(topology), {node.name for node in topology.nodes}
    of_several = {device.name for node in topology.nodes if len(node.devices) > 1 for device in node.devices}
    # As `ClusterTopology.path` chooses; the most specific is the last.
    rising = sorted(by_pair, key=lambda ends: (ends[0] not in nodes, ends[1] not in nodes))
    return {(node_of[a], node_of[b]): by_pair[a, b] if of_several.isdisjoint((a, b)) else None for a, b in rising}


def _through(topology: ClusterTopology, *, whole: bool = True) -> dict[str, frozenset[NodePair]]:
    """Return by shared link the pairs of different nodes of which all transfers (unless `whole`, some) pass through it."""
    node_of = _nodes_of(topology)
    parts = {device.name for node in topology.nodes if whole and len(node.devices) > 1 for device in node.devices}
    return {
        shared.name: frozenset((node_of[a], node_of[b]) for a, b in shared.members if node_of[a] != node_of[b] and parts.isdisjoint((a, b)))
        for shared in topology.shared_links
    }


def _nodes_of(topology: ClusterTopology) -> dict[str, str]:
    return {name: node.name for node in topology.nodes for name in (node.name, *(device.name for device in node.devices))}


def _called(node: str, names: Mapping[str, str] | None) -> str:
    return names.get(node, node) if names else node
