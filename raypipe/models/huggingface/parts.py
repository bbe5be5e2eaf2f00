"""Which modules of a transformers model belong to which layer of a pipeline, by the model's own plan.

A configuration of transformers has a plan, `base_model_pp_plan`, that lists the modules of its base model in the order of its forward::

    {"embed_tokens": (["input_ids"], ["inputs_embeds"]),
     "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
     "norm": (["hidden_states"], ["hidden_states"])}

The list of blocks is the module that takes a mask. What stands before it is the embedding, and what follows belongs to the head. A model
of several towers, as CLIP has for texts and images, is a branch for each tower; they meet in the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from raypipe.errors import ConfigError

EMBEDDING, HEAD = "embedding", "head"
"""Names of the first and the last layer."""

_BERT_LIKE = ("embeddings", "encoder.layer", "pooler")
_MISSING: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("wte", "wpe", "drop", "h", "ln_f"),
    "bert": _BERT_LIKE,
    "roberta": _BERT_LIKE,
    "xlm-roberta": _BERT_LIKE,
    "camembert": _BERT_LIKE,
    "electra": ("embeddings", "embeddings_project", "encoder.layer"),
    "opt": ("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in", "decoder.layers", "decoder.final_layer_norm"),
    "vit": ("embeddings", "layers", "layernorm"),
}
"""Plans of models that have none: the modules of the base model in order. The blocks are the only list among them."""

_TOWERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "clip": {
        "text_model": ("embeddings", "encoder.layers", "final_layer_norm"),
        "vision_model": ("embeddings", "pre_layrnorm", "encoder.layers", "post_layernorm"),
    },
}
"""Plans of models of several towers, which meet in the head."""
_BRANCHES: Mapping[str, str] = {"text_model": "text", "vision_model": "image"}


@dataclass(frozen=True)
class Tower:
    """A base model, whose forward its layers run; all names are those of the whole model.

    Attributes:
        base: Name of the base model.
        branch: Branch of its layers; `None` if it is the only one.
        before: Modules of the embedding.
        blocks: List of the blocks.
        num_blocks: Number of blocks.
        after: Modules behind the blocks, which belong to the head.
    """

    base: str
    branch: str | None
    before: tuple[str, ...]
    blocks: str
    num_blocks: int
    after: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of its layers, in order."""
        prefix = f"{self.branch}-" if self.branch is not None else ""
        return (f"{prefix}{EMBEDDING}", *(f"{prefix}block-{number}" for number in range(self.num_blocks)))

    def modules(self) -> Iterator[tuple[str, str]]:
        """Yield each module that belongs to one of its layers, and the layer."""
        embedding, *blocks = self.layers
        yield from ((name, embedding) for name in self.before)
        yield from ((f"{self.blocks}.{number}", layer) for number, layer in enumerate(blocks))


@dataclass(frozen=True)
class Parts:
    """The modules of a model by layer; all names are those of the whole model.

    Attributes:
        towers: Base models, in the order of the layers.
        after: Modules of the head.
        weights: Weights of the head that the whole model has outside of its modules.
    """

    towers: tuple[Tower, ...]
    after: tuple[str, ...]
    weights: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers of the pipeline, in order."""
        return (*(layer for tower in self.towers for layer in tower.layers), HEAD)

    def tower_of(self, layer: str) -> Tower | None:
        """Return the tower that a layer belongs to; `None` for the head."""
        return next((tower for tower in self.towers if layer in tower.layers), None)

    def modules(self) -> Iterator[tuple[str, str]]:
        """Yield each module that belongs to one layer, and the layer."""
        for tower in self.towers:
            yield from tower.modules()
        yield from ((name, HEAD) for name in self.after)

    def layer_of(self, weight: str) -> str | None:
        """Return the layer that a weight belongs to; `None` if the plan places it nowhere."""
        if weight in self.weights:
            return HEAD
        return next((layer for module, layer in self.modules() if weight.startswith(f"{module}.")), None)


def has_towers(kind: str) -> bool:
    """Return whether raypipe knows the towers of a kind of models."""
    return kind in _TOWERS


def parts_of(model: Any) -> Parts:
    """Return the parts of a transformers model, which may be on the device `meta`.

    Raises:
        ConfigError: The model has no plan, or one that does not place all of its weights.
    """
    kind, plans = model.config.model_type, _plans_of(model)
    if not plans:
        raise ConfigError(
            f"transformers' model {kind!r} ({type(model).__name__}) has no pipeline plan (`base_model_pp_plan`), so raypipe does not know "
            f"where to cut it; choose a model that has one, such as llama, qwen3, mistral or gemma3_text (or "
            f"{', '.join([*_MISSING, *_TOWERS])}), or describe the model with a function of your own"
        )
    towers = tuple(_tower(model, base, names, branch=_BRANCHES[base] if len(plans) > 1 else None) for base, names in plans.items())
    heads = [name for name, _ in model.named_children() if name not in plans]
    own = tuple(name for name, _ in model.named_parameters(recurse=False))
    parts = Parts(towers, after=(*(name for tower in towers for name in tower.after), *heads), weights=own)
    _check_all_placed(parts, (name for name, _ in model.named_parameters()), kind)
    return parts


def _plans_of(model: Any) -> Mapping[str, tuple[str, ...]]:
    """Return the modules of each base model in order, by its name."""
    kind, base_name = model.config.model_type, model.base_model_prefix
    towers = _TOWERS.get(kind, {})
    if towers and all(hasattr(model, name) for name in towers):
        return towers
    base = getattr(model, base_name, None)
    if base is None or base is model:
        return {}
    names = base.config.base_model_pp_plan or _MISSING.get(kind)
    return {base_name: tuple(names)} if names else {}


def _tower(model: Any, base_name: str, names: tuple[str, ...], *, branch: str | None) -> Tower:
    base = getattr(model, base_name)
    present = [name for name in names if _submodule(base, name) is not None]
    lists = [name for name in present if isinstance(_submodule(base, name), nn.ModuleList)]
    if len(lists) != 1:
        kind = model.config.model_type
        raise ConfigError(
            f"the pipeline plan of {kind!r} has {len(lists)} lists of blocks ({', '.join(names)}); raypipe cuts models with one"
        )
    at = present.index(lists[0])
    return Tower(
        base=base_name,
        branch=branch,
        before=tuple(f"{base_name}.{name}" for name in present[:at]),
        blocks=f"{base_name}.{lists[0]}",
        num_blocks=len(_submodule(base, lists[0])),
        after=tuple(f"{base_name}.{name}" for name in present[at + 1 :]),
    )


def _submodule(base: Any, name: str) -> Any:
    for part in name.split("."):
        base = getattr(base, part, None)
    return base


def _check_all_placed(parts: Parts, weights: Iterable[str], kind: str) -> None:
    missing = sorted(name for name in weights if parts.layer_of(name) is None)
    if missing:
        raise ConfigError(
            f"the pipeline plan of {kind!r} does not say to which layer {missing[0]} belongs (nor {len(missing) - 1} more); raypipe "
            "cannot cut a model whose layers share weights in this way"
        )
