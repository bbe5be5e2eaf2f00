"""The strategy that raypipe chooses by `raypipe.planning.replanning`, and changes between windows."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from raypipe.actors.orders import BuildOrder, LayerSize
from raypipe.analysis.observed import ObservedSpeeds
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.cluster.coordinator import Coordinator, Patterns
from raypipe.cluster.discovery import find_slots, planned_slots
from raypipe.cluster.node_matching import num_slots
from raypipe.cluster.slots import DeviceSlot
from raypipe.cluster.window import WindowResult
from raypipe.config import AUTO, TrainConfig
from raypipe.errors import ConfigError, InputError, PlanError
from raypipe.model import Model
from raypipe.network.estimate import NetworkEstimate
from raypipe.planning.branches import placed_stages
from raypipe.planning.choices import Choice
from raypipe.planning.cluster_state import ClusterState
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.plan import bound
from raypipe.planning.problem import Devices, Problem
from raypipe.planning.replanning import ConcurrencyPolicy, Decision
from raypipe.planning.staleness_cost import known_optimizer
from raypipe.schedule_registry import spec
from raypipe.schedules.families import branch_aware
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Placement
from raypipe.schedules.metrics import metrics as facts_of
from raypipe.schedules.passes import division_of_stages, one_of_repeated, recomputed_stages
from raypipe.simulation.simulator import simulate
from raypipe.training.checks import check_alike, check_runnable
from raypipe.training.record import RunRecord
from raypipe.training.run_cluster import Notice, num_measuring_devices, run_topology
from raypipe.training.run_schedules import sharded
from raypipe.training.strategy import Measure, Strategy
from raypipe.training.sums import SumAdaptation
from raypipe.units import counted

_LOG = logging.getLogger("raypipe.training.adaptive")


class AdaptiveStrategy(Strategy):
    """Follows the choices of a policy, from a `start` or from nothing.

    Attributes:
        can_divide: Whether batches can be read in microbatches of other sizes.
        state: What the last decision assumed.
    """

    policy: ConcurrencyPolicy
    state: ClusterState
    _speeds: ObservedSpeeds
    _expected: Trace

    def __init__(
        self, config: TrainConfig, model: Model, *, window_sizes: Collection[int], start: Strategy | None, can_divide: bool
    ) -> None:
        super().__init__(
            config,
            model,
            schedules=start.schedules if start else {},
            placement=start.placement if start else Placement.even(config.scaling.num_devices),
        )
        self.start = start
        self._choice: Choice | None = None
        self._starting_choice: Choice | None = None
        self.window_sizes = sorted(set(window_sizes))
        self.can_divide = can_divide
        self._launched: tuple[str, ...] = ()  # names of the devices in the topology
        self._nodes: dict[str, str] | None = None  # names in the topology, by address; None where its nodes are not the cluster's
        self._warming_up = True  # memory and connections are set up in the first window of a choice
        for name in config.adaptation.schedules:
            spec(name)
        if start is None and config.schedule.name == branch_aware.NAME and len(model.branches()) < 2:
            raise PlanError(
                f"schedule.name {branch_aware.NAME}: the model's layers name {counted(len(model.branches()), 'branch')}; "
                "name two or more by Layer(..., branch=NAME), or choose another schedule"
            )
        chosen_too = (("scaling", ("replicas", "layers_per_stage")), ("schedule", ("num_chunks", "num_pipelines", "max_in_flight")))
        for section, names in chosen_too:
            configured = getattr(config, section)
            usual = type(configured)()
            for name in names if start is None else ():
                if getattr(configured, name) != getattr(usual, name):
                    chosen = config.schedule.name
                    raise ConfigError(f"{section}.{name}: schedule.name {chosen} chooses that, too; leave it out, or name another schedule")

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """See `Strategy`; empty before the first choice."""
        return super().stages if self.schedules else [()] * self.config.scaling.num_devices

    @property
    def microbatch_size(self) -> int:
        """See `Strategy`."""
        return self._choice.microbatch_size if self._choice else super().microbatch_size

    @property
    def num_validation_microbatches(self) -> int:
        """See `Strategy`; an evaluation has the same rows for every microbatch size."""
        return super().num_validation_microbatches * self.config.schedule.microbatch_size // self.microbatch_size

    @property
    def num_slots(self) -> int:
        """See `Strategy`."""
        return self.start.num_slots if self.start else self.config.scaling.num_devices

    def find_slots(self, *, local: bool) -> list[DeviceSlot]:
        """See `Strategy`."""
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
        return planned_slots(topology, names, scaling, local=local and num_slots(topology, names) == len(names))

    def check_layers(self, sizes: Mapping[int, LayerSize]) -> None:
        """See `Strategy`."""
        if self.start is not None:
            self.start.check_layers(sizes)

    def prepare(self, coordinator: Coordinator, *, name: str, measure: Measure, notice: Notice) -> None:
        """See `Strategy`."""
        if self.start is not None:
            self.start.prepare(coordinator, name=name, measure=measure, notice=notice)
            self.schedules, self.plan, self.predicted = self.start.schedules, self.start.plan, self.start.predicted
            profile, topology, self._launched = self.plan.profile, self.plan.topology, self.plan.devices
        else:
            scaling = self.config.scaling
            profile = measure(num_measuring_devices(coordinator, scaling))
            topology = run_topology(self.config, coordinator, notice, num_devices=scaling.num_devices)
            self._launched = tuple(device.name for device in topology.devices)[: scaling.num_devices]
        self._observe(coordinator, profile, topology.only(self._launched), notice)
        if self.start is not None:
            self._choice = self._starting_choice = _choice_of(self.plan, self.policy, max_in_flight=self.config.schedule.max_in_flight)
            self.policy.adopt(self._choice)
            self._expected = self._expect()
            return
        self._choose(notice)
        coordinator.actors.assign(self.devices, self.stages)

    def prepare_without(self, coordinator: Coordinator, topology: ClusterTopology, *, lost: Collection[int], notice: Notice) -> None:
        """Choose for a run that has lost the devices in some slots, by number, in place of the strategy it started with.

        `topology` is that of the run's plan, perhaps with fewer links.

        Raises:
            PlanError: The model does not fit the devices that are left.
        """
        assert self.start is not None, "a run that has lost a device has a strategy"
        self._launched = self.start.launched
        left = [name for number, name in enumerate(self._launched) if number not in lost]
        self._observe(coordinator, self.start.plan.profile, topology.only(left), notice)
        self._choose(notice)

    def _observe(self, coordinator: Coordinator, profile: ModelProfile, topology: ClusterTopology, notice: Notice) -> None:
        # A plan's profile may be older than what the model says.
        profile = dataclasses.replace(profile, loss_couples_rows=self.model.loss_couples_rows or None)
        self._follow_links(coordinator, topology, notice)
        self._speeds = ObservedSpeeds(profile)
        self.policy = self._policy(profile, topology)

    def _choose(self, notice: Notice) -> None:
        notice("choosing stages, schedule and devices")
        choice = self.policy.choose()
        self.adopt(choice)
        if self.config.optimizer.max_grad_norm is not None:
            self.policy.keep_scope(self.schedule.update_scope)
        notice(f"chosen: {choice.layout}, {choice.num_microbatches} microbatches of {choice.microbatch_size} rows")

    @property
    def launched(self) -> tuple[str, ...]:
        """See `Strategy`."""
        return self._launched

    @property
    def devices(self) -> list[int]:
        """Number of the launched slot of each device of the plan."""
        return [self._launched.index(name) for name in self.plan.devices]

    def devices_of(self, choice: Choice) -> list[int]:
        """Return the slot numbers that a choice uses."""
        names = self.policy.planner.problem.names
        return [self._launched.index(names[device]) for group in choice.layout.workers for device in group]

    def begin_anew(self) -> None:
        """Leave out the next window, in which connections and memory are set up."""
        self._warming_up = True

    def leave_out(self, slots: Sequence[int]) -> list[str]:
        """Plan without unused slots; return the names of their devices."""
        names = [self._launched[slot] for slot in slots]
        self.policy.leave_out(names)
        self._choice = self.policy.choice
        self._starting_choice = None  # its device numbers have changed
        return names

    def adopt(self, choice: Choice) -> None:
        """Set plan, schedules and placement to those of a choice; the actors stay as they are."""
        self._choice = choice
        evaluator = self.policy.planner.evaluator_of(choice)
        evaluation = evaluator.simulate(choice.layout)
        assert evaluation is not None, "the policy simulates what it chooses"
        least_s, reason = bound(evaluator.problem, choice.layout.order)
        plan = evaluator.plan(evaluation, planner="adaptive", lower_bound_s=least_s, lower_bound_reason=reason)
        if self.start is not None and choice == self._starting_choice:
            self.schedules = dict(self.start.schedules)
        else:
            schedules = {size: layout_schedule(evaluator.problem, choice.layout, num_updates=size) for size in self.window_sizes}
            replicated = plan.placement.replicated_workers
            self.schedules = {size: sharded(self.config, schedule, replicated) for size, schedule in schedules.items()}
        self.placement = plan.placement
        self.__dict__.pop("cut", None)  # cached of the plan before
        self._predict(dataclasses.replace(plan, schedule=self.schedule))
        self._expected = self._expect()
        self._warming_up = True

    def after_window(
        self, result: WindowResult, network: NetworkEstimate, *, updates_left: int, patterns: Patterns = MappingProxyType({})
    ) -> Decision | None:
        """Learn from a window and decide; `None` after a short window, or the first of a choice.

        `patterns` are those of the sums of the next window.
        """
        warming_up, self._warming_up = self._warming_up, False
        if warming_up or result.num_updates != self.window_sizes[-1]:
            return None
        was_scaled = self._speeds.is_scaled
        self._speeds.observe(dataclasses.replace(result.trace, devices=self.plan.devices), self._expected, self.plan.cut.stages)
        if not was_scaled:
            self._expected = self._expect()
        topology = self.policy.planner.problem.topology
        if self._nodes is not None:
            topology = network.snapshot(topology, names=self._nodes)
        topology = self._speeds.topology(topology)
        self.state = ClusterState(self._speeds.profile, topology, patterns)
        return self.policy.after_window(self.state, update_s=result.trace.makespan_s / result.num_updates, updates_left=updates_left)

    def _follow_links(self, coordinator: Coordinator, topology: ClusterTopology, notice: Notice) -> None:
        slots = [member.slot for member in coordinator.actors.launched]
        there = {device.name for device in topology.devices}
        nodes = {
            (slot.node.address, topology.node_of(device).name)
            for slot, device in zip(slots, self._launched, strict=True)
            if device in there
        }
        if len(nodes) == len({address for address, _ in nodes}) == len({name for _, name in nodes}):
            self._nodes = dict(nodes)
            coordinator.links.seed(topology, self._launched)
        elif self.config.adaptation.enabled:
            notice(f"the nodes of the topology {topology.name!r} are not those of the cluster: link speeds are not followed")

    def _expect(self) -> Trace:
        return simulate(dataclasses.replace(self.plan, profile=self._speeds.first, topology=self.policy.planner.problem.topology))

    def _policy(self, profile: ModelProfile, topology: ClusterTopology) -> ConcurrencyPolicy:
        config = self.config
        schedule, adaptation = config.schedule, config.adaptation
        staleness, mismatch = schedule.max_staleness, schedule.max_mismatch
        if self.start is not None and self.schedule.weight_rule.overlaps_updates:
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
            optimizer=known_optimizer(config.optimizer),
            synchronous_share=config.synchronous_share,
            update_scope=schedule.update_scope or (self.schedule.update_scope if self.start else None),
        )
        rows = super().num_validation_microbatches * schedule.microbatch_size
        divisions = _divisions(schedule.num_microbatches, schedule.microbatch_size) if self.can_divide else ()
        named = () if self.start is not None or schedule.name == AUTO else (schedule.name,)
        return ConcurrencyPolicy(
            problem,
            schedules=adaptation.schedules or named,
            divisions=[division for division in divisions if rows % division[1] == 0],  # every evaluation has the same rows
            least_gain=adaptation.least_gain,
            horizon_updates=adaptation.horizon_updates,
            check=check_runnable,
        )


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Switches of a run; every decision is a line of `adaptation.jsonl`."""

    strategy: AdaptiveStrategy
    coordinator: Coordinator
    record: RunRecord
    build_order: Callable[[], BuildOrder]
    sums: SumAdaptation

    def after_window(self, result: WindowResult, *, update: int, updates_left: int) -> None:
        """Decide after a window whether to switch, and switch."""
        strategy = self.strategy
        since = time.perf_counter()
        decision = strategy.after_window(
            result, self.coordinator.links.estimate, updates_left=updates_left, patterns=self.coordinator.patterns
        )
        if decision is None:
            return
        _LOG.info("update %d: %s", update, decision.text)
        topology = strategy.state.topology
        line: dict[str, Any] = {
            "update": update,
            "switch": decision.switch,
            "text": decision.text,
            "gain": decision.gain,
            "update_s": result.trace.makespan_s / result.num_updates,
            "predicted_s": decision.predicted_s,
            "links_bytes_per_s": {f"{link.source} -> {link.target}": link.bandwidth_bytes_per_s for link in topology.links},
            "speeds": {device.name: device.speed for device in topology.devices},
            "decided_s": time.perf_counter() - since,
        }
        if names := self._leave_out_dead(decision):
            text = f"no switch ({decision.text}): {' and '.join(names)} is dead or silent, and is left out from now on"
            line |= {"switch": False, "text": text}
            self._notice(update, text)
        try:
            if line["switch"]:
                self._switch(decision, update)
                line["took_s"] = strategy.policy.switch_s
        finally:  # a switch that fails is recorded, too
            self.record.add_decision(line)

    def _leave_out_dead(self, decision: Decision) -> list[str]:
        # Unused devices that a switch needs; a device in use fails with its own message.
        if not decision.switch:
            return []
        idle = set(self.strategy.devices_of(decision.choice)).difference(self.strategy.devices)
        dead = self.coordinator.actors.dead(sorted(idle)) if idle else []
        return self.strategy.leave_out(dead) if dead else []

    def _switch(self, decision: Decision, update: int) -> None:
        self._notice(update, decision.text)
        strategy = self.strategy
        before, since = strategy.plan, time.perf_counter()
        strategy.adopt(decision.choice)
        # Before the move, which may fail: a recovery builds what has been adopted.
        strategy.policy.adopt(decision.choice)
        self.record.switch(before, strategy, update=update, reason=decision.text)
        order, programs = self.build_order(), strategy.programs()
        self.coordinator.move(strategy.devices, strategy.stages, order=order, programs=programs, wiring=self.sums.begin(programs))
        strategy.policy.adopt(decision.choice, took_s=time.perf_counter() - since)

    def _notice(self, update: int, text: str) -> None:
        self.record.notice(f"update {update}: {text}")


