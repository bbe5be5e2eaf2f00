"""Command `raypipe probe`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raypipe.cli.options import COUNT, SECONDS, check_output, example, json_option
from raypipe.cli.screen import console, notice, print_json
from raypipe.config import ClusterConfig
from raypipe.network.probe_budget import Budget
from raypipe.profiling.sailor import SailorData, parse_nodes
from raypipe.show.report import Figure, Report, rows_table
from raypipe.show.tables import shared_words
from raypipe.units import counted, ratio, seconds, size

if TYPE_CHECKING:
    from raypipe.cluster.prober import Probed, ProbedNode
    from raypipe.network.fit import LinkFit


_SAILOR = ("nodes", "tensor_parallel")


@click.command(
    epilog=example(
        "raypipe probe -o topology.yaml",
        "raypipe probe --address 10.0.0.1:6379 --budget-s 20 --json",
        "raypipe probe --from-sailor measured --nodes 'GH-96x4@us-central1-a*8' --tensor-parallel 4 -o topology.yaml",
    )
)
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="File to write the description of the cluster to (.yaml).")
@click.option(
    "--address", help="Address of a running Ray cluster.  [default: the environment's RAY_ADDRESS, else a local cluster is started]"
)
@click.option("--budget-s", type=SECONDS, default=Budget.seconds, help="Largest time to spend on measurements, in seconds.")
@click.option(
    "--budget-bytes", type=click.IntRange(1), default=Budget.num_bytes, help="Largest number of bytes to send, summed over all links."
)
@click.option("--devices-per-node", type=COUNT, help="Largest number of devices to describe on each node.  [default: all]")
@click.option("--use-gpu", is_flag=True, help="Measure GPUs and the links between them in place of CPU slots.")
@click.option("--timeout-s", type=SECONDS, default=60.0, help="Seconds to wait for the measuring processes to start.")
@click.option(
    "--from-sailor", type=click.Path(), metavar="FOLDER", help="Take the links of this folder of Sailor's in place of a measurement."
)
@click.option("--nodes", metavar="GPUxGPUS@ZONE*NODES,...", help="With --from-sailor, kind of GPU, GPUs a node, zone and number of nodes.")
@click.option("--tensor-parallel", type=COUNT, default=1, help="With --from-sailor, number of GPUs that are one device together.")
@json_option
@click.pass_context
def probe(
    context: click.Context,
    *,
    output: str | None,
    address: str | None,
    budget_s: float,
    budget_bytes: int,
    devices_per_node: int | None,
    use_gpu: bool,
    timeout_s: float,
    from_sailor: str | None,
    nodes: str | None,
    tensor_parallel: int,
    as_json: bool,
) -> None:
    """Measure the running cluster: latency and bandwidth of every link, what links share, and how far clocks are apart.

    Messages go over the transports that training uses. Keep the cluster quiet meanwhile. What is written with -o can be planned and
    simulated with. What Sailor measured of GPUs and clouds is read with --from-sailor.
    """
    check_output(output, suffixes=["yaml", "yml"])
    _check_options(context)
    if from_sailor is not None:
        assert nodes is not None, "checked with the options"
        _convert(from_sailor, nodes, tensor_parallel, output, as_json=as_json)
        return
    from raypipe.cluster.prober import probe as measure  # noqa: PLC0415  # loads ray and torch

    found = measure(
        ClusterConfig(address=address, dashboard=False, log_to_driver=False, start_timeout_s=timeout_s),
        budget=Budget(seconds=budget_s, num_bytes=budget_bytes),
        devices_per_node=devices_per_node,
        use_gpu=use_gpu,
        notice=notice,
    )
    if output:
        found.topology.save(output)
    report = _report(found)
    if as_json:
        print_json(report.document())
        return
    _print(found, report)
    if output:
        console().print(f"\nwritten to {output}", soft_wrap=True)


def _check_options(context: click.Context) -> None:
    params = context.params
    sailor = params["from_sailor"] is not None
    if sailor and params["nodes"] is None:
        raise click.UsageError("--from-sailor needs --nodes: its files have the links of many kinds of nodes", context)
    allowed = {"output", "as_json", "from_sailor", *_SAILOR} if sailor else {name for name in params if name not in _SAILOR}
    for parameter in context.command.params:
        given = parameter.name and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        if given and parameter.name not in allowed:
            of_what = "a measurement" if sailor else "--from-sailor"
            raise click.UsageError(f"{max(parameter.opts, key=len)} can be used with {of_what} only", context)


def _convert(folder: str, nodes: str, tensor_parallel: int, output: str | None, *, as_json: bool) -> None:
    data, listed = SailorData(Path(folder)), parse_nodes(nodes)
    topology = data.topology(listed, tensor_parallel=tensor_parallel)
    if output:
        topology.save(output)
    pairs = [(one, other) for one, other in itertools.product(dict.fromkeys(listed), repeat=2) if one != other or listed.count(one) > 1]
    links = [
        Report(
            Figure("from", f"{one.gpu} {one.zone}", "from"),
            Figure("to", f"{other.gpu} {other.zone}", "to"),
            Figure("latency_s", curve.line[0], "latency", seconds),
            Figure("bandwidth_bytes_per_s", curve.line[1], "bandwidth", _rate),
            Figure("error", curve.error, "largest\nerror", ratio),
        )
        for one, other in pairs
        for curve in [data.between(one, other, tensor_parallel)]
    ]
    report = Report(
        Figure("name", topology.name),
        Figure("digest", topology.digest),
        Figure("num_devices", topology.num_devices),
        Figure("links", links),
    )
    if as_json:
        print_json(report.document())
        return
    screen = console()
    screen.print(f"{counted(len(listed), 'node')}, {counted(topology.num_devices, 'device')}", style="bold")
    if links:
        screen.print(rows_table(links, left=2))
    if output:
        screen.print(f"\nwritten to {output}", soft_wrap=True)


def _print(found: Probed, report: Report) -> None:
    screen = console()
    screen.print(f"{counted(len(found.topology.nodes), 'node')}, {counted(found.topology.num_devices, 'device')}", style="bold")
    screen.print(rows_table([_node_report(node) for node in found.nodes], left=2))
    for shown in (_link_reports(found), [gpu for node in found.nodes for gpu in _gpu_reports(node)]):
        if shown:
            screen.print()
            screen.print(rows_table(shown, left=2))
    for shared in found.topology.shared_links:
        screen.print(f"{shared_words(shared)}: {_rate(shared.bandwidth_bytes_per_s)}")
    screen.print(f"\n{report.sentence()}")


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


def _node_report(node: ProbedNode) -> Report:
    clock, info = node.clock, node.info
    return Report(
        Figure("name", node.name, "node"),
        Figure("hostname", info.hostname, "host"),
        Figure("num_devices", node.num_devices, "devices"),
        Figure("num_cores", info.num_cores, "cores"),
        Figure("memory_bytes", info.memory_bytes, "memory", size),
        Figure("inside", None if node.inside is None else Report(*_link_figures(node.inside, "within\n"))),
        Figure(
            "clock",
            Report(
                Figure("offset_s", clock and clock.offset_s, "clock\nahead", seconds),
                Figure("residual_s", clock and clock.residual_s, "at most\noff by", seconds),
                Figure("drift", clock and clock.drift, "clock\ngains", lambda drift: f"{drift * 1e6:+.0f} us/s"),
            ),
        ),
        Figure("gpus", _gpu_reports(node)),
    )


def _link_figures(link: LinkFit, prefix: str = "") -> tuple[Figure, ...]:
    return (
        Figure("latency_s", link.latency_s, f"{prefix}latency", seconds),
        Figure("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, f"{prefix}bandwidth", _rate),
        Figure("residual", link.residual, f"{prefix}residual", ratio),
        Figure("num_round_trips", link.num_round_trips),
        Figure("num_bytes", link.num_bytes),
    )


def _link_reports(found: Probed) -> list[Report]:
    return [
        Report(Figure("from", found.nodes[source].name, "from"), Figure("to", found.nodes[target].name, "to"), *_link_figures(link))
        for (source, target), link in sorted(found.links.items())
    ]


def _gpu_reports(node: ProbedNode) -> list[Report]:
    return [
        Report(
            Figure("", node.name, "node"),
            Figure("name", gpu.name, "GPU"),
            Figure("uuid", gpu.uuid),
            Figure("memory_bytes", gpu.memory_bytes, "memory", size),
            Figure("", f"{gpu.pcie_generation} x{gpu.pcie_lanes}", "PCIe"),
            Figure("pcie_generation", gpu.pcie_generation),
            Figure("pcie_lanes", gpu.pcie_lanes),
            Figure("numa_node", gpu.numa_node, "NUMA"),
            Figure("num_nvlinks", gpu.num_nvlinks, "NVLinks"),
        )
        for gpu in node.info.node_gpus
    ]


def _report(found: Probed) -> Report:
    topology, rounds = found.topology, found.measurements.rounds
    return Report(
        Figure("name", topology.name),
        Figure("digest", topology.digest),
        Figure("num_devices", topology.num_devices),
        Figure("nodes", list(map(_node_report, found.nodes))),
        Figure("links", _link_reports(found)),
        Figure("missing_links", [[found.nodes[node].name for node in pair] for pair in found.missing]),
        Figure(
            "shared_links",
            [
                {"name": shared.name, "bandwidth_bytes_per_s": shared.bandwidth_bytes_per_s, "members": list(map(list, shared.members))}
                for shared in topology.shared_links
            ],
        ),
        Figure("num_rounds", {"tournament": rounds.tournament, "company": rounds.paired, "fans": rounds.one_to_all}),
        Figure("", found.measurements.num_rounds, "rounds between nodes"),
        Figure("looks", found.measurements.looks),
        Figure("num_steps", found.num_steps, "measurements"),
        Figure("num_bytes", found.num_bytes, "sent", size),
        Figure("seconds", found.seconds, "in", seconds),
        Figure("notices", list(found.notices)),
    )
