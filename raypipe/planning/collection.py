"""Garbage collection while planning.

A search keeps millions of small objects, the orders that it has simulated. Whenever these have grown by a quarter, Python's collector looks
through all of them for cycles, which took a fifth of the CPU time of a search and found next to nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**30
_lock = threading.Lock()
_thresholds: list[tuple[int, int, int]] = []  # As they were before, once for each search under way.


@contextmanager
def young_garbage_alone() -> Iterator[None]:
    """Let the collector look at young objects alone, in this process, until the last of the searches under way has ended."""
    with _lock:
        _thresholds.append(_thresholds[0] if _thresholds else gc.get_threshold())
        gc.set_threshold(*_thresholds[0][:2], _NEVER)
    try:
        yield
    finally:
        with _lock:
            before = _thresholds.pop()
            if not _thresholds:
                gc.set_threshold(*before)
