"""How devices pass tensors: what every transport does.

A transport serves one device. Channels (ordered pairs of devices) and collectives keep the order of the lowered programs. One thread at a
time passes messages; another one may start collectives and wait for them meanwhile, and `abort` and `check` may be called from any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from raypipe.communication.shards import Segment
from raypipe.errors import TransportError
from raypipe.schedules.collectives import Collective
from raypipe.schedules.lower import Message


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that will arrive, so that its memory can be allocated before."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Expected:
    """A message that a channel will carry, and its tensors.

    Attributes:
        due: How many slots of the receiver's program come before the one that waits for it.
    """

    message: Message
    tensors: tuple[TensorSpec, ...]
    due: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.message} ({', '.join(map(str, self.tensors)) or 'no tensors'})"


@dataclass(frozen=True)
class Places:
    """Where the numbers of a tensor stand in a longer one, of which it leaves out what is 0 on all members, in the same order.

    Attributes:
        numel: Numbers of the longer tensor.
        num_before: Returns how many numbers of the tensor stand before a place of the longer one.
    """

    numel: int
    num_before: Callable[[int], int]


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Wait for the end; return the tensor given to `Transport.start`, now holding the sum, or what is needed here of it."""


class Transport(Protocol):
    """One device's end of all its channels and collectives."""

    def open_window(self, incoming: Mapping[int, Sequence[Expected]], outgoing: Mapping[int, Sequence[Expected]]) -> None:
        """Begin a window, in which exactly these messages pass, by peer and in the order of the channel; post receives.

        What a list needs is prepared once, when it is given for the first time. So lists must not change.
        """

    def send(self, message: Message, peer: int, tensors: Sequence[Tensor]) -> None:
        """Hand the next message to the channel towards `peer` and return at once; the tensors must not change any more.

        Raises:
            TransportError: The peer is gone, or the tensors are not as announced.
            AbortedError: `abort` was called.
        """

    def recv(self, message: Message, peer: int) -> tuple[Tensor, ...]:
        """Wait for the next message from `peer`; what arrives is checked here, and nowhere else.

        Raises:
            TransportTimeoutError: It did not come in time.
            TransportError: The peer is gone, or sent another message.
            AbortedError: `abort` was called.
        """

    def slice_owners(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order, by position, in which members should own what lies one behind the other in vectors that they divide."""

    def start(
        self,
        collective: Collective,
        tensor: Tensor,
        *,
        deadline: int = 0,
        places: Places | None = None,
        segments: tuple[Segment, ...] = (),
    ) -> Pending:
        """Begin to sum `tensor`, in place, over the members of a collective, and return at once.

        With `segments`, whose owners divide the tensor (that of all `places`), each owner gets the sum of its own numbers alone; other
        numbers may be anything behind it. For the collective `weights`, nothing is summed: each owner's numbers go to all.

        `deadline` is the position in this device's program where the sum is awaited; of several sums, what is due first goes first where
        the transport can choose. With `places`, a transport whose order of additions depends on the place of a number adds in the order
        that the longer tensor would have; gloo and NCCL choose their own.
        """

    def check(self) -> None:
        """Poll for asynchronous errors (NCCL's) that no blocked call has reported. Called from another thread.

        Raises:
            TransportError: There is one.
        """

    def close_window(self) -> None:
        """End a window: wait until all that was sent has left.

        Raises:
            TransportError: A message could not be delivered.
        """

    def abort(self, reason: str) -> None:
        """Make every wait, present and future, end with AbortedError within a second. Called from another thread."""

    def close(self) -> None:
        """Release sockets, threads and memory. Does not wait for peers."""


@dataclass(frozen=True)
class ErrorPlace:
    """The device where a transport's errors happen, and the names of all devices."""

    device: int
    names: Sequence[str]

    def of_message(self, message: Message, peer: int, problem: str, *, kind: type[TransportError] = TransportError) -> TransportError:
        """Return the error about a message with `peer`."""
        return kind(self.names[self.device], self.names[peer], str(message), problem)

    def of_collective(self, collective: Collective, problem: str, *, kind: type[TransportError] = TransportError) -> TransportError:
        """Return the error about a collective with all its other members."""
        others = ", ".join(self.names[member] for member in collective.devices if member != self.device)
        return kind(self.names[self.device], others, str(collective), problem)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors are summed: float32 for 16-bit floats, which are so rounded once, else their own."""
    return torch.float32 if dtype in {torch.bfloat16, torch.float16} else dtype


def own_numbers(tensor: Tensor, segments: tuple[Segment, ...], position: int) -> Tensor:
    """Return a copy of a vector with zeros for what is another member's, so that the sum of all members' has each owner's numbers."""
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    start = 0
    for end, owner in segments:
        if owner != position:
            own[start:end] = 0
        start = end
    return own
