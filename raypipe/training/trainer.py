"""Trains a model as a pipeline of Ray actors: `Trainer(...).fit() -> Result`, in Ray Train's manner.

launch   actors on the nodes and devices of the cluster
profile  each layer measured on one device
plan     the layers cut for the schedule, the window predicted by simulation
run      windows of updates; between them evaluation, checkpoints, progress
report   metrics, traces, a drawing, generated text, predicted against measured
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from raypipe.actors.actor import BatchFunction, BuildOrder
from raypipe.actors.execution.batches import FixedBatch, TokenSource
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.execution.report import mean_losses, norms_of
from raypipe.actors.measure.metrics import RunMetrics
from raypipe.actors.stage.checkpoint import Checkpoint, CheckpointIndex
from raypipe.analysis.comparison import Figure, compare, median_window
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.trace import Trace
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.session import session
from raypipe.cluster.window import WindowResult
from raypipe.config import (
    AUTO,
    AdaptationConfig,
    ClusterConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    Precision,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    TrainConfig,
)
from raypipe.data.tokens import TokenDataset
from raypipe.errors import ConfigError
from raypipe.model import Model
from raypipe.planning.replanning import Decision
from raypipe.profiling.profiler import model_profile
from raypipe.schedules.validate import facts
from raypipe.show.page import draw_page
from raypipe.show.svg import draw_traces
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.named import NamedStrategy
from raypipe.training.plan_checks import check_staleness, with_plan
from raypipe.training.planned import PlannedStrategy
from raypipe.training.run_folder import RunFolder
from raypipe.training.sample import NUM_BYTES, generate
from raypipe.training.strategy import Strategy
from raypipe.user_code import keyword, make_model, name_of

_LOG = logging.getLogger("raypipe.training.trainer")
_WINDOWS_KEPT = 50
"""Traces of the last windows, for the comparison with what was predicted."""


class _Stretch:
    """The windows that ran in one way.

    Args:
        predicted: a window of the largest size.
        reason: why the run went on so; empty at its beginning.
    """

    def __init__(self, *, predicted: Trace, reason: str) -> None:
        self.predicted = predicted
        self.reason = reason
        self.windows: deque[Trace] = deque(maxlen=_WINDOWS_KEPT)
        """As large as the predicted one."""

    def add(self, trace: Trace) -> None:
        """Takes a window."""
        if trace.num_updates == self.predicted.num_updates:
            self.windows.append(trace)

    @property
    def measured(self) -> list[Trace]:
        """Its windows without the first, which has connections, caches and memory to warm up."""
        windows = list(self.windows)
        return windows[1:] or windows

    def save(self, folder: RunFolder, *, until: int) -> None:
        """Keeps a window and what was predicted of it, for comparisons with what runs afterwards."""
        if self.windows:
            median_window(self.measured).save(folder.file(f"trace-until-update-{until:06d}.json"))
            self.predicted.save(folder.file(f"predicted-until-update-{until:06d}.json"))


@dataclass(frozen=True)
class Progress:
    """How far a run is, after a window.

    Attributes:
        update: updates done.
        num_updates: of the run.
        loss: of the last update.
        validation_loss: of the last evaluation; `None` before the first.
        tokens_per_s: over the last window, rows a second where a row has no tokens.
        update_s: seconds per update over the last window.
        bubble_ratio: of the last window.
        seconds_left: at this pace.
    """

    update: int
    num_updates: int
    loss: float
    validation_loss: float | None
    tokens_per_s: float
    update_s: float
    bubble_ratio: float
    seconds_left: float


class Listener(Protocol):
    """Who is told how a run goes."""

    def notice(self, text: str) -> None:
        """Something worth a line."""

    def progress(self, progress: Progress) -> None:
        """A window is done."""


class Silent:
    """Listens and says nothing."""

    def notice(self, text: str) -> None:
        """Says nothing."""

    def progress(self, progress: Progress) -> None:
        """Says nothing."""


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Attributes:
        path: its folder.
        metrics: the last figures: `loss`, `validation_loss`, `tokens_per_s`, `update_s`, `bubble_ratio`, `updates`.
        losses: of each update of this fit.
        validation_losses: pairs (updates done, loss).
        checkpoint: the last.
        plan: what ran where.
        figures: predicted against measured.
        sample: generated text; empty where none was asked for.
    """

    path: str
    metrics: dict[str, float]
    losses: list[float]
    validation_losses: list[tuple[int, float]]
    checkpoint: Checkpoint
    plan: Plan
    figures: list[Figure]
    sample: str


