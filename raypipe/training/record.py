"""Records a run: in memory, in its folder, in Ray's metrics, and for its callbacks."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raypipe.actors.execution.report import mean_losses, norms_of
from raypipe.actors.measure.metrics import RunCounter, RunGauge, RunMetrics
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.analysis.comparison import ComparedFigure, compare, median_window
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Trace
from raypipe.callbacks import events
from raypipe.callbacks.group import CallbackGroup
from raypipe.cluster.window import WindowResult
from raypipe.config import CheckpointMetric, TrainConfig
from raypipe.errors import FormatError
from raypipe.network.estimate import NetworkEstimate
from raypipe.planning.sum_patterns import PatternDecision
from raypipe.schedules.ir import Schedule
from raypipe.show.page import draw_page
from raypipe.show.svg import draw_traces
from raypipe.training.run_data import run_data
from raypipe.training.run_folder import RunFolder
from raypipe.training.strategy import Strategy

_NUM_WINDOWS_KEPT = 50
_LEAST_LOSSES, _MOST_LOSSES = 20, 50  # of the last updates, which say what is usual
_SPIKE = 10.0  # median deviations from the median, from which a loss is a spike
# Ray's metric of each figure.
_GAUGES = {
    "loss": RunGauge.LOSS,
    "validation_loss": RunGauge.VALIDATION_LOSS,
    "samples_per_s": RunGauge.SAMPLES_PER_SECOND,
    "tokens_per_s": RunGauge.TOKENS_PER_SECOND,
    "update_s": RunGauge.UPDATE_SECONDS,
    "updates": RunGauge.UPDATE,
}


class Phase:
    """Windows that ran under one plan; `predicted` is a simulated one."""

    def __init__(self, *, predicted: Trace) -> None:
        self.predicted = predicted
        self.windows: deque[Trace] = deque(maxlen=_NUM_WINDOWS_KEPT)

    def add(self, trace: Trace) -> None:
        """Keep the trace of a window, unless it was a short one."""
        if trace.num_updates == self.predicted.num_updates:
            self.windows.append(dataclasses.replace(trace, branches=self.predicted.branches))

    @property
    def measured(self) -> list[Trace]:
        """Windows without the first, in which connections, caches and memory warm up."""
        windows = list(self.windows)
        return windows[1:] or windows

    def save(self, folder: RunFolder, *, until: int) -> None:
        """Write median window and prediction of a phase that ended with an update."""
        if self.windows:
            median_window(self.measured).save(folder.file(f"trace-until-update-{until:06d}.json"))
            self.predicted.save(folder.file(f"predicted-until-update-{until:06d}.json"))


def write_report(folder: RunFolder, phase: Phase, *, notes: Sequence[str]) -> list[ComparedFigure]:
    """Write traces, timelines and comparison of a phase with windows; return predicted against measured."""
    predicted = phase.predicted
    window = dataclasses.replace(median_window(phase.measured), notes=tuple(notes))
    window.save(folder.file("trace.json"))
    predicted.save(folder.file("predicted.json"))
    folder.write_json("trace.perfetto.json", {"traceEvents": predicted.to_chrome() + window.to_chrome()})
    # Two updates from the middle: few enough to read the Ops.
    middle = max(window.num_updates // 2 - 1, 0)
    shown = [trace.of_updates(middle, min(middle + 2, trace.num_updates)) for trace in (predicted, window)]
    folder.file("timeline.svg").write_text(draw_traces(shown), encoding="utf-8")
    folder.file("timeline.html").write_text(draw_page((predicted, window), run_data(folder, window)), encoding="utf-8")
    figures = compare(predicted, phase.measured)
    folder.write_json("comparison.json", [dataclasses.asdict(figure) | {"error": figure.error} for figure in figures])
    return figures


class RunRecord:
    """The record of one run, for its `Result`.

    Attributes:
        notes: Why the run switched plans, each change of the pattern of a sum, and what else a reader of its timeline should know.
        measured: The newest phase with a whole window; `None` before the first.
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, callbacks: CallbackGroup, *, tokens_per_row: int | None, first_update: int
    ) -> None:
        self.config = config
        self.folder = folder
        self.callbacks = callbacks
        self.notice = callbacks.notice
        self.losses: list[float] = []
        self.validation_losses: list[tuple[int, float]] = []
        self.figures: dict[str, float] = {}
        self.notes: list[str] = []
        self.measured: Phase | None = None
        self._phase: Phase
        self._unwritten: deque[Callable[[], object]] = deque()
        self.recoveries: list[events.RecoveredFailure] = []
        self._first_update = first_update
        self._metrics: RunMetrics
        self._tokens_per_row = tokens_per_row
        self._window: events.Window | None = None

    def start_metrics(self, run: str) -> None:
        """Register metrics with the connected Ray cluster."""
        self._metrics = RunMetrics(run=run)

    def begin_phase(self, strategy: Strategy, *, update: int, reason: str = "") -> None:
        """Write the plan that runs from now on."""
        self._phase = Phase(predicted=strategy.predicted)
        if reason:
            self.notes.append(reason)
        self._write(partial(strategy.plan.save, self.folder.file("plan.json")))
        self._metrics.set(RunGauge.PIPELINES, len(strategy.schedule.pipelines))
        assert strategy.plan.predicted is not None, "a strategy predicts its plan"
        self._metrics.set(RunGauge.PREDICTED_UPDATE_SECONDS, strategy.plan.predicted.update_s)
        self.callbacks.phase(events.Phase(update, strategy.plan, strategy.predicted, reason))

    def switch(self, before: Plan, strategy: Strategy, *, update: int, reason: str) -> None:
        """Write what ran until an update, and the plan that runs from now on."""
        self._write(partial(before.save, self.folder.file(f"plan-until-update-{update:06d}.json")))
        self._write(partial(self._phase.save, self.folder, until=update))
        self.begin_phase(strategy, update=update, reason=f"update {update}: {reason}")
        self._metrics.count(RunCounter.SWITCHES)

    def _write(self, write: Callable[[], object]) -> None:
        """Write something into the folder, or keep it until the disk has room again."""
        self._unwritten.append(write)
        while self._unwritten:
            try:
                self._unwritten[0]()
            except (OSError, FormatError) as error:  # the latter from plans and traces, for the same reasons
                if len(self._unwritten) == 1:
                    self.notice(f"{self.folder.name}: the records of the run cannot be written now, and are kept: {error}")
                return
            self._unwritten.popleft()

    def add_decision(self, line: dict[str, Any]) -> None:
        """Write a decision."""
        self._write(partial(self.folder.add_decision, line))

    def add_pattern_decision(self, update: int, decision: PatternDecision) -> None:
        """Record a decision on the pattern of a sum."""
        line = {
            "update": update,
            "switch": False,
            "devices": list(decision.members),
            "pattern": str(decision.pattern),
            "changes": decision.changes,
            "gain": decision.gain,
            "text": decision.text,
        }
        self.add_decision(line)
        if decision.changes:
            self._metrics.count(RunCounter.PATTERN_CHANGES)
            self.notes.append(f"update {update}: {decision.text}")

    def add_window(self, result: WindowResult, plan: Plan, schedule: Schedule, *, first_update: int, links: NetworkEstimate) -> None:
        """Record a training window."""
        losses = mean_losses(result.reports, num_microbatches=schedule.num_microbatches)
        norms = norms_of(result.reports, scope=schedule.update_scope)
        self._notice_spikes(losses, first_update)
        self.losses += losses
        self._phase.add(result.trace)
        if self._phase.windows:
            self.measured = self._phase
        optimizer, num_updates = self.config.optimizer, self.config.run.num_updates
        updates = tuple(
            events.Update(at + 1, loss, norms.get(number), optimizer.rate(at, num_updates=num_updates))
            for number, (at, loss) in enumerate(enumerate(losses, first_update))
        )
        speed = self._speed(result) | {"bubble_ratio": result.trace.bubble_ratio}
        self.figures |= speed | {"loss": losses[-1], "updates": first_update + result.num_updates}
        self._metrics.set(RunGauge.GRADIENT_NORM, updates[-1].grad_norm)
        self._metrics.set(RunGauge.LEARNING_RATE, updates[-1].learning_rate)
        self._metrics.count(RunCounter.UPDATES, result.num_updates)
        self._metrics.count(RunCounter.SAMPLES, speed["samples_per_s"] * result.wall_s)
        self._metrics.count(RunCounter.TOKENS, speed.get("tokens_per_s", 0.0) * result.wall_s)
        for update in updates:
            figures = {"loss": update.loss, "grad_norm": update.grad_norm, "learning_rate": update.learning_rate}
            self._write(partial(self.folder.add_metrics, {"update": update.number, **figures, **speed}))
        self._window = events.Window(
            updates=updates,
            update_s=speed["update_s"],
            samples_per_s=speed["samples_per_s"],
            tokens_per_s=speed.get("tokens_per_s"),
            trace=result.trace,
            plan=plan,
            num_updates_left=num_updates - updates[-1].number,
            links={pair: rate for pair, link in links.links.items() if (rate := link.bandwidth_bytes_per_s) is not None},
        )

    def _speed(self, result: WindowResult) -> dict[str, float]:
        update_s, schedule = result.wall_s / result.num_updates, self.config.schedule
        rows_per_s = schedule.num_microbatches * schedule.microbatch_size / update_s
        tokens = {} if self._tokens_per_row is None else {"tokens_per_s": rows_per_s * self._tokens_per_row}
        return {"update_s": update_s, "samples_per_s": rows_per_s, **tokens}

    def _notice_spikes(self, losses: list[float], first_update: int) -> None:
        recent = deque((loss for loss in self.losses[-_MOST_LOSSES:] if math.isfinite(loss)), maxlen=_MOST_LOSSES)
        for number, loss in enumerate(losses):
            known = list(recent)
            usual = statistics.median(known) if len(known) >= _LEAST_LOSSES else math.inf
            spread = statistics.median(abs(one - usual) for one in known) if known else math.inf
            if loss > usual + _SPIKE * spread:
                text = f"update {first_update + number + 1}: the loss jumped to {loss:.4g}; it was {usual:.4g} in the last {len(known)}"
                self.notice(text)
                self.notes.append(text)
            if math.isfinite(loss):
                recent.append(loss)

    def add_evaluation(self, update: int, loss: float) -> None:
        """Record a validation loss."""
        self.validation_losses.append((update, loss))
        self.figures["validation_loss"] = loss
        self._write(partial(self.folder.add_metrics, {"update": update, "validation_loss": loss}))
        self.callbacks.evaluation(events.Evaluation(update, loss))

    def add_figures(self, line: dict[str, Any]) -> None:
        """Record figures that a callback has logged."""
        self._write(partial(self.folder.add_metrics, line))

    def losses_at(self, update: int) -> dict[str, float]:
        """Return the training loss of the last update, and the validation loss if the weights after this update were evaluated."""
        losses = {CheckpointMetric.LOSS.value: self.losses[-1]}
        if self.validation_losses and self.validation_losses[-1][0] == update:
            losses[CheckpointMetric.VALIDATION_LOSS.value] = self.validation_losses[-1][1]
        return losses

    def rewind(self, update: int) -> None:
        """Forget the losses after an update, from which the run goes on once more; it also evaluates once more."""
        self._write(partial(self.folder.rewind_metrics, update))
        del self.losses[update - self._first_update :]
        if self._window is not None and self._window.update > update:
            self._window = None  # it comes again
        self.validation_losses = [(at, loss) for at, loss in self.validation_losses if at < update]

    def add_recovery(self, recovery: events.RecoveredFailure) -> None:
        """Record a failure that the run has recovered from."""
        self._write(partial(self.folder.add_failure, dataclasses.asdict(recovery)))
        self.notes.append(f"update {recovery.update}: {recovery.text}")
        self.recoveries.append(recovery)
        self._metrics.count(RunCounter.RECOVERIES)
        self.callbacks.recovery(recovery)

    def count_failure(self, error: Exception, update: int) -> None:
        """Count a failure, whether the run recovers from it or not."""
        self._metrics.count(RunCounter.FAILURES)
        self.callbacks.failure(events.Failure(update, str(error)))

    def add_checkpoint(self, checkpoint: Checkpoint, seconds: float) -> None:
        """Record that a checkpoint is complete, and how long writing it took."""
        self._metrics.set(RunGauge.CHECKPOINT_TIMESTAMP_SECONDS, time.time())
        self._metrics.set(RunGauge.CHECKPOINT_SECONDS, seconds)
        index = checkpoint.index
        self.callbacks.checkpoint(events.SavedCheckpoint(index.update, checkpoint.path, seconds, index.metrics))

    def publish(self) -> None:
        """Send the last figures to Ray's metrics and to the callbacks."""
        for key, name in _GAUGES.items():
            if key in self.figures:
                self._metrics.set(name, self.figures[key])
        if self._window is not None:
            logged = dict(self.callbacks.run.logged)
            self.callbacks.window(dataclasses.replace(self._window, validation_loss=self.figures.get("validation_loss"), logged=logged))
            self._window = None
