"""From measured layers to a `ModelProfile`."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.actors.measure import LayerMeasurement
from raypipe.model import Model
from raypipe.profile import LayerProfile, ModelProfile, NamedEdge


def model_profile(measured: Sequence[LayerMeasurement], model: Model, *, name: str, microbatch_size: int) -> ModelProfile:
    """The profile of a model whose layers were measured in order.

    Args:
        measured: the costs of each layer.
        model: the model's description.
        name: of the profile.
        microbatch_size: rows of the microbatch that was measured.
    """
    layers = tuple(
        LayerProfile(
            name=layer.name,
            forward_s=layer.forward_s,
            backward_s=layer.backward_s,
            weight_grad_s=layer.weight_grad_s,
            output_bytes=layer.output_bytes,
            saved_bytes=layer.saved_bytes,
            parameter_bytes=layer.parameter_bytes,
        )
        for layer in measured
    )
    edges = model.edges()
    chain = tuple((index, index + 1) for index in range(len(layers) - 1))
    named = None
    if edges != chain:
        named = tuple(NamedEdge(producer=layers[source].name, consumer=layers[target].name) for source, target in edges)
    return ModelProfile(name=name, microbatch_size=microbatch_size, layers=layers, named_edges=named)
