"""All optimizers, with groups and without: pipelines equal the unsplit model, or the interpreter of the schedule's rule; state is kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import load_stages
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.snapshot import save_stages
from raypipe.actors.stage.state import export_stepped
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig, Precision, WeightGroup
from raypipe.model import Model
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Schedule
from raypipe.schedules.passes import shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from tests.actors.low_precision import furthest, train_low
from tests.actors.oracles import LowHandPipeline, RandomRows, largest_difference, layers_of, run_beside_hand, train_unsplit

RATE = 0.05
OWN = "tests.actors.stage.own_optimizers"
GROUPS = (
    WeightGroup(weights=("layer-0.*",), optimizer="sgd", learning_rate_factor=0.3, options={"momentum": 0.9, "nesterov": True}),
    WeightGroup(weights=("*.bias",), weight_decay=0.3, learning_rate_factor=2.0),
    WeightGroup(weights=("layer-2.linear.*",), optimizer=f"{OWN}:Remembering", options={"length": 2}),
)
OPTIMIZERS = {
    "adamw": OptimizerConfig(name="adamw", beta1=0.8),
    "nadamw": OptimizerConfig(name="nadamw"),
    "muon": OptimizerConfig(name="muon", beta2=0.9),
    "sgd": OptimizerConfig(name="sgd", options={"momentum": 0.9, "nesterov": True}, weight_decay=0.01),
    "adam": OptimizerConfig(name="torch.optim.Adam", options={"amsgrad": True, "betas": [0.8, 0.9]}),
    "adafactor": OptimizerConfig(name="adafactor"),
    "rmsprop": OptimizerConfig(name="rmsprop", options={"centered": True, "momentum": 0.5}),
    "radam": OptimizerConfig(name="RAdam"),
    "adagrad": OptimizerConfig(name="adagrad"),
    "adadelta": OptimizerConfig(name="adadelta"),
    "adamax": OptimizerConfig(name="adamax"),
    "asgd": OptimizerConfig(name="asgd"),
    "rprop": OptimizerConfig(name="rprop"),
    "own class": OptimizerConfig(name=f"{OWN}:Remembering", weight_decay=0.2),
    "own function": OptimizerConfig(name=f"{OWN}:halved", options={"momentum": 0.5}),
    "late": OptimizerConfig(name="muon", lookahead=1.0, gradient_correction=0.5),
    "late sgd": OptimizerConfig(name="sgd", options={"momentum": 0.9}, lookahead=1.5),
    "groups": OptimizerConfig(name="muon", groups=GROUPS),
}
TOLERANCE = 1e-9
NUM_UPDATES = 3
NUM_MICROBATCHES = 4
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def optimizer_of(name: str) -> partial[torch.optim.Optimizer]:
    return partial(build_optimizer, OPTIMIZERS[name])


def pipeline(model: Model, schedule: Schedule, name: str, *, precision: Precision = Precision.FLOAT32) -> LocalPipeline:
    return LocalPipeline(
        model,
        cut=Cut.equal(len(model.layers), schedule.num_stages, model.edges()),
        schedule=schedule,
        batches=RandomRows(dtype=torch.float64 if precision is Precision.FLOAT32 else torch.float32),
        optimizer=optimizer_of(name),
        learning_rate=lambda _: RATE,
        max_grad_norm=0.5 if precision is Precision.FLOAT32 else None,
        precision=precision,
    )


def scaled(name: str, weights: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer at the rate of the runs."""
    optimizer = build_optimizer(OPTIMIZERS[name], weights)
    for group in optimizer.param_groups:
        group["lr"] = RATE * group.get("learning_rate_factor", 1.0)
    return optimizer


def unsplit_losses_and_layers(model: Model, name: str, num_updates: int) -> tuple[list[float], list[list[torch.Tensor]]]:
    trained = train_unsplit(
        model,
        RandomRows(),
        num_updates=num_updates,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=RATE,
        max_grad_norm=0.5,
        optimizer=partial(scaled, name),
    )
    return trained.losses, trained.layers


def assert_equal(run: LocalPipeline, layers: list[list[torch.Tensor]]) -> None:
    for index, copies in layers_of(run).items():
        for copy in copies:
            assert largest_difference(copy, layers[index]) < TOLERANCE


