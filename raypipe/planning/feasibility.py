"""Refusals of problems that no plan can solve."""

from __future__ import annotations

import math
from itertools import pairwise

from raypipe.errors import PlanError
from raypipe.planning.problem import Problem
from raypipe.units import size


def check_possible(problem: Problem) -> None:
    """Refuse a problem that no plan can solve.

    Raises:
        PlanError: Some kind of device has no work, a layer fits nowhere, or all layers need more memory than there is.
    """
    for kind, whole in zip(problem.kinds, problem.prefix_s[:, :, -1], strict=True):
        if not whole.any():
            where = f" on devices of kind {kind!r}" if kind else ""
            raise PlanError(f"the layers of {problem.profile.name!r} take no time{where}; measure them with `raypipe profile`")
    largest = max(problem.memory_bytes)
    if largest == math.inf:
        return
    saved_per_row = [layer.saved_bytes / problem.profile.microbatch_size for layer in problem.profile.layers]
    standing = pairwise(problem.standing_prefix.tolist())
    for layer, (before, behind), of_row in zip(problem.profile.layers, standing, saved_per_row, strict=True):
        # At least one row of one microbatch.
        needed = behind - before + of_row
        if needed > largest:
            raise PlanError(
                f"layer {layer.name!r} needs {size(round(needed))} for weights, gradients, optimizer state and one row; the largest device "
                f"of {problem.topology.name!r} has {size(round(largest))}, {size(round(needed - largest))} too little; "
                "divide the layer or use larger devices"
            )
    # Tied weights are held once where their layers are in one stage.
    shared = (sorted(problem.profile.layers[layer].shared_bytes for layer in tie)[:-1] for tie in problem.profile.ties())
    needed = float(problem.standing_prefix[-1]) - sum(map(sum, shared)) * (1 + problem.state_bytes_per_parameter_byte)
    total = math.fsum(problem.memory_bytes)
    if needed > total:
        raise PlanError(
            f"weights, gradients and optimizer state of {problem.profile.name!r} need {size(round(needed))}, all devices of "
            f"{problem.topology.name!r} together have {size(round(total))}, {size(round(needed - total))} too little; add devices"
        )
