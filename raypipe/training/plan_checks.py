"""What of a plan or a schedule must fit the configuration, the model and the devices; each check says what to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from raypipe.actors.execution.programs import check_executable
from raypipe.artifacts.cut import joined
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cluster.node_matching import is_gpu
from raypipe.config import ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.errors import ConfigError, PlanError
from raypipe.model import Model
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import one_of_repeated

_ROW_TOLERANCE = 1e-6
_MOST_PARTS = 1000
"""Shares are read as fractions with at most this denominator: 0.3333 in a file is not a third, 1 / 3 in a program is."""


def check_staleness(config: TrainConfig, schedule: Schedule) -> None:
    """Refuse a schedule that exceeds a staleness limit of the configuration.

    Raises:
        ConfigError: Names the limit and the value that would admit the schedule.
    """
    limits = config.schedule.staleness
    if not limits:
        return
    for name, value in limits.exceeded_by(metrics(schedule)).items():
        raise ConfigError(
            f"schedule.{name} is {getattr(limits, name):g}, but {schedule.name!r} with {schedule.num_microbatches} microbatches an update "
            f"has {value:g}; allow {value:g}, choose another schedule, or let schedule.name be auto"
        )


def check_alike(topology: ClusterTopology, devices: Sequence[str]) -> None:
    """Refuse a mix of CPU slots and GPUs, which have no transport in common.

    Raises:
        PlanError: Names a device of each sort.
    """
    gpus = {is_gpu(topology.device(device)): device for device in devices}
    if len(gpus) > 1:
        raise PlanError(f"device {gpus[False]!r} is a CPU slot, {gpus[True]!r} a GPU: a run takes devices of one sort; plan for either")


def check_model(plan: Plan, model: Model) -> None:
    """Refuse a plan whose profile has other layers, edges or ties than the model.

    Raises:
        PlanError: Names the first difference.
    """
    ours, theirs = [layer.name for layer in model.layers], [layer.name for layer in plan.profile.layers]
    remedy = "it is a plan for another model; check model.function and model.options, or profile and plan again"
    for number, (built, profiled) in enumerate(zip(ours, theirs, strict=False)):
        if built != profiled:
            raise PlanError(f"layer {number} of the model is {built!r}, that of the plan's profile {profiled!r}: {remedy}")
    if len(ours) != len(theirs):
        raise PlanError(f"the model has {len(ours)} layers, the plan's profile {len(theirs)}: {remedy}")
    different = set(model.edges()) ^ {(edge.producer, edge.consumer) for edge in plan.profile.edges()}
    if different:
        source, target = min(different)
        where = "model" if (source, target) in model.edges() else "plan's profile"
        raise PlanError(f"only in the {where} does layer {ours[source]!r} feed {ours[target]!r}: {remedy}")
    if joined(model.tied_layers()) != joined(plan.profile.ties()):
        shared = [[[ours[layer] for layer in tie] for tie in sorted(joined(ties))] for ties in (model.tied_layers(), plan.profile.ties())]
        raise PlanError(f"the layers of the model that share weights are {shared[0]}, those of the plan's profile {shared[1]}: {remedy}")


def check_runnable(schedule: Schedule, placement: Placement, microbatch_size: int) -> None:
    """Refuse an order that the executor cannot run on microbatches of this many rows.

    Raises:
        InputError: The order asks for what the executor does not do, or cuts a microbatch within a row.
    """
    check_rows(placement, microbatch_size)
    check_executable(schedule)
    if not any(op.part for op, _ in schedule.ops()):
        return
    for program in lower(schedule, placement):
        if any(abs(end * microbatch_size - round(end * microbatch_size)) > _ROW_TOLERANCE for rows in program.row_ranges for end in rows):
            raise PlanError(f"the order {schedule.name!r} cuts microbatches of {microbatch_size} rows into parts that are no whole rows")


def least_rows(boundaries: Iterable[float], *, most: int) -> int:
    """Return the fewest rows of which all shares are whole rows; `most` where that takes more.

    Args:
        boundaries: Where shares begin and end, from 0 to 1.
        most: Rows that there are.
    """
    return min(math.lcm(*(Fraction(boundary).limit_denominator(_MOST_PARTS).denominator for boundary in boundaries)), most)


def check_rows(placement: Placement, num_rows: int) -> None:
    """Refuse a placement in which a device's share of a microbatch is not whole rows: it would not work on the share that was predicted.

    Raises:
        PlanError: Names the nearest shares that would work.
    """
    for worker, members in enumerate(placement.workers):
        if len(members) > num_rows:
            raise PlanError(
                f"worker {worker} has {len(members)} devices for microbatches of {num_rows} rows; use a microbatch_size of at least "
                f"{len(members)}, or fewer replicas"
            )
        wanted = [share * num_rows for _, share in members]
        if all(abs(rows - round(rows)) < _ROW_TOLERANCE and round(rows) for rows in wanted):
            continue
        whole = _nearest_whole(wanted, num_rows)
        parts = math.lcm(*(Fraction(share).limit_denominator(_MOST_PARTS).denominator for _, share in members))
        remedy = f"the nearest that work: {', '.join(f'{rows}/{num_rows}' for rows in whole)}"
        if parts <= _MOST_PARTS:
            remedy += f"; or a microbatch_size that is a multiple of {parts}"
        raise PlanError(
            f"worker {worker}: the shares {', '.join(f'{share:g}' for _, share in members)} of {num_rows} rows are "
            f"{', '.join(f'{rows:g}' for rows in wanted)} rows, which cannot be cut; {remedy}"
        )


def _nearest_whole(wanted: Sequence[float], num_rows: int) -> list[int]:
    spare = num_rows - len(wanted)
    # Every device has one row; the others are divided where the running sums are rounded.
    beyond = [max(rows - 1.0, 0.0) for rows in wanted]
    scale = spare / math.fsum(beyond) if any(beyond) else 0.0
    sums = [0.0]
    for rows in beyond:
        sums.append(sums[-1] + rows * scale)
    whole = [1 + round(end) - round(first) for first, end in pairwise(sums)]
    whole[-1] += num_rows - sum(whole)
    return whole


def with_plan(config: TrainConfig, plan: Plan) -> TrainConfig:
    """Return the configuration with the values that the plan decides.

    Raises:
        ConfigError: The configuration sets one of them to neither its default nor the plan's value.
    """
    order = plan.schedule
    schedule: dict[str, Any] = {
        "name": order.name,
        "num_microbatches": order.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "num_chunks": None,
        "num_pipelines": 0,
        "update_scope": order.update_scope,
        "max_in_flight": None,
    }
    if one_of_repeated(plan.schedule) is None:
        schedule["updates_per_window"] = order.num_updates
    scaling: dict[str, Any] = {"num_devices": len(plan.devices), "topology": None, "layers_per_stage": None, "calibration": None}
    for section, default, decided in (("schedule", ScheduleConfig(), schedule), ("scaling", ScalingConfig(), scaling)):
        for name, value in decided.items():
            configured = getattr(getattr(config, section), name)
            if configured not in {value, getattr(default, name)}:
                has = f"the plan {config.plan} has {value}" if value else f"the plan {config.plan} decides that"
                raise ConfigError(f"{section}.{name} is {configured}, {has}; leave it out, or make a plan for it")
    return dataclasses.replace(
        config, schedule=dataclasses.replace(config.schedule, **schedule), scaling=dataclasses.replace(config.scaling, **scaling)
    )
