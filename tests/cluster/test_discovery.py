"""Where the actors of a run that were lost find another slot."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from raypipe.cluster.discovery import end_processes, spare_slots
from raypipe.cluster.slots import ClusterNode, DeviceSlot

A = ClusterNode("a", "10.0.0.1", label="a", num_cpus=2)
B = ClusterNode("b", "10.0.0.2", label="b", num_cpus=2)
GPUS = ClusterNode("g", "10.0.0.3", label="g", num_cpus=8, num_gpus=1, accelerators=("H200",))
SLOTS = [DeviceSlot(A, "a/0"), DeviceSlot(B, "b/0"), DeviceSlot(B, "b/1")]


def spare(monkeypatch: pytest.MonkeyPatch, nodes: list[ClusterNode], lost: list[int], *, without: tuple[str, ...] = ()) -> dict[int, str]:
    monkeypatch.setattr("raypipe.cluster.discovery.cluster_nodes", lambda: nodes)
    return {number: slot.name for number, slot in spare_slots(SLOTS, lost, {"CPU": 1.0}, without=without).items()}


def test_an_actor_comes_back_where_it_was_while_its_node_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spare(monkeypatch, [A, B], [0, 2]) == {0: "a/0", 2: "b/1"}


def test_actors_of_a_lost_node_take_the_room_that_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    # The run has one of two CPUs there.
    assert spare(monkeypatch, [A, dataclasses.replace(B, alive=False)], [1, 2]) == {1: "a/1"}


def test_a_node_that_does_not_answer_is_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spare(monkeypatch, [A, B], [1], without=("b",)) == {1: "a/1"}


def test_a_node_that_is_not_reached_is_not_waited_for_to_end_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.cluster.discovery.listens", lambda _address, _port, *, timeout_s: timeout_s < 0)
    assert end_processes([(dataclasses.replace(node, port=7001), 12) for node in (A, B)]) == {"a", "b"}
    assert end_processes([]) == set()


def test_nothing_is_left_to_end_on_a_node_where_ray_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert end_processes([(dataclasses.replace(A, address="127.0.0.1", port=port), 12)]) == {"a"}


def test_a_cpu_slot_is_not_replaced_by_one_of_a_node_with_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spare(monkeypatch, [GPUS, A], [1, 2]) == {1: "a/1"}
