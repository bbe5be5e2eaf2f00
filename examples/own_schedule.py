"""A schedule of one's own: 1F1B that begins with more forwards, so that messages need not be fast.

After eager 1F1B (Zhuang et al., MLSys 2023, arXiv 2211.05322). Worker s runs 2(D-1-s) forwards before it alternates, where
1F1B runs D-1-s: every activation and gradient has the time of an Op for its way, for nearly twice the activations held.

    raypipe schedule examples/own_schedule.py:eager --devices 4 --microbatches 8 --latency 0.5
"""

from raypipe.schedules.builders import synchronous
from raypipe.schedules.ir import Op, OpKind, Schedule
from raypipe.schedules.request import ScheduleRequest


def eager(size: ScheduleRequest) -> Schedule:
    """1F1B with twice the forwards before it alternates."""
    programs = []
    for stage in range(size.num_devices):
        forwards = [Op(OpKind.FORWARD, stage, microbatch) for microbatch in range(size.num_microbatches)]
        backwards = [Op(OpKind.BACKWARD, stage, microbatch) for microbatch in range(size.num_microbatches)]
        warm_up = min(2 * (size.num_devices - 1 - stage), size.num_microbatches)
        num_pairs = size.num_microbatches - warm_up
        pairs = [op for pair in zip(forwards[warm_up:], backwards[:num_pairs], strict=True) for op in pair]
        programs.append([*forwards[:warm_up], *pairs, *backwards[num_pairs:]])
    # The same for every update, each with its U behind it.
    return synchronous("eager", size, workers=range(size.num_devices), one_update=programs)
