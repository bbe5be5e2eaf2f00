"""Planner against planner on four nodes whose links all differ: simulated, rehearsed and trained on a network of namespaces.

    python benchmarks/planners_on_wire.py [--models NAME ...] [--seed 1] [--rounds 3] [--slower 1] [--json FILE]  # root, iproute2
    python benchmarks/planners_on_wire.py --simulate                                                    # on any machine

Each ordered pair of nodes has a wire of 50 Mbit/s to 1 Gbit/s, at random. The models are those of `models.py` with seconds and bytes
divided so that an update takes some seconds: what computes waits for that time, messages and sums are real. The simulator is told what an
F and a B take beyond their waits, as `raypipe calibrate` fits it, from one rehearsal of raypipe's plan on the same nodes; with `--plain`
it is not.

With `--slower N` all wires are N times as slow, and models have an Nth of the bytes: the same seconds, with less work for the cores that
pass the bytes of all nodes.

A pair of planners whose simulated updates differ by more than 5 % must have the same order in rehearsal.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models import makers
from planning import regrouped
from rounds import Summary, in_rounds, print_table, write_json
from wire import GOODPUT, LATENCY_S, fitted, on_nodes, rehearsed_s, scaled

from raypipe import simulate
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, Overheads
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve

MBIT = 1e6 / 8
NUM_NODES = 4
SLOWEST_MBIT, FASTEST_MBIT = 50.0, 1000.0
CLOSE = 0.05
"""Planners whose simulated times differ by less need not have the same order in rehearsal."""
COPIED = ("data-parallel", "ddp-overlap")


@dataclass(frozen=True)
class Case:
    """A model and what its seconds and bytes are multiplied by."""

    model: str
    num_microbatches: int
    seconds: float
    num_bytes: float


CASES = {
    "vgg16": Case("vgg16", 8, 1.5, 1 / 33),
    "gnmt": Case("gnmt", 8, 6.0, 1 / 7),
    "gpt-24": Case("gpt-24", 8, 5.0, 1 / 10),
}
PLANNERS = ("raypipe", "spp", "pipedream", "node-pipeline", "ddp-overlap")


def rates(seed: int, *, slower: float = 1.0) -> dict[tuple[int, int], float]:
    """Return bytes per second of the wire of each ordered pair of nodes."""
    rng = random.Random(seed)
    pairs = itertools.permutations(range(NUM_NODES), 2)
    return {pair: round(SLOWEST_MBIT * (FASTEST_MBIT / SLOWEST_MBIT) ** rng.random()) * MBIT / slower for pair in pairs}


def network(of_pairs: dict[tuple[int, int], float]) -> ClusterTopology:
    """Return a device a node, and these wires."""
    return ClusterTopology(
        name="unlike links",
        nodes=tuple(Node(name=f"node{number}", devices=(Device(f"node{number}/0", "cpu"),)) for number in range(NUM_NODES)),
        links=tuple(
            Link(source=f"node{one}", target=f"node{other}", bandwidth_bytes_per_s=rate * GOODPUT, latency_s=LATENCY_S, one_way=True)
            for (one, other), rate in of_pairs.items()
        ),
    )


def problem_of(case: Case, topology: ClusterTopology) -> Problem:
    """Return the model on the network."""
    profile = scaled(makers()[case.model](), seconds=case.seconds, num_bytes=case.num_bytes)
    return Problem(profile, topology, case.num_microbatches, profile.microbatch_size)


def plans(problem: Problem) -> Iterator[tuple[str, Plan]]:
    """Yield the plan of each planner."""
    for name in PLANNERS:
        evaluator = LayoutEvaluator(regrouped(problem) if name in COPIED else problem)
        yield name, evaluator.plan(solve(evaluator, name=name), planner=name, lower_bound_s=0.0)


def misplaced(simulated: dict[str, float], rehearsed: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of planners that are apart in simulation and whose order is another one in rehearsal."""
    pairs = itertools.permutations(simulated, 2)
    return [(one, other) for one, other in pairs if simulated[one] * (1 + CLOSE) < simulated[other] and rehearsed[one] >= rehearsed[other]]


def compared(name: str, *, seed: int, rounds: int, plain: bool, slower: float) -> dict[str, Any]:
    """Return what each planner's plan of a model takes, simulated and, with rounds, rehearsed."""
    of_pairs, case = rates(seed, slower=slower), CASES[name]
    of_planner = dict(plans(problem_of(replace(case, num_bytes=case.num_bytes / slower), network(of_pairs))))
    simulated = {planner: plan.predicted.update_s for planner, plan in of_planner.items() if plan.predicted is not None}
    result: dict[str, Any] = {"name": name, "rates": {f"{one}->{other}": rate for (one, other), rate in of_pairs.items()}}
    result |= {"simulated_s": simulated, "orders": {planner: plan.schedule.name for planner, plan in of_planner.items()}}
    if rounds:
        with on_nodes(NUM_NODES, 1, rates=of_pairs) as (machines, commands):
            overheads = Overheads() if plain else fitted(machines, commands, of_planner["raypipe"])
            of_planner = {planner: plan.on(replace(plan.topology, overheads=overheads)) for planner, plan in of_planner.items()}
            simulated = {planner: simulate(plan).update_s for planner, plan in of_planner.items()}
            result |= {"simulated_s": simulated, "overheads": overheads}
            runs = {planner: partial(rehearsed_s, machines, commands, plan, num_updates=1) for planner, plan in of_planner.items()}
            found = {planner: Summary.of(values) for planner, values in in_rounds(runs, num_rounds=rounds).items()}
        result["rehearsed_s"] = found
        result["misplaced"] = misplaced(simulated, {planner: summary.median for planner, summary in found.items()})
    return result


def _rows(result: dict[str, Any]) -> Iterator[dict[str, str]]:
    for planner, simulated_s in result["simulated_s"].items():
        row = {"model": result["name"], "planner": planner, "order": result["orders"][planner], "simulated s": f"{simulated_s:.3f}"}
        if "rehearsed_s" in result:
            summary = result["rehearsed_s"][planner]
            row |= {"rehearsed s": f"{summary.median:.3f} +-{summary.spread:.3f}", "over simulated": f"{summary.median / simulated_s:.3f}"}
        yield row


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.0, help="how many times slower wires are, for as many times fewer bytes")
    parser.add_argument("--simulate", action="store_true", help="without rehearsals, on any machine")
    parser.add_argument("--plain", action="store_true", help="simulate without what Ops take beyond their waits")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    results = []
    for name in options.models:
        rounds = 0 if options.simulate else options.rounds
        results.append(compared(name, seed=options.seed, rounds=rounds, plain=options.plain, slower=options.slower))
        print_table(f"seconds of an update, {name}", list(_rows(results[-1])))
        if "misplaced" in results[-1]:
            print(f"pairs in another order than simulated: {results[-1]['misplaced'] or 'none'}", flush=True)
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
