"""The function behind `hf:PATH`: a model of Hugging Face transformers as a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raypipe.errors import ConfigError, UnknownNameError
from raypipe.model import Layer, Model, Tie
from raypipe.models.huggingface.layers import FIELDS, IMAGE, LayerMaker, quiet
from raypipe.models.huggingface.lora import Lora
from raypipe.models.huggingface.losses import AHEAD, contrastive, mean_over_targets, num_targets
from raypipe.models.huggingface.parts import HEAD, Parts, Tower, parts_of
from raypipe.models.huggingface.source import CAUSAL, MASKED, PAIRS, Source, class_of, dtype_of, library


@dataclass(frozen=True)
class Described:
    """What is known of a model before its weights are read.

    Attributes:
        source: Where it comes from.
        config: Its configuration, with the values that the options change.
        kind: The class of the whole model.
        head: What the model is trained for, such as `causal-lm`.
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
    if head.endswith("classification") and (settings.problem_type or "single_label_classification") != "single_label_classification":
        raise ConfigError(
            f"hf:{path}: raypipe trains heads with one label of several, not {settings.problem_type}; describe a loss of your own"
        )
    if head.endswith("classification") and settings.num_labels == 1:
        raise ConfigError(
            f"hf:{path}: a head for one class learns nothing, and transformers takes num_labels 1 for a regression, which raypipe does not "
            "train; name the classes in model.options.config.id2label, such as {0: no, 1: yes}, or describe a loss of your own"
        )
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
    """Return a model of transformers, cut at its blocks: `embedding`, `block-0`, `block-1`, ..., `head`.

    Layers run the forward of the model's own class, and their weights have the names that they have there. Batches have the fields
    `input_ids` or `pixel_values`, and `labels`, as the model takes them, or `tokens` and `targets` of a token file; where they have
    `attention_mask`, `position_ids` or `token_type_ids`, the model takes these, too. The loss is the mean over the labels that are not
    -100. CLIP has two branches, `text-embedding`, `text-block-0`, ... and `image-embedding`, `image-block-0`, ..., which meet in the head;
    its loss is contrastive and takes no labels.

    Args:
        path: Folder that `save_pretrained` or `raypipe export` wrote, or a name on the Hub. Every node must be able to read it.
        weights: `pretrained` for those of `path`, or `random` for the model's own initialization from the run's seed.
        dtype: Type of the weights that the optimizer steps: float32, bfloat16, float16, float64, or `auto` for that of the configuration.
        attention: Implementation of attention, such as `sdpa` or `eager`; left out for transformers' choice.
        config: Values of the model's configuration to change, such as `{"num_hidden_layers": 4}`.
        head: `causal-lm`, `masked-lm`, `sequence-classification`, `token-classification`, `image-classification`, `contrastive`, or `auto`
            for that of the configuration.
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
    make = LayerMaker(
        described.kind,
        described.skeleton.config,
        described.parts,
        source=described.source if weights == "pretrained" else None,
        dtype=described.dtype,
        lora=described.lora,
    )
    return _model(described, make)


def _model(described: Described, make: LayerMaker) -> Model:
    head, parts = described.head, described.parts
    images = {tower.base for tower in parts.towers if getattr(described.skeleton, tower.base).main_input_name == IMAGE}
    reads_text = len(images) < len(parts.towers)
    layers = [layer for tower in parts.towers for layer in _tower_layers(tower, make, is_image=tower.base in images)]
    ends = tuple(tower.layers[-1] for tower in parts.towers)
    layers.append(Layer(HEAD, partial(make, HEAD), inputs=ends, batch_if_present=FIELDS if reads_text else ()))
    needs = ((("input_ids", "tokens"),) if reads_text else ()) + (((IMAGE,),) if images else ())
    common: dict[str, Any] = {
        "layers": tuple(layers),
        "ties": described.ties,
        "vocabulary_size": described.config.get_text_config().vocab_size if reads_text else None,
    }
    if head == PAIRS:
        return Model(loss=contrastive, loss_couples_rows=True, needs=needs, **common)
    loss = partial(mean_over_targets, ahead=AHEAD[head])
    weight = partial(num_targets, ahead=AHEAD[head])
    labels = ("labels", "targets") if head in {CAUSAL, MASKED} else ("labels",)
    return Model(loss=loss, loss_weight=weight, is_masked=head == MASKED, needs=(*needs, labels), **common)


def _tower_layers(tower: Tower, make: LayerMaker, *, is_image: bool) -> list[Layer]:
    embedding, *blocks = tower.layers
    first = Layer(embedding, partial(make, embedding), batch_if_present=(IMAGE,) if is_image else FIELDS, branch=tower.branch)
    fields = () if is_image else FIELDS
    return [first, *(Layer(name, partial(make, name), batch_if_present=fields, branch=tower.branch) for name in blocks)]


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
