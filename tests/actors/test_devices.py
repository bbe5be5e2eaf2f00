"""What differs between a CPU and a GPU."""

from __future__ import annotations

import time

import pytest

from raypipe.actors import devices

WAIT_S = 0.01
WORK_S = 0.004


def test_a_wait_for_a_core_between_two_readings_takes_nothing_off_the_time_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = 0.0

    def read_late() -> float:
        nonlocal waited_s
        time.sleep(WAIT_S)  # the thread is put off while it reads, as on a machine with more to do than cores
        waited_s += WAIT_S
        return waited_s

    monkeypatch.setattr(devices, "_waited_s", read_late)
    stop = devices.stop_watch(devices.CPU)
    time.sleep(WORK_S)
    assert stop() >= WORK_S
