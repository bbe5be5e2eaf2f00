"""What no synchronous schedule can beat, for given pieces of a model, devices and microbatches.

The pieces are what is not cut any further: the layers of a model, for any cut of it, or the stages of one cut. Every piece
lies on one device, or on `num_copies` of them where a schedule keeps copies of the weights (two for Chimera and DualPipe).
A bound is the largest of three, each of which holds for every order of forwards and backwards, whole or split, and for
every way of laying the pieces onto the devices, contiguous or not:

    ramp    A device begins with the forward of some piece, which at most `num_copies` devices do; before it a microbatch
            must have passed the pieces in front. So the devices wait for the smallest of these heads at least, each head
            `num_copies` times, and behind them there must be room for all work: the sum of T - head over the devices.
    piece   All microbatches pass the busiest piece, one after the other: T >= its head + M (F + I + W) / copies.
    path    The last microbatch to enter has waited for the others, and then goes forth and back:
            T >= M F of the first piece / copies + F of the others + I of all.

Left out are memory, whose limits can only add to these, the bandwidth of links, and parts of microbatches, which would
shorten the path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.artifacts.profile import ModelProfile


@dataclass(frozen=True)
class Piece:
    """What one piece costs for one microbatch, on a device of speed 1.

    Attributes:
        forward_s: of F.
        input_grad_s: of I.
        weight_grad_s: of W; the full backward takes the sum of the last two.
        update_s: of U.
        sources: the pieces that feed it, all before it.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    update_s: float = 0.0
    sources: tuple[int, ...] = ()

    @property
    def microbatch_s(self) -> float:
        """All work of one microbatch."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True)
class LowerBound:
    """Seconds that one update takes at least, from its first forward to its last change of weights.

    Attributes:
        work_s: all work divided among all devices: also for a stream of updates that do not wait for each other.
        ramp_s: the same with what the devices must wait for at the beginning.
        piece_s: through the busiest piece.
        path_s: of a microbatch forth and back.
    """

    work_s: float
    ramp_s: float
    piece_s: float
    path_s: float

    @property
    def update_s(self) -> float:
        """The largest of them."""
        return max(self.ramp_s, self.piece_s, self.path_s)

    @property
    def binding(self) -> str:
        """Which of them it is: `ramp`, `piece` or `path`."""
        return max(("ramp", self.ramp_s), ("piece", self.piece_s), ("path", self.path_s), key=lambda bound: bound[1])[0]


def lower_bound(
    pieces: Sequence[Piece],
    *,
    num_microbatches: int,
    speeds: Sequence[float],
    num_copies: int = 1,
    latency_s: float = 0.0,
) -> LowerBound:
    """The bound for one update of a synchronous schedule.

    Args:
        pieces: in topological order.
        num_microbatches: of the update.
        speeds: of each device, 1 for one that takes the seconds of the pieces.
        num_copies: of each piece's weights, at most.
        latency_s: the shortest way between two devices.
    """
    fastest = max(speeds)
    num_copies = min(num_copies, len(speeds))
    queue = math.ceil(num_microbatches / num_copies)
    work = num_microbatches * math.fsum(piece.microbatch_s for piece in pieces) + math.fsum(piece.update_s for piece in pieces)
    heads = _heads(pieces, fastest)
    # What a device begins with and is fed came from another device.
    starts = [head + latency_s * bool(piece.sources) for head, piece in zip(heads, pieces, strict=True)]
    return LowerBound(
        work_s=work / math.fsum(speeds),
        ramp_s=_ramp_s(work, sorted(starts * num_copies), sorted(speeds, reverse=True)),
        piece_s=max(head + (queue * piece.microbatch_s + piece.update_s) / fastest for head, piece in zip(heads, pieces, strict=True)),
        path_s=_path_s(pieces, queue=queue) / fastest,
    )


def _ramp_s(work: float, starts: Sequence[float], speeds: Sequence[float]) -> float:
    """The least T for which the devices do all work from their starts on: the sum of speed x max(T - start, 0) is the work.

    The fastest devices with the earliest starts do the most. A device that would start after T does nothing.
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


def _heads(pieces: Sequence[Piece], speed: float) -> list[float]:
    """For each piece, the seconds until its first forward can begin."""
    ends: list[float] = []
    heads: list[float] = []
    for piece in pieces:
        heads.append(max((ends[source] for source in piece.sources), default=0.0))
        ends.append(heads[-1] + piece.forward_s / speed)
    return heads


def _path_s(pieces: Sequence[Piece], *, queue: int) -> float:
    """The longest way of the last microbatch to enter: its queue at a first piece, then forth, and back from anywhere."""
    forth: list[float] = []
    back: list[float] = []
    for piece in pieces:
        times = 1 if piece.sources else queue
        forth.append(max((forth[source] for source in piece.sources), default=0.0) + times * piece.forward_s)
        back.append(max((back[source] for source in piece.sources), default=0.0) + piece.input_grad_s)
    return max(there + home for there, home in zip(forth, back, strict=True))


def chain(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces one behind the other."""
    return tuple(
        Piece(piece.forward_s, piece.input_grad_s, piece.weight_grad_s, piece.update_s, (index - 1,) if index else ())
        for index, piece in enumerate(pieces)
    )


def pieces_of(profile: ModelProfile, *, microbatch_size: int | None = None) -> tuple[Piece, ...]:
    """The layers of a profile as pieces, for microbatches of so many rows; as profiled where left out."""
    scale = 1.0 if microbatch_size is None else microbatch_size / profile.microbatch_size
    sources: dict[int, list[int]] = {}
    for edge in profile.edges():
        sources.setdefault(edge.consumer, []).append(edge.producer)
    return tuple(
        Piece(
            forward_s=layer.forward_s * scale,
            input_grad_s=(layer.backward_s - layer.weight_grad_s) * scale,
            weight_grad_s=layer.weight_grad_s * scale,
            update_s=layer.update_s or 0.0,
            sources=tuple(sorted(sources.get(index, ()))),
        )
        for index, layer in enumerate(profile.layers)
    )


def profile_bound(
    profile: ModelProfile, *, num_devices: int, num_microbatches: int, microbatch_size: int | None = None, num_copies: int = 1
) -> LowerBound:
    """The bound for a model on equal devices of the profiled kind, whatever the cut."""
    pieces = pieces_of(profile, microbatch_size=microbatch_size)
    return lower_bound(pieces, num_microbatches=num_microbatches, speeds=(1.0,) * num_devices, num_copies=num_copies)
