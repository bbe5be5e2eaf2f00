"""The page of a run: its stages and layers, loss and speed, measured memory and configuration."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from raypipe.artifacts.trace import Source
from raypipe.show.page import draw_page
from raypipe.show.run_sections import RunData, curve
from raypipe.simulation.simulator import simulate
from tests.callbacks.events import PLAN
from tests.show.test_page import Reader

PREDICTED = simulate(PLAN)
MEASURED = replace(PREDICTED, source=Source.MEASURED, memory=(((0.0, 1_500_000),), ((0.0, 2_500_000),)))


def data(**changes: Any) -> RunData:
    lines: list[dict[str, Any]] = [{"update": 0, "validation_loss": 5.5}]
    lines += [{"update": update, "loss": 5.0 - update / 10, "samples_per_s": 100.0 + update} for update in range(1, 11)]
    lines += [{"update": 11, "loss": None, "samples_per_s": 100.0}]
    known: dict[str, Any] = {"name": "gpt-3", "plan": PLAN, "metrics": lines, "config": "run: {name: <gpt>}\n", "trace": MEASURED}
    return RunData(**known | changes)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page))


def test_the_page_of_a_run_has_all_that_is_known_of_it() -> None:
    page = draw_page((PREDICTED, MEASURED), data(notes=["it ended after update 10: no room"]))
    reader = Reader(page)
    assert reader.text_of("h1") == ["gpt-3"]
    body = text_of(page.split('<script type="application/json"')[0])
    for expected in (
        "loss after 10 updates 4.9 to 4",
        "validation loss 5.5 to 5.5",
        "speed 100 rows/s",
        "it ended after update 10: no room",
        "stage 0 device0 layer0, layer1 2",
        "stage 1 device1 layer2, layer3 2",
        "1.5 MB",
        "2.5 MB",
        "Configuration (1 line)",
        "run: {name: &lt;gpt&gt;}",
    ):
        assert expected in body
    assert [attributes["aria-label"] for tag, attributes in reader.elements if tag == "svg" and attributes.get("role") == "img"][:2] == [
        "loss: training 4.9 to 4, validation 5.5 to 5.5",
        "rows/s: speed 101 to 100",
    ]


def test_a_run_without_a_window_has_its_stages_and_no_curves() -> None:
    page = draw_page((PREDICTED,), data(metrics=[], trace=None))
    assert 'id="stages"' in page
    assert 'id="training"' not in page


def test_a_run_with_tokens_counts_tokens() -> None:
    run = data(metrics=[{"update": 1, "loss": 1.0, "samples_per_s": 2.0, "tokens_per_s": 256.0}])
    assert (run.speed, run.unit) == ("tokens_per_s", "tokens/s")


def test_long_runs_are_drawn_by_their_means_and_a_flat_line_is_drawn_too() -> None:
    drawn = curve("loss", {"training": [(update, float(update)) for update in range(1, 10_001)]})
    (path,) = re.findall(r'class="line line-0" d="M([^"]+)"', drawn)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    assert len(points) == 400
    assert points == sorted(points, key=lambda point: (point[0], -point[1])), "it rises"
    assert "NaN" not in curve("loss", {"training": [(1, 2.0)]})
    assert all(math.isfinite(float(number)) for number in re.findall(r"[\d.]+(?=[ L\"])", path))


@pytest.mark.parametrize("name", ["</style><b>", "a\x1b[31m"])
def test_nothing_in_a_run_can_act_on_its_page(name: str) -> None:
    page = draw_page((PREDICTED,), data(name=name, config=name, notes=[name]))
    assert name not in page
    Reader(page)
