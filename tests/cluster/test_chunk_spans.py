"""Chunks of a window as spans: which message or sum they are of, and by which clock."""

from __future__ import annotations

from raypipe.actors.execution.report import ChunkLog, WindowReport
from raypipe.actors.transport.tcp_link import Receipt
from raypipe.actors.transport.tcp_way import Departure
from raypipe.artifacts.trace import Span, SpanKind
from raypipe.cluster.window import WindowResult
from raypipe.communication.policy import Traffic
from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.lower import Send, lower
from raypipe.schedules.request import ScheduleRequest

PROGRAMS = lower(build("gpipe", ScheduleRequest(2, 3)))
SUM = Collective(CollectiveKind.GRADIENTS, 0, 0, 0, (0, 1))
SENT = [item.message for item in PROGRAMS[0].items if isinstance(item, Send)]


def left(number: int, start_s: float, *, collective: Collective | None = None, queued_bytes: int = 0) -> Departure:
    traffic = Traffic.MESSAGE if collective is None else Traffic.SUM
    return Departure(1, 100 + number, start_s, start_s + 0.25, traffic, number, collective, queued_bytes)


def result(departures: tuple[Departure, ...], receipts: tuple[Receipt, ...]) -> WindowResult:
    """Device 0 began at second 1,000 of the driver; its `perf_counter` was at 50 then, that of device 1 at 7. Both clocks are ahead."""
    reports = (
        WindowReport(0, 1003.0, chunks=ChunkLog(departures, (), ahead_s=953.0)),
        WindowReport(1, 1005.0, chunks=ChunkLog((), receipts, ahead_s=998.0)),
    )
    return WindowResult(reports, 1.0, "run", ("a", "b"), 1, PROGRAMS, (3.0, 5.0))


def test_chunks_are_spans_from_the_sender_s_begin_to_the_receiver_s_end() -> None:
    departures = (left(7, 50.5), left(8, 51.0, collective=SUM), left(9, 51.5))
    receipts = (Receipt(0, 7, 8.0), Receipt(0, 8, 8.5), Receipt(0, 9, 8.25))
    trace = result(departures, receipts).trace
    assert trace.spans == (
        Span(1, SpanKind.TRANSFER, SENT[-2], 0.5, 1.0, 107, 0),
        Span(1, SpanKind.TRANSFER, SUM, 1.0, 1.5, 108, 0),
        Span(1, SpanKind.TRANSFER, SENT[-1], 1.5, 1.5, 109, 0),  # clocks disagree a little
    ), "the newest messages are the last of the program"
    assert trace.by_device == ((), ())


def test_chunks_whose_end_is_not_known_are_left_out() -> None:
    trace = result((left(7, 50.5), left(8, 51.0)), (Receipt(0, 8, 9.0), Receipt(0, 9, 9.5))).trace
    assert [(span.item, span.bytes) for span in trace.spans] == [(SENT[-1], 108)]


def test_the_longest_queue_of_each_link_is_known() -> None:
    departures = (left(0, 50.0, queued_bytes=3), left(1, 51.0, queued_bytes=9), left(2, 52.0))
    assert result(departures, ()).queued_bytes == {(0, 1): 9}
