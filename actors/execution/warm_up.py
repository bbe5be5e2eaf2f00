"""Runs each stage of a GPU once before the device meets others.

In a window, loading kernels and compiling layers may wait for the GPU, which may wait for messages of devices that wait for this one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raypipe.actors import devices
from raypipe.actors.execution.binding import StageEdges
from raypipe.actors.execution.updates import root
from raypipe.actors.stage.backward import backward_full, backward_input
from raypipe.actors.stage.gradient_flow import zero_inputs
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import unchanged
from raypipe.actors.stage.weights import Weights
from raypipe.model import Batch, Model


def warm_up(weights: Mapping[int, Weights], edges: StageEdges, model: Model, batch: Batch, *, on: torch.device) -> None:
    """Run each stage over zeros, with the whole backward and with one in two parts, and drop the results."""
    batch = devices.upload(batch, on)
    for of_stage in weights.values():
        of_stage.module.train()
        with unchanged(of_stage.module):
            for split in (False, True):
                _run_once(of_stage, edges, model, batch, split=split)


def _run_once(weights: Weights, edges: StageEdges, model: Model, batch: Batch, *, split: bool) -> None:
    module, last = weights.module, len(model.layers) - 1
    incoming = {
        layer: tensors
        for edge, of_layers in edges.specs.items()
        if edge[1] == module.stage
        for layer, tensors in zip(edges.cut.crossing[edge], of_layers, strict=True)
    }
    inputs = zero_inputs(incoming, on=module.on)
    outputs = weights.run(weights.versions.newest, inputs, batch, RngKey(0))
    roots = [tensor for tensors in outputs.values() for tensor in tensors if tensor.requires_grad]
    if last in outputs:
        roots = [model.loss(outputs[last][0], batch)]
    gradients = [torch.ones_like(root) for root in roots]
    leaves = [tensor for tensors in inputs.values() for tensor in tensors]
    parameters = weights.bind(weights.versions.newest, 0)
    if split:
        _, deferred = backward_input(roots, gradients, leaves, parameters, pivot=module.pivot(leaves))
        deferred.run()
    else:
        backward_full(roots, gradients, leaves, parameters)
    root(weights.squared_norm(0))
    weights.gradients.flatten(0)
    weights.gradients.pop(0)
    module.first[0] = ()
