"""All planners behind one interface: what they find, what they refuse, and that raypipe's is never behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile
from raypipe.artifacts.schedule import to_json
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, Overheads
from raypipe.errors import PlanError, UnknownNameError
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.merged import MergedEvaluator
from raypipe.planning.plan import plan_problem
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.planners import PLANNERS
from raypipe.planning.problem import Problem
from raypipe.planning.schedule_search import climbed
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import best_division, divided, solve
from raypipe.schedule_registry import build
from raypipe.schedules.ir import Op, OpKind, WeightRule
from raypipe.schedules.metrics import metrics
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.plan_cost import plan_cost
from raypipe.simulation.simulator import simulate
from tests.marks import slow_unless
from tests.planning.instances import islands, random_problem

SMALL = SearchBudget(2000, 60)
TINY = SearchBudget(300, 10)
QUICK = tuple(planner.name for planner in PLANNERS if planner.quick)
OTHERS = tuple(planner.name for planner in PLANNERS if planner.name != "raypipe")


@pytest.mark.parametrize("seed", slow_unless({5}, range(6)))
def test_it_is_never_behind_another_planner(seed: int) -> None:
    num_devices = (4, 5, 6, 8, 8, 40)[seed]
    if num_devices < 40:
        problem = random_problem(seed, num_devices=num_devices, num_layers=12, num_microbatches=8, one_way=seed % 2 == 1)
    else:
        profile = ModelProfile.uniform(40, output_bytes=1, parameter_bytes=10**6, microbatch_size=1)
        problem = Problem(profile, ClusterTopology.uniform(40, bandwidth_bytes_per_s=1000.0), 16, 1)
    own_s = solve(LayoutEvaluator(problem), budget=TINY).update_s
    for name in OTHERS:
        if num_devices == 40 and name not in QUICK:
            continue
        assert own_s <= solve(LayoutEvaluator(problem), name=name).update_s * (1 + 1e-9), name


@pytest.mark.parametrize("name", [planner.name for planner in PLANNERS])
def test_a_plan_is_whole_and_promises_what_its_simulation_says(name: str) -> None:
    problem = islands((2, 2), num_layers=6)
    plan = plan_problem(problem, name=name, budget=SMALL)
    assert plan.planner == name
    assert [layer for stage in plan.stages for layer in stage] == [layer.name for layer in problem.profile.layers]
    assert plan.predicted is not None
    assert plan.predicted.update_s == pytest.approx(simulate(plan).update_s)
    bound_s = plan_bound(problem).update_s
    assert plan.predicted.lower_bound_s == pytest.approx(bound_s)
    assert bound_s <= plan.predicted.update_s
    for worker in plan.workers:
        assert sum(replica.share for replica in worker) == pytest.approx(1.0)
        for replica in worker:
            assert replica.share * problem.microbatch_size == pytest.approx(round(replica.share * problem.microbatch_size))


def test_all_that_is_simulated_is_told_and_none_of_it_is_faster() -> None:
    problem, told = islands((2, 2), num_layers=6), list[Evaluation]()
    plan = plan_problem(problem, budget=SMALL, on_evaluated=told.append)
    assert plan.predicted is not None
    assert min(judged.update_s for judged in told if not judged.missing_bytes) == pytest.approx(plan.predicted.update_s)
    division = list[Evaluation]()
    best_division(problem, budget=TINY, on_evaluated=division.append)
    assert len({len(judged.timing.order.kinds[0]) for judged in division}) > 1, "several ways to divide"


def test_one_device_gives_one_stage() -> None:
    problem = random_problem(1, num_devices=1, num_layers=5)
    for planner in PLANNERS:
        plan = plan_problem(problem, name=planner.name, budget=SMALL)
        assert (len(plan.stages), len(plan.devices)) == (1, 1)


def test_a_slow_device_behind_a_slow_link_stays_idle() -> None:
    profile = ModelProfile.uniform(8, output_bytes=1000, parameter_bytes=1000, microbatch_size=8)
    link = NodeLink(latency_s=0.0, bandwidth_bytes_per_s=1e5)
    nodes = (
        Node(name="fast", devices=tuple(Device(f"fast/{number}", "gpu") for number in range(4)), link=link),
        Node(name="slow", devices=(Device("slow/0", "gpu", speed=0.01),)),
    )
    topology = ClusterTopology(name="lab", nodes=nodes, default_link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=100.0))
    plan = plan_problem(Problem(profile, topology, 8, 8), budget=SMALL)
    assert "slow/0" not in plan.devices
    assert len(plan.devices) == 4


def test_a_device_of_half_the_speed_gets_half_the_work() -> None:
    profile = ModelProfile.uniform(9, output_bytes=1, microbatch_size=2)
    nodes = tuple(Node(name=name, devices=(Device(f"{name}/0", "gpu", speed=speed),)) for name, speed in (("new", 1.0), ("old", 0.5)))
    topology = ClusterTopology(name="pair", nodes=nodes, default_link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    plan = plan_problem(Problem(profile, topology, 32, 2), schedule="1f1b", budget=SMALL)
    layers = {worker[0].device: len(plan.stages[stage]) for stage, worker in enumerate(plan.workers)}
    assert layers == {"new/0": 6, "old/0": 3}


def test_memory_is_kept_where_activations_in_flight_decide() -> None:
    problem = random_problem(4, num_devices=4, num_layers=8)
    roomy = plan_problem(problem, budget=SMALL)
    assert roomy.predicted is not None
    limit = round(0.8 * max(roomy.predicted.peak_memory_bytes))
    tight = plan_problem(random_problem(4, num_devices=4, num_layers=8, memory_bytes=limit), budget=SMALL)
    assert tight.predicted is not None
    assert max(tight.predicted.peak_memory_bytes) <= limit
    assert tight.predicted.update_s >= roomy.predicted.update_s * (1 - 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-v", "chimera"])
def test_an_order_that_is_asked_for_is_used(schedule: str) -> None:
    plan = plan_problem(islands((4,), num_layers=8), schedule=schedule, budget=SMALL)
    assert plan.schedule.name == schedule


def test_rows_are_divided_into_as_many_microbatches_as_pay() -> None:
    problem = islands((4,), num_layers=8)
    whole = replace(problem, num_microbatches=1, microbatch_size=32)
    chosen = best_division(whole, schedule="1f1b", budget=SMALL)[0]
    assert chosen.num_microbatches * chosen.microbatch_size == 32
    own_s = solve(LayoutEvaluator(chosen), schedule="1f1b", budget=SMALL).update_s
    for num_microbatches, microbatch_size in divided(32, most_microbatches=32):
        other = replace(whole, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
        assert own_s <= solve(LayoutEvaluator(other), schedule="1f1b", budget=SMALL).update_s * 1.001


def test_what_a_microbatch_costs_besides_makes_them_larger() -> None:
    problem = islands((4,), num_layers=8)
    whole = replace(problem, num_microbatches=1, microbatch_size=32)
    slow = replace(problem.topology, overheads=Overheads(forward_s=5.0, backward_s=5.0))
    cheap, dear = (best_division(replace(whole, topology=topology), budget=SMALL)[0] for topology in (problem.topology, slow))
    assert dear.num_microbatches < cheap.num_microbatches


@pytest.mark.parametrize("fixed_share", [0.0, 0.9])
def test_rows_are_divided_where_that_saves_time(fixed_share: float) -> None:
    profile = ModelProfile.uniform(9, output_bytes=1000, parameter_bytes=1000, microbatch_size=6)
    profile = replace(profile, layers=tuple(replace(layer, fixed_share=fixed_share) for layer in profile.layers))
    problem = Problem(profile, ClusterTopology.uniform(3), 4, 6)
    plan = plan_problem(problem, schedule="1f1b", budget=SMALL)
    assert plan.schedule.num_stages == (3 if fixed_share else 1)
    best, _ = best_division(replace(problem, num_microbatches=1, microbatch_size=48), budget=SMALL)
    assert (best.microbatch_size > 6) is (fixed_share > 0)


@pytest.mark.parametrize("seed", range(3))
def test_estimates_and_bounds_count_what_fewer_rows_take_as_well(seed: int) -> None:
    problem = random_problem(seed, num_devices=4, num_layers=8)
    shares = [0.1 * (seed + number % 7) for number in range(problem.num_layers)]
    # Forwards and backwards in the same proportion in all layers: else the part of a stage is one between those of its layers.
    layers = zip(problem.profile.layers, shares, strict=True)
    profile = replace(problem.profile, layers=tuple(replace(layer, fixed_share=share) for layer, share in layers))
    problem = replace(problem, profile=profile, microbatch_size=problem.microbatch_size // 2)
    evaluator = LayoutEvaluator(problem)
    found = solve(evaluator, budget=TINY)
    assert plan_bound(problem).update_s <= found.update_s * (1 + 1e-9)
    layout = Layout((0, 3, 8), ((0, 1), (2, 3)))
    judged = evaluator.simulate(layout)
    assert judged is not None
    cost = plan_cost(evaluator.plan(judged, planner="raypipe", lower_bound_s=1.0))
    for stage, group in enumerate(layout.workers):
        rows = problem.rows(group)
        assert rows is not None
        seconds = [
            cost.compute_s(device, (Op(OpKind.FORWARD, stage, 0),), (of_device / problem.microbatch_size,))
            + cost.compute_s(device, (Op(OpKind.BACKWARD, stage, 0),), (of_device / problem.microbatch_size,))
            for device, of_device in zip(group, rows, strict=True)
        ]
        told = evaluator.estimator.stage(group, layout.cuts[stage], layout.cuts[stage + 1])
        assert told.forward_s + told.backward_s == pytest.approx(max(seconds), rel=1e-9)


def test_few_ways_to_divide_rows_are_all_tried_and_of_many_some() -> None:
    assert divided(12, most_microbatches=12) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert divided(7, most_microbatches=7) == [(1, 7), (7, 1)]
    assert divided(7, most_microbatches=6) == [(1, 7)]
    many = divided(720720, most_microbatches=64)
    assert len(many) == 8
    assert (many[0], many[-1]) == ((1, 720720), (63, 11440))


# Forwards that are run again


def of_memory(memory_bytes: int | None, *, num_devices: int = 3, num_layers: int = 6) -> Problem:
    """Layers that save ten times what their weights take."""
    profile = ModelProfile.uniform(num_layers, output_bytes=10, saved_bytes=500, parameter_bytes=50, microbatch_size=8)
    return Problem(profile, ClusterTopology.uniform(num_devices, bandwidth_bytes_per_s=1000.0, memory_bytes=memory_bytes), 8, 8)


@pytest.mark.parametrize("memory_bytes", [2000, 2600])
def test_where_forwards_run_again_the_search_still_changes_the_number_of_stages(memory_bytes: int) -> None:
    plan = plan_problem(of_memory(memory_bytes), budget=SearchBudget(300, 40))
    assert plan.predicted is not None
    assert max(plan.predicted.peak_memory_bytes) <= memory_bytes


def test_a_layer_that_is_moved_may_end_that_a_forward_runs_again() -> None:
    evaluator = LayoutEvaluator(of_memory(2600, num_devices=2, num_layers=4))
    begin = evaluator.simulate(Layout((0, 3, 4), ((0,), (1,))))
    assert begin is not None
    assert begin.layout.recomputed == (0,)
    found = climbed(evaluator, begin, most_steps=1)
    assert found is not None
    assert (found.layout.cuts, found.layout.recomputed, found.missing_bytes) == ((0, 2, 4), (), 0)


@pytest.mark.parametrize("make", [LayoutEvaluator, MergedEvaluator])
def test_only_workers_that_lack_memory_run_forwards_again(make: type[LayoutEvaluator]) -> None:
    # Zero-bubble orders hold twice the activations that estimates count.
    problem = of_memory(None, num_devices=6, num_layers=6)
    layout = Layout((0, 3, 5, 6), ((0, 1), (2, 3), (4, 5)), "zb-h2")
    free = make(problem).simulate(layout)
    assert free is not None
    peaks = sorted(free.timing.peak_memory_bytes)
    assert peaks[0] < peaks[-1]
    limit = peaks[-1] - 1
    nodes = tuple(
        replace(node, devices=tuple(replace(device, memory_bytes=limit) for device in node.devices)) for node in problem.topology.nodes
    )
    found = make(replace(problem, topology=replace(problem.topology, nodes=nodes))).simulate(layout)
    assert found is not None
    assert found.missing_bytes == 0
    assert found.layout.recomputed
    assert len(found.layout.recomputed) < 3


def test_frozen_weights_need_no_memory_but_their_own() -> None:
    problem = of_memory(250, num_devices=2, num_layers=4)
    layers = tuple(replace(layer, saved_bytes=5) for layer in problem.profile.layers)
    with pytest.raises(PlanError, match="too little"):
        plan_problem(replace(problem, profile=replace(problem.profile, layers=layers)), budget=TINY)
    frozen = tuple(replace(layer, frozen_bytes=45) for layer in layers)
    plan = plan_problem(replace(problem, profile=replace(problem.profile, layers=frozen)), budget=TINY)
    assert plan.predicted is not None
    assert max(plan.predicted.peak_memory_bytes) <= 250


# What is refused


def test_a_layer_that_fits_nowhere_is_named_with_what_is_missing() -> None:
    layers = [
        LayerProfile(
            name=name, forward_s=1.0, backward_s=2.0, weight_grad_s=1.0, output_bytes=10, saved_bytes=10, parameter_bytes=num_bytes
        )
        for name, num_bytes in (("small", 10), ("embedding", 1000))
    ]
    topology = ClusterTopology.uniform(3, memory_bytes=2000)
    problem = Problem(ModelProfile(name="m", microbatch_size=1, layers=tuple(layers)), topology, 4, 1)
    with pytest.raises(PlanError, match=r"layer 'embedding' needs .* the largest device of 'uniform' has .* too little; divide the layer"):
        plan_problem(problem)


def test_a_model_larger_than_all_devices_is_refused_saying_by_how_much() -> None:
    profile = ModelProfile.uniform(10, parameter_bytes=100, microbatch_size=1)
    problem = Problem(profile, ClusterTopology.uniform(2, memory_bytes=1000), 4, 1)
    with pytest.raises(PlanError, match=r"together have .* too little; add devices"):
        plan_problem(problem)


def test_copies_in_low_precision_need_memory_too() -> None:
    profile = ModelProfile.uniform(10, parameter_bytes=100, microbatch_size=1)
    copied = replace(profile, layers=tuple(replace(layer, low_precision_bytes=50) for layer in profile.layers))
    cluster = ClusterTopology.uniform(2, memory_bytes=2100)
    plan_problem(Problem(profile, cluster, 4, 1), budget=SMALL)
    with pytest.raises(PlanError, match=r"together have .* too little; add devices"):
        plan_problem(Problem(copied, cluster, 4, 1))


def test_what_a_layer_needs_for_a_while_must_fit_too() -> None:
    profile = ModelProfile.uniform(6, output_bytes=1, parameter_bytes=100, saved_bytes=100, microbatch_size=1)
    problem = Problem(profile, ClusterTopology.uniform(2, memory_bytes=2450), 8, 1)
    assert [len(layers) for layers in plan_problem(problem, budget=TINY, schedule="1f1b").stages] == [3, 3]
    last = replace(profile.layers[-1], working_bytes=1000)
    worked = replace(problem, profile=replace(profile, layers=(*profile.layers[:-1], last)))
    # Three layers with the last of them would take 2500 bytes, four without it take 2400.
    assert [len(layers) for layers in plan_problem(worked, budget=TINY, schedule="1f1b").stages] == [4, 2]


def test_what_fits_apart_but_not_together_says_where_memory_is_short() -> None:
    profile = ModelProfile.uniform(4, parameter_bytes=100, saved_bytes=3000, microbatch_size=8)
    problem = Problem(profile, ClusterTopology.uniform(4, memory_bytes=2600), 8, 8)
    with pytest.raises(PlanError, match=r"lacks .* of memory on its fullest device .*; .* would fit; more devices"):
        plan_problem(problem, name="1f1b-equal")


def test_layers_that_take_no_time_are_refused() -> None:
    problem = Problem(ModelProfile.uniform(3, forward_s=0.0, backward_s=0.0, weight_grad_s=0.0), ClusterTopology.uniform(2), 4, 1)
    with pytest.raises(PlanError, match="the layers of 'uniform' take no time; measure them"):
        plan_problem(problem)


def test_a_kind_of_device_on_which_layers_take_no_time_is_refused() -> None:
    free = (LayerTimes(forward_s=0.0, backward_s=0.0, weight_grad_s=0.0),) * 3
    profile = replace(ModelProfile.uniform(3), device_kinds={"gpu": free})
    node = Node(name="n", devices=(Device("d0", "cpu"), Device("d1", "gpu")), link=NodeLink(latency_s=0.0))
    problem = Problem(profile, ClusterTopology(name="t", nodes=(node,)), 4, 1)
    with pytest.raises(PlanError, match="the layers of 'uniform' take no time on devices of kind 'gpu'; measure them"):
        plan_problem(problem)
    assert plan_problem(replace(problem, topology=ClusterTopology(name="t", nodes=(replace(node, devices=node.devices[:1]),))), budget=TINY)


def test_a_node_without_devices_may_join_the_others() -> None:
    nodes = (Node(name="head", devices=(), cores=4), *(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in ("a", "b")))
    links = tuple(Link(source=one, target=other, latency_s=0.0) for one, other in (("head", "a"), ("head", "b"), ("a", "b")))
    problem = Problem(ModelProfile.uniform(4), ClusterTopology(name="t", nodes=nodes, links=links), 4, 1)
    assert set(plan_problem(problem, budget=TINY).devices) == {"a/0", "b/0"}


def test_unknown_names_are_refused_with_the_nearest() -> None:
    problem = islands((2,))
    with pytest.raises(UnknownNameError, match="did you mean 'dapple'"):
        plan_problem(problem, name="daple")
    with pytest.raises(UnknownNameError, match="did you mean 'zb-h1'"):
        plan_problem(problem, schedule="zbh1")


def test_counts_below_one_are_refused() -> None:
    problem = islands((2,))
    with pytest.raises(PlanError, match="num_microbatches must be at least 1, got 0"):
        replace(problem, num_microbatches=0)


def test_an_order_that_no_number_of_workers_suits_is_refused() -> None:
    problem = random_problem(1, num_devices=1, num_layers=2)
    with pytest.raises(PlanError, match=r"no plan with schedule 'dualpipe' for 2 layers, 1 device"):
        plan_problem(problem, schedule="dualpipe", budget=SMALL)


# Asynchronous orders


def uniform_chain(num_devices: int = 4, num_microbatches: int = 8, **changed: Any) -> Problem:
    """Equal layers and devices, and microbatches of one row, so that stages stay single."""
    profile = ModelProfile.uniform(16, output_bytes=1, parameter_bytes=1000, saved_bytes=1, microbatch_size=1)
    topology = ClusterTopology.uniform(num_devices, bandwidth_bytes_per_s=1e4)
    return Problem(profile, topology, num_microbatches, 1, **changed)


def heavy_last_layer(*, couples: bool) -> Problem:
    """Three equal layers and one of their joint work, for which replicas of the last stage are best."""
    profile = ModelProfile.uniform(4, microbatch_size=12)
    layers = (*profile.layers[:3], replace(profile.layers[3], forward_s=3.0, backward_s=6.0, weight_grad_s=3.0))
    profile = replace(profile, layers=layers, loss_couples_rows=couples or None)
    return Problem(profile, ClusterTopology.uniform(4), 8, 12)


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "chimera"])
def test_where_the_loss_couples_rows_no_worker_that_takes_it_has_replicas(schedule: str) -> None:
    def devices_at_loss(problem: Problem) -> list[int]:
        found = plan_problem(problem, schedule=schedule, budget=SMALL)
        return [len(found.workers[workers[-1]]) for workers in found.schedule.pipelines]

    assert max(devices_at_loss(heavy_last_layer(couples=False))) > 1
    assert set(devices_at_loss(heavy_last_layer(couples=True))) == {1}


def test_where_the_loss_couples_rows_other_layers_may_have_replicas() -> None:
    found = plan_problem(heavy_last_layer(couples=True), schedule="gpipe", budget=SMALL)
    assert [len(replicas) for replicas in found.workers] == [3, 1]


def test_where_the_loss_couples_rows_many_devices_are_planned_with_the_last_alone() -> None:
    profile = replace(ModelProfile.uniform(8, microbatch_size=12), loss_couples_rows=True)
    problem = Problem(profile, ClusterTopology.uniform(40, devices_per_node=4), 8, 12)
    found = plan_problem(problem, schedule="1f1b", budget=TINY)
    assert len(found.workers[-1]) == 1
    assert len(found.devices) > 8


@pytest.mark.parametrize(
    ("name", "schedule", "problem"),
    [
        ("raypipe", "chimera-halving", r"'chimera-halving' divides microbatch \d into parts .* takes the loss; the loss couples the rows"),
        ("data-parallel", "auto", r"worker 0 has 4 devices, .* takes the loss; the loss couples the rows .* give this worker one device"),
    ],
)
def test_where_the_loss_couples_rows_what_would_divide_them_is_refused(name: str, schedule: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        plan_problem(heavy_last_layer(couples=True), name=name, schedule=schedule, budget=TINY)


def test_where_the_loss_couples_rows_the_planner_does_not_divide_an_update() -> None:
    with pytest.raises(PlanError, match=r"couples the rows of a microbatch: .* instead of batch_size"):
        best_division(heavy_last_layer(couples=True))


@pytest.mark.parametrize("name", ["async-1f1b", "pipedream-2bw", "async-interleaved", "amdp"])
def test_a_plan_whose_updates_overlap_promises_its_part_of_a_window(name: str) -> None:
    problem = uniform_chain(updates_per_window=7)
    plan = plan_problem(problem, schedule=name, budget=SMALL)
    assert (plan.schedule.name, plan.schedule.num_updates) == (name, 7)
    assert plan.predicted is not None
    assert plan.predicted.lower_bound_s is not None
    assert plan.predicted.update_s == pytest.approx(simulate(plan).makespan_s / 7)
    assert plan.predicted.lower_bound_s <= plan.predicted.update_s
    if name != "amdp":  # a round of which has a bubble, too
        assert plan.predicted.update_s < plan_problem(problem, budget=SMALL).predicted.update_s  # type: ignore[union-attr]


@pytest.mark.parametrize("planner", ["raypipe", "1f1b-equal"])
@pytest.mark.parametrize("num_updates", [1, 7])
def test_orders_of_ones_own_whose_updates_overlap_are_planned_as_the_bundled_ones(planner: str, num_updates: int, tmp_path: Path) -> None:
    problem = uniform_chain(num_microbatches=2, updates_per_window=7)
    bundled = plan_problem(problem, name=planner, schedule="async-1f1b", budget=TINY).predicted
    assert bundled is not None
    path = str(tmp_path / "order.json")
    Path(path).write_text(to_json(build("async-1f1b", ScheduleRequest(4, 2, num_updates))))
    for name in ("raypipe.schedules.families.one_f_one_b_async:SPEC_ASYNC", path):
        plan = plan_problem(problem, name=planner, schedule=name, budget=TINY)
        assert (plan.schedule.weight_rule, plan.schedule.num_updates) == (WeightRule.LIVE, 7)
        assert plan.predicted is not None
        assert plan.predicted.lower_bound_s == bundled.lower_bound_s
        assert plan.predicted.update_s == pytest.approx(simulate(plan).makespan_s / 7)
        assert plan.predicted.update_s >= bundled.update_s * (1 - 1e-9)
        if name != path or num_updates == 7:  # the order of one update, again and again, drains in between
            assert plan.predicted.update_s == pytest.approx(bundled.update_s)


def test_a_file_of_a_window_is_refused_for_another_window_with_the_option_that_would_do(tmp_path: Path) -> None:
    path = str(tmp_path / "order.json")
    Path(path).write_text(to_json(build("async-1f1b", ScheduleRequest(4, 8, 3))))
    with pytest.raises(PlanError, match=r"is the order of 3 updates, asked for 7; use --updates 3 \(--updates-per-window, schedule\."):
        plan_problem(uniform_chain(updates_per_window=7), name="1f1b-equal", schedule=path)


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "interleaved", "async-1f1b", "amdp"])
def test_a_plan_keeps_what_layers_share_and_pays_for_it(schedule: str, tmp_path: Path) -> None:
    problem = uniform_chain(updates_per_window=3)
    layers = problem.profile.layers
    ends = {0: replace(layers[0], tied="w"), 15: replace(layers[15], tied="w")}
    profile = replace(problem.profile, layers=tuple(ends.get(number, layer) for number, layer in enumerate(layers)))
    plan = plan_problem(replace(problem, profile=profile), schedule=schedule, budget=SMALL)
    assert [layer.tied for layer in plan.profile.layers] == ["w", *[None] * 14, "w"]
    assert plan.schedule.graph.ties == ((0, plan.schedule.num_stages - 1),)
    assert plan_cost(plan).tied_bytes == {0: 1000}
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.predicted is not None
    assert plan.predicted.update_s == pytest.approx(simulate(plan).makespan_s / plan.schedule.num_updates)


def test_orders_that_are_stale_are_chosen_only_where_that_is_allowed() -> None:
    assert plan_problem(uniform_chain(), budget=SMALL).schedule.weight_rule is WeightRule.FLUSH
    assert plan_problem(uniform_chain(max_staleness=0, max_mismatch=0), budget=SMALL).schedule.weight_rule is WeightRule.FLUSH
    for mismatch in (0, 1):
        plan = plan_problem(uniform_chain(max_staleness=1, max_mismatch=mismatch), budget=SMALL)
        assert plan.schedule.weight_rule is not WeightRule.FLUSH
        known = metrics(plan.schedule)
        assert known.max_delay <= 1
        assert known.max_mismatch <= mismatch


def test_where_messages_are_long_forwards_run_ahead() -> None:
    problem = uniform_chain(max_staleness=1, max_mismatch=1, updates_per_window=7)
    profile = replace(problem.profile, layers=tuple(replace(layer, output_bytes=80_000) for layer in problem.profile.layers))
    problem = replace(problem, profile=profile)  # a message takes two forwards of a stage
    seconds = {
        name: plan_problem(problem, schedule=name, budget=SMALL).predicted.update_s  # type: ignore[union-attr]
        for name in ("auto", "async-1f1b", "async-interleaved", "pipedream-2bw", "amdp")
    }
    assert seconds["auto"] == min(seconds.values())
    # Forwards ahead are worth what orders with more microbatches under way are.
    assert seconds["pipedream-2bw"] < seconds["async-1f1b"] < seconds["async-interleaved"]


def test_limits_that_no_plan_keeps_are_refused_with_what_would_do() -> None:
    problem = uniform_chain(num_microbatches=1, max_staleness=1, max_mismatch=1)
    said = r"every plan with schedule 'pipedream' is staler than allowed .* allow max_staleness \d, max_mismatch 0$"
    with pytest.raises(PlanError, match=said):
        plan_problem(problem, name="1f1b-equal", schedule="pipedream")
    plan_problem(replace(problem, max_staleness=3), name="1f1b-equal", schedule="pipedream")
    assert len(plan_problem(problem, schedule="pipedream", budget=SMALL).stages) == 2  # which are one update behind each other
    with pytest.raises(PlanError, match="max_staleness must be at least 0, got -1"):
        uniform_chain(max_staleness=-1)


def test_a_limit_of_the_mean_staleness_is_kept_and_allows_orders_that_are_stale() -> None:
    found = {limit: plan_problem(uniform_chain(max_mean_staleness=limit), budget=SMALL) for limit in (0.0, 0.3, 2.0)}
    assert found[0.0].schedule.weight_rule is WeightRule.FLUSH
    for limit in (0.3, 2.0):
        assert found[limit].schedule.weight_rule is not WeightRule.FLUSH
        assert metrics(found[limit].schedule).mean_delay <= limit
    both = plan_problem(uniform_chain(max_staleness=0, max_mean_staleness=2.0), budget=SMALL)
    assert both.schedule.weight_rule is WeightRule.FLUSH
    said = r"'pipedream-2bw' is staler than allowed \(max_mean_staleness 0.2\); .* allow max_mean_staleness 0.\d+$"
    with pytest.raises(PlanError, match=said):
        plan_problem(uniform_chain(max_mean_staleness=0.2), name="1f1b-equal", schedule="pipedream-2bw")


def test_versions_of_the_weights_take_memory() -> None:
    problem = uniform_chain()
    live, buffered = (plan_problem(problem, schedule=name, budget=SMALL).predicted for name in ("async-1f1b", "pipedream-2bw"))
    assert live is not None
    assert buffered is not None
    assert max(buffered.peak_memory_bytes) - max(live.peak_memory_bytes) == pytest.approx(4 * 1000, rel=1e-3)
