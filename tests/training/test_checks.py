"""Shares of a microbatch that are, or are not, whole rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.schedules.lower import Placement
from raypipe.training.checks import check_rows, least_rows


def shared(*shares: float) -> Placement:
    return Placement((tuple(enumerate(shares)),))


@pytest.mark.parametrize(("shares", "num_rows"), [((1.0,), 1), ((0.5, 0.5), 2), ((1 / 3, 2 / 3), 6), ((0.1, 0.2, 0.7), 10)])
def test_shares_of_whole_rows_are_taken(shares: tuple[float, ...], num_rows: int) -> None:
    check_rows(shared(*shares), num_rows)


@pytest.mark.parametrize(
    ("shares", "num_rows", "problem"),
    [
        (
            (0.5, 0.5),
            5,
            "2.5, 2.5 rows, which cannot be cut; the nearest that work: 3/5, 2/5; or a microbatch_size that is a multiple of 2",
        ),
        ((1 / 3, 2 / 3), 8, "the nearest that work: 3/8, 5/8; or a microbatch_size that is a multiple of 3"),
        ((0.9, 0.1), 4, "the nearest that work: 3/4, 1/4"),
        ((0.25,) * 4, 3, "worker 0 has 4 devices for microbatches of 3 rows; use a microbatch_size of at least 4"),
    ],
)
def test_shares_that_cut_rows_are_refused_with_shares_that_work(shares: tuple[float, ...], num_rows: int, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_rows(shared(*shares), num_rows)
    assert problem in str(caught.value)


@given(weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), num_rows=st.integers(1, 40))
def test_the_shares_that_are_proposed_work(weights: list[float], num_rows: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    shares[-1] = 1 - sum(shares[:-1])
    try:
        check_rows(shared(*shares), num_rows)
    except PlanError as error:
        if "cannot be cut" in str(error):
            proposed = str(error).partition("that work: ")[2].partition(";")[0].split(", ")
            rows = [int(part.partition("/")[0]) for part in proposed]
            assert sum(rows) == num_rows
            check_rows(shared(*(count / num_rows for count in rows)), num_rows)


def test_the_fewest_rows_are_those_of_which_all_boundaries_are_whole() -> None:
    assert least_rows([0.0, 1 / 3, 0.5, 1.0], most=12) == 6
    assert least_rows([0.0, 1.0], most=12) == 1
    assert least_rows([0.0, 1 / 3, 0.5, 1.0], most=4) == 4
