"""The network of namespaces does what it says: rates, bottlenecks, cuts and ends, measured by plain sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.multinode.network import FOLDERS, MARK, ROOT, Network, NetworkError, finish, network, why_not
from tests.on_ray.conftest import Brand

MBIT = 1e6 / 8  # bytes per second

# Takes what comes and tells, on each connection's end, how many bytes came in how many seconds since the first.
SINK = """
import socket, threading, time
server = socket.create_server(("", 5000))
print("listening", flush=True)
def take(connection):
    connection.sendall(b"!")
    total, since = 0, None
    while data := connection.recv(1 << 20):
        now = time.monotonic()
        since = since or now
        total += len(data)
    connection.sendall(f"{total / (now - since)}".encode())
    connection.close()
while True:
    threading.Thread(target=take, args=server.accept()[:1], daemon=True).start()
"""

# Sends for some seconds, to all targets at the same time, and prints the bytes per second that each of them saw.
SOURCE = """
import json, socket, sys, threading, time
seconds, targets = float(sys.argv[1]), sys.argv[2:]
found = {}
ready = threading.Barrier(len(targets))
def send(target):
    connection = socket.create_connection((target, 5000), timeout=10)
    connection.recv(1)
    ready.wait(10)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.sendall(bytes(1 << 16))
    connection.shutdown(socket.SHUT_WR)
    found[target] = float(connection.recv(100))
threads = [threading.Thread(target=send, args=(target,)) for target in targets]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps([found[target] for target in targets]))
"""

# Prints what comes per fifth of a second, for as long as something comes.
METER = """
import socket, time
server = socket.create_server(("", 5001))
print("listening", flush=True)
connection, _ = server.accept()
total, since = 0, time.monotonic()
while data := connection.recv(1 << 20):
    total += len(data)
    if (now := time.monotonic()) - since >= 0.2:
        print(total / (now - since), flush=True)
        total, since = 0, now
"""

STREAM = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5001), timeout=60)
while True:
    connection.sendall(bytes(1 << 16))
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Five machines, a sink on each of the first four."""
    with network(nodes=5) as made, sinks(made, range(4)):
        yield made


