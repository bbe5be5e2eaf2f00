"""Makes the channels and sums of one device, together with the devices at their other ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, count
from typing import TypeVar

from raypipe.actors.transport import cuda_ipc, gloo, gloo_channel, nccl, shm, shm_channel
from raypipe.actors.transport.channel import ChannelError, IncomingChannel, OutgoingChannel, SumGroup
from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.actors.transport.tcp_port import Port, sum_peers
from raypipe.communication.patterns import Pattern, ring
from raypipe.communication.policy import Communication
from raypipe.errors import TransportError

K = TypeVar("K", bound=str)


class _Kind(StrEnum):
    CHANNEL = "channel"
    GROUP = "group"
    MEMORY = "memory"


@dataclass
class Endpoints:
    """One device's ends of its channels and sums; communicators with the names of their other members; its TCP connections."""

    outgoing: dict[int, OutgoingChannel] = field(default_factory=dict)
    incoming: dict[int, IncomingChannel] = field(default_factory=dict)
    groups: dict[tuple[int, ...], SumGroup] = field(default_factory=dict)
    communicators: list[tuple[nccl.Communicator, str]] = field(default_factory=list)
    port: Port | None = None

    def close(self) -> None:
        """Close all channels, after their connections were shut down."""
        port, self.port = self.port, None
        if port is not None:
            port.close()
        for outgoing in self.outgoing.values():
            outgoing.close()
        for incoming in self.incoming.values():
            incoming.close()
        self.outgoing.clear()
        self.incoming.clear()
        self.groups.clear()
        self.communicators.clear()


def in_rounds(sets: Collection[tuple[K, tuple[int, ...]]]) -> list[tuple[K, tuple[int, ...]]]:
    """Return sets of devices, each with its kind, in one order for all: by rounds, in each of which a device is in one set at most.

    So sets without a common member are connected at the same time. In sorted order each pair of a chain would wait for the one before it.
    """
    busy: defaultdict[int, set[int]] = defaultdict(set)  # rounds of each device
    placed: list[tuple[int, tuple[K, tuple[int, ...]]]] = []
    for one in sorted(sets):
        taken = set[int]().union(*(busy[member] for member in one[1]))
        number = next(number for number in count() if number not in taken)
        for member in one[1]:
            busy[member].add(number)
        placed.append((number, one))
    return [one for _, one in sorted(placed)]


