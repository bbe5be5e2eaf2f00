"""The search finds what trying everything finds."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from raypipe import stopping
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node
from raypipe.planning import moves, schedule_search
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.moves import Moves
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Problem
from raypipe.planning.search import LayoutSearch, SearchBudget
from raypipe.planning.solve import solve
from tests.marks import slow_unless
from tests.planning.instances import random_problem
from tests.planning.optima import Case, gap, optimum_s, stored

EVERY = 27
"""Of the stored problems, every so many are searched here, `NUM_PARTS` times; `python -m tests.planning.optima compare` searches all."""

NUM_PARTS = 12


def test_there_are_two_hundred_problems_of_four_to_eight_devices() -> None:
    cases = [case for case, _ in stored()]
    assert len(set(cases)) >= 200
    assert {case.num_devices for case in cases} == {4, 5, 6, 7, 8}


def test_a_third_of_the_problems_have_networks_of_which_some_pairs_have_no_link_and_most_of_these_little_memory() -> None:
    incomplete = [case for case, _ in stored() if case.missing]
    assert 3 * len(incomplete) >= len(stored()) * 0.9
    assert sum(case.room is not None for case in incomplete) > len(incomplete) / 2
    assert all(not case.problem().topology.default_link for case in incomplete)
    assert all(not math.isfinite(case.problem().latency_s.max()) for case in incomplete)


def test_the_bound_holds_for_all_optima() -> None:
    for case, best_s in stored():
        assert plan_bound(case.problem()).update_s <= best_s * (1 + 1e-9), case


def test_the_stored_optima_are_those_of_trying_everything() -> None:
    for case, best_s in (*stored()[:100:33], *stored()[206::31]):
        assert optimum_s(case.problem()) == pytest.approx(best_s)


@pytest.mark.parametrize("part", slow_unless({0}, range(NUM_PARTS)))
@pytest.mark.timeout(240)
def test_the_search_comes_within_two_percent_on_average_and_eight_at_worst(part: int) -> None:
    some: list[tuple[Case, float]] = stored()[part * EVERY // NUM_PARTS :: EVERY]
    gaps = [gap(case, best_s) for case, best_s in some]
    assert statistics.mean(max(value, 0.0) for value in gaps) <= 0.02
    assert max(gaps) <= 0.08


def test_a_plan_that_fits_is_found_where_faster_ones_lack_memory_for_their_sums() -> None:
    case, best_s = next((case, best_s) for case, best_s in stored() if case.seed == 1292)
    assert gap(case, best_s) <= 0.03


def test_equal_problems_get_equal_plans() -> None:
    layouts = []
    for _ in range(2):
        found = LayoutSearch(LayoutEvaluator(random_problem(7, num_devices=5, num_layers=6)), budget=SearchBudget(2000, 60)).run()
        assert found is not None
        layouts.append(found.layout)
    assert layouts[0] == layouts[1]


def test_more_devices_than_usual_get_fewer_looks_each() -> None:
    few, larger = (random_problem(1, num_devices=number, num_layers=40) for number in (4, 128))
    assert replace(SearchBudget.usual(few), work_s=SearchBudget.work_s) == SearchBudget()
    assert SearchBudget.usual(few, effort=2.0).num_estimates == 2 * SearchBudget().num_estimates
    many = SearchBudget.usual(replace(larger, num_microbatches=64))
    assert many.num_estimates < SearchBudget().num_estimates
    assert many.num_simulations < SearchBudget().num_simulations


@pytest.mark.parametrize(("seed", "num_devices"), [(0, 6), (1, 6), (2, 6), (3, 6), (4, 10), (5, 12)])
def test_whatever_is_changed_a_layout_stays_a_plan(seed: int, num_devices: int) -> None:
    problem = random_problem(seed, num_devices=num_devices, num_layers=7)
    searching = LayoutSearch(LayoutEvaluator(problem))
    rng = random.Random(seed)
    layout = next(iter(searching.starts()))
    kinds = set()
    for _ in range(500):
        changed = searching.moves.changed(layout, rng)
        if changed is None:
            continue
        layout = changed
        kinds.add((layout.num_stages, len({device for group in layout.workers for device in group})))
        devices = list(itertools.chain.from_iterable(layout.workers))
        assert len(devices) == len(set(devices)) <= problem.num_devices
        assert set(devices) <= set(range(problem.num_devices))
        assert all(layout.workers)
        assert len(layout.workers) == layout.num_stages
        assert layout.cuts[0] == 0
        assert layout.cuts[-1] == problem.num_layers
        assert all(first < end for first, end in itertools.pairwise(layout.cuts))
    assert len(kinds) > 5
    assert len(moves._CHANGES) == len(moves._WEIGHTS)


def test_the_busiest_worker_gets_an_idle_device_with_a_good_link() -> None:
    profile = ModelProfile.uniform(8, forward_s=0.1, backward_s=0.2, output_bytes=1000, parameter_bytes=50_000_000, microbatch_size=16)
    # Two islands of six devices each, with quick links within and slow ones between them.
    nodes = tuple(Node(name=f"n{at}", devices=(Device(f"n{at}/0", "gpu"),)) for at in range(12))
    pairs = itertools.combinations(range(12), 2)
    links = tuple(
        Link(source=f"n{one}", target=f"n{other}", bandwidth_bytes_per_s=10e9 if one // 6 == other // 6 else 0.1e9, latency_s=1e-5)
        for one, other in pairs
    )
    problem = Problem(profile, ClusterTopology(name="islands", nodes=nodes, links=links), 8, 16)
    evaluator = LayoutEvaluator(problem)
    moves = Moves(evaluator.estimator, ("1f1b",), evaluator.estimator.estimate_s)
    busy = Layout((0, 6, 8), ((0, 1), (6, 7)))
    ends_s = evaluator.estimator.ends_s(busy)
    assert ends_s[0] > 2 * ends_s[1]
    rng = random.Random(0)
    relieved = [layout for layout in (moves._relieve(busy, rng) for _ in range(200)) if layout is not None]
    larger = [layout for layout in relieved if len(layout.workers[0]) == 3]
    assert len(larger) > 1.5 * sum(len(layout.workers[1]) == 3 for layout in relieved)
    # Some give up one of their own, which is idle then.
    swapped = [layout for layout in relieved if list(map(len, layout.workers)) == [2, 2]]
    assert swapped
    assert all(layout.workers != busy.workers for layout in swapped)
    # Of the idle devices, those of the worker's own island come first.
    near = [layout for layout in larger if set(layout.workers[0]) <= set(range(6))]
    assert len(near) > len(larger) / 2
    assert all(max(evaluator.estimator.ends_s(layout)) < max(ends_s) for layout in near)


def test_a_change_leaves_open_which_forwards_run_again() -> None:
    searching = LayoutSearch(LayoutEvaluator(random_problem(1, num_devices=6, num_layers=7, memory_bytes=600_000_000)))
    rng = random.Random(1)
    begin = replace(next(iter(searching.starts())), recomputed=(0,))
    changed = [searching.moves.changed(begin, rng) for _ in range(100)]
    assert {layout.recomputed for layout in changed if layout is not None} == {None}


def improved_layouts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Solve a small problem, and return by order the number of layouts that the search by simulations begins with."""
    begun: dict[str, int] = {}
    improved = LayoutSearch.improved

    def counted(
        search: LayoutSearch,
        begin: Iterable[Evaluation],
        num_simulations: int,
        *,
        seconds: Callable[[Layout], float] | None = None,
        slack: float = 1.0,
    ) -> Evaluation:
        pool = list(begin)
        begun[pool[0].layout.order] = len(pool)
        return improved(search, pool, num_simulations, seconds=seconds, slack=slack)

    monkeypatch.setattr(LayoutSearch, "improved", counted)
    problem = random_problem(7, num_devices=4, num_layers=8)
    solve(LayoutEvaluator(problem), budget=replace(SearchBudget(), num_simulations=120, work_s=2.0))
    return begun


def test_of_orders_with_whole_backwards_the_best_layout_alone_is_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = improved_layouts(monkeypatch)
    assert begun["gpipe"] == 1
    assert min(begun["zb-h1"], begun["zb-h2"]) > 1


def test_cuts_for_the_ramp_leave_work_for_what_is_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> Iterator[Layout]:
        while True:
            stopping.spend(0.001)
            yield from ()

    monkeypatch.setattr(schedule_search, "ramped", endless)
    assert {"zb-h1", "zb-h2"} <= improved_layouts(monkeypatch).keys()
