"""A model as actors have it: a module for each layer, run as the edges say."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raypipe.model import Model


def build(model: Model, *, seed: int = 0) -> dict[str, nn.Module]:
    """Builds each layer from the same seed, as the actors do."""
    modules: dict[str, nn.Module] = {}
    for layer in model.layers:
        torch.manual_seed(seed)
        modules[layer.name] = layer.build()
    return modules


def forward(model: Model, modules: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the output of the last layer, computed as the edges and batch fields of the layers say."""
    outputs: list[Tensor] = []
    for position, layer in enumerate(model.layers):
        inputs = [outputs[source] for source, target in model.edges() if target == position]
        outputs.append(modules[layer.name](*inputs, *(batch[field] for field in layer.batch)))
    return outputs[-1]


def num_parameters(modules: Mapping[str, nn.Module]) -> int:
    return sum(parameter.numel() for module in modules.values() for parameter in module.parameters())


def gradients_by_layers(model: Model, modules: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of all weights where no layer's graph reaches into another: gradients of outputs are handed back edge by edge."""
    taken: list[list[Tensor]] = []
    outputs: list[Tensor] = []
    edges = model.edges()
    for position, layer in enumerate(model.layers):
        taken.append([outputs[source].detach().requires_grad_() for source, target in edges if target == position])
        outputs.append(modules[layer.name](*taken[-1], *(batch[field] for field in layer.batch)))
    last = outputs[-1].detach().requires_grad_()
    torch.autograd.backward(model.loss(last, batch))
    returned = {len(outputs) - 1: last.grad}
    for position in reversed(range(len(outputs))):
        torch.autograd.backward(outputs[position], returned[position])
        sources = [source for source, target in edges if target == position]
        for source, tensor in zip(sources, taken[position], strict=True):
            before = returned.get(source)
            returned[source] = tensor.grad if before is None or tensor.grad is None else before + tensor.grad
    return gradients(modules)


def gradients(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The gradients of all weights, by layer and name; taken away from the weights."""
    found: dict[str, Tensor] = {}
    for layer, module in modules.items():
        for name, weight in module.named_parameters():
            assert weight.grad is not None, f"{layer}.{name}"
            found[f"{layer}.{name}"] = weight.grad
            weight.grad = None
    return found
