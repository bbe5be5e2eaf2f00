"""How a list interleaves the layers of branches does not matter; the graph does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.planning.branch_placement import Layers
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layer_order import canonical, depth_first, listed, lists
from raypipe.planning.layout import Layout
from raypipe.planning.plan import plan
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from raypipe.planning.solve import solve
from tests.planning.instances import random_problem
from tests.planning.towers import node, towers


def random_list(profile: ModelProfile, rng: random.Random) -> ModelProfile:
    """Return the same graph with layers in another topological order, and edges in any."""
    left = {layer.name for layer in profile.layers}
    names = [layer.name for layer in profile.layers]
    edges = [(names[edge.producer], names[edge.consumer]) for edge in profile.edges()]
    order: list[str] = []
    while left:
        name = rng.choice(sorted(name for name in left if not any(target == name and source in left for source, target in edges)))
        left.remove(name)
        order.append(name)
    numbers = [names.index(name) for name in order]
    return replace(
        profile,
        layers=tuple(profile.layers[number] for number in numbers),
        named_edges=tuple(rng.sample(profile.named_edges or (), len(profile.named_edges or ()))),
        device_kinds={kind: tuple(times[number] for number in numbers) for kind, times in profile.device_kinds.items()},
    )


def random_graph(seed: int, num_layers: int) -> ModelProfile:
    """Return layers that read one or two earlier ones each, the last one all ends, with times on two kinds of device."""
    rng = random.Random(seed)
    layers = tuple(
        LayerProfile(
            name=f"layer{number}",
            forward_s=rng.uniform(0.1, 1.0),
            backward_s=rng.uniform(1.0, 2.0),
            weight_grad_s=rng.uniform(0.1, 1.0),
            output_bytes=rng.randrange(1000),
            saved_bytes=rng.randrange(1000),
            parameter_bytes=rng.randrange(1_000_000),
            branch=rng.choice((None, "one", "other")),
        )
        for number in range(num_layers)
    )
    edges = {(rng.randrange(target), target) for target in range(1, num_layers) for _ in range(2)}
    edges |= {(source, num_layers - 1) for source in set(range(num_layers - 1)) - {source for source, _ in edges}}
    return ModelProfile(
        name="graph",
        microbatch_size=8,
        layers=layers,
        named_edges=tuple(NamedEdge(producer=f"layer{source}", consumer=f"layer{target}") for source, target in sorted(edges)),
        device_kinds={"fast": tuple(replace(layer.times, forward_s=layer.forward_s / 3) for layer in layers)},
    )


def problem(profile: ModelProfile, topology: ClusterTopology) -> Problem:
    return Problem(profile, topology, 4, 8)


@given(seed=st.integers(0, 10_000), num_layers=st.integers(2, 14))
def test_every_list_of_a_graph_becomes_the_same_lists(seed: int, num_layers: int) -> None:
    profile = random_graph(seed, num_layers)
    names: list[list[list[str]]] = []
    for given_list in (profile, random_list(profile, random.Random(seed))):
        of, numbers = canonical(problem(given_list, node(2)))
        assert [given_list.layers[number] for number in numbers] == list(of.profile.layers)
        names.append([[of.profile.layers[layer].name for layer in layers] for layers in lists(of)])
        assert set(of.profile.named_edges or ()) == set(profile.named_edges or ())
    assert names[0] == names[1]


def test_a_chain_has_one_list() -> None:
    chain = random_problem(0, num_devices=2, num_layers=5)
    assert list(lists(chain)) == [(0, 1, 2, 3, 4)]
    assert canonical(chain)[0] is chain


def test_branches_are_listed_one_behind_the_other_and_interleaved_by_what_is_left() -> None:
    of, _ = canonical(problem(towers((1.0, 2.0), num_layers=4), node(2)))
    names = [[of.profile.layers[layer].name for layer in layers] for layers in lists(of)]
    assert names == [
        ["1-0", "1-1", "1-2", "1-3", "0-0", "0-1", "0-2", "0-3", "joint"],
        ["1-0", "1-1", "0-0", "1-2", "0-1", "0-2", "1-3", "0-3", "joint"],
    ]


def test_a_layout_of_another_list_is_the_same_in_the_numbers_of_the_model() -> None:
    of = problem(towers((1.0, 2.0), num_layers=4), node(3))
    _, layers = lists(of)
    layout = Layout((0, 2, 5, 9), ((1,), (0,), (2,)), "zb-h1")
    times = [LayoutEvaluator(listed(of, layers)).simulate(layout), LayoutEvaluator(of).simulate(layout.relisted(layers))]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0].update_s == pytest.approx(times[1].update_s)
    assert [sorted(layers[layer] for layer in stage) for stage in layout.cut(of).stages] == [
        list(stage) for stage in layout.relisted(layers).cut(of).stages
    ]
    assert layout.relisted(layers).relisted(tuple(layers.index(layer) for layer in range(9))) == layout


def content(of: Plan) -> tuple[object, ...]:
    workers = [[(replica.device, replica.share) for replica in replicas] for replicas in of.workers]
    return [set(stage) for stage in of.stages], workers, of.schedule


@pytest.mark.parametrize(
    ("profile", "schedule"),
    [
        (towers((1.0, 2.0), num_layers=4, kilobytes=400_000), "auto"),
        (towers((1.0, 2.0), num_layers=5, exchanges=1, kilobytes=400_000), "zb-h1"),
        (random_graph(3, 9), "zb-v"),
    ],
)
def test_plans_do_not_depend_on_how_the_list_interleaves_branches(profile: ModelProfile, schedule: str) -> None:
    topology = node(3)
    plans = [plan(each, topology, 4, schedule=schedule, effort=0.1) for each in (profile, random_list(profile, random.Random(1)))]
    assert content(plans[0]) == content(plans[1])
    updates = [each.predicted.update_s for each in plans if each.predicted is not None]
    assert updates[0] == pytest.approx(updates[1], rel=1e-12)


def test_interleaved_towers_go_from_branch_to_branch_however_many_layers_they_have() -> None:
    names = [layer.name for layer in towers((1.0, 1.0), num_layers=12, interleaved=True).layers]
    assert names == [*(f"{branch}-{at}" for at in range(12) for branch in range(2)), "joint"]


@pytest.mark.parametrize("planner", ["spp", "1f1b-equal"])
def test_other_planners_do_not_depend_on_it_either(planner: str) -> None:
    profile = towers((1.0, 2.0), num_layers=5)
    plans = [plan(each, node(3), 4, planner=planner) for each in (profile, random_list(profile, random.Random(2)))]
    assert content(plans[0]) == content(plans[1])


def test_memory_is_that_of_the_list_as_given() -> None:
    # In the canonical list the second branch keeps more than the backward of the first needs for a while.
    of = towers((2.0, 1.0), num_layers=1, saved_bytes=1000)
    first, second, joint = of.layers
    layers = (replace(first, working_bytes=3000), second, joint)
    budget = SearchBudget(num_estimates=500, num_simulations=20, num_starts=2)
    peaks = []
    for in_order in (layers, (layers[1], layers[0], joint)):
        profile = replace(of, layers=in_order)
        found = solve(LayoutEvaluator(problem(profile, node(1))), schedule="1f1b", budget=budget)
        peaks.append(max(found.timing.peak_memory_bytes))
    assert peaks[1] == peaks[0] + 1000
    # There is another plan that fits.
    found = solve(
        LayoutEvaluator(problem(replace(of, layers=(layers[1], layers[0], joint)), node(1, memory_bytes=peaks[0]))), budget=budget
    )
    assert not found.missing_bytes
    assert found.layout.recomputed


# Skips and joins without declared branches


def cells(num_cells: int, *, names: Sequence[str] = ("left", "right", "joined")) -> ModelProfile:
    """Cells of two unequal ways and a join, each of which reads the two cells before it, as NASNet's do."""
    rng = random.Random(num_cells)
    layers: list[LayerProfile] = []
    edges: list[tuple[str, str]] = []
    ends = ["stem"]
    for name in ("stem", *(f"{name}-{cell}" for cell in range(num_cells) for name in names)):
        forward_s = rng.uniform(0.1, 1.0)
        layers.append(
            LayerProfile(
                name=name,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                weight_grad_s=forward_s,
                output_bytes=rng.randrange(1, 9) * 1000,
                saved_bytes=1000,
                parameter_bytes=1000,
            )
        )
        if name != "stem":
            way, cell = name.split("-")
            if way == names[-1]:
                edges += [(f"{other}-{cell}", name) for other in names[:-1]]
                ends.append(name)
            else:
                edges += [(source, name) for source in ends[-2:]]
    named = tuple(NamedEdge(producer=producer, consumer=consumer) for producer, consumer in edges)
    return ModelProfile(name="cells", microbatch_size=4, layers=tuple(layers), named_edges=named)


