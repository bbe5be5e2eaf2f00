"""Runs the forwards and backwards of one window, with their messages and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.binding import StageEdges
from raypipe.actors.execution.loss_weights import LossWeights
from raypipe.actors.execution.report import WindowReport
from raypipe.actors.execution.steps import BoundOp, MessageKey, OutgoingMessage, ReceiveStep, RowRange, StageOutput
from raypipe.actors.stage.backward import PendingWeightGradient, backward_full, backward_input
from raypipe.actors.stage.gradient_flow import OutputId
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.losses import checked_loss
from raypipe.actors.stage.module import Outputs
from raypipe.actors.transport.protocol import Transport
from raypipe.errors import ConfigError, suggestion
from raypipe.model import Batch, Model
from raypipe.schedules.ir import OpKind

_Piece = tuple[RowRange, tuple[Tensor, ...]]
"""Tensors, and the rows of the microbatch that they are."""


class _Fields(dict[str, Tensor]):
    """The fields of a batch, which say what there is instead of a missing one."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"the model takes the field {name!r} of the batch{suggestion(name, self)}; the data has {', '.join(self) or 'none'}"
        )


class Mailbox:
    """What stages of this device have received and not yet used, and what they send."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.inbox: dict[MessageKey, list[_Piece]] = {}
        self.outbox: dict[MessageKey, tuple[Tensor, ...]] = {}

    def put(self, output: StageOutput, tensors: tuple[Tensor, ...]) -> None:
        """Put a stage's output where the other stage finds it, or for the sends of this step."""
        if output.local:
            self._arrive(output.key, (output.rows, tuple([tensor.detach() for tensor in tensors])))
        else:
            self.outbox[output.key] = tensors

    def take(self, key: MessageKey, rows: RowRange | None) -> tuple[Tensor, ...]:
        """Return some rows, or all, of the tensors from another stage, joined where they came in several pieces."""
        pieces = self.inbox.pop(key) if rows is None else self._cut_out(key, rows)
        if len(pieces) == 1:
            return pieces[0][1]
        pieces.sort(key=itemgetter(0))
        return tuple(torch.cat(parts) for parts in zip(*(tensors for _, tensors in pieces), strict=True))

    def receive(self, step: ReceiveStep) -> None:
        """Wait for a message."""
        self._arrive(step.key, (step.rows, self._transport.recv(step.message, step.device)))

    def send(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send what the Ops of a step have put."""
        for outgoing in messages:
            tensors = self.outbox[outgoing.key]
            if outgoing.rows is not None:
                first, end = outgoing.rows
                tensors = tuple(tensor[first:end] for tensor in tensors)
            self._transport.send(outgoing.message, outgoing.device, tensors)
        self.outbox.clear()

    def _arrive(self, key: MessageKey, piece: _Piece) -> None:
        pieces = self.inbox.setdefault(key, [piece])
        if pieces[0] is not piece:
            pieces.append(piece)

    def _cut_out(self, key: MessageKey, rows: RowRange) -> list[_Piece]:
        """Return the pieces of these rows; those of other rows stay for the parts that take them."""
        first, end = rows
        taken: list[_Piece] = []
        left: list[_Piece] = []
        for piece in self.inbox.pop(key):
            start, stop = piece[0]
            inside = max(first, start), min(end, stop)
            if inside[0] < inside[1]:
                taken.append(_rows_of(piece, inside))
                left += [_rows_of(piece, outside) for outside in ((start, inside[0]), (inside[1], stop)) if outside[0] < outside[1]]
            elif start < stop:
                left.append(piece)
        if left:
            self.inbox[key] = left
        return taken


def _rows_of(piece: _Piece, rows: RowRange) -> _Piece:
    start = piece[0][0]
    if rows == piece[0]:
        return piece
    # Detached, so that autograd takes each slice for a leaf and not for a view of all rows.
    return rows, tuple([tensor[rows[0] - start : rows[1] - start].detach() for tensor in piece[1]])


class WindowLosses:
    """The losses, and if asked for the model's outputs, of the microbatches of a window."""

    def __init__(self, model: Model, *, keep_outputs: bool) -> None:
        self._model = model
        self._keep_outputs = keep_outputs
        self._losses: dict[int, list[tuple[float, Tensor]]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[float, Tensor] = {}

    def loss(self, bound: BoundOp, outputs: Outputs, batch: Batch, rng_key: RngKey, *, counts: bool) -> Tensor:
        """Return the loss of a forward, 0 where it does not count.

        Raises:
            ConfigError: The model gives no scalar with a gradient, or several outputs.
        """
        output = outputs[len(self._model.layers) - 1]
        if len(output) != 1:
            raise ConfigError(f"the model's last layer gives {len(output)} tensors; the loss takes one")
        if self._keep_outputs:
            self._outputs[bound.op.index] = output[0].detach()
        if counts:
            with bound.weights.module.seeded_loss(rng_key):
                loss = self._model.loss(output[0], batch)
        else:
            loss = output[0].flatten()[:0].sum()  # a mean over nothing would be no number, and so would its gradient
        return checked_loss(loss)

    def add(self, bound: BoundOp, loss: Tensor, weight: float) -> None:
        """Add the loss of a forward to the report."""
        self._losses.setdefault(bound.op.index, []).append((weight, loss.detach()))

    def gradient(self, loss: Tensor, factor: float) -> Tensor:
        """Return the gradient of a loss: its factor, one graph node less than a product."""
        gradient = self._gradients.get(factor)
        if gradient is None:
            gradient = self._gradients[factor] = torch.full_like(loss, factor)
        return gradient

    def write(self, report: WindowReport) -> None:
        """Write losses and outputs into a report."""
        report.outputs = {index: output.cpu() for index, output in self._outputs.items()}
        for index, parts in self._losses.items():
            weight = report.loss_weights[index] = sum(weight for weight, _ in parts)
            report.losses[index] = sum(of_part * float(loss) for of_part, loss in parts) / (weight or 1.0)


@dataclass(slots=True)
class _Saved:
    """What a forward keeps for its backward; `backward_input` explains `pivot`, and `weight` is what the loss counts for."""

    version: int
    inputs: list[Tensor]
    outputs: Outputs
    pivot: tuple[Tensor, ...]
    loss: Tensor | None = None
    weight: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Computation:
    """Forwards, and in `training` backwards, of one window on one device."""

    model: Model
    on: torch.device
    edges: StageEdges
    mailbox: Mailbox
    losses: WindowLosses
    loss_weights: LossWeights
    batches: BatchSource | None
    first_microbatch: int
    training: bool
    saved: dict[tuple[int, int, int], _Saved] = field(default_factory=dict)
    """What forwards keep for their backwards, by stage, microbatch and part."""
    deferred: dict[tuple[int, int, int], tuple[int, PendingWeightGradient]] = field(default_factory=dict)
    """What input gradients have left for weight gradients, with the version of the weights."""
    rows: dict[tuple[int, int, int], Batch] = field(default_factory=dict)
    """What has been read for the Ops of a step, on the host."""

    def read(self, bound: BoundOp) -> None:
        """Read what an Op takes of the batch; before the first backward of an update, what its losses count for."""
        if bound.op.kind in {OpKind.FORWARD, OpKind.RECOMPUTE}:
            assert self.batches is not None, "a device whose stages read rows has a source of them"
            self.rows[bound.key] = self.batches.batch(self.first_microbatch + bound.op.index, bound.rows)
        elif bound.takes_loss and bound.op.kind.gives_input_gradient:
            self.loss_weights.count(bound.update)

    def forward(self, bound: BoundOp) -> None:
        """Run a forward."""
        mailbox = self.mailbox
        messages = [mailbox.take(activation.key, activation.rows) for activation in bound.activations]
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
            saved = self._run_layers(bound, messages, with_gradients=self.training)
            if self.training:
                self.saved[bound.key] = saved
        if saved.loss is not None:
            self.losses.add(bound, saved.loss, saved.weight)
        for output in bound.outputs:
            mailbox.put(output, tuple([tensor for layer in output.layers for tensor in saved.outputs[layer]]))

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
            self.mailbox.put(output, tuple(tensors))

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
        microbatch = self.first_microbatch + bound.op.index
        on_host = self.rows.pop(bound.key) if bound.takes_batch else {}
        batch = _Fields(devices.upload(on_host, self.on))
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
            return _Saved(bound.version, inputs, outputs, pivot)
        weight = self.loss_weights.weight(bound, on_host)
        loss = self.losses.loss(bound, outputs, batch, rng_key, counts=weight > 0)
        # The loss stands for the outputs: its backward begins with it, and logits are large.
        return _Saved(bound.version, inputs, {}, pivot, loss, weight)

    def _roots(self, bound: BoundOp, saved: _Saved) -> tuple[list[Tensor], list[Tensor]]:
        """Return where a stage's backward begins: its loss, or its outputs, with their gradients."""
        if saved.loss is not None:
            return [saved.loss], [self.losses.gradient(saved.loss, self.loss_weights.factor(bound, saved.weight))]
        sums: dict[OutputId, Tensor] = {}
        for message in bound.gradients:
            for place, gradient in zip(message.outputs, self.mailbox.take(message.key, message.rows), strict=True):
                sums[place] = sums[place] + gradient if place in sums else gradient
        return [saved.outputs[layer][number] for layer, number in sums], list(sums.values())

    def _origin(self, bound: BoundOp, number: int) -> OutputId:
        edges = [(output.key[2], output.key[1]) for output in bound.outputs]
        return [place for edge in edges for place, _ in self.edges.places(edge)][number]

    def _unforeseen(self, place: OutputId, what: str) -> ConfigError:
        layer, number = place
        name = self.model.layers[layer].name
        return ConfigError(
            f"output {number} of layer {name!r} {what}, but none of the forwards before training had a gradient of it, so that stages "
            f"exchange none; say Layer({name!r}, ..., gradients_vary=True)"
        )
