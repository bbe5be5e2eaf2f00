"""Pipelines of one process whose devices are connected over TCP."""

from __future__ import annotations

from typing import Any

from raypipe.actors.local import LocalPipeline
from raypipe.schedules.collectives import Start
from tests.lookups import Outcome, outcome
from tests.processes.process_ends import Make, all_channels
from tests.processes.transport_contract import together


def over_tcp(run: LocalPipeline, make: Make, prefix: str, **changed: Any) -> Outcome:
    num_devices = len(run.executors)
    settings: dict[str, Any] = {
        "names": tuple(f"device-{device}" for device in range(num_devices)),
        "groups": sorted({item.collective.devices for program in run.programs for item in program.items if isinstance(item, Start)}),
        "channels": all_channels(num_devices),
        "prefix": prefix,
        "connect_timeout_s": 20.0,
    } | changed
    ends = [make(device, num_devices, **settings) for device in range(num_devices)]
    together(*(end.connect for end in ends))
    for executor, end in zip(run.executors, ends, strict=True):
        executor.transport = end
    found = outcome(run)
    for end in ends:
        end.close()
    return found
