"""Budgets are kept, and refused where nothing can be measured with them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import InputError
from raypipe.network.probe_budget import Budget, MeasurementBudget, divide
from raypipe.network.rounds import all_paired_rounds, one_to_all_rounds, tournament

LEAST_PING, LEAST_STREAM = 1 << 20, 320_000


def divided(
    num_nodes: int, *, seconds: float = 60.0, num_bytes: int = 4 << 30, num_inside: int = 0, rounds_inside: int | None = None
) -> MeasurementBudget:
    return divide(
        Budget(seconds=seconds, num_bytes=num_bytes),
        ["node"] * num_nodes,
        num_inside=num_inside,
        rounds_inside=num_inside if rounds_inside is None else rounds_inside,
        least_ping_bytes=LEAST_PING,
        least_stream_bytes=LEAST_STREAM,
    )


@given(num_nodes=st.integers(1, 100), seconds=st.floats(1, 600), num_bytes=st.integers(1 << 20, 1 << 36), num_inside=st.integers(0, 200))
def test_what_is_planned_stays_within_the_budget(num_nodes: int, seconds: float, num_bytes: int, num_inside: int) -> None:
    try:
        found = divided(num_nodes, seconds=seconds, num_bytes=num_bytes, num_inside=num_inside)
    except InputError as error:
        (least,) = re.findall(r"raise --budget-\w+ to ([\d.]+)", str(error))
        assert float(least) > (num_bytes if "--budget-bytes" in str(error) else seconds) - 0.1  # noqa: PT017
        return
    met = tournament(["node"] * num_nodes)
    streams = [*all_paired_rounds(met, num_nodes), *one_to_all_rounds(num_nodes)] if found.looks_for_sharing else []
    assert found.looks * found.rounds.tournament * found.ping_s + len(streams) * found.stream_s + num_inside * found.ping_s / 4 <= seconds
    num_pings = 2 * sum(map(len, met)) + num_inside
    num_pings += (found.looks - 1) * 2 * sum(map(len, met))
    assert num_pings * found.ping_bytes + sum(map(len, streams)) * found.stream_bytes <= num_bytes
    assert found.ping_bytes >= LEAST_PING or not num_pings
    assert found.ping_s > 0


def test_the_least_that_is_named_is_enough() -> None:
    with pytest.raises(InputError, match=r"a budget of 1 s is too small: 6 rounds between 4 nodes and 8 within them") as caught:
        divided(4, seconds=1.0, num_inside=8)
    (least,) = re.findall(r"--budget-s to ([\d.]+)", str(caught.value))
    assert divided(4, seconds=float(least), num_inside=8).ping_s > 0
    with pytest.raises(InputError, match="12 directed links take at least 21 MB; raise --budget-bytes to 20971520"):
        divided(4, num_bytes=10_000_000)
    assert divided(4, num_bytes=20_971_520).ping_bytes >= LEAST_PING


@pytest.mark.parametrize("too_small", [{"seconds": 0.01}, {"num_bytes": 1000}])
@pytest.mark.parametrize("num_inside", [0, 1, 3])
def test_a_budget_that_is_raised_as_told_suffices(too_small: dict[str, Any], num_inside: int) -> None:
    for num_nodes in range(2, 25):
        with pytest.raises(InputError) as caught:
            divided(num_nodes, **too_small, num_inside=num_inside * num_nodes, rounds_inside=num_inside)
        ((option, least),) = re.findall(r"raise --budget-(\w+) to ([\d.]+)$", str(caught.value))
        raised: dict[str, Any] = {"seconds": float(least)} if option == "s" else {"num_bytes": int(least)}
        assert divided(num_nodes, **raised, num_inside=num_inside * num_nodes, rounds_inside=num_inside).ping_bytes >= LEAST_PING


def test_a_small_budget_gives_up_the_search_for_shared_links_first() -> None:
    assert divided(8).looks_for_sharing
    assert not divided(8, seconds=4.0).looks_for_sharing
    assert not divided(8, num_bytes=100 << 20).looks_for_sharing


def test_pairs_are_measured_twice_where_there_is_time_and_the_search_for_shared_links_loses_none() -> None:
    assert (divided(4).looks, divided(4).num_rounds) == (2, 2 * 6 + 12 + 8)
    assert divided(4).stream_s == divided(4, seconds=600.0).stream_s
    assert divided(4, seconds=10.0).looks == 1
    assert divided(4, num_bytes=20_971_520).looks == 1, "fewer bytes would not do"
    assert divided(16).looks == 1


def test_streams_that_would_be_over_in_no_time_tell_nothing_of_sharing() -> None:
    measurements = divided(4, num_bytes=100 << 20)
    assert measurements.looks_for_sharing
    assert measurements.tells_sharing_of(10e6)
    assert not measurements.tells_sharing_of(1e9)
    assert divided(4, num_bytes=Budget().num_bytes).tells_sharing_of(3e9)
    assert not divided(8, num_bytes=100 << 20).tells_sharing_of(1.0)


def test_a_large_budget_takes_no_longer_than_is_of_use() -> None:
    assert divided(4, seconds=600.0).ping_s == divided(4, seconds=60.0).ping_s == 0.4


def test_measurements_within_different_machines_take_the_time_of_one() -> None:
    with pytest.raises(InputError, match="--budget-s"):
        divided(24, seconds=12.0, num_inside=72)
    assert divided(24, seconds=12.0, num_inside=72, rounds_inside=3).ping_s > 0


def test_streams_are_shorter_where_a_node_is_expected_to_carry_several() -> None:
    measurements = divided(4)
    bandwidths = dict.fromkeys(itertools.permutations(range(4), 2), 1e8) | {(0, 3): 5e7}
    assert measurements.streams_s(((0, 1), (2, 3)), bandwidths) == {(0, 1): measurements.stream_s, (2, 3): measurements.stream_s}
    # Two fast ones and a slow one leave a node that is known to carry as much as a fast one.
    streams_s = measurements.streams_s(((0, 1), (0, 2), (0, 3)), bandwidths)
    assert streams_s == dict.fromkeys(streams_s, pytest.approx(measurements.stream_s / 2.5))
    # Where all at once would be too short to tell anything, they take longer.
    many = dict.fromkeys(itertools.permutations(range(20), 2), 1e8)
    streams_s = divided(20).streams_s(tuple(pair for pair in many if pair[0] == 0), many)
    assert streams_s == dict.fromkeys(streams_s, 0.01)
