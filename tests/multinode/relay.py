r"""A relay that makes one way between two nodes longer: it holds each packet for a set time, and keeps their order and rate.

    python -m tests.multinode.relay TARGET SECONDS        on the node that sends; TARGET is an IPv4 address

A route leads what goes to the target into a tunnel, whose other end is this process. A packet that has been held leaves through the
node's own queue, so rates are those of the node's wires. Connections that exist go through it from the next packet on. Prints a line
when the route is there. A line on stdin sets other seconds; the end of stdin removes the route, lets the held packets go, and ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

INTERFACE = "e0"
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MTU_BYTES = 9000
_MOST_QUEUED_BYTES = 64 << 20
"""In the queue of the node's wire: what a sender has under way, and no packet is lost."""


def relay(target: str, delay_s: float) -> None:
    """Hold what goes from this node to a target, until stdin ends."""
    number = target.rsplit(".", maxsplit=1)[1]
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", f"relay{number}".encode(), _TUN_WITHOUT_HEADER))
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, INTERFACE.encode())
        out.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_SNDBUFFORCE", 32), _MOST_QUEUED_BYTES)
        _ip(f"link set relay{number} mtu {_MTU_BYTES} txqueuelen 10000 up")
        _ip(f"route add {target}/32 dev relay{number} src {os.environ['NODE_IP']}")
        print("relays", flush=True)
        held: deque[tuple[float, bytes]] = deque()
        given = sys.stdin.fileno()
        ends = False
        while held or not ends:
            left_s = max(held[0][0] - time.monotonic(), 0.0) if held else None
            ready, _, _ = select.select([tunnel] if ends else [tunnel, given], [], [], left_s)
            if given in ready:
                if line := sys.stdin.readline():
                    delay_s = float(line)
                else:
                    ends = True
                    _ip(f"route del {target}/32 dev relay{number}")
            now_s = time.monotonic()
            if tunnel in ready:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        # The first packets behind a shorter delay do not overtake those that are held.
                        due_s = max(now_s + delay_s, held[-1][0] if held else 0.0)
                        held.append((due_s, os.read(tunnel, _MTU_BYTES)))
            while held and held[0][0] <= now_s:
                packet = held.popleft()[1]
                if packet[0] >> 4 == 4:
                    out.sendto(packet, (target, 0))


def _ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True, timeout=20.0)


if __name__ == "__main__":
    relay(sys.argv[1], float(sys.argv[2]))
