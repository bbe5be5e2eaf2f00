"""The configuration of a training run: frozen dataclasses, `raypipe.train/1` in YAML; names as in Ray Train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raypipe.artifacts import codec
from raypipe.artifacts.files import read_text, write_text
from raypipe.artifacts.record import invalid, record
from raypipe.artifacts.syntax import yaml_text, yaml_tree
from raypipe.errors import ConfigError, ScheduleError
from raypipe.optimizer_config import OptimizerConfig, OptimizerName, WeightGroup
from raypipe.run_config import CheckpointMetric, FailureConfig, OnNonFinite, RunConfig
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.staleness import StalenessLimits

__all__ = [
    "AUTO",
    "FORMAT",
    "AdaptationConfig",
    "CallbackConfig",
    "CheckpointMetric",
    "ClusterConfig",
    "CommunicationConfig",
    "DataConfig",
    "FailureConfig",
    "ModelConfig",
    "OnNonFinite",
    "OptimizerConfig",
    "OptimizerName",
    "Precision",
    "RunConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "TrainConfig",
    "Transport",
    "WeightGroup",
    "cache_folder",
    "calibration_file",
]

FORMAT = "raypipe.train/1"


def cache_folder() -> Path:
    """Return the folder for files that raypipe can make again; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "raypipe")


def calibration_file() -> Path:
    """Return the file that `raypipe calibrate` writes, and predictions read, on this machine."""
    return cache_folder() / f"calibration-{os.uname().nodename}.json"


class Precision(StrEnum):
    """Precision of forwards and backwards. The optimizer steps the weights in the precision that they are built in."""

    FLOAT32 = "float32"
    """The precision that the model builds its layers in, float32 as a rule."""
    BF16_MIXED = "bf16-mixed"
    """`torch.autocast`: matrix products in bfloat16, the rest in float32 where it needs that."""
    BF16 = "bf16"
    """All in bfloat16, as after `module.bfloat16()`; the optimizer keeps weights of its own."""


@record()
class ModelConfig:
    """The model.

    Attributes:
        function: `module:function`, or `path/to/file.py:function`; called with the options, it returns a `raypipe.model.Model`. Or
            `hf:PATH` for a language model of Hugging Face: a folder or a name on the Hub.
        options: Keyword arguments of the function.
        precision: Precision of forwards and backwards.
        compile: Whether each layer goes through `torch.compile`; layers of one class and shape are compiled once.
    """

    function: str
    options: dict[str, Any] = field(default_factory=dict)
    precision: Precision = Precision.FLOAT32
    compile: bool = False


@record()
class DataConfig:
    """The training data: a file (`path`), or functions that return any other data (`train`, `eval`).

    Attributes:
        path: Parquet file made by `raypipe data prepare`, of tokens or of named fields; every node whose stages read rows or have the
            loss must be able to read it.
        train: `module:function`, or `path/to/file.py:function`; called with the options, it returns the training rows: a dataset, an
            iterable or a loader.
        eval: The same for the rows of evaluations; left out for no evaluation.
        collate: `module:function`, or `path/to/file.py:function`, that makes a dict of tensors from a list of rows; left out to stack
            fields of one shape.
        options: Keyword arguments of `train` and `eval`.
        num_readers: Processes that read training rows beside the stages, for data that has a place for each row.
        prefetch: Microbatches that a stage asks the readers for ahead of its program.
        sequence_length: Tokens per row of a token file.
        num_validation_microbatches: Microbatches of held-out rows per evaluation; 0 for no evaluation.
    """

    path: str = ""
    train: str = ""
    eval: str = ""
    collate: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    num_readers: PositiveInt = 1
    prefetch: NonNegativeInt = 2
    sequence_length: PositiveInt = 128
    num_validation_microbatches: NonNegativeInt = 8

    def __post_init__(self) -> None:
        if self.path and self.train:
            raise invalid(self, "train", f"expected either data.path or data.train, got both, {self.path!r} and {self.train!r}")
        if self.eval and not self.train:
            raise invalid(self, "eval", "needs data.train: a file of data.path has rows of its own for evaluations")

    @property
    def file(self) -> str:
        """Return the absolute path of the file; raise `ConfigError` if the run has other data instead."""
        if not self.path:
            raise ConfigError(
                "data.path names no file, and data.train no function; set one, or start the run from Python, with "
                "Trainer(train_data=...) or Trainer(batches=...)"
            )
        return os.path.abspath(self.path)


