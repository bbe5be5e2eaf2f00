"""Lower bounds on the time of an update, for every synchronous schedule.

The bounds are for blocks, which are not divided among devices: the layers of a model, for any cut, or the stages of one cut. Each block
is on one device, or on `num_copies` devices where a schedule keeps copies of the weights (two for Chimera and DualPipe). A bound is the
largest of three, each of which holds for every order of forwards and backwards, whole or split, and every placement of the blocks:

    ramp    A device begins with the forward of some block, and at most `num_copies` devices begin with the same one. Before it a
            microbatch must have passed the earlier blocks, which takes the block's head. So the devices wait at least for the smallest
            heads, each counted `num_copies` times, and then all work must fit: the sum of T - head over the devices.
    block   All microbatches pass the busiest block one after the other: T >= its head + M (F + I + W) / copies.
    path    The last microbatch to enter has waited for the others, then goes forth and back:
            T >= M F of the first block / copies + F of the others + I of all.

The bounds ignore memory and the bandwidth of links, which can only add to them, and parts of microbatches, which would shorten the path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Seconds of one block for one microbatch on a device of speed 1.

    Attributes:
        forward_s: Seconds of F.
        input_grad_s: Seconds of I.
        weight_grad_s: Seconds of W; the full backward takes I and W.
        update_s: Seconds of U.
        sources: Numbers of the blocks that feed this one, all smaller than its own.
    """

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
    """Least seconds of one update, from its first forward to its last change of weights.

    Attributes:
        work_s: All work divided among all devices; also holds for updates that do not wait for each other.
        ramp_s: All work, and the wait of the devices at the beginning.
        block_s: Bound of the busiest block.
        path_s: Bound of a microbatch forth and back.
    """

    work_s: float
    ramp_s: float
    block_s: float
    path_s: float

    @property
    def update_s(self) -> float:
        """Largest of the bounds."""
        return max(self.ramp_s, self.block_s, self.path_s)

    @property
    def binding(self) -> str:
        """Name of the largest bound: `ramp`, `block` or `path`."""
        return max(("ramp", self.ramp_s), ("block", self.block_s), ("path", self.path_s), key=lambda bound: bound[1])[0]


def lower_bound(
    blocks: Sequence[Block],
    *,
    num_microbatches: int,
    speeds: Sequence[float],
    num_copies: int = 1,
    latency_s: float = 0.0,
) -> LowerBound:
    """Return the bound for one update of a synchronous schedule.

    Args:
        blocks: Blocks in topological order.
        num_microbatches: Number of microbatches of the update.
        speeds: Speed of each device; 1 for one that takes the blocks' seconds.
        num_copies: Most copies of each block's weights.
        latency_s: Smallest latency between two devices.
    """
    fastest = max(speeds)
    num_copies = min(num_copies, len(speeds))
    queue = math.ceil(num_microbatches / num_copies)
    work = num_microbatches * math.fsum(block.microbatch_s for block in blocks) + math.fsum(block.update_s for block in blocks)
    heads = _heads(blocks, fastest)
    # The first input of a device comes from another device.
    starts = [head + latency_s * bool(block.sources) for head, block in zip(heads, blocks, strict=True)]
    return LowerBound(
        work_s=work / math.fsum(speeds),
        ramp_s=_ramp_s(work, sorted(starts * num_copies), sorted(speeds, reverse=True)),
        block_s=max(head + (queue * block.microbatch_s + block.update_s) / fastest for head, block in zip(heads, blocks, strict=True)),
        path_s=_path_s(blocks, queue=queue) / fastest,
    )


def _ramp_s(work: float, starts: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the least T for which the sum of speed x max(T - start, 0) is the work.

    The fastest devices start the earliest. A device that would start after T does nothing.
    """
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
    """Return the seconds until each block's first forward can begin."""
    ends: list[float] = []
    heads: list[float] = []
    for block in blocks:
        heads.append(max((ends[source] for source in block.sources), default=0.0))
        ends.append(heads[-1] + block.forward_s / speed)
    return heads


def _path_s(blocks: Sequence[Block], *, queue: int) -> float:
    """Return the longest path of the last microbatch to enter: its queue at a first block, then forth, and back from anywhere."""
    forth: list[float] = []
    back: list[float] = []
    for block in blocks:
        times = 1 if block.sources else queue
        forth.append(max((forth[source] for source in block.sources), default=0.0) + times * block.forward_s)
        back.append(max((back[source] for source in block.sources), default=0.0) + block.input_grad_s)
    return max(forth_s + back_s for forth_s, back_s in zip(forth, back, strict=True))
