"""`GlooTransport`: messages and sums between processes and hosts, over TCP, by torch's gloo.

Each channel (ordered pair of devices) has a process group of its own with two ranks, and so has each set of devices that
meets in collectives. None of them is torch's default group. What shapes the code:

* A message passes when both ends have named it: gloo sends no data before the receive is posted. So receives are posted
  ahead, the next one before the current is waited for, and sends wait in the sender's memory, never in its program.
* Gloo only learns that a send has ended when somebody waits for it. A thread for each channel does, now and then.
* A message that is longer than its receive would end the process. So the tag by which gloo pairs them is made of all that
  both ends believe: the message, its number on the channel, shape and dtype. If they differ, nothing passes and time runs out.
* A wait inside gloo ends early only if its connection does. `abort` shuts the connections down; which ones they are is found
  by comparing this process's connections before and after a group is made, and what the other members saw.
* A wait that ran out of time breaks its connection. A transport with an error is therefore out of use: close it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp, TCPStore, Work  # type: ignore[attr-defined]  # public, says the manual

from raypipe.actors.gloo_channels import UNLIMITED, Group, Incoming, Outgoing, limit
from raypipe.actors.sockets import Connection, connections, interface_of
from raypipe.actors.transport import Expected, Ledger, Pending, summing_dtype
from raypipe.errors import AbortedError, RunError, TransportError, TransportTimeoutError
from raypipe.schedules.lower import Collective, Message

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def host_store(host: str, *, timeout_s: float) -> tuple[TCPStore, int]:
    """The store at which the transports of a run meet, and its port; it lives as long as the object.

    Args:
        host: this host's address as the others reach it.
        timeout_s: for each request to it.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit(timeout_s))
    return store, store.port