@pytest.mark.combined
@pytest.mark.parametrize(
    ("schedule", "devices", "sharded"),
    [("zb-h1", 4, False), ("chimera", 4, False), ("chimera", 4, True)],
    ids=["chain", "copies", "divided"],
)
@every_optimizer
def test_a_synchronous_pipeline_equals_the_unsplit_model(name: str, schedule: str, devices: int, sharded: bool) -> None:
    model = mlp(num_layers=4, dtype="float64")
    order = build(schedule, ScheduleRequest(devices, NUM_MICROBATCHES, NUM_UPDATES))
    run = pipeline(model, shard_optimizer(order) if sharded else order, name)
    losses = [loss for _ in range(2) for loss in mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)]
    expected_losses, layers = unsplit_losses_and_layers(model, name, 2 * NUM_UPDATES)
    assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    assert_equal(run, layers)


@pytest.mark.combined
@pytest.mark.parametrize("schedule", ["async-1f1b", "pipedream", "pipedream-2bw", "amdp"])
@every_optimizer
def test_an_asynchronous_pipeline_equals_the_interpreter_of_its_rule(name: str, schedule: str) -> None:
    num_microbatches = 1 if schedule == "pipedream" else NUM_MICROBATCHES
    order = build(schedule, ScheduleRequest(4, num_microbatches, 4))
    model = mlp(num_layers=order.num_stages, dtype="float64")
    cut = Cut.equal(order.num_stages, order.num_stages, model.edges())
    run_beside_hand(model, cut, order, optimizer=optimizer_of(name), tolerance=TOLERANCE)


@pytest.mark.parametrize("name", ["nadamw", "muon", "adafactor", "own class", "late", "groups"])
def test_an_asynchronous_pipeline_with_divided_state_equals_the_interpreter(name: str) -> None:
    order = shard_optimizer(build("amdp", ScheduleRequest(4, NUM_MICROBATCHES, 3)))
    model = mlp(num_layers=order.num_stages, dtype="float64")
    run_beside_hand(model, Cut.equal(4, 4, model.edges()), order, optimizer=optimizer_of(name), tolerance=TOLERANCE)


@pytest.mark.combined
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
@every_optimizer
def test_in_low_precision_a_pipeline_equals_the_unsplit_model(name: str, precision: Precision) -> None:
    model = mlp(num_layers=4)
    run = pipeline(model, build("1f1b", ScheduleRequest(4, NUM_MICROBATCHES, NUM_UPDATES)), name, precision=precision)
    losses = mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)
    expected = train_low(
        model,
        RandomRows(dtype=torch.float32),
        precision=precision,
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        optimizer=partial(scaled, name),
    )
    assert losses == pytest.approx(expected.losses, abs=1e-5)
    assert furthest(run, expected.layers) < 1e-5


@pytest.mark.combined
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16])
@pytest.mark.parametrize("schedule", ["async-1f1b", "pipedream-2bw"])
@every_optimizer
def test_in_low_precision_an_asynchronous_pipeline_equals_the_interpreter(name: str, schedule: str, precision: Precision) -> None:
    order = build(schedule, ScheduleRequest(4, NUM_MICROBATCHES, NUM_UPDATES))
    model = mlp(num_layers=4)
    rows = RandomRows(dtype=torch.float32)
    run = pipeline(model, order, name, precision=precision)
    run.run_window()
    by_hand = LowHandPipeline(model, order, rows, learning_rate=RATE, optimizer=optimizer_of(name))
    by_hand.run()
    assert furthest(run, [[versions[-1].weight, versions[-1].bias] for versions in by_hand.history]) < 1e-5


@every_optimizer
def test_a_run_resumes_on_other_stages_and_copies_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    model = mlp(num_layers=4, dtype="float64")
    first = pipeline(model, shard_optimizer(build("chimera", ScheduleRequest(4, NUM_MICROBATCHES, NUM_UPDATES))), name)
    first.run_window()
    holders: dict[int, list[int]] = {}
    for device, on_device in enumerate(first.weights):
        for stage in on_device:
            holders.setdefault(stage, []).append(device)
    stepped: dict[int, dict[str, torch.Tensor]] = {}
    for stage, (_, *others) in holders.items():
        for device in others:
            for layer, state in export_stepped(first.weights[device][stage]).items():
                stepped.setdefault(layer, {}).update(state)
    save_stages(tmp_path, [first.weights[devices[0]][stage] for stage, devices in sorted(holders.items())], stepped)

    second = pipeline(model, build("zb-h1", ScheduleRequest(2, NUM_MICROBATCHES, NUM_UPDATES)), name)
    for on_device in second.weights:
        load_stages(tmp_path, on_device.values())
    second.num_updates = NUM_UPDATES
    second.run_window()
    _, layers = unsplit_losses_and_layers(model, name, 2 * NUM_UPDATES)
    assert_equal(second, layers)
