"""Where threads wake late, or for little: chunks that a kernel runs out of grow, and a reader sleeps until a piece of a chunk is there."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from raypipe.actors.transport.tcp_link import HEADER, Kind, Link
from raypipe.communication.policy import Traffic
from tests.actors.transport.test_turns import BYTES_PER_S, Waiting, way_with

PAYLOAD = bytes(range(256)) * 100
BEGINNING = 10_000


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
        link = Link(1, server.accept()[0])
        yield link, other
        link.close()


class Message:
    """A message of which the memory is given, and whether it is whole."""

    def __init__(self) -> None:
        self.memory = bytearray(len(PAYLOAD))
        self.has_come = False
        self.due = 0

    def begin(self, text: bytes, num_bytes: int) -> list[memoryview]:
        assert num_bytes == len(PAYLOAD)
        return [memoryview(self.memory)]

    def complete(self) -> None:
        self.has_come = True


def begun(link: Link, other: socket.socket) -> tuple[Message, bytes]:
    """Read the first bytes of a message; return it and its frame."""
    link.messages = message = Message()
    frame = HEADER.pack(Kind.MESSAGE, 0, 0, 0, len(PAYLOAD)) + PAYLOAD
    other.sendall(frame[:BEGINNING])
    assert is_readable(link, 5.0)
    link.read()
    return message, frame


def is_readable(link: Link, timeout_s: float = 0.0) -> bool:
    return bool(select.select([link.end], [], [], timeout_s)[0])


def test_a_reader_sleeps_until_the_rest_of_a_chunk_is_there(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    message, frame = begun(link, other)
    other.sendall(frame[BEGINNING:-1])
    assert not is_readable(link, 0.1)
    other.sendall(frame[-1:] + frame[:1])
    assert is_readable(link, 5.0)
    link.read()
    assert message.has_come
    assert message.memory == PAYLOAD
    other.sendall(frame[1:20])
    assert is_readable(link, 5.0), "any byte of a header is news"


def test_who_waits_gets_the_last_bytes_of_a_chunk_of_which_another_has_read_the_first(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    message, frame = begun(link, other)
    waiting = threading.Thread(target=link.wait, args=(lambda: message.has_come, 30.0))
    waiting.start()
    for start in range(BEGINNING, len(frame), 5_000):
        waiting.join(0.05)
        other.sendall(frame[start : start + 5_000])
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert message.memory == PAYLOAD


def test_chunks_grow_while_the_kernel_runs_empty_and_shrink_again(pair: tuple[Link, socket.socket]) -> None:
    link, _ = pair
    way = way_with([link], Waiting(link, Traffic.SUM, 1 << 30))
    way.bytes_per_s = BYTES_PER_S

    def next_bytes() -> int:
        frame = way.next_frame(bulk=True)
        assert frame is not None
        return frame.num_bytes

    def wake(times: int) -> None:
        for _ in range(times):
            way.draining = link
            assert way.unblock({link.descriptor}, stalled_s=60.0)

    usual = next_bytes()
    wake(20)
    assert next_bytes() == pytest.approx(10 * usual, rel=0.01)
    link.end.setblocking(False)
    while True:  # until both ends are full
        try:
            link.end.send(bytes(1 << 20))
        except BlockingIOError:
            break
    wake(200)
    assert next_bytes() == usual
