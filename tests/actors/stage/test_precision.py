"""Training in low precision: which weights a backward reads, and that synchronous schedules give what plain autocast gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.actors.execution.batches import BatchSource
from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.measure.layer_costs import Effort
from raypipe.actors.measure.layers import measure_layers
from raypipe.actors.stage.layers import RngKey
from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.precision import build_stage, prepare
from raypipe.actors.stage.state import export_layers, import_layers
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts.cut import Cut
from raypipe.config import Precision
from raypipe.errors import ConfigError
from raypipe.model import Batch, Layer, Model
from raypipe.models.gpt import gpt
from raypipe.models.mlp import Dense, mean_squared_error, mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import OpKind, Schedule, WeightRule, reads
from raypipe.schedules.passes import evaluation, recompute, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.actors.execution.test_executor import ASYNCHRONOUS
from tests.actors.low_precision import furthest, masters_of, train_low
from tests.actors.oracles import (
    HandPipeline,
    LowHandPipeline,
    RandomRows,
    RandomTokens,
    StaleHandPipeline,
    Trained,
    train_unsplit,
)

ROWS = RandomRows(dtype=torch.float32)
RATE = 1.0
TOLERANCE = 1e-6
"""Of weights around 0.1. All compared runs take the same roundings, and differ by nothing at all where products add up in one order."""
NUM_MICROBATCHES = 4
LOW = [Precision.BF16_MIXED, Precision.BF16]


def pipeline(
    model: Model,
    schedule: Schedule,
    precision: Precision,
    *,
    batches: BatchSource = ROWS,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    rate: float = RATE,
) -> LocalPipeline:
    validate(schedule)
    return LocalPipeline(
        model,
        cut=Cut.equal(len(model.layers), schedule.num_stages, model.edges()),
        schedule=schedule,
        batches=batches,
        optimizer=partial(optimizer, lr=rate),
        learning_rate=lambda _: rate,
        precision=precision,
    )


def message_dtypes(run: LocalPipeline) -> set[torch.dtype]:
    edges = run.executors[0].edges.specs
    return {tensor.spec.dtype for layers in edges.values() for tensors in layers for tensor in tensors}


def by_hand(kind: type[HandPipeline], model: Model, schedule: Schedule) -> list[list[Tensor]]:
    """The weights of each layer as an interpreter leaves them."""
    interpreter = kind(model, schedule, ROWS, learning_rate=RATE)
    interpreter.run()
    return [[versions[-1].weight, versions[-1].bias] for versions in interpreter.history]


# Which weights a backward reads


@pytest.mark.combined
@pytest.mark.parametrize(
    ("again", "published", "precision"),
    [
        pytest.param(False, False, Precision.BF16_MIXED, id="autocast"),
        pytest.param(True, False, Precision.BF16_MIXED, id="autocast-recomputed"),
        pytest.param(True, True, Precision.BF16_MIXED, id="autocast-recomputed-owner-publishes"),
        pytest.param(False, False, Precision.BF16, id="bf16"),
    ],
)
@pytest.mark.parametrize(("name", "size"), [*ASYNCHRONOUS, pytest.param("amdp-flush", ScheduleRequest(4, 4, 4), id="amdp-flush")])
def test_an_asynchronous_window_in_low_precision_equals_its_rule_done_by_hand(
    name: str, size: ScheduleRequest, again: bool, published: bool, precision: Precision
) -> None:
    """Of dense layers, autocast leaves nothing in float32: both precisions round alike."""
    schedule = build(name, size)
    if again:
        schedule = recompute(schedule, range(0, schedule.num_stages, 2))
    if published:
        if len(schedule.pipelines) == 1:
            pytest.skip("a copy alone owns itself")
        schedule = shard_optimizer(schedule)
    model = mlp(num_layers=schedule.num_stages)
    run = pipeline(model, schedule, precision)
    run.run_window()
    assert furthest(run, by_hand(LowHandPipeline, model, schedule)) < TOLERANCE
    assert message_dtypes(run) == {torch.bfloat16}
    # The first stage has one layer, whose input needs no gradient, and the gradient of its weights does not depend on them; what differs
    # in the second alone changes no weights but those of the first, and hardly.
    backwards = [op for op, _ in schedule.ops() if op.kind is OpKind.BACKWARD and op.stage > 1]
    again_of = {op: op._replace(kind=OpKind.RECOMPUTE) for op in backwards}
    forwards = {op: again if again in schedule.places else op._replace(kind=OpKind.FORWARD) for op, again in again_of.items()}
    if any(reads(schedule, op) > reads(schedule, forward) for op, forward in forwards.items()):
        assert furthest(run, by_hand(StaleHandPipeline, model, schedule)) > 20 * TOLERANCE


class CastsItself(Dense):
    """Calls autocast behind raypipe's back."""

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(*inputs)


