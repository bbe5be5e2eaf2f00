"""Stages on devices with the order of their work: `raypipe.plan/1`, with the profile and topology it was made for."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property

from pydantic import PositiveInt

from raypipe.artifacts import codec
from raypipe.artifacts.branches import cut_branches
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.record import ShownName, record
from raypipe.artifacts.schedule import ScheduleField
from raypipe.artifacts.topology import ClusterTopology
from raypipe.errors import FormatError, PlanError, suggestion
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Placement
from raypipe.schedules.validate import validate

FORMAT = "raypipe.plan/1"


@record()
class Replica:
    """One device of a worker, with its share of the rows of every microbatch; the shares of a worker sum to 1."""

    device: str
    share: float = 1.0


@record()
class Predicted:
    """The simulated figures that a plan was chosen for; device figures in the order of the plan's devices.

    Attributes:
        bubble_ratio: 1 - mean busy time / longest span.
        lower_bound_s: Least seconds per update of any plan for this profile, topology and number of microbatches; None if unknown.
        lower_bound_reason: What no plan can avoid, in words, such that it takes `lower_bound_s`.
        lower_bound_one_run_s: The same of plans of one pipeline in which each worker has one run of layers; None if unknown.
        lower_bound_bundled_s: The same of plans with bundled schedules; None if unknown.
    """

    update_s: float
    bubble_ratio: float
    device_bubble_ratios: tuple[float, ...] = ()
    peak_memory_bytes: tuple[int, ...] = ()
    lower_bound_s: float | None = None
    lower_bound_reason: str | None = None
    lower_bound_one_run_s: float | None = None
    lower_bound_bundled_s: float | None = None

    @property
    def optimality_gap(self) -> float | None:
        """Return by how much an update exceeds the bound, relative to it: 0.1 for a tenth."""
        return None if not self.lower_bound_s else self.update_s / self.lower_bound_s - 1


@record()
class Plan:
    """Stages on workers on devices, with the order of their work.

    Attributes:
        name: Name of the model or run.
        planner: Name of the planner that chose it.
        microbatch_size: Rows per microbatch; times of a profile of another size are scaled (`LayerTimes.on_rows`).
        stages: Names of the layers of each stage.
        workers: Devices of each worker.
        schedule: Valid order of the work of one window.
        profile: Costs of the layers.
        topology: Devices and links.
        predicted: Figures that the plan was chosen for; None if it was not simulated.
        profile_digest: Digest of the profile when the plan was made.
        topology_digest: Digest of the topology when the plan was made.

    Raises:
        PlanError: Stages, workers, devices and schedule do not fit together.
        ScheduleError: The schedule cannot run.
    """

    name: ShownName
    planner: ShownName
    microbatch_size: PositiveInt
    stages: tuple[tuple[str, ...], ...]
    workers: tuple[tuple[Replica, ...], ...]
    schedule: ScheduleField
    profile: ModelProfile
    topology: ClusterTopology
    predicted: Predicted | None = None
    profile_digest: str = ""
    topology_digest: str = ""

    def __post_init__(self) -> None:
        if len(self.stages) != self.schedule.num_stages:
            raise PlanError(f"the plan has {len(self.stages)} stages, its schedule {self.schedule.num_stages}")
        if len(self.workers) != self.schedule.num_workers:
            raise PlanError(f"the plan has {len(self.workers)} workers, its schedule {self.schedule.num_workers}")
        self._check_devices()
        graph, expected = self.schedule.graph, self.cut.graph
        if graph.edges != expected.edges:
            raise PlanError(f"the layers of the stages make the edges {list(expected.edges)}, the schedule has {list(graph.edges)}")
        if graph.ties != expected.ties:
            raise PlanError(f"by its profile the plan ties the stages {list(expected.ties)}, its schedule {list(graph.ties)}; plan again")
        _ = self.placement
        validate(self.schedule)

    def _check_devices(self) -> None:
        known = {device.name for device in self.topology.devices}
        worker_of: dict[str, int] = {}
        for worker, replicas in enumerate(self.workers):
            for device in (replica.device for replica in replicas):
                if device in worker_of:
                    raise PlanError(f"device {device!r} serves worker {worker_of[device]} and worker {worker}; give each worker its own")
                if device not in known:
                    raise PlanError(
                        f"worker {worker} is on device {device!r}, which the topology {self.topology.name!r} does not have"
                        f"{suggestion(device, known)}"
                    )
                worker_of[device] = worker

    @cached_property
    def cut(self) -> Cut:
        """Return the layers of each stage by index."""
        index = {layer.name: position for position, layer in enumerate(self.profile.layers)}
        for stage, names in enumerate(self.stages):
            for name in names:
                if name not in index:
                    raise PlanError(f"stage {stage} has layer {name!r}, which the profile does not{suggestion(name, index)}")
        stages = tuple(tuple(index[name] for name in names) for names in self.stages)
        edges = tuple((edge.producer, edge.consumer) for edge in self.profile.edges())
        return Cut(stages, edges, self.profile.ties(), tuple(index))

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """Return the branch of each stage, empty text for a stage of none; nothing for a model without concurrent stages."""
        return cut_branches(self.cut, [layer.branch for layer in self.profile.layers])

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices in use, worker by worker; programs and traces number them in this order."""
        return tuple(replica.device for replicas in self.workers for replica in replicas)

    @cached_property
    def placement(self) -> Placement:
        """Return the devices of each worker by number."""
        number = {name: position for position, name in enumerate(self.devices)}
        return Placement(tuple(tuple((number[replica.device], replica.share) for replica in replicas) for replicas in self.workers))

    def on(self, topology: ClusterTopology) -> Plan:
        """Return the plan on another topology, which has its devices."""
        # The digest tells whether the plan's own topology was changed by hand.
        return replace(self, topology=topology, topology_digest="")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan in a JSON file; raise `FormatError`, also if its profile or topology was changed since."""
        name = os.fspath(path)
        plan = codec.load_json(cls, path, format_name=FORMAT)
        for what, stated, found in (
            ("profile", plan.profile_digest, plan.profile.digest),
            ("topology", plan.topology_digest, plan.topology.digest),
        ):
            if stated and stated != found:
                raise FormatError(
                    name, f"{what}_digest", f"the {what} was changed since the plan was made ({stated} is now {found}); plan again"
                )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        codec.save_json(self, path, format_name=FORMAT)


def make_plan(
    *,
    name: str,
    planner: str,
    cut: Cut,
    schedule: Schedule,
    profile: ModelProfile,
    topology: ClusterTopology,
    devices: tuple[str, ...],
    microbatch_size: int,
    replicas: int = 1,
) -> Plan:
    """Return an unsimulated plan whose workers are as many neighboring devices each as there are replicas, or raise `PlanError`."""
    num_devices = replicas * schedule.num_workers
    if len(devices) < num_devices:
        raise PlanError(f"the schedule {schedule.name!r} needs {num_devices} devices, there are {len(devices)}; add devices or use fewer")
    return Plan(
        name=name,
        planner=planner,
        microbatch_size=microbatch_size,
        stages=tuple(tuple(profile.layers[layer].name for layer in layers) for layers in cut.stages),
        workers=tuple(
            tuple(Replica(device=device, share=1 / replicas) for device in devices[first : first + replicas])
            for first in range(0, num_devices, replicas)
        ),
        schedule=schedule,
        profile=profile,
        topology=topology,
        profile_digest=profile.digest,
        topology_digest=topology.digest,
    )
