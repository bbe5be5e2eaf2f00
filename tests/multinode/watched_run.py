"""A run of two stages on two nodes that tells, after every window, what it knows of the links: one JSON document a line.

It goes on until the file that it is given exists, and ends with a line that has the clock offsets.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from raypipe.actors.execution.batches import BatchSource, FixedBatch
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.orders import BuildOrder
from raypipe.artifacts.cut import Cut
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import cluster_nodes
from raypipe.cluster.session import session
from raypipe.config import ClusterConfig, OptimizerConfig, ScalingConfig
from raypipe.models.waiting import waiting
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.request import ScheduleRequest

WIDTH = 1024
NUM_ROWS = 100
"""Messages of 400 kB."""
NUM_MICROBATCHES = 4
UPDATES_PER_WINDOW = 2
NUM_DEVICES = 2


@dataclass(frozen=True)
class Rows:
    """Opens the same rows for both splits."""

    def __call__(self, split: str) -> BatchSource:
        return FixedBatch({"inputs": torch.zeros(NUM_ROWS, WIDTH)})


def main(stop: Path) -> None:
    """Runs windows until a file exists."""
    cluster = ClusterConfig(dashboard=False, log_to_driver=False)
    scaling = ScalingConfig(num_devices=NUM_DEVICES)
    model = partial(waiting, num_layers=NUM_DEVICES, width=WIDTH, forward_s=0.005, input_grad_s=0.005, weight_grad_s=0.005)
    cut = Cut.of_sizes((2, 1), model().edges())
    schedule = build("1f1b", ScheduleRequest(NUM_DEVICES, NUM_MICROBATCHES, UPDATES_PER_WINDOW, update_scope=UpdateScope.STAGE))
    with session(cluster, num_devices=NUM_DEVICES, cpus_per_device=1.0):
        nodes = sorted(cluster_nodes(), key=lambda node: node.label)
        slots = [slot for node in nodes[:NUM_DEVICES] for slot in node.slots(1, name=node.address)]
        run = f"watched-{time.time_ns():x}"
        with Coordinator(run=run, slots=slots, stages=[(0,), (1,)], scaling=scaling, cluster=cluster) as coordinator:
            coordinator.actors.wait_until_up()
            coordinator.build(
                BuildOrder(
                    model=model,
                    batches=Rows(),
                    cut=cut,
                    weight_rule=schedule.weight_rule,
                    optimizer=OptimizerConfig(max_grad_norm=None),
                    num_rows=NUM_ROWS,
                    num_updates=1,
                    seed=0,
                )
            )
            coordinator.connect({"train": executable_programs(schedule)}, cut)
            number = 0
            while not stop.exists():
                coordinator.run_window("train", num_updates=UPDATES_PER_WINDOW, first_update=number * UPDATES_PER_WINDOW)
                number += 1
                tell(coordinator, updates=number * UPDATES_PER_WINDOW)
            coordinator.links.probe(slots[1].node.address, slots[0].node.address)
            tell(coordinator, updates=number * UPDATES_PER_WINDOW, clock_offsets_s=coordinator.clocks.offsets_s)


def tell(coordinator: Coordinator, **more: object) -> None:
    """Writes what is known of the links."""
    links = {
        f"{source} {target}": [link.bandwidth_bytes_per_s, link.num_transfers, link.num_changes]
        for (source, target), link in coordinator.links.estimate.links.items()
    }
    sys.stdout.write(json.dumps({"links": links, **more}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
