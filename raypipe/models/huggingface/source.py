"""Where a transformers model comes from: a folder or a name on the Hugging Face Hub, and what its configuration says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe.errors import ConfigError, UnknownNameError, suggestion
from raypipe.models.huggingface.parts import has_towers

CAUSAL, MASKED, PAIRS = "causal-lm", "masked-lm", "contrastive"
_HEADS = {
    CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING",
    MASKED: "MODEL_FOR_MASKED_LM_MAPPING",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    PAIRS: "MODEL_MAPPING",
}
"""Heads, and transformers' tables of the models that have them; a pair of towers is its own head."""
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def library() -> Any:
    """Return the module `transformers`; raise `ConfigError` if the extra is not installed."""
    try:
        import transformers  # noqa: PLC0415  # an extra, which takes seconds to load
    except ImportError as error:
        raise ConfigError(f"models of Hugging Face need the extra hf: pip install 'raypipe[hf]' ({error})") from error
    return transformers


@dataclass(frozen=True)
class Source:
    """A model by its folder or its name on the Hub.

    Attributes:
        path: Folder, or name on the Hub.
        revision: Version on the Hub.
    """

    path: str
    revision: str | None = None

    @property
    def is_folder(self) -> bool:
        """Return whether the model lies in a folder of this machine."""
        return os.path.isdir(os.path.expanduser(self.path))

    @property
    def name(self) -> str:
        """Return the folder as an absolute path, or the name."""
        return os.path.abspath(os.path.expanduser(self.path)) if self.is_folder else self.path

    def config(self, changes: Mapping[str, Any]) -> Any:
        """Return the configuration of the model with some values changed.

        Raises:
            ConfigError: There is none, transformers does not know the model, or it has no such value.
        """
        transformers = library()
        self._check_folder()
        try:
            config = transformers.AutoConfig.from_pretrained(self.name, revision=self.revision, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            absent = "" if self.is_folder else f", and there is no folder {os.path.abspath(self.path)}"
            raise ConfigError(
                f"hf:{self.path}: transformers {transformers.__version__} cannot read its configuration ({first}){absent}; name a "
                "folder that `save_pretrained` or `raypipe export` wrote, or a model on the Hub such as HuggingFaceTB/SmolLM2-135M"
            ) from error
        known = [name for name in vars(config) if not name.startswith("_")]
        for name, value in changes.items():
            if name not in known:
                raise ConfigError(f"model.options.config: {config.model_type} has no {name!r}{suggestion(name, known)}")
            try:
                setattr(config, name, value)
            except Exception as error:  # the validators of configurations have errors of their own
                raise ConfigError(f"model.options.config: {config.model_type} refuses {name}={value!r}: {error}") from error
        self._check_supported(config)
        return config

    def check_weights(self) -> None:
        """Refuse a folder without weights; raises `ConfigError`."""
        if self.is_folder and not any(file for pattern in _WEIGHT_FILES for file in Path(self.name).glob(pattern)):
            raise ConfigError(
                f"hf:{self.path}: the folder has no weights (model.safetensors); to train from scratch, set model.options.weights to random"
            )

    def _check_folder(self) -> None:
        looks_local = self.path.startswith((".", "/", "~")) or self.path.count("/") > 1
        if not self.path or (looks_local and not self.is_folder):
            raise ConfigError(f"hf:{self.path}: there is no such folder on this machine ({os.getcwd()}); check the path")
        if self.is_folder and not os.path.isfile(os.path.join(self.name, "config.json")):
            raise ConfigError(f"hf:{self.path}: the folder has no config.json; name one that `save_pretrained` or `raypipe export` wrote")

    def _check_supported(self, config: Any) -> None:
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"hf:{self.path}: its weights are quantized, and cannot be trained; choose the model in its full precision")
        if getattr(config, "output_router_logits", False):
            raise ConfigError(
                f"hf:{self.path}: output_router_logits adds a loss over the experts of all layers, which a pipeline does not take; "
                "set model.options.config.output_router_logits to false"
            )


def class_of(config: Any, head: str) -> tuple[Any, str]:
    """Return the class of the whole model and its head, by `head`: `auto`, or a name.

    Raises:
        ConfigError: transformers has no such class for this model.
    """
    transformers = library()
    if head not in {"auto", *_HEADS}:
        raise UnknownNameError("head", head, ("auto", *_HEADS))
    named = {getattr(transformers, name, None) for name in config.architectures or ()}
    of_towers = [PAIRS] if has_towers(config.model_type) else []
    heads = [*of_towers, *(name for name in _HEADS if name != PAIRS)] if head == "auto" else [head]
    if head == PAIRS and not of_towers:
        heads = []
    found = [(kind, name) for name in heads for kind in _kinds(getattr(transformers, _HEADS[name]).get(type(config), None))]
    if not found:
        raise ConfigError(
            f"transformers' model {config.model_type!r} has no head for {' or '.join(heads or [head])}; raypipe takes language models and "
            "classifiers, and pairs of towers such as clip"
        )
    return next(((kind, name) for kind, name in found if kind in named), found[0])


def _kinds(found: Any) -> tuple[Any, ...]:
    # Some of transformers' tables have several classes for a model.
    return () if found is None else found if isinstance(found, tuple) else (found,)


def dtype_of(name: str, config: Any) -> torch.dtype:
    """Return the type of the weights by its name; `auto` is that of the configuration."""
    if name == "auto":
        stated = config.dtype if config.dtype is not None else torch.float32
        return stated if isinstance(stated, torch.dtype) else dtype_of(str(stated), config)
    if name not in _DTYPES:
        raise UnknownNameError("dtype", name, ("auto", *_DTYPES))
    dtype: torch.dtype = getattr(torch, name)
    return dtype
