"""Runs the stages of a GPU, and steps of their optimizers, before the device meets others.

In a window, loading kernels and compiling layers may wait for the GPU, which may wait for messages of devices that wait for this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from raypipe.actors import devices
from raypipe.actors.execution.batches import row_range, share_of
from raypipe.actors.execution.binding import StageEdges
from raypipe.actors.execution.updates import clip_scale, hypot, root, sum_of_squares
from raypipe.actors.stage.backward import backward_full, backward_input
from raypipe.actors.stage.gradient_flow import EdgeTensor, zero_inputs
from raypipe.actors.stage.late_gradients import LateGradients
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import unchanged
from raypipe.actors.stage.named_weights import named_weights
from raypipe.actors.stage.weights import Optimizer, Weights
from raypipe.model import Batch, Model
from raypipe.schedules.ir import OpKind
from raypipe.schedules.lower import Compute, DeviceProgram, Rows

_NUM_STEPS = 2  # the first makes the optimizer's state, the second reads it


@dataclass(frozen=True)
class _Pass:
    """How a program runs a stage, as far as kernels and compiled layers depend on it.

    Attributes:
        num_rows: Rows of the microbatch that an Op takes.
        training: Whether layers are in training mode.
        backward: The kind of Op that computes gradients of the forward; `None` where the forward keeps no graph.
    """

    num_rows: int
    training: bool
    backward: OpKind | None


def warm_up(
    weights: Mapping[int, Weights],
    edges: StageEdges,
    model: Model,
    batch: Batch,
    programs: Iterable[DeviceProgram],
    *,
    num_rows: int,
    max_grad_norm: float | None,
    optimizers: Mapping[int, Optimizer],
    on: torch.device,
) -> None:
    """Run each stage over zeros in all ways in which programs do, and drop the results; on a GPU, step weights that are thrown away.

    Args:
        weights: The stages of the device.
        edges: What the stages exchange.
        model: The model.
        batch: A microbatch, as far as the stages read it.
        programs: What the device will run.
        num_rows: Rows of a microbatch.
        max_grad_norm: Limit of the gradient norm.
        optimizers: What has made the optimizer of each stage.
        on: The device.
    """
    for stage, passes in _passes(programs, num_rows).items():
        of_stage = weights[stage]
        with unchanged(of_stage.module):
            for one, rows in passes.items():
                of_stage.module.train(one.training)
                with torch.set_grad_enabled(one.backward is not None):
                    _run_once(of_stage, edges, model, devices.upload(share_of(batch, rows), on), one, max_grad_norm)
    if on.type != "cpu":
        for stage, of_stage in weights.items():
            if stage in optimizers:
                _step(of_stage, optimizers[stage])


def _passes(programs: Iterable[DeviceProgram], num_rows: int) -> dict[int, dict[_Pass, Rows]]:
    """Return the passes of each stage, each with some rows that it is run on."""
    found: defaultdict[int, dict[_Pass, Rows]] = defaultdict(dict)
    for program in programs:
        work = [pair for item in program.items if isinstance(item, Compute) for pair in zip(item.ops, item.rows, strict=True)]
        ops = {op for op, _ in work}
        for op, rows in work:
            # The forward of other Ops is part of the pass with their backward.
            keeps_no_graph = op.kind is OpKind.FORWARD and (program.forward_only or op._replace(kind=OpKind.RECOMPUTE) in ops)
            first, end = row_range(rows, num_rows)
            if end > first and (keeps_no_graph or op.kind.gives_input_gradient):
                one = _Pass(end - first, not program.forward_only, None if keeps_no_graph else op.kind)
                found[op.stage].setdefault(one, rows)
    return found


def _run_once(weights: Weights, edges: StageEdges, model: Model, batch: Batch, one: _Pass, max_grad_norm: float | None) -> None:
    module, last = weights.module, len(model.layers) - 1
    incoming = {
        layer: [_with_rows(tensor, one) for tensor in tensors]
        for edge, of_layers in edges.specs.items()
        if edge[1] == module.stage
        for layer, tensors in zip(edges.cut.crossing[edge], of_layers, strict=True)
    }
    inputs = zero_inputs(incoming, on=module.on)
    outputs = weights.run(weights.versions.newest, inputs, batch, RngKey(0))
    leaves = [tensor for tensors in inputs.values() for tensor in tensors]
    pivot = module.pivot(leaves)
    module.first[0] = ()
    roots = [tensor for tensors in outputs.values() for tensor in tensors if tensor.requires_grad]
    if last in outputs:
        roots = [model.loss(outputs[last][0], batch)]
    if one.backward is None:
        return
    gradients = [torch.full_like(root, 1.0) for root in roots]
    parameters = weights.bind(weights.versions.newest, 0)
    if one.backward is OpKind.BACKWARD:
        backward_full(roots, gradients, leaves, parameters)
    else:
        _, deferred = backward_input(roots, gradients, leaves, parameters, pivot=pivot)
        deferred.run()
    norm = root(sum_of_squares([weights.squared_norm(0)], on=module.on))
    weights.gradients.flatten(0)
    scale = clip_scale(hypot(norm, norm), max_grad_norm)
    for gradient in weights.gradients.pop(0):
        if gradient is not None:
            gradient.add_(gradient)  # as the backward of the next microbatch would
            gradient.mul_(scale)


def _with_rows(tensor: EdgeTensor, one: _Pass) -> EdgeTensor:
    spec = replace(tensor.spec, shape=(one.num_rows, *tensor.spec.shape[1:]))
    # In a window, too, what arrives takes a gradient only where a backward follows.
    return replace(tensor, spec=spec, takes_gradient=tensor.takes_gradient and one.backward is not None)


def _step(weights: Weights, make: Optimizer) -> None:
    """Let an optimizer like that of a stage step zeros: one weight of each shape and dtype that it treats alike."""
    if weights.optimizer is None:
        return
    group_of = {id(master): number for number, group in enumerate(weights.optimizer.param_groups) for master in group["params"]}
    unlike: dict[tuple[object, ...], tuple[str, Tensor, Tensor]] = {}
    for name, master, leaf in zip(weights.names, weights.masters, weights.versions.tensors(weights.versions.newest), strict=True):
        key = (group_of.get(id(master)), master.shape, master.stride(), master.dtype, leaf.dtype)
        unlike.setdefault(key, (name, master, leaf))
    zeros = [nn.Parameter(_zeros(master)) for _, master, _ in unlike.values()]
    optimizer = make(named_weights(weights.module, [name for name, _, _ in unlike.values()], zeros))
    if isinstance(optimizer, LateGradients):
        optimizer.delay = 1.0
    for _ in range(_NUM_STEPS):
        for weight in zeros:
            weight.grad = _zeros(weight)
        optimizer.step()
    for weight, (_, _, leaf) in zip(zeros, unlike.values(), strict=True):
        _zeros(leaf).copy_(weight.detach())  # stages that compute in another precision have copies of what was stepped


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, requires_grad=False)
