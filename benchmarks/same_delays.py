"""What the losses of an order depend on: which update's weights each layer reads for each row, and nothing else.

Two orders whose tables of delays are equal give equal losses, whatever their devices, pipelines and times
(`tests/actors/test_same_delays.py`). So a curve is computed once for each table, and by the cheapest order that has it: one worker, as few
stages and microbatches as the table allows.

    amdp, 8 devices, K = 1: row 0 ... 7 of the update              on one worker
    stage 0   10 10 10 10 10 10 10 10      10: F reads the         0 ... 6  one stage
    ...                                    weights of one
    stage 7   11 11 11 11 00 00 00 00      update before, B        7        another; two microbatches, 0 ... 3 and 4 ... 7
                                           the newest
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby

from raypipe.artifacts.cut import Cut
from raypipe.errors import ScheduleError
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph, UpdateScope, WeightRule, reads
from raypipe.schedules.validate import validate

Delay = tuple[int, int]
"""Updates by which the weights that a forward and a backward read are older than the newest that their update may read."""
Table = tuple[tuple[Delay, ...], ...]
"""By stage or layer, and microbatch."""


@dataclass(frozen=True)
class Delays:
    """The delays of a window, by layer and equal share of the rows of an update, merged as far as they are equal.

    Attributes:
        layers: Of each stage; the layers of a stage have equal delays.
        tables: Of the first updates of a window; later ones repeat the last `period` of them.
        period: Updates after which delays repeat.
        keeps_versions: Whether backwards always read the version of their forwards, which lies one update back.
    """

    layers: tuple[tuple[int, ...], ...]
    tables: tuple[Table, ...]
    period: int
    keeps_versions: bool

    @classmethod
    def of(cls, schedule: Schedule, cut: Cut) -> Delays:
        """Return the delays of a schedule with whole backwards, for a cut of its stages.

        Raises:
            ScheduleError: Its window is too short to show how the delays repeat.
        """
        if not schedule.weight_rule.overlaps_updates:
            return cls((tuple(layer for layers in cut.stages for layer in layers),), ((((0, 0),),),), 1, False)
        tables = _tables(schedule)
        start, period = _repeated(tables, schedule.name)
        tables = tables[: start + period]
        columns = {layer: tuple(table[stage] for table in tables) for stage, layers in enumerate(cut.stages) for layer in layers}
        layers = tuple(tuple(group) for _, group in groupby(sorted(columns), key=columns.__getitem__))
        merged = tuple(tuple(columns[group[0]][update] for group in layers) for update in range(start + period))
        return cls(layers, _with_fewest_microbatches(merged), period, schedule.weight_rule is WeightRule.DOUBLE_BUFFER)

    @property
    def num_microbatches(self) -> int:
        """Number of equal shares of an update's rows."""
        return len(self.tables[0][0])

    @property
    def mean_delay(self) -> float:
        """Mean delay of the forwards over layers and rows, in settled updates."""
        sizes = [len(layers) for layers in self.layers]
        settled = self.tables[-self.period :]
        rows = [(size, row) for table in settled for size, row in zip(sizes, table, strict=True)]
        return sum(size * sum(forward for forward, _ in row) / len(row) for size, row in rows) / sum(sizes) / len(settled)

    @property
    def digest(self) -> str:
        """Text that is equal for equal delays."""
        return hashlib.sha256(json.dumps([self.layers, self.tables, self.period]).encode()).hexdigest()[:12]

    @property
    def cut(self) -> Cut:
        """The stages of `schedule`, of a model that is a chain."""
        last = self.layers[-1][-1]
        return Cut(self.layers, tuple((layer, layer + 1) for layer in range(last)))

    def schedule(self, num_updates: int) -> Schedule:
        """Return an order of one worker with these delays.

        Raises:
            ScheduleError: One worker cannot have them.
        """
        num_stages = len(self.layers)
        schedule = Schedule(
            name="same-delays",
            graph=StageGraph.chain(num_stages),
            pipelines=((0,) * num_stages,),
            programs=((),),
            num_microbatches=self.num_microbatches,
            num_updates=num_updates,
            weight_rule=WeightRule.DOUBLE_BUFFER if self.keeps_versions else WeightRule.LIVE,
            update_scope=UpdateScope.GLOBAL,
        )
        schedule = replace(schedule, programs=(tuple(self._order(schedule)),))
        validate(schedule)
        for op, _ in schedule.ops():
            if not op.kind.per_update and reads(schedule, op) != self._version(op):
                raise ScheduleError(f"{op} reads version {reads(schedule, op)}, expected {self._version(op)}")
        return schedule

    def _version(self, op: Op) -> int:
        update, number = divmod(op.index, self.num_microbatches)
        settled = len(self.tables) - self.period
        listed = update if update < settled else settled + (update - settled) % self.period
        forward, backward = self.tables[listed][op.stage][number]
        return update - (forward if op.kind is OpKind.FORWARD else backward)

    def _order(self, schedule: Schedule) -> list[Op]:
        stages = range(schedule.num_stages)
        before: dict[Op, set[Op]] = defaultdict(set)
        for index in range(schedule.num_microbatches * schedule.num_updates):
            for stage in stages:
                forward, backward = Op(OpKind.FORWARD, stage, index), Op(OpKind.BACKWARD, stage, index)
                before[forward] |= {Op(OpKind.FORWARD, stage - 1, index)} if stage else set()
                before[backward] |= {forward} | ({Op(OpKind.BACKWARD, stage + 1, index)} if stage + 1 < len(stages) else set())
                for op in (forward, backward):
                    version = self._version(op)
                    before[op] |= {Op(OpKind.UPDATE, stage, version - 1)} if version else set()
                    if version < schedule.num_updates and not self.keeps_versions:
                        before[Op(OpKind.UPDATE, stage, version)].add(op)
                # An update waits for the norm over all stages.
                for other in stages:
                    before[Op(OpKind.UPDATE, other, index // schedule.num_microbatches)].add(backward)
        for stage in stages:
            for update in range(1, schedule.num_updates):
                before[Op(OpKind.UPDATE, stage, update)].add(Op(OpKind.UPDATE, stage, update - 1))
        return _sorted(before, schedule.num_microbatches)


def _tables(schedule: Schedule) -> tuple[Table, ...]:
    rows: list[list[list[Delay]]] = [
        [[(0, 0)] * schedule.num_microbatches for _ in range(schedule.num_stages)] for _ in range(schedule.num_updates)
    ]
    for op, _ in schedule.ops():
        if op.kind is OpKind.BACKWARD:
            update, number = divmod(op.index, schedule.num_microbatches)
            (forward,) = schedule.find(op._replace(kind=OpKind.FORWARD))
            rows[update][op.stage][number] = (update - reads(schedule, forward), update - reads(schedule, op))
    return tuple(tuple(map(tuple, table)) for table in rows)


def _repeated(tables: tuple[Table, ...], name: str) -> tuple[int, int]:
    """Return the update from which tables repeat, and after how many updates; each must be seen twice."""
    count = len(tables)
    for start in range(count):
        for period in range(1, (count - start) // 2 + 1):
            if all(tables[update] == tables[update - period] for update in range(start + period, count)):
                return start, period
    raise ScheduleError(f"the delays of {name!r} do not repeat within {count} updates; take a longer window")


def _with_fewest_microbatches(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    count = len(tables[0][0])
    for size in sorted((size for size in range(1, count + 1) if count % size == 0), reverse=True):
        blocks = [row[first : first + size] for table in tables for row in table for first in range(0, count, size)]
        if all(len(set(block)) == 1 for block in blocks):
            return tuple(tuple(row[::size] for row in table) for table in tables)
    raise AssertionError("a microbatch is as itself")


def _sorted(before: dict[Op, set[Op]], num_microbatches: int) -> list[Op]:
    """Return the Ops in an order that keeps what must be before, the earliest microbatch first."""

    def key(op: Op) -> tuple[int, int, int, Op]:
        update = op.index if op.kind.per_update else op.index // num_microbatches
        rank = {OpKind.BACKWARD: 0, OpKind.UPDATE: 1, OpKind.FORWARD: 2}[op.kind]
        return update, rank, op.index, op

    missing = {op: len(needed) for op, needed in before.items()}
    behind: dict[Op, list[Op]] = defaultdict(list)
    for op, needed in before.items():
        for other in needed:
            behind[other].append(op)
    ready = [key(op) for op, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[Op] = []
    while ready:
        *_, op = heapq.heappop(ready)
        order.append(op)
        for other in behind[op]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, key(other))
    if len(order) < len(before):
        raise ScheduleError("one worker cannot have these delays: versions and the flow of data contradict each other")
    return order
