"""Sums make way for messages: of their own device in the middle of a chunk, of others where these ask for it."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from raypipe.actors.transport.secret import Secret
from raypipe.actors.transport.tcp_holds import NEVER_DUE, Address, Asked, Holds
from raypipe.actors.transport.tcp_link import Link
from raypipe.actors.transport.tcp_way import Way
from raypipe.communication.policy import Communication, Traffic

BYTES_PER_S = 25e6
LONG, SHORT = 200_000, 1_000


@dataclass(eq=False)
class Waiting:
    """What waits for a way."""

    link: Link
    traffic: Traffic
    ready: int
    deadline: int = 0
    sequence: int = -1
    turn: int = 0
    sent: int = 0
    unit: int = 1
    collective: Any = None
    problems: list[str] = field(default_factory=list)

    def frame(self, num_bytes: int) -> list[memoryview]:
        return [memoryview(bytes(num_bytes))]

    def left(self, num_bytes: int) -> None:
        pass

    def fail(self, problem: str) -> None:
        self.problems.append(problem)


@pytest.fixture
def links() -> Iterator[list[Link]]:
    pairs = [socket.socketpair() for _ in range(2)]
    made = [Link(peer, end) for peer, (end, _) in enumerate(pairs)]
    yield made
    for link, (_, other) in zip(made, pairs, strict=True):
        link.close()
        other.close()


def way_with(links: list[Link], *waiting: Waiting, communication: Communication | None = None) -> Way:
    way = Way(links, communication or Communication())
    for entry in waiting:
        way.arrived.append((entry, entry.ready))
    way.take_in()
    return way


def test_a_message_stops_a_chunk_to_another_peer_which_goes_on_behind_it(links: list[Link]) -> None:
    way = way_with(links, Waiting(links[0], Traffic.SUM, 10_000_000))
    chunk = way.active = way.next_frame(bulk=True)
    way.make_way()
    assert way.active is chunk, "there is no message"
    message = Waiting(links[1], Traffic.MESSAGE, LONG)
    way.arrived.append((message, LONG))
    way.take_in()
    way.make_way()
    assert way.active is None
    frame = way.next_frame(bulk=False)
    assert frame is not None
    assert frame.entry is message
    assert way.next_frame(bulk=False) is None
    assert way.has_work
    assert way.next_frame(bulk=True) is chunk
    assert not way.paused


def test_a_message_to_the_same_peer_waits_for_the_chunk(links: list[Link]) -> None:
    way = way_with(links, Waiting(links[0], Traffic.SUM, 10_000_000))
    chunk = way.active = way.next_frame(bulk=True)
    way.arrived.append((Waiting(links[0], Traffic.MESSAGE, LONG), LONG))
    way.take_in()
    way.make_way()
    assert way.active is chunk


def test_plain_connections_have_no_turns(links: list[Link]) -> None:
    way = way_with(links, Waiting(links[0], Traffic.SUM, 10_000_000), communication=Communication(scheduled=False))
    chunk = way.active = way.next_frame(bulk=True)
    way.arrived.append((Waiting(links[1], Traffic.MESSAGE, LONG), LONG))
    way.take_in()
    way.make_way()
    assert way.active is chunk


def test_a_hold_stops_sums_to_a_peer_until_its_time_is_over(links: list[Link]) -> None:
    other = Waiting(links[1], Traffic.SUM, 10_000_000, deadline=9)
    way = way_with(links, Waiting(links[0], Traffic.SUM, 10_000_000), other)
    chunk = way.active = way.next_frame(bulk=True)
    assert chunk is not None
    assert chunk.entry.link is links[0]
    now_s = time.monotonic()
    way.hold([links[0]], now_s + 60.0)
    assert way.active is None
    between = way.next_frame(bulk=True)
    assert between is not None
    assert between.entry is other
    way.release(now_s + 59.0)
    assert way.next_frame(bulk=True) is not chunk
    way.release(now_s + 61.0)
    assert way.next_frame(bulk=True) is chunk


def test_a_message_goes_where_sums_are_held_behind_the_chunk_in_its_way(links: list[Link]) -> None:
    way = way_with(links, Waiting(links[0], Traffic.SUM, 10_000_000))
    chunk = way.active = way.next_frame(bulk=True)
    way.hold([links[0]], time.monotonic() + 60.0)
    message = Waiting(links[0], Traffic.MESSAGE, SHORT)
    way.arrived.append((message, SHORT))
    way.take_in()
    assert way.next_frame(bulk=True) is chunk
    frame = way.next_frame(bulk=True)
    assert frame is not None
    assert frame.entry is message
    assert way.next_frame(bulk=True) is None, "the rest of the sum is held"


def test_a_message_stops_in_the_middle_and_goes_on_before_later_ones(links: list[Link]) -> None:
    message = Waiting(links[0], Traffic.MESSAGE, LONG)
    way = way_with(links, message)
    frame = way.active = way.next_frame(bulk=True)
    now_s = time.monotonic()
    way.hold([links[0]], now_s + 60.0, with_messages=True)
    assert way.active is None
    assert not way.is_idle(links[0])
    others = [Waiting(link, Traffic.MESSAGE, LONG) for link in links[:2]]
    for other in others:
        way.arrived.append((other, LONG))
    way.take_in()
    between = way.next_frame(bulk=False)
    assert between is not None
    assert between.entry is others[1], "to another peer"
    assert way.next_frame(bulk=True) is None
    way.release(now_s + 61.0)
    assert way.next_frame(bulk=True) is frame
    behind = way.next_frame(bulk=True)
    assert behind is not None
    assert behind.entry is others[0]


def test_nothing_of_a_sum_goes_to_who_waits_for_another_message(links: list[Link]) -> None:
    way = way_with(links, Waiting(links[0], Traffic.SUM, 10_000_000))
    now_s = time.monotonic()
    way.hold([links[0]], now_s + 60.0, with_messages=True)
    assert way.next_frame(bulk=True) is None
    way.hold([links[0]], 0.0, with_messages=True)
    assert way.next_frame(bulk=True) is not None


def test_a_lost_connection_fails_the_chunk_that_has_stopped(links: list[Link]) -> None:
    total = Waiting(links[0], Traffic.SUM, 10_000_000)
    way = way_with(links, total)
    way.active = way.next_frame(bulk=True)
    way.hold([links[0]], time.monotonic() + 60.0)
    way.lose(links[0], "gone")
    assert "gone" in total.problems
    assert not way.paused
    assert not way.queue


@pytest.fixture
def three() -> Iterator[list[Holds]]:
    """Devices 0 and 1 of one node, and 2 of another, to which 1 sends sums."""
    ends = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3)]
    for end in ends:
        end.bind(("127.0.0.1", 0))
        end.setblocking(False)
    hosts = ("one", "one", "other")
    secret = Secret.new()
    addresses = [Address(host, 0, end.getsockname()[1], secrets.token_hex(16)) for host, end in zip(hosts, ends, strict=True)]
    summing: tuple[list[int], ...] = ([], [], [1])
    made = []
    for device, end in enumerate(ends):
        others = {other: address for other, address in enumerate(addresses) if other != device}
        own = addresses[device]
        holds = Holds(
            device,
            end,
            own,
            others,
            secret=secret,
            rate=lambda _: BYTES_PER_S,
            summing=partial(summing.__getitem__, device),
            entrances={0: 7, 1: 7} if device == 2 else {},
        )
        # All hosts of this test are this one.
        holds._addresses = {other: (token, ("127.0.0.1", address[1])) for other, (token, address) in holds._addresses.items()}
        made.append(holds)
    yield made
    for end in ends:
        end.close()


def asked(holds: Holds) -> list[Asked]:
    deadline_s = time.monotonic() + 5.0
    while time.monotonic() < deadline_s:
        if found := list(holds.asked()):
            return found
        time.sleep(0.001)
    return []


def test_a_receiver_asks_those_that_send_it_sums(three: list[Holds]) -> None:
    assert three[2].comes(0, LONG, due=0)
    (request,) = asked(three[1])
    assert request.peer == 2
    assert request.seconds == pytest.approx(1.5 * LONG / BYTES_PER_S)
    three[2].has_come(0)
    assert asked(three[1]) == [Asked(2, 0.0)]


def stops(holds: Holds) -> list[Asked]:
    return [request for request in asked(holds) if request.with_messages]


def test_of_two_messages_that_share_an_entrance_the_one_that_is_due_first_comes_first(three: list[Holds]) -> None:
    assert three[2].comes(0, LONG, due=5)
    assert three[2].comes(1, LONG, due=3)
    (stop,) = stops(three[0])
    assert stop.peer == 2
    assert stop.seconds == pytest.approx(1.5 * LONG / BYTES_PER_S)
    three[2].has_come(1)
    assert stops(three[0]) == [Asked(2, 0.0, with_messages=True)]


def test_a_sum_that_begins_while_a_message_comes_is_held_until_that_is_there(three: list[Holds]) -> None:
    three[2]._summing = list  # this device has not started its sum
    assert three[2].comes(0, 10 * LONG, due=0)
    three[2].sum_comes(1)
    (request,) = asked(three[1])
    assert 0.0 < request.seconds <= 1.5 * 10 * LONG / BYTES_PER_S
    three[2].sum_comes(1)
    assert list(three[1].asked()) == [], "once"
    three[2].has_come(0)
    assert asked(three[1]) == [Asked(2, 0.0)]
    three[2].sum_comes(1)
    time.sleep(0.02)
    assert list(three[1].asked()) == []


def test_a_message_that_takes_longer_than_any_hold_is_held_for(three: list[Holds]) -> None:
    assert three[2].comes(0, 1000 * LONG, due=0)
    (request,) = asked(three[1])
    assert request.seconds == 1.0


def test_nobody_stops_for_a_message_whose_sender_is_busy_with_others(three: list[Holds]) -> None:
    assert three[2].comes(0, LONG, due=5)
    assert three[2].comes(1, LONG, due=3)
    three[2].has_come(1)
    assert len(stops(three[0])) in {1, 2}
    assert three[2].resuming == {0}
    assert three[2].comes(1, LONG, due=7)
    time.sleep(0.02)
    assert not [request for request in three[1].asked() if request.with_messages]
    three[2].moves(0)
    assert [request.peer for request in stops(three[1])] == [2]


def test_a_message_that_came_before_its_window_gets_its_turn_when_that_opens(three: list[Holds]) -> None:
    assert three[2].comes(0, LONG, due=NEVER_DUE)
    assert three[2].comes(1, LONG, due=3)
    assert [request.peer for request in stops(three[0])] == [2]
    three[2].is_due(0, 0)
    assert stops(three[0]) == [Asked(2, 0.0, with_messages=True)]


def test_one_that_begins_later_and_is_due_later_is_stopped(three: list[Holds]) -> None:
    assert three[2].comes(0, LONG, due=3)
    assert three[2].comes(1, LONG, due=5)
    assert [request.peer for request in stops(three[1])] == [2]
    three[2].has_come(0)
    assert stops(three[1]) == [Asked(2, 0.0, with_messages=True)]


def test_what_one_slot_waits_for_comes_together(three: list[Holds]) -> None:
    assert three[2].comes(0, LONG, due=3)
    assert three[2].comes(1, LONG, due=3)
    time.sleep(0.02)
    assert not [request for holds in three[:2] for request in holds.asked() if request.with_messages]


def test_who_is_gone_stops_nobody(three: list[Holds]) -> None:
    assert three[2].comes(0, LONG, due=3)
    assert three[2].comes(1, LONG, due=5)
    assert stops(three[1])
    three[2].has_come(0)  # as a link says that is lost
    three[2].has_come(0)
    assert stops(three[1]) == [Asked(2, 0.0, with_messages=True)]


def test_a_sender_asks_the_devices_of_its_node(three: list[Holds]) -> None:
    three[0].leaves(2, LONG)
    (request,) = asked(three[1])
    assert request.peer is None


def test_short_messages_and_those_within_a_node_ask_for_nothing(three: list[Holds]) -> None:
    assert not three[2].comes(0, SHORT, due=0)
    assert not three[1].comes(0, LONG, due=0)
    three[0].leaves(2, SHORT)
    three[0].leaves(1, LONG)
    time.sleep(0.02)
    assert [list(holds.asked()) for holds in three] == [[], [], []]


def test_a_message_that_enters_a_node_holds_sums_to_its_other_devices(three: list[Holds]) -> None:
    three[0]._summing = lambda: [2]
    assert three[1].comes(2, LONG, due=0)
    deadline_s = time.monotonic() + 5.0
    found: list[Asked] = []
    while not found and time.monotonic() < deadline_s:
        list(three[0].asked())  # passes it on
        found = list(three[2].asked())
    assert [request.peer for request in found] == [0]


@pytest.mark.parametrize("datagram", [b"", b"x" * 29, bytes(25), b"\0" * 16 + b"\x02\0\0\0\0\0\0\x80\x3f"])
def test_strangers_hold_nothing(three: list[Holds], datagram: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(datagram, three[1].end.getsockname())
    time.sleep(0.02)
    assert list(three[1].asked()) == []
