"""Reads the layer profiles and bandwidths of Sailor (github.com/eth-easl/sailor; Strati et al., SOSP 2025, arXiv 2504.17096).

A folder of the files `profiles.json`, `layers.json`, `training.json`, `between_nodes.json` and `within_node.json`, whose nesting
`benchmarks/data/measured_clusters/SOURCE.txt` states. Training was in float32. A group of GPUs of one node with tensor parallelism inside
is one device here: its memory, weights and activations are those of all its GPUs. It passes on its output once: each GPU sends its slice.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raypipe.artifacts.files import read_text
from raypipe.artifacts.profile import LayerProfile, LayerTimes, ModelProfile
from raypipe.artifacts.topology import ClusterTopology, Device, Link, Node, NodeLink, SharedLink, node_ports
from raypipe.artifacts.validation import from_tree
from raypipe.errors import FormatError, InputError, UnknownNameError
from raypipe.profiling.pipedream import WEIGHT_GRAD_SHARE
from raypipe.units import counted

BYTES_PER_NUMBER = 4
LEAST_BYTES, MOST_BYTES = 2**23, 2**29
"""Sizes between which a latency and one rate stand for the measured curve: activations of one row, and the gradients of a stage."""
_SIZES = tuple([LEAST_BYTES * 2 ** (step / 8) for step in range(49)])  # up to MOST_BYTES

_LayerTimes = tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat]  # Forward, backward and update.
_Times = dict[str, dict[str, dict[PositiveInt, dict[PositiveInt, dict[NonNegativeInt, _LayerTimes]]]]]
_Sizes = dict[str, dict[PositiveInt, dict[NonNegativeInt, dict[str, NonNegativeInt]]]]
_Curve = tuple[tuple[float, float, float], PositiveFloat]
_Between = dict[str, dict[str, dict[PositiveInt, dict[str, dict[str, dict[PositiveInt, _Curve]]]]]]
_Within = dict[str, dict[PositiveInt, _Curve]]

K = TypeVar("K")
V = TypeVar("V")
_KEYS = {"act_output_floats": "passes on", "act_mem_floats": "keeps", "params_floats": "has as weights"}


@dataclass(frozen=True)
class GpuNode:
    """A node of GPUs in a zone.

    Attributes:
        gpu: Kind of GPU, as the files name it.
        num_gpus: GPUs of the node that are used.
        zone: Zone of a cloud, or of a cluster, as `between_nodes.json` names it.
    """

    gpu: str
    num_gpus: int
    zone: str


def parse_nodes(text: str) -> list[GpuNode]:
    """Return the nodes that a text like `GH-96x4@us-central1-a*2,V100-16x8@us-west1-b` lists: GPU, GPUs a node, zone, number of nodes.

    Raises:
        InputError: A part is none of that form.
    """
    nodes: list[GpuNode] = []
    for part in text.split(","):
        match = re.fullmatch(r"(.+)x([1-9]\d*)@([^*]+)(?:\*([1-9]\d*))?", part.strip())
        if match is None:
            raise InputError(f"nodes: expected GPUxGPUS@ZONE or GPUxGPUS@ZONE*NODES, such as GH-96x4@us-central1-a*2, got {part.strip()!r}")
        nodes += [GpuNode(match[1], int(match[2]), match[3])] * int(match[4] or 1)
    return nodes


@dataclass(frozen=True)
class LinkCurve:
    """Seconds of a message by its size, and the latency and rate that stand for it.

    Attributes:
        coefficients: GB/s = c[0] x^2 + c[1] x + c[2] with x = log2(bytes / 1e6).
        most_bytes_per_s: Highest rate measured.

    Raises:
        InputError: The rate at 1 MB is not above 0.
    """

    coefficients: tuple[float, float, float]
    most_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.coefficients[2] > 0 and self.most_bytes_per_s > 0):
            raise InputError(f"the bandwidth {self.coefficients} is not above 0 GB/s at 1 MB; measure this link again")

    def seconds(self, num_bytes: float) -> float:
        """Return the measured seconds of a message; below 1 MB at the rate of 1 MB."""
        x = max(math.log2(max(num_bytes, 1.0) / 1e6), 0.0)
        a, b, c = self.coefficients
        return num_bytes / min(max((a * x + b) * x + c, c) * 1e9, self.most_bytes_per_s)

    @property
    def line(self) -> tuple[float, float]:
        """Latency in seconds and bytes per second, of least squares of the relative error from `LEAST_BYTES` to `MOST_BYTES`."""
        return _line(self)

    @property
    def error(self) -> float:
        """Largest relative error of the line from `LEAST_BYTES` to `MOST_BYTES`."""
        latency_s, rate = self.line
        return max([abs((latency_s + size / rate) / self.seconds(size) - 1) for size in _SIZES])


@lru_cache(maxsize=1024)
def _line(curve: LinkCurve) -> tuple[float, float]:
    times = np.array([curve.seconds(size) for size in _SIZES])
    rows = np.stack([1 / times, np.array(_SIZES) / times], axis=1)
    latency_s, s_per_byte = np.linalg.lstsq(rows, np.ones(len(_SIZES)), rcond=None)[0]
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, rows[:, 1].sum() / (rows[:, 1] @ rows[:, 1])
    return float(latency_s), float(1 / s_per_byte)


@dataclass(frozen=True)
class SailorData:
    """A folder of Sailor's measurements; each file is read when it is first needed."""

    folder: Path

    def profile(
        self,
        model: str,
        *,
        microbatch_size: int,
        tensor_parallel: int = 1,
        gpu: str | None = None,
        weight_grad_share: float = WEIGHT_GRAD_SHARE,
        name: str | None = None,
    ) -> ModelProfile:
        """Return the profile of a model for groups of `tensor_parallel` GPUs, with the times of each kind of GPU that was measured.

        Args:
            model: Name of the model in the files.
            microbatch_size: Rows of a microbatch; a measured number.
            tensor_parallel: GPUs of a group; a measured number.
            gpu: Kind of GPU whose times the layers have, and with whose update those of other kinds are in proportion to their layers'
                other times; the first by default.
            weight_grad_share: Share of the backward that computes the gradient of the weights, which the files do not tell.
            name: Name of the profile; the model's by default.

        Raises:
            FormatError: A file is none of Sailor's.
            InputError: The model, the size or the GPU was not measured, or the share is not from 0 to 1.
        """
        if not 0 <= weight_grad_share <= 1:
            raise InputError(f"weight_grad_share: expected a share from 0 to 1, got {weight_grad_share}")
        times = self._kinds(model, microbatch_size, tensor_parallel)
        if gpu is not None and gpu not in times:
            raise UnknownNameError(f"GPU with times of {model} for {_sizes_text(microbatch_size, tensor_parallel)}", gpu, times)
        path = self._path("layers")
        layers = _at(_at(self._layers, path, "model", model), path, "tensor-parallel degree", tensor_parallel)
        reference = times[gpu or next(iter(times))]
        for kind, of_kind in times.items():
            if set(layers) != set(of_kind):
                problem = f"{model} has {len(layers)} layers here and {len(of_kind)} on {kind} in profiles.json; take both from one source"
                raise FormatError(path, f"{model}.{tensor_parallel}", problem)

        def floats(number: int, key: str) -> int:
            try:
                return layers[number][key]
            except KeyError:
                problem = f"{key} is missing, what the layer {_KEYS[key]}; add it"
                raise FormatError(path, f"{model}.{tensor_parallel}.{number}", problem) from None

        def measured(kind: Mapping[int, _LayerTimes], number: int) -> LayerTimes:
            forward_s, backward_s, _ = kind[number]
            has_weights = floats(number, "params_floats") > 0
            return LayerTimes(
                forward_s=forward_s, backward_s=backward_s, weight_grad_s=backward_s * weight_grad_share if has_weights else 0.0
            )

        of_rows = BYTES_PER_NUMBER * microbatch_size
        of_group = BYTES_PER_NUMBER * tensor_parallel
        return ModelProfile(
            name=name or model,
            microbatch_size=microbatch_size,
            layers=tuple(
                LayerProfile(
                    name=f"layer{number}",
                    forward_s=(base := measured(reference, number)).forward_s,
                    backward_s=base.backward_s,
                    weight_grad_s=base.weight_grad_s,
                    output_bytes=floats(number, "act_output_floats") * of_rows,
                    saved_bytes=floats(number, "act_mem_floats") * of_rows * tensor_parallel,
                    parameter_bytes=floats(number, "params_floats") * of_group,
                    update_s=reference[number][2],
                )
                for number in sorted(layers)
            ),
            device_kinds={kind: tuple(measured(of_kind, number) for number in sorted(layers)) for kind, of_kind in times.items()},
        )

    def topology(
        self, nodes: Sequence[GpuNode], *, tensor_parallel: int | None = 1, rate_share: float = 1.0, name: str = "sailor"
    ) -> ClusterTopology:
        """Return the cluster of some nodes, one device for each group of `tensor_parallel` GPUs.

        Each pair of groups of different nodes has a link with what as many GPUs at both ends reach. What all GPUs of two nodes reach
        together is a shared link, and so is the highest of these of a node with any other, each way: its port.

        Args:
            nodes: Nodes in the order in which their devices are counted.
            tensor_parallel: GPUs of a group; divides those of each node. None for all of a node.
            rate_share: Share of the measured rates that links have.
            name: Name of the cluster.

        Raises:
            FormatError: A file is none of Sailor's.
            InputError: A GPU or a link was not measured, or groups do not divide a node.
        """
        if not rate_share > 0:
            raise InputError(f"rate_share: expected a number above 0, got {rate_share}")
        degrees = [tensor_parallel or node.num_gpus for node in nodes]
        made = tuple(
            self._node(f"node{at}", node, degree, rate_share) for at, (node, degree) in enumerate(zip(nodes, degrees, strict=True))
        )
        links: list[Link] = []
        shared: list[SharedLink] = []
        for (a, one, here), (b, other, there) in itertools.permutations(zip(made, nodes, degrees, strict=True), 2):
            latency_s, rate = self._between_gpus(one, other, here, there).line
            is_alone = len(a.devices) == len(b.devices) == 1
            ends = [(a.name, b.name)] if is_alone else itertools.product(*([device.name for device in node.devices] for node in (a, b)))
            links += [
                Link(source=source, target=target, bandwidth_bytes_per_s=rate * rate_share, latency_s=latency_s, one_way=True)
                for source, target in ends
            ]
            if not is_alone:
                together = self._together(one, other) * rate_share
                shared.append(SharedLink(name=f"{a.name}-{b.name}", bandwidth_bytes_per_s=together, members=((a.name, b.name),)))
        return ClusterTopology(name=name, nodes=made, links=tuple(links), shared_links=(*shared, *self._ports(made, nodes, rate_share)))

    def between(self, one: GpuNode, other: GpuNode, num_gpus: int) -> LinkCurve:
        """Return what `num_gpus` GPUs at each end of two nodes reach; raises as `topology`.

        Figures of fewer GPUs count for more GPUs where these have lower ones: all use the same ports.
        """
        return self._between_gpus(one, other, num_gpus, num_gpus)

    def within(self, gpu: str, num_gpus: int) -> LinkCurve:
        """Return what groups of `num_gpus` GPUs of one node reach between them; raises as `topology`.

        It is the figure of both groups' GPUs together, or of the most GPUs that were measured.
        """
        measured = _at(self._within, self._path("within_node"), "GPU", gpu)
        count = min((count for count in measured if count >= 2 * num_gpus), default=max(measured))
        return LinkCurve(*measured[count])

    def _node(self, name: str, node: GpuNode, tensor_parallel: int, rate_share: float) -> Node:
        if node.num_gpus % tensor_parallel:
            raise InputError(
                f"{name} has {node.num_gpus} GPUs, which groups of {tensor_parallel} do not divide; choose another tensor-parallel degree"
            )
        memory_bytes = _at(self._memory_bytes, self._path("training"), "GPU", node.gpu)
        count = node.num_gpus // tensor_parallel
        link = None
        if count > 1:
            latency_s, rate = self.within(node.gpu, tensor_parallel).line
            link = NodeLink(latency_s=latency_s, bandwidth_bytes_per_s=rate * rate_share)
        devices = (Device(f"{name}/{number}", node.gpu, memory_bytes * tensor_parallel) for number in range(count))
        return Node(name=name, devices=tuple(devices), link=link)

    def _between_gpus(self, one: GpuNode, other: GpuNode, here: int, there: int) -> LinkCurve:
        curves = self._curves(one, other) or self._curves(other, one)
        fitting = [LinkCurve(*curve) for (a, b), curve in curves.items() if a <= here and b <= there]
        if not fitting:
            words = f"{here} {one.gpu} in {one.zone} and {there} {other.gpu} in {other.zone}"
            raise InputError(f"{self._path('between_nodes')} has no bandwidth between {words}; choose other zones, GPUs or groups")
        return min(fitting, key=lambda curve: curve.seconds(MOST_BYTES))

    def _together(self, one: GpuNode, other: GpuNode) -> float:
        return self._between_gpus(one, other, one.num_gpus, other.num_gpus).line[1]

    def _ports(self, made: Sequence[Node], nodes: Sequence[GpuNode], rate_share: float) -> tuple[SharedLink, ...]:
        if len(made) < 3:
            return ()
        out, into = {}, {}
        for node, own in zip(made, nodes, strict=True):
            others = [gpus for peer, gpus in zip(made, nodes, strict=True) if peer is not node]
            out[node.name] = max(self._together(own, gpus) for gpus in others) * rate_share
            into[node.name] = max(self._together(gpus, own) for gpus in others) * rate_share
        return node_ports(out, into)

    def _curves(self, one: GpuNode, other: GpuNode) -> dict[tuple[int, int], _Curve]:
        return {
            (here, there): curve
            for here, zones in self._between.get(one.zone, {}).get(one.gpu, {}).items()
            for there, curve in zones.get(other.zone, {}).get(other.gpu, {}).items()
        }

    def _kinds(self, model: str, microbatch_size: int, tensor_parallel: int) -> dict[str, dict[int, _LayerTimes]]:
        gpus = _at(self._profiles, self._path("profiles"), "model", model)
        measured = {gpu: times for gpu, sizes in gpus.items() if (times := sizes.get(microbatch_size, {}).get(tensor_parallel))}
        if not measured:
            pairs = sorted({(rows, degree) for sizes in gpus.values() for rows, degrees in sizes.items() for degree in degrees})
            raise InputError(
                f"{self._path('profiles')} has no times of {model} for {_sizes_text(microbatch_size, tensor_parallel)}; choose from: "
                + "; ".join(_sizes_text(*pair) for pair in pairs)
            )
        return measured

    def _path(self, name: str) -> str:
        return os.fspath(self.folder / f"{name}.json")

    def _read(self, name: str, cls: Any) -> Any:
        path = self._path(name)
        text = read_text(path)
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise FormatError(path, "", f"not JSON ({error}); check that this is the right file") from None
        return from_tree(cls, tree, path=path)

    @cached_property
    def _profiles(self) -> _Times:
        profiles: _Times = self._read("profiles", _Times)
        return profiles

    @cached_property
    def _layers(self) -> _Sizes:
        layers: _Sizes = self._read("layers", _Sizes)
        return layers

    @cached_property
    def _between(self) -> _Between:
        between: _Between = self._read("between_nodes", _Between)
        return between

    @cached_property
    def _within(self) -> _Within:
        within: _Within = self._read("within_node", _Within)
        return within

    @cached_property
    def _memory_bytes(self) -> dict[str, int]:
        path = self._path("training")
        tree = _at(self._read("training", dict[str, dict[str, Any]]), path, "key", "nodes")
        nodes: dict[str, dict[str, int]] = from_tree(dict[str, dict[str, PositiveInt]], tree, path=path)
        return {gpu: _at(node, path, "key", "mem_per_gpu") for gpu, node in nodes.items()}


def _sizes_text(microbatch_size: int, tensor_parallel: int) -> str:
    return f"{counted(microbatch_size, 'row')} on {counted(tensor_parallel, 'GPU')}"


def _at(tree: Mapping[K, V], path: str, what: str, key: K) -> V:
    try:
        return tree[key]
    except KeyError:
        raise UnknownNameError(f"{what} in {path}", str(key), map(str, tree)) from None
