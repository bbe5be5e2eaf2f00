"""Fits Hockney's model (1994) to round trips: seconds = 2 latency_s + bytes / bandwidth_bytes_per_s; the answer is one byte.

Disturbances only delay, so the lower quartile counts. The slope is the median over pairs of sizes (Theil, 1950; Sen, 1968), weighted by
distance: noise tilts a short lever more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raypipe.errors import RunError
from raypipe.units import lower_quartile

LEAST_BYTES_PER_S = 65536 / 10.0
"""Links that carry less count as dead: 64 KiB, the least for a rate, would take over 10 s."""


@dataclass(frozen=True)
class RoundTrip:
    """Bytes of a message, and seconds until its answer is there."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class LinkFit:
    """The fitted figures of a link; `residual` is the largest relative difference of a size's lower quartile."""

    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float
    num_round_trips: int
    num_bytes: int

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds that a message of this size is under way."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


def fit(round_trips: Iterable[RoundTrip], *, link: str) -> LinkFit:
    """Return the latency and bandwidth that fit round trips of several sizes, clamped at 0, or raise `RunError`."""
    by_size: dict[int, list[float]] = {}
    num_round_trips = num_bytes = 0
    for trip in round_trips:
        by_size.setdefault(trip.num_bytes, []).append(trip.seconds)
        num_round_trips += 1
        num_bytes += trip.num_bytes
    if len(by_size) < 2:
        raise RunError(
            f"link {link}: {num_round_trips} messages came back, of {len(by_size)} sizes; see that both ends are up and reach each other"
        )
    sizes = sorted(by_size)
    took_s = [lower_quartile(by_size[size]) for size in sizes]
    s_per_byte = _slope(sizes, took_s)
    if s_per_byte <= 0:  # so fast that noise hides the bytes: all of the time may be theirs
        s_per_byte = took_s[-1] / sizes[-1]
    if s_per_byte <= 0:
        raise RunError(f"link {link}: {sizes[-1]} bytes seem to take no time, so the clocks or the probe are wrong; probe it again")
    if not s_per_byte * LEAST_BYTES_PER_S < 1:
        raise measured_as_zero(link, f"{sizes[-1]} bytes took {took_s[-1]:.3g} s")
    # The smallest tell of the latency; in the largest it drowns.
    latency_s = max(took_s[0] - sizes[0] * s_per_byte, 0.0) / 2
    fitted_s = [2 * latency_s + size * s_per_byte for size in sizes]
    # Nothing is fitted for an empty message where the bytes take all of the time.
    residual = max(abs(took / fitted - 1) for fitted, took in zip(fitted_s, took_s, strict=True) if fitted)
    return LinkFit(latency_s, 1 / s_per_byte, residual, num_round_trips, num_bytes)


def measured_as_zero(link: str, seen: str) -> RunError:
    """Return the error about a link that carries almost nothing."""
    return RunError(
        f"link {link}: its bandwidth was measured as zero ({seen}); see whether it is cut or throttled, and take the node out "
        "of the cluster or mend the link"
    )


def _slope(sizes: Sequence[int], took_s: Sequence[float]) -> float:
    slopes = sorted(((b_s - a_s) / (b - a), b - a) for (a, a_s), (b, b_s) in itertools.combinations(zip(sizes, took_s, strict=True), 2))
    left = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        left -= weight
        if left <= 0:
            return slope
    raise AssertionError("half of the weight lies somewhere")
