"""Binds programs to a device: turns lowered items into steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from raypipe.actors.execution.batches import row_range
from raypipe.actors.execution.steps import (
    ActivationInput,
    Announced,
    AwaitStep,
    BoundOp,
    BoundProgram,
    ComputeStep,
    GradientInput,
    MessageKey,
    OutgoingMessage,
    ReceiveStep,
    RowRange,
    StageOutput,
    StartStep,
    Step,
)
from raypipe.actors.stage.gradient_flow import EdgeSpecs, EdgeTensor, OutputId
from raypipe.actors.stage.weights import Weights
from raypipe.actors.transport.protocol import Expected, TensorSpec
from raypipe.artifacts.branches import of_branches
from raypipe.artifacts.cut import Cut
from raypipe.errors import ConfigError, PlanError
from raypipe.schedules.collectives import Await, CollectiveKind, Start
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.lower import Compute, DeviceProgram, Direction, Item, Message, Recv, Rows, Send, starts_inside

Edge = tuple[int, int]
"""Source and target stage."""


class StageEdges:
    """The tensors of each layer that cross the edges of the stage graph."""

    def __init__(self, cut: Cut, specs: EdgeSpecs) -> None:
        self.cut = cut
        self.specs = specs

    def places(self, edge: Edge) -> list[tuple[OutputId, EdgeTensor]]:
        """Return the tensors of an edge, each with the layer output that it is."""
        layers = zip(self.cut.crossing[edge], self.specs[edge], strict=True)
        return [((layer, number), tensor) for layer, tensors in layers for number, tensor in enumerate(tensors)]

    def tensors(self, edge: Edge) -> list[EdgeTensor]:
        """Return the tensors of an edge."""
        return [tensor for tensors in self.specs[edge] for tensor in tensors]

    def message_specs(self, message: Message, num_rows: int) -> tuple[TensorSpec, ...]:
        """Return the tensors of a message: the edge's, or their gradients, for the message's rows."""
        edge = (min(message.source, message.target), max(message.source, message.target))
        is_gradient = message.direction is Direction.GRADIENT
        first, end = row_range(message.rows, num_rows)
        specs = [tensor.spec for tensor in self.tensors(edge) if tensor.returns or not is_gradient]
        return tuple(TensorSpec((end - first, *spec.shape[1:]), spec.dtype) for spec in specs)


def bind(
    program: DeviceProgram, weights: Mapping[int, Weights], edges: StageEdges, num_rows: int, *, branches: Sequence[str] = ()
) -> BoundProgram:
    """Return a program bound to a device; `branches` of the stages are for messages.

    Raises:
        PlanError: An Op has no rows, or shared weights are not summed.
        ConfigError: Copies of a stage would exchange the rows of a weight whose gradient is dense.
    """
    if program.graph.ties != edges.cut.graph.ties and not program.forward_only:
        tied = f"the cut of the model ties the stages {edges.cut.graph.ties}, the schedule {program.graph.ties}"
        raise PlanError(f"{tied}; put the schedule on the cut's graph with raypipe.schedules.passes.over_graph")
    for rows in program.row_ranges:
        first, end = row_range(rows, num_rows)
        if first == end:
            raise PlanError(
                f"device {program.device} works on the share {rows} of a microbatch of {num_rows} rows, which is no whole row; "
                "use larger microbatches, fewer replicas, or a schedule that does not divide microbatches"
            )
    sums = (item.collective for item in program.items if isinstance(item, Start) and item.collective.kind is CollectiveKind.GRADIENTS)
    for refusal in (weights[collective.stage].lookups.refusal for collective in sums):
        if refusal:
            raise ConfigError(refusal)
    return _Binding(program, weights, edges, num_rows, branches).bound()


class _Binding:
    def __init__(
        self, program: DeviceProgram, weights: Mapping[int, Weights], edges: StageEdges, num_rows: int, branches: Sequence[str]
    ) -> None:
        self.program = program
        self.weights = weights
        self.edges = edges
        self.num_rows = num_rows
        self.branches = branches
        self.ops = frozenset(op for item in program.items if isinstance(item, Compute) for op in item.ops)
        self.num_sends = Counter(_key(item.message) for item in program.items if isinstance(item, Send))

    def bound(self) -> BoundProgram:
        incoming: Announced = {}
        outgoing: Announced = {}
        num_slots = 0
        for item in self.program.items:
            num_slots += isinstance(item, Compute)
            if isinstance(item, Recv | Send):
                announced = incoming if isinstance(item, Recv) else outgoing
                expected = Expected(item.message, self.edges.message_specs(item.message, self.num_rows), due=num_slots)
                announced.setdefault(item.device, []).append(expected)
        updated = frozenset(op.stage for op in self.ops if op.kind is OpKind.UPDATE)
        return BoundProgram(tuple(self._steps()), updated, incoming, outgoing)

    def _steps(self) -> Iterator[Step]:
        items = self.program.items
        awaited = {item.collective: position for position, item in enumerate(items) if isinstance(item, Await)}

        def start(item: Start) -> StartStep:
            return StartStep(item.collective, item.after, awaited.get(item.collective, len(items)))

        for position, item in enumerate(items):
            match item:
                case Compute():
                    inside = tuple(map(start, starts_inside(items, position, self.program.num_microbatches)))
                    yield self._compute(position, item, list(_sends_behind(items, position)), inside)
                case Recv():
                    specs = self.edges.message_specs(item.message, self.num_rows)
                    num_bytes = sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)
                    doing = f"waiting for {item} from device {item.device}"
                    rows = row_range(item.message.rows, self.num_rows)
                    yield ReceiveStep(position, doing, item.message, item.device, _arrived(_key(item.message)), rows, num_bytes)
                case Start():
                    yield start(item)
                case Await():
                    members = ", ".join(map(str, item.collective.devices))
                    yield AwaitStep(position, f"waiting for {item} with devices {members}", item.collective)
                case Send():
                    pass  # part of the step of its Op

    def _compute(self, position: int, item: Compute, sends: list[Send], inside: tuple[StartStep, ...]) -> ComputeStep:
        program = self.program
        reads = list(zip(item.ops, item.versions, strict=True))
        ops = tuple(self._op(op, version, rows) for (op, version), rows in zip(reads, item.rows, strict=True))
        rows_of = {output.key: bound.rows for bound in ops for output in bound.outputs}
        return ComputeStep(
            position=position,
            doing=f"{item}{of_branches((op.stage for op in item.ops), self.branches)}",
            after=f"waiting to go on after {item}",
            ops=ops,
            sends=tuple(self._outgoing(send, rows_of[_key(send.message)]) for send in sends),
            releases=tuple(
                (self.weights[op.stage], version)
                for op, version in reads
                if not program.forward_only and program.last_reads[op.stage, version] == position
            ),
            inside=inside,
        )

    def _outgoing(self, send: Send, rows: Rows) -> OutgoingMessage:
        message = send.message
        within = None
        if message.rows != rows:
            start = row_range(rows, self.num_rows)[0]
            first, end = row_range(message.rows, self.num_rows)
            within = (first - start, end - start)
        return OutgoingMessage(message, send.device, _key(message), within)

    def _op(self, op: Op, version: int, rows: Rows) -> BoundOp:
        first, end = row_range(rows, self.num_rows)
        weights, graph, num_microbatches = self.weights[op.stage], self.program.graph, self.program.num_microbatches
        sources = [] if op.kind.per_update else [(source, op.stage) for source in graph.predecessors[op.stage]]
        targets = [] if op.kind.per_update else [(op.stage, target) for target in graph.successors[op.stage]]
        runs_forward = op.kind in {OpKind.FORWARD, OpKind.RECOMPUTE}
        outputs: tuple[StageOutput, ...] = ()
        if op.kind is OpKind.FORWARD:
            outputs = tuple(self._activation_output(op, edge, (first, end)) for edge in targets)
        elif op.kind.gives_input_gradient:
            outputs = tuple(self._gradient_outputs(op, sources, (first, end)))
        takes_loss = op.stage in graph.sinks
        taken = (first, end) if op.part else None
        return BoundOp(
            op=op,
            key=(op.stage, op.index, op.part),
            version=version,
            update=op.index if op.kind.per_update else op.index // num_microbatches,
            rows=rows,
            first_row=first,
            num_rows=end - first,
            loss_factor=(end - first) / self.num_rows / num_microbatches,
            weights=weights,
            takes_loss=takes_loss,
            takes_batch=takes_loss or weights.module.takes_batch,
            recomputed=op.kind is OpKind.FORWARD and op._replace(kind=OpKind.RECOMPUTE) in self.ops,
            activations=tuple(self._activation_input(op, edge, taken) for edge in sources) if runs_forward else (),
            gradients=tuple(self._gradient_input(op, edge, taken) for edge in targets) if op.kind.gives_input_gradient else (),
            outputs=outputs,
            constants=tuple(place for edge in targets for place, tensor in self.edges.places(edge) if not tensor.takes_gradient)
            if runs_forward
            else (),
        )

    def _activation_input(self, op: Op, edge: Edge, rows: RowRange | None) -> ActivationInput:
        layers: list[tuple[int, int, int]] = []
        first = 0
        for layer, specs in zip(self.edges.cut.crossing[edge], self.edges.specs[edge], strict=True):
            layers.append((layer, first, first + len(specs)))
            first += len(specs)
        leaves = tuple(number for number, tensor in enumerate(self.edges.tensors(edge)) if tensor.takes_gradient)
        return ActivationInput((Direction.ACTIVATION, *edge, op.index, op.pipeline, 0), rows, tuple(layers), leaves)

    def _gradient_input(self, op: Op, edge: Edge, rows: RowRange | None) -> GradientInput:
        outputs = tuple(place for place, tensor in self.edges.places(edge) if tensor.returns)
        return GradientInput((Direction.GRADIENT, edge[1], edge[0], op.index, op.pipeline, 0), rows, outputs)

    def _activation_output(self, op: Op, edge: Edge, rows: RowRange) -> StageOutput:
        key = (Direction.ACTIVATION, *edge, op.index, op.pipeline, op.part)
        return self._output(key, rows, layers=self.edges.cut.crossing[edge])

    def _gradient_outputs(self, op: Op, edges: list[Edge], rows: RowRange) -> Iterator[StageOutput]:
        first = 0
        for edge in edges:
            key = (Direction.GRADIENT, edge[1], edge[0], op.index, op.pipeline, op.part)
            tensors = list(enumerate(self.edges.tensors(edge), start=first))
            sent = tuple(number for number, tensor in tensors if tensor.returns)
            unsent = tuple(number for number, tensor in tensors if tensor.takes_gradient and not tensor.returns)
            yield self._output(key, rows, inputs=sent, unsent_inputs=unsent)
            first += len(tensors)

    def _output(
        self,
        key: MessageKey,
        rows: RowRange,
        *,
        layers: tuple[int, ...] = (),
        inputs: tuple[int, ...] = (),
        unsent_inputs: tuple[int, ...] = (),
    ) -> StageOutput:
        local = not self.num_sends[key]
        return StageOutput(_arrived(key) if local else key, rows, layers, inputs, unsent_inputs, local=local)


def _sends_behind(items: Sequence[Item], position: int) -> Iterator[Send]:
    while (position := position + 1) < len(items) and isinstance(item := items[position], Send):
        yield item


def _key(message: Message) -> MessageKey:
    return (message.direction, message.source, message.target, message.index, message.pipeline, message.part)


def _arrived(key: MessageKey) -> MessageKey:
    return (*key[:5], 0)
