"""What a driver program may write into a configuration."""

from dataclasses import fields
from enum import StrEnum
from typing import Any

import pytest

import raypipe
from raypipe.config import (
    AdaptationConfig,
    ClusterConfig,
    CommunicationConfig,
    DataConfig,
    FailureConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    Precision,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    TrainConfig,
    Transport,
)
from raypipe.errors import ConfigError, FormatError
from raypipe.schedules.ir import UpdateScope

NAMES = [
    (OptimizerConfig, {}, "name", OptimizerName.NADAMW),
    (ScheduleConfig, {}, "update_scope", UpdateScope.GLOBAL),
    (ScalingConfig, {}, "transport", Transport.GLOO),
    (ModelConfig, {"function": "models:gpt"}, "precision", Precision.BF16),
]


@pytest.mark.parametrize(("config", "options", "field", "member"), NAMES)
def test_names_may_be_plain_text_and_others_are_refused(config: type[Any], options: dict[str, Any], field: str, member: StrEnum) -> None:
    found = getattr(config(**options, **{field: member.value}), field)
    assert found is member
    with pytest.raises(FormatError, match=rf"{config.__name__}: {field}: expected '.*'{member}'.*, got 'other'"):
        config(**options, **{field: "other"})


def test_what_the_staleness_may_be_on_average_is_an_amount() -> None:
    assert ScheduleConfig(max_mean_staleness=0.25).staleness.max_mean_staleness == 0.25
    with pytest.raises(FormatError, match=r"ScheduleConfig: max_mean_staleness: expected a number >= 0, got -0.5"):
        ScheduleConfig(max_mean_staleness=-0.5)


def test_the_trainer_of_a_configuration_leaves_nothing_out() -> None:
    from raypipe.training.trainer import Trainer  # loads torch

    config = TrainConfig(
        model=ModelConfig(function="raypipe.models.gpt:gpt", options={"num_layers": 3}, precision=Precision.BF16, compile=True),
        data=DataConfig(path="tokens.parquet"),
        schedule=ScheduleConfig(name="gpipe"),
        optimizer=OptimizerConfig(name=OptimizerName.NADAMW),
        scaling=ScalingConfig(num_devices=3),
        cluster=ClusterConfig(dashboard=False),
        run=RunConfig(num_updates=7),
        adaptation=AdaptationConfig(enabled=True),
        communication=CommunicationConfig(exact=False),
        failure=FailureConfig(max_failures=1),
    )
    default = TrainConfig(model=ModelConfig(function="a:b"), data=DataConfig(path=""))
    different = {part.name: getattr(config, part.name) != getattr(default, part.name) for part in fields(TrainConfig)}
    assert different == {**dict.fromkeys(different, True), "plan": False}, "a new part of the configuration belongs in this test"
    assert all(getattr(config.model, part.name) != getattr(default.model, part.name) for part in fields(ModelConfig))
    assert Trainer.of(config).config == config


@pytest.mark.parametrize(
    ("num_updates", "problem"), [(0, "expected a number >= 1, got 0"), (10**12, "expected a number <= 10,000,000, got 1000000000000")]
)
def test_a_run_has_some_updates_and_not_endlessly_many(num_updates: int, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        RunConfig(num_updates=num_updates)


def test_the_final_learning_rate_is_a_tenth_of_the_highest_if_nothing_is_said() -> None:
    config = OptimizerConfig(learning_rate=2e-5, warmup_updates=2)
    rates = [config.rate(update, num_updates=12) for update in range(12)]
    assert max(rates) == pytest.approx(2e-5)
    assert rates[-1] == pytest.approx(2e-6)
    assert OptimizerConfig(learning_rate=2e-5, final_learning_rate=0.0, warmup_updates=2).rate(11, num_updates=12) < 1e-20


def test_a_run_with_batches_of_its_own_has_no_token_file() -> None:
    with pytest.raises(ConfigError, match=r"data.path names no file, and data.train no function; set one, or start the run from Python"):
        _ = DataConfig(path="").file


def test_every_public_name_is_there() -> None:
    assert all(getattr(raypipe, name).__name__ == name for name in raypipe.__all__)
