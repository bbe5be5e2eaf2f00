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
from raypipe.schedules.family import Family
from raypipe.schedules.ir import Schedule, Size

FAMILIES: tuple[Family, ...] = (
    gpipe.FAMILY,
    one_f_one_b.FAMILY,
    list_order.FAMILY,
    interleaved.FAMILY,
    zero_bubble.FAMILY_H1,
    zero_bubble.FAMILY_H2,
    zero_bubble_v.FAMILY,
    zero_bubble_auto.FAMILY,
    chimera.FAMILY,
    chimera.FAMILY_DOUBLING,
    chimera.FAMILY_HALVING,
    dualpipe.FAMILY,
    dualpipe.FAMILY_V,
    one_f_one_b_async.FAMILY_PIPEDREAM,
    one_f_one_b_async.FAMILY_2BW,
    one_f_one_b_async.FAMILY_ASYNC,
    interleaved_async.FAMILY,
    amdp.FAMILY,
    amdp.FAMILY_FLUSH,
    amdp_auto.FAMILY,
)


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        UnknownNameError: lists the names there are.
    """
    for found in FAMILIES:
        if found.name == name:
            return found
    raise UnknownNameError("schedule", name, [known.name for known in FAMILIES])


def build(name: str, size: Size) -> Schedule:
    """The schedule of that name and size, not yet validated.

    Raises:
        UnknownNameError: no schedule has that name.
        ScheduleError: the size is one that the schedule cannot take.
    """
    return of_size(family(name), size)


def of_size(found: Family, size: Size) -> Schedule:
    """The schedule of a family, bundled or not; errors as of `build`."""
    for what in ("num_devices", "num_microbatches", "num_updates", "num_chunks"):
        if (number := getattr(size, what)) < 1:
            raise ScheduleError(f"{what} must be at least 1, got {number}")
    return found.build(size)
