"""A device of a run whose members fail: a process on a node that forks a child for each attempt, and what the child does.

The child is a `StageActor` without Ray. It runs a window in which the victim of the attempt strikes: in the middle of a message, of a chunk
of a dense sum, or of a chunk of a sum of rows. Orders come on stdin and answers leave on stdout, a JSON
object a line, as Ray's calls would:

    {"status": {...}}            what it waits for, when asked with `status`
    {"strikes": "killed"}        the victim, just before
    {"left": ..., "text": ...}   the window has ended: how, and the state of the stage
    {"gone": 9}                  the child is gone, or has stopped; told by its parent
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from raypipe.actors.actor import StageActor
from raypipe.actors.device_stages import DeviceStages
from raypipe.actors.execution.programs import executable_programs
from raypipe.actors.orders import BuildOrder, ConnectOrder, Identity
from raypipe.actors.stage.gradient_flow import EdgeSpecs, LayerOutput, edge_specs
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.state import export_layers
from raypipe.actors.transport.secret import Secret, StoreAddress
from raypipe.actors.transport.store import StoreServer
from raypipe.actors.transport.tcp_link import Memory
from raypipe.actors.transport.tcp_sender import Sender
from raypipe.actors.transport.tcp_way import Entry, Frame, Way
from raypipe.artifacts.cut import Cut
from raypipe.communication.policy import Traffic
from raypipe.config import OptimizerConfig
from raypipe.models.ngram_gpt import ngram_gpt
from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Start
from raypipe.schedules.ir import UpdateScope
from raypipe.schedules.lower import Placement, Recv
from raypipe.schedules.passes import late_updates
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomTokens

NAMES = ("alpha", "beta", "gamma", "delta")
SECRET = Secret(b"of members in network namespaces")
STAGES = (0, 0, 1, 1)
"""Of each device; a worker's copies share the rows."""
PLACEMENT = Placement((((0, 0.5), (1, 0.5)), ((2, 0.5), (3, 0.5))))
NUM_MICROBATCHES = 4
NUM_UPDATES = 4
"""Of the window."""
NUM_ROWS = 4
LENGTH = 32
TIMEOUT_S = 3.0
"""Until a wait ends of whose end nothing else tells: a member that is cut off cannot be told."""


class Fault(StrEnum):
    """What happens to the victim."""

    KILLED = "killed"
    STOPPED = "stopped"
    CUT_OFF = "cut off"


class During(StrEnum):
    """The transfer in whose middle it happens."""

    MESSAGE = "message"
    SUM = "sum"
    ROWS = "rows"


@dataclass(frozen=True)
class Attempt:
    """One run.

    Attributes:
        victim: Device; -1 for none.
        number: Of the transfers of this kind that begin to leave the victim, which one.
        part: Share of its bytes that leaves before.
    """

    prefix: str
    victim: int = -1
    fault: Fault = Fault.KILLED
    during: During = During.MESSAGE
    number: int = 0
    part: float = 0.5


def order() -> BuildOrder:
    """Return the stages: tables of which an update touches some rows on the first, and dense layers on the second."""
    model = partial(ngram_gpt, num_layers=2, d_model=32, num_heads=2, sequence_length=LENGTH, table_rows=4001)
    cut = Cut.equal(4, 2, model().edges(), ())
    return BuildOrder(
        model=model,
        batches=lambda _split: RandomTokens(num_rows=NUM_ROWS, length=LENGTH),
        cut=cut,
        weight_rule=SCHEDULE.weight_rule,
        optimizer=OptimizerConfig(max_grad_norm=None),
        num_rows=NUM_ROWS,
        num_updates=NUM_UPDATES,
        seed=0,
    )


SCHEDULE = late_updates(build("pipedream-2bw", ScheduleRequest(2, NUM_MICROBATCHES, NUM_UPDATES, update_scope=UpdateScope.STAGE)))
PROGRAMS = executable_programs(SCHEDULE, PLACEMENT)


