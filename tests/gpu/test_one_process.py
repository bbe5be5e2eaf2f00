"""Devices of one process on one GPU: that schedules compute there what the unsplit model does, and that the host never waits.

Without a GPU a device stands in for it, on which tensors of two devices do not mix, either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.actors.execution import executor as of_programs
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.execution.updates import Updates
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.state import export_layers, import_layers
from raypipe.actors.stage.weights import Optimizer
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.trace import SpanKind
from raypipe.config import OptimizerConfig, OptimizerName, Precision
from raypipe.model import Model
from raypipe.models.gpt import gpt
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.passes import over_graph
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomTokens, train_unsplit
from tests.gpu.device import HAS_CUDA, forbid_waits, gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150), pytest.mark.filterwarnings("default")]

NUM_UPDATES = 10
NUM_MICROBATCHES = 4
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 0.5
SCHEDULES = [
    ("gpipe", 4, 1),
    ("1f1b", 4, 1),
    ("interleaved", 2, 2),
    ("zb-h1", 4, 1),
    ("zb-v", 2, 2),
    ("chimera", 4, 1),
    ("dualpipe", 2, 1),
    ("amdp-flush", 4, 1),
]


def model(**options: object) -> Model:
    sizes = {"num_layers": 6, "d_model": 64, "num_heads": 4, "sequence_length": 16, "vocabulary_size": 256}
    return gpt(**(sizes | options))  # type: ignore[arg-type]


def adamw(weights: list[torch.nn.Parameter] | NamedWeights) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=HAS_CUDA)


def pipeline(
    described: Model,
    schedule: Schedule,
    *,
    on: torch.device | None = None,
    precision: Precision = Precision.FLOAT32,
    make: Optimizer = adamw,
) -> LocalPipeline:
    cut = Cut.equal(len(described.layers), schedule.num_stages, described.edges(), described.tied_layers())
    return LocalPipeline(
        described,
        cut=cut,
        schedule=over_graph(schedule, cut.graph),
        batches=RandomTokens(),
        optimizer=make,
        learning_rate=lambda _: LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        on=on or gpu(),
        precision=precision,
    )


def losses_of(run: LocalPipeline, *, num_windows: int) -> list[float]:
    return [loss for _ in range(num_windows) for loss in mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)]


@cache
def losses_unsplit(*, tied: bool = False) -> list[float]:
    return train_unsplit(
        model(tie_embeddings=tied),
        RandomTokens(),
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        optimizer=adamw,
        on=gpu(),
    ).losses


@pytest.mark.combined
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("name", "devices", "chunks"), SCHEDULES)
def test_ten_updates_equal_the_unsplit_model_on_the_same_gpu(name: str, devices: int, chunks: int, tied: bool) -> None:
    schedule = build(name, ScheduleRequest(devices, NUM_MICROBATCHES, 5, chunks, update_scope=UpdateScope.GLOBAL))
    found = losses_of(pipeline(model(tie_embeddings=tied), schedule), num_windows=2)
    assert found == pytest.approx(losses_unsplit(tied=tied), rel=1e-5)


@pytest.mark.parametrize("name", ["amdp", "amdp-auto", "pipedream-2bw", "async-1f1b"])
def test_asynchronous_schedules_do_on_a_gpu_what_they_do_on_the_cpu(name: str) -> None:
    schedule = build(name, ScheduleRequest(4, NUM_MICROBATCHES, 5))
    losses = {on.type: losses_of(pipeline(model(dtype="float64"), schedule, on=on), num_windows=2) for on in (torch.device("cpu"), gpu())}
    assert losses[gpu().type] == pytest.approx(losses["cpu"], rel=1e-7)


@pytest.mark.parametrize(("precision", "tolerance"), [(Precision.BF16_MIXED, 2e-3), (Precision.BF16, 2e-2)])
def test_in_bfloat16_losses_are_near_those_of_the_unsplit_model_in_float32(precision: Precision, tolerance: float) -> None:
    schedule = build("1f1b", ScheduleRequest(4, NUM_MICROBATCHES, 5, update_scope=UpdateScope.GLOBAL))
    expected = losses_unsplit()
    found = losses_of(pipeline(model(), schedule, precision=precision), num_windows=2)
    assert found == pytest.approx(expected, rel=tolerance)
    assert found != pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "amdp"])
def test_dropout_draws_the_same_masks_whatever_the_cut(name: str) -> None:
    described = model(dropout=0.2)
    whole = losses_of(
        pipeline(described, build("gpipe", ScheduleRequest(1, NUM_MICROBATCHES, 1, update_scope=UpdateScope.GLOBAL))), num_windows=1
    )
    found = losses_of(
        pipeline(described, build(name, ScheduleRequest(4, NUM_MICROBATCHES, 1, update_scope=UpdateScope.GLOBAL))), num_windows=1
    )
    assert found == pytest.approx(whole, rel=1e-5)


@pytest.fixture
def refuse_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes it an error if the host waits for the GPU while a step of a program is enqueued."""
    walk = of_programs._WindowRun
    for owner, name in ((walk, "_compute"), (walk, "_receive"), (Updates, "start"), (walk, "_await")):
        own = getattr(owner, name)

        def step(self: object, what: object, own: Callable[..., None] = own) -> None:
            forbid_waits(True)
            try:
                own(self, what)
            finally:
                forbid_waits(False)

        monkeypatch.setattr(owner, name, step)
    yield
    forbid_waits(False)


