"""SPP (Luo et al., INFOCOM 2022) with each of its parts switched off in turn, over devices, microbatches and bandwidth.

    python benchmarks/spp_tables.py [--models vgg16 gpt-24] [--seeds 1 2 3] [--raypipe] [--json FILE]
    python benchmarks/spp_tables.py --rehearse [--rounds 3] [--json FILE]     # as root, with iproute2

SPP as reconstructed (`planning/baselines.py`): RDO orders the devices, PRM cuts the layers and replicates stages, PE orders the blocks, and
the search takes the best number of stages. Each pair of nodes has a link of its own between 1 and 100 Gbit/s, at random (`planning.py`);
nodes have one device. Seconds of an update over those of the whole of SPP, simulated, as geometric means over models and seeds:

    no RDO      the devices in the order of the file
    no PRM      equally many layers and equally many devices a stage
    no PE       GPipe's order, all forwards before all backwards; 1F1B beside it
    no search   as many stages as there are devices
    raypipe     `raypipe plan`, which begins with SPP's parts and searches beyond them (`--raypipe`; takes minutes)

The theorem bounds what PE makes of N stages: (M + 4 N - 4) C and the longest sum of gradients, where C is the time of a microbatch, forth
and back, on the busiest stage or link. `--rehearse` runs SPP's plans on the network of `planners_on_wire.py` and prints the measured update
over that bound.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models import makers
from planners_on_wire import CASES, NUM_NODES, network, problem_of, rates
from planning import scattered
from rounds import Summary, in_rounds, print_table, write_json
from wire import on_nodes, rehearsed_s

from raypipe.artifacts.topology import ClusterTopology
from raypipe.planning.baselines import spp
from raypipe.planning.device_order import recursive
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.partition import Partition
from raypipe.planning.planners import Planner, best_proposal
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve

MEMORY_BYTES = 80_000_000_000
DEVICES, MICROBATCHES, BANDWIDTHS = (2, 4, 8), (4, 8, 16, 32, 64), (0.25, 1.0, 4.0)
"""What is swept, about eight devices, 16 microbatches and the bandwidths as drawn."""
USUAL = (8, 16, 1.0)
WITHOUT = ("no RDO", "no PRM", "no PE", "1F1B for PE", "no search")
REHEARSED = (4, 8, 16)


@dataclass(frozen=True)
class Cell:
    """A model, a network and a size."""

    model: str
    seed: int
    num_devices: int
    num_microbatches: int
    bandwidth: float

    def problem(self) -> Problem:
        """The planning problem: the first devices of a network of eight."""
        whole = scattered(self.seed, MEMORY_BYTES)
        nodes = whole.nodes[: self.num_devices]
        names = {node.name for node in nodes}
        links = tuple(
            replace(link, bandwidth_bytes_per_s=self.bandwidth * link.bandwidth_bytes_per_s)
            for link in whole.links
            if {link.source, link.target} <= names and link.bandwidth_bytes_per_s is not None
        )
        profile = makers()[self.model]()
        topology = ClusterTopology(name=whole.name, nodes=nodes, links=links)
        return Problem(profile, topology, self.num_microbatches, profile.microbatch_size)


def layouts(evaluator: LayoutEvaluator, without: str) -> Iterator[Layout]:
    """Yield what SPP proposes without a part of it."""
    problem, estimator = evaluator.problem, evaluator.estimator
    if without == "no PRM":
        yield from _equal(problem, recursive(problem))
        return
    order = tuple(range(problem.num_devices)) if without == "no RDO" else recursive(problem)
    found = [plan.layout for plan in Partition(estimator, order, most_positions=problem.num_layers + 1).least_bottleneck("list")]
    if without == "no search":
        found = found[-1:]
    name = {"no PE": "gpipe", "1F1B for PE": "1f1b"}.get(without, "list")
    yield from (replace(layout, order=name) for layout in found)


def _equal(problem: Problem, order: tuple[int, ...]) -> Iterator[Layout]:
    for num_stages in range(1, min(problem.num_devices, problem.num_layers) + 1):
        size, left = divmod(problem.num_devices, num_stages)
        if left or size > problem.microbatch_size:
            continue
        cuts = tuple(round(stage * problem.num_layers / num_stages) for stage in range(num_stages + 1))
        workers = tuple(order[first : first + size] for first in range(0, problem.num_devices, size))
        yield Layout(cuts, workers, "list")


def compared(cell: Cell, *, with_raypipe: bool) -> dict[str, float | None]:
    """Return the seconds of an update of SPP, of SPP without each part and, if asked for, of raypipe."""
    problem = cell.problem()

    def best(without: str) -> float | None:
        evaluator = LayoutEvaluator(problem)
        found = best_proposal(Planner(without, without, lambda _: layouts(evaluator, without)), evaluator, "auto")
        return None if found is None or found.missing_bytes else found.update_s

    evaluator = LayoutEvaluator(problem)
    whole = best_proposal(Planner("spp", "SPP", spp), evaluator, "auto")
    found = {"spp": None if whole is None else whole.update_s, **{without: best(without) for without in WITHOUT}}
    return found | ({"raypipe": solve(LayoutEvaluator(problem)).update_s} if with_raypipe else {})


def theorem_s(evaluator: LayoutEvaluator, layout: Layout) -> float:
    """Return the bound of the theorem for a layout in the list order, with both directions of a link taking turns as there."""
    problem, estimator = evaluator.problem, evaluator.estimator
    busiest_s, sums_s, latency_s = 0.0, 0.0, 0.0
    for stage, (group, first, end) in enumerate(zip(layout.workers, layout.cuts, layout.cuts[1:], strict=False)):
        seconds = estimator.stage(group, first, end)
        busiest_s = max(busiest_s, seconds.forward_s + seconds.backward_s)
        sums_s = max(sums_s, float(problem.sum_s(group, float(problem.summed_prefix[end] - problem.summed_prefix[first]))))
        if stage + 1 < layout.num_stages:
            ways = estimator.channel(group, layout.workers[stage + 1]), estimator.channel(layout.workers[stage + 1], group)
            busiest_s = max(busiest_s, float(problem.crossing_bytes[end]) * sum(way.s_per_byte for way in ways))
            latency_s = max(latency_s, *(way.latency_s for way in ways))
    # A latency occupies nothing; a microbatch meets it once on each of its 2 N - 2 ways.
    return (problem.num_microbatches + 4 * layout.num_stages - 4) * (busiest_s + 2 * latency_s) + sums_s


def swept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all cells, and print a line for each size."""
    sizes = dict.fromkeys(
        [USUAL]
        + [(count, USUAL[1], USUAL[2]) for count in DEVICES]
        + [(USUAL[0], count, USUAL[2]) for count in MICROBATCHES]
        + [(USUAL[0], USUAL[1], scale) for scale in BANDWIDTHS]
    )
    results: list[dict[str, Any]] = []
    rows = []
    for size in sizes:
        cells = [Cell(model, seed, *size) for model, seed in itertools.product(options.models, options.seeds)]
        found = [compared(cell, with_raypipe=options.raypipe) for cell in cells]
        results += [{"cell": cell, "update_s": seconds} for cell, seconds in zip(cells, found, strict=True)]
        row = {"devices": str(size[0]), "microbatches": str(size[1]), "bandwidth": f"x {size[2]:g}"}
        for name in (*WITHOUT, *(["raypipe"] if options.raypipe else [])):
            ratios = [seconds[name] / seconds["spp"] for seconds in found if seconds.get(name) and seconds["spp"]]  # type: ignore[operator]
            row[name] = f"{statistics.geometric_mean(ratios):.3f} ({max(ratios):.2f})" if ratios else "-"
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print_table("seconds of an update over SPP's: geometric mean (most)", rows)
    return results