def write_shapes(path: Path) -> None:
    """Write what stages give each other, which takes a process that then cannot fork: torch has started threads."""
    stages = DeviceStages(order(), (0, 1), on=torch.device("cpu"))
    stages.build()
    outputs: dict[int, tuple[LayerOutput, ...]] = {}
    before = [dict(outputs)]
    for stage in (0, 1):
        outputs |= stages.output_specs(stage, outputs)
        before.append(dict(outputs))
    path.write_bytes(pickle.dumps((before, edge_specs(order().cut, outputs))))


# The child


def tell(**answer: Any) -> None:
    """Write a line, whole."""
    os.write(1, json.dumps(answer).encode() + b"\n")


def read_line() -> str:
    """Read a line of stdin and nothing of the next one, which may be for another process."""
    line = b""
    while not line.endswith(b"\n"):
        character = os.read(0, 1)
        if not character:
            raise EOFError("the driver is gone")
        line += character
    return line.decode().strip()


class Trap:
    """Strikes once in the middle of a transfer that leaves this device."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.is_set = True
        self.goes_on = threading.Event()
        self._left = attempt.number
        self._lock = threading.Lock()

    def install(self) -> None:
        """See all that leaves from now on."""
        write, send = Way.write, Sender.send

        def watched_write(way: Way, frame: Frame) -> bool:
            is_sum = frame.entry.traffic is Traffic.SUM and frame.entry.collective is not None
            if is_sum and self.attempt.during is not During.MESSAGE and self._comes():
                self.strike(frame.entry.link.end.fileno(), frame.buffers, frame.drop)
            return write(way, frame)

        def watched_send(sender: Sender, link: Any, buffers: Sequence[Memory], num_bytes: int, make: Callable[[], Entry]) -> None:
            # Only where the message can leave at once: what waits for its turn is not in the middle of anything.
            if self.attempt.during is During.MESSAGE and sender._way_of[link].is_idle(link) and self._comes():
                pieces = [memoryview(buffer).cast("B") for buffer in buffers]
                self.strike(link.descriptor, pieces, lambda _: None)
            send(sender, link, buffers, num_bytes, make)

        setattr(Way, "write", watched_write)  # noqa: B010  # mypy wants no assignment to a method
        setattr(Sender, "send", watched_send)  # noqa: B010

    def _comes(self) -> bool:
        with self._lock:
            self._left -= self.is_set
            return self.is_set and self._left < 0

    def strike(self, descriptor: int, buffers: Sequence[memoryview], drop: Callable[[int], None]) -> None:
        """Let a part leave, and fail; what is cut off goes on as if nothing had happened."""
        self.is_set = False
        tell(strikes=str(self.attempt.fault))
        if self.attempt.fault is Fault.CUT_OFF:
            self.goes_on.wait(20.0)
            return
        whole = b"".join(buffers)
        os.write(descriptor, whole[: max(round(self.attempt.part * len(whole)), 1)])
        os.kill(os.getpid(), signal.SIGKILL if self.attempt.fault is Fault.KILLED else signal.SIGSTOP)
        threading.Event().wait()  # the signal may come to another thread first, and what was cut short must not leave again


class Child:
    """One device of one attempt."""

    def __init__(
        self, device: int, attempt: Attempt, shapes: tuple[list[dict[int, tuple[LayerOutput, ...]]], EdgeSpecs], port: int
    ) -> None:
        torch.set_num_threads(1)
        self.device = device
        self.trap = Trap(attempt)
        self.stage = STAGES[device]
        self.told_s: float | None = None
        self.ends = threading.Event()
        self.actor = StageActor(Identity("faults", device, NAMES[device], (self.stage,)), num_threads=1)
        before, specs = shapes
        self.actor.build(order())
        self.actor.output_specs(self.stage, before[self.stage])
        items = [(program.device, item) for program in PROGRAMS for item in program.items]
        connect = ConnectOrder(
            names=NAMES,
            channels=tuple(sorted({(item.device, device) for device, item in items if isinstance(item, Recv)})),
            shared=frozenset(),
            over_tcp=True,
            nodes=NAMES,
            groups=tuple(sorted({item.collective.devices for _, item in items if isinstance(item, Start)})),
            patterns={},
            wires=(),
            entrances=(),
            store=StoreAddress("10.77.0.1", port, SECRET),
            prefix=attempt.prefix,
            connect_timeout_s=20.0,
            message_timeout_s=TIMEOUT_S,
        )
        self.actor.connect(connect, specs, host_ip=f"10.77.0.{device + 1}")
        self.actor.load_programs({"train": PROGRAMS[device]})

    def run(self) -> None:
        """Run the window; tell how it ended."""
        threading.Thread(target=self._listen, daemon=True).start()
        states: dict[int, str] = {}
        left, text = "ended", ""
        self._note_states(states)
        if self.device == self.trap.attempt.victim:
            self.trap.install()
        try:
            self.actor.run("train", number=0, first_update=0, split="train")
        except Exception as error:
            left, text = type(error).__name__, str(error)
        leaving_s = None if self.told_s is None else time.monotonic() - self.told_s
        newest = self._weights.versions.newest
        tell(left=left, text=text, leaving_s=leaving_s, num_updates=newest, state=self._digest(), states=states)
        self.ends.wait(30.0)

    @property
    def _weights(self) -> Any:
        assert self.actor._stages is not None
        return self.actor._stages.weights[self.stage]

    def _digest(self) -> str:
        """Return a digest of all weights and of the optimizer's state."""
        digest = blake2b(digest_size=16)
        for layer, state in sorted(export_layers(self._weights).items()):
            for name, tensor in sorted(state.items()):
                content = tensor.detach().contiguous()
                digest.update(f"{layer} {name} ".encode())
                digest.update((ctypes.c_ubyte * content.nbytes).from_address(content.data_ptr()))
        return digest.hexdigest()

    def _note_states(self, states: dict[int, str]) -> None:
        """Keep a digest behind each update."""
        weights, update = self._weights, self._weights.update
        states[0] = self._digest()

        def noted(number: int, **arguments: Any) -> None:
            update(number, **arguments)
            states[number + 1] = self._digest()

        weights.update = noted

    def _listen(self) -> None:
        while True:
            line = read_line()
            word, _, rest = line.partition(" ")
            if word == "status":
                status = self.actor.status()
                tell(status={"doing": status.doing, "awaited": asdict(status.awaited) if status.awaited is not None else None})
            elif word == "abort":
                self.told_s = time.monotonic()
                self.actor.abort(rest)
            elif word == "go":
                self.trap.goes_on.set()
            else:
                self.ends.set()
                return


