"""Figures and tables of plans, topologies and profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from raypipe.analysis.slack import StageCommunication
from raypipe.artifacts.plan import Plan, Predicted
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Link, Node, NodeLink, SharedLink
from raypipe.artifacts.trace import Dimension
from raypipe.planning.staleness_cost import more_updates
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import recomputed_stages
from raypipe.show.report import Figure, FittedTable, Report, rows_table
from raypipe.simulation.plan_cost import plan_cost
from raypipe.units import number, ratio, seconds, size

_BAR = 12


def plan_report(
    plan: Plan,
    communication: Sequence[StageCommunication] = (),
    *,
    planning_s: float | None = None,
    optimizer: str | None = None,
    synchronous_share: float = 0.0,
) -> Report:
    """Return a plan with its prediction, and the communication of each stage if given; names are JSON keys.

    With an `optimizer`, also what late gradients cost it where this share of a run's updates, the first ones, is on time.
    """
    predicted = prediction(plan)
    rows = plan.schedule.num_microbatches * plan.microbatch_size
    # Where no layer takes time, an update takes none: it has no rate and no bound.
    rate = rows / predicted.update_s if predicted.update_s else None
    return Report(
        Figure("planner", plan.planner),
        Figure("schedule", plan.schedule.name),
        Figure("num_stages", len(plan.stages)),
        Figure("stages", [_stage_document(plan, stage, communication) for stage in range(len(plan.stages))]),
        Figure("recomputed_stages", list(recomputed_stages(plan.schedule))),
        Figure("num_devices", len(plan.devices)),
        Figure("idle_devices", [device.name for device in plan.topology.devices if device.name not in plan.devices]),
        *_islands(plan),
        Figure("num_microbatches", plan.schedule.num_microbatches),
        Figure("microbatch_size", plan.microbatch_size),
        Figure("update_s", predicted.update_s, "update", seconds),
        Figure("samples_per_s", rate, "rate", "{:.4g} samples/s".format),
        Figure("bubble_ratio", predicted.bubble_ratio, "bubble", ratio),
        Figure("lower_bound_s", predicted.lower_bound_s, "no plan takes less than", seconds),
        Figure("lower_bound_reason", predicted.lower_bound_reason, "because" if predicted.lower_bound_s else ""),
        Figure("optimality_gap", predicted.optimality_gap, "gap", ratio),
        *_closer_bounds(predicted),
        Figure("peak_memory_bytes", list(predicted.peak_memory_bytes)),
        *_late(plan, optimizer, synchronous_share),
        *([Figure("planning_s", planning_s, "planned in", seconds)] if planning_s is not None else []),
    )


def _closer_bounds(predicted: Predicted) -> list[Figure]:
    """Return the bounds of plans with some schedules; in words where one says more than that of more plans."""
    one_run_s, bundled_s = predicted.lower_bound_one_run_s, predicted.lower_bound_bundled_s
    of_all_s = predicted.lower_bound_s or 0.0
    bundled = "with a bundled schedule none takes less than" if (bundled_s or 0.0) > of_all_s else ""
    one_run = "of one pipeline with one run of layers a worker none takes less than"
    says_more = (one_run_s or 0.0) > (bundled_s or of_all_s)
    return [
        Figure("lower_bound_bundled_s", bundled_s, bundled, seconds),
        Figure("lower_bound_one_run_s", one_run_s, one_run if says_more else "", seconds),
    ]


def _late(plan: Plan, optimizer: str | None, synchronous_share: float) -> list[Figure]:
    if optimizer is None:
        return []
    mean_delay = metrics(plan.schedule).mean_delay
    return [Figure("mean_staleness", mean_delay), Figure("more_updates", more_updates(optimizer, mean_delay, synchronous_share))]


def _islands(plan: Plan) -> list[Figure]:
    """Return that links do not join all devices, so that the plan stays among some of them."""
    islands = plan.topology.islands
    if len(islands) == 1:
        return []
    chosen = next(number for number, island in enumerate(islands) if plan.devices[0] in island)
    words = f"one of {len(islands)} sets of devices that no link joins, of {len(islands[chosen])} devices"
    return [Figure("islands", [list(island) for island in islands]), Figure("", words, "inside")]


def prediction(plan: Plan) -> Predicted:
    """Return the prediction, which every planned plan has."""
    assert plan.predicted is not None, "a planner simulates its plan"
    return plan.predicted


def _stage_document(plan: Plan, stage: int, communication: Sequence[StageCommunication]) -> dict[str, object]:
    workers = [plan.workers[pipeline[stage]] for pipeline in plan.schedule.pipelines]
    return {
        "layers": list(plan.stages[stage]),
        "devices": [[replica.device for replica in replicas] for replicas in workers],
        "shares": [[replica.share for replica in replicas] for replicas in workers],
        **({"branch": plan.branches[stage]} if plan.branches else {}),
        **(_communication_document(communication[stage]) if communication else {}),
    }


def _communication_document(of_stage: StageCommunication) -> dict[str, object]:
    exposed_s = {str(carried): of_stage.exposed_s.get(carried, 0.0) for carried in Dimension}
    return {"sum_need_s": of_stage.need_s, "sum_slack_s": of_stage.slack_s, "exposed_s": exposed_s}


def stage_table(plan: Plan, communication: Sequence[StageCommunication] = ()) -> FittedTable:
    """Return a row for each stage of each pipeline, with the communication of the stage if given."""
    peaks = dict(zip(plan.devices, prediction(plan).peak_memory_bytes, strict=True))
    has_several = len(plan.schedule.pipelines) > 1
    has_sums = any(of_stage.need_s is not None for of_stage in communication)
    rows = []
    for stage, layers in enumerate(plan.stages):
        for at, pipeline in enumerate(plan.schedule.pipelines):
            replicas = plan.workers[pipeline[stage]]
            devices = [replica.device if len(replicas) == 1 else f"{replica.device}:{replica.share:.3g}" for replica in replicas]
            rows.append(
                Report(
                    Figure("", stage, "stage"),
                    *([Figure("", at, "pipe-\nline")] if has_several else []),
                    *_branch_figure(plan, stage),
                    Figure("", layers, "layers", _range),
                    Figure("", " ".join(devices), "devices\n(share of the rows)"),
                    Figure("", max(peaks[replica.device] for replica in replicas), "peak\nmemory", size),
                    *_communication_figures(communication[stage] if communication else None, has_sums),
                )
            )
    return rows_table(rows, left=3 + has_several + bool(plan.branches))


def _communication_figures(of_stage: StageCommunication | None, has_sums: bool) -> list[Figure]:
    if of_stage is None:
        return []
    of_sums = [Figure("", of_stage.need_s, "its sum\nneeds", seconds), Figure("", of_stage.slack_s, "slack", seconds)]
    return [*(of_sums if has_sums else ()), Figure("", sum(of_stage.exposed_s.values()), "exposed\nan update", seconds)]


def _branch_figure(plan: Plan, stage: int) -> list[Figure]:
    return [Figure("", plan.branches[stage] or None, "branch")] if plan.branches else []


def plan_table(plan: Plan) -> FittedTable:
    """Return the stages with their costs for one microbatch."""
    cost = plan_cost(plan)
    rows = []
    for stage, layers in enumerate(plan.stages):
        workers = sorted({pipeline[stage] for pipeline in plan.schedule.pipelines})
        devices = [device for worker in workers for device, _ in plan.placement.workers[worker]]
        times = cost.stages[devices[0], stage]
        rows.append(
            Report(
                Figure("", stage, "stage"),
                *_branch_figure(plan, stage),
                Figure("", tuple(plan.devices[device] for device in devices), "devices", _several),
                Figure("", layers, "layers", _range),
                Figure("", times.forward_s, "forward", seconds),
                Figure("", times.backward_s, "backward", seconds),
                Figure("", times.parameter_bytes, "para-\nmeters", size),
            )
        )
    return rows_table(rows, left=3 + bool(plan.branches))


def _several(names: Sequence[str], most: int = 4) -> str:
    return " ".join(names) if len(names) <= most else f"{names[0]} .. {names[-1]} ({len(names)})"


_range = partial(_several, most=2)  # of names in a row


def topology_report(topology: ClusterTopology) -> Report:
    """Return the figures of a topology, with a report for each node; names are JSON keys."""
    return Report(
        Figure("name", topology.name),
        Figure("num_nodes", len(topology.nodes), "nodes"),
        Figure("num_devices", topology.num_devices, "devices"),
        Figure("nodes", list(map(_node_report, topology.nodes))),
        Figure("num_links", len(topology.links), "links"),
        Figure("num_shared_links", len(topology.shared_links), "shared links"),
    )


def _node_report(node: Node) -> Report:
    memory = sorted({device.memory_bytes for device in node.devices if device.memory_bytes is not None})
    return Report(
        Figure("name", node.name, "node"),
        Figure("devices", tuple(device.name for device in node.devices), "devices", _range),
        Figure("", " ".join(sorted({device.kind for device in node.devices})), "kind"),
        Figure("", _span(list(map(size, memory))), "memory\neach"),
        Figure("", _span(list(map(number, sorted({device.speed for device in node.devices})))), "speed"),
        Figure("", node.cores, "cores\nshared"),
        Figure("", link_words(node.link) if node.link else "the default", "link between\ndevices"),
    )


def node_table(topology: ClusterTopology) -> FittedTable:
    """Return a row for each node."""
    return rows_table(list(map(_node_report, topology.nodes)), left=3)


def _span(words: Sequence[str]) -> str:
    return "-" if not words else words[0] if words[0] == words[-1] else f"{words[0]} .. {words[-1]}"


def link_ends(link: Link) -> str:
    """Return `source -> target`, or `source <-> target` for both directions."""
    return f"{link.source} {'->' if link.one_way else '<->'} {link.target}"


def link_words(link: Link | NodeLink | SharedLink) -> str:
    """Return bandwidth and latency."""
    bandwidth = "no limit" if link.bandwidth_bytes_per_s is None else f"{size(link.bandwidth_bytes_per_s)}/s"
    return bandwidth if isinstance(link, SharedLink) else f"{bandwidth}, {seconds(link.latency_s)}"


def shared_words(shared: SharedLink) -> str:
    """Return name and pairs of a shared link."""
    return f"{shared.name}, shared by {_several([f'{source}->{target}' for source, target in shared.members])}"


def link_table(topology: ClusterTopology) -> FittedTable:
    """Return a row for each link, the default last."""
    links: list[tuple[str, Link | NodeLink | SharedLink]] = [(link_ends(link), link) for link in topology.links]
    links += [(shared_words(shared), shared) for shared in topology.shared_links]
    links += [("any other pair", topology.default_link)] if topology.default_link else []
    return rows_table([Report(Figure("", ends, "link"), Figure("", link, "bandwidth, latency", link_words)) for ends, link in links])


_LAYER_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "forward_s": ("forward", seconds),
    "backward_s": ("backward", seconds),
    "weight_grad_s": ("weight grad", seconds),
    "fixed_share": ("fixed", ratio),
    "output_bytes": ("output", size),
    "saved_bytes": ("saved", size),
    "parameter_bytes": ("parameters", size),
}


def profile_report(profile: ModelProfile) -> Report:
    """Return the sums of a profile; names are JSON keys."""
    summed = ("forward_s", "backward_s", "weight_grad_s", "parameter_bytes", "saved_bytes")
    return Report(
        Figure("name", profile.name),
        Figure("microbatch_size", profile.microbatch_size),
        Figure("num_layers", profile.num_layers, "layers"),
        *(Figure(name, sum(getattr(layer, name) for layer in profile.layers), *_LAYER_COLUMNS[name]) for name in summed),
    )


def layer_report(layer: LayerProfile, *more: Figure, bar: str | None = None) -> Report:
    """Return the figures of a layer, with a bar for its time and figures beyond the profile's."""
    values = {name: value for name, value in asdict(layer).items() if value is not None}
    return Report(
        Figure("name", values.pop("name"), "layer"),
        *([Figure("", bar, "time")] if bar is not None else []),
        *(Figure(name, value, *_LAYER_COLUMNS.get(name, ())) for name, value in values.items()),
        *more,
    )


def profile_table(profile: ModelProfile) -> FittedTable:
    """Return a row for each layer, with a bar for its time."""
    longest_s = max(layer.forward_s + layer.backward_s for layer in profile.layers) or 1.0
    bars = ["#" * round(_BAR * (layer.forward_s + layer.backward_s) / longest_s) for layer in profile.layers]
    return rows_table([layer_report(layer, bar=bar) for layer, bar in zip(profile.layers, bars, strict=True)], left=2)
