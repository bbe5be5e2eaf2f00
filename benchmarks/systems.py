"""The same work for raypipe and for torch.distributed.pipelining, each held ready over many windows.

    raypipe         Ray actors; messages as raypipe chooses by itself: shared memory on one node
    raypipe-gloo    Ray actors; all messages by gloo
    torch           plain processes and gloo, torch's own schedules; on GPUs NCCL

Both run a window of updates when they are told to, and the clock of the driver counts from telling to the last answer.
Layers, first weights, rows, loss and optimizer are the same; no update waits for other stages, no gradient is clipped.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from raypipe import ClusterConfig, Model, OptimizerConfig, ScalingConfig
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.execution.report import norms_of
from raypipe.actors.orders import BatchFunction, BuildOrder
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.calibration import Calibration
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.topology import Overheads, Path
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import find_slots
from raypipe.cluster.window import WindowResult
from raypipe.config import Precision, Transport
from raypipe.profiling.profiler import stage_costs
from raypipe.schedules.catalogue import build, spec
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import lower
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.cost import Cost
from raypipe.simulation.simulator import time_order

SYSTEMS = {"raypipe": Transport.AUTO, "raypipe-gloo": Transport.GLOO, "torch": None}
"""The systems by name, with raypipe's transport."""

TORCH_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
_PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both systems do in every window.

    Attributes:
        schedule: as raypipe's catalogue names it.
        num_devices: processes.
        num_microbatches: of an update.
        microbatch_size: rows of a microbatch.
        num_updates: of a window.
        model: makes the model: a chain of layers, of which the first takes the one field of the batch that is not `targets`.
        batches: opens the rows of a split.
        layers_per_stage: the cut.
        learning_rate: of AdamW, the same for all updates.
        seed: of the first weights.
        gpus_per_device: of each process; 0 for CPUs. Processes that share one are hosts of their own to NCCL, which refuses them else.
        precision: in which both compute.
    """

    schedule: str
    num_devices: int
    num_microbatches: int
    microbatch_size: int
    num_updates: int
    model: Callable[[], Model]
    batches: BatchFunction
    layers_per_stage: tuple[int, ...]
    learning_rate: float = 1e-3
    seed: int = 0
    gpus_per_device: float = 0.0
    precision: Precision = Precision.FLOAT32

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW's figures."""
        rate = self.learning_rate
        return OptimizerConfig(learning_rate=rate, final_learning_rate=rate, warmup_updates=0, max_grad_norm=None)

    @property
    def size(self) -> ScheduleRequest:
        """What the generator of the schedule is asked for."""
        chunks = spec(self.schedule).default_chunks
        return ScheduleRequest(self.num_devices, self.num_microbatches, self.num_updates, num_chunks=chunks, update_scope=UpdateScope.STAGE)

    @cached_property
    def order(self) -> Schedule:
        """The schedule as raypipe orders it."""
        return build(self.schedule, self.size)

    @property
    def stages(self) -> list[tuple[int, ...]]:
        """The stages of each device."""
        held = [(at, stage) for workers in self.order.pipelines for stage, at in enumerate(workers)]
        return [tuple(sorted({stage for at, stage in held if at == device})) for device in range(self.num_devices)]

    @property
    def cut(self) -> Cut:
        """The layers of all stages."""
        return Cut.of_sizes(self.layers_per_stage, self.model().edges())


@dataclass(frozen=True)
class Window:
    """What a system did.

    Attributes:
        seconds: that the driver waited.
        losses: of each microbatch.
        norm: of the last update's gradient over all weights.
    """

    seconds: float
    losses: list[float]
    norm: float


class System(Protocol):
    """Something that does the work."""

    def run_window(self) -> Window:
        """Runs the next window."""

    def stand_still(self, still: bool) -> None:
        """Keeps it from using the machine while another one is measured, or lets it go on."""

    def close(self) -> None:
        """Ends its processes."""


def start(name: str, work: Work) -> System:
    """Starts a system of this name."""
    transport = SYSTEMS[name]
    return TorchSystem(work) if transport is None else RaypipeSystem(work, transport=transport)


