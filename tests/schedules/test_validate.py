"""The validator objects to orders that cannot run, and says where and why."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, Slot, StageGraph, UpdateScope, WeightRule
from raypipe.schedules.lower import lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.text import parse_slot
from raypipe.schedules.validate import validate
from tests import strategies
from tests.schedules import handwritten, reference


def schedule_of(*rows: str, pipelines: Sequence[Sequence[int]] | None = None, graph: StageGraph | None = None, **fields: Any) -> Schedule:
    """The schedule whose programs are written as rows of slots; by default a chain with stage s on worker s."""
    programs: tuple[tuple[Slot, ...], ...] = tuple(tuple(parse_slot(cell) for cell in row.split()) for row in rows)
    graph = graph or StageGraph.chain(len(rows))
    pipelines = pipelines or (range(graph.num_stages),)
    schedule = Schedule("by hand", graph, tuple(map(tuple, pipelines)), programs, num_microbatches=1)
    return replace(schedule, **fields)


def refusal(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return caught.value


def is_complete(schedule: Schedule) -> bool:
    """Said by hand: all F, and all B or all I and W, of each stage and microbatch in one pipeline, and U of each copy and update."""
    counts = Counter(op for op, _ in schedule.ops())
    if any(count > 1 for count in counts.values()):
        return False
    if any(schedule.pipelines[op.pipeline][op.stage] != at.worker for op, at in schedule.ops()):
        return False
    copies = {(worker, stage) for workers in schedule.pipelines for stage, worker in enumerate(workers)}
    updates = Counter((at.worker, op.stage, op.index) for op, at in schedule.ops() if op.kind is OpKind.UPDATE)
    if updates != Counter((*copy, update) for copy in copies for update in range(schedule.num_updates)):
        return False
    whole: dict[tuple[int, int], dict[str, set[int]]] = {}
    for op in counts:
        if op.kind is not OpKind.UPDATE:
            whole.setdefault((op.stage, op.index), {}).setdefault(str(op.kind), set()).add(op.part)
    work = {(stage, index) for stage in range(schedule.num_stages) for index in range(schedule.num_microbatches * schedule.num_updates)}
    return whole.keys() == work and all(
        kinds.keys() in ({"F", "B"}, {"F", "I", "W"}) and len(set(map(frozenset, kinds.values()))) == 1 for kinds in whole.values()
    )


def runs(schedule: Schedule) -> bool:
    try:
        reference.asap(schedule, reference.durations(1, 1, 1))
        for seed in range(3):
            reference.check_one_order(reference.run(schedule, lower(schedule), seed).starts)
    except ValueError:  # graphlib.CycleError
        return False
    except reference.WrongRunError:
        return False
    return True


@given(data=st.data())
@settings(max_examples=300)
def test_an_edited_schedule_is_refused_unless_it_still_runs(data: st.DataObject) -> None:
    schedule = data.draw(strategies.family_schedules(max_devices=4, max_microbatches=5))
    edit = data.draw(strategies.edits(schedule))
    assume(edit.what != "drop" or not edit.ops[0].part)  # how many parts there should be is stated nowhere
    good = is_complete(edit.schedule) and runs(edit.schedule)
    if good:
        validate(edit.schedule)
    else:
        error = refusal(edit.schedule)
        assert ">" in error.grid or edit.what == "drop"
        assert error.grid.count("worker ") == schedule.num_workers
        # A moved Op and what it collides with, a neighbor of the edit: all concern the same worker, stage or index.
        named = error.problem
        assert any(str(op) in named or f"microbatch {op.index} " in named for op in edit.ops) or names_a_relative(error, edit)


def names_a_relative(error: ScheduleError, edit: strategies.Edit) -> bool:
    """Whether the Ops of the edit are marked in the grid, or the message names an Op of the same index or stage."""
    marked = any(f">{op}<" in error.grid for op in edit.ops)
    words = error.problem.replace(";", " ").replace(":", " ").split()
    ops = [parse_slot(word) for word in words if word[:1].isdigit() and not word.isdigit() and word[-1].isdigit()]
    related = any(isinstance(op, Op) and (op.index == moved.index or op.stage == moved.stage) for op in ops for moved in edit.ops)
    return marked or related


@pytest.mark.parametrize("name", strategies.SPEC_NAMES)
def test_every_dropped_op_is_missed_and_named(name: str) -> None:
    schedule = catalogue.build(name, strategies.near(name, 3, 3, 2))
    for op, place in schedule.ops():
        programs: Sequence[Sequence[Slot]] = schedule.programs
        for part in schedule.find(op._replace(part=0)):
            programs = strategies.without(programs, part)
        error = refusal(replace(schedule, programs=tuple(map(tuple, programs))))
        assert f"worker {place.worker} has no {op._replace(part=0)}" in error.problem


@pytest.mark.parametrize("name", strategies.SPEC_NAMES)
def test_every_doubled_op_is_named_and_marked_twice(name: str) -> None:
    schedule = catalogue.build(name, strategies.near(name, 3, 3))
    chance = random.Random(name)
    for op, place in schedule.ops():
        program = list(schedule.programs[place.worker])
        slot = program[place.position]
        program.insert(chance.randint(0, len(program)), op)
        error = refusal(
            replace(schedule, programs=(*schedule.programs[: place.worker], tuple(program), *schedule.programs[place.worker + 1 :]))
        )
        assert f"{op} runs a second time" in error.problem
        assert error.grid.count(f">{op}<") + (error.grid.count(f">{slot}<") if slot != op else 0) == 2


@pytest.mark.parametrize("name", strategies.SPEC_NAMES)
def test_every_op_on_the_wrong_worker_is_named(name: str) -> None:
    schedule = catalogue.build(name, strategies.near(name, 3, 3))
    for op, place in schedule.ops():
        programs = strategies.without(schedule.programs, op)
        programs[(place.worker + 1) % schedule.num_workers].append(op)
        error = refusal(replace(schedule, programs=tuple(map(tuple, programs))))
        assert f"{op} belongs on worker {place.worker}, which holds stage {op.stage}" in error.problem
        assert f">{op}<" in error.grid


def test_a_backward_before_its_forward_is_refused_with_the_grid() -> None:
    schedule = schedule_of("0F0 0B0 0U0", "1F0 1B0 1U0", "2F0 2B0 2U0", "3B0 3F0 3U0")
    assert str(refusal(schedule)) == (
        "worker 3, position 0: 3B0 runs before 3F0\n"
        "worker   0 | 0F0   0B0   0U0\n"
        "worker   1 | 1F0   1B0   1U0\n"
        "worker   2 | 2F0   2B0   2U0\n"
        "worker   3 | >3B0< >3F0< 3U0"
    )


def test_two_workers_that_wait_for_each_other_are_named() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0B1 0U0", "1F1 1B1 1F0 1B0 1U0", num_microbatches=2)
    assert str(refusal(schedule)) == (
        "deadlock: worker 0 waits with 0B0 for 1B0; worker 1 waits with 1F1 for 0F1\n"
        "worker   0 | 0F0   >0B0< 0F1   0B1   0U0\n"
        "worker   1 | >1F1< 1B1   1F0   1B0   1U0"
    )


def test_a_microbatch_that_misses_a_stage_is_refused() -> None:
    error = refusal(schedule_of("0F0 0B0 0U0", "1B0 1U0"))
    assert error.problem == "worker 1 has no 1F0"
    assert ">1B0<" in error.grid


def test_a_missing_backward_is_refused() -> None:
    assert refusal(schedule_of("0F0 0U0", "1F0 1B0 1U0")).problem == "worker 0 has no 0B0"


def test_a_missing_weight_gradient_is_refused() -> None:
    assert refusal(schedule_of("0F0 0I0 0W0 0U0", "1F0 1I0 1U0")).problem == "worker 1 has no 1W0"


def test_a_missing_input_gradient_is_refused() -> None:
    assert refusal(schedule_of("0F0 0W0 0U0", "1F0 1B0 1U0")).problem == "worker 0 has no 0I0"


def test_a_missing_update_is_refused() -> None:
    assert refusal(schedule_of("0F0 0B0 0U0", "1F0 1B0")).problem == "worker 1 has no 1U0: its copy of stage 1 would miss update 0"


def test_a_weight_gradient_before_its_input_gradient_is_refused() -> None:
    assert refusal(schedule_of("0F0 0W0 0I0 0U0")).problem == "worker 0, position 1: 0W0 runs before 0I0"


def test_an_update_before_its_last_gradient_is_refused() -> None:
    schedule = schedule_of("0F0 0F1 0B0 0U0 0B1", num_microbatches=2)
    assert refusal(schedule).problem == "worker 0, position 3: 0U0 runs before 0B1"


def test_a_forward_before_the_update_whose_weights_it_needs_is_refused() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0U0 0B1 0U1", num_updates=2)
    assert refusal(schedule).problem == "worker 0, position 2: 0F1 runs before 0U0"
    validate(replace(schedule, weight_rule=WeightRule.DOUBLE_BUFFER))


def test_updates_out_of_order_are_refused() -> None:
    schedule = schedule_of("0F0 0F1 0B0 0B1 0U1 0U0", num_updates=2, weight_rule=WeightRule.LIVE)
    assert refusal(schedule).problem == "worker 0, position 4: 0U1 runs before 0U0"


def test_a_gradient_behind_its_reduction_is_refused() -> None:
    rows = ("0F0 0F1 0B0 0G0 0B1 0U0", "0F2@1 0B2@1 0G0@1 0U0@1")
    schedule = schedule_of(*rows, graph=StageGraph.chain(1), pipelines=[[0], [1]], num_microbatches=3)
    error = refusal(schedule)
    assert "0G0 runs before 0B1" in error.problem or "0B1 adds to a gradient that 0G0 has already reduced" in error.problem
    assert ">0G0<" in error.grid
    assert ">0B1<" in error.grid


def test_a_reduction_that_another_copy_leaves_out_is_refused() -> None:
    rows = ("0F0 0B0 0G0 0U0", "0F1@1 0B1@1 0U0@1")
    schedule = schedule_of(*rows, graph=StageGraph.chain(1), pipelines=[[0], [1]], num_microbatches=2)
    assert refusal(schedule).problem == "worker 0, position 2: 0G0 would wait for ever: worker 1 has no 0G0@1 for its copy"


def test_an_op_that_a_copy_does_once_is_named_by_its_first_pipeline() -> None:
    schedule = schedule_of("0F0 0B0 0F1@1 0B1@1 0U0 0U0@1", graph=StageGraph.chain(1), pipelines=[[0], [0]], num_microbatches=2)
    assert refusal(schedule).problem == "worker 0, position 5: 0U0@1 is done once for the copy that pipelines share; write 0U0"


def test_an_unknown_stage_is_refused() -> None:
    assert refusal(schedule_of("0F0 0B0 0U0 1F0")).problem == "worker 0, position 3: 1F0 names stage 1; there are 1"


def test_an_unknown_pipeline_is_refused() -> None:
    assert refusal(schedule_of("0F0@1 0B0 0U0")).problem == "worker 0, position 0: 0F0@1 names pipeline 1; there are 1"


@pytest.mark.parametrize("op", ["0F1", "0U1"])
def test_an_index_that_is_too_large_is_refused(op: str) -> None:
    assert refusal(schedule_of(f"0F0 0B0 0U0 {op}")).problem == f"worker 0, position 3: {op}: its index must be less than 1"


def test_a_microbatch_in_two_pipelines_is_refused() -> None:
    rows = ("0F0 0B0 0U0", "0F0@1 0B0@1 0U0@1")
    error = refusal(schedule_of(*rows, graph=StageGraph.chain(1), pipelines=[[0], [1]]))
    assert error.problem == "worker 0, position 0: microbatch 0 passes through 2 pipelines, not through one"
    assert error.grid.count(">") == 4


def test_a_microbatch_in_no_pipeline_is_refused() -> None:
    assert refusal(schedule_of("0F0 0B0 0U0", num_microbatches=2)).problem == "microbatch 1 passes through 0 pipelines, not through one"


def test_collectives_in_different_orders_are_refused() -> None:
    rows = ("0F0 1F0 1B0 0B0 0G0 1G0 0U0 1U0", "0F1@1 1F1@1 1B1@1 0B1@1 1G0@1 0G0@1 0U0@1 1U0@1")
    schedule = schedule_of(*rows, graph=StageGraph.chain(2), pipelines=[[0, 0], [1, 1]], num_microbatches=2, update_scope=UpdateScope.STAGE)
    error = refusal(schedule)
    assert "in different orders; give all workers one order" in error.problem
    assert "gradients of stage 0 for update 0" in error.problem
    assert "gradients of stage 1 for update 0" in error.problem
    assert ">0G0<" in error.grid


def test_what_runs_whole_and_in_parts_is_refused() -> None:
    error = refusal(schedule_of("0F0 0F0.1 0B0 0U0"))
    assert error.problem == "worker 0, position 1: 0F0.1 is a part of what also runs whole"
    assert ">0F0<" in error.grid


def test_a_backward_that_runs_split_and_whole_is_refused() -> None:
    assert refusal(schedule_of("0F0 0B0 0I0 0W0 0U0")).problem == "worker 0, position 1: 0B0 runs whole and split"


def test_ops_that_overlap_must_not_need_each_other() -> None:
    schedule = replace(schedule_of("0F0 0B0 0U0"), programs=((parse_slot("(0F0;0B0)"), parse_slot("0U0")),))
    assert refusal(schedule).problem == "worker 0, position 0: 0B0 runs before 0F0"


def test_ops_that_overlap_are_valid_where_neither_needs_the_other() -> None:
    schedule = schedule_of("0F0 (0F1;0B0) 0B1 0U0", num_microbatches=2)
    validate(schedule)
    assert isinstance(schedule.programs[0][1], Overlap)
    assert metrics(schedule).peak_in_flight == (2,)


def test_parts_of_a_microbatch_run_in_any_number_and_count_as_shares() -> None:
    schedule = schedule_of("0F0 0F1 0B0 0B1 0U0", "1F0.1 1F0.2 1B0.1 1B0.2 1F1 1B1 1U0", num_microbatches=2)
    validate(schedule)
    reference.run(schedule, lower(schedule))
    assert metrics(schedule).peak_in_flight == (2, 1)


def test_a_reduction_does_not_hold_up_the_work_that_the_other_copy_waits_for() -> None:
    # The second copy's last gradient needs 0F1@1, which stands behind the first copy's reduction.
    rows = ("0F0 1F0 1B0 1G0 0F1@1 0B0 0B1@1 0U0 1U0", "1F1@1 1B1@1 1G0@1 1U0@1")
    schedule = schedule_of(*rows, graph=StageGraph.chain(2), pipelines=[[0, 0], [0, 1]], num_microbatches=2, update_scope=UpdateScope.STAGE)
    validate(schedule)
    for seed in range(10):
        reference.run(schedule, lower(schedule), seed)


def test_an_update_waits_until_every_copy_hands_its_gradient_over() -> None:
    # 0U0 of worker 0 needs 0G0@1, which stands behind 1F2 on worker 1, which needs 0F2, which stands behind 0U0.
    rows = (
        "0F0 0B0 0G0 0U0 0F2 0B2 0G1 0U1",
        "1F0 1B0 0F1@1 1F1@1 1B1@1 0B1@1 1U0 1F2 0G0@1 0U0@1 1B2 0F3@1 1F3@1 1B3@1 0B3@1 0G1@1 0U1@1 1U1",
    )
    fields: dict[str, Any] = {"pipelines": [[0, 1], [1, 1]], "num_microbatches": 2, "num_updates": 2, "weight_rule": WeightRule.LIVE}
    hangs = schedule_of(*rows, update_scope=UpdateScope.STAGE, **fields)
    assert refusal(hangs).problem == "deadlock: worker 0 waits with 0U0 for 0G0@1; worker 1 waits with 1F2 for 0F2"
    runs = schedule_of(rows[0], rows[1].replace("1F2 0G0@1", "0G0@1 1F2"), update_scope=UpdateScope.STAGE, **fields)
    validate(runs)
    reference.run(runs, lower(runs))


def test_workers_that_publish_weights_wait_for_each_other() -> None:
    # 0P0 ends when worker 1 gets to it, which stands behind 1F1, which waits for what worker 0 does after 0P0.
    graph = StageGraph.chain(2)
    rows = ("0F0 0B0 0U0 0P0 0F1 0B1 0U1 0P1", "1F0 1B0 1U0 1F1 0P0@1 1B1 1U1 0P1@1")
    schedule = schedule_of(
        *rows, graph=graph, pipelines=[[0, 1], [1, 1]], num_updates=2, weight_rule=WeightRule.LIVE, update_scope=UpdateScope.STAGE
    )
    error = refusal(schedule)
    assert "worker 0 waits with 0F1 for 0P0@1" in error.problem
    assert "worker 1 waits with 1F1 for 0F1" in error.problem
    assert ">0F1<" in error.grid
    fixed = replace(
        schedule, programs=(schedule.programs[0], tuple(map(parse_slot, ["1F0", "1B0", "1U0", "0P0@1", "1F1", "1B1", "1U1", "0P1@1"])))
    )
    validate(fixed)
    reference.run(fixed, lower(fixed))


def test_weights_that_nobody_updates_cannot_be_published() -> None:
    rows = ("0F0 0B0 0P0", "0F1@1 0B1@1 0P0@1")
    schedule = schedule_of(*rows, graph=StageGraph.chain(1), pipelines=[[0], [1]], num_microbatches=2)
    assert refusal(schedule).problem == (
        "worker 0, position 2: 0P0 publishes what no worker updates; give one of the copies of stage 0 a U"
    )


def test_a_copy_that_no_microbatch_passes_through_is_updated_all_the_same() -> None:
    rows = ("0F0 0B0 0U0", "0U0@1")
    schedule = schedule_of(*rows, graph=StageGraph.chain(1), pipelines=[[0], [1]])
    validate(schedule)
    reference.run(schedule, lower(schedule))


def test_workers_without_stages_are_left_out_of_the_norm() -> None:
    schedule = schedule_of("0F0 0B0 0U0", "", "1F0 1B0 1U0", graph=StageGraph.chain(2), pipelines=[[0, 2]])
    validate(schedule)
    starts = reference.run(schedule, lower(schedule)).starts
    assert [len(started) for started in starts.values()] == [1, 0, 1]
    assert starts[0][0].devices == (0, 2)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_microbatches": 0}, "schedule 'by hand' has 0 num_microbatches; it needs at least 1"),
        ({"num_updates": 0}, "schedule 'by hand' has 0 num_updates; it needs at least 1"),
        ({"programs": ()}, "schedule 'by hand' has 0 workers; it needs at least 1"),
        ({"pipelines": ()}, "schedule 'by hand' has 0 pipelines; it needs at least 1"),
        ({"pipelines": ((0, 0),)}, "pipeline 0 places 2 stages, the stage graph has 1"),
        ({"pipelines": ((1,),)}, "pipeline 0 places stage 0 on worker 1; there are programs for 0..0"),
    ],
)
def test_a_malformed_schedule_is_refused(fields: dict[str, Any], problem: str) -> None:
    assert refusal(replace(schedule_of("0F0 0B0 0U0"), **fields)).problem == problem


def test_a_stage_that_works_on_a_whole_microbatch_waits_for_all_its_parts() -> None:
    chain = StageGraph.chain(2)
    valid = "0F0.1 0F0.2 1F0 1B0 0B0.1 0B0.2 0U0 1U0"
    validate(schedule_of(valid, graph=chain, pipelines=((0, 0),)))
    early = schedule_of("0F0.1 1F0 0F0.2 1B0 0B0.1 0B0.2 0U0 1U0", graph=chain, pipelines=((0, 0),))
    assert refusal(early).problem == "worker 0, position 1: 1F0 runs before 0F0.2"
    early = schedule_of("0F0.1 0F0.2 1F0 0B0.1 1B0 0B0.2 0U0 1U0", graph=chain, pipelines=((0, 0),))
    assert refusal(early).problem == "worker 0, position 3: 0B0.1 runs before 1B0"


@pytest.mark.parametrize(
    ("edges", "ties", "problem"),
    [
        (((1, 0),), (), "edge 1 -> 0 does not lead from a stage to a later one"),
        (((0, 2),), (), "edge 0 -> 2 does not lead from a stage to a later one"),
        (((0, 1), (0, 1)), (), "names an edge twice"),
        (((0, 1),), ((0,),), "does not name two or more of the stages"),
        (((0, 1),), ((0, 0),), "does not name two or more of the stages"),
        (((0, 1),), ((0, 5),), "does not name two or more of the stages"),
    ],
)
def test_a_malformed_stage_graph_is_refused(edges: tuple[tuple[int, int], ...], ties: tuple[tuple[int, ...], ...], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        StageGraph(2, edges, ties)


def test_a_stage_graph_without_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least one stage"):
        StageGraph(0, ())


@given(data=st.data())
@settings(max_examples=100)
def test_an_edited_hand_written_schedule_is_refused_or_runs(data: st.DataObject) -> None:
    schedule = data.draw(strategies.handwritten_schedules())
    edit = data.draw(strategies.edits(schedule))
    error = None
    try:
        validate(edit.schedule)
    except ScheduleError as found:
        error = found
    if error:
        assert error.grid
        return
    assert set(edit.schedule.places) == set(schedule.places)
    for seed in range(2):
        reference.run(edit.schedule, lower(edit.schedule), seed)


def test_marks_of_a_long_grid_leave_out_what_is_far_away() -> None:
    schedule = handwritten.pipedream(4, 40)
    programs = [list(program) for program in schedule.programs]
    at = programs[2].index(Op(OpKind.UPDATE, 2, 20))
    programs[2][at - 1], programs[2][at] = programs[2][at], programs[2][at - 1]
    error = refusal(replace(schedule, programs=tuple(map(tuple, programs))))
    assert "... " in error.grid
    assert max(map(len, error.grid.splitlines())) < 300
