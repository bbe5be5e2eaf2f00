"""Interleaved 1F1B that never drains: V stages a device, one live copy of the weights, an update every M microbatches.

The order of `interleaved` over all microbatches of the window; U stands right behind the stage's last backward of the update,
or where all stages have ended if updates wait for all. Unpublished; it balances coarse stages as pipelines in several
directions do, with one copy of the weights. Two devices, two chunks, two microbatches an update (stages 0 and 2 on worker 0):

    worker 0   0F0 0F1 2F0 2F1 .   2B0 0F2 2B1 2U0 0F3 0B0 2F2 0B1 0U0 2F3 2B2 ...
    worker 1   .   1F0 1F1 3F0 3B0 3F1 3B1 3U0 1F2 1B0 1F3 1B1 1U0 3F2 3B2 ...

Bubbles stand only at the ends of the window; as many activations are held as in `interleaved`. A microbatch is in flight while
about 2D others run, twice as long as in `async-1f1b`; mismatch and delay are at most 1 where M >= 2D, for up to four stages a device.
"""

from __future__ import annotations

from dataclasses import replace

from raypipe.schedules.builders import unflushed
from raypipe.schedules.families import interleaved
from raypipe.schedules.ir import Schedule, UpdateScope, WeightRule
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.search.dispatch import TimedPipelines, defer_updates


def async_interleaved(request: ScheduleRequest) -> Schedule:
    """Return the order of `interleaved` over the whole window, with an update every M microbatches."""
    request.require_one_pipeline("async-interleaved")
    programs = interleaved.one_update(_one_long_update(request))
    workers = interleaved.round_robin(request)
    at_once = unflushed("async-interleaved", request, workers=workers, programs=programs, weight_rule=WeightRule.LIVE)
    if at_once.update_scope is UpdateScope.STAGE:
        return at_once
    # Right behind its stage's last gradient an update would wait for the other stages of the same worker.
    return defer_updates(at_once, TimedPipelines.of(at_once.pipelines, request))


def _one_long_update(request: ScheduleRequest) -> ScheduleRequest:
    return replace(request, num_microbatches=request.num_microbatches * request.num_updates, num_updates=1)


SPEC = replace(
    interleaved.SPEC,
    name="async-interleaved",
    build=async_interleaved,
    title="interleaved without a flush, one live copy of the weights",
    paper="unpublished",
    bubble="0 but at the ends",
    mismatch="1 if M >= 2D, V <= 4",
    delay="1 if M >= 2D, V <= 4",
    peak_in_flight=lambda request, worker: interleaved.SPEC.peak_in_flight(_one_long_update(request), worker),
    weight_rule=WeightRule.LIVE,
)
