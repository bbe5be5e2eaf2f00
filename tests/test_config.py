"""What a driver program may write into a configuration."""

from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import raypipe
from raypipe.config import (
    AdaptationConfig,
    CallbackConfig,
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
    WeightGroup,
)
from raypipe.errors import ConfigError, FormatError
from raypipe.schedules.ir import UpdateScope

NAMES = [
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


def test_text_in_place_of_a_number_is_told_without_the_remedy_of_limits() -> None:
    with pytest.raises(FormatError, match=r"gpus_per_device: expected a number <= 1, got 2; a device is one GPU or a part of it$"):
        ScalingConfig(gpus_per_device=2)
    with pytest.raises(FormatError, match=r"gpus_per_device: .*got 'all'$"):
        ScalingConfig(gpus_per_device="all")  # type: ignore[arg-type]


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
        callbacks=(CallbackConfig(name="csv"),),
    )
    default = TrainConfig(model=ModelConfig(function="a:b"), data=DataConfig(path=""))
    different = {part.name: getattr(config, part.name) != getattr(default, part.name) for part in fields(TrainConfig)}
    assert different == {**dict.fromkeys(different, True), "plan": False}, "a new part of the configuration belongs in this test"
    assert all(getattr(config.model, part.name) != getattr(default.model, part.name) for part in fields(ModelConfig))
    assert Trainer.of(config).config == config


@pytest.mark.parametrize(
    ("num_updates", "problem"),
    [
        (0, "expected a number >= 1, got 0$"),
        (10**12, "expected a number <= 10,000,000, got 1000000000000; a longer run can be resumed$"),
        ("many", "got 'many'$"),
        (4.5, "expected a whole number, got 4.5$"),
    ],
)
def test_a_run_has_some_updates_and_not_endlessly_many(num_updates: Any, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        RunConfig(num_updates=num_updates)


def test_the_final_learning_rate_is_a_tenth_of_the_highest_if_nothing_is_said() -> None:
    config = OptimizerConfig(learning_rate=2e-5, warmup_updates=2)
    rates = [config.rate(update, num_updates=12) for update in range(12)]
    assert max(rates) == pytest.approx(2e-5)
    assert rates[-1] == pytest.approx(2e-6)
    assert OptimizerConfig(learning_rate=2e-5, final_learning_rate=0.0, warmup_updates=2).rate(11, num_updates=12) < 1e-20


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1]),
        (f"{__name__}:stairs", [0.5, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_learning_rates_follow_the_named_curve(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(
        learning_rate=2.0, final_learning_rate=0.2 if schedule != "linear" else 0.0, learning_rate_schedule=schedule, warmup_updates=2,
        decay_updates=3,
    )  # fmt: skip
    rates = [config.rate(update, num_updates=12) / 2 for update in range(12)]
    if schedule == "linear":
        expected = [0.5, 1, *((11 - update) / 9 for update in range(2, 12))]
    assert rates == pytest.approx(expected)


def stairs(update: int, num_updates: int) -> float:
    """Half of the rate in the second half."""
    return 1.0 if update < num_updates / 2 else 0.5


def nowhere(_update: int, _num_updates: int) -> float:
    """No rate."""
    return float("nan")


def test_a_curve_that_is_not_there_or_is_no_rate_is_refused() -> None:
    with pytest.raises(FormatError, match=r"learning_rate_schedule: there is no learning rate schedule 'cosin'; did you mean 'cosine'\?"):
        OptimizerConfig(learning_rate_schedule="cosin")
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate_schedule 'tests.test_config:stair': .* did you mean 'stairs'\?"):
        OptimizerConfig(learning_rate_schedule="tests.test_config:stair").rate(0, num_updates=1)
    with pytest.raises(ConfigError, match=r"returned nan for update 3 of 5"):
        OptimizerConfig(learning_rate_schedule="tests.test_config:nowhere").rate(3, num_updates=5)


def test_no_limit_on_the_norm_is_still_none_when_the_configuration_is_read_back(tmp_path: Path) -> None:
    config = TrainConfig(
        model=ModelConfig(function="a:b"),
        data=DataConfig(path="x"),
        optimizer=OptimizerConfig(
            max_grad_norm=None, options={"foreach": None}, groups=(WeightGroup(weights=("*.bias",), learning_rate_factor=0.5),)
        ),
    )
    config.save(tmp_path / "config.yaml")
    assert TrainConfig.load(tmp_path / "config.yaml") == config


def test_the_kind_of_state_names_what_cannot_be_exchanged() -> None:
    sgd = WeightGroup(weights=("a.*", "b.*"), optimizer="SGD", options={"momentum": 0.9})
    slow = WeightGroup(weights=("*.bias",), learning_rate_factor=0.1)
    assert OptimizerConfig(beta1=0.5, options={"eps": 1e-3}, groups=(slow,)).state_kind == "adamw"
    assert OptimizerConfig(options={"amsgrad": True}).state_kind == "adamw(amsgrad)"
    assert OptimizerConfig(groups=(sgd, slow)).state_kind == "adamw; a.*, b.*: sgd(momentum)"
    assert OptimizerConfig(groups=(slow, sgd)).state_kind == "adamw; *.bias: adamw; a.*, b.*: sgd(momentum)"


def test_a_group_has_a_pattern() -> None:
    with pytest.raises(FormatError, match=r"weights: expected a list of one pattern or more, got \(\)"):
        WeightGroup(weights=())


def test_a_run_with_batches_of_its_own_has_no_token_file() -> None:
    with pytest.raises(ConfigError, match=r"data.path names no file, and data.train no function; set one, or start the run from Python"):
        _ = DataConfig(path="").file


def test_every_public_name_is_there() -> None:
    assert all(getattr(raypipe, name).__name__ == name for name in raypipe.__all__)
