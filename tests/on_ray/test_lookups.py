"""Actors in processes of their own that exchange the rows of gradients which the data says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.plan import Plan
from raypipe.config import DataConfig, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, Transport
from raypipe.model import Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.plan_cost import plan_programs
from raypipe.training.result import Result
from raypipe.training.trainer import Trainer
from tests.actors.oracles import RandomTokens
from tests.lookups import dense, table_gpt
from tests.on_ray.plans import in_turn, lab, plan_of, profile_of, this_node

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

NUM_ROWS = 12
NUM_UPDATES = 6


def rows(split: str) -> RandomTokens:
    assert split in {"train", "validation"}
    return RandomTokens(NUM_ROWS)


def dense_gpt() -> Model:
    return dense(table_gpt())


@pytest.mark.parametrize(
    ("name", "shares"),
    [("pipedream-2bw", ((1 / 3, 1 / 6, 1 / 2), (0.5, 0.5))), ("chimera", ((0.5, 0.5), (0.5, 0.5)))],
    ids=["three-copies", "two-pipelines"],
)
def test_rows_give_the_bits_of_whole_gradients(tmp_path: Path, name: str, shares: tuple[tuple[float, ...], ...]) -> None:
    node = this_node()
    plan = plan_of(
        profile_of(table_gpt(), rows("train").batch(0, (0.0, 1.0))),
        lab({node: sum(map(len, shares))}),
        build(name, ScheduleRequest(2, 4, 3)),
        in_turn(node, shares),
        sizes=(1, 2),
        microbatch_size=NUM_ROWS,
    )
    plan.save(tmp_path / "plan.json")
    results = [
        Trainer(
            model,
            batches=rows,
            schedule_config=ScheduleConfig(updates_per_window=3),
            optimizer_config=OptimizerConfig(max_grad_norm=0.5),
            scaling_config=ScalingConfig(transport=Transport.TCP),
            run_config=RunConfig(name=model.__name__, storage_path=str(tmp_path), num_updates=NUM_UPDATES),
            plan=str(tmp_path / "plan.json"),
        ).fit()
        for model in (table_gpt, dense_gpt)
    ]
    assert results[0].losses == results[1].losses
    check_equal_checkpoints(*results)


@pytest.mark.slow
def test_late_rows_give_the_weights_of_rows_that_are_due_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node, shares = this_node(), ((0.5, 0.5), (1.0,))
    profile = profile_of(table_gpt(), rows("train").batch(0, (0.0, 1.0)))
    assert profile.layers[0].has_late_rows
    schedule, workers = build("pipedream-2bw", ScheduleRequest(2, 4, 4)), in_turn(node, shares)
    plan = plan_of(profile, lab({node: 3}), schedule, workers, sizes=(1, 2), microbatch_size=NUM_ROWS)
    together = dataclasses.replace(profile, layers=tuple(dataclasses.replace(layer, reread_share=None) for layer in profile.layers))

    def trained(
        name: str,
        of_plan: Plan,
        *,
        max_grad_norm: float | None,
        num_updates: int = 12,
        resume: bool = False,
        faults: FaultScript | None = None,
    ) -> Result:
        path = tmp_path / f"{name}.json"
        of_plan.save(path)
        return Trainer(
            table_gpt,
            batches=rows,
            data_config=DataConfig(num_validation_microbatches=2),
            schedule_config=ScheduleConfig(updates_per_window=4),
            optimizer_config=OptimizerConfig(max_grad_norm=max_grad_norm),
            scaling_config=ScalingConfig(transport=Transport.TCP),
            run_config=RunConfig(name=name, storage_path=str(tmp_path), num_updates=num_updates, evaluate_every=4, checkpoint_every=4),
            failure_config=FailureConfig(copy_share=1.0, spare_processes=False),
            plan=str(path),
            faults=faults,
        ).fit(resume=resume)

    late = trained("late", plan, max_grad_norm=None)
    expected = trained("together", dataclasses.replace(plan, profile=together, profile_digest=together.digest), max_grad_norm=None)
    assert has_late_rows(late)
    assert not has_late_rows(expected)
    assert late.losses == expected.losses
    assert late.validation_losses == expected.validation_losses
    check_equal_checkpoints(late, expected)

    trained("halves", plan, max_grad_norm=None, num_updates=8)
    resumed = trained("halves", plan, max_grad_norm=None, resume=True)
    assert resumed.losses == expected.losses[8:]
    check_equal_checkpoints(resumed, expected)

    # Device 1 is a copy of the first stage; before this backward it has updates of which late rows are not stepped.
    faults = FaultScript().fail_at(device=1, before="0B11", kind=FaultKind.RAISE, window=1)
    recovered = trained("recovered", plan, max_grad_norm=None, faults=faults)
    assert len(recovered.recoveries) == 1
    assert recovered.losses == expected.losses
    check_equal_checkpoints(recovered, expected)

    clipped = trained("clipped", plan, max_grad_norm=0.5, num_updates=4)
    assert not has_late_rows(clipped)
    assert "max_grad_norm limits a norm" in capsys.readouterr().err


def has_late_rows(result: Result) -> bool:
    return any(program.has_late_rows for program in plan_programs(result.plan))


def check_equal_checkpoints(one: Result, other: Result) -> None:
    first, second = (Checkpoint.open(result.checkpoint.path) for result in (one, other))
    for index in range(len(table_gpt().layers)):
        saved, expected = first.load_layer(index), second.load_layer(index)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in saved.items())
