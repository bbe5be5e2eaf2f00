"""Layers are measured one by one: what they keep is counted exactly, and what disturbs a measurement for a while does not show."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypipe.actors.measure.layer_costs import USUAL_EFFORT, Effort, LayerMeasurement
from raypipe.actors.measure.layers import measure_layers
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.artifacts.profile import LayerTimes
from raypipe.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from raypipe.errors import ConfigError, InputError
from raypipe.model import Batch, Layer, Model
from raypipe.models.mlp import mlp
from raypipe.models.ngram_gpt import ngram_gpt
from raypipe.models.towers import two_towers
from raypipe.models.waiting import waiting
from raypipe.profiling.linearize import linearize
from raypipe.profiling.profiler import DeviceKind, Measured, model_profile, profile_model

NUM_ROWS, WIDTH = 4, 16
TENSOR_BYTES = NUM_ROWS * WIDTH * 8
QUICK = Effort(repeats=2, warm_up=1)


def batch(*names: str) -> Batch:
    return {name: torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64) for name in names}


def measure(model: Model, rows: Batch, effort: Effort = QUICK) -> list[LayerMeasurement]:
    return measure_layers(model, rows, optimizer=partial(build_optimizer, OptimizerConfig()), seed=0, effort=effort)


def one_layer(build: Callable[[], nn.Module]) -> Model:
    return Model((Layer("only", build, inputs=(), batch=("inputs",)),), mean)


def mean(output: Tensor, _: Batch) -> Tensor:
    return output.mean()


def test_bytes_are_those_of_the_tensors_that_are_kept() -> None:
    first, middle, last = measure(mlp(num_layers=3, width=WIDTH, dtype="float64"), batch("inputs", "targets"))
    assert [layer.name for layer in (first, middle, last)] == ["layer-0", "layer-1", "layer-2"]
    assert {layer.output_bytes for layer in (first, middle, last)} == {TENSOR_BYTES}
    assert {layer.parameter_bytes for layer in (first, middle, last)} == {(WIDTH + 1) * WIDTH * 8}
    # The input, for the gradient of the weights, and the output of tanh; of the last, the output and the targets, for the loss.
    assert [layer.saved_bytes for layer in (first, middle, last)] == [2 * TENSOR_BYTES, 2 * TENSOR_BYTES, 3 * TENSOR_BYTES]
    # The input, and the gradient of the product: tanh and the loss are done with.
    assert [layer.weight_grad_saved_bytes for layer in (middle, last)] == [2 * TENSOR_BYTES] * 2
    # Nobody takes the gradient of the first layer's input: all of its backward is put off, with the gradient of its output.
    assert first.weight_grad_saved_bytes == 3 * TENSOR_BYTES


@pytest.mark.parametrize(
    ("optimizer", "of_matrix", "of_vector"),
    [
        (OptimizerConfig(name="sgd"), 0, 0),
        (OptimizerConfig(name="torch.optim.Adafactor"), 8 * 2 * WIDTH + 4, 8 * WIDTH + 4),
        (OptimizerConfig(name="muon"), 8 * WIDTH**2, 2 * 8 * WIDTH + 4),
        (OptimizerConfig(name="muon", lookahead=1.0), 2 * 8 * WIDTH**2, 3 * 8 * WIDTH + 4),
    ],
)
def test_the_state_of_the_optimizer_is_measured(optimizer: OptimizerConfig, of_matrix: int, of_vector: int) -> None:
    rows = batch("inputs", "targets")
    first, *_ = measure_layers(
        mlp(num_layers=2, width=WIDTH, dtype="float64"), rows, optimizer=partial(build_optimizer, optimizer), seed=0, effort=QUICK
    )
    assert first.state_bytes == of_matrix + of_vector


def test_frozen_weights_are_told_from_trained_ones() -> None:
    model = one_layer(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).double().requires_grad_(False), nn.Linear(WIDTH, 1).double()))
    (found,) = measure(model, batch("inputs"))
    assert (found.parameter_bytes, found.frozen_bytes) == ((WIDTH + 1) * (WIDTH + 1) * 8, (WIDTH + 1) * WIDTH * 8)
    profile = model_profile([[found]], model, name="m", microbatch_size=NUM_ROWS)
    assert profile.layers[0].trained_bytes == (WIDTH + 1) * 8
    (trained,) = measure(one_layer(lambda: nn.Linear(WIDTH, 1).double()), batch("inputs"))
    assert model_profile([[trained]], model, name="m", microbatch_size=NUM_ROWS).layers[0].frozen_bytes is None


def test_measuring_in_a_thread_writes_nothing_where_the_profiler_was_started_before() -> None:
    script = """
