"""A whole pipeline in one process, one thread per device: the same programs as on Ray."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from raypipe.actors import devices
from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.executor import Executor, Window
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.execution.report import WindowReport
from raypipe.actors.execution.updates import LearningRate
from raypipe.actors.stage.gradient_flow import LayerOutput, edge_specs
from raypipe.actors.stage.precision import build_stage, loss_in_float32, prepare
from raypipe.actors.stage.weights import Optimizer
from raypipe.actors.transport.local import LocalNetwork
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.errors import AbortedError
from raypipe.model import Model
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import DeviceProgram, Placement


class LocalPipeline:
    """The devices of one schedule, each a thread of this process.

    `cut` and `schedule` have the same number of stages. `placement` names the devices of each worker, `None` means one
    device each, `buckets` and `late_rows` as in `lower`. `Executor` and `build_stage` explain the other arguments.
    """

    def __init__(
        self,
        model: Model,
        *,
        cut: Cut,
        schedule: Schedule,
        batches: BatchSource,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        seed: int = 0,
        placement: Placement | None = None,
        buckets: Sequence[int] = (),
        late_rows: Collection[int] = (),
        max_grad_norm: float | None = None,
        timeout_s: float = 30.0,
        faults: FaultScript | None = None,
        precision: Precision = Precision.FLOAT32,
        on: torch.device = devices.CPU,
    ) -> None:
        self.batches = batches
        self.placement = placement
        self._lowered = partial(executable_programs, placement=placement, buckets=buckets, late_rows=late_rows)
        self.programs = self._lowered(schedule)
        self._others: dict[Schedule, tuple[DeviceProgram, ...]] = {}
        self.num_windows = 0
        self.num_updates = 0
        stages_of = [sorted({op.stage for op, place in schedule.ops() if place.worker == program.worker}) for program in self.programs]
        build = partial(build_stage, model, cut, optimizer=optimizer, rule=schedule.weight_rule, seed=seed, precision=precision, on=on)
        self.weights = [{stage: build(stage) for stage in stages} for stages in stages_of]
        network = LocalNetwork(len(self.programs), timeout_s=timeout_s)
        batch = batches.batch(0, (0.0, 1.0))
        num_rows = len(next(iter(batch.values())))
        outputs: dict[int, tuple[LayerOutput, ...]] = {}
        for stage in range(len(cut.stages)):
            for weights in (on_device[stage] for on_device in self.weights if stage in on_device):
                outputs |= prepare(weights, outputs, batch, num_rows=num_rows)
        self.executors = [
            Executor(
                device=program.device,
                model=loss_in_float32(model, precision),
                cut=cut,
                weights=on_device,
                transport=network.transport(program.device),
                edge_specs=edge_specs(cut, outputs),
                num_rows=num_rows,
                learning_rate=learning_rate,
                max_grad_norm=max_grad_norm,
                faults=faults,
                on=on,
                timeout_s=timeout_s,
            )
            for program, on_device in zip(self.programs, self.weights, strict=True)
        ]
        self._threads = ThreadPoolExecutor(len(self.executors))  # libraries of GPUs keep plans by thread

    def run_window(self, schedule: Schedule | None = None) -> list[WindowReport]:
        """Run the next window, by default that of the pipeline's schedule; return one report per device.

        Args:
            schedule: The same schedule for another number of updates.
        """
        programs = self.programs if schedule is None else self._programs_of(schedule)
        reports = self._run(programs, Window(number=self.num_windows, first_update=self.num_updates, batches=self.batches))
        self.num_windows += 1
        self.num_updates += programs[0].num_updates
        return reports

    def evaluate(self, schedule: Schedule, *, batches: BatchSource, keep_outputs: bool = False) -> list[WindowReport]:
        """Run a forward-only schedule over other rows."""
        window = Window(number=self.num_windows, first_update=0, batches=batches, keep_outputs=keep_outputs)
        return self._run(self._programs_of(schedule), window)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
        for executor in self.executors:
            executor.close()

    def _programs_of(self, schedule: Schedule) -> tuple[DeviceProgram, ...]:
        if schedule not in self._others:  # executors keep what they work out for each program
            self._others[schedule] = self._lowered(schedule)
        return self._others[schedule]

    def _run(self, what: Sequence[DeviceProgram], window: Window) -> list[WindowReport]:
        def one(executor: Executor, program: DeviceProgram) -> WindowReport:
            try:
                return executor.run(program, window)
            except BaseException as error:
                for other in self.executors:
                    other.abort(f"device {executor.device} failed: {error}")
                raise

        futures = [self._threads.submit(one, executor, program) for executor, program in zip(self.executors, what, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, AbortedError)), errors[0])
        return [future.result() for future in futures]
