"""An actor reads the weights of its own layers: memory beyond what it had grows by these and one file at most."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.transformers_models import save, small_config

pytest.importorskip("transformers")

# The high-water mark of memory is read again from 0 after what both cases need: libraries, and a first layer.
BUILD = """
import gc, re, sys
import torch
from raypipe.actors.stage.layers import build_layer
from raypipe.user_code import make_model

def status(key):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(key + r":\\s+(\\d+) kB", file.read())[1])

model = make_model("hf:" + sys.argv[1], {})
warm = build_layer(make_model("hf:" + sys.argv[2], {}).layers[1], index=1, seed=0)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
layers = [build_layer(model.layers[index], index=index, seed=0) for index in map(int, sys.argv[3:])]
own = sum(weight.nbytes for layer in layers for weight in layer.parameters())
print(status("VmHWM") - before, own)
"""
MIB = 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    large = small_config("llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, head_dim=256, vocab_size=4096)
    folders = (tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("small"))
    save(large, folders[0], dtype=torch.float32, max_shard_size="40MB")
    return str(folders[0]), save(small_config("llama"), folders[1], dtype=torch.float32)


@pytest.mark.parametrize("layers", [("1",), ("4", "5"), ("0", "1")])
def test_the_peak_is_the_layers_and_one_file_of_weights(folders: tuple[str, str], layers: tuple[str, ...]) -> None:
    large, small = folders
    sizes = [file.stat().st_size for file in Path(large).glob("*.safetensors")]
    assert len(sizes) > 5
    result = subprocess.run([sys.executable, "-c", BUILD, large, small, *layers], capture_output=True, text=True, check=False, timeout=50)
    assert result.returncode == 0, result.stderr
    peak, own = map(int, result.stdout.split())
    assert own > 30 * MIB
    assert peak < own + max(sizes) + 8 * MIB < sum(sizes)
