"""The state of a layer on its way between processes."""

from __future__ import annotations

import pickle

import torch

from raypipe.actors.stage.state import packed, unpacked


def test_packed_tensors_come_out_as_they_went_in() -> None:
    state = {
        "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),  # not contiguous
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "optimizer/step/weight": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "mask": torch.tensor([[True], [False]]),
    }
    found = unpacked(pickle.loads(pickle.dumps(packed(state), protocol=5)))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_packing_on_the_cpu_copies_nothing() -> None:
    tensor = torch.zeros(4)
    state = packed({"weight": tensor})
    tensor += 1
    assert torch.equal(unpacked(state)["weight"], torch.ones(4))
