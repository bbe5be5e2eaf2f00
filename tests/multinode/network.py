r"""Several "machines" on this one: network namespaces, joined by a switch, with a rate from each to each.

    node 0   10.77.0.1 e0 --- p0 \                          / p2 --- e0   node 2   10.77.0.3
                                   br0 -- u0 --- core --- u1 -- br1          (one bridge and no uplinks without `islands`)
    node 1   10.77.0.2 e0 --- p1 /                          \ p3 --- e0   node 3   10.77.0.4

Rates are those of `tc`'s htb where a packet leaves: at e0 for each pair, at u0 for what leaves an island, at e0 or p2 for what several
pairs from one node or to one node share. Packets have 9,000 bytes and are not put together to larger ones, so that what arrives in a
second is within 1 % of the rate, and a message of 100 kB takes its time and not that of its last segment. Acknowledgements pass the
queues at once: these hold all that a sender has under way, as no switch does, and data would wait for those of the other direction.

Each node is a process that sleeps, in namespaces of its own for network, process ids and mounts; the switch is another. The kernel
removes interfaces, queues and all processes of a namespace when that one ends, and ends it when the process that made the network ends,
however that happens. Outside of the namespaces there is nothing but a folder in /tmp. Files, shared memory and the host's name are
common to all nodes. The nodes reach each other, and nothing else. A relay adds latency (`tests.multinode.relay`): netem need not be there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypipe.cluster.signals import put_off
from tests.multinode.cores import CoreGroup, why_no_cores

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = Path("/tmp")  # not the TMPDIR of whoever runs the tests: Ray's sockets lie below, and their paths may have 107 bytes
MARK = "RAYPIPE_NETWORK"
"""In the environment of all processes of a network: its name; and in the file that marks its folder."""
UNLIMITED_BYTES_PER_S = 2.5e9
"""What the queues let through where no rate is set; two cores move less."""

_FOLDER = re.compile(r"rp(\d+)-\d+")
"""The name of a network's folder, with the process that made it."""
_MTU_BYTES = 9000
_BURST_S = 0.5e-3
"""A queue that was idle, or woken late, may catch up as much."""

_PROGRAM_S = 20.0
"""Until `ip` or `tc` must have ended."""
_KILLED_S = 10.0
"""Until a process must be gone that was killed."""
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "env")
_TRIAL = """
ip link set lo up
ip link add br0 type bridge
ip link add p0 type veth peer name e0
ip link set p0 master br0 up gso_max_segs 1
tc qdisc add dev e0 root handle 1: htb default 1
tc class add dev e0 parent 1: classid 1:1 htb rate 1000000bps quantum 60000
tc filter add dev e0 parent 1: protocol ip prio 1 u32 match u16 0 0xffc0 at 2 flowid 1:1
tc filter add dev e0 parent 1: protocol ip prio 2 u32 match ip dst 10.77.0.1/32 flowid 1:1
"""


class NetworkError(RuntimeError):
    """Something of the network, or a process on it, failed; says where and why."""


