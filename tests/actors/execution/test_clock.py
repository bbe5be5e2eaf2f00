"""The clock of a device that works behind the host, with events that happen when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raypipe.actors.execution.clock import DeviceClock
from raypipe.actors.execution.steps import ComputeStep
from raypipe.actors.local import LocalPipeline
from raypipe.artifacts.cut import Cut
from raypipe.errors import RunError, TransportTimeoutError
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomRows
from tests.processes.transport_contract import becomes_true

STREAM = "the computing stream"


class Event:
    """An event that happens when it is recorded, or held back until its device goes on."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.happened = threading.Event()
        self.at_s = 0.0

    def record(self, stream: object) -> None:
        assert stream == STREAM
        self.device.recorded.append(self)
        if not self.device.held:
            self.happen()

    def happen(self) -> None:
        self.at_s = self.device.now_s = self.device.now_s + 0.5
        self.happened.set()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(20.0)

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at_s - self.at_s)


class Device:
    """In place of `torch.cuda`. Half a second passes from event to event."""

    def __init__(self) -> None:
        self.held = False
        self.now_s = 0.0
        self.recorded: list[Event] = []

    def Event(self, *, enable_timing: bool, blocking: bool) -> Event:  # noqa: N802  # torch's name
        assert enable_timing
        assert blocking, "a host that waits would burn its core"
        return Event(self)

    def current_stream(self) -> str:
        return STREAM

    def synchronize(self) -> None:
        assert all(event.query() for event in self.recorded)

    def go_on(self) -> None:
        self.held = False
        for event in self.recorded:
            if not event.query():
                event.happen()


def step(position: int) -> ComputeStep:
    return ComputeStep(position, f"F{position}", "", (), (), ())


def pipeline_of(num_devices: int) -> LocalPipeline:
    model = mlp(num_layers=4)
    return LocalPipeline(
        model,
        cut=Cut.equal(4, num_devices, model.edges()),
        schedule=build("1f1b", ScheduleRequest(num_devices, 4)),
        batches=RandomRows(dtype=torch.float32),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        learning_rate=lambda _: 0.1,
    )


class Seen:
    """What a clock called, and when."""

    def __init__(self) -> None:
        self.checks = 0
        self.stuck: list[Any] = []

    def check(self) -> None:
        self.checks += 1


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def clock(device: Device, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceClock]:
    monkeypatch.setattr("raypipe.actors.execution.clock._LOOK_EVERY_S", 0.01)
    made = DeviceClock(device, timeout_s=0.3, check=seen.check, stuck=seen.stuck.append)
    yield made
    made.close()


def note(clock: DeviceClock, number: int, num_bytes: int = 0) -> None:
    since = clock.mark()
    clock.note(step(number), since, clock.mark(), num_bytes)


def test_spans_are_the_devices_seconds_since_the_window_began(clock: DeviceClock) -> None:
    for _ in range(2):
        before_s = time.time()
        assert before_s <= clock.begin() <= time.time()
        note(clock, 3)
        note(clock, 4, num_bytes=8)
        log = clock.finish()
        assert list(log.positions) == [3, 4]
        assert list(log.starts_s) == [0.5, 1.5]
        assert list(log.ends_s) == [1.0, 2.0]
        assert list(log.sizes_bytes) == [0, 8]
    assert clock.doing() is None


def test_a_window_begins_without_rest_and_rests_before_anything_waits_for_a_peer(
    clock: DeviceClock, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(device, "synchronize", lambda: seen.append("rest"))
    clock.begin()
    assert not seen
    clock.finish()
    pipeline = pipeline_of(1)
    executor = pipeline.executors[0]
    executor.clock = clock
    own = executor.transport.open_window

    def open_window(*what: Any) -> None:
        seen.append("open")
        own(*what)

    monkeypatch.setattr(executor.transport, "open_window", open_window)
    pipeline.run_window()
    assert seen == ["rest", "open"]


def test_the_host_is_a_few_steps_ahead_and_no_more(clock: DeviceClock, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.actors.execution.clock._STEPS_AHEAD", 3)
    clock.begin()
    device.held = True
    for number in range(3):
        note(clock, number)
    assert clock.doing() == step(0)
    before_s = time.monotonic()
    timer = threading.Timer(0.1, device.go_on)
    timer.start()
    note(clock, 3)
    assert time.monotonic() - before_s >= 0.1
    timer.join()
    assert len(clock.finish().positions) == 4


def test_a_step_at_which_nothing_moves_is_told(clock: DeviceClock, device: Device, seen: Seen) -> None:
    clock.begin()
    note(clock, 0)
    device.held = True
    note(clock, 1)
    note(clock, 2)
    assert becomes_true(lambda: bool(seen.stuck), within_s=5.0)
    assert seen.stuck[0] == step(1)
    assert seen.checks > 0
    device.go_on()
    clock.finish()


def test_nothing_is_told_while_something_moves_or_between_windows(clock: DeviceClock, device: Device, seen: Seen) -> None:
    for _ in range(2):
        clock.begin()
        for number in range(5):
            device.held = True
            note(clock, number)
            time.sleep(0.1)
            device.go_on()
        clock.finish()
        time.sleep(0.5)
    assert not seen.stuck


def test_close_ends_the_thread(device: Device, seen: Seen) -> None:
    before = set(threading.enumerate())
    made = DeviceClock(device, timeout_s=1.0, check=seen.check, stuck=seen.stuck.append)
    assert set(threading.enumerate()) - before
    made.close()
    assert becomes_true(lambda: set(threading.enumerate()) <= before, within_s=5.0)


@pytest.mark.parametrize(
    ("number_of_events", "error", "match"),
    [
        (1, TransportTimeoutError, r"device 1: activation 0->1 of microbatch 0 with device 0: it did not come within 1 s"),
        (4, RunError, r"device 1 has been at 1F0 for 1 s, on cpu, and does not end"),
    ],
    ids=["a message", "an Op"],
)
def test_what_a_device_does_not_get_past_ends_the_window_with_its_name(
    monkeypatch: pytest.MonkeyPatch, number_of_events: int, error: type[Exception], match: str
) -> None:
    monkeypatch.setattr("raypipe.actors.execution.clock._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("raypipe.actors.execution.executor._LEAST_WAIT_S", 60.0)  # however slow the core, rows have no event of their own
    device = StopsAfter(number_of_events)
    pipeline = pipeline_of(2)
    executor = pipeline.executors[1]
    executor.timeout_s = 1.0
    executor.clock = DeviceClock(device, timeout_s=1.0, check=executor._check_transport, stuck=executor._give_up)
    try:
        with pytest.raises(error, match=match):
            pipeline.run_window()
        assert executor.progress
    finally:
        executor.close()


class StopsAfter(Device):
    """A device that stops after so many events, until what it waits for is ended."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def Event(self, *, enable_timing: bool, blocking: bool) -> Event:  # noqa: N802  # torch's name
        self.held = len(self.recorded) >= self.number
        return _Ended(self) if self.held else super().Event(enable_timing=enable_timing, blocking=blocking)


class _Ended(Event):
    """An event that comes only when the window is given up: the wait for it is over then."""

    def synchronize(self) -> None:
        time.sleep(2.5)
