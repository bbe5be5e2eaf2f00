"""Where branches lie, how they are cut together, and what is chosen."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from raypipe.analysis.observed import ObservedSpeeds
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.artifacts.trace import Trace
from raypipe.errors import PlanError
from raypipe.planning import branches
from raypipe.planning.branch_placement import BranchPlacement, divisions, named_branches, placements
from raypipe.planning.choices import Choice
from raypipe.planning.cluster_state import ClusterState
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.joint_cut import JointCut
from raypipe.planning.layout import Layout
from raypipe.planning.plan import plan
from raypipe.planning.problem import Problem
from raypipe.planning.replanning import ConcurrencyPolicy, Decision
from raypipe.planning.solve import solve
from raypipe.simulation.simulator import simulate
from tests.planning.towers import node, towers

pytestmark = pytest.mark.timeout(240)  # whole plans of branches take tens of seconds


def problem(profile: ModelProfile, topology: ClusterTopology, num_microbatches: int = 8) -> Problem:
    return Problem(profile, topology, num_microbatches, 8)


def one_each(topology: ClusterTopology) -> tuple[tuple[int, ...], ...]:
    return tuple((device,) for device in range(topology.num_devices))


def best(profile: ModelProfile, topology: ClusterTopology, num_microbatches: int = 4) -> Evaluation:
    evaluator = LayoutEvaluator(problem(profile, topology, num_microbatches))
    evaluations = [evaluator.simulate(layout) for layout in branches.layouts(evaluator, one_each(topology))]
    return min((evaluation for evaluation in evaluations if evaluation is not None), key=lambda each: each.rank)


def loads(evaluation: Evaluation, work: Sequence[float], num_layers: int) -> list[float]:
    """Return the work of each device."""
    found = [0.0] * len(evaluation.layout.workers)
    placed = evaluation.layout.branches
    assert placed is not None
    for layers, worker in zip(placed.layers, placed.search.line.pipelines[0], strict=True):
        found[worker] += sum(work[layer // num_layers] / num_layers for layer in layers if layer < num_layers * len(work))
    return found


@pytest.mark.parametrize(("num_devices", "bubble"), [(4, 1), (8, 3)])
def test_two_equal_branches_have_the_least_bubble(num_devices: int, bubble: int) -> None:
    found = best(towers((1.0, 1.0), num_layers=num_devices), node(num_devices, bandwidth_bytes_per_s=1e15), 8)
    stage_s = 1 / num_devices
    assert found.update_s == pytest.approx((8 * 2 * 3 + bubble) * stage_s, rel=1e-6)


@pytest.mark.parametrize("work", [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0), (2.0, 3.0, 1.0)])
def test_devices_have_equal_sums(work: tuple[float, ...]) -> None:
    found = loads(best(towers(work, num_layers=8), node(4, bandwidth_bytes_per_s=1e15)), work, 8)
    assert max(found) <= sum(work) / 4 + max(work) / 8


def test_slow_devices_have_less() -> None:
    found = loads(best(towers((1.0, 1.0), num_layers=14), node(4, speeds=(1.0, 1.0, 0.5, 1.0))), (1.0, 1.0), 14)
    assert found[2] == pytest.approx(2 / 7, abs=1 / 14)


def test_how_the_list_interleaves_branches_does_not_matter() -> None:
    topology = node(4)
    seconds = {best(towers((1.0, 2.0), num_layers=8, interleaved=interleaved), topology).update_s for interleaved in (False, True)}
    assert len(seconds) == 1


def test_branches_that_read_each_other_are_cut_where_they_do() -> None:
    profile = towers((1.0, 1.0), num_layers=6, exchanges=2)
    topology = node(4)
    found = best(profile, topology)
    cut = found.layout.cut(problem(profile, topology))  # refuses stages that wait for each other
    assert len(cut.stages) > 4


def test_a_cut_in_a_circle_is_never_proposed() -> None:
    of = problem(towers((1.0, 1.0), num_layers=6, exchanges=5), node(4))
    named = named_branches(of)
    for placement in itertools.islice(placements(of, named, one_each(of.topology)), 8):
        # Five exchanges need six stages a branch; there are four.
        assert JointCut.balanced(of, named, one_each(of.topology), placement) is None


def test_what_is_entangled_is_one_branch() -> None:
    of = problem(towers((1.0, 1.0), num_layers=6, exchanges=5), node(4))
    apart, together = divisions(of)
    assert len(apart) == 3
    assert sorted(map(len, together)) == [1, 1, 1, 10]


def test_branches_may_have_devices_of_their_own() -> None:
    of = problem(towers((1.0, 3.0), num_layers=4), node(4))
    first = next(iter(placements(of, named_branches(of), one_each(of.topology))))
    assert first == BranchPlacement(((0,), (1, 2, 3), (0,)))


def test_memory_limits_what_devices_hold() -> None:
    profile = towers((1.0, 1.0), num_layers=4, saved_bytes=1000)
    evaluations = {limit: best(profile, node(4, memory_bytes=limit), 12) for limit in (100_000, 3_000)}
    assert not any(evaluation.missing_bytes for evaluation in evaluations.values())
    assert evaluations[100_000].update_s <= evaluations[3_000].update_s


@pytest.mark.parametrize("coupled", [False, True])
def test_where_memory_is_short_forwards_run_again(coupled: bool) -> None:
    # Four layers of a device keep 4 MB of a microbatch, or of all rows of a coupled loss; they read 1 KB.
    profile = towers((1.0, 1.0), num_layers=8, saved_bytes=1_000_000, coupled=coupled)
    found = best(profile, node(4, memory_bytes=3_000_000), 1 if coupled else 8)
    assert found.layout.recomputed
    assert not found.missing_bytes


def test_the_planner_chooses_branches_by_itself() -> None:
    profile = towers((1.0, 1.0), num_layers=8, kilobytes=400_000)
    found = plan(profile, node(4), 8)
    assert found.schedule.name == "branch-aware"
    chain = min(update_s(plan(profile, node(4), 8, schedule=order)) for order in ("1f1b", "zb-h1", "chimera", "zb-v"))
    assert update_s(found) < chain


def update_s(found: object) -> float:
    return found.predicted.update_s  # type: ignore[attr-defined,no-any-return]


def test_a_model_without_branches_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="use --branches 1,1, or plan a model whose layers name their branches"):
        plan(ModelProfile.uniform(8), node(4), 8, schedule="branch-aware")


@dataclass
class Run:
    """A run of two branches whose layers take other times than was measured."""

    policy: ConcurrencyPolicy
    truth: ModelProfile
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    traces: dict[tuple[int, Choice], Trace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.speeds = ObservedSpeeds(self.truth)

    def window(self) -> Decision:
        """Return what the policy says after a window, whose every Op and update is noisy."""
        topology = self.policy.planner.problem.topology
        measured, expected = (self.trace(profile) for profile in (self.truth, self.speeds.first))
        noisy = tuple(span._replace(end_s=span.start_s + (span.end_s - span.start_s) * self.noise(0.03)) for span in measured.spans)
        stages = self.policy.choice.layout.cut(self.policy.planner.problem).stages
        self.speeds.observe(replace(measured, spans=noisy), expected, stages)
        state = ClusterState(self.speeds.profile, self.speeds.topology(topology))
        decision = self.policy.after_window(state, update_s=measured.makespan_s * self.noise(0.04), updates_left=1000)
        if decision.switch:
            self.policy.adopt(decision.choice, took_s=2.0)
        return decision

    def noise(self, size: float) -> float:
        return math.exp(self.rng.gauss(0.0, size))

    def trace(self, profile: ModelProfile) -> Trace:
        """Return a window of one update as it goes with these times."""
        choice = self.policy.choice
        if (id(profile), choice) not in self.traces:
            self.traces[id(profile), choice] = self.simulated(profile, choice)
        return self.traces[id(profile), choice]

    def simulated(self, profile: ModelProfile, choice: Choice) -> Trace:
        evaluator = LayoutEvaluator(replace(self.policy.planner.problem, profile=profile))
        evaluation = evaluator.simulate(choice.layout)
        assert evaluation is not None
        return simulate(evaluator.plan(evaluation, planner="test", lower_bound_s=0.0))


TRAINED = towers((1.0, 1.0), num_layers=16, kilobytes=200_000)


@cache
def first_policy() -> ConcurrencyPolicy:
    policy = ConcurrencyPolicy(replace(problem(TRAINED, node(4)), updates_per_window=1))
    policy.choose()
    return policy


def begun() -> Run:
    """A run of `TRAINED` on the plan that is made for it."""
    return Run(copy.deepcopy(first_policy()), TRAINED)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(range(1), id="one layer"),
        pytest.param(range(4, 10), id="six layers", marks=pytest.mark.slow),
        pytest.param(range(24, 32), id="eight layers", marks=pytest.mark.slow),
        pytest.param(range(16, 32), id="a branch", marks=pytest.mark.slow),
        pytest.param((*range(6, 10), *range(22, 26)), id="four layers of each branch", marks=pytest.mark.slow),
    ],
)
def test_a_branch_that_becomes_slower_is_cut_anew_within_two_windows(layers: Sequence[int]) -> None:
    run = begun()
    assert run.policy.choice.layout.order == "branch-aware"
    for _ in range(3):
        assert not run.window().switch
    slow = [
        replace(layer, forward_s=layer.forward_s * by, backward_s=layer.backward_s * by, weight_grad_s=layer.weight_grad_s * by)
        for number, layer in enumerate(TRAINED.layers)
        for by in [1.5 if number in layers else 1.0]
    ]
    run.truth = replace(TRAINED, layers=tuple(slow))
    for _ in range(2):
        run.window()
    hindsight = solve(LayoutEvaluator(replace(problem(run.truth, node(4)), updates_per_window=1)))
    assert run.trace(run.truth).makespan_s <= 1.05 * hindsight.update_s


def test_a_thousand_windows_of_noise_are_no_reason_to_switch() -> None:
    run = begun()
    for _ in range(1000):
        decision = run.window()
        assert not decision.switch, decision.text


def test_coupled_losses_stay_whole() -> None:
    of = problem(towers((1.0, 1.0), num_layers=8, coupled=True), node(4), num_microbatches=1)
    layouts = list(branches.layouts(LayoutEvaluator(of), one_each(of.topology)))
    assert any(layout.branches is not None and layout.branches.search.line.num_parts == 8 for layout in layouts)
    for layout in layouts:
        placed: Layout = layout
        assert placed.branches is not None
        line = placed.branches.search.line
        assert line.whole_stages == (frozenset(line.graph.sinks) if line.num_parts > 1 else frozenset())
