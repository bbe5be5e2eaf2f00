"""All TCP connections of one device, with the threads that read and write them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from raypipe.actors.transport import tcp
from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.actors.transport.tcp_channel import Incoming, Outgoing
from raypipe.actors.transport.tcp_link import Link
from raypipe.actors.transport.tcp_receiver import Receiver
from raypipe.actors.transport.tcp_sender import Sender
from raypipe.actors.transport.tcp_sum import TcpSumGroup
from raypipe.actors.transport.tcp_way import Departure, Sending, Way


class Port:
    """One device's end of all its TCP connections; made by `connect`."""

    def __init__(self, device: int, connected: Mapping[int, tcp.Connected], sending: Sending) -> None:
        self.device = device
        self.links = {peer: Link(peer, one.end) for peer, one in connected.items()}
        ways: dict[str, list[Link]] = {}
        for peer, link in self.links.items():
            ways.setdefault(_way(peer, connected[peer], sending), []).append(link)
        self.sender = Sender([Way(of_way, sending) for of_way in ways.values()], name=f"raypipe sends from {device}")
        self.receiver = Receiver(self.links.values(), name=f"raypipe receives at {device}")

    @classmethod
    def connect(cls, rendezvous: Rendezvous, peers: Collection[int], *, host_ip: str | None, sending: Sending) -> Port:
        """Connect with peers; raises as `ProcessTransport.connect`."""
        port = cls(rendezvous.device, tcp.connect(rendezvous, peers, host_ip=host_ip), sending)
        try:
            rendezvous.aborting.add(port.links.values())
        except BaseException:
            port.close()
            raise
        return port

    @property
    def departures(self) -> tuple[Departure, ...]:
        """The newest chunks that have left since the window began, some thousands of them."""
        return tuple(self.sender.departures)

    def open_window(self) -> None:
        """Forget the chunks of the last window."""
        self.sender.departures.clear()

    def outgoing(self, peer: int) -> Outgoing:
        """Return the sending end of the channel to a peer."""
        return Outgoing(self.links[peer], self.sender)

    def incoming(self, peer: int, *, timeout_s: float) -> Incoming:
        """Return the receiving end of the channel from a peer."""
        return Incoming(self.links[peer], self.receiver, timeout_s=timeout_s)

    def group(self, members: tuple[int, ...]) -> TcpSumGroup:
        """Return a set of devices that sums, in the order of the ring."""
        position = members.index(self.device)
        before, behind = (self.links[members[(position + step) % len(members)]] for step in (-1, 1))
        return TcpSumGroup(members, position, before=before, behind=behind, sender=self.sender, receiver=self.receiver)

    def close(self) -> None:
        """End the threads and close the connections, which shuts them down."""
        for link in self.links.values():
            link.shut_down()
        self.sender.close()
        self.receiver.close()
        for link in self.links.values():
            link.close()


def neighbors(device: int, groups: Collection[tuple[int, ...]]) -> set[int]:
    """Return the devices next to one in the rings of sums."""
    found: set[int] = set()
    for members in groups:
        if device in members and len(members) > 1:
            position = members.index(device)
            found |= {members[position - 1], members[(position + 1) % len(members)]}
    return found - {device}


def _way(peer: int, connected: tcp.Connected, sending: Sending) -> str:
    if not sending.scheduled:
        return f"device {peer}"
    if sending.ways is not None and peer in sending.ways:
        return sending.ways[peer]
    return f"device {peer}" if connected.is_local else "port"
