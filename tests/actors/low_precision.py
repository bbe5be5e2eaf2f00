"""An unsplit model in low precision with every rounding written out: what pipelines must agree with in `bf16-mixed` and `bf16`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.weights import Optimizer
from raypipe.config import Precision
from raypipe.model import Batch, Model
from tests.actors.oracles import Trained, largest_difference, named, unsplit

LOW = torch.bfloat16


def train_low(
    model: Model,
    batches: BatchSource,
    *,
    precision: Precision,
    num_updates: int,
    num_microbatches: int,
    num_parts: int = 1,
    divided: Collection[int] = (),
    learning_rate: float = 0.1,
    optimizer: Optimizer | None = None,
) -> Trained:
    """Train with weights, their gradients' sums and the loss in float32; layers compute under autocast, or all in bfloat16.

    The optimizer is SGD unless another is given. Each pass through a layer rounds the weights anew and returns a gradient of its own,
    which is added in float32. The layers
    `divided`, which come first, take `num_parts` parts of the rows one by one. Norms are not told.
    """
    modules = unsplit(model)
    stepped = (optimizer or partial(torch.optim.SGD, lr=learning_rate))(named(model, modules))
    losses: list[float] = []
    for update in range(num_updates):
        total = 0.0
        for number in range(num_microbatches):
            step = _Pass(model, modules, precision)
            loss = step.loss(batches.batch(update * num_microbatches + number, (0.0, 1.0)), num_parts, divided)
            (loss / num_microbatches).backward()  # type: ignore[no-untyped-call]
            for weight, leaf in step.uses:
                if leaf.grad is not None:
                    weight.grad = leaf.grad.float() if weight.grad is None else weight.grad + leaf.grad
            total += loss.item()
        stepped.step()
        stepped.zero_grad()
        losses.append(total / num_microbatches)
    return Trained(losses, [[weight.detach() for weight in module.parameters()] for module in modules], [])


class _Pass:
    """One microbatch through all layers."""

    def __init__(self, model: Model, modules: nn.ModuleList, precision: Precision) -> None:
        self.model = model
        self.modules = modules
        self.low = precision is Precision.BF16
        self.uses: list[tuple[nn.Parameter, Tensor]] = []
        """Each weight with what a layer computed with."""
        self.autocast = nullcontext() if self.low else torch.autocast("cpu", dtype=LOW, cache_enabled=False)

    def loss(self, batch: Batch, num_parts: int, divided: Collection[int]) -> Tensor:
        parts: list[dict[int, Tensor]] = []
        for rows in zip(*(tensor.chunk(num_parts) for tensor in batch.values()), strict=True):
            parts.append({})
            self._run(sorted(divided), dict(zip(batch, rows, strict=True)), parts[-1])
        whole = {index: torch.cat([part[index] for part in parts]) for index in parts[0]}
        self._run([index for index in range(len(self.modules)) if index not in divided], batch, whole)
        return self.model.loss(whole[len(self.modules) - 1].float(), batch)

    def _run(self, layers: Sequence[int], batch: Batch, outputs: dict[int, Tensor]) -> None:
        for index in layers:
            inputs = [outputs[source] for source, target in self.model.edges() if target == index]
            fields = [self._rounded(batch[field]) for field in self.model.layers[index].batch]
            with self.autocast:
                state = dict(self._state(self.modules[index]))
                outputs[index] = torch.func.functional_call(self.modules[index], state, (*inputs, *fields))

    def _state(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, weight in module.named_parameters():
            leaf = self._rounded(weight.detach().clone()).requires_grad_()
            self.uses.append((weight, leaf))
            yield name, leaf
        for name, buffer in module.named_buffers():
            yield name, self._rounded(buffer)

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(LOW) if self.low and tensor.is_floating_point() else tensor


def masters_of(run: LocalPipeline) -> list[tuple[int, Tensor]]:
    """Pairs of a layer and a weight that the optimizer of one of its copies has stepped."""
    return [
        (int(name.split(".")[1]), master.detach())
        for on_device in run.weights
        for weights in on_device.values()
        for name, master in zip(weights.names, weights.masters, strict=True)
    ]


def furthest(run: LocalPipeline, expected: list[list[Tensor]]) -> float:
    """The largest difference between the weights of a run and those expected of each layer."""
    found: dict[int, list[Tensor]] = {}
    for layer, weight in masters_of(run):
        found.setdefault(layer, []).append(weight)
    assert sorted(found) == [layer for layer, weights in enumerate(expected) if weights]
    copies = {layer: len(weights) // len(expected[layer]) for layer, weights in found.items()}
    return max(largest_difference(weights, expected[layer] * copies[layer]) for layer, weights in found.items())
