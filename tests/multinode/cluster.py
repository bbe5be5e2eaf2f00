"""A Ray cluster of several nodes on this one machine, over a network with set rates (`tests.multinode.network`).

    with cluster(nodes=4, rates=200e6 / 8) as c:             # 200 Mbit/s from each node to each other one
        c.set_rate(1, 2, 50e6 / 8)                           # bytes per second from node 1 to node 2, at any time; None: no limit
        c.set_rates({(0, 1): 100e6 / 8})                     # of all wires; those left out have no limit
        c.share([(0, 2), (0, 3)], 100e6 / 8)                 # ... together; from one source or to one target; c.unshare(...) undoes it
        c.set_delay(0, 1, 0.02)                              # seconds besides, from node 0 to node 1, at any time; None: none
        done = c.run("import ray; ray.init(); print(ray.nodes())")    # Python on node 0; done.stdout, done.stderr
        c.run([sys.executable, "-m", "raypipe", "train", "config.yaml"], node=0, timeout_s=120)
        with c.start(code) as driver:                        # the same in the background: a Popen with text streams
            driver.stdout.readline()
        c.cut(3); c.mend(3); c.kill(2)                       # the cable pulled and plugged in; all processes of a node ended
        c.wait_for_alive({0, 1})                             # until Ray has noticed

    with cluster(nodes=4, islands=[[0, 1], [2, 3]], uplink=[50e6 / 8, 100e6 / 8]) as c:   # what leaves island 0, and what leaves island 1
        c.set_uplink(0, 25e6 / 8)

Nodes are counted from 0; node 0 is the head. `c.nodes[i].ip` is an address, `c.address` what `ray.init` and `cluster.address` take;
processes on the nodes have it in RAY_ADDRESS. Ray's label `raypipe.io/node` of a node is `node0` and so on. Nothing outside of the network
can reach it: drivers must run on a node (`c.run`). Every node has its own process ids, so a plain `ray.init()` finds the node that
it is on, on every node. Files and the host's name are those of this machine.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.multinode.network import Network, NetworkError, closing_surely, finish, why_not

PORT = 6379
OBJECT_STORE_BYTES = 100_000_000  # of each node; they share /dev/shm
DEATH_ENVIRONMENT = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "5"}
"""A node that is cut off counts as dead after about 10 s, instead of more than a minute."""

_RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
_ALIVE = """
import json, sys, time, ray
ray.init(log_to_driver=False, logging_level="ERROR")
expected, deadline = set(json.loads(sys.argv[1])), time.monotonic() + float(sys.argv[2])
while (alive := {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) != expected and time.monotonic() < deadline:
    time.sleep(0.2)
print("alive", json.dumps(sorted(alive)))
"""


@contextlib.contextmanager
def cluster(
    *,
    nodes: int = 4,
    rates: float | Mapping[tuple[int, int], float] | None = None,
    cpus_per_node: int | Sequence[int] = 4,
    labels: Mapping[int, Mapping[str, str]] | None = None,
    islands: Sequence[Sequence[int]] | None = None,
    uplink: float | Sequence[float] | None = None,
    environment: Mapping[str, str] | None = None,
    core_share: float | None = None,
    start_timeout_s: float = 120.0,
) -> Iterator[Cluster]:
    """Brings up a Ray cluster, and removes it whatever happens. Takes about 10 s on two cores.

    Args:
        nodes: how many.
        rates: bytes per second from one node to another, by (source, target); one number for all; pairs left out have no limit.
        cpus_per_node: what Ray is told that each has; one number for all, or one for each.
        labels: Ray labels of some nodes, by number.
        islands: the nodes of each island; left out for one switch that joins all nodes.
        uplink: bytes per second that may leave an island, all its nodes together; one number for all islands, or one for each.
        environment: variables for all processes on the nodes, above those that this module sets.
        core_share: part of a core that each node has for itself (`tests.multinode.cores`); left out, nodes share all cores.
        start_timeout_s: until all nodes must be there.

    Raises:
        NetworkError: this machine cannot have such a network (`why_not`), or a node did not start; names it.
        ValueError: the arguments do not fit together.
    """
    if reason := why_not(core_share):
        raise NetworkError(reason)
    cpus = [cpus_per_node] * nodes if isinstance(cpus_per_node, int) else list(cpus_per_node)
    if len(cpus) != nodes:
        raise ValueError(f"cpus_per_node: expected one number for each of {nodes} nodes, got {cpus}")
    with closing_surely() as stack:
        made = Cluster(
            stack, nodes=nodes, rates=rates, islands=islands, uplink=uplink, environment=environment or {}, core_share=core_share
        )
        made.start_ray(cpus, labels or {}, timeout_s=start_timeout_s)
        yield made


class Cluster(Network):
    """Machines in namespaces that run Ray. Made by `cluster`."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        *,
        nodes: int,
        rates: float | Mapping[tuple[int, int], float] | None,
        islands: Sequence[Sequence[int]] | None,
        uplink: float | Sequence[float] | None,
        environment: Mapping[str, str],
        core_share: float | None,
    ) -> None:
        super().__init__(stack, nodes=nodes, rates=rates, islands=islands, uplink=uplink, core_share=core_share)
        self._environment = dict(environment)
        self._token = self.folder / "token"
        self._token.write_text(secrets.token_hex(32))

    @property
    def address(self) -> str:
        """Where the cluster is reached, by processes on its nodes."""
        return f"{self.nodes[0].ip}:{PORT}"

    def environment(self, node: int) -> dict[str, str]:
        """The environment of processes on a node, Ray's and drivers'."""
        inherited = {name: value for name, value in super().environment(node).items() if not name.startswith("RAY_")}
        return (
            inherited
            | DEATH_ENVIRONMENT
            | {
                "RAY_ADDRESS": self.address,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self._token),
                "RAY_TMPDIR": str(self._ray_folder(node)),
                "RAY_USAGE_STATS_ENABLED": "0",
                # Four nodes' idle workers would take the two cores of a small machine for seconds; stage actors start their own.
                "RAY_prestart_worker_first_driver": "0",
                "RAY_worker_niceness": "0",
            }
            | self._environment
        )

    def alive(self) -> set[int]:
        """The nodes that Ray holds to be alive, by number."""
        return self._alive(None, timeout_s=0.0)

    def wait_for_alive(self, expected: set[int], *, timeout_s: float = 40.0) -> float:
        """Waits until Ray holds just these nodes to be alive; returns the seconds that it took.

        Raises:
            NetworkError: it does not within the time.
        """
        since = time.monotonic()
        found = self._alive(expected, timeout_s=timeout_s)
        if found != expected:
            raise NetworkError(f"{self.name}: after {timeout_s:g} s Ray sees the nodes {sorted(found)}, not {sorted(expected)}")
        return time.monotonic() - since

    def start_ray(self, cpus: Sequence[int], labels: Mapping[int, Mapping[str, str]], *, timeout_s: float) -> None:
        """Starts the head, then all other nodes at the same time."""
        deadline = time.monotonic() + timeout_s
        commands = [self._start_command(node.number, cpus[node.number], labels.get(node.number, {})) for node in self.nodes]
        for node in self.nodes:
            self._ray_folder(node.number).mkdir()
        self.run(commands[0], node=0, timeout_s=timeout_s)
        with contextlib.ExitStack() as stack:
            starting = {number: stack.enter_context(self.start(commands[number], node=number)) for number in range(1, len(self.nodes))}
            for number, process in starting.items():
                left_s = max(deadline - time.monotonic(), 0.0)
                what = f"node {number} of {self.name}: ray start, with {timeout_s:g} s for all nodes"
                finish(process, what=what, timeout_s=left_s)

    def start_node(self, node: int, *, num_cpus: int, timeout_s: float = 60.0) -> None:
        """Starts Ray on a node once more, after `crash`."""
        self.run(self._start_command(node, num_cpus, {}), node=node, timeout_s=timeout_s)

    def _start_command(self, node: int, num_cpus: int, labels: Mapping[str, str]) -> list[str]:
        role = ["--head", f"--port={PORT}", "--include-dashboard=false"] if node == 0 else [f"--address={self.address}"]
        named = {"raypipe.io/node": f"node{node}"} | dict(labels)
        return [
            *_RAY,
            *role,
            f"--node-ip-address={self.nodes[node].ip}",
            f"--num-cpus={num_cpus}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            # A folder for each: nodes that start at the same time would otherwise take the same names for their sockets.
            f"--temp-dir={self._ray_folder(node)}",
            "--labels=" + ",".join(f"{key}={value}" for key, value in named.items()),
            "--disable-usage-stats",
        ]

    def _ray_folder(self, node: int) -> Path:
        return self.folder / str(node)

    def _alive(self, expected: set[int] | None, *, timeout_s: float) -> set[int]:
        wanted = [self.nodes[number].ip for number in sorted(expected or ())]
        done = self.run([sys.executable, "-c", _ALIVE, json.dumps(wanted), str(timeout_s)], timeout_s=timeout_s + 40)
        # What Ray has to say of dead nodes may stand before and behind it.
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("alive "))
        found = set(json.loads(line.removeprefix("alive ")))
        return {node.number for node in self.nodes if node.ip in found}
