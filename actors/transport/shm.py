"""Channels through shared memory, between processes of one host.

    sender                      one channel                         receiver
    copies a message into   --> [slot 0][slot 1] ... [slot n-1] --> copies it out
    a free slot, sends      --> socket: a packet                --> wakes up, compares the packet
    counts free slots       <-- socket: how many were taken     <-- every n/4 messages

* A send never waits: if no slot is free, a thread moves the message later.
* The receiver copies messages out, so a slot is free at once, however long the tensors live.
* The first message makes the ring; one that does not fit makes a ring of at least twice the size. Messages are taken in order, so the
  receiver drops the former ring when it hears of the next.
* The ring is an unnamed file (memfd), whose descriptor travels over the socket: nothing is left behind, whatever the size of /dev/shm.
  Its memory is allocated first: if it lacks, the send fails, and no process dies of SIGBUS.
* The socket (AF_UNIX) keeps packets whole, ends with either process, orders accesses to the memory, and wakes a receiver in 16 to 34 us on
  an idle core, as fast as a pipe, an eventfd or a semaphore.
* The packet is the text of the message, prepared once: the receiver compares bytes, and can say what differs.
* When caches are cold, copying 64 KB takes 25 us with `copy_` and 12 us with memmove, allocating them 20 us instead of 1 us. So small
  tensors are allocated when the window begins, and bytes are copied, not tensors.
"""

from __future__ import annotations

import array
import math
import os
import secrets
import select
import socket
import struct
import threading
from contextlib import suppress

from raypipe.actors.transport import gate
from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError
from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.errors import TransportError

_NUMBER = struct.Struct("<Q")
_TIME = struct.Struct("@ll")
"""Seconds and microseconds of a socket's limit."""
_LOOK_EVERY_S = 0.02
_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group of a socket's peer (Linux)."""


def available() -> bool:
    """Return whether this process can share memory."""
    try:
        os.close(os.memfd_create("raypipe"))
    except (AttributeError, OSError):  # not Linux, or forbidden
        return False
    return True


def connect(rendezvous: Rendezvous, source: int, target: int) -> PacketSocket:
    """Connect one end of a channel, together with the other end. Raises as `ProcessTransport.connect`."""
    channel = f"memory {source}-{target}"
    return PacketSocket(_listen(rendezvous, channel, target) if rendezvous.device == source else _call(rendezvous, channel, source))


def _purpose(rendezvous: Rendezvous, channel: str) -> str:
    return f"{channel} in {rendezvous.prefix}"


def _listen(rendezvous: Rendezvous, channel: str, target: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # After a zero byte the name is no file: it goes with the socket, and is known within the network namespace only.
    name = f"raypipe-{secrets.token_hex(16)}"
    listening.bind(f"\0{name}")
    with gate.Gate(listening, secret=rendezvous.secret, purpose=_purpose(rendezvous, channel)) as entrance:
        rendezvous.publish(f"{channel} listens", name)
        while True:
            for device, end in entrance.admit(_LOOK_EVERY_S):
                if device == target and _user_of(end) == os.geteuid():
                    return end
                end.close()
            rendezvous.check(rendezvous.names[target], "it did not call for the shared memory")


def _call(rendezvous: Rendezvous, channel: str, source: int) -> socket.socket:
    (name,) = rendezvous.wait_for(f"{channel} listens", [source])
    peer = rendezvous.names[source]

    def check() -> None:
        rendezvous.check(peer, "it does not answer for the shared memory")

    while True:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.setblocking(False)
            end.connect(f"\0{name}")
            if (user := _user_of(end)) != os.geteuid():
                raise gate.UnprovedError(f"who listens for it is of another user ({user})")
            gate.prove(end, secret=rendezvous.secret, purpose=_purpose(rendezvous, channel), device=rendezvous.device, check=check)
        except ConnectionRefusedError as error:
            end.close()
            problem = (
                f"no way through shared memory ({error.strerror}): they are not on one host; set scaling.transport to tcp, or to nccl "
                "for GPUs"
            )
            raise TransportError(rendezvous.name, peer, "connecting", problem) from error
        except OSError as error:  # strangers fill the queue, or had this call dropped
            end.close()
            rendezvous.check(peer, f"no way through shared memory: {error.strerror or error}")
            rendezvous.aborting.aborted.wait(_LOOK_EVERY_S)
        except BaseException:
            end.close()
            raise
        else:
            return end


def _user_of(end: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


PACKET_BYTES = 256
"""Longest packet. The socket must hold the packets of several rings full of messages that nobody takes."""
NEW_RING = b"\0"
"""Packet that announces a ring; text has no zeros."""


class PacketSocket:
    """One end of a channel's socket, over which packets and file descriptors travel in order.

    Reads raise `BlockingIOError` after `limit`; reads and writes raise `ChannelError` if the peer is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self.end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._lock = threading.Lock()

    def limit(self, timeout_s: float) -> None:
        """Set the limit of waiting reads, which restarts with each signal that Python handles."""
        # To the socket, 0 means for ever.
        seconds, microseconds = divmod(max(1, math.ceil(1e6 * timeout_s)), 1_000_000)
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(seconds, microseconds))

    def read(self) -> bytes:
        """Wait for the next packet."""
        try:
            packet = self.end.recv(PACKET_BYTES)
        except ConnectionResetError:
            return self.read()  # the peer ended with packets unread, which is told once; its own are still there
        if not packet:
            raise ChannelError(CLOSED_BY_PEER)
        return packet

    def read_file(self) -> tuple[int, int]:
        """Wait for a number and the file descriptor that comes with it."""
        try:
            packet, ancillary, _, _ = self.end.recvmsg(_NUMBER.size, _ANCILLARY_BYTES)
        except ConnectionResetError:
            return self.read_file()
        if not packet:
            raise ChannelError(CLOSED_BY_PEER)
        return _NUMBER.unpack(packet)[0], array.array("i", ancillary[0][2])[0]

    def read_number(self) -> int | None:
        """Return the next number, or `None` if there is none yet."""
        try:
            packet = self.end.recv(_NUMBER.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return self.read_number()
        if not packet:
            raise ChannelError(CLOSED_BY_PEER)
        number: int = _NUMBER.unpack(packet)[0]
        return number

    def wait(self) -> None:
        """Wait until there is something to read, or the peer is gone."""
        self._poll.poll()

    def write(self, packet: bytes) -> None:
        """Send a packet; raises `BlockingIOError` if the socket is full."""
        try:
            self.end.send(packet, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelError(CLOSED_BY_PEER) from error

    def write_when_there_is_room(self, packet: bytes) -> None:
        """Send a packet; wait while the socket is full."""
        try:
            self.end.send(packet)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelError(CLOSED_BY_PEER) from error

    def write_number(self, number: int) -> None:
        """Send a number."""
        self.write(_NUMBER.pack(number))

    def write_file(self, number: int, descriptor: int) -> None:
        """Send a number and a file descriptor."""
        try:
            socket.send_fds(self.end, [_NUMBER.pack(number)], [descriptor], socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelError(CLOSED_BY_PEER) from error

    def shut_down(self) -> None:
        """End all waits at both ends. Called from any thread."""
        with self._lock, suppress(OSError):  # the peer was faster, or it is closed
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self.end.close()
