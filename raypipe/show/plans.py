"""A plan in figures: where its stages are, and what an update takes."""

from __future__ import annotations

from raypipe.artifacts.plan import Plan, Predicted
from raypipe.schedules.passes import recomputed_stages
from raypipe.show.report import Figure, FittedTable, Report, rows_table
from raypipe.units import ratio, seconds, size


def plan_report(plan: Plan, *, planning_s: float | None = None) -> Report:
    """Return what a plan is and promises; the names of the figures are a contract."""
    predicted = prediction(plan)
    rows = plan.schedule.num_microbatches * plan.microbatch_size
    # Where no layer takes time, an update takes none: it has no rate and no bound.
    rate = rows / predicted.update_s if predicted.update_s else None
    return Report(
        Figure("planner", plan.planner),
        Figure("schedule", plan.schedule.name),
        Figure("num_stages", len(plan.stages)),
        Figure("stages", [_stage_document(plan, stage) for stage in range(len(plan.stages))]),
        Figure("recomputed_stages", list(recomputed_stages(plan.schedule))),
        Figure("num_devices", len(plan.devices)),
        Figure("idle_devices", [device.name for device in plan.topology.devices if device.name not in plan.devices]),
        Figure("num_microbatches", plan.schedule.num_microbatches),
        Figure("microbatch_size", plan.microbatch_size),
        Figure("update_s", predicted.update_s, "update", seconds),
        Figure("samples_per_s", rate, "rate", "{:.4g} samples/s".format),
        Figure("bubble_ratio", predicted.bubble_ratio, "bubble", ratio),
        Figure("lower_bound_s", predicted.lower_bound_s, "no plan takes less than", seconds),
        Figure("optimality_gap", predicted.optimality_gap, "gap", ratio),
        Figure("peak_memory_bytes", list(predicted.peak_memory_bytes)),
        *([Figure("planning_s", planning_s, "planned in", seconds)] if planning_s is not None else []),
    )


def prediction(plan: Plan) -> Predicted:
    """Return what a planner predicts of its plan."""
    assert plan.predicted is not None, "a planner simulates its plan"
    return plan.predicted


def _stage_document(plan: Plan, stage: int) -> dict[str, object]:
    workers = [plan.workers[pipeline[stage]] for pipeline in plan.schedule.pipelines]
    return {
        "layers": list(plan.stages[stage]),
        "devices": [[replica.device for replica in replicas] for replicas in workers],
        "shares": [[replica.share for replica in replicas] for replicas in workers],
    }


def stage_table(plan: Plan) -> FittedTable:
    """Return a row for each stage and pipeline."""
    peaks = dict(zip(plan.devices, prediction(plan).peak_memory_bytes, strict=True))
    has_several = len(plan.schedule.pipelines) > 1
    rows = []
    for stage, layers in enumerate(plan.stages):
        for number, pipeline in enumerate(plan.schedule.pipelines):
            replicas = plan.workers[pipeline[stage]]
            devices = [replica.device if len(replicas) == 1 else f"{replica.device}:{replica.share:.3g}" for replica in replicas]
            rows.append(
                Report(
                    Figure("", stage, "stage"),
                    *([Figure("", number, "pipeline")] if has_several else []),
                    Figure("", f"{layers[0]} .. {layers[-1]} ({len(layers)})" if len(layers) > 1 else layers[0], "layers"),
                    Figure("", " ".join(devices), "devices (share of the rows)"),
                    Figure("", max(peaks[replica.device] for replica in replicas), "peak memory", size),
                )
            )
    return rows_table(rows, left=3 + has_several)
