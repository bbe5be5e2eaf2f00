"""Sums that share wires with each other and with messages: estimated, simulated and rehearsed on nodes in network namespaces.

    python benchmarks/wire.py [--cases NAME ...] [--rounds 3] [--simulate] [--json FILE]     # as root, with iproute2

A wire between two nodes carries 200 Mbit/s each way (50 in the last two cases), whatever devices use it; the actors wait for the time
of their computation, messages and sums are real. Seconds of an update with a flush. *Told* is the simulator that knows what Ops take
beyond their waits, from one rehearsal. But in the cases of own and unlike wires, what leaves a node is stated to pass its one port.

    two sums          two stages, each with a copy on either node: both sums pass the wire between them
    sum and messages  three stages by GPipe's order: the last one has a copy on either node and sums while gradients of earlier stages,
                      which pass the same wire, are still to come
    sum and another   two stages, the second on two nodes: what these send to the first, and their sum, leave over wires of their own, one
                      after the other
    bad wires         data parallelism on four nodes; all wires but those along 2 - 0 - 3 - 1 have a tenth: the sum goes along a tree
    own wires         the same where all wires are alike, and stated as links: what leaves over several passes at once
    unlike wires      the same where two of them have a tenth: slices go along trees of their own
    slow port         data parallelism on five nodes, each behind a port; one port has a tenth, and is a leaf of the sum's tree
    ports in turns    a pipeline on five nodes, each behind a port: one node sends in turns to two, which also take gradients by their ports
    slow receiver     a pipeline on four nodes, each behind a port: one node sends to three, of which one has a tenth of the bandwidth
    ports both ways   a pipeline of five nodes, each behind a port, which takes activations and gradients at once
    node ports        a pipeline of six devices on three nodes of two, each behind a port; `copies`: three stages of two copies there;
                      `slow`: two stages, of which the second has a copy behind a port of a tenth
    four chunks       interleaved on two workers of two nodes each: a worker's chunks sum over one wire
    cnn, planned      VGG-16 (PipeDream's profile; bytes over 40, seconds times 4) on four nodes of two devices: raypipe's plan
    cnn, copies       the same as data parallelism, its sums in buckets that overlap the last backward

The last two give what raypipe's plan gains over data parallelism, promised and measured. `--simulate` leaves the rehearsals out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from models import chain_of
from rounds import Summary, in_rounds, print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cluster in namespaces is made by the tests' own tools

from raypipe import simulate
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, Overheads, SharedLink
from raypipe.artifacts.trace import Trace
from raypipe.planning.evaluator import Evaluation, LayoutEvaluator
from raypipe.planning.layout import Layout
from raypipe.planning.problem import Problem
from raypipe.planning.solve import solve
from tests.multinode.cluster import Cluster, cluster
from tests.multinode.driver import Driver, driver
from tests.multinode.ops_overheads import ops_overheads

WIRE_BYTES_PER_S = 25e6
GOODPUT = 0.992
"""Of a wire's bytes, those that are not headers of Ethernet, IP and TCP, with packets of 9,000 bytes."""
LATENCY_S = 4e-4
"""Of a message over TCP between two nodes of this machine, beyond the time of its bytes."""
NUM_UPDATES = 2


def rates(count: int, bad: Collection[tuple[int, int]], rate: float) -> dict[tuple[int, int], float]:
    """Return the bytes per second of each wire; bad ones, in both directions, have a tenth."""
    return {ends: rate / (10 if ends in bad or ends[::-1] in bad else 1) for ends in itertools.permutations(range(count), 2)}


