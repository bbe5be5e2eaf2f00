"""A member is killed, stopped or cut off in the middle of a message, a sum or an exchange of rows, at random places.

Every other member leaves the window within a second of knowing, with the state that some whole update left. The driver says who is lost,
its stage, and which transfers others waited for. RAYPIPE_FAULTS says at how many places; all kinds of faults and transfers come in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from raypipe.actors.orders import Awaited, Status
from raypipe.cluster.stage_actors import waits_for
from tests.multinode.fault_members import NAMES, NUM_UPDATES, STAGES, TIMEOUT_S, Attempt, During, Fault
from tests.multinode.network import Network, network
from tests.processes.transport_contract import becomes_true

NUM_PLACES = int(os.environ.get("RAYPIPE_FAULTS", "12"))
BYTES_PER_S = 6e6
"""So slow that a window takes about a second, and transfers most of it."""
SILENCE_S = 1.0
"""Until the driver takes a member for lost that does not answer."""
LEAVES_WITHIN_S = 1.0
CLOSED_WITHIN_S = 1.5
"""Until a peer of a member that is killed has left; it may still compute when its connection is closed."""
PATIENCE_S = 30.0

pytestmark = pytest.mark.timeout(60 + 15 * NUM_PLACES)


def attempts() -> list[Attempt]:
    """Return the places: all kinds of faults and transfers in turn, the rest at random."""
    found = []
    kinds = [(fault, during) for fault in Fault for during in During]
    for seed in range(NUM_PLACES):
        chance = random.Random(seed)
        fault, during = kinds[seed % len(kinds)]
        victims = {During.MESSAGE: range(4), During.ROWS: (0, 1), During.SUM: (2, 3)}[during]
        number = chance.randrange(12 if during is During.MESSAGE else 6)
        found.append(Attempt(f"{os.getpid()}-{seed}", chance.choice(victims), fault, during, number, chance.random()))
    return found


class Member:
    """The process of a node, and what it says."""

    def __init__(self, device: int, process: subprocess.Popen[str]) -> None:
        self.device = device
        self.process = process
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.statuses: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # it is closed
            for line in self.process.stdout:
                if line.startswith("{"):
                    answer = json.loads(line)
                    (self.statuses if "status" in answer else self.answers).put(answer)

    def order(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, key: str, *, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return the next answer, which has this key."""
        try:
            answer = self.answers.get(timeout=within_s)
        except queue.Empty:
            pytest.fail(f"device {NAMES[self.device]} did not say {key!r} within {within_s:g} s")
        assert key in answer, answer
        return answer

    def ask(self) -> Status:
        """Return the status."""
        self.order("status")
        status = self.statuses.get(timeout=PATIENCE_S)["status"]
        awaited = status["awaited"]
        known = Awaited(tuple(awaited["devices"]), awaited["transfer"]) if awaited is not None else None
        return Status(self.device, status["doing"], 0.0, computes=False, awaited=known)


@pytest.fixture(scope="module")
def members() -> Iterator[tuple[Network, list[Member]]]:
    """A process on each of four nodes, from which those of the attempts are forked."""
    with network(nodes=4, rates=BYTES_PER_S) as made, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "tests.multinode.fault_members"]
        made.run([*command, "shapes", str(made.folder)], timeout_s=PATIENCE_S)
        store = stack.enter_context(made.start([*command, "store", str(made.folder)], node=0, stdin=subprocess.PIPE))
        assert store.stdout is not None
        assert "store" in json.loads(store.stdout.readline())
        started = [
            Member(device, stack.enter_context(made.start([*command, str(device), str(made.folder)], node=device, stdin=subprocess.PIPE)))
            for device in range(4)
        ]
        for member in started:
            member.answer("ready")
        yield made, started


