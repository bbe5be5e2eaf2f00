"""Measures the layers of a model on devices of a cluster, and makes a `ModelProfile` or the costs of stages of the measurements.

A stage actor measures layer by layer. Kinds of devices are measured one after the other, as they may share a machine or a network.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from raypipe.actors.execution.batches import TokenSource
from raypipe.actors.measure.layers import Effort, LayerMeasurement
from raypipe.actors.orders import BatchFunction, ModelFunction
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, NamedEdge
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import cluster_nodes, find_slots
from raypipe.cluster.node_matching import is_cpu_kind
from raypipe.cluster.session import session
from raypipe.cluster.slots import NODE_LABEL, ClusterNode, DeviceSlot, nodes_called, resource_text, resources_per_device
from raypipe.config import DataConfig, ScalingConfig, TrainConfig
from raypipe.data.tokens import TokenDataset
from raypipe.errors import ConfigError, PlanError
from raypipe.model import Model
from raypipe.simulation.cost import StageCost
from raypipe.user_code import make_model

DEFAULT_KIND = "cpu"
CAREFUL = Effort(passes=3)
"""Default effort: many plans are made from one profile."""
_KIND = re.compile(r"([^\s=,]+)(?:=([^\s=,]+))?")


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device, and a node that has one.

    Attributes:
        name: Name in topologies.
        node: Label, address or host name of the node; `None` for the cluster's first.
    """

    name: str
    node: str | None = None

    @classmethod
    def of(cls, text: str) -> DeviceKind:
        """Read a kind from `KIND` or `KIND=NODE`, such as `cpu-slow=10.0.0.3`.

        Raises:
            ConfigError: The text has another form.
        """
        matched = _KIND.fullmatch(text)
        if matched is None:
            raise ConfigError(f"device kind {text!r}: expected KIND or KIND=NODE without spaces, such as cpu-slow=10.0.0.3")
        name, node = matched.groups()
        return cls(name, node)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, not a CPU slot."""
        return not is_cpu_kind(self.name)


@dataclass(frozen=True)
class Measured:
    """The layers of a model as measured on one kind of device.

    Attributes:
        kind: Name of the kind.
        device: Name of the device.
        times: Times of each layer.
        spreads: For each layer, half the distance between the quartiles of forward plus backward over their median; the largest of
            several devices.
    """

    kind: str
    device: str
    times: tuple[LayerTimes, ...]
    spreads: tuple[float, ...]

    def merged_spreads(self, members: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return the spreads of merged layers: means of their members' spreads, weighted by time, which are upper bounds."""
        seconds = [times.forward_s + times.backward_s for times in self.times]
        return tuple(
            sum(self.spreads[layer] * seconds[layer] for layer in group) / (sum(seconds[layer] for layer in group) or 1.0)
            for group in members
        )


@dataclass(frozen=True)
class Profiled:
    """A profile with the times of the first kind of device, and what was measured on each kind."""

    profile: ModelProfile
    kinds: tuple[Measured, ...]


