"""Measures the layers of a model on devices of a cluster, and makes a `ModelProfile` or the costs of stages of the measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

from raypipe.actors.data.source import DataSource
from raypipe.actors.execution.batches import FileSource
from raypipe.actors.measure.layer_costs import Effort, LayerMeasurement
from raypipe.actors.orders import BatchFunction, ModelFunction
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile, NamedEdge
from raypipe.cluster.coordinator import Coordinator
from raypipe.cluster.discovery import cluster_nodes, find_slots
from raypipe.cluster.node_matching import is_cpu_kind
from raypipe.cluster.row_readers import RowReaders
from raypipe.cluster.session import session
from raypipe.cluster.slots import NODE_LABEL, DeviceSlot, nodes_called, resource_text, resources_per_device
from raypipe.config import ScalingConfig, TrainConfig
from raypipe.data.prepare import check_exists
from raypipe.errors import ConfigError, PlanError
from raypipe.model import Model
from raypipe.profiling.late_rows import with_rows_of
from raypipe.simulation.cost import StageCost
from raypipe.user_code import located, make_model

DEFAULT_KIND = "cpu"
CAREFUL = Effort(passes=3)
"""Default effort: many plans are made from one profile."""
_KIND = re.compile(r"([^\s=,]+)(?:=([^\s=,]+))?")


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device, and the label, address or host name of a node that has one; `None` for the cluster's first node."""

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
        return cls(*matched.groups())

    @property
    def is_gpu(self) -> bool:
        """Whether devices of this kind are GPUs."""
        return not is_cpu_kind(self.name)


@dataclass(frozen=True)
class Measured:
    """The layers of a model as measured on one kind of device.

    Attributes:
        device: Name of the first device that measured.
        times: Times of each layer.
        spreads: For each layer, half the interquartile range of forward plus backward over their median; the largest of several devices.
    """

    kind: str
    device: str
    times: tuple[LayerTimes, ...]
    spreads: tuple[float, ...]

    def merged_spreads(self, members: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return upper bounds of the spreads of merged layers: means of their members' spreads, weighted by time."""
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
    """Measure a model at its microbatch size on one kind of device after the other, as they may share a machine or a network.

    Without kinds, the times of the cluster's first device hold for all. `num_at_once` devices of a node measure at the same time, as they
    share memory and cores in training; times are their means. `batches` opens the rows of a split instead of the configured tokens.

    Raises:
        InputError: Configuration, model, data and cluster do not fit together.
        RunError: The cluster cannot be reached, or a measurement failed.
    """
    names = [kind.name for kind in kinds]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"the device kind {', '.join(sorted(repeated))} is given twice; name one device of each kind")
    make = partial(make_model, located(config.model.function), config.model.options, compile_layers=config.model.compile)
    model = make()
    data, seed, microbatch_size = config.data, config.run.seed, config.schedule.microbatch_size
    source: DataSource | None = None
    if batches is None and data.train:
        source = DataSource.of(data, seed=seed)
    elif batches is None:
        batches = FileSource(path=data.file, sequence_length=data.sequence_length, seed=seed, microbatch_size=microbatch_size)
        check_exists(data.path, {name for layer in model.layers for name in layer.batch})
        batches("train")  # what is wrong with the file shows before actors start
    scaling = dataclasses.replace(config.scaling, num_devices=num_at_once)
    by_kind: list[list[list[LayerMeasurement]]] = []
    measured: list[Measured] = []
    with session(config.cluster, num_devices=num_at_once, cpus_per_device=scaling.cpus_per_device):
        # A kind without a slot is refused before any is measured.
        default = DeviceKind("gpu" if scaling.use_gpu else DEFAULT_KIND)
        slots = {kind: _slots(kind, dataclasses.replace(scaling, use_gpu=kind.is_gpu)) for kind in kinds or (default,)}
        for kind, of_kind in slots.items():
            notice(f"measuring {len(model.layers)} layers on {', '.join(slot.name for slot in of_kind)} ({kind.name})")
            with _rows(source, batches, config) as rows:
                by_kind.append(of_devices := _measure(config, scaling, of_kind, make, rows, effort))
            spreads = tuple(max(layer.spread for layer in layers) for layers in zip(*of_devices, strict=True))
            measured.append(Measured(kind.name, of_kind[0].name, _times(of_devices), spreads))
    profile = model_profile(by_kind[0], model, name=config.model.function, microbatch_size=microbatch_size)
    profile = with_rows_of(profile, config.optimizer, notice)
    if kinds:
        profile = dataclasses.replace(profile, device_kinds={of_kind.kind: of_kind.times for of_kind in measured})
    return Profiled(profile, tuple(measured))


