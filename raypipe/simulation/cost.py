"""The one place where Ops, messages and collectives get seconds and bytes.

What it leaves out: contention for memory bandwidth, kernel launch overheads, links that a ring all-reduce keeps busy for
point-to-point traffic, and the time that a device needs to hand a message over.

Of memory: what a stage passes on, which is held until its backward though the stages behind it have a copy; rows of the batch; messages
that wait in a sender or arrive early, and the rings of shared memory; buffers of libraries; holes that the C library keeps. Copies of the
weights are counted as if the most of them were held throughout, and a layer that keeps its output counts it beside the next one's input.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, held_once, most_working_bytes
from raypipe.artifacts.topology import ClusterTopology, Device, Overheads, Path
from raypipe.schedules.ir import Holder, Op, OpKind, Schedule
from raypipe.schedules.lower import Collective, CollectiveKind, Message, Placement
from raypipe.schedules.passes import recomputed_stages
from raypipe.schedules.validate import facts

STATE_BYTES_PER_PARAMETER_BYTE = 3.0
"""Of gradients and optimizer state: AdamW in the precision of the weights."""
GRADIENT_BYTES_PER_PARAMETER_BYTE = 1.0
"""Of gradients alone."""


@dataclass(frozen=True)
class StageCost:
    """What one stage costs on one device, for one whole microbatch.

    Attributes:
        forward_s: seconds of F and of R.
        backward_s: seconds of B.
        weight_grad_s: seconds of W; I takes the rest of the backward.
        update_s: seconds of U.
        saved_bytes: held from F to the end of B, or of I where the backward is split.
        weight_grad_saved_bytes: of these, held on until the end of W.
        parameter_bytes: the weights as the optimizer steps them.
        state_bytes: optimizer state, held throughout.
        low_precision_bytes: copies of weights, half as long as these, that one version computes with in place of them.
        kept_bytes: of the saved ones, held from F to R where the forward is run again; `None` where it is not.
        gradient_bytes: gradients of the weights, held from the first backward of an update to its U.
        working_bytes: beyond the saved ones, held while F, B, W or R run.
        input_grad_working_bytes: likewise while I runs.
        frozen_bytes: of the weights, those that are not trained.
    """

    forward_s: float
    backward_s: float
    weight_grad_s: float
    update_s: float = 0.0
    saved_bytes: int = 0
    weight_grad_saved_bytes: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0
    low_precision_bytes: int = 0
    kept_bytes: int | None = None
    gradient_bytes: int = 0
    working_bytes: int = 0
    input_grad_working_bytes: int = 0
    frozen_bytes: int = 0

    @property
    def trained_bytes(self) -> int:
        """The weights that the optimizer steps: what copies of a stage sum and publish."""
        return self.parameter_bytes - self.frozen_bytes


@dataclass(frozen=True)
class SharedCompute:
    """Devices that share cores: while more of them compute than there are cores, each is slowed in proportion.

    Attributes:
        devices: their numbers.
        cores: how many may compute at full speed.
    """

    devices: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of everything in lowered programs.

    Attributes:
        devices: names, by number.
        stages: by (device, stage).
        edge_bytes: bytes of a whole microbatch's tensors by edge (source, target) of the stage graph; a gradient has as
            many as its activation. Edges left out carry nothing.
        path: the way from one device to another.
        shared_compute: groups of devices that share cores; devices in none have their own.
        tied_bytes: by tie of the stage graph, bytes of the weights that its stages share; none where left out.
        weight_versions: by device, the most versions of the weights held at once, over the stages held; 1 where left out.
        together: seconds of a slot whose Ops overlap, from the seconds of each; their sum by default.
        overheads: seconds that the devices spend besides; none by default.
    """

    devices: tuple[str, ...]
    stages: Mapping[tuple[int, int], StageCost]
    edge_bytes: Mapping[tuple[int, int], int]
    path: Callable[[int, int], Path]
    shared_compute: tuple[SharedCompute, ...] = ()
    tied_bytes: Mapping[int, int] = field(default_factory=dict)
    weight_versions: Mapping[int, float] = field(default_factory=dict)
    together: Callable[[tuple[float, ...]], float] = sum
    overheads: Overheads = field(default_factory=Overheads)

    def compute_s(self, device: int, ops: tuple[Op, ...], shares: tuple[float, ...] = ()) -> float:
        """Seconds of one slot on a device, if it computes alone.

        Args:
            device: its number.
            ops: of the slot.
            shares: of the microbatch's rows that each Op works on; all of them where left out.
        """
        times = tuple(
            self._op_s(self.stages[device, op.stage], op.kind, share) for op, share in zip(ops, shares or (1.0,) * len(ops), strict=True)
        )
        own_s = times[0] if len(times) == 1 else self.together(times)
        return own_s + math.fsum(self._overhead_s(op.kind) for op in ops)

    def _overhead_s(self, kind: OpKind) -> float:
        match kind:
            case OpKind.FORWARD | OpKind.RECOMPUTE:
                return self.overheads.forward_s
            case OpKind.BACKWARD:
                return self.overheads.backward_s
            case OpKind.INPUT_GRADIENT:
                return self.overheads.input_grad_s
            case OpKind.WEIGHT_GRADIENT:
                return self.overheads.weight_grad_s
            case _:
                return 0.0

    @staticmethod
    def _op_s(stage: StageCost, kind: OpKind, share: float) -> float:
        match kind:
            case OpKind.FORWARD | OpKind.RECOMPUTE:
                return stage.forward_s * share
            case OpKind.BACKWARD:
                return stage.backward_s * share
            case OpKind.INPUT_GRADIENT:
                return (stage.backward_s - stage.weight_grad_s) * share
            case OpKind.WEIGHT_GRADIENT:
                return stage.weight_grad_s * share
            case OpKind.UPDATE:
                return stage.update_s
            case _:
                return 0.0

    def message_bytes(self, message: Message) -> int:
        """Bytes of a message."""
        edge = (min(message.source, message.target), max(message.source, message.target))
        # Part of a byte is one; what lies below a millionth is the rounding of shares.
        return math.ceil(self.edge_bytes.get(edge, 0) * (message.rows[1] - message.rows[0]) - 1e-6)

    def collective_bytes(self, collective: Collective) -> int:
        """Bytes that each member brings."""
        if collective.kind.is_norm:
            return _NORM_BYTES
        if collective.kind is CollectiveKind.TIED:
            return self.tied_bytes.get(collective.stage, 0)
        return self.stages[collective.devices[0], collective.stage].trained_bytes

    def collective_s(self, collective: Collective) -> float:
        """Seconds from the last member's start to the end.

        A norm, or the sum of a tie whose size is not known, is a few bytes that every member sends to every other: one latency. Other
        sums and publications go round a ring, 2 (r-1) steps of 1/r of the bytes over its slowest link (Patarasuk and Yuan, 2009); what
        several links of the ring pass through, they share.
        """
        members = collective.devices
        pairs = list(zip(members, members[1:] + members[:1], strict=True))
        of_no_size = collective.kind is CollectiveKind.TIED and not self.tied_bytes.get(collective.stage)
        if collective.kind.is_norm or of_no_size:
            return max((self.path(source, target).latency_s for source in members for target in members if source != target), default=0.0)
        steps, share = 2 * (len(members) - 1), self.collective_bytes(collective) / len(members)
        return steps * max(latency_s + share * s_per_byte for latency_s, s_per_byte in ring([self.path(*pair) for pair in pairs]))

    def memory_step_bytes(self, device: int, op: Op, share: float = 1.0) -> tuple[int, int]:
        """Bytes that an Op takes at its start and frees at its end."""
        stage = self.stages[device, op.stage]
        if stage.kept_bytes is not None and op.kind in {OpKind.FORWARD, OpKind.RECOMPUTE}:
            kept = round(min(stage.kept_bytes, stage.saved_bytes) * share)
            return (kept if op.kind is OpKind.FORWARD else round(stage.saved_bytes * share) - kept), 0
        match op.kind:
            case OpKind.FORWARD:
                return round(stage.saved_bytes * share), 0
            case OpKind.BACKWARD:
                return 0, round(stage.saved_bytes * share)
            case OpKind.INPUT_GRADIENT:
                return 0, round(stage.saved_bytes * share) - round(stage.weight_grad_saved_bytes * share)
            case OpKind.WEIGHT_GRADIENT:
                return 0, round(stage.weight_grad_saved_bytes * share)
            case _:
                return 0, 0

    def working_bytes(self, device: int, op: Op, share: float = 1.0) -> int:
        """Bytes that an Op needs while it runs, beyond those of `memory_step_bytes`."""
        stage = self.stages[device, op.stage]
        if op.kind is OpKind.INPUT_GRADIENT:
            return round(stage.input_grad_working_bytes * share)
        return 0 if op.kind.per_update else round(stage.working_bytes * share)

    def standing_bytes(self, device: int) -> int:
        """Bytes held throughout: weights in as many versions as the schedule keeps, and optimizer state.

        Of a weight that is computed with in low precision, a version is the copy alone; the weight itself is held once, as frozen ones are.
        """
        held = [stage for (at, _), stage in self.stages.items() if at == device]
        version_bytes = sum(stage.trained_bytes - stage.low_precision_bytes for stage in held)
        copied_bytes = sum(2 * stage.low_precision_bytes + stage.frozen_bytes for stage in held)
        versions = self.weight_versions.get(device, 1.0)
        return round(version_bytes * versions) + copied_bytes + sum(stage.state_bytes for stage in held)