class Trainer:
    """A training run.

    Args:
        model: a function that returns a `raypipe.model.Model`, or its name, `module:function`.
        model_options: its keyword arguments.
        precision: in which it computes.
        compile_layers: whether each of its layers goes through `torch.compile`.
        data_config: which tokens; with `batches`, whose path is left empty, how many microbatches an evaluation takes.
        batches: instead of tokens, a function from a split, `train` or `validation`, to a
            `raypipe.actors.execution.executor.BatchSource` of `schedule_config.microbatch_size` rows; called on the actors.
        schedule_config: in which order the stages work.
        optimizer_config: which optimizer, and its learning rate.
        scaling_config: on what.
        cluster_config: which Ray cluster.
        run_config: how long, and where its results go.
        adaptation_config: whether and when it goes on in another way.
        plan: a `raypipe.plan/1` file, which then decides about stages, devices, schedule, microbatches and their size.
        faults: what is to go wrong, for drills.

    Example:
        Trainer("raypipe.models.gpt:gpt", data_config=DataConfig(path="tokens.parquet")).fit().metrics["loss"]
    """

    def __init__(
        self,
        model: str | Callable[..., Model],
        *,
        model_options: Mapping[str, Any] | None = None,
        precision: Precision = Precision.FLOAT32,
        compile_layers: bool = False,
        data_config: DataConfig | None = None,
        batches: BatchFunction | None = None,
        schedule_config: ScheduleConfig | None = None,
        optimizer_config: OptimizerConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        cluster_config: ClusterConfig | None = None,
        run_config: RunConfig | None = None,
        adaptation_config: AdaptationConfig | None = None,
        plan: str | None = None,
        faults: FaultScript | None = None,
    ) -> None:
        self.model_function = model
        self.faults = faults or FaultScript()
        config = TrainConfig(
            model=ModelConfig(function=name_of(model), options=dict(model_options or {}), precision=precision, compile=compile_layers),
            data=data_config or DataConfig(path=""),
            schedule=schedule_config or ScheduleConfig(),
            optimizer=optimizer_config or OptimizerConfig(),
            scaling=scaling_config or ScalingConfig(),
            cluster=cluster_config or ClusterConfig(),
            run=run_config or RunConfig(),
            adaptation=adaptation_config or AdaptationConfig(),
            plan=plan,
        )
        self.plan = Plan.load(plan) if plan is not None else None
        self.config = with_plan(config, self.plan) if self.plan is not None else config
        if batches is None and data_config is None:
            raise ConfigError("give the trainer either data_config or batches")
        if batches is not None and self.config.data.path:
            raise ConfigError("give the trainer either batches or a data_config with a path; without one it says how long evaluations are")
        self.batches: BatchFunction = batches or TokenSource(
            path=self.config.data.file,
            sequence_length=self.config.data.sequence_length,
            seed=self.config.run.seed,
            microbatch_size=self.config.schedule.microbatch_size,
        )
        self.reads_tokens = batches is None

    @classmethod
    def of(cls, config: TrainConfig) -> Trainer:
        """The trainer of a configuration."""
        return cls(
            config.model.function,
            model_options=config.model.options,
            precision=config.model.precision,
            compile_layers=config.model.compile,
            data_config=config.data,
            schedule_config=config.schedule,
            optimizer_config=config.optimizer,
            scaling_config=config.scaling,
            cluster_config=config.cluster,
            run_config=config.run,
            adaptation_config=config.adaptation,
            plan=config.plan,
        )

    def fit(self, *, listener: Listener | None = None, resume: bool = False) -> Result:
        """Trains.

        Args:
            listener: told how it goes.
            resume: go on from the newest checkpoint of the newest run of this name, at whatever cut it was written.

        Raises:
            InputError: configuration, model, data, schedule and cluster do not fit together.
            RunError: something failed while running; the checkpoints written so far stay.
        """
        return _Fit(self, listener or Silent(), resume=resume).run()


