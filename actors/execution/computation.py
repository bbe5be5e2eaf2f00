"""Runs the forwards and backwards of one window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.binding import StageEdges
from raypipe.actors.execution.losses import WindowLosses
from raypipe.actors.execution.mailbox import Mailbox
from raypipe.actors.execution.steps import BoundOp
from raypipe.actors.stage.backward import PendingWeightGradient, backward_full, backward_input
from raypipe.actors.stage.gradient_flow import OutputId
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model
from raypipe.schedules.ir import OpKind


@dataclass(slots=True)
class _Saved:
    """What a forward leaves for its backward; `pivot` as of `backward_input`."""

    version: int
    inputs: list[Tensor]
    outputs: Outputs
    pivot: tuple[Tensor, ...]
    loss: Tensor | None


class Computation:
    """Forwards and backwards of one window on one device; `training` says whether backwards follow."""

    def __init__(
        self,
        *,
        model: Model,
        on: torch.device,
        edges: StageEdges,
        mailbox: Mailbox,
        losses: WindowLosses,
        batches: BatchSource | None,
        first_microbatch: int,
        training: bool,
    ) -> None:
        self._model = model
        self._on = on
        self._edges = edges
        self._mailbox = mailbox
        self._losses = losses
        self._batches = batches
        self._first_microbatch = first_microbatch
        self._training = training
        self.saved: dict[tuple[int, int, int], _Saved] = {}
        """What forwards have left, by stage, microbatch and part."""
        self.deferred: dict[tuple[int, int, int], tuple[int, PendingWeightGradient]] = {}
        """What input gradients have left for weight gradients, with the version of the weights."""

    def forward(self, bound: BoundOp) -> None:
        """Run a forward."""
        mailbox = self._mailbox
        messages = [mailbox.take(activation.key) for activation in bound.activations]
        if bound.recomputed:
            inputs = [tensor for tensors in messages for tensor in tensors]
            # A layer may write into what takes no gradient, and the forward that runs again must find it as it was.
            copies = [
                tuple([tensor if number in activation.leaves else tensor.clone() for number, tensor in enumerate(tensors)])
                for activation, tensors in zip(bound.activations, messages, strict=True)
            ]
            with torch.no_grad():
                saved = self._run_layers(bound, copies, with_gradients=False)
            # The inputs alone are kept: they are what the stages before hold anyway, or next to nothing beside what layers save.
            self.saved[bound.key] = replace(saved, inputs=inputs, outputs={}, pivot=(), loss=None)
        else:
            saved = self._run_layers(bound, messages, with_gradients=self._training)
            if self._training:
                self.saved[bound.key] = saved
        if saved.loss is not None:
            self._losses.add(bound, saved.loss)
        for output in bound.outputs:
            mailbox.put(output, bound.rows, tuple([tensor for layer in output.layers for tensor in saved.outputs[layer]]))

    def recompute(self, bound: BoundOp) -> None:
        """Run a forward again, with the weights, rows and random numbers that it had."""
        inputs = self.saved[bound.key].inputs
        messages: list[tuple[Tensor, ...]] = []
        first = 0
        for activation in bound.activations:
            end = first + activation.layers[-1][2]
            messages.append(tuple(inputs[first:end]))
            first = end
        self.saved[bound.key] = self._run_layers(bound, messages, with_gradients=True)

    def backward(self, bound: BoundOp) -> None:
        """Run a full backward, or the part of it that gives the gradients of the inputs."""
        saved = self.saved.pop(bound.key)
        roots, root_gradients = self._roots(bound, saved)
        parameters = bound.weights.bind(saved.version, bound.update)
        inputs = saved.inputs
        if bound.op.kind is OpKind.BACKWARD:
            gradients = backward_full(roots, root_gradients, inputs, parameters)
        else:
            gradients, deferred = backward_input(roots, root_gradients, inputs, parameters, pivot=saved.pivot)
            self.deferred[bound.key] = (saved.version, deferred)
        for output in bound.outputs:
            tensors: list[Tensor] = []
            for number in output.inputs:
                gradient = gradients[number]
                tensors.append(torch.zeros_like(inputs[number]) if gradient is None else gradient)
            for number in output.unsent_inputs:
                if gradients[number] is not None:
                    raise self._unforeseen(self._origin(bound, number), f"gets a gradient from {bound.op}")
            self._mailbox.put(output, bound.rows, tuple(tensors))

    def weight_gradient(self, bound: BoundOp) -> None:
        """Run the part of a backward that gives the gradients of the weights."""
        version, deferred = self.deferred.pop(bound.key)
        bound.weights.bind(version, bound.update)
        deferred.run()

    def _run_layers(self, bound: BoundOp, messages: Sequence[tuple[Tensor, ...]], *, with_gradients: bool) -> _Saved:
        inputs: list[Tensor] = []
        by_layer: Outputs = {}
        has_leaves = False
        for activation, tensors in zip(bound.activations, messages, strict=True):
            if with_gradients:
                for number in activation.leaves:
                    tensors[number].requires_grad_()
                    has_leaves = True
            inputs += tensors
            for layer, first, end in activation.layers:
                by_layer[layer] = tensors[first:end]
        microbatch = self._first_microbatch + bound.op.index
        batch: Batch = {}
        if bound.takes_batch:
            assert self._batches is not None, "a device whose stages read rows has a source of them"
            batch = devices.upload(self._batches.batch(microbatch, bound.rows), self._on)
        rng_key = RngKey(microbatch, bound.first_row)
        outputs = bound.weights.run(bound.version, by_layer, batch, rng_key)
        if with_gradients:
            for layer, number in bound.constants:
                if outputs[layer][number].requires_grad:
                    raise self._unforeseen((layer, number), f"takes a gradient in {bound.op}")
        first_outputs = bound.weights.module.first
        pivot = () if has_leaves else first_outputs[0]
        first_outputs[0] = ()
        if not bound.takes_loss:
            return _Saved(bound.version, inputs, outputs, pivot, None)
        # The loss stands for the outputs: its backward begins with it, and logits are large.
        return _Saved(bound.version, inputs, {}, pivot, self._losses.loss(bound, outputs, batch, rng_key))

    def _roots(self, bound: BoundOp, saved: _Saved) -> tuple[list[Tensor], list[Tensor]]:
        """Return where a stage's backward begins: its loss, or its outputs, with their gradients."""
        if saved.loss is not None:
            return [saved.loss], [self._losses.gradient(saved.loss, bound.loss_weight)]
        sums: dict[OutputId, Tensor] = {}
        for message in bound.gradients:
            for place, gradient in zip(message.outputs, self._mailbox.take(message.key), strict=True):
                sums[place] = sums[place] + gradient if place in sums else gradient
        return [saved.outputs[layer][number] for layer, number in sums], list(sums.values())

    def _origin(self, bound: BoundOp, number: int) -> OutputId:
        edges = [(output.key[2], output.key[1]) for output in bound.outputs]
        return [place for edge in edges for place, _ in self._edges.places(edge)][number]

    def _unforeseen(self, place: OutputId, what: str) -> ConfigError:
        layer, number = place
        name = self._model.layers[layer].name
        return ConfigError(
            f"output {number} of layer {name!r} {what}, but none of the forwards before training had a gradient of it, so that stages "
            f"exchange none; say Layer({name!r}, ..., gradients_vary=True)"
        )
