"""How what a configuration names is settled once layers are measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.cluster.coordinator import Coordinator
from raypipe.config import DataConfig, ModelConfig, ScalingConfig, ScheduleConfig, TrainConfig
from raypipe.errors import PlanError
from raypipe.models.mlp import mlp
from raypipe.schedules.metrics import metrics
from raypipe.training.checks import check_alike, check_staleness
from raypipe.training.run_cluster import num_measuring_devices
from raypipe.training.strategy import NamedStrategy

DEPTH = 6


def coordinator(*nodes: str, num_cores: int = 1) -> Coordinator:
    """A coordinator of CPU devices on these nodes."""
    infos, slots = [SimpleNamespace(num_cores=num_cores, gpus=())], [SimpleNamespace(node=node) for node in nodes]
    return cast("Coordinator", SimpleNamespace(actors=SimpleNamespace(infos=infos), slots=slots))


COORDINATOR = coordinator("a")


def unequal(num_layers: int) -> ModelProfile:
    layers = tuple(
        LayerProfile(
            name=f"layer{number}",
            forward_s=1.0 + number % 3,
            backward_s=2.0 + number % 2,
            weight_grad_s=1.0 + number % 2,
            output_bytes=8,
            saved_bytes=8,
            parameter_bytes=8,
        )
        for number in range(num_layers)
    )
    return ModelProfile(name="unequal", microbatch_size=1, layers=layers)


@pytest.mark.parametrize("limit", [None, 1])
def test_an_order_for_measured_times_is_taken_only_where_it_keeps_what_was_allowed(tmp_path: Path, limit: int | None) -> None:
    topology = tmp_path / "topology.yaml"
    devices = tuple(Device(f"n/{number}", "cpu") for number in range(DEPTH))
    ClusterTopology(name="lab", nodes=(Node(name="n", devices=devices, link=NodeLink(latency_s=0.0)),)).save(topology)
    config = TrainConfig(
        model=ModelConfig(function="raypipe.models.mlp:mlp"),
        data=DataConfig(path=""),
        schedule=ScheduleConfig(name="amdp", num_microbatches=6, microbatch_size=1, num_pipelines=2, max_staleness=limit),
        scaling=ScalingConfig(num_devices=DEPTH, topology=str(topology), layers_per_stage=(1,) * DEPTH),
    )
    strategy = NamedStrategy(config, mlp(num_layers=DEPTH), window_sizes={10})
    before = strategy.schedule
    check_staleness(config, before)
    notices: list[str] = []
    strategy.prepare(COORDINATOR, name="test", measure=lambda _: unequal(DEPTH), notice=notices.append)
    assert strategy.schedule.pipelines == before.pipelines
    assert (strategy.schedule == before) == (limit is not None)
    assert metrics(strategy.schedule).max_delay == (2 if limit is None else 1)
    assert [notice for notice in notices if "max_staleness is 1, but 'amdp'" in notice] == notices
    assert len(notices) == (limit is not None)


def test_devices_of_two_sorts_are_refused_in_one_run() -> None:
    devices = tuple(Device(f"n/{number}", kind) for number, kind in enumerate(("cpu", "cpu-slow", "h200", "a100")))
    topology = ClusterTopology(name="lab", nodes=(Node(name="n", devices=devices, link=NodeLink(latency_s=0.0)),))
    check_alike(topology, ["n/0", "n/1"])
    check_alike(topology, ["n/2", "n/3"])
    with pytest.raises(PlanError, match=r"device 'n/1' is a CPU slot, 'n/3' a GPU"):
        check_alike(topology, ["n/1", "n/3"])


@pytest.mark.parametrize(("nodes", "num_cores", "threads", "expected"), [("aaaa", 1, 1, 2), ("aaab", 8, 1, 3), ("aaaa", 4, 4, 2)])
def test_as_many_devices_of_a_node_measure_at_once_as_train_there_but_two_for_a_core_at_most(
    nodes: str, num_cores: int, threads: int, expected: int
) -> None:
    assert num_measuring_devices(coordinator(*nodes, num_cores=num_cores), ScalingConfig(threads_per_device=threads)) == expected
