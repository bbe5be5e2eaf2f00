"""The stage actor: one device's stages, its transport and its clock. A plain class; `launch` makes Ray actors of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from raypipe.actors import cores, devices
from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.executor import Executor, Window
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.execution.report import WindowReport
from raypipe.actors.measure.layers import USUAL_EFFORT, Effort, LayerMeasurement, measure_layers, start_profiler
from raypipe.actors.measure.links import Flow, Links, MeetOrder, Readings
from raypipe.actors.measure.memory import MemoryMeter, memory_meter
from raypipe.actors.measure.metrics import StageMetrics
from raypipe.actors.stage.checkpoint import layer_file, load_stage
from raypipe.actors.stage.gradient_flow import EdgeSpecs, LayerOutput
from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.precision import build_stage, loss_in_float32, prepare
from raypipe.actors.stage.state import export_layers, import_layers
from raypipe.actors.stage.weights import Weights
from raypipe.actors.transport import cuda, shm
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.rendezvous import host_store
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig, Precision
from raypipe.errors import AbortedError, ConfigError, RaypipeError, RunError, StageFailedError
from raypipe.model import Model
from raypipe.schedules.ir import WeightRule
from raypipe.schedules.lower import DeviceProgram

_LOG = logging.getLogger("raypipe.stage")

ModelFunction = Callable[[], Model]
BatchFunction = Callable[[str], BatchSource]


@dataclass(frozen=True)
class Identity:
    """Who an actor is.

    Attributes:
        run: the run's name.
        device: its number in the plan.
        name: of the device.
        stages: the stages it holds.
    """

    run: str
    device: int
    name: str
    stages: tuple[int, ...]

    @property
    def stage_text(self) -> str:
        """The stages in text, such as `0,4`."""
        return ",".join(map(str, self.stages)) or "none"


@dataclass(frozen=True)
class ActorInfo:
    """Where an actor runs.

    Attributes:
        node_id: Ray's.
        ip: of the node.
        hostname: of the node.
        pid: of the process.
        num_cores: that the actors of the node may use.
        shares_memory: whether messages within the node can go through shared memory.
        gpus: the UUIDs of the GPUs that it was given.
        gpu_kind: of the first of them, such as `nvidia-h200`.
        gpu_bytes: its memory.
        nccl: the version of NCCL, where messages need it.
    """

    node_id: str
    ip: str
    hostname: str
    pid: int
    num_cores: int
    shares_memory: bool
    gpus: tuple[str, ...] = ()
    gpu_kind: str = ""
    gpu_bytes: int | None = None
    nccl: str = ""


StageOptimizer = Callable[[int, list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of a stage, given by number, from its weights."""


@dataclass(frozen=True)
class LayerSize:
    """How large a layer's weights are.

    Attributes:
        num_parameters: numbers; what it shares with an earlier layer counts there.
        parameter_bytes: bytes, with what it shares.
    """

    num_parameters: int
    parameter_bytes: int


@dataclass(frozen=True)
class BuildOrder:
    """What an actor needs to build its stages.

    Attributes:
        model: makes the model's description.
        batches: opens the rows of a split.
        cut: the layers of all stages.
        weight_rule: how a backward finds its weights.
        optimizer: which, and its figures.
        num_rows: of a microbatch.
        num_updates: of the run, for the learning rate.
        seed: of weights and randomness.
        faults: what is to go wrong.
        make_optimizer: instead of what `optimizer` names.
        precision: in which the stages compute.
    """

    model: ModelFunction
    batches: BatchFunction
    cut: Cut
    weight_rule: WeightRule
    optimizer: OptimizerConfig
    num_rows: int
    num_updates: int
    seed: int
    faults: FaultScript = field(default_factory=FaultScript)
    make_optimizer: StageOptimizer | None = None
    precision: Precision = Precision.FLOAT32


