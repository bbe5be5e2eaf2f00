from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest

from raypipe.artifacts.profile import LayerTimes, ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, SharedLink, node_ports
from raypipe.errors import NoLinkError
from raypipe.planning import chunks
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve
from tests.marks import slow_unless
from tests.planning.any_plans import any_plan
from tests.planning.instances import all_plans, islands, random_problem, with_fixed_shares

ORDERS = ("1f1b", "list", "gpipe", "zb-h1", "zb-h2")


def hub(problem: Problem, ports: tuple[float, ...]) -> Problem:
    """The same devices as nodes at a switch, with ports of so many bytes per second each way."""
    nodes = problem.topology.nodes
    shared = node_ports({node.name: rate for node, rate in zip(nodes, ports, strict=True)})
    topology = ClusterTopology(name="hub", nodes=nodes, default_link=NodeLink(latency_s=0.0), shared_links=shared)
    return replace(problem, topology=topology)


def hubs() -> list[Problem]:
    """Stars whose ports decide: slow ones, unequal ones, and sums that cost more or less than activations."""
    found: list[Problem] = []
    for seed, ports in enumerate(((5e5, 5e5, 5e5), (3e5, 4e6, 1e5, 1e6), (2e6, 2e6, 2e6, 1e5), (1e6, 1e6, 1e6, 1e6))):
        problem = random_problem(seed, num_devices=len(ports), num_layers=4 + seed % 2, num_microbatches=6)
        found.append(hub(problem, tuple(ports)))
        layers = tuple(replace(layer, parameter_bytes=1000 * layer.parameter_bytes) for layer in problem.profile.layers)
        found.append(replace(found[-1], profile=replace(problem.profile, layers=layers)))
        # Whole microbatches of one row, a way of which through all layers is long beside an update.
        found.append(replace(found[-1], microbatch_size=1))
    return found


def cases() -> list[Problem]:
    found = [random_problem(seed, num_devices=2 + seed % 3, num_layers=3 + seed % 4, num_microbatches=2 + seed % 9) for seed in range(16)]
    found += [islands((2, 2), between=between, parameter_bytes=parameters) for between in (0.01, 0.5, 5.0) for parameters in (0, 100, 9000)]
    chain = random_problem(3, num_devices=4, num_layers=5)
    edges = [NamedEdge(producer=f"layer{one}", consumer=f"layer{other}") for one, other in ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 4))]
    found.append(replace(chain, profile=replace(chain.profile, named_edges=tuple(edges))))
    # Kinds of device whose layers differ in which is the slower one.
    times = {
        kind: tuple(LayerTimes(forward_s=1 + 3 * (layer % 2 == odd), backward_s=2.0, weight_grad_s=1.0) for layer in range(6))
        for odd, kind in enumerate(("even", "odd"))
    }
    profile = replace(ModelProfile.uniform(6, microbatch_size=12, output_bytes=1), device_kinds=times)
    cluster = ClusterTopology.uniform(4, devices_per_node=1, bandwidth_bytes_per_s=5.0)
    nodes = tuple(
        replace(node, devices=tuple(replace(device, kind=("even", "odd", "other", "odd")[at]) for device in node.devices))
        for at, node in enumerate(cluster.nodes)
    )
    found.append(Problem(profile, replace(cluster, nodes=nodes), 6, 12))
    found += [with_fixed_shares(problem, number) for number, problem in enumerate(found[:16:4])]
    return [*found, *hubs()]


