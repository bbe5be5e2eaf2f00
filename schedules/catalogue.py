"""The bundled schedules by name. Every law test runs on each of them."""

from __future__ import annotations

from raypipe.errors import ScheduleError, UnknownNameError
from raypipe.schedules.families import (
    amdp,
    amdp_auto,
    branch_aware,
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
    branch_aware.SPEC,
)


def spec(name: str) -> ScheduleSpec:
    """Return the spec of the bundled schedule of that name.

    Raises:
        UnknownNameError: no bundled schedule has that name; the message lists the names.
    """
    for bundled in SPECS:
        if bundled.name == name:
            return bundled
    raise UnknownNameError("schedule", name, [known.name for known in SPECS])


def build(name: str, request: ScheduleRequest) -> Schedule:
    """Return the schedule of that name and request, not yet validated.

    Raises:
        UnknownNameError: no schedule has that name.
        ScheduleError: the schedule cannot take the size.
    """
    return of_size(spec(name), request)


def of_size(schedule_spec: ScheduleSpec, request: ScheduleRequest) -> Schedule:
    """Return the schedule of a spec, bundled or not, for a request; it is not yet validated.

    Raises:
        ScheduleError: the schedule cannot take the size.
    """
    for what in ("num_devices", "num_microbatches", "num_updates", "num_chunks"):
        if (number := getattr(request, what)) < 1:
            raise ScheduleError(f"{what} must be at least 1, got {number}")
    request.require_possible()
    return schedule_spec.build(request)