@record()
class ScheduleConfig:
    """The schedule: the order in which the stages work.

    Attributes:
        name: Name from `raypipe schedules`; `auto` to let raypipe choose schedule, cut and devices; or your own schedule: a file (.csv or
            .json, relative to the working directory), `module:function` or `path/to/file.py:function`.
        num_microbatches: Microbatches per update, over all pipelines.
        microbatch_size: Rows per microbatch.
        num_chunks: Stages per device, for schedules that take several; left out for the schedule's own number.
        num_pipelines: Pipelines, for schedules that have several; 0 lets the schedule choose.
        update_scope: What an update waits for; left out for the schedule's own default.
        max_in_flight: Most stage activations that a device may hold, for schedules that are searched for; left out for their own limit.
        max_staleness: Where raypipe chooses the schedule, the most updates between the weights of a forward and the weights that its
            gradient changes. Left out, only synchronous schedules are chosen (unless `max_mean_staleness` allows a delay), or a run that
            adapts keeps the limit of its first schedule.
        max_mismatch: Where raypipe chooses the schedule, the most weight versions between the forward and the backward of a microbatch;
            left out for no limit, or for that of the first schedule of a run that adapts.
        max_mean_staleness: Limit on the mean delay in updates over microbatches and stages, for chosen and for named schedules;
            `amdp-auto` takes its fastest order within it. Left out for no limit.
        updates_per_window: Updates between two drains; evaluation and checkpoints happen between windows.
        synchronous_updates: First updates of a run behind each of which the pipeline drains, so that none of their gradients is late.
    """

    name: str = "1f1b"
    num_microbatches: PositiveInt = 8
    microbatch_size: PositiveInt = 8
    num_chunks: PositiveInt | None = None
    num_pipelines: NonNegativeInt = 0
    update_scope: UpdateScope | None = None
    max_in_flight: Annotated[float, Field(ge=1)] | None = None
    max_staleness: NonNegativeInt | None = None
    max_mismatch: NonNegativeInt | None = None
    max_mean_staleness: NonNegativeFloat | None = None
    updates_per_window: PositiveInt = 10
    synchronous_updates: NonNegativeInt = 0

    @property
    def staleness(self) -> StalenessLimits:
        """Return the limits on delay and mismatch."""
        return StalenessLimits(self.max_staleness, self.max_mismatch, self.max_mean_staleness)


class Transport(StrEnum):
    """What carries the messages between stages, and the sums over several devices."""

    AUTO = "auto"
    """What suits the devices: `tcp` for CPU slots; for GPUs NCCL, and memory within a GPU."""
    SHM = "shm"
    """Messages through shared memory; refused if devices of different nodes exchange messages. Sums as with `tcp`."""
    GLOO = "gloo"
    """All over gloo, which also uses TCP, within a node, too; its transfers take no turns."""
    TCP = "tcp"
    """Connections of raypipe's own, on which messages go before sums, and sums in chunks, the one that is due first before the others.
    Within a node messages go through shared memory."""
    NCCL = "nccl"
    """NCCL between all GPUs, even between processes that share one; refused for CPU devices."""


