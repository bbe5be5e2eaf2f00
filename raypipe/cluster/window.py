"""The result of one window of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from raypipe.actors.execution.report import WindowReport
from raypipe.artifacts.trace import Source, Trace
from raypipe.cluster.chunk_spans import chunk_spans
from raypipe.schedules.lower import DeviceProgram


@dataclass(frozen=True)
class WindowResult:
    """Reports of all devices on a window; the driver waited `wall_s` for them.

    Attributes:
        clock_offsets_s: Seconds by which each device's clock is ahead of the driver's; empty if all share one clock.
    """

    reports: tuple[WindowReport, ...]
    wall_s: float
    name: str
    device_names: tuple[str, ...]
    num_updates: int
    programs: tuple[DeviceProgram, ...]
    clock_offsets_s: tuple[float, ...] = ()

    @property
    def offsets_s(self) -> tuple[float, ...]:
        """Seconds by which each device's clock is ahead of the driver's."""
        return self.clock_offsets_s or (0.0,) * len(self.reports)

    @property
    def began_s(self) -> tuple[float, ...]:
        """Start of each device, by the driver's clock."""
        return tuple(report.began_s - ahead_s for report, ahead_s in zip(self.reports, self.offsets_s, strict=True))

    @property
    def queued_bytes(self) -> dict[tuple[int, int], int]:
        """The most bytes that waited for the way from one device to another when a chunk had left, over TCP."""
        most: dict[tuple[int, int], int] = {}
        for report in self.reports:
            for departure in report.chunks.departures:
                link = (report.device, departure.peer)
                most[link] = max(most.get(link, 0), departure.queued_bytes)
        return most

    @property
    def round_trips_s(self) -> dict[tuple[int, int], float]:
        """The shortest round trip from one device to another, over TCP."""
        return {(report.device, peer): trip_s for report in self.reports for peer, trip_s in report.chunks.round_trips_s.items()}

    @cached_property
    def trace(self) -> Trace:
        """Spans of all devices, and of all chunks between them that went over TCP; at time 0 the first device began."""
        origin = min(self.began_s)
        spans = tuple(
            span
            for report, program, began_s in zip(self.reports, self.programs, self.began_s, strict=True)
            for span in report.log.spans(program, shift_s=began_s - origin)
        )
        chunks = chunk_spans(self.reports, self.programs, offsets_s=self.offsets_s, origin_s=origin)
        peaks = [report.peak_memory_bytes for report in self.reports]
        memory = tuple(((0.0, peak),) for peak in peaks if peak is not None)
        is_complete = len(memory) == len(peaks)
        return Trace(self.name, Source.MEASURED, self.device_names, self.num_updates, (*spans, *chunks), memory if is_complete else ())
