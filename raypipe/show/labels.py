"""What is written on the Ops of a drawn trace."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from raypipe.artifacts.trace import Span, Trace
from raypipe.schedules.ir import Op, OpKind


class Label(NamedTuple):
    """Text of Ops of a slot that share it.

    Attributes:
        ops: Neighbors of one kind, stage and pipeline.
        text: `F3`, `F3@1` for pipeline 1, `F0+2` for two microbatches, `F0.1` for a part of one.
    """

    ops: tuple[Op, ...]
    text: str


class Labels:
    """Short names of the Ops of some traces.

    Attributes:
        with_stage: Whether names include the stage: only where a device holds several stages of one pipeline.
        kinds: Kinds of the Ops that take time.
        num_pipelines: Number of pipelines of these Ops.
    """

    def __init__(self, *traces: Trace) -> None:
        self._known: dict[tuple[Op, ...], tuple[Label, ...]] = {}
        seen: set[OpKind] = set()
        held: dict[tuple[int, int, int], set[int]] = {}
        self._num_parts: dict[tuple[OpKind, int, int, int], int] = {}
        for number, trace in enumerate(traces):
            for span in trace.spans:
                if span.end_s > span.start_s:
                    for op in span.ops:
                        seen.add(op.kind)
                        held.setdefault((number, span.device, op.pipeline), set()).add(op.stage)
                        if op.part:
                            self._num_parts[op[:4]] = max(self._num_parts.get(op[:4], 0), op.part)
        self.with_stage = any(len(stages) > 1 for stages in held.values())
        self.kinds = tuple(kind for kind in OpKind if kind in seen)
        self.num_pipelines = max((pipeline + 1 for _, _, pipeline in held), default=1)

    def of(self, span: Span) -> tuple[Label, ...]:
        """Return the labels of a computing span."""
        if span.ops not in self._known:
            alike = itertools.groupby(span.ops, key=lambda op: (op.kind, op.stage, op.pipeline))
            self._known[span.ops] = tuple(self._label(tuple(ops)) for _, ops in alike)
        return self._known[span.ops]

    def _label(self, ops: tuple[Op, ...]) -> Label:
        kind, stage, index, pipeline, _ = ops[0]
        if len({op.index for op in ops}) == 1 and len(ops) == self._num_parts.get(ops[0][:4]):
            work = str(index)  # all its parts
        else:
            work = "+".join(f"{op.index}.{op.part}" if op.part else str(op.index) for op in ops)
        return Label(ops, f"{stage if self.with_stage else ''}{kind}{work}{f'@{pipeline}' if pipeline else ''}")

    def text(self, span: Span) -> str:
        """Return the label of a span: `F3`, `0F3` with the stage, `F3&B1` where Ops overlap."""
        return "&".join(label.text for label in self.of(span))
