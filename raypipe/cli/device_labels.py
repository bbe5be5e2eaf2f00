"""What tables call the devices of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import Plan
from raypipe.training.run_schedules import device_stages


def device_labels(plan: Plan) -> dict[str, str]:
    """Return a label for each device name: the device's stages where all are on one node, else its address."""
    if len({plan.topology.node_of(device).name for device in plan.devices}) > 1:
        return {device: f"device {device}" for device in plan.devices}
    stages = device_stages(plan.schedule, plan.placement)
    labels = [f"stage{'s' if len(held) > 1 else ''} {' '.join(map(str, held))}" for held in stages]
    # Devices with the same stages keep their number.
    labels = [f"{label}, device {number}" if labels.count(label) > 1 else label for number, label in enumerate(labels)]
    return dict(zip(plan.devices, labels, strict=True))


def labelled(figures: Iterable[ComparedFigure], plan: Plan) -> Iterator[ComparedFigure]:
    """Yield the figures of a run with the labels of its devices in their names."""
    labels = {f"device {device}": label for device, label in device_labels(plan).items()}
    for figure in figures:
        quantity, of, device = figure.name.partition(" of ")
        yield dataclasses.replace(figure, name=f"{quantity} of {labels[device]}") if of else figure
