"""Rows of a microbatch that devices of unequal power take."""

from __future__ import annotations

import itertools
import random

import pytest

from raypipe.artifacts.profile import factor_of_rows
from raypipe.planning.row_shares import Factors, divided_rows, fixed_rows


@pytest.mark.parametrize("fixed_share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(8))
def test_no_other_division_is_done_sooner(seed: int, fixed_share: float) -> None:
    rng = random.Random(seed)
    num_rows, powers = rng.randint(3, 9), [rng.choice((0.3, 1.0, 2.5)) for _ in range(3)]
    more = fixed_rows(num_rows, fixed_share)

    def done(rows: tuple[int, ...]) -> float:
        return max(factor_of_rows(fixed_share, of_device / num_rows) / power for of_device, power in zip(rows, powers, strict=True))

    rows = divided_rows(num_rows, powers, fixed_rows=more)
    assert rows is not None
    assert sum(rows) == num_rows
    assert min(rows) >= 1
    every = (each for each in itertools.product(range(1, num_rows + 1), repeat=3) if sum(each) == num_rows)
    assert done(rows) == pytest.approx(min(map(done, every)))


def test_fewer_rows_than_devices_are_not_divided() -> None:
    assert divided_rows(2, [1.0, 1.0, 1.0]) is None


def test_where_rows_count_for_nothing_they_are_divided_equally() -> None:
    assert divided_rows(8, [1.0, 1.0], fixed_rows=fixed_rows(8, 1.0)) == (4, 4)


def test_factors_give_the_seconds_of_a_part_of_the_rows() -> None:
    factors = Factors.of(0.25, 2.0)
    assert factors.seconds(8.0, 8.0 * 0.6) == pytest.approx(8.0 * factor_of_rows(0.6, 0.25) / 2.0)
