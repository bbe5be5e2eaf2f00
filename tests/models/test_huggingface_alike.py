"""Blocks of transformers models that cost the same are measured once, wherever in the model they stand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raypipe.actors.measure.layer_costs import Effort
from raypipe.actors.measure.layers import measure_layers
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.config import OptimizerConfig
from raypipe.user_code import make_model
from tests.models.transformers_models import TextRows, save, small_config

transformers = pytest.importorskip("transformers")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "options", "num_different"),
    [
        ("llama", {}, 2),
        ("gpt2", {}, 2),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "query_pre_attn_scalar": 8}, 3),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, 3),
    ],
)
def test_blocks_of_a_model_of_transformers_are_told_apart_by_what_they_do(
    family: str, options: dict[str, Any], num_different: int, tmp_path: Path
) -> None:
    model = make_model(f"hf:{save(small_config(family, num_hidden_layers=4, **options), tmp_path)}", {"dtype": "float64"})
    told: list[str] = []
    # The first block, at which hidden states enter by a hook, is measured by itself.
    measured = measure_layers(
        model,
        TextRows().batch(0, (0.0, 1.0)),
        optimizer=partial(build_optimizer, OptimizerConfig()),
        seed=0,
        effort=Effort(repeats=1, warm_up=0),
        on_layer=told.append,
    )
    assert [layer.name for layer in measured] == [layer.name for layer in model.layers]
    assert len(measured) == 6
    assert sum(text.startswith("measuring layer") for text in told) == 2 + num_different
