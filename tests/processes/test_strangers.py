"""Who does not know the secret of a run finds its sockets, and changes nothing."""

from __future__ import annotations

import itertools
import logging
import os
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.actors.transport import gate
from raypipe.actors.transport.gate import Gate
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreClient, StoreServer
from raypipe.errors import AbortedError, TransportError, TransportTimeoutError
from tests.processes.process_ends import Make, all_channels
from tests.processes.transport_contract import activation, announced, becomes_true, gradients, open_both, together

NUM_CALLERS = 10_000
RANDOM = random.Random(0)
PAIR = (0, 1)


def own_inodes() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    return found


def listening_tcp() -> list[tuple[str, int]]:
    """Addresses at which this process listens, as the kernel lists them for anyone."""
    own = own_inodes()
    found = []
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in own:
            host, port = fields[1].split(":")
            found.append((socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)))
    return found


def listening_memory() -> list[str]:
    """Names of the sockets of shared memory, as the kernel lists them for anyone."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.split()[-1] for line in lines if "@raypipe-" in line]


def torch_store_set() -> bytes:
    """What torch's own store takes as a new value from anyone: validate, set, name, value."""
    words = (b"key", b"value")
    return struct.pack("<BI", 12, 0x3C85F7CE) + b"\0" + b"".join(struct.pack("<Q", len(word)) + word for word in words)


def garbage() -> bytes:
    return RANDOM.choice((
        b"",
        RANDOM.randbytes(RANDOM.randrange(1, 2000)),
        b"GET / HTTP/1.1\r\n\r\n",
        torch_store_set(),
        struct.pack("<I", 0) + bytes(64),
        struct.pack("<I", 1) + RANDOM.randbytes(64),
    ))


