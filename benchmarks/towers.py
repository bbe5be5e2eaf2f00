"""Towers of 5 and 20 billion parameters that read each other, on 64 devices of 80 GB over two kinds of links, against branch baselines.

    python benchmarks/towers.py [--systems raypipe distmm ...] [--time-limit 300] [--write FOLDER] [--json FILE]

Towers of that size are what FlexPipe speaks of (co-attention as in ViLBERT; Lu et al., NeurIPS 2019). Counted as in `models.py`, on A100s:
24 blocks of hidden size 4096 and 44 of 6144, sequences of 512, microbatches of 8 rows, 32 of them an update; weights, gradients and two
moments of Adam in single precision, and a copy of the weights in half. At four places each tower reads the other one. Eight nodes of eight
devices: 300 GB/s within a node, 25 GB/s between two nodes.

    raypipe        `raypipe plan`, all orders
    distmm         towers on workers of their own that share the rows (Huang et al., NSDI 2024), as in `branches.py`
    graphpipe      towers on devices of their own (Jeon et al., ASPLOS 2025), as there
    others         the planners of `raypipe plan` that take 64 devices, on a list in which the towers follow each other

`--write` writes profile and topology; the plan is explained by

    raypipe plan --profile towers.json --topology towers.yaml --microbatches 32 --explain
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from branches import Case, Systems
from models import BYTES_PER_NUMBER, Transformer
from rounds import print_table, write_json

from raypipe.artifacts.profile import LayerProfile, ModelProfile, NamedEdge
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink
from raypipe.errors import RaypipeError
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.plan_bound import plan_bound
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve
from raypipe.stopping import Stop, searching

NUM_ROWS, SEQUENCE, NUM_MICROBATCHES, NUM_READS = 8, 512, 32, 4
TOWERS = {
    "small": Transformer(num_blocks=24, hidden=4096, sequence=SEQUENCE, vocabulary=0, num_rows=NUM_ROWS),
    "large": Transformer(num_blocks=44, hidden=6144, sequence=SEQUENCE, vocabulary=0, num_rows=NUM_ROWS),
}
PLANNERS = ("ddp-overlap", "node-pipeline", "1f1b-equal", "gpipe-equal")


def profile() -> ModelProfile:
    """Return both towers, in turns by the work done, and a layer in which they meet."""
    depth: dict[str, float] = {}
    layers: dict[str, LayerProfile] = {}
    for tower, sizes in TOWERS.items():
        blocks = sizes.profile(tower).layers[1:-1]
        for number, block in enumerate(blocks):
            name = f"{tower}-{number}"
            half = block.parameter_bytes
            layers[name] = replace(block, name=name, branch=tower, parameter_bytes=4 * half // BYTES_PER_NUMBER, low_precision_bytes=half)
            depth[name] = number / len(blocks)
    edges = [(f"{tower}-{number - 1}", f"{tower}-{number}") for tower, sizes in TOWERS.items() for number in range(1, sizes.num_blocks)]
    for tower, other in (("small", "large"), ("large", "small")):
        for read in range(1, NUM_READS + 1):
            at, source = (TOWERS[name].num_blocks * read // (NUM_READS + 1) for name in (tower, other))
            edges.append((f"{other}-{source - 1}", f"{tower}-{at}"))
    edges += [(f"{tower}-{sizes.num_blocks - 1}", "joint") for tower, sizes in TOWERS.items()]
    joint = LayerProfile(
        name="joint", forward_s=1e-4, backward_s=2e-4, weight_grad_s=1e-4, output_bytes=4, saved_bytes=BYTES_PER_NUMBER, parameter_bytes=0
    )
    in_turn = sorted(layers, key=lambda name: (depth[name], name))
    return ModelProfile(
        name="towers of 5 and 20 billion",
        microbatch_size=NUM_ROWS,
        layers=(*(layers[name] for name in in_turn), joint),
        named_edges=tuple(NamedEdge(producer=producer, consumer=consumer) for producer, consumer in edges),
    )


def topology() -> ClusterTopology:
    """Return eight nodes of eight devices."""
    nodes = tuple(
        Node(
            name=f"n{number}",
            devices=tuple(Device(f"n{number}/{slot}", "a100", 80_000_000_000) for slot in range(8)),
            link=NodeLink(bandwidth_bytes_per_s=300e9, latency_s=5e-6),
        )
        for number in range(8)
    )
    return ClusterTopology(name="two kinds of links", nodes=nodes, default_link=NodeLink(bandwidth_bytes_per_s=25e9, latency_s=20e-6))


@dataclass(frozen=True)
class Towers(Case):
    """This model as a case of `branches.py`."""

    @property
    def problem(self) -> Problem:
        """The planning problem."""
        return Problem(profile(), topology(), NUM_MICROBATCHES, NUM_ROWS)


def systems(case: Towers, time_limit_s: float | None) -> dict[str, Callable[[], Evaluation | None]]:
    """Return what finds the layout of each system."""
    of_branches = Systems(case)

    def planned(name: str) -> Evaluation | None:
        with searching(Stop.after(time_limit_s)):
            return solve(LayoutEvaluator(case.problem), name=name)

    found: dict[str, Callable[[], Evaluation | None]] = {name: partial(planned, name) for name in ("raypipe", *PLANNERS)}
    return found | {"distmm": of_branches.distmm, "graphpipe": of_branches.graphpipe}


def main() -> int:
    """Run the benchmark."""
    case = Towers(64, "1:1", "co-attention", 0.0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=("raypipe", *PLANNERS, "distmm", "graphpipe"))
    parser.add_argument("--time-limit", type=float, help="seconds of a search; without one, plans do not depend on the machine")
    parser.add_argument("--write", metavar="FOLDER", help="write profile and topology, and end")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if options.write:
        profile().save(Path(options.write) / "towers.json")
        topology().save(Path(options.write) / "towers.yaml")
        return 0
    bound = plan_bound(case.problem)
    results: dict[str, Any] = {}
    for name, search in systems(case, options.time_limit).items():
        if name not in (options.systems or [name]):
            continue
        began_s = time.process_time()
        try:
            evaluation = search()
        except RaypipeError as error:
            results[name] = {"update_s": None, "why": str(error)}
            print(f"{name}: {error}", flush=True)
            continue
        update_s = None if evaluation is None else evaluation.update_s
        layout = None if evaluation is None else str(evaluation.layout)
        results[name] = {"update_s": update_s, "layout": layout, "cpu_s": time.process_time() - began_s}
        print(f"{name}: {update_s} s, {layout}; {results[name]['cpu_s']:.0f} CPU s", flush=True)
    ours = results.get("raypipe", {}).get("update_s")
    rows = [
        {
            "system": name,
            "update s": "-" if result["update_s"] is None else f"{result['update_s']:.3f}",
            "over raypipe's": "-" if result["update_s"] is None or ours is None else f"{result['update_s'] / ours:.3f}",
            "over the bound": "-" if result["update_s"] is None else f"{result['update_s'] / bound.update_s:.3f}",
        }
        for name, result in results.items()
    ]
    print_table(f"seconds of an update; bound {bound.update_s:.3f} s: {bound.reason}", rows)
    write_json(options.json, {"systems": results, "bound_s": bound.update_s, "bound": bound.reason})
    return 0


if __name__ == "__main__":
    sys.exit(main())
