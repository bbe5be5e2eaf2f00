"""Stages that compute in a lower precision than the one in which the optimizer steps their weights.

    optimizer -> weight, float32 -> copy, bfloat16 -> matrix products of F, B and W       one copy per version
                 weight, float32 -------------------> norms, embeddings                   what autocast leaves alone

Trial forwards show which weights autocast casts. Weights used in both ways are left to autocast, and refused under `live`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from raypipe.actors import devices
from raypipe.actors.stage.gradient_flow import LayerOutput, StageOutputs, output_specs
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs, StageModule, unchanged
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model
from raypipe.schedules.ir import WeightRule

LOW = torch.bfloat16


class _AutocastStage(StageModule):
    def forward(self, inputs: Outputs, batch: Batch, rng_key: RngKey) -> Outputs:
        # Outputs of other stages are leaves here but not in the unsplit model, so nothing made of them may be cached.
        with torch.autocast(self.on.type, dtype=LOW, cache_enabled=False):
            return super().forward(inputs, batch, rng_key)


class _LowStage(StageModule):
    # All in low precision, with buffers, frozen weights and batch.
    def __init__(self, model: Model, cut: Cut, stage: int, *, seed: int, on: torch.device = devices.CPU) -> None:
        super().__init__(model, cut, stage, seed=seed, on=on)
        fixed = [*self.buffers(), *(weight for weight in self.parameters() if not weight.requires_grad)]
        for tensor in fixed:
            tensor.data = _lowered(tensor.data)

    def forward(self, inputs: Outputs, batch: Batch, rng_key: RngKey) -> Outputs:
        return super().forward(inputs, {name: _lowered(tensor) for name, tensor in batch.items()}, rng_key)


def _lowered(tensor: Tensor) -> Tensor:
    return tensor.to(LOW) if tensor.is_floating_point() else tensor


_STAGES = {Precision.FLOAT32: StageModule, Precision.BF16_MIXED: _AutocastStage, Precision.BF16: _LowStage}


def build_stage(
    model: Model,
    cut: Cut,
    stage: int,
    *,
    optimizer: Optimizer,
    rule: WeightRule,
    seed: int,
    precision: Precision,
    on: torch.device = devices.CPU,
) -> Weights:
    """Build the layers of a stage in `precision`, with weights and optimizer."""
    return Weights(_STAGES[precision](model, cut, stage, seed=seed, on=on), optimizer=optimizer, rule=rule)


def loss_in_float32(model: Model, precision: Precision) -> Model:
    """Return the model with its loss in float32 at least, outside of autocast."""
    return model if precision is Precision.FLOAT32 else dataclasses.replace(model, loss=partial(_loss, model.loss))


def _loss(loss: Callable[[Tensor, Batch], Tensor], output: Tensor, batch: Batch) -> Tensor:
    return loss(output.to(torch.promote_types(output.dtype, torch.float32)), batch)


def prepare(
    weights: Weights,
    outputs: StageOutputs,
    batch: Batch,
    *,
    num_rows: int,
    known: Callable[[], dict[int, tuple[LayerOutput, ...]] | None] = lambda: None,
) -> dict[int, tuple[LayerOutput, ...]]:
    """Make the copies of weights that a stage computes with, and return the tensors that it passes on; `known` as in `output_specs`.

    Raises:
        ConfigError: As `output_specs`; or a backward under `live` would read an outdated cast.
    """
    module = weights.module
    inputs = {source: outputs[source] for sources in module.inputs.values() for source in sources if source in outputs}
    if isinstance(module, _LowStage):
        weights.versions.lower(weights.names, LOW)
    uses = _Uses(weights) if isinstance(module, _AutocastStage) else None
    with unchanged(module), uses.watched() if uses else nullcontext():
        specs = output_specs(module, inputs, batch, num_rows=num_rows, known=known)
    weights.versions.check_in_place()
    if uses is not None:
        both = uses.cast & uses.plain
        if both and weights.rule.allows_mismatch:
            raise ConfigError(
                f"stage {module.stage}: autocast needs {', '.join(sorted(both))} in bfloat16 and as built; the copy that it makes in a "
                "forward would be out of date in the backward. Set model.precision to bf16 or float32, use two weights, or choose a "
                "schedule whose backward reads the weights of its forward"
            )
        weights.versions.lower(uses.cast - both, LOW)  # a `live` backward would read outdated copies of autocast's own
    return specs


class _Uses:
    # Casts in training only, and in layers that call autocast themselves, are not seen and left to autocast.
    def __init__(self, weights: Weights) -> None:
        self.cast: set[str] = set()
        self.plain: set[str] = set()
        # Views share the memory of their weight, and weights may share memory.
        self._names: defaultdict[int, set[str]] = defaultdict(set)
        for name, weight in weights.module.named_parameters():
            if weight.requires_grad:
                self._names[weight.untyped_storage().data_ptr()].add(name)

    @contextmanager
    def watched(self) -> Iterator[None]:
        # Nothing is compiled unless `torch.compile` is loaded, which takes seconds.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        # Only selective checkpointing reports operators together with their tensors.
        context, _ = create_selective_checkpoint_contexts(self._note)  # type: ignore[no-untyped-call]
        with eager, context:
            yield

    def _note(self, _: object, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if not operator.is_view:
            names = self.cast if str(operator) == "aten._to_copy.default" and options.get("dtype") == LOW else self.plain
            for tensor in _tensors(arguments):
                names |= self._names.get(tensor.untyped_storage().data_ptr(), set())
        return CheckpointPolicy.PREFER_RECOMPUTE


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)
