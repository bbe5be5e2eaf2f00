r"""Turns the DAG of a `ModelProfile` into a chain: its layers are merged between the places where few tensors cross.

    a ---> b ---> d ---> e        a | b c d | e       one tensor crosses behind a, one behind d; behind b cross two, a's and b's
      \--> c ---/

Layers are put in an order first: depth first from the outputs back, the longer way before the shorter. So a branch is done before
the next begins, what nothing feeds (a mask, an embedding of targets) comes right before the layer that takes it, and what nobody
takes right behind the one that makes it; neither crosses a place that it need not. Every place of the order where at most
`max_tensors` tensors cross is a cut point. Of a model that begins with one layer, the cut points with one tensor are the layers that
all ways from there to the output pass (its dominators), whatever the order.

Layers that cost nothing, such as views, are no stages: of the places before and behind them, the one with fewer bytes is a cut point.

Where several cross, the chain hands all of them on from layer to layer, although a tensor for a later layer need not stop on its
way; the tensors of a layer count as often as different layers make them, not as often as they are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx

from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, held_once, most_working_bytes
from raypipe.errors import InputError


@dataclass(frozen=True)
class Chain:
    """A chain that stands for a DAG.

    Attributes:
        profile: of the chain; times, saved and parameter bytes are those of the merged layers together, output bytes what crosses.
        members: for each of its layers, the layers of the DAG by index, in the order in which they compute.
        num_tensors: how many tensors cross behind each of its layers but the last.
    """

    profile: ModelProfile
    members: tuple[tuple[int, ...], ...]
    num_tensors: tuple[int, ...]


@dataclass(frozen=True)
class _Crossing:
    """What crosses behind a place of the order."""

    num_tensors: int
    bytes: int


def linearize(profile: ModelProfile, *, max_tensors: int | None = 1) -> Chain:
    """The chain of a model's layers, merged between its cut points. Time O(layers * edges).

    A model that is a chain stays as it is, but for layers that cost nothing. Tensors of no bytes cross unseen.

    Args:
        profile: of the model.
        max_tensors: the most tensors that may cross a cut point; `None` for any number.

    Raises:
        InputError: less than one tensor is asked for.
    """
    if max_tensors is not None and max_tensors < 1:
        raise InputError(f"max_tensors: expected at least 1 tensor to cross a cut point, got {max_tensors}")
    order = _order(profile)
    crossings = _crossings(profile, order)
    ends = [place for place, crossing in enumerate(crossings) if max_tensors is None or crossing.num_tensors <= max_tensors]
    ends = _useful([_costs(profile, layer) for layer in order], ends, crossings)
    starts = [0, *(end + 1 for end in ends)]
    members = tuple(tuple(order[start : end + 1]) for start, end in zip(starts, [*ends, len(order) - 1], strict=True))
    outputs = [*(crossings[end].bytes for end in ends), profile.layers[order[-1]].output_bytes]
    tied = _tied(profile, members)
    return Chain(
        profile=ModelProfile(
            name=profile.name,
            microbatch_size=profile.microbatch_size,
            layers=tuple(
                _merged([profile.layers[layer] for layer in group], output_bytes, tied[group[0]])
                for group, output_bytes in zip(members, outputs, strict=True)
            ),
            device_kinds={
                kind: tuple(_added([times[layer] for layer in group]) for group in members) for kind, times in profile.device_kinds.items()
            },
        ),
        members=members,
        num_tensors=tuple(crossings[end].num_tensors for end in ends),
    )


def _order(profile: ModelProfile) -> list[int]:
    """A topological order in which tensors live short."""
    producers: list[set[int]] = [set() for _ in profile.layers]
    for producer, consumer, _ in profile.edges():
        producers[consumer].add(producer)
    # Sets of layers as the bits of numbers: all that leads to each layer.
    before: list[int] = []
    for of_layer in producers:
        found = 0
        for producer in of_layer:
            found |= before[producer] | 1 << producer
        before.append(found)
    taken = {producer for of_layer in producers for producer in of_layer}
    outputs = sorted((layer for layer in range(profile.num_layers) if layer not in taken), key=lambda layer: before[layer].bit_count())
    # Edges lead backwards, and are walked in the order in which they are added; of several outputs, the nearest to the begin is first.
    graph: nx.DiGraph[int] = nx.DiGraph()
    start = profile.num_layers
    graph.add_edges_from((start, layer) for layer in outputs)
    for layer, of_layer in enumerate(producers):
        graph.add_edges_from((layer, producer) for producer in sorted(of_layer, key=lambda other: (-before[other].bit_count(), other)))
    return [layer for layer in nx.dfs_postorder_nodes(graph, start) if layer != start]


def _crossings(profile: ModelProfile, order: Sequence[int]) -> list[_Crossing]:
    """What crosses behind each place of an order but the last: of a layer's edges across, the widest."""
    position = {layer: place for place, layer in enumerate(order)}
    takers: list[list[tuple[int, int]]] = [[] for _ in order]
    for producer, consumer, num_bytes in profile.edges():
        takers[position[producer]].append((position[consumer], num_bytes))
    num_tensors, total = [0] * (len(order) - 1), [0] * (len(order) - 1)
    for place, of_layer in enumerate(takers):
        last = max((taker for taker, _ in of_layer), default=place)
        for behind in range(place, last):
            if widest := max(num_bytes for taker, num_bytes in of_layer if taker > behind):
                num_tensors[behind] += 1
                total[behind] += widest
    return [_Crossing(*pair) for pair in zip(num_tensors, total, strict=True)]


