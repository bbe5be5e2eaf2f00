"""Sums of gradients behind one backward, and behind the weight gradients of several microbatches: simulated and rehearsed.

    python benchmarks/hidden_sums.py [--models NAME ...] [--mbit 200] [--rounds 3] [--json FILE]     # as root, with iproute2
    python benchmarks/hidden_sums.py --simulate                                                      # on any machine

Four nodes, each with one device and the same wire to every other one. The models are those of `models.py` with seconds and bytes divided so
that an update takes some seconds: what computes waits for that time, messages and sums are real. What an F and a B take beyond their waits
is fitted to a rehearsal of the first plan, and known to the planner.

Three plans of each model: all devices with copies of the whole model, whose sums overlap the last backward in buckets, as data parallelism
does it everywhere; the same with divided stages (`raypipe.planning.hidden_sums`); and the plan that raypipe chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from models import makers
from planners_on_wire import CASES, MBIT, NUM_NODES, Case, network
from rounds import Summary, in_rounds, print_table, write_json
from wire import fitted, on_nodes, rehearsed_s, scaled

from raypipe.artifacts.plan import Plan
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.hidden_sums import HiddenSumSearch
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve

MODELS = CASES | {"resnet50": Case("resnet50", 8, 3.0, 1 / 8), "inception_v3": Case("inception_v3", 8, 2.0, 1 / 8)}


def whole(problem: Problem) -> Layout:
    """Return copies of the whole model on all devices."""
    return Layout((0, problem.num_layers), (tuple(range(problem.num_devices)),), "1f1b")


def plans(problem: Problem) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that are compared."""
    evaluator = LayoutEvaluator(problem)
    copies = evaluator.simulate(whole(problem))
    divided = HiddenSumSearch(evaluator, effort=0.0).best([whole(problem)])
    found: dict[str, Evaluation | None] = {"copies": copies, "copies, divided": divided, "raypipe": solve(LayoutEvaluator(problem))}
    for name, evaluation in found.items():
        assert evaluation is not None, "all devices are linked"
        yield name, evaluator.plan(evaluation, planner=name, lower_bound_s=0.0)


def compared(name: str, *, mbit: float, rounds: int) -> dict[str, Any]:
    """Return what each plan of a model takes, simulated and, with rounds, rehearsed."""
    of_pairs = {(one, other): mbit * MBIT for one in range(NUM_NODES) for other in range(NUM_NODES) if one != other}
    case = MODELS[name]
    profile = scaled(makers()[case.model](), seconds=case.seconds, num_bytes=case.num_bytes)
    problem = Problem(profile, network(of_pairs), case.num_microbatches, profile.microbatch_size)
    if not rounds:
        return _result(name, mbit, dict(plans(problem)))
    with on_nodes(NUM_NODES, 1, rates=of_pairs) as (machines, commands):
        evaluator = LayoutEvaluator(problem)
        copies = evaluator.simulate(whole(problem))
        assert copies is not None, "all devices are linked"
        overheads = fitted(machines, commands, evaluator.plan(copies, planner="copies", lower_bound_s=0.0))
        of_name = dict(plans(replace(problem, topology=replace(problem.topology, overheads=overheads))))
        runs = {planner: partial(rehearsed_s, machines, commands, plan, num_updates=1) for planner, plan in of_name.items()}
        rehearsed = {planner: Summary.of(values) for planner, values in in_rounds(runs, num_rounds=rounds).items()}
    return _result(name, mbit, of_name) | {"overheads": overheads, "rehearsed_s": rehearsed}


def _result(name: str, mbit: float, of_name: dict[str, Plan]) -> dict[str, Any]:
    simulated = {planner: plan.predicted.update_s for planner, plan in of_name.items() if plan.predicted is not None}
    orders = {planner: f"{plan.schedule.name}, {len(plan.stages)} stages" for planner, plan in of_name.items()}
    return {"name": name, "mbit": mbit, "simulated_s": simulated, "orders": orders}


def _rows(result: dict[str, Any]) -> Iterator[dict[str, str]]:
    for planner, simulated_s in result["simulated_s"].items():
        first_s = result["simulated_s"]["copies"]
        row = {"model": result["name"], "plan": planner, "order": result["orders"][planner], "simulated s": f"{simulated_s:.3f}"}
        row["copies / it"] = f"{first_s / simulated_s:.3f}"
        if "rehearsed_s" in result:
            summary, first = result["rehearsed_s"][planner], result["rehearsed_s"]["copies"]
            row |= {"rehearsed s": f"{summary.median:.3f} +-{summary.spread:.3f}", "over simulated": f"{summary.median / simulated_s:.3f}"}
            row["copies / it, rehearsed"] = f"{first.median / summary.median:.3f}"
        yield row


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of each wire")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate", action="store_true", help="without rehearsals, on any machine")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    results = []
    for name in options.models:
        results.append(compared(name, mbit=options.mbit, rounds=0 if options.simulate else options.rounds))
        print_table(f"seconds of an update, {name}", list(_rows(results[-1])))
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
