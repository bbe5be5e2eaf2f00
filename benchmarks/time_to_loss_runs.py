"""The cells of `time_to_loss.py`: models, schedules on their own best cuts, losses by delays, seconds, and the files that keep them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from async_cases import Case, best_cut, plan_of, timed
from convergence_runs import OPTIMIZERS
from in_turn import in_turn
from same_delays import Delays

from raypipe.actors.execution.batches import BatchSource, MaskedTokenBatches, TokenBatches
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.measure.layer_costs import Effort
from raypipe.actors.measure.layers import measure_layers
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.calibration import Calibration
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.cluster.session import session
from raypipe.config import ClusterConfig, calibration_file
from raypipe.data.samples import Split
from raypipe.data.tokens import TokenDataset
from raypipe.model import Model
from raypipe.models.bert import bert
from raypipe.models.gpt import gpt
from raypipe.planning.problem import Problem
from raypipe.profiling.profiler import model_profile
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.passes import evaluation
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.rehearsal import rehearse

NUM_DEVICES = 8
NUM_ROWS = 64
"""Of an update: one a microbatch with K = 8."""
NUM_POSITIONS = 64
NUM_VALIDATION_ROWS = 256
NUM_WINDOWS = 2
"""Of a run; each ends with an evaluation."""
WARMUP = 0.2
SCOPE = UpdateScope.GLOBAL
NUM_TIMED_UPDATES = 9
LATENCY_S, BANDWIDTH_BYTES_PER_S = 60e-6, 4e9
"""Of the messages between two processes of one node: a wake-up and a copy."""


@dataclass(frozen=True)
class Task:
    """A model and how rows of tokens are given to it."""

    model: Callable[[], Model]
    batches: Callable[[TokenDataset, int], BatchSource]


_SIZES: dict[str, Any] = {"num_layers": 14, "num_heads": 4, "sequence_length": NUM_POSITIONS}
TASKS = {
    "gpt": Task(partial(gpt, d_model=76, **_SIZES), TokenBatches),
    # Tokens are bytes; the other rows of the head make it as heavy as two blocks, as BERT's is beside its blocks.
    "bert": Task(partial(bert, d_model=68, vocabulary_size=1536, **_SIZES), MaskedTokenBatches),
}


@dataclass(frozen=True)
class Scheduled:
    """A schedule with K rounds of 8 microbatches an update.

    Attributes:
        case: Schedule and stages a device.
        rounds: K.
    """

    case: Case
    rounds: int

    @property
    def num_microbatches(self) -> int:
        """Of an update."""
        return NUM_DEVICES * self.rounds

    @property
    def num_rows(self) -> int:
        """Of a microbatch."""
        return NUM_ROWS // self.num_microbatches

    @property
    def is_synchronous(self) -> bool:
        """Whether no gradient is late."""
        return self.case in SYNCHRONOUS

    def __str__(self) -> str:
        return f"{self.case} K={self.rounds}"


SYNCHRONOUS = (Case("1f1b"), Case("interleaved", chunks=2), Case("zb-auto"), Case("zb-v", chunks=2), Case("chimera"), Case("amdp-flush"))
ASYNCHRONOUS = (Case("pipedream-2bw"), Case("async-1f1b"), Case("amdp"), Case("amdp-auto"), Case("amdp-auto", most_stale=0.25))
ROUNDS = (1, 2, 4, 8)
SCHEDULED = tuple(Scheduled(case, rounds) for case in (*SYNCHRONOUS, *ASYNCHRONOUS) for rounds in ROUNDS)


@dataclass(frozen=True)
class Store:
    """Cells in files, one JSON file for each kind and key. What is there is not computed again."""

    folder: Path
    computed: list[str] = field(default_factory=list)

    def path(self, kind: str, key: str) -> Path:
        """Return the file of a cell."""
        return self.folder / kind / f"{key}.json"

    def get(self, kind: str, key: str) -> Any:
        """Return a cell, or `None`."""
        path = self.path(kind, key)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def put(self, kind: str, key: str, value: Any) -> None:
        """Write a cell, whole or not at all."""
        path = self.path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value) + "\n", encoding="utf-8")
        part.rename(path)
        self.computed.append(key)

    def all(self, kind: str) -> dict[str, Any]:
        """Return all cells of a kind by key."""
        return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((self.folder / kind).glob("*.json"))}


# Losses


@dataclass(frozen=True)
class LossKey:
    """All that a curve depends on, but for the data.

    Attributes:
        delays: As `Delays.digest`.
        synchronous_updates: As in the configuration's `schedule`.
    """

    task: str
    optimizer: str
    learning_rate: float
    num_updates: int
    seed: int
    delays: str
    synchronous_updates: int = 0

    def __str__(self) -> str:
        start = f"-synchronous{self.synchronous_updates}" if self.synchronous_updates else ""
        return f"{self.task}-{self.optimizer}-rate{self.learning_rate:g}-updates{self.num_updates}-seed{self.seed}-{self.delays}{start}"


def without_corrections(optimizer: str) -> str:
    """Return the optimizer whose curve an optimizer has where nothing is late, and nothing is corrected."""
    plain = replace(OPTIMIZERS[optimizer].optimizer, lookahead=0.0, gradient_correction=0.0)
    return next(name for name, recipe in OPTIMIZERS.items() if recipe.optimizer == plain)


def window_ends(num_updates: int, synchronous_updates: int) -> list[int]:
    """Return the updates behind which the pipeline drains: the first ones, and those of `NUM_WINDOWS` equal windows."""
    size = num_updates // NUM_WINDOWS
    return sorted({*range(1, synchronous_updates + 1), *range(size, num_updates + 1, size)})


def train(key: LossKey, delays: Delays, data: Path) -> dict[str, Any]:
    """Return the training loss of each update, and the validation loss behind each of `NUM_WINDOWS` equal parts of the run.

    The run ends where a loss is no longer a number.
    """
    torch.set_num_threads(1)
    task, recipe = TASKS[key.task], OPTIMIZERS[key.optimizer]
    model, window = task.model(), key.num_updates // NUM_WINDOWS
    cut, schedules = delays.cut, cache(delays.schedule)
    schedule = schedules(window)

    def rows(split: Split, seed: int) -> BatchSource:
        return task.batches(TokenDataset(data, sequence_length=NUM_POSITIONS, seed=seed, split=split), NUM_ROWS // delays.num_microbatches)

    optimizer = replace(
        recipe.optimizer,
        learning_rate=key.learning_rate,
        final_learning_rate=key.learning_rate / 10,
        warmup_updates=round(WARMUP * key.num_updates),
    )
    pipeline = in_turn(
        LocalPipeline(
            model,
            cut=cut,
            schedule=schedule,
            batches=rows(Split.TRAIN, key.seed),
            optimizer=partial(build_optimizer, optimizer),
            learning_rate=partial(optimizer.rate, num_updates=key.num_updates),
            seed=key.seed,
            max_grad_norm=optimizer.max_grad_norm,
            timeout_s=3600.0,
        )
    )
    held_out = rows(Split.VALIDATION, 0)
    num_held_out = NUM_VALIDATION_ROWS * delays.num_microbatches // NUM_ROWS
    losses: list[float] = []
    validation: dict[int, float] = {}
    for first, end in pairwise([0, *window_ends(key.num_updates, key.synchronous_updates)]):
        losses += mean_losses(pipeline.run_window(schedules(end - first)), num_microbatches=delays.num_microbatches)
        if not all(map(math.isfinite, losses)):
            validation[end] = math.inf
            break
        if end % window == 0:
            reports = pipeline.evaluate(evaluation(schedule, num_microbatches=num_held_out), batches=held_out)
            (validation[end],) = mean_losses(reports, num_microbatches=num_held_out)
    return {
        "losses": [round(loss, 5) for loss in losses],
        "validation": {str(update): round(loss, 5) for update, loss in validation.items()},
    }


# Seconds


def measured(store: Store, task: str, optimizer: str, rows: int, data: Path) -> ModelProfile:
    """Return the layers of a model at a microbatch size, measured on a core of this machine, with the optimizer's steps."""
    key = f"{task}-{optimizer}-rows{rows}"
    path = store.path("profiles", key)
    if not path.exists():
        torch.set_num_threads(1)
        model = TASKS[task].model()
        source = TASKS[task].batches(TokenDataset(data, sequence_length=NUM_POSITIONS, seed=0, split=Split.TRAIN), rows)
        make = partial(build_optimizer, OPTIMIZERS[optimizer].optimizer)
        layers = measure_layers(model, source.batch(0, (0.0, 1.0)), optimizer=make, seed=0, effort=Effort(passes=3))
        path.parent.mkdir(parents=True, exist_ok=True)
        model_profile([layers], model, name=task, microbatch_size=rows).save(path)
    return ModelProfile.load(path)


