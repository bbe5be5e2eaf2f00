"""The policy by which a device's transfers take turns on a link.

A device has a queue for each of its ways out: the peers that it reaches over the same bottleneck, such as the port of its node. At
the end of every chunk the policy says which transfer goes on, and with how many bytes. It never waits while something is queued, so it
cannot close a circle of waits. After TriRace (Li et al., IEEE TPDS 2024) for the classes, and ByteScheduler (Peng et al., SOSP 2019) for
chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

CHUNK_S = 0.005
"""Seconds that a chunk of bulk keeps a link: the longest that a message waits for one, where it cannot stop it in the middle."""
HOLD_S = 0.003
"""Seconds of a link's work that a sum still passes when a message to or of another device begins: what the kernel holds of it.

`benchmarks/beside.py` measures 2.6 ms at the receiver's end of a link and 3.6 ms at the sender's.
"""
LEAST_CHUNK_BYTES = 64 << 10
"""Smaller chunks cost more than they gain."""


@dataclass(frozen=True)
class Communication:
    """How transfers share links.

    Attributes:
        scheduled: In turns; else all at once, as plain TCP.
        chunk_s: Seconds of a chunk.
        across_peers: Whether all peers behind one bottleneck take turns, and sums leave both ends of a link to others' messages. Else only
            what goes to one peer takes turns.
    """

    scheduled: bool = True
    chunk_s: float = CHUNK_S
    across_peers: bool = True

    @property
    def holds(self) -> bool:
        """Whether sums leave links to messages of other devices."""
        return self.scheduled and self.across_peers


SCHEDULED = Communication()


class Traffic(IntEnum):
    """What a transfer carries; a smaller number goes first."""

    MESSAGE = 0
    """An activation, a gradient, a norm: a device computes next with it. It is not cut into chunks."""
    SUM = 1
    """Gradients or weights on their way between copies of a stage."""


class Transfer(NamedTuple):
    """A transfer in a queue. Transfers compare by who goes first.

    Attributes:
        deadline: Position in the sender's program of the first item that waits for the transfer; 0 for messages.
        sequence: Number in the order of arrival; of a sum that passes slice by slice, that of the sum.
        turn: Number of the slice there; else 0.
        num_bytes: Bytes that have not left.
    """

    traffic: Traffic
    deadline: int
    sequence: int
    turn: int
    num_bytes: int


class Chunk(NamedTuple):
    """The next bytes to leave: of the transfer at a position of the queue."""

    position: int
    num_bytes: int


def next_chunk(queue: Sequence[Transfer], *, bytes_per_s: float, chunk_s: float = CHUNK_S) -> Chunk | None:
    """Return the chunk that leaves next at the rate of the link; `None` for an empty queue.

    Messages come before sums, then the earliest deadline, then who came first, then the first slice.
    """
    if not queue:
        return None
    position = min(range(len(queue)), key=queue.__getitem__)
    transfer = queue[position]
    if transfer.traffic is Traffic.MESSAGE:
        return Chunk(position, transfer.num_bytes)
    return Chunk(position, min(transfer.num_bytes, chunk_bytes(bytes_per_s, chunk_s)))


def chunk_bytes(bytes_per_s: float, chunk_s: float = CHUNK_S) -> int:
    """Return the bytes of a chunk of bulk on a link of a rate."""
    return max(int(min(bytes_per_s * chunk_s, 1 << 40)), LEAST_CHUNK_BYTES)


def first_come(queue: Sequence[Transfer]) -> Chunk | None:
    """Return what leaves next without a policy: all of the transfer that came first; `None` for an empty queue."""
    if not queue:
        return None
    position = min(range(len(queue)), key=lambda place: queue[place].sequence)
    return Chunk(position, queue[position].num_bytes)
