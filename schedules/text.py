"""Schedules as text: single Ops, grids for people, and CSV for files and for torch.

The CSV has one row a worker and one cell a slot. Its compute-only form is torch's
(`torch.distributed.pipelining.schedules`, `_load_csv(..., format="compute_only")`): F, B, I, W of one pipeline, one update,
no parts, so that torch's own runtime can run an order of raypipe's and the other way round.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence

from raypipe.errors import FormatError, ScheduleError
from raypipe.schedules.ir import Op, OpKind, Overlap, ProgramPlace, Slot, ops_of

_OP = re.compile(r"(\d{1,9})([A-Z])(\d{1,9})(?:\.(\d{1,9}))?(?:@(\d{1,9}))?", re.ASCII)
_KINDS = {str(kind): kind for kind in OpKind}
_OVERLAP = re.compile(r"\(([^()]+)\)(?:OVERLAP_F_B)?")
_TORCH_KINDS = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT})


def parse_op(text: str) -> Op:
    """Return the Op that `2F5`, `2B5.1` or `2B5@1` writes.

    Raises:
        ScheduleError: the text is no Op.
    """
    match = _OP.fullmatch(text.strip())
    if match is None or match[2] not in _KINDS:
        raise ScheduleError(f"{text.strip()[:40]!r} is no Op; write STAGE KIND INDEX such as 2F5, kinds {' '.join(OpKind)}")
    stage, kind, index, part, pipeline = match.groups()
    return Op(_KINDS[kind], int(stage), int(index), int(pipeline or 0), int(part or 0))


def parse_slot(text: str) -> Slot:
    """Return the Op, or the Ops that overlap, that `2F5` or `(2F5;0B3)` writes."""
    match = _OVERLAP.fullmatch(text.strip())
    return Overlap(tuple(parse_op(part) for part in match[1].split(";"))) if match else parse_op(text)


def to_csv(programs: Sequence[Sequence[Slot]]) -> str:
    """Return the programs as CSV, all Ops kept; `from_csv` reads it back."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(slot) for slot in program] for program in programs)
    return out.getvalue()


def to_torch_csv(programs: Sequence[Sequence[Slot]]) -> str:
    """Return the F, B, I and W of the programs as torch's compute-only CSV.

    Raises:
        ScheduleError: an Op has a pipeline or a part, which torch cannot write.
    """
    rows: list[list[str]] = []
    for worker, program in enumerate(programs):
        row: list[str] = []
        for position, slot in enumerate(program):
            ops = [op for op in ops_of(slot) if op.kind in _TORCH_KINDS]
            for op in ops:
                if op.pipeline or op.part:
                    raise ScheduleError(
                        f"worker {worker}, position {position}: torch's CSV cannot write {op}; it knows no pipelines or parts"
                    )
            if ops:
                row.append(str(ops[0]) if len(ops) == 1 else f"{Overlap(tuple(ops))}OVERLAP_F_B")
        rows.append(row)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def from_csv(text: str, *, path: str) -> tuple[tuple[Slot, ...], ...]:
    """Return the programs that a CSV holds; empty cells, which torch writes for idle slots, are left out.

    Raises:
        FormatError: names row and cell of what is no Op.
    """
    programs: list[tuple[Slot, ...]] = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text), strict=True), start=1):
            program: list[Slot] = []
            for column, cell in enumerate(row, start=1):
                if not cell.strip():
                    continue
                try:
                    program.append(parse_slot(cell))
                except ScheduleError as error:
                    raise FormatError(path, f"row {number}, cell {column}", str(error)) from None
            programs.append(tuple(program))
    except csv.Error as error:
        raise FormatError(path, "", f"not a CSV file: {error}") from None
    if not any(programs):
        raise FormatError(path, "", "holds no Op; expected one row a worker with cells such as 0F0")
    return tuple(programs)


def order_grid(programs: Sequence[Sequence[Slot]], marks: Mapping[ProgramPlace, str] | None = None, *, around: int = 12) -> str:
    """Return the programs as lines of text, in order and without times.

    Slots in `marks` are drawn `>like this<`, with `around` slots on each side and `...` for what is left out; a mark's text is a note.
    """
    marks = marks or {}
    positions = [place.position for place in marks]
    first = max(min(positions) - around, 0) if positions else 0
    last = max(positions) + around if positions else max(map(len, programs), default=0)
    cells = [
        [
            f">{slot}<" if ProgramPlace(worker, position) in marks else str(slot)
            for position, slot in enumerate(program)
            if first <= position <= last
        ]
        for worker, program in enumerate(programs)
    ]
    width = max((len(cell) for row in cells for cell in row), default=1)
    lines = []
    for worker, row in enumerate(cells):
        before = "... " if first else ""
        behind = " ..." if last < len(programs[worker]) - 1 else ""
        lines.append(f"worker {worker:>3} | {before}{' '.join(cell.ljust(width) for cell in row).rstrip()}{behind}".rstrip())
    notes = [f"            {note}" for note in marks.values() if note]
    return "\n".join(lines + notes)
