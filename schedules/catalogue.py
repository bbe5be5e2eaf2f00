"""The bundled schedules by name. A family in this list is subject to every law test."""

from __future__ import annotations

from raypipe.errors import ScheduleError, UnknownNameError
from raypipe.schedules.families import (
    amdp,
    amdp_auto,
    chimera,
    dualpipe,
    gpipe,
    interleaved,
    interleaved_async,
    list_order,
    one_f_one_b,
    one_f_one_b_async,
    zero_bubble,
    zero_bubble_auto,
    zero_bubble_v,
)
from raypipe.schedules.ir import Schedule
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec

SPECS: tuple[ScheduleSpec, ...] = (
    gpipe.SPEC,
    one_f_one_b.SPEC,
    list_order.SPEC,
    interleaved.SPEC,
    zero_bubble.SPEC_H1,
    zero_bubble.SPEC_H2,
    zero_bubble_v.SPEC,
    zero_bubble_auto.SPEC,
    chimera.SPEC,
    chimera.SPEC_DOUBLING,
    chimera.SPEC_HALVING,
    dualpipe.SPEC,
    dualpipe.SPEC_V,
    one_f_one_b_async.SPEC_PIPEDREAM,
    one_f_one_b_async.SPEC_2BW,
    one_f_one_b_async.SPEC_ASYNC,
    interleaved_async.SPEC,
    amdp.SPEC,
    amdp.SPEC_FLUSH,
    amdp_auto.SPEC,
)


def spec(name: str) -> ScheduleSpec:
    """Return the family of that name.

    Raises:
        UnknownNameError: lists the names there are.
    """
    for found in SPECS:
        if found.name == name:
            return found
    raise UnknownNameError("schedule", name, [known.name for known in SPECS])


def build(name: str, request: ScheduleRequest) -> Schedule:
    """Return the schedule of that name and request, not yet validated.

    Raises:
        UnknownNameError: no schedule has that name.
        ScheduleError: the size is one that the schedule cannot take.
    """
    return of_size(spec(name), request)


def of_size(found: ScheduleSpec, request: ScheduleRequest) -> Schedule:
    """Return the schedule of a family, bundled or not; errors as of `build`."""
    for what in ("num_devices", "num_microbatches", "num_updates", "num_chunks"):
        if (number := getattr(request, what)) < 1:
            raise ScheduleError(f"{what} must be at least 1, got {number}")
    return found.build(request)