import threading
from tests.profiling.test_profiler import batch, measure
from raypipe.actors.measure.layers import start_profiler
from raypipe.models.mlp import mlp
start_profiler()
thread = threading.Thread(target=measure, args=(mlp(num_layers=1, dtype="float64"), batch("inputs", "targets")))
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_what_a_layer_needs_for_a_while_is_counted_beyond_what_it_keeps() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64), nn.Sigmoid())

    inner = Layer("inner", build)
    entry = partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    layers = (Layer("entry", entry, inputs=(), batch=("inputs",)), inner, Layer("exit", nn.Identity))
    measured = measure(Model(layers, mean), batch("inputs"))[1]
    # Kept are its input and the output of the sigmoid. At the most there are besides the gradients of that, of the product, of the input
    # and of the weight, which is then added to the others.
    assert measured.saved_bytes == 2 * TENSOR_BYTES
    assert measured.working_bytes == 3 * TENSOR_BYTES + WIDTH * WIDTH * 8
    assert measured.input_grad_working_bytes == 3 * TENSOR_BYTES


def test_a_layer_without_weights_keeps_nothing_for_them() -> None:
    layers = (Layer("entry", partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64), inputs=(), batch=("inputs",)), Layer("tanh", nn.Tanh))
    measured = measure(Model((*layers, Layer("exit", partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64))), mean), batch("inputs"))[1]
    assert (measured.saved_bytes, measured.weight_grad_saved_bytes) == (TENSOR_BYTES, 0)
    assert (measured.parameter_bytes, measured.update_s) == (0, 0.0)


def test_the_rows_are_those_that_the_microbatch_looks_up() -> None:
    model = ngram_gpt(num_layers=1, d_model=4, num_heads=1, sequence_length=8, table_rows=101)
    tokens = torch.arange(6).repeat(2, 1)
    measured = measure(model, {"tokens": tokens, "targets": tokens})
    # Both sequences are equal, and no two of their n-grams.
    assert (measured[0].gradient_rows, measured[0].looked_up_rows, measured[0].looked_up_bytes) == (12, 202, 202 * 4 * 4)
    first, *others = model_profile([measured], model, name="m", microbatch_size=2).layers
    assert (first.gradient_rows, first.looked_up_rows, first.looked_up_bytes) == (12, 202, 202 * 4 * 4)
    assert all(layer.gradient_rows is None and layer.looked_up_rows is None for layer in others)


class Clock:
    """Stands in for `time`: only sleeping takes any, and waiting for a core."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return 0.0

    def wait_for_core(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.waited_s += wait_s

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of measurements and of layers that wait."""
    made = Clock()
    for module in ("raypipe.actors.devices", "raypipe.models.waiting"):
        monkeypatch.setattr(f"{module}.time", made)
    monkeypatch.setattr("raypipe.actors.devices._waited_s", lambda: made.waited_s)
    return made


@pytest.mark.usefixtures("clock")
def test_times_are_those_that_layers_take() -> None:
    model = waiting(num_layers=2, width=WIDTH, forward_s=0.004, input_grad_s=0.008, weight_grad_s=0.006)
    entry, *waits = measure(model, batch("inputs"))
    assert (entry.forward_s, entry.backward_s, entry.weight_grad_s) == (0.0, 0.0, 0.0)
    for layer in waits:
        assert (layer.forward_s, layer.backward_s, layer.weight_grad_s) == pytest.approx((0.004, 0.014, 0.006))
        assert layer.spread == pytest.approx(0.0)
        assert layer.split_s == pytest.approx(0.0)


