"""What a driver program may write into a configuration."""

from enum import StrEnum
from typing import Any

import pytest

from raypipe.config import ModelConfig, OptimizerConfig, OptimizerName, Precision, ScalingConfig, ScheduleConfig, Transport
from raypipe.errors import FormatError
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
    with pytest.raises(FormatError, match=r"ScheduleConfig: max_mean_staleness: expected a finite number >= 0, got -0.5"):
        ScheduleConfig(max_mean_staleness=-0.5)
