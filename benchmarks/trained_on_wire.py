"""A small GPT, trained on four nodes whose links all differ, by raypipe's plan and by the best baseline's.

    python benchmarks/trained_on_wire.py [--slower 20] [--rounds 3] [--seed 1] [--json FILE]     # as root, with iproute2

The wires are those of `planners_on_wire.py`, divided by `--slower`: four devices of a real model compute on the cores of one machine, and
what is measured is to be the network. For the same reason the GPT is narrow and its microbatches are long: messages take longer than their
computation. Each device has memory for a third of what the model keeps. Layers are measured on a node. Printed are updates as foretold and
as trained, and what raypipe's plan gains.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from planners_on_wire import NUM_NODES, network, rates
from rounds import Summary, in_rounds, print_table, write_json
from wire import on_nodes

from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.data.prepare import prepare
from raypipe.errors import PlanError
from raypipe.planning.plan import plan_problem
from raypipe.planning.planners import PLANNERS
from raypipe.planning.problem import Problem
from tests.multinode.cluster import Cluster
from tests.multinode.driver import Driver

NUM_MICROBATCHES, NUM_ROWS, SEQUENCE = 8, 32, 64
ROOM = 1 / 3
CONFIG = """
format: raypipe.train/1
model:
  function: raypipe.models.gpt:gpt
  options: {{num_layers: 6, d_model: 16, num_heads: 2, sequence_length: {sequence}, vocabulary_size: 256}}
data: {{path: "{tokens}", sequence_length: {sequence}, num_validation_microbatches: 1}}
schedule: {{num_microbatches: {num_microbatches}, microbatch_size: {num_rows}, updates_per_window: 2}}
cluster: {{address: "{address}"}}
run: {{name: gpt, storage_path: "{runs}", num_updates: 8}}
"""


def configured(machines: Cluster) -> Path:
    """Write tokens and a configuration."""
    folder = machines.folder / "gpt"
    source = folder / "text"
    source.mkdir(parents=True)
    for number in range(20):
        (source / f"{number}.txt").write_text("little by little, the bird builds its nest\n" * 400)
    prepare(str(source), output=folder / "tokens.parquet", validation_fraction=0.3)
    config = folder / "config.yaml"
    config.write_text(
        CONFIG.format(
            sequence=SEQUENCE,
            tokens=folder / "tokens.parquet",
            num_microbatches=NUM_MICROBATCHES,
            num_rows=NUM_ROWS,
            address=machines.address,
            runs=folder / "runs",
        )
    )
    return config


def planned(profile: ModelProfile, of_pairs: dict[tuple[int, int], float]) -> dict[str, Plan]:
    """Return raypipe's plan and the best of the baselines'."""
    topology = network(of_pairs)
    needed = Problem(profile, topology, NUM_MICROBATCHES, NUM_ROWS)
    room = math.ceil(ROOM * float(needed.standing_prefix[-1] + NUM_MICROBATCHES * needed.saved_prefix[-1]))
    nodes = tuple(replace(node, devices=tuple(replace(device, memory_bytes=room) for device in node.devices)) for node in topology.nodes)
    problem = replace(needed, topology=replace(topology, nodes=nodes), recompute=False)
    plans: dict[str, Plan] = {}
    for planner in PLANNERS:
        try:
            plans[planner.name] = plan_problem(problem, name=planner.name)
        except PlanError as error:
            print(f"{planner.name}: {error}", file=sys.stderr)
    ours = plans.pop("raypipe")
    best = min(plans, key=lambda name: _update_s(plans[name]))
    return {"raypipe": ours, best: plans[best]}


def _update_s(plan: Plan) -> float:
    assert plan.predicted is not None, "planners predict"
    return plan.predicted.update_s


def trained_s(commands: Driver, config: Path, plan: Path) -> float:
    """Return the seconds of an update of a run."""
    document = commands.json("train", config, "--set", f"plan={plan}")
    (figure,) = (figure for figure in document["figures"] if figure["name"] == "update time")
    return float(figure["measured"])


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=20.0, help="what the wires' rates are divided by")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    of_pairs = {pair: rate / options.slower for pair, rate in rates(options.seed).items()}
    with on_nodes(NUM_NODES, 1, rates=of_pairs) as (machines, commands):
        config = configured(machines)
        profile = config.with_name("profile.json")
        commands.run("profile", config, "-o", profile)
        plans = planned(ModelProfile.load(profile), of_pairs)
        paths = {name: config.with_name(f"{name}.json") for name in plans}
        for name, plan in plans.items():
            plan.save(paths[name])
        runs = {name: partial(trained_s, commands, config, path) for name, path in paths.items()}
        found = {name: Summary.of(values) for name, values in in_rounds(runs, num_rounds=options.rounds).items()}
    rows = [
        {
            "planner": name,
            "order": plan.schedule.name,
            "foretold s": f"{_update_s(plan):.3f}",
            "trained s": f"{found[name].median:.3f} +-{found[name].spread:.3f}",
            "over foretold": f"{found[name].median / _update_s(plan):.3f}",
        }
        for name, plan in plans.items()
    ]
    print_table("seconds of an update of the GPT", rows)
    best = next(name for name in plans if name != "raypipe")
    gains = [_update_s(plans[best]) / _update_s(plans["raypipe"]), found[best].median / found["raypipe"].median]
    print(f"raypipe's plan over that of {best}: foretold {gains[0]:.3f}, trained {gains[1]:.3f}")
    results = {name: {"foretold_s": _update_s(plan), "trained_s": found[name], "order": plan.schedule.name} for name, plan in plans.items()}
    write_json(options.json, {"slower": options.slower, "plans": results, "foretold_gain": gains[0], "trained_gain": gains[1]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