class Connector:
    """Makes what `ProcessTransport` is told to connect, and puts it into `endpoints` as it is made."""

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        channels: Sequence[tuple[int, int]],
        shared: Collection[tuple[int, int]],
        groups: Sequence[tuple[int, ...]],
        patterns: Mapping[tuple[int, ...], Pattern],
        timeout_s: float,
        over_tcp: bool,
        communication: Communication,
        ways: Mapping[int, Hashable] | None,
        apart: Collection[int],
        entrances: Mapping[int, Hashable],
        receives_ahead: int,
        library: cuda_ipc.SharingLibrary | None,
        host_ip: str | None,
    ) -> None:
        self._endpoints = endpoints
        self._patterns = patterns
        self._timeout_s = timeout_s
        self._receives_ahead = receives_ahead
        self._over_tcp = over_tcp and library is None
        self._communication = communication
        self._ways = ways
        self._apart = apart
        self._entrances = entrances
        self._library = library
        self._host_ip = host_ip
        # Members wait for each other set by set. All go through them in this one order, so the first unfinished set is one
        # that all its members have come to.
        sets: set[tuple[_Kind, tuple[int, ...]]] = {(_Kind.MEMORY if channel in shared else _Kind.CHANNEL, channel) for channel in channels}
        sets |= {(_Kind.GROUP, members) for members in groups if len(members) > 1}
        self._sets = in_rounds(sets)

    def choose_interface(self, device: int) -> None:
        """Let gloo use the interface of this host, if the device needs gloo."""
        needs_gloo = any(kind is not _Kind.MEMORY and device in members for kind, members in self._sets)
        if self._host_ip is not None and self._library is None and not self._over_tcp and needs_gloo:
            gloo.choose_interface(self._host_ip)

    def connect(self, rendezvous: Rendezvous) -> None:
        """Make all channels and sums of this device; return when all their members have."""
        # All first wait for all, so that everyone names the one that is missing, and not someone who waits for it.
        rendezvous.publish("here")
        rendezvous.wait_for("here", sorted({member for _, members in self._sets for member in members}))
        if self._over_tcp:
            self._open_port(rendezvous)
        for kind, members in self._sets:
            if rendezvous.device not in members:
                continue
            if kind is _Kind.MEMORY:
                self._share_memory(rendezvous, *members)
            elif self._over_tcp:
                self._connect_over_tcp(rendezvous.device, kind, members)
            elif self._library is not None:
                self._connect_gpus(self._library, rendezvous, kind, members)
            else:
                self._connect_over_gloo(rendezvous, kind, members)
        if self._endpoints.port is not None:
            self._endpoints.port.receiver.start()

    def _share_memory(self, rendezvous: Rendezvous, source: int, target: int) -> None:
        endpoints, library, name = self._endpoints, self._library, _thread_name(source, target)
        packets = shm.connect(rendezvous, source, target)
        if rendezvous.device == source:
            endpoints.outgoing[target] = (
                shm_channel.Outgoing(packets, name=name) if library is None else cuda_ipc.Outgoing(library, packets, name=name)
            )
        else:
            endpoints.incoming[source] = (
                shm_channel.Incoming(packets, timeout_s=self._timeout_s)
                if library is None
                else cuda_ipc.Incoming(library, packets, timeout_s=self._timeout_s)
            )
        rendezvous.aborting.add([packets])

    def _open_port(self, rendezvous: Rendezvous) -> None:
        channels = [members for kind, members in self._sets if kind is _Kind.CHANNEL]
        groups = [members for kind, members in self._sets if kind is _Kind.GROUP]
        ends = {*chain(*channels, *groups)}
        if (device := rendezvous.device) in ends:
            peers = {*chain(*(members for members in channels if device in members))} - {device} | sum_peers(device, groups, self._patterns)
            self._endpoints.port = Port.connect(
                rendezvous,
                peers,
                others=ends - {device},
                host_ip=self._host_ip,
                communication=self._communication,
                ways=self._ways,
                apart=self._apart,
                entrances=self._entrances,
            )

    def _connect_over_tcp(self, device: int, kind: _Kind, members: tuple[int, ...]) -> None:
        endpoints, port = self._endpoints, self._endpoints.port
        assert port is not None, "members have neighbors"
        if kind is _Kind.GROUP:
            endpoints.groups[members] = port.group(members, self._patterns.get(members) or ring(range(len(members))))
        elif device == members[0]:
            endpoints.outgoing[members[1]] = port.outgoing(members[1])
        else:
            endpoints.incoming[members[0]] = port.incoming(members[0], timeout_s=self._timeout_s)

    def _connect_over_gloo(self, rendezvous: Rendezvous, kind: _Kind, members: tuple[int, ...]) -> None:
        if kind is _Kind.GROUP:
            # Gloo's sums go round from each rank to the one before it; they are to go from each member to the next, as `Cost` has it.
            group, connections = gloo.make_group(rendezvous, kind, members[::-1])
            position = members.index(rendezvous.device)
            self._endpoints.groups[members] = gloo.GlooSumGroup(group, connections, position=position, num_members=len(members))
            return
        source, target = members
        group, _ = gloo.make_group(rendezvous, kind, members)
        if rendezvous.device == source:
            self._endpoints.outgoing[target] = gloo_channel.Outgoing(group, name=_thread_name(source, target))
        else:
            self._endpoints.incoming[source] = gloo_channel.Incoming(group, ahead=self._receives_ahead, timeout_s=self._timeout_s)

    def _connect_gpus(self, library: cuda_ipc.SharingLibrary, rendezvous: Rendezvous, kind: _Kind, members: tuple[int, ...]) -> None:
        endpoints, device = self._endpoints, rendezvous.device
        others = ", ".join(rendezvous.names[member] for member in members if member != device)
        try:
            communicator = nccl.connect(library, rendezvous, kind, members)
        except ChannelError as error:
            raise TransportError(rendezvous.name, others, "connecting", error.problem) from error
        endpoints.communicators.append((communicator, others))
        if kind is _Kind.GROUP:
            endpoints.groups[members] = nccl.NcclSumGroup(library, communicator, num_members=len(members))
        elif device == members[0]:
            endpoints.outgoing[members[1]] = nccl.Outgoing(library, communicator)
        else:
            endpoints.incoming[members[0]] = nccl.Incoming(library, communicator, timeout_s=self._timeout_s)


def _thread_name(source: int, target: int) -> str:
    return f"raypipe sends {source}->{target}"
