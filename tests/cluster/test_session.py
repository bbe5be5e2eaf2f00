"""Connecting to a cluster that is not there ends soon, and says so."""

from __future__ import annotations

import socket

import pytest
import ray

from raypipe.cluster import session as module
from raypipe.config import ClusterConfig
from raypipe.errors import RunError


def connect(address: str) -> None:
    with module.session(ClusterConfig(address=address), num_devices=1, cpus_per_device=1.0):
        pass


def test_a_port_on_which_nobody_listens_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RunError, match=rf"the Ray cluster at '{address}' cannot be reached: .*refused; check cluster.address"):
            connect(address)


def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        assert timeout <= 30
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(RunError, match="cannot be reached: timed out"):
        connect("192.0.2.77:6379")


@pytest.mark.parametrize("address", ["auto", "ray://host:10001"])
def test_other_addresses_are_left_to_ray(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def init(**options: object) -> None:
        asked.append(options["address"])
        raise ConnectionError("nobody")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunError, match="nobody"):
        connect(address)
    assert asked == [address]
