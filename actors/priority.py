"""Work that takes only the processor time that nobody else wants. On systems without such a priority (macOS) it runs as any other."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from raypipe.errors import RunError

Result = TypeVar("Result")

_THREADS = Path("/proc/self/task")


def run_when_idle(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread of the lowest priority, and wait for it; return what it returns, or raise what it raises.

    The calling thread keeps its priority: without privileges a thread that has given it up cannot have it back. Threads that `work` starts
    begin with the lowest priority, too; see `raise_priorities`.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="idle", initializer=_begin_to_idle) as executor:
        return executor.submit(work).result()


def _begin_to_idle() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def raise_priorities() -> None:
    """Give all threads of this process that have the lowest priority that of the calling thread.

    Raises:
        RunError: A thread has it that this process may not change.
    """
    for thread in _idle_threads():
        try:
            os.sched_setscheduler(thread, os.sched_getscheduler(0), os.sched_param(0))
        except ProcessLookupError:
            continue  # it has just ended
        except PermissionError:
            name = (_THREADS / str(thread) / "comm").read_text(encoding="utf-8", errors="replace").strip()
            raise RunError(
                f"thread {name!r} was started while modules were loaded, has the lowest priority and may not be given another; "
                "allow it (RLIMIT_NICE), or start threads when the first layer is built"
            ) from None


def _idle_threads() -> Iterator[int]:
    if sys.platform != "linux" or os.sched_getscheduler(0) == os.SCHED_IDLE:
        return
    for thread in map(int, os.listdir(_THREADS)):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                yield thread
