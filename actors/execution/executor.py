"""Runs programs on one device: walks the steps of a bound program. Knows neither Ray nor the name of any schedule.

Tensors in flight lie in dicts of `Mailbox`, `Computation` and `Updates`, by stage and microbatch; all are empty between windows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.actors import devices
from raypipe.actors.execution.batches import WHOLE, AheadSource, BatchSource, KeptBatches
from raypipe.actors.execution.binding import StageEdges, bind
from raypipe.actors.execution.clock import Clock, DeviceClock, HostClock
from raypipe.actors.execution.computation import Computation, Mailbox, WindowLosses
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.execution.loss_weights import LossWeights
from raypipe.actors.execution.report import WindowReport
from raypipe.actors.execution.steps import AwaitStep, BoundOp, BoundProgram, ComputeStep, ReceiveStep, RowsStep, StartStep, Step, TimedStep
from raypipe.actors.execution.updates import LearningRate, Updates, divide_weights
from raypipe.actors.execution.warm_up import warm_up
from raypipe.actors.stage.backward import disable_buffer_donation
from raypipe.actors.stage.gradient_flow import EdgeSpecs
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.actors.transport.protocol import Transport
from raypipe.artifacts.branches import cut_branches
from raypipe.artifacts.cut import Cut
from raypipe.errors import AbortedError, ConfigError, RunError, TransportTimeoutError
from raypipe.model import Batch, Model
from raypipe.schedules.collectives import SumRows
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import DeviceProgram, Rows

_LEAST_WAIT_S = 1e-3  # for rows; what takes less, such as rows of a file in memory, belongs to the Op
_READING = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE})
_KEPT_UPDATES = 2  # forwards of the next update may come before the last backwards of one
_KEPT_UPDATES_AHEAD = 4  # the rows of the update after it are looked at, too
_NO_OPTIMIZERS: Mapping[int, Optimizer] = {}


@dataclass(frozen=True)
class Window:
    """What differs from one window to the next.

    Attributes:
        number: Number of the window among those of its program, from 0; for faults and messages.
        batches: Source of the rows; `None` for a device whose stages read none.
        keep_outputs: Whether the last layer's outputs are reported (evaluation only).
        num_rows: Rows of a microbatch, where the stages were connected for another number.
        skipped: Updates of the window that change no weight.
    """

    number: int
    first_update: int
    batches: BatchSource | None
    keep_outputs: bool = False
    num_rows: int | None = None
    skipped: frozenset[int] = frozenset()


class Executor:
    """Runs the programs of one device over its stages.

    `max_grad_norm` limits the gradient norm over the scope of an update, `timeout_s` each step of a GPU. `names` of all devices are for
    messages.
    """

    def __init__(
        self,
        *,
        device: int,
        model: Model,
        cut: Cut,
        weights: Mapping[int, Weights],
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
        self.weights = weights
        self.transport = transport
        self.edges = StageEdges(cut, edge_specs)
        self.branches = cut_branches(cut, [layer.branch for layer in model.layers])
        self._bound: dict[tuple[int, int], tuple[DeviceProgram, BoundProgram]] = {}
        self.num_rows = num_rows
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.faults = faults or FaultScript()
        self.doing = "waiting to begin"
        """What the host does."""
        self.waiting: ReceiveStep | AwaitStep | None = None
        """The wait for a transfer that the host is in, or in which the last window ended."""
        self._source: BatchSource | None = None
        """The rows of the window that runs."""
        self.abort_reason: str | None = None
        self.failure: RunError | None = None
        """An error that another thread has found, while the device may hold this one up."""
        self.at_rest: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered where the host waits for a thread of its own."""
        self.clock: Clock = HostClock()
        if on.type != "cpu":
            module = torch.get_device_module(on)
            self.clock = DeviceClock(module, timeout_s=timeout_s, check=self._check_transport, stuck=self._give_up)

    @property
    def progress(self) -> str:
        """What the device does, in words. Called from another thread."""
        step = self.clock.doing()
        return self.doing if step is None else step.doing

    @property
    def awaited(self) -> ReceiveStep | AwaitStep | None:
        """The wait for a transfer that the device is in, or in which the last window ended. Called from another thread."""
        step = self.clock.doing() or self.waiting
        return step if isinstance(step, ReceiveStep | AwaitStep) else None

    def run(self, program: DeviceProgram, window: Window) -> WindowReport:
        """Run one window.

        Raises:
            TransportError: A message did not pass.
            RunError: A device that works behind the host did not come to an end.
            AbortedError: `abort` was called.
        """
        try:
            return self._run(program, window)
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise

    def _run(self, program: DeviceProgram, window: Window) -> WindowReport:
        disable_buffer_donation()
        bound = self.bound(program, window.num_rows or self.num_rows)
        training = not program.forward_only
        self.clock.rest()
        self.transport.open_window(bound.incoming, bound.outgoing)
        for weights in self.weights.values():
            weights.module.train(training)
            weights.begin_window()
        self.doing = "waiting to begin"
        self.waiting = None
        self._source = window.batches
        with torch.set_grad_enabled(training):
            report = _WindowRun(self, program, bound, window).run(bound.steps)
        self.doing = "waiting for the last messages to leave"
        self.transport.close_window()
        if training:
            for weights in self.weights.values():
                weights.end_window()
        return report

    def bound(self, program: DeviceProgram, num_rows: int) -> BoundProgram:
        """Return a program bound to this device, bound when it is first asked for."""
        key = (id(program), num_rows)
        if key not in self._bound:
            if program.has_late_rows and self.max_grad_norm is not None:
                raise ConfigError("a norm over all rows of a weight limits its steps: then none of them may be summed behind others")
            # With the program, so that no other one gets its id.
            self._bound[key] = (program, bind(program, self.weights, self.edges, num_rows, branches=self.branches))
            divide_weights(program, self.weights, self.transport)
        return self._bound[key][1]

    def warm_up(self, batch: Batch, programs: Iterable[DeviceProgram], optimizers: Mapping[int, Optimizer] = _NO_OPTIMIZERS) -> None:
        """Run each stage as programs will, so that nothing is loaded or compiled within a window; `optimizers` as in `warm_up`."""
        warm_up(
            self.weights,
            self.edges,
            self.model,
            batch,
            programs,
            num_rows=self.num_rows,
            max_grad_norm=self.max_grad_norm,
            optimizers=optimizers,
            on=self.on,
        )

    def abort(self, reason: str) -> None:
        """End what runs, within a second. Called from another thread."""
        self.abort_reason = reason
        self.transport.abort(reason)
        if isinstance(source := self._source, AheadSource):
            source.abort()

    def close(self) -> None:
        """End the executor's threads."""
        self.clock.close()

    def _check_transport(self) -> None:
        try:
            if self.abort_reason is None:
                self.transport.check()
        except RunError as error:
            self._fail(error)

    def _give_up(self, step: TimedStep) -> None:
        if self.abort_reason is not None:
            return
        name, limit = self._name(self.device), f"within {self.timeout_s:g} s"
        match step:
            case ComputeStep():
                self._fail(RunError(f"device {name} has been at {step.doing} for {self.timeout_s:g} s, on {self.on}, and does not end"))
            case RowsStep():
                self._fail(RunError(f"device {name} has been {step.doing} for {self.timeout_s:g} s"))
            case ReceiveStep():
                self._fail(TransportTimeoutError(name, self._name(step.device), str(step.message), f"it did not come {limit}"))
            case AwaitStep():
                others = ", ".join(self._name(member) for member in step.collective.devices if member != self.device)
                self._fail(TransportTimeoutError(name, others, str(step.collective), f"it did not end {limit}"))

    def _fail(self, error: RunError) -> None:
        self.failure = error
        self.abort(str(error))

    def _name(self, device: int) -> str:
        return self.names[device] if self.names else str(device)