def nodes(count: int, devices: int, bad: Collection[tuple[int, int]], rate: float, *, are_stated: bool) -> ClusterTopology:
    """Return equal nodes whose pairs have a wire each; the bad ones are stated as links, or all."""
    of_pair = rates(count, bad, rate)
    return ClusterTopology(
        name="wires",
        nodes=tuple(
            Node(
                name=f"node{number}",
                devices=tuple(Device(f"node{number}/{slot}", "cpu") for slot in range(devices)),
                link=NodeLink(latency_s=1e-4, bandwidth_bytes_per_s=2e9),
            )
            for number in range(count)
        ),
        links=tuple(
            Link(source=f"node{one}", target=f"node{other}", latency_s=LATENCY_S, bandwidth_bytes_per_s=of_pair[one, other] * GOODPUT)
            for one, other in (itertools.combinations(range(count), 2) if are_stated else bad)
        ),
        default_link=NodeLink(latency_s=LATENCY_S, bandwidth_bytes_per_s=rate * GOODPUT),
    )


def ports(count: int, slow: int | None, rate: float) -> Iterator[tuple[str, list[tuple[int, int]], float]]:
    """Yield the name of what leaves or enters each node, its pairs of nodes and its bytes per second; a slow node has a tenth."""
    for number in range(count):
        others = [other for other in range(count) if other != number]
        of_node = rate / (10 if number == slow else 1)
        yield f"node{number}/out", [(number, other) for other in others], of_node
        yield f"node{number}/in", [(other, number) for other in others], of_node


def scaled(profile: ModelProfile, *, seconds: float, num_bytes: float) -> ModelProfile:
    """Return a profile whose layers take a multiple of the time, and have a multiple of the bytes."""
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * seconds,
            backward_s=layer.backward_s * seconds,
            weight_grad_s=layer.weight_grad_s * seconds,
            output_bytes=round(layer.output_bytes * num_bytes),
            saved_bytes=round(layer.saved_bytes * num_bytes),
            parameter_bytes=round(layer.parameter_bytes * num_bytes),
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _uniform(num_layers: int, *, output_bytes: int, parameter_bytes: int) -> ModelProfile:
    return ModelProfile.uniform(
        num_layers, forward_s=0.03, backward_s=0.06, output_bytes=output_bytes, parameter_bytes=parameter_bytes, microbatch_size=8
    )


@dataclass(frozen=True)
class Case:
    """A layout to rehearse; raypipe's or a baseline's where `layout` is a planner's name. See `nodes`."""

    profile: Callable[[], ModelProfile]
    num_nodes: int
    devices: int
    num_microbatches: int
    layout: Layout | str
    bad: tuple[tuple[int, int], ...] = ()
    are_stated: bool = False
    has_ports: bool = False
    slow_port: int | None = None
    wire_bytes_per_s: float = WIRE_BYTES_PER_S

    @property
    def topology(self) -> ClusterTopology:
        """The nodes, with a port each on request."""
        topology = nodes(self.num_nodes, self.devices, self.bad, self.wire_bytes_per_s, are_stated=self.are_stated)
        if not self.has_ports:
            return topology
        of_nodes = tuple(
            SharedLink(
                name=name,
                bandwidth_bytes_per_s=rate * GOODPUT,
                members=tuple((f"node{source}", f"node{target}") for source, target in pairs),
            )
            for name, pairs, rate in ports(self.num_nodes, self.slow_port, self.wire_bytes_per_s)
        )
        return replace(topology, shared_links=of_nodes, default_link=NodeLink(latency_s=LATENCY_S))

    def evaluated(self) -> tuple[LayoutEvaluator, Evaluation]:
        """Return the simulated layout and who simulated it."""
        profile = self.profile()
        evaluator = LayoutEvaluator(Problem(profile, self.topology, self.num_microbatches, profile.microbatch_size))
        found = solve(evaluator, name=self.layout) if isinstance(self.layout, str) else evaluator.simulate(self.layout)
        assert found is not None, "these layouts are valid"
        return evaluator, found


def cnn() -> ModelProfile:
    """Return VGG-16 with a fortieth of its bytes and four times its seconds.

    Eight actors send and wake at the same moments on few cores: the longer all takes, the less that is of it.
    """
    return scaled(chain_of("vgg16"), seconds=4.0, num_bytes=1 / 40)


