"""From measured layers to a `ModelProfile`, or to the costs of a cut's stages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from raypipe.actors.measure import LayerMeasurement
from raypipe.cost import StageCost
from raypipe.cut import Cut
from raypipe.model import Model
from raypipe.profile import LayerProfile, ModelProfile, NamedEdge


def model_profile(measured: Sequence[Sequence[LayerMeasurement]], model: Model, *, name: str, microbatch_size: int) -> ModelProfile:
    """The profile of a model whose layers were measured in order, on one or several devices of a kind at the same time.

    Args:
        measured: for each device, the costs of each layer; times are averaged.
        model: the model's description.
        name: of the profile.
        microbatch_size: rows of the microbatch that was measured.
    """
    layers = tuple(
        LayerProfile(
            name=of_devices[0].name,
            forward_s=fmean(layer.forward_s for layer in of_devices),
            backward_s=fmean(layer.backward_s for layer in of_devices),
            weight_grad_s=fmean(layer.weight_grad_s for layer in of_devices),
            output_bytes=of_devices[0].output_bytes,
            saved_bytes=of_devices[0].saved_bytes,
            parameter_bytes=of_devices[0].parameter_bytes,
            update_s=fmean(layer.update_s for layer in of_devices),
        )
        for of_devices in zip(*measured, strict=True)
    )
    edges = model.edges()
    chain = tuple((index, index + 1) for index in range(len(layers) - 1))
    named = None
    if edges != chain:
        named = tuple(NamedEdge(producer=layers[source].name, consumer=layers[target].name) for source, target in edges)
    return ModelProfile(name=name, microbatch_size=microbatch_size, layers=layers, named_edges=named)


def stage_costs(measured: Sequence[LayerMeasurement], cut: Cut) -> list[StageCost]:
    """What the stages of a cut cost in seconds, from the layers of the model as they were measured on one device."""
    return [
        StageCost(
            forward_s=sum(measured[layer].forward_s for layer in layers),
            backward_s=sum(measured[layer].backward_s for layer in layers),
            weight_grad_s=sum(measured[layer].weight_grad_s for layer in layers),
            update_s=sum(measured[layer].update_s for layer in layers),
        )
        for layers in cut.stages
    ]
