"""Work that takes only the processor time that nobody else wants, and then a bounded share of it.

On systems without such a priority (macOS) it runs as any other.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from raypipe.errors import RunError

Result = TypeVar("Result")

_IDLE_S = 5.0
"""For which work leaves the processor to all who want it. Where a core is free, modules are loaded by then."""
# Behind that, beside one busy thread of the usual priority, work gets a quarter of a core. Ray's processes have niceness 15, and niceness
# ends at 19: there it gets 0.29 of a core, and 0.08 at the lowest priority.
_MORE_NICE_BY = 5
_THREADS = Path("/proc/self/task")
_CHANGING = threading.Lock()


def run_when_idle(work: Callable[[], Result], *, urgent: threading.Event, idle_s: float = _IDLE_S) -> Result:
    """Run `work` in a thread of the lowest priority, and wait for it; return what it returns, or raise what it raises.

    After `idle_s` seconds the thread takes a bounded share of a busy processor, if this process may let it. Who needs the result at once
    sets `urgent` and calls `raise_priorities`, in this order. The calling thread keeps its priority: without privileges a thread that has
    given it up cannot have it back. Threads that `work` starts begin with the lowest priority, too.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="idle", initializer=_begin_to_idle, initargs=(urgent,)) as executor:
        future = executor.submit(work)
        if not wait([future], timeout=idle_s).done:
            with suppress(RunError):
                _raise(_idle_threads(), more_nice_by=_MORE_NICE_BY)
        return future.result()


def _begin_to_idle(urgent: threading.Event) -> None:
    if sys.platform == "linux":
        thread, usual = threading.get_native_id(), os.sched_getscheduler(0)
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            if urgent.is_set():  # since before this thread could be found among those of the lowest priority
                os.sched_setscheduler(thread, usual, os.sched_param(0))


def raise_priorities() -> None:
    """Give all threads of this process that have a lower priority than the calling thread that of the calling thread.

    Raises:
        RunError: A thread has one that this process may not change.
    """
    _raise(_lower_threads())


def _raise(threads: Iterator[int], *, more_nice_by: int = 0) -> None:
    if sys.platform != "linux":
        return
    with _CHANGING:
        policy, niceness = os.sched_getscheduler(0), _niceness(threading.get_native_id()) + more_nice_by
        for thread in threads:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
                os.sched_setscheduler(thread, policy, os.sched_param(0))
            except ProcessLookupError:
                continue  # it has just ended
            except PermissionError:
                name = (_THREADS / str(thread) / "comm").read_text(encoding="utf-8", errors="replace").strip()
                raise RunError(
                    f"thread {name!r} was started while modules were loaded, has a lower priority and may not be given another; "
                    "allow it (RLIMIT_NICE), or start threads when the first layer is built"
                ) from None


def _niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def _idle_threads() -> Iterator[int]:
    return _threads(lambda thread: os.sched_getscheduler(thread) == os.SCHED_IDLE)


def _lower_threads() -> Iterator[int]:
    own = threading.get_native_id()
    return _threads(lambda thread: os.sched_getscheduler(thread) == os.SCHED_IDLE or _niceness(thread) > _niceness(own))


def _threads(is_such: Callable[[int], bool]) -> Iterator[int]:
    if os.sched_getscheduler(0) == os.SCHED_IDLE:
        return
    for thread in map(int, os.listdir(_THREADS)):
        with suppress(ProcessLookupError):
            if is_such(thread):
                yield thread