def node() -> ClusterTopology:
    """Return eight slots of one node."""
    devices = tuple(Device(f"node/{number}", "cpu") for number in range(NUM_DEVICES))
    link = NodeLink(bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S, latency_s=LATENCY_S)
    return ClusterTopology(name="node", nodes=(Node(name="node", devices=devices, link=link),))


@dataclass(frozen=True)
class Timed:
    """A schedule on its own best cut, simulated.

    Attributes:
        sizes: Layers of each stage.
        drained_s: Seconds of an update behind which the pipeline drains.
        delays: As `Delays.digest`.
    """

    sizes: tuple[int, ...]
    update_s: float
    drained_s: float
    bubble: float
    delays: str


def problem_of(profile: ModelProfile, scheduled: Scheduled) -> Problem:
    """Return the planning problem of a schedule's size."""
    return Problem(profile, node(), scheduled.num_microbatches, scheduled.num_rows)


def simulated(store: Store, task: str, optimizer: str, scheduled: Scheduled, data: Path) -> Timed:
    """Return what a schedule takes on its own best cut."""
    key = _seconds_key(task, optimizer, scheduled)
    if (cell := store.get("seconds", key)) is None:
        problem = problem_of(measured(store, task, optimizer, scheduled.num_rows, data), scheduled)
        num_stages = NUM_DEVICES * scheduled.case.chunks
        known: list[tuple[int, ...]] = []
        if scheduled.case.name in {"amdp-auto", "amdp-flush"}:
            of_amdp = simulated(store, task, optimizer, Scheduled(Case("amdp"), scheduled.rounds), data).sizes
            known.append(tuple(accumulate(of_amdp, initial=0)))
        if scheduled.case.name == "amdp-auto":  # the same pipelines, in orders whose search takes seconds for each cut
            (cuts,) = known
        elif num_stages < problem.num_layers:
            # The search moves layers from the best cut of several; a better one to begin with may end at a worse one.
            begun = {best_cut(scheduled.case, problem, SCOPE, *more) for more in ([], known)}
            cuts = min(begun, key=lambda each: timed(scheduled.case, problem, SCOPE, each, NUM_TIMED_UPDATES)[1].steady_update_s)
        else:
            cuts = tuple(range(num_stages + 1))
        schedule, timing = timed(scheduled.case, problem, SCOPE, cuts, NUM_TIMED_UPDATES)
        busy_s = sum(timing.busy_s) / NUM_DEVICES / schedule.num_updates
        sizes = [end - first for first, end in pairwise(cuts)]
        delays = Delays.of(schedule, cut_of(sizes))
        cell = {
            "sizes": sizes,
            "update_s": timing.steady_update_s,
            "drained_s": timed(scheduled.case, problem, SCOPE, cuts, 1)[1].makespan_s,
            "bubble": 1 - busy_s / timing.steady_update_s,
            "delays": delays.digest,
        }
        store.put("seconds", key, cell)
        _keep(store, delays)
    return Timed(tuple(cell["sizes"]), cell["update_s"], cell["drained_s"], cell["bubble"], cell["delays"])


