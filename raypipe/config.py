"""The configuration of a training run: one tree of frozen dataclasses, `raypipe.train/1` in YAML.

Every default stands here. `RunConfig`, `ScalingConfig` and `FailureConfig`-like names follow Ray Train, so that a reader of
one finds the other's way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raypipe.artifacts import codec
from raypipe.artifacts.files import read_text, write_text
from raypipe.artifacts.record import invalid, record
from raypipe.artifacts.syntax import yaml_text, yaml_tree
from raypipe.errors import ConfigError
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.staleness import StalenessLimits

FORMAT = "raypipe.train/1"


def cache_folder() -> Path:
    """Return the folder for files that raypipe can make again; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "raypipe")


def calibration_file() -> Path:
    """Where `raypipe calibrate` writes, and predictions look for, what running costs on this machine."""
    return cache_folder() / f"calibration-{os.uname().nodename}.json"


class Precision(StrEnum):
    """In which precision forwards and backwards compute. The optimizer steps the weights in the one that they are built in."""

    FLOAT32 = "float32"
    """In the one that the model builds its layers in, float32 as a rule."""
    BF16_MIXED = "bf16-mixed"
    """Under `torch.autocast`: matrix products in bfloat16, what needs more in float32."""
    BF16 = "bf16"
    """All of it in bfloat16, as after `module.bfloat16()`; the optimizer keeps weights of its own."""


@record()
class ModelConfig:
    """Which model.

    Attributes:
        function: `module:function`, or `path/to/file.py:function`; called with the options, it returns a `raypipe.model.Model`.
        options: keyword arguments for it.
        precision: in which it computes.
        compile: whether each layer goes through `torch.compile`, where it runs; layers of one class and shape are compiled once.
    """

    function: str
    options: dict[str, Any] = field(default_factory=dict)
    precision: Precision = Precision.FLOAT32
    compile: bool = False


@record()
class DataConfig:
    """Which tokens.

    Attributes:
        path: a Parquet file made by `raypipe data prepare`; every node that holds a first or last stage must be able to read it.
        sequence_length: tokens of a row.
        num_validation_microbatches: how many microbatches of held-out rows an evaluation takes; 0 for no evaluation.
    """

    path: str
    sequence_length: PositiveInt = 128
    num_validation_microbatches: NonNegativeInt = 8

    @property
    def file(self) -> str:
        """The absolute path of the token file.

        Raises:
            ConfigError: there is none, since the run has batches of its own.
        """
        if not self.path:
            raise ConfigError(
                "data.path names no token file; a run with batches of its own is started from Python, with Trainer(batches=...)"
            )
        return os.path.abspath(self.path)


