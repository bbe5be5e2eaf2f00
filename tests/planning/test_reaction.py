"""How soon a run reacts to links that change: within two windows it gains most of what the best fixed way in hindsight gains."""

from __future__ import annotations

from itertools import permutations

import pytest

from raypipe.communication.patterns import direct, ring
from raypipe.planning.choices import ChoicePlanner
from raypipe.planning.cluster_state import ClusterState
from raypipe.planning.layout import Layout
from raypipe.planning.sum_patterns import SumPatterns
from tests.planning import reaction
from tests.planning.reaction import PlanRun, StageRun

OTHERS_S = 30.0
"""How long other processes fill half of a port."""


@pytest.mark.parametrize("exact", [False, True])
def test_sums_go_round_a_wire_that_falls_to_a_tenth(exact: bool) -> None:
    found = reaction.wire_falls(exact=exact)
    assert found.fixed_s > 3 * found.before_s
    assert found.gained >= 0.8, found
    assert len(found.texts) == 1
    assert ("ring 0 1 2 3 -> direct 0 1 2 3" if exact else "ring 0 1 2 3 -> ring 0 ") in found.texts[0]


def test_sums_of_a_run_that_need_not_be_exact_are_as_quick_as_before() -> None:
    found = reaction.wire_falls(exact=False)
    assert found.windows_s[-1] == pytest.approx(found.before_s, rel=0.01)


@pytest.mark.parametrize("exact", [False, True])
def test_sums_along_a_tree_go_round_when_bad_wires_are_good_again(exact: bool) -> None:
    along = {(0, 1), (1, 2), (2, 3)}
    bad = {ends: 0.05 for ends in permutations(range(4), 2) if not along & {ends, ends[::-1]}}
    sums = SumPatterns(reaction.stage_cost(reaction.ports(wires=bad)), reaction.PROGRAMS, exact=exact)
    assert set(sums.patterns[reaction.EVERYBODY].edges) == along
    assert not sums.after_window(reaction.ports(wires=bad))
    changed = [decision.pattern for decision in sums.after_window(reaction.ports()) if decision.changes]
    assert changed == ([] if exact else [direct(range(4))]), "nothing else adds in the order of a tree"


@pytest.mark.parametrize("exact", [False, True])
def test_at_constant_rates_no_pattern_changes(exact: bool) -> None:
    run = StageRun(exact)
    for _ in range(200):
        run.window()
    assert not [decision.text for decision in run.decisions if decision.changes]


def test_a_port_that_falls_is_left_by_the_sums() -> None:
    found, _ = reaction.port_falls(part=0.4)
    assert found.fixed_s > 1.2 * found.before_s
    assert found.gained >= 0.8, found


@pytest.mark.slow
def test_a_port_of_which_others_take_half_is_left_by_the_sums_and_no_harm_is_done_when_they_have_gone() -> None:
    # With fair shares, half of the port is what remains for the run; windows have five updates.
    found, run = reaction.port_falls(part=0.5)
    assert found.gained >= 0.8, found
    passed_s = 5 * sum(found.windows_s)
    while passed_s < OTHERS_S:
        passed_s += 5 * run.window()
    run.truth = reaction.ports()
    behind_s = [run.window() for _ in range(6)]
    assert max(behind_s[2:]) <= found.before_s + 0.2 * (found.fixed_s - found.before_s)


def test_at_constant_rates_no_plan_is_left() -> None:
    run = PlanRun()
    for _ in range(20):
        run.window()
    assert not [decision.text for decision in run.decisions if decision.switch]


def test_a_plan_whose_sums_may_not_go_round_a_wire_is_known_to_be_slow() -> None:
    topology = reaction.ports(wires={(0, 1): 0.1})
    planner = ChoicePlanner(reaction.problem(topology, microbatch_size=3), (), (), None)
    choice = planner.choice_of((4, 3), Layout((0, 8), ((0, 1, 2),), "1f1b"))
    assert planner.choice_of((4, 3), choice.layout) == choice
    free = planner.predicted(choice)
    planner.observe(ClusterState(reaction.PROFILE, topology, {(0, 1, 2): ring(range(3))}), runs=choice)
    bound = planner.predicted(choice)
    assert free is not None
    assert bound is not None
    assert bound.update_s > 2 * free.update_s
    other = planner.choice_of((4, 3), Layout((0, 8), ((2, 1, 0),), "1f1b"))
    again = planner.predicted(other)
    assert again is not None
    assert again.update_s == pytest.approx(free.update_s)
