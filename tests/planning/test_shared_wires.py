from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, SharedLink
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Problem
from raypipe.planning.shared_wires import SharedWires
from raypipe.simulation.pattern_choice import sum_pattern
from tests.simulation.test_pattern_choice import unlike

CROSSING = Layout((0, 2, 4, 6, 8), ((0, 4), (1, 5), (2, 6), (3, 7)))
"""Each stage has a copy on either node: all four sums pass the wire between them."""


def two_nodes(*, num_microbatches: int, output_bytes: int = 1000, parameter_bytes: int = 2_000_000) -> Problem:
    profile = ModelProfile.uniform(
        8, forward_s=0.02, backward_s=0.04, output_bytes=output_bytes, parameter_bytes=parameter_bytes, microbatch_size=8
    )
    nodes = tuple(
        Node(
            name=f"node{number}",
            devices=tuple(Device(f"node{number}/{slot}", "cpu") for slot in range(4)),
            link=NodeLink(bandwidth_bytes_per_s=1e9, latency_s=1e-4),
        )
        for number in range(2)
    )
    topology = ClusterTopology(name="two nodes", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=25e6, latency_s=1e-4))
    return Problem(profile, topology, num_microbatches, 8)


def ratio(problem: Problem, layout: Layout) -> float:
    evaluator = LayoutEvaluator(problem)
    judged = evaluator.simulate(layout)
    assert judged is not None
    return judged.update_s / evaluator.estimator.estimate_s(layout)


@pytest.mark.parametrize("num_microbatches", [4, 16])
@pytest.mark.parametrize(
    "layout",
    [
        CROSSING,
        Layout((0, 4, 8), ((0, 1, 4, 5), (2, 3, 6, 7))),
        Layout((0, 2, 4, 6, 8), ((0, 4), (1, 5), (2,), (3, 7))),
        Layout((0, 8), (tuple(range(8)),)),
    ],
)
def test_sums_of_several_stages_over_one_wire_are_estimated_as_simulated(layout: Layout, num_microbatches: int) -> None:
    assert ratio(two_nodes(num_microbatches=num_microbatches), layout) == pytest.approx(1.0, abs=0.02)


def test_sums_and_messages_over_one_wire_are_estimated_as_simulated() -> None:
    layout = Layout((0, 2, 4, 6, 8), ((0, 4), (1, 5), (2,), (3, 7)))
    assert ratio(two_nodes(num_microbatches=4, output_bytes=400_000), layout) == pytest.approx(1.0, abs=0.05)


def test_sums_through_the_port_of_a_node_share_it() -> None:
    problem = two_nodes(num_microbatches=4)
    port = SharedLink(name="port", bandwidth_bytes_per_s=10e6, members=(("node0", "node1"),))
    narrow = replace(problem, topology=replace(problem.topology, shared_links=(port,)))
    assert ratio(narrow, CROSSING) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("num_nodes", [3, 5, 8])
def test_a_slow_port_works_all_the_time_while_those_of_its_neighbors_send_to_others(num_nodes: int) -> None:
    names = [f"node{number}" for number in range(num_nodes)]
    rates = [25e6] * (num_nodes - 1) + [2.5e6]
    ports = tuple(
        SharedLink(
            name=f"{way}-{name}",
            bandwidth_bytes_per_s=rate,
            members=tuple((name, other) if way == "from" else (other, name) for other in names if other != name),
        )
        for name, rate in zip(names, rates, strict=True)
        for way in ("from", "to")
    )
    topology = ClusterTopology(
        name="star",
        nodes=tuple(Node(name=name, devices=(Device(f"{name}/0", "cpu"),)) for name in names),
        default_link=NodeLink(latency_s=1e-4),
        shared_links=ports,
    )
    profile = ModelProfile.uniform(2, forward_s=0.02, backward_s=0.04, output_bytes=1000, parameter_bytes=2_000_000, microbatch_size=8)
    problem, copies = Problem(profile, topology, 4, 8), Layout((0, 2), (tuple(range(num_nodes)),))
    judged, alone = LayoutEvaluator(problem).simulate(copies), LayoutEvaluator(problem).simulate(Layout((0, 2), ((0,),)))
    assert judged is not None
    assert alone is not None
    sum_s = float(problem.summed_prefix[-1]) / 2.5e6
    assert sum_s < judged.update_s < 1.1 * sum_s + alone.update_s
    assert ratio(problem, copies) == pytest.approx(1.0, abs=0.03)


def test_each_stage_alone_would_be_promised_a_wire_of_its_own() -> None:
    problem = two_nodes(num_microbatches=4)
    estimator = LayoutEvaluator(problem).estimator
    alone_s = max(estimator.stage(group, *CROSSING.cuts[number : number + 2]).sum_s for number, group in enumerate(CROSSING.workers))
    sums_s = sum(float(problem.summed_prefix[-1]) / 4 / 25e6 for _ in CROSSING.workers)  # A ring of two sends all bytes once.
    assert estimator.estimate_s(CROSSING) > sums_s > 2 * alone_s


@pytest.mark.parametrize("parameter_bytes", [200_000, 2_000_000, 20_000_000])
def test_the_bound_holds_where_sums_share_wires(parameter_bytes: int) -> None:
    problem = two_nodes(num_microbatches=4, parameter_bytes=parameter_bytes)
    bound = plan_bound(problem)
    evaluator = LayoutEvaluator(problem)
    for layout in (
        CROSSING,
        Layout((0, 8), (tuple(range(8)),)),
        Layout((0, 4, 8), ((0, 1, 2, 3), (4, 5, 6, 7))),
        Layout((0, 8), ((0, 1, 2, 3),)),
    ):
        judged = evaluator.simulate(layout)
        assert judged is not None
        assert judged.update_s >= bound.update_s * (1 - 1e-9)


def test_what_a_sum_puts_on_wires_is_that_of_the_pattern_with_which_a_run_begins() -> None:
    profile = ModelProfile.uniform(8, forward_s=0.02, backward_s=0.04, output_bytes=1000, parameter_bytes=2_000_000, microbatch_size=8)
    problem = Problem(profile, unlike(6, seed=0)[0], 4, 8)
    for num_bytes in (2.0**12, 2.0**24):
        for group in ((0, 1, 2, 3), (3, 1, 4), (5, 0, 3, 1, 2, 4)):
            of_nodes, path = problem.paths_of(group)
            expected: Counter[str] = Counter()
            for of_phase in sum_pattern(of_nodes, path, num_bytes).loads:
                for (source, target), part in of_phase.items():
                    for name, bandwidth in path(source, target).resources:
                        expected[name] += part / bandwidth  # type: ignore[assignment]
            # Slices of packed trees are about as long, in whatever order the members are.
            assert sum(SharedWires(problem).loads(group, num_bytes).values()) == pytest.approx(sum(expected.values()), rel=0.05)
            assert SharedWires(problem).loads(group, num_bytes) == pytest.approx(expected, rel=0.3)
