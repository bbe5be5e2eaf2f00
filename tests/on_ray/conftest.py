"""One local Ray for all tests that need one, and a way to know what a process left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.on_ray.actor_pool import ActorPool, runs_take_their_actors_from

NUM_CPUS = 9

# Else Ray starts a worker for each CPU before any is needed.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A local Ray cluster with a dashboard, for as many actors as any test has; what they cache is theirs alone."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        ray.init(address="local", num_cpus=NUM_CPUS, include_dashboard=True, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def actor_pool(local_ray: None) -> ActorPool:
    """Return the actors that tests share."""
    return ActorPool()


@pytest.fixture
def shared_actors(actor_pool: ActorPool) -> Iterator[None]:
    """Let the runs of a test take their actors from those that tests share."""
    with runs_take_their_actors_from(actor_pool):
        yield


@dataclass(frozen=True)
class Brand:
    """A mark in the environment, which all descendants of a process inherit."""

    mark: str

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"RAYPIPE_TEST_MARK": self.mark}

    def survivors(self) -> dict[int, str]:
        """The processes that bear the mark, with their command lines."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command:  # zombies have none
                        found[int(folder.name)] = command[:200]
            except OSError:
                continue
        return found

    def end_survivors(self) -> None:
        """End them at once by process id; asked kindly, a node of Ray takes ten seconds."""
        deadline = time.monotonic() + 10
        while (left := self.survivors()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)


@pytest.fixture
def brand() -> Iterator[Brand]:
    """A new mark; what still bears it after the test is ended."""
    mark = Brand(uuid.uuid4().hex)
    yield mark
    mark.end_survivors()
