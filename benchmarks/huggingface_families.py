"""Which causal models of the installed transformers raypipe cuts into layers that compute what the whole model computes.

    python benchmarks/huggingface_families.py [FAMILY ...]

For every family with a pipeline plan: a small model with random weights, its logits for two rows of which one is padded, and those of its
layers one after another. Printed is the family with `ok` if they are equal to the last bit, else how they differ or what went wrong; a
model that transformers itself cannot make or run in this small size is told apart.
"""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raypipe.errors import ConfigError
from raypipe.models.huggingface.layers import LayerMaker
from raypipe.models.huggingface.parts import parts_of

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rotary_dim": 4,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 4,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Some families derive one size from another and refuse both.
LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("partial_rotary_factor",),
    ("num_key_value_heads", "head_dim", "partial_rotary_factor", "rotary_dim"),
    ("head_dim",),
    ("sliding_window",),
)


def planned_families() -> list[str]:
    """Return the causal models whose configuration has a pipeline plan."""
    names = (name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
    return [name for name in names if CONFIG_MAPPING[name].base_model_pp_plan]


def small_config(family: str, left_out: Sequence[str]) -> Any:
    """Return a configuration with those sizes that the family knows."""
    kind = CONFIG_MAPPING[family]
    known = {*getattr(kind, "__dataclass_fields__", {}), *inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    config = kind(**{name: size for name, size in SIZES.items() if name in known and name not in left_out})
    config.use_cache = False
    return config


def difference(config: Any, *, logits: torch.Tensor, whole: Any, batch: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of logits between the whole model and its layers, where rows are not padded."""
    kind = type(whole)
    with torch.device("meta"):
        parts = parts_of(kind(config))
    make = LayerMaker(kind, config, parts, source=None, dtype=torch.float32, lora=None)
    weights = whole.state_dict()
    hidden: tuple[torch.Tensor, ...] = ()
    for name in parts.layers:
        layer = make(name).eval()
        layer.load_state_dict({weight: weights[weight] for weight in layer.state_dict()})
        hidden = (layer(*hidden, **batch),)
    there = batch["attention_mask"].bool()
    return float((logits[there] - hidden[0][there]).abs().max())


def verdict(family: str) -> str:
    """Return `ok`, or what is wrong with a family."""
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(3, 64, (2, 12), generator=generator), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    batch["attention_mask"][1, 10:] = 0
    first = ""
    for left_out in LEFT_OUT:
        try:
            config = small_config(family, left_out)
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            whole = kind.from_pretrained(None, config=config, state_dict={}, dtype=torch.float32).eval()
            for weight in whole.parameters():
                if weight.dim() > 1:
                    torch.nn.init.normal_(weight, std=0.2, generator=generator)
            logits = whole(**batch).logits
        except Exception as error:  # of a size that raypipe has no part in
            first = first or f"not made in this size: {type(error).__name__}: {error}"
            continue
        try:
            largest = difference(config, logits=logits, whole=whole, batch=batch)
        except ConfigError as error:
            return f"refused: {error}"
        except Exception as error:  # blocks that pass each other more than hidden states
            return f"cannot be cut: {type(error).__name__}: {error}"
        return "ok" if largest == 0 else f"differs by {largest:.1e}"
    return first


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Which causal models of transformers raypipe cuts.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to check (default: all that have a plan)")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    verdicts = {}
    for family in parser.parse_args().families or planned_families():
        with torch.no_grad():
            verdicts[family] = verdict(family)
        print(f"{family:24} {' '.join(verdicts[family].split())[:160]}", flush=True)
    print(f"{sum(text == 'ok' for text in verdicts.values())} of {len(verdicts)} families are cut into layers with the logits of the whole")


if __name__ == "__main__":
    main()