@pytest.mark.combined
@pytest.mark.parametrize("optimizer", list(OptimizerName))
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("scope", list(UpdateScope))
@pytest.mark.parametrize(
    ("name", "devices"),
    [("1f1b", 1), pytest.param("chimera", 2, marks=pytest.mark.skipif(HAS_CUDA, reason="CUDA forbids waits to all threads of a process"))],
)
def test_the_host_never_waits_for_the_gpu(
    refuse_waits: None, name: str, devices: int, scope: UpdateScope, precision: Precision, optimizer: OptimizerName
) -> None:
    gpu()
    config = OptimizerConfig(name=optimizer, learning_rate=LEARNING_RATE)
    schedule = build(name, ScheduleRequest(devices, NUM_MICROBATCHES, 3, update_scope=scope))
    run = pipeline(model(num_layers=2), schedule, precision=precision, make=partial(build_optimizer, config))
    assert len(losses_of(run, num_windows=2)) == 6


@pytest.mark.combined
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "pipedream-2bw"])
@pytest.mark.parametrize("precision", list(Precision))
def test_a_run_before_the_first_window_leaves_nothing_behind(name: str, precision: Precision) -> None:
    schedule = build(name, ScheduleRequest(4, NUM_MICROBATCHES, 2, update_scope=UpdateScope.GLOBAL))
    cold, warm = (pipeline(model(num_layers=2), schedule, precision=precision) for _ in range(2))
    for executor, program in zip(warm.executors, warm.programs, strict=True):
        executor.warm_up(RandomTokens().batch(0, (0.0, 1.0)), [program], dict.fromkeys(executor.weights, adamw))
        optimizers = [weights.optimizer for weights in executor.weights.values()]
        assert not any(optimizer.state for optimizer in optimizers if optimizer is not None)
    assert losses_of(warm, num_windows=2) == losses_of(cold, num_windows=2)


class CountingSteps(torch.optim.Optimizer):
    """Counts its steps."""

    def __init__(self, weights: NamedWeights) -> None:
        super().__init__(weights, {"lr": 1.0})
        self.num_steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.num_steps += 1


