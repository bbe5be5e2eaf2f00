"""Derives transfers between nodes from the waits of a measured window, where its chunks are not known (gloo, NCCL).

Only if the receiver waits does the arrival show. Messages on a link without a pause are one transfer. Left out are overlaps with a
collective of the same nodes, or with other links of a shared bottleneck.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from raypipe.artifacts.trace import Step, Trace, steps_of
from raypipe.network.estimate import LEAST_BYTES, LinkEstimate, NetworkEstimate, Transfer
from raypipe.schedules.collectives import Await, Collective
from raypipe.schedules.lower import DeviceProgram, Recv

_WAITED_S = 3e-4
_WAITED_SHARE = 0.25
"""A receive waited if it took longer than these seconds, and than this share of the time since its message was handed over and the one
before was taken. Taking a large message that has arrived may take a millisecond on a busy machine.
"""
_ON_ITS_WAY = 3.0  # A message with a late receiver was under way for at most this many times its link's estimate


@dataclass(frozen=True)
class _Carried:
    """A message on a link; `taken_s` is its arrival only if `awaited`."""

    handed_s: float
    taken_s: float
    num_bytes: int
    awaited: bool


class _Times:
    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []
        for start_s, end_s in sorted(spans):
            if self.ends_s and start_s <= self.ends_s[-1]:
                self.ends_s[-1] = max(self.ends_s[-1], end_s)
            else:
                self.starts_s.append(start_s)
                self.ends_s.append(end_s)

    def overlaps(self, begin_s: float, end_s: float) -> bool:
        first = bisect.bisect_right(self.ends_s, begin_s)
        return first < len(self.starts_s) and self.starts_s[first] < end_s


@dataclass(frozen=True)
class _Run:
    """Messages on a link without a pause."""

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
        begin_s, end_s = self.begin_s, self.end_s
        return (
            all(message.awaited for message in self.messages)
            and self.num_bytes >= LEAST_BYTES
            and end_s > begin_s
            and not in_the_way.overlaps(begin_s, end_s)
        )


class _Traffic:
    def __init__(self, trace: Trace, programs: Sequence[DeviceProgram], nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self.handed: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.taken: defaultdict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
        self.summed: defaultdict[frozenset[str], list[tuple[float, float]]] = defaultdict(list)
        for program in programs:
            self._add(program.device, steps_of(program, trace.by_device[program.device]))

    def _add(self, device: int, steps: Sequence[Step]) -> None:
        started: dict[Collective, float] = {}
        for step in steps:
            item, span = step.item, step.span
            if isinstance(item, Recv):
                self.taken[item.device, device].append((span.start_s, span.end_s, span.bytes))
            elif isinstance(item, Await):
                begun_s = started.pop(item.collective, span.start_s)
                for other in {self.nodes[member] for member in item.collective.devices} - {self.nodes[device]}:
                    self.summed[frozenset((self.nodes[device], other))].append((begun_s, span.end_s))
            for send in step.sent:
                self.handed[device, send.device].append(span.end_s)
            started.update((collective, span.end_s) for collective in step.started)

    def wires(self) -> dict[tuple[str, str], list[_Carried]]:
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


def transfers(
    trace: Trace, programs: Sequence[DeviceProgram], nodes: Sequence[str], known: NetworkEstimate, *, began_s: float = 0.0
) -> list[Transfer]:
    """Return the transfers between nodes whose begin and end are known; `began_s` is by the clock of the estimates."""
    traffic = _Traffic(trace, programs, nodes)
    wires = traffic.wires()
    busy = {ends: [_under_way(message, known.links[ends]) for message in carried] for ends, carried in wires.items()}
    found: list[Transfer] = []
    for ends, carried in wires.items():
        contending = known.contending(ends)
        sums = (span for pair in (ends, *contending) for span in traffic.summed[frozenset(pair)])
        in_the_way = _Times([*sums, *(span for pair in contending for span in busy.get(pair, ()))])
        found += [
            Transfer(*ends, run.num_bytes, run.end_s - run.begin_s, began_s + run.end_s) for run in _runs(carried) if run.tells(in_the_way)
        ]
    return found


def _under_way(message: _Carried, link: LinkEstimate) -> tuple[float, float]:
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