CASES = {
    "two sums": Case(
        partial(_uniform, 8, output_bytes=1000, parameter_bytes=2_000_000), 2, 2, 4, Layout((0, 4, 8), ((0, 2), (1, 3)), "1f1b")
    ),
    "sum and messages": Case(
        partial(_uniform, 6, output_bytes=2_000_000, parameter_bytes=8_000_000),
        2,
        2,
        6,
        Layout((0, 2, 4, 6), ((0,), (2,), (1, 3)), "gpipe"),
    ),
    "sum and another": Case(
        partial(_uniform, 4, output_bytes=1_000_000, parameter_bytes=8_000_000), 3, 1, 4, Layout((0, 2, 4), ((0,), (1, 2)), "1f1b")
    ),
    "bad wires": Case(
        partial(_uniform, 4, output_bytes=1000, parameter_bytes=4_000_000),
        4,
        1,
        4,
        Layout((0, 4), ((0, 1, 2, 3),), "1f1b"),
        bad=((0, 1), (1, 2), (2, 3)),
    ),
    "own wires": Case(
        partial(_uniform, 4, output_bytes=1000, parameter_bytes=4_000_000),
        4,
        1,
        4,
        Layout((0, 4), ((0, 1, 2, 3),), "1f1b"),
        are_stated=True,
    ),
    "unlike wires": Case(
        partial(_uniform, 4, output_bytes=1000, parameter_bytes=4_000_000),
        4,
        1,
        4,
        Layout((0, 4), ((0, 1, 2, 3),), "1f1b"),
        bad=((0, 1), (2, 3)),
        are_stated=True,
    ),
    "slow port": Case(
        partial(_uniform, 2, output_bytes=1000, parameter_bytes=2_500_000),
        5,
        1,
        4,
        Layout((0, 2), ((0, 1, 2, 3, 4),), "1f1b"),
        has_ports=True,
        slow_port=4,
    ),
    "ports in turns": Case(
        partial(_uniform, 3, output_bytes=1_500_000, parameter_bytes=200_000),
        5,
        1,
        12,
        Layout((0, 1, 2, 3), ((0,), (1, 2), (3, 4)), "zb-h1", ahead=(3, 0)),
        has_ports=True,
    ),
    "ports both ways": Case(
        partial(_uniform, 5, output_bytes=1_000_000, parameter_bytes=200_000),
        5,
        1,
        12,
        Layout((0, 1, 2, 3, 4, 5), ((0,), (1,), (2,), (3,), (4,)), "zb-h2"),
        has_ports=True,
    ),
    "slow receiver": Case(
        partial(_uniform, 3, output_bytes=800_000, parameter_bytes=100_000),
        4,
        1,
        12,
        Layout((0, 1, 3), ((0,), (1, 2, 3)), "zb-h1", ahead=(3, 0)),
        has_ports=True,
        slow_port=3,
    ),
    "node ports": Case(
        partial(_uniform, 6, output_bytes=600_000, parameter_bytes=200_000),
        3,
        2,
        12,
        Layout(tuple(range(7)), ((0,), (2,), (4,), (1,), (3,), (5,)), "zb-h2"),
        has_ports=True,
    ),
    "node ports, copies": Case(
        partial(_uniform, 3, output_bytes=1_000_000, parameter_bytes=500_000),
        3,
        2,
        8,
        Layout((0, 1, 2, 3), ((0, 1), (2, 3), (4, 5)), "zb-h1"),
        has_ports=True,
    ),
    "node ports, slow": Case(
        partial(_uniform, 3, output_bytes=600_000, parameter_bytes=500_000),
        3,
        2,
        8,
        Layout((0, 1, 3), ((0, 1), (2, 4)), "zb-h1", ahead=(3, 0)),
        has_ports=True,
        slow_port=2,
    ),
    "four chunks": Case(
        partial(_uniform, 8, output_bytes=100_000, parameter_bytes=4_000_000),
        4,
        1,
        4,
        Layout(tuple(range(9)), ((0, 1), (2, 3)), "interleaved"),
    ),
    "cnn, planned": Case(cnn, 4, 2, 4, "raypipe", wire_bytes_per_s=WIRE_BYTES_PER_S / 4),
    "cnn, copies": Case(cnn, 4, 2, 4, "ddp-overlap", wire_bytes_per_s=WIRE_BYTES_PER_S / 4),
}


