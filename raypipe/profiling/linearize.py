r"""Turns the DAG of a `ModelProfile` into a chain: layers are merged between cut points, places where few tensors cross.

a ---> b ---> d ---> e        a | b c d | e       one tensor crosses behind a, one behind d; behind b cross two, a's and b's
  \--> c ---/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx

from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, held_once, most_working_bytes
from raypipe.errors import InputError
from raypipe.planning.layer_order import depth_first


@dataclass(frozen=True)
class Chain:
    """A chain that stands for a DAG; it passes all tensors that cross from layer to layer, also those for a later layer.

    Attributes:
        members: For each layer of the chain, the layers of the DAG in computing order.
        num_tensors: Number of tensors that cross behind each layer but the last.
    """

    profile: ModelProfile
    members: tuple[tuple[int, ...], ...]
    num_tensors: tuple[int, ...]

    @property
    def longest_share(self) -> float:
        """Part of the model's time that its longest layer takes, and so the least that a stage of equal devices takes."""
        times_s = [layer.forward_s + layer.backward_s for layer in self.profile.layers]
        return max(times_s) / sum(times_s) if any(times_s) else 0.0


def finer_chains(profile: ModelProfile, chain: Chain, *, max_tensors: int, most: int = 8) -> dict[int, Chain]:
    """Return, by the number of tensors that may cross between layers, the chains whose longest layer is shorter by a twentieth or more."""
    finer: dict[int, Chain] = {}
    for number in range(max_tensors + 1, most + 1):
        other = linearize(profile, max_tensors=number)
        if other.longest_share < 0.95 * chain.longest_share:
            chain = finer[number] = other
    return finer


def linearize(profile: ModelProfile, *, max_tensors: int | None = 1) -> Chain:
    """Merge layers between the places where at most `max_tensors` (`None`: any number of) tensors cross. Time O(layers * edges).

    Layers that cost nothing, such as views, are merged with others. Tensors of no bytes do not count.

    Raises:
        InputError: `max_tensors` is below 1.
    """
    if max_tensors is not None and max_tensors < 1:
        raise InputError(f"max_tensors: expected at least 1 tensor to cross a cut point, got {max_tensors}")
    order = depth_first(profile)
    num_tensors, num_bytes = _crossings(profile, order)
    ends = [place for place, number in enumerate(num_tensors) if max_tensors is None or number <= max_tensors]
    ends = _useful([_costs(profile, layer) for layer in order], ends, num_bytes)
    starts = [0, *(end + 1 for end in ends)]
    members = tuple(tuple(order[start : end + 1]) for start, end in zip(starts, [*ends, len(order) - 1], strict=True))
    outputs = [*(num_bytes[end] for end in ends), profile.layers[order[-1]].output_bytes]
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
                kind: tuple(LayerTimes.of([times[layer] for layer in group]) for group in members)
                for kind, times in profile.device_kinds.items()
            },
            loss_couples_rows=profile.loss_couples_rows,
        ),
        members=members,
        num_tensors=tuple(num_tensors[end] for end in ends),
    )


def _crossings(profile: ModelProfile, order: Sequence[int]) -> tuple[list[int], list[int]]:
    # Tensors and bytes that cross behind each place but the last. A tensor counts once for its producer, with its widest edge.
    position = {layer: place for place, layer in enumerate(order)}
    consumers: list[list[tuple[int, int]]] = [[] for _ in order]
    for producer, consumer, num_bytes in profile.edges():
        consumers[position[producer]].append((position[consumer], num_bytes))
    num_tensors, total = [0] * (len(order) - 1), [0] * (len(order) - 1)
    for place, of_layer in enumerate(consumers):
        last = max((consumer for consumer, _ in of_layer), default=place)
        for behind in range(place, last):
            if widest := max(num_bytes for consumer, num_bytes in of_layer if consumer > behind):
                num_tensors[behind] += 1
                total[behind] += widest
    return num_tensors, total


def _costs(profile: ModelProfile, layer: int) -> bool:
    one = profile.layers[layer]
    kinds = [one.times, *(times[layer] for times in profile.device_kinds.values())]
    return any(times.forward_s or times.backward_s for times in kinds) or bool(one.saved_bytes or one.parameter_bytes or one.update_s)


