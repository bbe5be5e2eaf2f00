"""What the items of a job mean on one device, worked out once for all its windows.

Between two stages that wait, caches are cold, and every lookup costs several times what it does in a loop. So what an Op takes
and gives, under which names and in which layers' places, its rows and its weights are looked up before the first window. An Op's
Sends follow it at once: they belong to its step, and nothing is noted or given back before its messages are on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from raypipe.actors.execution.batches import row_range
from raypipe.actors.stage.gradient_flow import EdgeSpecs, EdgeTensor, Place
from raypipe.actors.stage.weights import Weights
from raypipe.actors.transport.protocol import Expected, TensorSpec
from raypipe.artifacts.cut import Cut
from raypipe.errors import PlanError
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.lower import Await, Collective, Compute, DeviceProgram, Direction, Message, Recv, Send, Start

Rows = tuple[float, float]
"""First row and end, in shares of a microbatch."""

MessageKey = tuple[Direction, int, int, int, int, int]
"""Direction, source stage, target stage, microbatch, pipeline and part: what one Op gives another stage, whatever rows travel where."""


def _message_key(message: Message) -> MessageKey:
    return (message.direction, message.source, message.target, message.index, message.pipeline, message.part)


@dataclass(frozen=True, slots=True)
class Activations:
    """What a forward takes from another stage.

    Attributes:
        key: of the message.
        layers: for each layer that crosses the edge, its first tensor in the message and the end.
        leaves: the numbers of the tensors that the stage finds gradients of.
    """

    key: MessageKey
    layers: tuple[tuple[int, int, int], ...]
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a backward takes from another stage.

    Attributes:
        key: of the message.
        roots: for each of its tensors, the layer of this stage, and which of the layer's outputs it is the gradient of.
    """

    key: MessageKey
    roots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Given:
    """What an Op gives another stage.

    Attributes:
        key: of the message.
        layers: whose tensors an activation consists of.
        leaves: which of the stage's inputs, counted over all its edges, a gradient consists of the gradients of.
        without: of its other inputs from there, those whose gradients would be missed; there are none.
        here: whether that stage is on this device: nothing is sent.
    """

    key: MessageKey
    layers: tuple[int, ...]
    leaves: tuple[int, ...]
    without: tuple[int, ...]
    here: bool


@dataclass(frozen=True, slots=True)
class WiredOp:
    """An Op and all that it needs to run.

    Attributes:
        op: which.
        kind: of it.
        key: stage, microbatch and part.
        version: of the weights that it uses.
        update: that it works for.
        rows: of the microbatch, in shares.
        first_row: of them.
        num_rows: how many they are.
        loss_weight: of their mean loss in the loss of the update.
        weights: of its stage.
        takes_loss: whether the loss is taken at its stage.
        takes_batch: whether it needs the batch.
        recomputed: whether a forward is run again before its backward, and keeps its inputs alone until then.
        activations: that a forward takes.
        gradients: that a backward takes.
        given: to other stages.
        constants: what a forward gives other stages that has no use for a gradient.
    """

    op: Op
    kind: OpKind
    key: tuple[int, int, int]
    version: int
    update: int
    rows: Rows
    first_row: int
    num_rows: int
    loss_weight: float
    weights: Weights
    takes_loss: bool
    takes_batch: bool
    recomputed: bool
    activations: tuple[Activations, ...]
    gradients: tuple[Gradients, ...]
    given: tuple[Given, ...]
    constants: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Sending:
    """A message that leaves.

    Attributes:
        message: which.
        device: to which it goes.
        key: of what the Op gives.
        rows: first row and end of these in what the Op gives, or `None` for all.
    """

    message: Message
    device: int
    key: MessageKey
    rows: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Computing:
    """A slot, and the messages that leave right behind it.

    Attributes:
        position: of its item.
        name: of the slot.
        after: what is being done behind it, in words.
        ops: in order.
        sends: in order.
        releases: versions of weights that nothing reads after it.
    """

    position: int
    name: str
    after: str
    ops: tuple[WiredOp, ...]
    sends: tuple[Sending, ...]
    releases: tuple[tuple[Weights, int], ...]


