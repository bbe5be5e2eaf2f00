"""The function behind `hf:PATH`: a language model of Hugging Face transformers as a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raypipe.errors import ConfigError, UnknownNameError
from raypipe.model import Layer, Model, Tie
from raypipe.models.huggingface.layers import FIELDS, LayerMaker, quiet
from raypipe.models.huggingface.lora import Lora
from raypipe.models.huggingface.losses import AHEAD, mean_over_targets, num_targets
from raypipe.models.huggingface.parts import Parts, parts_of
from raypipe.models.huggingface.source import Source, class_of, dtype_of, library


@dataclass(frozen=True)
class Described:
    """What is known of a model before its weights are read.

    Attributes:
        source: Where it comes from.
        config: Its configuration, with the values that the options change.
        kind: The class of the whole model.
        head: `causal-lm` or `masked-lm`.
        skeleton: The whole model without memory for its weights.
        parts: Which modules belong to which layer.
        dtype: Type of the weights that the optimizer steps.
        lora: The adapters that are trained in place of the weights; `None` to train the weights.
    """

    source: Source
    config: Any
    kind: Any
    head: str
    skeleton: Any
    parts: Parts
    dtype: torch.dtype
    lora: Lora | None

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Return the weights that layers share."""
        groups: dict[str, list[str]] = {}
        for target, origin in self.skeleton.all_tied_weights_keys.items():
            groups.setdefault(origin, [origin]).append(target)
        ties: list[Tie] = []
        for names in groups.values():
            placed = [(layer, name) for name in names if (layer := self.parts.layer_of(name)) is not None]
            if len({layer for layer, _ in placed}) > 1:
                ties.append(tuple(sorted(placed, key=lambda tied: self.parts.layers.index(tied[0]))))
        return tuple(ties)


def describe(
    path: str,
    *,
    dtype: str = "float32",
    attention: str | None = None,
    config: Mapping[str, Any] | None = None,
    head: str = "auto",
    revision: str | None = None,
    lora: Mapping[str, Any] | None = None,
) -> Described:
    """Return what is known of a model before its weights are read; arguments and errors are those of `huggingface`."""
    source = Source(path, revision)
    settings = source.config(config or {})
    kind, head = class_of(settings, head)
    skeleton = _skeleton(kind, settings, attention)
    adapters = None if lora is None else Lora.of(lora)
    if adapters is not None:
        adapters.check(skeleton)
    return Described(source, settings, kind, head, skeleton, parts_of(skeleton), dtype_of(dtype, settings), adapters)


def huggingface(
    path: str,
    *,
    weights: str = "pretrained",
    dtype: str = "float32",
    attention: str | None = None,
    config: Mapping[str, Any] | None = None,
    head: str = "auto",
    revision: str | None = None,
    lora: Mapping[str, Any] | None = None,
) -> Model:
    """Return a language model of transformers, cut at its blocks: `embedding`, `block-0`, `block-1`, ..., `head`.

    Layers run the forward of the model's own class, and their weights have the names that they have there. Batches have the fields
    `input_ids` and `labels`, as the model takes them, or `tokens` and `targets` of a token file; where they have `attention_mask`,
    `position_ids` or `token_type_ids`, the model takes these, too. The loss is the mean over the labels that are not -100.

    Args:
        path: Folder that `save_pretrained` or `raypipe export` wrote, or a name on the Hub. Every node must be able to read it.
        weights: `pretrained` for those of `path`, or `random` for the model's own initialization from the run's seed.
        dtype: Type of the weights that the optimizer steps: float32, bfloat16, float16, float64, or `auto` for that of the configuration.
        attention: Implementation of attention, such as `sdpa` or `eager`; left out for transformers' choice.
        config: Values of the model's configuration to change, such as `{"num_hidden_layers": 4}`.
        head: `causal-lm`, `masked-lm`, or `auto` for that of the configuration.
        revision: Version of the model on the Hub.
        lora: Arguments of PEFT's `LoraConfig`, such as `{"r": 8, "target_modules": ["q_proj", "v_proj"]}`: adapters are trained, and
            all other weights stay as they are. Left out to train all weights.

    Raises:
        ConfigError: There is no such model, it has no pipeline plan, or an option is unknown.
    """
    if weights not in {"pretrained", "random"}:
        raise UnknownNameError("source of weights", weights, ("pretrained", "random"))
    described = describe(path, dtype=dtype, attention=attention, config=config, head=head, revision=revision, lora=lora)
    if weights == "pretrained":
        described.source.check_weights()
    ahead = AHEAD[described.head]
    make = LayerMaker(
        described.kind,
        described.skeleton.config,
        described.parts,
        source=described.source if weights == "pretrained" else None,
        dtype=described.dtype,
        lora=described.lora,
    )
    return Model(
        layers=tuple(Layer(name, partial(make, name), batch_if_present=FIELDS) for name in described.parts.layers),
        loss=partial(mean_over_targets, ahead=ahead),
        loss_weight=partial(num_targets, ahead=ahead),
        ties=described.ties,
        needs=(("input_ids", "tokens"), ("labels", "targets")),
        vocabulary_size=described.config.get_text_config().vocab_size,
    )


def _skeleton(kind: Any, config: Any, attention: str | None) -> Any:
    config = copy.deepcopy(config)
    config.use_cache = False  # of earlier keys and values, which training has no use for
    with quiet(library()), torch.device("meta"):
        try:
            if attention is not None:
                config._attn_implementation = attention
            return kind(config)
        except (ValueError, TypeError, KeyError, ImportError) as error:
            raise ConfigError(f"{kind.__name__} cannot be made with this configuration: {error}; check model.options") from error
