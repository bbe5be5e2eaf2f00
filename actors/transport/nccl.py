"""Messages and sums between GPUs over NCCL, in the order of streams; the host never waits.

Each channel has a communicator of two ranks and a stream of its own, and so has each set of devices that sums.

* NCCL pairs the operations of both ends in order, without looking at them. Both follow the lowered programs, which the validator has run.
* Communicators may go in any order only if all their work fits on the GPU at once. So CUDA is asked for as many queues as it has
  (`cuda.environment`), and NCCL for few blocks of threads, which computation lacks while they wait.
* Making a communicator and passing its first message block the host until the other end does so, too, without a limit. Both happen in
  `connect`, set by set in one order for all, in a thread that is left behind on timeout.
* Only aborting a communicator ends its waits. `DeviceClock` watches the limits.
* Messages are received one ahead: more would take memory and the GPU's blocks. What is received stays in `Incoming` until the computing
  stream waits for it. `record_stream` keeps what is sent or summed, and what is left in `Incoming` by an abort.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from raypipe.actors.transport.channel import ChannelError, check_tensors
from raypipe.actors.transport.protocol import Expected, Places, summing_dtype
from raypipe.actors.transport.rendezvous import Rendezvous
from raypipe.communication.shards import Segment
from raypipe.errors import AbortedError
from raypipe.schedules.collectives import Collective, CollectiveKind
from raypipe.schedules.lower import Message

T = TypeVar("T")

_RECEIVES_AHEAD = 1
_LOOK_EVERY_S = 0.001


class Communicator(Protocol):
    """Ranks that pass messages and sum, in the order of a stream."""

    @property
    def stream(self) -> Any:
        """Stream of the communicator."""

    def send(self, tensors: Sequence[Tensor], peer: int, stream: Any) -> None:
        """Launch the sending of contiguous, non-empty tensors."""

    def recv(self, tensors: Sequence[Tensor], peer: int, stream: Any) -> None:
        """Launch the receiving into contiguous, non-empty tensors."""

    def all_reduce(self, tensor: Tensor, stream: Any) -> None:
        """Launch the in-place sum of a contiguous, non-empty tensor."""

    def to_owners(self, parts: Sequence[tuple[Tensor, int | None]], stream: Any) -> None:
        """Launch the in-place sums of contiguous, non-empty tensors, each for one rank or, with `None`, for all, as one operation."""

    def from_owners(self, parts: Sequence[tuple[Tensor, int]], stream: Any) -> None:
        """Launch the sending of contiguous, non-empty tensors, each from one rank to all, as one operation."""

    def problem(self) -> str | None:
        """Return the asynchronous error, if there is one. Called from any thread."""

    def shut_down(self) -> None:
        """Abort all work, whose results are then undefined; do not wait. Called from any thread."""


class Library(Protocol):
    """The used part of CUDA and NCCL: `raypipe.actors.transport.cuda` on a GPU."""

    def unique_id(self) -> bytes:
        """Return the id of a new communicator; one member calls this."""

    def communicator(self, num_ranks: int, unique_id: bytes, rank: int) -> Communicator:
        """Make a communicator; returns once all its ranks have called this."""

    def stream(self) -> Any:
        """Make a stream with a high priority."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor for the computing stream."""

    def follow(self, stream: Any) -> None:
        """Let a stream wait for the work of the computing stream so far."""

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a tensor until a stream has done its work so far."""

    def reached(self, stream: Any) -> Any:
        """Record an event behind the work of a stream so far."""

    def wait(self, event: Any, *, timeout_s: float) -> None:
        """Let the computing stream wait for an event. A library whose host computes raises `ChannelError` after `timeout_s`."""

    def happened(self, event: Any) -> bool:
        """Return whether an event has happened."""


def connect(library: Library, rendezvous: Rendezvous, kind: str, members: tuple[int, ...]) -> Communicator:
    """Make a communicator whose ranks follow `members`, once all have come. Raises as `ProcessTransport.connect`."""
    name = f"{kind} {'-'.join(map(str, members))}"
    rank = members.index(rendezvous.device)
    others = [member for member in members if member != rendezvous.device]
    if rank == 0:
        rendezvous.publish(f"{name} id", library.unique_id().hex())
    (unique_id,) = rendezvous.wait_for(f"{name} id", members[:1])
    # From here on members wait for each other in NCCL, which nothing ends: all must be there and alive.
    rendezvous.publish(f"{name} ready")
    rendezvous.wait_for(f"{name} ready", others)

    def make(given_up: threading.Event) -> Communicator:
        made = library.communicator(len(members), bytes.fromhex(unique_id), rank)
        # Before the first message, whose kernel would stay on the GPU if the peer died and nobody aborted the communicator.
        try:
            rendezvous.aborting.add([made])
        except AbortedError:
            made.shut_down()
            raise
        if given_up.is_set():  # whoever gave up has shut down what was there
            made.shut_down()
            raise ChannelError("it was made too late")
        _pass_the_first(library, made, rank, given_up, summed=kind == "group")
        return made

    return _with_limit(make, rendezvous, ", ".join(rendezvous.names[other] for other in others))


def _pass_the_first(library: Library, communicator: Communicator, rank: int, given_up: threading.Event, *, summed: bool) -> None:
    """Pass a first message or sum, for which NCCL blocks the host until its connections are open."""
    first, stream = library.empty((1,), torch.float32), communicator.stream
    first.zero_()
    library.follow(stream)
    if summed:
        communicator.all_reduce(first, stream)
    elif rank == 0:
        communicator.send([first], 1, stream)
    else:
        communicator.recv([first], 0, stream)
    library.use(first, stream)  # NCCL may write to it after this thread has given up
    event = library.reached(stream)
    while not library.happened(event) and not given_up.is_set():
        time.sleep(_LOOK_EVERY_S)


def _with_limit(make: Callable[[threading.Event], T], rendezvous: Rendezvous, peers: str) -> T:
    """Return what `make` makes in a thread; set its event before an abort or the deadline is raised."""
    made: list[T] = []
    failed: list[Exception] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            made.append(make(given_up))
        except Exception as error:  # raised by the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="raypipe connects over NCCL", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.05)
            rendezvous.aborting.check()
            if thread.is_alive():
                rendezvous.check_deadline(peers, "it came, but did not answer over NCCL")
    except BaseException:
        given_up.set()
        raise
    if failed:
        raise ChannelError(f"NCCL failed: {failed[0]}") from failed[0]
    return made[0]


def _with_bytes(library: Library, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the non-empty tensors, or one byte: NCCL passes no empty messages."""
    return [tensor for tensor in tensors if tensor.numel()] or [library.empty((1,), torch.uint8)]


