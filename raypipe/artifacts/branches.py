"""Which branch a stage belongs to, and how messages say so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from raypipe.artifacts.cut import Cut
from raypipe.schedules.ir import StageGraph


def stage_branches(graph: StageGraph, names: Sequence[Collection[str]] = ()) -> tuple[str, ...]:
    """Return the branch of each stage, empty text for a stage of none; nothing where no two stages are concurrent.

    `names` has the branches that the layers of each stage name. A stage with one name is of that branch. Of the others, one that is
    concurrent with no stage is of no branch; the rest continue the branch of a stage before them, or begin `branch 0`, `branch 1`
    and so on.
    """
    concurrent = _concurrent(graph)
    branches: list[str] = []
    ends: set[int] = set()  # stages whose branch nothing continues yet
    for stage in range(graph.num_stages):
        if names and len(set(names[stage])) == 1:
            (branch,) = set(names[stage])
        elif stage not in concurrent:
            branch = ""
        else:
            # A stage that feeds few others feeds its own branch; one that feeds many is read by others, too.
            before = min(ends.intersection(graph.predecessors[stage]), key=lambda end: (len(graph.successors[end]), end), default=None)
            branch = f"branch {len(set(branches) - {''})}" if before is None else branches[before]
            ends = (ends - {before}) | {stage}
        branches.append(branch)
    return tuple(branches) if concurrent and len(set(branches) - {""}) > 1 else ()


def cut_branches(cut: Cut, layers: Sequence[str | None]) -> tuple[str, ...]:
    """Return `stage_branches` of a cut whose layers are of these branches."""
    return stage_branches(cut.graph, [{name for layer in stage if (name := layers[layer]) is not None} for stage in cut.stages])


def of_branches(stages: Iterable[int], branches: Sequence[str]) -> str:
    """Return the branches of some stages, such as ` of image and text`; nothing where they are of none."""
    names = dict.fromkeys(branches[stage] for stage in stages if branches and branches[stage])
    return f" of {' and '.join(names)}" if names else ""


def stages_text(stages: Sequence[int], branches: Sequence[str] = ()) -> str:
    """Return stages with their branches: `0,4`, or `0 of image, 3 of text`; `none` for no stages."""
    return (", " if branches else ",").join(f"{stage}{of_branches([stage], branches)}" for stage in stages) or "none"


def _concurrent(graph: StageGraph) -> set[int]:
    """Return the stages that could compute at the same time as some other on one microbatch."""
    behind, before = [0] * graph.num_stages, [0] * graph.num_stages  # bit s stands for stage s
    for stage in range(graph.num_stages):
        for source in graph.predecessors[stage]:
            before[stage] |= before[source] | 1 << source
    for stage in reversed(range(graph.num_stages)):
        for target in graph.successors[stage]:
            behind[stage] |= behind[target] | 1 << target
    return {stage for stage in range(graph.num_stages) if (before[stage] | behind[stage]).bit_count() < graph.num_stages - 1}
