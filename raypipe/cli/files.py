"""What a file of raypipe holds, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raypipe import codec, plan, profile, schedule_file, topology, trace
from raypipe.errors import FormatError, ScheduleError, suggestion
from raypipe.plan import Plan
from raypipe.profile import ModelProfile
from raypipe.schedules.ir import Op, OpKind, Schedule, Slot, StageGraph, ops_of
from raypipe.schedules.text import from_csv
from raypipe.schedules.validate import validate
from raypipe.topology import ClusterTopology
from raypipe.trace import Trace

Content = Schedule | Plan | ClusterTopology | ModelProfile | Trace

_LOADERS: Mapping[str, Callable[[str], Content]] = {
    schedule_file.FORMAT: schedule_file.load_schedule,
    plan.FORMAT: Plan.load,
    topology.FORMAT: ClusterTopology.load,
    profile.FORMAT: ModelProfile.load,
    trace.FORMAT: Trace.load,
}


def load(path: str) -> Content:
    """What a JSON, YAML or CSV file holds.

    Raises:
        InputError: it is no such file, or what it holds is not valid.
    """
    if path.endswith(".csv"):
        return _schedule_of_csv(path)
    format_name = codec.read_format(path)
    if format_name not in _LOADERS:
        choices = ", ".join(_LOADERS)
        raise FormatError(path, "format", f"cannot show {format_name!r}{suggestion(format_name, _LOADERS)}; what can be shown: {choices}")
    return _LOADERS[format_name](path)


def _schedule_of_csv(path: str) -> Schedule:
    """The schedule of one chain of stages whose programs a CSV holds; without Us, as torch writes it, it is one update."""
    programs = from_csv(codec.read_text(path), path=path)
    where: dict[tuple[int, int], int] = {}
    for worker, program in enumerate(programs):
        for slot in program:
            for op in ops_of(slot):
                where.setdefault((op.pipeline, op.stage), worker)
    ops = [op for program in programs for slot in program for op in ops_of(slot)]
    num_stages = max(stage for _, stage in where) + 1
    layings = range(max(pipeline for pipeline, _ in where) + 1)
    # What is too large for its programs cannot be complete, and would take as long as it is large to find out.
    if missing := next(((laying, stage) for laying in layings for stage in range(num_stages) if (laying, stage) not in where), None):
        raise ScheduleError(f"{path}: no worker has an Op of stage {missing[1]} of pipeline {missing[0]}")
    num_microbatches = max((op.index for op in ops if not op.kind.per_update), default=0) + 1
    num_updates = max((op.index for op in ops if op.kind is OpKind.UPDATE), default=0) + 1
    if num_microbatches % num_updates:
        raise ScheduleError(f"{path}: {num_microbatches} microbatches cannot be shared by {num_updates} updates")
    has_gradients = any(op.kind.gives_input_gradient for op in ops)
    has_updates = any(op.kind is OpKind.UPDATE for op in ops)
    schedule = Schedule(
        name=path.rpartition("/")[2].removesuffix(".csv"),
        graph=StageGraph.chain(num_stages),
        pipelines=tuple(tuple(where[laying, stage] for stage in range(num_stages)) for laying in layings),
        programs=programs if has_updates or not has_gradients else _with_updates(programs, where),
        num_microbatches=num_microbatches // num_updates,
        num_updates=num_updates,
    )
    try:
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error.problem}", error.grid) from None
    return schedule


def _with_updates(programs: tuple[tuple[Slot, ...], ...], where: Mapping[tuple[int, int], int]) -> tuple[tuple[Slot, ...], ...]:
    holders: dict[tuple[int, int], int] = {}
    for (pipeline, stage), worker in sorted(where.items()):
        holders.setdefault((worker, stage), pipeline)
    return tuple(
        (*program, *(Op(OpKind.UPDATE, stage, 0, pipeline) for (at, stage), pipeline in holders.items() if at == worker))
        for worker, program in enumerate(programs)
    )