class Attack:
    """Calls at all sockets at which this process listens, over and over, and keeps some of the calls open."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.kept: list[socket.socket] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Attack:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for end in self.kept:
            end.close()

    def _run(self) -> None:
        while not self._ends.is_set():
            for host, port in listening_tcp():
                self._call(socket.socket(socket.AF_INET, socket.SOCK_STREAM), (host, port))
            for name in listening_memory():
                self._call(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), "\0" + name[1:])

    def _call(self, end: socket.socket, address: Any) -> None:
        end.settimeout(1.0)
        with suppress(OSError):
            end.connect(address)
            if said := garbage():
                end.send(said)
            self.num_calls += 1
            if len(self.kept) < 400 and RANDOM.random() < 0.5:
                self.kept.append(end)
                return
        end.close()


def exchange(ends: list[ProcessTransport], num_messages: int) -> None:
    open_both(ends[0], ends[1], [announced(activation(index), torch.tensor(0)) for index in range(num_messages)])
    for index in range(num_messages):
        ends[0].send(activation(index), 1, [torch.tensor(index)])
        assert int(ends[1].recv(activation(index), 0)[0]) == index
    pending = [end.start(gradients(PAIR), torch.ones(1000)) for end in ends]
    for part in pending:
        assert torch.equal(part.wait(), torch.full((1000,), 2.0))
    together(*(end.close_window for end in ends))


def at_leisure(wait_for: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """As `Rendezvous.wait_for`, but sockets of devices that meet are there for long enough that strangers find them."""

    def waits(*args: Any) -> list[str]:
        found = wait_for(*args)
        time.sleep(0.1)
        return found

    return waits


needs_proc = pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="the kernel lists its sockets on Linux only")


@needs_proc
@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "memory"])
@pytest.mark.timeout(120)
def test_strangers_at_every_socket_change_nothing_while_devices_meet_and_work(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    caplog.set_level(logging.WARNING, logger="raypipe.transport")
    monkeypatch.setattr(Rendezvous, "wait_for", at_leisure(Rendezvous.wait_for))
    with Attack() as attack:
        for attempt in itertools.count():
            channels = all_channels(2) if shared else []
            ends = [make(device, shared=channels, prefix=f"attacked {shared} {attempt}", connect_timeout_s=40.0) for device in PAIR]
            together(*(end.connect for end in ends))
            exchange(ends, 20)
            for end in ends:
                end.close()
            if attack.num_calls > 500 and attempt >= 10 and ("memory" if shared else "connections of device") in caplog.text:
                break
    # A socket has a line for the first caller, at most one in half a minute after it, and one for the rest when it is closed. An attempt
    # has a socket a device for TCP, and one a channel for memory; the store has one for all.
    num_sockets = (len(PAIR) + len(channels)) * (attempt + 1) + 1
    assert len(caplog.records) <= 2 * num_sockets + 5


@pytest.mark.timeout(120)
def test_ten_thousand_calls_of_garbage_leave_the_store_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="raypipe.transport")
    with StoreServer("127.0.0.1", secret=Secret.new()) as server:
        address = (server.address.host, server.address.port)
        known = StoreClient(server.address, device=0, check=lambda: None)
        known.set("kept", "value")
        before = len(os.listdir("/dev/fd"))
        for _ in range(NUM_CALLERS):
            with socket.create_connection(address, timeout=20.0) as end, suppress(OSError):
                end.sendall(garbage())
        late = StoreClient(server.address, device=1, check=lambda: None)
        assert late.get("kept") == b"value"
        assert known.num_keys() == 1
        late.close()
        assert becomes_true(lambda: len(os.listdir("/dev/fd")) <= before + 1, within_s=15.0)
        known.close()
    assert sum("refused" in record.message for record in caplog.records) <= 5


def test_the_store_forgets_the_names_that_nobody_needs_any_more() -> None:
    with StoreServer("127.0.0.1", secret=Secret.new()) as server:
        client = StoreClient(server.address, device=0, check=lambda: None)
        for name in ("run/1/ready/0", "run/link 0-1, probe 1/ready/0", "run/link 1-0, probe 2/ready/1"):
            client.set(name, "value")
        server.drop("run/link ")
        assert becomes_true(lambda: client.num_keys() == 1, within_s=15.0)
        assert client.get("run/1/ready/0") == b"value"
        client.close()


def test_callers_that_wait_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreServer("127.0.0.1", secret=Secret.new()) as server:
        address = (server.address.host, server.address.port)
        silent = [socket.create_connection(address) for _ in range(2 * gate.MOST_PENDING)]
        client = StoreClient(server.address, device=0, check=lambda: None)
        client.set("name", "value")
        assert client.get("name") == b"value"
        client.close()
        for end in silent:
            end.close()


@contextmanager
def at_gate(secret: Secret, purpose: str = "test") -> Iterator[tuple[tuple[str, int], list[gate.Admitted]]]:
    admitted: list[gate.Admitted] = []
    ends = threading.Event()
    with Gate(socket.create_server(("127.0.0.1", 0)), secret=secret, purpose=purpose) as entrance:
        address = entrance._server.getsockname()

        def serve() -> None:
            while not ends.is_set():
                admitted.extend(entrance.admit(0.01))

        serving = threading.Thread(target=serve)
        serving.start()
        yield address, admitted
        ends.set()
        serving.join()
    for one in admitted:
        one.end.close()


def within(seconds: float) -> Callable[[], None]:
    deadline_s = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline_s:
            raise TimeoutError("it took too long")

    return check


def test_both_ends_prove_to_know_the_secret() -> None:
    secret = Secret.new()
    with at_gate(secret) as (address, admitted):
        end = gate.call(*address, secret=secret, purpose="test", device=7, check=within(20.0))
        assert becomes_true(lambda: bool(admitted), within_s=5.0)
        assert admitted[0].device == 7
        end.sendall(b"x")
        admitted[0].end.settimeout(5.0)
        assert admitted[0].end.recv(2) == b"x"
        end.close()


@pytest.mark.parametrize("changed", [{"secret": Secret.new()}, {"purpose": "another"}], ids=["secret", "purpose"])
def test_another_secret_or_purpose_is_refused(changed: dict[str, Any]) -> None:
    secret = Secret.new()
    settings: dict[str, Any] = {"secret": secret, "purpose": "test"} | changed
    with at_gate(secret) as (address, admitted):
        with pytest.raises(OSError, match=r"closed before both ends had proved|reset"):
            gate.call(*address, **settings, device=0, check=within(20.0))
        assert not admitted


def test_a_proof_that_was_recorded_proves_nothing_later() -> None:
    secret = Secret.new()
    with at_gate(secret) as (address, admitted):
        recorded: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as between:

            def pass_on() -> None:
                end, _ = between.accept()
                with end, socket.create_connection(address) as there:
                    end.sendall(there.recv(32))
                    recorded.append(end.recv(100))
                    there.sendall(recorded[0])
                    end.sendall(there.recv(32))

            passing = threading.Thread(target=pass_on)
            passing.start()
            gate.call(*between.getsockname(), secret=secret, purpose="test", device=0, check=within(20.0)).close()
            passing.join()
        with socket.create_connection(address) as end:
            end.settimeout(5.0)
            end.recv(32)
            end.sendall(recorded[0])
            assert end.recv(32) == b""
        assert len(admitted) == 1


def test_who_listens_without_the_secret_is_told_nothing_and_gets_nothing_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            end, _ = impostor.accept()
            with end:
                end.sendall(secrets.token_bytes(32))
                end.recv(100)
                end.sendall(secrets.token_bytes(32))

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(gate.UnprovedError, match="does not know the secret"):
            gate.call(*impostor.getsockname(), secret=Secret.new(), purpose="test", device=0, check=within(20.0))
        answering.join()


def test_a_proof_sent_back_to_its_maker_is_none() -> None:
    """Who listens without the secret passes the caller's proof back as its own."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def reflect() -> None:
            end, _ = impostor.accept()
            with end:
                end.sendall(bytes(32))
                end.sendall(end.recv(100)[-32:])

        reflecting = threading.Thread(target=reflect)
        reflecting.start()
        with pytest.raises(gate.UnprovedError):
            gate.call(*impostor.getsockname(), secret=Secret.new(), purpose="test", device=0, check=within(20.0))
        reflecting.join()


