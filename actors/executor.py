"""Runs any lowered program on one device. Knows neither Ray nor the name of any schedule.

The executor walks the items of a `DeviceProgram`. Tensors in flight lie in dicts by stage and microbatch, which are empty
between windows:

    inbox      messages received, or made on this device for another of its stages, not yet used
    saved      what a forward left for its backward
    deferred   what an input gradient left for its weight gradient
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raypipe.actors.backward import PendingWeightGradient, backward_full, backward_input
from raypipe.actors.faults import FaultScript
from raypipe.actors.held import Draw, Outputs, Weights
from raypipe.actors.transport import Expected, Pending, TensorSpec, Transport
from raypipe.cut import Cut
from raypipe.errors import AbortedError, ConfigError, PlanError, ScheduleError
from raypipe.model import Batch, Model
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope
from raypipe.schedules.lower import (
    Await,
    Collective,
    CollectiveKind,
    Compute,
    DeviceProgram,
    Direction,
    Item,
    Message,
    Placement,
    Recv,
    Send,
    Start,
    lower,
)
from raypipe.trace import Span, SpanKind

EdgeSpecs = Mapping[tuple[int, int], tuple[tuple[TensorSpec, ...], ...]]
"""For each edge (source, target) of the stage graph and each layer that crosses it, its tensors for a whole microbatch."""


class BatchSource(Protocol):
    """Gives the rows of a microbatch: a pure function of its number."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        """The fields of a microbatch.

        Args:
            microbatch: counted from the beginning of training, or of the evaluation.
            rows: the share of its rows, from 0 to 1.
        """


Rows = tuple[float, float]
"""First row and end of a microbatch, in shares of it."""

MessageKey = tuple[Direction, int, int, int, int, int]
"""Direction, source stage, target stage, microbatch, pipeline and part: what one Op gives another stage, whatever rows travel where."""


def message_key(message: Message) -> MessageKey:
    """The key of a message."""
    return (message.direction, message.source, message.target, message.index, message.pipeline, message.part)


@dataclass(frozen=True)
class Job:
    """What one device does in every window of a schedule.

    Attributes:
        program: the items.
        graph: which stage feeds which.
        num_microbatches: of one update.
        num_updates: of the window.
        update_scope: whose gradients the norm of an update counts.
        forward_only: whether it evaluates.
        norm_stages: the stages whose norm this device brings, so that replicas count once.
    """

    program: DeviceProgram
    graph: StageGraph
    num_microbatches: int
    num_updates: int
    update_scope: UpdateScope
    forward_only: bool
    norm_stages: frozenset[int]

    @cached_property
    def num_sends(self) -> Counter[MessageKey]:
        """How many Sends carry each message; none where the stage that needs it is on the same device."""
        return Counter(message_key(item.message) for item in self.program.items if isinstance(item, Send))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Each item that takes time in text: for spans, status and faults, made once for all windows."""
        return tuple(_name(item) for item in self.program.items)

    @cached_property
    def rows(self) -> frozenset[Rows]:
        """The different rows of a microbatch that Ops of this device work on."""
        return frozenset(rows for item in self.program.items if isinstance(item, Compute) for rows in item.rows)


def _name(item: Item) -> str:
    match item:
        case Compute():
            return str(item)
        case Recv():
            return str(item.message)
        case Await():
            return str(item.collective)
        case _:
            return ""


