"""What of plan, schedule, checkpoint, configuration, model and devices must fit together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise, permutations
from typing import Any

from raypipe.actors.execution.batches import row_range
from raypipe.actors.execution.programs import check_executable
from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.cut import joined
from raypipe.artifacts.plan import Plan
from raypipe.artifacts.topology import ClusterTopology
from raypipe.cluster.node_matching import is_gpu
from raypipe.config import OptimizerConfig, OptimizerName, ScalingConfig, ScheduleConfig, TrainConfig, Transport
from raypipe.data.fields import FieldDataset, holds_fields
from raypipe.data.prepare import check_exists
from raypipe.data.tokens import TokenDataset
from raypipe.errors import ConfigError, NoLinkError, PlanError, suggestion
from raypipe.model import Model
from raypipe.schedules.collectives import Start
from raypipe.schedules.ir import Schedule
from raypipe.schedules.lower import Placement, Recv, lower
from raypipe.schedules.metrics import metrics
from raypipe.schedules.passes import one_of_repeated
from raypipe.simulation.pattern_choice import joining
from raypipe.training.run_cluster import Notice
from raypipe.training.run_folder import RunFolder

_NUM_BYTES = 256
_ROW_TOLERANCE = 1e-6
_MOST_OF_AN_UPDATE = 0.5
# Shares are read as fractions with at most this denominator: 0.3333 in a file is not a third, 1 / 3 in a program is.
_MOST_PARTS = 1000


def check_staleness(config: TrainConfig, schedule: Schedule) -> None:
    """Refuse a schedule that exceeds a configured staleness limit.

    Raises:
        ConfigError: Names the value that would admit the schedule.
    """
    limits = config.schedule.staleness
    if not limits:
        return
    for name, value in limits.exceeded_by(metrics(schedule)).items():
        raise ConfigError(
            f"schedule.{name} is {getattr(limits, name):g}, but {schedule.name!r} with {schedule.num_microbatches} microbatches an update "
            f"has {value:g}; allow {value:g}, choose another schedule, or let schedule.name be auto"
        )


def late_remedy(optimizer: OptimizerConfig, mean_delay: float) -> str:
    """Return the keys of an optimizer that bears gradients so many updates late better; nothing for one that is made for it."""
    if optimizer.lookahead or optimizer.gradient_correction:
        return ""
    if mean_delay >= _MOST_OF_AN_UPDATE:
        name = "" if optimizer.name == OptimizerName.MUON else "optimizer.name muon, "
        return f"{name}optimizer.gradient_correction 1"
    return "optimizer.name nadamw" if optimizer.name == OptimizerName.ADAMW else ""


def check_alike(topology: ClusterTopology, devices: Sequence[str]) -> None:
    """Refuse a mix of CPU slots and GPUs: they have no common transport.

    Raises:
        PlanError: Names one of each.
    """
    gpus = {is_gpu(topology.device(device)): device for device in devices}
    if len(gpus) > 1:
        raise PlanError(f"device {gpus[False]!r} is a CPU slot, {gpus[True]!r} a GPU: a run takes devices of one sort; plan for either")


def check_links(plan: Plan, transport: Transport) -> None:
    """Refuse a plan whose devices communicate over pairs that have no link in its topology.

    Sums over TCP go along the links that there are. Those over gloo and NCCL connect all members with each other.

    Raises:
        NoLinkError: Names two devices, or those of a sum, and what to do.
    """
    topology, names = plan.topology, plan.devices
    items = [(program.device, item) for program in lower(plan.schedule, plan.placement) for item in program.items]
    for target, source in sorted({(device, item.device) for device, item in items if isinstance(item, Recv)}):
        ends = names[source], names[target]
        if not (topology.reach(*ends).exists and topology.reach(*ends[::-1]).exists):
            raise NoLinkError(
                f"the plan sends from device {ends[0]!r} to device {ends[1]!r}, but its topology has no link between them both ways; "
                "add one or a route (`via`) to the topology, or plan for it anew"
            )
    for members in sorted({item.collective.devices for _, item in items if isinstance(item, Start)}):
        _check_sum(topology, [names[member] for member in members], transport)


def _check_sum(topology: ClusterTopology, members: Sequence[str], transport: Transport) -> None:
    apart = next((pair for pair in permutations(members, 2) if not topology.reach(*pair).exists), None)
    if apart is None:
        return
    on_gpus = is_gpu(topology.device(members[0]))
    if on_gpus or transport is Transport.GLOO:
        remedy = "" if on_gpus else "set scaling.transport to tcp, "
        raise NoLinkError(
            f"devices {', '.join(members)} sum over {'NCCL' if on_gpus else 'gloo'}, which connects all of them, but the topology has no "
            f"link from {apart[0]!r} to {apart[1]!r}; {remedy}add a link or a route (`via`), or plan without copies on both"
        )
    if joining(len(members), lambda one, other: topology.reach(members[one], members[other])) is None:
        raise NoLinkError(
            f"devices {', '.join(members)} sum, but the links of the topology do not join them both ways; add links or routes (`via`), "
            "or plan for it anew"
        )


def check_model(plan: Plan, model: Model) -> None:
    """Refuse a plan for other layers, edges or ties than the model has.

    Raises:
        PlanError: Names the first difference.
    """
    ours, theirs = [layer.name for layer in model.layers], [layer.name for layer in plan.profile.layers]
    remedy = "it is a plan for another model; check model.function and model.options, or profile and plan again"
    for number, (built, profiled) in enumerate(zip(ours, theirs, strict=False)):
        if built != profiled:
            raise PlanError(f"layer {number} of the model is {built!r}, that of the plan's profile {profiled!r}: {remedy}")
    if len(ours) != len(theirs):
        raise PlanError(f"the model has {len(ours)} layers, the plan's profile {len(theirs)}: {remedy}")
    different = set(model.edges()) ^ {(edge.producer, edge.consumer) for edge in plan.profile.edges()}
    if different:
        source, target = min(different)
        where = "model" if (source, target) in model.edges() else "plan's profile"
        raise PlanError(f"only in the {where} does layer {ours[source]!r} feed {ours[target]!r}: {remedy}")
    if joined(model.tied_layers()) != joined(plan.profile.ties()):
        shared = [[[ours[layer] for layer in tie] for tie in sorted(joined(ties))] for ties in (model.tied_layers(), plan.profile.ties())]
        raise PlanError(f"the layers of the model that share weights are {shared[0]}, those of the plan's profile {shared[1]}: {remedy}")


def check_runnable(schedule: Schedule, placement: Placement, microbatch_size: int) -> None:
    """Refuse an order that the executor cannot run on microbatches of this many rows.

    Raises:
        InputError: The order is not executable, or cuts a row.
    """
    check_rows(placement, microbatch_size)
    check_executable(schedule, placement)
    if not any(op.part for op, _ in schedule.ops()):
        return
    for program in lower(schedule, placement):
        if any(abs(end * microbatch_size - round(end * microbatch_size)) > _ROW_TOLERANCE for rows in program.row_ranges for end in rows):
            raise PlanError(
                f"device {program.device} works on a share of a part that is no whole rows: the order {schedule.name!r} divides "
                f"microbatches of {microbatch_size} rows; use larger microbatches, fewer parts or fewer replicas"
            )


def check_parts(schedule: Schedule, placement: Placement, microbatch_size: int) -> None:
    """Refuse an order whose parts of a microbatch are more than its rows.

    Raises:
        PlanError: A part has no row.
    """
    if not any(op.part for op, _ in schedule.ops()):
        return
    shares = {rows for program in lower(schedule, placement) for rows in program.row_ranges}
    if any(first == end for first, end in (row_range(share, microbatch_size) for share in shares)):
        raise PlanError(
            f"the order {schedule.name!r} divides microbatches into more parts than their rows, {microbatch_size}; "
            "raise schedule.microbatch_size, or choose an order with fewer parts"
        )


def least_rows(boundaries: Iterable[float], *, most: int) -> int:
    """Return the fewest rows in which shares that end at these `boundaries` (0 to 1) are whole, but at most `most`."""
    return min(math.lcm(*(Fraction(boundary).limit_denominator(_MOST_PARTS).denominator for boundary in boundaries)), most)


def check_rows(placement: Placement, num_rows: int) -> None:
    """Refuse a placement in which a device's share of a microbatch is not whole rows.

    Raises:
        PlanError: Names the nearest shares that work.
    """
    for worker, members in enumerate(placement.workers):
        if len(members) > num_rows:
            raise PlanError(
                f"worker {worker} has {len(members)} devices for microbatches of {num_rows} rows; use a microbatch_size of at least "
                f"{len(members)}, or fewer replicas"
            )
        wanted = [share * num_rows for _, share in members]
        if all(abs(rows - round(rows)) < _ROW_TOLERANCE and round(rows) for rows in wanted):
            continue
        whole = _nearest_whole(wanted, num_rows)
        parts = math.lcm(*(Fraction(share).limit_denominator(_MOST_PARTS).denominator for _, share in members))
        remedy = f"the nearest that work: {', '.join(f'{rows}/{num_rows}' for rows in whole)}"
        if parts <= _MOST_PARTS:
            remedy += f"; or a microbatch_size that is a multiple of {parts}"
        raise PlanError(
            f"worker {worker}: the shares {', '.join(f'{share:g}' for _, share in members)} of {num_rows} rows are "
            f"{', '.join(f'{rows:g}' for rows in wanted)} rows, which cannot be cut; {remedy}"
        )


def _nearest_whole(wanted: Sequence[float], num_rows: int) -> list[int]:
    spare = num_rows - len(wanted)
    # Every device has one row; the others are divided where the running sums are rounded.
    beyond = [max(rows - 1.0, 0.0) for rows in wanted]
    scale = spare / math.fsum(beyond) if any(beyond) else 0.0
    sums = [0.0]
    for rows in beyond:
        sums.append(sums[-1] + rows * scale)
    whole = [1 + round(end) - round(first) for first, end in pairwise(sums)]
    whole[-1] += num_rows - sum(whole)
    return whole


def with_plan(config: TrainConfig, plan: Plan) -> TrainConfig:
    """Return the configuration with the values that the plan decides.

    Raises:
        ConfigError: A configured value is neither its default nor the plan's.
    """
    order = plan.schedule
    schedule: dict[str, Any] = {
        "name": order.name,
        "num_microbatches": order.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "num_chunks": None,
        "num_pipelines": 0,
        "update_scope": order.update_scope,
        "max_in_flight": None,
    }
    if one_of_repeated(plan.schedule) is None:
        schedule["updates_per_window"] = order.num_updates
    scaling: dict[str, Any] = {
        "num_devices": len(plan.devices),
        "replicas": 1,
        "topology": None,
        "layers_per_stage": None,
        "calibration": None,
    }
    for section, default, decided in (("schedule", ScheduleConfig(), schedule), ("scaling", ScalingConfig(), scaling)):
        for name, value in decided.items():
            configured = getattr(getattr(config, section), name)
            if configured not in {value, getattr(default, name)}:
                has = f"the plan {config.plan} has {value}" if value else f"the plan {config.plan} decides that"
                raise ConfigError(f"{section}.{name} is {configured}, {has}; leave it out, or make a plan for it")
    return dataclasses.replace(
        config, schedule=dataclasses.replace(config.schedule, **schedule), scaling=dataclasses.replace(config.scaling, **scaling)
    )


def check_data(config: TrainConfig, model: Model, *, vocabulary_size: object) -> int:
    """Refuse a file of data that model and configuration do not fit; return how many tokens a row counts for (1 if it has none).

    Raises:
        InputError: The file cannot be read, lacks a split or a field, or has more tokens than `vocabulary_size`.
    """
    data, splits = config.data, ("train", "validation") if config.data.num_validation_microbatches else ("train",)
    check_exists(data.path, {name for layer in model.layers for name in layer.batch})
    if holds_fields(data.path):
        for split in splits:
            fields = FieldDataset(data.path, seed=0, split=split).fields
        model.check_fields(fields, where=data.path)
        for layer in model.layers:
            for name in layer.batch:
                if name not in fields:
                    near = suggestion(name, fields)
                    raise ConfigError(f"layer {layer.name!r} takes the field {name!r}{near}; {data.path} has {', '.join(fields)}")
        if config.run.sample_bytes:
            raise ConfigError(f"run.sample_bytes needs a file of tokens, {data.path} holds named fields; set it to 0")
        return 1
    if model.is_masked:
        raise ConfigError(
            f"the model predicts hidden tokens, but the targets of the token file {data.path} are the next tokens; in a "
            "configuration, put data.train: FILE.py:FUNCTION in the place of data.path, a function that returns rows whose targets (labels "
            f"of a transformers model) are the hidden tokens; in Python, give Trainer(..., batches=MaskedTokenSource({data.path!r}, ...))"
        )
    try:
        model.check_fields(("tokens", "targets"), where=data.path)
    except ConfigError as error:
        remedy = "token files are for language models: a model of Hugging Face is one with model.options.head set to causal-lm"
        raise ConfigError(f"{error}; {remedy}") from None
    for split in splits:
        tokens = TokenDataset(data.path, sequence_length=data.sequence_length, seed=0, split=split)
    if isinstance(vocabulary_size, int) and vocabulary_size < tokens.vocabulary_size:
        raise ConfigError(
            f"model.options.vocabulary_size is {vocabulary_size}, {data.path} has {tokens.vocabulary_size} different tokens; set it to that"
        )
    if model.vocabulary_size is not None and model.vocabulary_size < tokens.vocabulary_size:
        raise ConfigError(
            f"the model knows {model.vocabulary_size} tokens, {data.path} has {tokens.vocabulary_size} different ones; prepare it with the "
            "model's own tokenizer: raypipe data prepare SOURCE --tokenizer tokenizer.json"
        )
    if config.run.sample_bytes and tokens.vocabulary_size != _NUM_BYTES:
        raise ConfigError(
            f"run.sample_bytes needs tokens that are bytes, {data.path} has {tokens.vocabulary_size} different ones; set it to 0"
        )
    return data.sequence_length


def checkpoint_to_resume(folder: RunFolder, config: TrainConfig, model: Model, notice: Notice, *, may_be_done: bool) -> Checkpoint:
    """Return the newest checkpoint of a run's folder that is as it was written; tell `notice` of newer ones.

    Raises:
        FormatError: There is none.
        ConfigError: It does not fit the configuration, or has all updates already and may not be done.
    """
    checkpoint = Checkpoint.latest(folder.storage, notice=notice)
    assert checkpoint is not None, "a folder to resume from has a checkpoint"
    index, before = checkpoint.index, folder.config
    layers = tuple(layer.name for layer in model.layers)
    if index.layers != layers:
        raise ConfigError(f"{checkpoint.path} is of a model with the layers {', '.join(index.layers)}; this one has {', '.join(layers)}")
    if index.seed != config.run.seed:
        raise ConfigError(
            f"{checkpoint.path} is of a run with run.seed={index.seed}, got {config.run.seed}; the order of rows would change"
        )
    old_kind, new_kind = index.optimizer or before.optimizer.state_kind, config.optimizer.state_kind
    if old_kind != new_kind:
        is_name = not {"(", ";"} & {*old_kind, *new_kind}
        key, remedy = ("optimizer.name", f"set it to {old_kind}") if is_name else ("optimizer", "set name, options and groups as they were")
        raise ConfigError(f"{checkpoint.path} has the state of {key}={old_kind}, which {new_kind} cannot go on from; {remedy}")
    # An update's number says which rows it reads: with another number of rows, some would be skipped or read twice.
    old_rows, new_rows = index.rows_per_update or rows_per_update(before), rows_per_update(config)
    if old_rows != new_rows:
        raise ConfigError(
            f"{checkpoint.path} is of a run with {old_rows} rows an update, got {new_rows}; choose schedule.num_microbatches and "
            f"schedule.microbatch_size with the product {old_rows}"
        )
    old_size, new_size = before.schedule.microbatch_size, config.schedule.microbatch_size
    if model.loss_couples_rows and old_size != new_size:
        raise ConfigError(
            f"{checkpoint.path} is of a run with schedule.microbatch_size={old_size}, got {new_size}; the loss of the model couples the "
            f"rows of a microbatch, so that this would change its value: set it to {old_size}"
        )
    if config.data.path and before.data.sequence_length != config.data.sequence_length:
        raise ConfigError(
            f"{checkpoint.path} is of a run with data.sequence_length={before.data.sequence_length}, got {config.data.sequence_length}; "
            "the order of rows would change"
        )
    if before.data.path != config.data.path:  # the same file may have moved
        notice(f"data.path was {before.data.path} and is {config.data.path}: losses on other text do not compare")
    if index.update >= config.run.num_updates and not may_be_done:
        raise ConfigError(f"{checkpoint.path} has done {index.update} updates already; raise run.num_updates ({config.run.num_updates})")
    return checkpoint


def rows_per_update(config: TrainConfig) -> int:
    """Return the rows that an update reads, over all pipelines."""
    return config.schedule.num_microbatches * config.schedule.microbatch_size
