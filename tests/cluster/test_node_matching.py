"""The slots of a plan's devices, from what Ray reports of its nodes."""

from __future__ import annotations

import dataclasses

import pytest

from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.cluster.node_matching import is_gpu, match_slots, num_slots
from raypipe.cluster.slots import ClusterNode
from raypipe.config import ScalingConfig
from raypipe.errors import PlanError


def topology(*nodes: tuple[str, int], kind: str = "cpu") -> ClusterTopology:
    return ClusterTopology(
        name="lab",
        nodes=tuple(Node(name=name, devices=tuple(Device(f"{name}/{number}", kind) for number in range(count))) for name, count in nodes),
        default_link=NodeLink(latency_s=1e-4),
    )


NODES = (
    ClusterNode("a" * 40, "10.0.0.1", hostname="left", num_cpus=4),
    ClusterNode("b" * 40, "10.0.0.2", hostname="right", label="lab-2", num_cpus=2, num_gpus=2, accelerators=("H200",)),
    ClusterNode("c" * 40, "10.0.0.3", hostname="gone", num_cpus=8, alive=False),
)


def place(lab: ClusterTopology, *devices: str, cpus_per_device: float = 1.0, stand_ins: bool = False) -> list[str]:
    slots = match_slots(lab, devices, NODES, scaling=ScalingConfig(cpus_per_device=cpus_per_device), stand_ins=stand_ins)
    assert [slot.name for slot in slots] == list(devices)
    return [slot.node.address for slot in slots]


def refused(lab: ClusterTopology, *devices: str, cpus_per_device: float = 1.0) -> str:
    with pytest.raises(PlanError, match="the cluster is not the one that the plan was made for") as caught:
        match_slots(lab, devices, NODES, scaling=ScalingConfig(cpus_per_device=cpus_per_device))
    return str(caught.value)


def test_a_node_is_found_by_label_address_or_host_name() -> None:
    for right in ("lab-2", "10.0.0.2", "right"):
        for left in ("10.0.0.1", "left"):
            lab = topology((left, 2), (right, 2))
            assert place(lab, f"{right}/1", f"{left}/0", f"{right}/0") == ["10.0.0.2", "10.0.0.1", "10.0.0.2"]


def test_a_label_comes_before_an_address_of_another_node() -> None:
    nodes = (NODES[0], dataclasses.replace(NODES[1], label="10.0.0.1"))
    (slot,) = match_slots(topology(("10.0.0.1", 1)), ["10.0.0.1/0"], nodes, scaling=ScalingConfig())
    assert slot.node.address == "10.0.0.2"


def test_what_is_missing_is_named_with_what_is_there() -> None:
    message = refused(topology(("10.0.0.9", 1), ("left", 1)), "10.0.0.9/0", "left/0")
    assert "node '10.0.0.9' (device 10.0.0.9/0) is not there: no node has this label, address or host name" in message
    assert "Its nodes: 10.0.0.1 with 4 CPU; lab-2 10.0.0.2 with 2 CPU, 2 GPU." in message


def test_a_node_that_died_is_named_so() -> None:
    assert "node '10.0.0.3' (devices 10.0.0.3/0, 10.0.0.3/1) is no longer alive" in refused(
        topology(("10.0.0.3", 2)), "10.0.0.3/0", "10.0.0.3/1"
    )


def test_a_node_with_fewer_cpus_than_the_plan_uses_is_refused() -> None:
    lab = topology(("right", 3))
    assert place(lab, "right/0", "right/1") == ["10.0.0.2"] * 2
    assert "device 'right/2' is slot of 1 CPU number 3 of its node, node 10.0.0.2 has 2" in refused(lab, "right/2")
    assert "device 'right/1' is slot of 2 CPU number 2 of its node, node 10.0.0.2 has 1" in refused(lab, "right/1", cpus_per_device=2.0)
    assert place(lab, "right/2", cpus_per_device=0.5) == ["10.0.0.2"]
    assert place(lab, "right/2", cpus_per_device=0.0) == ["10.0.0.2"]


