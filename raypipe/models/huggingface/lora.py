"""Low-rank adapters of PEFT on the layers of a pipeline (Hu et al., 2021, arXiv:2106.09685)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from raypipe.errors import ConfigError, suggestion

ADAPTER = "default"
"""PEFT's name of an adapter that has none."""
_WHOLE_MODEL = ("modules_to_save", "trainable_token_indices", "layer_replication")


@dataclass(frozen=True)
class Lora:
    """The adapters of a model, as PEFT describes them; `settings` is a `peft.LoraConfig`."""

    settings: Any

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Lora:
        """Return the adapters of the options.

        Raises:
            ConfigError: PEFT is not installed, or refuses the options.
        """
        peft = library()
        known = list(peft.LoraConfig.__dataclass_fields__)
        for name in options:
            if name not in known:
                raise ConfigError(f"model.options.lora: PEFT's LoraConfig has no {name!r}{suggestion(name, known)}")
            if name in _WHOLE_MODEL:
                raise ConfigError(f"model.options.lora: {name} changes more than adapters, which a pipeline does not take; leave it out")
        try:
            return cls(peft.LoraConfig(**options))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model.options.lora: PEFT refuses it: {error}") from error

    def check(self, skeleton: Any) -> None:
        """Refuse adapters that fit no module of a model, and complete what PEFT knows of it; raises `ConfigError`."""
        from peft import utils  # noqa: PLC0415  # an extra
        from transformers.pytorch_utils import Conv1D  # noqa: PLC0415  # an extra

        kind, usual = skeleton.config.model_type, utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        if self.settings.target_modules is None:
            if kind not in usual:
                raise ConfigError(f"model.options.lora: PEFT does not know where adapters of {kind!r} go; name them in target_modules")
            self.settings.target_modules = set(usual[kind])
        if self.settings.target_modules == "all-linear":  # of the whole model: PEFT would look at one layer at a time
            head = skeleton.get_output_embeddings()
            linear = {name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head}
            self.settings.target_modules = {name.rpartition(".")[2] for name in linear}
        if not self._targets(skeleton):
            names = sorted({name.rpartition(".")[2] for name, module in skeleton.named_modules() if not any(module.children())})
            raise ConfigError(f"model.options.lora.target_modules fits no module of {kind!r}; its modules are {', '.join(names)}")
        try:
            self.insert(copy.deepcopy(skeleton))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"model.options.lora: PEFT refuses it: {error}") from error

    def _targets(self, model: Any) -> bool:
        from peft.tuners.tuners_utils import check_target_module_exists  # noqa: PLC0415  # an extra

        return any(name and check_target_module_exists(self.settings, name) for name, _ in model.named_modules())

    def insert(self, model: Any) -> None:
        """Add adapters to those modules that a model has, and freeze all other weights."""
        peft = library()
        model.requires_grad_(False)
        if self._targets(model):
            peft.inject_adapter_in_model(self.settings, model, adapter_name=ADAPTER)

    @staticmethod
    def is_adapter(name: str) -> bool:
        """Return whether a weight of a layer is one of an adapter."""
        return f".{ADAPTER}" in name

    @staticmethod
    def original_name(name: str) -> str:
        """Return the name that a frozen weight has in a model without adapters."""
        return name.replace(".base_layer.", ".")

    def around(self, model: Any, weights: Mapping[str, Tensor]) -> Any:
        """Return a model with these adapters, as PEFT has it.

        Raises:
            ConfigError: The adapters are of another model.
        """
        peft = library()
        wrapped = peft.get_peft_model(model, self.settings)
        inner = wrapped.base_model.model
        expected = {name for name in inner.state_dict() if self.is_adapter(name)}
        if expected != weights.keys():
            name = min(expected ^ weights.keys())
            raise ConfigError(
                f"the adapters of the checkpoint and of model.options.lora differ in {name!r}; was the configuration changed?"
            )
        inner.load_state_dict(dict(weights), strict=False)
        return wrapped.eval()


def library() -> Any:
    """Return the module `peft`; raise `ConfigError` if the extra is not installed."""
    try:
        import peft  # noqa: PLC0415  # an extra, which takes seconds to load
    except ImportError as error:
        raise ConfigError(f"model.options.lora needs PEFT: pip install 'raypipe[hf]' ({error})") from error
    return peft
