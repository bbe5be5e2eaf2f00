"""What would change a loss that couples the rows of a microbatch is refused before anything starts, and not chosen later."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import raypipe
from raypipe.actors.execution.batches import FixedBatch
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.checkpoint_files import CheckpointIndex
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan, Replica
from raypipe.artifacts.profile import LayerProfile, ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cluster.coordinator import Coordinator
from raypipe.config import AdaptationConfig, DataConfig, ModelConfig, RunConfig, ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.errors import ConfigError, PlanError, ScheduleError
from raypipe.model import Model
from raypipe.models.clip import clip
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.checks import with_plan
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_strategy import run_strategy
from raypipe.training.strategy import NamedStrategy, PlannedStrategy
from raypipe.training.trainer import Trainer
from tests.actors.oracles import largest_difference, layers_of, train_unsplit

FUNCTION = "raypipe.models.clip:clip"
NUM_DEVICES, NUM_MICROBATCHES, NUM_ROWS = 4, 4, 8


def config(**changed: object) -> TrainConfig:
    schedule = ScheduleConfig(num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS)
    sections = {"schedule": schedule, "scaling": ScalingConfig(num_devices=NUM_DEVICES), "data": DataConfig(path=""), **changed}
    return TrainConfig(model=ModelConfig(function=FUNCTION), **sections)  # type: ignore[arg-type]


def unaware(model: Model) -> ModelProfile:
    """A profile of the model that does not say that rows are coupled; nearly all work is in the last layer."""
    names = [layer.name for layer in model.layers]
    last = len(names) - 1
    layers = tuple(
        LayerProfile(
            name=name,
            forward_s=1.0 if number == last else 0.01,
            backward_s=2.0 if number == last else 0.02,
            weight_grad_s=1.0 if number == last else 0.01,
            output_bytes=8,
            saved_bytes=8,
            parameter_bytes=8,
        )
        for number, name in enumerate(names)
    )
    edges = tuple(NamedEdge(producer=names[source], consumer=names[target]) for source, target in model.edges())
    return ModelProfile(name="clip", microbatch_size=NUM_ROWS, layers=layers, named_edges=edges)


def plan(planner: str) -> Plan:
    return raypipe.plan(unaware(clip()), ClusterTopology.uniform(NUM_DEVICES), NUM_MICROBATCHES, planner=planner, schedule="1f1b")


def test_an_order_that_divides_microbatches_is_refused() -> None:
    halving = config(schedule=ScheduleConfig(name="chimera-halving", num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS))
    with pytest.raises(ScheduleError, match=r"'chimera-halving' divides microbatch .* choose an order of whole microbatches"):
        NamedStrategy(halving, clip(), window_sizes={1})
    NamedStrategy(halving, replace(clip(), loss_couples_rows=False), window_sizes={1})


@pytest.mark.parametrize(("num_rows", "fits"), [(2, True), (1, False)])
def test_an_order_with_more_parts_than_rows_is_refused(num_rows: int, fits: bool) -> None:
    halving = config(schedule=ScheduleConfig(name="chimera-halving", num_microbatches=NUM_MICROBATCHES, microbatch_size=num_rows))
    model = replace(clip(), loss_couples_rows=False)
    with nullcontext() if fits else pytest.raises(PlanError, match=r"more parts than their rows, 1; raise schedule.microbatch_size"):
        NamedStrategy(halving, model, window_sizes={1})


def test_a_plan_is_refused_whose_profile_did_not_say_that_rows_are_coupled() -> None:
    replicated = plan("data-parallel")
    with pytest.raises(PlanError, match=r"worker 0 has 4 devices, which share the rows .* give this worker one device"):
        PlannedStrategy(replicated, with_plan(config(), replicated), clip(), window_sizes={1})
    PlannedStrategy(replicated, with_plan(config(), replicated), replace(clip(), loss_couples_rows=False), window_sizes={1})


def plan_in_parts(num_parts: int) -> Plan:
    """A plan for two devices whose branches work on parts, and the loss on the whole; the worker without the loss is 0."""
    names = [layer.name for layer in clip().layers]
    stages = tuple(tuple(names[first:end]) for first, end in pairwise((0, 2, 5, 7, 10, 11)))
    cut = Cut.of_sizes([len(stage) for stage in stages], clip().edges())
    in_line = plan("1f1b-equal")
    order = build("branch-aware", ScheduleRequest(2, num_parts, branches=(1, 1), coupled=True))
    return replace(in_line, stages=stages, workers=in_line.workers[:2], schedule=replace(order, graph=cut.graph))


def test_a_plan_whose_branches_work_on_parts_trains_as_the_unsplit_model() -> None:
    model = clip(image_width=8, text_width=8, head_size=4, embedding_size=8, dtype="float64")
    planned = plan_in_parts(4)
    strategy = PlannedStrategy(planned, with_plan(replace(config(), schedule=ScheduleConfig()), planned), model, window_sizes={2})
    generator = torch.Generator().manual_seed(1)
    rows = {
        "glyph": torch.randint(256, (NUM_ROWS, 32, 32), generator=generator, dtype=torch.uint8),
        "name": torch.randint(128, (NUM_ROWS, 80), generator=generator, dtype=torch.uint8),
    }
    run = LocalPipeline(
        model,
        cut=planned.cut,
        schedule=strategy.schedule,
        batches=FixedBatch(rows),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        learning_rate=lambda _: 1e-2,
        max_grad_norm=0.5,
        placement=planned.placement,
    )
    losses = mean_losses(run.run_window(), num_microbatches=1)
    expected = train_unsplit(model, FixedBatch(rows), num_updates=2, num_microbatches=1, learning_rate=1e-2, max_grad_norm=0.5)
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    for index, copies in layers_of(run).items():
        assert all(largest_difference(copy, expected.layers[index]) < 1e-10 for copy in copies)


@pytest.mark.parametrize(("num_parts", "fits"), [(4, True), (8, False)])
def test_replicas_whose_shares_of_parts_are_no_whole_rows_are_refused(num_parts: int, fits: bool) -> None:
    in_parts = plan_in_parts(num_parts)
    halves = tuple(Replica(device=f"device{number}", share=0.5) for number in (2, 3))
    replicated = replace(in_parts, workers=(halves, in_parts.workers[1]))
    with nullcontext() if fits else pytest.raises(PlanError, match="device 0 works on a share of a part that is no whole rows"):
        PlannedStrategy(replicated, with_plan(replace(config(), schedule=ScheduleConfig()), replicated), clip(), window_sizes={1})


@pytest.mark.parametrize(
    ("num_parts", "problem"),
    [(1, "which share the rows of each microbatch, and stage 4, which takes the loss"), (4, "4F0, of which one works on a part")],
)
def test_replicas_of_the_worker_with_the_loss_of_branches_are_refused(num_parts: int, problem: str) -> None:
    in_parts = plan_in_parts(num_parts)
    halves = tuple(Replica(device=f"device{number}", share=0.5) for number in (2, 3))
    replicated = replace(in_parts, workers=(in_parts.workers[0], halves))
    with pytest.raises(PlanError, match=rf"worker 1 has .* devices, .*{problem}.* give this worker one device"):
        PlannedStrategy(replicated, with_plan(replace(config(), schedule=ScheduleConfig()), replicated), clip(), window_sizes={1})


@pytest.mark.parametrize("couples", [True, False])
def test_no_replicas_take_the_loss_after_a_start_with_a_plan_that_did_not_know(couples: bool) -> None:
    model, start_plan = replace(clip(), loss_couples_rows=couples), plan("1f1b-equal")
    run = with_plan(config(adaptation=AdaptationConfig(enabled=True, schedules=("1f1b",), divisions=False)), start_plan)
    start = PlannedStrategy(start_plan, run, model, window_sizes={1})
    strategy = AdaptiveStrategy(run, model, window_sizes={1}, start=start, can_divide=False)
    slot = SimpleNamespace(node=SimpleNamespace(address="10.0.0.1"))
    links = SimpleNamespace(seed=lambda *_: None)
    actors = SimpleNamespace(launched=[SimpleNamespace(slot=slot)] * NUM_DEVICES)
    coordinator = cast("Coordinator", SimpleNamespace(links=links, actors=actors))
    strategy.prepare(coordinator, name="test", measure=lambda _: unaware(model), notice=lambda _: None)
    assert (len(strategy.policy.choose().layout.workers[-1]) == 1) == couples


@pytest.mark.parametrize("name", ["auto", "1f1b"])
@pytest.mark.parametrize("couples", [True, False])
def test_adaptation_keeps_the_microbatches_of_coupled_rows(name: str, couples: bool) -> None:
    adapting = config(
        schedule=ScheduleConfig(name=name, num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS),
        adaptation=AdaptationConfig(enabled=True),
        data=DataConfig(path="glyphs.parquet"),
    )
    strategy = run_strategy(adapting, replace(clip(), loss_couples_rows=couples), None, window_sizes={1})
    assert isinstance(strategy, AdaptiveStrategy)
    assert strategy.can_divide is not couples


def test_a_run_does_not_go_on_with_microbatches_of_another_size(tmp_path: Path) -> None:
    def trainer(num_microbatches: int, microbatch_size: int) -> Trainer:
        return Trainer(
            FUNCTION,
            data_config=DataConfig(path=str(tmp_path / "glyphs.parquet")),
            schedule_config=ScheduleConfig(num_microbatches=num_microbatches, microbatch_size=microbatch_size),
            run_config=RunConfig(storage_path=str(tmp_path), name="run"),
        )

    folder = RunFolder.create(str(tmp_path), "run")
    folder.begin(trainer(NUM_MICROBATCHES, NUM_ROWS).config)
    layers = tuple(layer.name for layer in clip().layers)
    Checkpoint.finish(folder.new_checkpoint(4), CheckpointIndex(update=4, layers=layers, model=FUNCTION, seed=0))
    with pytest.raises(ConfigError, match=r"schedule\.microbatch_size=8, got 16; .* couples the rows .* set it to 8"):
        trainer(NUM_MICROBATCHES // 2, NUM_ROWS * 2).fit(resume=True)