class Incoming:
    """The receiving end, rank 1 of its communicator; `timeout_s` is the limit of `Library.wait`."""

    def __init__(self, library: Library, communicator: Communicator, *, timeout_s: float) -> None:
        self.library = library
        self.communicator = communicator
        self.timeout_s = timeout_s
        self.stream = communicator.stream
        self._left: list[Expected] = []
        """The last is the next."""
        self._posted: deque[tuple[tuple[Tensor, ...], list[Tensor], Any]] = deque()
        """Of each receive the message, what NCCL writes to and the event behind it."""

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        assert not self._left, "the last window took all its messages"
        assert not self._posted, "the last window received all its messages"
        self._left = list(reversed(messages))
        for _ in range(_RECEIVES_AHEAD):
            self._post()

    def _post(self) -> None:
        if not self._left:
            return
        expected = self._left.pop()
        tensors = tuple(self.library.empty(spec.shape, spec.dtype) for spec in expected.tensors)
        self.library.follow(self.stream)
        carried = _with_bytes(self.library, tensors)
        self.communicator.recv(carried, 0, self.stream)
        self._posted.append((tensors, carried, self.library.reached(self.stream)))

    def recv(self) -> tuple[Tensor, ...]:
        """See `IncomingChannel`; the host does not wait, the computing stream does."""
        self._post()
        tensors, _, event = self._posted[0]
        self.library.wait(event, timeout_s=self.timeout_s)
        # From here on memory that is freed goes to work of the computing stream, which is behind the receive. `Library.use` would hold it
        # back until the next message is there, too, whose receive is in the stream already.
        self._posted.popleft()
        return tensors

    def close(self) -> None:
        """See `IncomingChannel`."""
        self._left.clear()
        for _, carried, _ in self._posted:  # NCCL may write to these until its communicator has ended
            for tensor in carried:
                self.library.use(tensor, self.stream)
        self._posted.clear()


