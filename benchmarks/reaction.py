"""How soon a run reacts to links that change, and what part it gains of what the best fixed way in hindsight gains.

    python benchmarks/reaction.py [--nodes] [--json FILE]        (with --nodes as root, with iproute2)

Four nodes with one port each, 200 Mbit/s for all that leaves and all that enters. Simulated, window by window, with noisy links, layers and
windows (`tests/planning/reaction.py`); with `--nodes` also real, on Ray nodes in network namespaces (`tests/multinode/reacting.py`):

    wire     a stage on all four nodes; a wire between two neighbors of its ring falls to a tenth: sums go round it (`free`), or are
             exchanged directly, which keeps all bits (`exact`)
    port     the port falls that hurts the plan most, to 0.4, or to 0.5, which is what others leave who fill half of it
    constant 20 windows in which nothing changes

"Gained" is the part of what the best fixed way gains that the run gains behind the second window. The best fixed way is the plan or the
pattern that is best for the changed links; with `exact`, of the patterns that keep all bits. On real nodes the run before the change stands
for it, which no way behind the change can beat.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rounds import print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs and clusters are those of the tests

from tests.multinode import reacting
from tests.multinode.ports import nodes_with_ports
from tests.planning import reaction
from tests.planning.reaction import PlanRun, Reaction, StageRun

CONSTANT_WINDOWS = 20
PARTS = (0.5, 0.4)


def simulated() -> dict[str, Reaction]:
    """What simulated runs make of each change."""
    found = {f"wire, {'exact' if exact else 'free'}": reaction.wire_falls(exact=exact) for exact in (False, True)}
    return found | {f"port to {part:g}": reaction.port_falls(part=part)[0] for part in PARTS}


def changes_at_constant_rates() -> dict[str, int]:
    """How often simulated runs change anything in some windows in which nothing changes."""
    found: dict[str, int] = {}
    for exact in (False, True):
        stage = StageRun(exact)
        for _ in range(CONSTANT_WINDOWS):
            stage.window()
        found[f"patterns, {'exact' if exact else 'free'}"] = sum(decision.changes for decision in stage.decisions)
    plan = PlanRun()
    for _ in range(CONSTANT_WINDOWS):
        plan.window()
    return found | {"plans": sum(decision.switch for decision in plan.decisions)}


def on_nodes() -> dict[str, reacting.Reacted]:
    """What real runs make of each change."""
    found: dict[str, reacting.Reacted] = {}
    with nodes_with_ports(cpus_per_node=2) as machines:
        for exact in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found[f"wire, {'exact' if exact else 'free'}"] = reacting.wire_falls(machines, Path(folder), exact=exact)
        for part in PARTS:
            with tempfile.TemporaryDirectory() as folder:
                found[f"port to {part:g}"] = reacting.port_falls(machines, Path(folder), part=part)
    return found


def row(name: str, before_s: float, fixed_s: float, adapted_s: float, best_s: float, gained: float) -> dict[str, str]:
    """One line of the table."""
    return {
        "change": name,
        "s before": f"{before_s:.4f}",
        "s if it stays": f"{fixed_s:.4f}",
        "s adapted": f"{adapted_s:.4f}",
        "s of the best": f"{best_s:.4f}",
        "gained": f"{gained:.2f}",
    }


def main() -> None:
    """Prints a table of the simulated runs, and one of the real ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", action="store_true", help="also real runs, in network namespaces")
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"constant": changes_at_constant_rates()}
    rows = [{"what": name, "changes": str(count)} for name, count in document["constant"].items()]
    print_table(f"simulated: {CONSTANT_WINDOWS} windows at constant rates", rows)
    found = simulated()
    print_table(
        "simulated: seconds of an update",
        [row(name, one.before_s, one.fixed_s, max(one.windows_s[2:]), one.best_s, one.gained) for name, one in found.items()],
    )
    document["simulated"] = {name: asdict(one) | {"gained": one.gained} for name, one in found.items()}
    if arguments.nodes:
        real = on_nodes()
        print_table(
            "on nodes: seconds of an update",
            [row(name, one.before_s, one.fixed_s, one.adapted_s, one.before_s, one.gained(one.before_s)) for name, one in real.items()],
        )
        document["on_nodes"] = {name: asdict(one) | {"gained": one.gained(one.before_s)} for name, one in real.items()}
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
