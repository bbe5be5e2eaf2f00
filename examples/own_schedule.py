"""A user's own schedule: 1F1B that begins with more forwards, so that messages need not be fast.

After eager 1F1B (Zhuang et al., MLSys 2023, arXiv 2211.05322). Of D workers, worker s runs 2(D-1-s) forwards before it alternates;
1F1B runs D-1-s. Every message then has the time of an Op to travel, and workers hold nearly twice as many activations.

    raypipe schedule examples/own_schedule.py:eager --devices 4 --microbatches 8 --latency 0.5
"""

from raypipe.schedules.builders import synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule
from raypipe.schedules.request import ScheduleRequest


def eager(request: ScheduleRequest) -> Schedule:
    """Return 1F1B with twice the forwards before it alternates."""
    programs = []
    for stage in range(request.num_devices):
        forwards = [Op(OpKind.FORWARD, stage, microbatch) for microbatch in range(request.num_microbatches)]
        backwards = [Op(OpKind.BACKWARD, stage, microbatch) for microbatch in range(request.num_microbatches)]
        warm_up = min(2 * (request.num_devices - 1 - stage), request.num_microbatches)
        num_pairs = request.num_microbatches - warm_up
        pairs = [op for pair in zip(forwards[warm_up:], backwards[:num_pairs], strict=True) for op in pair]
        programs.append([*forwards[:warm_up], *pairs, *backwards[num_pairs:]])
    # Repeats the programs for every update, each followed by its U.
    return synchronous("eager", request, workers=range(request.num_devices), one_update=programs)