class Preempted(nn.Module):
    """Works for a while, and then waits for a core."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(0.004)
        self.clock.wait_for_core(0.002)
        out: Tensor = self.linear(x)
        return out


def test_while_a_layer_has_no_core_no_time_counts(clock: Clock) -> None:
    entry = Layer("entry", partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64), inputs=(), batch=("inputs",))
    model = Model((entry, Layer("preempted", partial(Preempted, clock)), Layer("exit", nn.Identity)), mean)
    assert measure(model, batch("inputs"))[1].forward_s == pytest.approx(0.004)


class Checkpointed(nn.Module):
    """Runs its forward again in every pass of its backward."""

    def __init__(self, clock: Clock, wait_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.clock = clock
        self.wait_s = wait_s

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return again

    def _run(self, x: Tensor) -> Tensor:
        self.clock.sleep(self.wait_s)
        return torch.tanh(self.linear(x))


def test_what_the_two_parts_of_a_backward_take_beyond_the_whole_is_measured(clock: Clock) -> None:
    entry = Layer("entry", partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64), inputs=(), batch=("inputs",))
    layers = (entry, Layer("again", partial(Checkpointed, clock, 0.004)), Layer("exit", nn.Identity))
    again = measure(Model(layers, mean), batch("inputs"))[1]
    assert (again.forward_s, again.backward_s, again.weight_grad_s, again.split_s) == pytest.approx((0.004, 0.004, 0.004, 0.004))


class Slow(nn.Module):
    """Waits in its forwards, for as long as it is told, in turn."""

    def __init__(self, clock: Clock, *waits_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.clock = clock
        self.waits_s = waits_s
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.clock.sleep(self.waits_s[self.num_calls % len(self.waits_s)])
        return x + self.weight


@pytest.mark.parametrize(("num_passes", "expected_s"), [(1, 0.006), (3, 0.001)])
def test_a_disturbance_that_lasts_for_a_pass_does_not_show_in_several(clock: Clock, num_passes: int, expected_s: float) -> None:
    # Of the layer as it is built for each pass, the last first; before that it is built to be compared with others.
    waits_s = [0.001] * (num_passes - 1) + [0.006, 0.001]
    model = one_layer(lambda: Slow(clock, waits_s.pop()))
    (measured,) = measure(model, batch("inputs"), Effort(repeats=4, warm_up=1, passes=num_passes))
    assert measured.forward_s == pytest.approx(expected_s)


def test_warming_up_is_not_measured(clock: Clock) -> None:
    # Four forwards for shapes and bytes, two for the only run of warm-up.
    model = one_layer(lambda: Slow(clock, 0.001, *[9.0] * 6, *[0.001] * 13))
    (measured,) = measure(model, batch("inputs"), Effort(repeats=2, warm_up=1))
    assert measured.forward_s == pytest.approx(0.001)


def test_two_runs_tell_of_no_time_shorter_than_theirs(clock: Clock) -> None:
    # Four forwards for shapes and bytes, two for each run, that of warm-up first; the first of a run is timed.
    model = one_layer(partial(Slow, clock, *[0.001] * 9, *[0.010] * 3))
    (measured,) = measure(model, batch("inputs"), Effort(repeats=2, warm_up=1))
    assert measured.forward_s == pytest.approx(0.001)
    assert measured.spread == pytest.approx(0.009 / 4 / 0.0055)


def test_the_spread_is_half_the_distance_of_the_quartiles_over_the_median(clock: Clock) -> None:
    # Every second forward is timed.
    model = one_layer(partial(Slow, clock, *[0.002] * 2, *[0.006] * 2))
    (measured,) = measure(model, batch("inputs"), Effort(repeats=8, warm_up=1))
    assert measured.spread == pytest.approx(0.5)
    assert measured.forward_s == pytest.approx(0.002)


class PerRow(nn.Module):
    """Waits for a time that does not depend on the rows, and for one that does; may take so many rows at least."""

    def __init__(self, clock: Clock, *, fixed_s: float, row_s: float, least_rows: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.clock, self.fixed_s, self.row_s, self.least_rows = clock, fixed_s, row_s, least_rows

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(self.fixed_s + self.row_s * len(x))
        return x.view(max(len(x), self.least_rows), -1) + self.weight


@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.004, 0.001), (0.0, 0.001), (0.004, 0.0)])
def test_the_part_of_the_time_that_fewer_rows_take_as_well_is_measured(clock: Clock, fixed_s: float, row_s: float) -> None:
    (measured,) = measure(one_layer(partial(PerRow, clock, fixed_s=fixed_s, row_s=row_s)), batch("inputs"), USUAL_EFFORT)
    assert measured.forward_s == pytest.approx(fixed_s + NUM_ROWS * row_s)
    assert measured.fixed_share == pytest.approx(fixed_s / (fixed_s + NUM_ROWS * row_s))


def test_a_layer_that_takes_no_fewer_rows_is_measured_all_the_same(clock: Clock) -> None:
    (measured,) = measure(one_layer(partial(PerRow, clock, fixed_s=0.001, row_s=0.001, least_rows=3)), batch("inputs"), USUAL_EFFORT)
    assert measured.forward_s == pytest.approx(0.005)
    assert measured.fixed_share is None


def test_of_one_row_and_of_few_runs_no_part_is_told(clock: Clock) -> None:
    model = one_layer(partial(PerRow, clock, fixed_s=0.001, row_s=0.001))
    (of_one,) = measure(model, {"inputs": torch.zeros(1, WIDTH, dtype=torch.float64)}, USUAL_EFFORT)
    (of_few,) = measure(model, batch("inputs"), QUICK)
    assert of_one.fixed_share is of_few.fixed_share is None


class Keeping(nn.Module):
    """Adds what it was given before, as a layer with a state does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight if self.before is None else x + self.weight + self.before
        self.before = x.detach()
        return y


