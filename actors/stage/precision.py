"""Stages that compute in a lower precision than the one in which the optimizer steps their weights.

Autocast makes a copy of each weight in F, and the backward reads it: under `live`, after an update, it would not be the weights of
that moment. So the copies belong to `Weights`, which writes them anew with every update, and autocast finds nothing left to do:

    optimizer -> weight, float32 -> copy, bfloat16 -> matrix products of F, B and W       one copy a version
                 weight, float32 -------------------> norms, embeddings                   what autocast leaves alone

Which weights autocast casts is found by watching it in the forward that finds the shapes of the stage's outputs. A weight of which it
needs both is left to it: right with weights that stay as they are until the backward, refused under `live`.

Not seen, and so left to autocast, are casts that evaluation does without, and those of layers that call autocast themselves.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from raypipe.actors import devices
from raypipe.actors.stage.gradient_flow import LayerOutput, output_specs, unchanged
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs, StageModule
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model

LOW = torch.bfloat16


class AutocastStage(StageModule):
    """A stage that computes under autocast."""

    def forward(self, inputs: Outputs, batch: Batch, draw: RngKey) -> Outputs:
        """The outputs that other stages or the loss take."""
        # What comes from other stages are leaves here, and no leaves in the unsplit model: of these nothing is cached.
        with torch.autocast(self.on.type, dtype=LOW, cache_enabled=False):
            return super().forward(inputs, batch, draw)


class LowStage(StageModule):
    """A stage that computes in low precision altogether; so are buffers, weights that are not trained, and what it takes of a batch."""

    def __init__(self, model: Model, cut: Cut, stage: int, *, seed: int, on: torch.device = devices.CPU) -> None:
        super().__init__(model, cut, stage, seed=seed, on=on)
        fixed = [*self.buffers(), *(weight for weight in self.parameters() if not weight.requires_grad)]
        for tensor in fixed:
            tensor.data = _lowered(tensor.data)

    def forward(self, inputs: Outputs, batch: Batch, draw: RngKey) -> Outputs:
        """The outputs that other stages or the loss take."""
        return super().forward(inputs, {name: _lowered(tensor) for name, tensor in batch.items()}, draw)


def _lowered(tensor: Tensor) -> Tensor:
    return tensor.to(LOW) if tensor.is_floating_point() else tensor


_STAGES = {Precision.FLOAT32: StageModule, Precision.BF16_MIXED: AutocastStage, Precision.BF16: LowStage}


def stage_module(model: Model, cut: Cut, stage: int, *, seed: int, precision: Precision, on: torch.device = devices.CPU) -> StageModule:
    """The layers of a stage as a module that computes in a precision; arguments as of `StageModule`."""
    return _STAGES[precision](model, cut, stage, seed=seed, on=on)


def loss_in_float32(model: Model, precision: Precision) -> Model:
    """The model whose loss is computed in float32 at least, outside of autocast."""
    return model if precision is Precision.FLOAT32 else dataclasses.replace(model, loss=partial(_loss, model.loss))


def _loss(loss: Callable[[Tensor, Batch], Tensor], output: Tensor, batch: Batch) -> Tensor:
    return loss(output.to(torch.promote_types(output.dtype, torch.float32)), batch)


def prepare(
    weights: Weights, inputs: Mapping[int, tuple[LayerOutput, ...]], batch: Batch, *, num_rows: int
) -> dict[int, tuple[LayerOutput, ...]]:
    """Makes the copies of weights that a stage computes with, and returns what it gives, as `output_specs` does.

    Raises:
        ConfigError: as `output_specs`; or a backward under `live` would read what autocast made of a weight in the forward.
    """
    module = weights.module
    if isinstance(module, LowStage):
        weights.lower(weights.names, LOW)
    if not isinstance(module, AutocastStage):
        with unchanged(module):
            specs = output_specs(module, inputs, batch, num_rows=num_rows)
        weights.check_in_place()
        return specs
    uses = _Uses(weights)
    with unchanged(module), _eagerly(), uses.watched():
        specs = output_specs(module, inputs, batch, num_rows=num_rows)
    weights.check_in_place()
    both = uses.cast & uses.plain
    if both and weights.rule.allows_mismatch:
        raise ConfigError(
            f"stage {module.stage}: autocast needs {', '.join(sorted(both))} in bfloat16 and as built; what it makes of it in a forward "
            "would be out of date in the backward. Set model.precision to bf16 or float32, use two weights, or take a schedule whose "
            "backward reads the weights of its forward"
        )
    weights.lower(uses.cast - both, LOW)
    return specs


def _eagerly() -> AbstractContextManager[Any]:
    """A context in which compiled layers run as they were written, so that their operators show."""
    # What `torch.compile` loads takes seconds; where it is not there, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Uses:
    """What autocast does with the weights of a stage.

    Attributes:
        cast: the names of those of which it makes copies in low precision.
        plain: the names of those that are computed with as they are.
    """

    def __init__(self, weights: Weights) -> None:
        self.cast: set[str] = set()
        self.plain: set[str] = set()
        # Views share the memory of their weight, and weights may share memory.
        self._names: defaultdict[int, set[str]] = defaultdict(set)
        for name, weight in weights.module.named_parameters():
            if weight.requires_grad:
                self._names[weight.untyped_storage().data_ptr()].add(name)

    def watched(self) -> AbstractContextManager[Any]:
        """A context in which operators are noted; this part of selective checkpointing alone tells operators with their tensors."""
        context, _ = create_selective_checkpoint_contexts(self._note)  # type: ignore[no-untyped-call]
        watching: AbstractContextManager[Any] = context
        return watching

    def _note(self, _: object, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if not operator.is_view:
            found = self.cast if str(operator) == "aten._to_copy.default" and options.get("dtype") == LOW else self.plain
            for tensor in _tensors(arguments):
                found |= self._names.get(tensor.untyped_storage().data_ptr(), set())
        return CheckpointPolicy.PREFER_RECOMPUTE


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)
