"""Messages and sums between GPUs over NCCL, in the order in which streams name them; the host waits for none of them.

Each channel (ordered pair of devices) has a communicator of two ranks and a stream of its own, and so has each set of devices that
meets in sums. What shapes the code:

* NCCL pairs what the two ends of a communicator name, first with first. Both ends name the messages of a channel in the order of the
  lowered programs, which the validator has run; what is named here is compared with what was announced here.
* Work of several communicators may pass in any order only if all of it can be on the GPU at once: the actor asks CUDA for as many queues
  as it has (`environment`), and NCCL for few blocks of threads, which computation then lacks while they wait.
* Making a communicator and passing its first message hold the host up until the other end does so, too. Both happen in `connect`, set by
  set in one order for all. NCCL knows no limit for that wait: a thread does it, and is left behind where time runs out.
* What waits for a peer ends with its communicator alone, which any thread may abort. Limits are the clock's, which sees the device.
* A message is received into memory that the computing stream asked for; the receiving stream begins behind that moment. It is asked for
  one message ahead: more would take memory and the GPU's blocks.
* Memory that is sent or received is marked as in use by that stream (`record_stream`), and given out again behind it.
* Tensors go as bytes. Sums of 16-bit floats are made in float32 and rounded once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from raypipe.actors.transport.channel import ChannelError, check_next, check_tensors
from raypipe.actors.transport.protocol import NO_MORE, Expected, summing_dtype
from raypipe.actors.transport.rendezvous import Meeting
from raypipe.schedules.lower import Message

T = TypeVar("T")

_RECEIVES_AHEAD = 1
_LOOK_EVERY_S = 0.001


class Communicator(Protocol):
    """Some ranks that pass messages and meet in sums. What it is told happens in the order of its stream.

    Attributes:
        stream: its own.
    """

    @property
    def stream(self) -> Any:
        """See above."""

    def send(self, tensors: Sequence[Tensor], peer: int, stream: Any) -> None:
        """Puts the sending of contiguous tensors that are not empty into a stream."""

    def recv(self, tensors: Sequence[Tensor], peer: int, stream: Any) -> None:
        """Puts the receiving into contiguous tensors that are not empty into a stream."""

    def all_reduce(self, tensor: Tensor, stream: Any) -> None:
        """Puts the summing of a contiguous tensor that is not empty, in place, into a stream."""

    def problem(self) -> str | None:
        """What has gone wrong since, if anything has. Called from any thread."""

    def shut_down(self) -> None:
        """Ends what is under way and all that follows, with any content; does not wait for that. Called from any thread."""


class Library(Protocol):
    """What is used of CUDA and NCCL: `raypipe.actors.transport.cuda` on a GPU."""

    def unique_id(self) -> bytes:
        """What the members of a new communicator know it by; one of them asks for it."""

    def communicator(self, num_ranks: int, unique_id: bytes, rank: int) -> Communicator:
        """Makes a communicator, once all its ranks do."""

    def stream(self) -> Any:
        """A new stream, which nothing else is put into, before others where they compete."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the computing stream."""

    def follow(self, stream: Any) -> None:
        """Lets a stream begin what comes next behind what the computing stream was told until now."""

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Keeps the memory of a tensor until a stream has done what it was told until now."""

    def reached(self, stream: Any) -> Any:
        """An event at the end of what a stream was told until now."""

    def wait(self, event: Any, *, timeout_s: float) -> None:
        """Lets the computing stream begin what comes next behind an event; the limit is for libraries whose host computes.

        Raises:
            ChannelError: the event did not happen.
        """

    def happened(self, event: Any) -> bool:
        """Whether an event has happened."""


def connect(library: Library, meeting: Meeting, kind: str, members: tuple[int, ...]) -> Communicator:
    """The communicator of this device and the others, once all have come; its ranks follow `members`.

    Raises:
        TransportTimeoutError: a member did not come in time.
        TransportError: one came and went, or NCCL failed.
        AbortedError: `abort` was called.
    """
    name = f"{kind} {'-'.join(map(str, members))}"
    rank = members.index(meeting.device)
    others = [member for member in members if member != meeting.device]
    if rank == 0:
        meeting.say(f"{name} id", library.unique_id().hex())
    (unique_id,) = meeting.hear(f"{name} id", members[:1])
    # From here on members wait for each other in NCCL, which nothing ends: all must be there and alive.
    meeting.say(f"{name} ready")
    meeting.hear(f"{name} ready", others)

    def make() -> Communicator:
        made = library.communicator(len(members), bytes.fromhex(unique_id), rank)
        _pass_the_first(library, made, rank, summed=kind == "group")
        return made

    return _with_limit(make, meeting, ", ".join(meeting.names[other] for other in others))


def _pass_the_first(library: Library, communicator: Communicator, rank: int, *, summed: bool) -> None:
    """Passes a first message or sum, for which NCCL holds the host up until its ways are open."""
    first, stream = library.empty((1,), torch.float32), communicator.stream
    first.zero_()
    library.follow(stream)
    if summed:
        communicator.all_reduce(first, stream)
    elif rank == 0:
        communicator.send([first], 1, stream)
    else:
        communicator.recv([first], 0, stream)
    event = library.reached(stream)
    while not library.happened(event):
        time.sleep(_LOOK_EVERY_S)


def _with_limit(make: Callable[[], T], meeting: Meeting, peers: str) -> T:
    """What a function makes, in a thread that is left behind if the meeting's time runs out."""
    made: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:  # raised by the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="raypipe connects over NCCL", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        meeting.lines.check()
        if thread.is_alive():
            meeting.check_deadline(peers, "it came, but did not answer over NCCL")
    if failed:
        raise ChannelError(f"NCCL failed: {failed[0]}") from failed[0]
    return made[0]


