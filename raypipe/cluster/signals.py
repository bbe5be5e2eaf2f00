"""Handles Ctrl-C and SIGTERM where they would do harm or be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def put_off(clean_up: Callable[[], object] | None = None) -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM to the end of the block; if one came, call `clean_up` and raise KeyboardInterrupt.

    Ray leaves processes behind if its start is interrupted, and an import may swallow an interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:  # whatever else went wrong in the block
            if clean_up is not None:
                clean_up()
            raise KeyboardInterrupt


@contextlib.contextmanager
def also_on_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