_NORM_BYTES = 8


def equal_stages(
    schedule: Schedule, *, forward_s: float = 1.0, backward_s: float = 2.0, weight_grad_s: float = 1.0, latency_s: float = 0.0
) -> Cost:
    """The cost of a schedule's shape alone: equal stages, one device a worker, and a pure delay between any two devices."""
    stage = StageCost(forward_s, backward_s, weight_grad_s)
    here, away = Path(0.0, float("inf"), ()), Path(latency_s, float("inf"), ())
    return Cost(
        devices=tuple(map(str, range(schedule.num_workers))),
        stages={(worker, number): stage for workers in schedule.pipelines for number, worker in enumerate(workers)},
        edge_bytes={},
        path=lambda source, target: here if source == target else away,
    )


def plan_cost(plan: Plan, *, state_bytes_per_parameter_byte: float = STATE_BYTES_PER_PARAMETER_BYTE) -> Cost:
    """The cost of a plan on its own topology.

    Args:
        plan: what runs where.
        state_bytes_per_parameter_byte: gradients and optimizer state.
    """
    return layout_cost(
        profile=plan.profile,
        topology=plan.topology,
        cut=plan.cut,
        pipelines=plan.schedule.pipelines,
        placement=plan.placement,
        devices=plan.devices,
        microbatch_size=plan.microbatch_size,
        weight_versions=weight_versions(plan.schedule, plan.placement),
        recomputed=recomputed_stages(plan.schedule),
        state_bytes_per_parameter_byte=state_bytes_per_parameter_byte,
        published=published_copies(plan.schedule),
    )


