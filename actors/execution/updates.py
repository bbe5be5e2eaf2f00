"""The updates of one window, and the collectives that bring devices together for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.starter import Share, Starter
from raypipe.actors.execution.steps import BoundOp, StartStep
from raypipe.actors.stage.gradients import Bucket
from raypipe.actors.stage.weights import Weights
from raypipe.actors.transport.protocol import Transport
from raypipe.model import Batch
from raypipe.schedules.collectives import Await, Collective, CollectiveKind, Start, SumRows
from raypipe.schedules.ir import Op, UpdateScope
from raypipe.schedules.lower import DeviceProgram

Number = float | Tensor
"""A number; one that a GPU computes behind the host stays there as a tensor."""


class LearningRate(Protocol):
    """The learning rate of each update."""

    def __call__(self, update: int, /) -> float:
        """Return the learning rate of an update, counted from the beginning of training."""


def root(square: Tensor) -> Number:
    """Return the square root of a scalar."""
    return math.sqrt(square) if square.is_cpu else square.sqrt()


def sum_of_squares(squares: Sequence[Tensor], *, on: torch.device) -> Tensor:
    """Return the sum of scalars in float64; zero on device `on` without any."""
    return torch.stack([torch.zeros((), dtype=torch.float64, device=on), *squares]).sum()


def clip_scale(norm: Number, limit: float | None) -> Number:
    """Return the factor that makes gradients of a norm keep to a limit."""
    if limit is None:
        return 1.0
    if isinstance(norm, Tensor):
        return torch.where(norm <= limit, 1.0, limit / (norm + 1e-6))
    return 1.0 if norm <= limit else limit / (norm + 1e-6)


def hypot(one: Number, other: Number) -> Number:
    """Return the norm of two parts that have these norms."""
    return torch.hypot(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else math.hypot(one, other)


def divide_weights(program: DeviceProgram, weights: Mapping[int, Weights], transport: Transport) -> None:
    """Let copies of stages step a part of the weights each, where a program has them pass weights on. Between windows only."""
    started = [item.collective for item in program.items if isinstance(item, Start)]
    num_buckets = {each.stage: each.num_parts for each in started if each.kind is CollectiveKind.GRADIENTS}
    for stage, members, owners in {(each.stage, each.devices, each.owners) for each in started if each.kind is CollectiveKind.WEIGHTS}:
        order = [position for position in transport.slice_owners(members) if members[position] in owners]
        copy = members.index(program.device)
        weights[stage].divide(order, copy=copy, num_copies=len(members), num_buckets=num_buckets[stage])


class Updates:
    """Norms, shared gradients, collectives and updates of one window on one device."""

    def __init__(
        self,
        program: DeviceProgram,
        *,
        updated: frozenset[int],
        weights: Mapping[int, Weights],
        transport: Transport,
        batches: BatchSource | None,
        on: torch.device,
        first_update: int,
        skipped: frozenset[int] = frozenset(),
        learning_rate: LearningRate,
        max_grad_norm: float | None,
        at_rest: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._program = program
        self._ties = program.graph.ties
        self._updated = updated
        self._weights = weights
        self._batches = batches
        self._on = on
        self._first_update = first_update
        self._skipped = skipped
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self.under_way = Starter(transport, share=self._share_in_place, put=self._put, on=on, at_rest=at_rest)
        self._awaited = {item.collective: position for position, item in enumerate(program.items) if isinstance(item, Await)}
        self.shared: dict[tuple[int, int], Tensor] = {}
        """By stage and update, the summed gradients of the weights that the stage shares with others."""
        self._norms: dict[int, Number] = {}
        self._tied_norms: dict[tuple[int, int], Number] = {}
        self._stage_norms: dict[tuple[int, int], Number] = {}

    def norms(self) -> dict[int, float]:
        """Return the gradient norm of each update, as far as this device knows it."""
        return {update: float(norm) for update, norm in self._norms.items()}

    def update(self, op: Op, position: int) -> None:
        """Update a stage."""
        weights = self._weights[op.stage]
        shared = self._shared(op.stage, op.index)
        norm = self._norm(op)
        if shared is not None:
            # All stages that share a weight clip its gradient alike. Not in place: other stages of this device may use the sum later.
            stage_only = self._program.update_scope is UpdateScope.STAGE
            shared = shared * self._scale(root(weights.shared.squared_norm(shared)) if stage_only else norm)
            del self.shared[op.stage, op.index]
        weights.update(
            op.index,
            scale=self._scale(norm),
            learning_rate=self._learning_rate(self._first_update + op.index),
            keep_old=self._program.last_reads[op.stage, op.index] > position,
            shared=shared,
            steps=op.index not in self._skipped,
            delay=self._program.delay_of.get((op.stage, op.index), 0.0),
        )

    def starting(self, bound: BoundOp, steps: Sequence[StartStep]) -> AbstractContextManager[None]:
        """Start sums of buckets while a backward runs, each when it has added to all gradients of the bucket."""
        by_bucket = {_bucket(step.collective): step for step in steps}
        return bound.weights.when_complete(bound.version, list(by_bucket), lambda bucket: self.start(by_bucket[bucket]))

    def start(self, step: StartStep) -> None:
        """Start a collective with this device's share, unless it has been started while a backward ran."""
        if step.collective in self.under_way.pending:
            return
        if step.after:  # the share is made in another thread
            for weights in self._weights.values():
                weights.gradients.unbind()
        self.under_way.start(step)

    def finish(self, collective: Collective) -> int:
        """Wait until a collective has ended and its sum is where it is needed; return its bytes."""
        return self.under_way.finish(collective)

    def close(self) -> None:
        """Start nothing more."""
        self.under_way.close()

    def _share_in_place(self, collective: Collective) -> Share:
        tensor = self._share(collective)
        if collective.kind not in {CollectiveKind.GRADIENTS, CollectiveKind.WEIGHTS}:
            return Share(tensor)
        weights, bucket, late = self._weights[collective.stage], _bucket(collective), collective.rows is SumRows.LATE
        shards = weights.shards if collective.owners else None
        if collective.kind is CollectiveKind.WEIGHTS:
            return Share(tensor, segments=shards.of_weights if shards else ())
        segments = shards.of_gradients(weights.gradients.members(bucket)) if shards else ()
        return Share(tensor, weights.gradients.places(collective.update, bucket, late=late), segments)

    def _put(self, collective: Collective, total: Tensor) -> None:
        weights, stage, update = self._weights, collective.stage, collective.update
        match collective.kind:
            case CollectiveKind.NORM:
                self._norms[update] = root(total.reshape(()))
            case CollectiveKind.TIED_NORM:
                self._tied_norms[stage, update] = root(total.reshape(()))
            case CollectiveKind.TIED:
                self._set_shared(stage, update, total)
            case CollectiveKind.GRADIENTS if collective.rows is SumRows.LATE:
                self._put_late_rows(weights[stage], collective, total)
            case CollectiveKind.GRADIENTS:
                shards = weights[stage].shards if collective.owners else None
                weights[stage].gradients.set_flat(update, total, _bucket(collective), kept=shards.stepped if shards else None)
            case CollectiveKind.STAGE_NORM:
                self._stage_norms[stage, update] = root(total.reshape(()))
            case CollectiveKind.WEIGHTS:
                keep_old = self._program.last_reads.get((stage, update), -1) > self._awaited[collective]
                weights[stage].receive(update, total, keep_old=keep_old)

    def _put_late_rows(self, weights: Weights, collective: Collective, total: Tensor) -> None:
        stage, update = collective.stage, collective.update
        weights.gradients.set_flat(update, total, _bucket(collective), late=True)
        if stage in self._program.primary_stages:
            self._norms[update] = hypot(self._norms[update], root(weights.squared_norm(update, late=True)))
        weights.update_late_rows(update)

    def _share(self, collective: Collective) -> Tensor:
        stage, update, primary = collective.stage, collective.update, self._program.primary_stages
        match collective.kind:
            case CollectiveKind.NORM:
                return self._local_squared_norm(update, self._weights).reshape(1)
            case CollectiveKind.TIED_NORM:
                return self._local_squared_norm(update, self._ties[stage]).reshape(1)
            case CollectiveKind.TIED:
                return self._local_shared(stage, update, primary)
            case CollectiveKind.GRADIENTS:
                return self._gradients(collective)
            case CollectiveKind.STAGE_NORM:
                return self._weights[stage].squared_norm(update).reshape(1)  # a weight that stages share has a norm of its own
            case CollectiveKind.WEIGHTS:
                return self._weights[stage].flat()

    def _gradients(self, collective: Collective) -> Tensor:
        weights, update, bucket = self._weights[collective.stage], collective.update, _bucket(collective)
        if collective.rows is SumRows.LATE:
            return weights.late_gradients(update, bucket)
        reader = weights.rule.only_reader(update + 1) if collective.rows is SumRows.DUE else None
        readers = None if reader is None else self._microbatches(reader)
        return weights.flat_gradients(update, self._microbatches(update), bucket, readers=readers)

    def _microbatches(self, update: int) -> Iterator[Batch]:
        """Yield the rows of all microbatches of an update, whichever copies of a stage they pass."""
        assert self._batches is not None, "a device whose stages look up rows has a source of them"
        first = (self._first_update + update) * self._program.num_microbatches
        for number in range(self._program.num_microbatches):
            yield self._batches.batch(first + number, (0.0, 1.0))

    # Norms

    def _scale(self, norm: Number) -> Number:
        return clip_scale(norm, self._max_grad_norm)

    def _norm(self, op: Op) -> Number:
        scope = self._program.update_scope
        if scope is UpdateScope.GLOBAL:
            if op.index not in self._norms:  # no other device: there was no collective
                self._norms[op.index] = root(self._local_squared_norm(op.index, self._weights))
            return self._norms[op.index]
        if op.stage in self._program.primary_stages or self._weights[op.stage].shards is not None:
            of_stage = root(self._local_squared_norm(op.index, (op.stage,)))
            self._norms[op.index] = hypot(self._norms[op.index], of_stage) if op.index in self._norms else of_stage
        tie = self._program.graph.tie_of.get(op.stage)
        if (op.stage, op.index) in self._stage_norms:
            return self._stage_norms[op.stage, op.index]
        if scope is UpdateScope.STAGE or tie is None:
            return root(self._weights[op.stage].squared_norm(op.index))
        if (tie, op.index) not in self._tied_norms:
            self._tied_norms[tie, op.index] = root(self._local_squared_norm(op.index, self._ties[tie]))
        return self._tied_norms[tie, op.index]

    def _local_squared_norm(self, update: int, stages: Collection[int]) -> Tensor:
        """Sum over stages of this device; shared weights count with the first stage of their tie, others with who steps them."""
        parts: list[Tensor] = []
        tie_of, primary = self._program.graph.tie_of, self._program.primary_stages
        for stage in sorted(stages):
            if stage in primary or (stage in self._weights and self._weights[stage].shards is not None):
                parts.append(self._weights[stage].squared_norm(update))
            if stage in primary and stage in tie_of and stage == self._ties[tie_of[stage]][0]:
                shared = self._shared(stage, update)
                assert shared is not None, "it is tied"
                parts.append(self._weights[stage].shared.squared_norm(shared))
        return sum_of_squares(parts, on=self._on)

    # Weights that stages share

    def _shared(self, stage: int, update: int) -> Tensor | None:
        tie = self._program.graph.tie_of.get(stage)
        if tie is None:
            return None
        if (stage, update) not in self.shared:  # all stages of the tie are here: there was no collective
            self._set_shared(tie, update, self._local_shared(tie, update, self._weights))
        return self.shared[stage, update]

    def _set_shared(self, tie: int, update: int, total: Tensor) -> None:
        for stage in self._updated.intersection(self._ties[tie]):
            self.shared[stage, update] = total

    def _local_shared(self, tie: int, update: int, stages: Collection[int]) -> Tensor:
        """Add up in one order everywhere; return zeros where no stage is tied."""
        present = [stage for stage in self._ties[tie] if stage in self._weights]
        parts = [self._weights[stage].shared_gradients(update) for stage in present if stage in stages]
        return sum(parts[1:], start=parts[0]) if parts else torch.zeros_like(self._weights[present[0]].shared_gradients(update))


def _bucket(collective: Collective) -> Bucket:
    return collective.part, collective.num_parts
