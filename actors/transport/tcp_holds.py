"""Room for messages at both ends of a link: sums of other devices leave the port of a node while a long message passes it.

    message from 0 to 2, sum from 1 to 2     2 asks 1 to hold its sum while the message comes
    message from 0, sum from its neighbor    0 asks the devices of its node to hold their sums while the message leaves
    messages from 0 and 1 to 2               2 asks who sends the one that is due later to stop, until the other one is there

A request is a datagram, since a connection may have several milliseconds of a sum before it. It ends by itself: nobody waits for an
answer, and a lost one costs nothing but time.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from raypipe.actors.transport.secret import Secret

_NOTICE = struct.Struct("<IBdQ")
"""Who sends it; what it says; seconds; its number among those that it sends, so that none counts twice."""
_PROOF_BYTES = 16
"""Of the proof before a notice, cut as RFC 2104 allows: it decides about milliseconds."""
_LONGER = 1.5
"""Than alone: what the kernel holds of a sum passes beside the message."""
_LEAST_S = 0.002
"""A message that is there sooner gains nothing: what the kernel holds of a sum passes beside it."""
_MOST_S = 1.0
"""A message that comes slowly holds no sum for longer."""
_MOST_STOPPED_S = 5.0
"""And no message for longer than this."""
NEVER_DUE = 1 << 62
"""Later than any message of a window."""
_NEWEST_WEIGHT = 0.5
"""Of the newest measurement in the seconds for a byte that comes."""


class _Say(IntEnum):
    HOLD = 0
    """What goes to me."""
    ENTERS = 1
    """A message comes into our node."""
    LEAVES = 2
    """A message leaves our node."""
    STOP = 3
    """What goes to me, messages too."""


@dataclass(frozen=True)
class Address:
    """Where a device takes connections and datagrams, and the token that proofs of datagrams for it cover."""

    host: str
    port: int
    datagram_port: int
    token: str


class Asked(NamedTuple):
    """A request: sums to a peer, or to all other nodes if that is `None`, are held for some seconds, messages too on request; 0 ends it."""

    peer: int | None
    seconds: float
    with_messages: bool = False


@dataclass
class _Coming:
    """A long message that comes by an entrance.

    Attributes:
        is_asked: Whether its sender is asked to stop.
        was_asked: Whether it was, so that nothing can be said of its rate.
    """

    due: int
    num_bytes: int
    since_s: float
    is_asked: bool = False
    was_asked: bool = False


class Holds:
    """What a device asks of others, and they of it.

    Args:
        device: This device.
        end: Socket for datagrams.
        own: Its address.
        secret: Of the run; datagrams prove to know it.
        addresses: Those of the others, on this host or not.
        rate: Returns the bytes per second of what goes to a peer.
        summing: Returns the devices that send sums to this one.
        apart: Devices on slow nodes, messages to which leave room in the port of this node.
        entrances: What messages of some senders share at this device's end; those that share it take turns.
    """

    def __init__(
        self,
        device: int,
        end: socket.socket,
        own: Address,
        addresses: Mapping[int, Address],
        *,
        secret: Secret,
        rate: Callable[[int], float],
        summing: Callable[[], Collection[int]],
        apart: Collection[int] = (),
        entrances: Mapping[int, Hashable],
    ) -> None:
        self.end = end
        self._device = device
        self._token = bytes.fromhex(own.token)
        self._secret = secret
        self._num_said = 0
        self._saying = threading.Lock()
        """Held while a notice gets its number and leaves."""
        self._last_of: dict[int, int] = {}
        """The number of the newest notice of each sender."""
        self._addresses = {
            other: (bytes.fromhex(address.token), (address.host, address.datagram_port)) for other, address in addresses.items()
        }
        self._of_node = [other for other, address in addresses.items() if address.host == own.host]
        self._far = {other for other, address in addresses.items() if address.host != own.host}
        self._rate = rate
        self._summing = summing
        self._coming: set[int] = set()
        """The senders of long messages that are on their way."""
        self._until_s = 0.0
        """Until when sums are held for these."""
        self._asked: set[int] = set()
        """Who was asked to hold sums until then."""
        self._apart = apart
        self._entrances = entrances
        self._turns = threading.Lock()
        """Held by who changes what follows."""
        self._entering: dict[int, _Coming] = {}
        self.resuming: set[int] = set()
        """The senders that may go on, and of which nothing has come since: they may be busy with others."""
        self._byte_s: dict[int, float] = {}
        """Seconds for a byte of messages by sender, so far as they were not stopped."""

    # Said to others

    def leaves(self, peer: int, num_bytes: int) -> None:
        """Say that a message begins to leave."""
        if self._of_node and peer in self._far and peer not in self._apart and (seconds := self._seconds(peer, num_bytes)):
            for other in self._of_node:
                self._say(other, _Say.LEAVES, seconds)

    def comes(self, peer: int, num_bytes: int, *, due: int) -> bool:
        """Say that a message begins to come, if it is a long one; return whether it is. See `Expected` for `due`."""
        if peer not in self._far or not (seconds := self._seconds(peer, num_bytes)):
            return False
        self._coming.add(peer)
        self._enters(seconds)
        if (entrance := self._entrances.get(peer)) is not None:
            with self._turns:
                self._entering[peer] = _Coming(due, num_bytes, time.monotonic())
                self._take_turns(entrance)
        return True

    def has_come(self, peer: int) -> None:
        """Say that a long message is there, or never will be."""
        if peer not in self._coming:
            return
        self._coming.discard(peer)
        if not self._coming:
            self._enters(0.0)
        if (entrance := self._entrances.get(peer)) is not None:
            with self._turns:
                came = self._entering.pop(peer)
                self.resuming.discard(peer)
                if came.is_asked:
                    self._say(peer, _Say.STOP, 0.0)
                if not came.was_asked:
                    byte_s = (time.monotonic() - came.since_s) / came.num_bytes
                    self._byte_s[peer] = _NEWEST_WEIGHT * byte_s + (1 - _NEWEST_WEIGHT) * self._byte_s.get(peer, byte_s)
                self._take_turns(entrance)

    def is_due(self, peer: int, due: int) -> None:
        """Say when a message is due that has begun before that was known."""
        with self._turns:
            if (message := self._entering.get(peer)) is not None:
                message.due = due
                self._take_turns(self._entrances[peer])

    def moves(self, peer: int) -> None:
        """Say that bytes come of a sender that may go on."""
        with self._turns:
            self.resuming.discard(peer)
            self._take_turns(self._entrances[peer])

    def _take_turns(self, entrance: Hashable) -> None:
        """Let what is due first come, and ask the others that share the entrance to stop."""
        entering = {peer: message for peer, message in self._entering.items() if self._entrances[peer] == entrance}
        first = min((message.due for peer, message in entering.items() if peer not in self.resuming), default=NEVER_DUE)
        # What one slot waits for comes together: stopping some of it would gain nothing.
        alone_s = sum(
            message.num_bytes * self._byte_s.get(peer, 1 / self._rate(peer)) for peer, message in entering.items() if message.due == first
        )
        for peer, message in entering.items():
            if message.due > first:
                message.is_asked = message.was_asked = True
                self.resuming.discard(peer)
                self._say(peer, _Say.STOP, min(_LONGER * alone_s, _MOST_STOPPED_S))
            elif message.is_asked:
                message.is_asked = False
                self.resuming.add(peer)
                self._say(peer, _Say.STOP, 0.0)

    def _enters(self, seconds: float) -> None:
        self._hold(seconds)
        for other in self._of_node:
            self._say(other, _Say.ENTERS, seconds)

    def _hold(self, seconds: float) -> None:
        self._until_s = until(seconds)
        for other in (self._far.intersection(self._summing()) | self._asked) - self._coming:
            self._say(other, _Say.HOLD, seconds)
            self._asked.add(other)
        if not seconds:
            self._asked = set()

    def sum_comes(self, peer: int) -> None:
        """Ask who sends a part of a sum to hold the others while a long message comes, if that was not known when it began."""
        if not self._until_s or peer in self._asked or peer in self._coming or peer not in self._far:
            return
        if (seconds := self._until_s - time.monotonic()) >= _LEAST_S:
            self._asked.add(peer)
            self._say(peer, _Say.HOLD, seconds)

    def _seconds(self, peer: int, num_bytes: int) -> float:
        alone_s = num_bytes / self._rate(peer)
        return min(_LONGER * alone_s, _MOST_S) if alone_s >= _LEAST_S else 0.0

    def _say(self, other: int, what: _Say, seconds: float) -> None:
        token, address = self._addresses[other]
        with self._saying, suppress(OSError):  # it is closed, or the system has no room
            self._num_said += 1
            notice = _NOTICE.pack(self._device, what, seconds, self._num_said)
            self.end.sendto(self._proof(token, notice) + notice, address)

    def _proof(self, token: bytes, notice: bytes) -> bytes:
        return self._secret.proof(b"notice", token, notice)[:_PROOF_BYTES]

    def is_far(self, peer: int) -> bool:
        """Whether a peer is on another node."""
        return peer in self._far

    # Asked by others

    def asked(self) -> Iterator[Asked]:
        """Yield the requests that have come; pass on those that concern who sends sums to this device."""
        while True:
            try:
                came = self.end.recv(_PROOF_BYTES + _NOTICE.size + 1)
            except OSError:
                return
            proof, notice = came[:_PROOF_BYTES], came[_PROOF_BYTES:]
            if len(notice) != _NOTICE.size or not hmac.compare_digest(proof, self._proof(self._token, notice)):
                continue
            other, what, seconds, number = _NOTICE.unpack(notice)
            most_s = _MOST_STOPPED_S if what == _Say.STOP else _MOST_S
            if other not in self._addresses or not 0.0 <= seconds <= most_s or number <= self._last_of.get(other, 0):
                continue
            self._last_of[other] = number
            if what in {_Say.HOLD, _Say.STOP}:
                yield Asked(other, seconds, with_messages=what == _Say.STOP)
            elif what == _Say.LEAVES:
                yield Asked(None, seconds)
            else:
                self._hold(seconds)


def until(seconds: float) -> float:
    """Return when a hold ends, by the clock of `time.monotonic`; 0 for one that has."""
    return time.monotonic() + seconds if seconds else 0.0
