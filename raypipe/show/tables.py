"""Tables of plans, topologies and profiles for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Link, NodeLink, SharedLink
from raypipe.show.report import Figure, FittedTable, Report, rows_table
from raypipe.simulation.plan_cost import plan_cost
from raypipe.units import number, seconds, size

_BAR = 12


def plan_table(plan: Plan) -> FittedTable:
    """Return the stages of a plan, their devices and their costs for one microbatch."""
    cost = plan_cost(plan)
    rows = []
    for stage, layers in enumerate(plan.stages):
        workers = sorted({pipeline[stage] for pipeline in plan.schedule.pipelines})
        devices = [device for worker in workers for device, _ in plan.placement.workers[worker]]
        times = cost.stages[devices[0], stage]
        rows.append((
            str(stage),
            _several([plan.devices[device] for device in devices]),
            _several(layers),
            seconds(times.forward_s),
            seconds(times.backward_s),
            size(times.parameter_bytes),
        ))
    return FittedTable(("stage", "devices", "layers", "forward", "backward", "parameters"), rows, left=3)


def _several(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)})"


def node_table(topology: ClusterTopology) -> FittedTable:
    """Return the nodes of a topology and their devices."""
    rows = []
    for node in topology.nodes:
        kinds = sorted({device.kind for device in node.devices})
        memory = sorted({device.memory_bytes for device in node.devices if device.memory_bytes is not None})
        speeds = sorted({device.speed for device in node.devices})
        rows.append((
            node.name,
            _several([device.name for device in node.devices]),
            " ".join(kinds),
            _span([size(held) for held in memory]),
            _span([number(speed) for speed in speeds]),
            str(node.cores or "-"),
            link_words(node.link) if node.link else "the default",
        ))
    return FittedTable(("node", "devices", "kind", "memory each", "speed", "cores shared", "link between devices"), rows, left=3)


def _span(words: Sequence[str]) -> str:
    return "-" if not words else words[0] if words[0] == words[-1] else f"{words[0]} .. {words[-1]}"


def link_words(link: Link | NodeLink | SharedLink) -> str:
    """Return bandwidth and latency of a link."""
    bandwidth = "no limit" if link.bandwidth_bytes_per_s is None else f"{size(link.bandwidth_bytes_per_s)}/s"
    return bandwidth if isinstance(link, SharedLink) else f"{bandwidth}, {seconds(link.latency_s)}"


def shared_words(shared: SharedLink) -> str:
    """Return a shared link and the pairs that share it."""
    return f"{shared.name}, shared by {_several([f'{source}->{target}' for source, target in shared.members])}"


def link_table(topology: ClusterTopology) -> FittedTable:
    """Return the links of a topology."""
    rows = [(f"{link.source} {'->' if link.one_way else '<->'} {link.target}", link_words(link)) for link in topology.links]
    for shared in topology.shared_links:
        rows.append((shared_words(shared), link_words(shared)))
    if topology.default_link:
        rows.append(("any other pair", link_words(topology.default_link)))
    return FittedTable(("link", "bandwidth, latency"), rows)


_LAYER_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "forward_s": ("forward", seconds),
    "backward_s": ("backward", seconds),
    "weight_grad_s": ("weight grad", seconds),
    "output_bytes": ("output", size),
    "saved_bytes": ("saved", size),
    "parameter_bytes": ("parameters", size),
}


def layer_report(layer: LayerProfile, *more: Figure, bar: str | None = None) -> Report:
    """Return the measured figures of a layer, with a bar for its share of the time and figures that the profile does not hold."""
    values = {name: value for name, value in asdict(layer).items() if value is not None}
    return Report(
        Figure("name", values.pop("name"), "layer"),
        *([Figure("", bar, "time")] if bar is not None else []),
        *(Figure(name, value, *_LAYER_COLUMNS.get(name, ())) for name, value in values.items()),
        *more,
    )


def profile_table(profile: ModelProfile) -> FittedTable:
    """Return the layers of a profile, with a bar for the share of each in the time."""
    longest_s = max(layer.forward_s + layer.backward_s for layer in profile.layers) or 1.0
    bars = ["#" * round(_BAR * (layer.forward_s + layer.backward_s) / longest_s) for layer in profile.layers]
    return rows_table([layer_report(layer, bar=bar) for layer, bar in zip(profile.layers, bars, strict=True)], left=2)
