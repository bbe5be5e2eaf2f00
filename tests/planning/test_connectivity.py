"""Topologies of which some pairs have no link: planners keep off these pairs, the simulator refuses plans that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.communication.patterns import exchange
from raypipe.errors import NoLinkError
from raypipe.planning.cluster_state import largest_change
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.plan import plan_problem
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.planners import PLANNERS
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import solve
from raypipe.planning.sum_patterns import SumPatterns
from raypipe.show.tables import plan_report
from raypipe.simulation.pattern_choice import joining, sum_pattern, sum_time
from raypipe.simulation.plan_cost import plan_cost, plan_programs
from raypipe.simulation.simulator import simulate

QUICK = SearchBudget(num_estimates=4000, num_simulations=60, num_starts=4)
Pairs = Sequence[tuple[int, int]]

RING: Pairs = ((0, 1), (1, 2), (2, 3), (3, 0))
LINE: Pairs = ((0, 2), (2, 1), (1, 3))
TREE: Pairs = ((0, 1), (0, 2), (0, 3))
MESH: Pairs = ((0, 1), (2, 3), (4, 5), (0, 2), (2, 4), (1, 3), (3, 5))
WITH_PLAN = {
    *(("data-parallel", network) for network in ("ring", "line", "tree", "mesh")),
    *(("metis", network) for network in ("line", "tree")),
    *((name, "ring") for name in ("gpipe-equal", "1f1b-equal", "pipedream")),
}
"""Planners that know no links and have a plan all the same: data parallelism on any tree, equal stages where the file's order is a path."""
NETWORKS: dict[str, Pairs] = {"ring": RING, "line": LINE, "tree": TREE, "mesh": MESH}


def cluster(pairs: Pairs, *, per_node: int = 1, rate: float = 1e8) -> ClusterTopology:
    """Equal nodes, of whom these pairs alone have links."""
    nodes = tuple(
        Node(
            name=f"n{number}",
            devices=tuple(Device(f"n{number}/{at}", "cpu") for at in range(per_node)),
            link=NodeLink(latency_s=1e-4, bandwidth_bytes_per_s=1e9),
        )
        for number in range(max(map(max, pairs)) + 1)
    )
    links = tuple(Link(source=f"n{one}", target=f"n{other}", bandwidth_bytes_per_s=rate, latency_s=1e-3) for one, other in pairs)
    return ClusterTopology(name="incomplete", nodes=nodes, links=links)


def problem(pairs: Pairs, *, per_node: int = 1, parameter_bytes: int = 1_000_000) -> Problem:
    profile = ModelProfile.uniform(
        8, forward_s=0.01, backward_s=0.02, output_bytes=1_000_000, parameter_bytes=parameter_bytes, saved_bytes=10, microbatch_size=8
    )
    return Problem(profile, cluster(pairs, per_node=per_node), 8, 8)


def used_pairs(plan: Plan) -> set[tuple[str, str]]:
    """Pairs of devices between which the plan's programs send messages, or pass on numbers of sums."""
    cost = plan_cost(plan)
    names = plan.devices
    pairs = {
        (span.sender, span.device) for span in simulate(plan).spans if span.sender is not None and span.kind.name in {"RECV", "TRANSFER"}
    }
    for members, pattern in SumPatterns(cost, plan_programs(plan), exact=False).patterns.items():
        pairs |= {(members[source], members[target]) for phase in pattern.loads for source, target in phase}
    return {(names[source], names[target]) for source, target in pairs}


@pytest.mark.parametrize("network", NETWORKS)
def test_plans_use_pairs_with_links_alone(network: str) -> None:
    pairs = NETWORKS[network]
    plan = plan_problem(problem(pairs), budget=QUICK)
    linked = {(f"n{one}/0", f"n{other}/0") for pair in pairs for one, other in permutations(pair)}
    assert len(plan.devices) > 1
    used = used_pairs(plan)
    assert used
    assert used <= linked
    assert plan.predicted is not None
    assert simulate(plan).update_s == pytest.approx(plan.predicted.update_s)
    assert plan.predicted.lower_bound_s is not None
    assert 0 < plan.predicted.lower_bound_s <= plan.predicted.update_s


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", [planner.name for planner in PLANNERS if planner.layouts is not None])
def test_every_planner_keeps_off_missing_pairs_or_says_that_it_has_no_plan(name: str, network: str) -> None:
    asked = problem(NETWORKS[network])
    if name in {"spp", "ddp-overlap", "node-pipeline"} or (name, network) in WITH_PLAN:
        found = solve(LayoutEvaluator(asked), name=name)
    else:
        with pytest.raises(NoLinkError, match=rf"planner '{name}' .* device 'n\d/0' to device 'n\d/0'"):
            solve(LayoutEvaluator(asked), name=name)
        return
    assert found.update_s >= plan_bound(asked).update_s * (1 - 1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "chimera", "zb-v", "gpipe"])
def test_a_named_schedule_gets_workers_that_it_can_use(schedule: str) -> None:
    found = solve(LayoutEvaluator(problem(RING)), schedule=schedule, budget=QUICK)
    assert found.layout.order == schedule


