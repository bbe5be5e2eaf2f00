"""Work of the lowest priority, and threads that get back the usual one."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypipe.actors.priority import raise_priorities, run_when_idle
from raypipe.errors import RunError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have a policy of their own on Linux")
MAY_RAISE = pytest.mark.skipif(os.getuid() != 0, reason="this user may give no thread a higher priority")


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


def priority() -> tuple[int, int]:
    """Return policy and niceness of the calling thread."""
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_work_has_the_lowest_priority_and_the_caller_keeps_its_own() -> None:
    assert run_when_idle(lambda: os.sched_getscheduler(0), urgent=threading.Event()) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_when_idle(lambda: 1 // 0, urgent=threading.Event())


def test_work_that_is_urgent_before_it_begins_has_the_usual_priority() -> None:
    urgent = threading.Event()
    urgent.set()
    found = run_when_idle(priority, urgent=urgent)
    assert found == priority() or os.getuid() != 0


@MAY_RAISE
def test_work_takes_a_bounded_share_after_a_time_and_is_hurried_all_the_same() -> None:
    found: list[tuple[int, int]] = []

    def work() -> None:
        found.append(priority())
        wait_for(lambda: priority() != found[0])
        found.append(priority())
        with ThreadPoolExecutor(1) as another:
            another.submit(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)).result()
            another.submit(os.setpriority, os.PRIO_PROCESS, 0, usual[1]).result()
            another.submit(raise_priorities).result()
        found.append(priority())

    usual = priority()
    run_when_idle(work, urgent=threading.Event(), idle_s=0.1)
    assert found == [(os.SCHED_IDLE, usual[1]), (os.SCHED_OTHER, usual[1] + 5), usual]
    assert priority() == usual


@MAY_RAISE
def test_threads_that_work_started_get_the_usual_priority(start_thread: Callable[[], int]) -> None:
    thread = run_when_idle(start_thread, urgent=threading.Event())
    assert os.sched_getscheduler(thread) == os.SCHED_IDLE
    raise_priorities()
    assert os.sched_getscheduler(thread) == os.SCHED_OTHER


def test_a_thread_that_may_not_be_given_another_priority_is_named(start_thread: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    thread = run_when_idle(start_thread, urgent=threading.Event())
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setscheduler", refuse)
        with pytest.raises(RunError, match="lower priority"):
            raise_priorities()
    assert os.sched_getscheduler(thread) == os.SCHED_IDLE