@contextlib.contextmanager
def sinks(net: Network, nodes: Sequence[int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for node in nodes:
            process = stack.enter_context(net.start(SINK, node=node))
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
        yield


def sent(net: Network, source: int, *targets: int) -> list[float]:
    """Megabits per second from one node to others at the same time."""
    argv = [sys.executable, "-c", SOURCE, "0.6", *(net.nodes[target].ip for target in targets)]
    return [rate / MBIT for rate in json.loads(net.run(argv, node=source).stdout)]


def carries(net: Network, source: int, *rates: tuple[int, float]) -> None:
    """Asserts that a node sends to others (target, megabits per second) at the same time.

    A machine that is busy with other things may be slower now and then, but never faster: one of five tries must hit the rates, and
    none may exceed one of them.
    """
    wanted = [rate for _, rate in rates]
    seen: list[list[float]] = []
    while len(seen) < 5:
        seen.append(sent(net, source, *(target for target, _ in rates)))
        if seen[-1] == pytest.approx(wanted, rel=0.1):
            return
        assert all(rate < 1.1 * most for rate, most in zip(seen[-1], wanted, strict=True))
    pytest.fail(f"wanted {wanted} Mbit/s to nodes {[target for target, _ in rates]}, got {seen}")


def carries_together(net: Network, source: int, targets: Sequence[int], rate: float) -> None:
    """Asserts that a node sends so many megabits per second to others together; tries as `carries` does."""
    seen: list[float] = []
    while len(seen) < 5:
        seen.append(sum(sent(net, source, *targets)))
        if seen[-1] == pytest.approx(rate, rel=0.1):
            return
        assert seen[-1] < 1.1 * rate
    pytest.fail(f"wanted {rate} Mbit/s to nodes {targets} together, got {seen}")


@pytest.mark.parametrize("megabits", [50, 100, 250, 500, 1000])
def test_a_wire_carries_what_its_rate_says(net: Network, megabits: int) -> None:
    net.set_rate(0, 1, megabits * MBIT)
    carries(net, 0, (1, megabits))


def test_the_two_directions_and_other_pairs_have_rates_of_their_own(net: Network) -> None:
    net.set_rate(0, 2, 50 * MBIT)
    net.set_rate(2, 0, 200 * MBIT)
    net.set_rate(0, 3, 100 * MBIT)
    carries(net, 0, (2, 50), (3, 100))
    carries(net, 2, (0, 200))


@contextlib.contextmanager
def stream(net: Network, source: int, target: int) -> Iterator[Iterator[float]]:
    """A stream without end from one node to another; yields its bytes per second as they are metered."""
    with net.start(METER, node=target) as meter:
        assert meter.stdout is not None
        assert meter.stdout.readline() == "listening\n"
        with net.start([sys.executable, "-c", STREAM, net.nodes[target].ip], node=source):
            yield (float(line) for line in meter.stdout)


def until(rates: Iterator[float], expected: float) -> int:
    """How many times the meter was read until it showed a rate, within a tenth."""
    seen: list[float] = []
    for rate in rates:
        seen.append(rate)
        if rate == pytest.approx(expected, rel=0.1):
            return len(seen)
        if len(seen) == 40:
            break
    pytest.fail(f"never came to {expected:g} bytes per second; saw {[f'{rate:.3g}' for rate in seen]}")


def test_a_rate_that_changes_while_data_flows_is_seen_within_two_seconds(net: Network) -> None:
    net.set_rate(1, 2, 100 * MBIT)
    with stream(net, 1, 2) as rates:
        until(rates, 100 * MBIT)
        net.set_rate(1, 2, 300 * MBIT)
        assert until(rates, 300 * MBIT) <= 10
        net.set_rate(1, 2, 50 * MBIT)
        assert until(rates, 50 * MBIT) <= 10


def test_wires_from_one_node_share_a_bottleneck_until_it_is_removed(net: Network) -> None:
    pairs = [(3, 1), (3, 2)]
    for source, target in pairs:
        net.set_rate(source, target, 100 * MBIT)
    net.share(pairs, 80 * MBIT)
    carries(net, 3, (1, 80))
    carries_together(net, 3, [1, 2], 80)
    net.set_rate(3, 1, 20 * MBIT)  # the wire's own rate holds too, and the other takes what is left
    carries(net, 3, (1, 20), (2, 60))
    net.share(pairs, 40 * MBIT)
    carries_together(net, 3, [1, 2], 40)
    net.unshare(pairs)
    carries(net, 3, (1, 20), (2, 100))


def test_wires_to_one_node_share_a_bottleneck(net: Network) -> None:
    net.set_rate(1, 0, 100 * MBIT)
    net.set_rate(2, 0, 100 * MBIT)
    net.share([(1, 0), (2, 0)], 100 * MBIT)
    try:
        with stream(net, 1, 0) as rates:
            until(rates, 100 * MBIT)
            carries(net, 2, (0, 50))
            until(rates, 100 * MBIT)
    finally:
        net.unshare([(1, 0), (2, 0)])


def test_a_node_that_is_cut_off_gets_nothing_until_it_is_mended(net: Network) -> None:
    net.set_rate(0, 1, None)
    net.cut(1)
    try:
        attempt = f"import socket; socket.create_connection(('{net.nodes[1].ip}', 5000), timeout=1)"
        with pytest.raises(NetworkError, match=r"TimeoutError|No route to host"):
            net.run(attempt, node=0)
    finally:
        net.mend(1)
    assert sent(net, 0, 1)[0] > 100


def test_the_processes_of_a_killed_node_are_gone_and_its_peers_notice(net: Network) -> None:
    with stream(net, 4, 0) as rates, net.start("import time; print('here', flush=True); time.sleep(600)", node=4) as sleeper:
        next(rates)
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "here\n"
        pids = net.pids(4)
        assert len(pids) == 3  # the one that holds the namespace, the stream and the sleeper
        net.kill(4)
        assert net.pids(4) == []
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert len(list(rates)) < 20  # the connection ends
    with pytest.raises(NetworkError, match=r"node 4 of .* is no more"):
        net.set_rate(4, 0, 50 * MBIT)


def test_what_leaves_an_island_shares_its_uplink_and_what_stays_does_not() -> None:
    with network(nodes=4, islands=[[0, 1], [2, 3]], uplink=[40 * MBIT, 80 * MBIT], rates=200 * MBIT) as net, sinks(net, range(4)):
        carries_together(net, 0, [2, 3], 40)
        carries(net, 3, (1, 80))
        carries(net, 0, (1, 200))
        net.set_uplink(0, 100 * MBIT)
        carries(net, 1, (2, 100))


def test_a_process_that_takes_too_long_or_fails_is_an_error_with_what_it_said(net: Network) -> None:
    with pytest.raises(NetworkError, match=r"node 0 .* not ended within 1 s; it said:\nhere"):
        net.run("import time; print('here', flush=True); time.sleep(600)", timeout_s=1)
    with pytest.raises(NetworkError, match=r"node 1 .* ended with 3:\n\nno luck"):
        net.run("import sys; print('no luck', file=sys.stderr); sys.exit(3)", node=1)
    assert net.run("raise SystemExit(3)", check=False).returncode == 3
    assert len(net.pids(0)) == 2  # the one that holds the namespace, and the sink


SPIN = """
import os, time
begin = {begin}
assert time.monotonic() < begin, "this process took too long to start"
time.sleep(begin - time.monotonic())
used = time.process_time()
while time.monotonic() < begin + 1.5:
    pass
print(len(os.sched_getaffinity(0)), (time.process_time() - used) / 1.5)
"""
"""Two processes spin in the same 1.5 seconds; what they take to start does not count."""


def test_a_node_has_no_more_than_its_part_of_a_core() -> None:
    if reason := why_not(0.25):
        pytest.skip(reason)
    with network(nodes=2, core_share=0.25) as net, contextlib.ExitStack() as stack:
        spin = SPIN.format(begin=time.monotonic() + 5)
        one, other = (stack.enter_context(net.start(spin, node=0)) for _ in range(2))
        used = [finish(process, what="spinning", timeout_s=30.0).stdout.split() for process in (one, other)]
        assert {cores for cores, _ in used} == {"1"}
        assert 0.0 < sum(float(share) for _, share in used) < 0.35
        groups = list(Path("/sys/fs/cgroup").glob(f"**/{net.name}-*"))
        assert len(groups) == 2
    assert not any(group.exists() for group in groups)
    with pytest.raises(ValueError, match="part of a core must be above 0 and at most 1, got 0"), network(nodes=1, core_share=0):
        pass
    with pytest.raises(ValueError, match=r"16 nodes with 0\.9 of a core each need more than"), network(nodes=16, core_share=0.9):
        pass


def test_processes_see_their_node_and_no_other(net: Network) -> None:
    code = """
        import os, socket
        print(os.environ["NODE_IP"], *(name for _, name in socket.if_nameindex()), sum(name.isdigit() for name in os.listdir("/proc")))
        """
    processes = "3"  # the one that holds the namespace, the sink, and this one
    assert net.run(code, node=2).stdout.split() == [net.nodes[2].ip, "lo", "e0", processes]
    with pytest.raises(NetworkError, match="Network is unreachable"):
        net.run("import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "1 to 100 nodes"),
        ({"nodes": 2, "rates": {(0, 2): 1e6}}, r"two different nodes out of 0 to 1, got \(0, 2\)"),
        ({"nodes": 2, "rates": 0.0}, "a rate from 1 to"),
        ({"nodes": 3, "islands": [[0, 1]]}, "each of the nodes 0 to 2 once"),
        ({"nodes": 2, "uplink": 1e6}, "an uplink needs islands"),
        ({"nodes": 2, "islands": [[0], [1]], "uplink": [1e6]}, "a rate for each of 2 islands"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message), network(**arguments):  # type: ignore[arg-type]
        pass


def test_wires_without_a_common_end_cannot_share_and_none_twice(net: Network) -> None:
    with pytest.raises(ValueError, match="use islands"):
        net.share([(0, 1), (2, 3)], 1e6)
    with pytest.raises(ValueError, match="share nothing"):
        net.unshare([(0, 1), (0, 2)])
    net.share([(0, 1), (0, 2)], 1e6)
    try:
        with pytest.raises(ValueError, match="unshare it first"):
            net.share([(0, 1), (0, 3)], 1e6)
    finally:
        net.unshare([(0, 1), (0, 2)])


def test_a_machine_that_cannot_have_a_network_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask = why_not.__wrapped__
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", "darwin")
        assert ask() == "network namespaces need Linux"
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        assert ask() == "network namespaces need root"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask() == "ip, tc, unshare, nsenter, setpriv, env not found; install iproute2, util-linux and coreutils"


OWNER = """
from tests.multinode.network import network
with network(nodes=2) as net, net.start("import time; time.sleep(600)", node=1):
    print(net.name, flush=True)
    input()
"""


def mark(name: str) -> Brand:
    """Finds the processes of a network by what all of them have in their environment."""
    return Brand(f"{MARK}={name}\0")


def gone(name: str) -> dict[int, str]:
    """The processes of a network that are left after a few seconds' grace."""
    deadline = time.monotonic() + 10
    while (left := mark(name).survivors()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_nothing_is_left_of_a_network_and_the_machine_is_as_before() -> None:
    interfaces = set(os.listdir("/sys/class/net"))
    with network(nodes=3) as net, net.start("import time; time.sleep(600)", node=2):
        assert len(mark(net.name).survivors()) >= 5
        assert set(os.listdir("/sys/class/net")) == interfaces
    assert mark(net.name).survivors() == {}
    assert not net.folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_network_whose_owner_is_stopped(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert len(mark(name).survivors()) >= 4
        owner.send_signal(number)
        owner.wait(timeout=30)
    assert gone(name) == {}
    if number is signal.SIGINT:
        assert not (FOLDERS / name).exists()
    with network(nodes=1):
        assert not (FOLDERS / name).exists()  # the next one removes what a killed one left


def test_folders_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.multinode.network.FOLDERS", tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    contents = {
        "rpm-build": MARK,
        f"rp{dead.pid}-x": MARK,
        f"rp{dead.pid}-0": "of another program",
        f"rp{dead.pid}-1": "",
        f"rp{os.getpid()}-999": MARK,  # its owner lives
        f"rp{dead.pid}-2": MARK,
    }
    for name, text in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text(text)
    with network(nodes=1):
        left = {folder.name for folder in tmp_path.iterdir()} & contents.keys()
    assert left == contents.keys() - {f"rp{dead.pid}-2"}


def test_a_network_that_fails_to_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() is None
    for program in ("ip", "unshare", "nsenter", "setpriv", "env", "sh", "mount", "sleep"):
        found = subprocess.run(["sh", "-c", f"command -v {program}"], capture_output=True, text=True, check=True).stdout.strip()
        (tmp_path / program).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))  # tc is missing, which is noticed when all nodes are there
    with pytest.raises(NetworkError, match=r"node 0 of rp\S+: tc refused") as caught, network(nodes=2):
        pass
    name = str(caught.value).split()[3].rstrip(":")
    assert mark(name).survivors() == {}
    assert not (FOLDERS / name).exists()


# Sends a number back and forth over one connection, as often as lines come, and prints the shortest of some round trips in seconds.
ECHO = """
import socket
server = socket.create_server(("", 5002))
print("listening", flush=True)
connection, _ = server.accept()
while data := connection.recv(8):
    connection.sendall(data)
"""

TRIPS = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5002), timeout=60)
for _ in sys.stdin:
    seconds = []
    for number in range(20):
        since = time.monotonic()
        connection.sendall(number.to_bytes(8, "little"))
        assert int.from_bytes(connection.recv(8), "little") == number
        seconds.append(time.monotonic() - since)
    print(min(seconds), flush=True)
