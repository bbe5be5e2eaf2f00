"""`ProcessTransport`: messages and sums between processes.

Devices that compute on the CPU pass messages through shared memory or over gloo, and sum over gloo. GPUs do both over NCCL, but for
messages between processes of one GPU, which stay in its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, Protocol

from torch import Tensor

from raypipe.actors.transport import cuda_ipc, gloo, gloo_channel, nccl, shm, shm_channel
from raypipe.actors.transport.channel import ChannelError, IncomingChannel, OutgoingChannel
from raypipe.actors.transport.protocol import Expected, Ledger, Pending, left_over
from raypipe.actors.transport.rendezvous import Lines, Meeting
from raypipe.errors import RunError, TransportError, TransportTimeoutError
from raypipe.schedules.collectives import Collective
from raypipe.schedules.lower import Message


class _Kind(StrEnum):
    """What the members of a set of devices make together when they connect."""

    CHANNEL = "channel"
    GROUP = "group"
    MEMORY = "memory"


class SumUnderWay(Protocol):
    """A sum under way.

    Attributes:
        tensor: this one's share; holds the sum after `wait`.
    """

    tensor: Tensor

    def wait(self, timeout_s: float) -> None:
        """Waits until the sum is there; on a GPU what computes does, and not the host.

        Raises:
            ChannelError: it did not come.
        """


class SummingGroup(Protocol):
    """A set of devices that meets in sums."""

    def sum(self, tensor: Tensor) -> SumUnderWay:
        """Begins to sum a tensor over the members, in place."""


class ProcessTransport:
    """One device's channels and collectives with devices in other processes; connected by `connect`.

    Only what is needed is made: a device all of whose channels go through shared memory, and which meets nobody in collectives,
    has nothing of gloo. A transport with an error is out of use: close it.

    Args:
        device: this one.
        names: of all devices, for messages.
        channels: all of the run as (source, target); the same list for all devices, in any order.
        shared: those of them that go through shared memory, whose ends are processes of one host, or of one GPU; the same for all devices.
        groups: the members, ascending, of all collectives of the run; the same list for all devices, in any order.
        store: host and port of the store that one process opened with `host_store`.
        prefix: keeps runs, and the attempts of a run, apart in the store; never use one twice.
        timeout_s: for every wait once connected.
        connect_timeout_s: for `connect`; `timeout_s` by default.
        host_ip: address of this node at the interface that carries gloo's traffic. Gloo learns of it by the environment variable
            GLOO_SOCKET_IFNAME, which is set for the whole process unless it is set already. Without it gloo looks up the host name.
        receives_ahead: messages of a channel over gloo whose memory waits for them; further ones wait at the sender.
        library: CUDA and NCCL, for devices that are GPUs; groups are then NCCL's, and so are channels that are not shared. `None` for CPU
            devices.
    """

    def __init__(
        self,
        device: int,
        *,
        names: Sequence[str],
        channels: Sequence[tuple[int, int]],
        shared: Collection[tuple[int, int]] = (),
        groups: Sequence[tuple[int, ...]],
        store: tuple[str, int],
        prefix: str,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        host_ip: str | None = None,
        receives_ahead: int = 4,
        library: cuda_ipc.SharingLibrary | None = None,
    ) -> None:
        self.device = device
        self.names = tuple(names)
        self.timeout_s = timeout_s
        self.connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self.receives_ahead = receives_ahead
        self.library = library
        self.prefix = prefix
        self._store_address = store
        self._host_ip = host_ip
        # Members wait for each other set by set. All go through them in this one order, so the first unfinished set is one
        # that all its members have come to.
        sets: set[tuple[_Kind, tuple[int, ...]]] = {(_Kind.MEMORY if channel in shared else _Kind.CHANNEL, channel) for channel in channels}
        sets |= {(_Kind.GROUP, members) for members in groups if len(members) > 1}
        self._sets = sorted(sets)
        self._outgoing: dict[int, OutgoingChannel] = {}
        self._incoming: dict[int, IncomingChannel] = {}
        self._groups: dict[tuple[int, ...], SummingGroup] = {}
        self._communicators: list[tuple[nccl.Communicator, str]] = []
        self._ledger = Ledger(device, self.names)
        self._lines = Lines()
        # Whoever forgets `close` must not hang at the end of the process, where gloo joins threads that may still wait.
        weakref.finalize(self, _release, self._lines, self._outgoing, self._incoming)
        self._dead: str | None = "it is not connected: call connect"

    # Connecting

    def connect(self) -> None:
        """Makes all channels and groups; returns when all their members have.

        Raises:
            TransportTimeoutError: a device did not come in time.
            TransportError: one came and went, or cannot share memory with this one.
            AbortedError: `abort` was called.
        """
        try:
            self._connect()
            self._dead = None
            self._lines.check()  # `abort`, in another thread, says so there before it sets `_dead`
        except BaseException as error:
            self._dead = "it could not connect"
            self.close()
            if isinstance(error, RuntimeError) and not isinstance(error, RunError):
                self._lines.check()
                host, port = self._store_address
                problem = gloo_channel.cause(error)
                raise TransportError(self.names[self.device], f"(store {host}:{port})", "connecting", problem) from error
            raise

    def _connect(self) -> None:
        mine = [(kind, members) for kind, members in self._sets if self.device in members]
        if self._host_ip is not None and self.library is None and any(kind is not _Kind.MEMORY for kind, _ in mine):
            gloo.choose_interface(self._host_ip)
        with Meeting(
            self.device,
            names=self.names,
            address=self._store_address,
            prefix=self.prefix,
            timeout_s=self.connect_timeout_s,
            lines=self._lines,
        ) as meeting:
            # All first wait for all, so that everyone names the one that is missing, and not someone who waits for it.
            meeting.say("here")
            meeting.hear("here", sorted({member for _, members in self._sets for member in members}))
            for kind, members in mine:
                self._make(meeting, kind, members)

    def _make(self, meeting: Meeting, kind: _Kind, members: tuple[int, ...]) -> None:
        if self.library is not None:
            self._make_on_gpus(self.library, meeting, kind, members)
            return
        if kind is _Kind.GROUP:
            # Gloo's sums go round from each rank to the one before it; they are to go from each member to the next, as `Cost` has it.
            self._groups[members] = gloo.SumGroup(*gloo.make_group(meeting, kind, members[::-1]))
            return
        source, target = members
        sends = self.device == source
        name = f"raypipe sends {source}->{target}"
        if kind is _Kind.MEMORY:
            line = shm.connect(meeting, source, target)
            if sends:
                self._outgoing[target] = shm_channel.Outgoing(line, name=name)
            else:
                self._incoming[source] = shm_channel.Incoming(line, timeout_s=self.timeout_s)
            self._lines.add([line])
        else:
            group, _ = gloo.make_group(meeting, kind, members)
            if sends:
                self._outgoing[target] = gloo_channel.Outgoing(group, name=name)
            else:
                self._incoming[source] = gloo_channel.Incoming(group, ahead=self.receives_ahead, timeout_s=self.timeout_s)

    def _make_on_gpus(self, library: cuda_ipc.SharingLibrary, meeting: Meeting, kind: _Kind, members: tuple[int, ...]) -> None:
        others = ", ".join(self.names[member] for member in members if member != self.device)
        if kind is _Kind.MEMORY:
            source, target = members
            line = shm.connect(meeting, source, target)
            if self.device == source:
                self._outgoing[target] = cuda_ipc.Outgoing(library, line, name=f"raypipe sends {source}->{target}")
            else:
                self._incoming[source] = cuda_ipc.Incoming(library, line, timeout_s=self.timeout_s)
            self._lines.add([line])
            return
        try:
            communicator = nccl.connect(library, meeting, kind, members)
        except ChannelError as error:
            raise TransportError(self.names[self.device], others, "connecting", error.problem) from error
        self._communicators.append((communicator, others))
        self._lines.add([communicator])
        if kind is _Kind.GROUP:
            self._groups[members] = nccl.Group(library, communicator)
        elif self.device == members[0]:
            self._outgoing[members[1]] = nccl.Outgoing(library, communicator)
        else:
            self._incoming[members[0]] = nccl.Incoming(library, communicator, timeout_s=self.timeout_s)

    # A window

    def open_window(self, incoming: Mapping[int, Sequence[Expected]], outgoing: Mapping[int, Sequence[Expected]]) -> None:
        """See `Transport`."""
        if self._dead is not None:
            self._refuse()
        for peer, messages in incoming.items():
            if messages:
                try:
                    self._incoming[peer].open(messages)
                except ChannelError as error:
                    raise self._failure(error, messages[0].message, peer) from error
        for peer, messages in outgoing.items():
            if messages:
                self._outgoing[peer].open(messages)

    # Between stages that sleep, caches are cold, and every line of the next two costs several times what it does in a loop.

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """See `Transport`."""
        if self._dead is not None:
            self._refuse(message, peer)
        try:
            self._outgoing[peer].send(message, tensors)
        except ChannelError as error:
            raise self._failure(error, message, peer) from error

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """See `Transport`."""
        if self._dead is not None:
            self._refuse(message, peer)
        try:
            return self._incoming[peer].recv(message)
        except ChannelError as error:
            raise self._failure(error, message, peer) from error

    def start(self, collective: Collective, tensor: Tensor) -> Pending:
        """See `Transport`."""
        if self._dead is not None:
            self._refuse(collective)
        try:
            total = self._groups[collective.devices].sum(tensor)
        except ChannelError as error:
            raise self._failure(error, collective) from error
        self._ledger.collectives.append(collective)
        return _Pending(self, collective, total)

    def _finish(self, collective: Collective, total: SumUnderWay) -> None:
        if self._dead is not None:
            self._refuse(collective)
        try:
            total.wait(self.timeout_s)
        except ChannelError as error:
            raise self._failure(error, collective) from error
        self._ledger.collectives.remove(collective)

    def close_window(self) -> None:
        """See `Transport`."""
        if self._dead is not None:
            self._refuse()
        for peer, channel in self._outgoing.items():
            unsent = channel.flush(self.timeout_s, self._lines.aborted)
            self._lines.check()
            if unsent is not None:
                problem = f"it was not taken within {self.timeout_s:g} s; the peer is stuck, or expects another message or shape"
                raise self._failure(channel.error or ChannelError(problem, kind=TransportTimeoutError), unsent, peer)
        left = [("taken", peer, incoming.end()) for peer, incoming in self._incoming.items()]
        left += [("sent", peer, outgoing.end()) for peer, outgoing in self._outgoing.items()]
        for done, peer, messages in left:
            if messages:
                raise self._failure(ChannelError(left_over(done, len(messages))), messages[0].message, peer)
        try:
            self._ledger.close()
        except TransportError as error:
            self._dead = error.problem
            raise

    def check(self) -> None:
        """See `Transport`."""
        for communicator, others in self._communicators:
            if self._dead is None and (problem := communicator.problem()) is not None:
                raise TransportError(self.names[self.device], others, "messages", problem)

    # The end

    def abort(self, reason: str) -> None:
        """See `Transport`. The peers find their connections closed. `connect` ends, too."""
        self._lines.abort(reason)
        self._dead = self._dead or "it was aborted"
        for channel in list(self._outgoing.values()):
            channel.wake()

    def close(self) -> None:
        """See `Transport`."""
        self._dead = self._dead or "it is closed"
        _release(self._lines, self._outgoing, self._incoming)
        self._groups.clear()
        self._communicators.clear()
        self._ledger = Ledger(self.device, self.names)

    # Errors

    def _refuse(self, what: Message | Collective | None = None, peer: int | None = None) -> NoReturn:
        """Says that this transport is out of use.

        Raises:
            AbortedError: that was the reason.
            TransportError: something else was.
        """
        self._lines.check()
        problem = f"this transport is out of use ({self._dead})"
        if what is None:
            raise TransportError(self.names[self.device], "any", "a window", problem)
        raise self._error(ChannelError(problem), what, peer)

    def _failure(self, error: ChannelError, what: Message | Collective, peer: int | None = None) -> TransportError:
        """Says of what and with whom an error is, and that this transport may not be used any more.

        Raises:
            AbortedError: that was the reason.
        """
        self._lines.check()
        failure = self._error(error, what, peer)
        self._dead = str(failure)
        return failure

    def _error(self, error: ChannelError, what: Message | Collective, peer: int | None) -> TransportError:
        if isinstance(what, Collective):
            return self._ledger.collective_error(what, error.problem, kind=error.kind)
        assert peer is not None, "a message has a peer"
        return self._ledger.error(what, peer, error.problem, kind=error.kind)


def _release(lines: Lines, outgoing: dict[int, OutgoingChannel], incoming: dict[int, IncomingChannel]) -> None:
    # First the lines: whatever still waits inside gloo wakes up, and its threads can be joined.
    lines.cut()
    for channels in (outgoing, incoming):
        for channel in channels.values():
            channel.close()
        channels.clear()


@dataclass(eq=False)
class _Pending:
    """A sum under way, and what it is."""

    transport: ProcessTransport
    collective: Collective
    total: SumUnderWay

    def wait(self) -> Tensor:
        self.transport._finish(self.collective, self.total)
        return self.total.tensor
