"""What pipelines must agree with: the unsplit model in one process, and a pipeline of dense layers done by hand in numpy.

Neither shares code with the executor, but for making each layer from its own seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.late_gradients import LateGradients
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.actors.stage.weights import Optimizer
from raypipe.artifacts.cut import Cut
from raypipe.model import Batch, Model
from raypipe.schedules.ir import Op, OpKind, Schedule, WeightRule, ops_of

NUM_ROWS = 6


@dataclass(frozen=True)
class RandomRows:
    """Rows of normally distributed fields, a pure function of the microbatch's number."""

    fields: tuple[str, ...] = ("inputs", "targets")
    width: int = 16
    dtype: torch.dtype = torch.float64

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        generator = torch.Generator().manual_seed(1000 + microbatch)
        whole = {name: torch.randn(NUM_ROWS, self.width, generator=generator, dtype=torch.float64) for name in self.fields}
        first, end = (round(share * NUM_ROWS) for share in rows)
        return {name: tensor[first:end].to(self.dtype) for name, tensor in whole.items()}


@dataclass(frozen=True)
class RandomTokens:
    """Rows of tokens for a GPT, and the tokens that follow them."""

    num_rows: int = 2
    length: int = 16

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        tokens = torch.randint(0, 256, (self.num_rows, self.length + 1), generator=torch.Generator().manual_seed(microbatch))
        first, end = (round(share * self.num_rows) for share in rows)
        return {"tokens": tokens[first:end, :-1], "targets": tokens[first:end, 1:]}


@dataclass(frozen=True)
class Trained:
    """Losses by update, the weights of each layer after the last, and the norm of each update's gradients."""

    losses: list[float]
    layers: list[list[Tensor]]
    norms: list[float]


def train_unsplit(
    model: Model,
    batches: BatchSource,
    *,
    num_updates: int,
    num_microbatches: int,
    learning_rate: float,
    max_grad_norm: float,
    seed: int = 0,
    decay_matrices_only: float | None = None,
    clipped_together: Callable[[nn.ModuleList], list[list[nn.Parameter]]] | None = None,
    autocast: AbstractContextManager[object] | None = None,
    fused: bool = False,
    optimizer: Optimizer | None = None,
    on: torch.device | None = None,
) -> Trained:
    """Plain PyTorch: accumulate over the microbatches, clip by the global norm, one step of AdamW or of another optimizer.

    AdamW as torch has it by default, or with this weight decay for matrices and none for vectors. Instead of all parameters, groups of
    them may each be clipped by their norm. Forward and loss run in `autocast`. A fused AdamW is the same but for the last bit.
    """
    modules = unsplit(model, seed=seed, on=on)
    edges = model.edges()
    stepped = (optimizer or partial(torch.optim.AdamW, lr=learning_rate))(named(model, modules))
    norms = []
    if decay_matrices_only is not None:
        groups = [[weight for weight in modules.parameters() if (weight.dim() > 1) is matrix] for matrix in (True, False)]
        decays = (decay_matrices_only, 0.0)
        stepped = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)], lr=learning_rate, fused=fused
        )
    losses = []
    for update in range(num_updates):
        total = 0.0
        of_update = [batches.batch(update * num_microbatches + number, (0.0, 1.0)) for number in range(num_microbatches)]
        weights = [float(model.loss_weight(batch)) if model.loss_weight else 1.0 for batch in of_update]
        for on_host, weight in zip(of_update, weights, strict=True):
            if not weight:
                continue
            batch = {name: tensor.to(on or tensor.device) for name, tensor in on_host.items()}
            values: dict[int, tuple[Tensor, ...]] = {}
            with autocast or nullcontext():
                for index, (layer, module) in enumerate(zip(model.layers, modules, strict=True)):
                    inputs = [tensor for source, target in edges if target == index for tensor in values[source]]
                    given = module(*inputs, *(batch[field] for field in layer.batch))
                    values[index] = given if isinstance(given, tuple) else (given,)
                loss = model.loss(values[len(modules) - 1][0], batch)
            (loss * weight / sum(weights)).backward()  # type: ignore[no-untyped-call]
            total += loss.item() * weight
        found = [
            torch.nn.utils.clip_grad_norm_(group, max_grad_norm)
            for group in (clipped_together(modules) if clipped_together else [list(modules.parameters())])
        ]
        norms.append(math.hypot(*map(float, found)))
        stepped.step()
        stepped.zero_grad()
        losses.append(total / sum(weights))
    return Trained(losses, [[weight.detach() for weight in module.parameters()] for module in modules], norms)


