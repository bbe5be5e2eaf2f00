"""Schedules of a run's windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from raypipe.artifacts.plan import Plan
from raypipe.config import ScheduleConfig, TrainConfig
from raypipe.errors import ConfigError
from raypipe.schedule_registry import build, spec
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import first_update, late_updates, one_of_repeated, over_graph, repeated, shard_optimizer
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.validate import validate
from raypipe.simulation.plan_cost import plan_cost


def schedule_request(config: ScheduleConfig, *, num_devices: int, num_updates: int) -> ScheduleRequest:
    """Return what the configured schedule is built to."""
    return ScheduleRequest(
        num_devices=num_devices,
        num_microbatches=config.num_microbatches,
        num_updates=num_updates,
        num_chunks=config.num_chunks or spec(config.name).default_chunks,
        num_pipelines=config.num_pipelines,
        update_scope=config.update_scope,
        max_in_flight=config.max_in_flight,
        max_mean_staleness=config.max_mean_staleness,
    )


def named_schedule(
    config: TrainConfig,
    num_updates: int,
    *,
    graph: StageGraph | None = None,
    times: tuple[StageTimes, ...] = (),
    latency_s: float = 0.0,
    late: int | None = None,
) -> Schedule:
    """Build the configured schedule, over a cut's stage graph if there is one.

    Where stages have copies, updates stand `late` slots later, or by default as late as their sums may last without another version read;
    with a sharded optimizer halfway, since new weights take as long as the sums.

    Raises:
        InputError: The name is unknown, or the schedule does not fit the size or cannot train.
    """
    scaling = config.scaling
    num_workers, left = divmod(scaling.num_devices, scaling.replicas)
    if left:
        raise ConfigError(f"scaling.replicas {scaling.replicas} does not divide scaling.num_devices {scaling.num_devices}; change either")
    request = schedule_request(config.schedule, num_devices=num_workers, num_updates=num_updates)
    schedule = build(config.schedule.name, dataclasses.replace(request, times=times, latency_s=latency_s))
    if graph is not None:
        schedule = over_graph(schedule, graph, times=times, latency_s=latency_s)
    schedule = sharded(config, schedule, range(num_workers) if scaling.replicas > 1 else ())
    if scaling.replicas > 1 or len(schedule.pipelines) > 1:
        schedule = late_updates(schedule, late)
    validate(schedule)
    if schedule.forward_only:
        raise ConfigError(f"schedule.name {config.schedule.name!r}: this order holds no backward; it cannot train")
    return schedule


def window_of(schedule: Schedule, num_updates: int) -> Schedule:
    """Return a plan's order for a window: the order itself, its first update, or one update repeated.

    Raises:
        ConfigError: The order cannot train, or its updates overlap or differ and fit no such window.
    """
    if schedule.forward_only:
        raise ConfigError(f"the plan's order {schedule.name!r} holds no backward; it cannot train")
    if schedule.num_updates == num_updates:
        return schedule
    one = first_update(schedule) if num_updates == 1 else one_of_repeated(schedule)
    if one is None:
        raise ConfigError(
            f"the plan's order {schedule.name!r} is of {schedule.num_updates} updates, which run as a whole, not in a window of "
            f"{num_updates}; let run.num_updates, run.evaluate_every, run.checkpoint_every and schedule.synchronous_updates be multiples "
            f"of {schedule.num_updates}"
        )
    window = repeated(one, num_updates=num_updates)
    validate(window)
    return window


def sharded(config: TrainConfig, schedule: Schedule, replicated_workers: Collection[int]) -> Schedule:
    """Shard the optimizer over the copies of each stage if so configured; `replicated_workers` are several devices each."""
    if not config.scaling.shard_optimizer or is_sharded(schedule):
        return schedule
    schedule = shard_optimizer(schedule, replicated_workers=replicated_workers)
    validate(schedule)
    return schedule


def is_sharded(schedule: Schedule) -> bool:
    """Return whether copies of stages publish their updated weights to others."""
    return bool(schedule.published_stages)


def stage_times(plan: Plan) -> tuple[tuple[StageTimes, ...], float]:
    """Return the times of the plan's stages, and the seconds of its slowest message."""
    cost = plan_cost(plan)
    # Of workers with several devices, the first stands for all: named schedules give them equal shares.
    members = [plan.placement.workers[worker][0] for worker in plan.schedule.pipelines[0]]
    kinds = (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)
    times = tuple(
        StageTimes(*(cost.compute_s(device, (Op(kind, stage, 0),), (share,)) for kind in kinds))
        for stage, (device, share) in enumerate(members)
    )
    ends = [(members[source][0], *members[target], num_bytes) for (source, target), num_bytes in cost.edge_bytes.items()]
    messages = [(cost.path(source, target), share * num_bytes) for source, target, share, num_bytes in ends if source != target]
    return times, max((path.latency_s + num_bytes / path.bandwidth_bytes_per_s for path, num_bytes in messages), default=0.0)


def device_stages(schedule: Schedule, placement: Placement) -> list[tuple[int, ...]]:
    """Return the stages of each device over all pipelines."""
    of_worker = [
        tuple(sorted({stage for workers in schedule.pipelines for stage, at in enumerate(workers) if at == worker}))
        for worker in range(schedule.num_workers)
    ]
    of_device = {device: of_worker[worker] for worker, members in enumerate(placement.workers) for device, _ in members}
    return [of_device[device] for device in sorted(of_device)]
