"""Cutting a chain of layers evenly, against every cut there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.artifacts.profile import ModelProfile
from raypipe.errors import PlanError
from raypipe.planning.balance import balanced_cut, balanced_sizes

# Eighths add up without rounding, so that equal sums are equal.
WEIGHTS = st.lists(st.integers(0, 80).map(lambda eighths: eighths / 8), min_size=1, max_size=8)


def all_sizes(num_items: int, num_groups: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, num_items), num_groups - 1):
        yield [end - start for start, end in itertools.pairwise((0, *cuts, num_items))]


def sums(weights: Sequence[float], sizes: Sequence[int]) -> list[float]:
    ends = list(itertools.accumulate(sizes))
    return [sum(weights[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


@given(WEIGHTS, st.data())
def test_no_cut_has_a_lighter_heaviest_stage(weights: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    sizes = balanced_sizes(weights, num_stages)
    assert len(sizes) == num_stages
    assert min(sizes) >= 1
    assert sum(sizes) == len(weights)
    assert max(sums(weights, sizes)) == min(max(sums(weights, other)) for other in all_sizes(len(weights), num_stages))


def test_stages_that_are_not_the_heaviest_are_evened_out_too() -> None:
    # The layer of 9 alone decides; the others could be cut 4, 1, 1 just as well.
    assert balanced_sizes([9, 1, 1, 1, 1, 1, 1], 4) == [1, 2, 2, 2]


def test_equal_layers_are_shared_equally() -> None:
    assert balanced_sizes([1.0] * 12, 4) == [3, 3, 3, 3]


@given(WEIGHTS)
def test_as_many_stages_as_layers_hold_one_each(weights: list[float]) -> None:
    assert balanced_sizes(weights, len(weights)) == [1] * len(weights)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="3 layers cannot be cut into 4 stages; use at most 3 stages"):
        balanced_sizes([1, 1, 1], 4)


def test_a_model_is_cut_by_forward_and_backward_together() -> None:
    profile = ModelProfile.uniform(6, forward_s=1.0, backward_s=2.0)
    assert balanced_cut(profile, 3).stages == ((0, 1), (2, 3), (4, 5))
