"""What the devices of a training run do: from a plan, or from the name of a schedule, for which a plan is made.

`Named` cuts the model for the schedule of the configuration, with layer times measured on the run's own devices. `Planned` takes a
`raypipe.plan/1`: stages, workers of several devices, shares, places and order are as it says, and what does not fit it is refused.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from raypipe.actors.actor import LayerSize
from raypipe.actors.execution.programs import check_executable, executable_programs
from raypipe.artifacts.calibration import Calibration, TransportCosts
from raypipe.artifacts.cut import Cut, joined
from raypipe.artifacts.plan import Plan, Predicted, make_plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.artifacts.trace import Trace
from raypipe.cluster.coordinator import Coordinator, on_gpus
from raypipe.cluster.node_matching import check_rows, is_gpu, least_rows, num_places
from raypipe.cluster.slots import Slot, find_slots, planned_slots
from raypipe.config import ScalingConfig, ScheduleConfig, TrainConfig, Transport, calibration_file
from raypipe.errors import ConfigError, PlanError, ScheduleError
from raypipe.model import Model
from raypipe.planning.balance import balanced_cut
from raypipe.schedule_registry import build, spec
from raypipe.schedules.ir import Op, OpKind, Schedule, ScheduleRequest, StageGraph, StageTimes, WeightRule
from raypipe.schedules.lower import DeviceProgram, Placement
from raypipe.schedules.passes import evaluation, one_of_repeated, over_graph, repeated, shard_optimizer
from raypipe.schedules.validate import facts, validate
from raypipe.simulation.cost import plan_cost
from raypipe.simulation.simulator import simulate_plan

_LOOPBACK = NodeLink(bandwidth_bytes_per_s=3e9, latency_s=1e-4)
_PCIE = NodeLink(bandwidth_bytes_per_s=2e10, latency_s=2e-5)
_ETHERNET = NodeLink(bandwidth_bytes_per_s=1.25e9, latency_s=2e-4)
"""What predictions assume of links that no topology file describes: gloo over loopback, PCIe 4.0 between the GPUs of a node, and 10 Gbit/s
between nodes."""

Measure = Callable[[int], ModelProfile]
"""Measures the layers of the model on so many of the run's first devices, all at the same time."""

Notice = Callable[[str], None]


