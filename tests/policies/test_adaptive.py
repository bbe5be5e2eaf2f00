"""What a run makes of its policy's choices, with simulated windows in place of real ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from raypipe.adaptive import Adaptive, check_runnable
from raypipe.arrangement import Named
from raypipe.config import AdaptationConfig, DataConfig, ModelConfig, ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.coordinator import WindowResult
from raypipe.models.waiting import waiting
from raypipe.network.estimate import NetworkEstimate
from raypipe.planner.layout import Layout
from raypipe.planner.problem import Problem
from raypipe.policies.concurrency import ConcurrencyPolicy, Decision, Facts
from raypipe.policies.observed import ObservedSpeeds
from raypipe.profile import ModelProfile
from raypipe.simulate import simulate_plan
from raypipe.topology import ClusterTopology
from tests.policies.test_concurrency import NODES, PROFILE, cluster, slow

UPDATES_PER_WINDOW = 5


class Simulated:
    """An adaptive run whose windows take what they would on a cluster as it really is, without noise."""

    def __init__(self) -> None:
        model = waiting(num_layers=PROFILE.num_layers - 1)
        layers = tuple(replace(layer, name=own.name) for layer, own in zip(PROFILE.layers, model.layers, strict=True))
        self.profile = replace(PROFILE, layers=layers)
        schedule = ScheduleConfig(
            name="auto", num_microbatches=4, microbatch_size=1, updates_per_window=UPDATES_PER_WINDOW, max_staleness=1, max_mismatch=1
        )
        config = TrainConfig(
            model=ModelConfig(function="raypipe.models.waiting:waiting"),
            data=DataConfig(path=""),
            schedule=schedule,
            scaling=ScalingConfig(num_devices=4),
            adaptation=AdaptationConfig(enabled=True),
        )
        self.run = Adaptive(config, model, window_sizes={UPDATES_PER_WINDOW}, start=None, can_divide=False)
        topology = cluster()
        self.run._launched = tuple(device.name for device in topology.devices)
        self.run._nodes = {name: name for name in NODES}
        self.run._speeds = ObservedSpeeds(self.profile)
        self.run.policy = self.run._policy(self.profile, topology)
        self.run.take(self.run.policy.choose())

    def update_s(self, truth: ClusterTopology) -> float:
        """Seconds of an update of what runs now."""
        return simulate_plan(replace(self.run.plan, profile=self.profile, topology=truth)).makespan_s / UPDATES_PER_WINDOW

    def window(self, truth: ClusterTopology) -> Decision | None:
        """A window there; goes on as was decided."""
        trace = simulate_plan(replace(self.run.plan, profile=self.profile, topology=truth))
        result = cast("WindowResult", SimpleNamespace(num_updates=UPDATES_PER_WINDOW, trace=trace))
        network = NetworkEstimate(NODES)
        network.seed(truth)
        decision = self.run.after_window(result, network, updates_left=1000)
        if decision is not None and decision.switch:
            self.run.take(decision.choice)
            self.run.policy.adopt(decision.choice, took_s=2.0)
        return decision


def limits(name: str, **given: Any) -> tuple[int | None, int | None, float | None]:
    """What the policy of a run that begins with a schedule may choose: latest, mismatch and mean."""
    model = waiting(num_layers=PROFILE.num_layers - 1)
    config = TrainConfig(
        model=ModelConfig(function="raypipe.models.waiting:waiting"),
        data=DataConfig(path=""),
        schedule=ScheduleConfig(name=name, num_microbatches=4, microbatch_size=1, updates_per_window=UPDATES_PER_WINDOW, **given),
        scaling=ScalingConfig(num_devices=4),
        adaptation=AdaptationConfig(enabled=True),
    )
    start = None if name == "auto" else Named(config, model, window_sizes={UPDATES_PER_WINDOW})
    run = Adaptive(config, model, window_sizes={UPDATES_PER_WINDOW}, start=start, can_divide=False)
    found = run._policy(PROFILE, cluster()).problem.staleness
    return found.max_staleness, found.max_mismatch, found.max_mean_staleness


def test_limits_that_are_left_out_are_those_of_a_beginning_whose_updates_overlap() -> None:
    assert limits("async-1f1b") == (1, 1, None)
    assert limits("async-1f1b", max_mean_staleness=3.0) == (1, 1, 3.0)
    assert limits("async-1f1b", max_staleness=2, max_mismatch=3) == (2, 3, None)
    for name in ("1f1b", "auto"):
        assert limits(name) == (None, None, None)
        assert limits(name, max_mean_staleness=3.0) == (None, None, 3.0)


def test_a_device_that_stays_slow_stays_known_as_slow_after_the_switch() -> None:
    run = Simulated()
    for _ in range(3):
        run.window(cluster())
    truth = cluster(speeds={2: 0.5})
    before_s = run.update_s(truth)
    decisions = [run.window(truth) for _ in range(12)]
    assert [decision.switch for decision in decisions if decision is not None].count(True) == 1
    assert run.update_s(truth) < before_s / 1.05
    assert run.run.facts.topology.device("n2/0").speed < 0.55


def test_a_link_that_drops_and_comes_back_is_left_and_taken_again() -> None:
    run = Simulated()
    for _ in range(3):
        run.window(cluster())
    begun_s = run.update_s(cluster())
    groups = run.run.policy.choice.layout.workers
    truth = cluster(slow(groups[0][0], groups[1][0]))
    dropped_s = run.update_s(truth)
    for _ in range(6):
        run.window(truth)
    assert run.update_s(truth) < dropped_s / 2
    for _ in range(8):
        run.window(cluster())
    assert run.update_s(cluster()) < 1.06 * begun_s


def test_an_order_that_cannot_run_does_not_hide_those_that_can() -> None:
    """Halves of microbatches of one row would be best by the simulator."""
    profile = ModelProfile.uniform(8, forward_s=0.01, backward_s=0.02, output_bytes=1000, microbatch_size=1)
    topology = ClusterTopology.uniform(4, latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    free = ConcurrencyPolicy(Problem(profile, topology, 2, 1)).choose()
    checked = ConcurrencyPolicy(Problem(profile, topology, 2, 1), check=check_runnable).choose()
    assert "halving" in free.layout.order
    assert "halving" not in checked.layout.order


def test_devices_of_one_stage_may_get_other_rows() -> None:
    """One of two devices slows down: the way that runs is judged by the rows that it has, and the same with other rows is another way."""
    profile = ModelProfile.uniform(4, forward_s=0.01, backward_s=0.02, output_bytes=10, parameter_bytes=10, microbatch_size=8)
    topology = ClusterTopology.uniform(2, latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    policy = ConcurrencyPolicy(Problem(profile, topology, 4, 8), schedules=("gpipe",))
    policy.adopt(policy.choice_of((4, 8), Layout((0, 4), ((0, 1),), "gpipe")))
    assert policy.choice.rows == ((4, 4),)
    node = topology.nodes[0]
    slower = replace(topology, nodes=(replace(node, devices=(replace(node.devices[0], speed=1 / 3), node.devices[1])),))
    decision = policy.after_window(Facts(profile, slower), update_s=4 * 0.12 * 0.5 * 3, updates_left=1000)
    assert decision.predicted_s is not None
    assert decision.predicted_s > 0.7  # half of the rows at a third of the speed
    assert decision.switch
    assert decision.choice.rows == ((2, 6),)
    assert decision.text.startswith("other rows for the devices of a stage")


def test_a_device_that_is_gone_is_planned_without_and_the_others_keep_their_names() -> None:
    run = Simulated()
    truth = cluster(speeds={1: 0.1})
    for _ in range(8):
        run.window(truth)
    used = run.run.plan.devices
    assert "n1/0" not in used, "a device so slow is of no use"
    assert run.run.leave_out([1]) == ["n1/0"]
    now = run.run.policy.choice
    assert [run.run.policy.problem.names[device] for group in now.layout.workers for device in group] == list(used)

    before_s = run.update_s(truth)
    a, b = (NODES.index(name.partition("/")[0]) for name in used[:2])
    truth = cluster(slow(a, b), speeds={1: 0.1})
    slowed_s = run.update_s(truth)
    assert slowed_s > 1.2 * before_s, "the link is one that is used"
    decisions = [run.window(truth) for _ in range(6)]
    assert any(decision.switch for decision in decisions if decision is not None)
    assert "n1/0" not in run.run.plan.devices
    assert run.run.devices == [NODES.index(name.partition("/")[0]) for name in run.run.plan.devices]
    assert run.update_s(truth) < slowed_s / 1.05
