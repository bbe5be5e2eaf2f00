"""Schedules by name: bundled, an entry point, a file (`order.csv`), or a function (`orders.py:eager`).

Paths are relative to the working directory. What is not bundled must have the requested size and be valid.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePath
from typing import Any

from raypipe.artifacts.schedule import load_order
from raypipe.errors import ConfigError, InputError, RaypipeError, ScheduleError, UnknownNameError
from raypipe.schedules import catalogue
from raypipe.schedules.ir import Op, OpKind, Overlap, Schedule, StageGraph, UpdateScope, WeightRule
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import repeated
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec
from raypipe.schedules.validate import validate
from raypipe.user_code import named

GROUP = "raypipe.schedules"

_UNKNOWN = "?"


def spec(name: str) -> ScheduleSpec:
    """Return the specification of a named schedule.

    Raises:
        UnknownNameError: No schedule has this name.
        InputError: A function, entry point or file cannot be loaded.
    """
    bundled = {bundled_spec.name: bundled_spec for bundled_spec in catalogue.SPECS}
    if name in bundled:
        return bundled[name]
    if is_file(name):
        return _of_file(name)
    if name.endswith(".py"):
        raise ConfigError(f"schedule {name!r}: name the function in it, as in {name}:function")
    if ":" in name:
        what = f"schedule {name!r}"
        return _of_object(name, what, named(name, what="schedule", such_as="my_orders:eager"))
    entries = _entries()
    if name not in entries:
        raise UnknownNameError("schedule", name, [*bundled, *entries])
    return _of_entry(name, entries[name])


def specs() -> tuple[ScheduleSpec, ...]:
    """Return all bundled and registered specifications; titles tell which cannot be loaded."""
    known: list[ScheduleSpec] = list(catalogue.SPECS)
    for name, entry in _entries().items():
        try:
            known.append(_of_entry(name, entry))
        except InputError as error:
            known.append(_described(name, partial(_fail, error), title=f"cannot be loaded: {error}"))
    return tuple(known)


def overlaps(name: str) -> bool:
    """Return whether a schedule's updates overlap; functions count as synchronous. Raises as `spec`."""
    return spec(name).weight_rule.overlaps_updates


def is_file(name: str) -> bool:
    """Return whether the name is that of a file with one order."""
    return name.endswith((".csv", ".json"))


def build(name: str, request: ScheduleRequest) -> Schedule:
    """Return a schedule of this size, or raise `InputError`."""
    return catalogue.of_size(spec(name), request)


def build_schedule(
    name: str,
    num_devices: int,
    num_microbatches: int,
    *,
    num_updates: int = 1,
    num_chunks: int | None = None,
    num_pipelines: int = 0,
    update_scope: UpdateScope | None = None,
) -> Schedule:
    """Return a schedule by name.

    Args:
        name: Name from `raypipe schedules`, or a file or function that defines a schedule.
        num_devices: Number of workers.
        num_microbatches: Microbatches of one update, over all pipelines.
        num_updates: Updates of the window.
        num_chunks: Stages per worker; the schedule's default where left out.
        num_pipelines: Number of pipelines; 0 lets the schedule choose.
        update_scope: What an update waits for; the schedule's default where left out.

    Raises:
        InputError: There is no such schedule, or it cannot take this size.
    """
    chosen = spec(name)
    request = ScheduleRequest(
        num_devices,
        num_microbatches,
        num_updates,
        num_chunks=num_chunks or chosen.default_chunks,
        num_pipelines=num_pipelines,
        update_scope=update_scope,
    )
    return catalogue.of_size(chosen, request)


def _described(
    name: str, build: Callable[[ScheduleRequest], Schedule], *, title: str, chunks: int = 1, weight_rule: WeightRule = WeightRule.FLUSH
) -> ScheduleSpec:
    return ScheduleSpec(
        name=name,
        build=build,
        title=title,
        paper=_UNKNOWN,
        bubble=_UNKNOWN,
        memory=_UNKNOWN,
        mismatch=_UNKNOWN,
        delay=_UNKNOWN,
        makespan_s=lambda request, times: None,
        peak_in_flight=lambda request, worker: metrics(build(request)).peak_in_flight[worker],
        default_chunks=chunks,
        weight_rule=weight_rule,
    )


def _fail(error: InputError, request: ScheduleRequest) -> Schedule:
    raise error


# Entry points


def _entries() -> dict[str, EntryPoint]:
    entries: dict[str, EntryPoint] = {}
    bundled = {known.name for known in catalogue.SPECS}
    for entry in entry_points(group=GROUP):
        name = entry.value if entry.name in bundled or entry.name in entries else entry.name
        entries.setdefault(name, entry)
    return entries


def _of_entry(name: str, entry: EntryPoint) -> ScheduleSpec:
    package = f" of {entry.dist.name}" if entry.dist else ""
    what = f"schedule {name!r} (entry point {entry.value}{package})"
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:  # sys.exit() shall not end the command in silence
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    return _of_object(name, what, loaded)


# Functions


