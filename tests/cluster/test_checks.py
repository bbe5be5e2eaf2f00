"""Checks of what actors report of themselves."""

from __future__ import annotations

import dataclasses

import pytest

from raypipe.actors.actor_info import ActorInfo
from raypipe.cluster.checks import channel_text, check_actors, shared_channels
from raypipe.cluster.slots import ClusterNode
from raypipe.config import Transport
from raypipe.errors import ConfigError, RunError

FIRST = ActorInfo(node_id="a" * 40, ip="10.0.0.1", hostname="host", pid=1, num_cores=2, memory_bytes=1 << 30, shares_memory=True)
SECOND = dataclasses.replace(FIRST, node_id="b" * 40)  # of the same host, for all that its name says
INFOS = (FIRST, FIRST, SECOND)
NAMES = ("10.0.0.1/0", "10.0.0.1/1", "10.0.0.1/2")
CHAIN = ((0, 1), (1, 0), (1, 2), (2, 1))


def test_channels_within_a_node_share_memory() -> None:
    assert shared_channels(CHAIN, infos=INFOS, names=NAMES, transport=Transport.AUTO) == {(0, 1), (1, 0)}
    assert shared_channels(CHAIN[:2], infos=INFOS, names=NAMES, transport=Transport.SHM) == {(0, 1), (1, 0)}


def test_connections_of_ones_own_are_between_nodes() -> None:
    assert shared_channels(CHAIN, infos=INFOS, names=NAMES, transport=Transport.TCP) == {(0, 1), (1, 0)}
    assert (
        channel_text(INFOS, num_channels=3, num_shared=2, transport=Transport.TCP) == "2 channels through shared memory, 1 channel over tcp"
    )
    assert channel_text(INFOS, num_channels=4, num_shared=0, transport=Transport.GLOO) == "4 channels over gloo"


def test_gloo_can_be_had_for_all_channels() -> None:
    assert shared_channels(CHAIN, infos=INFOS, names=NAMES, transport=Transport.GLOO) == frozenset()


def test_shared_memory_between_nodes_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"scaling.transport: shm: devices 10\.0\.0\.1/1 on node aaaaaaaa and 10\.0\.0\.1/2 on node bbbbbbbb exchange messages",
    ):
        shared_channels(CHAIN, infos=INFOS, names=NAMES, transport=Transport.SHM)


def test_a_device_that_cannot_share_memory_is_left_to_tcp_or_refused() -> None:
    infos = (FIRST, dataclasses.replace(FIRST, shares_memory=False))
    assert shared_channels(CHAIN[:2], infos=infos, names=NAMES, transport=Transport.AUTO) == frozenset()
    with pytest.raises(ConfigError, match="cannot share memory, for which they need Linux"):
        shared_channels(CHAIN[:2], infos=infos, names=NAMES, transport=Transport.SHM)


GPU = dataclasses.replace(FIRST, gpus=("GPU-1",), gpu_kind="nvidia-h200", nccl="2.32.3")
OTHER_GPU = dataclasses.replace(GPU, pid=2, gpus=("GPU-2",))
SLOTS = ClusterNode(FIRST.node_id, FIRST.ip).slots(2, num_gpus=1.0)


def test_gpus_pass_messages_over_nccl_alone() -> None:
    for transport in (Transport.AUTO, Transport.NCCL):
        assert shared_channels(CHAIN[:2], infos=(GPU, OTHER_GPU), names=NAMES, transport=transport) == frozenset()
    same = (GPU, dataclasses.replace(OTHER_GPU, gpus=GPU.gpus))
    assert shared_channels(CHAIN[:2], infos=same, names=NAMES, transport=Transport.AUTO) == {(0, 1), (1, 0)}
    assert shared_channels(CHAIN[:2], infos=same, names=NAMES, transport=Transport.NCCL) == frozenset()
    with pytest.raises(ConfigError, match="transport: shm: messages between GPUs go over NCCL"):
        shared_channels(CHAIN[:2], infos=(GPU, OTHER_GPU), names=NAMES, transport=Transport.SHM)
    with pytest.raises(ConfigError, match="transport: nccl: the devices are CPU slots"):
        shared_channels(CHAIN[:2], infos=INFOS, names=NAMES, transport=Transport.NCCL)


def test_every_device_has_a_gpu_of_its_own_unless_they_are_to_share_one() -> None:
    check_actors(SLOTS, (GPU, OTHER_GPU))
    same = dataclasses.replace(OTHER_GPU, gpus=GPU.gpus)
    with pytest.raises(RunError, match=r"devices 10\.0\.0\.1/0 and 10\.0\.0\.1/1 both got the GPU GPU-1 on 10\.0\.0\.1"):
        check_actors(SLOTS, (GPU, same))
    check_actors([dataclasses.replace(slot, num_gpus=0.5) for slot in SLOTS], (GPU, same))


def test_a_device_without_the_gpu_that_it_asked_for_is_named() -> None:
    with pytest.raises(RunError, match=r"device 10\.0\.0\.1/1 got no GPU that torch can see on 10\.0\.0\.1; .*torch .* for CUDA"):
        check_actors(SLOTS, (GPU, dataclasses.replace(OTHER_GPU, gpus=())))


def test_devices_with_other_versions_of_nccl_are_named() -> None:
    with pytest.raises(RunError, match=r"versions of NCCL: 2\.25\.1 on 10\.0\.0\.1 \(10\.0\.0\.1/1\), 2\.32\.3 on 10\.0\.0\.1 "):
        check_actors(SLOTS, (GPU, dataclasses.replace(OTHER_GPU, nccl="2.25.1")))
