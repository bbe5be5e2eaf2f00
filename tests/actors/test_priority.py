"""Work of the lowest priority, and threads that get back the usual one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from raypipe.actors.priority import raise_priorities, run_when_idle
from raypipe.errors import RunError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have a policy of their own on Linux")


@pytest.fixture
def start_thread() -> Iterator[Callable[[], int]]:
    """Return what starts a thread that lives as long as the test, and returns its id."""
    end, threads = threading.Event(), []

    def start() -> int:
        threads.append(threading.Thread(target=end.wait, daemon=True))
        threads[-1].start()
        return int(threads[-1].native_id or 0)

    yield start
    end.set()
    for thread in threads:
        thread.join()


def test_work_has_the_lowest_priority_and_the_caller_keeps_its_own() -> None:
    assert run_when_idle(lambda: os.sched_getscheduler(0)) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_when_idle(lambda: 1 // 0)


@pytest.mark.skipif(os.getuid() != 0, reason="this user may give no thread a higher priority")
def test_threads_that_work_started_get_the_usual_priority(start_thread: Callable[[], int]) -> None:
    thread = run_when_idle(start_thread)
    assert os.sched_getscheduler(thread) == os.SCHED_IDLE
    raise_priorities()
    assert os.sched_getscheduler(thread) == os.SCHED_OTHER


def test_a_thread_that_may_not_be_given_another_priority_is_named(start_thread: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    thread = run_when_idle(start_thread)
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setscheduler", refuse)
        with pytest.raises(RunError, match="lowest priority"):
            raise_priorities()
    assert os.sched_getscheduler(thread) == os.SCHED_IDLE
