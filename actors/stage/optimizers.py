"""The optimizer of a stage, as a configuration describes it.

A weight belongs to the first group of the configuration that matches its full name, or to none. All weights with one optimizer and one
set of options make one torch optimizer; several of them step as one (`JoinedOptimizer`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from raypipe.actors.stage.joined_optimizer import JoinedOptimizer
from raypipe.actors.stage.late_gradients import LateGradients
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.actors.stage.optimizer_names import OptimizerFunction, OptimizerSpec, optimizer_spec
from raypipe.actors.stage.row_steps import STEPS_NUMBERS
from raypipe.actors.stage.weights import RATE_FACTOR
from raypipe.config import OptimizerConfig, OptimizerName, WeightGroup
from raypipe.errors import ConfigError, suggestion

_NUM_MATRIX_DIMENSIONS = 2
_NUM_SHOWN = 8
_OF_WEIGHTS = frozenset({"params", "param_names", "lr"})


@dataclass(frozen=True)
class _Treatment:
    """How a weight is stepped; `decay` is for weights of any shape, `None` for the optimizer's own and by dimensions."""

    spec: OptimizerSpec
    options: Mapping[str, Any]
    factor: float
    decay: float | None
    is_of_group: bool
    """Whether a group names the optimizer."""


class _Treatments:
    """The treatment of each weight."""

    def __init__(self, config: OptimizerConfig, function: OptimizerFunction | None) -> None:
        self._config = config
        self._own = optimizer_spec(config.name, function)
        self._groups = [(group, self._of(group)) for group in config.groups]
        self._rest = self._of(None)

    def of(self, name: str, weight: nn.Parameter, *, is_outer: bool) -> _Treatment:
        """Return the treatment of a weight."""
        group, (treatment, others) = next(((group, pair) for group, pair in self._groups if _matches(group, name)), (None, self._rest))
        names_optimizer = group is not None and group.optimizer is not None
        # A group that names Muon means it, for embeddings, too.
        is_matrix = weight.dim() == _NUM_MATRIX_DIMENSIONS and (names_optimizer or not is_outer)
        return treatment if others is None or is_matrix else others

    def _of(self, group: WeightGroup | None) -> tuple[_Treatment, _Treatment | None]:
        config = self._config
        where, options = "optimizer.options", config.options
        spec = self._own
        if group is not None:
            where = f"optimizer.groups[{config.groups.index(group)}].options"
            options = group.options if group.optimizer else options | group.options
            spec = optimizer_spec(group.optimizer) if group.optimizer else spec
        factor = 1.0 if group is None else group.learning_rate_factor
        decay = None if group is None else group.weight_decay
        is_of_group = group is not None and group.optimizer is not None
        arguments = spec.arguments(options, config, where=where, is_of_group=is_of_group)
        treatment = _Treatment(spec, arguments, factor, decay, is_of_group)
        if not spec.is_for_matrices_only:
            return treatment, None
        # AdamW steps what Muon does not; the configuration's betas are its own.
        adamw = optimizer_spec(OptimizerName.ADAMW)
        return treatment, dataclasses.replace(treatment, spec=adamw, options=adamw.arguments({}, config, where=where))


def _matches(group: WeightGroup, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in group.weights)