@contextlib.contextmanager
def _rows(source: DataSource | None, batches: BatchFunction | None, config: TrainConfig) -> Iterator[BatchFunction]:
    if source is None:
        assert batches is not None, "the rows come from readers or from a function"
        yield batches
        return
    with RowReaders(source, is_stream=True, config=config) as readers:  # one microbatch is read
        yield readers.batches(config.schedule.microbatch_size)


def _slots(kind: DeviceKind, scaling: ScalingConfig) -> list[DeviceSlot]:
    slots = find_slots(scaling) if kind.node is None else []
    if len({slot.node for slot in slots}) == 1:
        return slots
    nodes = cluster_nodes()
    if kind.node is None:  # the first node has too few
        candidates = sorted((node for node in nodes if node.alive), key=lambda node: (node.address, node.node_id))
        problem = "no node has as many"
    else:
        candidates = nodes_called(kind.node, nodes)
        if len(candidates) != 1:
            what = f"{len(candidates)} nodes are" if candidates else "no living node is"
            raise PlanError(
                f"device kind {kind.name!r}: {what} called {kind.node!r}; give a node's label {NODE_LABEL}, its address or its host name. "
                f"The nodes: {'; '.join(str(node) for node in nodes if node.alive)}"
            )
        problem = f"{candidates[0]} has fewer"
    needs = resources_per_device(scaling)
    for node in candidates:
        if node.room(needs) >= scaling.num_devices:
            return node.slots(scaling.num_devices, num_gpus=needs.get("GPU", 0.0))
    raise PlanError(
        f"device kind {kind.name!r}: {scaling.num_devices} devices of {resource_text(needs)} are to measure on one node, {problem}; lower "
        "scaling.cpus_per_device, or how many measure at once"
    )


def _measure(
    config: TrainConfig, scaling: ScalingConfig, slots: Sequence[DeviceSlot], model: ModelFunction, batches: BatchFunction, effort: Effort
) -> list[list[LayerMeasurement]]:
    run = f"profile-{time.time_ns() // 1_000_000:x}"
    with Coordinator(run=run, slots=slots, stages=[()] * len(slots), scaling=scaling, cluster=config.cluster) as coordinator:
        coordinator.actors.wait_until_up()
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
            split_s=fmean(layer.split_s for layer in of_devices),
            fixed_share=None
            if any(layer.fixed_share is None for layer in of_devices)
            else fmean(layer.fixed_share or 0.0 for layer in of_devices),
        )
        for of_devices in zip(*measured, strict=True)
    )


def model_profile(measured: Sequence[Sequence[LayerMeasurement]], model: Model, *, name: str, microbatch_size: int) -> ModelProfile:
    """Return the profile of a model from the costs of its layers, by device and layer; times are means of the devices."""
    tied = _tied(model)
    layers = tuple(
        LayerProfile(
            name=layer.name,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            weight_grad_s=times.weight_grad_s,
            split_s=times.split_s,
            fixed_share=times.fixed_share,
            output_bytes=layer.output_bytes,
            saved_bytes=layer.saved_bytes,
            parameter_bytes=layer.parameter_bytes,
            weight_grad_saved_bytes=layer.weight_grad_saved_bytes,
            tied=tied.get(layer.name),
            tied_bytes=layer.tied_bytes if layer.name in tied else None,
            gradient_rows=layer.gradient_rows if layer.looked_up_rows else None,
            looked_up_rows=layer.looked_up_rows or None,
            looked_up_bytes=layer.looked_up_bytes or None,
            reread_share=layer.reread_share,
            update_s=fmean(one.update_s for one in (layer, *others)),
            low_precision_bytes=layer.low_precision_bytes or None,
            working_bytes=layer.working_bytes,
            input_grad_working_bytes=layer.input_grad_working_bytes,
            frozen_bytes=layer.frozen_bytes or None,
            state_bytes=layer.state_bytes,
            branch=described.branch,
        )
        for times, (layer, *others), described in zip(_times(measured), zip(*measured, strict=True), model.layers, strict=True)
    )
    edges = tuple(dict.fromkeys(model.edges()))  # a layer may take a tensor twice
    named = tuple(NamedEdge(producer=layers[source].name, consumer=layers[target].name) for source, target in edges)
    is_chain = edges == tuple(pairwise(range(len(layers))))
    return ModelProfile(
        name=name,
        microbatch_size=microbatch_size,
        layers=layers,
        named_edges=None if is_chain else named,
        loss_couples_rows=model.loss_couples_rows or None,
    )


def _tied(model: Model) -> dict[str, str]:
    # By layer. Ties that meet in a layer have one name together.
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
            split_s=sum(measured[layer].split_s for layer in layers),
            update_s=sum(measured[layer].update_s for layer in layers),
        )
        for layers in cut.stages
    ]
