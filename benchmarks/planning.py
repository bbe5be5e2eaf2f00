"""What planners make of models and networks: seconds of an update of each plan, simulated, over that of raypipe's.

    python benchmarks/planning.py [--models NAME ...] [--topologies NAME ...] [--microbatches 16] [--json FILE]
    python benchmarks/planning.py --bounds-of FILE      # the same plans against the present bounds
    python benchmarks/planning.py --others-of FILE      # raypipe's plans anew; the times of all other planners are those of FILE

Every plan is simulated on the true topology by the same simulator, with the model's own order where a planner brings one. *best* is
the fastest of the other planners' plans, *best / raypipe* above 1 says that raypipe's is faster; *raypipe / bound* is how far it may be
from the optimum of all plans, *raypipe / one run* from that of plans of one pipeline with one run of layers a worker. A dash: the planner
proposes nothing, or nothing that fits into memory. Where a microbatch has fewer rows than there are devices, data parallelism gets the
same rows in fewer, larger microbatches. Device memory is 16 GB for the measured models (V100, as they were) and 80 GB for the computed
ones (A100). Random topologies are seeded.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from models import models
from rounds import print_table, write_json

from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, node_ports
from raypipe.errors import PlanError
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.planners import PLANNERS
from raypipe.planning.problem import Problem
from raypipe.planning.schedule_bound import ScheduleBound
from raypipe.planning.solve import solve

OWN = "raypipe"
HARD = ("two islands", "star", "random 1", "random 2", "random 3")
"""Where raypipe must be ahead in the geometric mean."""
LATENCY_S = 20e-6
PAPER = 2.57
"""What SPP gains at most over other designs, by its abstract: 157 %."""
_MEASURED = ("vgg16", "resnet50", "gnmt", "inception_v3")


def node(name: str, count: int, memory_bytes: int, *, speed: float = 1.0, bandwidth: float | None = None) -> Node:
    devices = tuple(Device(f"{name}/{position}", "gpu", memory_bytes, speed) for position in range(count))
    link = NodeLink(bandwidth_bytes_per_s=bandwidth, latency_s=LATENCY_S) if bandwidth else None
    return Node(name=name, devices=devices, link=link)


def flat(memory_bytes: int) -> ClusterTopology:
    """Eight devices on one PCIe switch."""
    return ClusterTopology(name="flat", nodes=(node("a", 8, memory_bytes, bandwidth=10e9),))


def two_islands(memory_bytes: int) -> ClusterTopology:
    """Two nodes of four with NVLink, 10 Gbit/s between them."""
    nodes = tuple(node(name, 4, memory_bytes, bandwidth=50e9) for name in "ab")
    return ClusterTopology(name="two islands", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=1.25e9, latency_s=5e-5))


def star(memory_bytes: int) -> ClusterTopology:
    """Eight nodes at a switch, all with 10 Gbit/s but one with 1 Gbit/s; a node's transfers share its port."""
    names = [f"n{number}" for number in range(8)]
    return ClusterTopology(
        name="star",
        nodes=tuple(node(name, 1, memory_bytes) for name in names),
        default_link=NodeLink(latency_s=5e-5),
        shared_links=node_ports({name: 0.125e9 if name == "n3" else 1.25e9 for name in names}),
    )


def scattered(seed: int, memory_bytes: int) -> ClusterTopology:
    """Eight nodes, each pair with a link of its own between 1 and 100 Gbit/s."""
    rng = random.Random(seed)
    links = tuple(
        Link(source=f"n{one}", target=f"n{other}", bandwidth_bytes_per_s=10 ** rng.uniform(8.1, 10.1), latency_s=5e-5)
        for one, other in combinations(range(8), 2)
    )
    return ClusterTopology(name=f"random {seed}", nodes=tuple(node(f"n{number}", 1, memory_bytes) for number in range(8)), links=links)


