"""Optimizers by name, by groups and of a user's own on Ray actors: resumed on other stages, recovered, and refused in time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from raypipe.actors.execution.faults import FaultKind, FaultScript
from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.config import FailureConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, WeightGroup
from raypipe.errors import ConfigError
from raypipe.training.trainer import Trainer
from tests.actors.oracles import NUM_ROWS, RandomRows
from tests.actors.stage.own_optimizers import Remembering

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("local_ray")]

NUM_UPDATES = 9
MIXED = OptimizerConfig(
    name="muon",
    learning_rate=1e-2,
    learning_rate_schedule="wsd",
    warmup_updates=2,
    decay_updates=4,
    lookahead=1.0,
    max_grad_norm=None,
    groups=(
        WeightGroup(weights=("layer-0.*",), optimizer="tests.actors.stage.own_optimizers:Remembering", learning_rate_factor=0.5),
        WeightGroup(weights=("*.bias",), optimizer="sgd", options={"momentum": 0.9}),
    ),
)


def rows(split: str) -> RandomRows:
    assert split in {"train", "validation"}
    return RandomRows()


def trainer(
    folder: Path,
    *,
    schedule: str = "1f1b",
    devices: int = 2,
    num_updates: int = NUM_UPDATES,
    optimizer_config: OptimizerConfig = MIXED,
    optimizer: OptimizerFunction | None = None,
    shard_optimizer: bool = False,
    faults: FaultScript | None = None,
) -> Trainer:
    return Trainer(
        "raypipe.models.mlp:mlp",
        model_options={"num_layers": 4, "dtype": "float64"},
        batches=rows,
        schedule_config=ScheduleConfig(name=schedule, num_microbatches=4, microbatch_size=NUM_ROWS, updates_per_window=3),
        optimizer_config=optimizer_config,
        optimizer=optimizer,
        scaling_config=ScalingConfig(num_devices=devices, shard_optimizer=shard_optimizer),
        run_config=RunConfig(name="test", storage_path=str(folder), num_updates=num_updates),
        failure_config=FailureConfig(max_failures=3 if faults else 0, copy_share=1.0),
        faults=faults,
    )


@pytest.mark.usefixtures("shared_actors")
def test_a_mixed_optimizer_resumes_on_other_copies_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole").fit()
    config = dataclasses.replace(MIXED, learning_rate_schedule="constant")
    steady = trainer(tmp_path / "steady", optimizer_config=config).fit()
    assert steady.losses[-1] != whole.losses[-1], "the rate falls in the last updates"
    first = trainer(tmp_path / "parts", schedule="chimera", shard_optimizer=True, num_updates=6, optimizer_config=config).fit()
    second = trainer(tmp_path / "parts", schedule="zb-h1", devices=4, optimizer_config=config).fit(resume=True)
    assert first.losses + second.losses == pytest.approx(steady.losses, abs=1e-10)
    other = dataclasses.replace(config, groups=config.groups[:1])
    with pytest.raises(ConfigError, match=r"has the state of optimizer=muon; layer-0.\*: .*, which muon; .* cannot go on from"):
        trainer(tmp_path / "parts", optimizer_config=other, num_updates=12).fit(resume=True)


@pytest.mark.slow
def test_a_recovered_run_has_the_losses_of_a_run_without_a_fault(tmp_path: Path) -> None:
    calm = trainer(tmp_path / "calm").fit()
    faults = FaultScript().fail_at(device=1, before="1B2", kind=FaultKind.KILL, window=1)
    struck = trainer(tmp_path / "struck", faults=faults).fit()
    assert struck.losses == calm.losses
    assert len(struck.recoveries) == 1


@pytest.mark.usefixtures("shared_actors")
def test_a_class_of_ones_own_is_given_as_it_is_or_by_name(tmp_path: Path) -> None:
    config = OptimizerConfig(learning_rate=1e-2, warmup_updates=0, options={"length": 2})
    given = trainer(tmp_path / "given", optimizer_config=config, optimizer=Remembering).fit()
    name = "tests.actors.stage.own_optimizers:Remembering"
    named = trainer(tmp_path / "named", optimizer_config=dataclasses.replace(config, name=name)).fit()
    assert given.losses == named.losses
    assert (Path(given.path) / "config.yaml").read_text().count(name) == 1


@pytest.mark.usefixtures("shared_actors")
def test_a_pattern_that_gets_no_weight_ends_a_run_before_its_first_update(tmp_path: Path) -> None:
    config = OptimizerConfig(groups=(WeightGroup(weights=("layer-0.linear.wieght",)),))
    with pytest.raises(ConfigError, match=r"optimizer.groups\[0\].weights: 'layer-0.linear.wieght' .*'layer-0.linear.weight'"):
        trainer(tmp_path, optimizer_config=config).fit()


def test_an_option_that_is_misspelt_is_refused_before_there_are_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.options: sgd takes no 'momentun'; did you mean 'momentum'\?"):
        trainer(tmp_path, optimizer_config=OptimizerConfig(name="sgd", options={"momentun": 0.9})).fit()
    assert not list(tmp_path.iterdir()), "not even a folder is made"
