"""Estimates of layouts in microseconds: the largest of two bounds.

The paths that no order of whole microbatches can shorten: head + all microbatches through the busiest stage or link + tail. The cycle
that a limit K on activations in flight closes: the forward of microbatch i + K waits for the backward of i.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import NamedTuple

import numpy as np

from raypipe import stopping
from raypipe.communication.buckets import num_buckets
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Floats, Problem
from raypipe.planning.shared_wires import CopiedStage, SharedWires

_WorkerRows = tuple[Devices, Sequence[int]]  # Devices of a worker, and the rows of each.

_MANY_DEVICES = 64  # With more devices, arrays are faster than loops.
_STAGE_WORK_S = 40e-6  # Of an estimate, for each stage.
_CHANNEL_WORK_S = 16e-6  # Of a channel, for each device.
_RUNS_WORK_S = 25e-9  # Of what all runs of layers take on a worker, for each run.
_SMALL = 1e-12  # of bytes, by which sums of them may be off


class Channel(NamedTuple):
    """Cost of messages between two workers: seconds per byte of the whole tensor on the busiest link, latency, the former by link.

    `mean_s_per_byte` are those until a row has arrived, in the mean of all rows: devices go on as soon as they have their own.
    """

    s_per_byte: float
    latency_s: float
    loads: tuple[tuple[str, float], ...]
    mean_s_per_byte: float

    @property
    def exists(self) -> bool:
        """Whether all devices that exchange rows have links."""
        return self.latency_s < math.inf


class StageSeconds(NamedTuple):
    """Seconds of a microbatch on a stage's slowest device, and those of the sum of an update's gradients behind the last backward."""

    forward_s: float
    backward_s: float
    sum_s: float


class RunBytes(NamedTuple):
    """Bytes of runs of layers: weights and optimizer, activations whole or as inputs, the microbatch at work, vectors to sum."""

    standing: Floats
    saved: Floats
    inputs: Floats
    working: Floats
    vectors: Floats

    def most_in_flight(self, demands: Sequence[tuple[float, float]], *, recomputed: bool, copied: bool) -> Floats:
        """Return the most activations in flight with which runs fit on devices with these `Problem.demands`; 0 or less for none."""
        kept = self.inputs if recomputed else self.saved
        room = np.full(kept.shape, math.inf)  # for the activations of a whole microbatch
        for share, limit in demands:
            left = limit - self.standing
            if copied:
                left = np.where(self.vectors <= left, left, -math.inf)
            np.minimum(room, left / share, out=room)
        room -= self.working
        with np.errstate(divide="ignore", invalid="ignore"):
            most: Floats = np.floor(np.maximum(room, 0.0) / kept * (1 + _SMALL)) + 1
        return np.where(room < -_SMALL * self.working, 0.0, np.where(kept > 0, most, math.inf))


@dataclass
class Estimator:
    """Estimates time and memory of layouts of one problem."""

    problem: Problem
    _channels: dict[tuple[Devices, Devices], Channel] = field(default_factory=dict, repr=False)
    _vectors: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)
    _missing: dict[tuple[Devices, int, int, int, bool], float] = field(default_factory=dict, repr=False)
    _stages: dict[tuple[Devices, int, int], StageSeconds] = field(default_factory=dict, repr=False)

    @cached_property
    def wires(self) -> SharedWires:
        """The wires on which sums of several stages meet."""
        return SharedWires(self.problem)

    @cached_property
    def _wires_are_shared(self) -> bool:
        return self.wires.can_be_shared()

    def channel(self, source: Devices, target: Devices) -> Channel:
        """Return the cost of messages from one worker to another."""
        channel = self._channels.get((source, target))
        if channel is None:
            channel = self._channels[source, target] = self._channel(source, target)
        return channel

    def _channel(self, source: Devices, target: Devices) -> Channel:
        problem = self.problem
        stopping.spend(_CHANNEL_WORK_S * (len(source) + len(target)))
        loads: dict[str, float] = {}
        own: dict[str, dict[int, float]] = {}
        messages: list[tuple[float, list[tuple[str, float]]]] = []
        latency_s = 0.0
        rows = problem.rows(source), problem.rows(target)
        if rows[0] is None or rows[1] is None:
            return Channel(math.inf, math.inf, (), math.inf)
        merged = _merged_overlaps if len(source) + len(target) > _MANY_DEVICES else _overlaps
        for sender, receiver, num_rows in merged(problem, (source, rows[0]), (target, rows[1])):
            path = problem.path(sender, receiver)
            latency_s = max(latency_s, path.latency_s)
            share = num_rows / problem.microbatch_size
            for resource, bandwidth in path.resources:
                loads[resource] = loads.get(resource, 0.0) + share / bandwidth
                of_senders = own.setdefault(resource, {})
                of_senders[sender] = of_senders.get(sender, 0.0) + share / bandwidth
            messages.append((share, [(resource, own[resource][sender]) for resource, _ in path.resources]))
        # Messages of one device follow one another. Until one has passed a link, any other device has sent as much over it, or all it had.
        mean_s_per_byte = 0.0
        for share, passed in messages:
            arrived = (sum(min(other_s, so_far_s) for other_s in own[resource].values()) for resource, so_far_s in passed)
            mean_s_per_byte += share * max(arrived, default=0.0)
        return Channel(max(loads.values(), default=0.0), latency_s, tuple(loads.items()), mean_s_per_byte)

    def stage(self, group: Devices, first: int, end: int) -> StageSeconds:
        """Return the seconds of the layers first..end-1 on a worker's devices."""
        key = (group, first, end)
        seconds = self._stages.get(key)
        if seconds is None:
            seconds = self._stages[key] = self._stage(group, first, end)
        return seconds

    def _stage(self, group: Devices, first: int, end: int) -> StageSeconds:
        problem = self.problem
        if problem.rows(group) is None or not problem.can_sum(group) or (end == problem.num_layers and not problem.may_take_loss(group)):
            return StageSeconds(math.inf, math.inf, math.inf)
        forward_s = backward_s = 0.0
        for kind, factor in problem.factors(group):
            prefix, fixed = problem.prefix_s[kind], problem.fixed_prefix_s[kind]
            forward, input_grad, weight_grad = (prefix[:, end] - prefix[:, first]).tolist()
            fixed_forward, fixed_input_grad, fixed_weight_grad = (fixed[:, end] - fixed[:, first]).tolist()
            forward_s = max(forward_s, factor.seconds(forward, fixed_forward))
            backward_s = max(backward_s, factor.seconds(input_grad + weight_grad, fixed_input_grad + fixed_weight_grad))
        sum_s = problem.layers_sum_s(group, first, end)
        late_s = problem.late_sums.late_of(first, end, sum_s, backward_s) if len(group) > 1 else 0.0
        overhead_s = problem.overheads_s
        return StageSeconds(forward_s + overhead_s[0], backward_s + overhead_s[1], late_s)

    @cached_property
    def _runs_s(self) -> tuple[tuple[Floats, Floats], ...]:
        # Seconds of forwards and backwards at speed 1 by [kind, first layer, end], and their fixed part; infinite for no layers.
        both = (self.problem.prefix_s, self.problem.fixed_prefix_s)
        forward, backward = (
            tuple(sums[:, None, :] - sums[:, :, None] for sums in (prefix[:, kinds].sum(axis=1) for prefix in both))
            for kinds in (slice(0, 1), slice(1, 3))
        )
        forward[0][:, *np.tril_indices(forward[0].shape[1])] = np.inf
        return forward, backward

    def runs_s(self, group: Devices) -> tuple[Floats, Floats] | None:
        """Return the seconds of a microbatch's forward and backward on a worker for all runs of layers, by [first layer, end].

        Infinite for no layers, for the loss where the devices may not take it, and for devices that links do not join; `None` where the
        devices are more than rows.
        """
        problem = self.problem
        stopping.spend(_RUNS_WORK_S * problem.num_layers**2)
        if problem.rows(group) is None:
            return None
        factors = problem.factors(group)
        forward_s, backward_s = (
            reduce(np.maximum, (factor.seconds(whole[kind], fixed[kind]) for kind, factor in factors)) for whole, fixed in self._runs_s
        )
        if not problem.can_sum(group):
            forward_s[:] = np.inf
        if not problem.may_take_loss(group):
            forward_s[:, -1] = np.inf
        forward_s += problem.overheads_s[0]
        backward_s += problem.overheads_s[1]
        return forward_s, backward_s

    @cached_property
    def run_bytes(self) -> RunBytes:
        """Memory of all runs of layers, by [first layer, end]."""
        problem = self.problem
        standing = problem.standing_prefix[None, :] - problem.standing_prefix[:, None]
        saved = problem.saved_prefix[None, :] - problem.saved_prefix[:, None]
        working = np.zeros_like(saved)
        for first in range(problem.num_layers):
            working[first, first + 1 :] = np.maximum.accumulate(problem.working_peaks[first:]) - problem.saved_prefix[first]
        vectors = np.zeros_like(saved)
        for first, end in itertools.combinations(range(problem.num_layers + 1), 2):
            vectors[first, end] = self.vector_bytes(first, end)
        return RunBytes(standing, saved, np.minimum(problem.crossing_bytes[:, None], saved), np.maximum(saved, working), vectors)

    def busy_runs_s(self, group: Devices, held: int | None) -> Floats | None:
        """Return the seconds of a microbatch on a worker, forth and back, as `runs_s`.

        With `held` activations in flight, forwards run twice where memory demands it, and what does not fit takes forever.
        """
        seconds = self.runs_s(group)
        if seconds is None:
            return None
        once_s = seconds[0] + seconds[1]
        if held is None or not self._memory_is_limited:
            return once_s
        most = partial(self.run_bytes.most_in_flight, self.problem.demands(group), copied=len(group) > 1)
        twice_s = np.where(held <= most(recomputed=True), once_s + seconds[0], np.inf) if self.problem.recompute else np.inf
        return np.where(held <= most(recomputed=False), once_s, twice_s)

    def missing_bytes(self, layout: Layout) -> float:
        """Return the bytes that the fullest device lacks, for one stage per worker."""
        recomputed = self.recomputed(layout)
        return max(self._missing_bytes(layout, stage, recomputed=stage in recomputed) for stage in range(layout.num_stages))

    def recomputed(self, layout: Layout) -> tuple[int, ...]:
        """Return the stages whose forwards run again; if the layout leaves that open, those that would not fit otherwise."""
        if layout.recomputed is not None:
            return layout.recomputed
        if not self.problem.recompute or not self._memory_is_limited:
            return ()
        return tuple(stage for stage in range(layout.num_stages) if self._missing_bytes(layout, stage, recomputed=False) > 0)

    @cached_property
    def _memory_is_limited(self) -> bool:
        return min(self.problem.memory_bytes) < math.inf

    def _missing_bytes(self, layout: Layout, stage: int, *, recomputed: bool) -> float:
        held = layout.in_flight(stage, self.problem.num_microbatches)
        key = (layout.workers[stage], layout.cuts[stage], layout.cuts[stage + 1], held, recomputed)
        missing = self._missing.get(key)
        if missing is None:
            missing = self._missing[key] = self._missing_on(*key)
        return missing

    def _missing_on(self, group: Devices, first: int, end: int, held: int, recomputed: bool) -> float:
        problem, most = self.problem, 0.0
        standing = problem.standing_prefix[end] - problem.standing_prefix[first]
        saved = problem.saved_prefix[end] - problem.saved_prefix[first]
        kept = min(problem.crossing_bytes[first], saved) if recomputed else saved
        # The last microbatch also needs working memory for a moment.
        working = problem.working_peaks[first:end].max() - problem.saved_prefix[first]
        needed = kept * (held - 1) + max(saved, working)
        # Where a sum starts, the gradients of its bucket are copied into a vector; activations are gone then.
        vector = self.vector_bytes(first, end) if len(group) > 1 else 0.0
        for share, limit in problem.demands(group):
            most = max(most, standing + max(needed * share, vector) - limit)
        return float(most)

    def busy_s(self, layout: Layout) -> list[float]:
        """Return for each stage the seconds of a microbatch that its devices compute, or exchange with the next stage if that is longer."""
        again = self.recomputed(layout)
        busy_s: list[float] = []
        for number, group in enumerate(layout.workers):
            forward_s, backward_s, _ = self.stage(group, layout.cuts[number], layout.cuts[number + 1])
            busy_s.append(forward_s * (1 + (number in again)) + backward_s)
            if number + 1 < len(layout.workers):
                there, back = self.channel(group, layout.workers[number + 1]), self.channel(layout.workers[number + 1], group)
                crossing_bytes = float(self.problem.crossing_bytes[layout.cuts[number + 1]])
                busy_s[-1] = max(busy_s[-1], crossing_bytes * max(there.s_per_byte, back.s_per_byte))
        return busy_s

    def heads_s(self, layout: Layout) -> list[float]:
        """Return about when the first activation comes to each stage, for one pipeline and one stage per worker."""
        heads_s = [0.0]
        for number, (group, behind) in enumerate(itertools.pairwise(layout.workers)):
            forth = self.channel(group, behind)
            forward_s = self.stage(group, layout.cuts[number], layout.cuts[number + 1]).forward_s
            num_bytes = float(self.problem.crossing_bytes[layout.cuts[number + 1]])
            heads_s.append(heads_s[-1] + forward_s + forth.latency_s + num_bytes * forth.s_per_byte)
        return heads_s

    def ends_s(self, layout: Layout) -> list[float]:
        """Return about when each stage is done with an update if it works without a gap, and then sums."""
        heads_s, num_microbatches = self.heads_s(layout), self.problem.num_microbatches
        stages = (self.stage(group, *ends) for group, ends in zip(layout.workers, itertools.pairwise(layout.cuts), strict=True))
        return [
            head_s + num_microbatches * (forward_s + backward_s) + sum_s
            for head_s, (forward_s, backward_s, sum_s) in zip(heads_s, stages, strict=True)
        ]

    def vector_bytes(self, first: int, end: int) -> float:
        """Return the bytes of the vector in which copies of the layers first..end-1 sum a bucket of their gradients."""
        num_bytes = self._vectors.get((first, end))
        if num_bytes is None:
            trained = tuple(layer.trained_bytes for layer in self.problem.profile.layers[first:end])
            num_bytes = self._vectors[first, end] = sum(trained) / num_buckets(trained)
        return num_bytes

    def estimate_s(self, layout: Layout) -> float:
        """Return the seconds of one update, for one pipeline, one stage per worker and whole backwards."""
        problem, workers, cuts = self.problem, layout.workers, layout.cuts
        num_microbatches, num_stages = problem.num_microbatches, layout.num_stages
        stopping.spend(_STAGE_WORK_S * num_stages)
        stages = [self.stage(group, cuts[n], cuts[n + 1]) for n, group in enumerate(workers)]
        for n in self.recomputed(layout):
            forward_s, backward_s, sum_s = stages[n]
            stages[n] = StageSeconds(forward_s, backward_s + forward_s, sum_s)
        # For each channel: seconds that a message occupies it, and until the message has arrived.
        forth: list[tuple[float, float]] = []
        back: list[tuple[float, float]] = []
        links: dict[str, tuple[int, float]] = {}  # First stage that uses the link, and its seconds per microbatch.
        for n in range(num_stages - 1):
            num_bytes = float(problem.crossing_bytes[cuts[n + 1]])
            for direction, (source, target) in ((forth, (workers[n], workers[n + 1])), (back, (workers[n + 1], workers[n]))):
                channel = self.channel(source, target)
                direction.append((num_bytes * channel.s_per_byte, num_bytes * channel.s_per_byte + channel.latency_s))
                for link, s_per_byte in channel.loads:
                    first, busy_s = links.get(link, (n, 0.0))
                    links[link] = (first, busy_s + num_bytes * s_per_byte)
        late_s, sums = self._shared_sums(layout, stages, back)
        heads, tails = [0.0], [max(stages[0][2], late_s)]
        for n in range(1, num_stages):
            heads.append(heads[-1] + stages[n - 1][0] + forth[n - 1][1])
            tails.append(max(stages[n][2], back[n - 1][1] + stages[n - 1][1] + tails[-1]))
        round_trip = 0.0
        longest = 0.0
        for n in reversed(range(num_stages)):
            forward_s, backward_s, _ = stages[n]
            if n == num_stages - 1:
                round_trip = forward_s + backward_s
            else:
                behind = round_trip
                rest = back[n][1] + backward_s + tails[n]
                longest = max(
                    longest,
                    heads[n] + forward_s + (num_microbatches - 1) * forth[n][0] + forth[n][1] + behind + rest,
                    heads[n + 1] + behind + (num_microbatches - 1) * back[n][0] + rest,
                )
                round_trip = forward_s + forth[n][1] + behind + back[n][1] + backward_s
            turns = (num_microbatches - 1) // layout.in_flight(n, num_microbatches) + 1
            longest = max(longest, heads[n] + max(num_microbatches * (forward_s + backward_s), turns * round_trip) + tails[n])
        for first, busy_s in links.values():
            longest = max(longest, heads[first] + stages[first][0] + num_microbatches * busy_s + stages[first][1] + tails[first])
        for link, sums_s in sums.items():
            first, busy_s = links.get(link, (0, 0.0))
            longest = max(longest, heads[first] + stages[first][0] + num_microbatches * busy_s + sums_s)
        return longest

    def _shared_sums(
        self, layout: Layout, stages: Sequence[StageSeconds], back: Sequence[tuple[float, float]]
    ) -> tuple[float, dict[str, float]]:
        """Return the seconds by which sums on shared wires end behind the first stage's last backward, and how long they keep each wire."""
        if not self._wires_are_shared or not layout.has_copies:
            return 0.0, {}
        copied: list[CopiedStage] = []
        end_s = 0.0
        for n, group in enumerate(layout.workers):
            if n:
                end_s -= back[n - 1][1] + stages[n - 1][1]
            if len(group) > 1:
                copied.append(CopiedStage(group, layout.cuts[n], layout.cuts[n + 1], end_s, stages[n][1]))
        return self.wires.last_end_s(copied) if len(copied) > 1 else 0.0, self.wires.busy_s(copied)


