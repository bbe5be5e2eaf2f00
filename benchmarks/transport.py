"""What a message costs between two processes of one host: through shared memory, and over gloo and TCP on the loopback interface.

    python benchmarks/transport.py [--rounds 9] [--messages 100] [--sizes 65536 4194304] [--gap-ms 5] [--json FILE]

*one way*: from the call of send to the end of recv in a process that waits for it, with a gap between the messages in which both
sleep, as stages do that wait for each other. *send*: that call alone. *recv, data there*: a message that came long ago, after a gap.
All transports run in every round, in turn; printed are medians over the rounds of each round's median and 95th percentile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from rounds import Summary, in_rounds, print_table, write_json

from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.protocol import Expected, TensorSpec
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreServer
from raypipe.schedules.lower import Direction, Message

TIMEOUT_S = 60.0
NUM_READY = 4
"""Messages that wait for their receiver: as many as gloo takes before they are asked for."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    transport: str
    num_bytes: int

    def message(self, index: int) -> Message:
        """The message of a number."""
        return Message(Direction.ACTIVATION, 0, 1, index)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The payload."""
        return (TensorSpec((self.num_bytes // 4,), torch.float32),)


class Lists:
    """The messages of windows, the same lists each time, as an executor gives them."""

    def __init__(self) -> None:
        self.known: dict[tuple[Case, int], list[Expected]] = {}

    def of(self, case: Case, count: int) -> list[Expected]:
        """The list of so many messages."""
        if (case, count) not in self.known:
            self.known[case, count] = [Expected(case.message(index), case.specs) for index in range(count)]
        return self.known[case, count]


def connected(device: int, store: StoreAddress) -> dict[str, ProcessTransport]:
    """This process's ends."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ends = {
        name: ProcessTransport(
            device,
            names=("sender", "receiver"),
            channels=[(0, 1)],
            shared=[(0, 1)] if name == "shm" else [],
            groups=[],
            store=store,
            prefix=name,
            timeout_s=TIMEOUT_S,
            over_tcp=name != "gloo",
        )
        for name in ("shm", "gloo", "tcp")
    }
    for end in ends.values():
        end.connect()
    return ends


def receive(store: StoreAddress, orders: Connection) -> None:
    """The other process: takes windows of messages as it is told, and answers when each call of recv began and ended."""
    ends = connected(1, store)
    lists = Lists()
    orders.send(None)
    while (order := orders.recv()) is not None:
        case, num_messages, is_late, gap_s = order
        end = ends[case.transport]
        announced = lists.of(case, num_messages)
        end.open_window({0: announced}, {})
        orders.send(None)
        if is_late:
            orders.recv()
            time.sleep(0.1)
        calls: list[tuple[float, float]] = []
        for expected in announced:
            if is_late:
                time.sleep(gap_s)
            since_s = time.perf_counter()
            end.recv(expected.message, 0)
            calls.append((since_s, time.perf_counter()))
        end.close_window()
        orders.send(calls)


@dataclass(frozen=True)
class Window:
    """What a window of messages took, in seconds by message."""

    one_way: Sequence[float]
    send: Sequence[float]
    ready: Sequence[float]


def run(case: Case, *, end: ProcessTransport, orders: Connection, lists: Lists, num_messages: int, gap_s: float) -> Window:
    """Sends a window with gaps, and some that wait for their receiver."""

    def window(count: int, *, pause_s: float, is_late: bool) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        tensors = [torch.ones(case.num_bytes // 4)]
        orders.send((case, count, is_late, gap_s))
        orders.recv()
        announced = lists.of(case, count)
        end.open_window({}, {1: announced})
        calls: list[tuple[float, float]] = []
        for expected in announced:
            time.sleep(pause_s)
            since_s = time.perf_counter()
            end.send(expected.message, 1, tensors)
            calls.append((since_s, time.perf_counter()))
        if is_late:
            orders.send(None)
        end.close_window()
        return calls, orders.recv()

    sent, received = window(num_messages, pause_s=gap_s, is_late=False)
    # The clock is the system's monotonic one, which all processes share.
    one_way = [end_s - since_s for (since_s, _), (_, end_s) in zip(sent, received, strict=True)]
    late = [call for _ in range(max(num_messages // 10, 1)) for call in window(NUM_READY, pause_s=0.0, is_late=True)[1]]
    return Window(one_way, [end_s - since_s for since_s, end_s in sent], [end_s - since_s for since_s, end_s in late])


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 4 << 20])
    parser.add_argument("--gap-ms", type=float, default=5.0)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    store = StoreServer("127.0.0.1", secret=Secret.new())
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=receive, args=(store.address, theirs), daemon=True)
    process.start()
    ends = connected(0, store.address)
    orders.recv()
    lists = Lists()
    candidates: dict[Case, Callable[[], Window]] = {}
    for size in arguments.sizes:
        for name, end in ends.items():
            case = Case(name, size)
            candidates[case] = partial(
                run, case, end=end, orders=orders, lists=lists, num_messages=arguments.messages, gap_s=arguments.gap_ms / 1e3
            )
            candidates[case]()  # connections, memory and caches
    found = in_rounds(candidates, num_rounds=arguments.rounds)
    orders.send(None)
    process.join()
    for end in ends.values():
        end.close()
    store.close()
    rows: list[dict[str, str]] = []
    results: list[dict[str, object]] = []
    for case, windows in found.items():
        figures = {
            "one way p50": Summary.of([statistics.median(window.one_way) for window in windows]),
            "one way p95": Summary.of([statistics.quantiles(window.one_way, n=20)[-1] for window in windows]),
            "send p50": Summary.of([statistics.median(window.send) for window in windows]),
            "recv, data there p50": Summary.of([statistics.median(window.ready) for window in windows]),
        }
        texts = {f"{name}, us": f"{1e6 * figure.median:.0f} +-{1e6 * figure.spread:.0f}" for name, figure in figures.items()}
        rows.append({"transport": case.transport, "KB": f"{case.num_bytes / 1024:g}"} | texts)
        results.append({"transport": case.transport, "num_bytes": case.num_bytes} | figures)
    print_table(f"one message between two processes, {arguments.gap_ms:g} ms apart", rows)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
