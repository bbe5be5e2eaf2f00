"""Finds ports for services that tests start."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Ports outside of the range from which Ray takes those of its workers."""
    found: list[int] = []
    for port in range(6400, 10000):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")
