"""Derives transfers between nodes from the chunks of a measured window, whatever they carry and whether or not anybody waited for them.

    from device 0   |==chunk 0==|==chunk 1==|             |==chunk 2==|       a span: began to leave, has all arrived
    one transfer     ----------------------                                   the link had no pause
    another one                                            ----------

While a link has no pause, the bytes that arrive show its rate: the buffers of the sender's kernel do not matter, nor who computes
meanwhile. Where links share a bottleneck, those of the others that passed it at that time are a transfer's `most_bytes` with its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypipe.artifacts.trace import Dimension, Span, Trace, covered_s, dimension
from raypipe.network.estimate import LEAST_BYTES, NetworkEstimate, NodePair, Transfer

_TELLING_BYTES = 64 << 10
_TELLING_S = 0.002
"""A transfer of fewer bytes in less time shows clocks and what a port lets through at once: parts of a sum are passed on as they come."""
_LEAST_CHUNKS = 4
"""Of fewer chunks, all may have met others."""
_LONG_S = 0.02
"""A transfer ends after so much time without a pause, so that a long sum shows when the link changes."""


@dataclass(frozen=True)
class LinkUse:
    """What passed a link between two nodes in a window.

    Attributes:
        busy_ratio: Share of the window in which something was on its way.
        queued_bytes: The most bytes that waited for the way over which it goes when one of its chunks had left.
    """

    num_bytes: dict[Dimension, int]
    busy_ratio: float
    queued_bytes: int = 0


def link_uses(trace: Trace, nodes: Sequence[str], queued_bytes: Mapping[tuple[int, int], int] | None = None) -> dict[NodePair, LinkUse]:
    """Return what passed each link between nodes, by the chunks of a trace.

    `nodes` are those of its devices, `queued_bytes` the most bytes that waited for the way from one device to another.
    """
    spans: defaultdict[NodePair, list[Span]] = defaultdict(list)
    for (source, target), of_link in trace.by_link.items():
        if nodes[source] != nodes[target]:
            spans[nodes[source], nodes[target]] += of_link
    queued: Counter[NodePair] = Counter()
    for (source, target), most in (queued_bytes or {}).items():
        pair = (nodes[source], nodes[target])
        queued[pair] = max(queued[pair], most)
    uses: dict[NodePair, LinkUse] = {}
    for pair, of_pair in spans.items():
        num_bytes: Counter[Dimension] = Counter()
        for span in of_pair:
            if (carried := dimension(span.item)) is not None:
                num_bytes[carried] += span.bytes
        busy_s = covered_s((span.start_s, span.end_s) for span in of_pair)
        uses[pair] = LinkUse(dict(num_bytes), busy_s / (trace.makespan_s or 1.0), queued[pair])
    return uses


@dataclass(frozen=True)
class _Piece:
    begin_s: float
    end_s: float
    num_bytes: int


class _Carried:
    """What passed a link over time, as the ends of its chunks tell."""

    def __init__(self) -> None:
        self.times_s = [-math.inf]
        self.totals = [0.0]

    def add(self, begin_s: float, end_s: float, num_bytes: int) -> None:
        for at_s, count in ((begin_s, 0), (end_s, num_bytes)):
            self.times_s.append(max(at_s, self.times_s[-1]))
            self.totals.append(self.totals[-1] + count)

    def until(self, at_s: float) -> float:
        behind = bisect_right(self.times_s, at_s)
        if behind == len(self.times_s):
            return self.totals[-1]
        first_s, last_s, first, last = *self.times_s[behind - 1 : behind + 1], *self.totals[behind - 1 : behind + 1]
        return last if last == first or first_s == -math.inf else first + (last - first) * (at_s - first_s) / (last_s - first_s)

    def between(self, begin_s: float, end_s: float) -> float:
        return self.until(end_s) - self.until(begin_s)


def with_other_latency(trace: Trace, nodes: Sequence[str], known: NetworkEstimate) -> list[NodePair]:
    """Return the links between nodes whose quickest chunk of a trace came early or late by what the estimates say.

    Transfers of one size cannot tell whether a link has become longer or slower: a probe can.
    """
    late_s: defaultdict[NodePair, list[float]] = defaultdict(list)
    for (source, target), spans in trace.by_link.items():
        pair = (nodes[source], nodes[target])
        if pair in known.links:
            link = known.links[pair]
            s_per_byte = 1 / (link.bandwidth_bytes_per_s or math.inf)
            late_s[pair] += [span.end_s - span.start_s - span.bytes * s_per_byte - link.latency_s for span in spans]
    return [pair for pair, of_pair in late_s.items() if len(of_pair) >= _LEAST_CHUNKS and is_other_latency(min(of_pair))]


def is_other_latency(difference_s: float) -> bool:
    """Return whether latencies differ by more than clocks and queues do."""
    return abs(difference_s) >= _TELLING_S


def chunk_transfers(trace: Trace, nodes: Sequence[str], known: NetworkEstimate, *, began_s: float = 0.0) -> list[Transfer]:
    """Return what the chunks of a trace tell of the links between nodes; `began_s` is by the clock of the estimates."""
    chunks: defaultdict[NodePair, list[tuple[float, float, int]]] = defaultdict(list)
    for (source, target), spans in trace.by_link.items():
        if nodes[source] != nodes[target]:
            chunks[nodes[source], nodes[target]] += [(span.start_s, span.end_s, span.bytes) for span in spans]
    pieces: dict[NodePair, list[_Piece]] = {}
    carried: dict[NodePair, _Carried] = {}
    for pair, of_pair in chunks.items():
        carried[pair] = _Carried()
        pieces[pair] = list(_pieces(sorted(of_pair), known.links[pair].latency_s, carried[pair]))
    found: list[Transfer] = []
    for pair, of_link in pieces.items():
        latency_s, groups = known.links[pair].latency_s, known.sharing(pair)
        for piece in of_link:
            others = (
                sum(carried[other].between(piece.begin_s, piece.end_s) for other in members if other != pair and other in carried)
                for members in groups
            )
            most = piece.num_bytes + round(max(others, default=0.0))
            found.append(Transfer(*pair, piece.num_bytes, piece.end_s - piece.begin_s + latency_s, began_s + piece.end_s, most))
    return found


def _pieces(chunks: Sequence[tuple[float, float, int]], latency_s: float, carried: _Carried) -> Iterator[_Piece]:
    begin_s = end_s = -math.inf
    total, is_part = 0, False
    for start_s, arrived_s, num_bytes in chunks:
        first_s = min(start_s + latency_s, arrived_s)  # when its first byte may arrive
        if first_s > end_s:
            if not is_part and _tells(begin_s, end_s, total):
                yield _Piece(begin_s, end_s, total)
            begin_s, total, is_part = first_s, 0, False
        carried.add(max(first_s, end_s), max(arrived_s, end_s), num_bytes)
        end_s = max(arrived_s, end_s)
        total += num_bytes
        if end_s - begin_s >= _LONG_S and _tells(begin_s, end_s, total):
            yield _Piece(begin_s, end_s, total)
            begin_s, total, is_part = end_s, 0, True
    # What is left behind a long transfer is too short to tell as much.
    if not is_part and _tells(begin_s, end_s, total):
        yield _Piece(begin_s, end_s, total)


def _tells(begin_s: float, end_s: float, num_bytes: int) -> bool:
    return num_bytes >= LEAST_BYTES and (num_bytes >= _TELLING_BYTES or end_s - begin_s >= _TELLING_S)
