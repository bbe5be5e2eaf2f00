"""The machines and the network that a plan is made for: `raypipe.topology/1`.

The most specific link counts: device to device, device to node, node to device, node to node, default. A path crosses one link, or those
between the nodes that its link names as `via`. Pairs that no link serves cannot communicate, and no plan lets them.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise, permutations, product
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from raypipe.artifacts import codec
from raypipe.artifacts.files import read_text, write_text
from raypipe.artifacts.record import ShownName, invalid, record
from raypipe.errors import NoLinkError, PlanError, suggestion

FORMAT = "raypipe.topology/1"

_NO_LIMIT = "leave the key out for a link without limit, and the link out where there is none"

Name = Annotated[str, Field(pattern="^[A-Za-z0-9_.:/-]+$", json_schema_extra={"expected": "letters, digits and the characters _ . : / -"})]
_Names = tuple[str, ...]
"""The names of a place by which links may know it, the most specific first: a device and its node, or a node alone."""
Bandwidth = Annotated[float, Field(gt=0, json_schema_extra={"remedy": _NO_LIMIT})]


@record(kw_only=False)
class Device:
    """One GPU, or one CPU slot.

    Attributes:
        kind: Such as `cpu` or `h200`; a model profile may hold times for it.
        memory_bytes: Memory that a stage may use; None for no limit.
        speed: Speed relative to the device that the profile was measured on.
    """

    name: Name
    kind: str
    memory_bytes: PositiveInt | None = None
    speed: PositiveFloat = 1.0


@record()
class NodeLink:
    """The link for each ordered pair of a node's devices, or the default link; bandwidth None for no limit."""

    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: NonNegativeFloat


@record()
class Link:
    """A full-duplex link between nodes or devices, `from` and `to` in files.

    Attributes:
        bandwidth_bytes_per_s: Bytes per second each way, shared by all pairs of devices that the link serves; None for no limit.
        latency_s: Seconds until the first byte arrives; of a route, those beyond the links that it passes.
        via: Nodes that transfers pass in this order, over the links between them: they take the sum of the latencies and share the
            wires of all these links. None for a link of its own.
    """

    source: Annotated[str, Field(alias="from")]
    target: Annotated[str, Field(alias="to")]
    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: NonNegativeFloat
    one_way: bool = False
    via: Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise invalid(self, "to", f"the link joins {self.source!r} with itself; for the devices of a node, use the node's own link")
        passed = (self.source, *(self.via or ()), self.target)
        twice = next((name for name, count in Counter(passed).items() if count > 1), None)
        if twice is not None:
            raise invalid(self, "via", f"the route passes {twice!r} twice; name each node between the two ends once")

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        """Return the ordered pairs of names that the link serves."""
        there = (self.source, self.target)
        return (there,) if self.one_way else (there, there[::-1])


@record()
class SharedLink:
    """A bottleneck of several transfers, such as an uplink; a node paired with itself stands for all transfers inside it."""

    name: Name
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, json_schema_extra={"remedy": "leave the shared link out where there is no limit"})]
    members: tuple[tuple[str, str], ...]


def node_ports(out: Mapping[str, float], into: Mapping[str, float] | None = None) -> tuple[SharedLink, ...]:
    """Return a port of each node for all that leaves it, and one for all that comes to it: bytes per second, both ways alike by default."""
    ways = {"out": out, "in": out if into is None else into}
    return tuple(
        SharedLink(
            name=f"{node}/{way}",
            bandwidth_bytes_per_s=rates[node],
            members=tuple((node, other) if way == "out" else (other, node) for other in out if other != node),
        )
        for node in out
        for way, rates in ways.items()
    )


@record()
class Node:
    """One machine.

    Attributes:
        link: Link between any two of its devices, one for each ordered pair; None for the default link.
        cores: Cores that its CPU devices share: more devices computing at once are slowed in proportion. None if each has its own.
    """

    name: Name
    devices: tuple[Device, ...]
    link: NodeLink | None = None
    cores: PositiveInt | None = None


_Hop = tuple[tuple[str, str], Link | NodeLink]
"""A link, and the two names by which it joins two places."""