def in_float32(output: Tensor, batch: Batch) -> Tensor:
    return mean_squared_error(output.float(), batch)


@pytest.mark.parametrize("name", ["async-1f1b", "amdp"])
def test_the_copies_that_autocast_makes_itself_are_those_of_the_forward(name: str) -> None:
    """The control of the test above: were the copies left to autocast, it would fail."""
    schedule = build(name, ScheduleRequest(4, 4, 6))
    plain = mlp(num_layers=schedule.num_stages)
    last = len(plain.layers) - 1
    layers = tuple(
        dataclasses.replace(layer, build=partial(CastsItself, in_width=16, out_width=16, dtype=torch.float32, tanh=index != last))
        for index, layer in enumerate(plain.layers)
    )
    run = pipeline(Model(layers, in_float32), schedule, Precision.FLOAT32)
    run.run_window()
    assert furthest(run, by_hand(StaleHandPipeline, plain, schedule)) < TOLERANCE
    assert furthest(run, by_hand(LowHandPipeline, plain, schedule)) > 20 * TOLERANCE


# Synchronous schedules

SYNCHRONOUS = [("1f1b", 4, 1), ("gpipe", 1, 1), ("zb-h1", 4, 1), ("zb-v", 2, 2), ("chimera", 4, 1)]


def plain_autocast(model: Model, batches: BatchSource, *, cached: bool) -> Trained:
    return train_unsplit(
        model,
        batches,
        num_updates=6,
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=1e-3,
        max_grad_norm=1e9,
        autocast=torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached),
    )


@pytest.mark.combined
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("name", "devices", "chunks"), SYNCHRONOUS)
def test_autocast_over_stages_equals_plain_autocast(name: str, devices: int, chunks: int, again: bool) -> None:
    schedule = build(name, ScheduleRequest(devices, NUM_MICROBATCHES, 3, chunks))
    schedule = recompute(schedule, range(schedule.num_stages)) if again else schedule
    model = mlp(num_layers=8)
    run = pipeline(model, schedule, Precision.BF16_MIXED, optimizer=torch.optim.AdamW, rate=1e-3)
    losses = [loss for _ in range(2) for loss in mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)]
    for cached in (True, False):
        expected = plain_autocast(model, ROWS, cached=cached)
        assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
        assert furthest(run, expected.layers) < TOLERANCE


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_gpt_under_autocast_equals_plain_autocast(name: str) -> None:
    """Norms and embeddings stay in float32, and so do the sums of the hidden states that pass between the stages."""
    model = gpt(num_layers=4, d_model=32, num_heads=2, sequence_length=16)
    run = pipeline(
        model,
        build(name, ScheduleRequest(3, NUM_MICROBATCHES, 3)),
        Precision.BF16_MIXED,
        batches=RandomTokens(),
        optimizer=torch.optim.AdamW,
        rate=1e-3,
    )
    losses = [loss for _ in range(2) for loss in mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)]
    expected = plain_autocast(model, RandomTokens(), cached=True)
    assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
    assert furthest(run, expected.layers) < TOLERANCE
    assert message_dtypes(run) == {torch.float32}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_gpt_in_bfloat16_equals_one_process_that_keeps_float32_weights(name: str) -> None:
    model = gpt(num_layers=4, d_model=32, num_heads=2, sequence_length=16)
    run = pipeline(model, build(name, ScheduleRequest(3, NUM_MICROBATCHES, 3)), Precision.BF16, batches=RandomTokens(), rate=0.1)
    losses = [loss for _ in range(2) for loss in mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)]
    expected = train_low(model, RandomTokens(), precision=Precision.BF16, num_updates=6, num_microbatches=NUM_MICROBATCHES)
    assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
    assert furthest(run, expected.layers) < TOLERANCE
    assert message_dtypes(run) == {torch.bfloat16}


