"""What the driver decides from facts alone."""

from __future__ import annotations

import dataclasses

import pytest

from raypipe.actors.stage import Whereabouts
from raypipe.config import Transport
from raypipe.coordinator import shared_channels
from raypipe.errors import ConfigError

FIRST = Whereabouts(node_id="a" * 40, ip="10.0.0.1", hostname="host", pid=1, num_cores=2, shares_memory=True)
SECOND = dataclasses.replace(FIRST, node_id="b" * 40)  # of the same host, for all that its name says
PLACES = (FIRST, FIRST, SECOND)
NAMES = ("10.0.0.1/0", "10.0.0.1/1", "10.0.0.1/2")
CHAIN = ((0, 1), (1, 0), (1, 2), (2, 1))


def test_channels_within_a_node_share_memory() -> None:
    assert shared_channels(CHAIN, places=PLACES, names=NAMES, transport=Transport.AUTO) == {(0, 1), (1, 0)}
    assert shared_channels(CHAIN[:2], places=PLACES, names=NAMES, transport=Transport.SHM) == {(0, 1), (1, 0)}


def test_gloo_can_be_had_for_all_channels() -> None:
    assert shared_channels(CHAIN, places=PLACES, names=NAMES, transport=Transport.GLOO) == frozenset()


def test_shared_memory_between_nodes_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"scaling.transport: shm: devices 10\.0\.0\.1/1 on node aaaaaaaa and 10\.0\.0\.1/2 on node bbbbbbbb exchange messages",
    ):
        shared_channels(CHAIN, places=PLACES, names=NAMES, transport=Transport.SHM)


def test_a_device_that_cannot_share_memory_is_left_to_gloo_or_refused() -> None:
    places = (FIRST, dataclasses.replace(FIRST, shares_memory=False))
    assert shared_channels(CHAIN[:2], places=places, names=NAMES, transport=Transport.AUTO) == frozenset()
    with pytest.raises(ConfigError, match="cannot share memory, for which they need Linux"):
        shared_channels(CHAIN[:2], places=places, names=NAMES, transport=Transport.SHM)
