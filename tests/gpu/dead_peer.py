# mypy: disable-error-code="no-untyped-call"
"""Check that a stream which waits for another process's event goes on when that process is killed.

python -m tests.gpu.dead_peer made_by_peer|made_here        prints `goes on`, or `waits`
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

import torch

_DEVICE = torch.device("cuda", 0)
_CYCLES = 40_000_000_000  # of a kernel that the peer is killed in: some twenty seconds
_WAITS_S = 6.0


def _peer(pipe: Connection, made_by_peer: bool) -> None:
    torch.cuda.set_device(_DEVICE)
    torch.cuda._sleep(1)
    if made_by_peer:
        event = torch.cuda.Event(interprocess=True)
        pipe.send(event.ipc_handle())
    else:
        event = torch.cuda.Event.from_ipc_handle(_DEVICE, pipe.recv())
    torch.cuda._sleep(_CYCLES)
    event.record()
    pipe.send("recorded")
    time.sleep(60.0)


def _is_done(event: torch.cuda.Event, *, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not event.query():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def main() -> None:
    """Kills a process that has an event of both recorded."""
    made_by_peer = sys.argv[1] == "made_by_peer"
    torch.cuda._sleep(1)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_peer, args=(there, made_by_peer), daemon=True)
    process.start()
    if made_by_peer:
        event = torch.cuda.Event.from_ipc_handle(_DEVICE, here.recv())
    else:
        event = torch.cuda.Event(interprocess=True)
        here.send(event.ipc_handle())
    assert here.recv() == "recorded"
    stream, after = torch.cuda.Stream(), torch.cuda.Event()
    event.wait(stream)
    after.record(stream)
    assert not _is_done(after, within_s=1.0), "the peer still computes"
    process.kill()
    process.join()
    print("goes on" if _is_done(after, within_s=_WAITS_S) else "waits", flush=True)
    os._exit(0)  # what waits for ever would hold an orderly end up


if __name__ == "__main__":
    main()
