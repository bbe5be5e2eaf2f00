"""Figures as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from raypipe.analysis.comparison import Figure
from raypipe.analysis.idle import Cause, Division
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Link, NodeLink, SharedLink
from raypipe.artifacts.trace import Trace
from raypipe.schedules.ir import Schedule
from raypipe.simulation.plan_cost import plan_cost
from raypipe.units import number, ratio, seconds, size

MOST_ROWS = 48
_BAR = 20


def table(columns: Sequence[str], rows: Iterable[Iterable[str]], *, left: int = 1, title: str | None = None) -> Table:
    """A table without lines: the first `left` columns are text, the others numbers. Rows beyond the 48th are counted only."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left")
    for position, column in enumerate(columns):
        found.add_column(column, justify="left" if position < left else "right")
    rows = list(rows)
    for row in rows[:MOST_ROWS]:
        found.add_row(*row)
    if len(rows) > MOST_ROWS:
        found.add_row(f"({len(rows) - MOST_ROWS} more)")
    return found


def schedule_table(schedule: Schedule, trace: Trace, figures: Mapping[str, Any]) -> Table:
    """What each device of a simulated schedule does and holds."""
    held: dict[int, list[int]] = {}
    for holder in schedule.first_pipeline:
        held.setdefault(holder.worker, []).append(holder.stage)
    return table(
        ("device", "stages", "busy", "idle", "peak in flight", "weight copies"),
        (
            (
                trace.devices[device],
                " ".join(map(str, sorted(held.get(device, ())))),
                seconds(trace.busy_s[device]),
                seconds(trace.idle_s[device]),
                str(figures["peak_in_flight"][device]),
                str(figures["weight_copies"][device]),
            )
            for device in range(len(trace.devices))
        ),
        left=2,
    )


_FIGURE_WORDS: Mapping[str, Callable[[float], str]] = {"s": "{:.4f} s".format, "bytes": size, "ratio": ratio}


def comparison_table(figures: Iterable[Figure], *, measured: str = "measured", title: str | None = None) -> Table:
    """Predicted against measured.

    Args:
        figures: a row each.
        measured: the word for it.
        title: of the table.
    """
    rows = []
    for figure in figures:
        words = _FIGURE_WORDS[figure.unit]
        error = ratio(figure.error) if figure.error < 0 else f"+{ratio(figure.error)}"
        values = (figure.predicted, figure.measured, figure.spread)
        rows.append((figure.name, *map(words, values), error + ("" if figure.is_amount else " points")))
    return table(("figure", "predicted", measured, "spread", "error"), rows, title=title)


def trace_table(trace: Trace, memory_bytes: Sequence[int | None] = ()) -> Table:
    """What each device of a trace did.

    Args:
        trace: simulated or measured.
        memory_bytes: what each device has, for comparison with the most that it held.
    """
    columns = ["device", "busy", "waiting", "bubble"]
    rows = [
        [name, seconds(busy), seconds(wait), ratio(bubble)]
        for name, busy, wait, bubble in zip(trace.devices, trace.busy_s, trace.wait_s, trace.device_bubble_ratios, strict=True)
    ]
    if trace.memory:
        columns.append("peak memory")
        for device, peak in enumerate(trace.peak_memory_bytes):
            limit = memory_bytes[device] if memory_bytes else None
            rows[device].append(size(peak) + (f" of {size(limit)}" if limit is not None else ""))
    return table(columns, rows)


_IDLE_COLUMNS: Mapping[str, frozenset[Cause]] = {
    "computing": frozenset({Cause.COMPUTE}),
    "warm-up": frozenset({Cause.WARM_UP}),
    "activation": frozenset({Cause.ACTIVATION}),
    "gradient": frozenset({Cause.GRADIENT}),
    "collective": frozenset({Cause.COLLECTIVE}),
    "transfer": frozenset(cause for cause in Cause if cause.is_transfer),
    "overhead": frozenset({Cause.OVERHEAD}),
    "drain": frozenset({Cause.DRAIN}),
}


