"""Measures what the layers of a model cost on this device; holds one layer at a time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from raypipe.actors import devices
from raypipe.actors.measure.alike import LayerKey, OperatorTrace, code_of, structure
from raypipe.actors.measure.layer_cache import LayerCache
from raypipe.actors.measure.layer_costs import LEAST_TIMED, SLOW_S, USUAL_EFFORT, Effort, LayerMeasurement
from raypipe.actors.stage.backward import backward_full, backward_input
from raypipe.actors.stage.gradient_flow import LayerOutput, StageOutputs, zero_inputs
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.losses import tried_loss
from raypipe.actors.stage.module import unchanged
from raypipe.actors.stage.optimizer_state import flat_state
from raypipe.actors.stage.optimizers import described, kinds_of
from raypipe.actors.stage.precision import build_stage, loss_in_float32, prepare
from raypipe.actors.stage.ties import tied_weight
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.model import Batch, Model
from raypipe.schedules.ir import WeightRule
from raypipe.units import lower_quartile

T = TypeVar("T")


def measure_layers(
    model: Model,
    batch: Batch,
    *,
    optimizer: Optimizer,
    seed: int,
    effort: Effort = USUAL_EFFORT,
    precision: Precision = Precision.FLOAT32,
    on: torch.device = devices.CPU,
    on_layer: Callable[[str], None] = lambda _: None,
    cache: LayerCache | None = None,
) -> list[LayerMeasurement]:
    """Measure the layers on one microbatch, one for all that are alike; `on_layer` receives a text before each step.

    Layers that the cache knows are not measured, and it learns of those that are.
    """
    batch = devices.upload(batch, on)
    model = loss_in_float32(model, precision)
    make = _Maker(model, optimizer, seed=seed, precision=precision, on=on)
    compared = _Comparison(make, batch)
    for number in range(1, 1 + len(model.layers)):
        on_layer(f"comparing layer {number} of {len(model.layers)}")
        compared.add_next()
    outputs, keys = compared.outputs, compared.keys
    first_of = {key: index for index, key in reversed(list(enumerate(keys)))}
    measured = {key: known for key in first_of if cache is not None and (known := cache.get(key)) is not None}
    unknown = {key: index for key, index in sorted(first_of.items(), key=lambda pair: pair[1]) if key not in measured}
    samples = {key: _Samples() for key in unknown}
    alike = f" different layers of {len(keys)}" if len(unknown) < len(keys) else ""
    for number in range(effort.passes):
        again = f", pass {number + 1} of {effort.passes}" if number else ""
        for position, (key, index) in enumerate(unknown.items()):
            on_layer(f"measuring layer {position + 1} of {len(unknown)}{alike}{again}")
            weights = make.weights(index)
            prepare(weights, outputs, batch, num_rows=_num_rows(batch))
            measured[key] = _Layer(model, weights, outputs, batch).measure(samples[key], effort)
    if cache is not None:
        for key in unknown:
            cache.put(key, measured[key])
    devices.drop_fillers()
    return [dataclasses.replace(measured[key], name=layer.name) for key, layer in zip(keys, model.layers, strict=True)]


@dataclass(frozen=True)
class _Maker:
    """Makes the stages of one layer each."""

    model: Model
    optimizer: Optimizer
    _: KW_ONLY
    seed: int
    precision: Precision
    on: torch.device

    @cached_property
    def _cut(self) -> Cut:
        return Cut(tuple((layer,) for layer in range(len(self.model.layers))), self.model.edges())

    def sources(self, index: int) -> list[int]:
        return [source for source, target in self._cut.edges if target == index]

    def weights(self, index: int) -> Weights:
        untied = dataclasses.replace(self.model, ties=())  # initial values do not change the cost
        return build_stage(
            untied,
            self._cut,
            index,
            optimizer=self.optimizer,
            rule=WeightRule.FLUSH,
            seed=self.seed,
            precision=self.precision,
            on=self.on,
        )


class _Comparison:
    """What each layer passes on, and the key that it has in common with the layers that cost the same."""

    def __init__(self, make: _Maker, batch: Batch) -> None:
        self._make = make
        self._batch = batch
        self._first_of: dict[tuple[str, str, str], int] = {}
        self.outputs: dict[int, tuple[LayerOutput, ...]] = {}
        self.keys: list[LayerKey] = []

    def add_next(self) -> None:
        """Try the next layer: once if a layer before it is built alike and has done the same in its first trial."""
        index, make = len(self.keys), self._make
        weights, trace = make.weights(index), OperatorTrace()
        optimizer = weights.optimizer
        code = code_of(kinds_of(optimizer)) if optimizer is not None else ""
        built = structure(make.model, weights.module, self.outputs, self._batch) if code is not None else None
        stepped = f"{described(optimizer)} {code}" if optimizer is not None else ""
        alike = index

        def known() -> dict[int, tuple[LayerOutput, ...]] | None:
            nonlocal alike
            if built is not None:
                alike = self._first_of.setdefault((built, trace.digest(), stepped), index)
            return None if alike == index else {index: self._outputs_as_of(alike, index)}

        with trace.recorded(weights.module):
            self.outputs |= prepare(weights, self.outputs, self._batch, num_rows=_num_rows(self._batch), known=known)
        if alike != index:
            self.keys.append(self.keys[alike])
        else:
            self.keys.append(LayerKey(built, f"{trace.digest()} {stepped}") if built is not None else LayerKey("", str(index)))

    def _outputs_as_of(self, alike: int, index: int) -> tuple[LayerOutput, ...]:
        sources = dict(zip(self._make.sources(alike), self._make.sources(index), strict=True))
        return tuple(
            dataclasses.replace(output, reaches=frozenset((sources[layer], number) for layer, number in output.reaches))
            for output in self.outputs[alike]
        )


def _on_rows(output: LayerOutput, num_rows: int) -> LayerOutput:
    spec = output.spec
    return dataclasses.replace(output, spec=dataclasses.replace(spec, shape=(num_rows, *spec.shape[1:])))


def _num_rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


_NUM_CACHED = 2_000_000  # numbers that fill the caches of a core: 8 MB


@dataclass(frozen=True)
class _Samples:
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    input_grad_s: list[float] = field(default_factory=list)
    weight_grad_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    half_rows_s: list[float] = field(default_factory=list)  # of forward and backward

    @property
    def sums_s(self) -> list[float]:
        """Return the seconds of each forward and its backward."""
        return [forward_s + backward_s for forward_s, backward_s in zip(self.forward_s, self.backward_s, strict=True)]

    @property
    def spread(self) -> float:
        sums = self.sums_s
        quartiles = statistics.quantiles(sums, n=4, method="inclusive") if len(sums) > 1 else sums * 3
        return (quartiles[2] - quartiles[0]) / 2 / quartiles[1] if quartiles[1] else 0.0


class _Saved:
    # A saved tensor. Only autograd refers to this object, which therefore ends when autograd frees the tensor.
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Layer:
    def __init__(self, model: Model, weights: Weights, outputs: StageOutputs, batch: Batch) -> None:
        self.model = model
        self.weights = weights
        self.module = weights.module.train()
        self.index = self.module.stage
        self.inputs = {source: outputs[source] for source in self.module.inputs[self.index]}
        self.outputs = outputs[self.index]
        self.batch = batch
        self.on = weights.on
        self.parameters = weights.versions.tensors(0)
        self.filler = torch.empty(_NUM_CACHED if self.on.type == "cpu" else 0)

    def measure(self, samples: _Samples, effort: Effort) -> LayerMeasurement:
        began_s = time.perf_counter()
        saved_bytes, weight_grad_saved_bytes = self._saved_bytes()
        if effort.estimates:
            working_bytes = input_grad_working_bytes = self._least_working_bytes()
            self._estimate(samples)
        else:
            working_bytes, input_grad_working_bytes = (max(peak_bytes - saved_bytes, 0) for peak_bytes in self._peaks())
            self._time(samples, effort, warm_up=0 if time.perf_counter() - began_s > SLOW_S else effort.warm_up)
        backward_s, weight_grad_s = lower_quartile(samples.backward_s), lower_quartile(samples.weight_grad_s)
        frozen_bytes = sum(weight.nbytes for weight in self.module.parameters() if not weight.requires_grad)
        tables = self.weights.lookups.num_rows
        touched = self.weights.lookups.rows([self.batch])
        return LayerMeasurement(
            name=self.model.layers[self.index].name,
            forward_s=lower_quartile(samples.forward_s),
            backward_s=backward_s,
            weight_grad_s=min(weight_grad_s, backward_s),
            output_bytes=sum(math.prod(output.spec.shape) * output.spec.dtype.itemsize for output in self.outputs),
            saved_bytes=saved_bytes,
            weight_grad_saved_bytes=weight_grad_saved_bytes,
            parameter_bytes=frozen_bytes + sum(master.nbytes for master in self.weights.masters),
            tied_bytes=self._tied_bytes(),
            low_precision_bytes=self.weights.versions.low_precision_bytes,
            frozen_bytes=frozen_bytes,
            split_s=max(lower_quartile(samples.input_grad_s) + weight_grad_s - backward_s, 0.0),
            update_s=lower_quartile(samples.update_s),
            spread=samples.spread,
            working_bytes=working_bytes,
            input_grad_working_bytes=input_grad_working_bytes,
            gradient_rows=sum(len(touched[at]) if at in touched else num_rows for at, num_rows in tables.items()),
            looked_up_rows=sum(tables.values()),
            looked_up_bytes=sum(self.weights.masters[at].nbytes for at in tables),
            reread_share=self.weights.lookups.reread_share(self.batch),
            state_bytes=None if effort.estimates else self._state_bytes(),
            fixed_share=self._fixed_share(samples),
        )

    def _fixed_share(self, samples: _Samples) -> float | None:
        num_rows = _num_rows(self.batch)
        whole_s = lower_quartile(samples.sums_s)
        if len(samples.half_rows_s) < LEAST_TIMED or not whole_s:
            return None
        part = num_rows // 2 / num_rows
        share = min(max((lower_quartile(samples.half_rows_s) / whole_s - part) / (1 - part), 0.0), 1.0)
        return share if share > 2 * samples.spread else 0.0  # an error of both times doubles in it

    def _time_half(self, samples: _Samples, *, num_timed: int) -> None:
        """Time forwards and backwards on half the rows, unless there is one row, or the model's code takes no other number of rows."""
        num_rows = _num_rows(self.batch)
        if num_rows < 2 or num_timed < LEAST_TIMED:
            return
        half = copy.copy(self)
        half.batch = {name: tensor[: num_rows // 2] for name, tensor in self.batch.items()}
        half.inputs = {source: tuple(_on_rows(output, num_rows // 2) for output in outputs) for source, outputs in self.inputs.items()}
        # What was compiled for all rows is not compiled for others: it would stay so in training.
        stance = torch.compiler.set_stance("fail_on_recompile") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        timed = _Samples()
        try:
            with unchanged(self.module), stance:
                for _ in range(1 + num_timed):  # the first warms up
                    half._run_once(timed)
        except Exception:  # whatever that code raises; a worker of several devices would fail with it, too
            self._clear()
        else:
            samples.half_rows_s.extend(timed.sums_s[1:])

    def _time(self, samples: _Samples, effort: Effort, *, warm_up: int) -> None:
        for _ in range(warm_up):
            self._run_once(_Samples())
        until_s = time.perf_counter() + effort.most_s
        for number in range(1, effort.repeats + 1):
            self._run_once(samples)
            if time.perf_counter() > until_s or (number >= LEAST_TIMED and samples.spread <= effort.spread):
                break
        self._time_half(samples, num_timed=number)

    def _estimate(self, samples: _Samples) -> None:
        forward_s = self._forward()[2]
        samples.forward_s.append(forward_s)
        samples.backward_s.append(2 * forward_s)
        samples.input_grad_s.append(forward_s)
        samples.weight_grad_s.append(forward_s)
        samples.update_s.append(0.0)
        self.module.first[0] = ()

    def _least_working_bytes(self) -> int:
        outputs = sum(math.prod(output.spec.shape) * output.spec.dtype.itemsize for output in self.outputs)
        return outputs + max((weight.nbytes for weight in self.module.parameters()), default=0)

    def _state_bytes(self) -> int:
        # Behind the timed updates, so that all of it is there.
        states = self.weights.optimizer.state.values() if self.weights.optimizer is not None else ()
        return sum(tensor.nbytes for state in states for tensor in flat_state(state).values())

    def _tied_bytes(self) -> int:
        layer = self.model.layers[self.index].name
        names = [name for tie in self.model.ties for member, name in tie if member == layer]
        tied = {tied_weight(self.module.layers[str(self.index)], layer, name) for name in names}
        # In the precision of the master, whatever that of the copy.
        stepped = {id(own): master for own, master in zip(self.weights.versions.tensors(0), self.weights.masters, strict=True)}
        return sum(stepped.get(id(weight), weight).nbytes for weight in tied)

    def _run_once(self, samples: _Samples) -> None:
        roots, leaves, forward_s = self._forward()
        gradients = [torch.ones_like(root) for root in roots]
        self.weights.bind(0, self.weights.versions.newest)
        _, backward_s = self._timed(lambda: backward_full(roots, gradients, leaves, self.parameters))
        self._clear()
        roots, leaves, _ = self._forward()
        self.weights.bind(0, self.weights.versions.newest)
        pivot = self.module.pivot(leaves)
        (_, deferred), input_grad_s = self._timed(lambda: backward_input(roots, gradients, leaves, self.parameters, pivot=pivot))
        _, weight_grad_s = self._timed(deferred.run)
        samples.forward_s.append(forward_s)
        samples.backward_s.append(backward_s)
        samples.input_grad_s.append(input_grad_s)
        samples.weight_grad_s.append(weight_grad_s)
        update = partial(self.weights.update, self.weights.versions.newest, scale=1.0, learning_rate=0.0, keep_old=False)
        samples.update_s.append(self._timed(update)[1] if self.weights.optimizer is not None else 0.0)
        self._clear()

    def _saved_bytes(self) -> tuple[int, int]:
        alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

        def pack(tensor: Tensor) -> _Saved:
            # Detached: a saved output that referred to its graph would keep itself alive.
            saved = _Saved(tensor.detach())
            alive.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            roots, leaves, _ = self._forward()
        saved_bytes = self._storage_bytes(saved.tensor for saved in alive)
        gradients = [torch.ones_like(root) for root in roots]
        _, deferred = backward_input(roots, gradients, leaves, self.parameters, pivot=self.module.pivot(leaves))
        # The part of the graph above the cuts is freed with the last reference to the outputs.
        del roots
        self.module.first[0] = ()
        weight_grad_saved_bytes = self._storage_bytes([*(saved.tensor for saved in alive), *deferred.gradients()])
        self.weights.bind(0, self.weights.versions.newest)
        deferred.run()
        self._clear()
        return saved_bytes, weight_grad_saved_bytes

    def _peaks(self) -> tuple[int, int]:
        def run(*, split: bool) -> None:
            roots, leaves, _ = self._forward()
            gradients = [torch.ones_like(root) for root in roots]
            if split:
                backward_input(roots, gradients, leaves, self.parameters, pivot=self.module.pivot(leaves))
            else:
                backward_full(roots, gradients, leaves, self.parameters)

        run(split=False)  # from now on the weights have gradients, to which others are added
        peaks = []
        for work in (partial(run, split=False), partial(run, split=True)):
            self.module.first[0] = ()  # otherwise freed during the measurement
            peaks.append(_peak_bytes(work) if self.on.type == "cpu" else devices.peak_bytes(work, self.on))
        self.module.first[0] = ()
        self._clear()
        return peaks[0], peaks[1]

    def _storage_bytes(self, tensors: Iterable[Tensor]) -> int:
        own = {weight.untyped_storage().data_ptr() for weight in self.module.parameters()}
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}.values())

    def _forward(self) -> tuple[list[Tensor], list[Tensor], float]:
        inputs = zero_inputs(self.inputs, on=self.on)

        def forward() -> list[Tensor]:
            outputs = self.module(inputs, self.batch, RngKey(0))[self.index]
            if self.index == len(self.model.layers) - 1:
                return [tried_loss(self.model, outputs, self.batch)]
            return [tensor for tensor in outputs if tensor.requires_grad]

        roots, forward_s = self._timed(forward)
        return roots, [leaf for tensors in inputs.values() for leaf in tensors], forward_s

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        self.filler.zero_()  # leaves of the caches what other Ops of a run leave
        stop = devices.stop_watch(self.on)
        result = work()
        return result, stop()

    def _clear(self) -> None:
        self.weights.gradients.pop(self.weights.versions.newest)


_LOADED_BY = threading.current_thread()


def start_profiler() -> None:
    """Start torch's profiler once, unless a thread calls that did not load this module: there the first start writes to stderr."""
    if threading.current_thread() is not _LOADED_BY:
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps it from writing a line at every start
    with torch.autograd.profiler.profile(use_kineto=False):
        pass


def _peak_bytes(work: Callable[[], None]) -> int:
    with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profiler:
        work()
    events = sorted(profiler.function_events or (), key=lambda event: event.time_range.end)
    return max(accumulate(event.self_cpu_memory_usage for event in events), default=0)
