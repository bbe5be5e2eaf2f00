"""All TCP connections of one device, with the threads that read and write them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from raypipe.actors.transport import tcp
from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.actors.transport.tcp_channel import Incoming, Outgoing
from raypipe.actors.transport.tcp_holds import Holds
from raypipe.actors.transport.tcp_link import Link, Receipt
from raypipe.actors.transport.tcp_receiver import Receiver
from raypipe.actors.transport.tcp_sender import Sender
from raypipe.actors.transport.tcp_sum import TcpSumGroup
from raypipe.actors.transport.tcp_way import Departure, Way
from raypipe.communication.patterns import MOST_MESHED, Pattern, exchange
from raypipe.communication.policy import Communication


class Port:
    """One device's end of all its TCP connections; made by `connect`."""

    def __init__(
        self,
        device: int,
        connections: tcp.Connections,
        communication: Communication,
        ways: Mapping[int, Hashable] | None,
        apart: Collection[int],
        entrances: Mapping[int, Hashable],
    ) -> None:
        self.device = device
        connected = connections.ends
        self.links = {peer: Link(peer, one.end) for peer, one in connected.items()}
        by_way: dict[Hashable, list[Link]] = {}
        for peer, link in self.links.items():
            own = ("peer", peer)
            by_default = own if connected[peer].is_local else "port"
            way = (ways or {}).get(peer, by_default) if communication.holds else own
            by_way.setdefault(way, []).append(link)
        all_ways = [Way(links, communication) for links in by_way.values()]
        self._way_of = {link.peer: way for way in all_ways for link in way.links}
        self.holds = Holds(
            device,
            connections.datagrams,
            connections.own,
            connections.addresses,
            secret=connections.secret,
            rate=self._bytes_per_s,
            apart=apart,
            entrances=entrances,
            summing=lambda: [peer for peer, link in self.links.items() if link.is_summing],
        )
        if communication.holds:
            for link in self.links.values():
                link.holds = self.holds
        self.sender = Sender(all_ways, holds=self.holds if communication.holds else None, name=f"raypipe sends from {device}")
        self.receiver = Receiver(self.links.values(), name=f"raypipe receives at {device}")

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        peers: Collection[int],
        *,
        others: Collection[int],
        host_ip: str | None,
        communication: Communication,
        ways: Mapping[int, Hashable] | None,
        apart: Collection[int],
        entrances: Mapping[int, Hashable],
    ) -> Port:
        """Connect with peers; `others` have ports, too. Raises as `ProcessTransport.connect`."""
        connections = tcp.connect(rendezvous, peers, others=others, host_ip=host_ip)
        port = cls(rendezvous.device, connections, communication, ways, apart, entrances)
        try:
            rendezvous.aborting.add(port.links.values())
        except BaseException:
            port.close()
            raise
        return port

    def _bytes_per_s(self, peer: int) -> float:
        return self._way_of[peer].bytes_per_s

    @property
    def departures(self) -> tuple[Departure, ...]:
        """The newest chunks that have left since the window began, some thousands of them."""
        return tuple(self.sender.departures)

    def take_receipts(self) -> tuple[Receipt, ...]:
        """Return the newest chunks that have come since the last call, some thousands from each peer."""
        taken: list[Receipt] = []
        for link in self.links.values():
            while link.receipts:
                taken.append(link.receipts.popleft())
        return tuple(taken)

    @property
    def round_trips_s(self) -> dict[int, float]:
        """The shortest round trip to each peer, as far as this system tells."""
        return {peer: trip_s for way in self.sender.ways for peer, trip_s in way.round_trips_s().items()}

    @property
    def unanswered(self) -> tuple[int, ...]:
        """The peers whose systems acknowledge nothing, though it was sent again. Called from any thread."""
        return tuple(peer for peer, link in self.links.items() if link.is_unanswered)

    def open_window(self) -> None:
        """Forget the chunks that left in the last window."""
        self.sender.departures.clear()

    def outgoing(self, peer: int) -> Outgoing:
        """Return the sending end of the channel to a peer."""
        return Outgoing(self.links[peer], self.sender)

    def incoming(self, peer: int, *, timeout_s: float) -> Incoming:
        """Return the receiving end of the channel from a peer."""
        return Incoming(self.links[peer], self.receiver, timeout_s=timeout_s)

    def group(self, members: tuple[int, ...], pattern: Pattern) -> TcpSumGroup:
        """Return a set of devices that sums, by a pattern at first."""
        return TcpSumGroup(
            members,
            members.index(self.device),
            pattern=pattern,
            exchange=exchange(len(members), pattern),
            links={position: self.links[peer] for position, peer in enumerate(members) if peer in self.links},
            sender=self.sender,
            receiver=self.receiver,
        )

    def close(self) -> None:
        """End the threads and close the connections, which shuts them down."""
        for link in self.links.values():
            link.shut_down()
        self.sender.close()
        self.receiver.close()
        for link in self.links.values():
            link.close()
        self.holds.end.close()


def sum_peers(device: int, groups: Collection[tuple[int, ...]], patterns: Mapping[tuple[int, ...], Pattern]) -> set[int]:
    """Return the devices with which a device exchanges numbers of sums.

    All other members, or those next to it in a large group, or in the tree of a group of whom some cannot communicate.
    """
    peers: set[int] = set()
    for members in groups:
        if device not in members:
            continue
        position, count, pattern = members.index(device), len(members), patterns.get(members)
        if pattern is not None and not pattern.is_meshed:
            peers.update(members[neighbor] for neighbor in pattern.neighbors[position])
        else:
            peers.update(members if count <= MOST_MESHED else (members[position - 1], members[(position + 1) % count]))
    return peers - {device}
