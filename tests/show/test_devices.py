"""What devices are called."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from raypipe.show.devices import device_labels, device_words, labels_of
from tests.spans import TWO_UPDATES

ONE_EACH = [[0], [1]]


@pytest.mark.parametrize(
    ("names", "stages", "labels", "words"),
    [
        (["192.0.2.2/3", "192.0.2.2/1"], ONE_EACH, ["stage 0", "stage 1"], ["stage 0", "stage 1"]),
        (["device0", "device1"], ONE_EACH, ["stage 0", "stage 1"], ["stage 0", "stage 1"]),
        (["a/5", "a/6"], [[0], [0]], ["stage 0, device 5", "stage 0, device 6"], ["stage 0, device 5", "stage 0, device 6"]),
        (["a/0", "a/1"], [{2, 0}, {1, 3}], ["device 0", "device 1"], ["device 0 (stages 0 and 2)", "device 1 (stages 1 and 3)"]),
        (["a/0", "a/1"], [[0], []], ["device 0", "device 1"], ["device 0 (stage 0)", "device 1"]),
        (["a/0", "b/0"], ONE_EACH, ["a/0", "b/0"], ["a/0 (stage 0)", "b/0 (stage 1)"]),
        (["gpu0", "gpu1"], [[1, 3, 5], range(5)], ["gpu0", "gpu1"], ["gpu0 (stages 1, 3 and 5)", "gpu1 (5 stages)"]),
        (["0", "1"], ONE_EACH, ["0", "1"], ["device 0 (stage 0)", "device 1 (stage 1)"]),
        ([], [], [], []),
    ],
)
def test_devices_of_one_node_are_called_by_their_stages_others_by_their_names(
    names: list[str], stages: list[Collection[int]], labels: list[str], words: list[str]
) -> None:
    assert device_labels(names, stages) == labels
    assert device_words(names, stages) == words


def test_a_trace_tells_the_stages_of_its_devices() -> None:
    assert labels_of(TWO_UPDATES) == ["left", "right"]
    assert labels_of(replace(TWO_UPDATES, devices=("node/0", "node/1"))) == ["stage 0", "stage 1"]
