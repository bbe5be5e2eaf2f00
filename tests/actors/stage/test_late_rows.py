"""Rows of tables that the next reader looks up are summed and stepped before the others, and nothing else changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from raypipe.actors.execution.executor import Window
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.gradients import GradientBuffers
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.config import OptimizerConfig, Precision, WeightGroup
from raypipe.errors import ConfigError
from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Collective, SumRows
from raypipe.schedules.passes import evaluation, late_updates, recompute
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomTokens
from tests.lookups import LEARNING_RATE, NUM_MICROBATCHES, NUM_WINDOWS, check_same_bits, outcome, pipeline, table_gpt

NAME = "pipedream-2bw"
NUM_UPDATES = 5
STAGES = (0,)


def run_of(late_rows: tuple[int, ...], *, copies: int = 2, num_pipelines: int = 1, **options: Any) -> LocalPipeline:
    settings: dict[str, Any] = {"change": late_updates, "max_grad_norm": None, "num_updates": NUM_UPDATES, **options}
    return pipeline(table_gpt(), NAME, num_pipelines=num_pipelines, copies=copies, late_rows=late_rows, **settings)


def summed(run: LocalPipeline) -> dict[SumRows, list[int]]:
    """The bytes of the first stage's sums of a window, by their rows."""
    found: dict[SumRows, list[int]] = {rows: [] for rows in SumRows}
    for report, program in zip(run.run_window(), run.programs, strict=True):
        for span in report.log.spans(program):
            if isinstance(span.item, Collective) and span.item.stage == 0:
                found[span.item.rows].append(span.bytes)
    return found


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("copies", [2, 3, 4])
def test_late_rows_give_the_bits_of_rows_that_are_due_together(copies: int, buckets: int) -> None:
    late, together = (outcome(run_of(stages, copies=copies, buckets=buckets)) for stages in (STAGES, ()))
    check_same_bits(late, together)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"change": lambda schedule: schedule}, id="early-updates"),
        pytest.param({"change": partial(recompute, stages=(0, 1))}, id="forwards-run-again"),
        pytest.param({"precision": Precision.BF16}, id="bf16"),
        pytest.param({"precision": Precision.BF16_MIXED}, id="bf16-mixed"),
        pytest.param({"num_stages": 1}, id="one-stage"),
        pytest.param({"num_stages": 3}, id="three-stages"),
    ],
)
def test_late_rows_give_the_same_bits_in_other_ways_to_run(options: dict[str, Any]) -> None:
    late, together = (outcome(run_of(stages, **options)) for stages in (STAGES, ()))
    check_same_bits(late, together)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(name="nadamw", lookahead=1.0, gradient_correction=0.5),
        OptimizerConfig(name="sgd", options={"momentum": 0.9, "nesterov": True}),
        OptimizerConfig(name="muon"),
        OptimizerConfig(
            name="adamw", groups=(WeightGroup(weights=("embedding.tables.*",), optimizer="adagrad", learning_rate_factor=2.0),)
        ),
    ],
    ids=["corrected", "sgd", "muon", "groups"],
)
def test_late_rows_give_the_same_bits_with_other_optimizers(config: OptimizerConfig) -> None:
    optimizer: Optimizer = partial(build_optimizer, config)
    late, together = (outcome(run_of(stages, optimizer=optimizer)) for stages in (STAGES, ()))
    check_same_bits(late, together)


def test_a_rate_that_changes_with_the_update_is_that_of_the_rows_update() -> None:
    def run(stages: tuple[int, ...]) -> LocalPipeline:
        found = run_of(stages)
        for executor in found.executors:
            executor.learning_rate = lambda update: LEARNING_RATE / (1 + update)
        return found

    check_same_bits(outcome(run(STAGES)), outcome(run(())))


def test_sums_of_rows_that_are_due_and_of_late_ones_send_together_what_one_sum_does() -> None:
    late, together = (summed(run_of(stages)) for stages in (STAGES, ()))
    # The last two versions of a window have no reader in it.
    assert [len(late[rows]) for rows in SumRows] == [2 * 2, 2 * (NUM_UPDATES - 2), 2 * (NUM_UPDATES - 2)]
    assert not together[SumRows.DUE]
    assert not together[SumRows.LATE]
    presence_bytes = 4 * len(run_of(STAGES).weights[0][0].masters)
    num_whole = sum(late[SumRows.DUE]) + sum(late[SumRows.LATE]) - len(late[SumRows.LATE]) * presence_bytes
    assert num_whole + sum(late[SumRows.ALL]) == sum(together[SumRows.ALL])
    assert min(late[SumRows.LATE]) > presence_bytes
    assert min(late[SumRows.DUE]) > presence_bytes