def idle_table(division: Division) -> Table:
    """Where the time of each device went, in shares of the window; causes that do not occur are left out.

    `activation`, `gradient` and `collective` are waits for what others had not finished, `transfer` for what was on its way. The last
    column names the device that this one waited for most.
    """
    whole_s = division.trace.makespan_s or 1.0
    columns = {
        name: [sum(row.get(cause, 0.0) for cause in causes) / whole_s for row in division.by_cause_s]
        for name, causes in _IDLE_COLUMNS.items()
    }
    kept = {name: shares for name, shares in columns.items() if name == "computing" or any(share >= 0.0005 for share in shares)}
    longest = [division.peer_most_waited_for(device) for device in range(len(division.pieces))]
    names = division.trace.devices
    rows = (
        (name, *(ratio(shares[device]) for shares in kept.values()), names[wait.peer] if wait else "-")
        for device, (name, wait) in enumerate(zip(names, longest, strict=True))
    )
    return table(("device", *kept, "waits for"), rows)


def plan_table(plan: Plan) -> Table:
    """The stages of a plan, where they are and what they cost there for one microbatch."""
    cost = plan_cost(plan)
    rows = []
    for stage, layers in enumerate(plan.stages):
        workers = sorted({laying[stage] for laying in plan.schedule.pipelines})
        devices = [device for worker in workers for device, _ in plan.placement.workers[worker]]
        here = cost.stages[devices[0], stage]
        rows.append((
            str(stage),
            _several([plan.devices[device] for device in devices]),
            _several(layers),
            seconds(here.forward_s),
            seconds(here.backward_s),
            size(here.parameter_bytes),
        ))
    return table(("stage", "devices", "layers", "forward", "backward", "parameters"), rows, left=3)


def _several(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)})"


def node_table(topology: ClusterTopology) -> Table:
    """The nodes of a topology and their devices."""
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
    return table(("node", "devices", "kind", "memory each", "speed", "cores shared", "link between devices"), rows, left=3)


def _span(words: Sequence[str]) -> str:
    return "-" if not words else words[0] if words[0] == words[-1] else f"{words[0]} .. {words[-1]}"


def link_words(link: Link | NodeLink | SharedLink) -> str:
    """Bandwidth and latency of a link."""
    bandwidth = "no limit" if link.bandwidth_bytes_per_s is None else f"{size(link.bandwidth_bytes_per_s)}/s"
    return bandwidth if isinstance(link, SharedLink) else f"{bandwidth}, {seconds(link.latency_s)}"


def shared_words(shared: SharedLink) -> str:
    """A shared link and who shares it."""
    return f"{shared.name}, shared by {_several([f'{source}->{target}' for source, target in shared.members])}"


def link_table(topology: ClusterTopology) -> Table:
    """The links between the nodes or devices of a topology."""
    rows = [(f"{link.source} {'->' if link.one_way else '<->'} {link.target}", link_words(link)) for link in topology.links]
    for shared in topology.shared_links:
        rows.append((shared_words(shared), link_words(shared)))
    if topology.default_link:
        rows.append(("any other pair", link_words(topology.default_link)))
    return table(("link", "bandwidth, latency"), rows)


def profile_table(profile: ModelProfile) -> Table:
    """The layers of a profile, with a bar for the share of each in the time."""
    longest_s = max(layer.forward_s + layer.backward_s for layer in profile.layers)
    rows = []
    for layer in profile.layers:
        share = (layer.forward_s + layer.backward_s) / longest_s if longest_s else 0.0
        rows.append((
            layer.name,
            "#" * round(_BAR * share),
            seconds(layer.forward_s),
            seconds(layer.backward_s),
            seconds(layer.weight_grad_s),
            size(layer.output_bytes),
            size(layer.saved_bytes),
            size(layer.parameter_bytes),
        ))
    return table(("layer", "time", "forward", "backward", "weight grad", "output", "saved", "parameters"), rows, left=2)
