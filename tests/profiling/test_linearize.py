"""The chain of a DAG costs what the DAG costs, and is cut where few tensors cross."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, NamedEdge
from raypipe.errors import InputError
from raypipe.profiling.linearize import finer_chains, linearize
from raypipe.profiling.pipedream import read_pipedream

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "pipedream_profiles"
NUM_CHAIN_LAYERS = {"vgg16": 38, "resnet50": 38, "gnmt": 9, "inception_v3": 32}
SUMS: tuple[Callable[[LayerProfile], float], ...] = (
    lambda layer: layer.forward_s,
    lambda layer: layer.backward_s,
    lambda layer: layer.weight_grad_s,
    lambda layer: layer.saved_bytes,
    lambda layer: layer.parameter_bytes,
    lambda layer: layer.update_s or 0.0,
)


def layer(name: str, *, output_bytes: int = 10, forward_s: float = 1.0, tied: str | None = None) -> LayerProfile:
    return LayerProfile(
        name=name,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        weight_grad_s=forward_s,
        output_bytes=output_bytes,
        saved_bytes=round(7 * forward_s),
        parameter_bytes=round(5 * forward_s),
        tied=tied,
    )


def dag(edges: str, **changed: LayerProfile) -> ModelProfile:
    """A model of layers with names of one letter: `ab ac` for edges from a to b and to c."""
    pairs = edges.split()
    names = sorted(set("".join(pairs)))
    return ModelProfile(
        name="dag",
        microbatch_size=1,
        layers=tuple(changed.get(name, layer(name)) for name in names),
        named_edges=tuple(NamedEdge(producer=pair[0], consumer=pair[1]) for pair in pairs),
    )


def names(profile: ModelProfile) -> list[str]:
    return [layer.name for layer in profile.layers]


@st.composite
def dags(draw: st.DrawFn, *, one_source: bool = False) -> ModelProfile:
    """Layers that cost something, each fed by some before it; the last takes all that nobody else takes."""
    num_layers = draw(st.integers(1, 12))
    pairs = set()
    for consumer in range(1, num_layers):
        least = 1 if one_source else 0
        pairs |= {(producer, consumer) for producer in draw(st.sets(st.integers(0, consumer - 1), min_size=least, max_size=3))}
    taken = {producer for producer, _ in pairs}
    pairs |= {(producer, num_layers - 1) for producer in range(num_layers - 1) if producer not in taken}
    return ModelProfile(
        name="random",
        microbatch_size=1,
        layers=tuple(
            replace(layer(f"layer{index}", output_bytes=draw(st.integers(1, 9))), update_s=draw(st.sampled_from([None, 0.5])))
            for index in range(num_layers)
        ),
        named_edges=tuple(
            NamedEdge(producer=f"layer{a}", consumer=f"layer{b}", bytes=draw(st.none() | st.integers(1, 20))) for a, b in sorted(pairs)
        ),
    )


def check_chain(profile: ModelProfile, max_tensors: int | None) -> None:
    """Holds a chain against its DAG, by sets of layers and without its order of work."""
    chain = linearize(profile, max_tensors=max_tensors)
    assert chain.profile.named_edges is None
    assert sorted(itertools.chain(*chain.members)) == list(range(profile.num_layers))
    for amount in SUMS:
        assert sum(map(amount, chain.profile.layers)) == pytest.approx(sum(map(amount, profile.layers)))
    done: set[int] = set()
    for of_chain, group, num_tensors in zip(chain.profile.layers, chain.members[:-1], chain.num_tensors, strict=False):
        done |= set(group)
        assert not any(edge.consumer in done and edge.producer not in done for edge in profile.edges())
        crossing: dict[int, int] = {}
        for edge in profile.edges():
            if edge.producer in done and edge.consumer not in done and edge.bytes:
                crossing[edge.producer] = max(crossing.get(edge.producer, 0), edge.bytes)
        assert of_chain.output_bytes == sum(crossing.values())
        assert num_tensors == len(crossing)
        assert max_tensors is None or num_tensors <= max_tensors
    for group in chain.members:
        place = {layer: position for position, layer in enumerate(group)}
        assert all(
            place[edge.producer] < place[edge.consumer] for edge in profile.edges() if edge.producer in place and edge.consumer in place
        )


@given(dags(), st.none() | st.integers(1, 4))
def test_a_chain_costs_what_its_graph_costs(profile: ModelProfile, max_tensors: int | None) -> None:
    check_chain(profile, max_tensors)


@given(dags(one_source=True))
def test_with_one_source_every_layer_that_all_ways_pass_ends_a_layer_of_the_chain(profile: ModelProfile) -> None:
    graph = nx.DiGraph([(edge.producer, edge.consumer) for edge in profile.edges()])
    graph.add_node(0)
    above = nx.immediate_dominators(graph, 0)
    last = profile.num_layers - 1
    passed = [last]
    while passed[-1]:
        passed.append(above[passed[-1]])
    assert [group[-1] for group in linearize(profile).members] == passed[::-1]


@pytest.mark.parametrize("max_tensors", [1, 2, 3, None])
@pytest.mark.parametrize("name", NUM_CHAIN_LAYERS)
def test_the_bundled_profiles_keep_their_costs(name: str, max_tensors: int | None) -> None:
    check_chain(read_pipedream(FOLDER / f"{name}.graph.txt", microbatch_size=128), max_tensors)


@pytest.mark.parametrize(("name", "num_layers"), NUM_CHAIN_LAYERS.items())
def test_the_bundled_profiles_have_so_many_cut_points(name: str, num_layers: int) -> None:
    graph = read_pipedream(FOLDER / f"{name}.graph.txt", microbatch_size=128)
    counts = [linearize(graph, max_tensors=most).profile.num_layers for most in (1, 2, 3, 4, None)]
    assert counts[0] == num_layers
    assert counts == sorted(counts)


def test_the_models_of_the_planning_benchmark_are_chains() -> None:
    models = runpy.run_path(str(FOLDER.parents[1] / "models.py"))["models"]()
    assert set(models) == {*NUM_CHAIN_LAYERS, "gpt-24", "gpt-96", "bert-large", "bert-48"}
    assert all(model.named_edges is None for model in models.values())
    # 24 B S H^2 operations of weights and 4 B S^2 H of scores, at 125e12 a second.
    block = models["gpt-24"].layers[1]
    assert block.forward_s == pytest.approx((24 * 8 * 1024 * 1024**2 + 4 * 8 * 1024**2 * 1024) / 125e12)
    assert block.backward_s == pytest.approx(2 * block.forward_s)
    # 24 blocks, a table of tokens and one of positions, and the head: GPT-2 medium's 355 million, and the head that it shares.
    numbers = sum(layer.parameter_bytes for layer in models["gpt-24"].layers) / 2
    assert numbers == pytest.approx(355e6 + 50257 * 1024, rel=0.01)


def test_branches_become_one_layer() -> None:
    chain = linearize(dag("ab ac bd cd de", a=layer("a", output_bytes=3), d=layer("d", output_bytes=4)))
    assert names(chain.profile) == ["a", "b..d", "e"]
    assert [layer.output_bytes for layer in chain.profile.layers] == [3, 4, 10]
    assert chain.profile.layers[1].times == LayerTimes(forward_s=3.0, backward_s=6.0, weight_grad_s=3.0)
    assert chain.members == ((0,), (1, 2, 3), (4,))
    assert chain.num_tensors == (1, 1)


def test_where_several_tensors_may_cross_branches_are_cut_too() -> None:
    chain = linearize(dag("ab ac bd cd de", a=layer("a", output_bytes=3)), max_tensors=2)
    assert names(chain.profile) == ["a", "b", "c", "d", "e"]
    assert chain.num_tensors == (1, 2, 2, 1)
    assert [layer.output_bytes for layer in chain.profile.layers] == [3, 13, 20, 10, 10]


def test_a_tensor_that_several_layers_take_crosses_once() -> None:
    assert linearize(dag("ab ac ad bd cd")).profile.layers[0].output_bytes == 10


def test_a_tensor_is_as_wide_as_its_widest_taker_behind_the_cut_needs() -> None:
    model = dag("ab ac bc")
    assert model.named_edges is not None
    wide = replace(
        model, named_edges=(replace(model.named_edges[0], bytes=99), replace(model.named_edges[1], bytes=5), model.named_edges[2])
    )
    assert [layer.output_bytes for layer in linearize(wide, max_tensors=2).profile.layers] == [99, 15, 10]


def test_what_nothing_feeds_comes_right_before_the_layer_that_takes_it() -> None:
    # a, the mask, stands first in the profile; b c d are cut points all the same.
    assert names(linearize(dag("bc cd de ae ef")).profile) == ["b", "c", "d", "a..e", "f"]


def test_what_nobody_takes_comes_right_behind_the_layer_that_makes_it() -> None:
    assert names(linearize(dag("ab bc cd bz")).profile) == ["a", "b", "z", "c", "d"]


def test_a_chain_stays_as_it_is() -> None:
    model = ModelProfile.uniform(5, output_bytes=3, saved_bytes=4, parameter_bytes=5)
    assert linearize(model).profile == model


def test_one_layer_is_a_chain() -> None:
    model = ModelProfile.uniform(1)
    assert linearize(model).profile == model


def test_tensors_without_bytes_cross_unseen() -> None:
    chain = linearize(dag("ab bc ac cd", a=layer("a", output_bytes=0)))
    assert names(chain.profile) == ["a", "b", "c", "d"]
    assert [layer.output_bytes for layer in chain.profile.layers] == [0, 10, 10, 10]


@pytest.mark.parametrize(("view_bytes", "expected"), [(4, ["a..b", "c"]), (10, ["a", "b..c"]), (40, ["a", "b..c"])])
def test_around_a_layer_that_costs_nothing_the_cheaper_place_is_cut(view_bytes: int, expected: list[str]) -> None:
    assert names(linearize(dag("ab bc", b=layer("b", forward_s=0.0, output_bytes=view_bytes))).profile) == expected


@pytest.mark.parametrize("free", ["a", "d"])
def test_no_stage_is_made_of_layers_that_cost_nothing(free: str) -> None:
    assert linearize(dag("ab bc cd", **{free: layer(free, forward_s=0.0)})).profile.num_layers == 3


def test_kinds_of_devices_are_merged_alike() -> None:
    model = dag("ab ac bd cd")
    slow = tuple(LayerTimes(forward_s=10.0 * index, backward_s=20.0 * index, weight_grad_s=5.0 * index) for index in range(4))
    chain = linearize(replace(model, device_kinds={"cpu-slow": slow})).profile
    assert chain.for_kind("cpu-slow") == (slow[0], LayerTimes(forward_s=60.0, backward_s=120.0, weight_grad_s=30.0))


@pytest.mark.parametrize(("amounts", "expected"), [((None, None, None), None), ((3, None, 4), 14), ((0, 0, 0), 0)])
def test_what_waits_for_weight_gradients_is_taken_whole_where_it_was_not_measured(
    amounts: Sequence[int | None], expected: int | None
) -> None:
    layers = {name: replace(layer(name), weight_grad_saved_bytes=amount) for name, amount in zip("bcd", amounts, strict=True)}
    assert linearize(dag("ab ac bd cd de", **layers)).profile.layers[1].weight_grad_saved_bytes == expected


def test_rows_of_a_gradient_outlive_a_merge_with_layers_without_weights() -> None:
    table = replace(layer("b"), gradient_rows=3)
    bare = {name: replace(layer(name), parameter_bytes=0) for name in "cd"}
    assert linearize(dag("ab ac bd cd", b=table, **bare)).profile.layers[1].gradient_rows == 3
    assert linearize(dag("ab ac bd cd", b=table)).profile.layers[1].gradient_rows is None


def test_rows_that_merged_layers_look_up_are_added() -> None:
    table = replace(layer("b"), gradient_rows=3, looked_up_rows=5, looked_up_bytes=layer("b").parameter_bytes)
    merged = linearize(dag("ab ac bd cd", b=table, c=replace(table, name="c"))).profile.layers[1]
    assert (merged.gradient_rows, merged.looked_up_rows, merged.looked_up_bytes) == (6, 10, 2 * table.parameter_bytes)
    one = linearize(dag("ab ac bd cd", b=table)).profile.layers[1]
    assert (one.gradient_rows, one.looked_up_rows, one.looked_up_bytes) == (3, 5, table.parameter_bytes)
    assert merged.reread_share is None
    shares = {"b": replace(table, reread_share=0.5), "c": replace(table, name="c", gradient_rows=1, reread_share=0.1)}
    one = linearize(dag("ab ac bd cd", **shares)).profile.layers[1]
    assert one.reread_share == pytest.approx((3 * 0.5 + 0.1) / 4)


def ties(edges: str, **tied: str) -> list[str | None]:
    return [
        of_chain.tied for of_chain in linearize(dag(edges, **{name: layer(name, tied=tie) for name, tie in tied.items()})).profile.layers
    ]


def test_ties_between_merged_layers_stay() -> None:
    assert ties("ab ac bd cd de", b="w", e="w") == [None, "w", "w"]


def test_a_tie_within_one_merged_layer_is_none() -> None:
    assert ties("ab ac bd cd de", b="w", c="w") == [None, None, None]


def test_ties_that_meet_in_a_merged_layer_become_one() -> None:
    assert ties("ab ac bd cd de", a="v", b="w", c="v", e="w") == ["v+w", "v+w", "v+w"]


def test_merged_layers_share_what_theirs_share() -> None:
    shared = {name: replace(layer(name, tied=tie), tied_bytes=size) for name, tie, size in (("b", "v", 3), ("c", "w", 2), ("e", "v", 3))}
    profile = linearize(dag("ab ac bd cd de ef", f=replace(layer("f", tied="w"), tied_bytes=2), **shared)).profile
    assert [of_chain.shared_bytes for of_chain in profile.layers] == [0, 5, 3, 2]


def test_less_than_one_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="expected at least 1 tensor to cross a cut point, got 0"):
        linearize(dag("ab"), max_tensors=0)


def test_a_weight_that_merged_layers_share_is_there_and_stepped_once() -> None:
    towers = {name: replace(layer(name, tied=tie), update_s=0.5) for name, tie in (("a", None), ("b", "w"), ("c", "w"), ("d", None))}
    chain = linearize(dag("ab ac bd cd", **towers)).profile
    assert sum(one.parameter_bytes for one in chain.layers) == 15
    assert sum(one.update_s or 0.0 for one in chain.layers) == 1.5


def test_finer_chains_have_a_shorter_longest_layer_each_and_are_what_linearize_gives() -> None:
    profile = read_pipedream(FOLDER / "inception_v3.graph.txt", microbatch_size=64)
    chain = linearize(profile)
    finer = finer_chains(profile, chain, max_tensors=1)
    shares = [chain.longest_share, *(other.longest_share for other in finer.values())]
    assert 1 not in finer
    assert len(shares) > 1
    assert all(later < 0.95 * earlier for earlier, later in itertools.pairwise(shares))
    assert all(other == linearize(profile, max_tensors=number) for number, other in finer.items())
    longest_s = max(layer.forward_s + layer.backward_s for layer in chain.profile.layers)
    assert chain.longest_share == pytest.approx(longest_s / sum(layer.forward_s + layer.backward_s for layer in profile.layers))


def test_a_chain_of_all_layers_has_no_finer_one() -> None:
    profile = read_pipedream(FOLDER / "vgg16.graph.txt", microbatch_size=64)
    assert finer_chains(profile, linearize(profile), max_tensors=1) == {}
