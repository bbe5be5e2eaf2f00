"""What names of optimizers mean, and which options each takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from raypipe.config import OptimizerConfig, OptimizerName
from raypipe.errors import ConfigError, RaypipeError, UnknownNameError, suggestion
from raypipe.user_code import name_of, named

OptimizerFunction = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or a function that makes one: `function(groups, lr=..., **options)`, with groups as those of torch take them."""

_SET_BY_RAYPIPE = {"params": "", "lr": "set optimizer.learning_rate", "differentiable": "raypipe does not differentiate updates"}
_REFUSED = {
    "LBFGS": "it evaluates the loss several times in a step, which a pipeline cannot",
    "SparseAdam": "it takes sparse gradients only, and those of stages are dense",
}
_PREFIX = "torch.optim."
_MOMENTUM_DECAY = 1e9
"""Momentum decay with which NAdam uses `beta1` from the first update on; with torch's default it starts at half of `beta1`."""
_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by name.

    Attributes:
        name: Name in the configuration.
        function: Makes it from groups of weights.
        defaults: Arguments where the configuration says nothing, in place of the function's defaults.
        is_own: Whether it is the user's.
        is_for_matrices_only: Whether AdamW steps all weights that are not matrices.
    """

    name: str
    function: OptimizerFunction
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = False
    is_for_matrices_only: bool = False

    @property
    def is_general(self) -> bool:
        """Whether it steps weights of any shape."""
        return self.is_for_matrices_only or self.function is not torch.optim.Muon

    @functools.cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        parameters = inspect.signature(self.function).parameters
        if not parameters:
            raise ConfigError(f"optimizer.name {self.name!r} takes no arguments; its first must be the weights, as with torch.optim.SGD")
        return parameters

    @property
    def _takes_any(self) -> bool:
        return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self._parameters.values())

    def _takes(self, option: str) -> bool:
        return self._takes_any or option in self._parameters

    def _default(self, option: str) -> Any:
        parameter = self._parameters.get(option)
        default = None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
        return self.defaults.get(option, default)

    @property
    def options(self) -> list[str]:
        """Names of the options that a configuration may give."""
        _, *names = self._parameters
        return [
            name
            for name in names
            if name not in _SET_BY_RAYPIPE
            and self._parameters[name].kind not in {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
        ]

    def arguments(self, options: Mapping[str, Any], config: OptimizerConfig, *, where: str, is_of_group: bool = False) -> dict[str, Any]:
        """Return the arguments, but for weights, learning rate and weight decay; `where` names the key that holds the options.

        The optimizer of a group takes the betas and the epsilon of the configuration where it has such options and its own do not say else.

        Raises:
            ConfigError: It takes no such option, or a key of the configuration that it does not take is set.
        """
        for option in options:
            if option in _SET_BY_RAYPIPE or option == "weight_decay":
                remedy = _SET_BY_RAYPIPE.get(option) or "set optimizer.weight_decay, or that of a group"
                raise ConfigError(f"{where}: {option!r} is not for {self.name} to be told here; {remedy}")
            if not self._takes_any and option not in self.options:
                known = suggestion(option, self.options) or f"; its options are {', '.join(self.options) or 'none'}"
                raise ConfigError(f"{where}: {self.name} takes no {option!r}{known}")
        arguments = {name: value for name, value in self.defaults.items() if name != "weight_decay"}
        arguments |= {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        if not self.is_for_matrices_only:  # otherwise these keys are AdamW's
            values = self._of_keys(config)
            if is_of_group:
                values = {option: value for option, value in values.items() if self._takes(option) and option not in options}
            elif config.beta1 is not None or config.beta2 is not None:
                self._check_key("beta1" if config.beta1 is not None else "beta2", "betas", options)
            if not is_of_group and config.epsilon is not None:
                self._check_key("epsilon", "eps", options)
            arguments |= values
        return arguments

    def _of_keys(self, config: OptimizerConfig) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if config.beta1 is not None or config.beta2 is not None:
            first, second = self._default("betas") or (0.9, 0.999)
            values["betas"] = (first if config.beta1 is None else config.beta1, second if config.beta2 is None else config.beta2)
        if config.epsilon is not None:
            values["eps"] = config.epsilon
        return values

    def _check_key(self, key: str, option: str, options: Mapping[str, Any]) -> None:
        if option in options:
            raise ConfigError(f"optimizer.{key} and the option {option!r} say the same; leave one of them out")
        if not self._takes(option):
            names = ", ".join(self.options) or "none"
            raise ConfigError(f"optimizer.{key}: {self.name} has nothing like that; leave it out. Its options are {names}")

    def weight_decay(self, configured: float | None, *, where: str, is_needed: bool = True) -> float | None:
        """Return the configured weight decay, or else its own; `None` for an optimizer without one.

        Raises:
            ConfigError: A weight decay is configured and needed, and the optimizer has none.
        """
        if not self._takes("weight_decay"):
            if configured and is_needed:
                raise ConfigError(f"{where}: {self.name} has no weight decay; leave it out")
            return None
        own = self._default("weight_decay") if configured is None else configured
        return None if own is None else float(own)

    def make(
        self,
        groups: list[dict[str, Any]],
        weights: Sequence[nn.Parameter],
        options: Mapping[str, Any],
        *,
        learning_rate: float,
    ) -> torch.optim.Optimizer:
        """Return the optimizer of groups of weights.

        Raises:
            ConfigError: It refuses the weights or an option, or is none that a pipeline can use.
        """
        arguments = dict(options)
        if self._takes("lr"):
            arguments["lr"] = learning_rate
        if self.name == OptimizerName.ADAMW:  # there is no fused kernel for complex weights
            arguments.setdefault("fused", all(weight.is_floating_point() for weight in weights) and not arguments.get("foreach"))
        try:
            made: object = self.function(groups, **arguments)
        except RaypipeError:
            raise
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            raise ConfigError(f"optimizer.name {self.name!r} with {given}: {type(error).__name__}: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer.name {self.name!r} made a {type(made).__name__}, expected a torch.optim.Optimizer")
        _check_refused(made, self.name)
        stepped = {id(weight) for group in made.param_groups for weight in group["params"]}
        if stepped != {id(weight) for weight in weights}:
            raise ConfigError(f"optimizer.name {self.name!r} steps others than the {len(weights)} weights that it was given; pass all on")
        return made


def _check_refused(optimizer: torch.optim.Optimizer, name: str) -> None:
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, getattr(torch.optim, kind)):
            raise ConfigError(f"optimizer.name {name!r} cannot train a pipeline: {reason}; choose another, such as adamw")


_BUNDLED = {
    spec.name: spec
    for spec in (
        OptimizerSpec(OptimizerName.ADAMW.value, torch.optim.AdamW, _ADAM),
        OptimizerSpec(
            OptimizerName.NADAMW.value,
            torch.optim.NAdam,
            {**_ADAM, "momentum_decay": _MOMENTUM_DECAY, "decoupled_weight_decay": True},
        ),
        OptimizerSpec(
            OptimizerName.MUON.value,
            torch.optim.Muon,
            {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"},
            is_for_matrices_only=True,
        ),
    )
}


def optimizer_spec(name: str, function: OptimizerFunction | None = None) -> OptimizerSpec:
    """Return the optimizer of this name; with a function, that one.

    Raises:
        ConfigError: It cannot be used: says why.
        UnknownNameError: There is none: lists those of torch.
    """
    if function is not None:
        return OptimizerSpec(name_of(function), function, is_own=True)
    if name.lower() in _BUNDLED:
        return _BUNDLED[name.lower()]
    if ":" in name:
        found = named(name, what="optimizer.name", such_as="my_optimizers:Lion")
        if not callable(found):
            raise ConfigError(f"optimizer.name {name!r}: expected a class or a function, got {type(found).__name__}")
        return OptimizerSpec(name, found, is_own=True)
    classes = _classes()
    cls = classes.get(name.removeprefix(_PREFIX).lower())
    if cls is None:
        choices = [*_BUNDLED, *(known for known in classes if known not in _BUNDLED and classes[known].__name__ not in _REFUSED)]
        raise UnknownNameError("optimizer", name, choices)
    if cls.__name__ in _REFUSED:
        raise ConfigError(f"optimizer.name {name!r} cannot train a pipeline: {_REFUSED[cls.__name__]}; choose another, such as adamw")
    return OptimizerSpec(name, cls)


@functools.cache
def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    found = vars(torch.optim).values()
    return {
        cls.__name__.lower(): cls
        for cls in found
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