def test_a_layer_with_a_state_of_all_rows_is_measured_in_several_passes() -> None:
    (measured,) = measure(one_layer(Keeping), batch("inputs"), Effort(repeats=3, warm_up=1, passes=2))
    assert measured.forward_s > 0
    assert measured.fixed_share is None


def test_merged_layers_have_the_fixed_part_of_all() -> None:
    times = [LayerTimes(forward_s=1.0, backward_s=3.0, weight_grad_s=1.0, fixed_share=share) for share in (0.5, None)]
    assert LayerTimes.of(times).fixed_share == pytest.approx(0.25)
    assert LayerTimes.of(times[1:]).fixed_share is None
    assert times[0].on_rows(2.0).fixed_share == pytest.approx(1 / 3)
    assert times[0].on_rows(2.0).forward_s == pytest.approx(1.5)


def test_a_misspelt_tied_weight_is_told_by_its_layer() -> None:
    model = dataclasses.replace(mlp(num_layers=2), ties=((("layer-0", "linear.wieght"), ("layer-1", "linear.weight")),))
    with pytest.raises(ConfigError, match=r"layer 'layer-0' is tied by its weight 'linear.wieght'.*did you mean 'linear.weight'"):
        measure(model, {name: rows.float() for name, rows in batch("inputs", "targets").items()})


def measurement(name: str, seconds: float, *, spread: float = 0.0) -> LayerMeasurement:
    return LayerMeasurement(
        name=name,
        forward_s=seconds,
        backward_s=2 * seconds,
        weight_grad_s=seconds,
        split_s=seconds / 4,
        output_bytes=1,
        saved_bytes=2,
        weight_grad_saved_bytes=3,
        parameter_bytes=4,
        tied_bytes=2,
        update_s=seconds,
        spread=spread,
        working_bytes=5,
        input_grad_working_bytes=6,
    )


def test_a_profile_has_the_means_of_devices_that_measured_together() -> None:
    model = mlp(num_layers=2)
    measured = [[measurement("layer-0", seconds), measurement("layer-1", 2 * seconds)] for seconds in (1.0, 3.0)]
    profile = model_profile(measured, model, name="m", microbatch_size=4)
    assert profile.named_edges is None
    assert [layer.times for layer in profile.layers] == [
        LayerTimes(forward_s=2.0, backward_s=4.0, weight_grad_s=2.0, split_s=0.5),
        LayerTimes(forward_s=4.0, backward_s=8.0, weight_grad_s=4.0, split_s=1.0),
    ]
    assert [layer.update_s for layer in profile.layers] == [2.0, 4.0]
    assert (profile.layers[0].saved_bytes, profile.layers[0].weight_grad_saved_bytes) == (2, 3)
    assert (profile.layers[0].working_bytes, profile.layers[0].input_grad_working_bytes) == (5, 6)


