"""The strategy of a schedule's name: one device a worker, stages balanced by layer times measured on the run's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, make_plan
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import find_slots
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, PlanError, ScheduleError
from raypipe.model import Model
from raypipe.planning.balance import balanced_cut
from raypipe.schedules.lower import Placement
from raypipe.training.checks import check_staleness
from raypipe.training.run_cluster import Notice, num_measuring_devices, run_topology
from raypipe.training.run_schedules import named_schedule, stage_times
from raypipe.training.strategy import Measure, Strategy


class NamedStrategy(Strategy):
    """Runs the configured schedule.

    Raises:
        InputError: The schedule is unknown, or does not fit the sizes or the model.
    """

    def __init__(self, config: TrainConfig, model: Model, *, window_sizes: Collection[int]) -> None:
        schedules = {size: named_schedule(config, size) for size in sorted(window_sizes)}
        num_workers = schedules[max(schedules)].num_workers
        super().__init__(config, model, schedules=schedules, placement=Placement.one_each(num_workers))
        num_layers, num_stages = len(model.layers), self.schedule.num_stages
        if num_stages > num_layers:
            raise PlanError(
                f"the schedule {self.schedule.name!r} on {self.schedule.num_workers} devices has {num_stages} stages, "
                f"the model only {num_layers} layers; lower scaling.num_devices or schedule.num_chunks"
            )
        sizes = config.scaling.layers_per_stage
        if sizes is not None and (len(sizes) != num_stages or sum(sizes) != num_layers):
            raise PlanError(
                f"scaling.layers_per_stage {list(sizes)} does not give {num_layers} layers to {num_stages} stages; "
                f"it needs {num_stages} numbers with the sum {num_layers}"
            )

    @property
    def num_slots(self) -> int:
        """See `Strategy`."""
        return self.config.scaling.num_devices

    def find_slots(self, *, local: bool) -> list[DeviceSlot]:
        """See `Strategy`."""
        return find_slots(self.config.scaling)

    def prepare(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """See `Strategy`."""
        scaling = self.config.scaling
        profile = measure(num_measuring_devices(coordinator, scaling))
        sizes = scaling.layers_per_stage
        cut = balanced_cut(profile, self.schedule.num_stages) if sizes is None else Cut.of_sizes(sizes, self.model.edges(), profile.ties())
        self.schedules = {size: named_schedule(self.config, size, graph=cut.graph) for size in self.schedules}
        topology = run_topology(self.config, coordinator, notice, num_devices=self.schedule.num_workers)
        plan = make_plan(
            name=name,
            planner="given" if sizes is not None else "balanced",
            cut=cut,
            schedule=self.schedule,
            profile=profile,
            topology=topology,
            devices=tuple(device.name for device in topology.devices),
            microbatch_size=self.config.schedule.microbatch_size,
        )
        self._predict(self._searched(plan, notice))

    def _searched(self, plan: Plan, notice: Notice) -> Plan:
        times, latency_s = stage_times(plan)
        search = partial(named_schedule, self.config, graph=plan.cut.graph, times=times, latency_s=latency_s)
        least = min(self.schedules)
        try:
            if search(least) == self.schedules[least]:
                return plan
            schedules = {size: search(size) for size in self.schedules}
            for schedule in schedules.values():
                check_staleness(self.config, schedule)
        except (ScheduleError, ConfigError) as error:
            # The order for equal stages keeps the limits: it was checked before anything started.
            notice(f"the order for equal stages runs, not the one that was searched for their measured times: {error}")
            return plan
        self.schedules = schedules
        return dataclasses.replace(plan, schedule=self.schedule)
