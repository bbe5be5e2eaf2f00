"""What runs before the first window: everything that windows run, so that nothing is compiled or loaded in one; and it leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.model import Batch, Layer, Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import DeviceProgram, Placement
from raypipe.schedules.passes import evaluation, recompute
from raypipe.schedules.request import ScheduleRequest
from raypipe.user_code import make_model
from tests.actors.oracles import RandomRows, RandomTokens, layers_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

NUM_MICROBATCHES = 4
WIDTH = 4
UNEVEN = Placement((((0, 0.75), (1, 0.25)), ((2, 1.0),)))

Call = tuple[int, int, bool, bool, bool]
"""Layer, rows, whether in training, whether with gradients, whether the input takes one."""
CALLS: set[Call] = set()


class Noting(nn.Module):
    """Notes how it is called; has buffers, and draws random numbers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.add((self.number, len(x), self.training, torch.is_grad_enabled(), x.requires_grad))
        result: Tensor = self.dropout(self.norm(self.layer(x))).tanh()
        return result


def mean_square(output: Tensor, _: Batch) -> Tensor:
    return output.square().mean()


def noting_model() -> Model:
    layers = [Layer("first", partial(Noting, 0), batch=("inputs",))]
    return Model((*layers, *(Layer(f"layer-{number}", partial(Noting, number)) for number in range(1, 4))), mean_square)


def pipeline_of(model: Model, schedule: Schedule, placement: Placement | None, batches: RandomRows | RandomTokens) -> LocalPipeline:
    return LocalPipeline(
        model,
        cut=Cut.equal(len(model.layers), schedule.num_stages, model.edges()),
        schedule=schedule,
        batches=batches,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        learning_rate=lambda _: 1e-2,
        max_grad_norm=0.5,
        placement=placement,
    )


def programs_of(run: LocalPipeline, *others: Schedule) -> list[list[DeviceProgram]]:
    """The programs of each device."""
    lowered = [executable_programs(other, run.placement) for other in others]
    return [list(of_device) for of_device in zip(run.programs, *lowered, strict=True)]


def warm(run: LocalPipeline, *others: Schedule) -> None:
    batch = run.batches.batch(0, (0.0, 1.0))
    for executor, programs in zip(run.executors, programs_of(run, *others), strict=True):
        executor.warm_up(batch, programs)


def schedule_of(name: str, *, again: tuple[int, ...] = (), num_devices: int = 2) -> Schedule:
    return recompute(build(name, ScheduleRequest(num_devices, NUM_MICROBATCHES, 2)), again)


@contextmanager
def calls() -> Iterator[set[Call]]:
    """The calls inside of the block."""
    CALLS.clear()
    seen: set[Call] = set()
    yield seen
    seen |= CALLS


CASES = [
    pytest.param("1f1b", (), None, id="plain"),
    pytest.param("zb-h1", (), None, id="divided backward"),
    pytest.param("1f1b", (), UNEVEN, id="unequal replicas"),
    pytest.param("1f1b", (0,), UNEVEN, id="one stage runs again"),
    pytest.param("pipedream-2bw", (0, 1), None, id="versions, all runs again"),
]


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "with evaluation"])
@pytest.mark.parametrize(("name", "again", "placement"), CASES)
def test_layers_are_called_in_just_the_ways_in_which_windows_call_them(
    name: str, again: tuple[int, ...], placement: Placement | None, evaluates: bool
) -> None:
    schedule = schedule_of(name, again=again)
    others = [evaluation(schedule, num_microbatches=2)] if evaluates else []
    run = pipeline_of(noting_model(), schedule, placement, RandomRows(width=WIDTH, dtype=torch.float32))
    with calls() as before:
        warm(run, *others)
    with calls() as within:
        run.run_window()
        for other in others:
            run.evaluate(other, batches=run.batches)
    run.close()
    assert before == within


@pytest.mark.parametrize(("name", "again", "placement"), CASES)
def test_weights_buffers_gradients_and_random_numbers_stay(name: str, again: tuple[int, ...], placement: Placement | None) -> None:
    schedule = schedule_of(name, again=again)
    other = evaluation(schedule, num_microbatches=2)
    cold, warmed = (pipeline_of(noting_model(), schedule, placement, RandomRows(width=WIDTH, dtype=torch.float32)) for _ in range(2))
    before = _state(warmed)
    warm(warmed, other)
    assert _state(warmed) == before
    for of_device in warmed.weights:
        for weights in of_device.values():
            assert weights.optimizer is not None
            assert not weights.optimizer.state
            leaves = weights.versions.tensors(weights.versions.newest)
            assert all(tensor.grad is None for tensor in (*leaves, *weights.masters, *weights.module.parameters()))
    for run in (cold, warmed):
        run.run_window()
        run.close()
    assert _state(warmed) == _state(cold)


def _state(run: LocalPipeline) -> list[list[float]]:
    tensors = [tensor for copies in layers_of(run).values() for copy in copies for tensor in copy]
    buffers = [each for of_device in run.weights for weights in of_device.values() for each in weights.module.buffers()]
    return [tensor.detach().double().flatten().tolist() for tensor in (*tensors, *buffers)]


@pytest.mark.parametrize(
    ("name", "again", "placement", "num_devices"),
    [
        pytest.param("1f1b", (0,), UNEVEN, 2, id="unequal replicas, one stage runs again"),
        pytest.param("pipedream-2bw", (), None, 2, id="versions"),
    ],
)
def test_windows_compile_nothing(
    counter: CompileCounterWithBackend, name: str, again: tuple[int, ...], placement: Placement | None, num_devices: int
) -> None:
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "sequence_length": 16}
    schedule = schedule_of(name, again=again, num_devices=num_devices)
    other = evaluation(schedule, num_microbatches=2)
    run = pipeline_of(make_model("raypipe.models.gpt:gpt", sizes, compile_layers=True), schedule, placement, RandomTokens(num_rows=4))
    warm(run, other)
    num_compiled = counter.frame_count
    assert num_compiled
    run.run_window()
    run.evaluate(other, batches=run.batches)
    run.close()
    assert counter.frame_count == num_compiled
