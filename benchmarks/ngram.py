"""Training a GPT with n-gram tables, two stages of two copies, on nodes with one port each: rows of gradients against whole ones.

    raypipe data prepare python-stdlib -o data/python-stdlib.parquet
    python benchmarks/ngram.py [--data data/python-stdlib.parquet] [--rounds 3] [--json FILE]       # as root, with iproute2

All that leaves a node, and all that enters it, shares 200 Mbit/s. The nodes are network namespaces of this machine and share its cores.
Milliseconds of an update, far from the ends of the median window. The losses of the last two are compared, bit for bit.

    a        pipedream-2bw, its sum awaited behind the last backward, over gloo
    dense    each U where its version is first read, over raypipe's own connections, whole gradients
    rows     the same, with the rows that an update looks up
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # actors load this file by its path

from communication import PORT_BYTES_PER_S, Cell
from rounds import Summary, in_rounds, print_table, write_json

from raypipe import build_schedule
from raypipe.actors.execution.batches import FileSource
from raypipe.actors.measure.layers import measure_layers
from raypipe.artifacts.trace import Trace
from raypipe.model import Model
from raypipe.models.ngram_gpt import ngram_gpt
from raypipe.profiling.profiler import model_profile
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.passes import late_updates
from tests.multinode.cluster import Cluster, cluster
from tests.on_ray.plans import plan_of

CELL = Cell("ngram", num_stages=2, num_replicas=2, num_microbatches=4, sum_share=0.0, message_s=0.0)
MICROBATCH_SIZE = 8
LENGTH = 128
UPDATES_PER_WINDOW = 8
NUM_UPDATES = 3 * UPDATES_PER_WINDOW
CONFIG = """
format: raypipe.train/1
model: {{function: "{function}", options: {{sequence_length: {length}}}}}
data: {{path: "{data}", sequence_length: {length}, num_validation_microbatches: 0}}
schedule: {{updates_per_window: {window}}}
scaling: {{transport: {transport}}}
optimizer: {{max_grad_norm: null}}
plan: "{plan}"
run: {{name: "{name}", storage_path: "{folder}", num_updates: {updates}, checkpoint_every: 0}}
"""


def whole(**options: Any) -> Model:
    """Return the model without what it says of rows."""
    model = ngram_gpt(**options)
    return dataclasses.replace(model, layers=tuple(dataclasses.replace(layer, looked_up={}) for layer in model.layers))


def save_plan(path: Path, model: Model, schedule: Schedule, data: str) -> None:
    """Write the plan of an order over the four nodes, with layers measured in this process."""
    torch.set_num_threads(1)
    batch = FileSource(data, LENGTH, 0, MICROBATCH_SIZE)("train").batch(0, (0.0, 1.0))
    measured = measure_layers(model, batch, optimizer=partial(torch.optim.AdamW, lr=1e-3), seed=0)
    workers = [[(f"node{copy * CELL.num_stages + stage}/0", 1 / CELL.num_replicas) for copy in range(2)] for stage in range(2)]
    profile = model_profile([measured], model, name="ngram", microbatch_size=MICROBATCH_SIZE)
    plan_of(profile, CELL.topology(), schedule, workers, sizes=(3, 3), microbatch_size=MICROBATCH_SIZE).save(path)


def train(machines: Cluster, config: Path) -> tuple[float, list[float]]:
    """Return the seconds of an update and the losses of a run."""
    done = machines.run([sys.executable, "-m", "raypipe", "train", str(config), "--json"], timeout_s=300)
    document = json.loads(done.stdout)
    return Trace.load(Path(document["path"]) / "trace.json").steady_update_s, document["losses"]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/python-stdlib.parquet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    data = str(Path(options.data).resolve())
    two_buffers = build_schedule(
        "pipedream-2bw",
        num_devices=CELL.num_stages,
        num_microbatches=CELL.num_microbatches,
        num_updates=UPDATES_PER_WINDOW,
        update_scope=UpdateScope.STAGE,
    )
    dense, rows = f"{Path(__file__).resolve()}:whole", "raypipe.models.ngram_gpt:ngram_gpt"
    systems = {
        "a": (whole, dense, two_buffers, "gloo"),
        "dense": (whole, dense, late_updates(two_buffers), "tcp"),
        "rows": (ngram_gpt, rows, late_updates(two_buffers), "tcp"),
    }
    count = CELL.num_stages * CELL.num_replicas
    with cluster(nodes=count, cpus_per_node=1) as machines:
        for node in range(count):
            others = [other for other in range(count) if other != node]
            machines.share([(node, other) for other in others], PORT_BYTES_PER_S)
            machines.share([(other, node) for other in others], PORT_BYTES_PER_S)
        configs = {}
        for name, (make, function, schedule, transport) in systems.items():
            plan, configs[name] = (machines.folder / f"{name}.{ending}" for ending in ("json", "yaml"))
            save_plan(plan, make(sequence_length=LENGTH), schedule, data)
            text = CONFIG.format(
                function=function,
                length=LENGTH,
                data=data,
                window=UPDATES_PER_WINDOW,
                transport=transport,
                plan=plan,
                name=name,
                folder=machines.folder,
                updates=NUM_UPDATES,
            )
            configs[name].write_text(text)
        found = in_rounds({name: partial(train, machines, config) for name, config in configs.items()}, num_rounds=options.rounds)
    seconds = {name: Summary.of([update_s for update_s, _ in runs]) for name, runs in found.items()}
    row = {f"{name} ms": f"{1000 * each.median:.0f} +-{1000 * each.spread:.0f}" for name, each in seconds.items()}
    ours = seconds["rows"].median
    row |= {f"over {name}": f"{seconds[name].median / ours:.2f}" for name in ("a", "dense")}
    same = all(losses == found["dense"][0][1] for name in ("dense", "rows") for _, losses in found[name])
    print_table(f"seconds of an update, trained ({options.rounds} rounds)", [{**row, "equal losses": "yes" if same else "no"}])
    write_json(options.json, [{"update_s": seconds, "equal_losses": same}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