def _choice_of(plan: Plan, policy: ConcurrencyPolicy, *, max_in_flight: float | None) -> Choice:
    number = {device.name: position for position, device in enumerate(policy.planner.problem.topology.devices)}
    workers = tuple(tuple(number[replica.device] for replica in replicas) for replicas in plan.workers)
    division = (plan.schedule.num_microbatches, plan.microbatch_size)
    rows = tuple(tuple(round(replica.share * plan.microbatch_size) for replica in replicas) for replicas in plan.workers)
    recomputed = tuple(sorted(recomputed_stages(plan.schedule)))
    if plan.schedule.name == branch_aware.NAME:
        return _branch_choice(plan, policy, division, workers, rows, recomputed)
    stages = plan.cut.stages
    cuts = tuple(itertools.accumulate(map(len, stages), initial=0))
    layers = tuple(itertools.chain(*stages))
    configured = None if max_in_flight is None else int(max_in_flight)
    limits = dict.fromkeys((configured, None, plan.schedule.num_stages, plan.schedule.num_stages + 1))
    # A generator's own stages come first: one worker of `interleaved` has the same ones.
    for counts, late in dict.fromkeys((((), 0), division_of_stages(plan.schedule))):
        for num_pipelines, limit in itertools.product((0, len(plan.schedule.pipelines)), limits):
            layout = Layout(cuts, workers, plan.schedule.name, limit, num_pipelines, recomputed, divided=counts, late_weight_grads=late)
            layout = layout.relisted(layers)
            choice = Choice(*division, layout, rows)
            evaluator = policy.planner.evaluator_of(choice)
            try:
                schedule = layout_schedule(evaluator.problem, layout, num_updates=plan.schedule.num_updates)
            except InputError:
                continue
            if schedule.pipelines == plan.schedule.pipelines:
                # An order searched for other times or limits than the generator's stays the plan's.
                evaluator.schedules.register(evaluator.problem, layout, one_of_repeated(plan.schedule) or plan.schedule)
                return choice
    raise ConfigError(
        f"adaptation.enabled: a run cannot begin with the order {plan.schedule.name!r}, which has no generator of its size; "
        "begin with another, or leave adaptation out"
    )


