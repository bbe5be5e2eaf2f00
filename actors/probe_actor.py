"""The probe actor: one device that measures its links. A plain class; `raypipe.cluster` makes Ray actors of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from raypipe.actors import cores, devices
from raypipe.actors.actor_info import ActorInfo, actor_info
from raypipe.actors.measure.flows import Flow, FlowConnection, Readings
from raypipe.actors.measure.links import Links
from raypipe.actors.transport import cuda


class ProbeActor:
    """One device that measures its links; with `use_gpu` a GPU, which Ray gave to this process alone."""

    def __init__(self, device: int, *, use_gpu: bool = False) -> None:
        torch.set_num_threads(1)
        self.device = device
        self._on = devices.CPU
        if use_gpu:
            os.environ.update(cuda.environment(""))
            self._on = torch.device("cuda", 0)
        self._links = Links(device, on=self._on)

    def __repr__(self) -> str:
        return f"Probe({self.device})"

    def info(self) -> ActorInfo:
        """Return where this actor runs."""
        return actor_info(self._on, num_cores=cores.num_usable())

    def connect(self, connections: Sequence[FlowConnection], *, host_ip: str) -> None:
        """Connect flows; raises `ConfigError` if cupy or NCCL is missing on a GPU."""
        self._load_library()
        self._links.connect(connections, host_ip=host_ip)

    def reach(self, connections: Sequence[FlowConnection], *, host_ip: str) -> list[tuple[int, int]]:
        """Connect flows as `connect` does; return source and target of those whose devices do not reach each other."""
        self._load_library()
        return self._links.reach(connections, host_ip=host_ip)

    def _load_library(self) -> None:
        if self._on.type == "cuda" and self._links.library is None:
            self._links.library = cuda.Cuda(self._on)

    def run(self, flows: Sequence[Flow]) -> list[Readings]:
        """Take part in flows; see `Links`."""
        return self._links.run(flows)
