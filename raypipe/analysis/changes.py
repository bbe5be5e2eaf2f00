"""What one change would give: a device or link twice as fast, more memory, other microbatches, updates that overlap.

Each change is made to the cluster or the update and simulated, with the plan kept or with a new one. So what a change is said to give can
be had; the change that gives most says what binds the plan as it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from raypipe.analysis.idle import Root, divide
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology, Link, Node, NodeLink, SharedLink
from raypipe.artifacts.trace import Trace
from raypipe.errors import PlanError
from raypipe.schedules.collectives import Start
from raypipe.schedules.lower import Send
from raypipe.simulation.plan_cost import plan_cost, plan_programs
from raypipe.simulation.simulator import simulate
from raypipe.units import size

AnyLink = TypeVar("AnyLink", Link, NodeLink)
FACTOR = 2.0
MORE_MEMORY = 0.25
_MOST_DEVICES = 3
_MOST_LINKS = 4
_MOST_PLANNED = 3


@dataclass(frozen=True)
class Change:
    """One change to the cluster or the update that a plan was made for.

    Attributes:
        limit: What the change relieves: `devices`, `links`, `memory`, `ramp` (filling and draining) or `staleness`.
        what: The change in words.
        options: Arguments of `plan` that are other than they were.
    """

    limit: str
    what: str
    topology: ClusterTopology
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Effect:
    """Seconds that an update of as many rows takes at most behind a change."""

    change: Change
    update_s: float


Again = Callable[..., Plan]
"""Plans the same profile on a topology; other keywords replace options of the plan."""


def effects(plan: Plan, again: Again) -> list[Effect]:
    """Return what changes give at least, the one that gives most first; `again` plans with the options that the plan was made with.

    A change to the cluster is judged with the plan kept; the changes that gain most so, and all others, are planned again.
    """
    found = [Effect(change, _kept_s(plan, change)) for change in changes(plan)]
    found.sort(key=lambda effect: effect.update_s)
    promising = [effect for effect in found if not _needs_plan(effect.change)][:_MOST_PLANNED]
    for position, effect in enumerate(found):
        if _needs_plan(effect.change) or effect in promising:
            found[position] = replace(effect, update_s=min(effect.update_s, _planned_s(effect.change, again)))
    return sorted(found, key=lambda effect: effect.update_s)


def _needs_plan(change: Change) -> bool:
    """Whether the plan as it is cannot gain from a change."""
    return bool(change.options) or change.limit == "memory"


def _kept_s(plan: Plan, change: Change) -> float:
    assert plan.predicted is not None, "a planner simulates its plan"
    kept_s = plan.predicted.update_s
    if _needs_plan(change):
        return kept_s
    return min(kept_s, simulate(replace(plan, topology=change.topology, predicted=None)).update_s)


def _planned_s(change: Change, again: Again) -> float:
    try:
        predicted = again(change.topology, **change.options).predicted
    except PlanError:
        return math.inf
    return math.inf if predicted is None else predicted.update_s


def changes(plan: Plan) -> Iterator[Change]:
    """Yield the changes that may help: to what computes or waits longest in the simulated plan, and to the update."""
    topology = plan.topology
    trace = simulate(plan)
    yield Change("devices", "every device twice as fast", _faster_devices(topology, plan.devices))
    for device in _held_up_by(plan, trace) if len(plan.devices) > 1 else ():
        yield Change("devices", f"device {device} twice as fast", _faster_devices(topology, (device,)))
    wires = _busy_wires(plan)
    if wires:
        yield Change("links", "every link twice as fast", _faster_links(topology))
    named: dict[str, str] = {}
    for wire in wires:
        named.setdefault(_words(topology, wire), wire)
    for what, wire in list(named.items())[:_MOST_LINKS]:
        yield Change("links", what, _faster_wire(topology, wire))
    yield from _more_memory(plan)
    yield from _other_microbatches(plan)
    if not plan.schedule.weight_rule.overlaps_updates:
        yield Change("staleness", "updates may overlap, with a staleness of 1 (--max-staleness 1)", topology, {"max_staleness": 1})


def _held_up_by(plan: Plan, trace: Trace) -> list[str]:
    division = divide(trace)
    compute_s = [sum(seconds.values()) for seconds in division.compute_s]
    busiest = max(range(len(compute_s)), key=lambda device: (compute_s[device], -device))
    at_work = [culprit.device for culprit in division.culprits if culprit.root is Root.WORK and culprit.device is not None]
    return [plan.devices[device] for device in list(dict.fromkeys([busiest, *at_work]))[:_MOST_DEVICES]]


def _busy_wires(plan: Plan) -> list[str]:
    """Return the links and shared links that the plan uses and that have a limit, the one that is busy longest first."""
    cost = plan_cost(plan)
    busy_s: dict[str, float] = defaultdict(float)

    def use(source: int, target: int, num_bytes: float) -> None:
        for resource, bandwidth in plan.topology.path(plan.devices[source], plan.devices[target]).resources:
            busy_s[resource] += num_bytes / bandwidth

    for program in plan_programs(plan):
        for item in program.items:
            if isinstance(item, Send):
                use(program.device, item.device, cost.message_bytes(item.message))
            elif isinstance(item, Start) and program.device == item.collective.devices[0]:
                num_bytes, members = cost.collective_bytes(item.collective), item.collective.devices
                for loads in cost.loads(item.collective):
                    for hop, share in loads.items():
                        use(members[hop.source], members[hop.target], share * num_bytes)
    return sorted(busy_s, key=lambda resource: (-busy_s[resource], resource))


def _faster_devices(topology: ClusterTopology, names: tuple[str, ...]) -> ClusterTopology:
    nodes = tuple(
        replace(
            node,
            devices=tuple(replace(device, speed=device.speed * (FACTOR if device.name in names else 1.0)) for device in node.devices),
        )
        for node in topology.nodes
    )
    return replace(topology, nodes=nodes)


def _faster(link: AnyLink) -> AnyLink:
    bandwidth = link.bandwidth_bytes_per_s and FACTOR * link.bandwidth_bytes_per_s
    return replace(link, bandwidth_bytes_per_s=bandwidth, latency_s=link.latency_s / FACTOR)


def _faster_shared(shared: SharedLink) -> SharedLink:
    return replace(shared, bandwidth_bytes_per_s=FACTOR * shared.bandwidth_bytes_per_s)


def _faster_links(topology: ClusterTopology) -> ClusterTopology:
    return replace(
        topology,
        nodes=tuple(replace(node, link=node.link and _faster(node.link)) for node in topology.nodes),
        links=tuple(map(_faster, topology.links)),
        shared_links=tuple(map(_faster_shared, topology.shared_links)),
        default_link=topology.default_link and _faster(topology.default_link),
    )


def _faster_wire(topology: ClusterTopology, wire: str) -> ClusterTopology:
    """Return the topology with a wire twice as fast: a shared link, a link both ways, a node's links, or a pair of the default link."""
    if any(shared.name == wire for shared in topology.shared_links):
        shared_links = tuple(_faster_shared(shared) if shared.name == wire else shared for shared in topology.shared_links)
        return replace(topology, shared_links=shared_links)
    ends = _ends(wire)
    if any(ends in link.directions for link in topology.links):
        return replace(topology, links=tuple(_faster(link) if ends in link.directions else link for link in topology.links))
    default = topology.default_link
    inside = _node_of_both(topology, ends)
    if inside is not None and (link := inside.link or default) is not None:
        return replace(topology, nodes=tuple(replace(node, link=_faster(link)) if node is inside else node for node in topology.nodes))
    assert default is not None, "a wire that no link and no node has is the default"
    taken = any(ends[::-1] in link.directions for link in topology.links)
    faster = _faster(default)
    there = Link(
        source=ends[0], target=ends[1], bandwidth_bytes_per_s=faster.bandwidth_bytes_per_s, latency_s=faster.latency_s, one_way=taken
    )
    return replace(topology, links=(*topology.links, there))


