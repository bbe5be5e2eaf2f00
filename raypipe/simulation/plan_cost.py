"""Costs of whole plans, from a profile and a topology."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from raypipe.artifacts.cut import Cut
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, held_once, most_working_bytes
from raypipe.artifacts.topology import ClusterTopology, Device, Overheads, Path
from raypipe.communication.buckets import buckets, num_buckets
from raypipe.communication.patterns import Pattern, ring
from raypipe.communication.ways import Wiring
from raypipe.schedules.collectives import Start
from raypipe.schedules.ir import OpKind, Schedule, StageReplica
from raypipe.schedules.lower import DeviceProgram, Placement, Recv, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import recomputed_stages
from raypipe.simulation.cost import Cost, LayerCost, SharedCompute, StageCost

STATE_BYTES_PER_PARAMETER_BYTE = 3.0  # Gradients and optimizer state of AdamW in the precision of the weights.
GRADIENT_BYTES_PER_PARAMETER_BYTE = 1.0  # Gradients alone.


def equal_stages(
    schedule: Schedule,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_grad_s: float = 1.0,
    latency_s: float = 0.0,
    work: Sequence[float] = (),
) -> Cost:
    """Return the cost of stages, one device per worker, and a pure delay between any two devices.

    Stages are equal, or take `work` times as long.
    """
    works = work or (1.0,) * schedule.num_stages
    stages = [StageCost(forward_s * each, backward_s * each, weight_grad_s * each) for each in works]
    local, remote = Path(0.0, float("inf"), ()), Path(latency_s, float("inf"), ())
    return Cost(
        devices=tuple(map(str, range(schedule.num_workers))),
        stages={(worker, number): stages[number] for workers in schedule.pipelines for number, worker in enumerate(workers)},
        edge_bytes={},
        path=lambda source, target: local if source == target else remote,
    )


def plan_cost(plan: Plan, *, state_bytes_per_parameter_byte: float = STATE_BYTES_PER_PARAMETER_BYTE) -> Cost:
    """Return the cost of a plan on its own topology."""
    return layout_cost(
        profile=plan.profile,
        topology=plan.topology,
        cut=plan.cut,
        pipelines=plan.schedule.pipelines,
        placement=plan.placement,
        devices=plan.devices,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.schedule.num_microbatches,
        weight_versions=weight_versions(plan.schedule, plan.placement),
        recomputed=recomputed_stages(plan.schedule),
        state_bytes_per_parameter_byte=state_bytes_per_parameter_byte,
        stepped=stepped_shares(plan.schedule, plan.placement),
    )


def plan_wiring(plan: Plan, programs: Iterable[DeviceProgram], patterns: Mapping[tuple[int, ...], Pattern]) -> Wiring:
    """Return how what a plan's programs send goes, with these patterns of sums; where left out, a ring."""
    devices, reach = plan.devices, plan.topology.reach
    pairs: set[tuple[int, int]] = set()
    groups: set[tuple[int, ...]] = set()
    for program in programs:
        pairs |= {(item.device, program.device) for item in program.items if isinstance(item, Recv)}
        groups |= {item.collective.devices for item in program.items if isinstance(item, Start)}
    for members in groups:
        pattern = patterns.get(members) or ring(range(len(members)))
        pairs |= {(members[hop.source], members[hop.target]) for loads in pattern.loads for hop in loads if hop.source != hop.target}
    return Wiring.between(pairs, len(devices), lambda source, target: reach(devices[source], devices[target]), patterns)


