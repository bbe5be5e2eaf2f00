"""What holds for every bundled schedule whose copies of stages divide the optimizer's state, on workers of one device or several."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import pytest

from raypipe.schedules import catalogue
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import Placement, lower
from raypipe.schedules.passes import late_updates, shard_optimizer
from raypipe.schedules.validate import validate
from tests import strategies
from tests.schedules import reference

SPECS = pytest.mark.parametrize("name", strategies.SPEC_NAMES)
SCOPES = pytest.mark.parametrize("scope", UpdateScope)


def placement(num_workers: int, replicated: Collection[int]) -> Placement:
    """Two devices for each replicated worker, one for each other."""
    devices = itertools.count()
    return Placement(
        tuple(
            ((next(devices), 0.5), (next(devices), 0.5)) if worker in replicated else ((next(devices), 1.0),)
            for worker in range(num_workers)
        )
    )


def check_runs(schedule: Schedule, replicated: Collection[int]) -> None:
    """Run a valid schedule on such workers to the end, where all devices start collectives in one order."""
    validate(schedule)
    programs = lower(schedule, placement(schedule.num_workers, replicated))
    reference.check_one_order(reference.run(schedule, programs).starts)


@SPECS
@SCOPES
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_every_schedule_runs_on_workers_of_one_device_or_several(name: str, scope: UpdateScope, num_microbatches: int) -> None:
    near = replace(strategies.near(name, 4, num_microbatches, 3), update_scope=scope)
    for num_chunks in {near.num_chunks, *strategies.CHUNKS.get(name, ())}:
        plain = catalogue.build(name, replace(near, num_chunks=num_chunks))
        everyone = range(plain.num_workers)
        for replicated in ((), (0,), (plain.num_workers - 1,), everyone[::2], everyone):
            check_runs(shard_optimizer(plain, replicated_workers=replicated), replicated)


@pytest.mark.parametrize("name", [*strategies.BIDIRECTIONAL, "amdp-flush"])
@SCOPES
def test_late_updates_of_several_pipelines_are_gathered_again(name: str, scope: UpdateScope) -> None:
    """Whatever the Ops: backwards that are split, and parts of microbatches."""
    for num_devices, num_microbatches in ((2, 1), (2, 4), (4, 1), (6, 4)):
        late = late_updates(catalogue.build(name, replace(strategies.near(name, num_devices, num_microbatches, 3), update_scope=scope)))
        check_runs(shard_optimizer(late), ())


@SCOPES
@pytest.mark.parametrize("name", ["interleaved", "async-interleaved", "chimera-halving"])
def test_one_worker_of_several_devices_and_stages_has_each_norm_before_its_update(name: str, scope: UpdateScope) -> None:
    """Of several stages on a worker the last one has its gradients first, and its update."""
    size = replace(strategies.near(name, 6, 1, 3), num_chunks=max(strategies.CHUNKS.get(name, (1,))[:2]), update_scope=scope)
    check_runs(shard_optimizer(catalogue.build(name, size), replicated_workers=[4]), [4])
