"""Bytes that each device holds: weights and optimizer state throughout, activations and gradients over time.

Left out: outputs kept until their backward, rows of the batch, waiting messages, buffers of libraries, fragmentation. Weights count
as if the most versions were held throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.schedules.collectives import Collective, CollectiveKind, SumRows
from raypipe.schedules.ir import Op, OpKind
from raypipe.schedules.lower import Compute
from raypipe.simulation.compiled import AWAIT, COMPUTE, START, CompiledOrder
from raypipe.simulation.cost import Cost

MemoryCurve = tuple[tuple[float, int], ...]  # Steps (seconds, bytes held from then on) of one device.


def standing_bytes(cost: Cost, device: int) -> int:
    """Return the bytes that a device holds throughout: all versions of its weights, and optimizer state.

    In low precision a version is the copy alone; the weight is held once, as frozen weights are.
    """
    stages = [stage for (owner, _), stage in cost.stages.items() if owner == device]
    version_bytes = sum(stage.trained_bytes - stage.low_precision_bytes for stage in stages)
    copied_bytes = sum(2 * stage.low_precision_bytes + stage.frozen_bytes for stage in stages)
    versions = cost.weight_versions.get(device, 1.0)
    return round(version_bytes * versions) + copied_bytes + sum(stage.state_bytes for stage in stages)


def activation_bytes(cost: Cost, device: int, op: Op, share: float = 1.0) -> tuple[int, int]:
    """Return the activation bytes that an Op on a share of the rows saves at its start, and frees at its end."""
    stage = cost.stages[device, op.stage]
    saved = round(stage.saved_bytes * share)
    if stage.kept_bytes is not None and op.kind in {OpKind.FORWARD, OpKind.RECOMPUTE}:
        kept = round(min(stage.kept_bytes, stage.saved_bytes) * share)
        return (kept if op.kind is OpKind.FORWARD else saved - kept), 0
    match op.kind:
        case OpKind.FORWARD:
            return saved, 0
        case OpKind.BACKWARD:
            return 0, saved
        case OpKind.INPUT_GRADIENT:
            return 0, saved - round(stage.weight_grad_saved_bytes * share)
        case OpKind.WEIGHT_GRADIENT:
            return 0, round(stage.weight_grad_saved_bytes * share)
        case _:
            return 0, 0


def working_bytes(cost: Cost, device: int, op: Op, share: float = 1.0) -> int:
    """Return the bytes that an Op on a share of the rows needs only while it runs."""
    stage = cost.stages[device, op.stage]
    if op.kind is OpKind.INPUT_GRADIENT:
        return round(stage.input_grad_working_bytes * share)
    return 0 if op.kind.per_update else round(stage.working_bytes * share)


def memory_curves(
    order: CompiledOrder, cost: Cost, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> tuple[MemoryCurve, ...]:
    """Return the bytes that each device holds over time."""
    curves: list[MemoryCurve] = [((0.0, standing_bytes(cost, device)),) for device in range(len(cost.devices))]
    for number, device in enumerate(order.devices):
        curves[device] = tuple(_curve(order, cost, number, starts[number], ends[number]))
    return tuple(curves)


def _curve(order: CompiledOrder, cost: Cost, program: int, starts: Sequence[float], ends: Sequence[float]) -> list[tuple[float, int]]:
    device = order.devices[program]
    slot_bytes = {number: _slot_bytes(cost, device, slot) for number, (owner, slot, _) in enumerate(order.classes) if owner == device}
    gradients = _GradientBytes(cost, device, order.microbatches_per_update)
    held = standing_bytes(cost, device)
    curve = [(0.0, held)]
    slots = zip(order.computes[program], starts, ends, strict=True)
    now_s = 0.0
    for kind, number in zip(order.kinds[program], order.numbers[program], strict=True):
        if kind == COMPUTE:
            slot, start_s, now_s = next(slots)
            saved, working, freed = slot_bytes[number]
            if saved or working:
                curve.append((start_s, held + saved + working))
            change = saved - freed + gradients.after(slot)
            if working or change != saved:
                curve.append((now_s, held + change))
            held += change
        elif kind in {START, AWAIT}:
            collective = order.collectives[number]
            for_a_moment, change = gradients.started(collective) if kind == START else (0, gradients.awaited(collective))
            held += change
            if for_a_moment:
                curve.append((now_s, held + for_a_moment))
            if for_a_moment or change:
                curve.append((now_s, held))
    return curve


def _slot_bytes(cost: Cost, device: int, slot: Compute) -> tuple[int, int, int]:
    """Return bytes saved at the start, needed while running, and freed at the end."""
    shares = [end - first for first, end in slot.rows]
    activations = [activation_bytes(cost, device, op, share) for op, share in zip(slot.ops, shares, strict=True)]
    working = max(working_bytes(cost, device, op, share) for op, share in zip(slot.ops, shares, strict=True))
    return sum(saved for saved, _ in activations), working, sum(freed for _, freed in activations)


class _GradientBytes:
    """Gradients of a device's stages, and vectors of its collectives."""

    def __init__(self, cost: Cost, device: int, microbatches_per_update: int) -> None:
        self.gradient_bytes = {stage: stage_cost.gradient_bytes for (owner, stage), stage_cost in cost.stages.items() if owner == device}
        self.table_bytes = {stage: stage_cost.late_table_bytes for (owner, stage), stage_cost in cost.stages.items() if owner == device}
        self.weight_bytes = {stage: stage_cost.trained_bytes for (owner, stage), stage_cost in cost.stages.items() if owner == device}
        self.microbatches_per_update = microbatches_per_update
        self.held: set[tuple[int, int]] = set()
        """Stages and updates whose gradients exist."""
        self.late: set[tuple[int, int]] = set()
        """Stages and updates of which some rows are summed late."""

    def after(self, slot: Compute) -> int:
        change = 0
        for op in slot.ops:
            if op.kind.writes_gradient:
                key = (op.stage, op.index // self.microbatches_per_update)
                if key not in self.held:
                    self.held.add(key)
                    change += self.gradient_bytes[op.stage]
            elif op.kind is OpKind.UPDATE:
                change -= self._freed(op.stage, op.index)
        return change

    def started(self, collective: Collective) -> tuple[int, int]:
        """Return the bytes needed for a moment, and those held from then on."""
        if collective.rows is SumRows.LATE:
            self.late.add((collective.stage, collective.update))
            return 0, 0
        if len(collective.devices) == 1:
            return 0, 0  # Where one device stands for a worker, what its Ops need has the vector in it.
        # Gradients are copied into one vector, which takes their place.
        for_a_moment = self.gradient_bytes[collective.stage] // collective.num_parts if collective.kind is CollectiveKind.GRADIENTS else 0
        return for_a_moment, self.weight_bytes[collective.stage] if collective.kind is CollectiveKind.WEIGHTS else 0

    def awaited(self, collective: Collective) -> int:
        """Return the bytes that are held from then on, beyond those before."""
        if collective.rows is SumRows.LATE:
            return -self.table_bytes[collective.stage]
        if collective.kind is not CollectiveKind.WEIGHTS:
            return 0
        return -self.weight_bytes[collective.stage] - self._freed(collective.stage, collective.update)

    def _freed(self, stage: int, update: int) -> int:
        if (stage, update) not in self.held:
            return 0
        self.held.remove((stage, update))
        return self.gradient_bytes[stage] - (self.table_bytes[stage] if (stage, update) in self.late else 0)
