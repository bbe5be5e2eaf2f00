"""The stage actor: one device's stages, its transport and its clock. A plain class; `raypipe.cluster` makes Ray actors of it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from raypipe.actors import cores, devices
from raypipe.actors.actor_info import ActorInfo, actor_info
from raypipe.actors.device_stages import DeviceStages
from raypipe.actors.execution.batches import WHOLE, BatchSource
from raypipe.actors.execution.executor import Executor, Window
from raypipe.actors.execution.faults import CONNECT, SAVE
from raypipe.actors.execution.report import ChunkLog, WindowReport
from raypipe.actors.execution.steps import AwaitStep, ReceiveStep
from raypipe.actors.measure.flows import Flow, FlowConnection, Readings
from raypipe.actors.measure.layer_cache import LayerCache
from raypipe.actors.measure.layer_costs import USUAL_EFFORT, Effort, LayerMeasurement
from raypipe.actors.measure.layers import measure_layers, start_profiler
from raypipe.actors.measure.links import Links
from raypipe.actors.measure.memory import MemoryMeter, memory_meter
from raypipe.actors.measure.metrics import StageMetrics
from raypipe.actors.orders import Awaited, BatchFunction, BuildOrder, ConnectOrder, Identity, LayerSize, ModelFunction, Status
from raypipe.actors.stage.gradient_flow import EdgeSpecs, LayerOutput
from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.state import PackedState, packed, unpacked
from raypipe.actors.transport import cuda
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.sockets import reaches
from raypipe.artifacts.branches import stages_text
from raypipe.artifacts.checkpoint_files import FileSums
from raypipe.artifacts.storage import Storage
from raypipe.communication.patterns import Pattern
from raypipe.config import OptimizerConfig, Precision
from raypipe.errors import AbortedError, ConfigError, RunError, StageRaisedError
from raypipe.schedules.lower import DeviceProgram
from raypipe.user_code import files_start_at


class Activity:
    """The call that an actor is in."""

    def __init__(self) -> None:
        self.doing = "starting"
        self.abort_reason: str | None = None
        self._since = time.monotonic()

    @property
    def since_s(self) -> float:
        """Seconds since the activity began."""
        return time.monotonic() - self._since

    def begin(self, doing: str) -> None:
        """Begin an activity; raises `AbortedError` if the actor was aborted."""
        self.doing = doing
        self._since = time.monotonic()
        if self.abort_reason is not None:
            raise AbortedError(self.abort_reason)

    def wait(self, doing: str) -> None:
        """Note that the actor has nothing to do."""
        self.doing = doing
        self._since = time.monotonic()


_LOG = logging.getLogger("raypipe.stage")
_WRITER_NICER_BY = 10


def remedy_of(error: BaseException) -> str:
    """Return what helps where something raised an error that is not raypipe's."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the GPU's memory is full: lower schedule.microbatch_size, use more devices, let `raypipe plan` place recomputation, or see "
            "who else uses this GPU (nvidia-smi)"
        )
    return "see the actor's log in the Ray dashboard"


def _merged(layers: Sequence[int], states: Sequence[PackedState]) -> dict[int, dict[str, torch.Tensor]]:
    merged: dict[int, dict[str, torch.Tensor]] = {}
    for layer, state in zip(layers, states, strict=True):
        merged.setdefault(layer, {}).update(unpacked(state))
    return merged


