"""By how much the clocks of a run's nodes are ahead of the driver's."""

from __future__ import annotations

import logging
import time

from raypipe.cluster.stage_actors import CONTROL, StageActors
from raypipe.network.clocks import Exchange, offset

_LOG = logging.getLogger("raypipe.cluster.node_clocks")
_NUM_READINGS = 15  # the quickest counts
_VALID_S = 60.0  # at a drift of 20 ppm, clocks are about a millisecond off after that


class NodeClocks:
    """Clock offsets of a run's devices against the driver."""

    def __init__(self, actors: StageActors) -> None:
        self.offsets_s: tuple[float, ...] = ()  # by which each device's clock is ahead; empty if all devices are on one node
        self._actors = actors
        self._read_s = 0.0

    def refresh(self) -> None:
        """Read the clocks again if the last reading is too old."""
        if time.monotonic() - self._read_s > _VALID_S:
            self.read()

    def read(self) -> None:
        """Read the clock of each node."""
        self._read_s = time.monotonic()
        nodes = [member.slot.node.node_id for member in self._actors.members]
        if len(set(nodes)) == 1:
            self.offsets_s = ()
            return
        device_of = {node: nodes.index(node) for node in nodes}
        exchanges: dict[str, list[Exchange]] = {node: [] for node in device_of}
        for _ in range(_NUM_READINGS):
            for node, device in device_of.items():
                asked_s = time.time()
                (answered_s,) = self._actors.ask(
                    "reading the clocks",
                    lambda _, actor: actor.read_clock.options(concurrency_group=CONTROL).remote(),
                    devices=[device],
                    timeout_s=self._actors.cluster.silence_timeout_s,
                ).values()
                exchanges[node].append(Exchange(asked_s, answered_s, answered_s, time.time()))
        offsets = {node: offset(of_node) for node, of_node in exchanges.items()}
        for node, clock in offsets.items():
            _LOG.debug("the clock of node %s is ahead by %.6f s, at most %.6f s off", node[:8], clock.offset_s, clock.residual_s)
        self.offsets_s = tuple(offsets[node].offset_s for node in nodes)