def jobs(schedule: Schedule, placement: Placement | None = None) -> tuple[Job, ...]:
    """The jobs of all devices of a valid schedule.

    Raises:
        ScheduleError: it asks for what the executor does not do: recomputation, shared weights, losses coupled over
            microbatches, or a microbatch that is not divided alike by all that is done with it.
    """
    placement = placement or Placement.one_each(schedule.num_workers)
    num_parts: dict[int, int] = {}
    for op, place in schedule.ops():
        where = f"worker {place.worker}, position {place.position}"
        if op.kind in {OpKind.EXCHANGE, OpKind.RECOMPUTE}:
            raise ScheduleError(f"{where}: {op} can be simulated but not yet run")
        if not op.kind.per_update:
            found_parts = len(schedule.find(op._replace(part=0)))
            if num_parts.setdefault(op.index, found_parts) != found_parts:
                raise ScheduleError(
                    f"{where}: {op} is one of {found_parts}, other Ops of microbatch {op.index} of {num_parts[op.index]}; to be run, "
                    "a microbatch must be divided alike by all stages, forward and backward"
                )
        elif op.part:
            raise ScheduleError(f"{where}: {op} can be simulated but not yet run; leave the part out")
    if schedule.graph.ties:
        raise ScheduleError(f"stages {schedule.graph.ties[0]} share a weight: this can be simulated but not yet run")
    if schedule.loss_group_size != 1:
        raise ScheduleError(f"loss_group_size {schedule.loss_group_size} can be simulated but not yet run; use 1")
    found: list[Job] = []
    for program in lower(schedule, placement):
        first = placement.workers[program.worker][0][0] == program.device
        norm_stages = frozenset(holders[0].stage for holders in schedule.replicas if first and holders[0].worker == program.worker)
        found.append(
            Job(
                program=program,
                graph=schedule.graph,
                num_microbatches=schedule.num_microbatches,
                num_updates=schedule.num_updates,
                update_scope=schedule.update_scope,
                forward_only=schedule.forward_only,
                norm_stages=norm_stages,
            )
        )
    return tuple(found)


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
        batches: where the rows come from.
        keep_outputs: whether the last layer's outputs are reported (evaluation only).
        num_rows: rows of a microbatch, where there are others than the stages were connected for.
    """

    number: int
    first_update: int
    batches: BatchSource
    keep_outputs: bool = False
    num_rows: int | None = None


@dataclass
class SpanLog:
    """The spans of a device as columns of numbers: they reach the driver in a small part of the time that objects take.

    Attributes:
        positions: of the items that took time.
        starts_s: seconds since the device began.
        ends_s: likewise.
        sizes_bytes: of what was received or summed.
    """

    positions: array[int] = field(default_factory=lambda: array("Q"))
    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    sizes_bytes: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, position: int, start_s: float, end_s: float, size_bytes: int) -> None:
        """Notes one."""
        self.positions.append(position)
        self.starts_s.append(start_s)
        self.ends_s.append(end_s)
        self.sizes_bytes.append(size_bytes)

    def spans(self, job: Job, *, shift_s: float = 0.0) -> list[Span]:
        """The spans of a job's window, that much later."""
        items, names, device = job.program.items, job.names, job.program.device
        return [
            Span(device, _SPAN_KINDS[type(items[position])], names[position], start_s + shift_s, end_s + shift_s, size)
            for position, start_s, end_s, size in zip(self.positions, self.starts_s, self.ends_s, self.sizes_bytes, strict=True)
        ]

    def seconds(self, job: Job, kind: SpanKind) -> float:
        """The seconds of all spans of a kind."""
        items = job.program.items
        return sum(
            end_s - start_s
            for position, start_s, end_s in zip(self.positions, self.starts_s, self.ends_s, strict=True)
            if _SPAN_KINDS[type(items[position])] is kind
        )


_SPAN_KINDS: dict[type[Item], SpanKind] = {Compute: SpanKind.COMPUTE, Recv: SpanKind.RECV, Await: SpanKind.COLLECTIVE}


@dataclass
class WindowReport:
    """What a device did in a window.

    Attributes:
        device: its number.
        began_s: when its first item began, by the clock that `time.time` reads.
        log: of its spans, in seconds since then.
        losses: by microbatch of the window, the mean over the rows of this device.
        num_rows: by microbatch, the rows of it that these losses are of.
        norms: by update of the window, the gradient norm: over all stages where the update's scope is global, else over the
            stages that count here.
        outputs: by microbatch, if they were asked for.
    """

    device: int
    began_s: float
    log: SpanLog = field(default_factory=SpanLog)
    losses: dict[int, float] = field(default_factory=dict)
    num_rows: dict[int, int] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Saved:
    """What a forward leaves for its backward."""

    version: int
    inputs: dict[int, tuple[Tensor, ...]]
    outputs: Outputs
    pivot: tuple[Tensor, ...]
    loss: _ScaledLoss | None