def rehearsed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the measured update of SPP's plans over the theorem's bound."""
    of_pairs = rates(1)
    plans: dict[tuple[str, int], tuple[LayoutEvaluator, Evaluation]] = {}
    for model, count in itertools.product(CASES, REHEARSED):
        evaluator = LayoutEvaluator(problem_of(replace(CASES[model], num_microbatches=count), network(of_pairs)))
        plans[model, count] = evaluator, solve(evaluator, name="spp")
    with on_nodes(NUM_NODES, 1, rates=of_pairs) as (machines, commands):
        runs = {
            key: partial(rehearsed_s, machines, commands, evaluator.plan(found, planner="spp", lower_bound_s=0.0), num_updates=1)
            for key, (evaluator, found) in plans.items()
        }
        measured = {key: Summary.of(values) for key, values in in_rounds(runs, num_rounds=options.rounds).items()}
    results = [
        {
            "model": model,
            "num_microbatches": count,
            "num_stages": found.layout.num_stages,
            "theorem_s": theorem_s(evaluator, found.layout),
            "simulated_s": found.update_s,
            "rehearsed_s": measured[model, count],
        }
        for (model, count), (evaluator, found) in plans.items()
    ]
    rows = [
        {
            "model": str(each["model"]),
            "M": str(each["num_microbatches"]),
            "stages": str(each["num_stages"]),
            "bound s": f"{each['theorem_s']:.3f}",
            "simulated s": f"{each['simulated_s']:.3f}",
            "rehearsed s": f"{measured[str(each['model']), each['num_microbatches']].median:.3f}",  # type: ignore[index]
            "rehearsed over bound": f"{measured[str(each['model']), each['num_microbatches']].median / each['theorem_s']:.3f}",  # type: ignore[index, operator]
        }
        for each in results
    ]
    print_table("SPP's plans, measured over the theorem's bound", rows)
    return results


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(makers()), default=["vgg16", "gpt-24"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--raypipe", action="store_true", help="also what raypipe plans")
    parser.add_argument("--rehearse", action="store_true", help="run SPP's plans on nodes in network namespaces")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    write_json(options.json, rehearsed(options) if options.rehearse else swept(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