@pytest.mark.parametrize("precision", LOW)
def test_an_evaluation_between_asynchronous_windows_computes_with_the_newest_weights(precision: Precision) -> None:
    for name in ("pipedream-2bw", "async-1f1b"):
        schedule = build(name, ScheduleRequest(4, 4, 3))
        run = pipeline(mlp(num_layers=4), schedule, precision)
        run.run_window()
        check = evaluation(schedule, num_microbatches=1)
        (loss,) = mean_losses(run.evaluate(check, batches=ROWS), num_microbatches=1)
        x = ROWS.batch(0, (0.0, 1.0))["inputs"]
        weights = [weight.bfloat16() for _, weight in masters_of(run)]
        for number in range(0, 8, 2):
            x = functional.linear(x.bfloat16(), weights[number], weights[number + 1])
            x = x.tanh() if number < 6 else x
        assert loss == pytest.approx(float(in_float32(x, ROWS.batch(0, (0.0, 1.0)))), abs=TOLERANCE)


# Which weights are copied


class ManyWays(nn.Module):
    """Weights that autocast casts: whole, as views, and of several products; and one that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.eye(16))
        self.packed = nn.Parameter(torch.cat([torch.eye(16)] * 3))
        self.gain = nn.Parameter(torch.ones(16))
        self.unused = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.packed.chunk(3)
        y = functional.linear(x, first) + functional.linear(x, second) + x @ third.T
        return (y @ self.turned.T) * self.gain


class Compiled(nn.Module):
    """A compiled product; its operators do not show where it runs compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.product = torch.compile(self.linear.forward, backend=refuse)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x)
        return y


def refuse(*_: object) -> Callable[..., Any]:
    raise AssertionError("this is not to be compiled")


class TwoUses(nn.Module):
    """A weight that is a matrix of a product, and a factor beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + x * self.weight.sum(dim=0)


def prepared(build_module: Callable[[], nn.Module], *, precision: Precision, rule: WeightRule = WeightRule.LIVE) -> Weights:
    model = Model((Layer("only", build_module, inputs=(), batch=("inputs",)),), mean_squared_error)
    optimizer = partial(torch.optim.AdamW, lr=0.1)
    weights = build_stage(model, Cut.equal(1, 1, ()), 0, optimizer=optimizer, rule=rule, seed=0, precision=precision)
    prepare(weights, {}, ROWS.batch(0, (0.0, 1.0)), num_rows=6)
    return weights


def dtypes(weights: Weights) -> dict[str, torch.dtype]:
    return {name.split(".")[-1]: leaf.dtype for name, leaf in zip(weights.names, weights.versions.tensors(0), strict=True)}


@pytest.mark.parametrize("rule", WeightRule)
def test_weights_that_autocast_casts_are_copied_and_others_are_not(rule: WeightRule) -> None:
    low, high = torch.bfloat16, torch.float32
    weights = prepared(ManyWays, precision=Precision.BF16_MIXED, rule=rule)
    assert dtypes(weights) == {"turned": low, "packed": low, "gain": high, "unused": high}
    assert {master.dtype for master in weights.masters} == {high}
    assert weights.versions.low_precision_bytes == 4 * 16 * 16 * 2
    assert set(dtypes(prepared(ManyWays, precision=Precision.BF16, rule=rule)).values()) == {low}
    assert set(dtypes(prepared(ManyWays, precision=Precision.FLOAT32, rule=rule)).values()) == {high}


def test_weights_of_compiled_layers_are_copied_too() -> None:
    assert set(dtypes(prepared(Compiled, precision=Precision.BF16_MIXED)).values()) == {torch.bfloat16}


class Twice(nn.Module):
    """One weight in two products, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("build_module", [ManyWays, Twice])
def test_gradients_of_several_uses_of_a_weight_are_summed_as_autocast_without_its_cache_does(
    build_module: type[nn.Module], name: str
) -> None:
    model = Model((Layer("first", build_module, inputs=(), batch=("inputs",)), Layer("second", build_module)), in_float32)
    run = pipeline(
        model, build(name, ScheduleRequest(2, NUM_MICROBATCHES, 6)), Precision.BF16_MIXED, optimizer=torch.optim.AdamW, rate=1e-3
    )
    losses = mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)
    assert losses == pytest.approx(plain_autocast(model, ROWS, cached=False).losses, abs=TOLERANCE)


def test_a_weight_that_autocast_needs_in_both_precisions_is_refused_where_it_could_change_before_the_backward() -> None:
    with pytest.raises(ConfigError, match=r"stage 0: autocast needs layers.0.weight in bfloat16 and as built"):
        prepared(TwoUses, precision=Precision.BF16_MIXED)
    for rule in (WeightRule.FLUSH, WeightRule.STASH, WeightRule.DOUBLE_BUFFER):
        assert dtypes(prepared(TwoUses, precision=Precision.BF16_MIXED, rule=rule)) == {"weight": torch.float32}


