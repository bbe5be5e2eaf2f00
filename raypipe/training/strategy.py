"""How a run divides its work: stages of each device, and programs of windows."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property

from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.orders import LayerSize
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Predicted
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.trace import Trace
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import TrainConfig
from raypipe.model import Model
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import DeviceProgram, Placement
from raypipe.schedules.passes import evaluation
from raypipe.schedules.validate import validate
from raypipe.simulation.simulator import simulate
from raypipe.training.checks import least_rows
from raypipe.training.run_cluster import Notice
from raypipe.training.run_schedules import device_stages

Measure = Callable[[int], ModelProfile]


class Strategy(ABC):
    """Stages of a run on its devices, and the order of their work.

    Attributes:
        schedules: Schedule of a window, by its number of updates.
        plan: What runs and what is predicted of it; set by `prepare`.
        predicted: Simulated window of the largest size; set by `prepare`.
    """

    plan: Plan
    predicted: Trace

    def __init__(self, config: TrainConfig, model: Model, *, schedules: Mapping[int, Schedule], placement: Placement) -> None:
        self.config = config
        self.model = model
        self.schedules = dict(schedules)
        self.placement = placement

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Number of device slots that one node needs to hold the whole run."""

    @abstractmethod
    def find_slots(self, *, local: bool) -> list[DeviceSlot]:
        """Return the devices' slots in the connected cluster, `local` if started for this run."""

    @abstractmethod
    def prepare(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """Make and predict the plan, called `name`, once the actors are up."""

    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:  # noqa: B027  # most strategies have nothing to check
        """Refuse built layers that differ from the planned ones."""

    @property
    def schedule(self) -> Schedule:
        """Schedule of the largest window."""
        return self.schedules[max(self.schedules)]

    @cached_property
    def cut(self) -> Cut:
        """Layers of each stage, with edges in the model's order, in which its layers take their inputs."""
        return Cut(self.plan.cut.stages, self.model.edges(), self.model.tied_layers())

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """Stages of each device."""
        return device_stages(self.schedule, self.placement)

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
        """Return the programs of all devices: `train-N` for windows of N updates, `evaluate` and `predict`."""
        # A profile may list edges in another order than the model.
        graph = self.cut.graph
        for size, schedule in self.schedules.items():
            if schedule.graph != graph:
                self.schedules[size] = dataclasses.replace(schedule, graph=graph)
            validate(self.schedules[size])
        programs = {f"train-{size}": executable_programs(schedule, self.placement) for size, schedule in self.schedules.items()}
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
