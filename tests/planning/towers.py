"""Profiles of models with branches, and clusters to plan them on."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.artifacts.profile import LayerProfile, ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink


def towers(
    work: Sequence[float],
    *,
    num_layers: int,
    exchanges: int = 0,
    coupled: bool = False,
    interleaved: bool = False,
    kilobytes: int = 0,
    saved_bytes: int = 0,
) -> ModelProfile:
    """Return branches that meet in a layer without time; F of a branch takes its `work`, B twice as long.

    Args:
        num_layers: Of each branch.
        exchanges: Layers, the last of each branch, that also read the layer before the same one of the next branch. The list goes from
            branch to branch then.
        coupled: Whether the loss couples the rows.
        interleaved: Whether the list goes from branch to branch.
        kilobytes: Of weights of each layer.
    """
    layers: dict[str, LayerProfile] = {}
    edges: list[tuple[str, str]] = []
    for branch, seconds in enumerate(work):
        for at in range(num_layers):
            name = f"{branch}-{at}"
            layers[name] = LayerProfile(
                name=name,
                forward_s=seconds / num_layers,
                backward_s=2 * seconds / num_layers,
                weight_grad_s=seconds / num_layers,
                output_bytes=1000,
                saved_bytes=saved_bytes,
                parameter_bytes=1000 * kilobytes,
                branch=f"branch{branch}",
            )
            if at:
                edges.append((f"{branch}-{at - 1}", name))
            if at and at >= num_layers - exchanges:
                edges.append((f"{(branch + 1) % len(work)}-{at - 1}", name))
    if interleaved or exchanges:
        layers = {name: layers[name] for at in range(num_layers) for name in (f"{branch}-{at}" for branch in range(len(work)))}
    joint = LayerProfile(name="joint", forward_s=0.0, backward_s=0.0, weight_grad_s=0.0, output_bytes=0, saved_bytes=0, parameter_bytes=0)
    edges += [(f"{branch}-{num_layers - 1}", "joint") for branch in range(len(work))]
    return ModelProfile(
        name="towers",
        microbatch_size=8,
        layers=(*layers.values(), joint),
        named_edges=tuple(NamedEdge(producer=producer, consumer=consumer) for producer, consumer in edges),
        loss_couples_rows=coupled or None,
    )


def node(
    num_devices: int, *, bandwidth_bytes_per_s: float = 1e9, memory_bytes: int | None = None, speeds: Sequence[float] = ()
) -> ClusterTopology:
    """Return devices that are joined alike."""
    devices = tuple(
        Device(name=f"n/{number}", kind="gpu", memory_bytes=memory_bytes, speed=speeds[number] if speeds else 1.0)
        for number in range(num_devices)
    )
    return ClusterTopology(
        name="node", nodes=(Node(name="n", devices=devices, link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=bandwidth_bytes_per_s)),)
    )
