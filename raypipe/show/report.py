"""Figures of a command, with their keys in JSON and their texts in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

MOST_ROWS = 48
_GAP = 2


@dataclass(frozen=True)
class Figure:
    """A figure, or one figure for each row of a table.

    Attributes:
        name: Key in the JSON document; empty if only the terminal shows the figure.
        value: A list for the rows of a table; a report, or a list of them, where the document nests.
        label: Word in a sentence or heading of a column; empty if only the document holds the figure.
    """

    name: str
    value: Any
    label: str = ""
    show: Callable[[Any], str] = str

    def text(self, value: Any) -> str:
        """Return the text of a value, `-` for None."""
        return "-" if value is None else self.show(value)


class Report:
    """A JSON object, and a sentence, a table or a row of one."""

    def __init__(self, *figures: Figure) -> None:
        self.figures = figures

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {figure.name: _document(figure.value) for figure in self.figures if figure.name}

    def silent(self) -> Iterator[Figure]:
        """Yield the figures without labels, for the document only."""
        return (replace(figure, label="") for figure in self.figures)

    def sentence(self) -> str:
        """Return the single figures: `update 33 s, bubble 27.3%`."""
        return ", ".join(f"{label} {text}" for label, text in self.cells().items() if text != "-")

    def cells(self) -> dict[str, str]:
        """Return the single figures, also of nested reports, by label."""
        texts: dict[str, str] = {}
        for figure in self.figures:
            if isinstance(figure.value, Report):
                texts |= figure.value.cells()
            elif figure.label and not isinstance(figure.value, list):
                texts[figure.label] = figure.text(figure.value)
        return texts

    def table(self, *, left: int = 1, title: str | None = None) -> FittedTable:
        """Return lists as columns."""
        columns = [figure for figure in self.figures if figure.label and isinstance(figure.value, list)]
        texts = [[figure.text(value) for value in figure.value] for figure in columns]
        return FittedTable([figure.label for figure in columns], zip(*texts, strict=True), left=left, title=title)


def _document(value: Any) -> Any:
    if isinstance(value, Report):
        return value.document()
    return list(map(_document, value)) if isinstance(value, list) else value


def rows_table(reports: Sequence[Report], *, left: int = 1, title: str | None = None) -> FittedTable:
    """Return a row for each report, with `-` for figures that it lacks."""
    rows = [report.cells() for report in reports]
    columns = max((list(row) for row in rows), key=len, default=[])
    return FittedTable(columns, ([row.get(column, "-") for column in columns] for row in rows), left=left, title=title)


def columns_table(reports: Sequence[Report]) -> FittedTable:
    """Return a column for each report, headed by its first figure; all have the same figures."""
    labels = reports[0].cells()
    heading, *rows = zip(labels, *(report.cells().values() for report in reports), strict=True)
    return FittedTable(heading, rows)


class FittedTable:
    """A table without lines, cut after 48 rows; a narrow terminal gets several that repeat the first column.

    The first `left` columns are text, the others numbers.
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[Iterable[str]], *, left: int = 1, title: str | None = None) -> None:
        self.columns = tuple(columns)
        self.rows = [tuple(row) for row in rows]
        self.left = left
        self.title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, group in enumerate(self._groups(options.max_width)):
            if number:
                yield ""
            yield self._table(group, title=None if number else self.title)

    def _groups(self, width: int) -> Iterator[list[int]]:
        shown = self.rows[:MOST_ROWS]
        widths = [max(len(line) for row in (self.columns, *shown) for line in row[at].split("\n")) for at in range(len(self.columns))]
        group: list[int] = []
        for column in range(len(widths)):
            if len(group) > 1 and sum(widths[at] + _GAP for at in group) + widths[column] > width:
                yield group
                group = [0]
            group.append(column)
        yield group

    def _table(self, group: Sequence[int], *, title: str | None) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", title=title, title_justify="left")
        num_lines = max(self.columns[at].count("\n") for at in group)
        for at in group:
            heading = "\n" * (num_lines - self.columns[at].count("\n")) + self.columns[at]
            table.add_column(heading, justify="left" if at < self.left else "right", overflow="fold")
        for row in self.rows[:MOST_ROWS]:
            table.add_row(*(row[at] for at in group))
        if len(self.rows) > MOST_ROWS:
            table.add_row(f"({len(self.rows) - MOST_ROWS} more)")
        return table
