"""Plans for GPU clusters and cloud zones that others measured: seconds of an update of each planner's plan, simulated, over raypipe's.

    python benchmarks/measured_planning.py [--cases NAME ...] [--json FILE]

Layer times, memory and links are Sailor's (`data/measured_clusters`, SOURCE.txt there). A device is a group of GPUs with tensor parallelism
inside. All planners are told what they usually are, may recompute, and are judged by the same simulator within memory (`planning.py`).
A dash: the planner proposes nothing, or nothing that fits.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from measured_clusters import DATA
from planning import OWN, compare
from rounds import print_table, write_json

from raypipe.planning.planners import PLANNERS
from raypipe.planning.problem import Problem
from raypipe.profiling.sailor import SailorData, parse_nodes


@dataclass(frozen=True)
class Case:
    """A model on a cluster, and the size of an update.

    Attributes:
        nodes: As `raypipe.profiling.sailor.parse_nodes` reads them.
        tensor_parallel: GPUs of a device.
        num_rows: Rows of a microbatch, a measured number.
        num_microbatches: Microbatches of an update.
    """

    model: str
    nodes: str
    tensor_parallel: int
    num_rows: int
    num_microbatches: int

    def problem(self, data: SailorData) -> Problem:
        """The planning problem."""
        nodes = parse_nodes(self.nodes)
        kinds = {node.gpu for node in nodes}
        profile = data.profile(self.model, microbatch_size=self.num_rows, tensor_parallel=self.tensor_parallel, gpu=nodes[0].gpu)
        if missing := kinds - profile.device_kinds.keys():
            raise SystemExit(f"{self.model} was not measured on {', '.join(sorted(missing))} at this size; choose another")
        topology = data.topology(nodes, tensor_parallel=self.tensor_parallel)
        return Problem(profile, topology, self.num_microbatches, self.num_rows)


CASES = {
    "OPT-350M, 8 GH200 nodes": Case("OPT-350", "GH-96x4@us-central1-a*8", 4, 8, 16),
    "OPT-350M, RTX and Titan nodes": Case(
        "OPT-350", "RTX-3090x8@us-central1-a,RTX-2080x8@us-central1-a*2,Titan-RTXx8@us-central1-a", 8, 8, 32
    ),
    "OPT-350M, A100 and V100, two regions": Case(
        "OPT-350",
        "A100-40x4@us-central1-a,V100-16x4@us-central1-a,A100-40x4@us-west1-b,V100-16x4@us-west1-b",
        2,
        4,
        32,
    ),
    "GPT-Neo 2.7B, A100, three zones": Case(
        "GPT-Neo-2.7", "A100-40x4@us-central1-a*4,A100-40x4@us-central1-b*2,A100-40x4@us-central1-c*2", 4, 2, 32
    ),
    "GPT-Neo 2.7B, A100 and V100, two regions": Case("GPT-Neo-2.7", "A100-40x4@us-central1-a*4,V100-16x4@us-west1-b*4", 4, 2, 32),
    "GPT-Neo 2.7B, 8 GH200 nodes": Case("GPT-Neo-2.7", "GH-96x4@us-central1-a*8", 4, 8, 16),
    "OPT-30B, 8 A100 nodes": Case("OPT-30", "A100-40x4@us-central1-a*8", 4, 2, 32),
    "OPT-30B, A100 and V100, two zones": Case("OPT-30", "A100-40x4@us-central1-a*4,V100-16x4@us-central1-b*4", 4, 2, 32),
    "Llama-3 8B, 4 GH200 nodes": Case("LLAMA-3-8", "GH-96x4@us-central1-a*4", 4, 2, 16),
    "Llama-3 8B, A100, two regions": Case("LLAMA-3-8", "A100-40x4@us-central1-a*4,A100-40x4@us-west1-b*4", 4, 2, 32),
}


def row(name: str, found: dict[str, Any]) -> dict[str, str]:
    times = found["times"]
    own_s, best_s = times[OWN], times.get(found["best"])
    return {
        "case": name,
        "raypipe s": "-" if own_s is None else f"{own_s:.4g}",
        **{
            planner.name: "-" if times[planner.name] is None or own_s is None else f"{times[planner.name] / own_s:.2f}"
            for planner in PLANNERS
            if planner.name != OWN
        },
        "best": "-" if best_s is None or own_s is None else f"{best_s / own_s:.3f}",
        "over bound": "-" if own_s is None else f"{own_s / found['bound_s']:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", help="file for all values")
    options = parser.parse_args()
    data = SailorData(DATA)
    rows, results = [], []
    for name in options.cases:
        found = compare(CASES[name].problem(data))
        results.append({"case": name, **found})
        rows.append(row(name, found))
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()) + f", plan {found['plan']}", flush=True)
    print_table("Update time over raypipe's, simulated", rows)
    gains = [found["times"][found["best"]] / found["times"][OWN] for found in results if found["best"]]
    print(f"best / raypipe: geometric mean {statistics.geometric_mean(gains):.3f}, least {min(gains):.3f}, most {max(gains):.3f}")
    write_json(options.json, results)


if __name__ == "__main__":
    main()
