"""The devices of `benchmarks/convergence.py` take turns; the numbers are the executor's, and no two of them compute at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from in_turn import in_turn
from torch import Tensor, nn

from raypipe.actors.execution.faults import FaultScript, ScriptedFault
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig
from raypipe.model import Batch, Layer, Model
from raypipe.models.gpt import gpt
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import evaluation
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.actors.oracles import RandomRows, layers_of

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_updates=2, max_grad_norm=0.5)
NUM_UPDATES = 4

CASES = [
    pytest.param("1f1b", 4, 1, id="1f1b"),
    pytest.param("pipedream", 1, 1, id="pipedream"),
    pytest.param("pipedream-2bw", 4, 1, id="pipedream-2bw"),
    pytest.param("async-1f1b", 4, 1, id="async-1f1b"),
    pytest.param("async-interleaved", 8, 2, id="async-interleaved"),
    pytest.param("amdp", 4, 1, id="amdp-k1"),
    pytest.param("amdp", 16, 1, id="amdp-k4"),
    pytest.param("amdp-auto", 16, 1, id="amdp-auto-k4"),
]


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens with targets, a pure function of the microbatch's number."""

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        generator = torch.Generator().manual_seed(microbatch)
        tokens_BS = torch.randint(20, (2, 9), generator=generator)
        first, end = (round(share * 2) for share in rows)
        return {"tokens": tokens_BS[first:end, :-1], "targets": tokens_BS[first:end, 1:]}


def pipeline(model: Model, schedule: Schedule, faults: FaultScript | None = None) -> LocalPipeline:
    return LocalPipeline(
        model,
        cut=Cut.equal(len(model.layers), schedule.num_stages, model.edges()),
        schedule=schedule,
        batches=TokenRows() if model.layers[0].name == "embedding" else RandomRows(),
        optimizer=partial(build_optimizer, OPTIMIZER),
        learning_rate=partial(OPTIMIZER.rate, num_updates=2 * NUM_UPDATES),
        max_grad_norm=OPTIMIZER.max_grad_norm,
        faults=faults,
    )


def trained(run: LocalPipeline, schedule: Schedule) -> tuple[list[float], dict[int, list[list[Tensor]]]]:
    """The losses of two windows with an evaluation behind each, and the weights afterwards."""
    losses: list[float] = []
    for _ in range(2):
        losses += mean_losses(run.run_window(), num_microbatches=schedule.num_microbatches)
        losses += mean_losses(run.evaluate(evaluation(schedule, num_microbatches=3), batches=run.batches), num_microbatches=3)
    return losses, layers_of(run)


@pytest.mark.combined
@pytest.mark.parametrize("scope", [UpdateScope.GLOBAL, UpdateScope.STAGE])
@pytest.mark.parametrize(("name", "num_microbatches", "num_chunks"), CASES)
def test_devices_that_take_turns_give_the_weights_of_the_executor(
    name: str, num_microbatches: int, num_chunks: int, scope: UpdateScope
) -> None:
    torch.set_num_threads(1)
    model = gpt(num_layers=6, d_model=8, num_heads=2, sequence_length=8, vocabulary_size=20, dtype="float64")
    schedule = build(name, ScheduleRequest(4, num_microbatches, NUM_UPDATES, num_chunks, update_scope=scope))
    validate(schedule)
    assert (metrics(schedule).max_delay > 0) is (name != "1f1b")
    losses, layers = trained(in_turn(pipeline(model, schedule)), schedule)
    expected_losses, expected = trained(pipeline(model, schedule), schedule)
    assert losses == expected_losses
    for index, copies in layers.items():
        for copy, other in zip(copies, expected[index], strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(copy, other, strict=True))


class Alone(nn.Module):
    """A layer that notes whether another one was computing at the same time."""

    computing = threading.Lock()
    met = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        alone = Alone.computing.acquire(blocking=False)
        y: Tensor = x
        for _ in range(20):
            y = self.linear(y)
        if alone:
            Alone.computing.release()
        else:
            Alone.met = True
        return y


def test_no_two_devices_compute_at_once() -> None:
    model = mlp(num_layers=4, dtype="float64")
    layers = tuple(Layer(layer.name, Alone, layer.inputs, layer.batch) for layer in model.layers)
    schedule = build("amdp", ScheduleRequest(4, 4, 10))
    in_turn(pipeline(Model(layers, model.loss), schedule)).run_window()
    assert not Alone.met


@pytest.mark.parametrize("op", ["0F0", "1B3", "2U1", "3F5"])
def test_a_device_that_fails_ends_all(op: str) -> None:
    model = mlp(num_layers=4, dtype="float64")
    for device in range(4):
        run = in_turn(pipeline(model, build("async-1f1b", ScheduleRequest(4, 4, 3)), FaultScript().fail_at(device=device, before=op)))
        if op.startswith(str(device)):
            with pytest.raises(ScriptedFault):
                run.run_window()
        else:
            run.run_window()
