"""Measuring links over the transports that training uses: what one device does, as a probe actor or as a stage actor between windows.

Each flow, a directed pair of devices, has a transport of its own with a channel each way, so that flows can run at the same time, each in
a thread. What a flow does is a pattern:

    Ping     message, answer of one byte, message, answer ...   of several sizes: latency, bandwidth, and the clocks of both ends
    Stream   message after message, no answers                  a rate while other flows are under way

The sender of a `Ping` chooses the sizes while it goes, so that a slow link takes no longer than a fast one, and tells the receiver.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from raypipe.actors import devices
from raypipe.actors.transport import cuda, shm
from raypipe.actors.transport.cuda_ipc import SharingLibrary
from raypipe.actors.transport.process import ProcessTransport
from raypipe.actors.transport.protocol import Expected, TensorSpec
from raypipe.actors.transport.rendezvous import host_store
from raypipe.errors import TransportError, TransportTimeoutError
from raypipe.network.clocks import Exchange
from raypipe.network.fit import RoundTrip
from raypipe.schedules.lower import Direction, Message

T = TypeVar("T")

LEAST_PING_BYTES = 1 << 20
"""The fewest bytes with which a link can be measured."""
WARM_UP_BYTES = 160_000
"""Of a stream, that do not count: a path at rest may take so many faster than it carries them."""

SCOUT_BYTES = 64 << 10
"""The smallest message that tells of a rate."""

_SMALL_BYTES = 1024
_NUM_SMALL = 16
_NUM_SCOUTS = 2
_MOST_BYTES = 16 << 20
_SHARES = (16, 8, 4, 2)
"""The largest message is so many times as large as the others."""
_NUM_SIZES = len(_SHARES) + 1
_MOST_REPEATS = 12
_REPEATS = 4
_PAGE_BYTES = 4096
_SOURCE, _TARGET = 0, 1
"""The two ends of a flow, as its transport numbers them."""


@dataclass(frozen=True)
class Ping:
    """Messages and answers.

    Attributes:
        seconds: that it should take, about.
        most_bytes: that it may send, at least `LEAST_PING_BYTES`.
    """

    seconds: float
    most_bytes: int


@dataclass(frozen=True)
class Stream:
    """Messages without answers.

    Attributes:
        chunk_bytes: of each.
        num_chunks: how many.
    """

    chunk_bytes: int
    num_chunks: int

    @classmethod
    def lasting(cls, seconds: float, *, bytes_per_s: float, most_bytes: int) -> Stream:
        """The stream that takes so long at a rate once it is warm; a sixteenth of it, or a page, is a message."""
        num_bytes = min(max(seconds * bytes_per_s, WARM_UP_BYTES) + WARM_UP_BYTES, most_bytes)
        chunk_bytes = _whole_pages(min(num_bytes / 16, _MOST_BYTES / 4))
        return cls(chunk_bytes, max(4, round(num_bytes / chunk_bytes)))

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return self.chunk_bytes * self.num_chunks


@dataclass(frozen=True)
class Flow:
    """What one device sends another.

    Attributes:
        source: the number of the device that sends.
        target: the number of the device that receives.
        pattern: what they do.
    """

    source: int
    target: int
    pattern: Ping | Stream

    @property
    def ends(self) -> tuple[int, int]:
        """Both devices."""
        return self.source, self.target


@dataclass(frozen=True)
class MeetOrder:
    """What the two devices of a flow need to find each other.

    Attributes:
        source: the number of the device that sends.
        target: the number of the device that receives.
        names: of the two, for messages.
        shared: whether they share memory; else their messages go over gloo.
        store: host and port of the store where they meet.
        prefix: unique to this flow and attempt.
        connect_timeout_s: until both must be there.
        timeout_s: for every wait after that.
    """

    source: int
    target: int
    names: tuple[str, str]
    shared: bool
    store: tuple[str, int]
    prefix: str
    connect_timeout_s: float
    timeout_s: float


@dataclass
class Readings:
    """What one end of a flow noted, by the clock that `time.time` reads.

    Attributes:
        sizes_bytes: of the messages.
        first_s: when each was handed over (source) or had arrived (target).
        second_s: when the answer had arrived (source) or was handed over (target: the same); of a `Stream` the same as `first_s`.
        num_bytes: of all messages, also of those that were taken off the lists.
    """

    sizes_bytes: list[int] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, num_bytes: int, first_s: float, second_s: float) -> None:
        """Notes a message."""
        self.sizes_bytes.append(num_bytes)
        self.first_s.append(first_s)
        self.second_s.append(second_s)
        self.num_bytes += num_bytes

    def forget_behind(self, count: int) -> None:
        """Takes all messages off the lists but the first ones."""
        del self.sizes_bytes[count:], self.first_s[count:], self.second_s[count:]


def round_trips(source: Readings) -> Iterator[RoundTrip]:
    """The messages of a `Ping` with their answers."""
    for num_bytes, handed_s, returned_s in zip(source.sizes_bytes, source.first_s, source.second_s, strict=True):
        yield RoundTrip(num_bytes, returned_s - handed_s)


def exchanges(source: Readings, target: Readings) -> Iterator[Exchange]:
    """The readings of both ends of a `Ping`, of messages so small that they are as quick as their answers."""
    for place, num_bytes in enumerate(source.sizes_bytes):
        if num_bytes <= _SMALL_BYTES:
            yield Exchange(source.first_s[place], target.first_s[place], target.second_s[place], source.second_s[place])


def by_device(flows: Iterable[Flow]) -> dict[int, list[Flow]]:
    """The flows that each device takes part in."""
    found: dict[int, list[Flow]] = {}
    for flow in flows:
        for device in flow.ends:
            found.setdefault(device, []).append(flow)
    return found


class Links:
    """One device's ends of the flows that it takes part in.

    Args:
        device: its number.
        on: torch's name of it.
        library: CUDA and NCCL, where it is a GPU.
    """

    def __init__(self, device: int, *, on: torch.device = devices.CPU, library: SharingLibrary | None = None) -> None:
        self.device = device
        self.on = on
        self.library = library
        self._transports: dict[tuple[int, int], ProcessTransport] = {}

    def meet(self, orders: Sequence[MeetOrder], *, host_ip: str) -> None:
        """Connects flows, all at the same time; those that are connected already stay so.

        Raises:
            TransportTimeoutError: names a device that did not come in time.
            TransportError: one came and went.
        """
        _at_once([partial(self._meet, order, host_ip) for order in orders])

    def _meet(self, order: MeetOrder, host_ip: str) -> None:
        key = (order.source, order.target)
        if key in self._transports:
            return
        both = ((_SOURCE, _TARGET), (_TARGET, _SOURCE))
        transport = ProcessTransport(
            _SOURCE if self.device == order.source else _TARGET,
            names=order.names,
            channels=both,
            shared=both if order.shared else (),
            groups=(),
            store=order.store,
            prefix=order.prefix,
            timeout_s=order.timeout_s,
            connect_timeout_s=order.connect_timeout_s,
            host_ip=host_ip,
            library=self.library,
        )
        transport.connect()
        self._transports[key] = transport

    def run(self, flows: Sequence[Flow]) -> list[Readings]:
        """Takes part in flows at the same time; returns what this end noted, in their order.

        Raises:
            TransportTimeoutError: a message took too long.
            TransportError: the other end is gone.
        """
        return _at_once([partial(self._try, flow) for flow in flows])

    def _try(self, flow: Flow) -> Readings:
        try:
            return self._run(flow)
        except TransportError:
            # It is out of use; another `meet` makes a new one.
            self._transports.pop(flow.ends).close()
            raise

    def _run(self, flow: Flow) -> Readings:
        end = _End(self._transports[flow.ends], _TARGET if self.device == flow.source else _SOURCE, self.on)
        with devices.own_stream(self.on):
            match flow.pattern, self.device == flow.source:
                case Ping() as ping, True:
                    end.ping(ping)
                case Ping(), False:
                    end.answer_all()
                case Stream() as stream, True:
                    end.send(stream)
                case Stream() as stream, False:
                    end.receive(stream)
        return end.readings

    def close(self) -> None:
        """Gives back sockets, threads and memory."""
        # The other ends see it at once, and may meet again.
        closing, self._transports = self._transports, {}
        for transport in closing.values():
            transport.close()


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of calls that run at the same time, each in a thread; one alone needs none."""
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="raypipe probes") as threads:
        futures = [threads.submit(call) for call in calls]
    return [future.result() for future in futures]