def test_a_plan_that_uses_a_missing_pair_is_refused_with_both_devices() -> None:
    plan = plan_problem(problem(RING), name="1f1b-equal")
    assert simulate(plan).update_s > 0
    without = cluster(((0, 1), (2, 3), (3, 0)))
    with pytest.raises(NoLinkError, match=r"'n1/0'.*'n2/0'|'n2/0'.*'n1/0'"):
        simulate(plan, topology=without)


def test_replicas_that_links_do_not_join_are_not_possible() -> None:
    asked = problem(((0, 1), (2, 3)))
    evaluator = LayoutEvaluator(asked)
    assert evaluator.simulate(Layout((0, 8), ((0, 1, 2, 3),))) is None
    assert evaluator.simulate(Layout((0, 4, 8), ((0,), (2,)))) is None
    assert evaluator.estimator.estimate_s(Layout((0, 8), ((0, 1, 2, 3),))) == float("inf")
    assert evaluator.simulate(Layout((0, 4, 8), ((0,), (1,)))) is not None


def test_two_islands_without_a_link_get_one_pipeline_inside_one() -> None:
    asked = problem(((0, 1), (2, 3), (3, 4)))
    found = solve(LayoutEvaluator(asked), budget=QUICK)
    used = {device for group in found.layout.workers for device in group}
    assert used == {2, 3, 4}


def test_nodes_without_any_link_get_a_plan_on_one() -> None:
    asked = replace(problem(RING), topology=replace(cluster(RING), links=()))
    found = solve(LayoutEvaluator(asked), budget=QUICK)
    assert len(found.layout.workers) == 1
    assert plan_bound(asked).update_s <= found.update_s


def test_a_route_makes_the_sums_of_a_tree_share_its_wires() -> None:
    routes = tuple(Link(source=f"n{one}", target=f"n{other}", via=("n0",), latency_s=0.0) for one, other in combinations((1, 2, 3), 2))
    direct = problem(TREE)
    routed = replace(direct, topology=replace(direct.topology, links=(*direct.topology.links, *routes)))
    pipeline = Layout((0, 2, 4, 6, 8), ((1,), (2,), (0,), (3,)))
    assert LayoutEvaluator(direct).simulate(pipeline) is None
    timed = LayoutEvaluator(routed).simulate(pipeline)
    assert timed is not None
    # From n2 to n0 pass the second hop's activations, and those that come from n1 on the way back: one wire for both.
    assert dict(routed.path(1, 2).resources).keys() == {"n1->n0", "n0->n2"}


def test_members_that_cannot_all_communicate_sum_along_the_tree_of_their_best_links() -> None:
    links = (("n0", "n1", 1e8), ("n1", "n2", 2e8), ("n2", "n3", 3e8), ("n3", "n0", 4e8))
    topology = replace(
        cluster(RING), links=tuple(Link(source=a, target=b, bandwidth_bytes_per_s=rate, latency_s=1e-3) for a, b, rate in links)
    )
    names = [device.name for device in topology.devices]

    def path(source: int, target: int):  # type: ignore[no-untyped-def]
        return topology.reach(names[source], names[target])

    pattern = sum_pattern(names, path, 1e6)
    assert pattern == joining(4, path)
    assert set(pattern.edges) == {(1, 2), (2, 3), (0, 3)}
    assert exchange(4, pattern) == pattern
    time = sum_time(pattern, names, path)
    # Along the tree 1 - 2 - 3 - 0, each link carries all numbers each way, as shares or totals; member 2 sends to two at once.
    assert time.s_per_byte == pytest.approx(1 / 2e8)
    assert time.latency_s == pytest.approx(6e-3)


def test_a_link_that_is_gone_is_a_change_of_the_cluster() -> None:
    old = problem(RING)
    new = replace(old, topology=cluster(((0, 1), (2, 3), (3, 0))))
    assert "link n2 -> n1 is gone" in largest_change(old, new)
    assert "is there" in largest_change(new, old)


def test_a_report_says_that_a_plan_stays_inside_one_island_and_what_binds() -> None:
    apart = plan_problem(problem(((0, 1), (2, 3), (3, 4))), budget=QUICK)
    assert apart.topology.islands == (("n0/0", "n1/0"), ("n2/0", "n3/0", "n4/0"))
    report = plan_report(apart)
    assert report.document()["islands"] == [["n0/0", "n1/0"], ["n2/0", "n3/0", "n4/0"]]
    assert report.document()["lower_bound_reason"] == plan_bound(problem(((0, 1), (2, 3), (3, 4)))).reason
    assert "one of 2 sets of devices that no link joins, of 3 devices" in report.sentence()
    assert "islands" not in plan_report(plan_problem(problem(RING), name="1f1b-equal")).document()


def test_nodes_and_devices_are_joined_over_others() -> None:
    lone = cluster(LINE, per_node=2)
    assert len(lone.islands) == 1
    one_way = replace(lone, links=tuple(replace(link, one_way=True) for link in lone.links))
    assert one_way.islands == tuple((f"n{number}/0", f"n{number}/1") for number in range(4))
    back = replace(one_way, links=(*one_way.links, Link(source="n2", target="n0/1", latency_s=0.0, one_way=True)))
    assert [len(island) for island in back.islands] == [4, 2, 2]
    unlinked = replace(lone, links=(), nodes=tuple(replace(node, link=None) for node in lone.nodes))
    assert len(unlinked.islands) == 8
