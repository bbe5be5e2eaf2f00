"""The trace of a window: which device did what, and when; the same for simulated, rehearsed and measured runs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from raypipe.artifacts import codec
from raypipe.errors import FormatError, ScheduleError
from raypipe.schedules.collectives import Await, Collective, CollectiveKind, Start, SumRows
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.lower import Compute, DeviceProgram, Direction, Message, Recv, Send
from raypipe.schedules.text import parse_op

FORMAT = "raypipe.trace/1"

_MOST_SECONDS = 1e12
_COLUMNS = ("device", "kind", "name", "start_s", "end_s", "bytes", "sender")

_MESSAGE = re.compile(r"(activation|gradient) (\d{1,9})->(\d{1,9}) of microbatch (\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)
_COLLECTIVE = re.compile(
    r"(\w+)(?: of (?:stage|tie) (\d{1,9}))? for update (\d{1,9})(?:, bucket (\d{1,9}) of (\d{1,9}))?(?:, (due|late) rows)?", re.ASCII
)


SpanItem = tuple[Op, ...] | Message | Collective | str
"""The Ops of a slot, a message or a collective; any other text of a file stays text."""


class SpanKind(StrEnum):
    """What happened in a span."""

    COMPUTE = "compute"
    RECV = "recv"  # the device waited for a message
    COLLECTIVE = "collective"  # the device waited for a collective
    DATA = "data"  # the device waited for rows to be read
    TRANSFER = "transfer"  # a message, or part of a sum, was on its way; the device is the receiver and may compute meanwhile


class Dimension(StrEnum):
    """What communication carries, whose order and cost differ: the dimensions of communication scheduling."""

    MESSAGE = "message"  # an activation or a gradient between stages
    SUM = "sum"  # gradients or weights between copies of a stage
    NORM = "norm"  # a few bytes that updates wait for


def dimension(item: SpanItem | None) -> Dimension | None:
    """Return what an item carries; `None` for what carries nothing, or is not known to."""
    if isinstance(item, Collective):
        return Dimension.NORM if item.kind.is_norm else Dimension.SUM
    return Dimension.MESSAGE if isinstance(item, Message) else None


class Span(NamedTuple):
    """What one device did from one time to another, in seconds since the window began.

    A file holds the item as text, so a loaded trace lacks rows of messages, and members of collectives.

    Attributes:
        device: Number of the device in `Trace.devices`.
        item: Ops if the kind is `COMPUTE`, else the message or collective.
        bytes: Size of the message, collective or chunk; 0 for computation.
        sender: Device that sent what was waited for or on its way, if known.
    """

    device: int
    kind: SpanKind
    item: SpanItem
    start_s: float
    end_s: float
    bytes: int = 0
    sender: int | None = None

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops that ran; empty for a wait."""
        return () if isinstance(self.item, Message | Collective | str) else self.item

    @property
    def name(self) -> str:
        """Text of the item: `2F5`, `(0F1;1B0)`, `activation 0->1 of microbatch 3`, `norm for update 0`."""
        return item_text(self.item)


def item_text(item: SpanItem) -> str:
    """Return an item as files and drawings write it."""
    if isinstance(item, Message | Collective | str):
        return str(item)
    return str(item[0]) if len(item) == 1 else f"({';'.join(map(str, item))})"


@dataclass(frozen=True)
class Step:
    """An item of a program that took time, and what the device sent and which collectives it joined at the end."""

    item: Compute | Recv | Await
    span: Span
    sent: list[Send] = field(default_factory=list)
    started: list[Collective] = field(default_factory=list)


def steps_of(program: DeviceProgram, spans: Sequence[Span]) -> list[Step]:
    """Return the steps of a device that ran a whole program; `spans` is its row of `Trace.by_device`."""
    spans = [span for span in spans if span.kind is not SpanKind.DATA]  # no item of the program
    steps: list[Step] = []
    for item in program.items:
        if isinstance(item, Send):
            steps[-1].sent.append(item)
        elif isinstance(item, Start):
            if steps:
                steps[-1].started.append(item.collective)
        else:
            steps.append(Step(item, spans[len(steps)]))
    return steps


class Source(StrEnum):
    """Origin of the times."""

    SIMULATED = "simulated"
    REHEARSED = "rehearsed"
    MEASURED = "measured"


def steady_s(ends: Sequence[float]) -> float | None:
    """Return the mean time between update ends in the middle half of a window; None for too few."""
    quarter = len(ends) // 4
    first, last = quarter, len(ends) - 1 - quarter
    return (ends[last] - ends[first]) / (last - first) if last > first else None


