"""Process groups of torch's gloo, which carry messages and sums between processes and hosts over TCP.

Each channel has a process group of two ranks, and so has each set of devices that sums; none is torch's default group.

* Gloo sends no data before the receive is posted. So receives are posted ahead, and sends wait in memory.
* Gloo learns that a send has ended only when somebody waits for it: a thread per channel does.
* A message longer than its receive would end the process. So the tag by which gloo pairs them hashes message, number on the channel,
  shape and dtype; if the ends differ, the receiver times out.
* A wait ends early only if its connection does, so `abort` shuts connections down: those that are new in this process, and that the other
  members see, too.
* A receive that times out breaks its connection.
* A sum waits for its neighbors in the ring alone. So its waits poll the connections of all members.
"""

from __future__ import annotations

import json
import os
import time
from typing import cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp  # type: ignore[attr-defined]  # public, says the manual

from raypipe.actors.transport.channel import CLOSED_BY_PEER, ChannelError
from raypipe.actors.transport.gloo_channel import UNLIMITED, ProcessGroup, cause, failure
from raypipe.actors.transport.protocol import Places, own_numbers, summing_dtype
from raypipe.actors.transport.rendezvous import Rendezvous, limit
from raypipe.actors.transport.sockets import Connection, connections, interface_of
from raypipe.communication.shards import Segment
from raypipe.errors import TransportError
from raypipe.schedules.collectives import Collective, CollectiveKind

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOK_EVERY_S = 0.3


def choose_interface(host_ip: str) -> None:
    """Let gloo use the interface with this address for the whole process, unless GLOO_SOCKET_IFNAME is set."""
    if _INTERFACE_VARIABLE not in os.environ:
        interface = interface_of(host_ip)
        if interface is not None:
            os.environ[_INTERFACE_VARIABLE] = interface


def make_group(rendezvous: Rendezvous, kind: str, members: tuple[int, ...]) -> tuple[ProcessGroup, list[Connection]]:
    """Make a process group whose ranks follow `members`; return it with its connections here. Raises as `ProcessTransport.connect`."""
    others = [member for member in members if member != rendezvous.device]
    name = f"{kind} {'-'.join(map(str, members))}"
    rendezvous.publish(f"{name} ready")
    rendezvous.wait_for(f"{name} ready", others)
    before = connections()
    rank = members.index(rendezvous.device)
    try:
        group = cast(ProcessGroup, ProcessGroupGloo(PrefixStore(name, rendezvous.store), rank, len(members), limit(rendezvous.left_s)))
    except RuntimeError as error:
        rendezvous.aborting.check()
        peers = ", ".join(rendezvous.names[other] for other in others)
        rendezvous.check_deadline(peers, "it came, but did not answer")
        raise TransportError(rendezvous.name, peers, "connecting", cause(error)) from error
    mine = connections() - before
    # Other threads of this process open connections, too. The group's are those that another member sees from its end.
    rendezvous.publish(f"{name} made", json.dumps([(connection.local, connection.remote) for connection in mine]))
    theirs = {(remote, local) for said in rendezvous.wait_for(f"{name} made", others) for local, remote in json.loads(said)}
    of_group = [connection for connection in mine if (connection.local, connection.remote) in theirs]
    rendezvous.aborting.add(of_group)
    return group, of_group


class GlooSumGroup:
    """A set of devices that sums over gloo."""

    def __init__(self, group: ProcessGroup, connections: list[Connection], *, position: int, num_members: int) -> None:
        self.group = group
        self.connections = connections
        self.position = position
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
        """See `SumGroup`. All members start their sums in one order, and get all of them. Owners' numbers go as sums with zeros."""
        of_others = segments if collective.kind is CollectiveKind.WEIGHTS else ()
        return Sum(self.group, self.connections, tensor, of_others, self.position)


class Sum:
    """A sum under way. 16-bit floats are summed in float32 and rounded once, at the cost of twice the bytes."""

    def __init__(
        self, group: ProcessGroup, connections: list[Connection], tensor: Tensor, of_others: tuple[Segment, ...], position: int
    ) -> None:
        self.connections = connections
        self.tensor = tensor
        # An empty tensor is not sent; its members sum a stand-in.
        sent = tensor.detach() if tensor.numel() else torch.zeros(1)
        if of_others:
            sent = own_numbers(sent, of_others, position)
        # `tensor` itself where gloo can work on it in place.
        self._summed = sent.to(summing_dtype(sent.dtype)).contiguous()
        try:
            self._work = group.allreduce([self._summed], ReduceOp.SUM, UNLIMITED)
        except RuntimeError as error:
            raise failure(error) from error

    def wait(self, timeout_s: float) -> None:
        """See `SumUnderWay`."""
        deadline_s = time.monotonic() + timeout_s
        ended = completed = False
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                self._work.wait(limit(min(max(left_s, 0.0), _LOOK_EVERY_S)))
                break
            except RuntimeError as error:
                if self._work.is_completed():
                    if completed:
                        raise failure(error) from error
                    completed = True  # perhaps just after the time was over: a wait for it says how it ended
                    continue
                if left_s <= 0.0:
                    raise failure(error, waited_s=timeout_s) from error
                if ended:
                    raise ChannelError(CLOSED_BY_PEER) from error
            # A member that has all it needs of the sum may leave before this one has: what it sent gets one more look's time.
            ended = any(connection.ended() for connection in self.connections)
        target = self.tensor.detach()
        if target.numel() and target.data_ptr() != self._summed.data_ptr():
            target.copy_(self._summed)
