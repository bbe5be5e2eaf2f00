"""What the driver tells actors before they connect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from raypipe.actors.actor_info import ActorInfo
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.stage_actors import StageActors
from raypipe.communication.ways import Wiring
from raypipe.config import ClusterConfig, ScalingConfig, Transport

INFO = ActorInfo(node_id="a" * 40, ip="10.0.0.1", hostname="host", pid=1, num_cores=2, memory_bytes=1 << 30, shares_memory=True)
CLUSTER = ClusterConfig(start_timeout_s=120.0, silence_timeout_s=30.0)


@pytest.mark.parametrize(
    ("gpus", "epoch", "expected_s"),
    [((), 0, 120.0), ((), 1, 30.0), (("GPU-1",), 0, 120.0), (("GPU-1",), 1, 120.0)],
    ids=["first", "again", "first, on a GPU", "again, on a GPU"],
)
def test_devices_that_meet_again_are_soon_there_but_on_gpus_where_a_new_one_may_compile(
    gpus: tuple[str, ...], epoch: int, expected_s: float
) -> None:
    info = ActorInfo(**(vars(INFO) | {"gpus": gpus, "nccl": "2.28.9" if gpus else ""}))
    coordinator = SimpleNamespace(
        run="run",
        cluster=CLUSTER,
        transport=Transport.AUTO,
        actors=SimpleNamespace(infos=(info,), open_store=lambda: None),
        device_names=("10.0.0.1/0",),
        patterns={},
        _programs={},
        _wiring=Wiring(),
        _epoch=epoch,
    )
    assert Coordinator._connect_order(cast("Coordinator", coordinator)).connect_timeout_s == expected_s


@pytest.mark.parametrize(
    ("nodes", "num_cores", "threads", "expected"),
    [("ab", 1, 1, ""), ("ab", 2, 1, "ab"), ("aab", 2, 1, "b"), ("aab", 4, 2, "b"), ("aab", 5, 2, "ab"), ("xab", 2, 1, "ab")],
)
def test_nodes_whose_devices_use_all_cores_have_none_to_spare(nodes: str, num_cores: int, threads: int, expected: str) -> None:
    info = ActorInfo(**(vars(INFO) | {"num_cores": num_cores}))
    actors = SimpleNamespace(
        scaling=ScalingConfig(threads_per_device=threads),
        launched_infos=(info,) * len(nodes),
        alive=lambda: {
            number: SimpleNamespace(slot=SimpleNamespace(node=node))
            for number, node in enumerate(nodes)
            if node != "x"  # lost
        },
    )
    found = {idle: {*map(str, StageActors.nodes(cast("StageActors", actors), with_idle_core=idle))} for idle in (True, False)}
    assert found == {True: set(expected), False: set(nodes) - {"x"}}