@contextmanager
def on_nodes(count: int, devices: int, *, rates: float | dict[tuple[int, int], float]) -> Iterator[tuple[Cluster, Driver]]:
    """Bring up nodes with set rates, and a process that runs raypipe's commands there one after the other."""
    with cluster(nodes=count, cpus_per_node=devices, rates=rates) as machines, driver(machines) as commands:
        yield machines, commands


def rehearsed_s(machines: Cluster, commands: Driver, plan: Plan, *, num_updates: int = NUM_UPDATES) -> float:
    """Return the seconds of an update of a rehearsal."""
    path = machines.folder / "plan.json"
    plan.save(path)
    return float(commands.json("rehearse", path, "--updates", num_updates)["update_s"])


def fitted(machines: Cluster, commands: Driver, plan: Plan) -> Overheads:
    """Return what Ops take beyond their waits in a rehearsal of a plan."""
    path = machines.folder / "fitted.json"
    plan.save(path)
    commands.run("rehearse", path, "--updates", 2, "-o", path.with_suffix(".trace.json"))
    return ops_overheads(plan, Trace.load(path.with_suffix(".trace.json")))


def measured(name: str, *, rounds: int) -> dict[str, Any]:
    """Return the seconds of an update as estimated and simulated, with rounds also told and rehearsed."""
    case = CASES[name]
    evaluator, found = case.evaluated()
    result: dict[str, Any] = {"name": name, "layout": str(found.layout), "simulated_s": found.update_s}
    result["estimated_s"] = evaluator.estimator.estimate_s(found.layout) if found.layout.has_estimate else None
    if rounds:
        plan = evaluator.plan(found, planner="given", lower_bound_s=0.0)
        of_wires = rates(case.num_nodes, case.bad, case.wire_bytes_per_s)
        with on_nodes(case.num_nodes, case.devices, rates=of_wires) as (machines, commands):
            for _, pairs, rate in ports(case.num_nodes, case.slow_port, case.wire_bytes_per_s) if case.has_ports else ():
                machines.share(pairs, rate)
            told = plan.on(replace(plan.topology, overheads=fitted(machines, commands, plan)))
            runs = in_rounds({name: partial(rehearsed_s, machines, commands, plan)}, num_rounds=rounds)
        result |= {"told_s": simulate(told).update_s, "rehearsed_s": Summary.of(runs[name])}
    return result


def _row(result: dict[str, Any]) -> dict[str, str]:
    estimated_s, rehearsed = result["estimated_s"], result.get("rehearsed_s")
    row = {"case": result["name"], "estimated s": "-" if estimated_s is None else f"{estimated_s:.3f}"}
    row["simulated s"] = f"{result['simulated_s']:.3f}"
    if rehearsed is not None:
        row["told s"] = f"{result['told_s']:.3f}"
        row["rehearsed s"] = f"{rehearsed.median:.3f} +-{rehearsed.spread:.3f}"
        row["rehearsed over told"] = f"{rehearsed.median / result['told_s']:.3f}"
    return row


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate", action="store_true", help="without rehearsals, on any machine")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    results = []
    for name in options.cases:
        results.append(measured(name, rounds=0 if options.simulate else options.rounds))
        print(", ".join(f"{key} {value}" for key, value in _row(results[-1]).items()), results[-1]["layout"], flush=True)
    print_table("seconds of an update", [_row(result) for result in results])
    of = {result["name"]: result for result in results}
    if {"cnn, planned", "cnn, copies"} <= of.keys():
        planned, copies = of["cnn, planned"], of["cnn, copies"]
        print(f"raypipe's plan of the CNN over data parallelism: promised {copies['simulated_s'] / planned['simulated_s']:.3f}", end="")
        if not options.simulate:
            print(f", measured {copies['rehearsed_s'].median / planned['rehearsed_s'].median:.3f}", end="")
        print()
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
