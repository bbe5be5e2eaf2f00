"""Tries the user's layers and loss on the driver, before anything starts: without memory for weights, on torch's device `meta`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from raypipe.actors.stage.losses import checked_loss, tried_loss
from raypipe.actors.stage.ties import check_ties
from raypipe.errors import ConfigError
from raypipe.model import Batch, Layer, Model
from raypipe.training.check_rows import generators_kept

_META = torch.device("meta")
_MOST_S = 20.0
"""Seconds that making the layers may delay a run."""


class DraftLayers:
    """The layers of a model without memory for their weights.

    Attributes:
        model: What they are made from.
        modules: One module for each layer.
    """

    def __init__(self, model: Model, modules: Sequence[nn.Module]) -> None:
        self.model = model
        self.modules = tuple(modules)

    @classmethod
    def of(cls, model: Model) -> DraftLayers | None:
        """Return the layers, or `None` if one cannot be made so, or all take long: actors then tell what is wrong with them."""
        modules: list[nn.Module] = []
        deadline = time.monotonic() + _MOST_S
        with generators_kept():
            for layer in model.layers:
                module = _built(layer)
                if module is None or time.monotonic() > deadline:
                    return None
                modules.append(module)
        return cls(model, modules)

    def weight_names(self) -> list[str]:
        """Return the full names of the trained weights; those that layers share have the name that they have in the first of them."""
        later = {tied for tie in self.model.ties for tied in tie[1:]}
        return [f"{layer}.{name}" for layer, name, weight in self._weights() if weight.requires_grad and (layer, name) not in later]

    def weight_bytes(self) -> int:
        """Return the bytes of all weights, those that layers share once."""
        later = {tied for tie in self.model.ties for tied in tie[1:]}
        return sum(weight.nbytes for layer, name, weight in self._weights() if (layer, name) not in later)

    def _weights(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        for layer, module in zip(self.model.layers, self.modules, strict=True):
            for name, weight in module.named_parameters():
                yield layer.name, name, weight

    def check_ties(self) -> None:
        """Refuse ties by weights that layers do not have or that cannot be one.

        Raises:
            ConfigError: Names the layer and its weight.
        """
        check_ties(self.model, self.modules)

    def check_forward(self, batch: Batch) -> None:
        """Refuse layers or a loss that fail on the first rows.

        What fails without memory is tried once more with it, one layer alone, over zeros in place of what other layers give: some code
        works only with values.

        Raises:
            ConfigError: Names the layer or the loss, what it got and what it said.
        """
        outputs: list[tuple[Tensor, ...]] = []
        sources = [[source for source, target in self.model.edges() if target == index] for index in range(len(self.modules))]
        meta = {name: tensor.to(_META) for name, tensor in batch.items()}
        with generators_kept():
            for layer, module, from_layers in zip(self.model.layers, self.modules, sources, strict=True):
                inputs = [tensor for source in from_layers for tensor in outputs[source]]
                try:
                    outputs.append(_forward(layer, module, inputs, meta))
                except Exception as error:
                    _try_for_real(layer, inputs, batch, because=error)
                    return
            self._check_loss(outputs[-1], batch, meta)

    def _check_loss(self, outputs: tuple[Tensor, ...], batch: Batch, meta: Batch) -> None:
        if len(outputs) == 1:
            try:
                loss: object = self.model.loss(outputs[0], meta)
            except Exception as error:
                if _is_for_want_of_values(error):
                    return
            else:
                checked_loss(loss)
                return
        with torch.no_grad():
            tried_loss(self.model, tuple(_zeros(outputs)), batch)


def _built(layer: Layer) -> nn.Module | None:
    try:
        with _META:
            module: object = layer.build()
    except Exception:
        return None
    if not isinstance(module, nn.Module) or any(not weight.is_meta for weight in module.parameters()):
        return None
    return module


def _forward(layer: Layer, module: nn.Module, inputs: Sequence[Tensor], batch: Batch) -> tuple[Tensor, ...]:
    optional = {name: batch[name] for name in layer.batch_if_present if name in batch}
    found: object = module(*inputs, *(batch[name] for name in layer.batch), **optional)
    if isinstance(found, Mapping):
        raise TypeError(
            f"its output is of type {type(found).__name__}; return its tensors as a tuple, in the order in which later layers take them"
        )
    if not isinstance(found, tuple | Tensor):
        raise TypeError(f"its output is of type {type(found).__name__}; return a tensor or a flat tuple of tensors")
    outputs = found if isinstance(found, tuple) else (found,)
    for number, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            raise TypeError(f"element {number} of its output is of type {type(output).__name__}; return a flat tuple of tensors")
    return outputs


def _try_for_real(layer: Layer, inputs: Sequence[Tensor], batch: Batch, *, because: Exception) -> None:
    if _is_for_want_of_values(because):
        return
    try:
        module = layer.build()
    except Exception:  # which actors tell
        return
    try:
        with torch.no_grad():
            _forward(layer, module.eval(), _zeros(inputs), batch)
    except Exception as error:
        fields = [name for name in (*layer.batch, *layer.batch_if_present) if name in batch]
        given = [f"an input of shape {_shape(tensor)}" for tensor in inputs] + [
            f"{name!r} of shape {_shape(batch[name])}" for name in fields
        ]
        raise ConfigError(
            f"layer {layer.name!r} failed on the first rows: {type(error).__name__}: {error}; it got {', '.join(given) or 'nothing'}"
        ) from error


def _is_for_want_of_values(error: Exception) -> bool:
    # Torch has no class for this. An error that only mentions meta is raised again where there are values.
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _zeros(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
