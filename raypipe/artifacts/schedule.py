"""Schedules as files, Ops as text such as `2F5`: `raypipe.schedule/1` (JSON), or CSV with a row per worker.

CSV is enough for a synchronous schedule of a chain of stages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

from pydantic import GetCoreSchemaHandler, GetPydanticSchema
from pydantic_core import core_schema

from raypipe.artifacts import codec
from raypipe.artifacts.files import read_text
from raypipe.artifacts.record import ShownName, record
from raypipe.errors import ScheduleError
from raypipe.schedules.ir import Op, OpKind, Schedule, Slot, StageGraph, UpdateScope, WeightRule, ops_of
from raypipe.schedules.text import from_csv, parse_slot
from raypipe.schedules.validate import validate

FORMAT = "raypipe.schedule/1"


@record()
class ScheduleFile:
    """The file form of a `Schedule`, also inside a plan.

    Attributes:
        loss_group_size: Always 1; files of earlier versions may have other numbers, which are refused.
        work: `SizedSchedule.work`, where stages are not equal.
    """

    name: ShownName
    num_stages: int
    edges: tuple[tuple[int, int], ...]
    pipelines: tuple[tuple[int, ...], ...]
    programs: tuple[tuple[str, ...], ...]
    num_microbatches: int
    num_updates: int = 1
    weight_rule: WeightRule = WeightRule.FLUSH
    update_scope: UpdateScope = UpdateScope.GLOBAL
    loss_group_size: int = 1
    ties: tuple[tuple[int, ...], ...] = ()
    work: tuple[float, ...] | None = None

    @classmethod
    def of(cls, schedule: Schedule, work: tuple[float, ...] = ()) -> ScheduleFile:
        """Return the file form of a schedule, and of the work of its stages unless they are equal."""
        return cls(
            name=schedule.name,
            num_stages=schedule.num_stages,
            edges=schedule.graph.edges,
            pipelines=schedule.pipelines,
            programs=tuple(tuple(map(str, program)) for program in schedule.programs),
            num_microbatches=schedule.num_microbatches,
            num_updates=schedule.num_updates,
            weight_rule=schedule.weight_rule,
            update_scope=schedule.update_scope,
            ties=schedule.graph.ties,
            work=work or None,
        )

    def schedule(self) -> Schedule:
        """Return the schedule, not yet validated; raise `ScheduleError` if an Op cannot be read."""
        if self.loss_group_size != 1:
            raise ScheduleError(
                f"loss_group_size {self.loss_group_size} is no longer read: microbatches with one loss are parts of one microbatch, "
                "and the loss is a stage that works on the whole, as `raypipe schedule branch-aware --coupled` writes it"
            )
        if self.work is not None and (len(self.work) != self.num_stages or not all(0 <= work < math.inf for work in self.work)):
            raise ScheduleError(f"work {list(self.work)} does not give each of {self.num_stages} stages a finite number of 0 or more")
        return Schedule(
            name=self.name,
            graph=StageGraph(self.num_stages, self.edges, self.ties),
            pipelines=self.pipelines,
            programs=tuple(tuple(map(parse_slot, program)) for program in self.programs),
            num_microbatches=self.num_microbatches,
            num_updates=self.num_updates,
            weight_rule=self.weight_rule,
            update_scope=self.update_scope,
        )


def _core_schema_of_field(_: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    in_file = handler.generate_schema(ScheduleFile)
    return core_schema.json_or_python_schema(
        json_schema=core_schema.no_info_after_validator_function(ScheduleFile.schedule, in_file),
        python_schema=core_schema.is_instance_schema(Schedule),
        serialization=core_schema.plain_serializer_function_ser_schema(ScheduleFile.of, return_schema=in_file),
    )


ScheduleField = Annotated[Schedule, GetPydanticSchema(_core_schema_of_field)]
"""Type of a field that holds a `Schedule` in Python and a `ScheduleFile` in its file."""


@dataclass(frozen=True)
class SizedSchedule:
    """A schedule and the work of its stages.

    Attributes:
        work: Seconds of each stage over those of the stage whose times are stated, as `ScheduleSpec.stage_work`; empty where all are equal.
    """

    schedule: Schedule
    work: tuple[float, ...] = ()


def load_schedule(path: str | os.PathLike[str]) -> SizedSchedule:
    """Return the valid schedule in a JSON file; raise `FormatError`, or `ScheduleError` if its order cannot run."""
    name = os.fspath(path)
    content = codec.load_json(ScheduleFile, path, format_name=FORMAT)
    try:
        schedule = content.schedule()
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error.problem}", error.grid) from None
    return SizedSchedule(schedule, content.work or ())


def load_csv(path: str | os.PathLike[str]) -> SizedSchedule:
    """Return the valid schedule of equal stages in a CSV file, named after the file; raises as `load_schedule`.

    Without Us, as torch writes it, the file is one update: each worker ends with the U of each of its stages.
    """
    name = os.fspath(path)
    programs = from_csv(read_text(path).rstrip("\r\n"), path=name)
    try:
        schedule = _of_programs(programs, name=PurePath(name).stem)
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error.problem}", error.grid) from None
    return SizedSchedule(schedule)


def _of_programs(programs: tuple[tuple[Slot, ...], ...], *, name: str) -> Schedule:
    where: dict[tuple[int, int], int] = {}
    for worker, program in enumerate(programs):
        for slot in program:
            for op in ops_of(slot):
                where.setdefault((op.pipeline, op.stage), worker)
    ops = [op for program in programs for slot in program for op in ops_of(slot)]
    num_stages = max(stage for _, stage in where) + 1
    pipelines = range(max(pipeline for pipeline, _ in where) + 1)
    # A number too large for the programs cannot be complete; the validator would take time in proportion to it.
    needed = ((pipeline, stage) for pipeline in pipelines for stage in range(num_stages))  # `product` would hold all of them
    if missing := next((place for place in needed if place not in where), None):
        raise ScheduleError(f"no worker has an Op of stage {missing[1]} of pipeline {missing[0]}")
    num_microbatches = max((op.index for op in ops if not op.kind.per_update), default=0) + 1
    num_updates = max((op.index for op in ops if op.kind is OpKind.UPDATE), default=0) + 1
    if num_microbatches % num_updates:
        raise ScheduleError(f"{num_microbatches} microbatches cannot be shared by {num_updates} updates")
    has_gradients = any(op.kind.gives_input_gradient for op in ops)
    has_updates = any(op.kind is OpKind.UPDATE for op in ops)
    return Schedule(
        name=name,
        graph=StageGraph.chain(num_stages),
        pipelines=tuple(tuple(where[pipeline, stage] for stage in range(num_stages)) for pipeline in pipelines),
        programs=programs if has_updates or not has_gradients else _with_updates(programs, where),
        num_microbatches=num_microbatches // num_updates,
        num_updates=num_updates,
    )


def _with_updates(programs: tuple[tuple[Slot, ...], ...], where: Mapping[tuple[int, int], int]) -> tuple[tuple[Slot, ...], ...]:
    first_pipelines: dict[tuple[int, int], int] = {}
    for (pipeline, stage), worker in sorted(where.items()):
        first_pipelines.setdefault((worker, stage), pipeline)
    return tuple(
        (*program, *(Op(OpKind.UPDATE, stage, 0, pipeline) for (at, stage), pipeline in sorted(first_pipelines.items()) if at == worker))
        for worker, program in enumerate(programs)
    )


def load_order(path: str | os.PathLike[str]) -> SizedSchedule:
    """Return the valid schedule in a CSV or JSON file, told apart by name; raises as `load_schedule`."""
    return load_csv(path) if os.fspath(path).endswith(".csv") else load_schedule(path)


def to_json(schedule: Schedule, work: tuple[float, ...] = ()) -> str:
    """Return a schedule, and the work of its stages unless they are equal, as `load_schedule` reads them."""
    return codec.to_json(ScheduleFile.of(schedule, work), format_name=FORMAT)
