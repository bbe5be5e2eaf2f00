"""What devices report of a window: spans, losses and norms."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from raypipe.actors.transport.tcp_link import Receipt
from raypipe.actors.transport.tcp_way import Departure
from raypipe.artifacts.trace import Span, SpanKind
from raypipe.schedules.collectives import Await
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import Compute, DeviceProgram, Item, Recv


@dataclass
class SpanLog:
    """The spans of a device in columns, which travel faster than objects; seconds since the device began."""

    positions: array[int] = field(default_factory=lambda: array("Q"))
    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    sizes_bytes: array[int] = field(default_factory=lambda: array("Q"))
    for_rows: array[int] = field(default_factory=lambda: array("B"))
    """1 where the device waited for the rows of the item at the position, before the item itself."""

    def add(self, position: int, start_s: float, end_s: float, size_bytes: int, *, for_rows: bool = False) -> None:
        """Add a span."""
        self.for_rows.append(for_rows)
        self.positions.append(position)
        self.starts_s.append(start_s)
        self.ends_s.append(end_s)
        self.sizes_bytes.append(size_bytes)

    def spans(self, program: DeviceProgram, *, shift_s: float = 0.0) -> list[Span]:
        """Return the spans of a program's window, `shift_s` later."""
        items, device, make = program.items, program.device, Span._make
        spans: list[Span] = []
        columns = zip(self.positions, self.starts_s, self.ends_s, self.sizes_bytes, self.for_rows, strict=True)
        for position, start_s, end_s, size, for_rows in columns:
            item, times_s = items[position], (start_s + shift_s, end_s + shift_s)
            if for_rows and isinstance(item, Compute):
                text = f"rows of microbatch {item.ops[0].index}"
                spans.append(make((device, SpanKind.DATA, text, *times_s, size, None)))
            elif isinstance(item, Compute):
                spans.append(make((device, SpanKind.COMPUTE, item.ops, *times_s, size, None)))
            elif isinstance(item, Recv):
                spans.append(make((device, SpanKind.RECV, item.message, *times_s, size, item.device)))
            elif isinstance(item, Await):
                spans.append(make((device, SpanKind.COLLECTIVE, item.collective, *times_s, size, None)))
        return spans

    def seconds(self, program: DeviceProgram, kind: SpanKind) -> float:
        """Return the seconds of all spans of a kind."""
        return sum(self.ends_s[at] - self.starts_s[at] for at in self._spans_of(program, kind))

    def num_bytes(self, program: DeviceProgram, kind: SpanKind) -> float:
        """Return the bytes of all spans of a kind."""
        return float(sum(self.sizes_bytes[at] for at in self._spans_of(program, kind)))

    def _spans_of(self, program: DeviceProgram, kind: SpanKind) -> Iterator[int]:
        items = program.items
        for at, (position, for_rows) in enumerate(zip(self.positions, self.for_rows, strict=True)):
            if kind is (SpanKind.DATA if for_rows else _SPAN_KINDS[type(items[position])]):
                yield at


_SPAN_KINDS: dict[type[Item], SpanKind] = {Compute: SpanKind.COMPUTE, Recv: SpanKind.RECV, Await: SpanKind.COLLECTIVE}


@dataclass(frozen=True)
class ChunkLog:
    """Chunks that left a device over TCP in a window, and those of others that came, by the clock of `time.perf_counter`.

    Attributes:
        ahead_s: Seconds by which `time.time` is ahead of that clock.
        round_trips_s: Seconds of the shortest round trip to each peer, where known.
    """

    departures: tuple[Departure, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    ahead_s: float = 0.0
    round_trips_s: dict[int, float] = field(default_factory=dict)


@dataclass
class WindowReport:
    """What a device did in a window.

    Attributes:
        began_s: Time of `time.time` at which the first item began.
        losses: Mean loss of each microbatch over the rows of this device.
        loss_weights: What each of these losses counts for: its number of rows, or the model's `loss_weight`.
        norms: Gradient norm of each update: over all stages if the update's scope is global, else over this device's primary stages.
        peak_memory_bytes: Most memory held; `None` if unknown.
    """

    device: int
    began_s: float
    log: SpanLog = field(default_factory=SpanLog)
    losses: dict[int, float] = field(default_factory=dict)
    loss_weights: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    chunks: ChunkLog = field(default_factory=ChunkLog)


def norms_of(reports: Sequence[WindowReport], *, scope: UpdateScope) -> dict[int, float]:
    """Return the gradient norm over all stages by update."""
    known: dict[int, list[float]] = {}
    for report in reports:
        for update, norm in report.norms.items():
            known.setdefault(update, []).append(norm)
    return {update: norms[0] if scope is UpdateScope.GLOBAL else math.hypot(*norms) for update, norms in known.items()}


def mean_losses(reports: Sequence[WindowReport], *, num_microbatches: int) -> list[float]:
    """Return the loss of each update: the mean over the rows of its microbatches by weight; `nan` where none counts."""
    parts = sorted((index, loss, report.loss_weights[index]) for report in reports for index, loss in report.losses.items())
    sums: dict[int, tuple[float, float]] = {}
    for index, loss, weight in parts:
        total, weights = sums.get(index // num_microbatches, (0.0, 0.0))
        sums[index // num_microbatches] = (total + loss * weight, weights + weight)
    return [total / weights if weights else math.nan for total, weights in sums.values()]