def is_simulated(store: Store, task: str, optimizer: str, scheduled: Scheduled) -> bool:
    """Return whether a schedule's seconds are there."""
    return store.path("seconds", _seconds_key(task, optimizer, scheduled)).exists()


def _seconds_key(task: str, optimizer: str, scheduled: Scheduled) -> str:
    return f"{task}-{optimizer}-{str(scheduled).replace(' ', '-')}"


def rehearsed(store: Store, task: str, optimizer: str, scheduled: Scheduled, data: Path, *, time_scale: float = 20.0) -> dict[str, float]:
    """Rehearse a schedule on its own best cut, an actor a device on this machine; keep and return the seconds of an update.

    Raises:
        RaypipeError: This machine is not calibrated (`raypipe calibrate`), or the rehearsal failed.
    """
    sizes = simulated(store, task, optimizer, scheduled, data).sizes
    problem = problem_of(measured(store, task, optimizer, scheduled.num_rows, data), scheduled)
    costs = Calibration.load(calibration_file()).of("shm")
    plan = plan_of(scheduled.case, problem, SCOPE, tuple(accumulate(sizes, initial=0)), costs)
    with session(ClusterConfig(dashboard=False, log_to_driver=False), num_devices=NUM_DEVICES, cpus_per_device=1.0):
        found = rehearse(plan, num_windows=2, num_updates=plan.schedule.num_updates, time_scale=time_scale, byte_scale=1.0)
    windows = [window.steady_update_s / time_scale for window in found.windows]
    cell = {"rehearsed_s": fmean(windows), "predicted_s": found.predicted.steady_update_s / time_scale, "time_scale": time_scale}
    store.put("rehearsed", _seconds_key(task, optimizer, scheduled), cell)
    return cell


def cut_of(sizes: Sequence[int]) -> Cut:
    """Return a cut of a chain."""
    return Cut.of_sizes(sizes, tuple((layer, layer + 1) for layer in range(sum(sizes) - 1)))


def synchronous_delays(store: Store, task: str) -> str:
    """Return the digest of the delays that all synchronous schedules have."""
    num_layers = len(TASKS[task].model().layers)
    schedule = build("gpipe", ScheduleRequest(1, 1))
    delays = Delays.of(schedule, cut_of([num_layers]))
    _keep(store, delays)
    return delays.digest


def _keep(store: Store, delays: Delays) -> None:
    if store.get("delays", delays.digest) is None:
        cell = {"layers": delays.layers, "tables": delays.tables, "period": delays.period, "keeps_versions": delays.keeps_versions}
        store.put("delays", delays.digest, cell)


@cache
def delays_of(folder: Path, digest: str) -> Delays:
    """Return the delays that a schedule was found to have."""
    cell: Mapping[str, Any] = Store(folder).get("delays", digest)
    tables = tuple(tuple(tuple((forward, backward) for forward, backward in row) for row in table) for table in cell["tables"])
    return Delays(tuple(map(tuple, cell["layers"])), tables, cell["period"], cell["keeps_versions"])
