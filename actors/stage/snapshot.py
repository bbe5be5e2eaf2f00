"""Undoing what trial forwards do to a module: some layers initialize themselves from the first values they see."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_ATTRIBUTES_OF_TORCH = frozenset(nn.Module().__dict__)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore a module's weights, buffers and attributes on exit, with their lists, dicts and sets, from the host's memory."""
    # Torch's own layers write into some buffers without changing their version counter.
    tensors: list[tuple[Tensor, int, Tensor]] = [(weight, weight._version, _on_host(weight)) for weight in module.parameters()]
    tensors += [(buffer, -1, _on_host(buffer)) for buffer in module.buffers() if buffer.layout is torch.strided]
    parts = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    containers = [
        (value, copy.copy(value))
        for _, attributes, _ in parts
        for name, value in attributes.items()
        if type(value) in {list, dict, set} and name not in _ATTRIBUTES_OF_TORCH
    ]
    try:
        yield
    finally:
        for value, before in containers:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for part, attributes, buffers in parts:
            for name in part.__dict__.keys() - attributes.keys():
                del part.__dict__[name]
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for tensor, version, before in tensors:
                if tensor._version != version:
                    tensor.copy_(before)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