@record()
class ScalingConfig:
    """The devices: stage actors on CPU slots or on GPUs.

    Attributes:
        num_devices: Number of stage actors.
        replicas: Copies of each stage, on neighboring devices, which share the rows of every microbatch and sum their gradients; divides
            `num_devices`. For a schedule by name: a plan and `schedule.name: auto` choose them.
        use_gpu: Whether each actor computes on a GPU of its node; a plan decides this by its devices.
        gpus_per_device: Part of a GPU that each actor reserves; less than 1 where several actors share one.
        cpus_per_device: CPUs that each actor reserves of its node; Ray counts them, nothing enforces them.
        threads_per_device: Torch threads of each actor on the CPU.
        bind_cores: Whether each actor is bound to cores of its node: those next to its GPU, or on the CPU an equal share if there is a
            core for each thread. Useful on nodes with several sockets.
        topology: `raypipe.topology/1` file for predictions, whose first devices stand for those of the run in order; with
            `schedule.name: auto` they are the devices of the run. Left out for the cores of the nodes and assumed links.
        layers_per_stage: Number of layers of each stage; left out for the best cut by measured layer times.
        transport: Transport of messages between stages. Sums over several devices use raypipe's own TCP connections, or gloo with `gloo`;
            between GPUs NCCL.
        calibration: `raypipe.calibration/1` file for predictions; left out for the file of `raypipe calibrate` on this machine.
        shard_optimizer: Whether the copies of a stage, in several pipelines or on the devices of one worker, divide the optimizer's state:
            each gets the summed gradients of some weights, updates these and sends them to the others (ZeRO stage 1). Otherwise all copies
            update all weights. A run says if each stage is on one device only, where this changes nothing.
        profile: Where the costs of layers come from: a `raypipe.model_profile/1` file, `measured` on the run's devices, or `estimated` by
            one forward of each. Left out, they are measured, but for layers that an earlier run measured on such a device. Of equal layers
            one is measured for all.
        measure_layers: Whether layers are measured even if a plan brings its profile; this changes predictions, not the plan.
    """

    num_devices: PositiveInt = 4
    replicas: PositiveInt = 1
    use_gpu: bool = False
    gpus_per_device: Annotated[float, Field(gt=0, le=1, json_schema_extra={"remedy": "a device is one GPU or a part of it"})] = 1.0
    cpus_per_device: NonNegativeFloat = 1.0
    threads_per_device: PositiveInt = 1
    bind_cores: bool = False
    topology: str | None = None
    layers_per_stage: tuple[int, ...] | None = None
    transport: Transport = Transport.AUTO
    calibration: str | None = None
    shard_optimizer: bool = False
    profile: str | None = None
    measure_layers: bool = False


AUTO = "auto"
"""Schedule name with which raypipe chooses the schedule."""
MEASURED, ESTIMATED = "measured", "estimated"
"""Values of `scaling.profile` beside files."""


@record()
class AdaptationConfig:
    """Whether and when a run changes its pipelines, schedule, cut, microbatches or devices.

    Attributes:
        enabled: Whether raypipe may switch between windows when links or devices change.
        schedules: Names of the schedules that it may choose; empty for all within the limits on staleness.
        least_gain: Least predicted speed-up of a switch.
        horizon_updates: Updates within which a switch must pay for itself.
        divisions: Whether the rows of an update may be divided into more or fewer microbatches; needs rows from `data`.
    """

    enabled: bool = False
    schedules: tuple[str, ...] = ()
    least_gain: Annotated[float, Field(ge=1)] = 1.03
    horizon_updates: PositiveInt = 200
    divisions: bool = True


@record()
class CommunicationConfig:
    """What devices sum and send each other.

    Attributes:
        exact: Whether the sums over three or more devices keep the order of their additions for as long as a plan runs, so that a link
            that changes does not change their last bits. Otherwise they may go another way after any window, where that is quicker.
    """

    exact: bool = True