def _useful(costs: Sequence[bool], ends: Iterable[int], num_bytes: Sequence[int]) -> list[int]:
    # Of cut points with no work between them, the one with the fewest bytes.
    done = list(accumulate(costs, initial=0))
    kept: list[int] = []
    for end in ends:
        if done[end + 1] in {0, done[-1]}:
            continue
        if kept and done[kept[-1] + 1] == done[end + 1]:
            if num_bytes[end] < num_bytes[kept[-1]]:
                kept[-1] = end
        else:
            kept.append(end)
    return kept


def _merged(layers: Sequence[LayerProfile], output_bytes: int, tied: str | None) -> LayerProfile:
    times = LayerTimes.of(layers)
    weighted = [layer for layer in layers if layer.parameter_bytes]
    saved = [layer.weight_grad_saved_bytes for layer in layers]
    held = held_once(layers)
    updates = [layer.update_s for layer in held if layer.update_s is not None]
    states = [layer.state_bytes for layer in held if layer.state_bytes is not None]
    copies = [layer.low_precision_bytes for layer in held if layer.low_precision_bytes is not None]
    tables = [layer for layer in held if layer.gradient_rows is not None and layer.looked_up_rows is not None]
    is_worked = any(layer.working_bytes is not None for layer in layers)
    return LayerProfile(
        name=layers[0].name if len(layers) == 1 else f"{layers[0].name}..{layers[-1].name}",
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_grad_s=min(times.weight_grad_s, times.backward_s),
        split_s=times.split_s,
        fixed_share=times.fixed_share,
        output_bytes=output_bytes,
        saved_bytes=sum(layer.saved_bytes for layer in layers),
        parameter_bytes=sum(layer.parameter_bytes for layer in held),
        frozen_bytes=sum(layer.frozen_bytes or 0 for layer in held) or None,
        # A layer without this measurement may keep everything.
        weight_grad_saved_bytes=None
        if all(amount is None for amount in saved)
        else sum(layer.saved_bytes if amount is None else amount for layer, amount in zip(layers, saved, strict=True)),
        tied=tied,
        tied_bytes=_tied_bytes(layers) if tied is not None else None,
        gradient_rows=_total(tables, "gradient_rows") if tables else weighted[0].gradient_rows if len(weighted) == 1 else None,
        looked_up_rows=_total(tables, "looked_up_rows"),
        looked_up_bytes=_total(tables, "looked_up_bytes"),
        reread_share=_reread_share(tables),
        update_s=sum(updates) if updates else None,
        state_bytes=sum(states) if len(states) == len(held) else None,
        low_precision_bytes=sum(copies) if copies else None,
        working_bytes=most_working_bytes(layers) if is_worked else None,
        input_grad_working_bytes=sum(layer.input_grad_working_bytes or 0 for layer in layers) if is_worked else None,
    )


def _total(layers: Sequence[LayerProfile], field: str) -> int | None:
    return sum(getattr(layer, field) or 0 for layer in layers) or None


def _reread_share(tables: Sequence[LayerProfile]) -> float | None:
    num_rows, shares = _total(tables, "gradient_rows"), [table.reread_share for table in tables]
    if num_rows is None or None in shares:
        return None
    return sum((table.gradient_rows or 0) * (table.reread_share or 0.0) for table in tables) / num_rows


def _tied_bytes(layers: Sequence[LayerProfile]) -> int:
    # Layers that share one weight count it once.
    by_text: dict[str, int] = {}
    for layer in layers:
        if layer.tied is not None:
            by_text[layer.tied] = max(by_text.get(layer.tied, 0), layer.shared_bytes)
    return sum(by_text.values())


def _tied(profile: ModelProfile, members: Sequence[Sequence[int]]) -> dict[int, str | None]:
    # By each group's first layer. Ties that meet in a group become one, those within a group vanish.
    graph: nx.Graph[int | str] = nx.Graph()
    for number, group in enumerate(members):
        graph.add_edges_from((number, tied) for layer in group if (tied := profile.layers[layer].tied) is not None)
    names: dict[int, str | None] = {group[0]: None for group in members}
    for component in nx.connected_components(graph):
        groups = [item for item in component if isinstance(item, int)]
        if len(groups) > 1:
            text = "+".join(sorted(item for item in component if isinstance(item, str)))
            names |= {members[number][0]: text for number in groups}
    return names
