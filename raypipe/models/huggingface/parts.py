"""Which modules of a transformers model belong to which layer of a pipeline, by the model's own plan.

A configuration of transformers has a plan, `base_model_pp_plan`, that lists the modules of its base model in the order of its forward::

    {"embed_tokens": (["input_ids"], ["inputs_embeds"]),
     "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
     "norm": (["hidden_states"], ["hidden_states"])}

The list of blocks is the module that takes a mask. What stands before it is the embedding, and what follows belongs to the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from raypipe.errors import ConfigError

EMBEDDING, HEAD = "embedding", "head"
"""Names of the first and the last layer."""

_BERT_LIKE = ("embeddings", "encoder.layer")
_MISSING: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("wte", "wpe", "drop", "h", "ln_f"),
    "bert": _BERT_LIKE,
    "roberta": _BERT_LIKE,
    "xlm-roberta": _BERT_LIKE,
    "camembert": _BERT_LIKE,
    "electra": ("embeddings", "embeddings_project", "encoder.layer"),
    "opt": ("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in", "decoder.layers", "decoder.final_layer_norm"),
}
"""Plans of models that have none: the modules of the base model in order. The blocks are the only list among them."""


@dataclass(frozen=True)
class Parts:
    """The modules of a model by layer; all names are those of the whole model.

    Attributes:
        base: Name of the base model, whose forward all layers but the head run.
        before: Modules of the embedding.
        blocks: List of the blocks.
        num_blocks: Number of blocks.
        after: Modules of the head.
    """

    base: str
    before: tuple[str, ...]
    blocks: str
    num_blocks: int
    after: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers of the pipeline, in order."""
        return (EMBEDDING, *(f"block-{number}" for number in range(self.num_blocks)), HEAD)

    def modules(self) -> Iterator[tuple[str, str]]:
        """Yield each module that belongs to one layer, and the layer."""
        yield from ((name, EMBEDDING) for name in self.before)
        yield from ((f"{self.blocks}.{number}", f"block-{number}") for number in range(self.num_blocks))
        yield from ((name, HEAD) for name in self.after)

    def layer_of(self, weight: str) -> str | None:
        """Return the layer that a weight belongs to; `None` if the plan places it nowhere."""
        return next((layer for module, layer in self.modules() if weight.startswith(f"{module}.")), None)


def parts_of(model: Any) -> Parts:
    """Return the parts of a transformers model, which may be on the device `meta`.

    Raises:
        ConfigError: The model has no plan, or one that does not place all of its weights.
    """
    kind, base_name = model.config.model_type, model.base_model_prefix
    base = getattr(model, base_name, None)
    names = _plan_of(base, kind) if base is not None and base is not model else None
    if names is None:
        raise ConfigError(
            f"transformers' model {kind!r} ({type(model).__name__}) has no pipeline plan (`base_model_pp_plan`), so raypipe does not know "
            f"where to cut it; choose a model that has one, such as llama, qwen3, mistral or gemma3_text (or {', '.join(_MISSING)}), or "
            "describe the model with a function of your own"
        )
    present = [name for name in names if _submodule(base, name) is not None]
    lists = [name for name in present if isinstance(_submodule(base, name), nn.ModuleList)]
    if len(lists) != 1:
        raise ConfigError(
            f"the pipeline plan of {kind!r} has {len(lists)} lists of blocks ({', '.join(names)}); raypipe cuts models with one"
        )
    at = present.index(lists[0])
    heads = [name for name, _ in model.named_children() if name != base_name]
    parts = Parts(
        base=base_name,
        before=tuple(f"{base_name}.{name}" for name in present[:at]),
        blocks=f"{base_name}.{lists[0]}",
        num_blocks=len(_submodule(base, lists[0])),
        after=(*(f"{base_name}.{name}" for name in present[at + 1 :]), *heads),
    )
    _check_all_placed(parts, (name for name, _ in model.named_parameters()), kind)
    return parts


def _plan_of(base: Any, kind: str) -> tuple[str, ...] | None:
    plan = base.config.base_model_pp_plan
    return tuple(plan) if plan else _MISSING.get(kind)


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
