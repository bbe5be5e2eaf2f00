"""Searches that end early have the best plan so far, or say that there is none."""

from __future__ import annotations

import pytest

import raypipe
from raypipe.errors import NoPlanYetError
from raypipe.planning.evaluator import Evaluation
from tests.planning.instances import islands


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
