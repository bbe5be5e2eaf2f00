"""The bound of plans with bundled schedules."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from raypipe.artifacts.profile import LayerTimes, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Link, NodeLink, node_ports
from raypipe.errors import InputError, NoLinkError
from raypipe.planning import chunks, two_run_bound
from raypipe.planning.chunks import CHAIN_ORDERS
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Floats, Problem
from raypipe.planning.schedule_bound import ScheduleBound
from raypipe.planning.shape_bound import Counts, ShapeBound, Truths, _Costs, _least_between, _Shape, _sizes
from raypipe.planning.solve import solve
from raypipe.schedule_registry import build, overlaps
from raypipe.schedules.catalogue import SPECS
from raypipe.schedules.families import branch_aware
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.search.ring import Pipelines
from tests.marks import slow_unless
from tests.planning.any_plans import random_workers
from tests.planning.test_bound import hub
from tests.planning.test_run_bound import PROBLEMS, of_star

SYNCHRONOUS = [spec.name for spec in SPECS if not overlaps(spec.name) and spec.name != branch_aware.NAME]


def bundled(problem: Problem, rng: random.Random) -> Layout | None:
    """A bundled schedule on any workers with any cut; `None` where the schedule cannot take them."""
    workers = random_workers(rng, problem.num_devices, problem.microbatch_size)
    order = rng.choice(SYNCHRONOUS)
    num_stages = len(workers) * rng.choice((1, 2, 2, 3, 4))
    if num_stages > problem.num_layers:
        return None
    cuts = (0, *sorted(rng.sample(range(1, problem.num_layers), num_stages - 1)), problem.num_layers)
    num_pipelines = rng.choice((0, 0, *range(2, len(workers) + 1)))
    return Layout(cuts, workers, order, num_pipelines=num_pipelines)


@pytest.mark.parametrize("number", slow_unless(range(0, len(PROBLEMS), 3), range(len(PROBLEMS))))
def test_no_plan_with_a_bundled_schedule_beats_the_bound(number: int) -> None:
    problem = PROBLEMS[number]
    least_s = ScheduleBound(problem, plan_bound(problem).update_s).bundled_s
    if least_s is None:
        return  # Its devices share cores.
    evaluator, rng = LayoutEvaluator(problem), random.Random(number)
    at_random = [layout for _ in range(120) if (layout := bundled(problem, rng)) is not None]
    balanced = (
        chunks.layouts(evaluator, random_workers(rng, problem.num_devices, problem.microbatch_size), order) for order in CHAIN_ORDERS * 3
    )
    for layout in (*at_random, *itertools.chain(*balanced)):
        try:
            judged = evaluator.simulate(layout)
        except NoLinkError:
            continue
        assert judged is None or judged.update_s >= least_s * (1 - 1e-9), str(layout)


def test_plans_of_all_kinds_are_tried_against_it() -> None:
    """Else the test above would show nothing."""
    tried: Counter[str] = Counter()
    for number, problem in enumerate(PROBLEMS):
        rng, evaluator = random.Random(number), LayoutEvaluator(problem)
        for _ in range(120):
            layout = bundled(problem, rng)
            if layout is not None and len(layout.workers) > 1 and evaluator.schedules.compiled(problem, layout) is not None:
                tried[layout.order] += 1
    assert set(tried) == set(SYNCHRONOUS)
    assert min(tried.values()) > 20, tried


@pytest.mark.parametrize(("rate", "parameter_bytes", "nearer"), [(20.0, 600, 1.02), (40.0, 600, 1.01)])
def test_on_slow_ports_it_is_nearer_to_the_best_plan_than_that_of_all_plans(rate: float, parameter_bytes: int, nearer: float) -> None:
    problem = of_star(rate, parameter_bytes=parameter_bytes)
    best = solve(LayoutEvaluator(problem))
    of_all_s = plan_bound(problem).update_s
    bounds = ScheduleBound(problem, of_all_s)
    assert bounds.bundled_s is not None
    assert bounds.one_run_s is not None
    assert nearer * of_all_s < bounds.bundled_s <= min(best.update_s, bounds.one_run_s)


def rises(times: tuple[float, float]) -> tuple[LayerTimes, ...]:
    return tuple(LayerTimes(forward_s=each, backward_s=2 * each, weight_grad_s=each) for each in times)


def test_the_fewest_rows_of_a_member_are_those_in_any_order() -> None:
    """Of five rows, weak members get one each, so that a strong one has two rows or one, by its place."""
    uniform = ModelProfile.uniform(2, microbatch_size=5, output_bytes=10**6, parameter_bytes=0)
    layers = (uniform.layers[0], replace(uniform.layers[1], parameter_bytes=10**12))
    kinds = {"strong": rises((1.0, 9.0)), "weak": rises((2.0, 38.0)), "other": rises((9.0, 0.4))}
    cluster = ClusterTopology.uniform(5, devices_per_node=1)
    of_nodes = ("strong", "strong", "weak", "weak", "other")
    nodes = tuple(
        replace(node, devices=tuple(replace(device, kind=kind) for device in node.devices))
        for node, kind in zip(cluster.nodes, of_nodes, strict=True)
    )
    problem = Problem(replace(uniform, layers=layers, device_kinds=kinds), replace(cluster, nodes=nodes), 60, 5)
    problem = hub(problem, (196078.0, 1e9, 1e9, 1e9, 1e9))
    judged = LayoutEvaluator(problem).simulate(Layout((0, 1, 2), ((0, 1, 2, 3), (4,)), "zb-h2"))
    bounds = ScheduleBound(problem, plan_bound(problem).update_s)
    assert judged is not None
    assert bounds.one_run_s is not None
    assert bounds.bundled_s is not None
    assert bounds.bundled_s <= bounds.one_run_s <= judged.update_s


def test_halves_of_one_microbatch_overlap_on_their_way_back() -> None:
    profile = ModelProfile.uniform(2, forward_s=1, backward_s=2, weight_grad_s=0, output_bytes=1, parameter_bytes=1, microbatch_size=1)
    problem = Problem(profile, ClusterTopology.uniform(2, bandwidth_bytes_per_s=100.0, devices_per_node=1), 1, 1)
    judged = LayoutEvaluator(problem).simulate(Layout((0, 1, 2), ((0,), (1,)), "chimera-halving"))
    bundled_s = ScheduleBound(problem, plan_bound(problem).update_s).bundled_s
    assert judged is not None
    assert bundled_s is not None
    assert bundled_s <= judged.update_s


def test_nodes_with_stated_links_to_others_do_not_change_places_with_all() -> None:
    """Six nodes at ports, pairs of which have links of their own, as fast as ports: what is summed there may go both ways at once."""
    cluster = ClusterTopology.uniform(6, devices_per_node=1)
    names = [node.name for node in cluster.nodes]
    links = tuple(Link(source=names[at], target=names[at + 3], bandwidth_bytes_per_s=1e6, latency_s=0.0) for at in range(3))
    ports = [
        replace(port, members=tuple(pair for pair in port.members if pair not in {ends for link in links for ends in link.directions}))
        for port in node_ports(dict.fromkeys(names, 1e6))
    ]
    topology = replace(cluster, default_link=NodeLink(latency_s=0.0), links=links, shared_links=tuple(ports))
    profile = ModelProfile.uniform(1, forward_s=8.0, backward_s=16.0, microbatch_size=4, output_bytes=10, parameter_bytes=8_000_000)
    bound = ScheduleBound(Problem(profile, topology, 2, 4), 1.0)
    assert bound._runs is not None
    assert sorted(bound._runs._kinds) == [[0, 3], [1, 4], [2, 5]]


def test_layers_that_take_no_time_need_none() -> None:
    problem = of_star(5.0)
    assert ScheduleBound(problem, 0.0).bundled_s == 0.0


def shape_bound(num_layers: int, num_microbatches: int, rates: tuple[float, ...], seed: int) -> ShapeBound:
    rng = np.random.default_rng(seed)
    crossing = rng.choice((1.0, 3.0, 10.0), num_layers + 1)
    crossing[[0, -1]] = 0.0
    shares = np.array([1 / count for count in range(1, len(rates) + 1)])
    own_s, sums = rng.uniform(0.5, 2.0, (3, num_layers)), rng.choice((0.0, 1.0, 20.0), num_layers)
    return ShapeBound(num_microbatches, shares, own_s, crossing, sums, np.array(rates))


def all_shapes(bound: ShapeBound, num_workers: int) -> set[Pipelines]:
    return {tuple(map(tuple, shape)) for shape in bound._shapes(num_workers, math.inf)}


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_all_bundled_schedules_have_one_of_the_shapes(name: str, num_workers: int) -> None:
    num_microbatches = 12
    bound = shape_bound(4 * num_workers, num_microbatches, (1.0,) * num_workers, 0)
    down = tuple(range(num_workers))
    known = all_shapes(bound, num_workers) | {(down,), (down * 2,), ((*down, *reversed(down)),)}
    built = 0
    for num_chunks, num_pipelines in itertools.product((1, 2, 3, 4), (0, 1, 2, 3, 4, 5, 6)):
        request = ScheduleRequest(num_workers, num_microbatches, num_chunks=num_chunks, num_pipelines=num_pipelines)
        try:
            schedule = build(name, request)
        except InputError:
            continue
        built += 1
        assert schedule.pipelines in known, request
    assert built or num_workers % 2


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def test_the_cut_of_least_cost_is_that_of_all() -> None:
    rng = np.random.default_rng(7)
    for seed in range(20):
        bound = shape_bound(9, 4, (1.0, 2.0, 4.0), seed)
        costs = _Costs(*rng.uniform(0, 2, (4, 3, 4)))
        most_s = rng.uniform(0.2, 0.8, (3, 4)) * bound._work_s[-1]
        least, cuts = bound._least(costs, most_s)
        for choice in range(3):
            of_cuts = {cut: cost_of(bound, costs, most_s, choice, cut) for cut in all_cuts(9, 4)}
            assert least[choice] == pytest.approx(min(of_cuts.values()))
            if math.isfinite(least[choice]):
                assert of_cuts[tuple(cuts[choice].tolist())] == pytest.approx(least[choice])


def cost_of(bound: ShapeBound, costs: _Costs, most_s: Floats, choice: int, cut: tuple[int, ...]) -> float:
    total = 0.0
    for stage, (first, end) in enumerate(itertools.pairwise(cut)):
        before, sums, work, forward = (float(cost[choice, stage]) for cost in costs)
        work_s = bound._work_s[end] - bound._work_s[first]
        if work_s > most_s[choice, stage]:
            return math.inf
        total += before * bound._crossing_s[first] + sums * (bound._summed_s[end] - bound._summed_s[first])
        total += work * work_s + forward * (bound._forward_s[end] - bound._forward_s[first])
    return total


def test_the_least_value_between_two_places() -> None:
    rng = np.random.default_rng(3)
    for num_places in (1, 2, 5, 8, 13):
        values = rng.permutation(4 * num_places).reshape(4, num_places).astype(float)
        firsts, ends = rng.integers(0, num_places + 1, (2, 4, num_places))
        firsts = np.minimum(firsts, num_places - 1)
        chosen, least = _least_between(values, firsts, ends)
        for row, place in itertools.product(range(4), range(num_places)):
            between = values[row, firsts[row, place] : ends[row, place]]
            assert least[row, place] == (between.min() if between.size else math.inf)
            assert not between.size or values[row, chosen[row, place]] == least[row, place]


class _WithoutSlowest(ShapeBound):
    def _suit_the_slowest(self, shape: _Shape, sizes: Counts, most_s: Floats, seconds: float) -> Truths:
        del shape, most_s, seconds
        return np.ones(len(sizes), dtype=bool)


def test_what_prices_exclude_no_cut_can_do() -> None:
    """For each shape and sizes: all cuts, with what all ports and those of each worker carry, and what each worker computes."""
    excluded = 0
    for seed in range(12):
        bound = shape_bound(8, 4, (1.0, 1.0, 1.0, 0.5), seed)
        bound = _WithoutSlowest(**vars(bound))
        for pipelines in all_shapes(bound, 3):
            shape = _Shape(pipelines, 4)
            for sizes in _sizes(3, 3, 4)[:, None]:
                seconds = least_seconds(bound, shape, sizes)
                assert bound._fits(shape, sizes, seconds * (1 + 1e-6))
                excluded += not bound._fits(shape, sizes, seconds * 0.9)
    assert excluded > 100


def least_seconds(bound: ShapeBound, shape: _Shape, sizes: Counts) -> float:
    """Return the least seconds in which some cut does all that has a price."""
    rates = bound._fastest.cumsum()
    limits = np.stack((sizes, rates[sizes - 1], sizes), axis=1)
    of_all = bound._costs(shape, sizes)
    nothing = np.zeros(of_all.sums.shape)
    costs = _Costs(of_all.before, of_all.sums, nothing, nothing)
    best = math.inf
    for cut in all_cuts(len(bound.sums), len(shape.parts)):
        of_workers = bound._of_workers(shape, sizes, np.array([cut])) / limits
        sent = cost_of(bound, costs, nothing + math.inf, 0, cut) / float(rates[sizes.sum() - 1])
        best = min(best, max(float(of_workers.max()), sent))
    return best


def test_many_devices_and_many_pairs_of_runs_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(problem: Problem) -> float | None:
        return ScheduleBound(problem, plan_bound(problem).update_s).bundled_s

    profile = ModelProfile.uniform(12, microbatch_size=16, output_bytes=8, parameter_bytes=600)
    few, many = (Problem(profile, ClusterTopology.uniform(count, bandwidth_bytes_per_s=5.0, devices_per_node=1), 8, 16) for count in (8, 9))
    assert found(few) is not None
    assert found(many) is None
    monkeypatch.setattr(two_run_bound, "_MOST_STEPS", 1000)
    assert found(few) is None
