"""Runs that go on in other ways between windows: nothing is lost on the way, and what was decided can be read afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.trace import Trace
from raypipe.callbacks.base import Callback
from raypipe.callbacks.events import Phase, Run
from raypipe.config import AdaptationConfig, ClusterConfig, RunConfig, ScalingConfig, ScheduleConfig
from raypipe.errors import ConfigError, PlanError, UnknownNameError
from raypipe.models.mlp import mlp
from raypipe.planning.cluster_state import ClusterState
from raypipe.planning.layout import Layout
from raypipe.planning.replanning import Decision
from raypipe.schedules.ir import WeightRule
from raypipe.training.adaptive import AdaptiveStrategy
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows, train_unsplit
from tests.marks import slow_unless
from tests.on_ray.test_training import LEARNING_RATE, MAX_GRAD_NORM, NUM_MICROBATCHES, adamw_settings, rows
from tests.told import Told, telling

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

NUM_UPDATES = 20


def trainer(
    folder: Path,
    *,
    schedule: str,
    adaptation: AdaptationConfig,
    max_staleness: int | None = None,
    max_mean_staleness: float | None = None,
    devices: int = 4,
    shard_optimizer: bool = False,
    train_data: object = None,
) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 8, "dtype": "float64"},
        batches=rows if train_data is None else None,
        train_data=train_data,
        schedule_config=ScheduleConfig(
            name=schedule,
            num_microbatches=NUM_MICROBATCHES,
            microbatch_size=NUM_ROWS,
            updates_per_window=4,
            max_staleness=max_staleness,
            max_mean_staleness=max_mean_staleness,
        ),
        optimizer_config=adamw_settings(max_grad_norm=MAX_GRAD_NORM),
        scaling_config=ScalingConfig(num_devices=devices, shard_optimizer=shard_optimizer),
        cluster_config=ClusterConfig(message_timeout_s=60.0),
        run_config=RunConfig(name="test", storage_path=str(folder), num_updates=NUM_UPDATES),
        adaptation_config=adaptation,
    )


def scripted(monkeypatch: pytest.MonkeyPatch, layouts: list[Layout], division: tuple[int, int] = (NUM_MICROBATCHES, NUM_ROWS)) -> None:
    """Lets the policy say after each window what stands in a list."""
    script: Iterator[Layout] = iter(layouts)

    def decide(self: AdaptiveStrategy, *_: object, **__: object) -> Decision | None:
        layout = next(script, None)
        self.state = ClusterState(self.plan.profile, self.plan.topology)
        choice = self.policy.choice if layout is None else self.policy.planner.choice_of(division, layout)
        return Decision(choice, switch=layout is not None, gain=1.5, text=f"as scripted: {choice.layout.order}")

    monkeypatch.setattr(AdaptiveStrategy, "after_window", decide)


WAYS = [
    # Two stages a device, the other way round.
    Layout((0, 1, 2, 3, 4, 5, 6, 7, 8), ((3,), (2,), (1,), (0,)), "interleaved"),
    # Two copies of every stage, in pipelines of opposite directions.
    Layout((0, 3, 4, 5, 8), ((0,), (2,), (1,), (3,)), "chimera"),
    # A stage of two devices that share its rows; one device has nothing to do.
    Layout((0, 2, 8), ((1,), (3, 0)), "gpipe"),
    Layout((0, 5, 6, 7, 8), ((2,), (1,), (0,), (3,)), "zb-h1"),
]


class Asking(Callback):
    """Asks for a forward while stages may be on their way."""

    required = True

    def __init__(self) -> None:
        self.num_refused = 0

    def on_phase(self, run: Run, phase: Phase) -> None:
        assert run.forward is not None
        with pytest.raises(ConfigError, match="not in on_phase"):
            run.forward({"inputs": torch.zeros(1, 16, dtype=torch.float64)})
        self.num_refused += 1


@pytest.mark.parametrize("sharded", slow_unless({False}, [False, True]))
def test_a_run_that_is_moved_four_times_equals_the_unsplit_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Adam's moments travel with their layers, also from copies that divide them: without them losses differ after the first switch."""
    scripted(monkeypatch, WAYS)
    torch.set_num_threads(1)
    unsplit = train_unsplit(
        mlp(num_layers=8, dtype="float64"),
        RandomRows(),
        num_updates=NUM_UPDATES,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        decay_matrices_only=0.01,
    )
    notices, asking = Told(), Asking()
    adaptation = AdaptationConfig(enabled=True)
    result = telling(trainer(tmp_path, schedule="1f1b", adaptation=adaptation, shard_optimizer=sharded), notices, asking).fit()
    assert asking.num_refused == 1 + len(WAYS)
    assert result.losses == pytest.approx(unsplit.losses, abs=1e-10)
    for index, weights in enumerate(unsplit.layers):
        saved = result.checkpoint.load_layer(index)
        assert torch.allclose(saved["linear.weight"], weights[0], rtol=0, atol=1e-10)
    folder = Path(result.path)
    lines = [json.loads(line) for line in (folder / "adaptation.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [4, 8, 12, 16]
    assert all(line["switch"] and line["took_s"] > 0 for line in lines)
    assert "update 4: as scripted: interleaved" in notices.texts
    assert [Plan.load(folder / f"plan-until-update-{update:06d}.json").schedule.name for update in (4, 8, 12, 16)] == [
        "1f1b",
        *(way.order for way in WAYS[:3]),
    ]
    assert result.plan.schedule.name == "zb-h1"
    assert Trace.load(folder / "trace.json").notes == tuple(f"update {line['update']}: {line['text']}" for line in lines)
    before = Trace.load(folder / "trace-until-update-000004.json")
    assert before.num_updates == 4


@pytest.mark.slow
def test_an_update_of_rows_from_readers_is_divided_into_other_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RandomRows().batch(0, (0.0, 1.0))
    data = [{name: tensor[row % NUM_ROWS] * (1 + row / 100) for name, tensor in whole.items()} for row in range(150)]
    calm = trainer(tmp_path / "calm", schedule="1f1b", adaptation=AdaptationConfig(), train_data=data).fit()
    scripted(monkeypatch, [Layout((0, 5, 6, 7, 8), ((2,), (1,), (0,), (3,)), "zb-h1")], (2 * NUM_MICROBATCHES, NUM_ROWS // 2))
    moved = trainer(tmp_path / "moved", schedule="1f1b", adaptation=AdaptationConfig(enabled=True), train_data=data).fit()
    assert moved.losses == pytest.approx(calm.losses, abs=1e-10)
    assert (moved.plan.schedule.name, moved.plan.microbatch_size) == ("zb-h1", NUM_ROWS // 2)
    assert len(set(calm.losses)) == NUM_UPDATES


def test_a_run_may_choose_its_schedule_from_the_start(tmp_path: Path) -> None:
    notices = Told()
    result = telling(trainer(tmp_path, schedule="auto", adaptation=AdaptationConfig(), max_mean_staleness=1.0), notices).fit()
    assert any(text.startswith("chosen: ") for text in notices.texts)
    assert any("updates late on average: with optimizer.name " in text for text in notices.texts) == (
        result.plan.schedule.weight_rule is not WeightRule.FLUSH
    )
    assert len(result.losses) == NUM_UPDATES
    assert result.losses[-1] < result.losses[0]
    assert not (Path(result.path) / "adaptation.jsonl").exists()  # it was not asked to switch


def test_limits_that_no_way_keeps_are_refused(tmp_path: Path) -> None:
    adaptation = AdaptationConfig(schedules=("pipedream-2bw",))
    with pytest.raises(PlanError, match=r"max_staleness 0.*allow max_staleness 1"):
        trainer(tmp_path, schedule="auto", adaptation=adaptation, max_staleness=0).fit()


def test_a_schedule_that_is_staler_than_allowed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule.max_staleness is 0, but 'amdp' .* has 1; allow 1"):
        trainer(tmp_path, schedule="amdp", adaptation=AdaptationConfig(), max_staleness=0).fit()
    with pytest.raises(ConfigError, match=r"schedule.max_mean_staleness is 0.1, but 'amdp' .* has 0.\d+; allow 0.\d+"):
        trainer(tmp_path, schedule="amdp", adaptation=AdaptationConfig(), max_mean_staleness=0.1).fit()


def test_an_unknown_schedule_to_choose_from_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="amdb"):
        trainer(tmp_path, schedule="auto", adaptation=AdaptationConfig(schedules=("amdb",))).fit()
