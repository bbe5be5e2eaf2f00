"""What adaptation makes of the plan that a run begins with."""

from __future__ import annotations

import pytest

from raypipe.planning.plan import plan
from raypipe.planning.problem import Problem
from raypipe.planning.replanning import ConcurrencyPolicy
from raypipe.training.adaptive import _choice_of
from tests.planning.instances import slow_sums
from tests.planning.towers import node, towers


def test_a_run_may_begin_with_stages_that_are_not_consecutive_in_the_list() -> None:
    profile, topology = towers((1.0, 2.0), num_layers=5, interleaved=True, kilobytes=400_000), node(3)
    begun = plan(profile, topology, 4, schedule="zb-h1", effort=0.05)
    assert any(layers[-1] - layers[0] >= len(layers) for layers in begun.cut.stages)
    policy = ConcurrencyPolicy(Problem(profile, topology, 4, 8))
    choice = _choice_of(begun, policy, max_in_flight=None)
    assert choice.layout.cut(policy.planner.problem).stages == begun.cut.stages
    predicted = policy.planner.predicted(choice)
    assert predicted is not None
    assert begun.predicted is not None
    assert predicted.update_s == pytest.approx(begun.predicted.update_s)


def test_a_run_may_begin_with_divided_stages() -> None:
    problem = slow_sums(num_layers=8, num_microbatches=8, message_s=4.0)
    begun = plan(problem.profile, problem.topology, 8, effort=0.05)
    assert len(begun.stages) > len(begun.workers)
    policy = ConcurrencyPolicy(problem)
    choice = _choice_of(begun, policy, max_in_flight=None)
    predicted = policy.planner.predicted(choice)
    assert predicted is not None
    assert begun.predicted is not None
    assert predicted.update_s == pytest.approx(begun.predicted.update_s)