def unsplit(model: Model, *, seed: int = 0, on: torch.device | None = None) -> nn.ModuleList:
    """All layers in one process; what is tied is one parameter."""
    modules = nn.ModuleList(build_layer(layer, index=index, seed=seed).to(on) for index, layer in enumerate(model.layers))
    by_name = {layer.name: module for layer, module in zip(model.layers, modules, strict=True)}
    for (first, name), *others in model.ties:
        for other, called in others:
            holder, _, attribute = called.rpartition(".")
            setattr(by_name[other].get_submodule(holder), attribute, by_name[first].get_parameter(name))
    return modules


def named(model: Model, modules: nn.ModuleList) -> NamedWeights:
    """All trained weights by the layer that has them first, and those of embeddings, of the last layer and of ties apart."""
    names: dict[nn.Parameter, str] = {}
    outer = set()
    tied = {(layer, name) for tie in model.ties for layer, name in tie}
    for number, (layer, module) in enumerate(zip(model.layers, modules, strict=True)):
        tables = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                names.setdefault(weight, f"{layer.name}.{name}")
                if weight in tables or number == len(modules) - 1 or (layer.name, name) in tied or name in layer.looked_up:
                    outer.add(names[weight])
    return NamedWeights(((name, weight) for weight, name in names.items()), outer=outer)


def gradients_unsplit(model: Model, batches: RandomRows, *, num_microbatches: int, seed: int = 0) -> list[list[Tensor]]:
    """For each layer of a chain, the gradients of the mean loss over the microbatches of the first update."""
    modules = nn.ModuleList(build_layer(layer, index=index, seed=seed) for index, layer in enumerate(model.layers))
    for number in range(num_microbatches):
        batch = batches.batch(number, (0.0, 1.0))
        x = batch["inputs"]
        for module in modules:
            x = module(x)
        (model.loss(x, batch) / num_microbatches).backward()  # type: ignore[no-untyped-call]
    return [[weight.grad for weight in module.parameters() if weight.grad is not None] for module in modules]


def layers_of(pipeline: LocalPipeline) -> dict[int, list[list[Tensor]]]:
    """For each layer, its weights in each copy that the pipeline's devices hold."""
    found: dict[int, list[list[Tensor]]] = {}
    for on_device in pipeline.weights:
        for weights in on_device.values():
            for index in weights.module.indices:
                copy = [weight.detach() for weight in weights.module.layers[str(index)].parameters()]
                found.setdefault(index, []).append(copy)
    return found


def off_unsplit(
    trained: LocalPipeline,
    model: Model,
    batches: BatchSource,
    *,
    num_updates: int,
    num_microbatches: int,
    learning_rate: float,
    optimizer: Optimizer,
) -> float:
    """How far the weights of all copies are from those of the unsplit model after as many updates."""
    whole = train_unsplit(
        model,
        batches,
        num_updates=num_updates,
        num_microbatches=num_microbatches,
        learning_rate=learning_rate,
        max_grad_norm=1e9,
        optimizer=optimizer,
    )
    return max(
        float((found - expected).abs().max())
        for index, copies in layers_of(trained).items()
        for copy in copies
        for found, expected in zip(copy, whole.layers[index], strict=True)
    )


@dataclass(eq=False)
class _Dense:
    """One layer by hand: tanh(x W' + b), or without tanh."""

    weight: Any
    bias: Any
    tanh: bool