class _ScaledLoss(NamedTuple):
    """A loss and the weight of its rows in the loss of the update."""

    value: Tensor
    weight: float


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
    ) -> None:
        self.device = device
        self.model = model
        self.cut = cut
        self.held = held
        self.transport = transport
        self.edge_specs = edge_specs
        self.num_rows = num_rows
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.faults = faults or FaultScript()
        self.doing = "waiting to begin"
        self.abort_reason: str | None = None

    def run(self, job: Job, window: Window) -> WindowReport:
        """Runs one window.

        Raises:
            TransportError: a message did not pass.
            AbortedError: `abort` was called.
        """
        num_rows = window.num_rows or self.num_rows
        for rows in job.rows:
            if row_range(rows, num_rows)[0] == row_range(rows, num_rows)[1]:
                raise PlanError(
                    f"device {self.device} works on the share {rows} of a microbatch of {num_rows} rows, which is none; "
                    "use larger microbatches, fewer replicas, or a schedule that does not divide microbatches"
                )
        self.transport.open_window(self._expect(job, num_rows))
        for weights in self.held.values():
            weights.module.train(not job.forward_only)
            weights.begin_window()
        self.doing = "waiting to begin"
        run = _Run(self, job, window)
        with torch.set_grad_enabled(not job.forward_only):
            report = run.run()
        self.doing = "waiting for the last messages to leave"
        self.transport.close_window()
        for weights in self.held.values():
            if not job.forward_only:
                weights.end_window()
        return report

    def abort(self, reason: str) -> None:
        """Ends what runs, within a second. Called from another thread."""
        self.abort_reason = reason
        self.transport.abort(reason)

    def message_specs(self, message: Message, num_rows: int) -> tuple[TensorSpec, ...]:
        """The tensors of a message: the edge's, or those of their gradients, for its share of a microbatch of so many rows."""
        edge = (min(message.source, message.target), max(message.source, message.target))
        specs = tuple(spec for layer in self.edge_specs[edge] for spec in layer)
        if message.direction is Direction.GRADIENT:
            specs = tuple(spec for spec in specs if takes_gradient(spec.dtype))
        first, end = row_range(message.rows, num_rows)
        return tuple(TensorSpec((end - first, *spec.shape[1:]), spec.dtype) for spec in specs)

    def _expect(self, job: Job, num_rows: int) -> dict[int, list[Expected]]:
        expected: dict[int, list[Expected]] = {}
        for item in job.program.items:
            if isinstance(item, Recv):
                expected.setdefault(item.device, []).append(Expected(item.message, self.message_specs(item.message, num_rows)))
        return expected


def norms_of(reports: Sequence[WindowReport], *, scope: UpdateScope) -> dict[int, float]:
    """The gradient norm over all stages by update, from what the devices know of it."""
    known: dict[int, list[float]] = {}
    for report in reports:
        for update, norm in report.norms.items():
            known.setdefault(update, []).append(norm)
    return {update: norms[0] if scope is UpdateScope.GLOBAL else math.hypot(*norms) for update, norms in known.items()}


def mean_losses(reports: Sequence[WindowReport], *, num_microbatches: int) -> list[float]:
    """The loss of each update: the mean over the rows of its microbatches."""
    sums: dict[int, tuple[float, int]] = {}
    for report in reports:
        for index, loss in report.losses.items():
            total, rows = sums.get(index, (0.0, 0))
            sums[index] = (total + loss * report.num_rows[index], rows + report.num_rows[index])
    means = [total / rows for _, (total, rows) in sorted(sums.items())]
    return [sum(means[first : first + num_microbatches]) / num_microbatches for first in range(0, len(means), num_microbatches)]


def row_range(rows: tuple[float, float], num_rows: int) -> tuple[int, int]:
    """First row and end of a share of the rows of a microbatch; neighbouring shares meet without gap or overlap."""
    return round(rows[0] * num_rows), round(rows[1] * num_rows)


def takes_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


