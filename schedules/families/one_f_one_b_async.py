"""1F1B that never drains: PipeDream, PipeDream-2BW, and the same order with one live copy of the weights.

The order of `one_f_one_b` over all microbatches of the window, with U right behind the last backward of each update. Two
devices, two microbatches an update, two updates:

    worker 0   0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 .   0B3 0U1
    worker 1   .   1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1

Bubbles stand only at the ends of the window; at most D-s activations are held. The weights differ:

* `pipedream` (Narayanan et al., SOSP 2019, arXiv 1806.03377, section 3.3) updates after every microbatch and keeps the version
  of each forward for its backward: D-s versions, mismatch 0, delay D-1-s.
* `pipedream-2bw` (Narayanan et al., ICML 2021, arXiv 2006.09503, section 3.1) accumulates M microbatches and keeps two
  versions; F and B of microbatch k read version max(floor(k / M) - 1, 0): delay 1. M < D-1 would need a third version.
* `async-1f1b` (PACI, arXiv 2606.07881) accumulates M microbatches and keeps one live version. Between F and B of a microbatch
  stage s runs D-1-s other backwards: mismatch and delay are at most ceil((D-1-s)/M), at most 1 exactly where M >= D-1.
"""

from __future__ import annotations

from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedules.builders import in_turn, unflushed
from raypipe.schedules.families.gpipe import flushed_makespan_s
from raypipe.schedules.ir import Op, OpKind, Schedule, WeightRule
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.spec import ScheduleSpec


def pipedream(request: ScheduleRequest) -> Schedule:
    """Return an update after each microbatch, with stashed weights."""
    if request.num_microbatches != 1:
        raise ScheduleError(
            f"pipedream updates after every microbatch, got {request.num_microbatches} an update; "
            "use --microbatches 1, or the schedule 'pipedream-2bw'"
        )
    return _build("pipedream", request, WeightRule.STASH)


def pipedream_2bw(request: ScheduleRequest) -> Schedule:
    """Return updates with two versions of the weights."""
    if request.num_microbatches < request.num_devices - 1:
        raise ScheduleError(
            f"pipedream-2bw keeps two versions of the weights, which takes at least {request.num_devices - 1} microbatches an update "
            f"on {request.num_devices} devices, got {request.num_microbatches}; use --microbatches {request.num_devices - 1}"
        )
    return _build("pipedream-2bw", request, WeightRule.DOUBLE_BUFFER)


def async_one_f_one_b(request: ScheduleRequest) -> Schedule:
    """Return updates of one version, which every Op reads as it is."""
    return _build("async-1f1b", request, WeightRule.LIVE)


def _build(name: str, request: ScheduleRequest, weight_rule: WeightRule) -> Schedule:
    request.require_one_chunk(name, instead="async-interleaved")
    request.require_one_pipeline(name)
    count = request.num_microbatches * request.num_updates
    programs = [
        in_turn(
            [Op(OpKind.FORWARD, stage, microbatch) for microbatch in range(count)],
            [Op(OpKind.BACKWARD, stage, microbatch) for microbatch in range(count)],
            warm_up=request.num_devices - 1 - stage,
        )
        for stage in range(request.num_devices)
    ]
    return unflushed(name, request, workers=range(request.num_devices), programs=programs, weight_rule=weight_rule)


SPEC_ASYNC = ScheduleSpec(
    name="async-1f1b",
    build=async_one_f_one_b,
    title="1F1B without a flush, one live copy of the weights",
    paper="PACI, arXiv 2606.07881",
    bubble="0 but at the ends",
    memory="D-s",
    mismatch="ceil((D-1-s)/M)",
    delay="ceil((D-1-s)/M)",
    makespan_s=flushed_makespan_s,
    peak_in_flight=lambda request, worker: min(request.num_devices - worker, request.num_microbatches * request.num_updates),
    weight_rule=WeightRule.LIVE,
)

SPEC_2BW = replace(
    SPEC_ASYNC,
    name="pipedream-2bw",
    build=pipedream_2bw,
    title="1F1B without a flush, two versions of the weights",
    paper="Narayanan et al., ICML 2021, arXiv 2006.09503",
    mismatch="0",
    delay="1",
    weight_rule=WeightRule.DOUBLE_BUFFER,
)

SPEC_PIPEDREAM = replace(
    SPEC_ASYNC,
    name="pipedream",
    build=pipedream,
    title="1F1B that updates after every microbatch",
    paper="Narayanan et al., SOSP 2019, arXiv 1806.03377",
    memory="D-s, as many versions",
    mismatch="0",
    delay="D-1-s",
    weight_rule=WeightRule.STASH,
)
