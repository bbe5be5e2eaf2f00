"""Low precision on real Ray actors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.config import OptimizerConfig, Precision, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.models.gpt import gpt
from raypipe.training.trainer import Trainer
from tests.actors.oracles import RandomTokens, largest_difference, train_unsplit
from tests.told import Told, telling

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

NUM_UPDATES = 8
NUM_MICROBATCHES = 4
RATE = 1e-3
TOLERANCE = 1e-6
"""Of losses around 5.5 and of weights. Both sides round alike; they differ by nothing at all where products add up in one order."""
OPTIONS = {"num_layers": 4, "d_model": 32, "num_heads": 2, "sequence_length": 16}


def rows(split: str) -> RandomTokens:
    assert split in {"train", "validation"}
    return RandomTokens()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_gpt_over_two_actors_under_autocast_equals_plain_autocast_in_one_process(tmp_path: Path, schedule: str) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(
        "raypipe.models.gpt:gpt",
        model_options=OPTIONS,
        precision=Precision.BF16_MIXED,
        batches=rows,
        schedule_config=ScheduleConfig(name=schedule, num_microbatches=NUM_MICROBATCHES, microbatch_size=2, updates_per_window=5),
        optimizer_config=OptimizerConfig(
            learning_rate=RATE, final_learning_rate=RATE, warmup_updates=0, beta2=0.999, weight_decay=0.01, max_grad_norm=None
        ),
        scaling_config=ScalingConfig(num_devices=2),
        run_config=RunConfig(name="test", storage_path=str(tmp_path), num_updates=NUM_UPDATES),
    )
    said = Told()
    result = telling(trainer, said).fit()
    assert any("precision bf16-mixed" in text for text in said.texts)
    by_precision = [
        train_unsplit(
            gpt(**OPTIONS),  # type: ignore[arg-type]
            RandomTokens(),
            num_updates=NUM_UPDATES,
            num_microbatches=NUM_MICROBATCHES,
            learning_rate=RATE,
            max_grad_norm=1e9,
            decay_matrices_only=0.01,
            autocast=autocast,
            fused=True,
        )
        for autocast in (torch.autocast("cpu", dtype=torch.bfloat16), None)
    ]
    mixed, single = by_precision
    assert result.losses == pytest.approx(mixed.losses, abs=TOLERANCE)
    assert result.losses != pytest.approx(single.losses, abs=20 * TOLERANCE)
    for index, layer in enumerate(gpt(**OPTIONS).layers):  # type: ignore[arg-type]
        saved = result.checkpoint.load_layer(index)
        names = [name for name, _ in layer.build().named_parameters()]
        assert largest_difference([saved[name] for name in names], mixed.layers[index]) < TOLERANCE
    copies = [layer.low_precision_bytes for layer in result.plan.profile.layers]
    assert copies[0] is None
    assert all(copies[1:])