class RaypipeSystem:
    """Stage actors on the connected Ray cluster, driven as the trainer drives them, without its reports and files.

    Args:
        work: what to do.
        transport: what carries the messages.
    """

    def __init__(self, work: Work, *, transport: Transport) -> None:
        self.work = work
        self.done = 0
        self.last: WindowResult
        scaling = ScalingConfig(
            num_devices=work.num_devices,
            transport=transport,
            use_gpu=work.gpus_per_device > 0,
            gpus_per_device=work.gpus_per_device or 1.0,
        )
        name = f"benchmark-{transport}-{time.time_ns():x}"
        self.coordinator = Coordinator(run=name, slots=find_slots(scaling), stages=work.stages, scaling=scaling, cluster=ClusterConfig())
        self.transport = "gloo" if transport is Transport.GLOO else "shm"
        try:
            self._build()
        except BaseException:
            self.coordinator.close()
            raise

    def _build(self) -> None:
        work = self.work
        self.coordinator.actors.wait_until_up()
        (self.measured,) = self.coordinator.measure(
            work.model, work.batches, optimizer=work.optimizer, seed=work.seed, num_devices=1, precision=work.precision
        )
        self.coordinator.build(
            BuildOrder(
                model=work.model,
                batches=work.batches,
                cut=work.cut,
                weight_rule=work.order.weight_rule,
                optimizer=work.optimizer,
                num_rows=work.microbatch_size,
                num_updates=1,
                seed=work.seed,
                precision=work.precision,
            )
        )
        self.coordinator.connect({"train": executable_programs(work.order)}, work.cut)

    def run_window(self) -> Window:
        """Runs the next window."""
        since = time.perf_counter()
        result = self.coordinator.run_window("train", num_updates=self.work.num_updates, first_update=self.done)
        seconds = time.perf_counter() - since
        self.last = result
        self.done += self.work.num_updates
        by_microbatch = {index: loss for report in result.reports for index, loss in report.losses.items()}
        norms = norms_of(result.reports, scope=UpdateScope.STAGE)
        return Window(seconds, [loss for _, loss in sorted(by_microbatch.items())], norms[self.work.num_updates - 1])

    def predicted_s(self, calibration: Calibration | None) -> float:
        """Seconds per update: the layers as measured on an actor, the order, and what a calibration says of Ops and messages.

        Args:
            calibration: `None` for Ops and messages that cost nothing.
        """
        overheads, link = Overheads(), Path()
        if calibration is not None:
            costs = calibration.of(self.transport)
            overheads, link = costs.overheads, Path(costs.link.latency_s, costs.link.bandwidth_bytes_per_s or math.inf)
        stages = stage_costs(self.measured, self.work.cut)
        edge_bytes = {edge: sum(self.measured[layer].output_bytes for layer in layers) for edge, layers in self.work.cut.crossing.items()}
        cost = Cost(
            devices=self.coordinator.device_names,
            stages={(device, stage): stages[stage] for device, held in enumerate(self.work.stages) for stage in held},
            edge_bytes=edge_bytes,
            path=lambda _source, _target: link,
            overheads=overheads,
        )
        return time_order(CompiledOrder(lower(self.work.order)), cost).makespan_s / self.work.num_updates

    def stand_still(self, still: bool) -> None:
        """Stops the actors' processes while another system is measured, or lets them go on.

        Idle actors wake hundreds of times a second; that would be a burden on whoever is measured beside them.
        """
        for place in self.coordinator.actors.infos:
            with suppress(ProcessLookupError):  # it died, which its window has told
                os.kill(place.pid, signal.SIGSTOP if still else signal.SIGCONT)

    def close(self) -> None:
        """Ends the actors."""
        self.stand_still(False)
        self.coordinator.close()