def covered_s(times_s: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that some times from begin to end cover together."""
    total_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(times_s):
        total_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(end_s, until_s)
    return total_s


@dataclass(frozen=True)
class Trace:
    """The spans of one window.

    Attributes:
        name: Name of what ran.
        devices: Names of the devices.
        num_updates: Updates of the window.
        spans: Spans in no particular order.
        memory: For each device, steps (seconds, bytes held from then on); only the peak if measured; empty if unknown.
        notes: Lines for the reader, such as why the run was re-planned.
        branches: Name of the branch of each stage, empty for a stage of none; empty for a model without concurrent stages.
    """

    name: str
    source: Source
    devices: tuple[str, ...]
    num_updates: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    notes: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()

    def branch(self, stage: int) -> str:
        """Return the branch of a stage, or empty text."""
        return self.branches[stage] if stage < len(self.branches) else ""

    @cached_property
    def by_device(self) -> tuple[tuple[Span, ...], ...]:
        """Spans of each device by start, without transfers."""
        rows: list[list[Span]] = [[] for _ in self.devices]
        for span in self.spans:
            if span.kind is not SpanKind.TRANSFER:
                rows[span.device].append(span)
        return tuple(tuple(sorted(row, key=lambda span: (span.start_s, span.end_s))) for row in rows)

    @cached_property
    def by_link(self) -> dict[tuple[int, int], tuple[Span, ...]]:
        """Transfers by sender and receiver, those of each link by start; without those whose sender is not known."""
        links: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.kind is SpanKind.TRANSFER and span.sender is not None:
                links[span.sender, span.device].append(span)
        return {link: tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s))) for link, spans in sorted(links.items())}

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the start of the window to the last end."""
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each device computed."""
        return self._sums({SpanKind.COMPUTE})

    @cached_property
    def wait_s(self) -> tuple[float, ...]:
        """Seconds that each device waited for messages and collectives."""
        return self._sums({SpanKind.RECV, SpanKind.COLLECTIVE})

    @cached_property
    def data_s(self) -> tuple[float, ...]:
        """Seconds that each device waited for rows to be read."""
        return self._sums({SpanKind.DATA})

    def _sums(self, kinds: set[SpanKind]) -> tuple[float, ...]:
        return tuple(sum(span.end_s - span.start_s for span in row if span.kind in kinds) for row in self.by_device)

    @cached_property
    def span_s(self) -> tuple[float, ...]:
        """Seconds from each device's first Op, or the wait for its rows, to the end of its last; Ops of no duration do not count."""
        kinds = {SpanKind.COMPUTE, SpanKind.DATA}
        rows = [[span for span in row if span.kind in kinds and span.end_s > span.start_s] for row in self.by_device]
        return tuple(max(span.end_s for span in row) - row[0].start_s if row else 0.0 for row in rows)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Span less busy seconds of each device."""
        return tuple(span - busy for span, busy in zip(self.span_s, self.busy_s, strict=True))

    @property
    def bubble_ratio(self) -> float:
        """1 - mean busy / longest span (Qi et al., 2024, section 5.3); a device's own waits for rows are no bubble."""
        longest = max(self.span_s, default=0.0)
        return 1 - (sum(self.busy_s) + sum(self.data_s)) / len(self.busy_s) / longest if longest else 0.0

    @property
    def device_bubble_ratios(self) -> tuple[float, ...]:
        """1 - busy / longest span of any device, for each device; waits for rows count as busy."""
        longest = max(self.span_s, default=0.0)
        return tuple(1 - (busy + data) / longest if longest else 0.0 for busy, data in zip(self.busy_s, self.data_s, strict=True))

    @cached_property
    def update_ends_s(self) -> tuple[float, ...]:
        """Time at which the last U of each update ended; without any U, the makespan alone."""
        ends: dict[int, float] = defaultdict(float)
        for span in self.spans:
            for op in span.ops:
                if op.kind is OpKind.UPDATE:
                    ends[op.index] = max(ends[op.index], span.end_s)
        return tuple(ends[update] for update in sorted(ends)) or (self.makespan_s,)

    @property
    def update_s(self) -> float:
        """Mean seconds between update ends; for a single end, its time over the number of updates."""
        ends = self.update_ends_s
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0] / self.num_updates

    @property
    def steady_update_s(self) -> float:
        """Seconds per update over the middle half of the updates; with fewer than four, at least the busiest device's compute time."""
        interval_s = steady_s(self.update_ends_s) or self.update_s
        return interval_s if len(self.update_ends_s) >= 4 else max(interval_s, max(self.busy_s, default=0.0) / self.num_updates)

    def of_updates(self, first: int, end: int) -> Trace:
        """Return the part from the end of update `first` - 1 to the end of update `end` - 1, timed from its start."""
        ends = (0.0, *self.update_ends_s)
        since, until = ends[first], ends[end]
        spans = tuple(
            span._replace(start_s=max(span.start_s, since) - since, end_s=min(span.end_s, until) - since)
            for span in self.spans
            if span.end_s > since and (span.start_s < until or span.end_s == until)  # the last update may take no time
        )
        memory = tuple(_clipped(steps, since, until) for steps in self.memory)
        name = f"{self.name}, updates {first} to {end - 1}"
        return replace(self, name=name, num_updates=end - first, spans=spans, memory=memory)

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Peak of each device; empty if unknown."""
        return tuple(max((held for _, held in steps), default=0) for steps in self.memory)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, or as Parquet with a row for each span if the name ends in `.parquet`.

        Raises:
            FormatError: The file cannot be written.
        """
        columns: dict[str, Any] = {name: [getattr(span, name) for span in self.spans] for name in _COLUMNS}
        if str(path).lower().endswith(".parquet"):
            self._save_parquet(path, columns)
            return
        if not any(span.sender is not None for span in self.spans):
            columns["sender"] = None  # left out
        memory = [list(steps) for steps in self.memory]
        content = _TraceFile(
            self.name,
            self.source,
            list(self.devices),
            self.num_updates,
            _Columns(**columns),
            memory,
            list(self.notes),
            list(self.branches) or None,
        )
        codec.save_json(content, path, format_name=FORMAT)

    def _save_parquet(self, path: str | Path, columns: dict[str, list[Any]]) -> None:
        import pyarrow as pa  # noqa: PLC0415  # only this export needs it
        import pyarrow.parquet as pq  # noqa: PLC0415

        columns["device"] = [self.devices[span.device] for span in self.spans]
        columns["sender"] = [None if span.sender is None else self.devices[span.sender] for span in self.spans]
        metadata = {"format": FORMAT, "name": self.name, "source": str(self.source), "notes": "\n".join(self.notes)}
        types = {"device": pa.string(), "kind": pa.string(), "name": pa.string(), "bytes": pa.int64(), "sender": pa.string()}
        schema = pa.schema([(name, types.get(name, pa.float64())) for name in _COLUMNS], metadata=metadata)
        try:
            pq.write_table(pa.table(columns, schema=schema), path)
        except OSError as error:
            raise FormatError(str(path), "", f"cannot be written ({error.strerror or error}); choose a path that is yours") from None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace from JSON.

        Raises:
            FormatError: Place and problem in the file.
        """
        content = codec.load_json(_TraceFile, path, format_name=FORMAT)
        spans = _spans(content, path=str(path))
        memory = tuple(map(tuple, content.memory))
        if memory and len(memory) != len(content.devices):
            raise FormatError(str(path), "memory", f"has {len(memory)} devices, the trace {len(content.devices)}")
        return cls(
            content.name,
            content.source,
            tuple(content.devices),
            content.num_updates,
            spans,
            memory,
            tuple(content.notes),
            tuple(content.branches or ()),
        )

    def to_chrome(self) -> list[dict[str, Any]]:
        """Return Chrome trace events, which Perfetto opens: one process, a thread for each device and for each link between two.

        Begins of transfers are those of the turn on their link: Perfetto drops what overlaps in a thread.
        """
        pid = {Source.SIMULATED: 1, Source.REHEARSED: 2, Source.MEASURED: 3}[self.source]
        meta: dict[str, Any] = {"ph": "M", "pid": pid}
        events = [{**meta, "name": "process_name", "args": {"name": f"{self.name} ({self.source})"}}]
        tracks = {2 * device: f"device {name}" for device, name in enumerate(self.devices)}
        if not self.by_link or any(span.kind is SpanKind.TRANSFER and span.sender is None for span in self.spans):
            tracks |= {2 * device + 1: f"device {name} incoming" for device, name in enumerate(self.devices)}
        first = 2 * len(self.devices)
        tracks |= {first + at: f"link {' -> '.join(self.devices[end] for end in link)}" for at, link in enumerate(self.by_link)}
        for track, name in sorted(tracks.items()):
            events.append({**meta, "name": "thread_name", "tid": track, "args": {"name": name}})
            events.append({**meta, "name": "thread_sort_index", "tid": track, "args": {"sort_index": track}})

        def drawn(span: Span, track: int, start_s: float, **more: object) -> dict[str, Any]:
            times = {"ts": start_s * 1e6, "dur": (span.end_s - start_s) * 1e6}
            args = ({"bytes": span.bytes} if span.bytes else {}) | more
            return {"ph": "X", "name": span.name, "cat": str(span.kind), "pid": pid, "tid": track, **times, "args": args}

        for span in self.spans:
            is_transfer = span.kind is SpanKind.TRANSFER
            if not is_transfer or span.sender is None:
                events.append(drawn(span, 2 * span.device + is_transfer, span.start_s))
        for track, spans in enumerate(self.by_link.values(), first):
            free_s = -math.inf
            for span in spans:
                free_s, start_s = max(span.end_s, free_s), min(max(span.start_s, free_s), span.end_s)
                more = {"traffic": str(carried)} if (carried := dimension(span.item)) else {}
                events.append(drawn(span, track, start_s, **more))
        events += [{"ph": "i", "name": note, "pid": pid, "tid": 0, "ts": 0.0, "s": "p"} for note in self.notes]
        for owner, steps in zip(self.devices, self.memory, strict=False):
            memory = {"ph": "C", "name": f"memory {owner}", "pid": pid}
            events += [memory | {"ts": at * 1e6, "args": {"bytes": held}} for at, held in steps]
        return events


def _clipped(steps: tuple[tuple[float, int], ...], since: float, until: float) -> tuple[tuple[float, int], ...]:
    held = [bytes_held for at, bytes_held in steps if at <= since][-1:]
    inside = tuple((at - since, bytes_held) for at, bytes_held in steps if since < at < until)
    return (*((0.0, bytes_held) for bytes_held in held), *inside)


@dataclass(frozen=True)
class _Columns:
    # Columns take a tenth of the size of an object for each span.
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    device: list[int]
    kind: list[SpanKind]
    name: list[str]
    start_s: list[float]
    end_s: list[float]
    bytes: list[int]
    sender: list[int | None] | None = None  # left out where none is known


@dataclass(frozen=True)
class _TraceFile:
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    name: str
    source: Source
    devices: list[str]
    num_updates: int
    spans: _Columns
    memory: list[list[tuple[float, int]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    branches: list[str] | None = None  # left out for a chain


def _spans(content: _TraceFile, *, path: str) -> tuple[Span, ...]:
    columns = content.spans
    lists = (columns.device, columns.kind, columns.name, columns.start_s, columns.end_s, columns.bytes)
    senders = columns.sender if columns.sender is not None else [None] * len(columns.device)
    if len({len(column) for column in (*lists, senders)}) != 1:
        raise FormatError(path, "spans", "its columns have different lengths")
    pipelines: dict[int, int] = {}
    slots: dict[str, tuple[Op, ...]] = {}
    for position, (device, kind, name, start_s, end_s, _) in enumerate(zip(*lists, strict=True)):
        if not 0 <= device < len(content.devices):
            raise FormatError(path, f"spans.device[{position}]", f"names device {device}; there are {len(content.devices)}")
        sender = senders[position]
        if sender is not None and not 0 <= sender < len(content.devices):
            raise FormatError(path, f"spans.sender[{position}]", f"names device {sender}; there are {len(content.devices)}")
        if not max(abs(start_s), abs(end_s)) <= _MOST_SECONDS:
            raise FormatError(path, f"spans.start_s[{position}]", f"lasts from {start_s} to {end_s}, which are no times")
        if not start_s <= end_s:
            raise FormatError(path, f"spans.end_s[{position}]", f"{end_s} lies before the start, {start_s}")
        if kind is SpanKind.COMPUTE and name not in slots:
            try:
                slots[name] = tuple(map(parse_op, name.strip("()").split(";")))
            except ScheduleError as error:
                raise FormatError(path, f"spans.name[{position}]", str(error)) from None
            pipelines.update((op.index, op.pipeline) for op in slots[name] if not op.kind.per_update)
    names = {name for name, kind in zip(columns.name, columns.kind, strict=True) if kind is not SpanKind.COMPUTE}
    others = {name: _parse_item(name, pipelines) for name in names}
    items = (slots[name] if kind is SpanKind.COMPUTE else others[name] for name, kind in zip(columns.name, columns.kind, strict=True))
    return tuple(map(Span, columns.device, columns.kind, items, columns.start_s, columns.end_s, columns.bytes, senders))


def _parse_item(name: str, pipelines: Mapping[int, int]) -> SpanItem:
    if (match := _MESSAGE.fullmatch(name)) is not None:
        direction, source, target, index, part = match.groups()
        return Message(Direction(direction), int(source), int(target), int(index), pipelines.get(int(index), 0), int(part or 0))
    if (match := _COLLECTIVE.fullmatch(name)) is not None and match[1] in frozenset(CollectiveKind):
        kind, stage, update, part, num_parts, rows = match.groups()
        rows_of = SumRows(rows or SumRows.ALL)
        return Collective(CollectiveKind(kind), int(stage or 0), int(update), int(part or 0), (), int(num_parts or 1), rows=rows_of)
    return name
