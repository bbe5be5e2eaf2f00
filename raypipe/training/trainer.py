"""Public class `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from raypipe.actors.data.collate import Collate
from raypipe.actors.data.source import DataSource, data_name
from raypipe.actors.execution.batches import FileSource
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.orders import BatchFunction
from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.artifacts.plan import Plan
from raypipe.callbacks.base import Callback
from raypipe.callbacks.catalogue import callback_configs, make_callback
from raypipe.callbacks.group import CallbackGroup
from raypipe.callbacks.progress import Progress
from raypipe.config import (
    AdaptationConfig,
    CallbackConfig,
    CheckpointMetric,
    ClusterConfig,
    CommunicationConfig,
    DataConfig,
    FailureConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    TrainConfig,
)
from raypipe.data.samples import Split
from raypipe.errors import ConfigError
from raypipe.model import Model
from raypipe.training.checks import with_plan
from raypipe.training.fit import Fit
from raypipe.training.result import Result, Resume
from raypipe.user_code import located, make_model, model_function, recorded_name


class Trainer:
    """A model, its data, and how to train it.

    Args:
        model: Function that returns a `raypipe.model.Model`, or its name, `module:function`; or `hf:PATH` for a model of Hugging Face.
        model_options: Keyword arguments of the function.
        precision: Precision that the model computes in.
        compile_layers: Whether each layer goes through `torch.compile`.
        data_config: File or functions that the rows come from. With `train_data` or `batches` it says how many microbatches an
            evaluation takes, and how far ahead rows are read.
        train_data: Training rows: a table with `__len__` and `__getitem__` (a torch or Hugging Face dataset, a list), a dict of columns,
            an iterable (an `IterableDataset`, a `DataLoader`, a Ray Dataset), or a function that returns one of them.
        eval_data: The same for evaluations; without it there are none.
        collate: Function that makes a dict of tensors from a list of rows; without it, fields of one shape are stacked.
        batches: Function from a split, `train` or `validation`, to a `raypipe.actors.execution.batches.BatchSource` of
            `schedule_config.microbatch_size` rows; called on the actors.
        schedule_config: Order in which the stages work.
        optimizer_config: Optimizer and learning rate.
        optimizer: Class of optimizers, or function that makes one, instead of what `optimizer_config.name` names; called on the actors
            with groups of weights, `lr` and the options.
        scaling_config: Devices.
        cluster_config: Ray cluster.
        run_config: Length of the run, and where its results go.
        adaptation_config: Whether and when to switch plans.
        communication_config: What devices sum and send each other.
        failure_config: What the run does about failures.
        callbacks: What receives the events of the run, beside its progress on stderr (`RunConfig.show_progress`): callbacks, or names as in
            the configuration.
        plan: `raypipe.plan/1` file that decides about stages, devices, schedule and microbatches.
        faults: Failures to inject, for drills.

    Raises:
        ConfigError: `model` is no function, there is not exactly one of a `data_config` with rows, `train_data` and `batches`, or a value
            contradicts the plan.

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
        train_data: object = None,
        eval_data: object = None,
        collate: Collate | None = None,
        batches: BatchFunction | None = None,
        schedule_config: ScheduleConfig | None = None,
        optimizer_config: OptimizerConfig | None = None,
        optimizer: OptimizerFunction | None = None,
        scaling_config: ScalingConfig | None = None,
        cluster_config: ClusterConfig | None = None,
        run_config: RunConfig | None = None,
        adaptation_config: AdaptationConfig | None = None,
        communication_config: CommunicationConfig | None = None,
        failure_config: FailureConfig | None = None,
        callbacks: Sequence[Callback | CallbackConfig | str] = (),
        plan: str | None = None,
        faults: FaultScript | None = None,
    ) -> None:
        self.model_function = model = located(model) if isinstance(model, str) else model_function(model, what="model")
        self.optimizer_function = optimizer
        self.faults = faults or FaultScript()
        config = TrainConfig(
            model=ModelConfig(
                function=recorded_name(model), options=dict(model_options or {}), precision=precision, compile=compile_layers
            ),
            data=data_config or DataConfig(path=""),
            schedule=schedule_config or ScheduleConfig(),
            optimizer=_with_function(optimizer_config or OptimizerConfig(), optimizer),
            scaling=scaling_config or ScalingConfig(),
            cluster=cluster_config or ClusterConfig(),
            run=run_config or RunConfig(),
            adaptation=adaptation_config or AdaptationConfig(),
            communication=communication_config or CommunicationConfig(),
            failure=failure_config or FailureConfig(),
            callbacks=callback_configs(callbacks),
            plan=plan,
        )
        self.callbacks = [make_callback(one) for one in callbacks]
        self.plan = Plan.load(plan) if plan is not None else None
        self.config = with_plan(config, self.plan) if self.plan is not None else config
        if train_data is None and (eval_data is not None or collate is not None):
            raise ConfigError("eval_data and collate need train_data")
        has_rows = bool(self.config.data.path or self.config.data.train)
        if (batches is not None) + (train_data is not None) + (has_rows or (data_config is not None and not (batches or train_data))) != 1:
            raise ConfigError(
                "give the trainer one of train_data, batches, and a data_config with a path or functions; beside the first two, a "
                "data_config says how long evaluations are"
            )
        if batches is not None:
            self.config = replace(self.config, data=replace(self.config.data, train=data_name(batches)))
        self.batches = batches or self._source(train_data, eval_data, collate)
        _check_kept(self.config)

    def _source(self, train_data: object, eval_data: object, collate: Collate | None) -> BatchFunction | DataSource:
        data, seed = self.config.data, self.config.run.seed
        if train_data is not None:
            given = {Split.TRAIN.value: train_data} | ({Split.VALIDATION.value: eval_data} if eval_data is not None else {})
            self._use_data(train=data_name(train_data), eval=data_name(eval_data), collate=data_name(collate))
            return DataSource(given, collate=collate, seed=seed)
        if data.train:
            self._use_data()
            return DataSource.of(data, seed=seed)
        return FileSource(
            path=data.file, sequence_length=data.sequence_length, seed=seed, microbatch_size=self.config.schedule.microbatch_size
        )

    def _use_data(self, **named: str) -> None:
        data = replace(self.config.data, **named)  # type: ignore[arg-type]
        if not data.eval:
            data = replace(data, num_validation_microbatches=0)
        self.config = replace(self.config, data=data)

    @classmethod
    def of(cls, config: TrainConfig, *, faults: FaultScript | None = None, callbacks: Sequence[Callback] = ()) -> Trainer:
        """Return the trainer of a configuration; `callbacks` come before those that it names."""
        model, others = config.model, {"model", "plan", "callbacks"}
        sections = {f"{field.name}_config": getattr(config, field.name) for field in fields(config) if field.name not in others}
        return cls(
            model.function,
            model_options=model.options,
            precision=model.precision,
            compile_layers=model.compile,
            callbacks=[*callbacks, *config.callbacks],
            plan=config.plan,
            faults=faults,
            **sections,
        )

    def fit(self, *, resume: Resume = False) -> Result:
        """Train, and return the outcome.

        Args:
            resume: Whether to go on from the newest checkpoint of this name, whatever stages wrote it. With `auto` the newest run of this
                name goes on, or begins again if it has no checkpoint, or returns its result if it has all updates; without one, a run
                begins.

        Raises:
            InputError: Configuration, model, data, schedule and cluster do not fit together, or another process writes this run.
            RunError: Something failed while running; checkpoints stay.
            KeyboardInterrupt: By Ctrl-C or SIGTERM: a `StoppedRun` once the window and a checkpoint are done.
        """
        result = Fit(
            self.config,
            model=self.model_function,
            optimizer_function=self.optimizer_function,
            batches=self.batches,
            plan=self.plan,
            faults=self.faults,
            callbacks=self._group(),
            resume=resume,
        ).run()
        return replace(result, model=partial(make_model, self.model_function, self.config.model.options))

    def _group(self) -> CallbackGroup:
        shows = self.config.run.show_progress and not any(isinstance(one, Progress) for one in self.callbacks)
        return CallbackGroup([*([Progress()] if shows else []), *self.callbacks])


def _check_kept(config: TrainConfig) -> None:
    if config.run.keep_best_by is not CheckpointMetric.VALIDATION_LOSS or config.data.num_validation_microbatches:
        return
    has_rows = not config.data.train or config.data.eval
    remedy = "set data.num_validation_microbatches" if has_rows else "give rows for it, data.eval or eval_data"
    raise ConfigError(f"run.keep_best_by is validation_loss, but this run has no validation: {remedy}, or keep by loss")


def _with_function(config: OptimizerConfig, function: OptimizerFunction | None) -> OptimizerConfig:
    if function is None:
        return config
    if config.name != OptimizerConfig().name:
        raise ConfigError(f"give the trainer either an optimizer or an optimizer_config with a name; it has {config.name!r}")
    return replace(config, name=recorded_name(function))
