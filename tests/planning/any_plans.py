"""Plans of all kinds at random, also such as no planner proposes: what must hold for every plan is tried on these."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Problem
from raypipe.schedules.builders import synchronous_pipelines
from raypipe.schedules.ir import Op, OpKind, Schedule, StageGraph
from raypipe.schedules.passes import shard_optimizer
from raypipe.schedules.request import ScheduleRequest, StageTimes
from raypipe.schedules.search.dispatch import Key, TimedPipelines, dispatch
from raypipe.schedules.validate import validate

Pipelines = tuple[tuple[int, ...], ...]


def random_workers(rng: random.Random, num_devices: int, most: int) -> tuple[Devices, ...]:
    """Workers of at most so many of the devices each, in any order; some devices may be idle."""
    devices = rng.sample(range(num_devices), rng.randint(1, num_devices))
    workers: list[Devices] = []
    while devices:
        size = rng.choice((1, 1, 2, 3, len(devices)))
        workers.append(tuple(devices[: min(size, most)]))
        devices = devices[min(size, most) :]
    return tuple(workers)


def random_pipelines(rng: random.Random, num_workers: int, num_stages: int, num_microbatches: int) -> Pipelines:
    """Ways through the workers: in some order, several times around, back and forth, or any."""
    counts = [count for count in range(1, num_microbatches + 1) if num_microbatches % count == 0]
    found: list[tuple[int, ...]] = []
    for _ in range(rng.choice((1, 1, rng.choice(counts)))):
        order = rng.sample(range(num_workers), num_workers)
        forth = [order[stage * num_workers // num_stages] for stage in range(num_stages)]
        around = [order[stage % num_workers] for stage in range(num_stages)]
        back = [([*order, *reversed(order)])[stage % (2 * num_workers)] for stage in range(num_stages)]
        anywhere = [rng.randrange(num_workers) for _ in range(num_stages)]
        chosen = rng.choice((forth, around, back, anywhere))
        if found and rng.random() < 0.5:
            # As another one, but for a stage or two.
            chosen = [was if rng.random() < 0.7 else now for was, now in zip(found[-1], chosen, strict=True)]
        found.append(tuple(chosen))
    return tuple(found)


def random_key(rng: random.Random) -> Key:
    """What a free worker does first: what came first, backwards, forwards, later or earlier stages of all microbatches, or anything."""
    keys: tuple[Callable[[float, Op], tuple[float, ...]], ...] = (
        lambda now_s, op: (now_s,),
        lambda now_s, op: (op.kind is OpKind.FORWARD, op.kind is OpKind.WEIGHT_GRADIENT, op.index),
        lambda now_s, op: (op.kind is not OpKind.FORWARD, op.index),
        lambda now_s, op: (op.kind is OpKind.FORWARD, -op.stage, op.index),
        lambda now_s, op: (op.kind is OpKind.WEIGHT_GRADIENT, op.pipeline, op.index),
        lambda now_s, op: (rng.random(),),
    )
    return rng.choice(keys)


def random_cuts(rng: random.Random, num_layers: int) -> tuple[int, ...]:
    """Borders of any number of stages."""
    num_stages = rng.randint(1, num_layers)
    return (0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers)


def ordered(problem: Problem, cuts: Sequence[int], workers: Sequence[Devices], pipelines: Pipelines, *, splits: bool, key: Key) -> Schedule:
    """The order in which free workers take what a key ranks first, by the times of the first kind of device alone."""
    prefix_s = problem.prefix_s[0]
    times = tuple(StageTimes(*(prefix_s[:, end] - prefix_s[:, first]).tolist()) for first, end in itertools.pairwise(cuts))
    used = {worker: number for number, worker in enumerate(sorted({worker for pipeline in pipelines for worker in pipeline}))}
    assert len(used) == len(workers)
    line = TimedPipelines(StageGraph.chain(len(times)), pipelines, times, splits=splits)
    done = dispatch(line, turns=problem.num_microbatches // len(pipelines), key=key)
    request = ScheduleRequest(len(workers), problem.num_microbatches)
    programs = [[started.op for started in row] for row in done]
    return synchronous_pipelines("any", request, pipelines=pipelines, one_update=programs)


def any_plan(problem: Problem, rng: random.Random) -> tuple[Layout, Schedule]:
    """Any stages, workers, pipelines and order; backwards may be split, and copies may divide the optimizer's state."""
    workers = random_workers(rng, problem.num_devices, problem.microbatch_size)
    cuts = random_cuts(rng, problem.num_layers)
    pipelines = random_pipelines(rng, len(workers), len(cuts) - 1, problem.num_microbatches)
    # Workers without a stage are idle.
    used = sorted({worker for pipeline in pipelines for worker in pipeline})
    workers = tuple(workers[worker] for worker in used)
    pipelines = tuple(tuple(map(used.index, pipeline)) for pipeline in pipelines)
    schedule = ordered(problem, cuts, workers, pipelines, splits=rng.random() < 0.5, key=random_key(rng))
    if rng.random() < 0.3:
        copied = [worker for worker, group in enumerate(workers) if len(group) > 1]
        schedule = shard_optimizer(schedule, replicated_workers=copied)
    validate(schedule)
    return Layout(cuts, workers), schedule