def layout_cost(
    *,
    profile: ModelProfile,
    topology: ClusterTopology,
    cut: Cut,
    pipelines: Sequence[Sequence[int]],
    placement: Placement,
    devices: tuple[str, ...],
    microbatch_size: int,
    num_microbatches: int,
    weight_versions: Mapping[int, float] | None = None,
    state_bytes_per_parameter_byte: float = STATE_BYTES_PER_PARAMETER_BYTE,
    recomputed: Collection[int] = (),
    stepped: Mapping[StageReplica, float] | None = None,
    patterns: Mapping[tuple[int, ...], Pattern] | None = None,
) -> Cost:
    """Return the cost of stages placed on devices, whatever the order of Ops.

    `pipelines` has the worker of each stage, `placement` numbers devices as `devices` does, an update has `num_microbatches`, each device
    of a replica steps a part of the weights (`stepped_shares`), and of `recomputed` stages only the inputs are kept. Sums go by
    `patterns`, as `Cost` has them.
    """
    number = {name: position for position, name in enumerate(devices)}
    scale = microbatch_size / profile.microbatch_size
    edge_bytes = {ends: math.ceil(num_bytes * scale - 1e-6) for ends, num_bytes in crossing_bytes(profile, cut).items()}
    input_bytes: Counter[int] = Counter()
    for (_, target), num_bytes in edge_bytes.items():
        input_bytes[target] += num_bytes
    stages: dict[tuple[int, int], StageCost] = {}
    optimizer_bytes = state_bytes_per_parameter_byte - GRADIENT_BYTES_PER_PARAMETER_BYTE
    shared_bytes: Counter[int] = Counter()
    for tie in cut.parted_ties:
        for stage in {cut.stage_of[layer] for layer in cut.ties[tie]}:
            shared_bytes[stage] += max(profile.layers[layer].shared_bytes for layer in cut.ties[tie])
    for workers in pipelines:
        for stage, worker in enumerate(workers):
            share = (stepped or {}).get(StageReplica(worker, stage), 1.0)
            for device, _ in placement.workers[worker]:
                at = topology.device(devices[device])
                cost = _stage_cost(profile, cut.stages[stage], at, scale, num_microbatches, optimizer_bytes, share, shared_bytes[stage])
                stages[device, stage] = replace(cost, kept_bytes=input_bytes[stage]) if stage in recomputed else cost
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
        path=lambda source, target: topology.reach(devices[source], devices[target]),
        shared_compute=tuple(shared),
        weight_versions=weight_versions or {},
        overheads=topology.overheads or Overheads(),
        nodes=tuple(topology.node_of(name).name for name in devices),
        patterns=patterns or {},
    )


def layer_state_bytes(layer: LayerProfile, state_bytes_per_parameter_byte: float) -> float:
    """Return the bytes of a layer's optimizer state: as measured, else so many for each byte of its trained weights."""
    return layer.trained_bytes * state_bytes_per_parameter_byte if layer.state_bytes is None else layer.state_bytes


def stage_buckets(profile: ModelProfile, cut: Cut) -> list[int]:
    """Return in how many buckets the replicas of each stage sum its gradients."""
    held = (held_once([profile.layers[at] for at in layers]) for layers in cut.stages)
    return [num_buckets(tuple([layer.trained_bytes for layer in layers])) for layers in held]


def late_row_stages(profile: ModelProfile, cut: Cut) -> tuple[int, ...]:
    """Return the stages whose replicas may sum some rows of a looked-up weight behind others, as the profile says."""
    if not any(layer.has_late_rows for layer in profile.layers):
        return ()
    held = (held_once([profile.layers[at] for at in layers]) for layers in cut.stages)
    return tuple(stage for stage, layers in enumerate(held) if any(layer.has_late_rows for layer in _last_bucket(layers)))


