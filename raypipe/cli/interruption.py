"""Ctrl-C as a wish to end soon with what there is."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130


class Interruption:
    """Notes the first Ctrl-C inside of its block; a second one raises KeyboardInterrupt as usual.

    Only where Ctrl-C raises KeyboardInterrupt and in the main thread, which alone may handle signals.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: Any = None

    def __call__(self) -> bool:
        """Return whether Ctrl-C came."""
        return self._came

    @property
    def exit_code(self) -> int | None:
        """Exit code of a command that ended with what it had; `None` where Ctrl-C did not come."""
        return EXIT_INTERRUPTED if self._came else None

    def __enter__(self) -> Interruption:
        handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if handled and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, _: int, __: FrameType | None) -> None:
        self._came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
