"""What tests of transports between processes share."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreServer
from tests.processes.process_ends import INTERFACE, Make, Peers, connect_and_hang, settings

_runs = itertools.count()


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")


@pytest.fixture(scope="module")
def store() -> Iterator[StoreAddress]:
    with StoreServer("127.0.0.1", secret=Secret.new()) as server:
        yield server.address


@pytest.fixture
def make(store: StoreAddress, loopback: None) -> Iterator[Make]:
    made: list[ProcessTransport] = []
    run = next(_runs)

    def one(device: int, num_devices: int = 2, **changed: Any) -> ProcessTransport:
        made.append(ProcessTransport(**settings(device, num_devices=num_devices, run=run, **({"store": store} | changed))))
        return made[-1]

    yield one
    for transport in made:
        transport.close()


@pytest.fixture
def peers(make: Make, store: StoreAddress) -> Iterator[Peers]:
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []

    def start(
        num_devices: int = 2, *, target: Callable[[dict[str, Any]], None] = connect_and_hang, **changed: Any
    ) -> tuple[ProcessTransport, list[BaseProcess]]:
        mine = make(0, num_devices, connect_timeout_s=40.0, **changed)
        common = {key: value for key, value in changed.items() if key in {"shared", "groups", "over_tcp", "communication", "ways"}}
        for device in range(1, num_devices):
            other = settings(device, num_devices=num_devices, run=0, store=store, prefix=mine.prefix, connect_timeout_s=40.0, **common)
            process = context.Process(target=target, args=(other,), daemon=True)
            process.start()
            processes.append(process)
        mine.connect()
        return mine, processes

    yield start
    for process in processes:
        process.kill()
        process.join()
        process.close()
