"""Communication at scale, simulated: large models on nodes of eight devices with one port each.

    python benchmarks/communication_scale.py [--models gpt bert] [--nodes 2 3 4] [--gbits 10 25 100] [--microbatches 8 16] [--json FILE]

The GPT of 1.56 and the BERT of 1.04 thousand million parameters of `async.py` (layers counted in `models.py`), on nodes of eight A800
with NVLink, all that leaves or enters a node on one port. As many copies of each stage as there are nodes; every copy has four
sequences of a microbatch, so that an update has 4 x nodes x microbatches sequences. Updates wait for their own stage. Each system runs
with eight stages in each node, so that sums pass the ports; with the copies of a stage side by side, so that messages pass them; and so
with the mirrored stages 0 and 7, 1 and 6 and so on beside each other, for schedules with pipelines in two directions. The fastest is told.

    a          pipedream-2bw, its sum awaited behind the last backward
    a'         the same with each U where its version is first read
    b          1F1B with a flush and the sum behind it
    2bw        pipedream-2bw as raypipe plans it: transfers in turns, U where its version is first read, forwards ahead
    amdp-auto, chimera, zb-v      as raypipe plans them, with transfers in turns: of several numbers of pipelines the fastest, U as few
               slots later as make it nearly that, stages balanced over the devices

a, a' and b share links as plain TCP does. Times are those of an update far from the ends of a window. Exposed is what a device waits
for transfers, in the mean over devices, by what they carry, in a whole window over its updates. "Ideal" is a's busiest device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from async_cases import LATENCY_S, ROWS, SHAPES, STATE, profile_of
from rounds import print_table, write_json

from raypipe.analysis.idle import divide
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, node_ports
from raypipe.artifacts.trace import Dimension
from raypipe.communication.policy import SCHEDULED, Communication
from raypipe.planning import chunks
from raypipe.planning.evaluator import LayoutEvaluator
from raypipe.planning.late import with_hidden_transfers
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.problem import Devices, Problem
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import lower
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.simulator import Timing, time_order

DEVICES_PER_NODE = 8
NUM_UPDATES = 12
PLAIN = Communication(scheduled=False)
MOST_STEPS = 3
"""Of the search for forwards ahead."""
PLANNED = ("pipedream-2bw", "amdp-auto", "chimera", "zb-v")


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: str
    num_nodes: int
    gbits: float
    num_microbatches: int

    def topology(self) -> ClusterTopology:
        """Return nodes of A800 whose ports carry all that leaves and all that enters them."""
        names = [f"node{number}" for number in range(self.num_nodes)]
        nodes = tuple(
            Node(
                name=name,
                devices=tuple(Device(f"{name}/{number}", "gpu", 80_000_000_000) for number in range(DEVICES_PER_NODE)),
                link=NodeLink(bandwidth_bytes_per_s=200e9, latency_s=LATENCY_S),
            )
            for name in names
        )
        ports = node_ports(dict.fromkeys(names, 1e9 / 8 * self.gbits))
        link = NodeLink(bandwidth_bytes_per_s=None, latency_s=2 * LATENCY_S)
        return ClusterTopology(name="A800", nodes=nodes, shared_links=ports, default_link=link)

    def problem(self, profile: ModelProfile) -> Problem:
        """Return the planning problem: four rows of a microbatch for each copy."""
        return Problem(
            profile,
            self.topology(),
            self.num_microbatches,
            ROWS * self.num_nodes,
            state_bytes_per_parameter_byte=STATE,
            updates_per_window=NUM_UPDATES,
            max_staleness=1,
            update_scope=UpdateScope.STAGE,
        )

    def workers(self) -> dict[str, tuple[Devices, ...]]:
        """Return the devices of each worker: copies of a stage on different nodes, side by side, and with those of the mirrored stage."""
        stages, copies = range(DEVICES_PER_NODE), self.num_nodes
        folded = sorted(stages, key=lambda stage: (min(stage, DEVICES_PER_NODE - 1 - stage), stage))
        return {
            "apart": tuple(tuple(copy * DEVICES_PER_NODE + stage for copy in range(copies)) for stage in stages),
            "together": tuple(tuple(stage * copies + copy for copy in range(copies)) for stage in stages),
            "folded": tuple(tuple(folded.index(stage) * copies + copy for copy in range(copies)) for stage in stages),
        }


@dataclass(frozen=True)
class Found:
    """A system's layout with its copies apart or together, and the times of a window."""

    layout: Layout
    copies: str
    timing: Timing
    missing_bytes: float

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: what fits first, then what is faster."""
        return self.missing_bytes, self.timing.steady_update_s

    def figures(self) -> dict[str, Any]:
        """Return seconds of an update, and seconds that a device waits for transfers in it."""
        timing, layout = self.timing, self.layout
        exposed: dict[str, float] = dict.fromkeys(map(str, Dimension), 0.0)
        for of_device in divide(timing.trace(name="scale", num_updates=NUM_UPDATES, with_memory=False)).exposed_s:
            for carried, seconds in of_device.items():
                exposed[str(carried)] += seconds / NUM_UPDATES / len(timing.busy_s)
        return {
            "update_s": timing.steady_update_s,
            "exposed_s": exposed,
            "busiest_s": max(timing.busy_s) / NUM_UPDATES,
            "copies": self.copies,
            "num_pipelines": layout.num_pipelines,
            "late": layout.late,
            "forwards_ahead": layout.forwards_ahead if layout.ahead else [],
            "missing_bytes": self.missing_bytes,
        }


def of_window(evaluator: LayoutEvaluator, layout: Layout, copies: str, communication: Communication) -> Found:
    """Time a whole window of a layout."""
    problem, workers = evaluator.problem, layout.placement(evaluator.problem)
    simulated = evaluator.simulate(layout)
    assert workers is not None, "each copy has rows"
    assert simulated is not None, "its schedule takes the size"
    order = CompiledOrder(lower(layout_schedule(problem, simulated.layout, num_updates=NUM_UPDATES), workers))
    timing = time_order(order, replace(simulated.timing.cost, communication=communication))
    return Found(simulated.layout, copies, timing, max(evaluator.lacking_bytes(simulated.layout, lambda: timing.peak_memory_bytes)))


def baselines(evaluator: LayoutEvaluator, workers: tuple[Devices, ...], copies: str) -> Iterator[tuple[str, Found]]:
    """Yield the baselines by name."""
    for name, order, late in (("a", "pipedream-2bw", 0), ("a'", "pipedream-2bw", None), ("b", "1f1b", None)):
        for layout in chunks.layouts(evaluator, workers, order):
            yield name, of_window(evaluator, replace(layout, late=late), copies, PLAIN)


def planned(evaluator: LayoutEvaluator, workers: tuple[Devices, ...], copies: str) -> Iterator[tuple[str, Found]]:
    """Yield what raypipe plans, by schedule: forwards ahead and late U where they hide transfers."""
    for order in PLANNED:
        for layout in chunks.layouts(evaluator, workers, order):
            evaluation = with_hidden_transfers(evaluator, evaluator.simulate(layout), most_steps=MOST_STEPS)
            if evaluation is not None:
                yield "2bw" if order == "pipedream-2bw" else order, of_window(evaluator, evaluation.layout, copies, SCHEDULED)


def simulated(case: Case) -> dict[str, Any]:
    """Return the figures of all systems of a case."""
    began_s = time.perf_counter()
    evaluator = LayoutEvaluator(case.problem(profile_of(case.model)))
    best: dict[str, Found] = {}
    for copies, workers in case.workers().items():
        for name, found in chain(baselines(evaluator, workers, copies), planned(evaluator, workers, copies)):
            if name not in best or found.rank < best[name].rank:
                best[name] = found
    systems = {name: found.figures() for name, found in best.items()}
    ours_s = systems["2bw"]["update_s"]
    over = {name: system["update_s"] / ours_s for name, system in systems.items() if name != "2bw"}
    return {
        "model": case.model,
        "num_nodes": case.num_nodes,
        "gbits": case.gbits,
        "num_microbatches": case.num_microbatches,
        "systems": systems,
        "over": over,
        "ideal_s": systems["a"]["busiest_s"],
        "simulated_in_s": time.perf_counter() - began_s,
    }


def row_of(result: dict[str, Any]) -> dict[str, str]:
    """Return a line of the table: milliseconds, and in brackets those exposed for messages and sums; `t`, `f`: copies together, folded."""

    def cell(system: dict[str, Any]) -> str:
        exposed = system["exposed_s"]
        waits = f"{1000 * exposed['message']:.0f}+{1000 * (exposed['sum'] + exposed['norm']):.0f}"
        return f"{1000 * system['update_s']:.0f} ({waits}){'' if system['copies'] == 'apart' else ' ' + system['copies'][0]}"

    systems = result["systems"]
    return {
        "model": result["model"],
        "nodes": str(result["num_nodes"]),
        "Gbit/s": f"{result['gbits']:g}",
        "M": str(result["num_microbatches"]),
        "ideal": f"{1000 * result['ideal_s']:.0f}",
        **{name: cell(systems[name]) for name in ("a", "a'", "b", "2bw", "amdp-auto", "chimera", "zb-v") if name in systems},
        "over a, a', b": ", ".join(f"{result['over'][name]:.2f}" for name in ("a", "a'", "b")),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--gbits", nargs="+", type=float, default=[10.0, 25.0, 100.0], help="of each node's port")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    cases = [Case(*each) for each in product(options.models, options.nodes, options.gbits, options.microbatches)]
    results = []
    for case in cases:
        results.append(simulated(case))
        print(json.dumps(row_of(results[-1])), file=sys.stderr)
    print_table(
        "ms of an update (exposed for messages + sums), simulated; copies of a stage t: together, f: folded, else apart",
        [row_of(each) for each in results],
    )
    write_json(options.json, results)


if __name__ == "__main__":
    main()