def _costs(profile: ModelProfile, layer: int) -> bool:
    """Whether a layer takes time or memory."""
    found = profile.layers[layer]
    kinds = [found.times, *(times[layer] for times in profile.device_kinds.values())]
    return any(times.forward_s or times.backward_s for times in kinds) or bool(found.saved_bytes or found.parameter_bytes or found.update_s)


def _useful(costs: Sequence[bool], ends: Iterable[int], crossings: Sequence[_Crossing]) -> list[int]:
    """The cut points with something to do between them; of those with nothing between, the one with the fewest bytes."""
    done = list(accumulate(costs, initial=0))
    kept: list[int] = []
    for end in ends:
        if done[end + 1] in {0, done[-1]}:
            continue
        if kept and done[kept[-1] + 1] == done[end + 1]:
            if crossings[end].bytes < crossings[kept[-1]].bytes:
                kept[-1] = end
        else:
            kept.append(end)
    return kept


def _added(times: Iterable[LayerTimes | LayerProfile]) -> LayerTimes:
    found = list(times)
    return LayerTimes(
        forward_s=sum(layer.forward_s for layer in found),
        backward_s=sum(layer.backward_s for layer in found),
        weight_grad_s=sum(layer.weight_grad_s for layer in found),
    )


def _merged(layers: Sequence[LayerProfile], output_bytes: int, tied: str | None) -> LayerProfile:
    """One layer that stands for several."""
    times = _added(layers)
    weighted = [layer for layer in layers if layer.parameter_bytes]
    saved = [layer.weight_grad_saved_bytes for layer in layers]
    held = held_once(layers)
    updates = [layer.update_s for layer in held]
    copies = [layer.low_precision_bytes for layer in held]
    is_worked = any(layer.working_bytes is not None for layer in layers)
    return LayerProfile(
        name=layers[0].name if len(layers) == 1 else f"{layers[0].name}..{layers[-1].name}",
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_grad_s=min(times.weight_grad_s, times.backward_s),
        output_bytes=output_bytes,
        saved_bytes=sum(layer.saved_bytes for layer in layers),
        parameter_bytes=sum(layer.parameter_bytes for layer in held),
        frozen_bytes=sum(layer.frozen_bytes or 0 for layer in held) or None,
        # A layer that was not measured may keep all.
        weight_grad_saved_bytes=None
        if all(amount is None for amount in saved)
        else sum(layer.saved_bytes if amount is None else amount for layer, amount in zip(layers, saved, strict=True)),
        tied=tied,
        tied_bytes=_tied_bytes(layers) if tied is not None else None,
        gradient_rows=weighted[0].gradient_rows if len(weighted) == 1 else None,
        update_s=None if all(amount is None for amount in updates) else sum(amount or 0.0 for amount in updates),
        low_precision_bytes=None if all(amount is None for amount in copies) else sum(amount or 0 for amount in copies),
        working_bytes=most_working_bytes(layers) if is_worked else None,
        input_grad_working_bytes=sum(layer.input_grad_working_bytes or 0 for layer in layers) if is_worked else None,
    )


def _tied_bytes(layers: Sequence[LayerProfile]) -> int:
    """The bytes that layers which stand for one share with others; what they share by one text counts once."""
    by_text: dict[str, int] = {}
    for layer in layers:
        if layer.tied is not None:
            by_text[layer.tied] = max(by_text.get(layer.tied, 0), layer.shared_bytes)
    return sum(by_text.values())


def _tied(profile: ModelProfile, members: Sequence[Sequence[int]]) -> dict[int, str | None]:
    """For the first layer of each group, what it shares a weight by; ties that meet in a group become one, inner ones vanish."""
    graph: nx.Graph[int | str] = nx.Graph()
    for number, group in enumerate(members):
        graph.add_edges_from((number, tied) for layer in group if (tied := profile.layers[layer].tied) is not None)
    found: dict[int, str | None] = {group[0]: None for group in members}
    for together in nx.connected_components(graph):
        groups = [item for item in together if isinstance(item, int)]
        if len(groups) > 1:
            text = "+".join(sorted(item for item in together if isinstance(item, str)))
            found |= {members[number][0]: text for number in groups}
    return found