class HandPipeline:
    """One dense layer a stage, trained by SGD with the weights that the schedule's rule names, Op by Op, in numpy; or by an optimizer.

    A stage takes the outputs of the stages before it side by side, in their order, or fields of the batch.

    Forward keeps x and y of its own weights; backward multiplies with the weights of its own version: what `live` means. Where the
    forward is run again, x is kept alone and y is that of the weights at that moment. Copies of a stage are at a version each; the
    version itself, made when the gradients of all microbatches are there, is one for all of them. Stages of a tie have one weight, whose
    gradient is the sum of theirs, and each a bias.
    """

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        batches: RandomRows,
        *,
        learning_rate: float,
        seed: int = 0,
        cut: Cut | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.schedule = schedule
        self.batches = batches
        self.learning_rate = learning_rate
        self.history: list[list[_Dense]] = []
        indices = [index for (index,) in cut.stages] if cut else list(range(len(model.layers)))
        self.fields = [model.layers[index].batch for index in indices]
        for index in indices:
            module = build_layer(model.layers[index], index=index, seed=seed)
            weight, bias = (self._array(parameter.detach().clone()) for parameter in module.parameters())
            self.history.append([_Dense(weight, bias, tanh=index < len(model.layers) - 1)])
        self.tied = {stage: tie for tie in schedule.graph.ties for stage in tie}
        for stage, tie in self.tied.items():
            self.history[stage][0].weight = self.history[tie[0]][0].weight
        self.steppers = [self._stepper(optimizer, model, indices, stage) for stage in range(len(indices))] if optimizer else None
        self.newest: dict[tuple[int, int], int] = {}
        self.gradients: dict[tuple[int, int], list[Any]] = {}
        self.counted: dict[tuple[int, int], int] = {}
        self.saved: dict[tuple[int, int], tuple[int, Any, Any]] = {}
        self.outputs: dict[tuple[int, int], Any] = {}
        self.input_gradients: dict[tuple[int, int, int], Any] = {}
        self.losses: dict[int, float] = {}
        self.mismatches: dict[int, int] = {}
        self.delays: dict[tuple[int, int], list[int]] = {}

    def run(self) -> None:
        """Runs all Ops of the window in some order that the programs allow."""
        heads = [0] * self.schedule.num_workers
        moved = True
        while moved:
            moved = False
            for worker, program in enumerate(self.schedule.programs):
                while heads[worker] < len(program) and all(self._ready(op) for op in ops_of(program[heads[worker]])):
                    for op in ops_of(program[heads[worker]]):
                        self._do(op, worker)
                    heads[worker] += 1
                    moved = True
        assert heads == [len(program) for program in self.schedule.programs]

    def _ready(self, op: Op) -> bool:
        graph = self.schedule.graph
        if op.kind is OpKind.FORWARD:
            return all((source, op.index) in self.outputs for source in graph.predecessors[op.stage])
        if op.kind is OpKind.BACKWARD:
            return all((op.stage, target, op.index) in self.input_gradients for target in graph.successors[op.stage])
        if op.kind is OpKind.UPDATE:
            together = self.tied.get(op.stage, (op.stage,))
            return all(self.counted.get((stage, op.index)) == self.schedule.num_microbatches for stage in together)
        if op.kind is OpKind.PUBLISH:
            return len(self.history[op.stage]) > op.index + 1
        return True

    def _version(self, op: Op, worker: int) -> int:
        update = op.index // self.schedule.num_microbatches
        if self.schedule.weight_rule is WeightRule.FLUSH:
            return update
        if self.schedule.weight_rule is WeightRule.DOUBLE_BUFFER:
            return max(update - 1, 0)
        if self.schedule.weight_rule is WeightRule.STASH and op.kind is not OpKind.FORWARD:
            return self.saved[op.stage, op.index][0]
        return self.newest.get((worker, op.stage), 0)

    def _do(self, op: Op, worker: int) -> None:
        match op.kind:
            case OpKind.FORWARD | OpKind.RECOMPUTE:
                self._forward(op, worker)
            case OpKind.BACKWARD:
                self._backward(op, worker)
            case OpKind.UPDATE:
                self._update(op)
                self.newest[worker, op.stage] = op.index + 1
            case OpKind.PUBLISH:
                self.newest[worker, op.stage] = op.index + 1

    def _batch(self, op: Op, field: str) -> Any:
        return self._array(self.batches.batch(op.index, (0.0, 1.0))[field])

    def _forward(self, op: Op, worker: int) -> None:
        version = self._version(op, worker)
        layer = self.history[op.stage][version]
        inputs = [self.outputs[source, op.index] for source in self.schedule.graph.predecessors[op.stage]]
        x = self._side_by_side(inputs or [self._batch(op, field) for field in self.fields[op.stage]])
        y = self._output(layer, x)
        self.saved[op.stage, op.index] = (version, x, y)
        if op.kind is OpKind.RECOMPUTE:
            return
        self.outputs[op.stage, op.index] = y
        if op.stage == self.schedule.num_stages - 1:
            self.losses[op.index] = self._loss(op, y)

    def _backward(self, op: Op, worker: int) -> None:
        version = self._version(op, worker)
        of_forward, x, y = self.saved.pop((op.stage, op.index))
        layer = self.history[op.stage][self._read_by_backward(version, of_forward)]
        self.mismatches[op.index] = max(self.mismatches.get(op.index, 0), version - of_forward)
        if op.stage == self.schedule.num_stages - 1:
            gradient = self._loss_gradient(op, y)
        else:
            gradient = sum(self.input_gradients[op.stage, target, op.index] for target in self.schedule.graph.successors[op.stage])
        of_inputs, *parts = self._gradients(layer, x, y, gradient)
        first = 0
        for source in self.schedule.graph.predecessors[op.stage]:
            end = first + self.outputs[source, op.index].shape[1]
            self.input_gradients[source, op.stage, op.index] = of_inputs[:, first:end]
            first = end
        key = (op.stage, op.index // self.schedule.num_microbatches)
        self.delays.setdefault(key, []).append(key[1] - of_forward)
        before = self.gradients.get(key)
        self.gradients[key] = parts if before is None else [total + part for total, part in zip(before, parts, strict=True)]
        self.counted[key] = self.counted.get(key, 0) + 1

    def _update(self, op: Op) -> None:
        versions = self.history[op.stage]
        if len(versions) > op.index + 1:
            return  # another copy has made it
        weight = sum(self.gradients[stage, op.index][0] for stage in self.tied.get(op.stage, (op.stage,)))
        bias = self.gradients[op.stage, op.index][1]
        step = self.learning_rate
        if self.steppers is not None:
            if isinstance(late := self.steppers[op.stage][1], LateGradients):
                late.delay = mean(delay for stage in self.tied.get(op.stage, (op.stage,)) for delay in self.delays[stage, op.index])
            new_weight, new_bias = self._stepped(*self.steppers[op.stage], [weight, bias])
            versions.append(_Dense(new_weight, new_bias, versions[-1].tanh))
            return
        versions.append(_Dense(versions[-1].weight - step * weight, versions[-1].bias - step * bias, versions[-1].tanh))

    def _stepper(
        self, optimizer: Optimizer, model: Model, indices: Sequence[int], stage: int
    ) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        dense, name = self.history[stage][0], model.layers[indices[stage]].name
        weights = [nn.Parameter(torch.as_tensor(array).clone()) for array in (dense.weight, dense.bias)]
        names = [f"{name}.linear.weight", f"{name}.linear.bias"]
        is_last = indices[stage] == len(model.layers) - 1
        outer = names if is_last else names[:1] if stage in self.tied else []
        return weights, optimizer(NamedWeights(zip(names, weights, strict=True), outer=outer))

    def _stepped(self, weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: Sequence[Any]) -> list[Any]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = torch.as_tensor(gradient).contiguous()  # fused kernels pair elements by their place in memory
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * group.get("learning_rate_factor", 1.0)
        optimizer.step()
        return [self._array(weight.detach().clone()) for weight in weights]

    # Arithmetic

    def _loss(self, op: Op, y: Any) -> float:
        return float(((y - self._batch(op, "targets")) ** 2).mean())

    def _loss_gradient(self, op: Op, y: Any) -> Any:
        targets = self._batch(op, "targets")
        return (y - targets) * (2 / (NUM_ROWS * targets.shape[1]) / self.schedule.num_microbatches)

    def _array(self, tensor: Tensor) -> Any:
        return tensor.numpy()

    def _side_by_side(self, arrays: Sequence[Any]) -> Any:
        return np.concatenate(arrays, axis=1)

    def _output(self, layer: _Dense, x: Any) -> Any:
        y = x @ layer.weight.T + layer.bias
        return np.tanh(y) if layer.tanh else y

    def _gradients(self, layer: _Dense, x: Any, y: Any, gradient: Any) -> tuple[Any, Any, Any]:
        """Of the input, the weight and the bias."""
        if layer.tanh:
            gradient = gradient * (1 - y**2)
        return gradient @ layer.weight, gradient.T @ x, gradient.sum(axis=0)

    def _read_by_backward(self, now: int, before: int) -> int:
        """The version that the input gradient is computed with: that of the backward, not that of its forward."""
        return now


def run_beside_hand(
    model: Model,
    cut: Cut,
    schedule: Schedule,
    *,
    batches: Any = None,
    kind: type[HandPipeline] = HandPipeline,
    optimizer: Optimizer | None = None,
    tolerance: float = 1e-12,
) -> tuple[LocalPipeline, HandPipeline]:
    """Returns a pipeline and one by hand after a window, whose losses and weights agreed."""
    batches = batches or RandomRows(tuple(dict.fromkeys([*(field for layer in model.layers for field in layer.batch), "targets"])))
    run = LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=batches,
        optimizer=optimizer or (lambda weights: torch.optim.SGD(weights, lr=0.1)),
        learning_rate=lambda _: 0.1,
    )
    by_hand = kind(model, schedule, batches, learning_rate=0.1, cut=cut, optimizer=optimizer)
    by_hand.run()
    losses: dict[int, float] = {}
    for report in run.run_window():
        losses |= report.losses
    assert losses == pytest.approx(by_hand.losses, abs=tolerance)
    for index, copies in layers_of(run).items():
        newest = by_hand.history[cut.stage_of[index]][-1]
        for copy in copies:
            assert np.allclose(copy[0].numpy(), newest.weight, rtol=0, atol=tolerance)
            assert np.allclose(copy[1].numpy(), newest.bias, rtol=0, atol=tolerance)
    return run, by_hand


class LowHandPipeline(HandPipeline):
    """The same as autocast computes it, with every rounding written out: weights and sums in float32, products in bfloat16.

    Each product is one operator of torch, so that only the order of additions within it, which is a matter of the machine, is not said.
    """

    def _array(self, tensor: Tensor) -> Tensor:
        return tensor

    def _side_by_side(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(arrays), dim=1)

    def _output(self, layer: _Dense, x: Tensor) -> Tensor:
        y = torch.addmm(layer.bias.bfloat16(), x.bfloat16(), layer.weight.bfloat16().T)
        return y.float().tanh().bfloat16() if layer.tanh else y

    def _gradients(self, layer: _Dense, x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient = gradient.bfloat16()
        if layer.tanh:
            gradient = (gradient.float() * (1 - y.float() ** 2)).bfloat16()
        weight_gradient = (x.bfloat16().T @ gradient).T
        return gradient @ layer.weight.bfloat16(), weight_gradient.float(), gradient.sum(dim=0).float()


class StaleHandPipeline(LowHandPipeline):
    """What autocast left to itself makes of `live`: the backward reads the copies that were made in the forward."""

    def _read_by_backward(self, now: int, before: int) -> int:
        return before


def largest_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference between the numbers of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))
