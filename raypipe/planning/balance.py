"""Cuts of a chain of layers whose slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.profile import ModelProfile
from raypipe.errors import PlanError


def balanced_sizes(weights: Sequence[float], num_stages: int) -> list[int]:
    """Return sizes of consecutive nonempty groups with the least largest sum, then the least sum of squares.

    Exact dynamic program over (groups, items); time O(stages items^2).

    Raises:
        PlanError: There are more stages than items.
    """
    num_items = len(weights)
    if num_stages > num_items:
        raise PlanError(f"{num_items} layers cannot be cut into {num_stages} stages; use at most {num_items} stages")
    prefix = [0.0, *accumulate(weights)]
    worst = float("inf")
    # best[end] = (largest sum, sum of squares, start of the last group) of the groups so far over items [0, end)
    best: list[tuple[float, float, int]] = [
        (prefix[end], prefix[end] ** 2, 0) if end else (worst, worst, 0) for end in range(num_items + 1)
    ]
    starts: list[list[int]] = []
    for group in range(1, num_stages):
        layer: list[tuple[float, float, int]] = [(worst, worst, 0)] * (num_items + 1)
        for end in range(group + 1, num_items + 1):
            layer[end] = min(
                (max(best[start][0], total), best[start][1] + total**2, start)
                for start in range(group, end)
                for total in [prefix[end] - prefix[start]]
            )
        starts.append([start for _, _, start in layer])
        best = layer
    sizes: list[int] = []
    end = num_items
    for row in reversed(starts):
        sizes.append(end - row[end])
        end = row[end]
    return [end, *reversed(sizes)]


def balanced_cut(profile: ModelProfile, num_stages: int) -> Cut:
    """Return the cut whose slowest forward and backward together are shortest.

    Raises:
        PlanError: There are more stages than layers.
    """
    sizes = balanced_sizes([layer.forward_s + layer.backward_s for layer in profile.layers], num_stages)
    return Cut.of_sizes(sizes, tuple((edge.producer, edge.consumer) for edge in profile.edges()), profile.ties())