"""


def test_a_relay_delays_one_way_of_a_connection_that_is_in_use(net: Network) -> None:
    with net.start(ECHO, node=1) as echo:
        assert echo.stdout is not None
        echo.stdout.readline()
        with net.start([sys.executable, "-c", TRIPS, net.nodes[1].ip], stdin=subprocess.PIPE) as trips:

            def trip_s() -> float:
                assert trips.stdin is not None
                assert trips.stdout is not None
                trips.stdin.write("\n")
                trips.stdin.flush()
                return float(trips.stdout.readline())

            alone_s = trip_s()
            net.set_delay(0, 1, 0.02)
            assert 0.02 <= trip_s() < 0.03 + alone_s
            net.set_delay(1, 0, 0.03)
            assert 0.05 <= trip_s() < 0.06 + alone_s
            net.set_delay(1, 0, 0.01)
            assert 0.03 <= trip_s() < 0.04 + alone_s
            net.set_delay(0, 1, None)
            net.set_delay(1, 0, None)
            assert trip_s() < 0.01 + alone_s


def test_a_relay_keeps_the_rate(net: Network) -> None:
    net.set_delay(2, 3, 0.02)
    net.set_rate(2, 3, 100 * MBIT)
    try:
        carries(net, 2, (3, 100))
    finally:
        net.set_rate(2, 3, None)
        net.set_delay(2, 3, None)
