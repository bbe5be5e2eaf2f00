"""What the driver tells stage actors, and what they answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.faults import FaultScript
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.actors.stage.optimizer_names import OptimizerFunction
from raypipe.actors.transport.secret import StoreAddress
from raypipe.artifacts.branches import cut_branches, stages_text
from raypipe.artifacts.cut import Cut
from raypipe.communication.patterns import Pattern
from raypipe.config import OptimizerConfig, Precision
from raypipe.errors import RunError
from raypipe.model import Model
from raypipe.schedules.ir import WeightRule

ModelFunction = Callable[[], Model]
BatchFunction = Callable[[str], BatchSource]
"""Opens the rows of a split, such as `train`."""
StageOptimizer = Callable[[int, NamedWeights], torch.optim.Optimizer]
"""Makes the optimizer of a stage from its number and its weights."""


@dataclass(frozen=True)
class Identity:
    """Who an actor is.

    Attributes:
        directory: Working directory of the driver, where relative paths of the user's files start.
    """

    run: str
    device: int
    name: str
    stages: tuple[int, ...]
    directory: str = field(default_factory=os.getcwd)

    @property
    def stage_text(self) -> str:
        """The stages in text, such as `0,4`."""
        return stages_text(self.stages)


@dataclass(frozen=True)
class BuildOrder:
    """What an actor needs to build its stages.

    Attributes:
        num_updates: Updates of the run, for the learning rate.
        optimizer_function: Makes an optimizer from groups of weights, instead of what `optimizer` names.
        make_optimizer: Makes each stage's optimizer, whatever `optimizer` says.
    """

    model: ModelFunction
    batches: BatchFunction
    cut: Cut
    weight_rule: WeightRule
    optimizer: OptimizerConfig
    num_rows: int
    num_updates: int
    seed: int
    faults: FaultScript = field(default_factory=FaultScript)
    optimizer_function: OptimizerFunction | None = None
    make_optimizer: StageOptimizer | None = None
    precision: Precision = Precision.FLOAT32

    def branches(self) -> tuple[str, ...]:
        """Return the branch of each stage; nothing for a model without concurrent stages."""
        return cut_branches(self.cut, [layer.branch for layer in self.model().layers])


@dataclass(frozen=True)
class ConnectOrder:
    """What an actor needs to connect with the others.

    Attributes:
        channels: Ordered pairs of devices that exchange messages.
        shared: Those channels that go through shared memory; the others go over TCP or gloo, or NCCL between GPUs.
        over_tcp: Whether they, and sums, go over raypipe's own connections, and not over gloo.
        nodes: Ray node of each device; see `ways`.
        groups: Members of each sum.
        patterns: Patterns of sums by members, at first; where left out a ring in the order of the members.
        wires: See `Wiring`.
        entrances: See `Wiring`.
        store: Where the actors find each other.
        prefix: Text unique to this run and epoch.
        number: How often the devices of the run have met before; for faults.
        message_timeout_s: Limit for every later wait.
    """

    names: tuple[str, ...]
    channels: tuple[tuple[int, int], ...]
    shared: frozenset[tuple[int, int]]
    over_tcp: bool
    nodes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    patterns: Mapping[tuple[int, ...], Pattern]
    wires: tuple[Mapping[int, int], ...]
    entrances: tuple[Mapping[int, int], ...]
    store: StoreAddress
    prefix: str
    connect_timeout_s: float
    message_timeout_s: float
    number: int = 0

    def apart(self, device: int) -> set[int]:
        """Return the devices on slow nodes. They leave room in this node's port, so transfers to them take no turns with others."""
        return {peer for peer, number in self.wires[device].items() if number < 0} if self.wires else set()

    def ways(self, device: int) -> dict[int, str]:
        """Return what transfers to each other device share: nothing within the node, else a wire, or the port if none is known."""
        own, wires = self.nodes[device], self.wires[device] if self.wires else {}
        outside = {peer: f"wire {wires[peer]}" if peer in wires else "port" for peer in range(len(self.nodes))}
        return {peer: f"within {peer}" if node == own else outside[peer] for peer, node in enumerate(self.nodes) if peer != device}


@dataclass(frozen=True)
class LayerSize:
    """How large a layer's weights are; parameters shared with an earlier layer count there, but their bytes here, too.

    Attributes:
        weights: Full names of the trained weights.
    """

    num_parameters: int
    parameter_bytes: int
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Awaited:
    """A message or collective that a device waits for, in text, and the other devices that take part in it."""

    devices: tuple[int, ...]
    transfer: str


@dataclass(frozen=True)
class Status:
    """What an actor is doing.

    Attributes:
        since_s: Seconds since the actor began the call that it is in.
        computes: Whether it runs an Op of a window, and does not wait for another device.
        failure: Why its window cannot end, where the thread that runs it cannot say so itself.
        name: Name of the device.
        stages: The stages on it, in text.
        awaited: The transfer that it waits for, or waited for when its window failed.
        unanswered: Devices whose systems do not acknowledge what was sent to them over TCP, again and again.
    """

    device: int
    doing: str
    since_s: float
    computes: bool
    failure: RunError | None = None
    awaited: Awaited | None = None
    name: str = ""
    stages: str = ""
    unanswered: tuple[int, ...] = ()