@record()
class ScheduleConfig:
    """In which order the stages work.

    Attributes:
        name: as `raypipe schedules` lists them; `auto` to let raypipe choose it, the cut and the devices of the stages; or
            one's own: a file (.csv or .json, relative to the working directory), or `module:function` or `path/to/file.py:function`.
        num_microbatches: of one update, over all pipelines.
        microbatch_size: rows of a microbatch.
        num_chunks: stages a device, for the schedules that take several; left out for the schedule's own number.
        num_pipelines: layings of the model, for the schedules that have several; 0 lets the schedule choose.
        update_scope: what an update waits for; left out for the schedule's own default.
        max_in_flight: the most stage activations that a device may hold, for the schedules that are searched for; left out for their
            own limit.
        max_staleness: where raypipe chooses the schedule, the most updates between the weights of a forward and those that its gradient
            changes; left out for synchronous schedules alone, unless some delay is allowed on average, or for as many as the schedule to
            begin with has.
        max_mismatch: likewise, the most weight versions between the forward and the backward of a microbatch; left out for no limit, or
            for as many as the schedule to begin with has.
        max_mean_staleness: the updates of `max_staleness` on average over microbatches and stages, which is what training feels, of
            schedules that raypipe chooses and of named ones; `amdp-auto` takes its fastest order that keeps it. Left out for no limit.
        updates_per_window: updates between two drains; evaluation and checkpoints happen between windows.
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

    @property
    def staleness(self) -> StalenessLimits:
        """What is allowed of an order."""
        return StalenessLimits(self.max_staleness, self.max_mismatch, self.max_mean_staleness)


class OptimizerName(StrEnum):
    """What steps the weights."""

    ADAMW = "adamw"
    """Loshchilov and Hutter 2019, arXiv 1711.05101."""
    NADAMW = "nadamw"
    """AdamW that looks one step of its momentum ahead (Dozat 2016), which makes up for gradients that are late."""


Decay = Annotated[float, Field(ge=0, lt=1)]


@record()
class OptimizerConfig:
    """The optimizer and its learning rate: a linear warm-up, then a cosine down to the final rate.

    Attributes:
        name: which.
        learning_rate: the highest.
        final_learning_rate: at the last update; left out for a tenth of the highest.
        warmup_updates: until the highest is reached.
        beta1: decay of the first moment.
        beta2: decay of the second.
        epsilon: added to the root of the second moment.
        weight_decay: of all weights with two dimensions or more.
        max_grad_norm: gradients are scaled to at most this norm over the scope of the update; left out for no limit.
    """

    name: OptimizerName = OptimizerName.ADAMW
    learning_rate: NonNegativeFloat = 1e-3
    final_learning_rate: NonNegativeFloat | None = None
    warmup_updates: NonNegativeInt = 20
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    max_grad_norm: PositiveFloat | None = 1.0

    def rate(self, update: int, *, num_updates: int) -> float:
        """The learning rate of an update, counted from 0, of so many."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        progress = min((update - self.warmup_updates) / max(num_updates - 1 - self.warmup_updates, 1), 1.0)
        final = self.learning_rate / 10 if self.final_learning_rate is None else self.final_learning_rate
        return final + (self.learning_rate - final) * (1 + math.cos(math.pi * progress)) / 2


class Transport(StrEnum):
    """What carries the messages between stages."""

    AUTO = "auto"
    """Shared memory between devices of one Ray node, gloo between nodes."""
    SHM = "shm"
    """Shared memory; refused if devices of different nodes exchange messages."""
    GLOO = "gloo"
    """Gloo, over TCP, also within a node."""
    NCCL = "nccl"
    """NCCL between all GPUs, also where processes share one, which `auto` lets exchange messages within it; refused for CPU devices."""


@record()
class ScalingConfig:
    """On what: stage actors on CPU slots or on GPUs.

    Attributes:
        num_devices: stage actors.
        use_gpu: whether each computes on a GPU of its node; with a plan, its devices say so.
        gpus_per_device: what each actor reserves of a GPU: less than 1 where several share one, as tests do.
        cpus_per_device: what each actor reserves of its node; Ray counts them, nothing enforces them.
        threads_per_device: torch threads of each actor on the CPU.
        bind_cores: whether each actor keeps to some cores of its node: those next to its GPU; on the CPU an equal share, if there is a
            core for each thread. For nodes with several sockets.
        topology: a `raypipe.topology/1` file for predictions, whose first devices stand for the run's in order; with `schedule.name: auto`
            they are the run's, where the file says. Left out for one made of the nodes' cores and assumed links.
        layers_per_stage: the cut, one number a stage; left out for the best cut by measured layer times.
        transport: what carries the messages between stages; sums over several devices go over gloo, between GPUs over NCCL.
        calibration: a `raypipe.calibration/1` file for predictions; left out for what `raypipe calibrate` wrote on this machine.
        shard_optimizer: whether of several pipelines' copies of a stage one alone keeps optimizer state; it updates and publishes the
            weights to the others (ZeRO stage 1). Otherwise all of them update.
        measure_layers: whether the layers are measured also where a plan brings its profile; predictions are then made of what is
            measured, the plan stays.
    """

    num_devices: PositiveInt = 4
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
    measure_layers: bool = False


AUTO = "auto"
"""In place of a schedule's name: raypipe chooses."""


