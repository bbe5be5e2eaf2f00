"""Branches of a model, and where their stages may lie.

A branch passes over the devices in one of two directions from one of them, several times if it has more work; or it has devices of its
own, as in GraphPipe (Jeon et al., ASPLOS 2025, arXiv 2406.17145). Layers without a branch, in which branches meet, are one more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypipe.planning.problem import Devices, Problem
from raypipe.schedules.families.branch_aware import turned

Layers = tuple[int, ...]

_MOST_PASSES = 4
_MINOR = 0.5  # a branch with less than this share of a device's work is one stage


def divisions(problem: Problem) -> Iterator[tuple[Layers, ...]]:
    """Yield ways to divide the layers into branches: as the model names them, and with what is entangled as one branch."""
    named = named_branches(problem)
    if len(named) < 2:
        return
    yield named
    entangled = _entangled(problem, named)
    if entangled:
        apart = (tuple(layer for layer in layers if layer not in entangled) for layers in named)
        yield (*(layers for layers in apart if layers), tuple(sorted(entangled)))


def named_branches(problem: Problem) -> tuple[Layers, ...]:
    """Return the layers of each named branch, and those of none: by the branches before and behind them. Empty without two branches."""
    names = [layer.branch for layer in problem.profile.layers]
    if len({name for name in names if name is not None}) < 2:
        return ()
    behind, before = _reached(problem, names, forward=True), _reached(problem, names, forward=False)
    groups: dict[object, list[int]] = {}
    for layer, name in enumerate(names):
        groups.setdefault((behind[layer], before[layer]) if name is None else name, []).append(layer)
    return tuple(map(tuple, groups.values()))


def _reached(problem: Problem, names: Sequence[str | None], *, forward: bool) -> list[frozenset[str]]:
    """Return for each layer the branches before it, or behind it."""
    met: list[frozenset[str]] = [frozenset()] * len(names)
    for producer, consumer in sorted(problem.edges, key=lambda edge: edge[forward], reverse=not forward):
        source, target = (producer, consumer) if forward else (consumer, producer)
        own = names[source]
        met[target] |= met[source] | (frozenset() if own is None else {own})
    return met


def levels(problem: Problem, branches: Sequence[Layers]) -> list[int]:
    """Return for each layer the most times that a path to it changes branch."""
    branch_of = {layer: branch for branch, layers in enumerate(branches) for layer in layers}
    found = [0] * problem.num_layers
    for producer, consumer in sorted(problem.edges, key=lambda edge: edge[1]):
        found[consumer] = max(found[consumer], found[producer] + (branch_of[producer] != branch_of[consumer]))
    return found


def _entangled(problem: Problem, branches: Sequence[Layers]) -> set[int]:
    """Return the layers that read another branch, or come behind one that does, in branches that read each other both ways."""
    branch_of = {layer: branch for branch, layers in enumerate(branches) for layer in layers}
    reads = {(branch_of[consumer], branch_of[producer]) for producer, consumer in problem.edges} - {(b, b) for b in range(len(branches))}
    mutual = {branch for branch, other in reads if (other, branch) in reads}
    of_layer = levels(problem, branches)
    return {layer for branch in mutual for layer in branches[branch] if of_layer[layer]}


# Placements


@dataclass(frozen=True)
class BranchPlacement:
    """The worker of each stage of each branch."""

    workers: tuple[tuple[int, ...], ...]


def placements(problem: Problem, branches: Sequence[Layers], workers: Sequence[Devices]) -> Iterator[BranchPlacement]:
    """Yield placements: branches in both directions from several devices, and each on devices of its own."""
    work = [work_s(problem, layers) for layers in branches]
    num_workers = len(workers)
    major = major_branches(problem, branches, num_workers)
    if not major:
        return
    least = min(work[branch] for branch in major)
    passes = {branch: min(max(round(work[branch] / least), 1), _MOST_PASSES) for branch in major}
    seen: set[BranchPlacement] = set()
    for of_major in itertools.chain(
        _disjoint(branches, work, major, num_workers),
        _turned(branches, passes, num_workers),
        _turned(branches, dict.fromkeys(major, 1), num_workers),
    ):
        placement = BranchPlacement(tuple(joined(problem, branches, of_major, workers)))
        if placement not in seen:
            seen.add(placement)
            yield placement


def _turned(branches: Sequence[Layers], passes: dict[int, int], num_workers: int) -> Iterator[dict[int, tuple[int, ...]]]:
    counts = [min(of_branch * num_workers, len(branches[branch])) for branch, of_branch in passes.items()]
    for workers in turned(counts, num_workers):
        yield dict(zip(passes, workers, strict=True))


def _disjoint(
    branches: Sequence[Layers], work: Sequence[float], major: Sequence[int], num_workers: int
) -> Iterator[dict[int, tuple[int, ...]]]:
    if len(major) > num_workers or len(major) < 2:
        return
    counts = {branch: 1 for branch in major}
    for _ in range(num_workers - len(major)):
        open_branches = [branch for branch in major if counts[branch] < len(branches[branch])]
        if not open_branches:
            return
        neediest = max(open_branches, key=lambda branch: work[branch] / counts[branch])
        counts[neediest] += 1
    ends = list(itertools.accumulate(counts.values()))
    yield {branch: tuple(range(end - counts[branch], end)) for branch, end in zip(major, ends, strict=True)}


def joined(
    problem: Problem, branches: Sequence[Layers], of_major: Mapping[int, tuple[int, ...]], workers: Sequence[Devices]
) -> Iterator[tuple[int, ...]]:
    """Yield the workers of each branch; a small branch is one stage, next to what it reads, or to what reads it.

    Layers behind which the loss is taken are on a worker that may take it, if there is one.
    """
    branch_of = {layer: branch for branch, layers in enumerate(branches) for layer in layers}
    read = {producer for producer, _ in problem.edges}
    for branch, layers in enumerate(branches):
        if branch in of_major:
            yield of_major[branch]
            continue
        before = [branch_of[source] for source, target in problem.edges if target in layers and branch_of[source] in of_major]
        behind = [branch_of[target] for source, target in problem.edges if source in layers and branch_of[target] in of_major]
        neighbors = [of_major[other][-1] for other in before] or [of_major[other][0] for other in behind] or [0]
        if not read.issuperset(layers):
            neighbors = [worker for worker in (*neighbors, *range(len(workers))) if problem.may_take_loss(workers[worker])] or neighbors
        yield (neighbors[0],)


def major_branches(problem: Problem, branches: Sequence[Layers], num_workers: int) -> list[int]:
    """Return the branches that have work for more than one stage."""
    work = [work_s(problem, layers) for layers in branches]
    return [branch for branch, each in enumerate(work) if each >= _MINOR * sum(work) / num_workers]


def work_s(problem: Problem, layers: Iterable[int]) -> float:
    """Return the mean seconds of layers over the kinds of devices."""
    seconds = problem.layer_s.mean(axis=0).sum(axis=0)
    return float(sum(seconds[layer] for layer in layers))
