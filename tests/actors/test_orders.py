"""What actors are told."""

from __future__ import annotations

from raypipe.actors.orders import ConnectOrder
from raypipe.actors.transport.secret import Secret, StoreAddress


def test_what_leaves_for_other_nodes_takes_turns_and_what_stays_does_not() -> None:
    order = ConnectOrder(
        names=("a", "b", "c", "d"),
        channels=(),
        shared=frozenset(),
        over_tcp=True,
        nodes=("one", "one", "two", "three"),
        patterns={},
        wires=(),
        groups=(),
        store=StoreAddress("127.0.0.1", 1, Secret.new()),
        prefix="run/0",
        connect_timeout_s=1.0,
        message_timeout_s=1.0,
    )
    ways = order.ways(0)
    assert ways[2] == ways[3] != ways[1]
    assert 0 not in ways
