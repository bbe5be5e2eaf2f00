"""Budgets are kept, and refused where nothing can be measured with them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import InputError
from raypipe.network.allowance import Allowance, Budget, divide
from raypipe.network.rounds import company, fan_rounds, tournament

LEAST_PING, LEAST_STREAM = 1 << 20, 320_000


def divided(num_nodes: int, *, seconds: float = 60.0, num_bytes: int = 4 << 30, num_inside: int = 0) -> Allowance:
    budget = Budget(seconds=seconds, num_bytes=num_bytes)
    return divide(budget, ["node"] * num_nodes, num_inside=num_inside, least_ping_bytes=LEAST_PING, least_stream_bytes=LEAST_STREAM)


@given(num_nodes=st.integers(1, 100), seconds=st.floats(1, 600), num_bytes=st.integers(1 << 20, 1 << 36), num_inside=st.integers(0, 200))
def test_what_is_planned_stays_within_the_budget(num_nodes: int, seconds: float, num_bytes: int, num_inside: int) -> None:
    try:
        found = divided(num_nodes, seconds=seconds, num_bytes=num_bytes, num_inside=num_inside)
    except InputError as error:
        (least,) = re.findall(r"raise --budget-\w+ to ([\d.]+)", str(error))
        assert float(least) > (num_bytes if "--budget-bytes" in str(error) else seconds) - 0.1  # noqa: PT017
        return
    met = tournament(["node"] * num_nodes)
    streams = [*company(met, num_nodes), *fan_rounds(num_nodes)] if found.looks_for_sharing else []
    assert found.rounds.tournament * found.ping_s + len(streams) * found.stream_s + num_inside * found.ping_s / 4 <= seconds
    num_pings = 2 * sum(map(len, met)) + num_inside
    assert num_pings * found.ping_bytes + sum(map(len, streams)) * found.stream_bytes <= num_bytes
    assert found.ping_bytes >= LEAST_PING or not num_pings
    assert found.ping_s > 0


def test_the_least_that_is_named_is_enough() -> None:
    with pytest.raises(InputError, match=r"a budget of 1 s is too small: 6 rounds between 4 nodes and 8 measurements") as caught:
        divided(4, seconds=1.0, num_inside=8)
    (least,) = re.findall(r"--budget-s to ([\d.]+)", str(caught.value))
    assert divided(4, seconds=float(least) + 0.1, num_inside=8).ping_s > 0
    with pytest.raises(InputError, match="12 directed links take at least 21 MB; raise --budget-bytes to 20971520"):
        divided(4, num_bytes=10_000_000)
    assert divided(4, num_bytes=20_971_520).ping_bytes >= LEAST_PING


def test_a_small_budget_gives_up_the_search_for_shared_links_first() -> None:
    assert divided(8).looks_for_sharing
    assert not divided(8, seconds=4.0).looks_for_sharing
    assert not divided(8, num_bytes=100 << 20).looks_for_sharing


def test_streams_that_would_be_over_in_no_time_tell_nothing_of_sharing() -> None:
    allowance = divided(4, num_bytes=100 << 20)
    assert allowance.looks_for_sharing
    assert allowance.tells_sharing_of(10e6)
    assert not allowance.tells_sharing_of(1e9)
    assert divided(4, num_bytes=Budget().num_bytes).tells_sharing_of(3e9)
    assert not divided(8, num_bytes=100 << 20).tells_sharing_of(1.0)


def test_a_large_budget_takes_no_longer_than_is_of_use() -> None:
    assert divided(4, seconds=600.0).ping_s == divided(4, seconds=60.0).ping_s == 0.4
