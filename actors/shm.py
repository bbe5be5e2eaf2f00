"""Channels through shared memory, between processes of one host.

    sender                      one channel                         receiver
    copies a message into   --> [slot 0][slot 1] ... [slot n-1] --> copies it out
    a free slot, says so    --> socket: how long its text is    --> wakes up, compares the text
    counts free slots       <-- socket: how many were taken     <-- every n/4 messages

What shapes the code, here and in `shm_channels`:

* A send never waits. If no slot is free, the message stays in the sender's memory and a thread, which lives only as long as there
  are such messages, moves it when a slot becomes free, whatever the sender's program does meanwhile.
* The receiver copies messages out, so that a slot is free as soon as its message was received, however long the tensors live.
  For 64 KB the copy costs what a view into the slot costs (4 us); for 4 MB it costs 0.2 ms.
* The sender makes the ring with the first message, and one of twice the size or more when a message does not fit. The receiver
  takes messages in order, so it needs the former ring no more when it hears of the next.
* The ring is a file without a name (memfd), whose descriptor travels over the socket. Nothing can be left behind, however a process
  ends, and the size of /dev/shm, 64 MB in many containers, does not matter. Its memory is there before it is written to: where it
  lacks, the send fails, and no process dies of SIGBUS.
* The socket (AF_UNIX, whose packets stay whole) ends when either process does, which its peer sees at once. It wakes as fast as a
  named pipe, an eventfd or a semaphore: 16 to 34 us from the send to the receiver's hands, with any of them, where a core is idle.
* Both ends describe a message in text: what it is, shapes and dtypes. It stands at the end of the slot.
* Between two stages that sleep, caches are cold, and every line of Python costs several times what it does in a loop. What repeats
  in every window is therefore kept: the descriptions of messages, and the tensors in the slots.

Counts and places are only ever passed through the socket, whose system calls order them against reads and writes of the memory.
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

from raypipe.actors.channels import CLOSED_BY_PEER, ChannelError
from raypipe.actors.meeting import Meeting
from raypipe.errors import TransportError

_NUMBER = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group, as Linux tells them of a socket's peer."""


def available() -> bool:
    """Whether this process can share memory in this way."""
    try:
        os.close(os.memfd_create("raypipe"))
    except (AttributeError, OSError):  # not Linux, or forbidden
        return False
    return True


def connect(meeting: Meeting, source: int, target: int) -> Line:
    """One end of the line of a channel, made by both at the same time.

    Raises:
        TransportTimeoutError: the other end did not come in time.
        TransportError: the two cannot reach each other.
        AbortedError: `abort` was called.
    """
    channel = f"memory {source}-{target}"
    return Line(_listen(meeting, channel, target) if meeting.device == source else _call(meeting, channel, source))


def _listen(meeting: Meeting, channel: str, target: int) -> socket.socket:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        # After a zero byte the name is no file: it goes with the socket, and is known within the network namespace only.
        name = f"raypipe-{secrets.token_hex(16)}"
        listening.bind(f"\0{name}")
        listening.listen()
        meeting.say(f"{channel} listens", name)
        meeting.hear(f"{channel} called", [target])
        listening.settimeout(meeting.left_s)
        while True:
            end, _ = listening.accept()
            _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if user == os.geteuid():
                return end
            end.close()  # a stranger, who may not read the memory


def _call(meeting: Meeting, channel: str, source: int) -> socket.socket:
    (name,) = meeting.hear(f"{channel} listens", [source])
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(f"\0{name}")
    except OSError as error:
        end.close()
        problem = f"no way through shared memory ({error.strerror}): they are not on one host; set scaling.transport to gloo"
        raise TransportError(meeting.name, meeting.names[source], "connecting", problem) from error
    meeting.say(f"{channel} called")
    return end


class Line:
    """One end of the socket of a channel, over which numbers travel in order, and files with them.

    Args:
        end: the connected socket, closed by `close`.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._ancillary_bytes = socket.CMSG_SPACE(array.array("i").itemsize)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._lock = threading.Lock()

    def read(self) -> tuple[int, int | None] | None:
        """The next number and the descriptor that came with it, or None if there is no number yet.

        Raises:
            ChannelError: there will be none any more.
        """
        for _ in range(2):
            try:
                packet, ancillary, _, _ = self._end.recvmsg(_NUMBER.size, self._ancillary_bytes)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # the peer ended with numbers unread; its own are still there
            if not packet:
                break
            return _NUMBER.unpack(packet)[0], array.array("i", ancillary[0][2])[0] if ancillary else None
        raise ChannelError(CLOSED_BY_PEER)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until there is a number, or will be none any more; returns whether that came in time."""
        return bool(self._poll.poll(None if timeout_s is None else max(0, math.ceil(1000 * timeout_s))))

    def write(self, number: int, descriptor: int | None = None) -> None:
        """Sends a number, and with it a file.

        Raises:
            ChannelError: the peer is gone.
        """
        try:
            if descriptor is None:
                self._end.send(_NUMBER.pack(number))
            else:
                socket.send_fds(self._end, [_NUMBER.pack(number)], [descriptor])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelError(CLOSED_BY_PEER) from error

    def shut_down(self) -> None:
        """Ends all waits at both ends; called from any thread."""
        with self._lock, suppress(OSError):  # the peer was faster, or it is closed
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket back."""
        with self._lock:
            self._end.close()
