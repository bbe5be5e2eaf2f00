"""Schedules as text come back as they were; what is no schedule is refused with its place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import FormatError, ScheduleError
from raypipe.schedules.ir import Op, OpKind, Overlap, ProgramPlace, Schedule, Slot
from raypipe.schedules.text import from_csv, order_grid, parse_op, parse_slot, to_csv, to_torch_csv
from tests import strategies

NUMBERS = st.integers(0, 999_999_999)
OPS = st.builds(Op, st.sampled_from(OpKind), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
SLOTS: st.SearchStrategy[Slot] = st.one_of(OPS, st.lists(OPS, min_size=2, max_size=4).map(lambda ops: Overlap(tuple(ops))))


@given(op=OPS)
def test_an_op_comes_back_from_its_text(op: Op) -> None:
    assert parse_op(str(op)) == op
    assert parse_slot(f" {op} ") == op


@given(programs=st.lists(st.lists(SLOTS, min_size=1, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple))
def test_programs_come_back_from_csv(programs: tuple[tuple[Slot, ...], ...]) -> None:
    assert from_csv(to_csv(programs), path="order.csv") == programs


@given(schedule=strategies.schedules())
@settings(max_examples=30)
def test_schedules_come_back_from_csv(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule.programs), path="order.csv") == schedule.programs


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("2F5", Op(OpKind.FORWARD, 2, 5)),
        ("2B5.1", Op(OpKind.BACKWARD, 2, 5, part=1)),
        ("2W5@1", Op(OpKind.WEIGHT_GRADIENT, 2, 5, 1)),
        ("12U3.2@4", Op(OpKind.UPDATE, 12, 3, 4, 2)),
    ],
)
def test_ops_are_written_as_documented(text: str, op: Op) -> None:
    assert str(op) == text
    assert parse_op(text) == op


@pytest.mark.parametrize(
    "text",
    ["", "F0", "0F", "0Q0", "0f0", "0F0.", "0F0@", "0F0@1.1", "0F0 1F0", "-1F0", "0F1e3", "0F0000000000", "\u0663F0", "0F0;0B0", "0FF0"],
)
def test_what_is_no_op_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no Op; write STAGE KIND INDEX such as 2F5, kinds F B I W R U G P"):
        parse_op(text)


@pytest.mark.parametrize("text", ["()", "(0F0;)", "(0F0", "0F0)", "(0F0;(0B0;0B1))", "(0F0;0B0)OVERLAP"])
def test_what_is_no_slot_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_slot(text)


@given(text=st.text(max_size=30))
def test_any_text_is_an_op_or_refused(text: str) -> None:
    try:
        slot = parse_slot(text)
    except ScheduleError:
        return
    assert parse_slot(str(slot)) == slot


@given(text=st.one_of(st.text(max_size=200), st.binary(max_size=200).map(lambda data: data.decode("latin-1"))))
@settings(max_examples=200)
def test_any_text_is_programs_or_refused(text: str) -> None:
    problem = ""
    try:
        from_csv(text, path="order.csv")
    except FormatError as error:
        problem = str(error)
    assert not problem or problem.startswith("order.csv: ")


@given(text=st.text(alphabet='0123FBU(;)@.,"\n\r \t', max_size=60))
@settings(max_examples=300)
def test_text_like_programs_is_programs_or_refused(text: str) -> None:
    try:
        programs = from_csv(text, path="order.csv")
    except FormatError:
        return
    assert from_csv(to_csv(programs), path="order.csv") == tuple(programs)


def test_a_malformed_cell_is_named_by_row_and_cell() -> None:
    with pytest.raises(FormatError) as error:
        from_csv("0F0,0B0\n1F0,,1X\n", path="order.csv")
    assert str(error.value) == ("order.csv: row 2, cell 3: '1X' is no Op; write STAGE KIND INDEX such as 2F5, kinds F B I W R U G P")


@pytest.mark.parametrize("text", ["", "\n", ",,\n,\n"])
def test_a_file_without_ops_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="holds no Op; expected one row a worker"):
        from_csv(text, path="order.csv")


def test_an_open_quote_is_refused() -> None:
    with pytest.raises(FormatError, match="not a CSV file"):
        from_csv('"0F0,0B0', path="order.csv")


def test_idle_cells_are_left_out() -> None:
    assert from_csv(",0F0,,0B0\n", path="order.csv") == ((parse_op("0F0"), parse_op("0B0")),)


def test_torch_gets_computation_only() -> None:
    programs = (tuple(map(parse_slot, ("0F0", "0R0", "(0F1;0B0)", "0G0", "0U0"))),)
    assert to_torch_csv(programs) == "0F0,(0F1;0B0)OVERLAP_F_B\n"
    assert from_csv(to_torch_csv(programs), path="order.csv") == ((parse_slot("0F0"), parse_slot("(0F1;0B0)")),)


@pytest.mark.parametrize("op", ["0B0@1", "0B0.1"])
def test_what_torch_cannot_write_is_refused(op: str) -> None:
    with pytest.raises(ScheduleError) as error:
        to_torch_csv(((parse_op("0F0"), parse_op(op)),))
    assert str(error.value) == f"worker 0, position 1: torch's CSV cannot write {op}; it knows no pipelines or parts"


def test_a_grid_shows_one_line_a_worker() -> None:
    programs = (tuple(map(parse_op, ("0F0", "0F10"))), (parse_op("1F0"),))
    assert order_grid(programs) == "worker   0 | 0F0  0F10\nworker   1 | 1F0"


def test_a_grid_marks_slots_and_adds_notes() -> None:
    programs = (tuple(map(parse_op, ("0F0", "0B0"))), (parse_op("1F0"),))
    assert order_grid(programs, {ProgramPlace(0, 1): "runs early", ProgramPlace(1, 0): ""}) == (
        "worker   0 | 0F0   >0B0<\nworker   1 | >1F0<\n            runs early"
    )


def test_a_grid_leaves_out_what_is_far_from_the_marks() -> None:
    program = tuple(Op(OpKind.FORWARD, 0, index) for index in range(9))
    assert order_grid((program, program[:2]), {ProgramPlace(0, 4): ""}, around=1) == (
        "worker   0 | ... 0F3   >0F4< 0F5 ...\nworker   1 | ..."
    )


def test_a_grid_of_nothing_is_empty() -> None:
    assert not order_grid(())
    assert order_grid(((),)) == "worker   0 |"