def profile_model(
    config: TrainConfig,
    *,
    kinds: Sequence[DeviceKind] = (),
    effort: Effort = CAREFUL,
    num_at_once: int = 1,
    notice: Callable[[str], None] = lambda _: None,
    batches: BatchFunction | None = None,
) -> Profiled:
    """Measure the model of a training configuration on devices of its cluster, at its microbatch size.

    Args:
        config: Configuration of the run.
        kinds: Kinds of devices to measure; without any, the times of the cluster's first device hold for all kinds.
        effort: Number of repetitions.
        num_at_once: Devices of a node that measure at the same time, as they share memory and cores in training; times are means.
        notice: Called with each line for the user.
        batches: Function that opens the rows of a split, instead of the configured tokens.

    Raises:
        InputError: Configuration, model, data and cluster do not fit together.
        RunError: The cluster cannot be reached, or a measurement failed.
    """
    names = [kind.name for kind in kinds]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"the device kind {', '.join(sorted(repeated))} is given twice; name one device of each kind")
    make = partial(make_model, config.model.function, config.model.options, compile_layers=config.model.compile)
    model = make()
    rows = batches or _tokens(config.data, seed=config.run.seed, microbatch_size=config.schedule.microbatch_size)
    scaling = dataclasses.replace(config.scaling, num_devices=num_at_once)
    by_kind: dict[DeviceKind, tuple[DeviceSlot, list[list[LayerMeasurement]]]] = {}
    with session(config.cluster, num_devices=num_at_once, cpus_per_device=scaling.cpus_per_device):
        # A kind without a slot is refused before any is measured.
        default = DeviceKind("gpu" if scaling.use_gpu else DEFAULT_KIND)
        slots = {kind: _slots(kind, dataclasses.replace(scaling, use_gpu=kind.is_gpu)) for kind in kinds or (default,)}
        for kind, of_kind in slots.items():
            notice(f"measuring {len(model.layers)} layers on {', '.join(slot.name for slot in of_kind)} ({kind.name})")
            by_kind[kind] = of_kind[0], _measure(config, scaling, of_kind, make, rows, effort)
    first, *_ = by_kind.values()
    profile = model_profile(first[1], model, name=config.model.function, microbatch_size=config.schedule.microbatch_size)
    measured = tuple(
        Measured(kind.name, slot.name, _times(of_devices), _spreads(of_devices)) for kind, (slot, of_devices) in by_kind.items()
    )
    if kinds:
        profile = dataclasses.replace(profile, device_kinds={of_kind.kind: of_kind.times for of_kind in measured})
    return Profiled(profile, measured)


def _spreads(measured: Sequence[Sequence[LayerMeasurement]]) -> tuple[float, ...]:
    return tuple(max(layer.spread for layer in of_devices) for of_devices in zip(*measured, strict=True))


def _tokens(data: DataConfig, *, seed: int, microbatch_size: int) -> TokenSource:
    # Opened once here: what is wrong with the file shows before actors start.
    TokenDataset(data.file, sequence_length=data.sequence_length, seed=seed, split="train")
    return TokenSource(path=data.file, sequence_length=data.sequence_length, seed=seed, microbatch_size=microbatch_size)


def _slots(kind: DeviceKind, scaling: ScalingConfig) -> list[DeviceSlot]:
    if kind.node is None:
        return _first_with_room(kind, scaling)
    nodes = cluster_nodes()
    there = "; ".join(str(node) for node in nodes if node.alive)
    matches = nodes_called(kind.node, nodes)
    if len(matches) != 1:
        what = f"{len(matches)} nodes are" if matches else "no living node is"
        raise PlanError(
            f"device kind {kind.name!r}: {what} called {kind.node!r}; give a node's label {NODE_LABEL}, its address or its host name. "
            f"The nodes: {there}"
        )
    (node,) = matches
    if not _has_room(node, scaling):
        raise PlanError(_lacking(kind, scaling, f"{node} has fewer"))
    return _slots_of(node, scaling)


def _first_with_room(kind: DeviceKind, scaling: ScalingConfig) -> list[DeviceSlot]:
    slots = find_slots(scaling)
    if len({slot.node for slot in slots}) == 1:
        return slots
    # The first node has too few.
    roomy = [node for node in cluster_nodes() if node.alive and _has_room(node, scaling)]
    if not roomy:
        raise PlanError(_lacking(kind, scaling, "no node has as many"))
    return _slots_of(min(roomy, key=lambda node: (node.address, node.node_id)), scaling)


def _has_room(node: ClusterNode, scaling: ScalingConfig) -> bool:
    return node.room(resources_per_device(scaling)) >= scaling.num_devices


def _slots_of(node: ClusterNode, scaling: ScalingConfig) -> list[DeviceSlot]:
    return node.slots(scaling.num_devices, num_gpus=resources_per_device(scaling).get("GPU", 0.0))


def _lacking(kind: DeviceKind, scaling: ScalingConfig, what: str) -> str:
    needs = resource_text(resources_per_device(scaling))
    return (
        f"device kind {kind.name!r}: {scaling.num_devices} devices of {needs} are to measure on one node, {what}; lower "
        "scaling.cpus_per_device, or how many measure at once"
    )


