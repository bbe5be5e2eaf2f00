"""Lower bounds on an update, for every synchronous schedule and placement of undivided blocks (layers, or stages of one cut).

    ramp    Devices wait for the heads (earlier forwards) of the blocks with which they begin; then all work must fit.
    block   All microbatches pass the busiest block: T >= its head + M (F + I + W) / copies.
    path    The last microbatch waits for the others: T >= M F of the first block / copies + F of the others + I of all.

Memory and bandwidth only add; parts of microbatches would shorten the path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Seconds of one block for one microbatch at speed 1; `sources` are the earlier blocks that feed it."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    update_s: float = 0.0
    sources: tuple[int, ...] = ()

    @property
    def microbatch_s(self) -> float:
        """Seconds of F, I and W of one microbatch."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True)
class LowerBound:
    """Least seconds of an update from first forward to last U; `work_s` holds also where updates overlap."""

    work_s: float
    ramp_s: float
    block_s: float
    path_s: float

    @property
    def update_s(self) -> float:
        """Largest of the bounds."""
        return max(self.ramp_s, self.block_s, self.path_s)


def lower_bound(
    blocks: Sequence[Block],
    *,
    num_microbatches: int,
    speeds: Sequence[float],
    num_copies: int = 1,
    latency_s: float = 0.0,
) -> LowerBound:
    """Bound one synchronous update of blocks in topological order; `latency_s` is the smallest of any link."""
    fastest = max(speeds)
    num_copies = min(num_copies, len(speeds))
    queue = math.ceil(num_microbatches / num_copies)
    work = num_microbatches * math.fsum(block.microbatch_s for block in blocks) + math.fsum(block.update_s for block in blocks)
    heads = _heads(blocks, fastest)
    # The first input of a device comes from another device.
    starts = [head + latency_s * bool(block.sources) for head, block in zip(heads, blocks, strict=True)]
    return LowerBound(
        work_s=work / math.fsum(speeds),
        ramp_s=ramp_s(work, sorted(starts * num_copies), sorted(speeds, reverse=True)),
        block_s=max(head + (queue * block.microbatch_s + block.update_s) / fastest for head, block in zip(heads, blocks, strict=True)),
        path_s=_path_s(blocks, queue=queue) / fastest,
    )


def ramp_s(work: float, starts: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the least T for which the sum of speed x max(T - start, 0) is the work; the fastest devices start the earliest."""
    total_speed = lost = 0.0
    end_s = math.inf
    for start, speed in zip(starts, speeds, strict=False):
        if start >= end_s:
            break
        total_speed += speed
        lost += speed * start
        end_s = (work + lost) / total_speed
    return end_s


def _heads(blocks: Sequence[Block], speed: float) -> list[float]:
    ends: list[float] = []
    heads: list[float] = []
    for block in blocks:
        heads.append(max((ends[source] for source in block.sources), default=0.0))
        ends.append(heads[-1] + block.forward_s / speed)
    return heads


def _path_s(blocks: Sequence[Block], *, queue: int) -> float:
    forth: list[float] = []
    back: list[float] = []
    for block in blocks:
        times = 1 if block.sources else queue
        forth.append(max((forth[source] for source in block.sources), default=0.0) + times * block.forward_s)
        back.append(max((back[source] for source in block.sources), default=0.0) + block.input_grad_s)
    return max(forth_s + back_s for forth_s, back_s in zip(forth, back, strict=True))
