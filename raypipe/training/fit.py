"""One run of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from raypipe.actors.execution.batches import FileSource, FixedBatch
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.orders import BatchFunction, BuildOrder
from raypipe.actors.stage.checkpoint import Checkpoint, CheckpointIndex
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.cluster.coordinator import Coordinator
from raypipe.config import AUTO, OptimizerName, TrainConfig
from raypipe.model import Model
from raypipe.profiling.profiler import model_profile
from raypipe.schedules.families import branch_aware
from raypipe.schedules.metrics import metrics
from raypipe.training.adaptive import Adaptation, AdaptiveStrategy
from raypipe.training.checks import check_data, check_staleness, checkpoint_to_resume
from raypipe.training.record import RunRecord, write_report
from raypipe.training.result import Listener, Result
from raypipe.training.run_cluster import stage_actors
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_schedules import is_sharded
from raypipe.training.strategy import NamedStrategy, PlannedStrategy, Strategy
from raypipe.training.sums import SumAdaptation
from raypipe.units import counted
from raypipe.user_code import keyword, make_model

# Generation of text: the byte that ends a document and pads short contexts.
_SENTINEL = 0
_TEMPERATURE = 0.7


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
        batches: BatchFunction,
        plan: Plan | None,
        faults: FaultScript,
        listener: Listener,
        resume: bool,
    ) -> None:
        self.config = config
        self.batches = batches
        self.faults = faults
        self.listener = listener
        self.model_function = partial(make_model, model, config.model.options, compile_layers=config.model.compile)
        self.model = self.model_function()
        folder = RunFolder.latest(config.run.storage_path, config.run.name) if resume else None
        self.resumed = checkpoint_to_resume(folder, config, self.model, listener.notice) if folder else None
        self.first_update = self.resumed.index.update if self.resumed else 0
        self.strategy = run_strategy(config, self.model, plan, window_sizes={size for _, size in _windows(config, self.first_update)})
        tokens_per_row = 1
        if config.data.path:
            tokens_per_row = check_data(config, self.model, vocabulary_size=keyword(model, config.model.options, "vocabulary_size"))
        self.folder = folder or RunFolder.create(config.run.storage_path, config.run.name)
        if self.resumed is None:
            self.folder.begin(config)
        self.record = RunRecord(config, self.folder, listener, tokens_per_row=tokens_per_row)
        self.coordinator: Coordinator
        self.adaptation: Adaptation | None = None
        self.sums: SumAdaptation
        self.checkpoint: Checkpoint

    def run(self) -> Result:
        """Train, and write the report.

        Raises:
            InputError: The cluster does not fit the run.
            RunError: Something failed while running.
        """
        config, strategy = self.config, self.strategy
        self.listener.notice(f"run folder: {self.folder.path}")
        if "working_dir_files" in Path(self.folder.path).absolute().parts:
            self.listener.notice("Ray removes this copy of the job's working directory some day; set run.storage_path to keep the results")
        actors = stage_actors(
            self.folder.path.name,
            stages=strategy.stages,
            num_slots=strategy.num_slots,
            find_slots=strategy.find_slots,
            scaling=config.scaling,
            cluster=config.cluster,
            notice=self.listener.notice,
        )
        with actors as self.coordinator:
            self.record.start_metrics(self.coordinator.run)
            self._prepare()
            if config.data.num_validation_microbatches:
                self.listener.notice("evaluating before the first update")
                self._evaluate(self.first_update)
            self.listener.notice(f"training updates {self.first_update + 1} to {config.run.num_updates}")
            for first, size in _windows(config, self.first_update):
                self._train(first, size)
            sample = self._sample()
        self.listener.notice("writing the report")
        figures = write_report(self.folder, self.record.phases)
        return Result(
            path=str(self.folder.path),
            metrics=self.record.figures,
            losses=self.record.losses,
            validation_losses=self.record.validation_losses,
            checkpoint=self.checkpoint,
            plan=strategy.plan,
            figures=figures,
            sample=sample,
        )

    def _prepare(self) -> None:
        coordinator, strategy, notice = self.coordinator, self.strategy, self.listener.notice
        coordinator.check_storage(str(self.folder.path))
        strategy.prepare(coordinator, name=self.folder.path.name, measure=self._measure, notice=notice)
        if self.resumed is None:
            self.record.begin_phase(strategy)
        notice(f"building {counted(strategy.schedule.num_stages, 'stage')}")
        sizes = coordinator.build(self._build_order())
        strategy.check_layers(sizes)
        if self.resumed is not None:
            coordinator.load(self.resumed.path)
            # Only now: a run that cannot be resumed leaves its folder as it was.
            self.folder.continue_from(self.config, update=self.first_update)
            self.record.begin_phase(strategy)
            notice(f"resumed from {self.resumed.path} at update {self.first_update}")
        self.sums = SumAdaptation(strategy, coordinator, self.record, exact=self.config.communication.exact)
        programs = strategy.programs()
        coordinator.connect(programs, strategy.cut, patterns=self.sums.begin(programs))
        if coordinator.channel_text:
            notice(f"messages between devices: {coordinator.channel_text}")
        if isinstance(strategy, AdaptiveStrategy) and self.config.adaptation.enabled:
            self.adaptation = Adaptation(strategy, coordinator, self.record, build_order=self._build_order, sums=self.sums)
        self._describe(sum(size.num_parameters for size in sizes.values()))

    def _describe(self, num_parameters: int) -> None:
        strategy, notice = self.strategy, self.listener.notice
        schedule, predicted = strategy.schedule, strategy.plan.predicted
        assert predicted is not None, "a strategy predicts its plan"
        notice(
            f"{num_parameters / 1e6:.2f} M parameters on {counted(len(self.coordinator.slots), 'device')}, "
            f"schedule {schedule.name}, precision {self.config.model.precision}"
        )
        notice(f"layers of each stage: {' '.join(str(len(layers)) for layers in strategy.cut.stages)}")
        notice(f"predicted {predicted.update_s:.3f} s per update, bubble {predicted.bubble_ratio:.1%}")
        if self.config.scaling.shard_optimizer and not is_sharded(schedule):
            notice(f"scaling.shard_optimizer changes nothing: {schedule.name} has each stage on one device only")
        mean_delay = metrics(schedule).mean_delay
        if mean_delay and self.config.optimizer.name is OptimizerName.ADAMW:
            notice(
                f"gradients are {mean_delay:.2g} updates late on average: with optimizer.name nadamw and a long optimizer.warmup_updates "
                "training loses less by that"
            )

    def _build_order(self) -> BuildOrder:
        batches, size = self.batches, self.strategy.microbatch_size
        if isinstance(batches, FileSource):
            batches = dataclasses.replace(batches, microbatch_size=size)
        return BuildOrder(
            model=self.model_function,
            batches=batches,
            cut=self.strategy.cut,
            weight_rule=self.strategy.schedule.weight_rule,
            optimizer=self.config.optimizer,
            num_rows=size,
            num_updates=self.config.run.num_updates,
            seed=self.config.run.seed,
            faults=self.faults,
            precision=self.config.model.precision,
        )

    def _measure(self, num_devices: int) -> ModelProfile:
        config = self.config
        self.listener.notice(f"measuring {counted(len(self.model.layers), 'layer')} on {counted(num_devices, 'device')}")
        measured = self.coordinator.measure(
            self.model_function,
            self.batches,
            optimizer=config.optimizer,
            seed=config.run.seed,
            num_devices=num_devices,
            precision=config.model.precision,
            notice=self.listener.notice,
        )
        layers = [layer for of_device in measured for layer in of_device]
        seconds = [layer.forward_s + layer.backward_s for layer in layers]
        spread = sum(layer.spread * took for layer, took in zip(layers, seconds, strict=True)) / sum(seconds)
        self.listener.notice(f"layer times measured to within +-{spread:.0%}")
        return model_profile(measured, self.model, name=config.model.function, microbatch_size=config.schedule.microbatch_size)

    def _train(self, first: int, size: int) -> None:
        run = self.config.run
        result = self.coordinator.run_window(f"train-{size}", num_updates=size, first_update=first)
        self.record.add_window(result, self.strategy.schedule, first_update=first)
        done = first + size
        is_last = done == run.num_updates
        if self.config.data.num_validation_microbatches and (is_last or (run.evaluate_every and done % run.evaluate_every == 0)):
            self._evaluate(done)
        if is_last or (run.checkpoint_every and done % run.checkpoint_every == 0):
            self._save(done)
        self.record.publish()
        if not is_last:
            self.sums.after_window(update=done)
        if self.adaptation is not None and not is_last:
            self.adaptation.after_window(result, update=done, updates_left=run.num_updates - done)

    def _evaluate(self, update: int) -> None:
        result = self.coordinator.run_window("evaluate", num_updates=1, first_update=0, split="validation")
        self.record.add_evaluation(update, mean_losses(result.reports, num_microbatches=self.strategy.num_validation_microbatches)[0])

    def _save(self, update: int) -> None:
        folder = self.folder.new_checkpoint(update)
        self.coordinator.save(str(folder))
        layers = tuple(layer.name for layer in self.model.layers)
        index = CheckpointIndex(update=update, layers=layers, model=self.config.model.function, seed=self.config.run.seed)
        self.checkpoint = Checkpoint.finish(folder, index)

    def _sample(self) -> str:
        run = self.config.run
        if not run.sample_bytes or not self.config.data.path:
            return ""
        self.listener.notice(f"generating {run.sample_bytes} bytes of text")
        # Devices that share the rows of a microbatch need one each; all rows are the same.
        num_rows, length = self.strategy.num_sample_rows, self.config.data.sequence_length
        generator = torch.Generator().manual_seed(run.seed)
        prompt = run.sample_prompt.encode()
        tokens = list(prompt or [_SENTINEL])
        for _ in range(run.sample_bytes):
            context = tokens[-length:]
            # The model is causal: padding after the context changes nothing.
            rows = torch.tensor([context + [_SENTINEL] * (length - len(context))]).expand(num_rows, -1)
            result = self.coordinator.run_on("predict", FixedBatch({"tokens": rows, "targets": rows}), num_rows=num_rows)
            logits_v = next(report.outputs[0] for report in result.reports if report.outputs)[0, len(context) - 1]
            probabilities = torch.softmax(logits_v.double() / _TEMPERATURE, dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        text = bytes(tokens if prompt else tokens[1:]).decode(errors="replace")
        self.folder.file("sample.txt").write_text(text, encoding="utf-8")
        return text


def run_strategy(config: TrainConfig, model: Model, plan: Plan | None, *, window_sizes: set[int]) -> Strategy:
    """Return how a run divides its work, by its configuration."""
    start: Strategy | None = None
    if plan is not None:
        start = PlannedStrategy(plan, config, model, window_sizes=window_sizes)
    elif config.schedule.name not in {AUTO, branch_aware.NAME}:
        start = NamedStrategy(config, model, window_sizes=window_sizes)
    if start is not None:
        check_staleness(config, start.schedule)
        if not config.adaptation.enabled:
            return start
    # A schedule asked for by name keeps the microbatches asked for with it.
    is_open = config.adaptation.enabled or config.schedule.name == AUTO
    can_divide = is_open and bool(config.data.path) and config.adaptation.divisions and not model.loss_couples_rows
    return AdaptiveStrategy(config, model, window_sizes=window_sizes, start=start, can_divide=can_divide)


def _windows(config: TrainConfig, first: int) -> Iterator[tuple[int, int]]:
    """Yield (first update, number of updates) of each window; evaluations and checkpoints end one."""
    run = config.run
    intervals = (run.evaluate_every if config.data.num_validation_microbatches else 0, run.checkpoint_every)
    while first < run.num_updates:
        ends = [first + config.schedule.updates_per_window, run.num_updates]
        ends += [(first // every + 1) * every for every in intervals if every]
        yield first, min(ends) - first
        first = min(ends)