class GlooTransport:
    """One device's channels and collectives over gloo; connected by `connect`.

    16-bit floats are summed in float32 and rounded once, at the cost of twice the bytes.

    Args:
        device: this one.
        names: of all devices, for messages.
        channels: all of the run as (source, target); the same list for all devices, in any order.
        groups: the members, ascending, of all collectives of the run; the same list for all devices, in any order.
        store: host and port of the store that one process opened with `host_store`.
        prefix: keeps runs, and the attempts of a run, apart in the store; never use one twice.
        timeout_s: for every wait once connected.
        connect_timeout_s: for `connect`; `timeout_s` by default.
        host_ip: address of this node at the interface that carries the traffic. Gloo learns of it by the environment variable
            GLOO_SOCKET_IFNAME, which is set for the whole process unless it is set already. Without it gloo looks up the host name.
        receives_ahead: messages of a channel whose memory waits for them; further ones wait at the sender.
    """

    def __init__(
        self,
        device: int,
        *,
        names: Sequence[str],
        channels: Sequence[tuple[int, int]],
        groups: Sequence[tuple[int, ...]],
        store: tuple[str, int],
        prefix: str,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        host_ip: str | None = None,
        receives_ahead: int = 4,
    ) -> None:
        self.device = device
        self.names = tuple(names)
        self.timeout_s = timeout_s
        self.connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self.receives_ahead = receives_ahead
        self.prefix = prefix
        self._store_address = store
        self._host_ip = host_ip
        # Members wait for each other group by group. All go through them in this one order, so the first unfinished group
        # is one that all its members have come to.
        self._keys = sorted({("channel", channel) for channel in channels} | {("group", members) for members in groups if len(members) > 1})
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._groups: dict[tuple[int, ...], Group] = {}
        self._ledger = Ledger(device, self.names)
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        # Whoever forgets `close` must not hang at the end of the process, where gloo joins threads that may still wait.
        weakref.finalize(self, _release, self._connections, self._outgoing)
        self._aborted = threading.Event()
        self._abort_reason: str | None = None
        self._dead: str | None = "it is not connected: call connect"

    def connect(self) -> None:
        """Makes all process groups; returns when all their members have.

        Raises:
            TransportTimeoutError: a device did not come in time.
            TransportError: one came and went.
            AbortedError: `abort` was called.
        """
        try:
            _Meeting(self).run()
            self._dead = None
        except BaseException as error:
            self._dead = "it could not connect"
            self.close()
            if isinstance(error, RuntimeError) and not isinstance(error, RunError):
                self._check()
                host, port = self._store_address
                raise TransportError(self.names[self.device], f"(store {host}:{port})", "connecting", _cause(error)) from error
            raise

    def _add(self, kind: str, members: tuple[int, ...], group: Group) -> None:
        if kind == "group":
            self._groups[members] = group
        elif members[0] == self.device:
            self._outgoing[members[1]] = Outgoing(group, name=f"raypipe sends {self.device}->{members[1]}")
        else:
            self._incoming[members[0]] = Incoming(group, ahead=self.receives_ahead)

    def _watch(self, found: Iterable[Connection]) -> None:
        """Lets `abort` and `close` shut these connections down, too."""
        with self._lock:
            self._connections.update(found)
        self._check()

    def _forget(self, found: Iterable[Connection]) -> None:
        with self._lock:
            self._connections.difference_update(found)

    def open_window(self, expected: Mapping[int, Sequence[Expected]]) -> None:
        """See `Transport`."""
        self._check_usable()
        self._ledger.open(expected)
        for peer, messages in expected.items():
            if messages:
                with self._translating(messages[0].message, peer):
                    self._incoming[peer].open(messages)
        for channel in self._outgoing.values():
            channel.open()

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """See `Transport`."""
        with self._translating(message, peer):
            self._outgoing[peer].send(message, tensors)

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """See `Transport`."""
        with self._translating(message, peer):
            self._ledger.take(message, peer)
            return self._incoming[peer].recv(self.timeout_s)

    def start(self, collective: Collective, tensor: Tensor) -> Pending:
        """See `Transport`."""
        with self._translating(collective):
            # An empty tensor is not sent; its members meet over a stand-in.
            sent = tensor.detach() if tensor.numel() else torch.zeros(1)
            summed = sent.to(summing_dtype(sent.dtype)).contiguous()
            work = self._groups[collective.devices].allreduce([summed], ReduceOp.SUM, UNLIMITED)
        self._ledger.collectives.append(collective)
        return _GlooPending(self, collective, tensor, summed, work)

    def _finish(self, collective: Collective, work: Work) -> None:
        with self._translating(collective):
            work.wait(limit(self.timeout_s))
        self._ledger.collectives.remove(collective)

    def close_window(self) -> None:
        """See `Transport`."""
        self._check_usable()
        for peer, channel in self._outgoing.items():
            unsent = channel.flush(self.timeout_s, self._aborted)
            self._check()
            if unsent is not None:
                with self._translating(unsent, peer):
                    if channel.error is not None:
                        raise channel.error
                    problem = f"it was not taken within {self.timeout_s:g} s; the peer is stuck, or expects another message or shape"
                    raise self._ledger.error(unsent, peer, problem, kind=TransportTimeoutError)
        try:
            self._ledger.close()
        except TransportError as error:
            self._dead = error.problem
            raise

    def abort(self, reason: str) -> None:
        """See `Transport`. The peers find their connections closed. `connect` ends, too."""
        with self._lock:
            self._abort_reason = self._abort_reason or reason
            found = list(self._connections)
        self._aborted.set()
        for connection in found:
            connection.shut_down()
        for channel in list(self._outgoing.values()):
            channel.wake()

    def close(self) -> None:
        """See `Transport`."""
        self._dead = self._dead or "it is closed"
        _release(self._connections, self._outgoing)
        self._incoming.clear()
        self._groups.clear()
        self._ledger = Ledger(self.device, self.names)

    # Errors

    def _check(self) -> None:
        if self._abort_reason is not None:
            raise AbortedError(self._abort_reason)

    def _check_usable(self) -> None:
        self._check()
        if self._dead is not None:
            raise TransportError(self.names[self.device], "any", "a window", self._out_of_use())

    def _out_of_use(self) -> str:
        return f"this transport is out of use ({self._dead})"

    @contextmanager
    def _translating(self, what: Message | Collective, peer: int | None = None) -> Iterator[None]:
        """Turns gloo's errors into ours."""

        def error(problem: str, kind: type[TransportError] = TransportError) -> TransportError:
            if isinstance(what, Collective):
                return self._ledger.collective_error(what, problem, kind=kind)
            assert peer is not None, "a message has a peer"
            return self._ledger.error(what, peer, problem, kind=kind)

        self._check()
        if self._dead is not None:
            raise error(self._out_of_use())
        began_s = time.monotonic()
        try:
            yield
        except RunError as raised:
            self._dead = str(raised)
            raise
        except RuntimeError as raised:
            self._check()
            if time.monotonic() - began_s >= self.timeout_s:
                text = f"nothing came within {self.timeout_s:g} s; the peer is stuck, or sent another message or shape"
                translated: TransportError = error(text, TransportTimeoutError)
            else:
                translated = error(_cause(raised))
            self._dead = self._dead or str(translated)
            raise translated from raised


def _release(watched: Iterable[Connection], outgoing: dict[int, Outgoing]) -> None:
    # First the connections: whatever still waits inside gloo wakes up, and its threads can be joined.
    for connection in watched:
        connection.shut_down()
    for channel in outgoing.values():
        channel.stop()
    outgoing.clear()


