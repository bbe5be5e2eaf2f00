"""The chunks of a window as spans of a trace, from when they began to leave one device until the other had them.

The n-th chunk that leaves over a connection is the n-th that comes, whatever it carries; the n-th message that leaves is the n-th Send
of the program to that peer. A chunk whose end is not known is left out: of a long window only the newest are noted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from raypipe.actors.execution.report import WindowReport
from raypipe.artifacts.trace import Span, SpanItem, SpanKind
from raypipe.schedules.lower import DeviceProgram, Message, Send


def chunk_spans(
    reports: Sequence[WindowReport], programs: Sequence[DeviceProgram], *, offsets_s: Sequence[float], origin_s: float
) -> Iterator[Span]:
    """Yield the spans of all chunks; the devices' clocks are ahead by `offsets_s`, and the window began at `origin_s`."""
    # Seconds of the window less those of each device's `perf_counter`.
    shifts_s = [report.chunks.ahead_s - ahead_s - origin_s for report, ahead_s in zip(reports, offsets_s, strict=True)]
    came_s: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for report, shift_s in zip(reports, shifts_s, strict=True):
        for receipt in report.chunks.receipts:
            came_s[receipt.peer, report.device][receipt.number] = receipt.end_s + shift_s
    for report, program, shift_s in zip(reports, programs, shifts_s, strict=True):
        messages = _Messages(report, program)
        for departure in report.chunks.departures:
            item: SpanItem = departure.collective or messages.next(departure.peer)
            end_s = came_s[report.device, departure.peer].get(departure.number)
            if end_s is not None:
                start_s = departure.start_s + shift_s
                yield Span(departure.peer, SpanKind.TRANSFER, item, start_s, max(end_s, start_s), departure.num_bytes, report.device)


class _Messages:
    # The newest departures belong to the last Sends.

    def __init__(self, report: WindowReport, program: DeviceProgram) -> None:
        sent: dict[int, list[Message]] = defaultdict(list)
        for item in program.items:
            if isinstance(item, Send):
                sent[item.device].append(item.message)
        peers = [departure.peer for departure in report.chunks.departures if departure.collective is None]
        self._left = {peer: iter(messages[-count:] if (count := peers.count(peer)) else ()) for peer, messages in sent.items()}

    def next(self, peer: int) -> SpanItem:
        return next(self._left.get(peer, iter(())), "message")
