"""Planted latencies and bandwidths are found again, whatever a few round trips say."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import RunError
from raypipe.network.fit import LinkFit, RoundTrip, fit

SIZES = (1024, 20_000, 40_000, 80_000, 160_000, 320_000)


def trips(latency_s: float, bandwidth: float, *, repeats: int = 5, scale: int = 1) -> list[RoundTrip]:
    return [RoundTrip(size * scale, 2 * latency_s + size * scale / bandwidth) for size in SIZES for _ in range(repeats)]


@given(latency_s=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e5, 1e10))
def test_a_planted_link_is_found(latency_s: float, bandwidth: float) -> None:
    found = fit(trips(latency_s, bandwidth), link="a -> b")
    # As exactly as numbers that were added can tell.
    scale_s = 2 * latency_s + SIZES[-1] / bandwidth
    assert 1 / found.bandwidth_bytes_per_s == pytest.approx(1 / bandwidth, rel=1e-9, abs=1e-12 * scale_s)
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-9 * scale_s)
    assert found.residual < 1e-6
    assert found.num_round_trips == 30
    assert found.num_bytes == 5 * sum(SIZES)


@given(seed=st.integers(0, 10_000), bandwidth=st.floats(6e6, 1.25e8))
def test_noise_and_outliers_cost_a_few_percent(seed: int, bandwidth: float) -> None:
    source = random.Random(seed)
    scale = max(1, round(bandwidth / 6e6))  # each message lasts as long, whatever the bandwidth: so the prober chooses them
    noisy = []
    for trip in trips(1e-4, bandwidth, repeats=7, scale=scale):
        seconds = trip.seconds * source.gauss(1, 0.02) + source.expovariate(1e4)
        noisy.append(RoundTrip(trip.num_bytes, seconds * (10 if source.random() < 0.1 else 1)))
    found = fit(noisy, link="a -> b")
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(1e-9, 1e3)), min_size=2, max_size=30, unique_by=lambda trip: trip[0]))
def test_whatever_is_measured_no_figure_is_negative(measured: list[tuple[int, float]]) -> None:
    with contextlib.suppress(RunError):
        found = fit([RoundTrip(*trip) for trip in measured], link="a -> b")
        assert found.latency_s >= 0
        assert found.bandwidth_bytes_per_s > 0
        assert found.residual >= 0


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert LinkFit(1e-3, 1e6, 0.0, 1, 1).seconds(1_000_000) == pytest.approx(1.001)


def test_a_link_that_carries_nothing_is_named() -> None:
    with pytest.raises(RunError, match=r"link a -> b: .* measured as zero \(320000 bytes took 640 s\); see whether it is cut"):
        fit(trips(0.0, 500.0), link="a -> b")


def test_a_link_from_which_nothing_came_back_is_named() -> None:
    with pytest.raises(RunError, match="link a -> b: 0 messages came back"):
        fit([], link="a -> b")


def test_a_link_whose_messages_take_no_time_is_named() -> None:
    with pytest.raises(RunError, match="link a -> b: 1000 bytes seem to take no time"):
        fit([RoundTrip(10, 0.0), RoundTrip(1000, 0.0)], link="a -> b")


def test_an_empty_message_that_took_no_time_is_no_error() -> None:
    found = fit([RoundTrip(0, 0.0), RoundTrip(1000, 0.1)], link="a -> b")
    assert found.latency_s == 0.0
    assert found.bandwidth_bytes_per_s == pytest.approx(10_000)
    assert found.residual == pytest.approx(0.0)