def test_reported_norms_have_all_rows() -> None:
    late, together = ([report.norms for report in run_of(stages).run_window()] for stages in (STAGES, ()))
    for mine, expected in zip(late, together, strict=True):
        assert mine == pytest.approx(expected, rel=1e-12)
    assert any(len(norms) == NUM_UPDATES for norms in together)


def test_forwards_need_the_rows_that_are_stepped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    together = outcome(run_of(()))

    def left_alone(_: Weights, late: Any, gradients: list[Any]) -> None:
        for at in late.due:
            gradients[at] = None

    monkeypatch.setattr(Weights, "_step_due", left_alone)
    assert outcome(run_of(STAGES)).losses != together.losses


def test_evaluations_between_windows_see_all_rows() -> None:
    losses: list[list[float]] = []
    for stages in (STAGES, ()):
        run = run_of(stages)
        forward = evaluation(build(NAME, ScheduleRequest(2, NUM_MICROBATCHES)), num_microbatches=2)
        losses.append([])
        for _ in range(NUM_WINDOWS):
            run.run_window()
            reports = run.evaluate(forward, batches=RandomTokens(num_rows=12))
            losses[-1] += mean_losses(reports, num_microbatches=2)
    assert losses[0] == losses[1]


def test_skipped_updates_change_no_row() -> None:
    def weights_of(stages: tuple[int, ...]) -> list[torch.Tensor]:
        run = run_of(stages)
        run._run(run.programs, Window(number=0, first_update=0, batches=run.batches, skipped=frozenset({1, 2})))
        return [weight for on_device in run.weights for of_stage in on_device.values() for weight in of_stage.masters]

    assert all(torch.equal(mine, other) for mine, other in zip(weights_of(STAGES), weights_of(()), strict=True))


def test_a_limit_of_the_norm_is_refused_with_late_rows() -> None:
    with pytest.raises(ConfigError, match="norm over all rows"):
        run_of(STAGES, max_grad_norm=1.0).run_window()


def test_an_optimizer_that_mixes_rows_is_refused_with_late_rows() -> None:
    optimizer: Optimizer = partial(torch.optim.Adafactor, lr=LEARNING_RATE)
    with pytest.raises(ConfigError, match="Adafactor is not known to step each number by itself"):
        run_of(STAGES, optimizer=optimizer).run_window()


def test_late_vectors_have_nothing_but_rows_and_know_their_places() -> None:
    masters = [torch.zeros(2), torch.zeros(5, 3), torch.zeros(())]
    buffers = GradientBuffers(masters, on=torch.device("cpu"))
    table = torch.arange(15.0).view(5, 3)
    buffers.of(0)[:] = [torch.tensor([7.0, 8.0]), table, None]
    due, late = buffers.flatten(0, {1: torch.tensor([1])}), buffers.flatten(0, {1: torch.tensor([0, 4])}, late=True)
    assert due.tolist() == [7, 8, 3, 4, 5, 0, 1, 1, 0]
    assert late.tolist() == [0, 1, 2, 12, 13, 14, 1, 1, 0]
    places = buffers.places(0, late=True)
    assert places is not None
    assert places.numel == 2 + 15 + 1 + 3
    # The rows begin at places 2 and 14 of the whole vector, and behind them is one number, which is not here.
    assert [places.num_before(place) for place in (0, 1, 2, 4, 5, 13, 14, 16, 17, 18, 19, 21)] == [0, 0, 0, 2, 3, 3, 3, 5, 6, 6, 7, 9]
    buffers.set_flat(0, 2 * due)
    buffers.set_flat(0, 3 * late, late=True)
    first, second, third = buffers.of(0)
    assert first is not None
    assert first.tolist() == [14, 16]
    assert second is not None
    assert second.tolist() == [[0, 3, 6], [6, 8, 10], [6, 7, 8], [9, 10, 11], [36, 39, 42]]
    assert third is None


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BF16_MIXED])
def test_halves_of_a_microbatch_say_which_part_of_the_rows_is_read_again(precision: Precision) -> None:
    lookups = run_of(STAGES, precision=precision).weights[0][0].lookups
    batch = RandomTokens(num_rows=5).batch(0, (0.0, 1.0))
    one, other = (lookups.all_rows([{"tokens": batch["tokens"][first : first + 2]}]) for first in (0, 2))
    sets = [{(at, int(row)) for at, rows in half.items() for row in rows} for half in (one, other)]
    assert lookups.reread_share(batch) == pytest.approx(2 * len(sets[0] & sets[1]) / (len(sets[0]) + len(sets[1])))
    assert lookups.reread_share(RandomTokens(num_rows=1).batch(0, (0.0, 1.0))) is None


def test_rows_of_weights_of_16_bits_are_not_late() -> None:
    lookups = pipeline(table_gpt(dtype="bfloat16"), NAME, num_pipelines=1, copies=2).weights[0][0].lookups
    assert lookups.reread_share(RandomTokens(num_rows=4).batch(0, (0.0, 1.0))) is None
