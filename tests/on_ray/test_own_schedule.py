"""Training with an order of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe import schedule_registry
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.text import to_torch_csv
from tests.on_ray.test_training import NUM_MICROBATCHES, trainer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("shared_actors")]

EAGER = f"{Path(__file__).parents[2]}/examples/own_schedule.py:eager"


def test_an_order_from_a_file_trains_as_1f1b_does_in_windows_of_any_size(tmp_path: Path) -> None:
    """Ten updates are a window of seven and one of three; the file holds one."""
    order = schedule_registry.build(EAGER, ScheduleRequest(3, NUM_MICROBATCHES))
    (tmp_path / "order.csv").write_text(to_torch_csv(order.programs))
    own = trainer(tmp_path, schedule=str(tmp_path / "order.csv"), devices=3, num_updates=10).fit()
    bundled = trainer(tmp_path, schedule="1f1b", devices=3, num_updates=10).fit()
    assert own.losses == pytest.approx(bundled.losses, abs=1e-12)
    assert own.plan.schedule.name == "order"
