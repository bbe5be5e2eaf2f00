"""The strategy of a plan file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from raypipe.actors.execution.programs import check_executable
from raypipe.actors.orders import LayerSize
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import planned_slots
from raypipe.cluster.node_matching import num_slots
from raypipe.cluster.slots import DeviceSlot
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, PlanError
from raypipe.model import Model
from raypipe.training.checks import check_alike, check_model, check_rows
from raypipe.training.run_cluster import Notice
from raypipe.training.run_schedules import sharded, window_of
from raypipe.training.strategy import Measure, Strategy


class PlannedStrategy(Strategy):
    """Runs a plan, whose values `with_plan` has set in the configuration.

    Raises:
        PlanError: The model is not the profiled one, or a device cannot have its share of the rows.
        ConfigError: Windows cannot have these sizes.
        ScheduleError: The order can be simulated, but not run.
    """

    def __init__(self, plan: Plan, config: TrainConfig, model: Model, *, window_sizes: Collection[int]) -> None:
        self.file_plan = plan
        check_model(plan, model)
        check_alike(plan.topology, plan.devices)
        check_rows(plan.placement, plan.microbatch_size)
        schedules = {size: sharded(config, window_of(plan.schedule, size)) for size in sorted(window_sizes)}
        super().__init__(config, model, schedules=schedules, placement=plan.placement)
        check_executable(plan.schedule)  # before anything is started

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
        times = {name: value * speed for name, value in dataclasses.asdict(layer.times).items()}
        return dataclasses.replace(layer, **times, update_s=None if layer.update_s is None else layer.update_s * speed)

    return dataclasses.replace(measured, layers=tuple(map(scaled, measured.layers)))
