"""Figures as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from raypipe.schedules.ir import Schedule
from raypipe.show.amounts import ratio, seconds, size
from raypipe.trace import Trace

MOST_ROWS = 48


def table(columns: Sequence[str], rows: Iterable[Iterable[str]], *, left: int = 1, title: str | None = None) -> Table:
    """A table without lines: the first `left` columns are text, the others numbers. Rows beyond the 48th are counted only."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left")
    for position, column in enumerate(columns):
        found.add_column(column, justify="left" if position < left else "right")
    rows = list(rows)
    for row in rows[:MOST_ROWS]:
        found.add_row(*row)
    if len(rows) > MOST_ROWS:
        found.add_row(f"({len(rows) - MOST_ROWS} more)")
    return found


def schedule_table(schedule: Schedule, trace: Trace, figures: Mapping[str, Any]) -> Table:
    """What each device of a simulated schedule does and holds."""
    held: dict[int, list[int]] = {}
    for holder in schedule.holders:
        held.setdefault(holder.worker, []).append(holder.stage)
    return table(
        ("device", "stages", "busy", "idle", "peak in flight", "weight copies"),
        (
            (
                trace.devices[device],
                " ".join(map(str, sorted(held.get(device, ())))),
                seconds(trace.busy_s[device]),
                seconds(trace.idle_s[device]),
                str(figures["peak_in_flight"][device]),
                str(figures["weight_copies"][device]),
            )
            for device in range(len(trace.devices))
        ),
        left=2,
    )


def trace_table(trace: Trace, memory_bytes: Sequence[int | None] = ()) -> Table:
    """What each device of a trace did.

    Args:
        trace: simulated or measured.
        memory_bytes: what each device has, for comparison with the most that it held.
    """
    columns = ["device", "busy", "waiting", "bubble"]
    rows = [
        [name, seconds(busy), seconds(wait), ratio(bubble)]
        for name, busy, wait, bubble in zip(trace.devices, trace.busy_s, trace.wait_s, trace.device_bubble_ratios, strict=True)
    ]
    if trace.memory:
        columns.append("peak memory")
        for device, peak in enumerate(trace.peak_memory_bytes):
            limit = memory_bytes[device] if memory_bytes else None
            rows[device].append(size(peak) + (f" of {size(limit)}" if limit is not None else ""))
    return table(columns, rows)
