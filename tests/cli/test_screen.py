"""What tables call the devices of a run."""

from __future__ import annotations

import pytest

from raypipe.analysis.comparison import ComparedFigure
from raypipe.artifacts.plan import Plan, make_plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cli.screen import device_labels, labelled
from raypipe.planning.balance import balanced_cut
from raypipe.schedules.catalogue import build
from raypipe.schedules.request import ScheduleRequest


def plan(name: str, *, devices_per_node: int) -> Plan:
    profile = ModelProfile.uniform(8)
    topology = ClusterTopology.uniform(2, devices_per_node=devices_per_node)
    schedule = build(name, ScheduleRequest(num_devices=2, num_microbatches=4, num_chunks=2 if name == "interleaved" else 1))
    return make_plan(
        name="test",
        planner="balanced",
        cut=balanced_cut(profile, schedule.num_stages),
        schedule=schedule,
        profile=profile,
        topology=topology,
        devices=tuple(device.name for device in topology.devices),
        microbatch_size=1,
    )


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("1f1b", ["stage 0", "stage 1"]),
        ("interleaved", ["stages 0 2", "stages 1 3"]),
        ("chimera", ["stages 0 1, device 0", "stages 0 1, device 1"]),
    ],
)
def test_devices_of_one_node_are_called_by_their_stages(name: str, labels: list[str]) -> None:
    assert list(device_labels(plan(name, devices_per_node=2)).values()) == labels


def test_devices_of_several_nodes_keep_their_names() -> None:
    spread = plan("1f1b", devices_per_node=1)
    assert list(device_labels(spread).values()) == [f"device {device}" for device in spread.devices]


def test_figures_carry_the_labels_of_their_devices() -> None:
    on_one = plan("1f1b", devices_per_node=2)
    figures = [
        ComparedFigure("bubble", "ratio", 0.5, 0.5, 0.0),
        ComparedFigure(f"bubble of device {on_one.devices[1]}", "ratio", 0.5, 0.5, 0.0),
    ]
    assert [figure.name for figure in labelled(figures, on_one)] == ["bubble", "bubble of stage 1"]
