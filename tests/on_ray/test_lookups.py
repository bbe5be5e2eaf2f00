"""Actors in processes of their own that exchange the rows of gradients which the data says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.config import OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, Transport
from raypipe.model import Model
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
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
    first, second = (Checkpoint.open(result.checkpoint.path) for result in results)
    for index in range(len(table_gpt().layers)):
        saved, expected = first.load_layer(index), second.load_layer(index)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in saved.items())