@record()
class ClusterConfig:
    """The Ray cluster.

    Attributes:
        address: Address of a running cluster; left out for that of the job (RAY_ADDRESS), else a local cluster is started.
        dashboard: Whether a local cluster has Ray's dashboard.
        log_to_driver: Whether the driver shows what actors print.
        start_timeout_s: Seconds within which all actors must be up.
        message_timeout_s: Seconds within which a message between stages must come; more than the slowest stage takes for its part of
            an update.
        silence_timeout_s: Seconds within which an actor must answer a question about its state, and a node acknowledge what another one
            sends.
    """

    address: str | None = None
    dashboard: bool = True
    log_to_driver: bool = True
    start_timeout_s: PositiveFloat = 120.0
    message_timeout_s: PositiveFloat = 300.0
    silence_timeout_s: PositiveFloat = 30.0

    @property
    def resolved_address(self) -> str | None:
        """Return the configured address, else that of the job; `None` for a local cluster."""
        return self.address or os.environ.get("RAY_ADDRESS") or None


@record()
class CallbackConfig:
    """What receives the events of a run; a name alone stands for one without options.

    Attributes:
        name: `progress`, `tensorboard`, `wandb`, `mlflow`, `csv`, `parquet`, `early-stopping`, or a class of your own that extends
            `raypipe.Callback`: `module:Class` or `path/to/file.py:Class`.
        options: Keyword arguments of the class.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def _callback(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


@record()
class TrainConfig:
    """The whole configuration of a run.

    Attributes:
        model: The model.
        data: The training data.
        schedule: The order in which the stages work.
        optimizer: The optimizer and its learning rate.
        scaling: The devices.
        cluster: The Ray cluster.
        run: The length of the run and the place of its results.
        adaptation: Whether and when the run changes its plan.
        communication: What devices sum and send each other.
        failure: What the run does about failures.
        callbacks: What receives the events of the run.
        plan: `raypipe.plan/1` file. Stages, devices, schedule, microbatches and their size are then those of the plan. The keys of
            `schedule` and `scaling` that it decides may be left out; a value that is neither the default nor the plan's is refused.
    """

    model: ModelConfig
    data: DataConfig
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scaling: ScalingConfig = ScalingConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()
    adaptation: AdaptationConfig = AdaptationConfig()
    communication: CommunicationConfig = CommunicationConfig()
    failure: FailureConfig = FailureConfig()
    callbacks: tuple[Annotated[CallbackConfig, BeforeValidator(_callback)], ...] = ()
    plan: str | None = None

    def __post_init__(self) -> None:
        # Before torch and Ray are loaded.
        chosen = self.schedule
        request = ScheduleRequest(
            self.scaling.num_devices, chosen.num_microbatches, chosen.updates_per_window, num_chunks=chosen.num_chunks or 1
        )
        try:
            request.require_possible()
        except ScheduleError as error:
            raise invalid(self, "schedule", str(error)) from None

    @property
    def synchronous_share(self) -> float:
        """Share of the run's updates behind each of which the pipeline drains, at its start."""
        return min(self.schedule.synchronous_updates / self.run.num_updates, 1.0)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> TrainConfig:
        """Return the configuration in a YAML file, with some values replaced.

        Args:
            path: File to read.
            overrides: `key=value` with dots between the keys, such as `schedule.name=zb-h1`; values are read as YAML.

        Raises:
            FormatError: The file or a value cannot be used.
            ConfigError: An override is not of this form.
        """
        name = os.fspath(path)
        text = read_text(path)
        if overrides:
            text = _overridden(text, overrides, path=name)
        return cls.from_text(text, path=name)

    @classmethod
    def from_text(cls, text: str, *, path: str) -> TrainConfig:
        """Return the configuration in YAML text, or raise `FormatError`, which names it by `path`."""
        return codec.from_yaml(cls, text, path=path, format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration as YAML, with its defaults."""
        write_text(path, codec.to_yaml(self, format_name=FORMAT))


def _overridden(text: str, overrides: Sequence[str], *, path: str) -> str:
    content = yaml_tree(text, path=path)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {override!r}: expected key=value with dots between the keys, such as schedule.name=zb-h1")
        read = yaml_tree(f"value: {value}", path=f"--set {key}")
        *parents, last = key.split(".")
        at = content
        for parent in parents:
            at = at.setdefault(parent, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict) or not isinstance(read, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(parents)!r} holds no keys in {path}")
        at[last] = read["value"]
    return yaml_text(content)
