"""What tables, drawings and sentences call the devices of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from raypipe.artifacts.trace import Trace
from raypipe.units import counted

_MOST_STAGES = 4
# Names that raypipe gives: the number of a device, behind its node if that has an address.
_NUMBERED = re.compile(r"(?:device|(?P<node>.+)/)(?P<number>\d+)", re.DOTALL)


def device_labels(names: Sequence[str], stages: Sequence[Collection[int]]) -> list[str]:
    """Return what short rows call devices: their names, but on one node `stage 2`, or `device 2` where one holds several stages."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    if len(matches) < len(names) or len({match["node"] for match in matches}) > 1:
        return list(names)
    numbers = [f"device {match['number']}" for match in matches]
    if any(len(held) != 1 for held in stages):
        return numbers
    words = list(map(_stage_words, stages))
    alike = Counter(words)
    return [word if alike[word] == 1 else f"{word}, {number}" for word, number in zip(words, numbers, strict=True)]


def stages_of(trace: Trace) -> list[set[int]]:
    """Return the stages that each device of a trace works on."""
    stages: list[set[int]] = [set() for _ in trace.devices]
    for span in trace.spans:
        stages[span.device].update(op.stage for op in span.ops)
    return stages


def labels_of(trace: Trace) -> list[str]:
    """Return the labels of a trace's devices."""
    return device_labels(trace.devices, stages_of(trace))


def device_words(names: Sequence[str], stages: Sequence[Collection[int]]) -> list[str]:
    """Return what sentences call devices: `stage 2`, `device 2 (stage 2)`, `gpu1 (stages 1 and 5)`."""
    return [
        spoken(label) if not held or label.startswith("stage ") else f"{spoken(label)} ({_stage_words(held)})"
        for label, held in zip(device_labels(names, stages), stages, strict=True)
    ]


def spoken(label: str) -> str:
    """Return a name as it stands in a sentence: a bare number is `device 3`."""
    return f"device {label}" if label.isdigit() else label


def _stage_words(stages: Collection[int]) -> str:
    if len(stages) > _MOST_STAGES:
        return counted(len(stages), "stage")
    *most, last = map(str, sorted(stages))
    return f"stages {', '.join(most)} and {last}" if most else f"stage {last}"
