"""Sums of gradients and messages on nodes with one port each: in turns by class and deadline, against plain ways of sending them.

    python benchmarks/communication.py --simulate [--cells sum-075 wire-24] [--json FILE]
    python benchmarks/communication.py --rehearse [--cells sum-075] [--rounds 3] [--json FILE]     # as root, with iproute2

`--rehearse` runs the same orders as actors of a Ray cluster whose nodes are network namespaces: the baselines over gloo, raypipe's over
its own connections. Beside each stands what the simulator says, with what an F and a B take there beyond their waits: the overheads that
`raypipe calibrate` fits, measured on the same nodes in the same order without sums. With `--slower 4` all seconds are four times as long,
on ports of a quarter of the rate: the same orders and bytes, beside which the time of cores that many actors share is small.

All that leaves a node, and all that enters it, shares 200 Mbit/s. F takes 20 ms, B 40 ms; C = M (F + B); A is the time of the sum of a
stage's gradients on its port; every device's message takes the stated time. One update of `pipedream-2bw`, far from the ends of the
window; updates of a stage wait for that stage alone.

    a      pipedream-2bw, its sum awaited behind the last backward (Narayanan et al., ICML 2021, as implemented)
    a'     the same with each U where its version is first read: no classes, no chunks
    b      1F1B with a flush and the sum behind it
    c      2BW and 1F1B as in a and b, with the sums in four buckets in the order in which they are complete, the first of them inside the
           last backward, as DistributedDataParallel has it (simulated)
    turns  as a', messages before sums, sums in chunks by deadline
    zero   the same with an optimizer whose state replicas divide (ZeRO-1): sums to owners, U halfway, weights to all
    raypipe  as a', messages before sums, sums in chunks by deadline, and as many forwards ahead at each hop as the search finds

Ablations of raypipe, each with all of those before:

    allreduce       each U where its version is first read; sums in chunks, by deadline, among what goes to one peer; whole gradients
    point to point  messages first on all of a port, sums leave it at both ends, forwards ahead
    sparse          rows of the table instead of all of it
    due first       of these, the rows that the next reader looks up
    runtime         chunk sizes and forwards ahead by the rates that are measured; at constant rates the same as before. Both are also
                    printed where every port falls to 0.4 of the rate that was known

Chimera and AMDP on such ports have no baselines: `--rehearse` prints for them, too, what the simulator says of the same programs.

The baselines sum whole gradients. In the cell `table`, the first stage has a table of 20 MB that the model looks up, of which an update
touches 1.2 MB of rows, 47 % of which the next reader looks up; "dense" is raypipe with whole gradients, "together" with all due at once.

"Possible" is a baseline over the larger of the busiest device and the busiest port.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rounds import Summary, in_rounds, print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cluster in namespaces is made by the tests' own tools

from raypipe import build_schedule
from raypipe.artifacts.plan import Plan, Replica
from raypipe.artifacts.profile import LayerProfile, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Node, NodeLink, Overheads, node_ports
from raypipe.artifacts.trace import Trace
from raypipe.communication.policy import Communication
from raypipe.planning.ahead import with_forwards_ahead
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.layout_schedules import layout_schedule
from raypipe.planning.problem import Problem
from raypipe.schedules.ir import Schedule, UpdateScope
from raypipe.schedules.lower import lower
from raypipe.schedules.passes import forwards_ahead, late_updates, shard_optimizer
from raypipe.schedules.validate import validate
from raypipe.simulation.compiled import CompiledOrder
from raypipe.simulation.plan_cost import late_row_stages, plan_cost, plan_programs
from raypipe.simulation.simulator import time_order
from tests.multinode.cluster import Cluster, cluster
from tests.multinode.ops_overheads import ops_overheads

PORT_BYTES_PER_S = 25e6
FORWARD_S = 0.020
BACKWARD_S = 0.040
LATENCY_S = 0.0001
ROW_BYTES = 512
NUM_UPDATES = 12
_NUM_BUCKETS = 4
CHUNKS_S = (0.003, 0.004, 0.005, 0.006, 0.008)
"""Where transfers repeat with a period, a few percent depend on how chunks fall into it: medians over these are told."""


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        sum_share: A over C, for the whole gradients of the first stage.
        message_s: Seconds of each device's message on its port.
        devices_per_node: Replicas of a stage are on different nodes.
        table_bytes: Part of the first stage's weights that the model looks up; other stages have none.
        touched_bytes: Rows of the table that an update touches.
        due_share: Part of these that the next update which reads their new version touches, too.
        port_bytes_per_s: What a port really carries; sums and messages keep their bytes.
        order: Order of raypipe's runs.
        slower: Factor of all seconds, on ports that carry as much less; bytes are the same.
    """

    name: str
    num_stages: int
    num_replicas: int
    num_microbatches: int
    sum_share: float
    message_s: float
    devices_per_node: int = 1
    table_bytes: int = 0
    touched_bytes: int = 0
    due_share: float = 1.0
    port_bytes_per_s: float = PORT_BYTES_PER_S
    order: str = "pipedream-2bw"
    slower: float = 1.0

    @property
    def compute_s(self) -> float:
        """C: seconds in which a device computes an update."""
        return self.slower * self.num_microbatches * (FORWARD_S + BACKWARD_S)

    @property
    def sum_bytes(self) -> int:
        """Bytes of the first stage's gradients."""
        # A ring of r sends 2 (r - 1) / r of the bytes through each port.
        sent = self.sum_share * self.compute_s * PORT_BYTES_PER_S / self.slower
        return round(sent * self.num_replicas / max(2 * (self.num_replicas - 1), 1))

    def slowed(self, slower: float) -> Cell:
        """Return the same with all seconds so many times as long."""
        return replace(self, slower=slower, port_bytes_per_s=self.port_bytes_per_s / slower)

    @property
    def dense(self) -> Cell:
        """The same where the model does not say that it looks up rows."""
        return replace(self, touched_bytes=0)

    def profile(self) -> ModelProfile:
        """Return a layer for each stage; the replicas share the rows of a microbatch."""
        num_rows = max(self.table_bytes // ROW_BYTES, 1)
        # So many rows of a microbatch that those of an update have the bytes asked for.
        touched = 1 - (1 - self.touched_bytes / max(self.table_bytes, 1)) ** (1 / self.num_microbatches)
        reread = 1 - (1 - self.due_share) / (1 - self.touched_bytes / max(self.table_bytes, 1))
        lookups: dict[str, Any] = {"looked_up_rows": num_rows, "looked_up_bytes": self.table_bytes, "reread_share": reread}
        lookups["gradient_rows"] = round(num_rows * touched)
        layers = [
            LayerProfile(
                name=f"layer{stage}",
                forward_s=self.slower * FORWARD_S * self.num_replicas,
                backward_s=self.slower * BACKWARD_S * self.num_replicas,
                weight_grad_s=self.slower * BACKWARD_S * self.num_replicas / 2,
                output_bytes=round(self.message_s * PORT_BYTES_PER_S * self.num_replicas),
                saved_bytes=0,
                parameter_bytes=self.sum_bytes - (self.table_bytes if stage else 0),
                **(lookups if self.touched_bytes and not stage else {}),
            )
            for stage in range(self.num_stages)
        ]
        return ModelProfile(name=self.name, microbatch_size=self.num_replicas, layers=tuple(layers))

    def topology(self) -> ClusterTopology:
        """Return nodes whose ports carry all that leaves and enters them."""
        count = self.num_stages * self.num_replicas // self.devices_per_node
        nodes = tuple(
            Node(
                name=f"node{number}",
                devices=tuple(Device(name=f"node{number}/{slot}", kind="cpu") for slot in range(self.devices_per_node)),
                link=NodeLink(latency_s=0.0, bandwidth_bytes_per_s=None),
            )
            for number in range(count)
        )
        ports = node_ports({node.name: self.port_bytes_per_s for node in nodes})
        link = NodeLink(latency_s=LATENCY_S, bandwidth_bytes_per_s=None)
        return ClusterTopology(name="ports", nodes=nodes, shared_links=ports, default_link=link)

    def plan(self, schedule: Schedule) -> Plan:
        """Return the plan of an order of the stages; a node holds neighboring stages of one replica."""
        profile, topology = self.profile(), self.topology()
        names = [device.name for device in topology.devices]
        workers = tuple(
            tuple(
                Replica(device=names[replica * self.num_stages + stage], share=1 / self.num_replicas)
                for replica in range(self.num_replicas)
            )
            for stage in range(self.num_stages)
        )
        return Plan(
            name=self.name,
            planner="given",
            microbatch_size=self.num_replicas,
            stages=tuple((layer.name,) for layer in profile.layers),
            workers=workers,
            schedule=schedule,
            profile=profile,
            topology=topology,
            profile_digest=profile.digest,
            topology_digest=topology.digest,
        )

    def schedule(self, name: str) -> Schedule:
        """Return the order of a whole window."""
        schedule = build_schedule(
            name,
            num_devices=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_updates=NUM_UPDATES,
            update_scope=UpdateScope.STAGE,
        )
        validate(schedule)
        return schedule

    def sharded(self, schedule: Schedule) -> Schedule:
        """Return the order with an optimizer whose state the replicas of each stage divide."""
        found = shard_optimizer(schedule, replicated_workers=range(self.num_stages) if self.num_replicas > 1 else ())
        validate(found)
        return found

    def possible_s(self) -> float:
        """Return the larger of a device's computation and a port's transfers."""
        messages_s = self.slower * self.num_microbatches * self.message_s if self.num_stages > 1 else 0.0
        # A stage in the middle sends activations one way and gradients the other; with several devices a node they leave it at its ends.
        inner = self.num_stages > 2 and self.devices_per_node == 1
        untouched = 1 - self.profile().layers[0].untouched_bytes(self.num_microbatches) / max(self.sum_bytes, 1)
        sums_s = self.sum_share * untouched * self.compute_s * self.devices_per_node
        return max(self.compute_s, sums_s + messages_s * (2 if inner else 1))


CELLS = (
    Cell("sum-075", 2, 2, 4, 0.75, 0.004),
    Cell("sum-050", 2, 2, 8, 0.50, 0.004),
    Cell("wire-24", 2, 2, 4, 0.25, 0.024),
    Cell("two-a-node", 4, 2, 8, 0.375, 0.004, 2),
    Cell("messages", 4, 1, 8, 0.0, 0.024),
    Cell("small-sum", 2, 2, 16, 0.05, 0.004),
    Cell("table", 2, 2, 4, 3.7, 0.004, table_bytes=20_000_000, touched_bytes=1_200_000, due_share=0.47),
)


OTHER_ORDERS = (
    Cell("chimera", 4, 1, 8, 0.25, 0.004, order="chimera"),
    Cell("amdp", 4, 1, 8, 0.25, 0.004, order="amdp"),
)
"""Whose stages have copies on several devices of their own."""
FALLEN = 0.4


def simulated(cell: Cell) -> dict[str, Any]:
    """Return the seconds of an update of each system, and the ratios of the table."""
    plain, dense = Communication(scheduled=False), cell.dense
    ahead, searched_s = _searched(cell)
    two_buffers, flushed = cell.schedule("pipedream-2bw"), cell.schedule("1f1b")
    seconds = {
        "a": _update_s(dense, two_buffers, plain),
        "a'": _update_s(dense, late_updates(two_buffers), plain),
        "b": _update_s(dense, flushed, plain),
        "c 2bw": _update_s(dense, two_buffers, plain, num_buckets=_NUM_BUCKETS),
        "c 1f1b": _update_s(dense, flushed, plain, num_buckets=_NUM_BUCKETS),
        "dense": _searched(dense)[1] if cell.touched_bytes else searched_s,
        "together": _searched(replace(cell, due_share=1.0))[1] if cell.due_share < 1 else searched_s,
        "turns": _in_turns_s(cell, late_updates(two_buffers)),
        "zero": _in_turns_s(cell, cell.sharded(two_buffers)),
        "raypipe": searched_s,
    }
    ablations = {
        "allreduce": _in_turns_s(dense, late_updates(two_buffers), across_peers=False),
        "point to point": seconds["dense"],
        "sparse": seconds["together"],
        "due first": searched_s,
        "runtime": searched_s,
    }
    fallen = replace(cell, port_bytes_per_s=FALLEN * PORT_BYTES_PER_S)
    # A chunk of the size for the rate that was known takes longer.
    as_before_s = _in_turns_s(fallen, late_updates(forwards_ahead(two_buffers, ahead)), slower=1 / FALLEN)
    fallen_s = {"sparse": as_before_s, "runtime": _searched(fallen)[1]}
    ours, possible_s = seconds["raypipe"], cell.possible_s()
    return {
        "name": cell.name,
        "over_a": seconds["a"] / ours,
        "over_b": seconds["b"] / ours,
        "over_a_late": seconds["a'"] / ours,
        "over_c": [seconds["c 2bw"] / ours, seconds["c 1f1b"] / ours],
        "over_dense": seconds["dense"] / ours,
        "possible_a": seconds["a"] / possible_s,
        "possible_b": seconds["b"] / possible_s,
        "update_s": seconds,
        "ablations_s": ablations,
        "fallen_s": fallen_s,
        "possible_s": possible_s,
        "sum_bytes": {"turns": _sum_bytes(cell, late_updates(two_buffers)), "zero": _sum_bytes(cell, cell.sharded(two_buffers))},
        "forwards_ahead": ahead,
    }


def _runs(cell: Cell) -> dict[str, tuple[Schedule, str]]:
    """Return the order of each system and the transport that carries it."""
    if cell.order != "pipedream-2bw":
        return {"raypipe": (cell.schedule(cell.order), "tcp")}
    two_buffers = cell.schedule("pipedream-2bw")
    together = {"together": (_ahead(replace(cell, due_share=1.0)), "tcp")} if cell.due_share < 1 else {}
    return together | {
        "a": (two_buffers, "gloo"),
        "a'": (late_updates(two_buffers), "gloo"),
        "b": (cell.schedule("1f1b"), "gloo"),
        "turns": (late_updates(two_buffers), "tcp"),
        "zero": (cell.sharded(two_buffers), "tcp"),
        "raypipe": (_ahead(cell), "tcp"),
    }


def _ahead(cell: Cell) -> Schedule:
    return late_updates(forwards_ahead(cell.schedule("pipedream-2bw"), _searched(cell)[0]))


def rehearsed(cell: Cell, *, rounds: int, systems: list[str] | None = None) -> dict[str, Any]:
    """Return the seconds of an update of each system as actors on nodes with one port each, and what the simulator says of it."""
    runs = {name: run for name, run in _runs(cell).items() if name in (systems or [name])}
    count = cell.num_stages * cell.num_replicas // cell.devices_per_node
    with cluster(nodes=count, cpus_per_node=cell.devices_per_node) as machines:
        for node in range(count):
            others = [other for other in range(count) if other != node]
            machines.share([(node, other) for other in others], cell.port_bytes_per_s)
            machines.share([(other, node) for other in others], cell.port_bytes_per_s)
        of = {name: cell if transport == "tcp" else cell.dense for name, (_, transport) in runs.items()}
        of["together"] = replace(cell, due_share=1.0)
        commands = {name: _command(machines, of[name], name, *each) for name, each in runs.items()}
        overheads = _overheads(machines, cell)
        found = in_rounds(
            {name: partial(_rehearse, machines, command, cell.slower) for name, command in commands.items()}, num_rounds=rounds
        )
    seconds = {name: Summary.of(values) for name, values in found.items()}
    expected_s = {
        name: _update_s(of[name], schedule, Communication(scheduled=transport == "tcp"), overheads)
        for name, (schedule, transport) in runs.items()
    }
    ours = seconds["raypipe"].median if "raypipe" in seconds else math.nan
    baselines = (("over_a", "a"), ("over_b", "b"), ("over_a_late", "a'"))
    over = {key: seconds[name].median / ours for key, name in baselines if name in seconds}
    return {"name": cell.name, **over, "rehearsed_s": seconds, "simulated_s": expected_s, "overheads": overheads}


def _overheads(machines: Cluster, cell: Cell) -> Overheads:
    """Return what Ops take beyond their waits on these nodes, as `raypipe calibrate` fits it, in the cell's order without sums."""
    alone = replace(cell, sum_share=0.0, table_bytes=0, touched_bytes=0, due_share=1.0)
    schedule = alone.schedule(cell.order)
    plan = alone.plan(schedule)
    command = _command(machines, alone, "alone", schedule, "tcp")
    _rehearse(machines, command, cell.slower)
    return ops_overheads(plan, Trace.load(command[-1]))


def _command(machines: Cluster, cell: Cell, name: str, schedule: Schedule, transport: str) -> list[str]:
    path = machines.folder / f"{cell.name}-{name}.json"
    cell.plan(schedule).save(path)
    rehearse = ["rehearse", str(path), "--transport", transport, "--json"]
    return [sys.executable, "-m", "raypipe", *rehearse, "-o", str(path.with_suffix(".trace.json"))]


def _rehearse(machines: Cluster, command: list[str], slower: float) -> float:
    machines.run(command, timeout_s=180 * slower)
    return Trace.load(command[-1]).steady_update_s or json.loads("null")


def _searched(cell: Cell) -> tuple[list[int], float]:
    """Return the forwards ahead that the search finds, and the seconds of an update."""
    problem = Problem(
        cell.profile(),
        cell.topology(),
        cell.num_microbatches,
        cell.num_replicas,
        updates_per_window=NUM_UPDATES,
        max_staleness=1,
        update_scope=UpdateScope.STAGE,
    )
    stages = range(cell.num_stages)
    workers = tuple(tuple(replica * cell.num_stages + stage for replica in range(cell.num_replicas)) for stage in stages)
    evaluator = LayoutEvaluator(problem)
    given = evaluator.simulate(Layout((*stages, cell.num_stages), workers, "pipedream-2bw"))

    def far_from_the_ends(evaluation: Evaluation) -> float:
        return _in_turns_s(cell, layout_schedule(problem, evaluation.layout, num_updates=NUM_UPDATES))

    found = with_forwards_ahead(evaluator, given, most_steps=20, seconds=far_from_the_ends)
    assert found is not None, "it was valid without"
    return found.layout.forwards_ahead, far_from_the_ends(found)


def _in_turns_s(cell: Cell, schedule: Schedule, *, across_peers: bool = True, slower: float = 1.0) -> float:
    policies = [Communication(chunk_s=slower * chunk_s, across_peers=across_peers) for chunk_s in CHUNKS_S]
    return statistics.median(_update_s(cell, schedule, policy) for policy in policies)


def _update_s(
    cell: Cell, schedule: Schedule, communication: Communication, overheads: Overheads | None = None, *, num_buckets: int = 1
) -> float:
    plan = cell.plan(schedule)
    cost = replace(plan_cost(plan), communication=communication, overheads=overheads or Overheads())
    if num_buckets > 1:  # a stage of many layers alike, not of one
        cost = replace(cost, stages={place: replace(stage, layers=()) for place, stage in cost.stages.items()})
    buckets, late_rows = [num_buckets] * cell.num_stages, late_row_stages(plan.profile, plan.cut)
    programs = lower(plan.schedule, plan.placement, buckets=buckets, late_rows=late_rows)
    return time_order(CompiledOrder(programs), cost).steady_update_s


def _sum_bytes(cell: Cell, schedule: Schedule) -> int:
    """Return the most bytes of sums and weights that a device sends for an update, as simulated."""
    plan = cell.plan(schedule)
    sent: Counter[int] = Counter()
    for passed in time_order(CompiledOrder(plan_programs(plan)), plan_cost(plan)).passed:
        sent[passed.source] += round(passed.num_bytes)
    return max(sent.values(), default=0) // NUM_UPDATES


def _rehearse_all(cells: list[Cell], options: argparse.Namespace) -> None:
    results = []
    for cell in cells:
        results.append(result := rehearsed(cell.slowed(options.slower), rounds=options.rounds, systems=options.systems))
        print_table(
            f"seconds of an update, rehearsed ({options.rounds} rounds)", [_compared(result, name) for name in result["rehearsed_s"]]
        )
        if {"over_a", "over_b", "over_a_late"} <= result.keys():
            print(f"over a, b, a': {result['over_a']:.2f}, {result['over_b']:.2f}, {result['over_a_late']:.2f}")
    print_table("simulated and rehearsed", [_compared(result, name) for result in results for name in result["rehearsed_s"]])
    write_json(options.json, results)


def _compared(result: dict[str, Any], name: str) -> dict[str, str]:
    measured, expected_s = result["rehearsed_s"][name], result["simulated_s"][name]
    return {
        "cell": result["name"],
        "system": name,
        "simulated ms": f"{1000 * expected_s:.0f}",
        "rehearsed ms": f"{1000 * measured.median:.0f} +-{1000 * measured.spread:.0f}",
        "rehearsed over simulated": f"{measured.median / expected_s:.3f}",
    }


def _ablations(result: dict[str, Any]) -> dict[str, str]:
    told = {"cell": result["name"]} | {f"{name} ms": f"{1000 * update_s:.0f}" for name, update_s in result["ablations_s"].items()}
    return told | {f"{name} at {FALLEN:g}": f"{1000 * update_s:.0f}" for name, update_s in result["fallen_s"].items()}


def _bytes(result: dict[str, Any]) -> dict[str, str]:
    return {"cell": result["name"]} | {system: f"{num_bytes / 1e6:.2f} MB" for system, num_bytes in result["sum_bytes"].items()}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="the table from the simulator; the default")
    parser.add_argument("--rehearse", action="store_true", help="run the orders on nodes in network namespaces")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in (*CELLS, *OTHER_ORDERS)])
    parser.add_argument("--systems", nargs="+", choices=["a", "a'", "b", "turns", "zero", "raypipe", "together"], help="what is rehearsed")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of all seconds that are rehearsed, for few cores")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if options.rehearse:
        _rehearse_all([cell for cell in (*CELLS, *OTHER_ORDERS) if cell.name in (options.cells or cell.name)], options)
        return 0
    results = [simulated(cell) for cell in CELLS if cell.name in (options.cells or cell.name)]
    rows = [
        {
            "cell": result["name"],
            **{f"{system} ms": f"{1000 * update_s:.0f}" for system, update_s in result["update_s"].items()},
            "possible ms": f"{1000 * result['possible_s']:.0f}",
            "possible over a, b": f"{result['possible_a']:.2f}, {result['possible_b']:.2f}",
            "over a, b": f"{result['over_a']:.2f}, {result['over_b']:.2f}",
            "over a', dense": f"{result['over_a_late']:.2f}, {result['over_dense']:.2f}",
            "ahead": " ".join(map(str, result["forwards_ahead"])),
        }
        for result in results
    ]
    print_table("seconds of an update, simulated", rows)
    print_table("ablations, simulated", [_ablations(result) for result in results])
    print_table("largest bytes that a device sends for an update, besides messages", [_bytes(result) for result in results])
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
