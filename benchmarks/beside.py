"""What sums of gradients add to the way of a message, on nodes with one port each.

    python benchmarks/beside.py [--rounds 3] [--json FILE]     # as root, with iproute2

A device sends another one 100 kB every 20 ms, over ports of 200 Mbit/s: 4 ms alone. Meanwhile two devices sum without a pause: the
sender and a third one, which share the sender's port, or the receiver and a third one, which share the receiver's. Milliseconds from the
beginning of the send to the end of the receive, by one clock; the first of a run are left out. In turns a message should take
`CHUNK_S` plus 1 ms more than alone, in the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rounds import in_rounds, print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the network in namespaces is made by the tests' own tools

from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.protocol import Expected, TensorSpec
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreServer
from raypipe.communication.policy import CHUNK_S, Communication
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.lower import Direction, Message
from tests.multinode.network import Network, finish, network

PORT_BYTES_PER_S = 25e6
MESSAGE_NUMBERS = 25_000
NUM_MESSAGES = 150
NUM_LEFT_OUT = 30
PERIOD_S = 0.02
SUM_NUMBERS = 2_500_000
NUM_SUMS = 9  # take a little longer than the messages
SENDER, RECEIVER, THIRD = range(3)
SECRET = Secret(b"of devices in network namespaces")
BESIDE = {"alone": (), "sender's sums": (SENDER, THIRD), "receiver's sums": (RECEIVER, THIRD)}


def end(device: int, summing: tuple[int, ...], store: StoreAddress, *, scheduled: bool, host_ip: str) -> list[float]:
    """Be a device; return the seconds of each message if this is the receiver."""
    torch.set_num_threads(1)
    transport = ProcessTransport(
        device,
        names=["sender", "receiver", "third"],
        channels=[(SENDER, RECEIVER), (SENDER, THIRD), (RECEIVER, THIRD)],
        groups=[summing] if summing else [],
        store=store,
        prefix="beside",
        timeout_s=60.0,
        host_ip=host_ip,
        communication=Communication(scheduled=scheduled),
    )
    transport.connect()
    messages = [Message(Direction.ACTIVATION, 0, 1, index) for index in range(NUM_MESSAGES)]
    expected = [Expected(message, (TensorSpec((MESSAGE_NUMBERS // 2,), torch.float64),)) for message in messages]
    transport.open_window({SENDER: expected} if device == RECEIVER else {}, {RECEIVER: expected} if device == SENDER else {})
    summed = threading.Thread(target=_sum, args=(transport, summing))
    if device in summing:
        summed.start()
    seconds: list[float] = []
    if device == SENDER:
        for message in messages:
            time.sleep(PERIOD_S)
            transport.send(message, RECEIVER, [torch.full((MESSAGE_NUMBERS // 2,), time.monotonic(), dtype=torch.float64)])
    elif device == RECEIVER:
        for message in messages:
            (tensor,) = transport.recv(message, SENDER)
            seconds.append(time.monotonic() - float(tensor[0]))
    if device in summing:
        summed.join()
    transport.close_window()
    time.sleep(0.5)  # others may still read
    transport.close()
    return seconds


def _sum(transport: ProcessTransport, members: tuple[int, ...]) -> None:
    for update in range(NUM_SUMS):
        transport.start(Collective(CollectiveKind.GRADIENTS, 0, update, 0, members), torch.ones(SUM_NUMBERS)).wait()


def measured(nodes: Network, beside: str, *, scheduled: bool) -> float:
    """Return the median milliseconds of a message; the 90th percentile goes to `percentiles`."""
    store = ""
    with ExitStack() as stack:
        processes = []
        for device in (RECEIVER, SENDER, THIRD):
            command = [sys.executable, __file__, "--device", str(device), "--beside", beside, "--host", nodes.nodes[device].ip]
            command += ["--scheduled"] if scheduled else []
            if device != RECEIVER:
                command += ["--store", store]
            process = stack.enter_context(nodes.start(command, node=device))
            if device == RECEIVER:
                assert process.stdout is not None
                store = process.stdout.readline().strip()
            processes.append(process)
        done = [finish(process, what="a device", timeout_s=60.0) for process in processes]
    seconds = sorted(json.loads(done[0].stdout)[NUM_LEFT_OUT:])
    percentiles.setdefault((beside, scheduled), []).append(1000 * seconds[len(seconds) * 9 // 10])
    return float(1000 * statistics.median(seconds))


percentiles: dict[tuple[str, bool], list[float]] = {}


def main() -> int:
    """Run the benchmark, or one of its devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    for name in ("--device", "--beside", "--host", "--store"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--scheduled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device is not None:
        if options.store is None:
            store = StoreServer(options.host, secret=SECRET).address
            print(store, flush=True)
        else:
            host, port_text = options.store.split(":")
            store = StoreAddress(host, int(port_text), SECRET)
        summing = BESIDE[options.beside]
        print(json.dumps(end(int(options.device), summing, store, scheduled=options.scheduled, host_ip=options.host)))
        return 0
    with network(nodes=3) as nodes:
        for node in range(3):
            others = [other for other in range(3) if other != node]
            nodes.share([(node, other) for other in others], PORT_BYTES_PER_S)
            nodes.share([(other, node) for other in others], PORT_BYTES_PER_S)
        cases = [(beside, scheduled) for beside in BESIDE for scheduled in (False, True)]
        found = in_rounds({case: partial(measured, nodes, case[0], scheduled=case[1]) for case in cases}, num_rounds=options.rounds)
    rows: list[dict[str, Any]] = []
    for beside in BESIDE:
        row: dict[str, Any] = {"beside": beside}
        for scheduled, way in ((False, "plain"), (True, "in turns")):
            medians = found[beside, scheduled]
            row[f"{way} ms"] = f"{statistics.median(medians):.1f}"
            row[f"{way} p90"] = f"{statistics.median(percentiles[beside, scheduled]):.1f}"
        rows.append(row)
    print_table(f"milliseconds of a message of 4 ms ({options.rounds} rounds); a chunk takes {1000 * CHUNK_S:g} ms", rows)
    write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