def _last_bucket(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    layer_bytes = tuple([layer.trained_bytes for layer in layers])
    return [layers[at] for at in buckets(layer_bytes, num_buckets(layer_bytes))[-1]]


def plan_programs(plan: Plan) -> tuple[DeviceProgram, ...]:
    """Return the programs of a plan's devices."""
    profile, cut = plan.profile, plan.cut
    return lower(plan.schedule, plan.placement, buckets=stage_buckets(profile, cut), late_rows=late_row_stages(profile, cut))


def crossing_bytes(profile: ModelProfile, cut: Cut) -> dict[tuple[int, int], int]:
    """Return the bytes that cross each edge of the stage graph for a microbatch as profiled.

    A layer's output crosses once, however many layers of the target stage read it.
    """
    widest: dict[tuple[int, int], dict[int, int]] = {}
    stage_of = cut.stage_of
    for producer, consumer, num_bytes in profile.edges():
        ends = (stage_of[producer], stage_of[consumer])
        if ends[0] != ends[1]:
            layer_bytes = widest.setdefault(ends, {})
            layer_bytes[producer] = max(layer_bytes.get(producer, 0), num_bytes)
    return {ends: sum(layer_bytes.values()) for ends, layer_bytes in widest.items()}


def tied_bytes(profile: ModelProfile, cut: Cut) -> dict[int, int]:
    """Return the bytes of the weights that stages share, by tie of the stage graph."""
    sizes: dict[int, int] = {}
    for number in cut.parted_ties:
        tie = cut.graph.tie_of[cut.stage_of[cut.ties[number][0]]]
        sizes[tie] = sizes.get(tie, 0) + max(profile.layers[layer].shared_bytes for layer in cut.ties[number])
    return sizes


def stepped_shares(schedule: Schedule, placement: Placement) -> dict[StageReplica, float]:
    """Return which part of a stage's weights each device of a replica steps, where copies divide them; the others step all."""
    shares: dict[StageReplica, float] = {}
    stepping = {schedule.replica(op) for op in schedule.places if op.kind is OpKind.UPDATE}
    for stage in schedule.published_stages:
        owners = [replica for replica in schedule.replicas[stage] if replica in stepping]
        num_devices = sum(len(placement.workers[owner.worker]) for owner in owners)
        shares |= {replica: 1 / num_devices if replica in stepping else 0.0 for replica in schedule.replicas[stage]}
    return shares


def weight_versions(schedule: Schedule, placement: Placement) -> dict[int, float]:
    """Return the weight copies per stage that each device holds; nothing where all hold one."""
    if not schedule.weight_rule.keeps_versions:
        return {}
    held = Counter(holder.worker for holder in schedule.first_pipeline)
    copies = metrics(schedule).weight_copies
    return {
        device: copies[worker] / held[worker] for worker, members in enumerate(placement.workers) if held[worker] for device, _ in members
    }


def _slowdown(times: LayerTimes, layer: LayerProfile) -> float:
    # Profiles have no optimizer's seconds per kind of device: they are scaled as those of the layer.
    profiled_s = layer.forward_s + layer.backward_s
    return (times.forward_s + times.backward_s) / profiled_s if profiled_s else 1.0


def _stage_cost(
    profile: ModelProfile,
    layers: tuple[int, ...],
    device: Device,
    scale: float,
    num_microbatches: int,
    state_bytes_per_parameter_byte: float,
    stepped_share: float,
    shared_bytes: int,
) -> StageCost:
    profiles = [profile.layers[layer] for layer in layers]
    held = held_once(profiles)
    trained_bytes = sum(layer.trained_bytes for layer in held)
    # Weights that stages share are stepped by all who step anything.
    of_all = min(shared_bytes / trained_bytes, 1.0) if trained_bytes else 0.0
    stepped = stepped_share + (1 - stepped_share) * of_all if stepped_share else 0.0
    profiled, times, factor = profile.for_kind(device.kind), profile.on_rows(device.kind, scale), 1 / device.speed
    seconds = LayerTimes.of(times[layer] for layer in layers)
    return StageCost(
        forward_s=seconds.forward_s * factor,
        backward_s=seconds.backward_s * factor,
        weight_grad_s=seconds.weight_grad_s * factor,
        split_s=(seconds.split_s or 0.0) * factor,
        fixed_share=seconds.fixed_share or 0.0,
        update_s=sum((layer.update_s or 0.0) * _slowdown(profiled[number], layer) for number, layer in zip(layers, held, strict=True))
        * stepped
        / device.speed,
        saved_bytes=round(sum(layer.saved_bytes for layer in profiles) * scale),
        weight_grad_saved_bytes=round(
            sum(layer.saved_bytes if layer.weight_grad_saved_bytes is None else layer.weight_grad_saved_bytes for layer in profiles) * scale
        ),
        parameter_bytes=sum(layer.parameter_bytes for layer in held),
        frozen_bytes=sum(layer.frozen_bytes or 0 for layer in held),
        state_bytes=round(sum(layer_state_bytes(layer, state_bytes_per_parameter_byte) for layer in held) * stepped),
        low_precision_bytes=sum(layer.low_precision_bytes or 0 for layer in held),
        gradient_bytes=round(trained_bytes * GRADIENT_BYTES_PER_PARAMETER_BYTE),
        untouched_bytes=sum(layer.untouched_bytes(num_microbatches * scale) for layer in held),
        late_bytes=sum(layer.late_bytes(num_microbatches * scale) for layer in _last_bucket(held)),
        late_table_bytes=sum(layer.looked_up_bytes or 0 for layer in _last_bucket(held)),
        shared_bytes=min(shared_bytes, trained_bytes),
        working_bytes=round(most_working_bytes(profiles) * scale),
        # Autograd keeps the whole graph while the gradients from which W starts pile up.
        input_grad_working_bytes=round(sum(layer.input_grad_working_bytes or 0 for layer in profiles) * scale),
        layers=tuple(
            LayerCost(
                layer.trained_bytes,
                layer.untouched_bytes(num_microbatches * scale),
                times[number].backward_s * factor,
                times[number].weight_grad_s * factor,
            )
            for number, layer in zip(layers, held, strict=True)
        ),
    )
