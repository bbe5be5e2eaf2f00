"""Strategies: how a run divides its work."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial

from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.orders import LayerSize
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Predicted, make_plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.trace import Trace
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import find_slots, planned_slots
from raypipe.cluster.node_matching import num_slots
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, PlanError, ScheduleError
from raypipe.model import Model
from raypipe.planning.balance import balanced_cut
from raypipe.planning.late import fewest_slots
from raypipe.schedules.families import amdp_auto
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import DeviceProgram, Placement, check_whole_losses
from raypipe.schedules.passes import evaluation
from raypipe.schedules.validate import validate
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.plan_cost import late_row_stages, plan_cost, plan_programs, stage_buckets
from raypipe.simulation.simulator import Timing, simulate, time_order
from raypipe.training.checks import (
    check_alike,
    check_links,
    check_model,
    check_parts,
    check_rows,
    check_runnable,
    check_staleness,
    least_rows,
)
from raypipe.training.run_cluster import Notice, num_measuring_devices, run_topology
from raypipe.training.run_schedules import device_stages, named_schedule, sharded, stage_times, window_of

Measure = Callable[[int], ModelProfile]
_SIMULATED_UPDATES = 6


class Strategy(ABC):
    """Stages of a run on its devices, and the order of their work.

    Attributes:
        schedules: Schedule of a window, by its number of updates.
        plan: What runs, with its prediction; set by `prepare`.
        predicted: Simulated window of the largest size; set by `prepare`.
    """

    plan: Plan
    predicted: Trace

    def __init__(self, config: TrainConfig, model: Model, *, schedules: Mapping[int, Schedule], placement: Placement) -> None:
        self.config = config
        self.model = model
        self.schedules = dict(schedules)
        self.placement = placement
        if model.loss_couples_rows:
            for schedule in self.schedules.values():
                check_whole_losses(schedule, placement)

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Number of device slots that one node needs to hold the whole run."""

    @abstractmethod
    def find_slots(self, *, local: bool) -> list[DeviceSlot]:
        """Return the devices' slots in the connected cluster, `local` if started for this run."""

    @abstractmethod
    def prepare(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """Make and predict the plan `name`, once the actors are up."""

    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:  # noqa: B027  # most strategies have nothing to check
        """Refuse built layers that differ from the planned."""

    @property
    def schedule(self) -> Schedule:
        """Schedule of the largest window."""
        return self.schedules[max(self.schedules)]

    @cached_property
    def cut(self) -> Cut:
        """Layers of each stage; edges are in the order in which the model's layers take their inputs."""
        return Cut(self.plan.cut.stages, self.model.edges(), self.model.tied_layers())

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """Stages of each device."""
        return device_stages(self.schedule, self.placement)

    @property
    def devices(self) -> list[int]:
        """Number of the launched slot of each device of the plan."""
        return list(range(len(self.plan.devices)))

    @property
    def launched(self) -> tuple[str, ...]:
        """Name in the plan's topology of the device in each launched slot."""
        return self.plan.devices

    @property
    def microbatch_size(self) -> int:
        """Rows of a microbatch."""
        return self.config.schedule.microbatch_size

    @property
    def num_validation_microbatches(self) -> int:
        """Microbatches of an evaluation."""
        return self.config.data.num_validation_microbatches

    @property
    def num_sample_rows(self) -> int:
        """Fewest rows that the devices of every worker can share."""
        boundaries = [end for worker in range(len(self.placement.workers)) for _, rows in self.placement.rows(worker) for end in rows]
        return least_rows(boundaries, most=self.microbatch_size)

    def programs(self) -> dict[str, tuple[DeviceProgram, ...]]:
        """Return the programs of all devices: `train-N` for N updates, `evaluate` and `predict`."""
        # A profile may list edges in another order than the model.
        graph = self.cut.graph
        for size, schedule in self.schedules.items():
            if schedule.graph != graph:
                self.schedules[size] = dataclasses.replace(schedule, graph=graph)
            validate(self.schedules[size])
        profile, cut = self.plan.profile, self.plan.cut
        lowered = partial(executable_programs, buckets=stage_buckets(profile, cut), late_rows=late_row_stages(profile, cut))
        programs = {f"train-{size}": lowered(schedule, self.placement) for size, schedule in self.schedules.items()}
        if count := self.num_validation_microbatches:
            programs["evaluate"] = executable_programs(evaluation(self.schedule, num_microbatches=count), self.placement)
        programs["predict"] = executable_programs(evaluation(self.schedule, num_microbatches=1), self.placement)
        return programs

    def _predict(self, plan: Plan) -> None:
        self.predicted = simulate(plan)
        overlaps = plan.schedule.weight_rule.overlaps_updates
        # Updates that overlap have no time of their own, only a share of the window, as the plan and its bound count.
        update_s = self.predicted.makespan_s / self.predicted.num_updates if overlaps else self.predicted.update_s
        bound_s = plan.predicted.lower_bound_s if plan.predicted else None
        # The bound is for an update that runs alone; stages that update by themselves start the next one early and may beat it.
        holds = bound_s is not None and bound_s <= update_s * (1 + 1e-9)
        predicted = Predicted(
            update_s=update_s,
            bubble_ratio=self.predicted.bubble_ratio,
            device_bubble_ratios=self.predicted.device_bubble_ratios,
            peak_memory_bytes=self.predicted.peak_memory_bytes,
            lower_bound_s=bound_s if holds else None,
        )
        self.plan = dataclasses.replace(plan, predicted=predicted)


class NamedStrategy(Strategy):
    """Runs the configured schedule; stages are balanced by layer times measured on the run's devices.

    Raises:
        InputError: The schedule is unknown, or does not fit sizes or model.
    """

    def __init__(self, config: TrainConfig, model: Model, *, window_sizes: Collection[int]) -> None:
        schedules = {size: named_schedule(config, size) for size in sorted(window_sizes)}
        placement = Placement.even(schedules[max(schedules)].num_workers, config.scaling.replicas)
        check_rows(placement, config.schedule.microbatch_size)
        super().__init__(config, model, schedules=schedules, placement=placement)
        check_parts(self.schedule, self.placement, config.schedule.microbatch_size)
        num_layers, num_stages = len(model.layers), self.schedule.num_stages
        if num_stages > num_layers:
            raise PlanError(
                f"the schedule {self.schedule.name!r} on {self.schedule.num_workers} workers has {num_stages} stages, "
                f"the model only {num_layers} layers; lower scaling.num_devices or schedule.num_chunks, or raise scaling.replicas"
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
        topology = run_topology(self.config, coordinator, notice, num_devices=scaling.num_devices)
        plan = make_plan(
            name=name,
            planner="given" if sizes is not None else "balanced",
            cut=cut,
            schedule=self.schedule,
            profile=profile,
            topology=topology,
            devices=tuple(device.name for device in topology.devices),
            microbatch_size=self.config.schedule.microbatch_size,
            replicas=scaling.replicas,
        )
        self._predict(self._searched(plan, notice))

    def _searched(self, plan: Plan, notice: Notice) -> Plan:
        times, latency_s = stage_times(plan)
        search = partial(named_schedule, self.config, graph=plan.cut.graph, times=times, latency_s=latency_s)
        # One update alone hides what differs where updates overlap.
        least = min((size for size in self.schedules if size > 1), default=1)
        try:
            late = self._late(plan, search)
            if late is None and search(least) == self.schedules[least]:
                return plan
            schedules = {size: search(size, late=late) for size in self.schedules}
            for schedule in schedules.values():
                check_staleness(self.config, schedule)
        except (ScheduleError, ConfigError) as error:
            # The order for equal stages keeps the limits: it was checked before anything started.
            notice(f"the order for equal stages runs, not the one that was searched for their measured times: {error}")
            return plan
        self.schedules = schedules
        return dataclasses.replace(plan, schedule=self.schedule)

    def _late(self, plan: Plan, search: Callable[..., Schedule]) -> int | None:
        """Return the slots by which updates of an order that is searched for wait for the sums of copies, or `None` for the usual."""
        if self.config.schedule.name != amdp_auto.SPEC.name:
            return None
        num_updates = min(max(self.schedules), _SIMULATED_UPDATES)
        cost = plan_cost(plan)

        def timed(late: int | None) -> Timing | None:
            try:
                schedule = search(num_updates, late=late)
                check_staleness(self.config, schedule)
            except (ScheduleError, ConfigError):
                return None
            return time_order(CompiledOrder(plan_programs(dataclasses.replace(plan, schedule=schedule))), cost)

        now = timed(None)
        if now is None:
            return None
        return fewest_slots(now, lambda late: None if (later := timed(late)) is None else later.steady_update_s) or None


class PlannedStrategy(Strategy):
    """Runs a plan, whose values the configuration has (`with_plan`).

    Raises:
        PlanError: Plan and model differ, or a device's share is not whole rows.
        ConfigError: Windows cannot have these sizes.
        ScheduleError: The order can be simulated, but not run.
    """

    def __init__(self, plan: Plan, config: TrainConfig, model: Model, *, window_sizes: Collection[int]) -> None:
        self.file_plan = plan
        check_model(plan, model)
        check_alike(plan.topology, plan.devices)
        check_links(plan, config.scaling.transport)
        check_runnable(plan.schedule, plan.placement, plan.microbatch_size)
        replicated = plan.placement.replicated_workers
        schedules = {size: sharded(config, window_of(plan.schedule, size), replicated) for size in sorted(window_sizes)}
        super().__init__(config, model, schedules=schedules, placement=plan.placement)

    @property
    def num_slots(self) -> int:
        """See `Strategy`."""
        return num_slots(self.file_plan.topology, self.file_plan.devices)

    def find_slots(self, *, local: bool) -> list[DeviceSlot]:
        """See `Strategy`."""
        return planned_slots(self.file_plan.topology, self.file_plan.devices, self.config.scaling, local=local)

    def prepare(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """See `Strategy`."""
        plan = self.file_plan
        coordinator.links.seed(plan.topology)
        if self.config.scaling.measure_layers:
            profile = _at_speed_one(measure(1), plan)
            plan = dataclasses.replace(plan, profile=profile, profile_digest=profile.digest)
        self._predict(dataclasses.replace(plan, schedule=self.schedule))

    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:
        """Refuse layers with other weights than the profile says.

        Raises:
            PlanError: Names the first such layer.
        """
        for layer, profile in enumerate(self.plan.profile.layers):
            if sizes[layer].parameter_bytes != profile.parameter_bytes:
                raise PlanError(
                    f"layer {profile.name!r} has {sizes[layer].parameter_bytes} bytes of weights, the plan's profile says "
                    f"{profile.parameter_bytes}: it is of another model; check model.options, or profile and plan again"
                )


def _at_speed_one(measured: ModelProfile, plan: Plan) -> ModelProfile:
    kinds = {plan.topology.device(name).kind for name in plan.devices}
    if len(kinds) > 1:
        raise ConfigError(
            f"scaling.measure_layers: the plan has devices of the kinds {', '.join(sorted(kinds))}, of which a run measures one; "
            "use `raypipe profile`, and plan again"
        )
    speed = plan.topology.device(plan.devices[0]).speed

    def scaled(layer: LayerProfile) -> LayerProfile:
        times = dataclasses.asdict(layer.times.scaled(speed))
        return dataclasses.replace(layer, **times, update_s=None if layer.update_s is None else layer.update_s * speed)

    return dataclasses.replace(measured, layers=tuple(map(scaled, measured.layers)))
