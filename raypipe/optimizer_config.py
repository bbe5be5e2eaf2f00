"""The sections of a configuration about the optimizer and its groups of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raypipe.artifacts.record import invalid, record
from raypipe.errors import ConfigError
from raypipe.learning_rates import LearningRateSchedule, check_curve, learning_rate
from raypipe.user_code import IN_PYTHON


class OptimizerName(StrEnum):
    """The optimizers that have defaults of raypipe's own. `OptimizerConfig.name` takes all of `torch.optim` besides."""

    ADAMW = "adamw"
    """Loshchilov and Hutter 2019, arXiv 1711.05101."""
    NADAMW = "nadamw"
    """AdamW with Nesterov momentum (Dozat 2016), which makes up for late gradients."""
    MUON = "muon"
    """Orthogonalized momentum for the matrices between embeddings and last layer (Jordan et al. 2024), AdamW for all else."""


Decay = Annotated[float, Field(ge=0, lt=1)]
_STATE_OPTIONS = ("amsgrad", "centered", "momentum")  # of torch's optimizers, those that decide what state a weight has


@record()
class WeightGroup:
    """Weights that the optimizer treats in a way of their own. A weight belongs to the first group that one of its patterns matches.

    Attributes:
        weights: Patterns of full names, `layer.weight` with `*`, `?` and `[...]`, such as `embedding.*` or `*norm.weight`. Each must match
            a weight that no earlier group has.
        optimizer: Optimizer of these weights, as `optimizer.name`; left out for that of the other weights.
        learning_rate_factor: Factor of the learning rate.
        weight_decay: Weight decay of all these weights, whatever their dimensions; left out for the rule of the other weights.
        options: Options of these weights' optimizer, in place of those of the same name in `optimizer.options`.
    """

    weights: Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"expected": "a list of one pattern or more"})]
    optimizer: str | None = None
    learning_rate_factor: NonNegativeFloat = 1.0
    weight_decay: NonNegativeFloat | None = None
    options: dict[str, Any] = field(default_factory=dict)


@record()
class OptimizerConfig:
    """The optimizer and its learning rate, which rises to the highest in a straight line and then follows a curve.

    Attributes:
        name: `adamw`, `nadamw` or `muon`; any class of `torch.optim`, such as `sgd` or `torch.optim.AdamW`, with torch's own defaults; or
            your own: `module:Class` or `path/to/file.py:function`.
        options: Further arguments of the optimizer.
        groups: Weights that are treated in another way.
        learning_rate: Highest learning rate.
        final_learning_rate: Learning rate of the last update; left out for a tenth of the highest.
        learning_rate_schedule: Curve after the warm-up: `cosine`, `linear` or `wsd`, which end at the final rate, `constant`, or your own
            function, `module:function`, of update and number of updates, which returns the factor of the highest rate.
        warmup_updates: Updates until the highest learning rate.
        decay_updates: Updates in which `wsd` goes down to the final rate; left out for a fifth of the run.
        beta1: Decay of the first moment; left out for the optimizer's own, which is 0.9 for `adamw`, `nadamw` and `muon`.
        beta2: Decay of the second moment; left out for the optimizer's own, which is 0.95 for `adamw`, `nadamw` and `muon`.
        epsilon: Number added to the root of the second moment; left out for the optimizer's own, which is 1e-8 as a rule.
        weight_decay: Weight decay of all weights with two dimensions or more; left out for the optimizer's own, which is 0.1 for `adamw`,
            `nadamw` and `muon`.
        max_grad_norm: Norm to which gradients are clipped, over the scope of the update; `null` for no limit.
        lookahead: Updates by which the weights stand ahead of the optimizer, along its last step, for each update by which a stage's
            gradients are late on average.
        gradient_correction: Factor of the difference to the last gradient, which is added to each gradient, for each update by which a
            stage's gradients are late on average.
    """

    name: str = OptimizerName.ADAMW.value
    options: dict[str, Any] = field(default_factory=dict)
    groups: tuple[WeightGroup, ...] = ()
    learning_rate: NonNegativeFloat = 1e-3
    final_learning_rate: NonNegativeFloat | None = None
    learning_rate_schedule: str = LearningRateSchedule.COSINE.value
    warmup_updates: NonNegativeInt = 20
    decay_updates: PositiveInt | None = None
    beta1: Decay | None = None
    beta2: Decay | None = None
    epsilon: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    max_grad_norm: PositiveFloat | None = 1.0
    lookahead: NonNegativeFloat = 0.0
    gradient_correction: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        try:
            check_curve(self.learning_rate_schedule)
        except ConfigError as error:
            raise invalid(self, "learning_rate_schedule", str(error)) from None

    def rate(self, update: int, *, num_updates: int) -> float:
        """Return the learning rate of an update, counted from 0.

        Raises:
            ConfigError: There is no such function as `learning_rate_schedule` names, or it returns no rate.
        """
        return learning_rate(
            update,
            name=self.learning_rate_schedule,
            highest=self.learning_rate,
            final=self.learning_rate / 10 if self.final_learning_rate is None else self.final_learning_rate,
            num_updates=num_updates,
            warmup_updates=self.warmup_updates,
            decay_updates=self.decay_updates,
        )

    @property
    def state_kind(self) -> str:
        """What state the weights have, in text, such as `adamw(amsgrad)`; with what groups have besides, behind semicolons.

        A checkpoint can be gone on from by a configuration with the same text.
        """
        parts = [_state_kind(self.name, self.options)]
        for group in self.groups:
            options = group.options if group.optimizer else self.options | group.options
            kind = _state_kind(group.optimizer or self.name, options)
            # Groups change the state only by another optimizer, and by taking weights from a later group that does.
            parts.append(f"{', '.join(group.weights)}: {kind}")
        first, *others = parts
        while others and others[-1].endswith(f": {first}"):
            others.pop()
        return "; ".join([first, *others])


def _state_kind(name: str, options: Mapping[str, Any]) -> str:
    switched_on = [option for option in _STATE_OPTIONS if options.get(option)]
    name = name.removeprefix(IN_PYTHON) if ":" in name else name.lower()
    return f"{name}({', '.join(switched_on)})" if switched_on else name
