"""How much an outside annealing improves raypipe's plans: it changes cuts, devices and replication, and the simulator judges each change.

    python benchmarks/planning_anneal.py [--devices 16] [--seeds 1 2 3] [--seconds 60]

It knows nothing of raypipe's search but its simulator. From raypipe's plan, and from a random one with the same order of Ops, it makes
one random change at a time for so many CPU seconds: a cut moves, two devices change places, a device moves to another worker or is idle,
a stage is divided or joined with the next. Problems are those of `planning_scale.py` with one device a node.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import replace

from planning_scale import profile, unlike
from rounds import print_table, write_json

from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve

TEMPERATURE = 0.03
"""Relative slowdown that is accepted at first, in the mean."""


def changed(layout: Layout, num_devices: int, num_layers: int, rng: random.Random) -> Layout | None:
    """The layout after one random change; `None` where it is impossible."""
    cuts, workers = list(layout.cuts), [list(group) for group in layout.workers]
    several = layout.num_stages // len(workers)
    places = [(worker, at) for worker, group in enumerate(workers) for at in range(len(group))]
    idle = [device for device in range(num_devices) if all(device not in group for group in workers)]
    match rng.choice(("cut", "cut", "swap", "swap", "move", "idle", "turn", "divide", "join")):
        case "cut" if len(cuts) > 2:
            at = rng.randrange(1, len(cuts) - 1)
            cuts[at] = rng.randrange(cuts[at - 1] + 1, cuts[at + 1]) if cuts[at + 1] - cuts[at - 1] > 1 else cuts[at]
        case "swap":
            (one, at), (other, other_at) = rng.choice(places), rng.choice(places)
            workers[one][at], workers[other][other_at] = workers[other][other_at], workers[one][at]
        case "move":
            worker, at = rng.choice(places)
            device = workers[worker].pop(at) if (len(workers[worker]) > 1 and rng.random() < 0.5) or not idle else rng.choice(idle)
            target = rng.choice(workers)
            target.insert(rng.randrange(len(target) + 1), device)
        case "idle":
            worker, at = rng.choice(places)
            if idle and rng.random() < 0.5:
                workers[worker][at] = rng.choice(idle)
            else:
                workers[worker].pop(at)
        case "turn":
            one, other = sorted((rng.randrange(len(workers)), rng.randrange(len(workers))))
            workers[one : other + 1] = workers[one : other + 1][::-1]
        case "divide" if several == 1:
            at = rng.randrange(len(workers))
            if cuts[at + 1] - cuts[at] < 2:
                return None
            group, size = workers[at], len(workers[at])
            devices = [group[: size // 2], group[size // 2 :]] if size > 1 else [group, [rng.choice(idle)] if idle else []]
            cuts.insert(at + 1, rng.randrange(cuts[at] + 1, cuts[at + 1]))
            workers[at : at + 1] = rng.sample(devices, 2)
        case "join" if several == 1 and len(workers) > 1:
            at = rng.randrange(len(workers) - 1)
            workers[at : at + 2] = [workers[at] + workers[at + 1]]
            del cuts[at + 1]
    if not all(workers) or len({device for group in workers for device in group}) != sum(map(len, workers)) or cuts[-1] != num_layers:
        return None
    found = replace(layout, cuts=tuple(cuts), workers=tuple(map(tuple, workers)), recomputed=None, ahead=())
    return None if found == layout else found


def annealed(problem: Problem, start: Layout, seconds: float, rng: random.Random) -> tuple[float, int]:
    """The seconds of an update of the best layout that is found, and how many were simulated."""
    evaluator = LayoutEvaluator(problem)

    def update_s(layout: Layout) -> float:
        found = evaluator.simulate(layout)
        return math.inf if found is None or found.missing_bytes else found.update_s

    current, current_s = start, update_s(start)
    best, best_s, count = current, current_s, 0
    began_s = time.process_time()
    while (gone := (time.process_time() - began_s) / seconds) < 1:
        layout = changed(current, problem.num_devices, problem.num_layers, rng)
        if layout is None:
            continue
        count += 1
        found_s = update_s(layout)
        if (
            found_s < math.inf and found_s <= current_s * (1 + TEMPERATURE * (1 - gone) ** 2 * rng.expovariate(1.0))
        ) or current_s == math.inf:
            current, current_s = layout, found_s
            if current_s < best_s:
                best, best_s = current, current_s
        elif count % 200 == 0:
            current, current_s = best, best_s
    return best_s, count


def scattered(problem: Problem, order: str, rng: random.Random) -> Layout:
    """A random layout of single devices."""
    num_stages = rng.randrange(2, min(problem.num_devices, problem.num_layers) + 1)
    cuts = (0, *sorted(rng.sample(range(1, problem.num_layers), num_stages - 1)), problem.num_layers)
    return Layout(cuts, tuple((device,) for device in rng.sample(range(problem.num_devices), num_stages)), order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU seconds of each annealing")
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    rows, results = [], []
    for seed in options.seeds:
        layers, rng = profile(options.layers, seed), random.Random(seed)
        problem = Problem(layers, unlike(options.devices, 1, seed), options.microbatches, layers.microbatch_size)
        began_s = time.process_time()
        own = solve(LayoutEvaluator(problem))
        planned_s = time.process_time() - began_s
        from_own_s, count = annealed(problem, own.layout, options.seconds, rng)
        single = own.layout.order if own.layout.num_stages == len(own.layout.workers) else "zb-h1"
        from_random_s, _ = annealed(problem, scattered(problem, single, rng), options.seconds, rng)
        least_s = min(own.update_s, from_own_s)
        values = {
            "own_s": own.update_s,
            "from_own_s": least_s,
            "from_random_s": from_random_s,
            "simulations": count,
            "planned_s": planned_s,
        }
        results.append({"seed": seed, "order": own.layout.order, **values})
        rows.append(
            {"seed": str(seed), "raypipe's plan": own.layout.order, "update s": f"{own.update_s:.3f}", "CPU s": f"{planned_s:.0f}"}
            | {"gain from it": f"{1 - least_s / own.update_s:.2%}", "from a random plan": f"{1 - from_random_s / own.update_s:.2%}"}
            | {"simulations": str(count)}
        )
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print_table(f"Gains of annealing for {options.seconds:.0f} s, {options.devices} devices", rows)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
