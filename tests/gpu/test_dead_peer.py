"""A process that dies beside another on one GPU leaves none of the other's streams waiting (`raypipe.actors.transport.cuda_ipc`)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("made", ["made_by_peer", "made_here"])
def test_a_stream_goes_on_that_waits_for_an_event_of_a_process_that_died(made: str) -> None:
    found = subprocess.run([sys.executable, "-m", "tests.gpu.dead_peer", made], capture_output=True, text=True, timeout=80, check=False)
    assert found.stdout == "goes on\n", found.stderr