class StageActor:
    """One device and the stages on it.

    Methods run one at a time, but for `status`, `read_clock`, `abort`, `reaches` and `write_snapshot`, which Ray gives threads of their
    own.
    `gpu_share` is 0 for a CPU device. An actor with a `node_position` among those of its node binds to some cores.
    """

    def __init__(
        self, identity: Identity, *, num_threads: int, gpu_share: float = 0.0, node_position: cores.NodePosition | None = None
    ) -> None:
        torch.set_num_threads(num_threads)
        self._num_threads = num_threads
        self._num_cores = cores.num_usable()
        self._on = devices.CPU
        self._cuda: cuda.Cuda | None = None
        start_profiler()  # layers are measured in a thread of Ray's
        self._activity = Activity()
        self._stages: DeviceStages | None = None
        self._transport: ProcessTransport | None = None
        self._executor: Executor | None = None
        self._running: Executor | None = None
        """The executor while it runs a window."""
        self._memory: MemoryMeter | None = None
        self._programs: dict[str, DeviceProgram] = {}
        self._held: dict[tuple[int, int], tuple[PackedState, ...]] = {}
        self._num_windows = 0
        """Windows of training that have ended here or, as far as this actor knows, elsewhere."""
        self.use_device(identity, gpu_share, node_position)

    def use_device(self, identity: Identity, gpu_share: float, node_position: cores.NodePosition | None) -> None:
        """Become the actor of a device; `gpu_share` and `node_position` as for the class."""
        if gpu_share:
            self._on = torch.device("cuda", 0)  # Ray shows a process its own GPUs alone
            os.environ.update(cuda.environment(f"{identity.run}-{identity.device}" if gpu_share < 1 else ""))
        if node_position is not None:
            share = cores.share(cores.usable(), node_position, num_threads=self._num_threads)
            cores.bind(cores.near(self._on) if gpu_share else share)
        files_start_at(identity.directory)
        self.identity = identity
        self._links = Links(identity.device)
        self._metrics = StageMetrics(run=identity.run, device=identity.name, stages=identity.stage_text)

    def __repr__(self) -> str:
        return f"Stage({self.identity.stage_text})"

    # Control: answered while the other methods compute

    def status(self) -> Status:
        """Return what this actor is doing, and for how long."""
        running, doing, transport = self._running, self._activity.doing, self._transport
        step = self._executor.awaited if self._executor is not None else None
        progress = running.progress if running is not None else ""
        return Status(
            device=self.identity.device,
            doing=f"{doing}, {progress}" if progress else doing,
            since_s=self._activity.since_s,
            computes=bool(progress) and not progress.startswith("waiting"),
            failure=running.failure if running is not None else None,
            awaited=self._awaited(step) if step is not None else None,
            name=self.identity.name,
            stages=self.identity.stage_text,
            unanswered=transport.unanswered if transport is not None else (),
        )

    def _awaited(self, step: ReceiveStep | AwaitStep) -> Awaited:
        if isinstance(step, ReceiveStep):
            return Awaited((step.device,), str(step.message))
        return Awaited(tuple(device for device in step.collective.devices if device != self.identity.device), str(step.collective))

    def read_clock(self) -> float:
        """Return the time by this node's clock, which windows begin by."""
        return time.time()

    def abort(self, reason: str) -> None:
        """End what this actor does, within a second."""
        self._activity.abort_reason = reason
        if self._executor is not None:
            self._executor.abort(reason)
        elif self._transport is not None:
            self._transport.abort(reason)

    def reaches(self, address: str, port: int, *, timeout_s: float) -> bool:
        """Return whether this node reaches another one at a port of its own."""
        return reaches(address, port, timeout_s=timeout_s)

    # Node and device

    def info(self) -> ActorInfo:
        """Return where this actor runs."""
        return actor_info(self._on, num_cores=self._num_cores)

    def check_storage(self, folder: Storage) -> None:
        """Raise `ConfigError` if this node cannot write to the folder where checkpoints will go."""
        name = f"probe-{self.identity.device}"
        try:
            folder.write(name, b"")
            folder.remove(name)
        except OSError as error:
            raise ConfigError(
                f"run.storage_path: {folder.name} cannot be written on node {os.uname().nodename} ({error.strerror or error}); "
                "choose a path that all nodes share"
            ) from None

    def measure(
        self,
        model: ModelFunction,
        batches: BatchFunction,
        *,
        optimizer: OptimizerConfig,
        seed: int,
        effort: Effort = USUAL_EFFORT,
        precision: Precision = Precision.FLOAT32,
        num_at_once: int = 1,
        uses_cache: bool = False,
        optimizer_function: OptimizerFunction | None = None,
    ) -> list[LayerMeasurement]:
        """Measure the layers of the model on this device, while `num_at_once` devices of its node do."""
        begin = self._activity.begin
        begin("measuring layers")
        batch = batches("train").batch(0, WHOLE)
        make = partial(build_optimizer, optimizer, function=optimizer_function)
        cache = LayerCache(self._on, precision, optimizer.name, effort, num_at_once) if uses_cache else None
        return measure_layers(
            model(), batch, optimizer=make, seed=seed, effort=effort, precision=precision, on=self._on, on_layer=begin, cache=cache
        )

    def probe_link(self, connection: FlowConnection, flow: Flow, *, host_ip: str) -> Readings:
        """Take part in measuring a link, over a channel of its own; return what this end noted, or raise `TransportError`."""
        self._activity.begin(f"probing a link with device {connection.names[self._links.device == connection.source]}")
        self._links.connect([connection], host_ip=host_ip)
        return self._links.run([flow])[0]

    # Stages

    def assign(self, identity: Identity | None) -> None:
        """Take another number and other stages, and drop what was built; `None` for an actor that has nothing to do."""
        self._activity.begin("taking stages")
        if self._transport is not None:
            self._transport.close()
        if self._executor is not None:
            self._executor.close()
        self._transport = self._executor = self._stages = None
        self._programs = {}
        identity = identity or replace(self.identity, stages=())
        if identity != self.identity:
            files_start_at(identity.directory)
            self.identity = identity
            self._metrics = StageMetrics(run=identity.run, device=identity.name, stages=identity.stage_text)

    def restart(self, identity: Identity | None) -> None:
        """Forget that this actor was aborted, and what it did; then as `assign`."""
        self._activity.abort_reason = None
        self.assign(identity)

    def build(self, order: BuildOrder) -> dict[int, LayerSize]:
        """Build the layers of this device's stages; return the size of each."""
        self._activity.begin("building layers")
        self._stages = DeviceStages(order, self.identity.stages, on=self._on)
        self._stages.rows("train")  # opened before memory is metered: a source may keep all rows
        if self._memory is None:
            self._memory = memory_meter(self._on)
        return self._stages.build()

    def output_specs(self, stage: int, made: Mapping[int, tuple[LayerOutput, ...]]) -> dict[int, tuple[LayerOutput, ...]]:
        """Return what a stage gives, from what the stages before it give; prepare its weights for the precision."""
        return self._built(f"finding the shapes of stage {stage}").output_specs(stage, made)

    def take_snapshot(self, layers: Sequence[int] = (), *stepped: PackedState) -> None:
        """Copy weights and optimizer state of each layer, of replicas the first, into memory.

        `layers` are those of which other replicas have `stepped` a part.
        """
        self._built("copying layers").take_snapshot(_merged(layers, stepped))

    def write_snapshot(self, folder: Storage) -> dict[str, FileSums]:
        """Write the copy into a folder, in a thread of its own; return the sums of each file, or raise `RunError`."""
        assert self._stages is not None, "a snapshot comes first"
        # Of the processors it takes what the stages leave; Linux has a priority for each thread.
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid())  # Ray's default for its workers is 15: only root may take less
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(niceness + _WRITER_NICER_BY, 19))
        self._strike(SAVE, self._num_windows - 1)
        return self._stages.write_snapshot(folder)

    def load(self, folder: Storage) -> None:
        """Read what was written from this or any other cut of the model."""
        self._built("loading").load(folder)

    def exported_layers(self) -> tuple[list[int], list[int]]:
        """Return the layers that this device exports whole, of replicas the first, and those of which it has stepped a part."""
        return self._stages.exported_layers() if self._stages is not None else ([], [])

    def nonfinite_layers(self) -> list[tuple[int, int, str]]:
        """Return index, stage and name of each layer with a weight that is infinite or no number."""
        return self._built("looking at weights").nonfinite_layers()

    def needed_layers(self) -> list[int]:
        """Return the layers whose states this device's stages need."""
        return self._stages.needed_layers() if self._stages is not None else []

    def export_layers(self, layers: Sequence[int]) -> Iterator[PackedState | None]:
        """Yield what this device has of each of `exported_layers`, then `None`, which tells the driver that all are done."""
        for state in self._built(f"exporting layers {', '.join(map(str, layers))}").export_layers(layers):
            yield packed(state)
        yield None

    def import_layers(self, layers: Sequence[int], *states: PackedState) -> None:
        """Take over layers that `needed_layers` returned, with the states that `export_layers` yielded on one or more devices."""
        self._built("importing layers").import_layers(_merged(layers, states))

    def hand_on(self, state: PackedState) -> PackedState:
        """Return what this actor is given, which then lies in the store of its node."""
        return state

    def hold(self, device: int, update: int, oldest: int, *states: PackedState) -> None:
        """Keep the states of another node's device behind an update, and of all devices none behind those before `oldest`.

        Answered while the other methods compute.
        """
        self.drop_held(oldest)
        # Ray keeps its copy of an object on this node for as long as a process here uses the object's memory.
        self._held[device, update] = states

    def drop_held(self, before: int) -> None:
        """Drop the states of other devices behind updates before this one. Answered while the other methods compute."""
        self._held = {key: states for key, states in self._held.items() if key[1] >= before}

    def _built(self, doing: str) -> DeviceStages:
        assert self._stages is not None, "build comes first"
        self._activity.begin(doing)
        return self._stages

    # Connecting

    def connect(self, order: ConnectOrder, edge_specs: EdgeSpecs, *, host_ip: str) -> None:
        """Connect this device with its neighbors."""
        stages = self._built("connecting")
        self._transport = ProcessTransport(
            self.identity.device,
            names=order.names,
            channels=order.channels,
            shared=order.shared,
            groups=order.groups,
            patterns=order.patterns,
            store=order.store,
            prefix=order.prefix,
            connect_timeout_s=order.connect_timeout_s,
            timeout_s=order.message_timeout_s,
            host_ip=host_ip,
            library=self._library() if order.channels or order.groups else None,
            over_tcp=order.over_tcp,
            ways=order.ways(self.identity.device),
            apart=order.apart(self.identity.device),
            entrances=order.entrances[self.identity.device] if order.entrances else {},
        )
        built = stages.order
        self._executor = Executor(
            device=self.identity.device,
            model=stages.model,
            cut=built.cut,
            weights=stages.weights,
            transport=self._transport,
            edge_specs=edge_specs,
            num_rows=built.num_rows,
            learning_rate=partial(built.optimizer.rate, num_updates=built.num_updates),
            max_grad_norm=built.optimizer.max_grad_norm,
            faults=built.faults,
            on=self._on,
            names=order.names,
            timeout_s=order.message_timeout_s,
        )
        if self._on.type != "cpu":
            self._executor.warm_up(stages.sample(), self._programs.values(), stages.optimizers)
        self._strike(CONNECT, order.number)
        self._transport.connect()

    def _strike(self, before: str, window: int) -> None:
        assert self._stages is not None, "build comes first"
        transport = self._transport
        cut = (lambda: None) if transport is None else partial(transport.abort, "a scripted fault closed its connections")
        self._stages.order.faults.strike(device=self.identity.device, stages=self._stages.primary, before=before, window=window, cut=cut)

    def _library(self) -> cuda.Cuda | None:
        if self._on.type != "cpu" and self._cuda is None:
            self._cuda = cuda.Cuda(self._on)
        return self._cuda

    def use_patterns(self, patterns: Mapping[tuple[int, ...], Pattern]) -> None:
        """Sum by these patterns from the next window on, by members."""
        self._activity.begin("taking patterns of sums")
        if self._transport is not None:
            self._transport.use_patterns(patterns)

    def load_programs(self, programs: dict[str, DeviceProgram]) -> None:
        """Take the programs that windows will name."""
        assert self._stages is not None, "build comes first"
        self._programs = programs
        self._stages.primary = frozenset(stage for program in programs.values() for stage in program.primary_stages)

    # Windows

    def run(self, name: str, *, number: int, first_update: int, split: str, skipped: frozenset[int] = frozenset()) -> WindowReport:
        """Run a window of a program over the rows of a split; raises `StageFailedError` or `TransportError`.

        The `skipped` updates of the window change no weight.
        """
        assert self._stages is not None, "build comes first"
        report = self._run(name, Window(number, first_update, self._stages.rows(split), skipped=skipped))
        if split == "train":
            self._num_windows = number + 1
        return report

    def run_on(self, name: str, *, number: int, batches: BatchSource, num_rows: int) -> WindowReport:
        """Run a program of forwards over the given rows, `num_rows` per microbatch; the report has the outputs."""
        return self._run(name, Window(number, 0, batches, keep_outputs=True, num_rows=num_rows))

    def _run(self, name: str, window: Window) -> WindowReport:
        executor, memory, transport, program = self._executor, self._memory, self._transport, self._programs[name]
        assert executor is not None, "connect comes before run"
        assert memory is not None, "build comes before run"
        self._activity.begin(f"window {window.number} of {name}")
        self._running = executor
        memory.begin()
        try:
            report = executor.run(program, window)
        except RunError:
            raise
        except Exception as error:
            raise self._failure(error, executor) from error
        finally:
            self._running = None
        report.peak_memory_bytes = memory.peak_bytes()
        if transport is not None:
            ahead_s = time.time() - time.perf_counter()
            report.chunks = ChunkLog(transport.departures, transport.take_receipts(), ahead_s, transport.round_trips_s)
        self._activity.wait(f"waiting for work after window {window.number}")
        self._metrics.record(report, program)
        return report

    def _failure(self, error: Exception, executor: Executor) -> StageRaisedError:
        info, during = self.info(), f"{self._activity.doing}, {executor.progress}"
        _LOG.error("%s", during, exc_info=error)  # the driver is told the last line alone
        return StageRaisedError(
            device=self.identity.name,
            stages=stages_text(self.identity.stages, executor.branches),
            node=f"{info.hostname} {info.ip}",
            during=during,
            problem=f"{type(error).__name__}: {error}",
            remedy=remedy_of(error),
        )
