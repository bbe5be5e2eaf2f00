"""What the system tells of a TCP connection: Linux's `struct tcp_info` (include/uapi/linux/tcp.h)."""

from __future__ import annotations

import socket
import struct
import sys

_MIN_RTT = struct.Struct("148xI")
_SENT_AGAIN = struct.Struct("2xBB20xI")  # tcpi_retransmits, tcpi_probes and tcpi_unacked
_USUAL_RTT_S = 1e-3
_MOST_PROBES = 2  # without an answer: a system answers one in half a second (tcp_invalid_ratelimit), and they begin more often
_NONE_S = 60.0  # from here on it is the kernel's word for none


def round_trip_s(end: socket.socket) -> float:
    """Return the seconds of the shortest round trip so far, or a usual one where this system does not tell; raise `OSError`."""
    if sys.platform != "linux":
        return _USUAL_RTT_S
    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    trip_s = 1e-6 * _MIN_RTT.unpack(told)[0] if len(told) == _MIN_RTT.size else _USUAL_RTT_S
    return trip_s if trip_s < _NONE_S else _USUAL_RTT_S


def is_unanswered(end: socket.socket) -> bool:
    """Return whether bytes were sent, and sent again, and the peer's system has not answered since; raise `OSError`.

    A process that reads nothing is no reason: its system acknowledges what it keeps for it, and answers probes when it keeps no more.
    Probes are also what this system sends where it finds no route at first. `False` where this system does not tell.
    """
    if sys.platform != "linux":
        return False
    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT_AGAIN.size)
    num_retransmits, num_probes, num_unacknowledged = _SENT_AGAIN.unpack(told)
    return bool((num_retransmits and num_unacknowledged) or num_probes > _MOST_PROBES)
