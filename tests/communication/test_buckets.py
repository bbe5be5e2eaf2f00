"""How the layers of a stage are divided into buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.communication.buckets import LEAST_BUCKET_BYTES, MOST_BUCKETS, buckets, num_buckets

SIZES = st.lists(st.integers(0, 100), min_size=1, max_size=12)


@given(sizes=SIZES, count=st.integers(1, 6))
def test_buckets_are_all_layers_from_the_last_to_the_first(sizes: list[int], count: int) -> None:
    found = buckets(tuple(sizes), count)
    assert len(found) == count
    assert [position for bucket in found for position in bucket] == list(reversed(range(len(sizes))))


@given(sizes=SIZES, count=st.integers(1, 6), zeros=st.lists(st.integers(0, 11), max_size=4))
def test_layers_without_bytes_make_no_difference(sizes: list[int], count: int, zeros: list[int]) -> None:
    padded = list(sizes)
    for at in zeros:
        padded.insert(at, 0)

    def bytes_of(layers: list[int]) -> list[list[int]]:
        return [[layers[at] for at in bucket if layers[at]] for bucket in buckets(tuple(layers), count)]

    assert bytes_of(padded) == bytes_of(sizes)


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([10, 10, 10, 10], 2, [[3, 2], [1, 0]]),
        ([10, 10, 10, 10], 4, [[3], [2], [1], [0]]),
        ([50, 10, 10, 10, 10, 10, 50], 3, [[6], [5, 4, 3, 2, 1], [0]]),
        ([100, 1, 1], 3, [[2, 1, 0], [], []]),
    ],
)
def test_buckets_have_about_as_many_bytes_each(sizes: list[int], count: int, expected: list[list[int]]) -> None:
    assert [list(bucket) for bucket in buckets(tuple(sizes), count)] == expected


@given(sizes=SIZES)
def test_each_bucket_that_is_worth_it_has_bytes(sizes: list[int]) -> None:
    sizes = [size * LEAST_BUCKET_BYTES // 20 for size in sizes]
    count = num_buckets(tuple(sizes))
    assert 1 <= count <= MOST_BUCKETS
    if count > 1:
        assert all(sum(sizes[at] for at in bucket) for bucket in buckets(tuple(sizes), count))
        assert sum(sizes) >= count * LEAST_BUCKET_BYTES


def test_small_stages_and_single_layers_stay_whole() -> None:
    assert num_buckets((LEAST_BUCKET_BYTES // 2,) * 3) == 1
    assert num_buckets((100 * LEAST_BUCKET_BYTES,)) == 1
    assert num_buckets((LEAST_BUCKET_BYTES,) * 12) == MOST_BUCKETS