def layout_cost(
    *,
    profile: ModelProfile,
    topology: ClusterTopology,
    cut: Cut,
    pipelines: Sequence[Sequence[int]],
    placement: Placement,
    devices: tuple[str, ...],
    microbatch_size: int,
    weight_versions: Mapping[int, float] | None = None,
    state_bytes_per_parameter_byte: float = STATE_BYTES_PER_PARAMETER_BYTE,
    recomputed: Collection[int] = (),
    published: Collection[Holder] = (),
) -> Cost:
    """The cost of stages laid onto devices, whatever the order.

    Args:
        profile: what layers cost.
        topology: devices and links.
        cut: the layers of each stage.
        pipelines: for each laying, the worker of each stage.
        placement: the devices of each worker, by number.
        devices: their names, by number.
        microbatch_size: rows of a microbatch.
        weight_versions: as of `Cost`.
        state_bytes_per_parameter_byte: gradients and optimizer state.
        recomputed: stages whose forwards are run again, so that until then only their inputs are kept.
        published: copies of stages that another copy updates, so that they hold no optimizer state.
    """
    number = {name: position for position, name in enumerate(devices)}
    scale = microbatch_size / profile.microbatch_size
    edge_bytes = {ends: math.ceil(num_bytes * scale - 1e-6) for ends, num_bytes in crossing_bytes(profile, cut).items()}
    stages: dict[tuple[int, int], StageCost] = {}
    for workers in pipelines:
        for stage, worker in enumerate(workers):
            for device, _ in placement.workers[worker]:
                found = topology.device(devices[device])
                of_optimizer = state_bytes_per_parameter_byte - GRADIENT_BYTES_PER_PARAMETER_BYTE
                state = 0.0 if Holder(worker, stage) in published else of_optimizer
                of_stage = _stage_cost(profile, cut.stages[stage], found, scale, state)
                if stage in recomputed:
                    inputs = sum(num_bytes for (_, target), num_bytes in edge_bytes.items() if target == stage)
                    of_stage = replace(of_stage, kept_bytes=inputs)
                stages[device, stage] = of_stage
    shared = []
    for node in topology.nodes:
        if node.cores is None:
            continue
        members = tuple(number[device.name] for device in node.devices if device.name in number)
        if len(members) > node.cores:
            shared.append(SharedCompute(members, node.cores))
    return Cost(
        devices=devices,
        stages=stages,
        edge_bytes=edge_bytes,
        tied_bytes=tied_bytes(profile, cut),
        path=lambda source, target: topology.path(devices[source], devices[target]),
        shared_compute=tuple(shared),
        weight_versions=weight_versions or {},
        overheads=topology.overheads or Overheads(),
    )