def _cause(error: RuntimeError) -> str:
    text = str(error).splitlines()[0]
    if any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe", "caused pair closure")):
        return "connection closed by peer: its process ended, or gave up after an error of its own"
    return f"gloo failed: {text}"


@dataclass(eq=False)
class _GlooPending:
    """A sum under way; `summed` is `tensor` itself where gloo can work on it in place."""

    transport: GlooTransport
    collective: Collective
    tensor: Tensor
    summed: Tensor
    work: Work

    def wait(self) -> Tensor:
        self.transport._finish(self.collective, self.work)
        target = self.tensor.detach()
        if target.numel() and target.data_ptr() != self.summed.data_ptr():
            target.copy_(self.summed)
        return self.tensor


# Connecting


class _Meeting:
    """One run of `GlooTransport.connect`.

    A wait in the store cannot be ended from outside, and complains on stderr. So this looks there again and again until all
    members of a group have shown up, and only then lets gloo connect them, which takes a millisecond.
    """

    def __init__(self, transport: GlooTransport) -> None:
        self.transport = transport
        self.name = transport.names[transport.device]
        self.deadline_s = time.monotonic() + transport.connect_timeout_s

    def run(self) -> None:
        self._choose_interface()
        before = connections()
        store = self._reach_store()
        self.store = PrefixStore(self.transport.prefix, store)
        # If the store hangs, or a member between its coming and its connecting, abort ends this connection.
        to_store = [connection for connection in connections() - before if connection.remote.endswith(f":{store.port}")]
        self.transport._watch(to_store)
        try:
            self._meet_all()
        finally:
            self.transport._forget(to_store)

    def _meet_all(self) -> None:
        # All first wait for all, so that everyone names the one that is missing, and not someone who waits for it.
        self._say("here")
        self._await("here", sorted({member for _, members in self.transport._keys for member in members}))
        for kind, members in self.transport._keys:
            if self.transport.device in members:
                self._make(kind, members)

    def _choose_interface(self) -> None:
        host_ip = self.transport._host_ip
        if host_ip is not None and _INTERFACE_VARIABLE not in os.environ:
            interface = interface_of(host_ip)
            if interface is not None:
                os.environ[_INTERFACE_VARIABLE] = interface

    def _reach_store(self) -> TCPStore:
        host, port = self.transport._store_address
        # The store's own attempts to connect write stack traces to stderr and cannot be ended: first see that it answers.
        while True:
            self.transport._check()
            try:
                socket.create_connection((host, port), timeout=min(0.5, self._left_s())).close()
                break
            except OSError as error:
                self._check_deadline(f"(store {host}:{port})", f"there is no answer: {error}")
                self.transport._aborted.wait(0.05)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit(self._left_s()))

    def _make(self, kind: str, members: tuple[int, ...]) -> None:
        transport = self.transport
        others = [member for member in members if member != transport.device]
        name = f"{kind} {'-'.join(map(str, members))}"
        self._say(f"{name} ready")
        self._await(f"{name} ready", others)
        before = connections()
        rank = members.index(transport.device)
        try:
            left = limit(self._left_s())
            group = cast(Group, ProcessGroupGloo(PrefixStore(name, self.store), rank, len(members), left))
        except RuntimeError as error:
            transport._check()
            peers = ", ".join(transport.names[other] for other in others)
            self._check_deadline(peers, "it came, but did not answer")
            raise TransportError(self.name, peers, "connecting", _cause(error)) from error
        mine = connections() - before
        # Other threads of this process open connections, too. The group's are those that another member sees from its end.
        self._say(f"{name} made", json.dumps([(connection.local, connection.remote) for connection in mine]))
        self._await(f"{name} made", others)
        theirs = {(remote, local) for other in others for local, remote in json.loads(self.store.get(f"{name} made/{other}"))}
        transport._watch(connection for connection in mine if (connection.local, connection.remote) in theirs)
        transport._add(kind, members, group)

    def _say(self, what: str, value: str = "") -> None:
        self.store.set(f"{what}/{self.transport.device}", value)

    def _await(self, what: str, devices: Sequence[int]) -> None:
        """Waits until all these devices have said something."""
        keys = [f"{what}/{device}" for device in devices]
        pause_s = 0.001
        while not self.store.check(keys):
            self.transport._check()
            missing = [self.transport.names[device] for device, key in zip(devices, keys, strict=True) if not self.store.check([key])]
            self._check_deadline(", ".join(missing), "it did not come")
            self.transport._aborted.wait(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        self.transport._check()

    def _left_s(self) -> float:
        return max(0.001, self.deadline_s - time.monotonic())

    def _check_deadline(self, peer: str, problem: str) -> None:
        if time.monotonic() >= self.deadline_s:
            raise TransportTimeoutError(self.name, peer, "connecting", f"{problem} within {self.transport.connect_timeout_s:g} s")
