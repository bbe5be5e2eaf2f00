"""When a system says that what was sent to another one does not come through."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.multinode.network import Network, network
from tests.processes.transport_contract import becomes_true

pytestmark = pytest.mark.timeout(120)

READER = """
    import os, socket, sys
    listener = socket.create_server((os.environ["NODE_IP"], 9000))
    print("listens", flush=True)
    end, _ = listener.accept()
    sys.stdin.read()
"""
SENDER = """
    import socket, sys
    from raypipe.actors.transport.tcp_info import is_unanswered
    end = socket.create_connection((sys.argv[1], 9000))
    end.setblocking(False)
    for line in sys.stdin:
        if line.strip() == "send":
            try:
                print(end.send(bytes(10**6)), flush=True)
            except BlockingIOError:
                print(0, flush=True)
        else:
            print(int(is_unanswered(end)), flush=True)
"""


class Sender:
    """A process with a connection to one that reads nothing."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def _ask(self, text: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def send(self) -> int:
        return self._ask("send")

    def is_unanswered(self) -> bool:
        return bool(self._ask("ask"))


@contextmanager
def connected(made: Network) -> Iterator[Sender]:
    reader = made.start([sys.executable, "-c", textwrap.dedent(READER)], node=1, stdin=subprocess.PIPE)
    with reader as reading:
        assert reading.stdout is not None
        assert reading.stdout.readline() == "listens\n"
        command = [sys.executable, "-c", textwrap.dedent(SENDER), made.nodes[1].ip]
        with made.start(command, stdin=subprocess.PIPE) as sending:
            yield Sender(sending)


@pytest.fixture(scope="module")
def machines() -> Iterator[Network]:
    with network(nodes=2) as made:
        yield made


def test_a_peer_that_reads_nothing_answers(machines: Network) -> None:
    with connected(machines) as sender:
        assert becomes_true(lambda: sender.send() == 0, within_s=20.0)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            assert not sender.is_unanswered()


@pytest.mark.parametrize(("away", "back"), [("part", "join"), ("sever", "rejoin")])
def test_a_peer_behind_a_link_that_is_down_does_not_answer_until_the_link_is_back(machines: Network, away: str, back: str) -> None:
    with connected(machines) as sender:
        assert sender.send() > 0
        assert becomes_true(lambda: not sender.is_unanswered(), within_s=20.0)
        getattr(machines, away)(0, 1)
        try:
            assert not sender.is_unanswered()  # nothing was sent since
            sender.send()
            assert becomes_true(sender.is_unanswered, within_s=20.0)
        finally:
            getattr(machines, back)(0, 1)
        assert becomes_true(lambda: not sender.is_unanswered(), within_s=20.0)