def test_a_weight_that_autocast_needs_in_both_precisions_is_left_to_it() -> None:
    model = Model((Layer("first", TwoUses, inputs=(), batch=("inputs",)), Layer("second", TwoUses)), in_float32)
    run = pipeline(
        model, build("1f1b", ScheduleRequest(2, NUM_MICROBATCHES, 6)), Precision.BF16_MIXED, optimizer=torch.optim.AdamW, rate=1e-3
    )
    losses = mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)
    assert losses == pytest.approx(plain_autocast(model, ROWS, cached=False).losses, rel=TOLERANCE)


@pytest.mark.parametrize("rule", WeightRule)
@pytest.mark.parametrize("precision", LOW)
def test_a_checkpoint_has_what_the_optimizer_steps_and_brings_the_copies_up_to_date(precision: Precision, rule: WeightRule) -> None:
    before, after = (prepared(ManyWays, precision=precision, rule=rule) for _ in range(2))
    batch = ROWS.batch(0, (0.0, 1.0))
    before.begin_window()
    before.bind(0, 0)
    before.run(0, {}, batch, RngKey(0))[0][0].float().sum().backward()  # type: ignore[no-untyped-call]
    before.update(0, scale=1.0, learning_rate=0.1, keep_old=False)
    before.end_window()
    state = export_layers(before)
    assert {tensor.dtype for tensor in state[0].values()} == {torch.float32}
    import_layers(after, state)
    assert all(torch.equal(a, b) for a, b in zip(before.masters, after.masters, strict=True))
    assert torch.equal(
        before.run(before.versions.newest, {}, batch, RngKey(0))[0][0], after.run(after.versions.newest, {}, batch, RngKey(0))[0][0]
    )
    assert not torch.equal(after.masters[0], torch.eye(16))


def test_an_older_version_of_a_weight_in_low_precision_is_its_copy_alone() -> None:
    weights = prepared(partial(nn.Linear, 16, 16), precision=Precision.BF16_MIXED, rule=WeightRule.STASH)
    weights.begin_window()
    own = [master.data_ptr() for master in weights.masters]
    weights.bind(0, 0)
    weights.run(0, {}, ROWS.batch(0, (0.0, 1.0)), RngKey(0))[0][0].sum().backward()  # type: ignore[no-untyped-call]
    old = [leaf.clone() for leaf in weights.versions.tensors(0)]
    weights.update(0, scale=1.0, learning_rate=0.1, keep_old=True)
    assert [master.data_ptr() for master in weights.masters] == own
    assert all(torch.equal(leaf, was) for leaf, was in zip(weights.versions.tensors(0), old, strict=True))
    assert not any(torch.equal(leaf, was) for leaf, was in zip(weights.versions.tensors(1), old, strict=True))


# What it costs


def test_layers_are_measured_in_the_precision_of_the_run() -> None:
    def measured(precision: Precision) -> list[tuple[int, int, int, int]]:
        found = measure_layers(
            mlp(num_layers=2),
            ROWS.batch(0, (0.0, 1.0)),
            optimizer=partial(torch.optim.AdamW, lr=0.1),
            seed=0,
            effort=Effort(repeats=1, warm_up=0),
            precision=precision,
        )
        return [(layer.parameter_bytes, layer.low_precision_bytes, layer.output_bytes, layer.saved_bytes) for layer in found]

    tensor_bytes, weight_bytes = 6 * 16 * 4, 17 * 16 * 4
    # The input of the product and the output of tanh; of the last layer the input, the output and the targets.
    assert measured(Precision.FLOAT32) == [
        (weight_bytes, 0, tensor_bytes, 2 * tensor_bytes),
        (weight_bytes, 0, tensor_bytes, 3 * tensor_bytes),
    ]
    for precision in LOW:
        first, last = measured(precision)
        assert first == (weight_bytes, weight_bytes // 2, tensor_bytes // 2, tensor_bytes)
        # The loss keeps its output in float32.
        assert last == (weight_bytes, weight_bytes // 2, tensor_bytes // 2, tensor_bytes // 2 + 2 * tensor_bytes)


def test_the_default_precision_computes_as_the_model_builds_its_layers() -> None:
    weights = prepared(partial(nn.Linear, 16, 16), precision=Precision.FLOAT32)
    assert type(weights.module) is StageModule
    assert [leaf.data_ptr() for leaf in weights.versions.tensors(0)] == [master.data_ptr() for master in weights.masters]
