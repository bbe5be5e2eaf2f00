"""What planning for many devices costs, in seconds and in quality.

    python benchmarks/planning_scale.py [--devices 1024] [--layers 100]

First the loss of using runs of devices as one: the least busy bottleneck with half and a quarter as many runs as devices, over the exact
one, on devices in the recursive order; nodes of four with 10 to 100 Gbit/s between them, and devices that are all linked unequally.
Then the seconds of a whole plan, on the wall and of one core, for nodes of eight devices.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import combinations

from rounds import print_table

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.planning.device_order import recursive
from raypipe.planning.estimator import Estimator
from raypipe.planning.partition import Partition
from raypipe.planning.plan import plan_problem
from raypipe.planning.problem import Problem

GB = 1_000_000_000
NUM_SEEDS = 5


def cluster(num_devices: int, per_node: int, seed: int) -> ClusterTopology:
    """Nodes whose pairs have unequal links, and devices of unequal speed."""
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(num_devices // per_node)]
    inside = NodeLink(bandwidth_bytes_per_s=50.0 * GB, latency_s=1e-5)
    nodes = tuple(
        Node(
            name=name,
            devices=tuple(Device(f"{name}/{at}", "gpu", speed=speed) for at in range(per_node)),
            link=inside if per_node > 1 else None,
        )
        for name in names
        for speed in [rng.choice((1.0, 1.0, 0.6))]
    )
    links = tuple(
        Link(source=one, target=other, bandwidth_bytes_per_s=10 ** rng.uniform(0.1, 1.1) * GB, latency_s=2e-5)
        for one, other in combinations(names, 2)
    )
    return ClusterTopology(name="unequal", nodes=nodes, links=links)


def losses() -> None:
    rows: list[dict[str, str]] = []
    for num_devices in (16, 24, 32):
        for per_node in (4, 1):
            found: dict[int, list[float]] = {2: [], 4: []}
            for seed in range(NUM_SEEDS):
                rng = random.Random(seed)
                profile = ModelProfile.uniform(
                    48, forward_s=0.01, backward_s=0.02, output_bytes=rng.choice((4, 16, 64)) * 1_000_000, parameter_bytes=50_000_000,
                    microbatch_size=32,
                )  # fmt: skip
                problem = Problem(profile, cluster(num_devices, per_node, seed), 64, 32)
                estimator, order = Estimator(problem), recursive(problem)
                exact_s = Partition(estimator, order).least_limit_s()
                for part, values in found.items():
                    values.append(Partition(estimator, order, most_units=num_devices // part).least_limit_s() / exact_s - 1)
            shown = [f"{statistics.mean(values):.1%} ({max(values):.1%})" for values in found.values()]
            rows.append({"devices": str(num_devices), "a node": str(per_node), "half as many": shown[0], "a quarter": shown[1]})
    print_table("Loss by using runs of devices as one: mean (worst)", rows)


def many(num_devices: int, num_layers: int) -> None:
    inside = NodeLink(bandwidth_bytes_per_s=400.0 * GB, latency_s=1e-5)
    nodes = tuple(
        Node(name=f"n{number}", devices=tuple(Device(f"n{number}/{at}", "gpu", 80 * GB) for at in range(8)), link=inside)
        for number in range(num_devices // 8)
    )
    topology = ClusterTopology(name="many", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=50.0 * GB, latency_s=2e-5))
    profile = ModelProfile.uniform(
        num_layers, forward_s=0.05, backward_s=0.1, output_bytes=400_000_000, saved_bytes=2 * GB, parameter_bytes=2 * GB,
        microbatch_size=1024,
    )  # fmt: skip
    began_s, began_core_s = time.perf_counter(), time.process_time()
    plan = plan_problem(Problem(profile, topology, 64, 1024))
    assert plan.predicted is not None
    print(
        f"{num_layers} layers on {num_devices} devices: {len(plan.stages)} stages, {plan.schedule.name}, "
        f"update {plan.predicted.update_s:.3f} s, bound {plan.predicted.lower_bound_s:.3f} s; "
        f"planned in {time.perf_counter() - began_s:.0f} s, {time.process_time() - began_core_s:.0f} s of one core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=100)
    arguments = parser.parse_args()
    losses()
    many(arguments.devices, arguments.layers)


if __name__ == "__main__":
    main()
