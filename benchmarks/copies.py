"""What copies of a run's state in the memory of other nodes cost: seconds of an update, and processor time.

    python benchmarks/copies.py [--seconds S] [--rounds N] [--json FILE]

as root, with iproute2. Four Ray nodes in network namespaces of this machine, one stage of a small GPT each, which is the run of
`benchmarks/chaos.py`, with copies of the state and without, in turn. Processor time is that of all processes of the nodes, by what they
are, over updates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos import NUM_NODES, NUM_UPDATES, PATIENCE_S, Run, calm_losses
from rounds import in_rounds, print_table, write_json

from raypipe.data.prepare import prepare
from tests.multinode.cluster import Cluster, cluster

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MODES = {"without copies": "restart", "with copies": "copies"}
WARM_UPDATES = 100


def processor_s(machines: Cluster) -> dict[str, float]:
    """Seconds that the processes of all nodes have computed, by what they are."""
    found: dict[str, float] = defaultdict(float)
    for node in range(NUM_NODES):
        for pid in machines.pids(node):
            with suppress(OSError):
                name, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").partition("(")[2].rpartition(")")
                ticks = rest.split()[11:13]
                found[what(name)] += sum(map(int, ticks)) / TICKS_PER_S
    return found


def what(name: str) -> str:
    """What a process is, by its name."""
    if name == "raylet":
        return "raylets"
    return "stages" if name.startswith("ray::") else "driver" if name.startswith("python") else "others"


def measure(machines: Cluster, folder: Path, tokens: Path, plan: Path, mode: str, seconds: float) -> dict[str, Any]:
    """Seconds of an update in the median, and processor time over updates, of a run behind its first updates."""
    with tempfile.TemporaryDirectory(dir=folder) as storage:
        run = Run(machines, [storage, str(tokens), str(NUM_UPDATES), mode, str(plan)])
        run.start()
        try:
            if not run.watch(seconds=PATIENCE_S, until=run.has_done(WARM_UPDATES)):
                raise SystemExit(f"the run is too slow:\n{run.problem}")
            before, first, since_s = processor_s(machines), len(run.updates), time.monotonic()
            run.watch(seconds=seconds)
            after, wall_s = processor_s(machines), time.monotonic() - since_s
        finally:
            run.end()
    done = run.updates[-1][1] - run.updates[first - 1][1]
    return {
        "update_s": statistics.median(update_s for _, _, update_s in run.updates[first:]),
        "wall_s": wall_s / done,
        "processor_s": {name: (after[name] - before.get(name, 0.0)) / done for name in after},
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="for which a run is measured")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="file for all values")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = folder / "tokens.parquet"
        prepare(str(Path(__file__).resolve().parents[1] / "docs"), output=tokens, validation_fraction=0.1)
        _, plan = calm_losses(folder, tokens, num_updates=10, plan=None)
        with cluster(nodes=NUM_NODES, cpus_per_node=1) as machines:
            found = in_rounds(
                {
                    name: lambda mode=mode: measure(machines, folder, tokens, plan, mode, arguments.seconds)  # type: ignore[misc]
                    for name, mode in MODES.items()
                },
                num_rounds=arguments.rounds,
            )
    rows = []
    for name, values in found.items():
        kinds = sorted({kind for value in values for kind in value["processor_s"]})
        rows.append({
            "run": name,
            "seconds of an update (ms)": f"{1e3 * statistics.median(value['update_s'] for value in values):.1f}",
            "between two updates (ms)": f"{1e3 * statistics.median(value['wall_s'] for value in values):.1f}",
            "processor time (ms)": f"{1e3 * statistics.median(sum(value['processor_s'].values()) for value in values):.1f}",
            **{kind: f"{1e3 * statistics.median(value['processor_s'].get(kind, 0.0) for value in values):.1f}" for kind in kinds},
        })
    print_table("over updates", rows)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
