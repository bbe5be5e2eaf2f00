"""What planning for many devices costs, in seconds and in quality, against the other planners.

    python benchmarks/planning_scale.py [--devices N ...] [--per-node 1 8] [--json FILE]

Clusters of nodes that all differ in speed, memory and links, with one device a node and with eight. Every plan is simulated by the same
simulator. Beyond 32 devices the other planners are those that take little time. Seconds of planning are CPU seconds of the process.
With --grouping first the loss of using runs of devices as one: the least busy bottleneck with half and a quarter as many runs as devices,
over the exact one, on devices in the recursive order; nodes of four with 10 to 100 Gbit/s between them, and devices linked unequally.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from rounds import print_table

from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink
from raypipe.errors import PlanError
from raypipe.planning.device_order import recursive
from raypipe.planning.estimator import Estimator
from raypipe.planning.extrapolation import evaluator_of
from raypipe.planning.partition import MOST_UNITS, Partition
from raypipe.planning.plan import plan_problem
from raypipe.planning.planners import PLANNERS
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve

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
                exact_s = Partition(estimator, order, most_positions=49).least_limit_s()
                for part, values in found.items():
                    values.append(
                        Partition(estimator, order, most_units=num_devices // part, most_positions=49).least_limit_s() / exact_s - 1
                    )
            shown = [f"{statistics.mean(values):.1%} ({max(values):.1%})" for values in found.values()]
            rows.append({"devices": str(num_devices), "a node": str(per_node), "half as many": shown[0], "a quarter": shown[1]})
    print_table("Loss by using runs of devices as one: mean (worst)", rows)


def profile(num_layers: int, seed: int) -> ModelProfile:
    """Layers of unequal work, tensors and weights."""
    rng = random.Random(seed)
    layers = []
    for number in range(num_layers):
        forward_s = rng.uniform(0.005, 0.015)
        layers.append(
            LayerProfile(
                name=f"l{number}",
                forward_s=forward_s,
                backward_s=2 * forward_s,
                weight_grad_s=forward_s,
                output_bytes=rng.randrange(4_000_000, 40_000_000),
                saved_bytes=rng.randrange(50_000_000, 400_000_000),
                parameter_bytes=rng.randrange(50_000_000, 400_000_000),
            )
        )
    return ModelProfile(name="unequal", microbatch_size=32, layers=tuple(layers))


def unlike(num_devices: int, per_node: int, seed: int) -> ClusterTopology:
    """Nodes of unequal speed and memory, with a link of its own each way between any two: 0.3 to 25 GB/s."""
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(num_devices // per_node)]
    inside = NodeLink(bandwidth_bytes_per_s=100.0 * GB, latency_s=1e-5) if per_node > 1 else None
    nodes = []
    for name in names:
        memory_bytes, speed = rng.choice((16, 24, 40, 80)) * GB, rng.uniform(0.5, 1.0)
        devices = tuple(Device(f"{name}/{at}", "gpu", memory_bytes, speed) for at in range(per_node))
        nodes.append(Node(name=name, devices=devices, link=inside))
    links = tuple(
        Link(source=one, target=other, bandwidth_bytes_per_s=10 ** rng.uniform(-0.5, 1.4) * GB, latency_s=2e-5, one_way=True)
        for one, other in permutations(names, 2)
    )
    return ClusterTopology(name="unlike", nodes=tuple(nodes), links=links)


def compared(num_devices: int, per_node: int, num_layers: int, num_microbatches: int, seed: int) -> dict[str, Any]:
    """Update times of all planners for one cluster, CPU seconds of raypipe's planning, and the bound."""
    topology, layers = unlike(num_devices, per_node, seed), profile(num_layers, seed)
    update_s: dict[str, float | None] = {}
    began_s = time.process_time()
    plan = plan_problem(Problem(layers, topology, num_microbatches, layers.microbatch_size))
    seconds = time.process_time() - began_s
    assert plan.predicted is not None
    update_s["raypipe"] = plan.predicted.update_s
    problem = Problem(layers, topology, num_microbatches, layers.microbatch_size)
    for planner in PLANNERS:
        if planner.layouts is not None and (num_devices <= MOST_UNITS or planner.quick):
            try:
                update_s[planner.name] = solve(evaluator_of(problem), name=planner.name).update_s
            except PlanError:
                update_s[planner.name] = None
    return {
        "devices": num_devices,
        "devices_per_node": per_node,
        "schedule": plan.schedule.name,
        "stages": len(plan.stages),
        "seconds_of_planning": seconds,
        "update_s": update_s,
        "lower_bound_s": plan.predicted.lower_bound_s,
    }


def shown(found: dict[str, Any]) -> dict[str, str]:
    own_s = found["update_s"]["raypipe"]
    others = {name: value for name, value in found["update_s"].items() if name != "raypipe" and value is not None}
    best = min(others, key=lambda name: others[name], default="-")
    return {
        "devices": str(found["devices"]),
        "a node": str(found["devices_per_node"]),
        "plan": f"{found['schedule']}, {found['stages']} stages",
        "update s": f"{own_s:.3f}",
        "best other": best,
        "its / raypipe": f"{others[best] / own_s:.3f}" if others else "-",
        "raypipe / bound": f"{own_s / found['lower_bound_s']:.2f}",
        "CPU s": f"{found['seconds_of_planning']:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 32, 64, 256, 1024])
    parser.add_argument("--per-node", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grouping", action="store_true", help="also show what is lost where runs of devices count as one")
    parser.add_argument("--json", help="file for a list of all values, one entry per layout")
    options = parser.parse_args()
    if options.grouping:
        losses()
    results = []
    for num_devices in options.devices:
        for per_node in options.per_node:
            results.append(compared(num_devices, per_node, options.layers, options.microbatches, options.seed))
            print(", ".join(f"{key} {value}" for key, value in shown(results[-1]).items()), flush=True)
            if options.json:  # After each row, since the next may take minutes.
                Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_table(f"{options.layers} unequal layers, {options.microbatches} microbatches, unlike links", list(map(shown, results)))


if __name__ == "__main__":
    main()