class Arrangement(ABC):
    """The stages of a run on its devices, and the order of their work in windows of each size that it has.

    Args:
        config: of the run.
        model: its description.
        schedules: by the number of updates of a window.
        placement: the devices of each worker.
    """

    plan: Plan
    """What runs, and what was predicted of it; known once it is settled."""
    predicted: Trace
    """A window of the largest size."""

    def __init__(self, config: TrainConfig, model: Model, *, schedules: Mapping[int, Schedule], placement: Placement) -> None:
        self.config = config
        self.model = model
        self.schedules = dict(schedules)
        self.placement = placement

    @property
    def schedule(self) -> Schedule:
        """The order of the largest window."""
        return self.schedules[max(self.schedules)]

    @cached_property
    def cut(self) -> Cut:
        """The layers of each stage, with the model's edges in the order in which its layers take them."""
        return Cut(self.plan.cut.stages, self.model.edges(), self.model.tied_layers())

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """The stages of each device."""
        return stages_of(self.schedule, self.placement)

    @property
    @abstractmethod
    def num_places(self) -> int:
        """Places that a node must have which holds all devices."""

    @abstractmethod
    def find_slots(self, *, local: bool) -> list[Slot]:
        """The places of the devices in the connected cluster.

        Args:
            local: whether the cluster was started for this run.
        """

    @abstractmethod
    def settle(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """Makes the plan, once the actors are there, and predicts it.

        Args:
            coordinator: of the actors.
            name: of the plan.
            measure: measures layers.
            notice: is told what is worth a line.
        """

    @abstractmethod
    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:
        """Checks the layers that were built against those that were planned with."""

    def _predict(self, plan: Plan) -> None:
        self.predicted = simulate_plan(plan)
        overlaps = plan.schedule.weight_rule is not WeightRule.FLUSH
        # A window's part where updates overlap, as planned and as bounded.
        update_s = self.predicted.makespan_s / self.predicted.num_updates if overlaps else self.predicted.update_s
        bound_s = plan.predicted.lower_bound_s if plan.predicted else None
        # The bound is of one update by itself; stages that update by themselves begin the next before this one has ended, and may beat it.
        is_bound = bound_s is not None and bound_s <= update_s * (1 + 1e-9)
        figures = Predicted(
            update_s=update_s,
            bubble_ratio=self.predicted.bubble_ratio,
            device_bubble_ratios=self.predicted.device_bubble_ratios,
            peak_memory_bytes=self.predicted.peak_memory_bytes,
            lower_bound_s=bound_s if is_bound else None,
        )
        self.plan = dataclasses.replace(plan, predicted=figures)

    def programs(self) -> dict[str, tuple[DeviceProgram, ...]]:
        """The programs of all devices by name: `train-N` for windows of N updates, `evaluate` and `predict`."""
        # A profile may list edges in another order than the model.
        graph = self.cut.graph
        for size, schedule in self.schedules.items():
            if schedule.graph != graph:
                self.schedules[size] = dataclasses.replace(schedule, graph=graph)
            validate(self.schedules[size])
        found = {f"train-{size}": executable_programs(schedule, self.placement) for size, schedule in self.schedules.items()}
        if count := self.num_validation_microbatches:
            found["evaluate"] = executable_programs(evaluation(self.schedule, num_microbatches=count), self.placement)
        found["predict"] = executable_programs(evaluation(self.schedule, num_microbatches=1), self.placement)
        return found

    @property
    def num_microbatches(self) -> int:
        """Of an update."""
        return self.schedule.num_microbatches

    @property
    def microbatch_size(self) -> int:
        """Rows of a microbatch."""
        return self.config.schedule.microbatch_size

    @property
    def num_validation_microbatches(self) -> int:
        """Of an evaluation."""
        return self.config.data.num_validation_microbatches

    @property
    def num_sample_rows(self) -> int:
        """The fewest rows that a microbatch can have where the devices of a worker share it."""
        boundaries = [end for worker in range(len(self.placement.workers)) for _, rows in self.placement.rows(worker) for end in rows]
        return least_rows(boundaries, most=self.microbatch_size)


class Named(Arrangement):
    """A schedule by name, one device a worker, a cut for the times that the layers are measured to take.

    Args:
        config: of the run.
        model: its description.
        window_sizes: the numbers of updates that windows have.

    Raises:
        InputError: the schedule is not there, or does not fit the sizes or the model.
    """

    def __init__(self, config: TrainConfig, model: Model, *, window_sizes: Collection[int]) -> None:
        schedules = {size: _named_schedule(config, size) for size in sorted(window_sizes)}
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
    def num_places(self) -> int:
        """See `Arrangement`."""
        return self.config.scaling.num_devices

    def find_slots(self, *, local: bool) -> list[Slot]:
        """See `Arrangement`; node after node."""
        return find_slots(self.config.scaling)

    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:
        """Nothing to check: what was planned with was measured on these very layers."""

    def settle(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """See `Arrangement`."""
        scaling = self.config.scaling
        profile = measure(num_that_measure(coordinator, scaling))
        sizes = scaling.layers_per_stage
        cut = balanced_cut(profile, self.schedule.num_stages) if sizes is None else Cut.of_sizes(sizes, self.model.edges(), profile.ties())
        self.schedules = {size: _named_schedule(self.config, size, graph=cut.graph) for size in self.schedules}
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
        """The plan with an order for the times of its stages, where the schedule is one that is searched for."""
        times, latency_s = _stage_times(plan)
        find = partial(_named_schedule, self.config, graph=plan.cut.graph, times=times, latency_s=latency_s)
        least = min(self.schedules)
        try:
            if find(least) == self.schedules[least]:
                return plan
            found = {size: find(size) for size in self.schedules}
            for schedule in found.values():
                check_staleness(self.config, schedule)
        except (ScheduleError, ConfigError) as error:
            # That for equal stages keeps the limits; it was checked before anything started.
            notice(f"the order for equal stages runs, not the one that was searched for their measured times: {error}")
            return plan
        self.schedules = found
        return dataclasses.replace(plan, schedule=self.schedule)


def run_topology(config: TrainConfig, coordinator: Coordinator, notice: Notice, *, num_devices: int) -> ClusterTopology:
    """The devices in use, with the links of the configured file, or those of the nodes' cores and of assumed links.

    Raises:
        PlanError: the file has fewer devices.
    """
    scaling = config.scaling
    if scaling.topology is not None:
        topology = ClusterTopology.load(scaling.topology)
        if topology.num_devices < num_devices:
            raise PlanError(
                f"the run needs {num_devices} devices, {scaling.topology} has {topology.num_devices}; "
                "add devices to it or lower scaling.num_devices"
            )
        return topology
    if on_gpus(coordinator.places):
        return _of_gpus(coordinator)
    costs = _calibrated(scaling, notice)
    nodes: dict[str, list[Device]] = {}
    cores: dict[str, int] = {}
    for slot, place in zip(coordinator.slots, coordinator.places, strict=True):
        nodes.setdefault(slot.node, []).append(Device(slot.name, "cpu"))
        cores[slot.node] = max(place.num_cores // scaling.threads_per_device, 1)
    return ClusterTopology(
        name="measured cores, calibrated links" if costs else "measured cores, assumed links",
        nodes=tuple(
            Node(name=node, devices=tuple(devices), link=costs.link if costs else _LOOPBACK, cores=cores[node])
            for node, devices in nodes.items()
        ),
        default_link=_ETHERNET,
        overheads=costs.overheads if costs else None,
    )


def num_that_measure(coordinator: Coordinator, scaling: ScalingConfig) -> int:
    """How many devices measure layers at the same time: as many as compute on the cores of a node while training, one of GPUs.

    Devices that share a GPU take turns there, which is the simulation's to say.
    """
    if on_gpus(coordinator.places):
        return 1
    return max(coordinator.places[0].num_cores // scaling.threads_per_device, 1)


def _of_gpus(coordinator: Coordinator) -> ClusterTopology:
    """The GPUs in use, with assumed links; those of a node that are fewer than its devices share their time."""
    nodes: dict[str, list[Device]] = {}
    gpus: dict[str, set[str]] = {}
    for slot, place in zip(coordinator.slots, coordinator.places, strict=True):
        memory_bytes = None if place.gpu_bytes is None else int(place.gpu_bytes * slot.num_gpus)
        nodes.setdefault(slot.node, []).append(Device(slot.name, place.gpu_kind, memory_bytes=memory_bytes))
        gpus.setdefault(slot.node, set()).update(place.gpus)
    return ClusterTopology(
        name="GPUs, assumed links",
        nodes=tuple(
            Node(name=node, devices=tuple(of_node), link=_PCIE, cores=len(gpus[node]) if len(gpus[node]) < len(of_node) else None)
            for node, of_node in nodes.items()
        ),
        default_link=_ETHERNET,
    )


def _calibrated(scaling: ScalingConfig, notice: Notice) -> TransportCosts | None:
    """What running costs on this machine, if that was measured."""
    given = scaling.calibration
    path = Path(given) if given else calibration_file()
    if not given and not path.exists():
        notice("what an Op and a message cost on this machine is not known: `raypipe calibrate` improves predictions")
        return None
    return Calibration.load(path).of("shm" if scaling.transport is not Transport.GLOO else "gloo")


def check_staleness(config: TrainConfig, schedule: Schedule) -> None:
    """Checks a schedule against the limits of a configuration.

    Raises:
        ConfigError: it is staler than allowed; says what would have to be.
    """
    limits = config.schedule.staleness
    if not limits:
        return
    for name, found in limits.exceeded_by(facts(schedule)).items():
        raise ConfigError(
            f"schedule.{name} is {getattr(limits, name):g}, but {schedule.name!r} with {schedule.num_microbatches} microbatches an update "
            f"has {found:g}; allow {found:g}, choose another schedule, or let schedule.name be auto"
        )


def sharded(config: TrainConfig, schedule: Schedule) -> Schedule:
    """The schedule with one updating copy of each stage, where the configuration asks for it and the schedule has none yet."""
    if not config.scaling.shard_optimizer or any(op.kind is OpKind.PUBLISH for op, _ in schedule.ops()):
        return schedule
    found = shard_optimizer(schedule)
    validate(found)
    return found


def schedule_size(config: ScheduleConfig, *, num_devices: int, num_updates: int) -> ScheduleRequest:
    """Return what the schedule's generator is asked for."""
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


def _named_schedule(
    config: TrainConfig,
    num_updates: int,
    *,
    graph: StageGraph | None = None,
    times: tuple[StageTimes, ...] = (),
    latency_s: float = 0.0,
) -> Schedule:
    """The schedule of a configuration, over the chain that its generator knows or over the stage graph of a cut."""
    size = schedule_size(config.schedule, num_devices=config.scaling.num_devices, num_updates=num_updates)
    schedule = build(config.schedule.name, dataclasses.replace(size, times=times, latency_s=latency_s))
    if graph is not None:
        schedule = over_graph(schedule, graph, times=times, latency_s=latency_s)
    schedule = sharded(config, schedule)
    validate(schedule)
    if schedule.forward_only:
        raise ConfigError(f"schedule.name {config.schedule.name!r}: this order holds no backward; it cannot train")
    return schedule


def _stage_times(plan: Plan) -> tuple[tuple[StageTimes, ...], float]:
    """What a schedule that is searched for is given: how long the plan's stages take, and the slowest message between two of them."""
    cost = plan_cost(plan)
    workers = plan.schedule.pipelines[0]
    kinds = (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)
    times = tuple(StageTimes(*(cost.compute_s(worker, (Op(kind, stage, 0),)) for kind in kinds)) for stage, worker in enumerate(workers))
    ends = [(workers[source], workers[target], num_bytes) for (source, target), num_bytes in cost.edge_bytes.items()]
    messages = [(cost.path(source, target), num_bytes) for source, target, num_bytes in ends if source != target]
    return times, max((path.latency_s + num_bytes / path.bandwidth_bytes_per_s for path, num_bytes in messages), default=0.0)


class Planned(Arrangement):
    """What a plan says.

    Args:
        plan: the plan.
        config: of the run, with the plan's values in it (`with_plan`).
        model: its description.
        window_sizes: the numbers of updates that windows have.

    Raises:
        PlanError: the model is not the one that was profiled, or a device cannot have its share.
        ConfigError: windows cannot have these sizes.
        ScheduleError: its order can be simulated, but not run.
    """

    def __init__(self, plan: Plan, config: TrainConfig, model: Model, *, window_sizes: Collection[int]) -> None:
        self.given = plan
        _check_model(plan, model)
        check_alike(plan.topology, plan.devices)
        check_rows(plan.placement, plan.microbatch_size)
        schedules = {size: sharded(config, window_of(plan.schedule, size)) for size in sorted(window_sizes)}
        super().__init__(config, model, schedules=schedules, placement=plan.placement)
        check_executable(plan.schedule)  # says before anything is started what cannot be run

    @property
    def num_places(self) -> int:
        """See `Arrangement`; the plan may leave some of a node's out."""
        return num_places(self.given.topology, self.given.devices)

    def find_slots(self, *, local: bool) -> list[Slot]:
        """See `Arrangement`; as the plan says.

        Raises:
            PlanError: the cluster is no longer as it was.
        """
        return planned_slots(self.given, self.config.scaling, local=local)

    def settle(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """See `Arrangement`; with the plan's own profile, unless it is to be measured."""
        plan = self.given
        coordinator.seed_network(plan.topology)
        if self.config.scaling.measure_layers:
            profile = _of_speed_one(measure(1), plan)
            plan = dataclasses.replace(plan, profile=profile, profile_digest=profile.digest)
        self._predict(dataclasses.replace(plan, schedule=self.schedule))

    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:
        """Checks that the weights of each layer are as large as its profile says.

        Raises:
            PlanError: names the first layer that is not.
        """
        for layer, profile in enumerate(self.plan.profile.layers):
            if sizes[layer].parameter_bytes != profile.parameter_bytes:
                raise PlanError(
                    f"layer {profile.name!r} has {sizes[layer].parameter_bytes} bytes of weights, the plan's profile says "
                    f"{profile.parameter_bytes}: it is of another model; check model.options, or profile and plan again"
                )


def check_alike(topology: ClusterTopology, devices: Sequence[str]) -> None:
    """Checks that the devices of a run can pass messages to each other.

    Raises:
        PlanError: some are CPU slots, others GPUs; names one of each.
    """
    gpus = {is_gpu(topology.device(device)): device for device in devices}
    if len(gpus) > 1:
        raise PlanError(f"device {gpus[False]!r} is a CPU slot, {gpus[True]!r} a GPU: a run takes devices of one sort; plan for either")


def stages_of(schedule: Schedule, placement: Placement) -> list[tuple[int, ...]]:
    """The stages of each device: those of its worker, over all pipelines."""
    of_worker = [
        tuple(sorted({stage for workers in schedule.pipelines for stage, at in enumerate(workers) if at == worker}))
        for worker in range(schedule.num_workers)
    ]
    of_device = {device: of_worker[worker] for worker, members in enumerate(placement.workers) for device, _ in members}
    return [of_device[device] for device in sorted(of_device)]


def window_of(schedule: Schedule, num_updates: int) -> Schedule:
    """The order of a plan for a window of so many updates: itself, or one update again and again.

    Raises:
        ConfigError: it is of several updates that overlap or differ, and not of so many.
    """
    if schedule.forward_only:
        raise ConfigError(f"the plan's order {schedule.name!r} holds no backward; it cannot train")
    if schedule.num_updates == num_updates:
        return schedule
    one = one_of_repeated(schedule)
    if one is None:
        raise ConfigError(
            f"the plan's order {schedule.name!r} is of {schedule.num_updates} updates, which run as a whole, not in a window of "
            f"{num_updates}; let run.num_updates, run.evaluate_every and run.checkpoint_every be multiples of {schedule.num_updates}"
        )
    found = repeated(one, num_updates=num_updates)
    validate(found)
    return found


def _check_model(plan: Plan, model: Model) -> None:
    """Checks that a model's layers and edges are those of a plan's profile."""
    ours, theirs = [layer.name for layer in model.layers], [layer.name for layer in plan.profile.layers]
    remedy = "it is a plan for another model; check model.function and model.options, or profile and plan again"
    for number, (own, planned) in enumerate(zip(ours, theirs, strict=False)):
        if own != planned:
            raise PlanError(f"layer {number} of the model is {own!r}, that of the plan's profile {planned!r}: {remedy}")
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


def _of_speed_one(measured: ModelProfile, plan: Plan) -> ModelProfile:
    """What was measured on the plan's first device as a device of speed 1 would take it."""
    kinds = {plan.topology.device(name).kind for name in plan.devices}
    if len(kinds) > 1:
        raise ConfigError(
            f"scaling.measure_layers: the plan has devices of the kinds {', '.join(sorted(kinds))}, of which a run measures one; "
            "use `raypipe profile`, and plan again"
        )
    speed = plan.topology.device(plan.devices[0]).speed

    def scaled(layer: LayerProfile) -> LayerProfile:
        times = {name: value * speed for name, value in dataclasses.asdict(layer.times).items()}
        return dataclasses.replace(layer, **times, update_s=None if layer.update_s is None else layer.update_s * speed)

    return dataclasses.replace(measured, layers=tuple(map(scaled, measured.layers)))


def with_plan(config: TrainConfig, plan: Plan) -> TrainConfig:
    """The configuration with what a plan decides.

    Raises:
        ConfigError: a value is neither the default nor the plan's.
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
            given = getattr(getattr(config, section), name)
            if given not in {value, getattr(default, name)}:
                has = f"the plan {config.plan} has {value}" if value else f"the plan {config.plan} decides that"
                raise ConfigError(f"{section}.{name} is {given}, {has}; leave it out, or make a plan for it")
    return dataclasses.replace(
        config, schedule=dataclasses.replace(config.schedule, **schedule), scaling=dataclasses.replace(config.scaling, **scaling)
    )