class _Fit:
    """One call of `Trainer.fit`."""

    def __init__(self, trainer: Trainer, listener: Listener, *, resume: bool) -> None:
        self.config = trainer.config
        self.listener = listener
        self.batches = trainer.batches
        self.reads_tokens = trainer.reads_tokens
        self.faults = trainer.faults
        self.function = trainer.model_function
        self.model_function = partial(
            make_model, trainer.model_function, self.config.model.options, compile_layers=self.config.model.compile
        )
        self.model = self.model_function()
        run = self.config.run
        folder = RunFolder.latest(run.storage_path, run.name) if resume else None
        self.resumed = self._resumed(folder) if folder else None
        self.first_update = self.resumed.index.update if self.resumed else 0
        sizes = {size for _, size in self._windows(self.first_update)}
        self.strategy = self._strategy(trainer.plan, sizes)
        self._check_tokens()
        self.folder = folder or RunFolder.create(run.storage_path, run.name)
        if self.resumed is None:
            self.folder.begin(self.config)
        self.losses: list[float] = []
        self._has_diverged = False
        self.validation_losses: list[tuple[int, float]] = []
        self.stretches: list[_Stretch] = []
        self.figures: dict[str, float] = {}

    def _strategy(self, plan: Plan | None, sizes: set[int]) -> Strategy:
        """What the devices will do: as a plan or a name says, or as raypipe chooses."""
        config = self.config
        auto = config.schedule.name == AUTO
        start: Strategy | None = None
        if plan is not None:
            start = PlannedStrategy(plan, config, self.model, window_sizes=sizes)
        elif not auto:
            start = NamedStrategy(config, self.model, window_sizes=sizes)
        if start is not None:
            check_staleness(config, start.schedule)
            if not config.adaptation.enabled:
                return start
        can_divide = self.reads_tokens and config.adaptation.divisions
        return AdaptiveStrategy(config, self.model, window_sizes=sizes, start=start, can_divide=can_divide)

    def _check_tokens(self) -> None:
        """What can be refused of the data before anything is started."""
        if not self.reads_tokens:
            return
        data = self.config.data
        for split in ("train", "validation") if data.num_validation_microbatches else ("train",):
            tokens = TokenDataset(data.path, sequence_length=data.sequence_length, seed=0, split=split)
        known = keyword(self.function, self.config.model.options, "vocabulary_size")
        if isinstance(known, int) and known < tokens.vocabulary_size:
            raise ConfigError(
                f"model.options.vocabulary_size is {known}, {data.path} has {tokens.vocabulary_size} different tokens; set it to that"
            )
        if self.config.run.sample_bytes and tokens.vocabulary_size != NUM_BYTES:
            raise ConfigError(
                f"run.sample_bytes needs tokens that are bytes, {data.path} has {tokens.vocabulary_size} different ones; set it to 0"
            )

    def _resumed(self, folder: RunFolder) -> Checkpoint:
        """The checkpoint to go on from.

        Raises:
            ConfigError: it is of another model, seed or optimizer, or has all updates already.
        """
        checkpoint = Checkpoint.latest(folder.path)
        assert checkpoint is not None, "a folder to resume from has a checkpoint"
        index, run = checkpoint.index, self.config.run
        layers = tuple(layer.name for layer in self.model.layers)
        if index.layers != layers:
            raise ConfigError(
                f"{checkpoint.path} is of a model with the layers {', '.join(index.layers)}; this one has {', '.join(layers)}"
            )
        if index.seed != run.seed:
            raise ConfigError(f"{checkpoint.path} is of a run with run.seed={index.seed}, got {run.seed}; the order of rows would change")
        before, now = folder.config, self.config
        if before.optimizer.name is not now.optimizer.name:
            raise ConfigError(
                f"{checkpoint.path} has the state of optimizer.name={before.optimizer.name}, which {now.optimizer.name} cannot go on from; "
                f"set it to {before.optimizer.name}"
            )
        # A window's rows are found by its number: with others an update they would be skipped, or come twice.
        had, has = (config.schedule.num_microbatches * config.schedule.microbatch_size for config in (before, now))
        if had != has:
            raise ConfigError(
                f"{checkpoint.path} is of a run with {had} rows an update, got {has}; choose schedule.num_microbatches and "
                f"schedule.microbatch_size with the product {had}"
            )
        if self.reads_tokens and before.data.sequence_length != now.data.sequence_length:
            raise ConfigError(
                f"{checkpoint.path} is of a run with data.sequence_length={before.data.sequence_length}, got {now.data.sequence_length}; "
                "the order of rows would change"
            )
        if before.data.path != now.data.path:
            # The same file may lie elsewhere by now.
            self.listener.notice(
                f"data.path is {now.data.path}, and was {before.data.path} in the run that goes on: losses of other text do not compare"
            )
        if index.update >= run.num_updates:
            raise ConfigError(f"{checkpoint.path} has done {index.update} updates already; raise run.num_updates ({run.num_updates})")
        return checkpoint

    def _windows(self, first: int) -> Iterator[tuple[int, int]]:
        """Pairs (first update, number of updates): windows end where an evaluation or a checkpoint is due."""
        run = self.config.run
        stops = (run.evaluate_every if self.config.data.num_validation_microbatches else 0, run.checkpoint_every)
        while first < run.num_updates:
            ends = [first + self.config.schedule.updates_per_window, run.num_updates]
            ends += [(first // every + 1) * every for every in stops if every]
            end = min(ends)
            yield first, end - first
            first = end

    def run(self) -> Result:
        """Launches, plans, trains and reports."""
        config = self.config
        self.listener.notice(f"run folder: {self.folder.path}")
        if "working_dir_files" in Path(self.folder.path).absolute().parts:
            self.listener.notice("it lies in Ray's copy of the job's working directory, which is removed some day; set run.storage_path")
        num_slots = self.strategy.num_slots
        with session(config.cluster, num_devices=num_slots, cpus_per_device=config.scaling.cpus_per_device) as cluster:
            if cluster.dashboard_url:
                self.listener.notice(f"Ray dashboard: {cluster.dashboard_url} (if it asks for a token: ray get-auth-token)")
            slots = self.strategy.find_slots(local=cluster.local)
            name = f"{self.folder.path.name}-{time.time_ns() // 1_000_000:x}"
            self.metrics = RunMetrics(run=name)
            with Coordinator(
                run=name, slots=slots, stages=self.strategy.stages, scaling=config.scaling, cluster=config.cluster
            ) as coordinator:
                self.coordinator = coordinator
                self._prepare()
                if self.config.data.num_validation_microbatches:
                    self._evaluate(self.first_update)
                for first, size in self._windows(self.first_update):
                    self._train(first, size)
                sample = self._sample()
            return self._report(sample)

    # Before the first window

    def _prepare(self) -> None:
        coordinator = self.coordinator
        coordinator.wait_until_up()
        coordinator.check_storage(str(self.folder.path))
        strategy = self.strategy
        strategy.prepare(coordinator, name=self.folder.path.name, measure=self._measure, notice=self.listener.notice)
        plan, schedule = strategy.plan, strategy.schedule
        if self.resumed is None:
            self._begin_stretch("")
        sizes = coordinator.build(self._build_order())
        strategy.check_layers(sizes)
        if self.resumed is not None:
            coordinator.load(self.resumed.path)
            # Not before: what cannot go on leaves the folder as it was.
            self.folder.begin_again(self.config, update=self.first_update)
            self._begin_stretch("")
            self.listener.notice(f"resumed from {self.resumed.path} at update {self.first_update}")
        coordinator.connect(strategy.programs(), strategy.cut)
        if coordinator.channels:
            self.listener.notice(f"messages between devices: {coordinator.channel_text}")
        predicted = plan.predicted
        assert predicted is not None, "the trainer's plan is simulated"
        self.listener.notice(
            f"{sum(size.num_parameters for size in sizes.values()) / 1e6:.2f} M parameters in {schedule.num_stages} stages "
            f"({', '.join(str(len(layers)) for layers in strategy.cut.stages)} layers) on {len(coordinator.slots)} devices, "
            f"schedule {schedule.name}, precision {self.config.model.precision}; "
            f"predicted {predicted.update_s:.3f} s per update, bubble {predicted.bubble_ratio:.1%}"
        )
        mean_delay = facts(schedule).mean_delay
        if mean_delay and self.config.optimizer.name is OptimizerName.ADAMW:
            self.listener.notice(
                f"gradients are {mean_delay:.2g} updates late on average: with optimizer.name nadamw and a long optimizer.warmup_updates "
                "training loses less by that"
            )

    def _build_order(self) -> BuildOrder:
        """How the actors build the stages of the strategy of now."""
        batches = self.batches
        if isinstance(batches, TokenSource):
            batches = dataclasses.replace(batches, microbatch_size=self.strategy.microbatch_size)
        return BuildOrder(
            model=self.model_function,
            batches=batches,
            cut=self.strategy.cut,
            weight_rule=self.strategy.schedule.weight_rule,
            optimizer=self.config.optimizer,
            num_rows=self.strategy.microbatch_size,
            num_updates=self.config.run.num_updates,
            seed=self.config.run.seed,
            faults=self.faults,
            precision=self.config.model.precision,
        )

    def _begin_stretch(self, reason: str) -> None:
        """Notes what runs from now on, and keeps the plan of what ran before."""
        strategy = self.strategy
        self.stretches.append(_Stretch(predicted=strategy.predicted, reason=reason))
        strategy.plan.save(self.folder.file("plan.json"))
        self.metrics.record("pipelines", len(strategy.schedule.pipelines))
        self.metrics.record("switches", len(self.stretches) - 1)
        assert strategy.plan.predicted is not None, "the trainer's plan is simulated"
        self.metrics.record("predicted_update_seconds", strategy.plan.predicted.update_s)

    def _measure(self, num_devices: int) -> ModelProfile:
        """What the model's layers cost on the first devices, all at the same time."""
        measured = self.coordinator.measure(
            self.model_function,
            self.batches,
            optimizer=self.config.optimizer,
            seed=self.config.run.seed,
            num_devices=num_devices,
            precision=self.config.model.precision,
        )
        layers = [layer for of_device in measured for layer in of_device]
        seconds = [layer.forward_s + layer.backward_s for layer in layers]
        spread = sum(layer.spread * took for layer, took in zip(layers, seconds, strict=True)) / sum(seconds)
        self.listener.notice(f"layer times measured to within +-{spread:.0%}")
        return model_profile(measured, self.model, name=self.config.model.function, microbatch_size=self.config.schedule.microbatch_size)

    # Windows

    def _train(self, first: int, size: int) -> None:
        result = self.coordinator.run_window(f"train-{size}", num_updates=size, first_update=first)
        losses = mean_losses(result.reports, num_microbatches=self.strategy.schedule.num_microbatches)
        norms = norms_of(result.reports, scope=self.strategy.schedule.update_scope)
        self.losses += losses
        self.stretches[-1].add(result.trace)
        update_s = result.wall_s / size
        tokens = self.config.schedule.num_microbatches * self.config.schedule.microbatch_size
        tokens *= self.config.data.sequence_length if self.reads_tokens else 1
        self.figures |= {
            "loss": losses[-1],
            "tokens_per_s": tokens / update_s,
            "update_s": update_s,
            "bubble_ratio": result.trace.bubble_ratio,
            "updates": first + size,
        }
        diverged = next((number for number, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if diverged is not None and not self._has_diverged:
            self._has_diverged = True
            text = "what is saved from now on comes of it; remove those checkpoints to resume from before, and lower the learning rate"
            self.listener.notice(f"update {first + diverged + 1}: the loss is {losses[diverged]}; {text}")
        for number, loss in enumerate(losses):
            self.folder.add_metrics({
                "update": first + number + 1,
                "loss": loss,
                "grad_norm": norms.get(number),
                "learning_rate": self.config.optimizer.rate(first + number, num_updates=self.config.run.num_updates),
                "update_s": update_s,
                "tokens_per_s": tokens / update_s,
                "bubble_ratio": result.trace.bubble_ratio,
            })
        done = first + size
        self._between_windows(done)
        self._tell(done, update_s)
        self._adapt(result, done)

    def _adapt(self, result: WindowResult, done: int) -> None:
        """Goes on in another way where the policy says so."""
        strategy, left = self.strategy, self.config.run.num_updates - done
        if not isinstance(strategy, AdaptiveStrategy) or not self.config.adaptation.enabled or not left:
            return
        since = time.perf_counter()
        decision = strategy.after_window(result, self.coordinator.links.estimate, updates_left=left)
        if decision is None:
            return
        _LOG.info("update %d: %s", done, decision.text)
        facts = strategy.facts.topology
        line: dict[str, Any] = {
            "update": done,
            "switch": decision.switch,
            "text": decision.text,
            "gain": decision.gain,
            "update_s": result.trace.makespan_s / result.num_updates,
            "predicted_s": decision.predicted_s,
            "links_bytes_per_s": {f"{link.source} -> {link.target}": link.bandwidth_bytes_per_s for link in facts.links},
            "speeds": {device.name: device.speed for device in facts.devices},
            "decided_s": time.perf_counter() - since,
        }
        # A device that the present way needs, too, fails as it does without a switch: with its name.
        others = set(strategy.devices_of(decision.choice)).difference(strategy.devices) if decision.switch else set()
        if others and (dead := self.coordinator.dead_actors(sorted(others))):
            names = strategy.leave_out(dead)
            text = f"stays, and goes on without {' and '.join(names)}: needed for another way, but gone or silent ({decision.text})"
            line |= {"switch": False, "text": text}
            self.listener.notice(f"update {done}: {text}")
        try:
            if line["switch"]:
                self._switch(strategy, decision, done)
                line["took_s"] = strategy.policy.switch_s
        finally:  # also of a switch that failed
            self.folder.add_decision(line)

    def _switch(self, strategy: AdaptiveStrategy, decision: Decision, done: int) -> None:
        """Goes on in the way that was decided on."""
        self.listener.notice(f"update {done}: {decision.text}")
        before, began = strategy.plan, time.perf_counter()
        strategy.adopt(decision.choice)
        self.coordinator.move(strategy.devices, strategy.stages, order=self._build_order(), programs=strategy.programs())
        strategy.policy.adopt(decision.choice, took_s=time.perf_counter() - began)
        before.save(self.folder.file(f"plan-until-update-{done:06d}.json"))
        self.stretches[-1].save(self.folder, until=done)
        self._begin_stretch(f"update {done}: {decision.text}")

    def _between_windows(self, done: int) -> None:
        run = self.config.run
        last = done == run.num_updates
        if self.config.data.num_validation_microbatches and (last or (run.evaluate_every and done % run.evaluate_every == 0)):
            self._evaluate(done)
        if last or (run.checkpoint_every and done % run.checkpoint_every == 0):
            self.checkpoint = self._save(done)

    def _tell(self, done: int, update_s: float) -> None:
        for name, key in (
            ("loss", "loss"),
            ("validation_loss", "validation_loss"),
            ("tokens_per_s", "tokens_per_s"),
            ("update_seconds", "update_s"),
            ("updates", "updates"),
        ):
            if key in self.figures:
                self.metrics.record(name, self.figures[key])
        self.listener.progress(
            Progress(
                update=done,
                num_updates=self.config.run.num_updates,
                loss=self.figures["loss"],
                validation_loss=self.figures.get("validation_loss"),
                tokens_per_s=self.figures["tokens_per_s"],
                update_s=update_s,
                bubble_ratio=self.figures["bubble_ratio"],
                seconds_left=(self.config.run.num_updates - done) * update_s,
            )
        )

    def _evaluate(self, done: int) -> None:
        count = self.strategy.num_validation_microbatches
        result = self.coordinator.run_window("evaluate", num_updates=1, first_update=0, split="validation")
        loss = mean_losses(result.reports, num_microbatches=count)[0]
        self.validation_losses.append((done, loss))
        self.figures["validation_loss"] = loss
        self.folder.add_metrics({"update": done, "validation_loss": loss})

    def _save(self, done: int) -> Checkpoint:
        folder = self.folder.new_checkpoint(done)
        self.coordinator.save(str(folder))
        index = CheckpointIndex(
            update=done,
            layers=tuple(layer.name for layer in self.model.layers),
            model=self.config.model.function,
            seed=self.config.run.seed,
        )
        return Checkpoint.finish(folder, index)

    def _sample(self) -> str:
        run = self.config.run
        if not run.sample_bytes or not self.reads_tokens:
            return ""
        import torch  # noqa: PLC0415  # the driver needs it for this alone

        num_rows = self.strategy.num_sample_rows

        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            # Where several devices share the rows, each must have one: all are the same.
            rows = tokens.expand(num_rows, -1)
            result: WindowResult = self.coordinator.run_on("predict", FixedBatch({"tokens": rows, "targets": rows}), num_rows=num_rows)
            return next(report.outputs[0] for report in result.reports if report.outputs)[:1]

        text = generate(
            logits_of,
            prompt=run.sample_prompt.encode(),
            num_bytes=run.sample_bytes,
            sequence_length=self.config.data.sequence_length,
            seed=run.seed,
        ).decode(errors="replace")
        self.folder.file("sample.txt").write_text(text, encoding="utf-8")
        return text

    # After the last window

    def _report(self, sample: str) -> Result:
        # The last of the ways to run that had a whole window: a run may end soon after a switch.
        stretch = next(stretch for stretch in reversed(self.stretches) if stretch.windows)
        predicted, measured = stretch.predicted, stretch.measured
        window = dataclasses.replace(median_window(measured), notes=tuple(found.reason for found in self.stretches if found.reason))
        window.save(self.folder.file("trace.json"))
        predicted.save(self.folder.file("predicted.json"))
        self.folder.write_json("trace.perfetto.json", {"traceEvents": predicted.to_chrome() + window.to_chrome()})
        # Two updates from the middle: few enough to read the Ops.
        middle = max(window.num_updates // 2 - 1, 0)
        shown = [trace.of_updates(middle, min(middle + 2, trace.num_updates)) for trace in (predicted, window)]
        self.folder.file("timeline.svg").write_text(draw_traces(shown), encoding="utf-8")
        self.folder.file("timeline.html").write_text(draw_page((predicted, window)), encoding="utf-8")
        figures = compare(predicted, measured)
        self.folder.write_json("comparison.json", [dataclasses.asdict(figure) | {"error": figure.error} for figure in figures])
        return Result(
            path=str(self.folder.path),
            metrics=dict(self.figures),
            losses=self.losses,
            validation_losses=self.validation_losses,
            checkpoint=self.checkpoint,
            plan=self.strategy.plan,
            figures=figures,
            sample=sample,
        )
