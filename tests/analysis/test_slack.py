"""Slack, need and exposed seconds of stages, against what is known of 2BW (Narayanan et al., ICML 2021)."""

from __future__ import annotations

import pytest

from raypipe.analysis.slack import StageCommunication, stage_communication
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import Link
from raypipe.artifacts.trace import Dimension
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.passes import late_updates
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.simulator import simulate
from tests.on_ray.plans import lab, plan_of

FORWARD_S, BACKWARD_S = 0.02, 0.04
RATE = 25e6
NUM_UPDATES = 6


def plan(schedule: Schedule, *, sum_s: float, num_replicas: int = 2) -> Plan:
    """Stages with two replicas each, on nodes of their own, whose sums take so long; messages take no time."""
    names = [f"n{stage}-{replica}" for stage in range(schedule.num_stages) for replica in range(num_replicas)]
    pairs = [(f"n{stage}-{a}", f"n{stage}-{b}") for stage in range(schedule.num_stages) for a in range(num_replicas) for b in range(a)]
    links = [Link(source=a, target=b, bandwidth_bytes_per_s=RATE, latency_s=0.0) for a, b in pairs]
    topology = lab(dict.fromkeys(names, 1), links=links)
    layers = tuple(
        LayerProfile(
            name=f"l{stage}",
            forward_s=FORWARD_S * num_replicas,
            backward_s=BACKWARD_S * num_replicas,
            weight_grad_s=0.0,
            output_bytes=0,
            saved_bytes=0,
            parameter_bytes=round(sum_s * RATE),
        )
        for stage in range(schedule.num_stages)
    )
    workers = [[(f"n{stage}-{r}/0", 1 / num_replicas) for r in range(num_replicas)] for stage in range(schedule.num_stages)]
    profile = ModelProfile(name="p", microbatch_size=num_replicas, layers=layers)
    return plan_of(profile, topology, schedule, workers, sizes=[1] * schedule.num_stages, microbatch_size=num_replicas)


def order(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    return build(name, ScheduleRequest(num_stages, num_microbatches, NUM_UPDATES, update_scope=UpdateScope.STAGE))


def of(made: Plan) -> list[StageCommunication]:
    return stage_communication(made, simulate(made))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_a_stage_of_2bw_has_as_much_slack_as_pairs_until_its_version_is_read(num_stages: int, num_microbatches: int) -> None:
    found = of(plan(late_updates(order("pipedream-2bw", num_stages, num_microbatches)), sum_s=0.03))
    pair_s = FORWARD_S + BACKWARD_S
    expected = [(num_microbatches - num_stages + 1 + stage) * pair_s for stage in range(num_stages)]
    # Messages have a small latency, which may fall into it.
    assert [stage.slack_s for stage in found] == pytest.approx(expected, abs=0.005 * num_stages)
    assert [stage.need_s for stage in found] == pytest.approx([0.03] * num_stages)


def test_a_flush_has_no_slack_and_so_all_of_its_sums_is_exposed() -> None:
    for stage in of(plan(order("1f1b", 2, 4), sum_s=0.1)):
        assert stage.slack_s == pytest.approx(0.0, abs=1e-3)
        assert stage.need_s == pytest.approx(0.1)
        assert stage.exposed_s[Dimension.SUM] == pytest.approx(0.1, abs=5e-3)


def test_what_a_sum_needs_beyond_its_slack_is_exposed() -> None:
    late = late_updates(order("pipedream-2bw", 2, 4))
    hidden, exposed = of(plan(late, sum_s=0.1)), of(plan(late, sum_s=0.4))
    # Behind the last update of a window nothing hides a sum.
    assert max(stage.exposed_s[Dimension.SUM] for stage in hidden) <= 0.101 / NUM_UPDATES
    for stage in exposed:
        assert stage.exposed_s[Dimension.SUM] > 0.1


def test_a_stage_without_copies_needs_no_sum() -> None:
    for stage in of(plan(order("1f1b", 2, 4), sum_s=0.1, num_replicas=1)):
        assert (stage.need_s, stage.slack_s) == (None, None)
        assert Dimension.SUM not in stage.exposed_s
