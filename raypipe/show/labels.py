"""Labels, colours and names of Ops; black text is readable on all colours, and neighbors differ in lightness, too."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from raypipe.artifacts.trace import Span, Trace
from raypipe.schedules.ir import Op, OpKind
from raypipe.show.branches import Branch, branches_of

COLOURS: Mapping[OpKind, str] = {
    OpKind.FORWARD: "#7fb2e5",
    OpKind.BACKWARD: "#f2a45c",
    OpKind.INPUT_GRADIENT: "#f7c873",
    OpKind.WEIGHT_GRADIENT: "#8cc98a",
    OpKind.RECOMPUTE: "#c3aee0",
    OpKind.UPDATE: "#b08a78",
    OpKind.REDUCE: "#e59ab8",
    OpKind.PUBLISH: "#d6d06a",
}

KIND_NAMES: Mapping[OpKind, str] = {
    **{kind: kind.name.lower().replace("_", " ") for kind in OpKind},
    OpKind.REDUCE: "gradient reduction",
    OpKind.PUBLISH: "publication",
}


def colour(kind: OpKind, pipeline: int = 0) -> str:
    """Return a CSS colour, lighter for odd pipelines."""
    if pipeline % 2 == 0:
        return COLOURS[kind]
    channels = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) / 2):02x}" for channel in channels)


def pipeline_words(num_pipelines: int) -> str:
    """Return the legend of lighter colours; empty for one pipeline."""
    odd = [str(pipeline) for pipeline in range(1, num_pipelines, 2)]
    return f"lighter: {'pipeline' if len(odd) == 1 else 'pipelines'} {', '.join(odd)}" if odd else ""


class Label(NamedTuple):
    """Neighbors in a slot of one kind, stage and pipeline: `F3`, `F3@1` for pipeline 1, `F0+2` for two microbatches, `F0.1` for a part.

    The letter of the branch, if any, comes first: `aF3`.
    """

    ops: tuple[Op, ...]
    text: str
    branch: Branch | None = None


class Labels:
    """Labels of the Ops of `drawn`, by default the first trace, that suit all traces.

    Attributes:
        with_stage: Whether a device holds several stages of one pipeline and branch.
        branches: Branches of all traces, by name.
        has_unmarked: Whether a stage that takes time is of no branch, though others are.
    """

    def __init__(self, *traces: Trace, drawn: Trace | None = None) -> None:
        self.branches = branches_of(traces)
        self._drawn = drawn or traces[0]
        self._known: dict[tuple[Op, ...], tuple[Label, ...]] = {}
        seen: set[OpKind] = set()
        held: dict[tuple[int, int, int, str], set[int]] = {}
        self._num_parts: dict[tuple[OpKind, int, int, int], int] = {}
        for number, trace in enumerate(traces):
            for span in trace.spans:
                if span.end_s > span.start_s:
                    for op in span.ops:
                        seen.add(op.kind)
                        branch = trace.branch(op.stage)
                        held.setdefault((number, span.device, op.pipeline, branch), set()).add(op.stage)
                        if op.part:
                            self._num_parts[op[:4]] = max(self._num_parts.get(op[:4], 0), op.part)
        self.with_stage = any(len(stages) > 1 for stages in held.values())
        self.kinds = tuple(kind for kind in OpKind if kind in seen)
        self.num_pipelines = max((pipeline + 1 for _, _, pipeline, _ in held), default=1)
        self.has_unmarked = any(not branch and traces[number].branches for number, _, _, branch in held)

    def of(self, span: Span) -> tuple[Label, ...]:
        """Return a label for each group of like Ops."""
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
        branch = self.branches.get(self._drawn.branch(stage))
        text = f"{stage if self.with_stage else ''}{kind}{work}{f'@{pipeline}' if pipeline else ''}"
        return Label(ops, f"{branch.letter}{text}" if branch else text, branch)

    def text(self, span: Span) -> str:
        """Return `F3`, `0F3` with the stage, or `F3&B1` where Ops overlap."""
        return "&".join(label.text for label in self.of(span))