class _End:
    """One end of a flow while it runs.

    Args:
        transport: of the flow.
        peer: the other end.
        on: the device whose memory messages are in.
    """

    def __init__(self, transport: ProcessTransport, peer: int, on: torch.device) -> None:
        self.transport = transport
        self.peer = peer
        self.on = on
        self.readings = Readings()
        self._epoch_s = _epoch_s()

    def _now_s(self) -> float:
        return self._epoch_s + time.perf_counter()

    def _recv(self, message: Message) -> tuple[torch.Tensor, ...]:
        """The next message, once it is there, on a GPU, too."""
        tensors = self.transport.recv(message, self.peer)
        if not devices.settle(self.on, timeout_s=self.transport.timeout_s):
            names, own = self.transport.names, self.transport.device
            problem = f"it did not come within {self.transport.timeout_s:g} s"
            raise TransportTimeoutError(names[own], names[self.peer], str(message), problem)
        return tensors

    # Messages and answers

    def ping(self, pattern: Ping) -> None:
        """Sends messages of several sizes, and notes when their answers were there."""
        self._exchange([_SMALL_BYTES] * _NUM_SMALL)
        largest, took_s, left_bytes = self._scout(pattern)
        # What the scout saw may be of a path at rest.
        self.readings.forget_behind(_NUM_SMALL)
        sizes = [largest, *(_whole_pages(largest / share) for share in _SHARES)]
        repeats = int(min(pattern.seconds / (2 * took_s), left_bytes / sum(sizes), _MOST_REPEATS))
        self._exchange(sizes * max(repeats, 1))
        self._tell([])

    def _scout(self, pattern: Ping) -> tuple[int, float, float]:
        """The largest size to measure, the seconds that such a message takes, about, and the bytes that are left to send.

        With the smaller sizes it takes twice as long as alone, and all of them shall pass four times.
        """
        size, left_bytes = SCOUT_BYTES, float(pattern.most_bytes)
        while True:
            self._exchange([size] * _NUM_SCOUTS)
            left_bytes -= size * _NUM_SCOUTS
            times = zip(self.readings.first_s[-_NUM_SCOUTS:], self.readings.second_s[-_NUM_SCOUTS:], strict=True)
            # The quickest: a pause of the machine must not make the messages small.
            took_s = max(min(returned_s - handed_s for handed_s, returned_s in times), 1e-6)
            wanted = size * pattern.seconds / (2 * _REPEATS * took_s)
            most = min(left_bytes / (2 * _REPEATS), _MOST_BYTES)
            if wanted <= 2 * size or 2 * size > most:
                largest = _whole_pages(max(min(wanted, most), SCOUT_BYTES))
                return largest, took_s * largest / size, left_bytes
            size = _whole_pages(min(4 * size, wanted, most))

    def _exchange(self, sizes: Sequence[int]) -> None:
        """Sends messages of these sizes one by one, each after the answer to the one before."""
        self._tell(sizes)
        out, answers = _messages(sizes), _messages([1] * len(sizes))
        memory = torch.ones(max(sizes), dtype=torch.uint8, device=self.on)
        transport, peer = self.transport, self.peer
        transport.open_window({peer: answers}, {peer: out})
        for expected, size in zip(out, sizes, strict=True):
            data = (memory[:size],)
            handed_s = self._now_s()
            transport.send(expected.message, peer, data)
            self._recv(expected.message)
            self.readings.add(size, handed_s, self._now_s())
        transport.close_window()

    def _tell(self, sizes: Sequence[int]) -> None:
        """Tells the other end how many messages come, and of which sizes; none ends the flow. Sizes repeat."""
        pattern = list(dict.fromkeys(sizes))
        text = torch.zeros(1 + _NUM_SIZES, dtype=torch.int64)
        text[0] = len(sizes)
        text[1 : 1 + len(pattern)] = torch.tensor(pattern, dtype=torch.int64)
        transport = self.transport
        transport.open_window({}, {self.peer: _ANNOUNCEMENT})
        transport.send(_ANNOUNCEMENT[0].message, self.peer, (text.to(self.on),))
        transport.close_window()

    def _hear(self) -> list[int]:
        transport = self.transport
        transport.open_window({self.peer: _ANNOUNCEMENT}, {})
        (text,) = self._recv(_ANNOUNCEMENT[0].message)
        transport.close_window()
        count, *sizes = text.tolist()
        pattern = [size for size in sizes if size]
        return [pattern[place % len(pattern)] for place in range(count)]

    def answer_all(self) -> None:
        """Answers messages until none are announced."""
        transport, peer = self.transport, self.peer
        answer = (torch.ones(1, dtype=torch.uint8, device=self.on),)
        while sizes := self._hear():
            messages, answers = _messages(sizes), _messages([1] * len(sizes))
            transport.open_window({peer: messages}, {peer: answers})
            for expected, size in zip(messages, sizes, strict=True):
                self._recv(expected.message)
                heard_s = self._now_s()
                # Answered at once: when `send` returns, the answer may have long arrived.
                self.readings.add(size, heard_s, heard_s)
                transport.send(expected.message, peer, answer)
            transport.close_window()

    # Messages without answers

    def send(self, pattern: Stream) -> None:
        """Hands over all messages."""
        messages = _messages([pattern.chunk_bytes] * pattern.num_chunks)
        data = (torch.ones(pattern.chunk_bytes, dtype=torch.uint8, device=self.on),)
        transport, peer = self.transport, self.peer
        transport.open_window({}, {peer: messages})
        for expected in messages:
            handed_s = self._now_s()
            transport.send(expected.message, peer, data)
            self.readings.add(pattern.chunk_bytes, handed_s, handed_s)
        transport.close_window()

    def receive(self, pattern: Stream) -> None:
        """Notes when each message arrives."""
        messages = _messages([pattern.chunk_bytes] * pattern.num_chunks)
        transport, peer = self.transport, self.peer
        transport.open_window({peer: messages}, {})
        for expected in messages:
            self._recv(expected.message)
            arrived_s = self._now_s()
            self.readings.add(pattern.chunk_bytes, arrived_s, arrived_s)
        transport.close_window()


