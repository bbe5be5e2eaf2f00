"""The traffic that measures links, and the times that both ends note.

Each flow is a directed pair of devices. What it does is a pattern:

    Ping     message, answer of one byte, message, answer ...   several sizes: latency, bandwidth, and the offset of both ends' clocks
    Stream   message after message, no answers                  a rate while other flows are under way
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from raypipe.actors.transport.secret import StoreAddress
from raypipe.network.clocks import Exchange
from raypipe.network.fit import RoundTrip

LEAST_PING_BYTES = 1 << 20
"""Fewest bytes that suffice to measure a link."""
WARM_UP_BYTES = 160_000
"""Bytes at the start of a stream that are not timed: an idle path may accept this many faster than it carries them."""
SCOUT_BYTES = 64 << 10
"""The smallest message whose time depends on the bandwidth."""
SMALL_BYTES = 64
"""Size of messages whose time is the latency: on a slow link, too, where 1 KB takes as long as the rest."""
MOST_BYTES = 16 << 20
"""Size of the largest message."""
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Ping:
    """Messages and answers for about `seconds`, of `LEAST_PING_BYTES` to `most_bytes` bytes."""

    seconds: float
    most_bytes: int


@dataclass(frozen=True)
class Stream:
    """Messages without answers."""

    chunk_bytes: int
    num_chunks: int

    @classmethod
    def lasting(cls, seconds: float, *, bytes_per_s: float, most_bytes: int) -> Stream:
        """Return a stream that, once warm, lasts `seconds` at `bytes_per_s`; it has at most `most_bytes`."""
        num_bytes = min(max(seconds * bytes_per_s, WARM_UP_BYTES) + WARM_UP_BYTES, most_bytes)
        chunk_bytes = whole_pages(min(num_bytes / 16, MOST_BYTES / 4))
        return cls(chunk_bytes, max(4, round(num_bytes / chunk_bytes)))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole stream."""
        return self.chunk_bytes * self.num_chunks


@dataclass(frozen=True)
class Flow:
    """What one device sends another."""

    source: int
    target: int
    pattern: Ping | Stream

    @property
    def ends(self) -> tuple[int, int]:
        """Both devices."""
        return self.source, self.target


@dataclass(frozen=True)
class FlowConnection:
    """The settings with which the two devices of a flow connect.

    Attributes:
        names: Names of source and target, for messages.
        shared: Whether their messages go through shared memory; else they go over TCP, or NCCL between GPUs.
        store: Where the devices find each other.
        prefix: Text unique to this flow and attempt.
        timeout_s: Limit for every wait once connected.
    """

    source: int
    target: int
    names: tuple[str, str]
    shared: bool
    store: StoreAddress
    prefix: str
    connect_timeout_s: float
    timeout_s: float


@dataclass
class Readings:
    """What one end of a flow noted, by the clock that `time.time` reads.

    Attributes:
        first_s: When the message was handed over (source) or had arrived (target).
        second_s: When the answer had arrived (source) or was handed over (target); `first_s` for a `Stream`.
        num_bytes: Bytes of all messages, including those dropped from the lists.
    """

    sizes_bytes: list[int] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, num_bytes: int, first_s: float, second_s: float) -> None:
        """Add a message."""
        self.sizes_bytes.append(num_bytes)
        self.first_s.append(first_s)
        self.second_s.append(second_s)
        self.num_bytes += num_bytes

    def keep_first(self, count: int) -> None:
        """Drop all messages but the first ones from the lists."""
        del self.sizes_bytes[count:], self.first_s[count:], self.second_s[count:]


def round_trips(source: Readings) -> Iterator[RoundTrip]:
    """Yield the messages of a `Ping` with their answers."""
    for num_bytes, handed_s, returned_s in zip(source.sizes_bytes, source.first_s, source.second_s, strict=True):
        yield RoundTrip(num_bytes, returned_s - handed_s)


def exchanges(source: Readings, target: Readings) -> Iterator[Exchange]:
    """Yield the readings of both ends of a `Ping` for messages so small that they are as quick as their answers."""
    for place, num_bytes in enumerate(source.sizes_bytes):
        if num_bytes <= SMALL_BYTES:
            yield Exchange(source.first_s[place], target.first_s[place], target.second_s[place], source.second_s[place])


def by_device(flows: Iterable[Flow]) -> dict[int, list[Flow]]:
    """Return the flows that each device takes part in."""
    flows_of: dict[int, list[Flow]] = {}
    for flow in flows:
        for device in flow.ends:
            flows_of.setdefault(device, []).append(flow)
    return flows_of


def whole_pages(num_bytes: float) -> int:
    """Return a size rounded to pages of memory, at least one."""
    return max(_PAGE_BYTES, round(num_bytes / _PAGE_BYTES) * _PAGE_BYTES)
