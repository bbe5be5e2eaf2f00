"""`raypipe probe`: measures the running cluster's nodes, devices and links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from raypipe.cli.options import COUNT, SECONDS, check_folder, example, json_option
from raypipe.cli.screen import console, print_json
from raypipe.config import ClusterConfig
from raypipe.network.allowance import Budget
from raypipe.show.tables import shared_words, table
from raypipe.units import counted, ratio, seconds, size

if TYPE_CHECKING:
    from raypipe.cluster.prober import Probed, ProbedNode
    from raypipe.network.fit import LinkFit


@click.command(epilog=example("raypipe probe -o topology.yaml", "raypipe probe --address 10.0.0.1:6379 --budget-s 20 --json"))
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="Where to write the topology (YAML).")
@click.option("--address", help="Of the running Ray cluster.  [default: RAY_ADDRESS, else a local one is started]")
@click.option("--budget-s", type=SECONDS, default=Budget.seconds, show_default=True, help="Seconds that measuring may take.")
@click.option(
    "--budget-bytes",
    type=click.IntRange(1),
    default=Budget.num_bytes,
    show_default=True,
    help="Bytes that may go through all links together.",
)
@click.option("--devices-per-node", type=COUNT, help="Describe at most so many devices of each node.  [default: all]")
@click.option("--use-gpu", is_flag=True, help="Measure the GPUs and the links between them, not the CPU slots.")
@click.option("--timeout-s", type=SECONDS, default=60.0, show_default=True, help="Until the probe actors must be there.")
@json_option
def probe(
    *,
    output: str | None,
    address: str | None,
    budget_s: float,
    budget_bytes: int,
    devices_per_node: int | None,
    use_gpu: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Measure the running cluster: latency and bandwidth of every link, what links share, and how far clocks are apart.

    Messages go over the transports that training uses. Keep the cluster quiet meanwhile. What is written with -o can be planned and
    simulated with.
    """
    if output:
        check_folder(output)
    from raypipe.cluster.prober import probe as measure  # noqa: PLC0415  # loads ray and torch

    found = measure(
        ClusterConfig(address=address, dashboard=False, log_to_driver=False, start_timeout_s=timeout_s),
        budget=Budget(seconds=budget_s, num_bytes=budget_bytes),
        devices_per_node=devices_per_node,
        use_gpu=use_gpu,
        notice=lambda text: click.echo(text, err=True),
    )
    if output:
        found.topology.save(output)
    if as_json:
        print_json(_figures(found))
        return
    _print(found)
    if output:
        console().print(f"\nwritten to {output}", soft_wrap=True)


def _print(found: Probed) -> None:
    screen = console()
    topology = found.topology
    screen.print(f"{counted(len(topology.nodes), 'node')}, {counted(topology.num_devices, 'device')}", style="bold")
    columns = ("node", "host", "devices", "cores", "memory", "within: latency", "bandwidth", "residual", "clock ahead", "at most off by")
    screen.print(table(columns, (_node_row(node) for node in found.nodes), left=2))
    if found.links:
        screen.print()
        rows = (
            (found.nodes[a].name, found.nodes[b].name, seconds(link.latency_s), _rate(link.bandwidth_bytes_per_s), ratio(link.residual))
            for (a, b), link in sorted(found.links.items())
        )
        screen.print(table(("from", "to", "latency", "bandwidth", "residual"), rows, left=2))
    for shared in topology.shared_links:
        screen.print(f"{shared_words(shared)}: {_rate(shared.bandwidth_bytes_per_s)}", markup=False, soft_wrap=True)
    if any(node.info.node_gpus for node in found.nodes):
        screen.print()
        gpus = ((node, gpu) for node in found.nodes for gpu in node.info.node_gpus)
        screen.print(
            table(
                ("node", "GPU", "memory", "PCIe", "NUMA", "NVLinks"),
                (
                    (
                        node.name,
                        gpu.name,
                        size(gpu.memory_bytes),
                        f"{gpu.pcie_generation} x{gpu.pcie_lanes}",
                        "-" if gpu.numa_node is None else str(gpu.numa_node),
                        str(gpu.num_nvlinks),
                    )
                    for node, gpu in gpus
                ),
                left=2,
            )
        )
    between = found.allowance.num_rounds
    planned = f"{counted(between, 'round')} between nodes" if between else "no rounds between nodes"
    screen.print(f"\n{planned}; {counted(found.num_steps, 'measurement')}, {size(found.num_bytes)}, {seconds(found.seconds)}")


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


def _node_row(node: ProbedNode) -> tuple[str, ...]:
    inside, clock, info = node.inside, node.clock, node.info
    within = ("-", "-", "-") if inside is None else (seconds(inside.latency_s), _rate(inside.bandwidth_bytes_per_s), ratio(inside.residual))
    drift = "" if clock.drift is None else f" ({clock.drift * 1e6:+.0f} us/s)"
    return (
        node.name,
        info.hostname,
        str(node.num_devices),
        str(info.num_cores),
        size(info.memory_bytes),
        *within,
        seconds(clock.offset_s) + drift,
        seconds(clock.residual_s),
    )


def _link_figures(link: LinkFit | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {
        "latency_s": link.latency_s,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "residual": link.residual,
        "num_round_trips": link.num_round_trips,
        "num_bytes": link.num_bytes,
    }


def _figures(found: Probed) -> dict[str, Any]:
    """The figures of a probe; the keys are a contract."""
    rounds = found.allowance.rounds
    return {
        "name": found.topology.name,
        "digest": found.topology.digest,
        "num_devices": found.topology.num_devices,
        "nodes": [
            {
                "name": node.name,
                "hostname": node.info.hostname,
                "num_devices": node.num_devices,
                "num_cores": node.info.num_cores,
                "memory_bytes": node.info.memory_bytes,
                "inside": _link_figures(node.inside),
                "clock": {
                    "offset_s": node.clock.offset_s,
                    "residual_s": node.clock.residual_s,
                    "drift": node.clock.drift,
                },
                "gpus": [
                    {
                        "name": gpu.name,
                        "uuid": gpu.uuid,
                        "memory_bytes": gpu.memory_bytes,
                        "pcie_generation": gpu.pcie_generation,
                        "pcie_lanes": gpu.pcie_lanes,
                        "numa_node": gpu.numa_node,
                        "num_nvlinks": gpu.num_nvlinks,
                    }
                    for gpu in node.info.node_gpus
                ],
            }
            for node in found.nodes
        ],
        "links": [
            {"from": found.nodes[a].name, "to": found.nodes[b].name, **(_link_figures(link) or {})}
            for (a, b), link in sorted(found.links.items())
        ],
        "shared_links": [
            {
                "name": shared.name,
                "bandwidth_bytes_per_s": shared.bandwidth_bytes_per_s,
                "members": [list(member) for member in shared.members],
            }
            for shared in found.topology.shared_links
        ],
        "num_rounds": {"tournament": rounds.tournament, "company": rounds.company, "fans": rounds.fans},
        "looks": found.allowance.looks,
        "num_steps": found.num_steps,
        "num_bytes": found.num_bytes,
        "seconds": found.seconds,
        "notices": list(found.notices),
    }
