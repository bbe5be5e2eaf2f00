"""Blocks of transformers models that cost the same are measured once, wherever in the model they stand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.actors.measure.layer_cache import LayerCache
from raypipe.actors.measure.layer_costs import Effort, LayerMeasurement
from raypipe.actors.measure.layers import measure_layers
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.config import OptimizerConfig
from raypipe.model import Model
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
    measured = _measured(model, told)
    assert [layer.name for layer in measured] == [layer.name for layer in model.layers]
    assert len(measured) == 6
    assert sum(text.startswith("measuring layer") for text in told) == 2 + num_different


def test_a_second_run_measures_no_layer_of_a_model_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save(small_config("llama", num_hidden_layers=3), tmp_path)
    told: list[str] = []
    first, second = [_measured(make_model(f"hf:{folder}", {}), told, cache=LayerCache(torch.device("cpu"))) for _ in range(2)]
    assert first == second
    assert sum(text.startswith("measuring layer") for text in told) == 4


def test_the_whole_model_is_made_once_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(f"hf:{save(small_config('llama', num_hidden_layers=4), tmp_path)}", {})
    blocks: list[int] = []
    init = transformers.models.llama.modeling_llama.LlamaDecoderLayer.__init__

    def counted(self: Any, config: Any, layer_idx: int) -> None:
        blocks.append(layer_idx)
        init(self, config, layer_idx)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaDecoderLayer, "__init__", counted)
    for layer in model.layers:
        layer.build()
    assert blocks == [0, 1, 2, 3]


def _measured(model: Model, told: list[str], *, cache: LayerCache | None = None) -> list[LayerMeasurement]:
    return measure_layers(
        model,
        TextRows().batch(0, (0.0, 1.0)),
        optimizer=partial(build_optimizer, OptimizerConfig()),
        seed=0,
        effort=Effort(repeats=1, warm_up=0),
        on_layer=told.append,
        cache=cache,
    )