def test_a_profile_keeps_the_branches_of_its_model() -> None:
    model = two_towers(num_left_layers=1, num_right_layers=1)
    profile = model_profile([[measurement(layer.name, 1.0) for layer in model.layers]], model, name="m", microbatch_size=4)
    assert [(edge.producer, edge.consumer) for edge in profile.edges()] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("couples", "written"), [(True, True), (False, None)])
def test_a_profile_says_of_a_loss_that_couples_rows(couples: bool, written: bool | None) -> None:
    model = dataclasses.replace(two_towers(num_left_layers=1, num_right_layers=1), loss_couples_rows=couples)
    profile = model_profile([[measurement(layer.name, 1.0) for layer in model.layers]], model, name="m", microbatch_size=4)
    assert profile.loss_couples_rows is linearize(profile).profile.loss_couples_rows is written


def test_a_tensor_that_a_layer_takes_twice_is_one_edge() -> None:
    pair = Model((Layer("a", nn.Identity, inputs=()), Layer("b", nn.Bilinear, inputs=("a", "a"))), mean)  # type: ignore[arg-type]
    profile = model_profile([[measurement("a", 1.0), measurement("b", 1.0)]], pair, name="m", microbatch_size=4)
    assert len(profile.edges()) == 1


def test_the_spread_of_merged_layers_is_weighted_by_their_times() -> None:
    times = tuple(LayerTimes(forward_s=seconds, backward_s=0.0, weight_grad_s=0.0) for seconds in (1.0, 3.0, 0.0, 5.0))
    measured = Measured("cpu", "here/0", times, spreads=(0.4, 0.2, 9.0, 0.1))
    assert measured.merged_spreads(((0, 1), (2,), (3,))) == pytest.approx((0.25, 0.0, 0.1))


def test_kinds_of_devices_are_read_with_their_nodes() -> None:
    assert DeviceKind.of("cpu") == DeviceKind("cpu")
    assert DeviceKind.of("cpu-slow=10.0.0.3") == DeviceKind("cpu-slow", "10.0.0.3")


@pytest.mark.parametrize("text", ["", "=node", "cpu=", "cpu==10.0.0.3", "cpu fast=10.0.0.3", "cpu=a=b", "cpu= a"])
def test_a_kind_that_is_not_one_name_and_one_node_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected KIND or KIND=NODE"):
        DeviceKind.of(text)


def test_kinds_that_are_not_called_cpu_are_gpus() -> None:
    assert DeviceKind.of("h200=node-a").is_gpu
    assert not DeviceKind.of("cpu-slow=node-a").is_gpu


def config(path: str) -> TrainConfig:
    return TrainConfig(model=ModelConfig(function="raypipe.models.gpt:gpt"), data=DataConfig(path=path))


def test_data_that_cannot_be_read_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        profile_model(config(str(tmp_path / "none.parquet")))


def test_one_device_of_each_kind_is_enough() -> None:
    with pytest.raises(ConfigError, match="the device kind cpu is given twice"):
        profile_model(config("none.parquet"), kinds=[DeviceKind("cpu"), DeviceKind("cpu", "10.0.0.1")])


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (lambda output, batch: output.mean(dim=1), r"the model's loss has shape \(4,\); expected a scalar tensor"),
        (lambda output, batch: 1.0, "the model's loss is of type float"),
        (lambda output, batch: output.detach().mean(), "the model's loss has no gradient"),
        (lambda output, batch: batch["labels"], "the model's loss failed: KeyError: 'labels'; it got an output of shape"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_named_before_training(loss: Callable[[Tensor, Batch], Tensor], problem: str) -> None:
    model = dataclasses.replace(mlp(num_layers=2, width=WIDTH, dtype="float64"), loss=loss)
    with pytest.raises(ConfigError, match=problem):
        measure(model, batch("inputs", "targets"))