class _Run:
    """One window on one device."""

    def __init__(self, executor: Executor, job: Job, window: Window) -> None:
        self.executor = executor
        self.job = job
        self.window = window
        self.num_rows = window.num_rows or executor.num_rows
        self.report = WindowReport(executor.device, time.time())
        self.origin = time.perf_counter()
        self.inbox: dict[MessageKey, list[tuple[Rows, tuple[Tensor, ...]]]] = {}
        self.outbox: dict[MessageKey, tuple[int, Rows, tuple[Tensor, ...]]] = {}
        self.saved: dict[tuple[int, int, int], _Saved] = {}
        self.deferred: dict[tuple[int, int, int], tuple[int, PendingWeightGradient]] = {}
        self.pending: dict[Collective, Pending] = {}
        self.losses: dict[int, list[tuple[int, Tensor]]] = {}
        self.loss_gradients: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def run(self) -> WindowReport:
        handlers = {Compute: self._compute, Send: self._send, Recv: self._recv, Start: self._start, Await: self._await}
        for position, item in enumerate(self.job.program.items):
            if self.executor.abort_reason is not None:
                raise AbortedError(self.executor.abort_reason)
            handlers[type(item)](item, position)  # type: ignore[operator]
        for name in ("inbox", "outbox", "saved", "deferred", "pending"):
            assert not getattr(self, name), f"device {self.executor.device}: {name} holds {list(getattr(self, name))} after the window"
        for index, parts in self.losses.items():
            self.report.num_rows[index] = sum(rows for rows, _ in parts)
            self.report.losses[index] = sum(rows * float(loss) for rows, loss in parts) / self.report.num_rows[index]
        return self.report

    def _span(self, position: int, since: float, size: int = 0) -> None:
        self.report.log.add(position, since - self.origin, time.perf_counter() - self.origin, size)

    # Computation

    def _compute(self, item: Compute, position: int) -> None:
        name = self.job.names[position]
        self.executor.doing = name
        since = time.perf_counter()
        self.executor.faults.strike(device=self.executor.device, op=name, window=self.window.number)
        for op, version, rows in zip(item.ops, item.versions, item.rows, strict=True):
            match op.kind:
                case OpKind.FORWARD:
                    self._forward(op, version, rows)
                case OpKind.BACKWARD | OpKind.INPUT_GRADIENT:
                    self._backward(op, rows)
                case OpKind.WEIGHT_GRADIENT:
                    used, gradient = self.deferred.pop((op.stage, op.index, op.part))
                    self.executor.held[op.stage].bind(used, self._update_of(op))
                    gradient.run()
                case OpKind.UPDATE:
                    self._update(op, position)
                case _:
                    raise AssertionError(f"no such computation: {op}")
        self._span(position, since)
        self.executor.doing = f"waiting to go on after {name}"
        if not self.job.forward_only:
            for op, version in zip(item.ops, item.versions, strict=True):
                if self.job.program.last_reads[op.stage, version] == position:
                    self.executor.held[op.stage].release(version)

    def _update_of(self, op: Op) -> int:
        return op.index // self.job.num_microbatches

    def _microbatch(self, op: Op) -> int:
        """The microbatch's number since the beginning of training."""
        return self.window.first_update * self.job.num_microbatches + op.index

    def _forward(self, op: Op, version: int, rows: Rows) -> None:
        weights = self.executor.held[op.stage]
        inputs: dict[int, tuple[Tensor, ...]] = {}
        for source in self.job.graph.predecessors[op.stage]:
            tensors = self._take((Direction.ACTIVATION, source, op.stage, op.index, op.pipeline, op.part))
            inputs[source] = tuple(_leaf(tensor) for tensor in tensors) if not self.job.forward_only else tensors
        batch = self._batch(op, rows)
        draw = Draw(self._microbatch(op), row_range(rows, self.num_rows)[0])
        outputs = weights.run(version, self._by_layer(op.stage, inputs), batch, draw)
        has_leaves = any(tensor.requires_grad for tensors in inputs.values() for tensor in tensors)
        pivot = () if has_leaves else weights.module.first[0]
        weights.module.first[0] = ()
        loss = self._loss(op, outputs, batch, rows) if op.stage in self.job.graph.sinks else None
        if not self.job.forward_only:
            self.saved[op.stage, op.index, op.part] = _Saved(version, inputs, outputs, pivot, loss)
        for target in self.job.graph.successors[op.stage]:
            layers = self.executor.cut.crossing[op.stage, target]
            message = tuple(tensor.detach() for layer in layers for tensor in outputs[layer])
            self._give((Direction.ACTIVATION, op.stage, target, op.index, op.pipeline, op.part), rows, message)

    def _batch(self, op: Op, rows: Rows) -> Batch:
        needed = op.stage in self.job.graph.sinks or self.executor.held[op.stage].module.takes_batch
        return self.window.batches.batch(self._microbatch(op), rows) if needed else {}

    def _by_layer(self, stage: int, inputs: Mapping[int, tuple[Tensor, ...]]) -> Outputs:
        """The tensors of the messages from other stages, sorted to the layers that made them."""
        found: Outputs = {}
        for source, tensors in inputs.items():
            layers = self.executor.cut.crossing[source, stage]
            first = 0
            for layer, specs in zip(layers, self.executor.edge_specs[source, stage], strict=True):
                found[layer] = tensors[first : first + len(specs)]
                first += len(specs)
        return found

    def _loss(self, op: Op, outputs: Outputs, batch: Batch, rows: Rows) -> _ScaledLoss:
        output = outputs[len(self.executor.model.layers) - 1]
        if len(output) != 1:
            raise ConfigError(f"the model's last layer gives {len(output)} tensors; the loss takes one")
        if self.window.keep_outputs:
            self.report.outputs[op.index] = output[0].detach()
        loss = self.executor.model.loss(output[0], batch)
        if loss.dim():
            raise ConfigError(f"the model's loss has shape {tuple(loss.shape)}; expected a scalar, the mean over the rows")
        first, end = row_range(rows, self.num_rows)
        self.losses.setdefault(op.index, []).append((end - first, loss.detach()))
        return _ScaledLoss(loss, (end - first) / self.num_rows / self.job.num_microbatches)

    def _backward(self, op: Op, rows: Rows) -> None:
        weights = self.executor.held[op.stage]
        saved = self.saved.pop((op.stage, op.index, op.part))
        outputs, gradients = self._roots(op, saved)
        parameters = weights.bind(saved.version, self._update_of(op))
        leaves = [tensor for tensors in saved.inputs.values() for tensor in tensors]
        if op.kind is OpKind.BACKWARD:
            found = backward_full(outputs, gradients, leaves, parameters)
        else:
            found, deferred = backward_input(outputs, gradients, leaves, parameters, pivot=saved.pivot)
            self.deferred[op.stage, op.index, op.part] = (saved.version, deferred)
        position = 0
        for source, tensors in saved.inputs.items():
            pairs = list(zip(tensors, found[position : position + len(tensors)], strict=True))
            position += len(tensors)
            message = tuple(
                torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in pairs if takes_gradient(tensor.dtype)
            )
            self._give((Direction.GRADIENT, op.stage, source, op.index, op.pipeline, op.part), rows, message)

    def _roots(self, op: Op, saved: _Saved) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where the backward of a stage begins: its loss, or the outputs with the sums of what their consumers sent back."""
        if saved.loss is not None:
            # The weight is the gradient that the backward begins with: one node of the graph less than a product.
            key = (saved.loss.weight, saved.loss.value.dtype, saved.loss.value.device)
            if key not in self.loss_gradients:
                self.loss_gradients[key] = torch.full_like(saved.loss.value, saved.loss.weight)
            return [saved.loss.value], [self.loss_gradients[key]]
        sums: dict[tuple[int, int], Tensor] = {}
        for target in self.job.graph.successors[op.stage]:
            received = iter(self._take((Direction.GRADIENT, target, op.stage, op.index, op.pipeline, op.part)))
            for layer in self.executor.cut.crossing[op.stage, target]:
                for number, tensor in enumerate(saved.outputs[layer]):
                    if takes_gradient(tensor.dtype):
                        gradient = next(received)
                        sums[layer, number] = sums[layer, number] + gradient if (layer, number) in sums else gradient
        wanted = [key for key in sums if saved.outputs[key[0]][key[1]].requires_grad]
        return [saved.outputs[layer][number] for layer, number in wanted], [sums[key] for key in wanted]

    def _update(self, op: Op, position: int) -> None:
        executor, weights = self.executor, self.executor.held[op.stage]
        norm = self._norm(op)
        limit = executor.max_grad_norm
        scale = 1.0 if limit is None or norm <= limit else limit / (norm + 1e-6)
        weights.update(
            op.index,
            scale=scale,
            learning_rate=executor.learning_rate(self.window.first_update + op.index),
            keep_old=self.job.program.last_reads[op.stage, op.index] > position,
        )

    def _norm(self, op: Op) -> float:
        """The gradient norm that limits an update: over all stages, or over its own."""
        if self.job.update_scope is not UpdateScope.GLOBAL:
            norm = math.sqrt(self.executor.held[op.stage].squared_norm(op.index))
            if op.stage in self.job.norm_stages:
                self.report.norms[op.index] = math.hypot(self.report.norms.get(op.index, 0.0), norm)
            return norm
        if op.index not in self.report.norms:  # no other device: there was no collective
            self.report.norms[op.index] = math.sqrt(self._own_squared_norm(op.index))
        return self.report.norms[op.index]

    def _own_squared_norm(self, update: int) -> Tensor:
        parts = [weights.squared_norm(update) for stage, weights in self.executor.held.items() if stage in self.job.norm_stages]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    # Messages

    def _give(self, key: MessageKey, rows: Rows, tensors: tuple[Tensor, ...]) -> None:
        """Puts a stage's result where its consumer finds it: on this device, or for the Sends that follow."""
        num_sends = self.job.num_sends[key]
        if num_sends:
            self.outbox[key] = (num_sends, rows, tensors)
        else:
            self.inbox[key] = [(rows, tensors)]

    def _take(self, key: MessageKey) -> tuple[Tensor, ...]:
        """The tensors of a message, put together from its rows if they came in several."""
        pieces = self.inbox.pop(key)
        if len(pieces) == 1:
            return pieces[0][1]
        pieces.sort(key=lambda piece: piece[0])
        return tuple(torch.cat(parts) for parts in zip(*(tensors for _, tensors in pieces), strict=True))

    def _send(self, item: Send, _: int) -> None:
        key = message_key(item.message)
        num_left, rows, tensors = self.outbox.pop(key)
        if num_left > 1:
            self.outbox[key] = (num_left - 1, rows, tensors)
        if item.message.rows != rows:
            start = row_range(rows, self.num_rows)[0]
            first, end = (row - start for row in row_range(item.message.rows, self.num_rows))
            tensors = tuple(tensor[first:end] for tensor in tensors)
        self.executor.transport.send(item.message, item.device, tensors)

    def _recv(self, item: Recv, position: int) -> None:
        self.executor.doing = f"waiting for {self.job.names[position]} from device {item.device}"
        since = time.perf_counter()
        tensors = self.executor.transport.recv(item.message, item.device)
        self._span(position, since, sum(tensor.nbytes for tensor in tensors))
        self.inbox.setdefault(message_key(item.message), []).append((item.message.rows, tensors))

    # Collectives

    def _start(self, item: Start, _: int) -> None:
        collective = item.collective
        if collective.kind is CollectiveKind.NORM:
            tensor = self._own_squared_norm(collective.update).reshape(1)
        elif collective.kind is CollectiveKind.GRADIENTS:
            tensor = self.executor.held[collective.stage].flat_gradients(collective.update)
        else:
            # The owner has made the new version; the others add nothing, so that the sum is the owner's weights.
            weights = self.executor.held[collective.stage]
            tensor = weights.flat() if weights.newest > collective.update else torch.zeros_like(weights.flat())
        self.pending[collective] = self.executor.transport.start(collective, tensor)

    def _await(self, item: Await, position: int) -> None:
        collective = item.collective
        self.executor.doing = f"waiting for {collective} with devices {', '.join(map(str, collective.devices))}"
        since = time.perf_counter()
        total = self.pending.pop(collective).wait()
        self._span(position, since, total.nbytes)
        if collective.kind is CollectiveKind.NORM:
            self.report.norms[collective.update] = math.sqrt(total)
            return
        weights = self.executor.held[collective.stage]
        if collective.kind is CollectiveKind.GRADIENTS:
            weights.set_flat_gradients(collective.update, total)
        elif weights.newest <= collective.update:
            weights.receive(collective.update, total)


def _leaf(tensor: Tensor) -> Tensor:
    """The tensor as a leaf that collects a gradient, where it can have one."""
    return tensor.detach().requires_grad_(takes_gradient(tensor.dtype))