def _of_object(name: str, what: str, loaded: Any) -> ScheduleSpec:
    if isinstance(loaded, ScheduleSpec):
        return replace(loaded, name=name, build=partial(_checked, what, loaded.build))
    if not callable(loaded):
        raise ConfigError(
            f"{what}: expected a function from a ScheduleRequest to a Schedule, or a ScheduleSpec, got {type(loaded).__name__}"
        )
    title = (getattr(loaded, "__doc__", None) or "").strip().partition("\n")[0]
    return _described(name, partial(_checked, what, loaded), title=title or "a user's function")


def _checked(what: str, function: Callable[[ScheduleRequest], object], request: ScheduleRequest) -> Schedule:
    try:
        returned = function(request)
    except RaypipeError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() shall not end the command in silence
        words = f"{request.num_devices} devices, {request.num_microbatches} microbatches and {request.num_updates} updates"
        raise ScheduleError(f"{what} failed for {words}: {type(error).__name__}: {error}{_place(error)}") from error
    if not isinstance(returned, Schedule):
        raise ScheduleError(f"{what} returned {type(returned).__name__}, expected a raypipe.schedules.ir.Schedule")
    schedule = _well_formed(what, returned)
    for words, asked, got in (
        ("devices", request.num_devices, schedule.num_workers),
        ("microbatches an update", request.num_microbatches, schedule.num_microbatches),
        ("updates", request.num_updates, schedule.num_updates),
        ("pipelines", request.num_pipelines or len(schedule.pipelines), len(schedule.pipelines)),
        ("as the scope of updates", request.update_scope or schedule.update_scope, schedule.update_scope),
    ):
        if asked != got:
            raise ScheduleError(
                f"{what} returned a schedule of {got!s} {words}, asked for {asked!s}; follow the ScheduleRequest, or refuse it"
            )
    try:
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{what}: {error.problem}", error.grid) from None
    return schedule


def _place(error: BaseException) -> str:
    # The command line prints no traceback.
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename == __file__ else f" ({PurePath(last.filename).name}, line {last.lineno})"


def _well_formed(what: str, schedule: Schedule) -> Schedule:
    try:
        tidy = replace(
            schedule,
            programs=tuple(map(tuple, schedule.programs)),
            pipelines=tuple(map(tuple, schedule.pipelines)),
            weight_rule=WeightRule(schedule.weight_rule),
            update_scope=UpdateScope(schedule.update_scope),
        )
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"{what} returned a schedule that cannot be read: {error}; see raypipe.schedules.ir.Schedule") from None
    if not isinstance(tidy.graph, StageGraph):
        raise ScheduleError(f"{what} returned {tidy.graph!r} as the stage graph; write StageGraph.chain(num_stages)")
    for number, workers in enumerate(tidy.pipelines):
        if not all(isinstance(worker, int) for worker in workers):
            raise ScheduleError(f"{what} returned {workers} as pipeline {number}; write the number of the worker of each stage")
    for worker, program in enumerate(tidy.programs):
        for position, slot in enumerate(program):
            if not all(map(_is_op, slot.ops if isinstance(slot, Overlap) else (slot,))):
                raise ScheduleError(
                    f"{what}: worker {worker}, position {position}: {slot!r} is no Op; write Op(OpKind.FORWARD, stage, microbatch)"
                )
    return tidy


def _is_op(op: object) -> bool:
    return isinstance(op, Op) and isinstance(op.kind, OpKind) and all(isinstance(number, int) for number in op[1:])


# Files


def _of_file(path: str) -> ScheduleSpec:
    sized = load_order(path)
    order = sized.schedule
    chunks = math.ceil(order.num_stages / order.num_workers)
    title = f"the order in {PurePath(path).name}"
    described = _described(path, partial(_sized, path, order), title=title, chunks=chunks, weight_rule=order.weight_rule)
    return replace(described, stage_work=lambda _: sized.work) if sized.work else described


def _sized(path: str, order: Schedule, request: ScheduleRequest) -> Schedule:
    if (request.num_devices, request.num_microbatches) != (order.num_workers, order.num_microbatches):
        raise ScheduleError(
            f"{path} is an order for {order.num_workers} devices and {order.num_microbatches} microbatches an update, asked for "
            f"{request.num_devices} devices and {request.num_microbatches} microbatches; use --devices {order.num_workers} --microbatches "
            f"{order.num_microbatches} (scaling.num_devices, schedule.num_microbatches), or a schedule for any size"
        )
    chunks, pipelines = math.ceil(order.num_stages / order.num_workers), len(order.pipelines)
    if request.num_chunks != chunks or request.num_pipelines not in {0, pipelines}:
        raise ScheduleError(
            f"{path} has {order.num_stages} stages on {order.num_workers} devices in {pipelines} pipelines; "
            "leave --chunks and --pipelines (schedule.num_chunks, schedule.num_pipelines) out"
        )
    order = replace(order, update_scope=request.update_scope or order.update_scope)
    if request.num_updates != order.num_updates:
        if order.num_updates > 1:
            # A plan of a synchronous order is one of an update.
            options = "--updates-per-window, " if order.weight_rule.overlaps_updates else ""
            raise ScheduleError(
                f"{path} is the order of {order.num_updates} updates, asked for {request.num_updates}; use --updates {order.num_updates} "
                f"({options}schedule.updates_per_window), or write the order of one update, which is repeated"
            )
        order = repeated(order, num_updates=request.num_updates)
    try:
        validate(order)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error.problem}", error.grid) from None
    return order