def _ends(wire: str) -> tuple[str, str]:
    source, target = wire.split("->")
    return source, target


def _node_of_both(topology: ClusterTopology, ends: tuple[str, str]) -> Node | None:
    return next((node for node in topology.nodes if {*ends} <= {device.name for device in node.devices}), None)


def _words(topology: ClusterTopology, wire: str) -> str:
    if any(shared.name == wire for shared in topology.shared_links):
        return f"shared link {wire} twice as fast"
    ends = _ends(wire)
    served = any(ends in link.directions for link in topology.links)
    if not served and (inside := _node_of_both(topology, ends)) is not None:
        return f"the links within node {inside.name} twice as fast"
    return f"the link of {ends[0]} and {ends[1]} twice as fast"


def _more_memory(plan: Plan) -> Iterator[Change]:
    assert plan.predicted is not None, "a planner simulates its plan"
    topology = plan.topology
    limits = {device.name: device.memory_bytes for device in topology.devices if device.memory_bytes is not None}
    if not limits:
        return

    def with_more(names: set[str]) -> ClusterTopology:
        nodes = tuple(
            replace(
                node,
                devices=tuple(
                    replace(device, memory_bytes=limits[device.name] + _more_bytes(limits[device.name])) if device.name in names else device
                    for device in node.devices
                ),
            )
            for node in topology.nodes
        )
        return replace(topology, nodes=nodes)

    yield Change("memory", f"{MORE_MEMORY:.0%} more memory on every device", with_more(set(limits)))
    peaks = dict(zip(plan.devices, plan.predicted.peak_memory_bytes, strict=False))
    fullest = max(limits, key=lambda name: (peaks.get(name, 0) / limits[name], name))
    yield Change("memory", f"{size(_more_bytes(limits[fullest]))} more memory on device {fullest}", with_more({fullest}))


def _more_bytes(limit: int) -> int:
    return math.ceil(MORE_MEMORY * limit)


def _other_microbatches(plan: Plan) -> Iterator[Change]:
    """Divide the rows of an update otherwise; a loss that couples the rows of a microbatch would be another one."""
    count, rows = plan.schedule.num_microbatches, plan.microbatch_size
    if plan.profile.loss_couples_rows:
        return
    for more, fewer in ((count * 2, rows // 2), (count // 2, rows * 2)):
        if more * fewer == count * rows and more and fewer:
            what = f"{more} microbatches of {fewer} rows"
            yield Change("ramp", what, plan.topology, {"num_microbatches": more, "microbatch_size": fewer})