def _with_bytes(library: Library, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What travels of a message: its tensors that are not empty, or one byte, so that it is still a message."""
    return [tensor for tensor in tensors if tensor.numel()] or [library.empty((1,), torch.uint8)]


class Incoming:
    """The receiving end of a channel.

    Args:
        library: what it works with.
        communicator: this device is rank 1 of it.
        timeout_s: see `Library.wait`.
    """

    def __init__(self, library: Library, communicator: Communicator, *, timeout_s: float) -> None:
        self.library = library
        self.communicator = communicator
        self.timeout_s = timeout_s
        self.stream = communicator.stream
        self._left: list[Expected] = []
        """The last is the next."""
        self._posted: deque[tuple[Expected, tuple[Tensor, ...], Any]] = deque()

    def open(self, messages: Sequence[Expected]) -> None:
        """See `IncomingChannel`."""
        assert not self._left, "the last window was not closed"
        assert not self._posted, "the last window was not closed"
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
        for tensor in carried:
            self.library.use(tensor, self.stream)
        self._posted.append((expected, tensors, self.library.reached(self.stream)))

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        """See `IncomingChannel`; the host does not wait, the computing stream does."""
        if not self._posted and not self._left:
            raise ChannelError(NO_MORE)
        self._post()
        expected, tensors, event = self._posted.popleft()
        check_next(expected, message)
        self.library.wait(event, timeout_s=self.timeout_s)
        return tensors

    def end(self) -> list[Expected]:
        """See `IncomingChannel`."""
        left = [expected for expected, _, _ in self._posted] + self._left[::-1]
        self.close()
        return left

    def close(self) -> None:
        """See `IncomingChannel`."""
        self._left.clear()
        self._posted.clear()


class Outgoing:
    """The sending end of a channel.

    Args:
        library: what it works with.
        communicator: this device is rank 0 of it.
    """

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
        assert not self._left, "the last window was not closed"
        self._left = list(reversed(messages))

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """See `OutgoingChannel`."""
        if not self._left:
            raise ChannelError(NO_MORE)
        expected = self._left.pop()
        check_next(expected, message)
        check_tensors(expected, tensors)
        carried = _with_bytes(self.library, [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors])
        self.library.follow(self.stream)
        self.communicator.send(carried, 1, self.stream)
        for tensor in carried:
            self.library.use(tensor, self.stream)
        while self._sent and self.library.happened(self._sent[0][1]):
            self._sent.popleft()
        self._sent.append((message, self.library.reached(self.stream)))

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

    def end(self) -> list[Expected]:
        """See `OutgoingChannel`."""
        left = self._left[::-1]
        self._left.clear()
        return left

    def wake(self) -> None:
        """See `OutgoingChannel`; `flush` looks by itself."""

    def close(self) -> None:
        """See `OutgoingChannel`."""
        self._left.clear()
        self._sent.clear()


class Group:
    """A set of devices that meets in sums.

    Args:
        library: what it works with.
        communicator: of its members.
    """

    def __init__(self, library: Library, communicator: Communicator) -> None:
        self.library = library
        self.communicator = communicator
        self.stream = communicator.stream

    def sum(self, tensor: Tensor) -> Sum:
        """Begins to sum a tensor over the members, in place."""
        return Sum(self, tensor)


class Sum:
    """A sum under way.

    Args:
        group: of the members.
        tensor: this one's share; holds the sum after `wait`.
    """

    def __init__(self, group: Group, tensor: Tensor) -> None:
        self.group = group
        self.tensor = tensor
        library = group.library
        given = tensor.detach() if tensor.numel() else library.empty((1,), torch.float32).zero_()
        self._summed = given.to(summing_dtype(given.dtype)).contiguous()
        library.follow(group.stream)
        group.communicator.all_reduce(self._summed, group.stream)
        library.use(self._summed, group.stream)
        self._event = library.reached(group.stream)

    def wait(self, timeout_s: float) -> None:
        """Lets the computing stream wait until the sum is there.

        Raises:
            ChannelError: it did not come.
        """
        self.group.library.wait(self._event, timeout_s=timeout_s)
        target = self.tensor.detach()
        if target.numel() and target.data_ptr() != self._summed.data_ptr():
            target.copy_(self._summed)