def _epoch_s() -> float:
    """What makes a time of `perf_counter`, which is steady, out of one that `time.time` reads, which all nodes mean alike.

    The two are read one after the other; of several readings the one without a pause between counts.
    """
    found: list[tuple[float, float]] = []
    for _ in range(10):
        before_s, now_s, after_s = time.perf_counter(), time.time(), time.perf_counter()
        found.append((after_s - before_s, now_s - (before_s + after_s) / 2))
    return min(found)[1]


def _messages(sizes: Sequence[int]) -> list[Expected]:
    """Messages of so many bytes each."""
    specs = {size: (TensorSpec((size,), torch.uint8),) for size in set(sizes)}
    return [Expected(Message(Direction.ACTIVATION, _SOURCE, _TARGET, number), specs[size]) for number, size in enumerate(sizes)]


_ANNOUNCEMENT = [Expected(Message(Direction.GRADIENT, _SOURCE, _TARGET, 0), (TensorSpec((1 + _NUM_SIZES,), torch.int64),))]


def _whole_pages(num_bytes: float) -> int:
    return max(_PAGE_BYTES, round(num_bytes / _PAGE_BYTES) * _PAGE_BYTES)


# Devices


@dataclass(frozen=True)
class Gpu:
    """A GPU of a node, as its driver tells; 0, `unknown` or empty where it does not.

    Attributes:
        name: such as `NVIDIA H200`.
        uuid: its own.
        memory_bytes: that it has.
        pcie_generation: of its link to the host.
        pcie_lanes: of it.
        numa_node: whose memory is near; `None` where the system does not tell.
        num_nvlinks: that are active.
    """

    name: str
    uuid: str
    memory_bytes: int
    pcie_generation: int
    pcie_lanes: int
    numa_node: int | None
    num_nvlinks: int


