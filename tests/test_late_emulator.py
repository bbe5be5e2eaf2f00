"""`benchmarks/late_emulator.py` has the losses of the executor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from convergence_runs import OPTIMIZERS
from in_turn import in_turn
from late_emulator import NUM_DEVICES, NUM_POSITIONS, NUM_ROWS, SYNCHRONOUS, Cell, orthogonalized, seeded, small_gpt, train
from torch import Tensor

from raypipe.actors.execution.batches import TokenBatches
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.cut import Cut
from raypipe.data.prepare import prepare
from raypipe.data.tokens import TokenDataset
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.request import ScheduleRequest

RATE, NUM_UPDATES, NUM_SHOWN = 2e-2, 20, 9
RECIPES = {"nadamw": "nadamw90-corrected", "muon": "muon-nadamw-corrected"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text").mkdir()
    for number in range(40):
        words = " ".join(f"{word * (number + 3) % 97} and" for word in range(1200))
        (folder / "text" / f"{number}.txt").write_text(words)
    prepare(str(folder / "text"), output=folder / "tokens.parquet", validation_fraction=0.2)
    return folder / "tokens.parquet"


def executed(cell: Cell, data: Path) -> list[float]:
    recipe = OPTIMIZERS[RECIPES[cell.optimizer]]
    optimizer = replace(recipe.optimizer, learning_rate=RATE, final_learning_rate=RATE / 10, warmup_updates=round(0.2 * NUM_UPDATES))
    model = small_gpt()
    layers = tuple(replace(layer, build=partial(seeded, model, number, cell.seed)) for number, layer in enumerate(model.layers))
    num_microbatches = NUM_DEVICES * cell.rounds
    schedule = build(cell.schedule, ScheduleRequest(NUM_DEVICES, num_microbatches, NUM_SHOWN, update_scope=UpdateScope.GLOBAL))
    pipeline = LocalPipeline(
        replace(model, layers=layers),
        cut=Cut.equal(NUM_DEVICES, NUM_DEVICES, model.edges()),
        schedule=schedule,
        batches=TokenBatches(TokenDataset(data, sequence_length=NUM_POSITIONS, seed=cell.seed), NUM_ROWS // num_microbatches),
        optimizer=partial(build_optimizer, optimizer),
        learning_rate=partial(optimizer.rate, num_updates=NUM_UPDATES),
        max_grad_norm=optimizer.max_grad_norm,
    )
    return mean_losses(in_turn(pipeline).run_window(), num_microbatches=num_microbatches)


@pytest.mark.combined
@pytest.mark.parametrize("optimizer", list(RECIPES))
@pytest.mark.parametrize(("schedule", "rounds"), [("amdp", 2), ("pipedream-2bw", 1), (SYNCHRONOUS, 1)])
def test_emulated_losses_are_those_of_the_executor(
    tokens: Path, schedule: str, rounds: int, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_float32(gradient: Tensor, *_: object) -> Tensor:
        return orthogonalized(gradient[None])[0]

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_float32)
    cell = Cell(schedule, rounds, optimizer, RATE, 1, NUM_UPDATES, 1.0)
    emulated, _ = train(cell, tokens, num_updates=NUM_SHOWN)
    assert emulated == pytest.approx(executed(cell, tokens), rel=2e-4)
    if schedule != SYNCHRONOUS:
        assert emulated != pytest.approx(train(cell.on_time(), tokens, num_updates=NUM_SHOWN)[0], rel=2e-3)
        assert emulated != pytest.approx(train(replace(cell, gradient_correction=0.0), tokens, num_updates=NUM_SHOWN)[0], rel=1e-3)


def test_updates_at_the_start_may_have_nothing_late(tokens: Path) -> None:
    cell = Cell("pipedream-2bw", 1, "muon", RATE, 1, NUM_UPDATES, synchronous_updates=3)
    late, on_time = (train(each, tokens, num_updates=7)[0] for each in (cell, cell.on_time()))
    # The first update of the window behind them has nothing late either.
    assert late[:4] == on_time[:4]
    assert late[4] != on_time[4]
