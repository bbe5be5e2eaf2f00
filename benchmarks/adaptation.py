"""A run that adapts, on four nodes whose links change: against the best fixed way in hindsight, and whether noise makes it switch.

    python benchmarks/adaptation.py [--windows 20] [--drop-to 0.1] [--fixed 4] [--json FILE]        (as root, with iproute2)

Four Ray nodes in network namespaces, 200 Mbit/s from each to each other one; a model whose layers wait instead of computing, messages of
400 kB, eight microbatches an update, ten updates a window (`tests/multinode/adapting_run.py`). Three parts:

    constant   so many windows at constant rates: how often it switches, and how far the figures that it decides by scatter
    drop       after three windows the link between the first two stages' nodes drops, both ways: when it switches, and where it ends
    hindsight  fixed plans made for the dropped rates, each schedule's best, the best predicted of which are run

Printed are medians over windows of the seconds of an update, with half the distance of the quartiles.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rounds import Summary, print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cluster in namespaces is made by the tests' own tools

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology, Link
from raypipe.errors import PlanError
from raypipe.planning.plan import plan_problem
from raypipe.planning.problem import Problem
from raypipe.planning.search import SearchBudget
from tests.multinode.adapting_run import Settings
from tests.multinode.cluster import Cluster, cluster
from tests.on_ray.plans import lab

RATE = 25e6
GOODPUT = 0.992
LATENCY_S = 4e-4
SCHEDULES = ("1f1b", "list", "zb-h1", "zb-h2", "interleaved", "zb-v", "chimera", "async-1f1b", "async-interleaved", "pipedream-2bw", "amdp")
UPDATES_PER_WINDOW = 10
FIXED_WINDOWS = 4
DROP_AFTER = 3
WINDOWS_AFTER = 7

Watcher = Callable[[dict[str, Any]], None]


def topology(slow: tuple[str, str] | None = None, part: float = 1.0) -> ClusterTopology:
    """Four nodes; the links between the two nodes of `slow` carry `part` of the others' rate."""
    names = [f"node{number}" for number in range(4)]
    links = [
        Link(
            source=a,
            target=b,
            bandwidth_bytes_per_s=RATE * GOODPUT * (part if slow in {(a, b), (b, a)} else 1.0),
            latency_s=LATENCY_S,
            one_way=True,
        )
        for a in names
        for b in names
        if a != b
    ]
    return lab(dict.fromkeys(names, 1), links=links)


def run(
    machines: Cluster, folder: Path, num_updates: int, plan: Path | None = None, watch: Watcher = lambda _: None
) -> list[dict[str, Any]]:
    """What a run says, line by line; it adapts if no plan is given."""
    lines: list[dict[str, Any]] = []
    settings = Settings(num_updates, UPDATES_PER_WINDOW, adapts=plan is None, plan=None if plan is None else str(plan))
    with machines.start(settings.command(folder / "topology.yaml", folder)) as run:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(json.loads(line))
            watch(lines[-1])
    if "path" not in lines[-1]:
        raise SystemExit(f"the run ended early; its last line: {lines[-1]}")
    return lines


def updates(lines: list[dict[str, Any]], *, after: int = 0) -> Summary:
    """Seconds of an update over the windows that ended later; the first of all is left out."""
    return Summary.of([line["update_s"] for line in lines if line.get("update", 0) > max(after, UPDATES_PER_WINDOW)])


