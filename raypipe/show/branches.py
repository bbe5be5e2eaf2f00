"""How drawings tell branches apart: a letter in front of the label of an Op, and a stripe or a cell in the branch's colour."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from typing import NamedTuple

from raypipe.artifacts.trace import Trace

# White text is readable on them, and they stand out from the colours of Ops.
_COLOURS = ("#1f3a93", "#b3123f", "#1b6e3c", "#6c2b9b", "#7d4b00", "#00616b")
_MOST_RANGES = 8


class Branch(NamedTuple):
    """A branch in a drawing; `number` chooses its colour."""

    number: int
    letter: str
    name: str

    @property
    def colour(self) -> str:
        """CSS colour of its mark."""
        return _COLOURS[self.number % len(_COLOURS)]


def branches_of(traces: Sequence[Trace]) -> dict[str, Branch]:
    """Return the branches of traces by name; `a` is that of the first stage."""
    names = dict.fromkeys(name for trace in traces for name in trace.branches if name)
    letters = string.ascii_lowercase
    return {name: Branch(at, letters[at % len(letters)] * (1 + at // len(letters)), name) for at, name in enumerate(names)}


def branch_words(branch: Branch, traces: Sequence[Trace]) -> str:
    """Return name and stages of a branch, the name alone where traces disagree on its stages: `image (stages 0-3)`."""
    held = {tuple(stage for stage, name in enumerate(trace.branches) if name == branch.name) for trace in traces}
    return f"{branch.name} ({_stage_words(held.pop())})" if len(held) == 1 else branch.name


def _stage_words(stages: Sequence[int]) -> str:
    # Ranges of consecutive stages.
    ranges = [[stage for _, stage in group] for _, group in itertools.groupby(enumerate(stages), lambda pair: pair[1] - pair[0])]
    words = [str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in ranges]
    if len(words) > _MOST_RANGES:
        return f"{len(stages)} stages"
    return f"stage{'s' if len(stages) > 1 else ''} {' '.join(words)}"
