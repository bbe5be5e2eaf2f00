"""Searches that end early have the best plan so far, or say that there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypipe
from raypipe import stopping
from raypipe.errors import NoPlanYetError
from raypipe.planning import branches
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.plan import plan_problem
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import solve
from raypipe.stopping import SearchStopped, Stop, searching
from tests.planning.instances import islands, random_problem
from tests.planning.towers import node, towers


def test_without_time_the_first_plan_is_the_answer() -> None:
    problem = islands((4, 4), num_layers=12)
    tried: list[Evaluation] = []
    plan = raypipe.plan(problem.profile, problem.topology, 8, effort=100, time_limit_s=0.0, on_evaluated=tried.append)
    assert plan.predicted is not None
    assert len(tried) <= 3


def test_a_search_that_is_stopped_has_the_best_of_what_it_tried() -> None:
    problem = islands((4, 4), num_layers=12)
    tried: list[Evaluation] = []
    plan = raypipe.plan(problem.profile, problem.topology, 8, should_stop=lambda: len(tried) > 8, on_evaluated=tried.append)
    assert plan.predicted is not None
    assert plan.predicted.update_s == pytest.approx(min(evaluation.update_s for evaluation in tried))


def test_division_of_a_batch_that_is_stopped_has_a_plan() -> None:
    problem = islands((4,), num_layers=8)
    tried: list[Evaluation] = []
    plan = raypipe.plan(problem.profile, problem.topology, batch_size=32, should_stop=lambda: len(tried) > 8, on_evaluated=tried.append)
    assert plan.schedule.num_microbatches * plan.microbatch_size == 32


def test_a_search_that_is_stopped_before_it_has_a_plan_says_so() -> None:
    problem = islands((4,), num_layers=8)
    with pytest.raises(NoPlanYetError, match="more time"):
        raypipe.plan(problem.profile, problem.topology, 8, should_stop=lambda: True)


def test_the_work_of_a_search_is_bounded_and_its_plan_is_behind_no_baseline() -> None:
    problem = random_problem(7, num_devices=8, num_layers=12, num_microbatches=16)
    few, many = (replace(SearchBudget(), work_s=work_s) for work_s in (0.2, 2.0))
    done: dict[float, float] = {}
    update_s: dict[float, float] = {}
    for budget in (few, many):
        with searching(Stop()), stopping.part() as all_work:
            update_s[budget.work_s] = solve(LayoutEvaluator(problem), budget=budget).update_s
            done[budget.work_s] = all_work.done_s
    assert update_s[2.0] <= update_s[0.2]
    # What is simulated in the end comes on top.
    assert done[0.2] < 1.0 < done[2.0] < 4.0
    for name in ("spp", "pipedream", "node-pipeline", "1f1b-equal"):
        assert update_s[0.2] <= solve(LayoutEvaluator(problem), name=name).update_s


def test_a_search_that_its_work_ends_gives_equal_plans() -> None:
    problem = random_problem(8, num_devices=6, num_layers=9, num_microbatches=8)
    budget = replace(SearchBudget(), work_s=0.3)
    assert plan_problem(problem, budget=budget) == plan_problem(problem, budget=budget)


@pytest.mark.parametrize("num_questions", [10, 300, 3_000])
def test_the_search_for_branches_asks_often_whether_it_shall_end(num_questions: int) -> None:
    evaluator = LayoutEvaluator(Problem(towers((1.0, 3.0), num_layers=12, exchanges=2), node(8), 8, 8))
    asked = 0

    def shall_end() -> bool:
        nonlocal asked
        asked += 1
        return asked >= num_questions

    workers = tuple((device,) for device in range(8))
    with searching(Stop.after(None, shall_end)), pytest.raises(SearchStopped):
        list(branches.layouts(evaluator, workers))
    assert asked == num_questions


def test_a_search_that_is_stopped_late_has_a_plan_at_once() -> None:
    problem = Problem(towers((1.0, 3.0), num_layers=12, exchanges=2), node(8), 8, 8)
    asked = 0

    def shall_end() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 20_000

    plan = plan_problem(problem, stop=Stop.after(None, shall_end))
    assert plan.predicted is not None
    assert 20_000 <= asked <= 20_002