def build_optimizer(
    config: OptimizerConfig, weights: Iterable[tuple[str, nn.Parameter]], *, function: OptimizerFunction | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of some weights, given with their full names.

    Args:
        config: Optimizer, options and groups.
        weights: Full name of each weight, and the weight.
        function: Makes the optimizer, in place of what `config.name` names.

    Raises:
        ConfigError: There is no such optimizer or option, or the optimizer refuses the weights.
    """
    treatments = _Treatments(config, function)
    weights = weights if isinstance(weights, NamedWeights) else NamedWeights(weights)
    parts: dict[tuple[str, str], tuple[_Treatment, dict[tuple[float, float | None], list[tuple[str, nn.Parameter]]]]] = {}
    # Matrices before vectors, so that an optimizer has them in groups.
    for name, weight in sorted(weights, key=lambda pair: pair[1].dim() < _NUM_MATRIX_DIMENSIONS):
        treatment = treatments.of(name, weight, is_outer=name in weights.outer)
        key = (treatment.spec.name, repr(sorted(treatment.options.items())))
        _, groups = parts.setdefault(key, (treatment, defaultdict(list)))
        groups[treatment.factor, _decay(treatment, weight, config)].append((name, weight))
    made = [_made(treatment, groups, config) for treatment, groups in parts.values()]
    joined = made[0] if len(made) == 1 else JoinedOptimizer(made)
    if config.lookahead or config.gradient_correction:
        return LateGradients(joined, lookahead=config.lookahead, gradient_correction=config.gradient_correction)
    return joined


def _decay(treatment: _Treatment, weight: nn.Parameter, config: OptimizerConfig) -> float | None:
    if treatment.decay is not None:
        return treatment.spec.weight_decay(treatment.decay, where="optimizer.groups")
    own = treatment.spec.weight_decay(config.weight_decay, where="optimizer.weight_decay", is_needed=not treatment.is_of_group)
    return own if own is None or weight.dim() >= _NUM_MATRIX_DIMENSIONS else 0.0


def _made(
    treatment: _Treatment, groups: Mapping[tuple[float, float | None], list[tuple[str, nn.Parameter]]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    param_groups: list[dict[str, Any]] = []
    for (factor, decay), members in groups.items():
        param_groups.append({"params": members} | ({} if decay is None else {"weight_decay": decay}))
        if factor != 1.0:
            param_groups[-1][RATE_FACTOR] = factor
    weights = [weight for members in groups.values() for _, weight in members]
    return treatment.spec.make(param_groups, weights, treatment.options, learning_rate=config.learning_rate)


def described(optimizer: torch.optim.Optimizer) -> str:
    """Return text that is equal for optimizers that take equally long and keep equally much of equal weights."""
    match optimizer:
        case LateGradients():
            return f"late({optimizer.lookahead:g}, {optimizer.gradient_correction:g}) {described(optimizer.inner)}"
        case JoinedOptimizer():
            return " + ".join(described(part) for part in optimizer.parts)
    groups = [
        (sorted((key, repr(value)) for key, value in group.items() if key not in _OF_WEIGHTS), [tuple(w.shape) for w in group["params"]])
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}{groups}"


def kinds_of(optimizer: torch.optim.Optimizer) -> list[type[torch.optim.Optimizer]]:
    """Return the classes whose code steps the weights of an optimizer."""
    match optimizer:
        case LateGradients():
            return [LateGradients, *kinds_of(optimizer.inner)]
        case JoinedOptimizer():
            return [kind for part in optimizer.parts for kind in kinds_of(part)]
    return [type(optimizer)]


def check_optimizer(config: OptimizerConfig, *, function: OptimizerFunction | None = None) -> None:
    """Refuse an optimizer that cannot be, before any device is asked for.

    Optimizers of torch are tried on two small weights; of a user's, names and arguments are checked.

    Raises:
        ConfigError: There is no such optimizer, option or curve of the rate, a value is out of range, or it cannot train a pipeline.
    """
    config.rate(0, num_updates=1)
    specs = [optimizer_spec(config.name, function), *(optimizer_spec(group.optimizer) for group in config.groups if group.optimizer)]
    _Treatments(config, function)
    if any(spec.is_own for spec in specs):
        return
    # Each group has a matrix and a vector, by a name that its pattern matches.
    for group in (None, *config.groups):
        one = dataclasses.replace(config, groups=() if group is None else (dataclasses.replace(group, weights=("*",)),))
        needs_matrix = group is not None and group.optimizer is not None and not optimizer_spec(group.optimizer).is_general
        weights = [("layer.matrix", nn.Parameter(torch.ones(2, 2))), ("layer.vector", nn.Parameter(torch.ones(2)))]
        optimizer = build_optimizer(one, weights[:1] if needs_matrix or not specs[0].is_general else weights)
        for _, weight in weights:
            weight.grad = torch.ones_like(weight)
        try:
            optimizer.step()
        except Exception as error:
            name = config.name if group is None else group.optimizer or config.name
            raise ConfigError(f"optimizer.name {name!r} cannot make a step: {type(error).__name__}: {error}") from error


def late_rows_refusal(config: OptimizerConfig, *, function: OptimizerFunction | None = None) -> str:
    """Return why all rows of looked-up weights must be stepped together; empty if some may be behind others."""
    if config.max_grad_norm is not None:
        return "optimizer.max_grad_norm limits a norm that takes the gradients of all rows"
    own = optimizer_spec(config.name, function)
    # Muon leaves what is looked up to AdamW, unless a group says otherwise.
    specs = [optimizer_spec(OptimizerName.ADAMW) if own.is_for_matrices_only else own]
    specs += [optimizer_spec(group.optimizer) for group in config.groups if group.optimizer]
    unknown = [spec.name for spec in specs if spec.is_own or spec.function not in STEPS_NUMBERS]
    return f"{unknown[0]} is not known to step each number by its own gradient and state" if unknown else ""


def check_patterns(config: OptimizerConfig, names: Iterable[str]) -> None:
    """Refuse a pattern that gets no weight; `names` are the full names of all trained weights of the model.

    Raises:
        ConfigError: Names the pattern, and a weight that may have been meant.
    """
    names = list(dict.fromkeys(names))
    left = names
    for number, group in enumerate(config.groups):
        for pattern in group.weights:
            if any(fnmatchcase(name, pattern) for name in left):
                continue
            earlier = ": earlier groups have all that it matches" if any(fnmatchcase(name, pattern) for name in names) else ""
            near = suggestion(pattern, names) or f"; there are {', '.join(names[:_NUM_SHOWN])}{' ...' if len(names) > _NUM_SHOWN else ''}"
            raise ConfigError(f"optimizer.groups[{number}].weights: {pattern!r} gets no trained weight{earlier or near}")
        left = [name for name in left if not _matches(group, name)]