class _WindowRun:
    def __init__(self, executor: Executor, program: DeviceProgram, bound: BoundProgram, window: Window) -> None:
        self.executor = executor
        self.program = program
        self.window = window
        self.faults = executor.faults if executor.faults.faults else None
        self.report = WindowReport(executor.device, executor.clock.begin())
        self.mark, self.note = executor.clock.mark, executor.clock.note
        self.mailbox = Mailbox(executor.transport)
        self.losses = WindowLosses(executor.model, keep_outputs=window.keep_outputs)
        batches = self._batches()
        self._expect(bound.steps, whole=isinstance(batches, KeptBatches))
        first_microbatch = window.first_update * program.num_microbatches
        self.computation = Computation(
            model=executor.model,
            on=executor.on,
            edges=executor.edges,
            mailbox=self.mailbox,
            losses=self.losses,
            loss_weights=LossWeights(executor.model, batches, first_microbatch=first_microbatch, num_microbatches=program.num_microbatches),
            batches=batches,
            first_microbatch=first_microbatch,
            training=not program.forward_only,
        )
        self.updates = Updates(
            program,
            updated=bound.updated,
            weights=executor.weights,
            transport=executor.transport,
            batches=batches,
            on=executor.on,
            first_update=window.first_update,
            skipped=window.skipped,
            learning_rate=executor.learning_rate,
            max_grad_norm=executor.max_grad_norm,
            at_rest=executor.at_rest,
        )
        self.compute_kinds: dict[OpKind, Callable[[BoundOp], None]] = {
            OpKind.FORWARD: self.computation.forward,
            OpKind.BACKWARD: self.computation.backward,
            OpKind.INPUT_GRADIENT: self.computation.backward,
            OpKind.WEIGHT_GRADIENT: self.computation.weight_gradient,
            OpKind.RECOMPUTE: self.computation.recompute,
        }

    def _batches(self) -> BatchSource | None:
        """Return the source of the rows, which reads each microbatch once where an update's are counted or looked at ahead."""
        executor, source = self.executor, self.window.batches
        ahead = executor.model.loss_weight is not None or any(weights.lookups for weights in executor.weights.values())
        if source is None or self.program.forward_only or not ahead:
            return source
        num_updates = _KEPT_UPDATES_AHEAD if self.program.has_late_rows else _KEPT_UPDATES
        return KeptBatches(source, num_kept=num_updates * self.program.num_microbatches)

    def _expect(self, steps: Sequence[Step], *, whole: bool) -> None:
        """Tell a source that reads ahead what this window will read, and the next one, if it is alike."""
        source, program = self.window.batches, self.program
        if not isinstance(source, AheadSource):
            return
        first = self.window.first_update * program.num_microbatches
        order = [(first + number, WHOLE if whole else rows) for step in steps for number, rows in self._read_by(step)]
        order = list(dict.fromkeys(order)) if whole else order
        size = 0 if program.forward_only else program.num_updates * program.num_microbatches
        source.expect([*order, *((number + size, rows) for number, rows in order if size)])

    def _read_by(self, step: Step) -> Iterator[tuple[int, Rows]]:
        """Yield the microbatches of the window of which a step reads rows that no step before it is known to read."""
        if isinstance(step, ComputeStep):
            yield from ((bound.op.index, bound.rows) for bound in step.ops if bound.takes_batch and bound.op.kind in _READING)
        elif isinstance(step, StartStep) and step.collective.rows is SumRows.DUE:
            rule, size = self.executor.weights[step.collective.stage].rule, self.program.num_microbatches
            reader = rule.only_reader(step.collective.update + 1) or 0
            yield from ((number, WHOLE) for number in range(reader * size, (reader + 1) * size))

    def run(self, steps: Sequence[Step]) -> WindowReport:
        run_step: dict[type[Step], Callable[[Any], None]] = {
            ComputeStep: self._compute,
            ReceiveStep: self._receive,
            StartStep: self._start,
            AwaitStep: self._await,
        }
        executor = self.executor
        try:
            for step in steps:
                if executor.abort_reason is not None:
                    raise AbortedError(executor.abort_reason)
                run_step[type(step)](step)
        finally:
            self.updates.close()
        self._check_empty()
        self.report.log = executor.clock.finish()
        self.report.norms = self.updates.norms()
        self.losses.write(self.report)
        return self.report

    def _check_empty(self) -> None:
        mailbox, computation, updates = self.mailbox, self.computation, self.updates
        left = (
            mailbox.inbox,
            mailbox.outbox,
            computation.saved,
            computation.deferred,
            computation.rows,
            updates.under_way.pending,
            updates.shared,
        )
        assert not any(left), f"device {self.executor.device} holds tensors after the window: {[list(tensors) for tensors in left]}"

    def _compute(self, step: ComputeStep) -> None:
        executor = self.executor
        since = self._read(step)
        executor.doing = step.doing
        if self.faults is not None:
            self._strike(self.program.items[step.position], {bound.op.stage for bound in step.ops})
        for bound in step.ops:
            if bound.op.kind is OpKind.UPDATE:
                self.updates.update(bound.op, step.position)
            elif step.inside:
                with self.updates.starting(bound, step.inside):
                    self.compute_kinds[bound.op.kind](bound)
            else:
                self.compute_kinds[bound.op.kind](bound)
        until = self.mark()
        if step.sends:
            if self.faults is not None:
                for outgoing in step.sends:
                    self._strike(outgoing.message)
            # Messages first: others may wait for them.
            self.mailbox.send(step.sends)
            # The receiver may have been woken on this core, where it would wait until this process sleeps, up to 0.4 ms behind an update.
            os.sched_yield()
        self.note(step, since, until, 0)
        executor.doing = step.after
        for weights, version in step.releases:
            weights.release(version)

    def _strike(self, item: object, of_op: Collection[int] | None = None) -> None:
        assert self.faults is not None, "there are faults to strike"
        executor, primary = self.executor, self.program.primary_stages
        self.faults.strike(
            device=executor.device,
            stages=primary if of_op is None else primary.intersection(of_op),
            before=str(item),
            window=self.window.number,
            is_op=of_op is not None,
            cut=lambda: executor.transport.abort("a scripted fault closed its connections"),
        )

    def _start(self, step: StartStep) -> None:
        if self.faults is not None:
            self._strike(step.collective)
        self.updates.start(step)

    def _read(self, step: ComputeStep) -> Any:
        """Read the rows that Ops take; return when the Ops begin: a wait for rows is none of their time."""
        since = self.mark()
        reading = [bound for bound in step.ops if bound.takes_batch and not bound.op.kind.per_update]
        if not reading:
            return since
        began_s = time.perf_counter()
        self.executor.doing = f"waiting for the rows of {step.doing}"
        for bound in reading:
            self.computation.read(bound)
        if time.perf_counter() - began_s < _LEAST_WAIT_S:
            return since
        until = self.mark()
        self.note(RowsStep(step.position, self.executor.doing), since, until, 0)
        return until

    def _receive(self, step: ReceiveStep) -> None:
        self.executor.doing = step.doing
        self.executor.waiting = step
        if self.faults is not None:
            self._strike(step.message)
        since = self.mark()
        self.mailbox.receive(step)
        self.executor.waiting = None
        self.note(step, since, self.mark(), step.num_bytes)

    def _await(self, step: AwaitStep) -> None:
        self.executor.doing = step.doing
        self.executor.waiting = step
        if self.faults is not None:
            self._strike(step.collective)
        since = self.mark()
        num_bytes = self.updates.finish(step.collective)
        self.executor.waiting = None
        self.note(step, since, self.mark(), num_bytes)
