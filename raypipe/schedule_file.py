"""A schedule as a file, `raypipe.schedule/1`: its programs as text, such as `2F5`, one list a worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from raypipe import codec
from raypipe.errors import ScheduleError
from raypipe.schedules.ir import Schedule, StageGraph, UpdateScope, WeightRule
from raypipe.schedules.text import parse_slot
from raypipe.schedules.validate import validate

FORMAT = "raypipe.schedule/1"


@dataclass(frozen=True, kw_only=True)
class ScheduleFile:
    """The file form of a `Schedule`, and its form inside a plan. The attributes are those of `Schedule` and `StageGraph`."""

    __pydantic_config__: ClassVar[dict[str, object]] = codec.config()

    name: str
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

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleFile:
        """The file form of a schedule."""
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
            loss_group_size=schedule.loss_group_size,
            ties=schedule.graph.ties,
        )

    def schedule(self) -> Schedule:
        """The schedule, validated.

        Raises:
            ScheduleError: an Op cannot be read, or the order cannot run.
        """
        schedule = Schedule(
            name=self.name,
            graph=StageGraph(self.num_stages, self.edges, self.ties),
            pipelines=self.pipelines,
            programs=tuple(tuple(map(parse_slot, program)) for program in self.programs),
            num_microbatches=self.num_microbatches,
            num_updates=self.num_updates,
            weight_rule=self.weight_rule,
            update_scope=self.update_scope,
            loss_group_size=self.loss_group_size,
        )
        validate(schedule)
        return schedule


def load_schedule(path: str | os.PathLike[str]) -> Schedule:
    """The validated schedule that a JSON file holds.

    Raises:
        FormatError: the file cannot be read.
        ScheduleError: its order cannot run.
    """
    name = os.fspath(path)
    content = codec.from_json(ScheduleFile, codec.read_text(path), path=name, format_name=FORMAT)
    try:
        return content.schedule()
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error.problem}", error.grid) from None


def save_schedule(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes a schedule as JSON."""
    codec.write_text(path, codec.to_json(ScheduleFile.of(schedule), format_name=FORMAT))
