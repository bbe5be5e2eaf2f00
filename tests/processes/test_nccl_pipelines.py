"""Whole pipelines over NCCL, with another library in its place: sums, rows, ties, norms and late updates give the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from raypipe.actors.local import LocalPipeline
from raypipe.model import Model
from raypipe.schedules.collectives import CollectiveKind, Start
from raypipe.schedules.ir import Schedule
from raypipe.schedules.passes import late_updates
from tests.lookups import Outcome, check_same_bits, outcome, pipeline, table_gpt, tied_gpt
from tests.processes.fake_nccl import FakeNccl, Network
from tests.processes.process_ends import Make, all_channels
from tests.processes.transport_contract import together


def as_it_is(schedule: Schedule) -> Schedule:
    return schedule


def four_slots_late(schedule: Schedule) -> Schedule:
    return late_updates(schedule, 4)


def starts_of(run: LocalPipeline) -> list[Start]:
    return [item for program in run.programs for item in program.items if isinstance(item, Start)]


def over_nccl(run: LocalPipeline, make: Make) -> Outcome:
    num_devices, network = len(run.executors), Network()
    settings: dict[str, Any] = {
        "names": tuple(f"device-{device}" for device in range(num_devices)),
        "groups": sorted({start.collective.devices for start in starts_of(run)}),
        "channels": all_channels(num_devices),
        "connect_timeout_s": 20.0,
    }
    ends = [make(device, num_devices, library=FakeNccl(network), **settings) for device in range(num_devices)]
    together(*(end.connect for end in ends))
    for executor, end in zip(run.executors, ends, strict=True):
        executor.transport = end
    return outcome(run)


@pytest.mark.parametrize("model", [table_gpt, tied_gpt])
@pytest.mark.parametrize(
    ("name", "num_pipelines", "change"),
    [
        ("1f1b", 1, as_it_is),
        ("pipedream-2bw", 1, as_it_is),
        ("pipedream-2bw", 1, late_updates),
        ("async-1f1b", 1, four_slots_late),
        ("chimera", 2, as_it_is),
        ("amdp", 2, four_slots_late),
    ],
    ids=["1f1b", "2bw", "2bw-late", "async-1f1b-late", "chimera", "amdp-late"],
)
def test_a_pipeline_over_nccl_gives_the_bits_of_one_process(
    make: Make, model: Callable[[], Model], name: str, num_pipelines: int, change: Callable[[Schedule], Schedule]
) -> None:
    run = partial(pipeline, model(), name, num_pipelines=num_pipelines, copies=2, change=change)
    there = run()
    starts = starts_of(there)
    kinds = {start.collective.kind for start in starts}
    assert CollectiveKind.GRADIENTS in kinds
    # Where each device has both ends of a tie, the sums of these stages' gradients are enough.
    assert (CollectiveKind.TIED in kinds) == (model is tied_gpt and num_pipelines == 1)
    # A norm starts behind the sums of which it is made, not where it is awaited.
    assert all(start.after for start in starts if start.collective.kind.is_norm)
    check_same_bits(over_nccl(there, make), outcome(run()))