@pytest.fixture(scope="module")
def reference(members: tuple[Network, list[Member]]) -> dict[int, dict[int, str]]:
    """For each stage, a digest of its state behind each update."""
    _, devices = members
    for device in devices:
        device.order(json.dumps(asdict(Attempt(f"{os.getpid()}-reference"))))
    ended = [device.answer("left") for device in devices]
    for device in devices:
        device.order("end")
        device.answer("gone")
    assert [each["left"] for each in ended] == ["ended"] * 4, ended
    states = [{int(number): state for number, state in each["states"].items()} for each in ended]
    assert all(len(of_device) == NUM_UPDATES + 1 for of_device in states)
    assert states[0] == states[1]
    assert states[2] == states[3]
    return {0: states[0], 1: states[2]}


@dataclass(frozen=True)
class Outcome:
    """How devices left the window, by number, and what the driver says of it."""

    left: dict[int, dict[str, Any]]
    waits: list[str]


def outcome(made: Network, devices: list[Member], attempt: Attempt) -> Outcome:
    """Run an attempt as the driver of a run does."""
    victim, others = devices[attempt.victim], [device for device in devices if device.device != attempt.victim]
    lost, is_cut = NAMES[attempt.victim], attempt.fault is Fault.CUT_OFF
    for device in devices:
        device.order(json.dumps(asdict(attempt)))
    victim.answer("strikes")
    if is_cut:
        made.cut(attempt.victim)
        victim.order("go")
    else:
        victim.answer("gone")
    try:
        if attempt.fault is Fault.KILLED:
            # Who waits for it sees its connection closed.
            assert becomes_true(lambda: any(not device.answers.empty() for device in others), within_s=CLOSED_WITHIN_S)
        else:
            time.sleep(SILENCE_S)  # the driver asks how it is
        for device in others:
            device.order(f"abort stage {STAGES[attempt.victim]} (device {lost}) is lost")
        left = {device.device: device.answer("left", within_s=LEAVES_WITHIN_S + 1.0) for device in others}
        statuses = {device.device: device.ask() for device in others}
        if is_cut:  # nobody can tell it: its own waits end
            left[attempt.victim] = victim.answer("left", within_s=TIMEOUT_S + 2.0)
    finally:
        if is_cut:
            made.mend(attempt.victim)
        for device in devices:
            device.order("end")
    for device in devices:
        if device is not victim or attempt.fault is not Fault.KILLED:
            device.answer("gone")
    return Outcome(left, waits_for(lost, statuses, names=NAMES))


@pytest.mark.parametrize("attempt", attempts(), ids=lambda one: f"{one.fault}-{one.during}-{one.prefix.split('-')[1]}".replace(" ", "-"))
def test_members_leave_a_window_in_which_one_fails(
    members: tuple[Network, list[Member]], reference: dict[int, dict[int, str]], attempt: Attempt
) -> None:
    found = outcome(*members, attempt)
    lost, stage = NAMES[attempt.victim], STAGES[attempt.victim]
    for number, each in found.left.items():
        assert each["state"] == reference[STAGES[number]][each["num_updates"]], f"the state of device {NAMES[number]} is of no update"
        text = each["text"]
        if number == attempt.victim:
            assert each["left"] in {"TransportTimeoutError", "TransportError"}, each
        elif each["left"] == "AbortedError":
            assert text == f"stage {stage} (device {lost}) is lost"
            assert each["leaving_s"] < LEAVES_WITHIN_S
        else:
            # One that has left takes its connections with it: whoever sees that first names it, and the driver whom it knows to be lost.
            assert each["left"] == "TransportError", each
            assert "connection closed by peer" in text
            assert any(f"with device {name}:" in text for name in NAMES)
    transfers = ("activation 0->1", "gradient 1->0", f"gradients of stage {stage}")
    # What a device could not send it names itself.
    named = [*found.waits, *(each["text"] for each in found.left.values() if each["text"].find(f"with device {lost}:") > 0)]
    assert named, f"nobody names a transfer with {lost}: {found.left}"
    assert all(any(transfer in text for transfer in transfers) for text in named), named
