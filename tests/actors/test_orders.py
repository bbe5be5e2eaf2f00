"""What actors are told."""

from __future__ import annotations

from collections.abc import Mapping

from raypipe.actors.orders import ConnectOrder
from raypipe.actors.transport.secret import Secret, StoreAddress


def test_what_leaves_for_other_nodes_takes_turns_and_what_stays_does_not() -> None:
    ways = connect(wires=()).ways(0)
    assert ways[2] == ways[3] != ways[1]
    assert 0 not in ways


def test_what_leaves_over_stated_wires_waits_for_nothing_on_another() -> None:
    ways = connect(wires=({1: 0, 2: 1, 3: 2, 4: 2},)).ways(0)
    assert len({*ways.values()}) == 3, "within the node, and over two wires"
    assert ways[3] == ways[4], "they share a bottleneck"


def test_negative_numbers_are_those_of_slow_nodes() -> None:
    order = connect(wires=({1: 0, 2: -1, 3: 0, 4: -2},))
    assert order.apart(0) == {2, 4}
    assert connect(wires=()).apart(0) == set()
    assert len({order.ways(0)[peer] for peer in (2, 3, 4)}) == 3


def connect(*, wires: tuple[Mapping[int, int], ...]) -> ConnectOrder:
    return ConnectOrder(
        names=("a", "b", "c", "d", "e"),
        channels=(),
        shared=frozenset(),
        over_tcp=True,
        nodes=("one", "one", "two", "three", "four"),
        patterns={},
        wires=wires,
        entrances=(),
        groups=(),
        store=StoreAddress("127.0.0.1", 1, Secret.new()),
        prefix="run/0",
        connect_timeout_s=1.0,
        message_timeout_s=1.0,
    )
