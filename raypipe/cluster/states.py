"""The states of layers on their way between devices, as references to Ray's object stores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray

from raypipe.cluster.stage_actors import StageActors

Parts = Mapping[int, Sequence[tuple[int, Any]]]
"""What each device exports: layers, and a reference to what it has of each."""
States = Mapping[int, Sequence[Any]]
"""References to the parts of each layer's state; more than one where copies of a stage divide the optimizer."""


def exported_layers(actors: StageActors) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the layers that each device exports whole, and those of which it has stepped a part."""
    owned = actors.ask("asking for layers", lambda _, actor: actor.exported_layers.remote())
    whole, stepped = ({device: layers[number] for device, layers in owned.items()} for number in range(2))
    return whole, stepped


def export_states(actors: StageActors, layers: Mapping[int, Sequence[int]]) -> Parts:
    """Return what devices have of some layers each, once it lies in the stores of their nodes."""
    parts: dict[int, list[tuple[int, Any]]] = {}
    done: dict[int, Any] = {}
    for device, of_device in layers.items():
        if of_device:
            handle = actors.members[device].handle
            *states, done[device] = handle.export_layers.options(num_returns=len(of_device) + 1).remote(of_device)
            parts[device] = list(zip(of_device, states, strict=True))
    actors.gather(done, "handing layers out")
    return parts


def by_layer(parts: Parts) -> States:
    """Return the same parts by layer."""
    states: dict[int, list[Any]] = {}
    for of_device in parts.values():
        for layer, state in of_device:
            states.setdefault(layer, []).append(state)
    return states


def all_parts(actors: StageActors) -> Parts:
    """Return the state of all layers, by device."""
    whole, stepped = exported_layers(actors)
    return export_states(actors, {device: [*whole[device], *stepped[device]] for device in whole})


def all_states(actors: StageActors) -> States:
    """Return the state of all layers."""
    return by_layer(all_parts(actors))


def lie_only_on(nodes: Collection[str], states: States) -> bool:
    """Return whether some part lies on these nodes alone, by their ids. Small parts lie in the driver's memory, on no node."""
    parts = [part for of_layer in states.values() for part in of_layer]
    return bool(nodes) and any(found and found <= set(nodes) for found in _holders(parts).values())


def _holders(parts: Sequence[Any]) -> dict[Any, set[str]]:
    return {part: set(where.get("node_ids") or ()) for part, where in ray.experimental.get_object_locations(parts).items()}


def within_reach(actors: StageActors, states: States, device: int, layers: Sequence[int], *, apart: Collection[frozenset[str]]) -> States:
    """Return the states of layers for a device; nodes do not fetch from each other if they are `apart`, a pair of ids each.

    Where Ray may choose a copy on a node that is apart from the device's, one between them, or else one that has a copy, hands it on.
    Ray chooses among all nodes that have a copy by then: a node in use that is apart may have fetched one meanwhile.
    """
    node_id = actors.members[device].slot.node.node_id
    far = {next(iter(pair - {node_id})) for pair in apart if node_id in pair}
    if not far:
        return states
    may_fetch = not far.isdisjoint(member.slot.node.node_id for member in actors.members)
    holders = _holders([part for layer in layers for part in states[layer]])
    near = [member for member in actors.alive().values() if member.slot.node.node_id not in {*far, node_id}]

    def handed_on(part: Any) -> Any:
        """Return the part as who hands it on has it: rather one that reaches all copies than one that has a copy but not its maker."""
        found = holders[part]
        if not found or node_id in found or not (may_fetch or found & far):
            return part
        reaching = [one for one in near if not any(frozenset((one.slot.node.node_id, holder)) in apart for holder in found)]
        holding = [one for one in near if one.slot.node.node_id in found]
        chosen = next(iter([one for one in reaching if one in holding] + reaching + holding), None)
        return part if chosen is None else chosen.handle.hand_on.remote(part)

    return {layer: [handed_on(part) for part in states[layer]] for layer in layers}


def arguments(states: States, layers: Sequence[int]) -> list[Any]:
    """Return what an actor's method takes for some layers: a list with a layer for each part, and the parts."""
    return [[layer for layer in layers for _ in states[layer]], *(state for layer in layers for state in states[layer])]
