"""Runs any job on one device. Knows neither Ray nor the name of any schedule.

The executor walks the steps that `wiring` makes of a device's program. Tensors in flight lie in dicts by stage and microbatch,
which are empty between windows:

    inbox      messages received, or made on this device for another of its stages, not yet used
    outbox     what the Ops of this step have made for other devices
    saved      what a forward left for its backward
    deferred   what an input gradient left for its weight gradient
    shared     the sum of the gradients of what a stage shares with others, until its update
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.clock import Clock, DeviceClock, HostClock, Timed
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.execution.report import WindowReport
from raypipe.actors.execution.steps import Awaiting, Computing, Given, MessageKey, Receiving, Rows, Starting, WiredOp, Wirer, Wiring
from raypipe.actors.stage.backward import PendingWeightGradient, backward_full, backward_input, keep_what_compiled_forwards_save
from raypipe.actors.stage.gradient_flow import EdgeSpecs, Place, stand_in, unchanged
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import Outputs
from raypipe.actors.stage.weights import Weights
from raypipe.actors.transport.protocol import Pending, Transport
from raypipe.artifacts.cut import Cut
from raypipe.errors import AbortedError, ConfigError, RunError, TransportTimeoutError
from raypipe.model import Batch, Model
from raypipe.schedules.ir import Op, OpKind, UpdateScope
from raypipe.schedules.lower import Collective, CollectiveKind, DeviceProgram


class LearningRate(Protocol):
    """The learning rate of an update, counted from the beginning of training."""

    def __call__(self, update: int, /) -> float:
        """The rate."""


@dataclass(frozen=True)
class Window:
    """What differs from one window to the next.

    Attributes:
        number: counted from 0 for each program; for faults and messages.
        first_update: updates done before it.
        batches: where the rows come from; `None` for a device whose stages read none.
        keep_outputs: whether the last layer's outputs are reported (evaluation only).
        num_rows: rows of a microbatch, where there are others than the stages were connected for.
    """

    number: int
    first_update: int
    batches: BatchSource | None
    keep_outputs: bool = False
    num_rows: int | None = None


@dataclass(slots=True)
class _Saved:
    """What a forward leaves for its backward.

    Attributes:
        version: of the weights that it used.
        inputs: from the stages before it.
        outputs: by layer.
        pivot: see `backward_input`.
        loss: where it is taken.
    """

    version: int
    inputs: list[Tensor]
    outputs: Outputs
    pivot: tuple[Tensor, ...]
    loss: Tensor | None


class Executor:
    """One device's stages and its way of running programs over them.

    Args:
        device: its number.
        model: the whole model's description.
        cut: the layers of all stages.
        held: the weights of the stages that this device holds.
        transport: its channels.
        edge_specs: what travels along each edge of the stage graph.
        num_rows: rows of a whole microbatch.
        learning_rate: of each update.
        max_grad_norm: gradients are scaled to at most this norm, over the scope of the update; `None` for no limit.
        faults: what is to go wrong.
        on: torch's name of the device.
        names: of all devices, for messages; their numbers by default.
        timeout_s: until a device that works behind the host must have done another step.
    """

    def __init__(
        self,
        *,
        device: int,
        model: Model,
        cut: Cut,
        held: Mapping[int, Weights],
        transport: Transport,
        edge_specs: EdgeSpecs,
        num_rows: int,
        learning_rate: LearningRate,
        max_grad_norm: float | None = None,
        faults: FaultScript | None = None,
        on: torch.device = devices.CPU,
        names: Sequence[str] = (),
        timeout_s: float = 300.0,
    ) -> None:
        self.device = device
        self.on = on
        self.names = names
        self.timeout_s = timeout_s
        self.model = model
        self.held = held
        self.transport = transport
        self.wirer = Wirer(cut, held, edge_specs)
        self._wirings: dict[tuple[int, int], tuple[DeviceProgram, Wiring]] = {}
        self.num_rows = num_rows
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.faults = faults or FaultScript()
        self.doing = "waiting to begin"
        """What the host is at."""
        self.abort_reason: str | None = None
        self.failure: RunError | None = None
        """What another thread has found, while this one may be held up by the device."""
        self.clock: Clock = HostClock()
        if on.type != "cpu":
            module = torch.get_device_module(on)
            self.clock = DeviceClock(module, timeout_s=timeout_s, check=self._look_around, stuck=self._give_up)

    @property
    def progress(self) -> str:
        """What the device is doing, in words. Called from another thread."""
        step = self.clock.doing()
        return self.doing if step is None else step.name if isinstance(step, Computing) else step.doing

    def run(self, program: DeviceProgram, window: Window) -> WindowReport:
        """Runs one window.

        Raises:
            TransportError: a message did not pass.
            RunError: a device that works behind the host did not come to an end.
            AbortedError: `abort` was called.
        """
        try:
            return self._run(program, window)
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise

    def _run(self, program: DeviceProgram, window: Window) -> WindowReport:
        keep_what_compiled_forwards_save()
        wiring = self._wiring(program, window.num_rows or self.num_rows)
        self.clock.rest()
        self.transport.open_window(wiring.incoming, wiring.outgoing)
        for weights in self.held.values():
            weights.module.train(not program.forward_only)
            weights.begin_window()
        self.doing = "waiting to begin"
        run = _Run(self, program, window, wiring)
        with torch.set_grad_enabled(not program.forward_only):
            report = run.run()
        self.doing = "waiting for the last messages to leave"
        self.transport.close_window()
        for weights in self.held.values():
            if not program.forward_only:
                weights.end_window()
        return report

    def warm_up(self, batch: Batch) -> None:
        """Runs each stage forwards and backwards once, in both ways, and drops what that gave; for a GPU, before it meets others.

        CUDA loads kernels when they are first asked for, torch compiles layers when they first run, and both may wait until the GPU has
        done all that it was told. In a window that would be messages, too, which wait for others that wait for this device.
        """
        for weights in self.held.values():
            weights.module.train()
            with unchanged(weights.module):
                for split in (False, True):
                    self._run_once(weights, devices.upload(batch, self.on), split=split)

    def _run_once(self, weights: Weights, batch: Batch, *, split: bool) -> None:
        """Runs a stage over zeros, with the whole backward or with one in two parts."""
        module, last = weights.module, len(self.model.layers) - 1
        inputs: Outputs = {}
        for (source, target), of_layers in self.wirer.edge_specs.items():
            if target == module.stage:
                crossing = self.wirer.cut.crossing[source, target]
                inputs |= {
                    layer: tuple(stand_in(tensor, on=self.on) for tensor in tensors)
                    for layer, tensors in zip(crossing, of_layers, strict=True)
                }
        outputs = weights.run(weights.newest, inputs, batch, RngKey(0))
        roots = [tensor for tensors in outputs.values() for tensor in tensors if tensor.requires_grad]
        if last in outputs:
            roots = [self.model.loss(outputs[last][0], batch)]
        gradients = [torch.ones_like(root) for root in roots]
        leaves = [tensor for tensors in inputs.values() for tensor in tensors]
        parameters = weights.bind(weights.newest, 0)
        if split:
            pivot = () if any(leaf.requires_grad for leaf in leaves) else module.first[0]
            _, deferred = backward_input(roots, gradients, leaves, parameters, pivot=pivot)
            deferred.run()
        else:
            backward_full(roots, gradients, leaves, parameters)
        _root(weights.squared_norm(0))
        weights.flat_gradients(0)
        weights.drop_gradients(0)
        module.first[0] = ()

    def abort(self, reason: str) -> None:
        """Ends what runs, within a second. Called from another thread."""
        self.abort_reason = reason
        self.transport.abort(reason)

    def close(self) -> None:
        """Ends the threads that it has."""
        self.clock.close()

    def _look_around(self) -> None:
        """Ends what runs if messages will not come any more. Called from another thread."""
        try:
            if self.abort_reason is None:
                self.transport.check()
        except RunError as error:
            self.failure = error
            self.abort(str(error))

    def _give_up(self, step: Timed) -> None:
        """Ends what runs because the device has been at one step for too long. Called from another thread."""
        if self.abort_reason is not None:
            return
        name = self._name(self.device)
        if isinstance(step, Receiving):
            problem = f"it did not come within {self.timeout_s:g} s"
            self.failure = TransportTimeoutError(name, self._name(step.device), str(step.message), problem)
        elif isinstance(step, Computing):
            self.failure = RunError(f"device {name} has been at {step.name} for {self.timeout_s:g} s, on {self.on}, and does not end")
        else:
            others = ", ".join(self._name(member) for member in step.collective.devices if member != self.device)
            problem = f"it did not end within {self.timeout_s:g} s"
            self.failure = TransportTimeoutError(name, others, str(step.collective), problem)
        self.abort(str(self.failure))

    def _name(self, device: int) -> str:
        return self.names[device] if self.names else str(device)

    def _wiring(self, program: DeviceProgram, num_rows: int) -> Wiring:
        """The wiring of a program, worked out when it is first asked for."""
        key = (id(program), num_rows)
        if key not in self._wirings:
            # With the program, whose number nothing else may get.
            self._wirings[key] = (program, self.wirer.wire(program, num_rows))
        return self._wirings[key][1]


Number = float | Tensor
"""A number; one that a device works out behind the host stays there."""


def _root(square: Tensor) -> Number:
    return math.sqrt(square) if square.is_cpu else square.sqrt()


def _hypot(one: Number, other: Number) -> Number:
    return torch.hypot(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else math.hypot(one, other)


class _Run:
    """One window on one device."""

    def __init__(self, executor: Executor, program: DeviceProgram, window: Window, wiring: Wiring) -> None:
        self.executor = executor
        self.program = program
        self.window = window
        self.steps = wiring.steps
        self.updated = wiring.updated
        self.training = not program.forward_only
        self.first_microbatch = window.first_update * program.num_microbatches
        self.faults = executor.faults if executor.faults.faults else None
        self.report = WindowReport(executor.device, executor.clock.begin())
        self.mark, self.note = executor.clock.mark, executor.clock.note
        self.inbox: dict[MessageKey, list[tuple[Rows, tuple[Tensor, ...]]]] = {}
        self.outbox: dict[MessageKey, tuple[Tensor, ...]] = {}
        self.saved: dict[tuple[int, int, int], _Saved] = {}
        self.deferred: dict[tuple[int, int, int], tuple[int, PendingWeightGradient]] = {}
        self.pending: dict[Collective, Pending] = {}
        self.shared: dict[tuple[int, int], Tensor] = {}
        self.norms: dict[int, Number] = {}
        self.tied_norms: dict[tuple[int, int], Number] = {}
        self.losses: dict[int, list[tuple[int, Tensor]]] = {}
        self.loss_gradients: dict[float, Tensor] = {}

    def run(self) -> WindowReport:
        handlers = {Computing: self._compute, Receiving: self._receive, Starting: self._start, Awaiting: self._await}
        executor = self.executor
        for step in self.steps:
            if executor.abort_reason is not None:
                raise AbortedError(executor.abort_reason)
            handlers[type(step)](step)  # type: ignore[operator]
        for name in ("inbox", "outbox", "saved", "deferred", "pending", "shared"):
            assert not getattr(self, name), f"device {executor.device}: {name} holds {list(getattr(self, name))} after the window"
        self.report.log = executor.clock.finish()
        self.report.norms = {update: float(norm) for update, norm in self.norms.items()}
        self.report.outputs = {index: output.cpu() for index, output in self.report.outputs.items()}
        for index, parts in self.losses.items():
            self.report.num_rows[index] = sum(rows for rows, _ in parts)
            self.report.losses[index] = sum(rows * float(loss) for rows, loss in parts) / self.report.num_rows[index]
        return self.report

    # Computation

    def _compute(self, step: Computing) -> None:
        executor = self.executor
        executor.doing = step.name
        since = self.mark()
        if self.faults is not None:
            self.faults.strike(device=executor.device, op=step.name, window=self.window.number)
        for wired in step.ops:
            match wired.kind:
                case OpKind.FORWARD:
                    self._forward(wired)
                case OpKind.BACKWARD | OpKind.INPUT_GRADIENT:
                    self._backward(wired)
                case OpKind.RECOMPUTE:
                    self._recompute(wired)
                case OpKind.WEIGHT_GRADIENT:
                    used, gradient = self.deferred.pop(wired.key)
                    wired.weights.bind(used, wired.update)
                    gradient.run()
                case OpKind.UPDATE:
                    self._update(wired.op, step.position)
                case _:
                    raise AssertionError(f"no such computation: {wired.op}")
        until = self.mark()
        # Messages first: others may wait for them.
        for sending in step.sends:
            tensors = self.outbox[sending.key]
            if sending.rows is not None:
                first, end = sending.rows
                tensors = tuple(tensor[first:end] for tensor in tensors)
            executor.transport.send(sending.message, sending.device, tensors)
        self.outbox.clear()
        if step.sends:
            # The receiver may have been woken on this core, where it would wait until this process sleeps, up to 0.4 ms behind an update.
            os.sched_yield()
        self.note(step, since, until, 0)
        executor.doing = step.after
        for weights, version in step.releases:
            weights.release(version)

    def _forward(self, wired: WiredOp) -> None:
        messages = [self._take(taken.key) for taken in wired.activations]
        if wired.recomputed:
            inputs = [tensor for tensors in messages for tensor in tensors]
            # A layer may write into what takes no gradient, and the forward that runs again must find it as it was.
            copies = [
                tuple([tensor if number in taken.leaves else tensor.clone() for number, tensor in enumerate(tensors)])
                for taken, tensors in zip(wired.activations, messages, strict=True)
            ]
            with torch.no_grad():
                found = self._layers(wired, copies, with_gradients=False)
            # The inputs alone are kept: they are what the stages before hold anyway, or next to nothing beside what layers save.
            self.saved[wired.key] = replace(found, inputs=inputs, outputs={}, pivot=(), loss=None)
        else:
            found = self._layers(wired, messages, with_gradients=self.training)
            if self.training:
                self.saved[wired.key] = found
        if found.loss is not None:
            self.losses.setdefault(wired.op.index, []).append((wired.num_rows, found.loss.detach()))
        for given in wired.given:
            self._give(given, wired.rows, tuple([tensor for layer in given.layers for tensor in found.outputs[layer]]))

    def _recompute(self, wired: WiredOp) -> None:
        """Runs a forward again, with the weights, rows and random numbers that it had, for the backward that follows."""
        inputs = self.saved[wired.key].inputs
        messages: list[tuple[Tensor, ...]] = []
        first = 0
        for taken in wired.activations:
            end = first + taken.layers[-1][2]
            messages.append(tuple(inputs[first:end]))
            first = end
        self.saved[wired.key] = self._layers(wired, messages, with_gradients=True)

    def _layers(self, wired: WiredOp, messages: Sequence[tuple[Tensor, ...]], *, with_gradients: bool) -> _Saved:
        """Runs a stage's layers over what other stages sent."""
        inputs: list[Tensor] = []
        by_layer: Outputs = {}
        has_leaves = False
        for taken, tensors in zip(wired.activations, messages, strict=True):
            if with_gradients:
                for number in taken.leaves:
                    tensors[number].requires_grad_()
                    has_leaves = True
            inputs += tensors
            for layer, first, end in taken.layers:
                by_layer[layer] = tensors[first:end]
        microbatch = self.first_microbatch + wired.op.index
        batch = self._rows(microbatch, wired.rows) if wired.takes_batch else {}
        weights = wired.weights
        draw = RngKey(microbatch, wired.first_row)
        outputs = weights.run(wired.version, by_layer, batch, draw)
        if with_gradients:
            for layer, number in wired.constants:
                if outputs[layer][number].requires_grad:
                    raise self._unforeseen((layer, number), f"takes a gradient in {wired.op}")
        first_outputs = weights.module.first
        pivot = () if has_leaves else first_outputs[0]
        first_outputs[0] = ()
        loss = self._loss(wired, outputs, batch, draw) if wired.takes_loss else None
        # The loss stands for the outputs: its backward begins with it, and logits are large.
        return _Saved(wired.version, inputs, outputs if loss is None else {}, pivot, loss)

    def _rows(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        assert self.window.batches is not None, "a device whose stages read rows has some"
        return devices.upload(self.window.batches.batch(microbatch, rows), self.executor.on)

    def _loss(self, wired: WiredOp, outputs: Outputs, batch: Batch, draw: RngKey) -> Tensor:
        model = self.executor.model
        output = outputs[len(model.layers) - 1]
        if len(output) != 1:
            raise ConfigError(f"the model's last layer gives {len(output)} tensors; the loss takes one")
        if self.window.keep_outputs:
            self.report.outputs[wired.op.index] = output[0].detach()
        with wired.weights.module.seeded_loss(draw):
            loss = model.loss(output[0], batch)
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is of type {type(loss).__name__}"
            raise ConfigError(f"the model's loss {what}; expected a scalar tensor, the mean over the rows")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                "the model's loss has no gradient, so nothing would be trained: no weight takes one, or the loss is detached or made of "
                "constants alone"
            )
        return loss

    def _backward(self, wired: WiredOp) -> None:
        saved = self.saved.pop(wired.key)
        outputs, gradients = self._roots(wired, saved)
        parameters = wired.weights.bind(saved.version, wired.update)
        inputs = saved.inputs
        if wired.kind is OpKind.BACKWARD:
            found = backward_full(outputs, gradients, inputs, parameters)
        else:
            found, deferred = backward_input(outputs, gradients, inputs, parameters, pivot=saved.pivot)
            self.deferred[wired.key] = (saved.version, deferred)
        for given in wired.given:
            message: list[Tensor] = []
            for number in given.leaves:
                gradient = found[number]
                message.append(torch.zeros_like(inputs[number]) if gradient is None else gradient)
            for number in given.without:
                if found[number] is not None:
                    raise self._unforeseen(self._place(wired, number), f"gets a gradient from {wired.op}")
            self._give(given, wired.rows, tuple(message))

    def _place(self, wired: WiredOp, number: int) -> Place:
        """Where an input of a stage is made."""
        stage = wired.op.stage
        edges = [(source, stage) for source in self.program.graph.predecessors[stage]]
        return [place for edge in edges for place, _ in self.executor.wirer.places(edge)][number]

    def _unforeseen(self, place: Place, what: str) -> ConfigError:
        """What is wrong with a layer whose gradients depend on values."""
        layer, number = place
        name = self.executor.model.layers[layer].name
        return ConfigError(
            f"output {number} of layer {name!r} {what}, but none of the forwards before training had a gradient of it, so that stages "
            f"exchange none; say Layer({name!r}, ..., gradients_vary=True)"
        )

    def _roots(self, wired: WiredOp, saved: _Saved) -> tuple[list[Tensor], list[Tensor]]:
        """Where the backward of a stage begins: its loss, or the outputs with the sums of what their consumers sent back."""
        if saved.loss is not None:
            # The weight is the gradient that the backward begins with: one node of the graph less than a product.
            gradient = self.loss_gradients.get(wired.loss_weight)
            if gradient is None:
                gradient = self.loss_gradients[wired.loss_weight] = torch.full_like(saved.loss, wired.loss_weight)
            return [saved.loss], [gradient]
        sums: dict[tuple[int, int], Tensor] = {}
        for taken in wired.gradients:
            for at, gradient in zip(taken.roots, self._take(taken.key), strict=True):
                sums[at] = sums[at] + gradient if at in sums else gradient
        return [saved.outputs[layer][number] for layer, number in sums], list(sums.values())

    def _update(self, op: Op, position: int) -> None:
        executor, weights = self.executor, self.executor.held[op.stage]
        shared = self._shared(op.stage, op.index)
        norm = self._norm(op)
        if shared is not None:
            # What stages share is limited alike on all of them. A product: other stages of this device may be yet to use the sum.
            shared = shared * self._scale(
                _root(weights.shared_squared_norm(shared)) if self.program.update_scope is UpdateScope.STAGE else norm
            )
            del self.shared[op.stage, op.index]
        weights.update(
            op.index,
            scale=self._scale(norm),
            learning_rate=executor.learning_rate(self.window.first_update + op.index),
            keep_old=self.program.last_reads[op.stage, op.index] > position,
            shared=shared,
        )

    def _scale(self, norm: Number) -> Number:
        limit = self.executor.max_grad_norm
        if limit is None:
            return 1.0
        if isinstance(norm, Tensor):
            return torch.where(norm <= limit, 1.0, limit / (norm + 1e-6))
        return 1.0 if norm <= limit else limit / (norm + 1e-6)

    def _norm(self, op: Op) -> Number:
        """The gradient norm that limits an update: over all stages, over those of its tie, or over what its own shares with none."""
        if self.program.update_scope is UpdateScope.GLOBAL:
            if op.index not in self.norms:  # no other device: there was no collective
                self.norms[op.index] = _root(self._own_squared_norm(op.index, self.executor.held))
            return self.norms[op.index]
        if op.stage in self.program.primary_stages:
            own = _root(self._own_squared_norm(op.index, (op.stage,)))
            self.norms[op.index] = _hypot(self.norms[op.index], own) if op.index in self.norms else own
        tie = self.program.graph.tie_of.get(op.stage)
        if self.program.update_scope is UpdateScope.STAGE or tie is None:
            return _root(self.executor.held[op.stage].squared_norm(op.index))
        if (tie, op.index) not in self.tied_norms:
            self.tied_norms[tie, op.index] = _root(self._own_squared_norm(op.index, self.program.graph.ties[tie]))
        return self.tied_norms[tie, op.index]

    def _own_squared_norm(self, update: int, stages: Collection[int]) -> Tensor:
        """What this device brings to a norm over some stages; what they share counts with the first of them."""
        parts = [torch.zeros((), dtype=torch.float64, device=self.executor.on)]
        graph = self.program.graph
        for stage in self.program.primary_stages.intersection(stages):
            parts.append(self.executor.held[stage].squared_norm(update))
            if stage in graph.tie_of and stage == graph.ties[graph.tie_of[stage]][0]:
                shared = self._shared(stage, update)
                assert shared is not None, "it is tied"
                parts.append(self.executor.held[stage].shared_squared_norm(shared))
        return torch.stack(parts).sum()

    # Weights that stages share

    def _shared(self, stage: int, update: int) -> Tensor | None:
        """The sum of the gradients of all weights that a stage's tie shares; `None` where it has none."""
        tie = self.program.graph.tie_of.get(stage)
        if tie is None:
            return None
        if (stage, update) not in self.shared:  # all stages of the tie are here: there was no collective
            self._take_shared(tie, update, self._brought_to(tie, update, self.executor.held))
        return self.shared[stage, update]

    def _take_shared(self, tie: int, update: int, total: Tensor) -> None:
        for stage in self.updated.intersection(self.program.graph.ties[tie]):
            self.shared[stage, update] = total

    def _brought_to(self, tie: int, update: int, stages: Collection[int]) -> Tensor:
        """The sum over some of the stages of this device, added up in one order everywhere; zeros where none is tied."""
        held = self.executor.held
        mine = [stage for stage in self.program.graph.ties[tie] if stage in held]
        parts = [held[stage].shared_gradients(update) for stage in mine if stage in stages]
        return sum(parts[1:], start=parts[0]) if parts else torch.zeros_like(held[mine[0]].shared_gradients(update))

    # Messages

    def _give(self, given: Given, rows: Rows, tensors: tuple[Tensor, ...]) -> None:
        """Puts a stage's result where its consumer finds it: on this device, or for the Sends of this step."""
        if given.here:
            self.inbox[given.key] = [(rows, tuple([tensor.detach() for tensor in tensors]))]
        else:
            self.outbox[given.key] = tensors

    def _take(self, key: MessageKey) -> tuple[Tensor, ...]:
        """The tensors of a message, put together from its rows if they came in several."""
        pieces = self.inbox.pop(key)
        if len(pieces) == 1:
            return pieces[0][1]
        pieces.sort(key=itemgetter(0))
        return tuple(torch.cat(parts) for parts in zip(*(tensors for _, tensors in pieces), strict=True))

    def _receive(self, step: Receiving) -> None:
        executor = self.executor
        executor.doing = step.doing
        since = self.mark()
        tensors = executor.transport.recv(step.message, step.device)
        self.note(step, since, self.mark(), step.num_bytes)
        piece = (step.message.rows, tensors)
        pieces = self.inbox.setdefault(step.key, [piece])
        if pieces[0] is not piece:
            pieces.append(piece)

    # Collectives

    def _start(self, step: Starting) -> None:
        collective = step.collective
        if collective.kind is CollectiveKind.NORM:
            tensor = self._own_squared_norm(collective.update, self.executor.held).reshape(1)
        elif collective.kind is CollectiveKind.TIED_NORM:
            tensor = self._own_squared_norm(collective.update, self.program.graph.ties[collective.stage]).reshape(1)
        elif collective.kind is CollectiveKind.TIED:
            tensor = self._brought_to(collective.stage, collective.update, self.program.primary_stages)
        elif collective.kind is CollectiveKind.GRADIENTS:
            tensor = self.executor.held[collective.stage].flat_gradients(collective.update)
        else:
            # The owner has made the new version; the others, and all but one of an owner's devices, add nothing, so that the sum is it.
            weights = self.executor.held[collective.stage]
            brings = weights.newest > collective.update and collective.stage in self.program.primary_stages
            tensor = weights.flat() if brings else torch.zeros_like(weights.flat())
        self.pending[collective] = self.executor.transport.start(collective, tensor)

    def _await(self, step: Awaiting) -> None:
        collective = step.collective
        self.executor.doing = step.doing
        since = self.mark()
        total = self.pending.pop(collective).wait()
        self.note(step, since, self.mark(), total.nbytes)
        if collective.kind is CollectiveKind.NORM:
            self.norms[collective.update] = _root(total.reshape(()))
            return
        if collective.kind is CollectiveKind.TIED_NORM:
            self.tied_norms[collective.stage, collective.update] = _root(total.reshape(()))
            return
        if collective.kind is CollectiveKind.TIED:
            self._take_shared(collective.stage, collective.update, total)
            return
        weights = self.executor.held[collective.stage]
        if collective.kind is CollectiveKind.GRADIENTS:
            weights.set_flat_gradients(collective.update, total)
        elif weights.newest <= collective.update:
            weights.receive(collective.update, total)
