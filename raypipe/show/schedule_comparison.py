"""Schedules of one size side by side, as tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from raypipe.units import number, ratio, time_unit

LEGEND = (
    "in flight, weight copies: the most a device holds (least to most loaded) in shares of the model:",
    "  1 is a stage of as many as there are devices, so that schedules of smaller stages compare",
    "messages: per update, and those of the busiest sender; volume: of all, 1 is one stage a device",
    "over bound: update time / lower bound for these stages and pipelines (raypipe.planning.lower_bounds)",
)

_TIMES = ("stages", "pipelines", "makespan", "steady", "bubble", "over bound")
_HELD = ("in flight", "weights", "messages", "busiest", "volume", "mismatch", "delay")
# Broken so that all of them fit 100 columns for a usual size.
_HEADERS = {
    "stages": "sta-\nges",
    "pipelines": "pipe-\nlines",
    "makespan": "make-\nspan {unit}",
    "steady": "steady\nupdate",
    "over bound": "over\nbound",
    "in flight": "in\nflight",
    "weights": "weight\ncopies",
    "messages": "mes-\nsages",
    "busiest": "most\nsent",
    "volume": "vol-\nume",
    "mismatch": "mis-\nmatch",
}
_GAPS = (2, 1)


def zoo_tables(rows: Sequence[Mapping[str, Any]], *, width: int) -> list[Table]:
    """One table where it fits the width, else two, of times and of what is held and sent.

    Args:
        rows: figures of each schedule, as `raypipe schedules --json` prints them.
        width: columns of the terminal.
    """
    unit, unit_s = time_unit(max((row["makespan_s"] for row in rows), default=0.0))
    cells = {row["schedule"]: _cells(row, unit_s) for row in rows}
    headers = {column: _HEADERS.get(column, column).format(unit=unit) for column in (*_TIMES, *_HELD)}
    widths = {
        column: max(map(len, (*header.split("\n"), *(mine[column] for mine in cells.values())))) for column, header in headers.items()
    }
    widths["schedule"] = max(map(len, ("schedule", *cells)))
    for gap in _GAPS:
        if sum(widths.values()) + gap * (len(widths) - 1) <= width:
            return [_table((*_TIMES, *_HELD), headers, cells, gap=gap)]
    return [_table(columns, headers, cells, gap=_GAPS[0]) for columns in (_TIMES, _HELD)]


def _cells(row: Mapping[str, Any], unit_s: float) -> dict[str, str]:
    over = row["over_lower_bound"]
    return {
        "stages": str(row["num_stages"]),
        "pipelines": str(row["num_pipelines"]),
        "makespan": number(row["makespan_s"] / unit_s),
        "steady": number(row["steady_update_s"] / unit_s),
        "bubble": ratio(row["bubble_ratio"]),
        "over bound": "-" if over is None else f"x{over:.2f}",
        "in flight": _range(row["peak_in_flight_shares"]),
        "weights": _range(row["weight_copies_shares"]),
        "messages": number(row["messages_per_update"]),
        "busiest": number(row["max_device_messages_per_update"]),
        "volume": f"{row['relative_message_volume']:.2f}",
        "mismatch": str(row["max_mismatch"]),
        "delay": str(row["max_delay"]),
    }


def _range(shares: Sequence[float]) -> str:
    least, most = (f"{share:.3g}" for share in (min(shares), max(shares)))
    return least if least == most else f"{least}..{most}"


def _table(columns: Sequence[str], headers: Mapping[str, str], cells: Mapping[str, Mapping[str, str]], *, gap: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    table.add_column("schedule", overflow="fold", vertical="bottom")
    for column in columns:
        table.add_column(headers[column], justify="right", no_wrap=True)
    for name, mine in cells.items():
        table.add_row(name, *(mine[column] for column in columns))
    return table
