"""The steps of a device: its program's items with everything that they need to run already looked up, once.

Between two stages that wait, caches are cold and a lookup costs several times what it does in a loop. The Sends behind an Op belong to
its step: nothing else is done before they are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raypipe.actors.stage.gradient_flow import OutputId
from raypipe.actors.stage.weights import Weights
from raypipe.actors.transport.protocol import Expected
from raypipe.schedules.collectives import Collective
from raypipe.schedules.ir import Op
from raypipe.schedules.lower import Direction, Message, Rows

RowRange = tuple[int, int]
"""First row and end."""

MessageKey = tuple[Direction, int, int, int, int, int]
"""Direction, source stage, target stage, microbatch, pipeline and part: what an Op gives another stage, in however many messages.

What has arrived has part 0, since the Ops that take it may be of other parts: its rows tell it apart.
"""


@dataclass(frozen=True, slots=True)
class ActivationInput:
    """The activations that a forward gets from another stage.

    Attributes:
        rows: Rows of the microbatch that a part takes of what arrives; `None` where all that arrives is for one Op.
        layers: For each layer that crosses the edge: the layer, its first tensor in the message, and the end.
        leaves: Positions of the tensors whose gradients the stage computes.
    """

    key: MessageKey
    rows: RowRange | None
    layers: tuple[tuple[int, int, int], ...]
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GradientInput:
    """The gradients that a backward gets from another stage; `outputs` are the outputs of this stage that they are of, `rows` as above."""

    key: MessageKey
    rows: RowRange | None
    outputs: tuple[OutputId, ...]


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What an Op gives another stage.

    Attributes:
        layers: Layers whose output tensors form the message (activations).
        inputs: Positions, over all edges of the stage, of the inputs whose gradients form the message.
        unsent_inputs: Positions of the inputs from the same stage that must get no gradient, because none is sent.
        local: Whether the other stage is on this device.
    """

    key: MessageKey
    rows: RowRange
    layers: tuple[int, ...]
    inputs: tuple[int, ...]
    unsent_inputs: tuple[int, ...]
    local: bool


@dataclass(frozen=True, slots=True)
class BoundOp:
    """An Op with all that it needs to run.

    Attributes:
        key: Stage, microbatch and part.
        loss_factor: Factor of the rows' mean loss in the loss of the update, where all rows count alike.
        recomputed: Whether the forward runs again before its backward; until then only its inputs are kept.
        constants: Outputs of a forward that must not require a gradient, because none is sent back for them.
    """

    op: Op
    key: tuple[int, int, int]
    version: int
    update: int
    rows: Rows
    first_row: int
    num_rows: int
    loss_factor: float
    weights: Weights
    takes_loss: bool
    takes_batch: bool
    recomputed: bool
    activations: tuple[ActivationInput, ...]
    gradients: tuple[GradientInput, ...]
    outputs: tuple[StageOutput, ...]
    constants: tuple[OutputId, ...]


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message that leaves the device: some of the rows of the `StageOutput` with a key, counted from its first; `None` for all."""

    message: Message
    device: int
    key: MessageKey
    rows: RowRange | None


@dataclass(frozen=True, slots=True)
class StartStep:
    """The beginning of a collective, behind the end of those of `after`.

    Attributes:
        deadline: Position where it is awaited, or the end of the program.
    """

    collective: Collective
    after: tuple[Collective, ...]
    deadline: int


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """One slot of Ops, the messages that leave right behind it, and the versions of weights that nothing reads later.

    Attributes:
        inside: Sums that start as soon as the Op has completed their gradients; if it does not, at their own steps behind it.
    """

    position: int
    doing: str
    after: str
    ops: tuple[BoundOp, ...]
    sends: tuple[OutgoingMessage, ...]
    releases: tuple[tuple[Weights, int], ...]
    inside: tuple[StartStep, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiveStep:
    """The wait for a message."""

    position: int
    doing: str
    message: Message
    device: int
    key: MessageKey
    rows: RowRange
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AwaitStep:
    """The wait for the end of a collective."""

    position: int
    doing: str
    collective: Collective


@dataclass(frozen=True, slots=True)
class RowsStep:
    """The wait for the rows that the Ops of the step at `position` read."""

    position: int
    doing: str


Step = ComputeStep | ReceiveStep | StartStep | AwaitStep
TimedStep = ComputeStep | ReceiveStep | AwaitStep | RowsStep

Announced = dict[int, list[Expected]]
"""For each peer, the messages of a channel in order."""


@dataclass(frozen=True)
class BoundProgram:
    """A program bound to one device, for a fixed number of rows; `updated` are the stages that it updates itself."""

    steps: tuple[Step, ...]
    updated: frozenset[int]
    incoming: Announced = field(repr=False)
    outgoing: Announced = field(repr=False)