# The parent


def main() -> None:
    """Fork a child for each attempt that stdin names; the parent computes nothing, and so has no threads when it forks."""
    device, folder = int(sys.argv[1]), Path(sys.argv[2])
    build_optimizer(OptimizerConfig(), [("weight", torch.nn.Parameter(torch.zeros(1)))])  # loads hundreds of modules, once for all children
    tell(ready=device)
    while True:
        line = read_line()
        if not line.startswith("{"):
            continue  # for a child that is gone
        attempt = Attempt(**json.loads(line))
        attempt = Attempt(attempt.prefix, attempt.victim, Fault(attempt.fault), During(attempt.during), attempt.number, attempt.part)
        child = os.fork()
        if child == 0:
            try:
                shapes = pickle.loads((folder / "shapes").read_bytes())  # written by the test
                Child(device, attempt, shapes, int((folder / "port").read_text())).run()
            except BaseException as error:
                tell(failed=f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            tell(gone="stopped")
            while read_line() != "end":
                pass
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        tell(gone="ended")


def serve_store(folder: Path) -> None:
    """Host the store where members meet until stdin ends."""
    with StoreServer("10.77.0.1", secret=SECRET) as server:
        (folder / "port").write_text(str(server.address.port))
        tell(store=server.address.port)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "store":
        serve_store(Path(sys.argv[2]))
    elif sys.argv[1] == "shapes":
        write_shapes(Path(sys.argv[2]) / "shapes")
    else:
        main()
