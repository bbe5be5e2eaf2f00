"""`amdp-auto` where sums of gradients are slow, simulated: what late U gain, and how many pipelines are best.

    python benchmarks/slow_sums.py [--devices 4 8] [--shares 0 0.25 0.5 1] [--json FILE]

Devices of one node each, so equally fast and far from each other; every device computes M (F + B) in an update, with F = 20 ms, B = 40 ms
and M = 2 D. The sum of a device's gradients in two pipelines takes the stated share of that on its links. `even` has two layers for
each device; `uneven` has three for two, which no number of stages divides evenly, so that more pipelines are better balanced. Printed are
updates far from the ends of a window of 12 over M (F + B), with each U where its gradients arrive and as few slots later as are within
2 % of the fastest; largest and mean delay of the latter; and the number of pipelines that `raypipe plan --schedule amdp-auto` takes.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from rounds import print_table, write_json

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning import chunks
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.late import with_late_updates
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.plan import plan_problem
from raypipe.planning.problem import Problem
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.metrics import metrics

FORWARD_S = 0.02
BYTES_PER_S = 25e6
NUM_UPDATES = 12
LAYERS_PER_TWO = {"even": 4, "uneven": 3}
"""Layers for two devices."""


def problem_of(num_devices: int, layers: str, share: float) -> Problem:
    """Return devices whose sums take a share of their work where each has two stages."""
    num_microbatches = 2 * num_devices
    num_layers = LAYERS_PER_TWO[layers] * num_devices // 2
    forward_s = FORWARD_S * num_devices / num_layers
    work_s = num_microbatches * 3 * FORWARD_S
    # With two pipelines a device has two stages, each with one copy elsewhere: a ring of two sends all bytes once.
    parameter_bytes = round(share * work_s * BYTES_PER_S / 2 * num_devices / num_layers)
    profile = ModelProfile.uniform(
        num_layers, forward_s=forward_s, backward_s=2 * forward_s, output_bytes=1000, parameter_bytes=parameter_bytes
    )
    topology = ClusterTopology.uniform(num_devices, latency_s=1e-4, bandwidth_bytes_per_s=BYTES_PER_S, devices_per_node=1)
    return Problem(profile, topology, num_microbatches, 1, updates_per_window=NUM_UPDATES, max_staleness=1, update_scope=UpdateScope.STAGE)


def pipelines(evaluator: LayoutEvaluator) -> dict[int, tuple[Evaluation, Evaluation]]:
    """Return for each number of pipelines the order with early and with late updates."""
    found: dict[int, tuple[Evaluation, Evaluation]] = {}
    workers = tuple((device,) for device in range(evaluator.problem.num_devices))
    for layout in chunks.layouts(evaluator, workers, "amdp-auto"):
        early = evaluator.simulate(layout)
        late = with_late_updates(evaluator, early)
        if early is not None and late is not None:
            found[len(layout_schedule(evaluator.problem, layout, num_updates=1).pipelines)] = early, late
    return found


def simulated(num_devices: int, layers: str, share: float) -> list[dict[str, Any]]:
    """Return the figures of each number of pipelines."""
    problem = problem_of(num_devices, layers, share)
    work_s = problem.num_microbatches * 3 * FORWARD_S
    planned = len(plan_problem(problem, schedule="amdp-auto").schedule.pipelines)
    rows = []
    for number, (early, late) in sorted(pipelines(LayoutEvaluator(problem)).items()):
        known = metrics(layout_schedule(problem, late.layout, num_updates=NUM_UPDATES))
        rows.append({
            "devices": num_devices,
            "layers": layers,
            "share": share,
            "num_pipelines": number,
            "early": early.timing.steady_update_s / work_s,
            "late": late.timing.steady_update_s / work_s,
            "slots": late.layout.late or 0,
            "max_delay": known.max_delay,
            "mean_delay": known.mean_delay,
            "planned": number == planned,
        })
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.25, 0.5, 1.0], help="of a device's work that its sums take")
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    results = [row for case in product(options.devices, LAYERS_PER_TWO, options.shares) for row in simulated(*case)]
    rows = [
        {
            "D": str(each["devices"]),
            "layers": each["layers"],
            "sums": f"{each['share']:g}",
            "N": str(each["num_pipelines"]),
            "early U": f"{each['early']:.3f}",
            "late U": f"{each['late']:.3f}",
            "slots": str(each["slots"]),
            "delay": f"{each['max_delay']}, {each['mean_delay']:.2f} on average",
            "planned": "planned" if each["planned"] else "",
        }
        for each in results
    ]
    print_table("seconds of an update over M (F + B), simulated", rows)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