def decisions(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the policy said after each window."""
    return [json.loads(line) for line in (Path(lines[-1]["path"]) / "adaptation.jsonl").read_text().splitlines()]


def noise(found: list[dict[str, Any]]) -> dict[str, float]:
    """Standard deviations of the logarithms of what was decided by, over the windows of a run at constant rates."""

    def deviation(values: list[float]) -> float:
        return statistics.pstdev(map(math.log, values))

    return {
        "update_s": deviation([line["update_s"] for line in found]),
        "link estimates, the noisiest": max(
            deviation([line["links_bytes_per_s"][name] for line in found]) for name in found[0]["links_bytes_per_s"]
        ),
        "speeds, the noisiest": max(deviation([line["speeds"][name] for line in found]) for name in found[0]["speeds"]),
    }


def fixed_plans(folder: Path, adapted: Path, slow: tuple[str, str], part: float) -> list[tuple[str, float, Path]]:
    """Each schedule's best plan for the rates after the drop: name, predicted seconds and file, the best first."""
    began = Plan.load(next(iter(sorted(adapted.glob("plan-until-update-*.json"))), adapted / "plan.json"))
    problem = Problem(
        began.profile,
        topology(slow, part),
        began.schedule.num_microbatches,
        began.microbatch_size,
        max_staleness=1,
        max_mismatch=1,
        updates_per_window=UPDATES_PER_WINDOW,
    )
    found: list[tuple[str, float, Path]] = []
    for name in SCHEDULES:
        try:
            plan = plan_problem(problem, schedule=name, budget=SearchBudget.usual(problem, effort=0.5))
        except PlanError:
            continue  # it cannot take this size, or is staler than allowed
        assert plan.predicted is not None
        found.append((name, plan.predicted.update_s, folder / f"{name}.json"))
        plan.save(found[-1][2])
    return sorted(found, key=lambda plan: plan[1])


def main() -> None:
    """Runs the three parts and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20, help="at constant rates")
    parser.add_argument("--drop-to", type=float, default=0.1, metavar="PART", help="of the rate")
    parser.add_argument("--fixed", type=int, default=4, help="fixed plans that are run")
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, cluster(nodes=4, cpus_per_node=2, rates=RATE) as machines:
        folder = Path(name)
        topology().save(folder / "topology.yaml")
        constant = run(machines, folder, (arguments.windows + 2) * UPDATES_PER_WINDOW)
        asked = decisions(constant)
        document["constant"] = {"windows": len(asked), "switches": sum(line["switch"] for line in asked), **noise(asked)}
        print_table(
            f"{len(asked)} windows at constant rates",
            [{"figure": figure, "value": f"{value:.3g}"} for figure, value in document["constant"].items()],
        )

        # The first two stages' nodes, as they were chosen.
        plan = Plan.load(Path(constant[-1]["path"]) / "plan.json")
        slow = (plan.topology.node_of(plan.devices[0]).name, plan.topology.node_of(plan.devices[1]).name)
        pair = (int(slow[0][-1]), int(slow[1][-1]))

        def drop(line: dict[str, Any]) -> None:
            if line.get("update") == DROP_AFTER * UPDATES_PER_WINDOW:
                set_pair(machines, pair, RATE * arguments.drop_to)

        adapted = run(machines, folder, (DROP_AFTER + WINDOWS_AFTER) * UPDATES_PER_WINDOW, watch=drop)
        switches = [line for line in decisions(adapted) if line["switch"]]
        for line in switches:
            print(f"after update {line['update']}, in {line['took_s']:.1f} s: {line['text']}")
        after = updates(
            adapted, after=max([line["update"] for line in switches], default=DROP_AFTER * UPDATES_PER_WINDOW) + UPDATES_PER_WINDOW
        )
        rows = [
            row(
                "adapts, before the drop",
                Summary.of([line["update_s"] for line in adapted if 10 < line.get("update", 0) <= 10 * DROP_AFTER]),
            )
        ]
        rows.append(row("adapts, at the end", after, after))
        document["drop"] = {"switches": switches, "update_s": [line["update_s"] for line in adapted if "update" in line]}

        set_pair(machines, pair, RATE * arguments.drop_to)
        document["fixed"] = {}
        for schedule, predicted_s, path in fixed_plans(folder, Path(adapted[-1]["path"]), slow, arguments.drop_to)[: arguments.fixed]:
            measured = updates(run(machines, folder, FIXED_WINDOWS * UPDATES_PER_WINDOW, path))
            rows.append(row(f"fixed: {schedule}", measured, after, predicted_s))
            document["fixed"][schedule] = {"predicted_s": predicted_s, "update_s": measured.median, "spread": measured.spread}
        print_table(f"the link {slow[0]} - {slow[1]} drops to {arguments.drop_to:g} of its rate", rows)
    write_json(arguments.json, document)


def set_pair(machines: Cluster, pair: tuple[int, int], rate: float) -> None:
    """Sets the rates between two nodes, both ways."""
    machines.set_rate(*pair, rate)
    machines.set_rate(*pair[::-1], rate)


def row(name: str, measured: Summary, against: Summary | None = None, predicted_s: float | None = None) -> dict[str, str]:
    """One line of the table."""
    return {
        "run": name,
        "s per update": f"{measured.median:.4f}",
        "spread": f"{measured.spread:.4f}",
        "predicted": f"{predicted_s:.4f}" if predicted_s else "",
        "the adapted run over it": f"{against.median / measured.median:.3f}" if against else "",
    }


if __name__ == "__main__":
    main()
