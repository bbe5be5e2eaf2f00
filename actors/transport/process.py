"""`ProcessTransport`: messages and sums between processes.

CPU devices pass messages through shared memory or over TCP, and sum over TCP; or gloo does what TCP does. GPUs use NCCL, and memory
within one GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from torch import Tensor

from raypipe.actors.transport import cuda_ipc, gloo_channel
from raypipe.actors.transport.channel import ChannelError, SumUnderWay
from raypipe.actors.transport.connecting import Connector, Endpoints
from raypipe.actors.transport.protocol import ErrorPlace, Expected, Pending, Places
from raypipe.actors.transport.rendezvous import AbortGroup, Rendezvous
from raypipe.actors.transport.secret import StoreAddress
from raypipe.actors.transport.tcp_link import Receipt
from raypipe.actors.transport.tcp_sum import TcpSumGroup
from raypipe.actors.transport.tcp_way import Departure
from raypipe.communication.patterns import Pattern
from raypipe.communication.policy import SCHEDULED, Communication
from raypipe.communication.shards import Segment
from raypipe.errors import RunError, TransportError, TransportTimeoutError
from raypipe.schedules.collectives import Collective
from raypipe.schedules.lower import Message


class ProcessTransport:
    """One device's channels and collectives with devices in other processes.

    Call `connect` first. After an error the transport cannot be used again.

    Args:
        device: Number of this device.
        names: Names of all devices, for error messages.
        channels: All channels of the run as (source, target). Every device passes the same channels, in any order.
        shared: Channels through shared memory: both ends are processes of one host, or use one GPU. Every device passes the same.
        groups: Members, ascending, of each collective of the run. Every device passes the same groups, in any order.
        patterns: Pattern of the sums of a group over TCP, at first; where left out a ring in the order of the members.
        store: Address of the `StoreServer` that one process opened, with the secret that all of them prove to know.
        prefix: Text that keeps runs and their attempts apart in the store; never use one twice.
        timeout_s: Limit for every wait once connected.
        connect_timeout_s: Limit for `connect`; `timeout_s` by default.
        host_ip: Address of this node at the interface to use, unless GLOO_SOCKET_IFNAME names one. Without either, TCP takes the one that
            leads to the store, and gloo looks up the host name.
        over_tcp: Whether TCP connections of raypipe's own carry sums and the channels that are not in `shared`, and not gloo.
        communication: How transfers over TCP share links.
        ways: For each peer what its transfers over TCP have to share with those of others of this name. By default all peers on other hosts
            are behind one, the port of the node, and each peer on this host has its own.
        apart: Peers so slow that what goes to them leaves room for others in the port of this node.
        entrances: For peers whose messages share something at this device's end, what it is; the message that is due first goes first.
        receives_ahead: Messages of a gloo channel whose receives are posted ahead.
        library: CUDA and NCCL, which carry sums and the channels that are not in `shared`; `None` for CPU devices.
    """

    def __init__(
        self,
        device: int,
        *,
        names: Sequence[str],
        channels: Sequence[tuple[int, int]],
        shared: Collection[tuple[int, int]] = (),
        groups: Sequence[tuple[int, ...]],
        patterns: Mapping[tuple[int, ...], Pattern] | None = None,
        store: StoreAddress,
        prefix: str,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        host_ip: str | None = None,
        over_tcp: bool = True,
        communication: Communication = SCHEDULED,
        ways: Mapping[int, Hashable] | None = None,
        apart: Collection[int] = (),
        entrances: Mapping[int, Hashable] | None = None,
        receives_ahead: int = 4,
        library: cuda_ipc.SharingLibrary | None = None,
    ) -> None:
        self.device = device
        self.names = tuple(names)
        self.timeout_s = timeout_s
        self._error_place = ErrorPlace(device, self.names)
        self._aborting = AbortGroup()
        self._endpoints = Endpoints()
        self._outgoing, self._incoming = self._endpoints.outgoing, self._endpoints.incoming
        self._connector = Connector(
            self._endpoints,
            channels=channels,
            shared=shared,
            groups=groups,
            patterns=patterns or {},
            timeout_s=timeout_s,
            over_tcp=over_tcp,
            communication=communication,
            ways=ways,
            apart=apart,
            entrances=entrances or {},
            receives_ahead=receives_ahead,
            library=library,
            host_ip=host_ip,
        )
        self.prefix = prefix
        self._store_address = store
        self._begin_rendezvous = partial(
            Rendezvous,
            device,
            names=self.names,
            address=store,
            prefix=prefix,
            timeout_s=timeout_s if connect_timeout_s is None else connect_timeout_s,
            aborting=self._aborting,
        )
        # Whoever forgets `close` must not hang at the end of the process, where gloo joins threads that may still wait.
        weakref.finalize(self, _release, self._aborting, self._endpoints)
        self._unusable: str | None = "it is not connected: call connect"

    # Connecting

    def connect(self) -> None:
        """Make all channels and groups; return when all their members have.

        Raises:
            TransportTimeoutError: A device did not come in time.
            TransportError: A device came and went, or cannot share memory with this one.
            AbortedError: `abort` was called.
        """
        try:
            self._connector.choose_interface(self.device)
            with self._begin_rendezvous() as rendezvous:
                self._connector.connect(rendezvous)
            self._unusable = None
            self._aborting.check()  # `abort`, in another thread, says so there before it sets `_unusable`
        except BaseException as error:
            self._unusable = "it could not connect"
            self.close()
            if isinstance(error, RuntimeError | OSError) and not isinstance(error, RunError):  # the store, or what gloo says
                self._aborting.check()
                problem = gloo_channel.cause(error)
                raise TransportError(self.names[self.device], f"(store {self._store_address})", "connecting", problem) from error
            raise

    # A window

    def use_patterns(self, patterns: Mapping[tuple[int, ...], Pattern]) -> None:
        """Sum by other patterns from now on, over the same connections. All devices of a group call this between the same two sums.

        Sums over gloo and NCCL go as these choose, whatever the pattern.
        """
        for members, pattern in patterns.items():
            group = self._endpoints.groups.get(members)
            if isinstance(group, TcpSumGroup):
                group.pattern = pattern

    def open_window(self, incoming: Mapping[int, Sequence[Expected]], outgoing: Mapping[int, Sequence[Expected]]) -> None:
        """See `Transport`."""
        if self._unusable is not None:
            self._refuse()
        if self._endpoints.port is not None:
            self._endpoints.port.open_window()
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
        if self._unusable is not None:
            self._refuse(message, peer)
        try:
            self._outgoing[peer].send(tensors)
        except ChannelError as error:
            raise self._failure(error, message, peer) from error

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """See `Transport`."""
        if self._unusable is not None:
            self._refuse(message, peer)
        try:
            return self._incoming[peer].recv()
        except ChannelError as error:
            raise self._failure(error, message, peer) from error

    def slice_owners(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """See `Transport`; the same for as long as this transport lives, whatever the pattern."""
        return self._endpoints.groups[members].slice_owners

    def start(
        self,
        collective: Collective,
        tensor: Tensor,
        *,
        deadline: int = 0,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> Pending:
        """See `Transport`."""
        if self._unusable is not None:
            self._refuse(collective)
        group = self._endpoints.groups[collective.devices]
        try:
            total = group.sum(tensor, collective=collective, deadline=deadline, places=places, segments=segments)
        except ChannelError as error:
            raise self._failure(error, collective) from error
        return _Pending(self, collective, total)

    def _finish(self, collective: Collective, total: SumUnderWay) -> None:
        if self._unusable is not None:
            self._refuse(collective)
        try:
            total.wait(self.timeout_s)
        except ChannelError as error:
            raise self._failure(error, collective) from error

    def close_window(self) -> None:
        """See `Transport`."""
        if self._unusable is not None:
            self._refuse()
        for peer, channel in self._outgoing.items():
            unsent = channel.flush(self.timeout_s, self._aborting.aborted)
            self._aborting.check()
            if unsent is not None:
                problem = f"it was not taken within {self.timeout_s:g} s; the peer is stuck, or expects another message or shape"
                raise self._failure(channel.error or ChannelError(problem, kind=TransportTimeoutError), unsent, peer)

    def check(self) -> None:
        """See `Transport`."""
        for communicator, others in self._endpoints.communicators:
            if self._unusable is None and (problem := communicator.problem()) is not None:
                raise TransportError(self.names[self.device], others, "messages", problem)

    @property
    def departures(self) -> tuple[Departure, ...]:
        """The newest chunks, some thousands, that left over TCP since the window began."""
        return self._endpoints.port.departures if self._endpoints.port is not None else ()

    def take_receipts(self) -> tuple[Receipt, ...]:
        """Return the newest chunks, some thousands from each peer, that came over TCP since the last call."""
        return self._endpoints.port.take_receipts() if self._endpoints.port is not None else ()

    @property
    def round_trips_s(self) -> dict[int, float]:
        """The shortest round trip to each peer over TCP, as far as this system tells."""
        return self._endpoints.port.round_trips_s if self._endpoints.port is not None else {}

    @property
    def unanswered(self) -> tuple[int, ...]:
        """The peers over TCP whose systems acknowledge nothing, though it was sent again. Called from any thread."""
        port = self._endpoints.port
        return port.unanswered if port is not None else ()

    # The end

    def abort(self, reason: str) -> None:
        """See `Transport`. The peers find their connections closed. `connect` ends, too."""
        self._aborting.abort(reason)
        self._unusable = self._unusable or "it was aborted"
        for channel in list(self._outgoing.values()):
            channel.wake()

    def close(self) -> None:
        """See `Transport`."""
        self._unusable = self._unusable or "it is closed"
        _release(self._aborting, self._endpoints)

    # Errors

    def _refuse(self, subject: Message | Collective | None = None, peer: int | None = None) -> NoReturn:
        self._aborting.check()
        problem = f"this transport is out of use ({self._unusable})"
        if subject is None:
            raise TransportError(self.names[self.device], "any", "a window", problem)
        raise self._error(ChannelError(problem), subject, peer)

    def _failure(self, error: ChannelError, subject: Message | Collective, peer: int | None = None) -> TransportError:
        self._aborting.check()
        failure = self._error(error, subject, peer)
        self._unusable = str(failure)
        return failure

    def _error(self, error: ChannelError, subject: Message | Collective, peer: int | None) -> TransportError:
        if isinstance(subject, Collective):
            return self._error_place.of_collective(subject, error.problem, kind=error.kind)
        assert peer is not None, "a message has a peer"
        return self._error_place.of_message(subject, peer, error.problem, kind=error.kind)


def _release(aborting: AbortGroup, endpoints: Endpoints) -> None:
    # First the connections: whatever still waits inside gloo wakes up, and its threads can be joined.
    aborting.shut_down()
    endpoints.close()


@dataclass(eq=False)
class _Pending:
    transport: ProcessTransport
    collective: Collective
    total: SumUnderWay

    def wait(self) -> Tensor:
        self.transport._finish(self.collective, self.total)
        return self.total.tensor