@dataclass(frozen=True)
class Path:
    """The resources that a transfer between two devices passes through: the directed links `FROM->TO` and shared links.

    A path of infinite latency stands for none: nothing ever arrives.

    Attributes:
        port: What else it passes if no link with a limit is stated for it: the port of its node, since nobody has said that it is apart.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    resources: tuple[tuple[str, float], ...] = ()
    port: str | None = None

    @property
    def exists(self) -> bool:
        """Whether the two devices can communicate."""
        return self.latency_s < math.inf

    @property
    def bottlenecks(self) -> list[str]:
        """What it may share with other paths from its device."""
        names = [name for name, _ in self.resources]
        return names if self.port is None else [*names, self.port]


NO_PATH = Path(latency_s=math.inf)
"""The path of a pair that no link serves."""


@record()
class Overheads:
    """Seconds of a device beyond computation (by kind of Op) and transfer (per message or byte), from `raypipe calibrate`."""

    forward_s: NonNegativeFloat = 0.0
    backward_s: NonNegativeFloat = 0.0
    input_grad_s: NonNegativeFloat = 0.0
    weight_grad_s: NonNegativeFloat = 0.0
    send_s: NonNegativeFloat = 0.0
    send_s_per_byte: NonNegativeFloat = 0.0
    recv_s: NonNegativeFloat = 0.0
    recv_s_per_byte: NonNegativeFloat = 0.0


@record()
class ClusterTopology:
    """Nodes, their devices and the links between them.

    Attributes:
        name: Name of the cluster.
        nodes: Machines, in the order in which their devices are counted.
        links: Links between nodes or devices.
        shared_links: Bottlenecks on top of the links.
        default_link: Link of pairs that no other link joins; None if such pairs cannot communicate.
        overheads: Overheads of every device; None if unknown, which predicts none.

    Raises:
        FormatError: A name is used twice or unknown, two links serve the same pair, or a route passes nodes that no link joins.
    """

    name: ShownName
    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    shared_links: tuple[SharedLink, ...] = ()
    default_link: NodeLink | None = None
    overheads: Overheads | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise invalid(self, "nodes", "the cluster has no devices; give a node at least one")
        self._check_names()
        self._check_links()
        self._check_shared_links()
        self._check_routes()

    def __getstate__(self) -> dict[str, Any]:
        # Without the caches: a million paths need not travel with every message.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return all devices in the order of the file."""
        return tuple(device for node in self.nodes for device in node.devices)

    @property
    def num_devices(self) -> int:
        """Return the number of devices of all nodes."""
        return len(self.devices)

    def device(self, name: str) -> Device:
        """Return a device by name, or raise `PlanError`."""
        return self._located(name)[0]

    def node_of(self, device: str) -> Node:
        """Return the node of a device, or raise `PlanError`."""
        return self._located(device)[1]

    def only(self, devices: Collection[str]) -> ClusterTopology:
        """Return the cluster with only the named devices."""
        dropped = {device.name for device in self.devices} - set(devices)
        return replace(
            self,
            nodes=tuple(
                replace(node, devices=tuple(device for device in node.devices if device.name not in dropped)) for node in self.nodes
            ),
            links=tuple(link for link in self.links if not {link.source, link.target} & dropped),
            shared_links=tuple(
                replace(shared, members=tuple(pair for pair in shared.members if not set(pair) & dropped)) for shared in self.shared_links
            ),
        )

    def without_link(self, one: str, other: str) -> ClusterTopology:
        """Return the cluster as it is when nothing passes between two named nodes."""
        ends = [{name, *(device.name for device in self._nodes_by_name[name].devices)} for name in (one, other)]

        def crosses(source: str, target: str) -> bool:
            return any(source in sources and target in targets for sources, targets in (ends, ends[::-1]))

        def is_left(link: Link) -> bool:
            return not any(crosses(*hop) for hop in pairwise((link.source, *(link.via or ()), link.target)))

        left, default, nodes = [link for link in self.links if is_left(link)], self.default_link, self.nodes
        if default is not None:
            known = set(self._links_by_pair)
            nodes = tuple(replace(node, link=node.link or default) for node in nodes)
            rate, latency_s = default.bandwidth_bytes_per_s, default.latency_s
            left += [
                Link(source=source, target=target, one_way=True, bandwidth_bytes_per_s=rate, latency_s=latency_s)
                for source, target in permutations([node.name for node in nodes], 2)
                if (source, target) not in known and not crosses(source, target)
            ]
        return replace(self, nodes=nodes, links=tuple(left), default_link=None)

    def path(self, source: str, target: str) -> Path:
        """Return the path between two named devices, empty from a device to itself, or raise `PlanError` if no link serves them."""
        path = self.reach(source, target)
        if not path.exists:
            ends = [f"{name!r} (node {self.node_of(name).name!r})" for name in (source, target)]
            raise NoLinkError(
                f"topology {self.name!r} has no link from device {ends[0]} to device {ends[1]}; add one between the devices or their "
                "nodes, a route (`via`), or a default_link, or use a plan that does without"
            )
        return path

    def reach(self, source: str, target: str) -> Path:
        """Return the path between two named devices, `NO_PATH` if no link serves them."""
        one, other = self._known_as.get(source), self._known_as.get(target)
        key = (one[0], other[0]) if one and other and one[1] != other[1] else (source, target)
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = self._find_path(source, target)
        return path

    @cached_property
    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Return the sets of devices that links join both ways, directly or over other devices; each in the order of the file."""
        if self.default_link is not None:
            return (tuple(self._locations),)
        parents = {name: name for name in self._locations}

        def root(name: str) -> str:
            while parents[name] != name:
                parents[name] = name = parents[parents[name]]
            return name

        def join(names: Sequence[str]) -> None:
            for name in names[1:]:
                parents[root(name)] = root(names[0])

        def devices(name: str) -> list[str]:
            return [name] if name in self._locations else [device.name for device in self._nodes_by_name[name].devices]

        for node in self.nodes:
            if node.link is not None:
                join([device.name for device in node.devices])
        for source, target in self._links_by_pair:
            one, other = devices(source), devices(target)
            # A link of a device may lead back where that of its node has led there.
            if one and other and self.reach(other[0], one[0]).exists:
                join([*one, *other])
        found: dict[str, list[str]] = {}
        for name in self._locations:
            found.setdefault(root(name), []).append(name)
        return tuple(map(tuple, found.values()))

    @cached_property
    def digest(self) -> str:
        """Return sixteen hexadecimal digits for the content."""
        return codec.digest(self, format_name=FORMAT)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterTopology:
        """Return the topology in a YAML file, or raise `FormatError`."""
        return codec.from_yaml(cls, read_text(path), path=os.fspath(path), format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the topology to a YAML file."""
        write_text(path, codec.to_yaml(self, format_name=FORMAT))

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        *,
        latency_s: float = 0.0,
        bandwidth_bytes_per_s: float = math.inf,
        devices_per_node: int | None = None,
        kind: str = "cpu",
        memory_bytes: int | None = None,
        name: str = "uniform",
    ) -> ClusterTopology:
        """Return equal devices `device0`, `device1` and so on, with equal links inside and between nodes; None for one node."""
        link = NodeLink(latency_s=latency_s, bandwidth_bytes_per_s=None if bandwidth_bytes_per_s == math.inf else bandwidth_bytes_per_s)
        devices = tuple(Device(f"device{index}", kind, memory_bytes) for index in range(num_devices))
        size = devices_per_node or max(num_devices, 1)
        nodes = (Node(name=f"node{start // size}", devices=devices[start : start + size]) for start in range(0, num_devices, size))
        return cls(name=name, nodes=tuple(nodes), default_link=link)

    def _check_names(self) -> None:
        seen: set[str] = set()
        for index, node in enumerate(self.nodes):
            places = [(f"nodes[{index}]", node.name)]
            places += [(f"nodes[{index}].devices[{position}]", device.name) for position, device in enumerate(node.devices)]
            for place, name in places:
                if name in seen:
                    problem = f"a node or device before it is called {name!r} too; links name both, so give each its own name"
                    raise invalid(self, f"{place}.name", problem)
                seen.add(name)

    def _check_known(self, name: str, place: str) -> None:
        if name not in self._names:
            raise invalid(self, place, f"no node or device is called {name!r}{suggestion(name, self._names)}")

    def _check_links(self) -> None:
        seen: dict[tuple[str, str], int] = {}
        for index, link in enumerate(self.links):
            self._check_known(link.source, f"links[{index}].from")
            self._check_known(link.target, f"links[{index}].to")
            for pair in link.directions:
                if seen.setdefault(pair, index) != index:
                    problem = f"links[{seen[pair]}] already leads from {pair[0]!r} to {pair[1]!r}; keep one of them, or mark both one_way"
                    raise invalid(self, f"links[{index}]", problem)

    def _check_shared_links(self) -> None:
        seen: set[str] = set()
        for index, shared in enumerate(self.shared_links):
            if shared.name in seen:
                raise invalid(self, f"shared_links[{index}].name", f"a shared link before it is called {shared.name!r} too; rename one")
            seen.add(shared.name)
            for position, member in enumerate(shared.members):
                place = f"shared_links[{index}].members[{position}]"
                for end, name in enumerate(member):
                    self._check_known(name, f"{place}[{end}]")
                if member[0] == member[1] and member[0] in self._locations:
                    raise invalid(self, place, f"{member[0]!r} is paired with itself; name two devices")

    def _check_routes(self) -> None:
        for index, link in enumerate(self.links):
            for position, name in enumerate(link.via or ()):
                if name not in self._nodes_by_name:
                    problem = f"a route passes nodes, and none is called {name!r}{suggestion(name, self._nodes_by_name)}"
                    raise invalid(self, f"links[{index}].via[{position}]", problem)
            if link.via is None:
                continue
            places = [self._place(name) for name in (link.source, *link.via, link.target)]
            for directed in (places, places[::-1])[: len(link.directions)]:
                for one, other in pairwise(directed):
                    hop = self._hop(one, other)
                    if hop is None or (isinstance(hop[1], Link) and hop[1].via is not None):
                        problem = f"the route passes from {one[0]!r} to {other[0]!r}, between which there is no link of its own; add it"
                        raise invalid(self, f"links[{index}].via", problem)

    def _place(self, name: str) -> _Names:
        return (name, self._locations[name][1].name) if name in self._locations else (name,)

    @cached_property
    def _nodes_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset([node.name for node in self.nodes] + [device.name for device in self.devices])

    @cached_property
    def _locations(self) -> dict[str, tuple[Device, Node]]:
        return {device.name: (device, node) for node in self.nodes for device in node.devices}

    @cached_property
    def _links_by_pair(self) -> dict[tuple[str, str], Link]:
        return {pair: link for link in self.links for pair in link.directions}

    @cached_property
    def _shared_by_pair(self) -> dict[tuple[str, str], list[SharedLink]]:
        by_pair: dict[tuple[str, str], list[SharedLink]] = {}
        for shared in self.shared_links:
            for pair in shared.members:
                by_pair.setdefault(pair, []).append(shared)
        return by_pair

    @cached_property
    def _known_as(self) -> dict[str, tuple[str, str]]:
        """Return by device its name for links to other nodes (its own or its node's), and its node."""
        named = {name for link in self.links for name in (link.source, link.target)}
        named |= {name for shared in self.shared_links for member in shared.members for name in member}
        return {device: (device if device in named else node.name, node.name) for device, (_, node) in self._locations.items()}

    @cached_property
    def _paths(self) -> dict[tuple[str, str], Path]:
        return {}

    def _located(self, name: str) -> tuple[Device, Node]:
        try:
            return self._locations[name]
        except KeyError:
            raise PlanError(f"topology {self.name!r} has no device called {name!r}{suggestion(name, self._locations)}") from None

    def _find_path(self, source: str, target: str) -> Path:
        starts, ends = (source, self.node_of(source).name), (target, self.node_of(target).name)
        if source == target:
            return Path()
        hop = self._hop(starts, ends)
        if hop is None:
            return NO_PATH
        (begin, _), link = hop
        limits = self._limits(starts, ends, hop)
        latency_s = link.latency_s
        if isinstance(link, Link) and link.via is not None:
            # Against the direction in which a route is written, it is passed backwards.
            between = [(name,) for name in (link.via if begin == link.source else link.via[::-1])]
            passed = [self._limits(one, other, self._wire(one, other)) for one, other in pairwise([starts, *between, ends])]
            latency_s += math.fsum(self._wire(one, other)[1].latency_s for one, other in pairwise([starts, *between, ends]))
            # What is passed twice carries everything twice.
            times = Counter(name for of_hop in passed for name in of_hop)
            limits |= {name: limit / times[name] for of_hop in passed for name, limit in of_hop.items()}
        # What has no limit delays nobody.
        resources = tuple((resource, bandwidth) for resource, bandwidth in limits.items() if bandwidth < math.inf)
        is_apart = starts[-1] == ends[-1] or (resources and link is not self.default_link)
        return Path(latency_s, min(limits.values()), resources, None if is_apart else f"the port of {starts[-1]}")

    def _limits(self, starts: _Names, ends: _Names, hop: _Hop) -> dict[str, float]:
        """Return the bandwidth of a link's wire, and of the shared links on top of it."""
        wire, link = hop
        limits = {"->".join(wire): link.bandwidth_bytes_per_s or math.inf}
        if not self.shared_links:
            return limits
        shared = (shared for pair in product(starts, ends) for shared in self._shared_by_pair.get(pair, ()))
        return limits | {each.name: each.bandwidth_bytes_per_s for each in shared}

    def _wire(self, starts: _Names, ends: _Names) -> _Hop:
        hop = self._hop(starts, ends)
        assert hop is not None, "routes are checked when the topology is made"
        return hop

    def _hop(self, starts: _Names, ends: _Names) -> _Hop | None:
        """Return the link from one place to another, and its ends; places are named by device (if any) and node."""
        for start, end in product(starts, ends):
            if link := self._links_by_pair.get((start, end)):
                return (start, end), link
        if starts[-1] == ends[-1]:
            switch = self._nodes_by_name[starts[-1]].link or self.default_link
            return ((starts[0], ends[0]), switch) if switch else None
        return ((starts[-1], ends[-1]), self.default_link) if self.default_link else None
