"""Collectives of a schedule: which there are, who takes part, and beside which Ops they start and are awaited."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from raypipe.schedules.ir import Op, OpKind, Schedule, StageReplica, UpdateScope, WeightRule, reads
from raypipe.schedules.reductions import common_order


class CollectiveKind(StrEnum):
    """What a collective sums or passes on."""

    GRADIENTS = "gradients"
    """The gradients of one stage, summed over its replicas."""
    NORM = "norm"
    """The squared gradient norms of all stages: what an update of scope `global` waits for."""
    TIED = "tied"
    """The gradients of the weights that several stages share."""
    TIED_NORM = "tied_norm"
    """The squared gradient norms of stages that share a weight: what an update of scope `tied` waits for."""
    STAGE_NORM = "stage_norm"
    """The squared gradient norms of the weights that each owner of one stage steps: what its update waits for where its norm is its own."""

    @property
    def of_tie(self) -> bool:
        """Whether the members are the stages of a tie."""
        return self in {CollectiveKind.TIED, CollectiveKind.TIED_NORM}

    @property
    def is_norm(self) -> bool:
        """Whether the collective sums norms, which take a few bytes."""
        return self in {CollectiveKind.NORM, CollectiveKind.TIED_NORM, CollectiveKind.STAGE_NORM}

    WEIGHTS = "weights"
    """The weights of one stage, from their owners to all its replicas."""


class SumRows(StrEnum):
    """Which rows of looked-up weights a sum of gradients has; of all other weights `LATE` has nothing."""

    ALL = "all"
    DUE = "due"
    """Those that the microbatches look up which read the new version."""
    LATE = "late"
    """All others that the update touches."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One exchange among several devices.

    Attributes:
        stage: Number of the stage; of the tie for sums and norms of a tie; 0 for the norm over all stages.
        part: Number of the bucket, from 1; 0 for undivided gradients.
        num_parts: Number of buckets.
        owners: Devices that step a part of the stage's weights each, where others pass them on: only these get the sums of gradients, each
            those of its weights. Empty where each device steps all.
        rows: Which rows of looked-up weights a sum of gradients has.
    """

    kind: CollectiveKind
    stage: int
    update: int
    part: int
    devices: tuple[int, ...]
    num_parts: int = 1
    owners: tuple[int, ...] = ()
    rows: SumRows = SumRows.ALL

    def __str__(self) -> str:
        where = "" if self.kind is CollectiveKind.NORM else f" of {'tie' if self.kind.of_tie else 'stage'} {self.stage}"
        bucket = f", bucket {self.part} of {self.num_parts}" if self.part else ""
        rows = "" if self.rows is SumRows.ALL else f", {self.rows} rows"
        return f"{self.kind}{where} for update {self.update}{bucket}{rows}"


@dataclass(frozen=True, slots=True)
class Start:
    """Takes part in a collective; does not wait.

    A device takes part in its collectives in the order of the program, and in each only when those of `after` have ended here, of whose
    results its share is made.
    """

    collective: Collective
    after: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class Await:
    """Waits for the end of a collective."""

    collective: Collective

    def __str__(self) -> str:
        return str(self.collective)


NOT_COMPUTED = frozenset({OpKind.REDUCE, OpKind.PUBLISH})

_IN_TURN = (
    {CollectiveKind.GRADIENTS, CollectiveKind.WEIGHTS},
    {CollectiveKind.TIED},
    {CollectiveKind.NORM, CollectiveKind.TIED_NORM, CollectiveKind.STAGE_NORM},
)
"""Order within one update: each group reads the results of the groups before it."""


class _Join(NamedTuple):
    """What joins several stages or several owners of one stage: the sum of a tie, or a norm; fields as those of `Collective`."""

    update: int
    number: int
    kind: CollectiveKind
    stages: frozenset[int]


def late_rows_refusal(schedule: Schedule, stage: int) -> str:
    """Return why the rows of a stage's looked-up weights are all summed before its update; empty if some may be summed behind it."""
    if schedule.weight_rule is not WeightRule.DOUBLE_BUFFER:
        return f"the order {schedule.name!r} does not keep two versions of the weights, as pipedream-2bw does"
    if schedule.update_scope is not UpdateScope.STAGE:
        return f"updates wait for a norm of scope {schedule.update_scope!s}"
    if stage in schedule.published_stages:
        return "copies divide the optimizer's state"
    return f"stage {stage} shares a weight with other stages" if stage in schedule.graph.tie_of else ""