@dataclass(frozen=True)
class ConnectOrder:
    """What an actor needs to find the others.

    Attributes:
        names: of all devices.
        channels: the ordered pairs of devices that exchange messages.
        shared: those of them that go through shared memory; the others go over gloo.
        groups: the members of each collective.
        host: of the store where all meet.
        port: of the store.
        prefix: unique to this run and epoch.
        connect_timeout_s: until all must be there.
        message_timeout_s: for every wait after that.
    """

    names: tuple[str, ...]
    channels: tuple[tuple[int, int], ...]
    shared: frozenset[tuple[int, int]]
    groups: tuple[tuple[int, ...], ...]
    host: str
    port: int
    prefix: str
    connect_timeout_s: float
    message_timeout_s: float


@dataclass(frozen=True)
class Status:
    """What an actor is doing, as its control thread sees it.

    Attributes:
        device: its number.
        doing: in words.
        since_s: seconds since it began the call that it is in.
        computes: whether it runs an Op of a window, and does not wait for another device.
        failure: why its window cannot end, where the thread that runs it cannot say so itself.
    """

    device: int
    doing: str
    since_s: float
    computes: bool
    failure: RunError | None = None


def remedy_of(error: BaseException) -> str:
    """What helps where something raised that raypipe does not know."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the GPU's memory is full: lower schedule.microbatch_size, use more devices, let `raypipe plan` place recomputation, or see "
            "who else uses this GPU (nvidia-smi)"
        )
    return "see the actor's log in the Ray dashboard"


class StageActor:
    """One device's stages.

    Methods run one at a time, but for `status`, `read_clock` and `abort`, which Ray gives threads of their own.

    Args:
        identity: who it is.
        num_threads: of torch on the CPU.
        gpu_share: how much of a GPU it computes on; 0 for a CPU device.
        node_position: Position among the actors of its node if it binds to some cores; `None` otherwise.
    """

    def __init__(
        self, identity: Identity, *, num_threads: int, gpu_share: float = 0.0, node_position: cores.NodePosition | None = None
    ) -> None:
        torch.set_num_threads(num_threads)
        self._num_cores = len(cores.usable())
        self._on = devices.CPU
        self._cuda: cuda.Cuda | None = None
        if gpu_share:
            self._on = torch.device("cuda", 0)  # Ray shows a process its own GPUs alone
            os.environ.update(cuda.environment(f"{identity.run}-{identity.device}" if gpu_share < 1 else ""))
        if node_position is not None:
            cores.bind(cores.near(self._on) if gpu_share else cores.share(cores.usable(), node_position, num_threads=num_threads))
        start_profiler()  # layers are measured in a thread of Ray's
        self.identity = identity
        self._doing = "starting"
        self._since = time.monotonic()
        self._in_window = False
        self._abort_reason: str | None = None
        self._store: object = None
        self._transport: ProcessTransport | None = None
        self._executor: Executor | None = None
        self._order: BuildOrder | None = None
        self._model: Model | None = None
        self._memory: MemoryMeter | None = None
        self._weights: dict[int, Weights] = {}
        self._sources: dict[str, BatchSource] = {}
        self._reads_rows = True
        self._programs: dict[str, DeviceProgram] = {}
        self._links = Links(identity.device)
        self._metrics = StageMetrics(run=identity.run, device=identity.name, stages=identity.stage_text)

    def __repr__(self) -> str:
        return f"Stage({self.identity.stage_text})"

    def whereabouts(self) -> ActorInfo:
        """Where this actor runs."""
        import ray  # noqa: PLC0415  # only Ray can tell, and the class works without it

        context = ray.get_runtime_context()
        place = ActorInfo(
            node_id=context.get_node_id(),
            ip=ray.util.get_node_ip_address(),
            hostname=os.uname().nodename,
            pid=os.getpid(),
            num_cores=self._num_cores,
            shares_memory=shm.available(),
            gpus=_gpus() if context.get_accelerator_ids().get("GPU") else (),
        )
        if self._on.type == "cpu" or not place.gpus:
            return place
        return replace(place, gpu_kind=cuda.kind(self._on), gpu_bytes=cuda.memory_bytes(self._on), nccl=cuda.nccl_version())

    # Control: answered while the other methods compute

    def status(self) -> Status:
        """What this actor is doing, and for how long."""
        doing = self._executor.progress if self._executor is not None and self._in_window else ""
        computes = bool(doing) and not doing.startswith("waiting")
        since_s = time.monotonic() - self._since
        failure = self._executor.failure if self._executor is not None and self._in_window else None
        return Status(self.identity.device, f"{self._doing}, {doing}" if doing else self._doing, since_s, computes, failure)

    def read_clock(self) -> float:
        """The time by this node's clock, which windows begin by."""
        return time.time()

    def abort(self, reason: str) -> None:
        """Ends what this actor does, within a second."""
        self._abort_reason = reason
        if self._executor is not None:
            self._executor.abort(reason)
        elif self._transport is not None:
            self._transport.abort(reason)

    # Work

    def _begin(self, what: str) -> None:
        self._doing = what
        self._since = time.monotonic()
        if self._abort_reason is not None:
            raise AbortedError(self._abort_reason)

    def measure(
        self,
        model: ModelFunction,
        batches: BatchFunction,
        *,
        optimizer: OptimizerConfig,
        seed: int,
        effort: Effort = USUAL_EFFORT,
        precision: Precision = Precision.FLOAT32,
    ) -> list[LayerMeasurement]:
        """Measures every layer of the model on this device."""
        self._begin("measuring layers")
        batch = self._source(batches, "train").batch(0, (0.0, 1.0))
        make = partial(build_optimizer, optimizer)
        return measure_layers(model(), batch, optimizer=make, seed=seed, effort=effort, precision=precision, on=self._on)

    def _source(self, batches: BatchFunction, split: str) -> BatchSource:
        """The rows of a split, opened once."""
        if split not in self._sources:
            self._sources[split] = batches(split)
        return self._sources[split]

    def _rows(self, split: str) -> BatchSource | None:
        """The rows of a split for the stages of this device; `None` where they read none, and the file may not even be there."""
        assert self._order is not None, "build comes before rows"
        return self._source(self._order.batches, split) if self._reads_rows else None

    def check_storage(self, folder: str) -> None:
        """Checks that this node can write to a folder, where checkpoints will go.

        Raises:
            ConfigError: it cannot.
        """
        probe = Path(folder) / f"probe-{self.identity.device}"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"run.storage_path: {folder} cannot be written on node {os.uname().nodename} ({error.strerror}); "
                "choose a path that all nodes share"
            ) from None

    def assign(self, identity: Identity | None) -> None:
        """Takes another number and other stages, and drops what was held; `None` for an actor that has nothing to do."""
        self._begin("taking stages")
        if self._transport is not None:
            self._transport.close()
        if self._executor is not None:
            self._executor.close()
        self._transport = self._executor = self._order = None
        self._weights, self._programs, self._sources = {}, {}, {}
        identity = identity or replace(self.identity, stages=())
        if identity != self.identity:
            self.identity = identity
            self._metrics = StageMetrics(run=identity.run, device=identity.name, stages=identity.stage_text)

    def build(self, order: BuildOrder) -> dict[int, LayerSize]:
        """Builds the layers of this device's stages; returns the size of each."""
        self._begin("building layers")
        self._order = order
        self._model = loss_in_float32(order.model(), order.precision)
        held = {index for stage in self.identity.stages for index in order.cut.stages[stage]}
        # The loss is taken behind the last layer.
        self._reads_rows = len(self._model.layers) - 1 in held or any(self._model.layers[index].batch for index in held)
        self._rows("train")  # may be all that there are, which are no memory of the stages
        if self._memory is None:
            self._memory = memory_meter(self._on)
        for stage in self.identity.stages:
            make = partial(order.make_optimizer, stage) if order.make_optimizer else partial(build_optimizer, order.optimizer)
            self._weights[stage] = build_stage(
                self._model,
                order.cut,
                stage,
                optimizer=make,
                rule=order.weight_rule,
                seed=order.seed,
                precision=order.precision,
                on=self._on,
            )
        return {index: size for weights in self._weights.values() for index, size in _layer_sizes(weights.module).items()}

    def output_specs(self, stage: int, made: Mapping[int, tuple[LayerOutput, ...]]) -> dict[int, tuple[LayerOutput, ...]]:
        """What a stage gives, from what the stages before it give; gets its weights ready for the precision of the run."""
        assert self._order is not None, "build comes before output_specs"
        self._begin(f"finding the shapes of stage {stage}")
        weights = self._weights[stage]
        batch = self._source(self._order.batches, "train").batch(0, (0.0, 1.0)) if weights.module.takes_batch else {}
        return prepare(weights, made, batch, num_rows=self._order.num_rows)

    def host_store(self, *, host: str, timeout_s: float) -> int:
        """Opens the store where all actors meet; returns its port."""
        self._begin("opening the store")
        store, port = host_store(host, timeout_s=timeout_s)
        self._store = store
        return port

    def connect(self, order: ConnectOrder, edge_specs: EdgeSpecs, *, host_ip: str) -> None:
        """Connects this device with its neighbours."""
        assert self._order is not None, "build comes before connect"
        assert self._model is not None, "build comes before connect"
        self._begin("connecting")
        self._transport = ProcessTransport(
            self.identity.device,
            names=order.names,
            channels=order.channels,
            shared=order.shared,
            groups=order.groups,
            store=(order.host, order.port),
            prefix=order.prefix,
            connect_timeout_s=order.connect_timeout_s,
            timeout_s=order.message_timeout_s,
            host_ip=host_ip,
            library=self._library() if order.channels or order.groups else None,
        )
        optimizer, num_updates = self._order.optimizer, self._order.num_updates
        self._executor = Executor(
            device=self.identity.device,
            model=self._model,
            cut=self._order.cut,
            weights=self._weights,
            transport=self._transport,
            edge_specs=edge_specs,
            num_rows=self._order.num_rows,
            learning_rate=partial(optimizer.rate, num_updates=num_updates),
            max_grad_norm=optimizer.max_grad_norm,
            faults=self._order.faults,
            on=self._on,
            names=order.names,
            timeout_s=order.message_timeout_s,
        )
        if self._on.type != "cpu":
            rows = self._rows("train")
            self._executor.warm_up(rows.batch(0, (0.0, 1.0)) if rows is not None else {})
        self._transport.connect()

    def _library(self) -> cuda.Cuda | None:
        """CUDA and NCCL, where this device is a GPU that meets others."""
        if self._on.type != "cpu" and self._cuda is None:
            self._cuda = cuda.Cuda(self._on)
        return self._cuda

    def probe_link(self, order: MeetOrder, flow: Flow, *, host_ip: str) -> Readings:
        """Takes part in measuring a link, over a channel of its own; returns what this end noted.

        Raises:
            TransportError: the other end did not come, or a message did not pass.
        """
        self._begin(f"probing a link with device {order.names[self._links.device == order.source]}")
        self._links.meet([order], host_ip=host_ip)
        return self._links.run([flow])[0]

    def load_programs(self, programs: dict[str, DeviceProgram]) -> None:
        """Takes the programs that windows will name."""
        self._programs = programs

    def run(self, name: str, *, number: int, first_update: int, split: str) -> WindowReport:
        """Runs a window of a program over the rows of a split.

        Raises:
            StageFailedError: an Op raised.
            TransportError: a message did not pass.
        """
        return self._run(name, Window(number, first_update, self._rows(split)))

    def run_on(self, name: str, *, number: int, batches: BatchSource, num_rows: int) -> WindowReport:
        """Runs a program of forwards over given rows, so many a microbatch; the report has the outputs."""
        return self._run(name, Window(number, 0, batches, keep_outputs=True, num_rows=num_rows))

    def _run(self, name: str, window: Window) -> WindowReport:
        assert self._executor is not None, "connect comes before run"
        assert self._memory is not None, "build comes before run"
        self._begin(f"window {window.number} of {name}")
        self._in_window = True
        self._memory.begin()
        try:
            report = self._executor.run(self._programs[name], window)
        except RaypipeError as error:
            if isinstance(error, RunError):
                raise
            raise self._failure(error) from error
        except Exception as error:
            raise self._failure(error) from error
        finally:
            self._in_window = False
        report.peak_memory_bytes = self._memory.peak_bytes()
        self._doing, self._since = f"waiting for work after window {window.number}", time.monotonic()
        self._metrics.record(report, self._programs[name])
        return report

    def _failure(self, error: Exception) -> StageFailedError:
        assert self._executor is not None, "only a window fails so"
        _LOG.error("%s, %s", self._doing, self._executor.progress, exc_info=error)  # the driver is told the last line alone
        place = self.whereabouts()
        return StageFailedError(
            device=self.identity.name,
            stages=self.identity.stage_text,
            node=f"{place.hostname} {place.ip}",
            during=f"{self._doing}, {self._executor.progress}",
            problem=f"{type(error).__name__}: {error}",
            remedy=remedy_of(error),
        )

    def save(self, folder: str) -> list[str]:
        """Writes weights and optimizer state of each layer, of replicas the first, into a folder; returns the names of the files."""
        self._begin("saving")
        assert self._model is not None, "build comes before save"
        names: list[str] = []
        for weights in self._owned():
            for index, tensors in export_layers(weights).items():
                name = layer_file(index, self._model.layers[index].name)
                partial_file = Path(folder) / f"{name}.partial"
                save_file(apart(tensors), partial_file, metadata={"layer": str(index)})
                partial_file.rename(Path(folder) / name)
                names.append(name)
        return names

    def _owned(self) -> list[Weights]:
        """The stages of which this device, of all that hold a copy, is the first."""
        own = {stage for program in self._programs.values() for stage in program.primary_stages}
        return [weights for stage, weights in self._weights.items() if stage in own]

    def owned_layers(self) -> list[int]:
        """The layers that this device hands out, of replicas the first."""
        return [index for weights in self._owned() for index in weights.module.indices]

    def needed_layers(self) -> list[int]:
        """The layers whose states this device's stages need."""
        return list(dict.fromkeys(layer for weights in self._weights.values() for layer in weights.module.needed_layers))

    def export_layers(self, layers: Sequence[int]) -> Iterator[dict[str, torch.Tensor] | None]:
        """Yield the state of each layer, as `import_layers` takes it; then `None`, which tells that all are done."""
        for layer in layers:
            self._begin(f"exporting layer {layer}")
            weights = next(weights for weights in self._owned() if layer in weights.module.indices)
            yield {name: tensor.cpu() for name, tensor in export_layers(weights)[layer].items()}
        yield None

    def import_layers(self, layers: Sequence[int], *states: Mapping[str, torch.Tensor]) -> None:
        """Load layers with their optimizer state that other actors have exported.

        Args:
            layers: Indices of the layers, as `needed_layers` returns them.
            states: State of each layer.
        """
        self._begin("importing layers")
        by_layer = dict(zip(layers, states, strict=True))
        for weights in self._weights.values():
            import_layers(weights, by_layer)

    def load(self, folder: str) -> None:
        """Reads what `save` wrote, by this or any other cut of the model."""
        self._begin("loading")
        for weights in self._weights.values():
            load_stage(folder, weights)


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors contiguous, no two of them in the same memory, as safetensors takes them."""
    found: dict[str, torch.Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        found[name] = whole.clone() if whole.untyped_storage().data_ptr() in memory else whole
        memory.add(whole.untyped_storage().data_ptr())
    return found


def _layer_sizes(module: StageModule) -> dict[int, LayerSize]:
    """How large the weights of each layer of a stage are."""
    counted = {id(module.get_parameter(name)) for name in module.borrowed}
    found: dict[int, LayerSize] = {}
    for index, layer in module.layers.items():
        weights = list(layer.parameters())
        found[int(index)] = LayerSize(
            sum(weight.numel() for weight in weights if id(weight) not in counted), sum(weight.nbytes for weight in weights)
        )
        counted.update(map(id, weights))
    return found


def _gpus() -> tuple[str, ...]:
    """The UUIDs of the GPUs that this process sees."""
    return tuple(str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count()))
