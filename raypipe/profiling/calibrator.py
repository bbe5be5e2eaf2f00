"""Measures the overheads of Ops and messages on a machine: three stage actors wait in 1F1B, with small and with large messages."""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from raypipe.actors.execution.batches import BatchSource, FixedBatch
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.orders import BuildOrder
from raypipe.artifacts.calibration import Calibration, TransportCosts
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.topology import Path
from raypipe.artifacts.versions import versions
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import find_slots
from raypipe.cluster.session import session
from raypipe.config import ClusterConfig, OptimizerConfig, ScalingConfig, Transport
from raypipe.models.waiting import waiting
from raypipe.profiling.overhead_fit import Observations
from raypipe.profiling.profiler import stage_costs
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import Op, OpKind, Schedule, Slot, UpdateScope
from raypipe.schedules.request import ScheduleRequest
from raypipe.simulation.cost import Cost

NUM_DEVICES = 3
_NUM_MICROBATCHES = 7
_NUM_UPDATES = 4
_NUM_WINDOWS = 4
_WAIT_S = 0.003
_WIDTH = 256
TRANSPORTS = (Transport.SHM, Transport.GLOO)
_NUM_ROWS = (16, 1024)
"""Messages of 16 KiB and 1 MiB."""


def _rows(num_rows: int, split: str) -> BatchSource:
    return FixedBatch({"inputs": torch.zeros(num_rows, _WIDTH)})


def calibrate(cluster: ClusterConfig, *, transports: tuple[Transport, ...]) -> Calibration:
    """Calibrate the first node of a cluster, in about twenty seconds for each transport.

    Raises:
        PlanError: The cluster has no room for three devices.
        RunError: A run failed.
    """
    costs: dict[str, TransportCosts] = {}
    with session(cluster, num_devices=NUM_DEVICES, cpus_per_device=1.0):
        # The first pass does not count: Ray is busy for a while after its start.
        for _ in range(2):
            for transport in transports:
                observations = Observations()
                for num_rows in _NUM_ROWS:
                    _observe(observations, cluster, transport, num_rows)
                costs[str(transport)] = observations.costs()
    return Calibration(
        host=os.uname().nodename,
        date=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        transports=costs,
    )


def _observe(observations: Observations, cluster: ClusterConfig, transport: Transport, num_rows: int) -> None:
    model = partial(waiting, num_layers=NUM_DEVICES, width=_WIDTH, forward_s=_WAIT_S, input_grad_s=_WAIT_S, weight_grad_s=_WAIT_S)
    cut = Cut.of_sizes((2, *[1] * (NUM_DEVICES - 1)), model().edges())
    schedule, batches = _order(), partial(_rows, num_rows)
    optimizer = OptimizerConfig(max_grad_norm=None)
    scaling = ScalingConfig(num_devices=NUM_DEVICES, transport=transport)
    with Coordinator(
        run=f"calibrate-{transport}-{time.time_ns() // 1_000_000:x}",
        slots=find_slots(scaling),
        stages=[(stage,) for stage in range(NUM_DEVICES)],
        scaling=scaling,
        cluster=cluster,
    ) as coordinator:
        coordinator.actors.wait_until_up()
        (measured,) = coordinator.measure(model, batches, optimizer=optimizer, seed=0, num_devices=1)
        coordinator.build(
            BuildOrder(
                model=model,
                batches=batches,
                cut=cut,
                weight_rule=schedule.weight_rule,
                optimizer=optimizer,
                num_rows=num_rows,
                num_updates=1,
                seed=0,
            )
        )
        programs = executable_programs(schedule)
        coordinator.connect({"train": programs}, cut)
        cost = Cost(
            devices=coordinator.device_names,
            stages={(stage, stage): of_stage for stage, of_stage in enumerate(stage_costs(measured, cut))},
            edge_bytes={},
            path=lambda _source, _target: Path(),
        )
        for number in range(_NUM_WINDOWS):
            result = coordinator.run_window("train", num_updates=_NUM_UPDATES, first_update=number * _NUM_UPDATES)
            if number:
                observations.add(programs, result.trace, cost)


def _order() -> Schedule:
    schedule = build("1f1b", ScheduleRequest(NUM_DEVICES, _NUM_MICROBATCHES, _NUM_UPDATES, update_scope=UpdateScope.STAGE))
    return replace(schedule, name="calibration", programs=tuple(tuple(chain(*map(_split_odd, program))) for program in schedule.programs))


def _split_odd(slot: Slot) -> tuple[Slot, ...]:
    # Odd microbatches split their backward, so that all kinds of Ops occur.
    if isinstance(slot, Op) and slot.kind is OpKind.BACKWARD and slot.index % 2:
        return (slot._replace(kind=OpKind.INPUT_GRADIENT), slot._replace(kind=OpKind.WEIGHT_GRADIENT))
    return (slot,)
