"""What is written on the Ops of a drawn trace."""

from __future__ import annotations

from raypipe.schedules.ir import Op, OpKind
from raypipe.trace import Span, SpanKind, Trace, ops_named


class Labels:
    """Short names for the Ops of some traces: with the stage only where a device holds several.

    Attributes:
        with_stage: whether they name it.
        kinds: those of the Ops that take time.
    """

    def __init__(self, *traces: Trace) -> None:
        # A window repeats few names often on each device (once each) and across traces; reading them once is enough.
        self._ops: dict[str, tuple[Op, ...]] = {}
        seen: set[OpKind] = set()
        held: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for number, trace in enumerate(traces):
            for span in trace.spans:
                if span.kind is SpanKind.COMPUTE and span.end_s > span.start_s:
                    seen.update(op.kind for op in self.ops(span))
                    held.setdefault((number, span.device), set()).update((op.stage, op.pipeline) for op in self.ops(span))
        self.with_stage = any(len(stages) > 1 for stages in held.values())
        self.kinds = tuple(kind for kind in OpKind if kind in seen)

    def ops(self, span: Span) -> tuple[Op, ...]:
        """The Ops of a computing span."""
        if span.name not in self._ops:
            self._ops[span.name] = ops_named(span.name)
        return self._ops[span.name]

    def text(self, span: Span) -> str:
        """Such as `F3`, `0F3` where devices hold several stages, `F3&B1` where Ops overlap."""
        return "&".join(str(op) if self.with_stage else str(op)[len(str(op.stage)) :] for op in self.ops(span))
