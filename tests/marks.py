"""Marks of single cases of parametrized tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def slow_unless(kept: Collection[Any], cases: Sequence[Any]) -> list[Any]:
    """Return all cases; those that are not kept are slow: `make test-all` runs them, CI does not."""
    assert set(kept) <= set(cases), "what is kept is a case"
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases
    ]
