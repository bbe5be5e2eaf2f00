"""Weights that stages share, on real Ray actors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.trace import SpanKind
from raypipe.config import OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import PlanError
from raypipe.model import Model
from raypipe.models.gpt import gpt
from raypipe.planning.plan import plan_problem
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.training.rehearsal import rehearse
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.actors.oracles import unsplit
from tests.on_ray.plans import in_turn, lab, plan_of, profile_of, this_node

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

OPTIONS = {"num_layers": 2, "d_model": 16, "num_heads": 2, "sequence_length": 8, "vocabulary_size": 32, "dtype": "float64"}
TIED = {**OPTIONS, "tie_embeddings": True}
NUM_MICROBATCHES = 4
NUM_ROWS = 6
NUM_UPDATES = 8
RATE = 1e-2
DECAY = 0.1
MAX_GRAD_NORM = 0.2
OPTIMIZER = OptimizerConfig(learning_rate=RATE, final_learning_rate=RATE, warmup_updates=0, beta2=0.999, weight_decay=DECAY)


@dataclass(frozen=True)
class RandomTokens:
    def batch(self, microbatch: int, rows: tuple[float, float]) -> dict[str, Tensor]:
        tokens = torch.randint(0, 32, (NUM_ROWS, 9), generator=torch.Generator().manual_seed(microbatch))
        first, end = (round(share * NUM_ROWS) for share in rows)
        return {"tokens": tokens[first:end, :-1], "targets": tokens[first:end, 1:]}


def rows(split: str) -> RandomTokens:
    assert split in {"train", "validation"}
    return RandomTokens()


def train(
    folder: Path,
    *,
    schedule: str = "1f1b",
    devices: int = 4,
    num_updates: int = NUM_UPDATES,
    options: dict[str, Any] = TIED,
    max_grad_norm: float | None = MAX_GRAD_NORM,
    plan: Path | None = None,
    resume: bool = False,
    shard_optimizer: bool = False,
) -> Result:
    order = ScheduleConfig(name=schedule, num_microbatches=NUM_MICROBATCHES, microbatch_size=NUM_ROWS, updates_per_window=4)
    on_devices = ScalingConfig(num_devices=devices, shard_optimizer=shard_optimizer)
    return Trainer(
        "raypipe.models.gpt:gpt",
        model_options=options,
        batches=rows,
        schedule_config=ScheduleConfig(updates_per_window=4) if plan else order,
        optimizer_config=replace(OPTIMIZER, max_grad_norm=max_grad_norm),
        scaling_config=ScalingConfig() if plan else on_devices,
        run_config=RunConfig(name="test", storage_path=str(folder), num_updates=num_updates, checkpoint_every=4),
        plan=str(plan) if plan else None,
    ).fit(resume=resume)


def in_one_process() -> tuple[list[float], torch.nn.ModuleList]:
    """The same in plain PyTorch."""
    torch.set_num_threads(1)
    model = gpt(**TIED)  # type: ignore[arg-type]
    modules = unsplit(model)
    weights = list(modules.parameters())
    groups = [
        {"params": [w for w in weights if (w.dim() > 1) is matrix], "weight_decay": DECAY if matrix else 0.0} for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses = []
    for update in range(NUM_UPDATES):
        total = 0.0
        for number in range(NUM_MICROBATCHES):
            batch = RandomTokens().batch(update * NUM_MICROBATCHES + number, (0.0, 1.0))
            x = batch["tokens"]
            for module in modules:
                x = module(x)
            loss = model.loss(x, batch)
            (loss / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / NUM_MICROBATCHES)
    return losses, modules


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], torch.nn.ModuleList]:
    return in_one_process()


def check(result: Result, expected: tuple[list[float], torch.nn.ModuleList], first: int = 0) -> None:
    losses, modules = expected
    assert result.losses == pytest.approx(losses[first:], abs=1e-10)
    for mine, theirs in zip(result.load().modules.values(), modules, strict=True):
        for name, weight in theirs.named_parameters():
            assert torch.allclose(mine.get_parameter(name), weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("schedule", "devices", "sharded"), [("1f1b", 4, False), ("zb-h1", 3, False), ("chimera", 4, False), ("chimera", 4, True)]
)
def test_a_tied_gpt_trains_as_in_one_process(
    tmp_path: Path, expected: tuple[list[float], torch.nn.ModuleList], schedule: str, devices: int, sharded: bool
) -> None:
    result = train(tmp_path, schedule=schedule, devices=devices, shard_optimizer=sharded)
    check(result, expected)
    assert result.plan.schedule.graph.ties == ((0, devices - 1),)
    assert Checkpoint.latest(result.path) is not None
    assert "logits.weight" not in result.checkpoint.load_layer(3)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 1)])
def test_a_run_resumes_with_the_tied_layers_on_one_stage_or_apart(
    tmp_path: Path, expected: tuple[list[float], torch.nn.ModuleList], before: int, after: int
) -> None:
    train(tmp_path, devices=before, num_updates=4)
    check(train(tmp_path, devices=after, resume=True), expected, first=4)


@pytest.mark.parametrize(("schedule", "sharded"), [("async-1f1b", False), ("amdp", False), ("amdp", True)])
def test_an_asynchronous_schedule_trains_a_tied_gpt_by_its_rule(tmp_path: Path, schedule: str, sharded: bool) -> None:
    """Four updates a window, drained between them; copies may be published. Measured times decide where tied stages update."""
    result = train(tmp_path, schedule=schedule, max_grad_norm=None, shard_optimizer=sharded)
    model = gpt(**TIED)  # type: ignore[arg-type]
    cut = Cut(result.plan.cut.stages, model.edges(), model.tied_layers())
    assert (result.plan.schedule.name, result.plan.schedule.num_updates) == (schedule, 4)
    here = LocalPipeline(
        model,
        cut=cut,
        schedule=result.plan.schedule,
        batches=RandomTokens(),
        optimizer=partial(build_optimizer, OPTIMIZER),
        learning_rate=lambda _: RATE,
    )
    losses = [loss for _ in range(2) for loss in mean_losses(here.run_window(), num_microbatches=NUM_MICROBATCHES)]
    assert result.losses == pytest.approx(losses, abs=1e-12)


def profiled(model: Model) -> ModelProfile:
    return profile_of(model, RandomTokens().batch(0, (0.0, 1.0)))


def test_a_plan_of_a_tied_gpt_is_made_and_trained_by(tmp_path: Path, expected: tuple[list[float], torch.nn.ModuleList]) -> None:
    profile = profiled(gpt(**TIED))  # type: ignore[arg-type]
    assert [(layer.tied, layer.tied_bytes) for layer in profile.layers] == [
        ("embedding.token.weight", 32 * 16 * 8),
        *[(None, None)] * 2,
        ("embedding.token.weight", 32 * 16 * 8),
    ]
    # Layers that take long enough to be worth four devices.
    layers = tuple(replace(layer, forward_s=1.0, backward_s=2.0, weight_grad_s=1.0) for layer in profile.layers)
    problem = Problem(replace(profile, layers=layers), lab({this_node(): 4}), NUM_MICROBATCHES, NUM_ROWS)
    plan = plan_problem(problem, schedule="1f1b", budget=SearchBudget(20, 8))
    assert plan.schedule.graph.ties == ((0, plan.schedule.num_stages - 1),)
    plan.save(tmp_path / "plan.json")
    check(train(tmp_path, plan=tmp_path / "plan.json"), expected)
    with pytest.raises(
        PlanError, match=r"layers of the model that share weights are \[\], those of the plan's profile \[\['embedding', 'head'\]\]"
    ):
        train(tmp_path, plan=tmp_path / "plan.json", options=OPTIONS)


def test_a_rehearsal_sums_what_stages_share() -> None:
    profile = ModelProfile.uniform(3, forward_s=0.005, backward_s=0.01, output_bytes=600, parameter_bytes=40_000, microbatch_size=6)
    ends = [replace(profile.layers[at], tied="w", tied_bytes=30_000) for at in (0, 2)]
    profile = replace(profile, layers=(ends[0], profile.layers[1], ends[1]))
    node = this_node()
    plan = plan_of(
        profile, lab({node: 3}), build("1f1b", ScheduleRequest(3, 4)), in_turn(node, ((1.0,),) * 3), sizes=[1] * 3, microbatch_size=6
    )
    done = rehearse(plan, num_updates=2, num_windows=1)
    # A run also sums a number that says whether the weight has a gradient.
    for trace, more_bytes in ((done.trace, 4), (done.predicted, 0)):
        sums = [span for span in trace.spans if span.kind is SpanKind.COLLECTIVE and span.name.startswith("tied of tie 0")]
        assert {span.device for span in sums} <= {0, 2}
        assert {span.bytes for span in sums} == {30_000 + more_bytes}
