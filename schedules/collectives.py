"""Collectives of a schedule: which there are, who takes part, and beside which Ops they start and are awaited."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from operator import itemgetter

from raypipe.schedules.ir import Op, OpKind, Schedule, StageReplica, UpdateScope, reads


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


@dataclass(frozen=True, slots=True)
class Collective:
    """One exchange among several devices.

    Attributes:
        stage: Number of the stage; of the tie for sums and norms of a tie; 0 for the norm over all stages.
        part: Number of the bucket, from 1; 0 for undivided gradients.
        num_parts: Number of buckets.
        owners: Devices that step a part of the stage's weights each, where others pass them on: only these get the sums of gradients, each
            those of its weights. Empty where each device steps all.
    """

    kind: CollectiveKind
    stage: int
    update: int
    part: int
    devices: tuple[int, ...]
    num_parts: int = 1
    owners: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = "" if self.kind is CollectiveKind.NORM else f" of {'tie' if self.kind.of_tie else 'stage'} {self.stage}"
        bucket = f", bucket {self.part} of {self.num_parts}" if self.part else ""
        return f"{self.kind}{where} for update {self.update}{bucket}"


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


class CollectiveOrder:
    """Where the devices of a valid schedule with its reductions start and await their collectives.

    Sums of replicas start at their G. Published weights start at the P and are awaited by the first Op behind it that reads their version,
    or by the next U. What joins several stages (sums of ties, norms), and the norm of a stage whose weights have several owners, starts
    behind a worker's last gradient or G for it, when the sums that it is made of have ended, and is awaited by the first U that needs it.
    The norm of a tie comes behind all that starts before that U: earlier it would hold up sums of other stages until the tie's sum has
    ended, and these may be awaited first. So each worker has, for each update: sums of replicas, sums of ties, norms.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[Sequence[int]]) -> None:
        self.schedule = schedule
        self.devices = devices
        self.starts: dict[Op, list[Start]] = {}
        self.awaits: dict[Op, list[Start | Await]] = {}
        self._sums: dict[tuple[int, int], list[tuple[frozenset[int], Collective]]] = {}
        """By worker and update, the sums that norms and later sums are made of, with their stages."""
        self._joined: dict[int, Op] = {}
        """By worker, the Op behind which it took part in the last collective of several stages: those of later updates come behind it."""
        self.at_end: dict[int, list[Await]] = {}
        if schedule.forward_only:
            return
        self.joints = self._joints()
        self._reductions()
        self._joins()
        if schedule.update_scope is UpdateScope.TIED:
            self._join_norms_of_ties()

    def _joins(self) -> None:
        schedule = self.schedule
        for update in range(schedule.num_updates):
            for number, tie in enumerate(map(frozenset, schedule.graph.ties)):
                if not self._is_at_hand(tie, update):
                    self._join(CollectiveKind.TIED, number, tie, update)
            if schedule.update_scope is UpdateScope.GLOBAL:
                self._join(CollectiveKind.NORM, 0, self.joints[0], update)
                continue
            for stage in sorted(schedule.published_stages):
                if schedule.update_scope is UpdateScope.STAGE or stage not in schedule.graph.tie_of:
                    self._join(CollectiveKind.STAGE_NORM, stage, frozenset((stage,)), update)

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
        next_use = self._next_use() if handed else None
        for op, place in handed:
            kind = CollectiveKind.GRADIENTS if op.kind is OpKind.REDUCE else CollectiveKind.WEIGHTS
            members = self._members(replica.worker for replica in self.schedule.replicas[op.stage])
            num_parts = len(self.schedule.find(op._replace(part=0))) if op.part else 1
            collective = Collective(kind, op.stage, op.index, op.part, members, num_parts, self._owners(op))
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
                if len(members) > 1:
                    self._sums.setdefault((place.worker, op.index), []).append((frozenset((op.stage,)), collective))
            elif next_use and (user := next_use(op)) is not None:
                self.awaits.setdefault(user, []).append(Await(collective))
            elif len(members) > 1:
                self.at_end.setdefault(place.worker, []).append(Await(collective))

    def _join(self, kind: CollectiveKind, number: int, stages: frozenset[int], update: int) -> None:
        schedule, places = self.schedule, self.schedule.places
        # A worker has all collectives of an update where it first updates any of the stages that wait for each other.
        first = self._first_updates(next(joint for joint in self.joints if stages <= joint), update)
        in_turn = schedule.update_scope is UpdateScope.TIED and kind is not CollectiveKind.STAGE_NORM
        earlier = self._first_updates(stages, update - 1) if in_turn else {}
        collective = Collective(kind, number, update, 0, self._members(self._first_updates(stages, update)))
        for worker in self._first_updates(stages, update):
            awaits = self.awaits.setdefault(first[worker], [])
            sums = self._sums.setdefault((worker, update), [])
            after = tuple(each for of_stages, each in sums if not of_stages.isdisjoint(stages))
            # Where copies lie on several workers, behind the sums of all stages, which these may have in another order.
            behind = range(schedule.num_stages) if after and len(schedule.pipelines) > 1 else stages
            last = self._last_gradient(worker, behind, update)
            if worker in self._joined:
                last = max(last, self._joined[worker], key=lambda op: places[op].position)
            if worker in earlier and places[last] < places[earlier[worker]]:
                awaits += [Start(collective, after), Await(collective)]  # behind the norm of the update before, as on all workers
            else:
                self.starts.setdefault(last, []).append(Start(collective, after))
                self._joined[worker] = last
                awaits.append(Await(collective))
            if not kind.is_norm and len(collective.devices) > 1:
                sums.append((stages, collective))

    def _last_gradient(self, worker: int, stages: Collection[int], update: int) -> Op:
        """Return a worker's last Op, G included, that the gradients of an update of some stages wait for."""
        ends: list[Op] = []
        for replica, pipeline in self.schedule.first_pipeline.items():
            if replica.worker == worker and replica.stage in stages:
                ends += self.schedule.gradient_ops(replica, update)[-1:]
                ends += self.schedule.find(Op(OpKind.REDUCE, replica.stage, update, pipeline))
        return max(ends, key=lambda op: self.schedule.places[op].position)

    def _join_norms_of_ties(self) -> None:
        """Let norms of ties start when the sums are there, in the order in which their U stand among all that starts."""
        places, started = self.schedule.places, self._started()
        norms: list[tuple[int, int, Op, frozenset[int], Collective]] = []
        for update in range(self.schedule.num_updates):
            for number, tie in enumerate(map(frozenset, self.schedule.graph.ties)):
                first = self._first_updates(tie, update)
                norm = Collective(CollectiveKind.TIED_NORM, number, update, 0, self._members(first))
                norms += [(worker, places[op].position, op, tie, norm) for worker, op in first.items()]
        last: dict[int, Op] = {}
        for worker, position, first_update, stages, norm in sorted(norms, key=itemgetter(0, 1)):
            awaits = self.awaits.setdefault(first_update, [])
            after = tuple(each for of_stages, each in self._sums.get((worker, norm.update), ()) if not of_stages.isdisjoint(stages))
            if any(isinstance(item, Start) for item in awaits):  # the sum of the tie starts there, too
                awaits += [Start(norm, after), Await(norm)]
                continue
            before = started.get(worker, [])
            place = bisect.bisect_left(before, position, key=itemgetter(0))
            behind = [self._last_gradient(worker, stages, norm.update), *(op for _, op in before[max(place - 1, 0) : place])]
            behind += [last[worker]] if worker in last else []
            last[worker] = max(behind, key=lambda op: places[op].position)
            self.starts.setdefault(last[worker], []).append(Start(norm, after))
            awaits.append(Await(norm))

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
                    if item.collective.kind in kinds and len(item.collective.devices) > 1:
                        yield item

    def behind(self, ops: tuple[Op, ...]) -> Iterator[Start]:
        """Return the collectives that start right behind a slot."""
        for op in ops:
            yield from (start for start in self.starts.get(op, ()) if len(start.collective.devices) > 1)