@functools.cache
def why_not(core_share: float | None = None) -> str | None:
    """The reason why this machine cannot have such a network; `None` where it can. Tries it, in namespaces that vanish."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2, util-linux and coreutils"
    if os.geteuid() != 0:
        return "network namespaces need root"
    command = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-ec", _TRIAL]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_S, check=False)
    except subprocess.TimeoutExpired:
        return f"`unshare` with `ip` and `tc` did not end within {_PROGRAM_S:g} s"
    if tried.returncode != 0:
        return f"no namespaces, veth, bridge or htb here: {tried.stderr.strip() or f'unshare ended with {tried.returncode}'}"
    return None if core_share is None else why_no_cores()


@dataclass(frozen=True)
class Node:
    """One machine of the network.

    Attributes:
        number: counted from 0.
        ip: its address.
        island: the number of the island that it belongs to; 0 where there are none.
    """

    number: int
    ip: str
    island: int


@contextlib.contextmanager
def network(
    *,
    nodes: int = 4,
    rates: float | Mapping[tuple[int, int], float] | None = None,
    islands: Sequence[Sequence[int]] | None = None,
    uplink: float | Sequence[float] | None = None,
    core_share: float | None = None,
) -> Iterator[Network]:
    """Brings up a network, and removes it whatever happens.

    Args:
        nodes: how many machines.
        rates: bytes per second of the wire from one node to another, by (source, target), which are numbers from 0; one number for all
            of them. Pairs that are left out have no limit.
        islands: the nodes of each island; left out for one switch that joins all nodes.
        uplink: bytes per second that may leave an island, all its nodes together; one number for all islands, or one for each.
        core_share: part of a core that each node has for itself (`tests.multinode.cores`); left out, nodes share all cores.

    Raises:
        NetworkError: this machine cannot (`why_not`), or something failed.
        ValueError: the arguments do not fit together.
    """
    if reason := why_not(core_share):
        raise NetworkError(reason)
    with closing_surely() as stack:
        yield Network(stack, nodes=nodes, rates=rates, islands=islands, uplink=uplink, core_share=core_share)


@contextlib.contextmanager
def closing_surely() -> Iterator[contextlib.ExitStack]:
    """A stack that is unwound to its end even if Ctrl-C comes meanwhile."""
    stack = contextlib.ExitStack()
    try:
        yield stack
    finally:
        with put_off():
            stack.close()


class Network:
    """Machines in namespaces. Made by `network`.

    Attributes:
        name: unique among the networks of this machine.
        nodes: by number.
        folder: for whatever belongs to this network; goes with it.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        *,
        nodes: int,
        rates: float | Mapping[tuple[int, int], float] | None,
        islands: Sequence[Sequence[int]] | None,
        uplink: float | Sequence[float] | None,
        core_share: float | None = None,
    ) -> None:
        island_of = _islands(nodes, islands)
        wires = _rates(nodes, rates)
        uplinks = _uplinks(len(islands or ()), uplink)
        self.nodes = tuple(Node(number, f"10.77.0.{number + 1}", island_of[number]) for number in range(nodes))
        self._stack = stack
        self._relays: dict[tuple[int, int], subprocess.Popen[str]] = {}
        self.folder = _claim_folder(stack)
        self.name = self.folder.name
        self._switch = _Namespace("the switch", self.name, stack)
        self._namespaces = [_Namespace(f"node {node.number}", self.name, stack, self._on_core(node, core_share)) for node in self.nodes]
        self._lay_cables(uplinks)
        peers = {node.number: node.ip for node in self.nodes}
        self._leaving = [
            _Queue(
                namespace,
                "e0",
                "dst",
                {peer: ip for peer, ip in peers.items() if peer != number},
                {target: _positive(rate) for (source, target), rate in wires.items() if source == number},
            )
            for number, namespace in enumerate(self._namespaces)
        ]
        self._arriving: dict[int, _Queue] = {}
        self._shared: set[tuple[tuple[int, int], ...]] = set()

    def set_rate(self, source: int, target: int, bytes_per_s: float | None) -> None:
        """Sets the rate of the wire from one node to another, also while it is in use; `None` for no limit."""
        _check_pair(len(self.nodes), source, target)
        self._leaving[source].set_rates({target: _positive(bytes_per_s)})

    def set_rates(self, rates: float | Mapping[tuple[int, int], float] | None) -> None:
        """Sets the rates of all wires; see `network`."""
        wires = _rates(len(self.nodes), rates)
        for source, queue in enumerate(self._leaving):
            queue.set_rates({target: _positive(wires.get((source, target))) for target in queue.peers})

    def set_uplink(self, island: int, bytes_per_s: float | None) -> None:
        """Sets the rate at which an island's nodes together may send to the others; `None` for no limit."""
        self._switch.configure("tc", [f"class change dev u{island} parent 1: classid 1:1 {_amounts(_positive(bytes_per_s))}"])

    def share(self, pairs: Iterable[tuple[int, int]], bytes_per_s: float) -> None:
        """Plants a bottleneck that several wires from one node, or several to one node, share; their own rates hold too.

        A wire is part of at most one bottleneck at its source and one at its target. Sharing the same wires again changes the rate.

        Raises:
            ValueError: the wires have neither their source nor their target in common; islands have bottlenecks of the other kind.
        """
        key = self._key(pairs)
        queue, peers = self._shared_queue(key)
        queue.share(peers, _positive(bytes_per_s))
        self._shared.add(key)

    def unshare(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Removes a bottleneck that `share` planted.

        Raises:
            ValueError: these wires share none.
        """
        key = self._key(pairs)
        if key not in self._shared:
            raise ValueError(f"{list(key)} share nothing; shared are {sorted(self._shared)}")
        queue, peers = self._shared_queue(key)
        queue.unshare(peers)
        self._shared.remove(key)

    def set_delay(self, source: int, target: int, seconds: float | None) -> None:
        """Hold what goes from one node to another for so long before its wire, also while that is in use; `None` for no relay.

        Raises:
            NetworkError: the relay did not come up; says what it said.
        """
        _check_pair(len(self.nodes), source, target)
        relay = self._relays.get((source, target))
        if seconds is None:
            if relay is not None:
                del self._relays[source, target]
                _end_relay(relay)
            return
        if relay is None:
            command = [sys.executable, "-m", "tests.multinode.relay", self.nodes[target].ip, str(seconds)]
            relay = self._stack.enter_context(self.start(command, node=source, stdin=subprocess.PIPE))
            self._relays[source, target] = relay
            assert relay.stdout is not None
            if not (select.select([relay.stdout], [], [], _PROGRAM_S)[0] and relay.stdout.readline()):
                del self._relays[source, target]
                relay.kill()
                raise NetworkError(f"the relay from node {source} to node {target} did not come up: {relay.communicate()[1][-1500:]}")
            return
        assert relay.stdin is not None
        relay.stdin.write(f"{seconds}\n")
        relay.stdin.flush()

    def part(self, one: int, other: int) -> None:
        """Lets no packet pass between two nodes, and tells nobody, as a firewall does; all else passes."""
        for node, peer in ((one, other), (other, one)):
            # To an address that no interface has.
            self._namespaces[node].configure("ip", [f"neigh replace {self.nodes[peer].ip} lladdr 02:00:00:00:00:01 dev e0 nud permanent"])

    def join(self, one: int, other: int) -> None:
        """Undoes `part`."""
        for node, peer in ((one, other), (other, one)):
            self._namespaces[node].configure("ip", [f"neigh del {self.nodes[peer].ip} dev e0"])

    def cut(self, node: int) -> None:
        """Pulls the plug of a node's cable: nothing gets in or out, and nobody is told."""
        self._switch.configure("ip", [f"link set p{node} down"])

    def mend(self, node: int) -> None:
        """Puts the plug back. What gave the node up meanwhile need not take it back: Ray does not."""
        self._switch.configure("ip", [f"link set p{node} up"])

    def kill(self, node: int) -> None:
        """Ends all processes of a node at once, as SIGKILL does, and removes the node; it does not come back."""
        self._namespaces[node].end()

    def crash(self, node: int) -> None:
        """Ends all processes of a node at once, as when a machine is switched off and on again; the node stays."""
        self._namespaces[node].crash()

    def sever(self, one: int, other: int) -> None:
        """Lets nothing pass between two nodes, which still reach all others; nobody is told. `rejoin` undoes it."""
        self._route("add", one, other)

    def rejoin(self, one: int, other: int) -> None:
        """Lets two severed nodes reach each other again."""
        self._route("del", one, other)

    def _route(self, verb: str, one: int, other: int) -> None:
        for source, target in ((one, other), (other, one)):
            self._namespaces[source].configure("ip", [f"route {verb} blackhole {self.nodes[target].ip}/32"])

    def pids(self, node: int) -> list[int]:
        """The processes of a node, by the ids that they have outside; none after `kill`."""
        return self._namespaces[node].pids()

    def processes(self, node: int, title: str, *, within_s: float = 0.0) -> list[int]:
        """The processes of a node whose titles begin with a pattern, as soon as there is one within some seconds."""
        deadline_s = time.monotonic() + within_s
        while True:
            found: list[int] = []
            for pid in self.pids(node):
                with contextlib.suppress(OSError):
                    if re.match(title, Path(f"/proc/{pid}/cmdline").read_text(errors="replace")):
                        found.append(pid)
            if found or time.monotonic() > deadline_s:
                return found

    def environment(self, node: int) -> dict[str, str]:
        """The environment of processes on a node."""
        return os.environ | {
            "GLOO_SOCKET_IFNAME": "e0",
            "NCCL_SOCKET_IFNAME": "e0",
            MARK: self.name,
            "NODE_IP": self.nodes[node].ip,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    @contextlib.contextmanager
    def start(
        self,
        code: str | Sequence[str],
        *,
        node: int = 0,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> Iterator[subprocess.Popen[str]]:
        """Starts a process on a node, and ends it with the block if it still runs then.

        Args:
            code: Python source, or a command.
            node: where.
            environment: variables besides those of `self.environment`.
            stdin: what the process reads.

        Yields:
            the process; its output and errors are text streams.
        """
        argv = [sys.executable, "-c", textwrap.dedent(code)] if isinstance(code, str) else list(code)
        process = subprocess.Popen(
            self._namespaces[node].command("env", f"--chdir={ROOT}", *argv),
            env=self.environment(node) | dict(environment or {}),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # No session of its own: Linux compares the priorities of threads within a session only (sched(7), autogroups).
            process_group=0,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr, process.stdin or contextlib.nullcontext():
            try:
                yield process
            finally:
                with put_off():
                    self._namespaces[node].end_group(process)

    def run(
        self,
        code: str | Sequence[str],
        *,
        node: int = 0,
        timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a process on a node to its end, in the root of the checkout.

        Args:
            code: Python source, or a command.
            node: where.
            timeout_s: until it must have ended.
            environment: variables besides those of `self.environment`.
            check: whether an exit status other than 0 is an error.

        Returns:
            its exit status, output and errors.

        Raises:
            NetworkError: it took too long, or failed.
        """
        what = f"node {node} of {self.name}: {'Python' if isinstance(code, str) else ' '.join(code)}"
        with self.start(code, node=node, environment=environment) as process:
            return finish(process, what=what, timeout_s=timeout_s, check=check)

    def _on_core(self, node: Node, core_share: float | None) -> Sequence[str]:
        """The beginning of commands that run on a node: on its part of a core."""
        if core_share is None:
            return ()
        cores = sorted(os.sched_getaffinity(0))
        if core_share * -(-len(self.nodes) // len(cores)) > 1:
            raise ValueError(f"core_share: {len(self.nodes)} nodes with {core_share:g} of a core each need more than {len(cores)} cores")
        core = cores[node.number % len(cores)]
        return CoreGroup(f"{self.name}-{node.number}", core=core, share=core_share, stack=self._stack).enter

    def _lay_cables(self, uplinks: Sequence[float | None]) -> None:
        switch = ["link add core type bridge", "link set core up"] if uplinks else []
        for island in {node.island for node in self.nodes}:
            switch += [f"link add br{island} type bridge", f"link set br{island} up"]
            if uplinks:
                switch += [*_cable(f"u{island}", f"d{island}"), _plug(f"u{island}", f"br{island}"), _plug(f"d{island}", "core")]
        for node, namespace in zip(self.nodes, self._namespaces, strict=True):
            switch += [*_cable(f"p{node.number}", "e0", f"netns {namespace.pid}"), _plug(f"p{node.number}", f"br{node.island}")]
        self._switch.configure("ip", switch)
        for node, namespace in zip(self.nodes, self._namespaces, strict=True):
            namespace.configure(
                "ip",
                ["link set lo up", f"addr add {node.ip}/24 dev e0", f"link set e0 mtu {_MTU_BYTES} gso_max_segs 1 up"],
            )
        for island, rate in enumerate(uplinks):
            limited = f"class add dev u{island} parent 1: classid 1:1 {_amounts(_positive(rate))}"
            self._switch.configure("tc", [*_root(f"u{island}", default="1"), limited])

    def _key(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        key = tuple(sorted(set(pairs)))
        for source, target in key:
            _check_pair(len(self.nodes), source, target)
        return key

    def _shared_queue(self, pairs: Sequence[tuple[int, int]]) -> tuple[_Queue, tuple[int, ...]]:
        """The queue that all these wires pass, and which of its peers they are."""
        sources, targets = ({pair[end] for pair in pairs} for end in (0, 1))
        if len(sources) == 1:
            return self._leaving[sources.pop()], tuple(target for _, target in pairs)
        if len(targets) == 1:
            target = targets.pop()
            if target not in self._arriving:
                others = {node.number: node.ip for node in self.nodes if node.number != target}
                self._arriving[target] = _Queue(self._switch, f"p{target}", "src", others, {})
            return self._arriving[target], tuple(source for source, _ in pairs)
        raise ValueError(f"{list(pairs)} neither leave one node nor arrive at one; use islands for a bottleneck between groups of nodes")


def finish(process: subprocess.Popen[str], *, what: str, timeout_s: float, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Waits for the end of a process that `Network.start` started.

    Args:
        process: the process.
        what: names it in errors.
        timeout_s: until it must have ended.
        check: whether an exit status other than 0 is an error.

    Returns:
        its exit status, output and errors, but for what was read before.

    Raises:
        NetworkError: it took too long, or failed.
    """
    try:
        stdout, stderr = process.communicate(timeout=max(timeout_s, 0))
    except subprocess.TimeoutExpired as late:
        told = "\n".join(_text(part) for part in (late.stdout, late.stderr))
        raise NetworkError(f"{what} has not ended within {timeout_s:.0f} s; it said:\n{told[-3000:]}") from None
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    return ended(what, done) if check else done


def ended(what: str, done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return a process that ended well.

    Raises:
        NetworkError: it failed.
    """
    if done.returncode != 0:
        raise NetworkError(f"{what} ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return done


def _end_relay(relay: subprocess.Popen[str]) -> None:
    assert relay.stdin is not None
    relay.stdin.close()
    try:
        relay.wait(_PROGRAM_S)
    except subprocess.TimeoutExpired:
        raise NetworkError(f"a relay has not ended within {_PROGRAM_S:g} s") from None


class _Namespace:
    """A network, process ids and mounts of their own, held by a process that sleeps; they end with it and it with its maker.

    Attributes:
        pid: of the process that sleeps.
    """

    def __init__(self, what: str, network: str, stack: contextlib.ExitStack, on_core: Sequence[str] = ()) -> None:
        self._what = f"{what} of {network}"
        self._on_core = on_core
        # The sleeping process is the first of its namespace: what loses its parent becomes its child, and must not stay a zombie.
        sleep = "read -r pid rest < /proc/self/stat; mount -t proc proc /proc; echo $pid; exec env --ignore-signal=CHLD sleep infinity"
        unshare = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "sh", "-ec", sleep, network]
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare],
            env=os.environ | {MARK: network},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        stack.callback(self.end)
        assert self._holder.stdout is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], 20)
        line = self._holder.stdout.readline() if ready else ""
        if not line:
            self._holder.kill()
            raise NetworkError(f"{self._what} did not come up within 20 s: {self._holder.communicate()[1].strip()}")
        self.pid = int(line)
        self._id = os.stat(f"/proc/{self.pid}/ns/pid").st_ino

    def command(self, *argv: str) -> list[str]:
        """The command that runs another one inside; raises as `configure` does."""
        return [*self._on_core, *self._enter("--net", "--pid", "--mount"), *argv]

    def configure(self, program: str, lines: Sequence[str]) -> None:
        """Has `ip` or `tc` carry out some lines; the first that fails is an error.

        Raises:
            NetworkError: with what the program said, or because the namespace has ended.
        """
        text = "".join(f"{line}\n" for line in lines)
        # In this namespace's network, but with the process ids outside: by them the lines name other namespaces.
        command = [*self._enter("--net"), program, "-batch", "-"]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_PROGRAM_S, check=False)
        except subprocess.TimeoutExpired:
            raise NetworkError(f"{self._what}: {program} did not end within {_PROGRAM_S:g} s; its lines were\n{text}") from None
        if done.returncode != 0:
            raise NetworkError(f"{self._what}: {program} refused a line of\n{text}{done.stderr}")

    def pids(self) -> list[int]:
        """All processes inside, by the ids that they have outside."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(folder / "ns" / "pid").st_ino == self._id:
                    found.append(int(folder.name))
        return found

    def end_group(self, process: subprocess.Popen[str]) -> None:
        """Ends a process that `command` runs, if it still does, and what it started; returns when it is gone.

        What a process left behind that ended by itself is a service, such as those of `ray start`, and stays.

        Raises:
            NetworkError: it is still there after a while, which only a fault of the kernel or its devices can cause.
        """
        deadline = time.monotonic() + _KILLED_S
        while process.poll() is None:
            # Not nsenter, which is their parent outside and takes note of their end; without it they could stay zombies.
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(pid) == process.pid:
                        os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)  # it may be about to enter: then it is found in the next round
            if process.poll() is None and time.monotonic() > deadline:
                process.kill()  # what is left inside ends with the namespace
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                raise NetworkError(f"{self._what}: process {process.pid} was killed and has not ended within {_KILLED_S:g} s")

    def crash(self) -> None:
        """Ends all processes inside but the one that holds the namespace."""
        deadline = time.monotonic() + _KILLED_S
        while left := [pid for pid in self.pids() if pid != self.pid]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise NetworkError(f"{self._what}: the processes {left} were killed and have not ended within {_KILLED_S:g} s")
            time.sleep(0.05)

    def _enter(self, *namespaces: str) -> list[str]:
        if self._holder.poll() is not None:
            raise NetworkError(f"{self._what} is no more")
        return ["nsenter", f"--target={self.pid}", *namespaces, "--"]

    def end(self) -> None:
        """Ends all processes inside; returns when they are gone.

        Raises:
            NetworkError: they are still there after a while, which only a fault of the kernel or its devices can cause.
        """
        if self._holder.poll() is None:
            # The kernel ends a namespace's processes with its first one, whose end it holds back until they are gone. The holder waits
            # for that; where it has not told the pid yet, its own end is the first one's.
            with contextlib.suppress(ProcessLookupError):
                os.kill(getattr(self, "pid", self._holder.pid), signal.SIGKILL)
        try:
            self._holder.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            raise NetworkError(f"{self._what} does not end") from None


@dataclass(frozen=True)
class _Share:
    """A bottleneck within a queue."""

    peers: tuple[int, ...]
    bytes_per_s: float

    @property
    def class_id(self) -> str:
        """A peer is in one share at most, so the first of its peers tells it from the others."""
        return f"1:{0x800 + self.peers[0]:x}"


class _Queue:
    """The htb tree of an interface: a class for each peer, below the root or below the class of a bottleneck.

    1: -- 1:101 (peer 1)       1: -- 1:802 (a bottleneck) -- 1:102 (peer 2)
       `- 1:fff (acknowledgements and the rest)           `- 1:103 (peer 3)
    """

    def __init__(self, namespace: _Namespace, device: str, end: str, peers: Mapping[int, str], rates: Mapping[int, float]) -> None:
        self._namespace = namespace
        self._device = device
        self._end = end
        self.peers = peers
        self._rates = dict.fromkeys(peers, UNLIMITED_BYTES_PER_S) | dict(rates)
        self._shares: dict[int, _Share] = {}
        self._tc([*_root(device, default="fff"), *(line for peer in peers for line in self._added(peer))])

    def set_rates(self, rates: Mapping[int, float]) -> None:
        self._rates |= rates
        self._tc([self._leaf("change", peer) for peer in rates])

    def share(self, peers: Sequence[int], bytes_per_s: float) -> None:
        share = _Share(tuple(sorted(peers)), bytes_per_s)
        before = {self._shares.get(peer) for peer in share.peers}
        verb = "add"
        if before != {None}:
            if any(other is None or other.peers != share.peers for other in before):
                raise ValueError(f"{self._device}: some of {list(peers)} share a bottleneck already; unshare it first")
            verb = "change"
        inner = f"class {verb} dev {self._device} parent 1: classid {share.class_id} {_amounts(bytes_per_s)}"
        if verb == "change":
            self._shares |= dict.fromkeys(share.peers, share)
            self._tc([inner, *(self._leaf("change", peer) for peer in share.peers)])
        else:
            removed = [line for peer in share.peers for line in self._removed(peer)]
            self._shares |= dict.fromkeys(share.peers, share)
            self._tc([inner, *removed, *(line for peer in share.peers for line in self._added(peer))])

    def unshare(self, peers: Sequence[int]) -> None:
        share = self._shares[min(peers)]
        removed = [line for peer in share.peers for line in self._removed(peer)]
        for peer in share.peers:
            del self._shares[peer]
        added = [line for peer in share.peers for line in self._added(peer)]
        self._tc([*removed, f"class del dev {self._device} classid {share.class_id}", *added])

    def _leaf(self, verb: str, peer: int) -> str:
        rate, share = self._rates[peer], self._shares.get(peer)
        if share is None:
            return f"class {verb} dev {self._device} parent 1: classid 1:{0x100 + peer:x} {_amounts(rate)}"
        # htb grants a class its rate even where its parent has less: so each is sure of an equal part, and borrows the rest.
        amounts = _amounts(min(rate, share.bytes_per_s / len(share.peers)), ceil=min(rate, share.bytes_per_s))
        return f"class {verb} dev {self._device} parent {share.class_id} classid 1:{0x100 + peer:x} {amounts}"

    def _added(self, peer: int) -> list[str]:
        matched = f"u32 match ip {self._end} {self.peers[peer]}/32 flowid 1:{0x100 + peer:x}"
        return [self._leaf("add", peer), f"filter add dev {self._device} parent 1: protocol ip prio {2 + peer} {matched}"]

    def _removed(self, peer: int) -> list[str]:
        return [
            f"filter del dev {self._device} parent 1: protocol ip prio {2 + peer}",
            f"class del dev {self._device} classid 1:{0x100 + peer:x}",
        ]

    def _tc(self, lines: Sequence[str]) -> None:
        self._namespace.configure("tc", lines)


def _cable(one: str, other: str, where: str = "") -> list[str]:
    """The lines of `ip` for a cable with two ends, the other end maybe in another namespace."""
    # A peer's namespace must be named with it; its MTU is that of the cable.
    return [f"link add {one} mtu {_MTU_BYTES} type veth peer name {other} mtu {_MTU_BYTES} {where}".rstrip()]


def _plug(end: str, bridge: str) -> str:
    return f"link set {end} master {bridge} gso_max_segs 1 up"


def _root(device: str, *, default: str) -> list[str]:
    """The lines of `tc` for an htb tree whose class 1:fff takes acknowledgements: packets of less than 64 bytes."""
    return [
        f"qdisc add dev {device} root handle 1: htb default {default}",
        f"class add dev {device} parent 1: classid 1:fff {_amounts(UNLIMITED_BYTES_PER_S)}",
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0 0xffc0 at 2 flowid 1:fff",
    ]


def _amounts(rate: float, *, ceil: float | None = None) -> str:
    """The amounts of an htb class; tc's bps are bytes per second."""
    most = rate if ceil is None else ceil
    burst_bytes = max(round(most * _BURST_S), 2000)
    return f"htb rate {rate:.0f}bps ceil {most:.0f}bps burst {burst_bytes} cburst {burst_bytes} quantum 60000"


def _positive(bytes_per_s: float | None) -> float:
    if bytes_per_s is None:
        return UNLIMITED_BYTES_PER_S
    if not 1 <= bytes_per_s <= UNLIMITED_BYTES_PER_S:
        raise ValueError(f"expected a rate from 1 to {UNLIMITED_BYTES_PER_S:g} bytes per second, got {bytes_per_s:g}")
    return bytes_per_s


def _check_pair(num_nodes: int, source: int, target: int) -> None:
    if source == target or not {source, target} <= set(range(num_nodes)):
        raise ValueError(f"expected two different nodes out of 0 to {num_nodes - 1}, got ({source}, {target})")


def _rates(num_nodes: int, rates: float | Mapping[tuple[int, int], float] | None) -> dict[tuple[int, int], float]:
    if rates is None:
        return {}
    if isinstance(rates, Mapping):
        for source, target in rates:
            _check_pair(num_nodes, source, target)
        return dict(rates)
    return dict.fromkeys(itertools.permutations(range(num_nodes), 2), rates)


def _islands(num_nodes: int, islands: Sequence[Sequence[int]] | None) -> dict[int, int]:
    """The island of each node."""
    if not 1 <= num_nodes <= 100:
        raise ValueError(f"expected 1 to 100 nodes, got {num_nodes}")
    if islands is None:
        return dict.fromkeys(range(num_nodes), 0)
    if sorted(node for island in islands for node in island) != list(range(num_nodes)):
        raise ValueError(f"islands: expected each of the nodes 0 to {num_nodes - 1} once, got {islands}")
    return {node: number for number, island in enumerate(islands) for node in island}


def _uplinks(num_islands: int, uplink: float | Sequence[float] | None) -> list[float | None]:
    if uplink is not None and not num_islands:
        raise ValueError("an uplink needs islands")
    if isinstance(uplink, Sequence):
        if len(uplink) != num_islands:
            raise ValueError(f"uplink: expected a rate for each of {num_islands} islands, got {uplink}")
        return list(uplink)
    return [uplink] * num_islands


def _claim_folder(stack: contextlib.ExitStack) -> Path:
    """A folder that is locked for as long as its owner lives; folders that a dead owner left are removed first."""
    _sweep()
    for serial in itertools.count():
        folder = FOLDERS / f"rp{os.getpid()}-{serial}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    lock = stack.enter_context((folder / "lock.made").open("w"))
    lock.write(MARK)
    lock.flush()
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Only now does it have the name that others look for, so nobody takes it for one without an owner.
    (folder / "lock.made").rename(folder / "lock")
    return folder


def _sweep() -> None:
    """Removes the folders of networks whose owner was killed; the kernel has removed the rest of them.

    Others have folders there, too, and this may be root: the name, the user, the mark and the end of the owner must all be right.
    """
    for file in FOLDERS.glob("rp*-*/lock"):
        named = _FOLDER.fullmatch(file.parent.name)
        if named is None or Path(f"/proc/{named[1]}").exists():
            continue
        with contextlib.suppress(OSError, UnicodeError), file.open() as lock:
            if file.parent.is_symlink() or os.fstat(lock.fileno()).st_uid != os.geteuid() or lock.read(len(MARK) + 1) != MARK:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)


def _text(part: bytes | str | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""
