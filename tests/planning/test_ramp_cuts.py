from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning import ramp_cuts
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.levels import dealt
from raypipe.planning.problem import Devices, Problem
from raypipe.planning.ramp_cuts import RampCuts, ramped
from tests.planning.instances import random_problem


def end_s(problem: Problem, workers: tuple[Devices, ...], cuts: tuple[int, ...], ramp: float) -> float:
    """The end of the last worker, stage by stage."""
    estimator = LayoutEvaluator(problem).estimator
    head_s = last_s = 0.0
    for number, (first, end) in enumerate(itertools.pairwise(cuts)):
        if number:
            channel = estimator.channel(workers[number - 1], workers[number])
            head_s += float(problem.crossing_bytes[first]) * channel.s_per_byte + channel.latency_s
        stage = estimator.stage(workers[number], first, end)
        num_bytes = float(problem.summed_prefix[end] - problem.summed_prefix[first])
        busy_s = problem.num_microbatches * (stage.forward_s + stage.backward_s) + float(problem.sum_s(workers[number], num_bytes))
        last_s = max(last_s, ramp * head_s + busy_s)
        head_s += stage.forward_s
    return last_s


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cuts_end_earlier(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(seed, num_devices=5, num_layers=7, num_microbatches=4 + seed)
    devices = tuple(rng.sample(range(5), 5))
    workers = ((devices[0],), devices[1:3], (devices[3],), (devices[4],))[: 2 + seed % 3]
    for ramp in (1.0, 0.3):
        found = RampCuts.of(LayoutEvaluator(problem).estimator, workers)
        assert found is not None
        cuts = found.best(ramp)
        assert cuts is not None
        all_cuts = [(0, *inner, 7) for inner in itertools.combinations(range(1, 7), len(workers) - 1)]
        least_s = min(end_s(problem, workers, each, ramp) for each in all_cuts)
        assert end_s(problem, workers, cuts, ramp) == pytest.approx(least_s, rel=1e-5)


def test_one_microbatch_on_slow_links_has_cuts() -> None:
    """Messages take longer than twice the work of all layers."""
    profile = ModelProfile.uniform(6, forward_s=0.01, backward_s=0.02, microbatch_size=4, output_bytes=1_000_000)
    problem = Problem(profile, ClusterTopology.uniform(3, bandwidth_bytes_per_s=1e6), 1, 4)
    workers = ((0,), (1,), (2,))
    found = RampCuts.of(LayoutEvaluator(problem).estimator, workers)
    assert found is not None
    cuts = found.best(1.0)
    assert cuts is not None
    assert end_s(problem, workers, cuts, 1.0) > 2 * sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    all_cuts = [(0, *inner, 6) for inner in itertools.combinations(range(1, 6), 2)]
    least_s = min(end_s(problem, workers, each, 1.0) for each in all_cuts)
    assert end_s(problem, workers, cuts, 1.0) == pytest.approx(least_s, rel=1e-5)


def test_later_workers_of_a_long_pipeline_get_less_work_and_the_update_is_faster() -> None:
    profile = ModelProfile.uniform(96, microbatch_size=4, output_bytes=1)
    problem = Problem(profile, ClusterTopology.uniform(8), 16, 4)
    evaluator = LayoutEvaluator(problem)
    workers = tuple((device,) for device in range(8))
    balanced = dealt(evaluator.estimator, workers)
    assert balanced is not None
    before = evaluator.simulate(Layout(balanced, workers, "zb-h2"))
    assert before is not None
    layouts = list(ramped(evaluator.estimator, before.layout))
    assert layouts[0].sizes == sorted(layouts[0].sizes, reverse=True)
    assert layouts[0].sizes[0] > layouts[0].sizes[-1]
    after = [evaluation.update_s for layout in layouts if (evaluation := evaluator.simulate(layout)) is not None]
    assert min(after) < 0.98 * before.update_s


def test_layouts_of_several_stages_a_worker_or_of_one_worker_are_left_alone() -> None:
    problem = random_problem(1, num_devices=2, num_layers=4)
    estimator = LayoutEvaluator(problem).estimator
    several = Layout((0, 1, 2, 3, 4), ((0,), (1,)), "zb-v")
    assert list(ramped(estimator, several)) == []
    assert list(ramped(estimator, Layout((0, 4), ((0, 1),), "zb-h2"))) == []


def test_a_worker_with_more_devices_than_rows_has_no_cuts() -> None:
    problem = replace(random_problem(1, num_devices=4, num_layers=4), microbatch_size=2)
    assert list(ramped(LayoutEvaluator(problem).estimator, Layout((0, 2, 4), ((0, 1, 2), (3,)), "zb-h2"))) == []


@pytest.mark.parametrize("most_runs", [2 * 4**2, 2 * 4**2 - 1])
def test_tables_that_would_take_much_memory_are_not_made(monkeypatch: pytest.MonkeyPatch, most_runs: int) -> None:
    problem = random_problem(1, num_devices=2, num_layers=4)
    monkeypatch.setattr(ramp_cuts, "MOST_RUNS", most_runs)
    found = RampCuts.of(LayoutEvaluator(problem).estimator, ((0,), (1,)))
    assert (found is None) is (most_runs < 2 * 4**2)


def test_the_most_runs_take_no_more_than_256_mib() -> None:
    problem = random_problem(1, num_devices=2, num_layers=30)
    found = RampCuts.of(LayoutEvaluator(problem).estimator, ((0,), (1,)))
    assert found is not None
    num_bytes = sum(table.nbytes for table in (*found.forward_s, *found.busy_s))
    assert num_bytes / (2 * 31**2) * ramp_cuts.MOST_RUNS == 256 * 2**20
