"""What ways and patterns are chosen by: the paths between devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class LinkPath(Protocol):
    """The path from one member to another; see `raypipe.artifacts.topology.Path`."""

    @property
    def latency_s(self) -> float:
        """Seconds until the first byte arrives."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes per second of a transfer alone."""

    @property
    def resources(self) -> Sequence[tuple[str, float]]:
        """Name and bytes per second of each limited link."""

    @property
    def bottlenecks(self) -> Sequence[str]:
        """What it may share with other paths from its device."""

    @property
    def port(self) -> str | None:
        """What all passes that leaves a node over no stated link."""


PathOf = Callable[[int, int], LinkPath]
"""Returns the path between two members, by position; of infinite latency where they cannot communicate."""