def _merged_overlaps(problem: Problem, source: _WorkerRows, target: _WorkerRows) -> list[tuple[int, int, int]]:
    """Return `_overlaps`, merged for pairs between the same two nodes."""
    ends = np.cumsum(source[1]), np.cumsum(target[1])
    borders = np.union1d(*ends)
    senders = np.array(source[0])[np.searchsorted(ends[0], borders)]
    receivers = np.array(target[0])[np.searchsorted(ends[1], borders)]
    num_rows = np.diff(borders, prepend=0)
    node_of = problem.nodes_of
    # Within a node each pair has a path of its own.
    within = node_of[senders] == node_of[receivers]
    overlaps = list(zip(senders[within].tolist(), receivers[within].tolist(), num_rows[within].tolist(), strict=True))
    senders, receivers, num_rows = senders[~within], receivers[~within], num_rows[~within]
    _, first, block = np.unique(problem.block_of[senders, receivers], return_index=True, return_inverse=True)
    totals = np.bincount(block, weights=num_rows).astype(int)
    return overlaps + list(zip(senders[first].tolist(), receivers[first].tolist(), totals.tolist(), strict=True))


def _overlaps(_: Problem, one: _WorkerRows, other: _WorkerRows) -> list[tuple[int, int, int]]:
    """Return (sender, receiver, rows in common) for the devices of two workers."""
    (source, source_rows), (target, target_rows) = one, other
    overlaps: list[tuple[int, int, int]] = []
    sender = receiver = row = 0
    ends = [source_rows[0], target_rows[0]]
    while True:
        end = min(ends)
        overlaps.append((source[sender], target[receiver], end - row))
        row = end
        if ends[0] == end:
            sender += 1
            if sender == len(source):
                return overlaps
            ends[0] += source_rows[sender]
        if ends[1] == end:
            receiver += 1
            ends[1] += target_rows[receiver]