def _measure(
    config: TrainConfig, scaling: ScalingConfig, slots: Sequence[DeviceSlot], model: ModelFunction, batches: BatchFunction, effort: Effort
) -> list[list[LayerMeasurement]]:
    run = f"profile-{time.time_ns() // 1_000_000:x}"
    stages: list[tuple[int, ...]] = [() for _ in slots]
    with Coordinator(run=run, slots=slots, stages=stages, scaling=scaling, cluster=config.cluster) as coordinator:
        coordinator.wait_until_up()
        return coordinator.measure(
            model,
            batches,
            optimizer=config.optimizer,
            seed=config.run.seed,
            num_devices=len(slots),
            effort=effort,
            precision=config.model.precision,
        )


def _times(measured: Sequence[Sequence[LayerMeasurement]]) -> tuple[LayerTimes, ...]:
    return tuple(
        LayerTimes(
            forward_s=fmean(layer.forward_s for layer in of_devices),
            backward_s=fmean(layer.backward_s for layer in of_devices),
            weight_grad_s=fmean(layer.weight_grad_s for layer in of_devices),
        )
        for of_devices in zip(*measured, strict=True)
    )


def model_profile(measured: Sequence[Sequence[LayerMeasurement]], model: Model, *, name: str, microbatch_size: int) -> ModelProfile:
    """Return the profile of a model from the costs of its layers, by device and layer; times are means of the devices.

    Args:
        measured: Costs, by device and layer.
        model: Description of the model.
        name: Name of the profile.
        microbatch_size: Rows of the measured microbatch.
    """
    tied = _tied(model)
    layers = tuple(
        LayerProfile(
            name=of_devices[0].name,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            weight_grad_s=times.weight_grad_s,
            output_bytes=of_devices[0].output_bytes,
            saved_bytes=of_devices[0].saved_bytes,
            parameter_bytes=of_devices[0].parameter_bytes,
            weight_grad_saved_bytes=of_devices[0].weight_grad_saved_bytes,
            tied=tied.get(of_devices[0].name),
            tied_bytes=of_devices[0].tied_bytes if of_devices[0].name in tied else None,
            update_s=fmean(layer.update_s for layer in of_devices),
            low_precision_bytes=of_devices[0].low_precision_bytes or None,
            working_bytes=of_devices[0].working_bytes,
            input_grad_working_bytes=of_devices[0].input_grad_working_bytes,
            frozen_bytes=of_devices[0].frozen_bytes or None,
        )
        for times, of_devices in zip(_times(measured), zip(*measured, strict=True), strict=True)
    )
    edges = tuple(dict.fromkeys(model.edges()))  # a layer may take a tensor twice
    chain = tuple((index, index + 1) for index in range(len(layers) - 1))
    named = None
    if edges != chain:
        named = tuple(NamedEdge(producer=layers[source].name, consumer=layers[target].name) for source, target in edges)
    return ModelProfile(name=name, microbatch_size=microbatch_size, layers=layers, named_edges=named)


def _tied(model: Model) -> dict[str, str]:
    """Return a name of the shared weights for each layer that shares some; ties that meet in a layer have one name together."""
    names: dict[str, str] = {}
    for tie in model.ties:
        if len(layers := dict.fromkeys(layer for layer, _ in tie)) > 1:
            texts = dict.fromkeys(names[layer] for layer in layers if layer in names)
            joined = "+".join([*texts, ".".join(tie[0])])
            members = [layer for layer, text in names.items() if text in texts]
            names |= dict.fromkeys((*members, *layers), joined)
    return names


def stage_costs(measured: Sequence[LayerMeasurement], cut: Cut) -> list[StageCost]:
    """Return the costs of a cut's stages in seconds, from those of the layers on one device."""
    return [
        StageCost(
            forward_s=sum(measured[layer].forward_s for layer in layers),
            backward_s=sum(measured[layer].backward_s for layer in layers),
            weight_grad_s=sum(measured[layer].weight_grad_s for layer in layers),
            update_s=sum(measured[layer].update_s for layer in layers),
        )
        for layers in cut.stages
    ]
