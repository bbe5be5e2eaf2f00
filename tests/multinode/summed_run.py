"""A run of two stages with two replicas each, on four nodes, that tells after every window what it knows of the links.

    node 0: stage 0   node 1: stage 1   node 2: stage 0   node 3: stage 1

Sums of 2BW overlap with all that is computed; updates are late, so that nobody waits for them. One JSON document a line, and a file with
the trace of each window; the run goes on until the file that it is given exists. With a topology, it begins with what that says of the
links.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import torch

from raypipe.actors.execution.batches import BatchSource, FixedBatch
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.orders import BuildOrder
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import cluster_nodes
from raypipe.cluster.session import session
from raypipe.config import ClusterConfig, OptimizerConfig, ScalingConfig
from raypipe.models.rehearsing import NUMBER_BYTES, LayerWaits, WaitingOptimizer, layers_per_stage, rehearsing
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import Placement
from raypipe.schedules.passes import late_updates
from raypipe.schedules.request import ScheduleRequest
from tests.multinode.watched_run import tell

NUM_DEVICES = 4
NUM_MICROBATCHES = 4
UPDATES_PER_WINDOW = 4
WAITS = LayerWaits(forward_s=0.04, input_grad_s=0.04, weight_grad_s=0.04, num_parameters=3_000_000 // NUMBER_BYTES)
"""A device computes for 60 ms a microbatch, and so for 240 ms an update. A ring of two sends as many bytes as the gradients have."""
WIDTH = 50_000
"""Messages of 200 kB: each device has one of two rows of a microbatch."""


def same_rows(_split: str) -> BatchSource:
    """Returns the rows of every microbatch."""
    return FixedBatch({"inputs": torch.zeros(2, 1)})


def main(stop: Path, topology: Path | None) -> None:
    """Runs windows until a file exists."""
    cluster = ClusterConfig(dashboard=False, log_to_driver=False)
    scaling = ScalingConfig(num_devices=NUM_DEVICES)
    model = partial(rehearsing, stages=[[WAITS], [WAITS]], widths={(0, 1): WIDTH}, num_rows=2)
    cut = Cut.of_sizes(layers_per_stage([1, 1], [(0, 1)]), model().edges())
    two_buffers = build("pipedream-2bw", ScheduleRequest(2, NUM_MICROBATCHES, UPDATES_PER_WINDOW, update_scope=UpdateScope.STAGE))
    schedule = late_updates(two_buffers)
    placement = Placement((((0, 0.5), (2, 0.5)), ((1, 0.5), (3, 0.5))))
    with session(cluster, num_devices=NUM_DEVICES, cpus_per_device=1.0):
        nodes = sorted(cluster_nodes(), key=lambda node: node.label)
        slots = [slot for node in nodes[:NUM_DEVICES] for slot in node.slots(1, name=node.address)]
        stages = [(0,), (1,), (0,), (1,)]
        with Coordinator(run=f"summed-{time.time_ns():x}", slots=slots, stages=stages, scaling=scaling, cluster=cluster) as coordinator:
            coordinator.actors.wait_until_up()
            if topology is not None:
                coordinator.links.seed(ClusterTopology.load(topology), [f"node{number}/0" for number in range(NUM_DEVICES)])
            coordinator.build(
                BuildOrder(
                    model=model,
                    batches=same_rows,
                    cut=cut,
                    weight_rule=schedule.weight_rule,
                    optimizer=OptimizerConfig(max_grad_norm=None),
                    num_rows=2,
                    num_updates=1,
                    seed=0,
                    make_optimizer=partial(WaitingOptimizer, {0: 0.0, 1: 0.0}),
                )
            )
            coordinator.connect({"train": executable_programs(schedule, placement)}, cut)
            number = 0
            while not stop.exists():
                result = coordinator.run_window("train", num_updates=UPDATES_PER_WINDOW, first_update=number * UPDATES_PER_WINDOW)
                number += 1
                result.trace.save(stop.with_name(f"trace-{number}.json"))
                tell(coordinator, window=number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
