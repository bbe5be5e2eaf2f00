"""One run of a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from raypipe.actors.data.served import Readers
from raypipe.actors.data.source import DataSource
from raypipe.actors.execution.batches import FileSource
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.orders import BatchFunction, BuildOrder
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.actors.stage.optimizers import check_optimizer, check_patterns
from raypipe.artifacts.checkpoint_files import CheckpointIndex, finished_folders
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.callbacks.events import End, Run
from raypipe.callbacks.group import CallbackGroup
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.row_readers import RowReaders
from raypipe.cluster.signals import JOB_WAIT, StopRequest
from raypipe.cluster.state_copies import StateCopies
from raypipe.cluster.window import WindowResult
from raypipe.config import TrainConfig
from raypipe.errors import NonFiniteError, RaypipeError, RunError, RunTakenOverError
from raypipe.model import Model
from raypipe.profiling.late_rows import with_plan_rows_of
from raypipe.training.adaptive import Adaptation, AdaptiveStrategy
from raypipe.training.announcing import announce
from raypipe.training.check_input import check_run_rows, draft_layers
from raypipe.training.checkpoints import Checkpoints
from raypipe.training.checks import checkpoint_to_resume, rows_per_update
from raypipe.training.ending import finished_result, leave
from raypipe.training.forwards import Forwards
from raypipe.training.measuring import configured_profile, measured_profile
from raypipe.training.new_run import new_run
from raypipe.training.nonfinite import NonFiniteUpdates
from raypipe.training.record import RunRecord, write_report
from raypipe.training.recovery import Recovery
from raypipe.training.result import Result, Resume, StoppedRun
from raypipe.training.run_cluster import stage_actors
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_lock import RunLock
from raypipe.training.run_strategy import run_strategy
from raypipe.training.sampling import sampled_text
from raypipe.training.strategy import Strategy
from raypipe.training.sums import SumAdaptation
from raypipe.training.window_sizes import is_due, window_size, window_sizes
from raypipe.units import counted
from raypipe.user_code import keyword, make_model


class Fit:
    """Trains in windows.

    Raises:
        InputError: Configuration, model, data, plan and checkpoint do not fit together.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: str | Callable[..., Model],
        batches: BatchFunction | DataSource,
        plan: Plan | None,
        optimizer_function: OptimizerFunction | None = None,
        faults: FaultScript,
        callbacks: CallbackGroup,
        resume: Resume,
    ) -> None:
        self.config = config
        self.source = batches if isinstance(batches, DataSource) else None
        self.readers: RowReaders | None = None
        self.batches: BatchFunction
        if not isinstance(batches, DataSource):
            self.batches = batches
        self.optimizer_function = optimizer_function
        self.faults = faults
        self.callbacks = callbacks
        self.notice = callbacks.notice
        self.model_function = partial(make_model, model, config.model.options, compile_layers=config.model.compile)
        self.model = self.model_function()
        self.resumed: Checkpoint | None = None
        self.lock: RunLock | None = None
        try:
            self._settle(model, plan, resume)
        except BaseException:
            self._unlock()
            callbacks.close()
            raise

    def _settle(self, model: str | Callable[..., Model], plan: Plan | None, resume: Resume) -> None:
        # Whatever can be refused is, before a new folder is made or an old one changed.
        config, notice = self.config, self.notice
        check_optimizer(config.optimizer, function=self.optimizer_function)
        folder = self._folder_to_resume(resume)
        if folder is not None:
            self._lock(folder)
            folder.fetch()
            if resume is True or finished_folders(folder.storage):
                notice(f"checking the checkpoints of {folder.name}")
                self.resumed = checkpoint_to_resume(folder, config, self.model, notice, may_be_done=resume == "auto")
        self.first_update = self.resumed.index.update if self.resumed else 0
        self.is_done = self.first_update >= config.run.num_updates
        self.profile = configured_profile(config, self.model, notice, optimizer_function=self.optimizer_function)
        if plan is not None:
            plan = with_plan_rows_of(plan, config.optimizer, notice, function=self.optimizer_function)
        sizes = {1} if self.is_done else window_sizes(config, self.first_update)
        self.strategy = run_strategy(config, self.model, plan, window_sizes=sizes, has_batches=not (self.source or config.data.path))
        size = keyword(model, config.model.options, "vocabulary_size")
        source = self.source or self.batches
        rows = check_run_rows(config, self.model, source, vocabulary_size=size, is_done=self.is_done, notice=notice)
        self.is_stream, self.first_rows = rows.is_stream, rows.first
        self.draft = None if self.is_done else draft_layers(config, self._plain_model(), rows)
        if self.draft is not None:
            self._check_room(folder or RunFolder.planned(config.run.storage_path, config.run.name), self.draft.weight_bytes())
        if folder is None:
            folder, self.lock = new_run(config.run, notice)
            folder.begin(config)
        elif self.resumed is None:
            folder.restart(config)
        self.folder = folder
        self.record = RunRecord(config, self.folder, self.callbacks, tokens_per_row=rows.tokens_per_row, first_update=self.first_update)
        self.coordinator: Coordinator
        self.adaptation: Adaptation | None = None
        self.sums: SumAdaptation
        self.recovery: Recovery
        self.stop = StopRequest(config.run.grace_s, notice)
        assert self.lock is not None, "a run has the lock of its folder"
        self.checkpoints = Checkpoints(
            self.folder,
            self.lock,
            config.run,
            index=self._index(),
            resumed=self.resumed,
            notice=notice,
            on_saved=self.record.add_checkpoint,
            position=self._data_position,
        )
        self.nonfinite = NonFiniteUpdates(config.run.on_nonfinite, can_repeat=config.failure.max_failures > 0, notice=notice)
        self.num_done = self.first_update
        self.is_told = False
        self.is_between = False
        """Whether the stages hold the model and wait."""

    def _plain_model(self) -> Model:
        return self.model_function(compile_layers=False) if self.config.model.compile else self.model

    def _check_room(self, folder: RunFolder, weight_bytes: int) -> None:
        folder.check_room(weight_bytes, num_to_keep=self.config.run.num_to_keep, notice=self.notice)

    def _folder_to_resume(self, resume: Resume) -> RunFolder | None:
        run = self.config.run
        if resume == "auto":
            return RunFolder.newest(run.storage_path, run.name)
        return RunFolder.latest(run.storage_path, run.name) if resume else None

    def _lock(self, folder: RunFolder) -> None:
        self.lock = RunLock(folder.storage)
        self.lock.acquire(self.notice)

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _index(self) -> CheckpointIndex:
        config = self.config
        return CheckpointIndex(
            update=0,
            layers=tuple(layer.name for layer in self.model.layers),
            model=config.model.function,
            seed=config.run.seed,
            rows_per_update=rows_per_update(config),
            optimizer=config.optimizer.state_kind,
        )

    def run(self) -> Result:
        """Train, and write the report.

        Raises:
            InputError: The cluster does not fit the run.
            RunError: Something failed while running.
        """
        error: BaseException | None = None
        try:
            with self._told_if_interrupted():
                result = finished_result(self.folder, self.resumed, self.notice) if self.is_done and self.resumed else self._run()
        except BaseException as problem:
            error = problem
            leave(self.folder, self.record, error, update=self.num_done, notice=self.notice)
            raise
        finally:
            try:
                self.callbacks.end(End(self.num_done, error))
            finally:
                self._unlock()
                self.callbacks.close()
        if self.callbacks.error is not None:
            raise self.callbacks.error
        return result

    def _run(self) -> Result:
        config, strategy = self.config, self.strategy
        self.notice(f"run folder: {self.folder.name}")
        self.callbacks.start(self._seen())
        if "working_dir_files" in Path(self.folder.name).absolute().parts:
            self.notice("Ray removes this copy of the job's working directory some day; set run.storage_path to keep the results")
        actors = stage_actors(
            self.folder.path.name,
            stages=strategy.stages,
            num_slots=strategy.num_slots,
            find_slots=strategy.find_slots,
            scaling=config.scaling,
            cluster=config.cluster,
            spare_processes=config.failure.spare_processes if config.failure.max_failures else False,
            notice=self.notice,
        )
        with actors as self.coordinator, self._reading(), self._told_if_interrupted():
            self.record.start_metrics(self.coordinator.run)
            self._prepare()
            try:
                checkpoint = self._train()
            except RaypipeError:
                self.checkpoints.give_time(config.run.grace_s)
                self.checkpoints.save_copy(self.recovery.copies.candidates(), reason="the run fails")
                raise
            sample = self._sample()
        self.notice("writing the report")
        measured = self.record.measured
        figures = write_report(self.folder, measured, notes=self.record.notes) if measured is not None else []
        if self.callbacks.error is not None:
            raise self.callbacks.error
        if self.num_done < config.run.num_updates:
            self.folder.end_early(self.callbacks.stop_reason, update=self.num_done)
        try:
            self.folder.publish()
        except OSError as error:
            self.notice(f"{self.folder.name}: a record could not be replaced ({error})")
        return Result(
            path=self.folder.name,
            metrics=self.record.figures,
            losses=self.record.losses,
            validation_losses=self.record.validation_losses,
            checkpoint=checkpoint,
            plan=self.strategy.plan,
            figures=figures,
            sample=sample,
            recoveries=tuple(self.record.recoveries),
            stop_reason=self.callbacks.stop_reason if self.num_done < config.run.num_updates else "",
            callback_errors=tuple(map(str, self.callbacks.dropped)),
        )

    def _seen(self) -> Run:
        folder = self.folder
        return Run(
            name=folder.path.name,
            path=folder.name,
            records=folder.path,
            config=self.config,
            first_update=self.first_update,
            read_metrics=folder.metrics,
            forward=Forwards(self.model, self.first_rows, self._between),
            write_metrics=self.record.add_figures,
            update=self.first_update,
        )

    def _between(self) -> tuple[Coordinator, Strategy] | None:
        return (self.coordinator, self.strategy) if self.is_between else None

    @contextlib.contextmanager
    def _told_if_interrupted(self) -> Iterator[None]:
        # While there is time: `ray job stop` ends the process soon.
        try:
            yield
        except StoppedRun:
            raise
        except KeyboardInterrupt:
            if not self.is_told:
                self.is_told = True
                if self.stop.is_late:
                    self.checkpoints.save_copy(self.recovery.copies.candidates(), reason="no time is left for this window")
                self.notice(self._lost())
            raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        if self.source is None:
            yield
            return
        start = (self.resumed.index.data or "") if self.resumed else ""
        with RowReaders(self.source, is_stream=self.is_stream, config=self.config, start=start) as self.readers:
            self.batches = self.readers.batches(self.config.schedule.microbatch_size)
            yield

    def _data_position(self, update: int) -> str | None:
        return self.readers.position(update * rows_per_update(self.config)) if self.readers is not None else None

    def _lost(self) -> str:
        newest, done = self.checkpoints.newest, self.num_done
        saved = newest.index.update if newest is not None else 0
        goes_on = f"`--resume auto` goes on from update {saved}" if saved else "`--resume auto` begins again"
        lost = f"updates {saved + 1} to {done} are lost, " if done > saved else ""
        why = f"; {JOB_WAIT} of the cluster leaves less than run.grace_s" if self.stop.is_short and self.stop.came else ""
        return f"interrupted {f'after update {done}' if done else 'before the first update was done'}: {lost}{goes_on}{why}"

    def _prepare(self) -> None:
        coordinator, strategy, notice = self.coordinator, self.strategy, self.notice
        coordinator.check_storage(self.folder.storage)
        strategy.prepare(coordinator, name=self.folder.path.name, measure=self._measure, notice=notice)
        if self.resumed is None:
            self.record.begin_phase(strategy, update=self.first_update)
        notice(f"building {counted(strategy.schedule.num_stages, 'stage')}")
        sizes = coordinator.build(self._build_order())
        strategy.check_layers(sizes)
        if self.draft is None:  # what else is known before actors start
            self._check_room(self.folder, sum(size.parameter_bytes for size in sizes.values()))
            check_patterns(self.config.optimizer, [name for size in sizes.values() for name in size.weights])
        if self.resumed is not None:
            coordinator.load(self.resumed.folder)
            # Only now: a run that cannot be resumed leaves its folder as it was.
            self.folder.continue_from(self.config, update=self.first_update)
            self.record.begin_phase(strategy, update=self.first_update)
            notice(f"resumed from {self.resumed.path} at update {self.first_update}")
        self.folder.remove_unfinished()
        self.sums = SumAdaptation(strategy, coordinator, self.record, exact=self.config.communication.exact)
        programs = strategy.programs()
        coordinator.connect(programs, strategy.cut, wiring=self.sums.begin(programs))
        if coordinator.channel_text:
            notice(f"messages between devices: {coordinator.channel_text}")
        self.recovery = Recovery(
            self.config.failure,
            coordinator,
            self.record,
            self.sums,
            strategy,
            StateCopies(coordinator.actors, share=self.config.failure.copy_share),
            build_order=self._build_order,
            checkpoints=self.checkpoints.usable,
            newest=self.checkpoints.known,
            adopt=self._adopt,
        )
        self._begin_adaptation()
        num_parameters = sum(size.num_parameters for size in sizes.values())
        announce(self.config, strategy, num_parameters=num_parameters, num_devices=len(coordinator.slots), notice=notice)

    def _begin_adaptation(self) -> None:
        if isinstance(self.strategy, AdaptiveStrategy) and self.config.adaptation.enabled:
            self.adaptation = Adaptation(self.strategy, self.coordinator, self.record, build_order=self._build_order, sums=self.sums)

    def _adopt(self, strategy: Strategy, update: int, reason: str) -> None:
        before, self.strategy = self.strategy.plan, strategy
        self.notice(f"update {update}: {reason}")
        self.sums.strategy = self.recovery.strategy = strategy
        self.record.switch(before, strategy, update=update, reason=reason)
        self._warm_up()
        self._begin_adaptation()

    def _warm_up(self) -> None:
        self.recovery.copies.begin_anew()
        if isinstance(self.strategy, AdaptiveStrategy):
            self.strategy.begin_anew()

    def _build_order(self) -> BuildOrder:
        batches, size = self.batches, self.strategy.microbatch_size
        if isinstance(batches, FileSource | Readers):
            batches = dataclasses.replace(batches, microbatch_size=size)
        return BuildOrder(
            model=self.model_function,
            batches=batches,
            cut=self.strategy.cut,
            weight_rule=self.strategy.schedule.weight_rule,
            optimizer=self.config.optimizer,
            optimizer_function=self.optimizer_function,
            num_rows=size,
            num_updates=self.config.run.num_updates,
            seed=self.config.run.seed,
            faults=self.faults,
            precision=self.config.model.precision,
        )

    def _measure(self, num_devices: int) -> ModelProfile:
        if self.profile is not None:
            self.notice(f"costs of layers: {self.config.scaling.profile}")
            return self.profile
        return measured_profile(
            self.config,
            self.model,
            self.model_function,
            self.batches,
            self.coordinator,
            self.notice,
            num_devices=num_devices,
            optimizer_function=self.optimizer_function,
        )

    def _train(self) -> Checkpoint:
        run, done = self.config.run, self.first_update
        result: WindowResult | None = None
        with self.stop, self._holding_model():
            self.notice(f"training updates {done + 1} to {run.num_updates}")
            self.checkpoints.begin()
            while True:
                try:
                    self.is_between = True
                    self._report(done)
                    is_end = done == run.num_updates or self.stop.came or (done > 0 and bool(self.callbacks.stop_reason))
                    self._between_windows(done, result, is_end=is_end)
                    if is_end and done:
                        checkpoint = self.checkpoints.finish(done)
                    if is_end:
                        break
                    self.is_between = False
                    size = window_size(self.config, done)
                    skipped = self.nonfinite.skipped(done, size)
                    result = self.coordinator.run_window(f"train-{size}", num_updates=size, first_update=done, skipped=skipped)
                    if self.nonfinite.must_repeat(
                        result, self.strategy.schedule, first_update=done, layers=self.coordinator.nonfinite_layers
                    ):
                        self.num_done = done = self.recovery.rewind(update=done)
                        result = None
                        continue
                    self._record(result, done)
                    self.num_done = done = done + size
                    self.recovery.after_window(done, result)
                except (RunTakenOverError, NonFiniteError):
                    raise
                except RunError as error:
                    self.is_between = False
                    self.faults = self.faults.after(self.coordinator.num_windows(f"train-{window_size(self.config, done)}"))
                    done, result = self.recovery.recover(error, update=done), None
                    self._warm_up()
                    self.num_done = done
            if done == 0:
                raise KeyboardInterrupt
        if done < run.num_updates and self.callbacks.stop_reason:
            self.notice(f"ended after update {done}, saved in {checkpoint.path}: {self.callbacks.stop_reason}")
        elif done < run.num_updates:
            self.notice(f"stopped after update {done}, saved in {checkpoint.path}; `--resume auto` goes on from there")
            raise StoppedRun
        return checkpoint

    @contextlib.contextmanager
    def _holding_model(self) -> Iterator[None]:
        # However training ends, stages are not asked for forwards behind it.
        try:
            yield
        finally:
            self.is_between = False

    def _record(self, result: WindowResult, done: int) -> None:
        strategy = self.strategy
        self.record.add_window(result, strategy.plan, strategy.schedule, first_update=done, links=self.coordinator.links.estimate)

    def _report(self, done: int) -> None:
        """Evaluate if that is due behind an update, and tell of the window that ended there."""
        run = self.config.run
        is_first, is_last = done == self.first_update, done == run.num_updates
        is_evaluated = is_first or is_last or is_due(run.evaluate_every, done)
        if self.config.data.num_validation_microbatches and is_evaluated and (is_last or not self.stop.came):
            self._evaluate(done)
        self.record.publish()

    def _between_windows(self, done: int, result: WindowResult | None, *, is_end: bool) -> None:
        """Do what is due behind an update; `result` is that of the window that ended there, if one did since the run began or recovered."""
        self.checkpoints.poll()
        if done != self.first_update and (is_end or self.checkpoints.is_due(done)):
            self.checkpoints.save(self.coordinator, done, self.record.losses_at(done))
        if result is None or is_end:
            return
        self.is_between = False  # stages may move
        self.sums.after_window(update=done)
        if self.adaptation is not None:
            before = self.strategy.plan
            self.adaptation.after_window(result, update=done, updates_left=self.config.run.num_updates - done)
            if self.strategy.plan is not before:
                self.recovery.copies.begin_anew()

    def _evaluate(self, update: int) -> None:
        if update == self.first_update:
            self.notice(f"evaluating before update {update + 1}")
        result = self.coordinator.run_window("evaluate", num_updates=1, first_update=0, split="validation")
        self.record.add_evaluation(update, mean_losses(result.reports, num_microbatches=self.strategy.num_validation_microbatches)[0])

    def _sample(self) -> str:
        run = self.config.run
        if not run.sample_bytes or not self.config.data.path:
            return ""
        self.notice(f"generating {run.sample_bytes} bytes of text")
        length, num_rows = self.config.data.sequence_length, self.strategy.num_sample_rows
        text = sampled_text(self.coordinator, run, length=length, num_rows=num_rows)
        self.folder.file("sample.txt").write_text(text, encoding="utf-8")
        return text
