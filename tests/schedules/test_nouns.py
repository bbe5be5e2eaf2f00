"""Hand-written schedules prove what the nouns can say: pipelines, branches, weight rules and scopes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, StageReplica, UpdateScope, WeightRule, dependencies, reads
from raypipe.schedules.lower import Recv, Send, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import evaluation
from raypipe.schedules.reductions import add_reductions
from raypipe.schedules.text import order_grid, parse_op
from raypipe.schedules.validate import validate
from tests.schedules import reference
from tests.schedules.handwritten import async_one_f_one_b, opposite_pipelines, pipedream, pipedream_2bw, two_branches, without_flush


def needs(schedule: Schedule, op: str) -> set[str]:
    return set(map(str, dependencies(schedule, parse_op(op))))


def drawn_rows(function: object) -> list[list[str]]:
    """The cells that a docstring draws, without idle slots."""
    lines = [line.split() for line in (function.__doc__ or "").splitlines()]
    return [[cell for cell in line[2:] if cell != "."] for line in lines if line[:1] == ["worker"]]


def test_opposite_pipelines_are_as_drawn() -> None:
    rows = [[str(slot) for slot in program[:-2]] for program in opposite_pipelines().programs]
    assert rows == drawn_rows(opposite_pipelines)


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8])
def test_opposite_pipelines_hold_two_copies_and_as_many_activations_as_chimera(num_devices: int) -> None:
    schedule = opposite_pipelines(num_devices)
    validate(schedule)
    found = metrics(schedule)
    assert found.weight_copies == (2,) * num_devices
    assert (found.max_mismatch, found.max_delay) == (0, 0)
    assert max(found.peak_in_flight) == num_devices
    assert min(found.peak_in_flight) == num_devices // 2 + 1


def test_each_copy_of_opposite_pipelines_has_its_own_holder_and_replicas() -> None:
    schedule = opposite_pipelines()
    assert len(schedule.first_pipeline) == 8
    assert schedule.replicas[0] == (StageReplica(0, 0), StageReplica(3, 0))
    assert schedule.first_pipeline[StageReplica(3, 0)] == 1
    assert schedule.replicas[3] == (StageReplica(3, 3), StageReplica(0, 3))


def test_reductions_of_opposite_pipelines_stand_behind_the_last_gradient_of_each_copy() -> None:
    schedule = add_reductions(opposite_pipelines())
    validate(schedule)
    assert order_grid(schedule.programs[:2]).splitlines() == [
        "worker   0 | 0F0   0F1   3F2@1 3B2@1 3F3@1 3B3@1 3G0@1 0B0   0B1   0G0   0U0   3U0@1",
        "worker   1 | 1F0   2F2@1 1F1   2F3@1 2B2@1 1B0   2B3@1 2G0@1 1B1   1G0   1U0   2U0@1",
    ]
    assert add_reductions(schedule) == schedule


def test_lowered_collectives_of_opposite_pipelines_have_both_copies_and_a_norm_of_all() -> None:
    schedule = opposite_pipelines()
    starts = reference.run(schedule, lower(schedule)).starts
    outer, inner = (0, 3), (1, 2)

    def gradients(stage: int) -> Collective:
        return Collective(CollectiveKind.GRADIENTS, stage, 0, 0, outer if stage in outer else inner)

    norm = Collective(CollectiveKind.NORM, 0, 0, 0, (0, 1, 2, 3))
    assert starts[0] == starts[3] == [gradients(3), gradients(0), norm] or starts[3] == [gradients(0), gradients(3), norm]
    reference.check_one_order(starts)


def test_an_update_of_opposite_pipelines_waits_for_the_reductions_of_all_stages() -> None:
    schedule = add_reductions(opposite_pipelines())
    everything = {f"{stage}G0{pipeline}" for stage in range(4) for pipeline in ("", "@1")}
    assert needs(schedule, "0U0") == everything
    assert needs(replace(schedule, update_scope=UpdateScope.STAGE), "0U0@1") == {"0G0", "0G0@1"}
    assert needs(schedule, "0G0") == {"0B1"}
    assert needs(schedule, "0G0@1") == {"0B3@1"}


def test_replicas_without_reductions_wait_for_each_others_last_gradients() -> None:
    schedule = replace(opposite_pipelines(), update_scope=UpdateScope.STAGE)
    assert needs(schedule, "0U0") == needs(schedule, "0U0@1") == {"0B1", "0B3@1"}


def test_a_forward_depends_on_its_own_pipeline_only() -> None:
    assert needs(opposite_pipelines(), "2F2@1") == {"1F2@1"}
    assert needs(opposite_pipelines(), "2B1") == {"2F1", "3B1"}


def test_branches_meet_where_the_graph_says() -> None:
    schedule = two_branches()
    validate(schedule)
    assert schedule.graph.sources == (0, 1)
    assert schedule.graph.sinks == (4,)
    assert schedule.graph.depths == (0, 0, 1, 1, 2)
    assert needs(schedule, "4F1") == {"2F1", "3F1"}
    assert needs(schedule, "2B1") == {"2F1", "4B1"}
    assert needs(schedule, "0B1") == {"0F1", "2B1"}
    assert needs(schedule, "0F1") == set()


def test_branches_are_as_drawn() -> None:
    schedule = two_branches()
    for program, row in zip(schedule.programs, drawn_rows(two_branches), strict=True):
        drawn = [cell for cell in row if cell != "..."]
        assert [str(slot) for slot in program[: len(drawn)]] == drawn


def test_branches_hold_a_microbatch_per_stage_and_worker_behind() -> None:
    found = metrics(two_branches(num_microbatches=6))
    assert found.peak_in_flight == (6, 4, 1)
    assert found.weight_copies == (2, 2, 1)


def test_branches_of_equal_depth_take_the_time_of_a_chain_of_that_depth() -> None:
    # Two stages a worker: three workers of time 2(F+B) and one of F+B, of which the first two are the longest.
    timing = reference.asap(two_branches(num_microbatches=8), reference.durations(1, 1, 1))
    assert timing.makespan_s >= 8 * 6
    assert timing.makespan_s <= 8 * 6 + 2 * 6
    assert timing.busy_s(0) == timing.busy_s(1) == 48


def test_messages_of_branches_go_along_edges_only() -> None:
    schedule = two_branches()
    edges = {
        (item.message.source, item.message.target) for program in lower(schedule) for item in program.items if isinstance(item, Send | Recv)
    }
    assert edges == {edge for source, target in schedule.graph.edges for edge in ((source, target), (target, source))}


def test_evaluation_of_branches_runs() -> None:
    forward = evaluation(two_branches(), num_microbatches=5)
    validate(forward)
    reference.run(forward, lower(forward))


@pytest.mark.parametrize("num_microbatches", [4, 5, 8])
def test_2bw_computes_update_k_with_the_version_its_paper_states(num_microbatches: int) -> None:
    schedule = pipedream_2bw(num_microbatches=num_microbatches)
    validate(schedule)
    for op, _ in schedule.ops():
        if op.kind in {OpKind.FORWARD, OpKind.BACKWARD}:
            # The paper counts microbatches k from 1.
            assert reads(schedule, op) == max((op.index + 1 - 1) // num_microbatches - 1, 0)
        else:
            assert reads(schedule, op) == op.index
    found = metrics(schedule)
    assert (found.max_mismatch, found.max_delay) == (0, 1)
    assert found.weight_copies == (2, 2, 2, 2)
    assert found.peak_in_flight == (4, 3, 2, 1)


def test_2bw_needs_the_update_that_made_its_version() -> None:
    schedule = pipedream_2bw()
    assert needs(schedule, "2F4") == {"1F4"}
    assert needs(schedule, "2F8") == {"1F8", "2U0"}
    assert needs(schedule, "2B8") == {"2F8", "3B8", "2U0"}
    assert needs(schedule, "2U1") == {"2B7", "2U0"}


def test_2bw_with_fewer_microbatches_than_devices_would_need_a_version_that_is_not_there() -> None:
    schedule = pipedream_2bw(num_microbatches=1, num_updates=6)
    with pytest.raises(ValueError, match="worker 0, position 2: 0F2 runs before 0U0"):
        validate(schedule)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 6])
def test_pipedream_holds_a_version_per_microbatch_in_flight(num_devices: int) -> None:
    schedule = pipedream(num_devices, 3 * num_devices)
    validate(schedule)
    found = metrics(schedule)
    assert found.weight_copies == found.peak_in_flight == tuple(num_devices - stage for stage in range(num_devices))
    assert (found.max_mismatch, found.max_delay) == (0, num_devices - 1)


def test_pipedream_is_as_late_at_each_stage_as_workers_follow_it() -> None:
    schedule = pipedream(4, 12)
    for op, _ in schedule.ops():
        if op.kind is OpKind.BACKWARD:
            assert op.index - reads(schedule, op) == min(op.index, 3 - op.stage)
            assert reads(schedule, op) == reads(schedule, op._replace(kind=OpKind.FORWARD))


@pytest.mark.parametrize("num_microbatches", [3, 4, 8])
def test_async_1f1b_is_stale_by_one_where_an_update_fills_the_pipeline(num_microbatches: int) -> None:
    schedule = async_one_f_one_b(4, num_microbatches)
    validate(schedule)
    found = metrics(schedule)
    assert (found.max_mismatch, found.max_delay) == (1, 1)
    assert found.weight_copies == (1, 1, 1, 1)


@pytest.mark.parametrize(("num_microbatches", "stale"), [(1, 3), (2, 2)])
def test_async_1f1b_is_staler_where_an_update_is_shorter_than_the_pipeline(num_microbatches: int, stale: int) -> None:
    schedule = async_one_f_one_b(4, num_microbatches, 12 // num_microbatches)
    validate(schedule)
    found = metrics(schedule)
    assert (found.max_mismatch, found.max_delay) == (stale, stale)


def test_live_weights_differ_between_forward_and_backward_of_the_first_stage_only_across_an_update() -> None:
    schedule = async_one_f_one_b(4, 4)
    versions = {str(op): reads(schedule, op) for op, _ in schedule.ops() if op.stage == 0}
    assert [versions[f"0F{index}"] for index in range(12)] == [0] * 7 + [1] * 4 + [2]
    assert [versions[f"0B{index}"] for index in range(12)] == [0] * 4 + [1] * 4 + [2] * 4


def test_the_last_stage_is_never_stale() -> None:
    for schedule in (async_one_f_one_b(4, 4), pipedream(4, 8)):
        for op, _ in schedule.ops():
            if op.stage == 3 and not op.kind.per_update:
                assert reads(schedule, op) == schedule.update(op)


def test_an_update_of_scope_stage_waits_for_its_own_gradients() -> None:
    schedule = without_flush(4, 2, 2, weight_rule=WeightRule.LIVE)
    assert needs(schedule, "1U0") == {"1B1"}
    assert needs(schedule, "0U0") == {"0B1"}
    assert needs(schedule, "0U1") == {"0B3", "0U0"}


@pytest.mark.parametrize("scope", [UpdateScope.STAGE, UpdateScope.TIED])
def test_an_update_waits_for_the_stages_that_share_a_weight_with_its_own(scope: UpdateScope) -> None:
    schedule = without_flush(4, 2, 2, weight_rule=WeightRule.LIVE, update_scope=scope, ties=[(0, 3)])
    assert needs(schedule, "0U0") == needs(schedule, "3U0") == {"0B1", "3B1"}
    assert needs(schedule, "1U0") == {"1B1"}
    assert needs(schedule, "3U1") == {"0B3", "3B3", "3U0"}


def test_an_update_of_scope_global_waits_for_all_stages() -> None:
    schedule = without_flush(4, 2, 2, weight_rule=WeightRule.LIVE, update_scope=UpdateScope.GLOBAL)
    for stage in range(4):
        assert needs(schedule, f"{stage}U0") == {"0B1", "1B1", "2B1", "3B1"}


def test_ties_of_several_groups_stay_apart() -> None:
    schedule = without_flush(4, 2, 1, weight_rule=WeightRule.LIVE, update_scope=UpdateScope.TIED, ties=[(0, 3), (1, 2)])
    assert needs(schedule, "0U0") == {"0B1", "3B1"}
    assert needs(schedule, "2U0") == {"1B1", "2B1"}


@pytest.mark.parametrize("scope", UpdateScope)
@pytest.mark.parametrize("tied", [False, True])
def test_what_an_update_waits_for_sets_the_pace_of_asynchronous_1f1b(scope: UpdateScope, tied: bool) -> None:
    schedule = without_flush(8, 8, 8, weight_rule=WeightRule.LIVE, update_scope=scope, ties=[(0, 7)] if tied else [])
    update_s = 38 if tied or scope is UpdateScope.GLOBAL else 24
    validate(schedule)
    ends = reference.asap(schedule, reference.durations(1, 1, 1)).update_ends_s()
    assert ends[5] - ends[4] == ends[4] - ends[3] == update_s


def test_a_recomputation_stands_between_forward_and_backward() -> None:
    forward, again, backward, update = (Op(kind, 0, 0) for kind in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.UPDATE))
    schedule = Schedule("recompute", StageGraph.chain(1), ((0,),), ((forward, again, backward, update),), num_microbatches=1)
    validate(schedule)
    assert needs(schedule, "0B0") == {"0R0"}
    assert needs(schedule, "0R0") == {"0F0"}
    with pytest.raises(ValueError, match="0B0 runs before 0R0"):
        validate(replace(schedule, programs=((forward, backward, again, update),)))
