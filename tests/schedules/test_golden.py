"""The orders of the bundled schedules, reviewed as a diff when they change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raypipe.schedules import catalogue
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.text import to_csv
from tests import strategies

SIZES = [ScheduleRequest(4, 8), ScheduleRequest(3, 2, 2), ScheduleRequest(2, 5)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"d{size.num_devices}-m{size.num_microbatches}-u{size.num_updates}")
@pytest.mark.parametrize("name", [name for name in strategies.SPEC_NAMES if name != "interleaved"])
def test_the_order_is_the_reviewed_one(name: str, size: ScheduleRequest, golden: Callable[[str, str], None]) -> None:
    check(name, strategies.near(name, size.num_devices, size.num_microbatches, size.num_updates), golden)


@pytest.mark.parametrize("name", strategies.CHIMERAS)
def test_the_order_of_four_pipelines_is_the_reviewed_one(name: str, golden: Callable[[str, str], None]) -> None:
    check(name, ScheduleRequest(4, 8, num_pipelines=4), golden)


@pytest.mark.parametrize(
    "size",
    [
        ScheduleRequest(4, 8, num_chunks=2),
        ScheduleRequest(2, 4, num_chunks=3),
        ScheduleRequest(3, 2, 2, num_chunks=2),
        ScheduleRequest(4, 10, num_chunks=2),
    ],
    ids=lambda size: f"d{size.num_devices}-m{size.num_microbatches}-u{size.num_updates}-v{size.num_chunks}",
)
def test_the_interleaved_order_is_the_reviewed_one(size: ScheduleRequest, golden: Callable[[str, str], None]) -> None:
    check("interleaved", size, golden)


def check(name: str, size: ScheduleRequest, golden: Callable[[str, str], None]) -> None:
    chunks = f"-v{size.num_chunks}" if size.num_chunks > 1 else ""
    pipelines = f"-p{size.num_pipelines}" if size.num_pipelines else ""
    file = f"{name}-d{size.num_devices}-m{size.num_microbatches}-u{size.num_updates}{chunks}{pipelines}.csv"
    golden(file, to_csv(catalogue.build(name, size).programs))