def test_two_nodes_of_the_topology_on_one_of_the_cluster_are_refused() -> None:
    assert "nodes '10.0.0.1' and 'left' are one node" in refused(topology(("10.0.0.1", 1), ("left", 1)), "10.0.0.1/0", "left/0")


def test_a_name_of_two_nodes_of_the_cluster_is_refused_until_they_have_labels() -> None:
    twins = tuple(dataclasses.replace(NODES[0], node_id=letter * 40) for letter in "ab")
    with pytest.raises(PlanError, match=r"could be any of 2 nodes \(aaaaaaaa, bbbbbbbb\), which must each have a label raypipe.io/node"):
        match_slots(topology(("left", 1)), ["left/0"], twins, scaling=ScalingConfig())
    labelled = (twins[0], dataclasses.replace(twins[1], label="left"))
    (slot,) = match_slots(topology(("left", 1)), ["left/0"], labelled, scaling=ScalingConfig())
    assert slot.node is labelled[1]


def test_devices_of_another_kind_are_refused_unless_they_are_stood_in_for() -> None:
    assert place(topology(("right", 2), kind="h200"), "right/1") == ["10.0.0.2"]
    assert place(topology(("right", 2), kind="gpu"), "right/1") == ["10.0.0.2"]
    assert "device 'right/0' is of kind 'a100', node 10.0.0.2 has H200" in refused(topology(("right", 1), kind="a100"), "right/0")
    assert "device 'right/2' is GPU (kind 'h200') number 3 of its node, node 10.0.0.2 has 2" in refused(
        topology(("right", 3), kind="h200"), "right/2"
    )
    assert "device 'left/0' is GPU (kind 'h200') number 1 of its node, node 10.0.0.1 has 0" in refused(
        topology(("left", 1), kind="h200"), "left/0"
    )
    assert place(topology(("left", 1), kind="h200"), "left/0", stand_ins=True) == ["10.0.0.1"]


def test_slots_and_gpus_of_a_node_are_counted_apart() -> None:
    mixed = ClusterTopology(
        name="mixed",
        nodes=(Node(name="right", devices=(Device("g0", "h200"), Device("c0", "cpu-fast"), Device("g1", "h200"), Device("c1", "cpu"))),),
        default_link=NodeLink(latency_s=0.0),
    )
    assert [is_gpu(device) for device in mixed.devices] == [True, False, True, False]
    assert place(mixed, "c1", "g1") == ["10.0.0.2"] * 2


def test_all_that_changed_is_told_at_once() -> None:
    message = refused(topology(("left", 5), ("lost", 1), ("10.0.0.3", 1)), "left/4", "lost/0", "10.0.0.3/0")
    assert message.count(";") >= 3
    assert "number 5" in message
    assert "'lost'" in message
    assert "no longer alive" in message


def test_a_single_node_needs_slots_up_to_the_last_that_is_used() -> None:
    assert num_slots(topology(("a", 4), ("b", 2)), ["a/2", "b/0"]) == 3


@pytest.mark.parametrize(
    ("kind", "accelerator", "same"),
    [
        ("nvidia-a100-sxm4-40gb", "A100", True),
        ("nvidia-a100-sxm4-40gb", "A100-40G", True),
        ("nvidia-a100-sxm4-40gb", "A100-80G", False),
        ("rtx4090", "NVIDIA-GeForce-RTX-4090", True),
        ("nvidia-l40s", "L4", False),
        ("a10", "A100", False),
        ("nvidia-a100", "A10", False),
        ("gpu", "H200", True),
    ],
)
def test_kinds_of_gpus_are_compared_by_whole_words(kind: str, accelerator: str, same: bool) -> None:
    nodes = [ClusterNode("d" * 40, "10.0.0.4", hostname="far", num_cpus=2, num_gpus=1, accelerators=(accelerator,))]
    lab = topology(("far", 1), kind=kind)
    if same:
        assert [slot.num_gpus for slot in match_slots(lab, ["far/0"], nodes, scaling=ScalingConfig())] == [1.0]
    else:
        with pytest.raises(PlanError, match=f"is of kind '{kind}', node 10.0.0.4 has {accelerator}"):
            match_slots(lab, ["far/0"], nodes, scaling=ScalingConfig())