def mixed(memory_bytes: int) -> ClusterTopology:
    """Two fast devices, four of half and two of a third of the speed, in three nodes with 25 Gbit/s between them."""
    nodes = [
        node(name, count, memory_bytes, speed=speed, bandwidth=10e9)
        for name, count, speed in (("new", 2, 1.0), ("old", 4, 0.5), ("oldest", 2, 0.33))
    ]
    return ClusterTopology(name="mixed", nodes=tuple(nodes), default_link=NodeLink(bandwidth_bytes_per_s=3.1e9, latency_s=5e-5))


TOPOLOGIES: dict[str, Callable[[int], ClusterTopology]] = {
    "flat": flat,
    "two islands": two_islands,
    "star": star,
    **{f"random {seed}": partial(scattered, seed) for seed in (1, 2, 3)},
    "mixed": mixed,
}


def regrouped(problem: Problem) -> Problem:
    """The rows of an update in microbatches of at least a row for each device."""
    times = min(-(-problem.num_devices // problem.microbatch_size), problem.num_microbatches)
    while problem.num_microbatches % times:
        times += 1
    return replace(problem, num_microbatches=problem.num_microbatches // times, microbatch_size=problem.microbatch_size * times)


def compare(problem: Problem) -> dict[str, Any]:
    """The update times of all planners."""
    times: dict[str, float | None] = {}
    schedule, took_s = "", 0.0
    for planner in PLANNERS:
        began_s = time.process_time()
        try:
            found = solve(
                LayoutEvaluator(regrouped(problem) if planner.name in {"data-parallel", "ddp-overlap"} else problem), name=planner.name
            )
            times[planner.name] = found.update_s
        except PlanError:
            times[planner.name] = None
            continue
        if planner.name == OWN:
            schedule, took_s = str(found.layout), time.process_time() - began_s
    others = {name: value for name, value in times.items() if name != OWN and value is not None}
    best = min(others, key=lambda name: others[name]) if others else ""
    return {"times": times, "plan": schedule, "planning_s": took_s, "best": best, **bounds(problem)}


def bounds(problem: Problem) -> dict[str, Any]:
    """What no plan beats, none with a bundled schedule, and none of one pipeline with one run of layers a worker."""
    bound = plan_bound(problem)
    of_schedules = ScheduleBound(problem, bound.update_s)
    return {
        "bound_s": bound.update_s,
        "binding": bound.binding,
        "bundled_s": of_schedules.bundled_s,
        "one_run_s": of_schedules.one_run_s,
    }


def renewed(problem: Problem, known: dict[str, Any]) -> dict[str, Any]:
    """Earlier results of a case with the plan that raypipe finds now, and its bound."""
    began_s = time.process_time()
    found = solve(LayoutEvaluator(problem), name=OWN)
    took_s = time.process_time() - began_s
    times = known["times"] | {OWN: found.update_s}
    others = {name: value for name, value in times.items() if name != OWN and value is not None}
    assert not others or found.update_s <= min(others.values()) * (1 + 1e-9), "raypipe's plan is never behind"
    return known | {"times": times, "plan": str(found.layout), "planning_s": took_s, **bounds(problem)}


def problem_of(model: ModelProfile, name: str, place: str, num_microbatches: int) -> Problem:
    """A model on a topology."""
    topology = TOPOLOGIES[place](16_000_000_000 if name in _MEASURED else 80_000_000_000)
    return Problem(model, topology, num_microbatches, model.microbatch_size)


def rebound(path: str, num_microbatches: int, json_path: str | None) -> None:
    """Prints how far plans of earlier results are above the bounds of today, and what binds."""
    rows, results, known = [], [], models()
    for then in json.loads(Path(path).read_text(encoding="utf-8"))["results"]:
        found = then | bounds(problem_of(known[then["model"]], then["model"], then["topology"], num_microbatches))
        results.append(found)
        rows.append({"model": found["model"], "topology": found["topology"], **over(found), "then": over(then)["raypipe / bound"]})
        rows[-1] |= {"binds": found["binding"]}
    print_table("Plans over their bounds", rows)
    for place in dict.fromkeys(found["topology"] for found in results):
        for kind in ("bound_s", "bundled_s", "one_run_s"):
            values = [found["times"][OWN] / found[kind] for found in results if found["topology"] == place and found[kind]]
            mean, most = (f"{of_values(values):.3f}" if values else "-" for of_values in (statistics.geometric_mean, max))
            print(f"{place}: raypipe / {kind}: geometric mean {mean}, most {most}, of {len(values)}")
    write_json(json_path, results)


def over(found: dict[str, Any]) -> dict[str, str]:
    """How far raypipe's plan is above its bounds."""
    own_s = found["times"][OWN]
    kinds = {"raypipe / bound": "bound_s", "raypipe / bundled": "bundled_s", "raypipe / one run": "one_run_s"}
    return {text: f"{own_s / found[kind]:.3f}" if found.get(kind) else "-" for text, kind in kinds.items()}


def summarise(results: list[dict[str, Any]], topologies: list[str]) -> None:
    """Prints by topology how far ahead of the best other planner raypipe's is, and where it gains most over any."""
    for place in [*topologies, "all of " + ", ".join(HARD)]:
        chosen = HARD if place.startswith("all of") else (place,)
        ratios = [found["times"][found["best"]] / found["times"][OWN] for found in results if found["best"] and found["topology"] in chosen]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"{place}: best / raypipe: geometric mean {mean:.3f}, least {min(ratios):.3f}, most {max(ratios):.3f}")
    for planner in PLANNERS:
        gains = [
            (found["times"][planner.name] / found["times"][OWN], found["model"], found["topology"])
            for found in results
            if found["times"][planner.name] is not None
        ]
        if gains and planner.name != OWN:
            most, model, topology = max(gains)
            print(
                f"{planner.name} / raypipe: most {most:.2f} ({model} on {topology}); "
                f"at least the paper's {PAPER} in {sum(gain >= PAPER for gain, *_ in gains)} of {len(gains)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = models()
    parser.add_argument("--models", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--topologies", nargs="+", choices=list(TOPOLOGIES), default=list(TOPOLOGIES))
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--json", help="file for all values")
    parser.add_argument("--bounds-of", metavar="FILE", help="values of an earlier run, of which only the bounds are computed anew")
    parser.add_argument("--others-of", metavar="FILE", help="values of an earlier run, of which only raypipe's plans are made anew")
    options = parser.parse_args()
    if options.bounds_of:
        rebound(options.bounds_of, options.microbatches, options.json)
        return
    earlier: dict[tuple[str, str], dict[str, Any]] = {}
    if options.others_of:
        stored = json.loads(Path(options.others_of).read_text(encoding="utf-8"))["results"]
        earlier = {(found["model"], found["topology"]): found for found in stored}
    rows, results = [], []
    for name in options.models:
        for place in options.topologies:
            problem = problem_of(known[name], name, place, options.microbatches)
            found = renewed(problem, earlier[name, place]) if earlier else compare(problem)
            results.append({"model": name, "topology": place, **found})
            times = found["times"]
            own_s = times[OWN]
            best_s = times[found["best"]] if found["best"] else math.nan
            rows.append(
                {"model": name, "topology": place, "raypipe s": f"{own_s:.4f}", "schedule": found["plan"].split(":")[0]}
                | {other: "-" if value is None else f"{value / own_s:.2f}" for other, value in times.items() if other != OWN}
                | {"best / raypipe": f"{best_s / own_s:.3f}", **over(found)}
                | {"planned CPU s": f"{found['planning_s']:.1f}"}
            )
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            write_json(options.json, results)  # After each case, since the next may take minutes.
    print_table(f"Update time over raypipe's, {options.microbatches} microbatches, simulated", rows)
    summarise(results, options.topologies)


if __name__ == "__main__":
    main()
