"""Planted offsets are found within the bound that is stated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import RunError
from raypipe.network.clocks import ClockOffset, Exchange, from_reference, offset, with_drift


def exchange(source: random.Random, *, ahead_s: float, at_s: float = 100.0) -> Exchange:
    """One whose ways take differently long."""
    there_s, back_s, thinking_s = (5e-5 + source.expovariate(5e3) for _ in range(3))
    heard_s = at_s + there_s + ahead_s
    return Exchange(at_s, heard_s, heard_s + thinking_s, at_s + there_s + thinking_s + back_s)


@given(seed=st.integers(0, 10_000), ahead_s=st.floats(-3600, 3600))
def test_the_offset_is_within_its_residual(seed: int, ahead_s: float) -> None:
    source = random.Random(seed)
    exchanges = [exchange(source, ahead_s=ahead_s) for _ in range(20)]
    found = offset(exchanges)
    assert abs(found.offset_s - ahead_s) <= found.residual_s + 1e-9
    assert found.residual_s == pytest.approx(min(one.delay_s for one in exchanges) / 2)


def test_of_many_exchanges_the_quickest_counts() -> None:
    quick, slow = Exchange(0.0, 5.1, 5.1, 0.2), Exchange(0.0, 6.0, 6.0, 1.1)
    found = offset([slow, quick, slow])
    assert found.offset_s == pytest.approx(5.0)
    assert found.residual_s == pytest.approx(0.1)


def test_no_exchange_is_an_error() -> None:
    with pytest.raises(RunError, match="no exchange of clock readings came back"):
        offset([])


def test_a_drift_is_stated_only_where_the_residuals_do_not_explain_it() -> None:
    first = ClockOffset(1.0, 1e-4, 100.0)
    assert with_drift(first, ClockOffset(1.00015, 1e-4, 110.0)).drift is None
    drifting = with_drift(first, ClockOffset(1.001, 5e-5, 110.0))
    assert drifting.drift == pytest.approx(1e-4)
    assert drifting.residual_s == 5e-5
    assert with_drift(first, first).drift is None


@given(seed=st.integers(0, 10_000), num_nodes=st.integers(2, 12))
def test_offsets_add_up_along_a_path(seed: int, num_nodes: int) -> None:
    source = random.Random(seed)
    ahead_s = [0.0, *(source.uniform(-10, 10) for _ in range(num_nodes - 1))]
    seen = {}
    for node in range(1, num_nodes):
        other = source.randrange(node)
        pair = (node, other) if source.random() < 0.5 else (other, node)
        exchanges = [exchange(source, ahead_s=ahead_s[pair[1]] - ahead_s[pair[0]]) for _ in range(10)]
        seen[pair] = offset(exchanges)
    found = from_reference(seen, reference=0)
    assert found.keys() == set(range(num_nodes))
    for node, clock in found.items():
        assert abs(clock.offset_s - ahead_s[node]) <= clock.residual_s + 1e-9


def test_the_path_with_the_least_residual_is_taken() -> None:
    seen = {(0, 1): ClockOffset(1.0, 0.5, 0.0), (0, 2): ClockOffset(2.0, 0.1, 0.0), (2, 1): ClockOffset(-1.1, 0.1, 0.0)}
    assert from_reference(seen, reference=0)[1].offset_s == pytest.approx(0.9)


def test_a_node_that_nobody_met_has_no_offset() -> None:
    assert from_reference({(1, 2): ClockOffset(1.0, 0.5, 0.0)}, reference=0).keys() == {0}
