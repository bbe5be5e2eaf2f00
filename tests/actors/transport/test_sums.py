"""What comes for a sum goes on without a lock of that sum, and in any order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from raypipe.actors.transport.tcp_sum import TcpSum
from raypipe.actors.transport.tcp_way import Way
from raypipe.communication.patterns import ring
from raypipe.communication.policy import Communication
from raypipe.schedules.collectives import Collective, CollectiveKind

NUMEL = 3000


class WritesForOthers:
    """A sender of whose threads each writes, once all have submitted something, what the other one's sum has in its queue."""

    def __init__(self, count: int) -> None:
        self.met = threading.Barrier(count, timeout=10)
        self.sums: list[TcpSum] = []
        self.submitted: list[tuple[Any, int]] = []

    def submit(self, entry: Any, ready: int) -> None:
        self.submitted.append((entry, ready))
        self.met.wait()
        for other in self.sums:
            if other is not entry.total:
                other.left(0)


def link(peer: int) -> Any:
    return SimpleNamespace(peer=peer, broken=None, forget=lambda identity: None)


def sums(sender: Any, count: int) -> list[TcpSum]:
    group: Any = SimpleNamespace(
        members=(0, 1, 2), position=0, pattern=ring(range(3)), exchange=ring(range(3)), links={1: link(1), 2: link(2)}, sender=sender
    )
    return [
        TcpSum(
            group, torch.ones(NUMEL), identity=number, collective=Collective(CollectiveKind.GRADIENTS, number, 0, 0, (0, 1, 2)), deadline=0
        )
        for number in range(count)
    ]


def test_two_threads_that_each_write_for_the_other_ones_sum_do_not_wait_for_each_other() -> None:
    sender = WritesForOthers(2)
    sender.sums = sums(sender, 2)
    piece = memoryview(np.ones(NUMEL // 3, dtype=np.float32).tobytes())
    # In a ring a member adds the shares of the one before it, and sends on what it has added.
    threads = [threading.Thread(target=each.add, args=(2, 2 * len(piece), piece), daemon=True) for each in sender.sums]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(sender.submitted) == 2


def test_what_is_brought_in_another_order_leaves_once() -> None:
    total = sums(WritesForOthers(1), 1)[0]
    flow = next(flow for each in total._slices for flow in each.on)
    way = Way([], Communication())
    way.arrived.extend([(flow, 800), (flow, 400)])
    way.take_in()
    assert (flow.ready, way.queue) == (800, [flow])
    frame = way.next_frame(bulk=True)
    assert frame is not None
    assert frame.num_bytes == 800
    way.arrived.append((flow, 600))
    way.take_in()
    assert way.next_frame(bulk=True) is None
