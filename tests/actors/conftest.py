"""What tests of stages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts graphs. They are traced, forward and backward, and run as they are: the slow half of the compiler is left out."""
    own, made = torch.nn.Module.compile, CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: own(module, backend=made, **options))
    yield made
    torch.compiler.reset()
