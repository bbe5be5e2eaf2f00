"""No parts of layers need fewer bytes than the tables say, and some need no more."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from raypipe.planning.port_bytes import PortBytes


def tables(seed: int, *, num_layers: int = 5, is_chain: bool = True, most: float = 1.0) -> PortBytes:
    rng = random.Random(seed)
    prices = np.array([rng.choice((0.0, 0.3, 1.0, 2.0)) * rng.uniform(0.5, 1.5) for _ in range(num_layers)]) + 0.01
    crossing = np.array([0.0, *(rng.choice((1.0, 5.0, 20.0)) for _ in range(num_layers - 1)), 0.0])
    sums = np.array([rng.choice((0.0, 0.1, 3.0, 30.0)) for _ in range(num_layers)])
    return PortBytes(prices / prices.sum(), crossing, sums, most, 256, is_chain)


def random_parts(rng: random.Random, num_layers: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Parts of runs of layers: none, all, a few that recur or any."""
    few = [rng.random() ** rng.choice((1, 4)) for _ in range(2)]
    parts = [0.0]
    while len(parts) <= num_layers:
        parts += [rng.choice((0.0, 1.0, *few, rng.random()))] * rng.randint(1, 3)
    return np.array(parts[1 : num_layers + 1])


def least_of(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]], value: float, bytes_of: PortBytes) -> float:
    """Least bytes of a contribution of a value that some device could have as its most."""
    first = math.ceil(value / bytes_of.unit - 1e-6)
    return float(table[first : int(bytes_of.admitted(np.array([value]))[0]) + 1].min(initial=math.inf))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_chain", [True, False])
def test_no_parts_need_less_than_the_tables_say(seed: int, is_chain: bool) -> None:
    bytes_of = tables(seed, num_layers=3 + seed, is_chain=is_chain)
    rng = random.Random(seed)
    for _ in range(400):
        parts = random_parts(rng, len(bytes_of.prices))
        value = float(parts @ bytes_of.prices)
        in_part = (parts > 0) & (parts < 1)
        # Of a graph, the steepest border is one that parts must cross.
        steps = bytes_of.crossing[1:-1] * np.abs(np.diff(parts))
        crossing = float(steps.sum()) if is_chain else float(bytes_of.crossing[1:-1].min()) * float(np.ptp(parts))
        ends = int(parts[0] == 1), int(parts[-1] == 1)
        changes = np.flatnonzero(np.diff(parts))
        if is_chain and len(changes) == 1 and not in_part.any():
            continue  # First or last layers alone.
        assert least_of(bytes_of.each[ends], value, bytes_of) <= (crossing + bytes_of.sums[in_part].sum()) * (1 + 1e-9) + 1e-9
        if not in_part.any():
            assert least_of(bytes_of.single[ends], value, bytes_of) <= crossing * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_some_parts_need_about_what_the_tables_say(seed: int) -> None:
    bytes_of = tables(seed, num_layers=4)
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for part in np.linspace(0.02, 0.98, 49):
        # An end of the model that is almost alone is in part.
        of_ends, inner = (0.0, part, 0.999, 1.0), (0.0, part, 1.0)
        for choice in itertools.product(of_ends, inner, inner, of_ends):
            parts = np.array(choice)
            in_part = (parts > 0) & (parts < 1)
            needed = float((bytes_of.crossing[1:-1] * np.abs(np.diff(parts))).sum() + bytes_of.sums[in_part].sum())
            found.setdefault((int(parts[0] == 1), int(parts[-1] == 1)), []).append((float(parts @ bytes_of.prices), needed))
    for ends, pairs in found.items():
        for value in (0.1, 0.2, 0.35, 0.5, 0.8):
            low = least_of(bytes_of.each[ends], value, bytes_of)
            # Units and intervals of parts are as wide, and what crosses may be less by so much.
            near = [needed for of_pair, needed in pairs if value * 0.95 - 0.07 <= of_pair <= value * 1.05 + 0.07]
            assert low >= 0.95 * min(near, default=0.0) - 0.05 * float(bytes_of.crossing.sum())


def test_whole_layers_between_others_cross_both_borders() -> None:
    bytes_of = PortBytes(np.full(4, 0.25), np.array([0.0, 4.0, 4.0, 4.0, 0.0]), np.full(4, 1e9), 1.0, 100, is_chain=True)
    assert least_of(bytes_of.single[0, 0], 0.25, bytes_of) == 8.0
    assert least_of(bytes_of.single[0, 0], 0.5, bytes_of) == 8.0
    first, last, crossing = bytes_of.ends
    assert [*zip(first, last, crossing, strict=True)] == [(0.25, 0.75, 4.0), (0.5, 0.5, 4.0), (0.75, 0.25, 4.0)]
    assert bytes_of.single[1, 0].min() == 12.0  # The first and the third layer.
    assert least_of(bytes_of.single[1, 1], 1.0, bytes_of) == 0.0


def test_copies_of_all_layers_send_all_gradients_whatever_their_part() -> None:
    bytes_of = PortBytes(np.full(4, 0.25), np.array([0.0, 99.0, 99.0, 99.0, 0.0]), np.full(4, 0.5), 1.0, 1000, is_chain=True)
    assert [least_of(bytes_of.each[0, 0], value, bytes_of) for value in (0.05, 0.125, 0.5)] == pytest.approx([2.0, 2.0, 2.0])
