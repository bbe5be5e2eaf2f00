"""Calls the Ray actors of a run or a probe, gathers their answers, and says which of them failed."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError

from raypipe.actors.actor import remedy_of
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreServer
from raypipe.cluster.slots import DeviceSlot
from raypipe.errors import AbortedError, RaypipeError, RunError, StateLostError, TransportError

POLL_S = 2.0
"""Usual time until actors that have not answered are looked at."""
_AGAIN_S = 1.0  # between two further looks
STARTING = "starting"
SILENCE_REMEDY = "look at its node: it may be down, cut off, out of memory, or have no free CPU for it (`ray status`)"
_START_REMEDY = "raypipe and the model must be importable on every node: install them there, or submit with --working-dir"
_RAY_FIELD = re.compile(r"[a-z_]+: ")


@dataclass(frozen=True)
class Member:
    """An actor: Ray's handle, the slot of its device, and the stages that it holds."""

    handle: Any
    slot: DeviceSlot
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why an actor did not answer; `is_death` if its process is gone or silent."""

    error: RaypipeError
    is_death: bool = False

    @property
    def rank(self) -> int:
        """Order from causes to consequences: deaths and silence, raised errors, lost messages, aborts."""
        if self.is_death:
            return 0
        if isinstance(self.error, AbortedError):
            return 3
        return 2 if isinstance(self.error, TransportError) else 1


class ActorGroup:
    """Actors, addressed by the number of their device."""

    death_remedy = "look at its node for an out-of-memory kill or a crash (`ray status`)"

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.secret = Secret.new()
        """What the actors prove to each other to know; Ray hands it out with their calls."""
        self.store: StoreAddress
        """Once it is open."""
        self._server: StoreServer | None = None

    def ask(
        self, task: str, call: Callable[[int, Any], Any], *, devices: Iterable[int] | None = None, timeout_s: float | None = None
    ) -> dict[int, Any]:
        """Call the actors of some devices (default: all) and gather their answers; `task` names the call in messages."""
        numbers = range(len(self.members)) if devices is None else devices
        return self.gather({device: call(device, self.members[device].handle) for device in numbers}, task, timeout_s=timeout_s)

    def open_store(self) -> StoreAddress:
        """Open the store where the actors find each other, instead of an earlier one; return where it is.

        It is the driver's: all nodes reach it, if not each other.
        """
        self.close_store()
        self._server = StoreServer(ray.util.get_node_ip_address(), secret=self.secret)
        self.store = self._server.address
        return self.store

    def close_store(self) -> None:
        """Close the store, if one is open."""
        if self._server is not None:
            self._server.close()

    def drop_from_store(self, prefix: str) -> None:
        """Let the store forget the names that begin so, if one is open."""
        if self._server is not None:
            self._server.drop(prefix)

    def gather(self, calls: Mapping[int, Any], task: str, *, timeout_s: float | None = None, poll_s: float = POLL_S) -> dict[int, Any]:
        """Return the answers by device, or raise the failure of one. Without a timeout, only silence is a failure.

        Devices that have not answered within `poll_s` seconds are asked for their state, and then each second: some failures show only in
        several answers.
        """
        device_of = {ref: device for device, ref in calls.items()}
        pending = list(device_of)
        answers: dict[int, Any] = {}
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        checked_s = time.monotonic()
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(poll_s, max(deadline - time.monotonic(), 0.0)))
            for ref in ready:
                try:
                    answers[device_of[ref]] = ray.get(ref)
                except RayError as error:
                    self._fail(self._failure(error, device_of[ref], task), {other: device_of[other] for other in pending}, task)
            is_late = not ready and time.monotonic() >= deadline
            if pending and (is_late or time.monotonic() - checked_s > poll_s):
                if overdue := self._overdue([device_of[ref] for ref in pending], task, is_late=is_late):
                    self._fail(overdue, {ref: device_of[ref] for ref in pending}, task)
                checked_s, poll_s = time.monotonic(), min(poll_s, _AGAIN_S)
        return {device: answers[device] for device in sorted(answers)}

    def _overdue(self, devices: Sequence[int], task: str, *, is_late: bool) -> Failure | None:
        if not is_late:
            return None
        return Failure(RunError(f"{task}: no answer in time from {', '.join(map(self._where, devices))}; {SILENCE_REMEDY}"))

    def _fail(self, failure: Failure, pending: Mapping[Any, int], task: str) -> NoReturn:
        raise failure.error

    def _failure(self, error: Exception, device: int, task: str) -> Failure:
        if isinstance(error, RayTaskError) and isinstance(error.cause, RaypipeError):
            return Failure(error.cause)
        if isinstance(error, RayActorError):
            seen = "cannot be reached" if isinstance(error, ActorUnavailableError) else f"its process died ({_reason(error)})"
            return Failure(self._error(device, task, seen, _START_REMEDY if task == STARTING else self.death_remedy), is_death=True)
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, ObjectLostError):
            return Failure(StateLostError(f"{task}: {self._where(device)}: the nodes that had copies of layers are lost ({cause})"))
        return Failure(self._error(device, task, f"{type(cause).__name__}: {cause}", remedy_of(cause)))

    def _error(self, device: int, task: str, problem: str, remedy: str) -> RunError:
        return RunError(f"{task}: {self._where(device)}: {problem}; {remedy}")

    def _where(self, device: int) -> str:
        slot = self.members[device].slot
        return f"device {slot.name} (node {slot.node.name})"


def _reason(error: RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Without the fields that repeat what the user knows, such as the actor's name.
    texts = [line for line in lines if not _RAY_FIELD.match(line)]
    return next((line for line in texts if "reason" in line.lower() or "exit" in line.lower()), lines[-1] if lines else "")[:300]
