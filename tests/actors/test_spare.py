"""A spare process: what it loads, and how it becomes the actor of a device."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from raypipe.actors.orders import Identity
from raypipe.actors.spare import VISIBLE_GPUS, SpareProcess


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> SpareProcess:
    """Return a spare process, of which Ray does not know."""
    for name in (VISIBLE_GPUS, "PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_CTAS", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.setenv(name, "before")  # and put back behind the test
    monkeypatch.setattr(SpareProcess, "info", lambda actor: SimpleNamespace(on=actor._on))
    return SpareProcess("run", "spare process 1 on node0", num_threads=torch.get_num_threads())


def test_it_sees_no_gpu_until_it_takes_that_of_a_device(spare: SpareProcess) -> None:
    assert os.environ[VISIBLE_GPUS] == ""
    info = spare.take_device(Identity("run", 2, "node0/2", ()), gpu_share=1.0, node_position=None, gpus="5")
    assert (os.environ[VISIBLE_GPUS], info.on) == ("5", torch.device("cuda", 0))  # type: ignore[attr-defined]
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_it_becomes_the_actor_of_a_cpu_slot(spare: SpareProcess) -> None:
    identity = Identity("run", 2, "node0/2", ())
    info = spare.take_device(identity, gpu_share=0.0, node_position=None, gpus="")
    assert (info.on, spare.status().device, spare.status().name) == (torch.device("cpu"), 2, "node0/2")  # type: ignore[attr-defined]