@dataclass(frozen=True)
class Facts:
    """What a device knows of the node that it is on.

    Attributes:
        node_id: Ray's name for the node.
        ip: of the node.
        hostname: of its machine.
        pid: of the actor.
        num_cores: that the process may use.
        memory_bytes: that it may use.
        shares_memory: whether messages within the node can go through shared memory.
        gpus: of the node.
        gpu_kind: of the device itself, such as `nvidia-h200`; empty for a CPU slot.
        gpu_bytes: its memory.
    """

    node_id: str
    ip: str
    hostname: str
    pid: int
    num_cores: int
    memory_bytes: int
    shares_memory: bool
    gpus: tuple[Gpu, ...]
    gpu_kind: str = ""
    gpu_bytes: int | None = None


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this node; none where the driver or nvidia-ml-py (extras `cuda12`, `cuda13`) is missing."""
    try:
        import pynvml  # noqa: PLC0415  # an extra
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver
    try:
        return tuple(_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()  # it does not let this process have them
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    def asked(function: Callable[..., Any], *arguments: int) -> Any:
        """What the driver says, or 0 where it refuses or this GPU has no such thing."""
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return 0

    memory, bus = asked(nvml.nvmlDeviceGetMemoryInfo), asked(nvml.nvmlDeviceGetPciInfo)
    return Gpu(
        name=_text(asked(nvml.nvmlDeviceGetName) or "unknown"),
        uuid=_text(asked(nvml.nvmlDeviceGetUUID) or ""),
        memory_bytes=int(memory.total) if memory else 0,
        pcie_generation=int(asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration)),
        pcie_lanes=int(asked(nvml.nvmlDeviceGetMaxPcieLinkWidth)),
        numa_node=_numa_node(_text(bus.busId)) if bus else None,
        num_nvlinks=sum(asked(nvml.nvmlDeviceGetNvLinkState, link) == 1 for link in range(nvml.NVML_NVLINK_MAX_LINKS)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _numa_node(bus: str) -> int | None:
    """The NUMA node of a PCI device; the system writes -1 where there is none."""
    domain, _, rest = bus.lower().partition(":")
    try:
        number = int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or less where its control group has a limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such limit, or the word `max`
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


class ProbeActor:
    """One device that measures its links. A plain class; `raypipe.cluster.prober` makes Ray actors of it.

    Args:
        device: its number.
        use_gpu: whether it is a GPU, which Ray gave to this process alone.
    """

    def __init__(self, device: int, *, use_gpu: bool = False) -> None:
        torch.set_num_threads(1)
        self.device = device
        self._on = devices.CPU
        if use_gpu:
            os.environ.update(cuda.environment(""))
            self._on = torch.device("cuda", 0)
        self._links = Links(device, on=self._on)
        self._store: object = None

    def __repr__(self) -> str:
        return f"Probe({self.device})"

    def facts(self) -> Facts:
        """What this device knows of its node."""
        import ray  # noqa: PLC0415  # only Ray can tell, and the class works without it

        return Facts(
            node_id=ray.get_runtime_context().get_node_id(),
            ip=ray.util.get_node_ip_address(),
            hostname=os.uname().nodename,
            pid=os.getpid(),
            num_cores=len(os.sched_getaffinity(0)),
            memory_bytes=memory_bytes(),
            shares_memory=shm.available(),
            gpus=find_gpus(),
            gpu_kind=cuda.kind(self._on) if self._on.type == "cuda" else "",
            gpu_bytes=cuda.memory_bytes(self._on) if self._on.type == "cuda" else None,
        )

    def host_store(self, *, host: str, timeout_s: float) -> int:
        """Opens the store where flows meet; returns its port."""
        store, port = host_store(host, timeout_s=timeout_s)
        self._store = store
        return port

    def meet(self, orders: Sequence[MeetOrder], *, host_ip: str) -> None:
        """Connects flows; see `Links`.

        Raises:
            ConfigError: messages between GPUs need something that is not installed.
        """
        if self._on.type == "cuda" and self._links.library is None:
            self._links.library = cuda.Cuda(self._on)
        self._links.meet(orders, host_ip=host_ip)

    def run(self, flows: Sequence[Flow]) -> list[Readings]:
        """Takes part in flows; see `Links`."""
        return self._links.run(flows)
