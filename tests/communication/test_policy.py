"""Which transfer goes next, and how much of it."""

from __future__ import annotations

import pytest

from raypipe.communication.policy import LEAST_CHUNK_BYTES, Chunk, Traffic, Transfer, chunk_bytes, first_come, next_chunk

MEGABYTE = 1_000_000


def total(deadline: int, *, sequence: int = 0, num_bytes: int = 10 * MEGABYTE) -> Transfer:
    return Transfer(Traffic.SUM, deadline, sequence, 0, num_bytes)


def message(*, sequence: int = 0, num_bytes: int = 3 * MEGABYTE) -> Transfer:
    return Transfer(Traffic.MESSAGE, 0, sequence, 0, num_bytes)


def test_nothing_leaves_an_empty_queue() -> None:
    assert next_chunk([], bytes_per_s=1.0) is None


def test_a_message_leaves_first_and_whole() -> None:
    queue = [total(1), message(sequence=7), total(0, sequence=8)]
    assert next_chunk(queue, bytes_per_s=MEGABYTE) == Chunk(1, 3 * MEGABYTE)


def test_messages_leave_in_the_order_in_which_they_came() -> None:
    assert next_chunk([message(sequence=2), message(sequence=1)], bytes_per_s=MEGABYTE) == Chunk(1, 3 * MEGABYTE)


def test_the_sum_that_is_due_first_leaves_first() -> None:
    queue = [total(20, sequence=0), total(10, sequence=1), total(10, sequence=2)]
    assert next_chunk(queue, bytes_per_s=100 * MEGABYTE) == Chunk(1, 500_000)


@pytest.mark.parametrize(("rate", "expected"), [(100 * MEGABYTE, 500_000), (1.0, LEAST_CHUNK_BYTES), (float("inf"), 1 << 40)])
def test_a_chunk_takes_its_seconds_but_is_not_too_small(rate: float, expected: int) -> None:
    assert chunk_bytes(rate, 0.005) == expected


def test_slices_of_a_sum_leave_in_their_order_and_before_later_sums() -> None:
    queue = [Transfer(Traffic.SUM, 0, sequence, turn, 1 << 30) for sequence, turn in ((4, 0), (3, 2), (3, 1))]
    chunk = next_chunk(queue, bytes_per_s=MEGABYTE)
    assert chunk is not None
    assert chunk.position == 2


def test_the_last_chunk_is_what_is_left() -> None:
    assert next_chunk([total(0, num_bytes=10)], bytes_per_s=MEGABYTE) == Chunk(0, 10)


def test_without_a_policy_what_came_first_leaves_whole() -> None:
    assert first_come([]) is None
    queue = [Transfer(Traffic.MESSAGE, 0, 2, 0, 10), Transfer(Traffic.SUM, 5, 1, 0, 1 << 30), Transfer(Traffic.SUM, 1, 3, 0, 7)]
    assert first_come(queue) == Chunk(1, 1 << 30)
