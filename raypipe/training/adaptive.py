"""A run that raypipe arranges itself: it chooses the first way to run, or takes a given one, and goes on in others as the facts change.

The policy decides (`raypipe.planning.replanning`), from what windows showed of layers, devices and links. Here its choices become
stages, programs and places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from raypipe.actors.actor import LayerSize
from raypipe.actors.execution.programs import check_executable
from raypipe.analysis.observed import ObservedSpeeds
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.cluster.coordinator import Coordinator, WindowResult
from raypipe.cluster.node_matching import check_rows, num_places
from raypipe.cluster.slots import Slot, find_slots, slots_of
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError, InputError, PlanError
from raypipe.model import Model
from raypipe.network.estimate import NetworkEstimate
from raypipe.planning.layout import Layout
from raypipe.planning.planners import bound_s
from raypipe.planning.problem import Problem
from raypipe.planning.replanning import Choice, ConcurrencyPolicy, Decision, Facts
from raypipe.schedule_registry import spec
from raypipe.schedules.ir import Schedule, WeightRule
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.passes import one_of_repeated, recomputed_stages
from raypipe.schedules.validate import facts as facts_of
from raypipe.simulation.simulator import simulate_plan
from raypipe.training.strategy import Arrangement, Measure, Notice, check_alike, num_that_measure, run_topology, sharded

_NO_ROW = 1e-6


class Adaptive(Arrangement):
    """What the policy says.

    Args:
        config: of the run.
        model: its description.
        window_sizes: the numbers of updates that windows have.
        start: how the run begins; `None` to let the policy choose.
        can_divide: whether microbatches of other sizes can be had.

    Attributes:
        policy: decides; known once the arrangement is settled.
        facts: of the last window that the policy was asked after.
    """

    policy: ConcurrencyPolicy
    facts: Facts
    _speeds: ObservedSpeeds
    _expected: Trace

    def __init__(
        self, config: TrainConfig, model: Model, *, window_sizes: Collection[int], start: Arrangement | None, can_divide: bool
    ) -> None:
        super().__init__(
            config,
            model,
            schedules=start.schedules if start else {},
            placement=start.placement if start else Placement.one_each(config.scaling.num_devices),
        )
        self.start = start
        self._choice: Choice | None = None
        self._first: Choice | None = None
        """The way that the run begins with, where that was given."""
        self.window_sizes = sorted(set(window_sizes))
        self.can_divide = can_divide
        self._launched: tuple[str, ...] = ()
        """The topology's names of the devices, as launched."""
        self._nodes: dict[str, str] | None = None
        """The topology's names of the nodes, by address; `None` where its nodes are not the cluster's."""
        self._fresh = True
        """Whether the way that runs has not had a window yet, in which memory and connections are new."""
        for name in config.adaptation.schedules:
            spec(name)
        for section, names in (("scaling", ("layers_per_stage",)), ("schedule", ("num_chunks", "num_pipelines", "max_in_flight"))):
            for name in names if start is None else ():
                if getattr(getattr(config, section), name):
                    raise ConfigError(f"{section}.{name}: schedule.name auto chooses that, too; leave it out, or name a schedule")

    # As every arrangement

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """See `Arrangement`; none where nothing was chosen yet."""
        return super().stages if self.schedules else [()] * self.config.scaling.num_devices

    @property
    def microbatch_size(self) -> int:
        """See `Arrangement`."""
        return self._choice.microbatch_size if self._choice else super().microbatch_size

    @property
    def num_validation_microbatches(self) -> int:
        """See `Arrangement`; as many rows as configured, whatever the size of a microbatch."""
        return super().num_validation_microbatches * self.config.schedule.microbatch_size // self.microbatch_size

    @property
    def num_places(self) -> int:
        """See `Arrangement`."""
        return self.start.num_places if self.start else self.config.scaling.num_devices

    def find_slots(self, *, local: bool) -> list[Slot]:
        """See `Arrangement`; those of a topology file where it says."""
        if self.start is not None:
            return self.start.find_slots(local=local)
        scaling = self.config.scaling
        if scaling.topology is None:
            return find_slots(scaling)
        topology = ClusterTopology.load(scaling.topology)
        names = [device.name for device in topology.devices][: scaling.num_devices]
        if len(names) < scaling.num_devices:
            raise PlanError(f"the run needs {scaling.num_devices} devices, {scaling.topology} has {len(names)}; lower scaling.num_devices")
        check_alike(topology, names)
        return slots_of(topology, names, scaling, local=local and num_places(topology, names) == len(names))

    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:
        """See `Arrangement`."""
        if self.start is not None:
            self.start.check_layers(sizes)

    def settle(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """See `Arrangement`."""
        if self.start is not None:
            self.start.settle(coordinator, name=name, measure=measure, notice=notice)
            self.schedules, self.plan, self.predicted = self.start.schedules, self.start.plan, self.start.predicted
            profile, topology, self._launched = self.plan.profile, self.plan.topology, self.plan.devices
        else:
            scaling = self.config.scaling
            profile = measure(num_that_measure(coordinator, scaling))
            topology = run_topology(self.config, coordinator, notice, num_devices=scaling.num_devices)
            self._launched = tuple(device.name for device in topology.devices)[: scaling.num_devices]
        topology = topology.only(self._launched)
        nodes = {(slot.node, topology.node_of(device).name) for slot, device in zip(coordinator.slots, self._launched, strict=True)}
        if len(nodes) == len({address for address, _ in nodes}) == len({name for _, name in nodes}):
            self._nodes = dict(nodes)
            coordinator.seed_network(topology, self._launched)
        elif self.config.adaptation.enabled:
            notice(f"the nodes of the topology {topology.name!r} are not those of the cluster: what links carry is not followed")
        self._speeds = ObservedSpeeds(profile)
        self.policy = self._policy(profile, topology)
        if self.start is not None:
            self._choice = self._first = self._started(self.plan)
            self.policy.adopt(self._choice)
            self._expected = self._expect()
        else:
            notice("choosing how to run")
            choice = self.policy.choose()
            self.take(choice)
            if self.config.optimizer.max_grad_norm is not None:
                self.policy.keep_scope(self.schedule.update_scope)
            coordinator.assign(self.devices, self.stages)
            notice(f"chosen: {choice.layout}, {choice.num_microbatches} microbatches of {choice.microbatch_size} rows")

    def _expect(self) -> Trace:
        """A window as it would go with the layers' times as they are known and the devices' speeds as they were assumed."""
        return simulate_plan(dataclasses.replace(self.plan, profile=self._speeds.profile, topology=self.policy.problem.topology))

    def _policy(self, profile: ModelProfile, topology: ClusterTopology) -> ConcurrencyPolicy:
        config = self.config
        schedule, adaptation = config.schedule, config.adaptation
        staleness, mismatch = schedule.max_staleness, schedule.max_mismatch
        if self.start is not None and self.schedule.weight_rule is not WeightRule.FLUSH:
            known = facts_of(self.schedule)
            staleness = known.max_delay if staleness is None else staleness
            mismatch = known.max_mismatch if mismatch is None else mismatch
        problem = Problem(
            profile,
            topology,
            num_microbatches=schedule.num_microbatches,
            microbatch_size=schedule.microbatch_size,
            max_staleness=staleness,
            max_mismatch=mismatch,
            max_mean_staleness=schedule.max_mean_staleness,
            updates_per_window=self.window_sizes[-1],
            update_scope=schedule.update_scope or (self.schedule.update_scope if self.start else None),
        )
        rows = super().num_validation_microbatches * schedule.microbatch_size
        divisions = _divisions(schedule.num_microbatches, schedule.microbatch_size) if self.can_divide else ()
        return ConcurrencyPolicy(
            problem,
            schedules=adaptation.schedules,
            divisions=[division for division in divisions if rows % division[1] == 0],  # an evaluation is always of the same rows
            least_gain=adaptation.least_gain,
            horizon_updates=adaptation.horizon_updates,
            check=check_runnable,
        )

    def _started(self, plan: Plan) -> Choice:
        """The way that the run begins with, as the policy knows ways.

        Raises:
            ConfigError: none of its ways has this order.
        """
        number = {device.name: position for position, device in enumerate(self.policy.problem.topology.devices)}
        workers = tuple(tuple(number[replica.device] for replica in replicas) for replicas in plan.workers)
        cuts = (*(layers[0] for layers in plan.cut.stages), len(plan.profile.layers))
        again = tuple(sorted(recomputed_stages(plan.schedule)))
        division = (plan.schedule.num_microbatches, plan.microbatch_size)
        rows = tuple(tuple(round(replica.share * plan.microbatch_size) for replica in replicas) for replicas in plan.workers)
        if any(list(layers) != list(range(layers[0], layers[0] + len(layers))) for layers in plan.cut.stages):
            raise ConfigError("adaptation.enabled: a stage of the plan is not of consecutive layers; leave adaptation or the plan out")
        given = self.config.schedule.max_in_flight
        limits = dict.fromkeys((None if given is None else int(given), None, plan.schedule.num_stages, plan.schedule.num_stages + 1))
        for num_pipelines in (0, len(plan.schedule.pipelines)):
            for limit in limits:
                layout = Layout(cuts, workers, plan.schedule.name, limit, num_pipelines, again)
                choice = Choice(*division, layout, rows)
                evaluator = self.policy.judge_of(choice)
                try:
                    schedule = evaluator.schedule(layout, evaluator.cut(layout), num_updates=plan.schedule.num_updates)
                except InputError:
                    continue
                if schedule.pipelines == plan.schedule.pipelines:
                    # Its own order: one that was searched for with the times of its stages, or with other limits, is not the generator's.
                    evaluator.know(layout, one_of_repeated(plan.schedule) or plan.schedule)
                    return choice
        raise ConfigError(
            f"adaptation.enabled: a run cannot begin with the order {plan.schedule.name!r}, which has no generator of its size; "
            "begin with another, or leave adaptation out"
        )

    # In other ways

    @property
    def devices(self) -> list[int]:
        """For each device of the plan, the number of its slot as launched."""
        return [self._launched.index(name) for name in self.plan.devices]

    def devices_of(self, choice: Choice) -> list[int]:
        """The numbers of the slots that a way would use."""
        names = self.policy.problem.names
        return [self._launched.index(names[device]) for group in choice.layout.workers for device in group]

    def leave_out(self, slots: Sequence[int]) -> list[str]:
        """Plans without some slots from now on, given by number, of which what runs needs none; returns their devices' names."""
        names = [self._launched[slot] for slot in slots]
        self.policy.leave_out(names)
        self._choice = self.policy.choice
        self._first = None  # named by numbers that are others now
        return names

    def take(self, choice: Choice) -> None:
        """Arranges all as a choice says; what runs does not notice before it is moved."""
        self._choice = choice
        evaluator = self.policy.judge_of(choice)
        cut = evaluator.cut(choice.layout)
        judged = evaluator.simulate(choice.layout)
        assert judged is not None, "what the policy chooses it has simulated"
        plan = evaluator.plan(judged, planner="adaptive", lower_bound_s=bound_s(evaluator.problem, choice.layout.order))
        if self.start is not None and choice == self._first:
            self.schedules = dict(self.start.schedules)
        else:
            self.schedules = {
                size: sharded(self.config, evaluator.schedule(choice.layout, cut, num_updates=size)) for size in self.window_sizes
            }
        self.placement = plan.placement
        self.__dict__.pop("cut", None)  # of the plan before
        self._predict(dataclasses.replace(plan, schedule=self.schedule))
        self._expected = self._expect()
        self._fresh = True

    def after_window(self, result: WindowResult, network: NetworkEstimate, *, updates_left: int) -> Decision | None:
        """Learns from a window and decides how to go on; `None` after a window that tells nothing: a short one, or the first of a way.

        Args:
            result: of the window.
            network: what the links carry now.
            updates_left: of the run.
        """
        fresh, self._fresh = self._fresh, False
        if fresh or result.num_updates != self.window_sizes[-1]:
            return None
        settled = self._speeds.settled
        self._speeds.observe(dataclasses.replace(result.trace, devices=self.plan.devices), self._expected, self.plan.cut.stages)
        if not settled:
            self._expected = self._expect()
        topology = self.policy.problem.topology
        if self._nodes is not None:
            topology = network.snapshot(topology, names=self._nodes)
        topology = self._speeds.topology(topology)
        self.facts = Facts(self._speeds.profile, topology)
        return self.policy.after_window(self.facts, update_s=result.trace.makespan_s / result.num_updates, updates_left=updates_left)


def check_runnable(schedule: Schedule, placement: Placement, microbatch_size: int) -> None:
    """Checks that an order can be run on microbatches of so many rows.

    Raises:
        InputError: it asks for what the executor does not do, or for parts of rows.
    """
    check_rows(placement, microbatch_size)
    check_executable(schedule)
    if not any(op.part for op, _ in schedule.ops()):
        return
    for program in lower(schedule, placement):
        if any(abs(end * microbatch_size - round(end * microbatch_size)) > _NO_ROW for rows in program.row_ranges for end in rows):
            raise PlanError(f"the order {schedule.name!r} cuts microbatches of {microbatch_size} rows into parts that are no whole rows")


def _divisions(num_microbatches: int, microbatch_size: int) -> Iterator[tuple[int, int]]:
    """Half and twice as many microbatches with the same rows in all."""
    if num_microbatches % 2 == 0:
        yield num_microbatches // 2, microbatch_size * 2
    if microbatch_size % 2 == 0:
        yield num_microbatches * 2, microbatch_size // 2