def crossing_bytes(profile: ModelProfile, cut: Cut) -> dict[tuple[int, int], int]:
    """Bytes that cross each edge of the stage graph for a microbatch as profiled.

    A layer's output crosses once, however many layers of the target take it.
    """
    widest: dict[tuple[int, int], dict[int, int]] = {}
    stage_of = cut.stage_of
    for producer, consumer, num_bytes in profile.edges():
        ends = (stage_of[producer], stage_of[consumer])
        if ends[0] != ends[1]:
            of_layers = widest.setdefault(ends, {})
            of_layers[producer] = max(of_layers.get(producer, 0), num_bytes)
    return {ends: sum(of_layers.values()) for ends, of_layers in widest.items()}


def tied_bytes(profile: ModelProfile, cut: Cut) -> dict[int, int]:
    """By tie of the stage graph of a cut, the bytes of the weights that its stages share with each other."""
    found: dict[int, int] = {}
    for number in cut.parted_ties:
        tie = cut.graph.tie_of[cut.stage_of[cut.ties[number][0]]]
        found[tie] = found.get(tie, 0) + max(profile.layers[layer].shared_bytes for layer in cut.ties[number])
    return found


def published_copies(schedule: Schedule) -> frozenset[Holder]:
    """The copies of stages that are given new weights and make none."""
    made: dict[OpKind, set[Holder]] = {OpKind.UPDATE: set(), OpKind.PUBLISH: set()}
    for op, _ in schedule.ops():
        if op.kind in made:
            made[op.kind].add(schedule.holder(op))
    return frozenset(made[OpKind.PUBLISH] - made[OpKind.UPDATE])


def weight_versions(schedule: Schedule, placement: Placement) -> dict[int, float]:
    """For each device, weight copies over stages held; nothing where all hold one version."""
    if not schedule.weight_rule.keeps_versions:
        return {}
    held = Counter(holder.worker for holder in schedule.holders)
    copies = facts(schedule).weight_copies
    return {
        device: copies[worker] / held[worker] for worker, members in enumerate(placement.workers) if held[worker] for device, _ in members
    }


def ring(paths: Sequence[Path]) -> set[tuple[float, float]]:
    """Latency, in seconds, and seconds of a byte of each different link of a ring whose members all send at the same time.

    Args:
        paths: from each member to the next.
    """
    uses = Counter(name for path in paths for name, _ in path.resources)
    return {
        (path.latency_s, max((uses[name] / bandwidth for name, bandwidth in path.resources), default=1 / path.bandwidth_bytes_per_s))
        for path in paths
    }


def _times_as_long(times: LayerTimes, layer: LayerProfile) -> float:
    """How many times as long as the profile's a kind of device takes for a layer: so long its optimizer takes, too, which is not kept."""
    first_s = layer.forward_s + layer.backward_s
    return (times.forward_s + times.backward_s) / first_s if first_s else 1.0


def _stage_cost(
    profile: ModelProfile, layers: tuple[int, ...], device: Device, scale: float, state_bytes_per_parameter_byte: float
) -> StageCost:
    times = profile.for_kind(device.kind)
    profiles = [profile.layers[layer] for layer in layers]
    held = held_once(profiles)
    trained_bytes = sum(layer.trained_bytes for layer in held)
    factor = scale / device.speed
    return StageCost(
        forward_s=sum(times[layer].forward_s for layer in layers) * factor,
        backward_s=sum(times[layer].backward_s for layer in layers) * factor,
        weight_grad_s=sum(times[layer].weight_grad_s for layer in layers) * factor,
        update_s=sum((layer.update_s or 0.0) * _times_as_long(times[number], layer) for number, layer in zip(layers, held, strict=True))
        / device.speed,
        saved_bytes=round(sum(layer.saved_bytes for layer in profiles) * scale),
        weight_grad_saved_bytes=round(
            sum(layer.saved_bytes if layer.weight_grad_saved_bytes is None else layer.weight_grad_saved_bytes for layer in profiles) * scale
        ),
        parameter_bytes=sum(layer.parameter_bytes for layer in held),
        frozen_bytes=sum(layer.frozen_bytes or 0 for layer in held),
        state_bytes=round(trained_bytes * state_bytes_per_parameter_byte),
        low_precision_bytes=sum(layer.low_precision_bytes or 0 for layer in held),
        gradient_bytes=round(trained_bytes * GRADIENT_BYTES_PER_PARAMETER_BYTE),
        working_bytes=round(most_working_bytes(profiles) * scale),
        # Autograd keeps the whole graph while the gradients from which W starts pile up.
        input_grad_working_bytes=round(sum(layer.input_grad_working_bytes or 0 for layer in profiles) * scale),
    )
