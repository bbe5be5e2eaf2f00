"""Predictions of sums whose late rows do not hold up the update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, make_plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Collective, CollectiveKind, Start, SumRows
from raypipe.schedules.passes import late_updates
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.plan_cost import late_row_stages, plan_cost, plan_programs
from raypipe.simulation.simulator import simulate

NUM_UPDATES = 8
MEGABYTE = 1 << 20


def profile_of(share: float | None, *, parameter_bytes: int = 120_000, table_bytes: int = 100_000) -> ModelProfile:
    """Two layers, the first with a table of 1,000 rows, 100 of which a microbatch touches."""
    layer = LayerProfile(
        name="table",
        forward_s=0.5,
        backward_s=1.0,
        weight_grad_s=0.5,
        output_bytes=8,
        saved_bytes=8,
        parameter_bytes=parameter_bytes,
        gradient_rows=100,
        looked_up_rows=1000,
        looked_up_bytes=table_bytes,
        reread_share=share,
    )
    other = replace(layer, name="other", parameter_bytes=8, gradient_rows=None, looked_up_rows=None, looked_up_bytes=None)
    other = replace(other, reread_share=None)
    return ModelProfile(name="model", microbatch_size=2, layers=(layer, other))


def plan_of(profile: ModelProfile, *, name: str = "pipedream-2bw", bytes_per_s: float = 1e4, sizes: tuple[int, ...] = (1, 1)) -> Plan:
    topology = ClusterTopology.uniform(2 * len(sizes), bandwidth_bytes_per_s=bytes_per_s)
    return make_plan(
        name="late",
        planner="by hand",
        cut=Cut.of_sizes(sizes, ((0, 1),), ()),
        schedule=late_updates(build(name, ScheduleRequest(len(sizes), 4, NUM_UPDATES))),
        profile=profile,
        topology=topology,
        devices=tuple(device.name for device in topology.devices),
        microbatch_size=2,
        replicas=2,
    )


def test_sums_of_due_and_late_rows_have_the_bytes_of_all_rows() -> None:
    cost = plan_cost(plan_of(profile_of(0.25)))
    touched = 100_000 * (1 - 0.9**4)
    whole = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))
    num_bytes = {rows: cost.collective_bytes(replace(whole, rows=rows)) for rows in SumRows}
    assert num_bytes[SumRows.ALL] == pytest.approx(20_000 + touched, abs=1)
    assert num_bytes[SumRows.LATE] == pytest.approx(touched * 0.75 * (1 - touched / 100_000), abs=1)
    assert num_bytes[SumRows.DUE] + num_bytes[SumRows.LATE] == num_bytes[SumRows.ALL]


def test_late_rows_shorten_an_update_that_waits_for_its_sum() -> None:
    def update_s(share: float | None) -> float:
        found = simulate(plan_of(profile_of(share))).steady_update_s
        assert found is not None
        return found

    together, late = update_s(None), update_s(0.0)
    assert late < 0.95 * together
    assert update_s(1.0) == together


def rows_in(plan: Plan) -> set[SumRows]:
    return {item.collective.rows for program in plan_programs(plan) for item in program.items if isinstance(item, Start)}


def test_a_profile_without_a_share_or_another_order_has_no_late_rows() -> None:
    assert rows_in(plan_of(profile_of(0.5))) == set(SumRows)
    assert rows_in(plan_of(profile_of(None))) == {SumRows.ALL}
    assert rows_in(plan_of(profile_of(0.5), name="1f1b")) == {SumRows.ALL}


def test_tables_of_the_last_bucket_alone_have_late_rows() -> None:
    table, other = profile_of(0.5, parameter_bytes=2 * MEGABYTE, table_bytes=MEGABYTE).layers
    other = replace(other, parameter_bytes=2 * MEGABYTE)
    for layers, stages in (((table, other), (0,)), ((other, table), ())):
        profile = ModelProfile(name="model", microbatch_size=2, layers=layers)
        plan = plan_of(profile, sizes=(2,))
        assert late_row_stages(profile, plan.cut) == stages
        assert bool(plan_cost(plan).stages[0, 0].late_bytes) == bool(stages)


def test_gradients_of_tables_are_held_until_their_late_rows_are_summed() -> None:
    late, together = (simulate(plan_of(profile_of(share))).memory for share in (0.0, None))
    most = [[max(held for _, held in curve) for curve in memory] for memory in (late, together)]
    assert [mine - other for mine, other in zip(*most, strict=True)] == [100_000, 100_000, 0, 0]
    # All are freed in the end.
    assert [curve[-1][1] for curve in late] == [curve[-1][1] for curve in together]