@dataclass(frozen=True, slots=True)
class Receiving:
    """A message that is taken.

    Attributes:
        position: of its item.
        doing: what is being done, in words.
        message: which.
        device: from which it comes.
        key: of what the other Op gave.
        num_bytes: of its tensors.
    """

    position: int
    doing: str
    message: Message
    device: int
    key: MessageKey
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Starting:
    """A collective that begins."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Awaiting:
    """A collective whose end is waited for.

    Attributes:
        position: of its item.
        doing: what is being done, in words.
        collective: which.
    """

    position: int
    doing: str
    collective: Collective


Step = Computing | Receiving | Starting | Awaiting

Announced = dict[int, list[Expected]]
"""By peer, the messages of a channel in order."""


@dataclass(frozen=True)
class Wiring:
    """A job on one device, for microbatches of so many rows.

    Attributes:
        steps: in order.
        updated: Stages that the device updates; those of its others are published to it.
        incoming: what will come.
        outgoing: what will leave.
    """

    steps: tuple[Step, ...]
    updated: frozenset[int]
    incoming: Announced = field(repr=False)
    outgoing: Announced = field(repr=False)


class Wirer:
    """Works out the wirings of one device.

    Args:
        cut: the layers of all stages.
        held: the weights of the stages that this device holds.
        edge_specs: what travels along each edge of the stage graph.
    """

    def __init__(self, cut: Cut, held: Mapping[int, Weights], edge_specs: EdgeSpecs) -> None:
        self.cut = cut
        self.held = held
        self.edge_specs = edge_specs

    def wire(self, program: DeviceProgram, num_rows: int) -> Wiring:
        """The wiring of a program.

        Raises:
            PlanError: an Op has no rows, or the job does not sum what the stages of the cut share.
        """
        if program.graph.ties != self.cut.graph.ties and not program.forward_only:
            tied = f"the cut of the model ties the stages {self.cut.graph.ties}, the schedule {program.graph.ties}"
            raise PlanError(f"{tied}; lay it over the cut's graph with raypipe.schedules.passes.over_graph")
        for rows in program.row_ranges:
            if row_range(rows, num_rows)[0] == row_range(rows, num_rows)[1]:
                raise PlanError(
                    f"device {program.device} works on the share {rows} of a microbatch of {num_rows} rows, which is none; "
                    "use larger microbatches, fewer replicas, or a schedule that does not divide microbatches"
                )
        self._num_sends = Counter(_message_key(item.message) for item in program.items if isinstance(item, Send))
        ops = [op for item in program.items if isinstance(item, Compute) for op in item.ops]
        self._recomputations = frozenset(op for op in ops if op.kind is OpKind.RECOMPUTE)
        incoming: Announced = {}
        outgoing: Announced = {}
        for item in program.items:
            if isinstance(item, Recv | Send):
                announced = incoming if isinstance(item, Recv) else outgoing
                announced.setdefault(item.device, []).append(Expected(item.message, self._specs(item.message, num_rows)))
        updated = frozenset(op.stage for op in ops if op.kind is OpKind.UPDATE)
        return Wiring(tuple(self._steps(program, num_rows)), updated, incoming, outgoing)

    def places(self, edge: tuple[int, int]) -> list[tuple[Place, EdgeTensor]]:
        """The tensors of an edge, and where they are made."""
        layers = zip(self.cut.crossing[edge], self.edge_specs[edge], strict=True)
        return [((layer, number), tensor) for layer, tensors in layers for number, tensor in enumerate(tensors)]

    def _specs(self, message: Message, num_rows: int) -> tuple[TensorSpec, ...]:
        """The tensors of a message: the edge's, or those of their gradients, for its share of a microbatch."""
        edge = (min(message.source, message.target), max(message.source, message.target))
        back = message.direction is Direction.GRADIENT
        specs = [tensor.spec for tensor in self._tensors(edge) if tensor.returns or not back]
        first, end = row_range(message.rows, num_rows)
        return tuple(TensorSpec((end - first, *spec.shape[1:]), spec.dtype) for spec in specs)

    def _steps(self, program: DeviceProgram, num_rows: int) -> Iterator[Step]:
        items = program.items
        for position, item in enumerate(items):
            match item:
                case Compute():
                    end = position + 1
                    while end < len(items) and isinstance(items[end], Send):
                        end += 1
                    yield self._computing(
                        program, position, item, [send for send in items[position + 1 : end] if isinstance(send, Send)], num_rows
                    )
                case Recv():
                    num_bytes = sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in self._specs(item.message, num_rows))
                    doing = f"waiting for {program.names[position]} from device {item.device}"
                    yield Receiving(position, doing, item.message, item.device, _message_key(item.message), num_bytes)
                case Start():
                    yield Starting(item.collective)
                case Await():
                    others = ", ".join(map(str, item.collective.devices))
                    yield Awaiting(position, f"waiting for {item.collective} with devices {others}", item.collective)
                case Send():
                    pass  # part of the step of its Op

    def _computing(self, program: DeviceProgram, position: int, item: Compute, sends: list[Send], num_rows: int) -> Computing:
        ops = tuple(
            self._op(program, op, version, rows, num_rows) for op, version, rows in zip(item.ops, item.versions, item.rows, strict=True)
        )
        rows_of = {given.key: wired.rows for wired in ops for given in wired.given}
        releases = tuple(
            (self.held[op.stage], version)
            for op, version in zip(item.ops, item.versions, strict=True)
            if not program.forward_only and program.last_reads[op.stage, version] == position
        )
        return Computing(
            position=position,
            name=program.names[position],
            after=f"waiting to go on after {program.names[position]}",
            ops=ops,
            sends=tuple(_sending(send, rows_of[_message_key(send.message)], num_rows) for send in sends),
            releases=releases,
        )

    def _op(self, program: DeviceProgram, op: Op, version: int, rows: Rows, num_rows: int) -> WiredOp:
        first, end = row_range(rows, num_rows)
        weights, graph = self.held[op.stage], program.graph
        sources = [] if op.kind.per_update else [(source, (source, op.stage)) for source in graph.predecessors[op.stage]]
        targets = [] if op.kind.per_update else [(target, (op.stage, target)) for target in graph.successors[op.stage]]
        activations: tuple[Activations, ...] = ()
        gradients: tuple[Gradients, ...] = ()
        given: list[Given] = []
        constants: tuple[Place, ...] = ()
        if op.kind in {OpKind.FORWARD, OpKind.RECOMPUTE}:
            activations = tuple(self._activations(op, *source) for source in sources)
            constants = tuple(place for _, edge in targets for place, tensor in self.places(edge) if not tensor.takes_gradient)
        if op.kind is OpKind.FORWARD:
            given = [self._given(program, Direction.ACTIVATION, op, target, self.cut.crossing[edge]) for target, edge in targets]
        elif op.kind.gives_input_gradient:
            gradients = tuple(self._gradients(op, *target) for target in targets)
            num_inputs = 0
            for source, edge in sources:
                tensors = self._tensors(edge)
                leaves = tuple(num_inputs + number for number, tensor in enumerate(tensors) if tensor.returns)
                without = tuple(
                    num_inputs + number for number, tensor in enumerate(tensors) if tensor.takes_gradient and not tensor.returns
                )
                given.append(self._given(program, Direction.GRADIENT, op, source, (), leaves, without))
                num_inputs += len(tensors)
        takes_loss = op.stage in graph.sinks
        return WiredOp(
            op=op,
            kind=op.kind,
            key=(op.stage, op.index, op.part),
            version=version,
            update=op.index if op.kind.per_update else op.index // program.num_microbatches,
            rows=rows,
            first_row=first,
            num_rows=end - first,
            loss_weight=(end - first) / num_rows / program.num_microbatches,
            weights=weights,
            takes_loss=takes_loss,
            takes_batch=takes_loss or weights.module.takes_batch,
            recomputed=op.kind is OpKind.FORWARD and op._replace(kind=OpKind.RECOMPUTE) in self._recomputations,
            activations=activations,
            gradients=gradients,
            given=tuple(given),
            constants=constants,
        )

    def _tensors(self, edge: tuple[int, int]) -> list[EdgeTensor]:
        return [tensor for _, tensor in self.places(edge)]

    def _activations(self, op: Op, source: int, edge: tuple[int, int]) -> Activations:
        layers: list[tuple[int, int, int]] = []
        first = 0
        for layer, specs in zip(self.cut.crossing[edge], self.edge_specs[edge], strict=True):
            layers.append((layer, first, first + len(specs)))
            first += len(specs)
        leaves = tuple(number for number, tensor in enumerate(self._tensors(edge)) if tensor.takes_gradient)
        return Activations((Direction.ACTIVATION, source, op.stage, op.index, op.pipeline, op.part), tuple(layers), leaves)

    def _gradients(self, op: Op, target: int, edge: tuple[int, int]) -> Gradients:
        roots = tuple(place for place, tensor in self.places(edge) if tensor.returns)
        return Gradients((Direction.GRADIENT, target, op.stage, op.index, op.pipeline, op.part), roots)

    def _given(
        self,
        program: DeviceProgram,
        direction: Direction,
        op: Op,
        other: int,
        layers: tuple[int, ...] = (),
        leaves: tuple[int, ...] = (),
        without: tuple[int, ...] = (),
    ) -> Given:
        key = (direction, op.stage, other, op.index, op.pipeline, op.part)
        return Given(key, layers, leaves, without, here=not self._num_sends[key])


def _sending(send: Send, rows: Rows, num_rows: int) -> Sending:
    message = send.message
    within = None
    if message.rows != rows:
        start = row_range(rows, num_rows)[0]
        first, end = row_range(message.rows, num_rows)
        within = (first - start, end - start)
    return Sending(message, send.device, _message_key(message), within)
