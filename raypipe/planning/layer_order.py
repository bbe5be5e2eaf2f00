"""Lists of a model's layers that depend on its graph alone, so that no plan depends on how the list interleaves branches.

Planners cut a list of layers into stages. A chain has one list. A graph has many, all in topological order; two are tried. One has few
bytes that cross its places. Of three it is the one with the fewest: branches behind each other by the work from them to the end; from the
outputs back to what they need; step by step so that the fewest bytes are left to hand over. With skips and joins, a list by work would
carry tensors along that it could hand over at once. In the other list, all layers stand by the work from them to the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from raypipe.artifacts.profile import ModelProfile
from raypipe.planning.branch_placement import Layers
from raypipe.planning.problem import Problem

_STEPS = 50  # Lengths of paths to the end that are told apart.


def canonical(problem: Problem) -> tuple[Problem, Layers]:
    """Return the problem with its layers listed so that few bytes cross from each to those behind it, and the former number of each."""
    if _has_one_list(problem):
        return problem, tuple(range(problem.num_layers))
    by_work = _listed_by_work(problem, follow_branches=True)
    candidates = (by_work, depth_first(problem.profile, by_name=True), _fewest_bytes_first(problem.profile))
    found = [(listed(problem, layers), layers) for layers in candidates]
    return min(found, key=lambda one: float(one[0].crossing_bytes.sum()))


def depth_first(profile: ModelProfile, *, by_name: bool = False) -> Layers:
    """Return the layers from the outputs back, the longer path before the shorter; of equal ones, by number or `by_name`.

    A branch ends before the next begins, a layer without inputs comes right before its consumer, one without consumers right after its
    producer. No tensor crosses a place that it need not. In a model that begins with one layer, the places that one tensor crosses are the
    same in any order: those of its dominators.
    """
    producers: list[set[int]] = [set() for _ in profile.layers]
    for producer, consumer, _ in profile.edges():
        producers[consumer].add(producer)
    # For each layer, the set of its ancestors as bits.
    before: list[int] = []
    for of_layer in producers:
        ancestors = 0
        for producer in of_layer:
            ancestors |= before[producer] | 1 << producer
        before.append(ancestors)

    def rank(layer: int) -> tuple[int, str, int]:
        return before[layer].bit_count(), profile.layers[layer].name if by_name else "", layer

    consumed = {producer for of_layer in producers for producer in of_layer}
    outputs = sorted((layer for layer in range(profile.num_layers) if layer not in consumed), key=rank)
    # Edges lead backwards, and are walked in the order of insertion; of several outputs, the one with the fewest ancestors is first.
    graph: nx.DiGraph[int] = nx.DiGraph()
    start = profile.num_layers
    graph.add_edges_from((start, layer) for layer in outputs)
    for layer, of_layer in enumerate(producers):
        by_path = sorted(of_layer, key=lambda other: (-before[other].bit_count(), *rank(other)[1:]))
        graph.add_edges_from((layer, producer) for producer in by_path)
    return tuple(layer for layer in nx.dfs_postorder_nodes(graph, start) if layer != start)


def lists(problem: Problem) -> Iterator[Layers]:
    """Yield the lists worth trying: the problem's own, and one that interleaves branches by work."""
    own = tuple(range(problem.num_layers))
    yield own
    if not _has_one_list(problem):
        interleaved = _listed_by_work(problem, follow_branches=False)
        if interleaved != own:
            yield interleaved


def _fewest_bytes_first(profile: ModelProfile) -> Layers:
    """Return the list in which the next layer is the one behind which the fewest bytes wait for others; of equal ones, by name."""
    sources: list[set[int]] = [set() for _ in profile.layers]
    readers: list[set[int]] = [set() for _ in profile.layers]
    num_bytes = [0] * profile.num_layers
    for producer, consumer, of_edge in profile.edges():
        sources[consumer].add(producer)
        readers[producer].add(consumer)
        num_bytes[producer] = max(num_bytes[producer], of_edge)
    left = [len(of_layer) for of_layer in sources]
    ready = {layer for layer, count in enumerate(left) if not count}
    found: list[int] = []

    def rank(layer: int) -> tuple[int, str]:
        freed = sum(num_bytes[source] for source in sources[layer] if readers[source] == {layer})
        return (num_bytes[layer] if readers[layer] else 0) - freed, profile.layers[layer].name

    while ready:
        layer = min(ready, key=rank)
        ready.remove(layer)
        found.append(layer)
        for source in sources[layer]:
            readers[source].discard(layer)
        for reader in tuple(readers[layer]):
            left[reader] -= 1
            if not left[reader]:
                ready.add(reader)
    return tuple(found)


def _has_one_list(problem: Problem) -> bool:
    """Return whether each layer needs the one before it."""
    return set(itertools.pairwise(range(problem.num_layers))) <= set(problem.edges)


def listed(problem: Problem, layers: Layers) -> Problem:
    """Return the problem with its layers, and the edges between them, in another topological order."""
    profile = problem.profile
    position = {profile.layers[layer].name: at for at, layer in enumerate(layers)}
    edges = sorted(profile.named_edges or (), key=lambda edge: (position[edge.producer], position[edge.consumer]))
    in_order = replace(
        profile,
        layers=tuple(profile.layers[layer] for layer in layers),
        named_edges=tuple(edges) if profile.named_edges is not None else None,
        device_kinds={kind: tuple(times[layer] for layer in layers) for kind, times in profile.device_kinds.items()},
    )
    return replace(problem, profile=in_order)


def _listed_by_work(problem: Problem, *, follow_branches: bool) -> Layers:
    """Return the list in which the layer with the most work to the end is next, or one that continues the branch of the last."""
    profile = problem.profile
    targets: list[list[int]] = [[] for _ in profile.layers]
    num_sources = [0] * problem.num_layers
    for producer, consumer in problem.edges:
        targets[producer].append(consumer)
        num_sources[consumer] += 1
    left_s = problem.layer_s.mean(axis=0).sum(axis=0).tolist()
    for layer in reversed(range(problem.num_layers)):
        left_s[layer] += max((left_s[target] for target in targets[layer]), default=0.0)
    longest_s = max(left_s) or 1.0
    # Paths that are about as long are ordered by name: noise of measurements must not turn the list.
    steps = [round(_STEPS * seconds / longest_s) for seconds in left_s]
    ready = {layer for layer, count in enumerate(num_sources) if not count}
    found: list[int] = []

    def rank(layer: int) -> tuple[bool, bool, int, str]:
        last = found[-1] if found and follow_branches else None
        follows = last is not None and layer in targets[last]
        stays = follows and last is not None and profile.layers[layer].branch == profile.layers[last].branch
        return not follows, not stays, -steps[layer], profile.layers[layer].name

    while ready:
        layer = min(ready, key=rank)
        ready.remove(layer)
        found.append(layer)
        for target in targets[layer]:
            num_sources[target] -= 1
            if not num_sources[target]:
                ready.add(target)
    return tuple(found)
