"""What a window's spans tell of the links between nodes, after the fact and for nothing.

A message is handed over when the Op that makes it ends. If the receiver already waits for it, its arrival is seen, too:

    sender      | 0F1 |->.                            bytes / seconds of the link, from the end of 0F1 to the end of the wait
    receiver        ......`->| 1F1 |

If the receiver comes later, nobody knows when it arrived, and it tells nothing. Messages that follow each other on a link without a
pause count as one transfer, since they were in each other's way: devices of two nodes share what joins these. What a collective of
the same two nodes was in the way of does not count, nor what passed through a bottleneck together with what other links carried.

The receiver's and the sender's spans are compared, so their clocks are corrected before (`clocks`).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from raypipe.network.estimate import LinkEstimate, NetworkEstimate, Transfer
from raypipe.schedules.lower import Await, Collective, DeviceProgram, Recv, Send, Start

_WAITED_S = 3e-4
_WAITED_SHARE = 0.25
"""A receive has waited if it took longer than so many seconds, and than this share of the time that the message had for itself, since
it was handed over and the one before was taken. Taking what is there takes a while, too: a millisecond where it is large and the
machine busy, which would be put down to the link."""
_ON_ITS_WAY = 3.0
"""A message whose receiver came later is taken to have been under way for at most so many times what its link would need."""
_LEAST_BYTES = 16_384
"""Fewer bytes tell of the latency, not of the bandwidth."""


class Columns(Protocol):
    """The spans of a device, as columns of numbers."""

    @property
    def positions(self) -> Sequence[int]:
        """Of the items that took time."""

    @property
    def starts_s(self) -> Sequence[float]:
        """Seconds since the device began."""

    @property
    def ends_s(self) -> Sequence[float]:
        """Likewise."""

    @property
    def sizes_bytes(self) -> Sequence[int]:
        """Of what was received or summed."""


@dataclass(frozen=True)
class DeviceLog:
    """What one device did in a window.

    Attributes:
        node: the name of its node.
        program: what it ran.
        columns: its spans.
        began_s: when its first item began, by a clock that all devices share.
    """

    node: str
    program: DeviceProgram
    columns: Columns
    began_s: float


@dataclass(frozen=True)
class _Carried:
    """A message on a link.

    Attributes:
        handed_s: when it was handed over.
        taken_s: when it arrived, if its receiver had waited for it; else a time at which it had.
        num_bytes: its own.
        awaited: whether its receiver had waited for it.
    """

    handed_s: float
    taken_s: float
    num_bytes: int
    awaited: bool


class _Times:
    """A union of spans of time.

    Args:
        spans: in any order.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []
        for start_s, end_s in sorted(spans):
            if self.ends_s and start_s <= self.ends_s[-1]:
                self.ends_s[-1] = max(self.ends_s[-1], end_s)
            else:
                self.starts_s.append(start_s)
                self.ends_s.append(end_s)

    def meet(self, begin_s: float, end_s: float) -> bool:
        """Whether one of them overlaps with a span."""
        first = bisect.bisect_right(self.ends_s, begin_s)
        return first < len(self.starts_s) and self.starts_s[first] < end_s


@dataclass(frozen=True)
class _Run:
    """Messages that follow each other on a link without a pause, in the order in which they were handed over."""

    messages: list[_Carried]

    @property
    def begin_s(self) -> float:
        return self.messages[0].handed_s

    @property
    def end_s(self) -> float:
        return max(message.taken_s for message in self.messages)

    @property
    def num_bytes(self) -> int:
        return sum(message.num_bytes for message in self.messages)

    def tells(self, in_the_way: _Times) -> bool:
        """Whether begin and end are known, and are those of these messages alone."""
        begin_s, end_s = self.begin_s, self.end_s
        return (
            all(message.awaited for message in self.messages)
            and self.num_bytes >= _LEAST_BYTES
            and end_s > begin_s
            and not in_the_way.meet(begin_s, end_s)
        )


