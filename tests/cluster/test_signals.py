"""What a first signal, a second one and the end of the grace do to a block."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from raypipe.cluster.signals import JOB_WAIT, StopRequest, job_wait_s

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(IN_JOB, raising=False)
    monkeypatch.delenv(JOB_WAIT, raising=False)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]


@BOTH
def test_a_first_signal_is_noted_and_told_and_the_handlers_of_before_come_back(number: signal.Signals) -> None:
    before, told, said = handlers(), list[str](), threading.Event()

    def notice(text: str) -> None:
        told.append(text)
        said.set()

    with StopRequest(60.0, notice) as stop:
        came = [stop.came]
        signal.raise_signal(number)
        came.append(stop.came)
        assert said.wait(20)
    assert came == [False, True]
    assert told == [f"{number.name}: ending the window, then saving, within 60 s; a second signal ends the run at once"]
    assert handlers() == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@BOTH
def test_a_second_signal_interrupts(number: signal.Signals) -> None:
    with StopRequest(60.0, lambda _: None) as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert not stop.is_late
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_end_of_the_grace_interrupts() -> None:
    with StopRequest(0.05, lambda _: None) as stop:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # the alarm comes at any moment of these
            signal.raise_signal(signal.SIGTERM)
            time.sleep(20)
        assert stop.is_late


def test_an_alarm_before_any_signal_is_for_who_set_it() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: rung.append(number))
    try:
        with StopRequest(10.0, lambda _: None) as request:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(0.5)
        assert rung == [signal.SIGALRM]
        assert not request.came
    finally:
        signal.signal(signal.SIGALRM, before)


def test_without_a_grace_the_first_signal_interrupts() -> None:
    with StopRequest(0.0, lambda _: None), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_job_leaves_half_of_its_limit_unless_that_is_longer_than_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_wait_s() is None
    assert (StopRequest(30.0, print).grace_s, StopRequest(30.0, print).is_short) == (30.0, False)
    monkeypatch.setenv(IN_JOB, "{}")
    assert (StopRequest(30.0, print).grace_s, StopRequest(30.0, print).is_short) == (1.5, True), "Ray's own limit is 3 s"
    monkeypatch.setenv(JOB_WAIT, "60")
    assert (StopRequest(30.0, print).grace_s, StopRequest(30.0, print).is_short) == (30.0, False)
    monkeypatch.setenv(JOB_WAIT, "many")
    assert job_wait_s() == 3.0


def test_other_threads_note_nothing() -> None:
    before, during = handlers(), list[object]()

    def run() -> None:
        with StopRequest(60.0, print):
            during.extend(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert during == before
