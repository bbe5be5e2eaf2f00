"""The orders of the bundled schedules, reviewed as a diff when they change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raypipe.schedules import catalogue
from raypipe.schedules.ir import Size
from raypipe.schedules.text import to_csv
from tests import strategies

SIZES = [Size(4, 8), Size(3, 2, 2), Size(2, 5)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"d{size.num_devices}-m{size.num_microbatches}-u{size.num_updates}")
@pytest.mark.parametrize("name", [name for name in strategies.FAMILY_NAMES if name != "interleaved"])
def test_the_order_is_the_reviewed_one(name: str, size: Size, golden: Callable[[str, str], None]) -> None:
    check(name, strategies.near(name, size.num_devices, size.num_microbatches, size.num_updates), golden)


@pytest.mark.parametrize("name", strategies.CHIMERAS)
def test_the_order_of_four_pipelines_is_the_reviewed_one(name: str, golden: Callable[[str, str], None]) -> None:
    check(name, Size(4, 8, num_pipelines=4), golden)


@pytest.mark.parametrize(
    "size",
    [Size(4, 8, num_chunks=2), Size(2, 4, num_chunks=3), Size(3, 2, 2, num_chunks=2), Size(4, 10, num_chunks=2)],
    ids=lambda size: f"d{size.num_devices}-m{size.num_microbatches}-u{size.num_updates}-v{size.num_chunks}",
)
def test_the_interleaved_order_is_the_reviewed_one(size: Size, golden: Callable[[str, str], None]) -> None:
    check("interleaved", size, golden)


def check(name: str, size: Size, golden: Callable[[str, str], None]) -> None:
    chunks = f"-v{size.num_chunks}" if size.num_chunks > 1 else ""
    pipelines = f"-p{size.num_pipelines}" if size.num_pipelines else ""
    file = f"{name}-d{size.num_devices}-m{size.num_microbatches}-u{size.num_updates}{chunks}{pipelines}.csv"
    golden(file, to_csv(catalogue.build(name, size).programs))
