"""One hop of a pipeline gets more delay each way: an order that is adapted to it, against the order as it was.

    python benchmarks/slow_hop.py [--simulate] [--orders 1f1b amdp] [--devices 4] [--json FILE]
    python benchmarks/slow_hop.py --rehearse [--devices 4] [--delays 1 2] [--rounds 1] [--json FILE]      # as root, with iproute2
    python benchmarks/slow_hop.py --adapt [--devices 4] [--delays 1 2] [--json FILE]                      # as root, with iproute2

Equal stages with F 20 ms, B 40 ms and messages of 40 kB, one a device, M = 4 D microbatches; half of the devices are on one node, half
on another one. The hop between the nodes takes 0.5, 1 or 2 F more each way, so that no placement avoids it.

`--simulate`: the best layout of an order without the delay, and the best one with it, both with the delay; their seconds, and the gain.
`--rehearse`: both as actors of a Ray cluster in network namespaces, where relays hold every packet between the two nodes for that time.
`--adapt`: a run of 1f1b with the same times in which the delay begins behind the second window, once adapting, once as it began.

After PipeMorph (NSDI 2026), whose measure of a delay in F this is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rounds import Summary, in_rounds, print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cluster in namespaces is made by the tests' own tools

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Link
from raypipe.artifacts.trace import Trace
from raypipe.planning.chunks import layouts
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.late import with_hidden_transfers
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.problem import Problem
from tests.multinode.adapting_run import Settings
from tests.multinode.cluster import Cluster, cluster
from tests.on_ray.plans import lab

F_S = 0.02
RATE_BYTES_PER_S = 250e6
LATENCY_S = 3e-4
WIDTH = 10_000
"""Numbers of a message, of 4 bytes."""
DELAYS = (0.5, 1.0, 2.0)
ORDERS = ("1f1b", "zb-h1", "pipedream-2bw", "amdp")
WINDOW = 2
"""Updates of a window, where updates do not overlap."""
DELAY_AFTER = 2
WINDOWS_AFTER = 6
HORIZON = 200
"""Updates that a run is told to take; it is ended before. A switch must pay in those that are left."""


@dataclass(frozen=True)
class Case:
    """An order on so many devices, and the delay of the hop in the middle in F."""

    order: str
    num_devices: int
    delay: float

    def topology(self, delay: float) -> ClusterTopology:
        """Return two nodes with half of the devices each."""
        link = Link(source="node0", target="node1", bandwidth_bytes_per_s=RATE_BYTES_PER_S, latency_s=LATENCY_S + delay * F_S)
        return lab({"node0": self.num_devices // 2, "node1": self.num_devices // 2}, links=[link])

    def evaluator(self, delay: float) -> LayoutEvaluator:
        """Return what simulates layouts with a delay."""
        profile = ModelProfile.uniform(
            self.num_devices, forward_s=F_S, backward_s=2 * F_S, weight_grad_s=F_S, output_bytes=4 * WIDTH, parameter_bytes=4000
        )
        # As stale as pipedream-2bw is, and amdp's own order.
        problem = Problem(profile, self.topology(delay), 4 * self.num_devices, 1, max_staleness=1, max_mismatch=1, updates_per_window=8)
        return LayoutEvaluator(problem)

    def best(self, delay: float) -> Evaluation:
        """Return the best layout of the order with a delay, stages on the devices as they come."""
        evaluator, size = self.evaluator(delay), self.num_devices
        as_they_come = layouts(evaluator, tuple((device,) for device in range(size)), self.order)
        tried = [with_hidden_transfers(evaluator, evaluator.simulate(layout), most_steps=20) for layout in as_they_come]
        return min((one for one in tried if one is not None), key=seconds)

    def both(self) -> tuple[Evaluation, Evaluation]:
        """Return the layout that was best without the delay, and the one that is best with it, both with it."""
        kept = self.evaluator(self.delay).simulate(self.best(0.0).layout)
        assert kept is not None, "it was valid without"
        return kept, self.best(self.delay)

    def plan(self, evaluation: Evaluation) -> Plan:
        """Return the plan of a layout."""
        return self.evaluator(self.delay).plan(evaluation, planner="given", lower_bound_s=0.0)


def seconds(evaluation: Evaluation) -> float:
    """Return the seconds of an update, far from the ends of a window where updates overlap."""
    return evaluation.timing.steady_update_s if evaluation.num_updates > 1 else evaluation.update_s


def described(evaluator: LayoutEvaluator, layout: Layout) -> str:
    """Return what adapts an order: its forwards ahead, or the number of its pipelines."""
    schedule = layout_schedule(evaluator.problem, layout, num_updates=1)
    return f"{len(schedule.pipelines)} pipelines" if len(schedule.pipelines) > 1 else " ".join(map(str, layout.forwards_ahead))


def simulated(case: Case) -> dict[str, Any]:
    """Return the seconds of an update of both layouts, and the gain."""
    kept, adapted = case.both()
    return {
        "order": case.order,
        "num_devices": case.num_devices,
        "delay": case.delay,
        "kept_s": seconds(kept),
        "adapted_s": seconds(adapted),
        "gain": seconds(kept) / seconds(adapted),
        "adapted": described(case.evaluator(case.delay), adapted.layout),
    }


def rehearsed(cases: list[Case], *, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of an update of both layouts as actors, with the simulated ones; all cases have as many devices."""
    found = []
    with cluster(nodes=2, cpus_per_node=cases[0].num_devices // 2) as machines:
        for case in cases:
            delay_both_ways(machines, case.delay * F_S)
            commands = {}
            for name, evaluation in zip(("kept", "adapted"), case.both(), strict=True):
                path = machines.folder / f"{name}.json"
                case.plan(evaluation).save(path)
                trace = str(path.with_suffix(".trace.json"))
                updates = ["--updates", str(WINDOW)] if evaluation.num_updates == 1 else []
                commands[name] = [sys.executable, "-m", "raypipe", "rehearse", str(path), *updates, "--json", "-o", trace]
            values = in_rounds({name: partial(_rehearse, machines, command) for name, command in commands.items()}, num_rounds=rounds)
            medians = {name: Summary.of(of_name) for name, of_name in values.items()}
            found.append(
                simulated(case)
                | {"rehearsed_kept_s": medians["kept"], "rehearsed_adapted_s": medians["adapted"]}
                | {"rehearsed_gain": medians["kept"].median / medians["adapted"].median}
            )
            print_table("rehearsed", [row(found[-1])])
    return found


def _rehearse(machines: Cluster, command: list[str]) -> float:
    machines.run(command, timeout_s=300)
    trace = Trace.load(command[-1])
    steady_s = trace.steady_update_s if trace.num_updates > WINDOW else None
    return steady_s or trace.update_s


def delay_both_ways(machines: Cluster, delay_s: float) -> None:
    """Let the hop between the nodes take so much longer, or no longer than before."""
    for pair in ((0, 1), (1, 0)):
        machines.set_rate(*pair, RATE_BYTES_PER_S)
        machines.set_delay(*pair, delay_s or None)


def adapted(case: Case) -> dict[str, Any]:
    """Return what a run does in which the delay begins: the seconds of an update of each window, adapting and as it began."""
    with cluster(nodes=2, cpus_per_node=case.num_devices // 2) as machines, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.topology(0.0).save(folder / "topology.yaml")
        runs = {way: adapting_run(machines, case, folder, adapts=way == "adapting") for way in ("adapting", "kept")}
    switches = [decision for decision in runs["adapting"]["decisions"] if decision["switch"]]
    kept_s = statistics.median(runs["kept"]["update_s"][DELAY_AFTER + 1 :])
    switched = (switches[0]["update"] // WINDOW if switches else DELAY_AFTER) + 1
    adapted_s = statistics.median(runs["adapting"]["update_s"][switched:])
    return {
        "order": case.order,
        "num_devices": case.num_devices,
        "delay": case.delay,
        "switched_after_windows": [switch["update"] // WINDOW - DELAY_AFTER for switch in switches],
        "texts": [switch["text"] for switch in switches],
        "kept_s": kept_s,
        "adapted_s": adapted_s,
        "gain": kept_s / adapted_s,
        "runs": {way: run["update_s"] for way, run in runs.items()},
        "decisions": runs["adapting"]["decisions"],
    }


def adapting_run(machines: Cluster, case: Case, folder: Path, *, adapts: bool) -> dict[str, Any]:
    """Return the seconds of an update of each window, and the decisions of a run in which the delay begins behind a window."""
    delay_both_ways(machines, 0.0)
    settings = Settings(
        num_layers=case.num_devices,
        width=WIDTH,
        forward_s=F_S,
        input_grad_s=F_S,
        weight_grad_s=F_S,
        num_microbatches=4 * case.num_devices,
        num_devices=case.num_devices,
        updates_per_window=WINDOW,
        num_updates=HORIZON,
        schedule=case.order,
        adapts=adapts,
        among=(case.order,),
    )
    update_s: list[float] = []
    with machines.start(settings.command(folder / "topology.yaml", storage := folder / f"{adapts}")) as run:
        assert run.stdout is not None
        for line in run.stdout:
            told = json.loads(line)
            update_s += [told["update_s"]] if "update_s" in told else []
            if told.get("update") == DELAY_AFTER * WINDOW:
                delay_both_ways(machines, case.delay * F_S)
            if len(update_s) == DELAY_AFTER + WINDOWS_AFTER:
                break
        else:
            assert run.stderr is not None
            raise SystemExit(f"the run ended early:\n{run.stderr.read()[-2000:]}")
    decisions = [json.loads(line) for path in storage.rglob("adaptation.jsonl") for line in path.read_text().splitlines()]
    return {"update_s": update_s, "decisions": decisions}


def row(result: dict[str, Any]) -> dict[str, str]:
    """Return a line of the table."""
    told = {"order": result["order"], "D": str(result["num_devices"]), "delay F": f"{result['delay']:g}"}
    told |= {f"{way} ms": f"{1000 * result[f'{way}_s']:.0f}" for way in ("kept", "adapted")}
    told |= {"gain": f"{result['gain']:.2f}"}
    if "adapted" in result:
        told |= {"ahead": result["adapted"]}
    if "rehearsed_gain" in result:
        of_way = {way: result[f"rehearsed_{way}_s"] for way in ("kept", "adapted")}
        told |= {f"rehearsed {way}": f"{1000 * each.median:.0f} +-{1000 * each.spread:.0f}" for way, each in of_way.items()}
        told |= {f"{way} / simulated": f"{each.median / result[f'{way}_s']:.3f}" for way, each in of_way.items()}
        told |= {"rehearsed gain": f"{result['rehearsed_gain']:.2f}"}
    if "switched_after_windows" in result:
        told |= {"windows until it switched": " ".join(map(str, result["switched_after_windows"]))}
    return told


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="the table from the simulator; the default")
    parser.add_argument("--rehearse", action="store_true", help="run both orders on nodes in network namespaces")
    parser.add_argument("--adapt", action="store_true", help="run where the delay begins in the middle")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, help="all if simulated, else 1f1b")
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--delays", nargs="+", type=float, default=list(DELAYS), metavar="F")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    orders = options.orders or (("1f1b",) if options.rehearse or options.adapt else ORDERS)
    results: list[dict[str, Any]] = []
    for size in options.devices:
        cases = [Case(order, size, delay) for order in orders for delay in options.delays]
        if options.rehearse:
            results += rehearsed(cases, rounds=options.rounds)
        else:
            results += [adapted(case) if options.adapt else simulated(case) for case in cases]
    what = "rehearsed" if options.rehearse else "in a run" if options.adapt else "simulated"
    print_table(f"milliseconds of an update with a slow hop, {what}", [row(result) for result in results])
    write_json(options.json, results)


if __name__ == "__main__":
    main()