class CollectiveOrder:
    """Where the devices of a valid schedule with its reductions start and await their collectives.

    Sums of replicas start at their G. Published weights start at the P and are awaited by the first Op behind it that reads their version,
    or by the next U. What joins several stages (sums of ties, norms), and the norm of a stage whose weights have several owners, starts
    behind a worker's last gradient or G for it, when the sums that it is made of have ended, and is awaited by the first U that needs it.
    Workers take those that they share in one order, that of their U as far as these agree; what only the devices of one worker take part
    in needs no turn. Norms of tied stages come behind all that starts before that U: earlier they would hold up sums of other stages until
    the tie's sum has ended, and these may be awaited first. So each worker has, for each update: sums of replicas, sums of ties, norms.

    Collectives of fewer than `fewest` devices are left out.

    The last bucket of a stage of `late_rows` is two sums. That of the rows that the next reader of the weights looks up is awaited by U,
    that of the others starts right behind it, and is awaited by the U of the next update. So it is where `late_rows_refusal` has no reason
    against it and the window has a reader of the new version.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[Sequence[int]], late_rows: Collection[int] = (), *, fewest: int = 2) -> None:
        self.schedule = schedule
        self.devices = devices
        self._fewest = fewest
        self._late_rows = frozenset(stage for stage in late_rows if not late_rows_refusal(schedule, stage))
        self.starts: dict[Op, list[Start]] = {}
        self.awaits: dict[Op, list[Start | Await]] = {}
        self._sums: dict[tuple[int, int], list[tuple[frozenset[int], Collective]]] = {}
        """By worker and update, the sums that norms and later sums are made of, with their stages."""
        self._joined: dict[int, Op] = {}
        """By worker, the Op behind which it took part in the last collective of several workers: the next come behind it."""
        self.at_end: dict[int, list[Await]] = {}
        if schedule.forward_only:
            return
        self.joints = self._joints()
        self._reductions()
        self._joins()

    def _joins(self) -> None:
        schedule, tie_of = self.schedule, self.schedule.graph.tie_of
        joins: list[_Join] = []
        last: list[_Join] = []
        for update in range(schedule.num_updates):
            for number, tie in enumerate(map(frozenset, schedule.graph.ties)):
                if not self._is_at_hand(tie, update):
                    joins.append(_Join(update, number, CollectiveKind.TIED, tie))
                if schedule.update_scope is UpdateScope.TIED:
                    last.append(_Join(update, number, CollectiveKind.TIED_NORM, tie))
            if schedule.update_scope is UpdateScope.GLOBAL:
                joins.append(_Join(update, 0, CollectiveKind.NORM, self.joints[0]))
                continue
            for stage in sorted(schedule.published_stages):
                norm = _Join(update, stage, CollectiveKind.STAGE_NORM, frozenset((stage,)))
                if stage not in tie_of:
                    joins.append(norm)
                elif schedule.update_scope is UpdateScope.STAGE:
                    last.append(norm)
        for join in common_order(list(self._by_awaiting(joins).values())):
            self._join(join)
        self._join_last(last)

    def _by_awaiting(self, joins: Iterable[_Join]) -> dict[int, list[_Join]]:
        """Return the collectives of each worker in the order of the U that await them."""
        rows: dict[int, list[tuple[int, _Join]]] = {}
        for join in joins:
            for worker, op in self._awaiting(join).items():
                rows.setdefault(worker, []).append((self.schedule.places[op].position, join))
        return {worker: [join for _, join in sorted(row, key=itemgetter(0))] for worker, row in rows.items()}

    def _awaiting(self, join: _Join) -> dict[int, Op]:
        """Return for each member the U that awaits the collective: the first of any stage of those that wait for each other."""
        first = self._first_updates(next(joint for joint in self.joints if join.stages <= joint), join.update)
        return {worker: first[worker] for worker in self._first_updates(join.stages, join.update)}

    def _joints(self) -> list[frozenset[int]]:
        if self.schedule.update_scope is UpdateScope.GLOBAL:
            return [frozenset(range(self.schedule.num_stages))]
        graph = self.schedule.graph
        alone = (stage for stage in sorted(self.schedule.published_stages) if stage not in graph.tie_of)
        return [*map(frozenset, graph.ties), *(frozenset((stage,)) for stage in alone)]

    def _is_at_hand(self, tie: frozenset[int], update: int) -> bool:
        """Whether each worker that updates one stage of a tie updates all its stages, and so adds their gradients by itself."""
        updated: dict[int, set[int]] = {}
        for replica, pipeline in self.schedule.first_pipeline.items():
            if replica.stage in tie and Op(OpKind.UPDATE, replica.stage, update, pipeline) in self.schedule.places:
                updated.setdefault(replica.worker, set()).add(replica.stage)
        return all(stages == tie for stages in updated.values())

    def _members(self, workers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({device for worker in workers for device in self.devices[worker]}))

    def _first_updates(self, stages: Collection[int], update: int) -> dict[int, Op]:
        found: dict[int, tuple[int, Op]] = {}
        for replica, pipeline in self.schedule.first_pipeline.items():
            op = Op(OpKind.UPDATE, replica.stage, update, pipeline)
            place = self.schedule.places.get(op)
            if replica.stage in stages and place is not None:
                found[replica.worker] = min(found.get(replica.worker, (place.position, op)), (place.position, op))
        return {worker: op for worker, (_, op) in found.items()}

    def _next_use(self) -> Callable[[Op], Op | None]:
        uses: dict[StageReplica, list[tuple[int, Op]]] = {}
        for op, place in self.schedule.ops():
            if op.kind is not OpKind.REDUCE:
                uses.setdefault(self.schedule.replica(op), []).append((place.position, op))

        def after(publication: Op) -> Op | None:
            of_stage = uses[self.schedule.replica(publication)]
            at = bisect.bisect_right(of_stage, self.schedule.places[publication].position, key=itemgetter(0))
            return next((op for _, op in itertools.islice(of_stage, at, None) if reads(self.schedule, op) > publication.index), None)

        return after

    def _owners(self, op: Op) -> tuple[int, ...]:
        """Return the devices that step the weights of a G or P, where a P passes them on."""
        if op.stage not in self.schedule.published_stages:
            return ()
        places, first = self.schedule.places, self.schedule.first_pipeline
        copies = self.schedule.replicas[op.stage]
        stepping = [copy for copy in copies if Op(OpKind.UPDATE, op.stage, op.index, first[copy]) in places]
        return self._members(copy.worker for copy in stepping)

    def _reductions(self) -> None:
        handed = [(op, place) for op, place in self.schedule.places.items() if op.kind in NOT_COMPUTED]
        next_use = self._next_use() if any(op.kind is OpKind.PUBLISH for op, _ in handed) else None
        for op, place in handed:
            kind = CollectiveKind.GRADIENTS if op.kind is OpKind.REDUCE else CollectiveKind.WEIGHTS
            members = self._members(replica.worker for replica in self.schedule.replicas[op.stage])
            num_parts = len(self.schedule.find(op._replace(part=0))) if op.part else 1
            collective = Collective(kind, op.stage, op.index, op.part, members, num_parts, self._owners(op))
            if self._has_late_rows(op, num_parts):
                late = replace(collective, rows=SumRows.LATE)
                collective = replace(collective, rows=SumRows.DUE)
                self.starts[op] = [Start(collective), Start(late)]
                self.awaits.setdefault(Op(OpKind.UPDATE, op.stage, op.index + 1, op.pipeline), []).insert(0, Await(late))
            else:
                self.starts.setdefault(op, []).append(Start(collective))
            if op.kind is OpKind.REDUCE:
                update = op._replace(kind=OpKind.UPDATE, part=0)
                for stages in self.joints:
                    if op.stage in stages:
                        # What joins the stages is made of their sums.
                        update = self._first_updates(stages, op.index).get(place.worker, update)
                if update not in self.schedule.places:  # another copy updates and publishes; the sum is taken part in all the same
                    update = op._replace(kind=OpKind.PUBLISH, part=0)
                self.awaits.setdefault(update, []).append(Await(collective))
                if len(members) >= self._fewest:
                    self._sums.setdefault((place.worker, op.index), []).append((frozenset((op.stage,)), collective))
            elif next_use and (user := next_use(op)) is not None:
                self.awaits.setdefault(user, []).append(Await(collective))
            elif len(members) >= self._fewest:
                self.at_end.setdefault(place.worker, []).append(Await(collective))

    def _has_late_rows(self, op: Op, num_parts: int) -> bool:
        is_last_bucket = op.kind is OpKind.REDUCE and op.part in {0, num_parts}
        reader = self.schedule.weight_rule.only_reader(op.index + 1)
        return is_last_bucket and op.stage in self._late_rows and reader is not None and reader < self.schedule.num_updates

    def _join(self, join: _Join) -> None:
        schedule, places = self.schedule, self.schedule.places
        update, _, kind, stages = join
        awaiting = self._awaiting(join)
        in_turn = schedule.update_scope is UpdateScope.TIED and kind is not CollectiveKind.STAGE_NORM
        earlier = self._first_updates(stages, update - 1) if in_turn else {}
        # The devices of one worker have one program: theirs alone need not wait for their turn among those of several workers.
        is_alone = len(awaiting) == 1
        collective = self._collective(join, awaiting)
        for worker, op in awaiting.items():
            awaits = self.awaits.setdefault(op, [])
            after = self._sums_of(join, worker)
            # Where copies lie on several workers, behind the sums of all stages, which these may have in another order.
            behind = range(schedule.num_stages) if after and len(schedule.pipelines) > 1 else stages
            last = self._last_gradient(worker, behind, update)
            if worker in self._joined and not is_alone:
                last = max(last, self._joined[worker], key=lambda op: places[op].position)
            if worker in earlier and places[last] < places[earlier[worker]]:
                awaits += [Start(collective, after), Await(collective)]  # behind the norm of the update before, as on all workers
            else:
                self.starts.setdefault(last, []).append(Start(collective, after))
                if not is_alone:
                    self._joined[worker] = last
                awaits.append(Await(collective))
            if not kind.is_norm and len(collective.devices) >= self._fewest:
                self._sums.setdefault((worker, update), []).append((stages, collective))

    def _collective(self, join: _Join, workers: Iterable[int]) -> Collective:
        return Collective(join.kind, join.number, join.update, 0, self._members(workers))

    def _sums_of(self, join: _Join, worker: int) -> tuple[Collective, ...]:
        """Return the sums on a worker that its share is made of."""
        sums = self._sums.get((worker, join.update), ())
        return tuple(each for of_stages, each in sums if not of_stages.isdisjoint(join.stages))

    def _last_gradient(self, worker: int, stages: Collection[int], update: int) -> Op:
        """Return a worker's last Op, G included, that the gradients of an update of some stages wait for."""
        ends: list[Op] = []
        for replica, pipeline in self.schedule.first_pipeline.items():
            if replica.worker == worker and replica.stage in stages:
                ends += self.schedule.gradient_ops(replica, update)[-1:]
                ends += self.schedule.find(Op(OpKind.REDUCE, replica.stage, update, pipeline))
        return max(ends, key=lambda op: self.schedule.places[op].position)

    def _join_last(self, norms: Sequence[_Join]) -> None:
        """Let norms of tied stages start when the sums are there, behind all that starts before the U that awaits them.

        Workers whose U stand in different orders take these norms in one order, where their gradients are there early enough.
        """
        places, started = self.schedule.places, self._started()
        rows = self._by_awaiting(norms)
        rank = {join: number for number, join in enumerate(common_order(list(rows.values())))}
        ranked = {worker: self._in_time(worker, sorted(row, key=rank.__getitem__)) for worker, row in rows.items()}
        if not all(self._fits(worker, join, end) for worker, row in ranked.items() for join, end in row):
            ranked = {worker: self._in_time(worker, row) for worker, row in rows.items()}
        for worker, row in ranked.items():
            last: list[Op] = []
            for join, end in row:
                awaiting = self._awaiting(join)
                awaits = self.awaits.setdefault(awaiting[worker], [])
                norm = self._collective(join, awaiting)
                start = Start(norm, self._sums_of(join, worker))
                if self._starts_before(awaiting[worker]):  # the sum of the tie starts there, too
                    awaits += [start, Await(norm)]
                    continue
                before = started.get(worker, [])
                place = bisect.bisect_left(before, end, key=itemgetter(0))
                behind = [op for _, op in before[max(place - 1, 0) : place]]
                behind += [self._last_gradient(worker, join.stages, join.update), *last]
                last = [max(behind, key=lambda op: places[op].position)]
                self.starts.setdefault(last[0], []).append(start)
                awaits.append(Await(norm))

    def _in_time(self, worker: int, row: Sequence[_Join]) -> list[tuple[_Join, int]]:
        """Return with each collective the position before which it starts, so that all behind it are in time for their U, too.

        And before the worker's first Op that must read what the update makes: it may wait for the U of another worker.
        """
        ends = [
            min(self.schedule.places[self._awaiting(join)[worker]].position, self._first_reads.get((worker, join.update + 1), math.inf))
            for join in reversed(row)
        ]
        return list(zip(row, map(int, reversed(list(itertools.accumulate(ends, min)))), strict=True))

    @cached_property
    def _first_reads(self) -> dict[tuple[int, int], int]:
        """By worker and version, where a rule fixes it, the position of the first Op that must read it."""
        found: dict[tuple[int, int], int] = {}
        for op, place in self.schedule.ops():
            version = None if op.kind.per_update else self.schedule.weight_rule.fixed_version(self.schedule.update(op))
            if version is not None:
                found.setdefault((place.worker, version), place.position)
        return found

    def _fits(self, worker: int, join: _Join, end: int) -> bool:
        """Whether the gradients are there before this position; a collective that starts right before its U has that place alone."""
        update = self._awaiting(join)[worker]
        if self._starts_before(update):
            return self.schedule.places[update].position == end
        return self.schedule.places[self._last_gradient(worker, join.stages, join.update)].position < end

    def _starts_before(self, update: Op) -> bool:
        return any(isinstance(item, Start) for item in self.awaits.get(update, ()))

    def _started(self) -> dict[int, list[tuple[int, Op]]]:
        """Return for each worker the Ops behind or before which it starts collectives, with their positions."""
        starting = {op for op, starts in self.starts.items() if starts}
        starting |= {op for op, items in self.awaits.items() if any(isinstance(item, Start) for item in items)}
        found: dict[int, list[tuple[int, Op]]] = {}
        for op in sorted(starting, key=lambda op: self.schedule.places[op].position):
            place = self.schedule.places[op]
            found.setdefault(place.worker, []).append((place.position, op))
        return found

    @cached_property
    def concerned(self) -> frozenset[Op]:
        """The Ops before or behind which a collective starts or is awaited, and all G and P."""
        named = (op for op in self.schedule.places if op.kind in NOT_COMPUTED)
        return frozenset({*self.starts, *self.awaits, *named})

    def before(self, ops: tuple[Op, ...]) -> Iterator[Start | Await]:
        """Return the collectives that are awaited, or start, right before a slot."""
        for op in ops:
            for kinds in _IN_TURN:
                for item in self.awaits.get(op, ()):
                    if item.collective.kind in kinds and len(item.collective.devices) >= self._fewest:
                        yield item

    def behind(self, ops: tuple[Op, ...]) -> Iterator[Start]:
        """Return the collectives that start right behind a slot."""
        for op in ops:
            yield from (start for start in self.starts.get(op, ()) if len(start.collective.devices) >= self._fewest)
