"""What tests on a GPU share. Without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from tests.gpu.device import gpu


def pytest_collection_finish(session: pytest.Session) -> None:
    """Brings the device in before any test: autograd knows the devices that there were at the first backward of its process."""
    if not session.config.option.collectonly and any(item.get_closest_marker("gpu") for item in session.items):
        with suppress(pytest.skip.Exception):  # the tests that need it say so
            gpu()


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Matrix products in float32 as they are on the CPU, and not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="session")
def ray_with_gpus() -> Iterator[None]:
    """A local Ray cluster that has the GPUs of this machine."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=9, num_gpus=torch.cuda.device_count(), include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