class _Seen:
    """What the devices of a window did to the links.

    Args:
        logs: of all devices, by number.
    """

    def __init__(self, logs: Sequence[DeviceLog]) -> None:
        self.nodes = [log.node for log in logs]
        self.handed: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.taken: defaultdict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
        self.summed: defaultdict[frozenset[str], list[tuple[float, float]]] = defaultdict(list)
        for log in logs:
            self._walk(log)

    def _walk(self, log: DeviceLog) -> None:
        device, items, columns, began_s = log.program.device, log.program.items, log.columns, log.began_s
        started: dict[Collective, float] = {}
        spans = zip(columns.positions, columns.starts_s, columns.ends_s, columns.sizes_bytes, strict=True)
        for position, asked_s, done_s, num_bytes in spans:
            item, since_s, until_s = items[position], began_s + asked_s, began_s + done_s
            if isinstance(item, Recv):
                self.taken[item.device, device].append((since_s, until_s, num_bytes))
            elif isinstance(item, Await):
                begun_s = started.pop(item.collective, since_s)
                for other in {self.nodes[member] for member in item.collective.devices} - {log.node}:
                    self.summed[frozenset((log.node, other))].append((begun_s, until_s))
            # What an item is followed by and takes no time of its own happens when it ends.
            for after in itertools.islice(items, position + 1, None):
                if isinstance(after, Send):
                    self.handed[device, after.device].append(until_s)
                elif isinstance(after, Start):
                    started[after.collective] = until_s
                else:
                    break

    def wires(self) -> dict[tuple[str, str], list[_Carried]]:
        """The messages from each node to each other one."""
        found: defaultdict[tuple[str, str], list[_Carried]] = defaultdict(list)
        for (source, target), arrivals in self.taken.items():
            ends = (self.nodes[source], self.nodes[target])
            if ends[0] != ends[1]:
                before_s = -math.inf
                # The n-th message that is sent on a channel is the n-th that is taken.
                for handed_s, (asked_s, taken_s, num_bytes) in zip(self.handed[source, target], arrivals, strict=True):
                    awaited = taken_s - asked_s > max(_WAITED_S, _WAITED_SHARE * (taken_s - max(handed_s, before_s)))
                    before_s = taken_s
                    found[ends].append(_Carried(handed_s, taken_s if awaited else asked_s, num_bytes, awaited))
        return found


def transfers(logs: Sequence[DeviceLog], known: NetworkEstimate) -> list[Transfer]:
    """The transfers between nodes whose begin and end are known.

    Args:
        logs: of all devices, by number.
        known: of the links so far.
    """
    seen = _Seen(logs)
    wires = seen.wires()
    busy = {ends: [_under_way(message, known.links[ends]) for message in carried] for ends, carried in wires.items()}
    found: list[Transfer] = []
    for ends, carried in wires.items():
        company = known.company(ends)
        sums = (span for pair in (ends, *company) for span in seen.summed[frozenset(pair)])
        in_the_way = _Times([*sums, *(span for pair in company for span in busy.get(pair, ()))])
        found += [Transfer(*ends, run.num_bytes, run.end_s - run.begin_s, run.end_s) for run in _runs(carried) if run.tells(in_the_way)]
    return found


def _under_way(message: _Carried, link: LinkEstimate) -> tuple[float, float]:
    """From when to when a message was on its link, or may have been."""
    if message.awaited or link.bandwidth_bytes_per_s is None:
        return message.handed_s, message.taken_s
    alone_s = link.latency_s + message.num_bytes / link.bandwidth_bytes_per_s
    return message.handed_s, min(message.taken_s, message.handed_s + _ON_ITS_WAY * alone_s)


def _runs(carried: Sequence[_Carried]) -> Iterator[_Run]:
    messages: list[_Carried] = []
    end_s = 0.0
    for message in sorted(carried, key=lambda message: message.handed_s):
        if messages and message.handed_s >= end_s:
            yield _Run(messages)
            messages = []
        messages.append(message)
        end_s = max(message.taken_s, end_s) if len(messages) > 1 else message.taken_s
    if messages:
        yield _Run(messages)