def crossing(profile: ModelProfile, layers: Layers) -> float:
    return float(listed(on_three(profile), layers).crossing_bytes.sum())


def on_three(profile: ModelProfile) -> Problem:
    nodes = tuple(Node(name=f"n{number}", devices=(Device(f"n{number}/0", "cpu"),)) for number in range(3))
    topology = ClusterTopology(name="three", nodes=nodes, default_link=NodeLink(latency_s=0.01, bandwidth_bytes_per_s=10_000))
    return Problem(profile, topology, 4, 4)


@pytest.mark.parametrize("num_cells", [3, 8])
def test_skips_and_joins_are_listed_so_that_few_bytes_cross(num_cells: int) -> None:
    profile = cells(num_cells)
    chosen, layers = canonical(on_three(profile))
    assert chosen.crossing_bytes.sum() <= crossing(profile, depth_first(profile))
    rng = random.Random(1)
    for _ in range(20):
        other = random_list(profile, rng)
        assert chosen.crossing_bytes.sum() <= 1.02 * on_three(other).crossing_bytes.sum()
        # Whatever the list, its layers come in the same order.
        assert canonical(on_three(other))[0].profile.layers == chosen.profile.layers
    assert sorted(layers) == list(range(profile.num_layers))


def test_every_tensor_that_crosses_a_cut_is_in_its_messages() -> None:
    # Behind the second cell's end, a cut carries the end of the first one, too.
    profile = cells(4)
    problem, _ = canonical(on_three(profile))
    names = [layer.name for layer in problem.profile.layers]
    cut = names.index("joined-1") + 1
    sent = {"joined-0", "joined-1"}
    assert problem.crossing_bytes[cut] == sum(layer.output_bytes for layer in profile.layers if layer.name in sent)
    found = LayoutEvaluator(problem).simulate(Layout((0, cut, problem.num_layers), ((0,), (1,))))
    assert found is not None
    carried = sum(cost for cost in found.timing.cost.edge_bytes.values())
    assert carried == problem.crossing_bytes[cut]