class Outgoing:
    """The sending end, rank 0 of its communicator."""

    def __init__(self, library: Library, communicator: Communicator) -> None:
        self.library = library
        self.communicator = communicator
        self.stream = communicator.stream
        self._left: list[Expected] = []
        """The last is the next."""
        self._sent: deque[tuple[Message, Any]] = deque()

    @property
    def error(self) -> ChannelError | None:
        """See `OutgoingChannel`."""
        problem = self.communicator.problem()
        return None if problem is None else ChannelError(problem)

    def open(self, messages: Sequence[Expected]) -> None:
        """See `OutgoingChannel`."""
        assert not self._left, "the last window took all its messages"
        self._left = list(reversed(messages))

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        expected = self._left.pop()
        check_tensors(expected, tensors)
        carried = _with_bytes(self.library, [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors])
        self.library.follow(self.stream)
        self.communicator.send(carried, 1, self.stream)
        for tensor in carried:
            self.library.use(tensor, self.stream)
        while self._sent and self.library.happened(self._sent[0][1]):
            self._sent.popleft()
        self._sent.append((expected.message, self.library.reached(self.stream)))

    def flush(self, timeout_s: float, aborted: threading.Event) -> Message | None:
        """See `OutgoingChannel`."""
        deadline_s = time.monotonic() + timeout_s
        while self._sent:
            message, event = self._sent[0]
            if self.library.happened(event):
                self._sent.popleft()
                deadline_s = time.monotonic() + timeout_s
            elif self.error is not None or time.monotonic() > deadline_s or aborted.wait(_LOOK_EVERY_S):
                return message
        return None

    def wake(self) -> None:
        """See `OutgoingChannel`; `flush` polls."""

    def close(self) -> None:
        """See `OutgoingChannel`."""
        self._left.clear()
        self._sent.clear()


class NcclSumGroup:
    """A set of devices that sums over NCCL."""

    def __init__(self, library: Library, communicator: Communicator, *, num_members: int) -> None:
        self.library = library
        self.communicator = communicator
        self.stream = communicator.stream
        self.slice_owners = tuple(range(num_members))

    def sum(
        self,
        tensor: Tensor,
        *,
        collective: Collective,
        deadline: int,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> Sum:
        """Begin to sum a tensor over the members, in place; see `Transport.start`."""
        if places is not None:
            segments = tuple(Segment(places.num_before(end), owner) for end, owner in segments)
        return Sum(self, tensor, segments, gathers=collective.kind is CollectiveKind.WEIGHTS)


class Sum:
    """A sum under way; 16-bit floats are summed in float32 and rounded once."""

    def __init__(self, group: NcclSumGroup, tensor: Tensor, segments: tuple[Segment, ...], *, gathers: bool) -> None:
        self.group = group
        self.tensor = tensor
        library = group.library
        given = tensor.detach() if tensor.numel() else library.empty((1,), torch.float32).zero_()
        self._summed = (given if gathers else given.to(summing_dtype(given.dtype))).contiguous()
        library.follow(group.stream)
        starts = [0, *(end for end, _ in segments)]
        parts = [(self._summed[start:end], owner) for start, (end, owner) in zip(starts, segments, strict=False) if end > start]
        if gathers:
            group.communicator.from_owners([(part, owner) for part, owner in parts if owner is not None], group.stream)
        elif parts:
            group.communicator.to_owners(parts, group.stream)
        else:
            group.communicator.all_reduce(self._summed, group.stream)
        library.use(self._summed, group.stream)
        self._event = library.reached(group.stream)

    def wait(self, timeout_s: float) -> None:
        """See `SumUnderWay`."""
        self.group.library.wait(self._event, timeout_s=timeout_s)
        target = self.tensor.detach()
        if target.numel() and target.data_ptr() != self._summed.data_ptr():
            target.copy_(self._summed)
            if self._summed.is_cuda:
                self._summed.record_stream(torch.cuda.current_stream())  # its memory may come from another thread's