@pytest.mark.parametrize("precision", list(Precision))
def test_an_optimizer_steps_weights_like_the_stages_before_the_first_window_and_not_these(precision: Precision) -> None:
    run = pipeline(model(num_layers=2), build("1f1b", ScheduleRequest(1, NUM_MICROBATCHES, 1)), precision=precision)
    (weights,) = run.weights[0].values()
    made: list[CountingSteps] = []

    def make(named: NamedWeights) -> CountingSteps:
        made.append(CountingSteps(named))
        return made[-1]

    run.executors[0].warm_up(RandomTokens().batch(0, (0.0, 1.0)), run.programs, {0: make})
    (optimizer,) = made
    stepped = optimizer.param_groups[0]["params"]
    assert optimizer.num_steps == 2, "the second finds the state that the first has made"
    assert {(weight.shape, weight.dtype) for weight in stepped} == {(master.shape, master.dtype) for master in weights.masters}
    assert len(stepped) < len(weights.masters), "one for all that are alike"
    assert not {weight.data_ptr() for weight in stepped} & {master.data_ptr() for master in weights.masters}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that run, each with the types of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[str, tuple[object, ...]]] = set()

    def __torch_dispatch__(self, operator: Any, _: object, arguments: Any = (), options: Any = None) -> Any:
        tensors = [value for value in pytree.tree_leaves((arguments, options)) if isinstance(value, torch.Tensor)]
        self.seen.add((str(operator), tuple(dict.fromkeys((tensor.device.type, tensor.dtype) for tensor in tensors))))
        return operator(*arguments, **(options or {}))


@pytest.mark.combined
@pytest.mark.parametrize("optimizer", list(OptimizerName))
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("scope", list(UpdateScope))
@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_a_window_runs_no_operator_that_did_not_run_before_it(
    name: str, scope: UpdateScope, precision: Precision, optimizer: OptimizerName
) -> None:
    gpu()
    make = partial(build_optimizer, OptimizerConfig(name=optimizer, learning_rate=LEARNING_RATE, gradient_correction=0.5, lookahead=0.5))
    schedule = build(name, ScheduleRequest(1, NUM_MICROBATCHES, 2, update_scope=scope))
    run = pipeline(model(num_layers=2, dropout=0.1), schedule, precision=precision, make=make)
    with Operators() as before:
        run.executors[0].warm_up(RandomTokens().batch(0, (0.0, 1.0)), run.programs, dict.fromkeys(run.weights[0], make))
    with Operators() as within:
        run.executors[0].run(run.programs[0], of_programs.Window(0, 0, RandomTokens()))
    reads = "aten._local_scalar_dense.default"  # the host reads losses and norms when the window has ended
    assert not {operator for operator in within.seen - before.seen if operator[0] != reads}


def test_spans_are_the_gpus_and_follow_each_other() -> None:
    run = pipeline(model(d_model=256), build("1f1b", ScheduleRequest(1, NUM_MICROBATCHES, 2)))
    run.run_window()
    (report,) = run.run_window()
    spans = report.log.spans(run.programs[0])
    spans = [span for span in spans if span.kind is not SpanKind.DATA]  # the host reads rows
    assert {span.kind for span in spans} == {SpanKind.COMPUTE}
    assert all(span.end_s > span.start_s for span in spans)
    assert all(one.end_s <= other.start_s + 1e-5 for one, other in itertools.pairwise(spans))


def test_a_checkpoint_of_a_gpu_goes_on_where_it_was() -> None:
    schedule = build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES, 2, update_scope=UpdateScope.GLOBAL))
    first = pipeline(model(), schedule)
    losses_of(first, num_windows=1)
    second = pipeline(model(), schedule)
    for ours, theirs in zip(second.weights, first.weights, strict=True):
        for stage, weights in ours.items():
            state = export_layers(theirs[stage])
            import_layers(weights, {layer: {name: tensor.cpu() for name, tensor in state[layer].items()} for layer in state})
    second.num_updates = first.num_updates
    assert losses_of(second, num_windows=1) == pytest.approx(losses_of(first, num_windows=1), rel=1e-6)


def test_the_device_refuses_what_these_tests_say_it_does() -> None:
    numbers = torch.ones(3, device=gpu())
    with pytest.raises(RuntimeError, match=r"two devices|same device"):
        numbers + torch.ones(3)
    forbid_waits(True)
    try:
        with pytest.raises(RuntimeError, match=r"waits for the device|synchroniz"):
            float(numbers[0])
    finally:
        forbid_waits(False)
    assert float(numbers[0]) == 1.0
