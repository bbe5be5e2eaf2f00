"""Exhaustive optima of small random problems, kept in tests/golden/planning_optima.json, and how far the search is from them.

    python -m tests.planning.optima write        # tries every plan of every case; most of an hour
    python -m tests.planning.optima compare      # searches each case with the usual budget: minutes

A plan here has consecutive layers on any devices in any order, replicated or not, some idle, in the orders 1f1b and list. All plans
are estimated; in the order of their estimates they are simulated until an estimate is so much above the best simulated time that
no plan behind it can be better: replicated stages may be faster than estimated, by less than `_MARGIN` in all problems tried.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Problem
from raypipe.planning.search import LayoutSearch
from raypipe.planning.solve import solve
from tests.planning.instances import all_plans, random_problem

GOLDEN = Path(__file__).parent.parent / "golden" / "planning_optima.json"
_MARGIN = 0.85
_CASES = {4: (100, (4, 5, 6)), 5: (60, (4, 5, 6)), 6: (30, (4, 5)), 7: (10, (3,)), 8: (5, (2, 3))}
"""By number of devices: how many cases, and numbers of layers."""
_INCOMPLETE = {4: (60, (4, 5, 6)), 5: (35, (4, 5))}
"""The same of networks of which some pairs have no link; two of three have too little memory for the whole model on one device."""
_ROOMS = (None, 0.6, 0.4)


@dataclass(frozen=True)
class Case:
    """A problem by its seed."""

    seed: int
    num_devices: int
    num_layers: int
    num_microbatches: int
    one_way: bool
    missing: float = 0.0
    room: float | None = None

    def problem(self) -> Problem:
        return random_problem(
            self.seed,
            num_devices=self.num_devices,
            num_layers=self.num_layers,
            num_microbatches=self.num_microbatches,
            one_way=self.one_way,
            missing=self.missing,
            room=self.room,
        )


def cases() -> Iterator[Case]:
    seed = 1000
    for num_devices, (count, layers) in _CASES.items():
        for _ in range(count):
            yield Case(seed, num_devices, layers[seed % len(layers)], (4, 8, 16)[seed // 3 % 3], seed % 4 == 3)
            seed += 1
    for num_devices, (count, layers) in _INCOMPLETE.items():
        for _ in range(count):
            size = (num_devices, layers[seed % len(layers)], (4, 8, 16)[seed // 3 % 3])
            yield Case(seed, *size, one_way=False, missing=(0.3, 0.6)[seed % 2], room=_ROOMS[seed // 2 % 3])
            seed += 1


def optimum_s(problem: Problem) -> float | None:
    """Seconds of an update of the best of all plans; `None` if none fits."""
    evaluator = LayoutEvaluator(problem)
    best_s, estimates = math.inf, {}

    def simulated_s(layout: Layout) -> float:
        judged = evaluator.simulate(layout)
        return math.inf if judged is None or judged.missing_bytes else judged.update_s

    # Whatever is known already need not be remembered, only what may be better.
    for plan in all_plans(problem.num_devices, problem.num_layers):
        for order in ("1f1b", "list"):
            layout = replace(plan, order=order)
            estimate_s = evaluator.estimator.estimate_s(layout)
            if estimate_s * _MARGIN < best_s:
                estimates[layout] = estimate_s
                if estimate_s < best_s:
                    best_s = min(best_s, simulated_s(layout))
    for layout in sorted(estimates, key=lambda layout: estimates[layout]):
        if estimates[layout] * _MARGIN > best_s:
            break
        best_s = min(best_s, simulated_s(layout))
    return best_s if best_s < math.inf else None


def stored() -> list[tuple[Case, float]]:
    """The cases and their optima, without those where nothing fits."""
    entries = json.loads(GOLDEN.read_text())
    return [(Case(**entry["case"]), entry["optimum_s"]) for entry in entries if entry["optimum_s"] is not None]


def gap(case: Case, best_s: float) -> float:
    """How far the search's plan is above the best of all; below 0 where a limit on activations that is not tried there helps."""
    found = LayoutSearch(LayoutEvaluator(case.problem())).run()
    assert found is not None
    assert not found.missing_bytes
    return found.update_s / best_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("--incomplete", action="store_true", help="compare only on networks of which some pairs have no link")
    options = parser.parse_args()
    if options.what == "write":
        entries = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else []
        for case in list(cases())[len(entries) :]:  # Goes on where it was stopped.
            entries.append({"case": asdict(case), "optimum_s": optimum_s(case.problem())})
            print(entries[-1], flush=True)
            GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
        return
    gaps, bare, bound_gaps = [], [], []
    for case, best_s in stored():
        if options.incomplete and not case.missing:
            continue
        bound_gaps.append(plan_bound(case.problem()).update_s / best_s)
        gaps.append(gap(case, best_s))
        bare.append(solve(LayoutEvaluator(case.problem()), name="spp").update_s / best_s - 1)
        print(f"{case}: {gaps[-1]:+.4f}, SPP as reconstructed {bare[-1]:+.4f}", flush=True)
    print(f"the bound is {max(bound_gaps):.4f} of the optimum at most, {statistics.geometric_mean(bound_gaps):.4f} in the geometric mean")
    for name, values in (("raypipe", gaps), ("SPP as reconstructed", bare)):
        print(f"{name}: {len(values)} problems, mean gap {statistics.mean(values):.4f}, worst {max(values):.4f}")


if __name__ == "__main__":
    main()