class TorchSystem:
    """Processes that run torch's schedule and wait at pipes between windows.

    Attributes:
        order: the Ops of each rank as torch orders them, for the schedules with several stages a rank; else empty.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.resources = ExitStack()
        folder = self.resources.enter_context(tempfile.TemporaryDirectory())
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(work.num_devices):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(work, rank, f"file://{folder}/store", there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.order: list[list[str]]
        try:
            self.order, *_ = [self._answer(rank) for rank in range(work.num_devices)]
        except BaseException:
            self.close()
            raise

    def _answer(self, rank: int) -> Any:
        if not self.pipes[rank].poll(_PATIENCE_S):
            raise TimeoutError(f"torch's rank {rank} did not answer within {_PATIENCE_S:g} s")
        return self.pipes[rank].recv()

    def run_window(self) -> Window:
        """Runs the next window."""
        since = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(True)
        shares = [self._answer(rank) for rank in range(self.work.num_devices)]
        seconds = time.perf_counter() - since
        return Window(seconds, [loss for share in shares for loss in share.losses], sum(share.squared_norm for share in shares) ** 0.5)

    def stand_still(self, still: bool) -> None:
        """Does nothing: these processes sleep at their pipes."""

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()
        self.resources.close()


@dataclass(frozen=True)
class _Share:
    """What one rank answers."""

    losses: list[float]
    squared_norm: float


def _serve(work: Work, rank: int, store: str, pipe: Connection) -> None:
    """The life of one of torch's processes: it works when told, and ends when the driver closes the pipe."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=_PATIENCE_S)
    device, backend = torch.device("cpu"), "gloo"
    if work.gpus_per_device:
        device, backend = torch.device("cuda", rank % torch.cuda.device_count()), "nccl"
        torch.cuda.set_device(device)
        if work.gpus_per_device < 1:
            os.environ["NCCL_HOSTID"] = f"torch-{rank}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=work.num_devices, timeout=patience)
    process = _Rank(work, rank, device)
    pipe.send(process.order)
    try:
        while pipe.recv():
            pipe.send(process.run())
    except EOFError:
        return


class _Rank:
    """One of torch's ranks: its stages, their optimizers, and the schedule."""

    def __init__(self, work: Work, rank: int, device: torch.device) -> None:
        self.work = work
        self.device = device
        self.model = work.model()
        self.done = 0
        cut = work.cut
        modules = {stage: self._module(cut.stages[stage]) for stage in work.stages[rank]}
        self.weights = [weight for module in modules.values() for weight in module.parameters()]
        self.optimizers = [build_optimizer(work.optimizer, module.named_parameters()) for module in modules.values()]
        num_stages = len(cut.stages)
        self.first, self.last = 0 in modules, num_stages - 1 in modules
        self.source = work.batches("train")
        stages = [PipelineStage(module, stage, num_stages, device) for stage, module in modules.items()]
        several = num_stages > work.num_devices
        self.schedule = TORCH_SCHEDULES[work.schedule](stages if several else stages[0], work.num_microbatches, loss_fn=self._loss)
        rows = self.schedule.pipeline_order if several else {}
        self.order = [[str(action) for action in rows[rank] if action is not None] for rank in sorted(rows)]

    def _module(self, layers: tuple[int, ...]) -> nn.Module:
        built = nn.Sequential(*(build_layer(self.model.layers[layer], index=layer, seed=self.work.seed) for layer in layers))
        return _Autocast(built.to(self.device)) if self.work.precision is Precision.BF16_MIXED else built.to(self.device)

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(output.float(), {"targets": targets})

    def run(self) -> _Share:
        """Runs a window."""
        found: list[Tensor] = []
        for _ in range(self.work.num_updates):
            losses: list[Tensor] = []
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            inputs, targets = self._rows()
            self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
            for optimizer in self.optimizers:
                optimizer.step()
            found += [loss.detach() for loss in losses]
            self.done += 1
        squared_norm = sum(float(weight.grad.square().sum()) for weight in self.weights if weight.grad is not None)
        return _Share([float(loss) for loss in found], squared_norm)

    def _rows(self) -> tuple[list[Tensor], Tensor | None]:
        """The rows of an update, as the first stage and the loss take them."""
        if not self.first and not self.last:
            return [], None
        first = self.done * self.work.num_microbatches
        batches = [self.source.batch(microbatch, (0.0, 1.0)) for microbatch in range(first, first + self.work.num_microbatches)]
        (field,) = batches[0].keys() - {"targets"}
        inputs = [self._upload([batch[field] for batch in batches])] if self.first else []
        return inputs, self._upload([batch["targets"] for batch in batches]) if self.last else None

    def _upload(self, rows: list[Tensor]) -> Tensor:
        whole = torch.cat(rows)
        return whole.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else whole


class _Autocast(nn.Module):
    """Layers under autocast in bfloat16, as one writes it by hand."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            output: Tensor = self.layers(*inputs)
        return output
