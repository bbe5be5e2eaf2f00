"""Measures links over the transports that training uses, in probe actors and in stage actors between windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from raypipe.actors import devices
from raypipe.actors.measure.flow_ends import SOURCE, TARGET, run_flow
from raypipe.actors.measure.flows import Flow, FlowConnection, Readings
from raypipe.actors.transport.cuda_ipc import SharingLibrary
from raypipe.actors.transport.process import ProcessTransport
from raypipe.errors import TransportError

T = TypeVar("T")


class Links:
    """One device's ends of its flows. Each flow has a transport of its own, a channel each way, and runs in a thread."""

    def __init__(self, device: int, *, on: torch.device = devices.CPU, library: SharingLibrary | None = None) -> None:
        self.device = device
        self.on = on
        self.library = library
        self._transports: dict[tuple[int, int], ProcessTransport] = {}

    def connect(self, connections: Sequence[FlowConnection], *, host_ip: str) -> None:
        """Connect flows, except connected ones, at the same time; raise `TransportError` if a device does not come."""
        _at_once([partial(self._connect, connection, host_ip) for connection in connections])

    def reach(self, connections: Sequence[FlowConnection], *, host_ip: str) -> list[tuple[int, int]]:
        """Connect as `connect` does; return source and target of the flows whose devices do not reach each other."""
        reached = _at_once([partial(self._reaches, connection, host_ip) for connection in connections])
        return [(connection.source, connection.target) for connection, is_there in zip(connections, reached, strict=True) if not is_there]

    def _reaches(self, connection: FlowConnection, host_ip: str) -> bool:
        try:
            self._connect(connection, host_ip)
        except TransportError:
            return False
        return True

    def _connect(self, connection: FlowConnection, host_ip: str) -> None:
        ends = (connection.source, connection.target)
        if (before := self._transports.get(ends)) is not None:
            if before.prefix == connection.prefix:
                return
            before.close()  # the other end has not come, and tries again
        channels = ((SOURCE, TARGET), (TARGET, SOURCE))
        transport = ProcessTransport(
            SOURCE if self.device == connection.source else TARGET,
            names=connection.names,
            channels=channels,
            shared=channels if connection.shared else (),
            groups=(),
            store=connection.store,
            prefix=connection.prefix,
            timeout_s=connection.timeout_s,
            connect_timeout_s=connection.connect_timeout_s,
            host_ip=host_ip,
            library=self.library,
        )
        transport.connect()
        self._transports[ends] = transport

    def run(self, flows: Sequence[Flow]) -> list[Readings]:
        """Take part in flows at the same time; return what this end noted, in their order, or raise `TransportError`."""
        return _at_once([partial(self._run, flow) for flow in flows])

    def _run(self, flow: Flow) -> Readings:
        try:
            with devices.own_stream(self.on):
                return run_flow(flow, self._transports[flow.ends], on=self.on)
        except TransportError:
            # The transport is out of use; another `connect` makes a new one.
            self._transports.pop(flow.ends).close()
            raise

    def close(self) -> None:
        """Release sockets, threads and memory. The other ends see it at once, and may connect again."""
        closing, self._transports = self._transports, {}
        for transport in closing.values():
            transport.close()


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="raypipe probes") as threads:
        futures = [threads.submit(call) for call in calls]
    return [future.result() for future in futures]
