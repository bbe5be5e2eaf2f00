"""Which branch a stage belongs to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from raypipe.artifacts.branches import of_branches, stage_branches, stages_text
from raypipe.schedules import catalogue
from raypipe.schedules.ir import StageGraph
from raypipe.schedules.request import ScheduleRequest
from tests import strategies

A, B = "branch 0", "branch 1"
# Two branches of two stages, which meet in stage 4.
TOWERS = StageGraph(5, ((0, 1), (2, 3), (1, 4), (3, 4)))


def test_a_chain_has_no_branches_whatever_its_layers_name() -> None:
    assert stage_branches(StageGraph.chain(4)) == ()
    assert stage_branches(StageGraph.chain(2), [{"image"}, {"text"}]) == ()


@pytest.mark.parametrize(
    ("stages", "alone", "with_branches"),
    [((0, 3), "0,3", "0 of image, 3 of text"), ((4,), "4", "4"), ((), "none", "none")],
)
def test_messages_name_the_branches_of_stages(stages: tuple[int, ...], alone: str, with_branches: str) -> None:
    assert stages_text(stages) == alone
    assert stages_text(stages, ("image", "image", "text", "text", "")) == with_branches


def test_messages_name_each_branch_once() -> None:
    assert of_branches((3, 0, 4, 2), ("image", "image", "text", "text", "")) == " of text and image"
    assert not of_branches((3, 0), ())


def test_edges_that_skip_stages_make_no_branches() -> None:
    assert stage_branches(StageGraph(4, ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3)))) == ()


def test_branches_are_counted_in_the_order_of_their_first_stages() -> None:
    assert stage_branches(TOWERS) == (A, A, B, B, "")


def test_what_is_before_and_behind_all_branches_is_of_none() -> None:
    assert stage_branches(StageGraph(5, ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4)))) == ("", A, B, "", "")


def test_branches_that_read_each_other_stay_two() -> None:
    # Stages 0, 2 and 4 are one branch, 1, 3 and 5 the other; 2 also reads 1, and 3 reads 0.
    graph = StageGraph(7, ((0, 2), (1, 2), (1, 3), (0, 3), (2, 4), (3, 5), (4, 6), (5, 6)))
    assert stage_branches(graph) == (A, B, A, B, A, B, "")


def test_a_branch_that_another_reads_is_not_continued_by_it() -> None:
    assert stage_branches(StageGraph(5, ((0, 2), (1, 2), (0, 3), (2, 4), (3, 4)))) == (A, B, B, A, "")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([{"image"}, {"image"}, {"text"}, {"text"}, set()], ("image", "image", "text", "text", "")),
        ([{"image"}, {"image"}, {"text"}, {"text"}, {"text"}], ("image", "image", "text", "text", "text")),
        ([{"image"}, {"image"}, {"text"}, {"text"}, {"image", "text"}], ("image", "image", "text", "text", "")),
        ([{"image"}, {"image"}, set(), set(), set()], ("image", "image", B, B, "")),
        ([{"image"}] * 5, ()),
    ],
)
def test_names_of_layers_are_those_of_stages(names: list[set[str]], expected: tuple[str, ...]) -> None:
    assert stage_branches(TOWERS, names) == expected


@given(strategies.stage_graphs())
def test_stages_of_no_branch_are_concurrent_with_none(graph: StageGraph) -> None:
    branches = stage_branches(graph)
    assert len(branches) in {0, graph.num_stages}
    for first, second in itertools.combinations(range(graph.num_stages), 2):
        if branches and not (branches[first] and branches[second]):
            assert _leads(graph, first, second)
        if branches and branches[first] and branches[first] == branches[second]:
            assert _leads(graph, first, second), "a branch is a chain"
    if not branches:
        assert all(_leads(graph, *pair) for pair in itertools.combinations(range(graph.num_stages), 2))


def _leads(graph: StageGraph, first: int, second: int) -> bool:
    return first == second or any(_leads(graph, first, source) for source in graph.predecessors[second])


def test_the_branches_of_the_bundled_order_are_those_asked_for() -> None:
    schedule = catalogue.build("branch-aware", ScheduleRequest(2, 2, branches=(1.0, 2.0)))
    assert stage_branches(schedule.graph) == (A, A, B, B, B, B, "")
