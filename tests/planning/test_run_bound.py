"""The bound of plans in which each worker has one run of layers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from raypipe.artifacts.profile import ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology
from raypipe.errors import NoLinkError
from raypipe.planning import run_bound
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.plan import plan
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Problem
from raypipe.planning.schedule_bound import ScheduleBound
from raypipe.planning.solve import solve
from raypipe.schedules.ir import Schedule
from tests.marks import slow_unless
from tests.planning.any_plans import any_plan
from tests.planning.instances import all_plans, random_problem
from tests.planning.test_bound import ORDERS, chains, hub


def one_run_s(problem: Problem) -> float | None:
    return ScheduleBound(problem, plan_bound(problem).update_s).one_run_s


def found(problem: Problem) -> float:
    least_s = one_run_s(problem)
    assert least_s is not None
    return least_s


def has_one_run(schedule: Schedule) -> bool:
    workers = schedule.pipelines[0]
    goes_on = [worker for worker, before in zip(workers, (-1, *workers), strict=False) if worker != before]
    return len(schedule.pipelines) == 1 and len(set(goes_on)) == len(goes_on)


def random_chains() -> list[Problem]:
    """Links of one way, unlike speeds and ports, few rows and few microbatches."""
    found: list[Problem] = []
    for seed in range(100, 160):
        problem = random_problem(
            seed,
            num_devices=2 + seed % 4,
            num_layers=3 + seed % 5,
            num_microbatches=1 + seed % 11,
            one_way=seed % 3 == 0,
            speeds=((1.0,), (1.0, 3.0, 0.4), (1.0, 1.1))[seed % 3],
        )
        problem = replace(problem, microbatch_size=(12, 2, 3, 5, 7)[seed % 5])
        if seed % 4 == 1:
            rates = random.Random(seed).choices((3e5, 3e6, 3e4), k=problem.num_devices)
            problem = hub(problem, tuple(rates))
        found.append(problem)
    return found


PROBLEMS = [*chains(), *random_chains()]
NUM_PROBLEMS = len(PROBLEMS)


@pytest.mark.parametrize("number", slow_unless(range(0, NUM_PROBLEMS, 3), range(NUM_PROBLEMS)))
def test_no_plan_with_one_run_of_layers_a_worker_beats_the_bound(number: int) -> None:
    problem = PROBLEMS[number]
    least_s = one_run_s(problem)
    if least_s is None:
        return  # Its devices share cores.
    evaluator, rng = LayoutEvaluator(problem), random.Random(number)
    layouts = list(all_plans(problem.num_devices, problem.num_layers))
    for layout in rng.sample(layouts, min(len(layouts), 40)):
        for order in (*ORDERS, "zb-auto"):
            judged = evaluator.simulate(replace(layout, order=order))
            assert judged is None or judged.update_s >= least_s * (1 - 1e-9), str(judged.layout)
    for _ in range(30):
        layout, schedule = any_plan(problem, rng)
        if not has_one_run(schedule):
            continue
        try:
            update_s = evaluator.simulate_order(layout, schedule).update_s
        except NoLinkError:
            continue
        assert update_s >= least_s * (1 - 1e-9), (str(layout), schedule.pipelines)


def of_star(rate: float, *, parameter_bytes: int = 10**6) -> Problem:
    uniform = Problem(
        ModelProfile.uniform(8, microbatch_size=8, output_bytes=8, parameter_bytes=parameter_bytes),
        ClusterTopology.uniform(4, devices_per_node=1),
        8,
        8,
    )
    return hub(uniform, (rate,) * 4)


@pytest.mark.parametrize(("rate", "parameter_bytes"), [(5.0, 10**6), (20.0, 600)])
def test_on_slow_ports_it_is_nearer_to_the_best_plan_than_that_of_all_plans(rate: float, parameter_bytes: int) -> None:
    problem = of_star(rate, parameter_bytes=parameter_bytes)
    best = solve(LayoutEvaluator(problem))
    assert best.layout.worker_cuts is not None
    assert 1.05 * plan_bound(problem).update_s < found(problem) <= best.update_s


def test_plans_with_several_runs_a_worker_may_beat_it() -> None:
    problem = of_star(40.0, parameter_bytes=600)
    best = solve(LayoutEvaluator(problem))
    assert best.layout.worker_cuts is None
    assert plan_bound(problem).update_s < best.update_s < found(problem)


def test_devices_that_can_change_places_count_once_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hub(of_star(5.0), (2.0, 5.0, 5.0, 5.0))
    nodes = problem.topology.nodes
    turned = [replace(problem, topology=replace(problem.topology, nodes=(*nodes[first:], *nodes[:first]))) for first in range(4)]
    bounds = [found(each) for each in turned]
    assert bounds == pytest.approx([bounds[0]] * 4, rel=1e-9)
    # Two kinds have a few states; four have more than a search of so few steps looks at.
    monkeypatch.setattr(run_bound, "_MOST_STEPS", 4 * 15 * 64)
    assert found(problem) == bounds[0]
    unlike = hub(of_star(5.0), (2.0, 3.0, 4.0, 5.0))
    assert one_run_s(unlike) is None


def test_layers_that_are_no_chain_have_none() -> None:
    chain = of_star(5.0)
    edges = tuple(NamedEdge(producer=f"layer{one}", consumer=f"layer{other}") for one, other in ((0, 2), *pairwise(range(8))))
    branched = replace(chain, profile=replace(chain.profile, named_edges=edges))
    assert one_run_s(branched) is None


def test_a_plan_says_it_unless_updates_overlap_or_time_is_up() -> None:
    problem = of_star(5.0)

    def said(**options: object) -> float | None:
        made = plan(problem.profile, problem.topology, num_microbatches=8, **options)  # type: ignore[arg-type]
        assert made.predicted is not None
        return made.predicted.lower_bound_one_run_s

    assert said() == pytest.approx(found(problem))
    assert said(schedule="async-1f1b", updates_per_window=4, max_staleness=8) is None
    assert said(time_limit_s=1e-6) is None
