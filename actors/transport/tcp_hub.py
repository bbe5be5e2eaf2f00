"""All connections of one device over TCP, with its sender, its receiver and its sums."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping

import torch

from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.actors.transport.tcp import Frame, FrameKind, bytes_of, connect
from raypipe.actors.transport.tcp_channel import Incoming, Outgoing
from raypipe.actors.transport.tcp_receiver import Receiver, Target
from raypipe.actors.transport.tcp_sender import Sender, closed
from raypipe.actors.transport.tcp_sum import Sums, TcpSumGroup


class TcpHub:
    """One device's end of its connections; raises as `ProcessTransport.connect`."""

    def __init__(
        self, rendezvous: Rendezvous, peers: Collection[int], *, timeout_s: float, chunk_s: float, ways: Mapping[int, Hashable]
    ) -> None:
        self._timeout_s = timeout_s
        # Whoever holds it may send, and sending may find a peer gone.
        self._lock = threading.Condition(threading.RLock())
        self._sockets = connect(rendezvous, peers)
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        self._ended: set[int] = set()
        name = f"raypipe {rendezvous.device}"
        self.sender = Sender(self._sockets, lock=self._lock, chunk_s=chunk_s, ways=ways, on_broken=self._end, name=f"{name} sends over tcp")
        self._sums = Sums(rendezvous.device, self.sender)
        # A channel must be there before its first message is.
        for peer in peers:
            self._incoming[peer] = Incoming(self._lock, timeout_s=timeout_s)
        self._receiver = Receiver(self._sockets, on_frame=self._target, on_ended=self._end, name=f"{name} receives over tcp")

    def incoming(self, peer: int) -> Incoming:
        """Return the end of the channel from a peer."""
        return self._incoming[peer]

    def outgoing(self, peer: int) -> Outgoing:
        """Return the end of the channel to a peer."""
        return self._outgoing.setdefault(peer, Outgoing(self.sender, peer))

    def group(self) -> TcpSumGroup:
        """Return the sums of any members that are connected in a ring."""
        return TcpSumGroup(self._sums)

    def _target(self, peer: int, frame: Frame) -> Target:
        if frame.kind == FrameKind.PIECE:
            return self._sums.target(frame)
        description = bytearray(frame.key)
        payload = torch.empty(frame.num_bytes, dtype=torch.uint8)
        channel = self._incoming[peer]

        def arrived() -> None:
            with self._lock:
                channel.arrived.append((bytes(description), payload))
                self._lock.notify_all()

        return (memoryview(description), bytes_of(payload)), arrived

    def _end(self, peer: int) -> None:
        with self._lock:
            if peer in self._ended:
                return
            self._ended.add(peer)
            self.sender.drop(peer)
            self._incoming[peer].is_closed = True
            if peer in self._outgoing:
                self._outgoing[peer].error = closed()
            self._sums.end(peer)
            self._lock.notify_all()

    def close(self) -> None:
        """End the threads and close the connections."""
        for end in self._sockets.values():
            end.shut_down()
        self.sender.close()
        self._receiver.close()
        for end in self._sockets.values():
            end.close()
