"""How the result of a run shows itself."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.checkpoint_files import CheckpointIndex
from raypipe.training.result import Result
from tests.callbacks.events import PLAN

RESULT = Result(
    path="/runs/run",
    metrics={"loss": 1.23456789, "update_s": 0.25, "bubble_ratio": cast(float, None), "updates": 50},
    losses=[2.0] * 50,
    validation_losses=[(50, 1.5)],
    checkpoint=Checkpoint("/runs/run/checkpoints/update-000050", CheckpointIndex(update=50, layers=("a",), model="m:f", seed=0)),
    plan=PLAN,
    figures=[],
    sample="",
)


def test_a_result_shows_itself_in_three_lines() -> None:
    assert repr(RESULT).splitlines() == [
        "run /runs/run, 50 updates done",
        "loss 1.235, update_s 0.25, bubble_ratio None",
        "checkpoint /runs/run/checkpoints/update-000050",
    ]


def test_a_result_says_what_did_not_go_as_configured() -> None:
    result = replace(RESULT, metrics={}, stop_reason="no progress", callback_errors=("wandb: offline",))
    assert repr(result).splitlines()[2:] == ["ended early: no progress", "went on without a callback: wandb: offline"]
