"""The tables of `benchmarks/time_to_loss.py`, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from time_to_loss_report import Found, tables
from time_to_loss_runs import LossKey, Store, synchronous_delays

NUM_UPDATES, START, RATE = 20, 4, 0.01
LATE = "0123456789ab"
LAYERS_OF = "muon-nadamw"


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """A synchronous schedule whose loss falls by 0.5 from 10 to 20 updates, and a late one with and without a start on time."""
    store = Store(tmp_path)
    on_time = synchronous_delays(store, "gpt")
    store.put("delays", LATE, {"layers": [[0]], "tables": [[[[0, 0]]], [[[1, 1]]]], "period": 1, "keeps_versions": True})
    for name, digest, update_s, drained_s in (("1f1b-K=1", on_time, 3.0, 3.0), ("pipedream-2bw-K=1", LATE, 2.0, 3.0)):
        cell = {"sizes": [16], "update_s": update_s, "drained_s": drained_s, "bubble": 0.0, "delays": digest}
        store.put("seconds", f"gpt-{LAYERS_OF}-{name}", cell)
    for optimizer, num_updates, digest, start, loss in (
        ("muon-nadamw", NUM_UPDATES // 2, on_time, 0, 2.5),
        ("muon-nadamw", NUM_UPDATES, on_time, 0, 2.0),
        ("muon-nadamw-corrected", NUM_UPDATES, LATE, 0, 2.5),
        ("muon-nadamw-corrected", NUM_UPDATES, LATE, START, 2.25),
    ):
        key = LossKey("gpt", optimizer, RATE, num_updates, 0, digest, start)
        store.put("losses", str(key), vars(key) | {"losses": [loss] * num_updates, "validation": {str(num_updates): loss}})
    return Found(store, NUM_UPDATES)


def test_seconds_to_a_loss_count_the_drained_updates(found: Found) -> None:
    rows = next(rows for title, rows in tables(found, "gpt", LAYERS_OF) if title.startswith("gpt, muon-nadamw-corrected"))
    by_start = {row["on time"]: row for row in rows}
    # L = a - b ln N with b = 0.5 / ln 2: a difference of 0.5 takes twice as many updates, one of 0.25 the root of that.
    assert float(by_start["0 of 20"]["same loss, times as soon"]) == pytest.approx(3 / 2 / 2, abs=1e-3)
    mean_s = (4 * 3 + 16 * 2) / 20
    assert float(by_start["4 of 20"]["same loss, times as soon"]) == pytest.approx(3 / mean_s / math.sqrt(2), abs=1e-3)


def test_a_late_curve_is_compared_with_the_synchronous_one_of_its_seed(found: Found) -> None:
    rows = next(rows for title, rows in tables(found, "gpt", LAYERS_OF) if "validation loss" in title)
    over = {row["on time"]: row["over synchronous"] for row in rows if row["optimizer"] == "muon-nadamw-corrected"}
    assert over == {"0 of 20": "+25.00%", "4 of 20": "+12.50%"}


def test_a_late_curve_is_compared_with_the_same_order_on_time_where_that_is_asked_for(found: Found) -> None:
    key = LossKey("gpt", "muon-nadamw-corrected", RATE, NUM_UPDATES, 0, LATE, NUM_UPDATES)
    found.store.put("losses", str(key), vars(key) | {"losses": [2.2] * NUM_UPDATES, "validation": {str(NUM_UPDATES): 2.2}})
    rows = next(rows for title, rows in tables(found, "gpt", LAYERS_OF) if "validation loss" in title)
    over = {row["on time"]: row["over synchronous"] for row in rows if row["optimizer"] == "muon-nadamw-corrected"}
    assert over == {"0 of 20": "+25.00%", "4 of 20": "+12.50%", "20 of 20": "+10.00%"}
    assert found.starts("gpt", "muon-nadamw-corrected", LATE) == [0, START]
    whole, of_same_order = (found.more_updates("gpt", "muon-nadamw-corrected", LATE, of_same_order=flag) for flag in (False, True))
    assert whole is not None
    assert of_same_order is not None
    assert math.log(of_same_order) / math.log(whole) == pytest.approx((2.5 - 2.2) / (2.5 - 2.0))


def test_runs_with_another_start_are_other_cells() -> None:
    keys = [LossKey("gpt", "muon", RATE, NUM_UPDATES, 0, LATE, start) for start in (0, 1, 4)]
    assert len({str(key) for key in keys}) == 3
    assert "synchronous" not in str(keys[0]), "runs without a start on time keep the names that they had"
