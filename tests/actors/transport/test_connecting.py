"""The order in which devices connect: one for all, in which those meet at the same time that have nothing to do with each other."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.actors.transport.connecting import in_rounds
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.secret import Secret, StoreAddress

Sets = list[tuple[str, tuple[int, ...]]]


def channels(pairs: list[tuple[int, int]]) -> Sets:
    return [("channel", ends) for pair in pairs for ends in permutations(pair)]


def chain(num_devices: int) -> Sets:
    return channels([(device, device + 1) for device in range(num_devices - 1)])


def ring(num_devices: int) -> Sets:
    return channels([(device, (device + 1) % num_devices) for device in range(num_devices)])


def num_meetings(order: Sets) -> int:
    """How many meetings come one after the other, where each takes as long as any, and begins when all its members have come to it."""
    left = {device: [one for one in order if device in one[1]] for _, members in order for device in members}
    count = 0
    while any(left.values()):
        next_of = {device: sets[0] for device, sets in left.items() if sets}
        met = {one for one in next_of.values() if all(next_of.get(member) == one for member in one[1])}
        assert met, f"nobody can go on: {next_of}"
        for kind, members in met:
            for member in members:
                assert left[member].pop(0) == (kind, members)
        count += 1
    return count


@pytest.mark.parametrize(
    ("sets", "expected", "sorted_ones"),
    [
        pytest.param(chain(8), 4, 14, id="chain of 8"),
        pytest.param(ring(6), 4, 12, id="ring of 6"),
        pytest.param([*chain(8), *(("group", (device, device + 4)) for device in range(4))], 5, 15, id="chain of 8 with sums"),
    ],
)
def test_devices_of_a_chain_or_ring_meet_in_few_rounds(sets: Sets, expected: int, sorted_ones: int) -> None:
    assert num_meetings(in_rounds(sets)) == expected
    assert num_meetings(sorted(sets)) == sorted_ones


def test_transports_go_through_their_channels_in_this_order() -> None:
    pairs = [(source, target) for _, (source, target) in chain(8)]
    orders = [
        ProcessTransport(
            device,
            names=[f"device-{number}" for number in range(8)],
            channels=listed,
            groups=[],
            store=StoreAddress("127.0.0.1", 1, Secret(b"")),
            prefix="run/0",
            timeout_s=1.0,
        )._connector._sets
        for device, listed in ((0, pairs), (7, pairs[::-1]))
    ]
    assert orders[0] == orders[1]
    assert num_meetings([(str(kind), members) for kind, members in orders[0]]) == 4


members = st.lists(st.integers(0, 7), min_size=2, max_size=4, unique=True).map(tuple)


@given(st.sets(st.tuples(st.sampled_from(["channel", "group", "memory"]), members), max_size=20), st.randoms())
def test_all_devices_work_out_the_same_order_and_nobody_waits_for_ever(sets: set[tuple[str, tuple[int, ...]]], shuffle: object) -> None:
    listed = list(sets)
    shuffle.shuffle(listed)  # type: ignore[attr-defined]
    assert in_rounds(listed) == in_rounds(sets)
    assert sorted(in_rounds(sets)) == sorted(sets)
    assert num_meetings(in_rounds(sets)) <= len(sets)