def odd_cases() -> list[tuple[Problem, Layout]]:
    """Problems with a layout that some bound could claim not to exist."""
    base = ModelProfile.uniform(4, microbatch_size=4, parameter_bytes=1000, output_bytes=10)
    heavy = replace(base, layers=tuple(replace(layer, parameter_bytes=10**6, output_bytes=0) for layer in base.layers))
    free = NodeLink(latency_s=0.0)

    def kind(forward_s: float, backward_s: float, weight_grad_s: float) -> tuple[LayerTimes, ...]:
        return (LayerTimes(forward_s=forward_s, backward_s=backward_s, weight_grad_s=weight_grad_s),) * 4

    alone = Layout((0, 4), ((0,),))
    # A fast and a slow kind share one core.
    shared = ClusterTopology(name="shared", nodes=(Node(name="n", cores=1, devices=(Device("d0", "a"), Device("d1", "b")), link=free),))
    unlike = replace(base, device_kinds={"a": kind(0.1, 0.2, 0.1), "b": kind(1.0, 2.0, 1.0)})
    # Two of four devices with two cores, while the others rest.
    links = tuple(
        Link(source=f"d{one}", target=f"d{other}", latency_s=0.0, bandwidth_bytes_per_s=1e9 if one // 2 == other // 2 else 1e-3)
        for one, other in combinations(range(4), 2)
    )
    crossed = ClusterTopology(
        name="crossed", nodes=(Node(name="n", cores=2, devices=tuple(Device(f"d{number}", "cpu") for number in range(4))),), links=links
    )
    # A kind that is quick forth and slow back.
    backward = replace(heavy, device_kinds={"a": kind(0.1, 2.9, 2.8)})
    apart = ClusterTopology.uniform(4, kind="a", bandwidth_bytes_per_s=1.0, devices_per_node=1)
    one_each = Layout((0, 1, 2, 3, 4), ((0,), (1,), (2,), (3,)), "zb-h1")
    # Less than a byte of each message for each device.
    slow = ClusterTopology.uniform(4, devices_per_node=2, bandwidth_bytes_per_s=1e-3)
    slow = replace(slow, nodes=tuple(replace(node, link=free) for node in slow.nodes))
    bytes_apart = ModelProfile.uniform(4, microbatch_size=4, parameter_bytes=1000, output_bytes=1)
    halves = Layout((0, 2, 4), ((0, 1), (2, 3)))
    # Two models beside each other.
    two = replace(base, named_edges=tuple(NamedEdge(producer=f"layer{at}", consumer=f"layer{at + 1}") for at in (0, 2)))
    return [
        (Problem(unlike, shared, 4, 4), alone),
        (Problem(base, crossed, 8, 4), Layout((0, 2, 4), ((0,), (1,)))),
        (Problem(backward, apart, 4, 4), one_each),
        (Problem(bytes_apart, slow, 8, 4), halves),
        (Problem(two, slow, 8, 4), halves),
    ]


@pytest.mark.parametrize("number", range(5))
def test_unlike_kinds_shared_cores_and_parts_of_bytes_are_no_way_below_the_bound(number: int) -> None:
    problem, layout = odd_cases()[number]
    judged = LayoutEvaluator(problem).simulate(layout)
    assert judged is not None
    assert 0 < plan_bound(problem).update_s <= judged.update_s * (1 + 1e-9)


@pytest.mark.parametrize("number", slow_unless(range(0, len(cases()), 3), range(len(cases()))))
def test_no_simulated_plan_beats_the_bound(number: int) -> None:
    problem = cases()[number]
    evaluator = LayoutEvaluator(problem)
    bound = plan_bound(problem)
    rng = random.Random(number)
    layouts = list(all_plans(problem.num_devices, problem.num_layers))
    for layout in rng.sample(layouts, min(len(layouts), 40)):
        tried = [evaluator.simulate(replace(layout, order=order)) for order in ORDERS]
        tried += [evaluator.simulate(several) for order in chunks.ORDERS for several in chunks.layouts(evaluator, layout.workers, order)]
        for judged in tried:
            assert judged is None or judged.update_s >= bound.update_s * (1 - 1e-9), (str(judged.layout), bound)


@pytest.mark.parametrize("number", slow_unless(range(0, len(cases()), 12), range(0, len(cases()), 3)))
def test_no_planner_beats_the_bound(number: int) -> None:
    problem = cases()[number]
    bound_s = plan_bound(problem).update_s
    for name in ("raypipe", "spp", "data-parallel", "1f1b-equal", "dapple", "metis", "pipedream"):
        assert solve(LayoutEvaluator(problem), name=name).update_s >= bound_s * (1 - 1e-9)


def test_equal_layers_on_equal_devices_meet_the_bound() -> None:
    problem = Problem(ModelProfile.uniform(8, microbatch_size=8), ClusterTopology.uniform(4), 16, 8)
    found = solve(LayoutEvaluator(problem))
    assert plan_bound(problem).update_s == pytest.approx(16 * 8 * 3 / 4)
    assert found.update_s == pytest.approx(plan_bound(problem).update_s)


def test_slow_links_between_islands_raise_the_bound() -> None:
    near, far = (islands((2, 2), between=between, parameter_bytes=5000) for between in (100.0, 0.05))
    assert plan_bound(far).binding == "border"
    assert plan_bound(far).update_s > 1.5 * plan_bound(near).update_s
    # It tells how much two islands can give at most: far from twice one island, which is what this comes to.
    assert plan_bound(far).update_s <= solve(LayoutEvaluator(far)).update_s


def test_slow_ports_of_a_star_raise_the_bound() -> None:
    uniform = Problem(
        ModelProfile.uniform(8, microbatch_size=8, output_bytes=2, parameter_bytes=10**6),
        ClusterTopology.uniform(4, devices_per_node=1),
        8,
        8,
    )
    slow, fast = (hub(uniform, (rate,) * 4) for rate in (0.3, 1e9))
    assert plan_bound(slow).binding == "ports"
    assert plan_bound(slow).update_s > 1.1 * plan_bound(fast).update_s
    assert plan_bound(slow).update_s <= solve(LayoutEvaluator(slow)).update_s


def test_the_place_of_a_node_in_the_list_does_not_change_what_its_port_carries() -> None:
    profile = ModelProfile.uniform(8, microbatch_size=8, output_bytes=2, parameter_bytes=10)
    uniform = Problem(profile, ClusterTopology.uniform(5, devices_per_node=1), 8, 8)
    slow = hub(uniform, (0.3,) * 5)
    bounds = []
    for first in range(5):
        nodes = slow.topology.nodes
        turned = replace(slow, topology=replace(slow.topology, nodes=(*nodes[first:], *nodes[:first])))
        bounds.append(plan_bound(turned).ports_s)
    assert bounds == pytest.approx([bounds[0]] * 5, rel=1e-6)
    # Each port carries as much as the one of the first node: with wider ones for all others, an update is faster.
    assert plan_bound(hub(uniform, (0.3, 0.6, 0.9, 0.6, 0.3))).ports_s < 0.9 * bounds[0]


def test_a_slow_port_at_an_end_of_the_pipeline_has_no_more_than_what_a_row_leaves_it() -> None:
    profile = ModelProfile.uniform(8, microbatch_size=1, output_bytes=10, parameter_bytes=10**6)
    uniform = Problem(profile, ClusterTopology.uniform(4, devices_per_node=1), 8, 1)
    work_s = plan_bound(uniform).work_s
    # Alone, the activations of the slow port's device fill all of this time; with it, three devices are not faster than all work on them.
    slow, fast = (hub(uniform, (1e3, 1e3, 1e3, 8 * 10 / (part * work_s))) for part in (0.98, 0.1))
    assert plan_bound(slow).binding == "ports"
    assert plan_bound(slow).update_s >= work_s * 4 / 3 * 0.99
    for problem in (slow, fast):
        evaluator = LayoutEvaluator(problem)
        layouts = [
            Layout((0, *cuts, 8), tuple((device,) for device in devices), order)
            for used in (3, 4)
            for devices in permutations(range(4), used)
            for cuts in combinations(range(1, 8), used - 1)
            for order in ("1f1b", "zb-h2")
            if sorted(devices[:-1]) == [*devices[:-1]] or devices[0] == 3
        ]
        times = [
            judged.update_s for layout in layouts[:: max(len(layouts) // 150, 1)] if (judged := evaluator.simulate(layout)) is not None
        ]
        assert plan_bound(problem).update_s <= min(times) * (1 + 1e-9)


def test_weights_too_heavy_to_copy_raise_the_bound() -> None:
    light, heavy = (islands((4,), within=10.0, parameter_bytes=number) for number in (1, 10_000))
    assert plan_bound(heavy).binding == "copies"
    assert plan_bound(heavy).update_s > plan_bound(light).update_s


def networks() -> list[Problem]:
    """Rings and other networks without all links, links of one way alone, devices of many speeds."""
    found = [
        random_problem(seed, num_devices=3 + seed % 4, num_layers=4 + seed % 3, num_microbatches=6, one_way=True, missing=0.4 * (seed % 2))
        for seed in range(6)
    ]
    found += [random_problem(seed, num_devices=5, num_layers=6, speeds=(1.0, 3.0, 0.2)) for seed in range(6, 9)]
    base = random_problem(9, num_devices=6, num_layers=6, num_microbatches=4)
    nodes = base.topology.nodes
    links = tuple(
        Link(source=node.name, target=nodes[number - 1].name, latency_s=0.001, bandwidth_bytes_per_s=(1 + number) * 2e6)
        for number, node in enumerate(nodes)
    )
    ring = ClusterTopology(name="ring", nodes=nodes, links=links)
    return [*found, replace(base, topology=ring)]


def chains() -> list[Problem]:
    return [problem for problem in (*cases(), *networks()) if set(problem.edges) == set(pairwise(range(problem.num_layers)))]


@pytest.mark.parametrize("number", range(len(chains())))
def test_no_plan_of_any_kind_beats_the_bound(number: int) -> None:
    problem = chains()[number]
    bound_s = plan_bound(problem).update_s
    evaluator = LayoutEvaluator(problem)
    rng = random.Random(number)
    num_simulated = 0
    for _ in range(25):
        layout, schedule = any_plan(problem, rng)
        try:
            update_s = evaluator.simulate_order(layout, schedule).update_s
        except NoLinkError:
            continue
        num_simulated += 1
        assert update_s >= bound_s * (1 - 1e-9), (str(layout), schedule.pipelines)
    assert num_simulated


def test_what_leaves_by_a_port_is_the_same_whether_links_are_plain_or_share_a_limit_that_never_binds() -> None:
    """One layer whose copies must sum: members behind a port send to one after the other, over stated links to all at once."""
    names = [f"n{number}" for number in range(4)]
    profile = ModelProfile.uniform(
        1, microbatch_size=4, forward_s=1.0, backward_s=2.0, weight_grad_s=1.0, parameter_bytes=100_000_000, output_bytes=1
    )

    def bounds_s(stated: tuple[tuple[str, str], ...]) -> tuple[float, float]:
        plain = ClusterTopology(
            name="plain",
            nodes=tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in names),
            links=tuple(Link(source=one, target=other, bandwidth_bytes_per_s=2e7, latency_s=0.0) for one, other in stated),
            default_link=NodeLink(bandwidth_bytes_per_s=2e7, latency_s=0.0),
        )
        shared = replace(plain, shared_links=(SharedLink(name="wide", bandwidth_bytes_per_s=1e18, members=(("n2", "n3"),)),))
        of_plain, of_shared = (plan_bound(Problem(profile, topology, 4, 4)).update_s for topology in (plain, shared))
        return of_plain, of_shared

    by_port, half, apart = (bounds_s(stated) for stated in ((), (("n0", "n1"), ("n2", "n3")), tuple(combinations(names, 2))))
    for of_plain, of_shared in (by_port, half, apart):
        assert of_plain == pytest.approx(of_shared)
    assert by_port[0] > half[0] > apart[0]