@record()
class AdaptationConfig:
    """Whether and when a run goes on in another way: other pipelines, order, cut, microbatches or devices of the stages.

    Attributes:
        enabled: whether raypipe may switch between windows, when links or devices change.
        schedules: names of those that it may choose; none for all that the limits on staleness allow.
        least_gain: how many times as fast another way must be predicted.
        horizon_updates: in how many updates a switch must pay for itself.
        divisions: whether an update's rows may be divided into more or fewer microbatches; needs rows from `data`.
    """

    enabled: bool = False
    schedules: tuple[str, ...] = ()
    least_gain: Annotated[float, Field(ge=1)] = 1.05
    horizon_updates: PositiveInt = 200
    divisions: bool = True


@record()
class ClusterConfig:
    """Which Ray cluster.

    Attributes:
        address: of a running cluster; left out for the one that a job runs in (RAY_ADDRESS), else a local one is started.
        dashboard: whether a local cluster has Ray's dashboard.
        log_to_driver: whether what actors print is shown by the driver.
        start_timeout_s: until all actors must be there.
        message_timeout_s: until a message between stages must come; longer than the slowest stage may take for its part of an update.
        silence_timeout_s: until an actor must have answered a question about its state.
    """

    address: str | None = None
    dashboard: bool = True
    log_to_driver: bool = True
    start_timeout_s: PositiveFloat = 120.0
    message_timeout_s: PositiveFloat = 300.0
    silence_timeout_s: PositiveFloat = 30.0

    @property
    def resolved_address(self) -> str | None:
        """The address here, else that of the job it runs in; `None` for a local cluster."""
        return self.address or os.environ.get("RAY_ADDRESS") or None


@record()
class RunConfig:
    """How long, and where its results go.

    Attributes:
        name: of the run; its folder in the storage path.
        storage_path: folder of all runs; with several nodes, one that all of them share.
        seed: of weights, the order of rows and dropout.
        num_updates: how many, at most 10,000,000.
        evaluate_every: updates between evaluations; 0 for one at the end alone.
        checkpoint_every: updates between checkpoints; 0 for one at the end alone.
        sample_bytes: how much text to generate at the end, for models of bytes; 0 for none.
        sample_prompt: what it begins with.
    """

    name: str = "run"
    storage_path: str = "runs"
    seed: NonNegativeInt = 0
    # Windows are planned when a run begins.
    num_updates: Annotated[int, Field(ge=1, le=10_000_000, json_schema_extra={"remedy": "a longer run can be resumed"})] = 100
    evaluate_every: NonNegativeInt = 0
    checkpoint_every: NonNegativeInt = 0
    sample_bytes: NonNegativeInt = 0
    sample_prompt: str = ""

    def __post_init__(self) -> None:
        if not self.name or self.name != os.path.basename(self.name) or self.name in {".", ".."}:
            raise invalid(self, "name", f"expected a name for a folder, got {self.name!r}")


@record()
class TrainConfig:
    """All of a run.

    Attributes:
        model: which.
        data: which tokens.
        schedule: in which order the stages work.
        optimizer: which, and its learning rate.
        scaling: on what.
        cluster: which Ray cluster.
        run: how long, and where its results go.
        adaptation: whether and when it goes on in another way.
        plan: a `raypipe.plan/1` file: stages, devices, schedule, microbatches and their size are then the plan's. Keys of `schedule` and
            `scaling` that it decides may be left out; a value that is neither the default nor the plan's is refused.
    """

    model: ModelConfig
    data: DataConfig
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scaling: ScalingConfig = ScalingConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()
    adaptation: AdaptationConfig = AdaptationConfig()
    plan: str | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> TrainConfig:
        """The configuration that a YAML file holds, with some values replaced.

        Args:
            path: the file.
            overrides: `key=value` with dots between the keys, such as `schedule.name=zb-h1`; values are read as YAML.

        Raises:
            FormatError: the file or a value cannot be used.
            ConfigError: an override is not of this form.
        """
        name = os.fspath(path)
        text = read_text(path)
        if overrides:
            text = _overridden(text, overrides, path=name)
        return codec.from_yaml(cls, text, path=name, format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it, defaults included, as YAML."""
        write_text(path, codec.to_yaml(self, format_name=FORMAT))


def _overridden(text: str, overrides: Sequence[str], *, path: str) -> str:
    """The YAML text with some values replaced."""
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