def _branch_choice(
    plan: Plan,
    policy: ConcurrencyPolicy,
    division: tuple[int, int],
    workers: tuple[Devices, ...],
    rows: tuple[tuple[int, ...], ...],
    recomputed: tuple[int, ...],
) -> Choice:
    schedule = plan.schedule
    computed = [op for op, _ in schedule.ops() if not op.kind.per_update]
    evaluator = policy.planner.evaluator_of(Choice(*division, Layout((), workers), rows))
    layout = placed_stages(
        evaluator,
        workers,
        plan.cut.stages,
        schedule.pipelines[0],
        num_parts=max(1, *(op.part for op in computed)),
        split=any(op.kind is OpKind.INPUT_GRADIENT for op in computed),
        recomputed=recomputed,
    )
    assert layout is not None, "a plan is refused before if several devices take a loss that couples rows"
    choice = Choice(*division, layout, rows)
    evaluator.schedules.register(evaluator.problem, layout, one_of_repeated(schedule) or schedule)
    return choice


def _divisions(num_microbatches: int, microbatch_size: int) -> Iterator[tuple[int, int]]:
    if num_microbatches % 2 == 0:
        yield num_microbatches // 2, microbatch_size * 2
    if microbatch_size % 2 == 0:
        yield num_microbatches * 2, microbatch_size // 2