def test_devices_with_another_secret_do_not_meet_and_the_error_names_both_ends(make: Make, store: StoreAddress) -> None:
    stranger = make(0, store=StoreAddress(store.host, store.port, Secret.new()), connect_timeout_s=0.5)
    with pytest.raises(TransportTimeoutError) as caught:
        stranger.connect()
    assert caught.value.device == "alpha"
    assert str(store) in caught.value.peer


def test_a_listener_of_shared_memory_without_the_secret_is_named(make: Make, store: StoreAddress) -> None:
    run = next(itertools.count())
    end = make(1, shared=all_channels(2), groups=[], prefix=f"impostor {run}", connect_timeout_s=1.0)
    known = StoreClient(store, device=0, check=within(20.0))
    name = f"raypipe-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind(f"\0{name}")
        impostor.listen()
        known.multi_set([f"impostor {run}/here/0", f"impostor {run}/memory 0-1 listens/0"], ["", name])
        with pytest.raises(TransportError) as caught:
            end.connect()
    known.close()
    assert (caught.value.device, caught.value.peer) == ("beta", "alpha")


def test_a_secret_is_in_no_text() -> None:
    secret = Secret.new()
    address = StoreAddress("127.0.0.1", 1, secret)
    for text in (repr(secret), str(secret), repr(address), str(address), f"{address}"):
        assert secret.key.hex() not in text
        assert repr(secret.key) not in text


@needs_proc
def test_sockets_listen_at_the_address_of_the_node_alone(make: Make) -> None:
    before = set(listening_tcp())
    with StoreServer("127.0.0.1", secret=Secret.new()) as server, ThreadPoolExecutor(1) as pool:
        assert set(listening_tcp()) - before == {("127.0.0.1", server.address.port)}
        end = make(0, store=server.address)
        other = StoreClient(server.address, device=1, check=within(20.0))
        connecting = pool.submit(end.connect)
        other.set(f"{end.prefix}/here/1", "")
        other.get(f"{end.prefix}/tcp/0")
        opened = set(listening_tcp()) - before
        assert {host for host, _ in opened} == {"127.0.0.1"}
        assert len(opened) == 2
        end.abort("enough")
        assert isinstance(connecting.exception(timeout=20.0), AbortedError)
        other.close()
