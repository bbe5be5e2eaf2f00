"""Orders for models with branches against those for chains, each with its own best cut, in the same memory.

    python benchmarks/branches.py [--devices 4 8] [--shapes 1:1 1:2 1:4 1:1:1] [--losses microbatch coupled co-attention]
                                  [--latencies 0 0.25 1] [--links] [--plan] [--json FILE]
    python benchmarks/branches.py --rehearse [--devices 4] [--shapes 1:1 1:2] [--losses microbatch co-attention] [--time-scale 0.02]
                                  [--rounds 3] [--json FILE]

A branch of work 1 takes D forwards (F) and backwards (B = 2 F, half of it for weights) on D devices; a shape gives the work of each
branch. An update has 2D microbatches. `coupled` takes one loss over all of them: one microbatch, of which branches take parts. With
`co-attention` branches read each other at D places, in both directions. Latency is in F. Every device has room for its weights twice,
which pipelines in opposite directions need, and for D microbatches of its share: for all of an update where its loss needs all.

    equal         Chimera (Li and Hoefler, SC 2021) with equal stages of one chain, in which branches follow each other, as its paper has it
    chimera       Chimera with its best cut
    variants      the best of chimera, chimera-doubling and chimera-halving on that chain
    listed        the best of all bundled synchronous orders for a chain, on that chain
    chain         the best of the same orders where raypipe lets branches run at once, as stages allow it
    chain, whole  the best of those with whole backwards
    units         1F1B of the branches as separate units, in the same direction
    graphpipe     branches on devices of their own (Jeon et al., ASPLOS 2025), the order searched, whole backwards
    distmm        branches on devices of their own that share the rows (Huang et al., NSDI 2024), whole backwards; where all rows have
                  one loss, its devices gather them for nothing
    branches      raypipe's branch-aware: placement, cut, order, whole or split backwards
    whole         the same with whole backwards
    plan          what `raypipe plan` finds with all schedules (`--plan`)

Coupled losses: of the orders for chains, those in which all forwards of an update may stand before all backwards (gpipe), and the order
that raypipe's search finds for a chain that passes over the devices once, or down and up. `--links` adds sums and messages of towers of
300 MB of weights and 20 MB of output a stage, with F of 10 ms, on links of 25, 100 and 400 Gbit/s. `--rehearse` runs chimera and
branches in turn, with waits for computation.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rounds import Summary, in_rounds, print_table, write_json

from raypipe.artifacts.calibration import Calibration
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.config import calibration_file
from raypipe.errors import RaypipeError
from raypipe.planning import branches, chunks
from raypipe.planning.branch_groups import groupings
from raypipe.planning.branch_placement import BranchPlacement, divisions, named_branches, placements
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.joint_cut import JointCut
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Devices, Problem
from raypipe.planning.schedule_search import ONE_STAGE_ORDERS, climbed
from raypipe.planning.solve import solve
from raypipe.training.rehearsal import rehearse

SHAPES = {"1:1": (1, 1), "1:2": (1, 2), "1:4": (1, 4), "1:1:1": (1, 1, 1)}
LOSSES = ("microbatch", "coupled", "co-attention")
CHIMERAS = ("chimera", "chimera-doubling", "chimera-halving")
ORDERS = ("1f1b", "zb-auto", *ONE_STAGE_ORDERS, *chunks.CHAIN_ORDERS)
SPLIT_ORDERS = {"zb-auto", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"}
BASELINES = ("equal", "chimera", "variants", "listed", "chain", "chain, whole", "units", "graphpipe", "distmm")

_LAYERS = 4  # of a stage of work 1
_KB = 1000
_ROWS = 16  # of a microbatch
_F_S = 0.01  # seconds of F, by which links are slow or fast
_STEPS = 12  # of the search for a cut


@dataclass(frozen=True)
class Case:
    """One model on one cluster; `gbit_s` of `None` stands for links without limit, and weights without bytes."""

    num_devices: int
    shape: str
    loss: str
    latency: float
    gbit_s: float | None = None

    def __str__(self) -> str:
        link = f", {self.gbit_s:g} Gbit/s" if self.gbit_s else ""
        return f"D = {self.num_devices}, {self.shape}, {self.loss}, latency {self.latency:g} F{link}"

    @property
    def problem(self) -> Problem:
        """The planning problem; F is the unit of time."""
        num_units = 2 * self.num_devices
        if self.loss == "coupled":
            return Problem(self._profile(num_units), self._topology(), 1, num_units * _ROWS)
        return Problem(self._profile(1), self._topology(), num_units, _ROWS)

    def _profile(self, units: int) -> ModelProfile:
        """Return the profile of a microbatch that stands for so many."""
        layers: dict[str, LayerProfile] = {}
        edges: list[tuple[str, str]] = []
        work = SHAPES[self.shape]
        weights = 300_000_000 if self.gbit_s else 4_000
        for branch, times in enumerate(work):
            count = _LAYERS * self.num_devices * times
            every = count // self.num_devices
            for at in range(count):
                name = f"{branch}-{at}"
                layers[name] = LayerProfile(
                    name=name,
                    forward_s=units / _LAYERS,
                    backward_s=2 * units / _LAYERS,
                    weight_grad_s=units / _LAYERS,
                    output_bytes=(20_000_000 if self.gbit_s else 1) * units,
                    saved_bytes=_KB * units * (20_000 if self.gbit_s else 1),
                    parameter_bytes=weights // _LAYERS,
                    branch=f"branch{branch}",
                )
                if at:
                    edges.append((f"{branch}-{at - 1}", name))
                if self.loss == "co-attention" and at and at % every == 0:
                    other = (branch + 1) % len(work)
                    edges.append((f"{other}-{at // every * _LAYERS * work[other] - 1}", name))
            edges.append((f"{branch}-{count - 1}", "joint"))
        if self.loss == "co-attention":  # a chain of layers must not lead back
            depth = {name: int(name.split("-")[1]) / work[int(name.split("-")[0])] for name in layers}
            layers = dict(sorted(layers.items(), key=lambda item: (int(depth[item[0]] // _LAYERS), item[0].split("-")[0], depth[item[0]])))
        joint = LayerProfile(
            name="joint", forward_s=0.0, backward_s=0.0, weight_grad_s=0.0, output_bytes=0, saved_bytes=0, parameter_bytes=0
        )
        return ModelProfile(
            name=str(self),
            microbatch_size=units * _ROWS,
            layers=(*layers.values(), joint),
            named_edges=tuple(NamedEdge(producer=producer, consumer=consumer) for producer, consumer in edges),
            loss_couples_rows=self.loss == "coupled" or None,
        )

    def _topology(self) -> ClusterTopology:
        profile = self._profile(1)
        weights = 4 * sum(layer.parameter_bytes for layer in profile.layers) / self.num_devices
        saved = sum(layer.saved_bytes for layer in profile.layers) / self.num_devices
        # A layer more, for cuts that are not quite level.
        slack = 1 + 2 * self.num_devices / len(profile.layers)
        held = self.num_devices * (2 if self.loss == "coupled" else 1)
        room = math.ceil((2 * weights + held * saved) * slack)
        bandwidth = math.inf if self.gbit_s is None else self.gbit_s * 1e9 / 8 * _F_S
        link = NodeLink(latency_s=self.latency, bandwidth_bytes_per_s=None if bandwidth == math.inf else bandwidth)
        devices = tuple(Device(name=f"n/{number}", kind="gpu", memory_bytes=room) for number in range(self.num_devices))
        return ClusterTopology(name="node", nodes=(Node(name="n", devices=devices, link=link),))


class Systems:
    """The best of each system for one case."""

    def __init__(self, case: Case, *, gathers: bool = False) -> None:
        self.case = case
        self.problem = case.problem
        if gathers:  # a loss that couples rows may then be taken by several devices
            self.problem = replace(self.problem, profile=replace(self.problem.profile, loss_couples_rows=None))
        self.evaluator = LayoutEvaluator(self.problem)
        as_chain = replace(self.problem.profile, named_edges=None, loss_couples_rows=None)
        self.as_chain = LayoutEvaluator(replace(self.problem, profile=as_chain))
        self.workers: tuple[Devices, ...] = tuple((device,) for device in range(case.num_devices))

    def best(self) -> dict[str, Evaluation]:
        """Return each system's best that fits into memory."""
        if self.case.loss == "coupled":
            found = self._coupled_chains()
        else:
            orders = {order: self._chain(order, self.evaluator) for order in ORDERS}
            whole = [order for order in orders if order not in SPLIT_ORDERS]
            listed = {order: self._chain(order, self.as_chain) for order in ORDERS}
            equal = self.as_chain.simulate(next(chunks.layouts(self.as_chain, self.workers, "chimera")))
            found = {
                "equal": _fastest([equal]),
                "chimera": listed["chimera"],
                "variants": _fastest(listed[order] for order in CHIMERAS),
                "listed": _fastest(listed.values()),
                "chain": _fastest(orders.values()),
                "chain, whole": _fastest(orders[order] for order in whole),
                "units": self._units(),
            }
        found["graphpipe"] = self.graphpipe()
        found["distmm"] = self.distmm()
        proposed = itertools.chain(
            branches.layouts(self.evaluator, self.workers), branches.replicated_layouts(self.evaluator, tuple(range(self.case.num_devices)))
        )
        ours = [evaluation for layout in proposed if (evaluation := self.evaluator.simulate(layout))]
        whole_ours = self._placed(self._all(), self.workers, splits=(False,))
        found["whole"] = _fastest(whole_ours)
        found["branches"] = _fastest([*ours, found["whole"]])
        return {name: evaluation for name, evaluation in found.items() if evaluation is not None}

    def graphpipe(self) -> Evaluation | None:
        """Return the best with devices of its own for each branch."""
        return _fastest(self._placed(self._disjoint(self.workers), self.workers, splits=(False,)))

    def distmm(self) -> Evaluation | None:
        """Return the best with workers of its own for each branch, of equally many devices or by the work of the branch."""
        if self.problem.profile.loss_couples_rows:
            return Systems(self.case, gathers=True).distmm()
        count = self.case.num_devices
        named = named_branches(self.problem)
        major = [branch for branch, layers in enumerate(named) if len(layers) > 1]
        by_width = [
            (groups, list(self._disjoint(groups)))
            for width in range(2, count // 2 + 1)
            if count % width == 0
            for groups in [tuple(tuple(range(first, first + width)) for first in range(0, count, width))]
        ]
        by_work = [
            (grouping.workers, [(named, grouping.placement)])
            for grouping in groupings(self.problem, named, tuple(range(count)))
            if _apart([grouping.placement.workers[branch] for branch in major])
        ]
        return _fastest(
            evaluation for groups, placed in (*by_width, *by_work) for evaluation in self._placed(placed, groups, splits=(False,))
        )

    def _chain(self, order: str, evaluator: LayoutEvaluator) -> Evaluation | None:
        """Return the order with its best cut: of many that are more or less level, the best are improved by single layers."""
        starts: list[Layout] = []
        if order in chunks.CHAIN_ORDERS:
            for layout in chunks.layouts(evaluator, self.workers, order):
                starts += [layout, *(replace(layout, cuts=cuts) for cuts in self._skewed(layout.num_stages))]
        else:
            starts += [Layout(cuts, self.workers, order) for cuts in self._skewed(self.case.num_devices)]
        tried = [evaluation for layout in dict.fromkeys(starts) if (evaluation := evaluator.simulate(layout)) is not None]
        best = sorted(tried, key=lambda evaluation: evaluation.rank)[:_NUM_CLIMBED]
        return _fastest(climbed(evaluator, evaluation, most_steps=_STEPS) for evaluation in best)

    def _skewed(self, num_stages: int) -> Iterator[tuple[int, ...]]:
        """Yield cuts into equal stages, and into ones that grow towards one end, both ends or the middle."""
        places = [2 * stage / max(num_stages - 1, 1) - 1 for stage in range(num_stages)]
        for slope, bend in itertools.product((-0.3, -0.15, 0.0, 0.15, 0.3), (-0.4, -0.2, 0.0, 0.2, 0.4, 0.6)):
            shares = [1 + slope * place + bend * (place**2 - 1 / 3) for place in places]
            ends = list(itertools.accumulate(shares, initial=0.0))
            cuts = tuple(round(end / ends[-1] * self.problem.num_layers) for end in ends)
            if all(first < end for first, end in itertools.pairwise(cuts)):
                yield cuts

    def _coupled_chains(self) -> dict[str, Evaluation | None]:
        """Return the best of one chain of all branches: by search, down once, or down and up."""
        num_devices = self.case.num_devices
        chain = (tuple(range(self.problem.num_layers - 1)), (self.problem.num_layers - 1,))
        once, back = tuple(range(num_devices)), tuple(reversed(range(num_devices)))
        down = BranchPlacement((once, (num_devices - 1,)))
        down_and_up = BranchPlacement(((*once, *back), (0,)))
        straight = _fastest(self._cut(chain, [down], self.workers, splits=(False,)))
        folded = list(self._cut(chain, [down_and_up, down], self.workers, splits=(False, True)))
        return {
            "gpipe": straight,
            "chain": _fastest(folded),
            "chain, whole": _fastest(self._cut(chain, [down_and_up], self.workers, splits=(False,))),
        }

    def _units(self) -> Evaluation | None:
        named = named_branches(self.problem)
        same_way = tuple(range(self.case.num_devices))
        placement = BranchPlacement(tuple(same_way if len(layers) > 1 else (same_way[-1],) for layers in named))
        return _fastest(self._cut(named, [placement], self.workers, splits=(False,)))

    def _all(self) -> Iterator[tuple[tuple[tuple[int, ...], ...], BranchPlacement]]:
        for division in divisions(self.problem):
            for placement in placements(self.problem, division, self.workers):
                yield division, placement

    def _disjoint(self, workers: tuple[Devices, ...]) -> Iterator[tuple[tuple[tuple[int, ...], ...], BranchPlacement]]:
        named = named_branches(self.problem)
        for placement in placements(self.problem, named, workers):
            major = [of_branch for of_branch, layers in zip(placement.workers, named, strict=True) if len(layers) > 1]
            if _apart(major):
                yield named, placement

    def _placed(self, placed: Iterable[Any], workers: tuple[Devices, ...], *, splits: tuple[bool, ...]) -> Iterator[Evaluation | None]:
        by_division: dict[Any, list[BranchPlacement]] = {}
        for division, placement in placed:
            by_division.setdefault(division, []).append(placement)
        for division, of_division in by_division.items():
            yield from self._cut(division, of_division, workers, splits=splits)

    def _cut(
        self,
        division: tuple[tuple[int, ...], ...],
        placements: list[BranchPlacement],
        workers: tuple[Devices, ...],
        *,
        splits: tuple[bool, ...],
    ) -> Iterator[Evaluation | None]:
        """Yield the few most promising of these placements."""
        num_parts = 2 * self.case.num_devices if self.case.loss == "coupled" else 1
        found: list[tuple[float, int, Layout]] = []
        for placement in placements:
            cut = JointCut.balanced(self.problem, division, workers, placement)
            if cut is None:
                continue
            for split in splits:
                layout = branches.layout_of(self.evaluator, cut, num_parts=num_parts, split=split)
                if layout is not None and layout.branches is not None:
                    found.append((layout.branches.search.rough_s(), len(found), layout))
        for _, _, layout in sorted(found)[:_NUM_SEARCHED]:
            placed = layout.branches
            assert placed is not None
            yield self.evaluator.simulate(replace(layout, branches=replace(placed, search=replace(placed.search, most_moved_ops=300_000))))


_NUM_SEARCHED = 3
_NUM_CLIMBED = 2


def _apart(workers: Sequence[Sequence[int]]) -> bool:
    """Return whether each worker has one stage of one branch at most."""
    return len(set(itertools.chain(*workers))) == sum(map(len, workers))


def _fastest(evaluations: Iterable[Evaluation | None]) -> Evaluation | None:
    fitting = (evaluation for evaluation in evaluations if evaluation is not None and not evaluation.missing_bytes)
    return min(fitting, key=lambda evaluation: evaluation.update_s, default=None)


def run(cases: Iterable[Case], *, with_plan: bool) -> list[dict[str, Any]]:
    """Print and return the update of each system, relative to that of branches."""
    results: list[dict[str, Any]] = []
    for case in cases:
        began_s = time.process_time()
        systems = Systems(case)
        found = systems.best()
        if with_plan:
            found["plan"] = solve(systems.evaluator)
        ours = found["branches"]
        work_s = 3 * sum(SHAPES[case.shape]) * 2 * case.num_devices
        bubble = ours.update_s - work_s
        result: dict[str, Any] = {
            "case": str(case),
            "update_s": {name: evaluation.update_s for name, evaluation in found.items()},
            "bubble_F": {name: evaluation.update_s - work_s for name, evaluation in found.items()},
            "peak_bytes": {name: evaluation.timing.peak_memory_bytes for name, evaluation in found.items()},
            "layout": str(ours.layout),
            "cpu_s": time.process_time() - began_s,
        }
        results.append(result)
        ahead = {name: f"{evaluation.update_s / ours.update_s:.3f}" for name, evaluation in found.items() if name != "branches"}
        print(f"{case}: bubble {bubble:.2f} F; over branches: {ahead}; {result['cpu_s']:.0f} CPU s", flush=True)
    return results


def summaries(results: list[dict[str, Any]], cases: list[Case]) -> None:
    """Print how far branches are ahead, by shape and by loss."""
    rows = []
    groups: list[tuple[str, Callable[[Case], bool]]] = [("all", lambda case: True)]
    groups += [(f"shape {shape}", partial(_has, shape=shape)) for shape in SHAPES]
    groups += [(f"loss {loss}", partial(_has, loss=loss)) for loss in LOSSES]
    groups += [("microbatch, no latency", lambda case: case.loss == "microbatch" and not case.latency)]
    for title, belongs in groups:
        row = {"cases": title}
        for name in (*BASELINES, "gpipe"):
            ratios = [
                result["update_s"][name] / result["update_s"]["branches"]
                for result, case in zip(results, cases, strict=True)
                if belongs(case) and name in result["update_s"]
            ]
            row[name] = f"{statistics.fmean(ratios):.3f} ({min(ratios):.3f})" if ratios else "-"
        rows.append(row)
    print_table("update over that of branches: mean (least)", rows)


def _has(case: Case, **values: str) -> bool:
    return all(getattr(case, name) == value for name, value in values.items())


def rehearsals(cases: list[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run chimera and branches in turn, with waits for computation."""
    costs = Calibration.load(calibration_file()).of("shm")
    results = []
    for case in cases:
        systems = Systems(case)
        plans: dict[str, Plan] = {}
        for name, evaluation in systems.best().items():
            if name in {"chimera", "branches"}:
                evaluator = systems.as_chain if name == "chimera" else systems.evaluator
                plan = evaluator.plan(evaluation, planner=name, lower_bound_s=0.0)
                plans[name] = plan.on(replace(plan.topology, overheads=costs.overheads))
        if "chimera" not in plans:
            print(f"{case}: chimera does not fit")
            continue

        simulated: dict[str, float] = {}

        def rehearsed(name: str, plans: dict[str, Plan] = plans, simulated: dict[str, float] = simulated) -> float:
            done = rehearse(plans[name], num_updates=2, num_windows=2, time_scale=options.time_scale, byte_scale=1e-3, stand_ins=True)
            simulated[name] = done.predicted.update_s
            return statistics.median(window.update_s for window in done.windows)

        found = in_rounds({name: lambda name=name: rehearsed(name) for name in plans}, num_rounds=options.rounds)  # type: ignore[misc]
        medians = {name: Summary.of(values) for name, values in found.items()}
        result = {"case": str(case), "rehearsed_s": medians, "simulated_s": simulated}
        results.append(result)
        ratio = medians["chimera"].median / medians["branches"].median
        close = {name: f"{medians[name].median / simulated[name]:.3f}" for name in plans}
        print(f"{case}: branches {ratio:.3f}x as fast as chimera; rehearsed over simulated {close}", flush=True)
    return results


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, help="default: all; rehearsals take the loss of each microbatch")
    parser.add_argument("--latencies", nargs="+", type=float, default=[0.0, 0.25, 1.0])
    parser.add_argument("--links", action="store_true", help="links of set bandwidths, with sums of gradients")
    parser.add_argument("--plan", action="store_true", help="also what `raypipe plan` finds with all schedules")
    parser.add_argument("--rehearse", action="store_true", help="run with waits for computation")
    parser.add_argument("--time-scale", type=float, default=0.02, help="seconds of F")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    links = [25.0, 100.0, 400.0] if options.links else [None]
    latencies = [0.0] if options.links or options.rehearse else options.latencies
    losses = options.losses or (["microbatch"] if options.rehearse else LOSSES)
    cases = [Case(*each) for each in itertools.product(options.devices, options.shapes, losses, latencies, links)]
    try:
        if options.rehearse:
            write_json(options.json, rehearsals(cases, options))
            return 0
        results = run(cases, with_plan=options.plan)
    except RaypipeError as error:
        print(error, file=sys.stderr)
        return 1
    summaries(results, cases)
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
