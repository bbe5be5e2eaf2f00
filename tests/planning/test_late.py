"""Updates wait for sums of gradients as many slots as these take, where the weight rule lets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.late import with_hidden_transfers, with_late_updates
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.plan import plan_problem
from raypipe.planning.problem import Problem
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.metrics import ScheduleMetrics, metrics
from raypipe.schedules.validate import validate
from raypipe.simulation.simulator import simulate
from tests.marks import slow_unless

BYTES_PER_S = 25e6
NUM_MICROBATCHES = 8


def problem(sum_share: float, *, max_mean_staleness: float | None = None, scope: UpdateScope = UpdateScope.STAGE) -> Problem:
    """Four devices with one stage each in two pipelines, whose sums take a share of a device's work."""
    work_s = NUM_MICROBATCHES * 0.06
    # A device has two stages, each with one copy elsewhere: a ring of two sends all bytes once.
    profile = ModelProfile.uniform(
        4, forward_s=0.02, backward_s=0.04, output_bytes=1000, parameter_bytes=round(sum_share * work_s * BYTES_PER_S / 2)
    )
    topology = ClusterTopology.uniform(4, latency_s=1e-4, bandwidth_bytes_per_s=BYTES_PER_S, devices_per_node=1)
    return Problem(
        profile,
        topology,
        NUM_MICROBATCHES,
        1,
        updates_per_window=12,
        max_staleness=1,
        max_mean_staleness=max_mean_staleness,
        update_scope=scope,
    )


def simulated(problem: Problem, order: str) -> Evaluation:
    found = LayoutEvaluator(problem).simulate(Layout((0, 1, 2, 3, 4), ((0,), (1,), (2,), (3,)), order, num_pipelines=2))
    assert found is not None
    return found


def window_metrics(found: Evaluation) -> ScheduleMetrics:
    return metrics(layout_schedule(problem(0.25), found.layout, num_updates=12))


@pytest.mark.parametrize("scope", [UpdateScope.STAGE, UpdateScope.GLOBAL])
def test_sums_of_a_quarter_of_the_work_hardly_slow_amdp_auto(scope: UpdateScope) -> None:
    slowed = simulated(problem(0.25, scope=scope), "amdp-auto")
    without = simulated(problem(0.0, scope=scope), "amdp-auto")
    assert slowed.timing.steady_update_s > 1.1 * without.timing.steady_update_s
    late = with_late_updates(LayoutEvaluator(problem(0.25, scope=scope)), slowed)
    assert late is not None
    assert late.layout.late
    assert late.timing.steady_update_s < 1.03 * without.timing.steady_update_s
    assert window_metrics(late).max_delay == 1


def test_updates_without_sums_are_not_late() -> None:
    found = simulated(problem(0.0), "amdp-auto")
    assert with_late_updates(LayoutEvaluator(problem(0.0)), found) is found


def test_a_limit_on_staleness_holds() -> None:
    limited = problem(0.25, max_mean_staleness=0.3)
    late = with_late_updates(LayoutEvaluator(limited), simulated(limited, "amdp-auto"))
    free = with_late_updates(LayoutEvaluator(problem(0.25)), simulated(problem(0.25), "amdp-auto"))
    assert late is not None
    assert free is not None
    assert window_metrics(late).mean_delay <= 0.3 < window_metrics(free).mean_delay
    assert free.timing.steady_update_s < late.timing.steady_update_s


def test_updates_are_later_only_as_far_as_the_optimizer_bears_it() -> None:
    """Faster updates do not pay for several times as many."""
    free = with_late_updates(LayoutEvaluator(problem(0.25)), simulated(problem(0.25), "amdp-auto"))
    paying = replace(problem(0.25), optimizer="nadamw")
    early = simulated(paying, "amdp-auto")
    late = with_late_updates(LayoutEvaluator(paying), early)
    assert free is not None
    assert free.layout.late
    assert late is not None
    as_free = LayoutEvaluator(paying).simulate(free.layout)
    assert as_free is not None
    assert as_free.loss_s > 1.5 * early.loss_s
    assert late.loss_s <= early.loss_s
    hidden = with_hidden_transfers(LayoutEvaluator(paying), early, most_steps=3)
    assert hidden is not None
    assert hidden.rank <= early.rank


def test_a_plan_has_them() -> None:
    found = plan_problem(problem(0.25), schedule="amdp-auto")
    validate(found.schedule)
    trace = simulate(found)
    assert trace.steady_update_s is not None
    assert trace.steady_update_s < 1.05 * NUM_MICROBATCHES * 0.06


@pytest.mark.parametrize(("sum_share", "num_pipelines"), slow_unless({(1.0, 1)}, [(0.0, 4), (0.25, 4), (0.5, 2), (1.0, 1)]))
def test_the_number_of_pipelines_follows_the_sums(sum_share: float, num_pipelines: int) -> None:
    # Twelve layers on eight devices: the more pipelines, the better balanced, and the more copies to sum.
    num_devices, num_layers, num_microbatches = 8, 12, 16
    forward_s = 0.02 * num_devices / num_layers
    parameter_bytes = round(sum_share * num_microbatches * 0.06 * BYTES_PER_S / 2 * num_devices / num_layers)
    profile = ModelProfile.uniform(
        num_layers, forward_s=forward_s, backward_s=2 * forward_s, output_bytes=1000, parameter_bytes=parameter_bytes
    )
    topology = ClusterTopology.uniform(num_devices, latency_s=1e-4, bandwidth_bytes_per_s=BYTES_PER_S, devices_per_node=1)
    on_ring = Problem(profile, topology, num_microbatches, 1, updates_per_window=12, max_staleness=1, update_scope=UpdateScope.STAGE)
    assert len(plan_problem(on_ring, schedule="amdp-auto").schedule.pipelines) == num_pipelines
