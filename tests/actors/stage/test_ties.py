"""Weights that several layers share: on one stage, on several, on copies of stages, under every schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raypipe.actors.execution.report import mean_losses, norms_of
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.checkpoint import Checkpoint, load_modules, load_stages
from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.actors.stage.optimizers import build_optimizer
from raypipe.actors.stage.snapshot import save_stages
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts.checkpoint_files import CheckpointIndex
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig
from raypipe.errors import ConfigError, InputError, PlanError
from raypipe.model import Layer, Model, Tie
from raypipe.models.gpt import gpt
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.collectives import Await, CollectiveKind, Start
from raypipe.schedules.ir import Schedule, UpdateScope, WeightRule
from raypipe.schedules.lower import DeviceProgram, Item, Placement
from raypipe.schedules.passes import evaluation, over_graph, recompute, shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from raypipe.schedules.validate import validate
from tests.actors.execution.test_executor import ASYNCHRONOUS
from tests.actors.oracles import RandomRows, largest_difference, layers_of, run_beside_hand, train_unsplit, unsplit

LEARNING_RATE = 1e-2
MAX_GRAD_NORM = 0.05
NUM_MICROBATCHES = 4
NUM_UPDATES = 6
TIE: Tie = (("layer-0", "linear.weight"), ("layer-7", "linear.weight"))


def tied_mlp(*ties: Tie, num_layers: int = 8, dtype: str = "float64") -> Model:
    return dataclasses.replace(mlp(num_layers=num_layers, dtype=dtype), ties=ties or (TIE,))


def cut_of(model: Model, num_stages: int) -> Cut:
    return Cut.equal(len(model.layers), num_stages, model.edges(), model.tied_layers())


def adamw(weights: list[nn.Parameter] | NamedWeights) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=LEARNING_RATE)


def pipeline(
    model: Model, schedule: Schedule, *, cut: Cut | None = None, placement: Placement | None = None, sharded: bool = False
) -> LocalPipeline:
    cut = cut or cut_of(model, schedule.num_stages)
    schedule = over_graph(schedule, cut.graph)
    if sharded:
        schedule = shard_optimizer(schedule)
    validate(schedule)
    return LocalPipeline(
        model,
        cut=cut,
        schedule=schedule,
        batches=RandomRows(),
        optimizer=adamw,
        learning_rate=lambda _: LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        placement=placement,
    )


def check_copies(run: LocalPipeline, model: Model) -> None:
    """Copies of layers, and what layers share, are equal to the last bit."""
    copies: dict[str, list[dict[str, Tensor]]] = {}
    for on_device in run.weights:
        for weights in on_device.values():
            for index in weights.module.indices:
                layer = weights.module.layers[str(index)]
                copies.setdefault(model.layers[index].name, []).append({
                    name: weight.detach() for name, weight in layer.named_parameters(remove_duplicate=False)
                })
    for of_layer in copies.values():
        assert all(torch.equal(copy[name], of_layer[0][name]) for copy in of_layer for name in copy)
    for (first, name), *others in model.ties:
        assert all(torch.equal(copies[other][0][called], copies[first][0][name]) for other, called in others)


def check_training(run: LocalPipeline, model: Model, scope: UpdateScope, num_windows: int, **options: object) -> None:
    reports = [run.run_window() for _ in range(num_windows)]
    losses = [loss for window in reports for loss in mean_losses(window, num_microbatches=NUM_MICROBATCHES)]
    norms = [norm for window in reports for _, norm in sorted(norms_of(window, scope=scope).items())]
    expected = train_unsplit(
        model,
        RandomRows(),
        num_updates=len(losses),
        num_microbatches=NUM_MICROBATCHES,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        **options,  # type: ignore[arg-type]
    )
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    assert norms == pytest.approx(expected.norms, rel=1e-9)
    for index, copies in layers_of(run).items():
        assert largest_difference(copies[0], expected.layers[index]) < 1e-10
    check_copies(run, model)


SYNCHRONOUS = [
    pytest.param("gpipe", 4, 1, id="gpipe"),
    pytest.param("1f1b", 4, 1, id="1f1b"),
    pytest.param("1f1b", 1, 1, id="one-stage"),
    pytest.param("interleaved", 4, 2, id="interleaved"),
    pytest.param("zb-h1", 4, 1, id="zb-h1"),
    pytest.param("zb-v", 4, 2, id="zb-v"),
    pytest.param("zb-auto", 4, 1, id="zb-auto"),
    pytest.param("chimera", 4, 1, id="chimera"),
    pytest.param("dualpipe", 2, 1, id="dualpipe"),
    pytest.param("dualpipe-v", 2, 2, id="dualpipe-v"),
    pytest.param("amdp-flush", 4, 1, id="amdp-flush"),
    pytest.param("amdp-flush", 3, 1, id="amdp-flush-three-devices"),
]


@pytest.mark.parametrize("sharded", [False, True], ids=["all-update", "owner-publishes"])
@pytest.mark.parametrize(("name", "devices", "chunks"), SYNCHRONOUS)
def test_updates_in_float64_equal_the_unsplit_model(name: str, devices: int, chunks: int, sharded: bool) -> None:
    schedule = build(name, ScheduleRequest(devices, NUM_MICROBATCHES, 3, chunks))
    if sharded and len(schedule.pipelines) == 1:
        pytest.skip("a copy alone owns itself")
    model = tied_mlp()
    check_training(pipeline(model, schedule, sharded=sharded), model, UpdateScope.GLOBAL, NUM_UPDATES // 3)


@pytest.mark.parametrize(
    "ties",
    [
        pytest.param((tuple((f"layer-{index}", "linear.weight") for index in (7, 2, 3, 0)),), id="four-layers-the-last-first"),
        pytest.param((TIE, (("layer-1", "linear.weight"), ("layer-6", "linear.weight"))), id="two-weights"),
        pytest.param((TIE, (("layer-0", "linear.bias"), ("layer-7", "linear.bias"))), id="two-weights-of-the-same-layers"),
        pytest.param(((("layer-2", "linear.weight"), ("layer-3", "linear.weight")),), id="within-a-stage"),
        pytest.param(((("layer-2", "linear.weight"), ("layer-3", "linear.weight")), TIE), id="within-a-stage-and-across"),
    ],
)
@pytest.mark.parametrize(("name", "devices", "chunks"), [("1f1b", 4, 1), ("interleaved", 2, 2), ("zb-h1", 4, 1), ("chimera", 4, 1)])
def test_any_layers_may_share_a_weight(ties: tuple[Tie, ...], name: str, devices: int, chunks: int) -> None:
    model = tied_mlp(*ties)
    check_training(pipeline(model, build(name, ScheduleRequest(devices, NUM_MICROBATCHES, 2, chunks))), model, UpdateScope.GLOBAL, 2)


def groups_of(scope: UpdateScope) -> Callable[[nn.ModuleList], list[list[nn.Parameter]]]:
    """What is clipped together where the layers 0 and 1, 2 and 3 ... are stages, of which the first and the last share a weight."""

    def groups(modules: nn.ModuleList) -> list[list[nn.Parameter]]:
        shared = modules[0].get_parameter("linear.weight")
        stages = [[*modules[first].parameters(), *modules[first + 1].parameters()] for first in range(0, 8, 2)]
        own = [[weight for weight in stage if weight is not shared] for stage in stages]
        if scope is UpdateScope.STAGE:
            return [*own, [shared]]
        return [own[0] + own[3] + [shared], *own[1:3]]

    return groups


@pytest.mark.parametrize("sharded", [False, True], ids=["all-update", "owner-publishes"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize("scope", [UpdateScope.STAGE, UpdateScope.TIED])
def test_a_weight_counts_once_in_the_norm_of_every_scope(scope: UpdateScope, name: str, sharded: bool) -> None:
    model = tied_mlp()
    schedule = build(name, ScheduleRequest(4, NUM_MICROBATCHES, 2, update_scope=scope))
    check_training(pipeline(model, schedule, sharded=sharded), model, scope, 2, clipped_together=groups_of(scope))


def norms_at_updates(program: DeviceProgram) -> DeviceProgram:
    """Return the program in which norms of ties start where they are awaited."""
    items: list[Item] = []
    for item in program.items:
        is_norm = isinstance(item, Start | Await) and item.collective.kind is CollectiveKind.TIED_NORM
        if is_norm and isinstance(item, Start):
            continue
        items += [Start(item.collective), item] if is_norm and isinstance(item, Await) else [item]
    return dataclasses.replace(program, items=tuple(items))


@pytest.mark.parametrize("name", ["async-1f1b", "pipedream-2bw", "amdp"])
def test_norms_of_ties_that_start_early_clip_to_the_last_bit_as_those_at_the_update(name: str) -> None:
    model = tied_mlp((("layer-0", "linear.weight"), ("layer-3", "linear.weight")), num_layers=4)
    found = []
    for moved in (False, True):
        run = pipeline(model, build(name, ScheduleRequest(4, 4, 4, update_scope=UpdateScope.TIED)))
        if moved:
            early_programs = run.programs
            run.programs = tuple(map(norms_at_updates, early_programs))
            assert run.programs != early_programs
        norms = [norms_of(run.run_window(), scope=UpdateScope.TIED) for _ in range(2)]
        found.append((norms, layers_of(run)))
    assert all(norm > MAX_GRAD_NORM for window in found[0][0] for norm in window.values())
    assert found[0][0] == found[1][0]
    for early, late in zip(found[0][1].values(), found[1][1].values(), strict=True):
        for one, other in zip(early, late, strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("scope", UpdateScope)
def test_devices_that_share_the_rows_of_tied_stages_equal_the_unsplit_model(scope: UpdateScope) -> None:
    model = tied_mlp()
    schedule = build("1f1b", ScheduleRequest(4, NUM_MICROBATCHES, 2, update_scope=scope))
    placement = Placement((((0, 1 / 3), (1, 2 / 3)), ((2, 1.0),), ((3, 1.0),), ((4, 0.5), (5, 0.5))))
    options = {} if scope is UpdateScope.GLOBAL else {"clipped_together": groups_of(scope)}
    check_training(pipeline(model, schedule, placement=placement), model, scope, 2, **options)


@pytest.mark.parametrize("stages", [(0, 1, 2, 3), (3,)])
def test_stages_whose_forwards_run_again_equal_the_unsplit_model(stages: tuple[int, ...]) -> None:
    model = tied_mlp()
    check_training(pipeline(model, recompute(build("1f1b", ScheduleRequest(4, NUM_MICROBATCHES, 2)), stages)), model, UpdateScope.GLOBAL, 2)


@pytest.mark.parametrize("published", [False, True], ids=["all-update", "owner-publishes"])
@pytest.mark.parametrize(("name", "size"), ASYNCHRONOUS)
def test_an_asynchronous_window_equals_its_rule_done_by_hand(name: str, size: ScheduleRequest, published: bool) -> None:
    schedule = build(name, size)
    last = schedule.num_stages - 1
    model = tied_mlp((("layer-0", "linear.weight"), (f"layer-{last}", "linear.weight")), num_layers=last + 1)
    cut = cut_of(model, last + 1)
    schedule = over_graph(schedule, cut.graph)
    if published:
        if len(schedule.pipelines) == 1:
            pytest.skip("a copy alone owns itself")
        schedule = shard_optimizer(schedule)
    validate(schedule)
    run, _ = run_beside_hand(model, cut, schedule)
    check_copies(run, model)


@pytest.mark.parametrize(("name", "size"), ASYNCHRONOUS)
def test_late_gradients_of_a_shared_weight_are_corrected_alike_on_all_stages(name: str, size: ScheduleRequest) -> None:
    """Stages late by different amounts make one step with the weight that they share."""
    schedule = build(name, size)
    last = schedule.num_stages - 1
    model = tied_mlp((("layer-0", "linear.weight"), (f"layer-{last}", "linear.weight")), num_layers=last + 1)
    cut = cut_of(model, last + 1)
    config = OptimizerConfig(name="nadamw", gradient_correction=0.5)
    optimizer = partial(build_optimizer, config)
    run, _ = run_beside_hand(model, cut, over_graph(schedule, cut.graph), optimizer=optimizer, tolerance=1e-9)
    check_copies(run, model)


@pytest.mark.parametrize("rule", [WeightRule.STASH, WeightRule.DOUBLE_BUFFER])
def test_layers_of_one_stage_share_a_weight_in_every_version(rule: WeightRule) -> None:
    name = {WeightRule.STASH: "pipedream", WeightRule.DOUBLE_BUFFER: "pipedream-2bw"}[rule]
    ties = tuple((f"layer-{index}", "linear.weight") for index in (0, 1, 3))
    found = []
    for model in (tied_mlp(ties, num_layers=4), tied_mlp(ties[::-1], num_layers=4)):
        run = pipeline(model, build(name, ScheduleRequest(2, 1 if rule is WeightRule.STASH else 4, 4)))
        run.run_window()
        check_copies(run, model)
        found.append(layers_of(run)[3][0][1])
    assert not torch.equal(*found)  # the first layer of a tie gives the weight that all begin with


def test_copies_stay_equal_to_the_last_bit_in_float32() -> None:
    for name, devices in (("1f1b", 4), ("chimera", 4), ("async-1f1b", 4), ("amdp", 4)):
        model = gpt(num_layers=2, d_model=32, num_heads=2, sequence_length=16, tie_embeddings=True)
        cut = Cut.of_sizes((1, 1, 1, 1), model.edges(), model.tied_layers())
        run = LocalPipeline(
            model,
            cut=cut,
            schedule=over_graph(build(name, ScheduleRequest(devices, 4, 3)), cut.graph),
            batches=_Tokens(),
            optimizer=adamw,
            learning_rate=lambda _: LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
        )
        for _ in range(2):
            run.run_window()
            check_copies(run, model)


class _Tokens:
    def batch(self, microbatch: int, rows: tuple[float, float]) -> dict[str, Tensor]:
        tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(microbatch))
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def test_the_tied_gpt_trains_alike_whatever_the_cut() -> None:
    model = gpt(num_layers=2, d_model=32, num_heads=2, sequence_length=16, dropout=0.1, dtype="float64", tie_embeddings=True)
    found = []
    for sizes in ([4], [2, 2], [1, 3], [1, 1, 1, 1]):
        cut = Cut.of_sizes(sizes, model.edges(), model.tied_layers())
        schedule = over_graph(build("1f1b", ScheduleRequest(len(sizes), NUM_MICROBATCHES, 3)), cut.graph)
        run = LocalPipeline(
            model,
            cut=cut,
            schedule=schedule,
            batches=_Tokens(),
            optimizer=adamw,
            learning_rate=lambda _: LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
        )
        losses = mean_losses(run.run_window(), num_microbatches=NUM_MICROBATCHES)
        check = evaluation(schedule, num_microbatches=2)
        found.append(losses + mean_losses(run.evaluate(check, batches=_Tokens()), num_microbatches=2))
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-10)


# Beginning


def held(model: Model, cut: Cut, stage: int, *, seed: int = 0) -> Weights:
    return Weights(StageModule(model, cut, stage, seed=seed), optimizer=adamw, rule=WeightRule.FLUSH)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_all_members_begin_as_the_first_of_their_tie(first: int, num_stages: int) -> None:
    ties = ((f"layer-{first}", "linear.weight"), (f"layer-{3 - first}", "linear.weight"))
    model = tied_mlp(ties, num_layers=4)
    begins = build_layer(model.layers[first], index=first, seed=7).get_parameter("linear.weight")
    cut = cut_of(model, num_stages)
    for layer in (0, 3):
        module = StageModule(model, cut, cut.stage_of[layer], seed=7)
        assert torch.equal(module.get_parameter(f"layers.{layer}.linear.weight"), begins)
    if num_stages == 1:
        assert module.get_parameter("layers.0.linear.weight") is module.get_parameter("layers.3.linear.weight")


def test_every_name_of_a_tied_weight_in_its_layer_is_tied() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x))
            return result

    layers = (Layer("a", partial(nn.Linear, 4, 4), inputs=(), batch=("inputs",)), Layer("b", Twice))
    model = Model(layers, lambda output, _: output.sum(), ties=((("a", "weight"), ("b", "second.weight")),))
    for num_stages in (1, 2):
        module = StageModule(model, cut_of(model, num_stages), num_stages - 1, seed=0)
        assert module.get_parameter("layers.1.first.weight") is module.get_parameter("layers.1.second.weight")


# Checkpoints


def save(folder: Path, model: Model, cut: Cut, stages: list[Weights]) -> Checkpoint:
    for weights in stages:
        save_stages(folder, [weights])
    names = tuple(layer.name for layer in model.layers)
    return Checkpoint.finish(folder, CheckpointIndex(update=1, layers=names, model="tied", seed=0))


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4)])
def test_any_cut_reads_what_any_other_wrote(tmp_path: Path, before: int, after: int, first: int) -> None:
    ties = ((f"layer-{first}", "linear.weight"), (f"layer-{3 - first}", "linear.weight"))
    model = tied_mlp(ties, num_layers=4)
    run = pipeline(model, build("1f1b", ScheduleRequest(before, NUM_MICROBATCHES, 2)))
    run.run_window()
    checkpoint = save(tmp_path, model, cut_of(model, before), [weights for on_device in run.weights for weights in on_device.values()])
    assert "linear.weight" not in checkpoint.load_layer(3)
    assert "optimizer/exp_avg/linear.weight" in checkpoint.load_layer(0)
    resumed = pipeline(model, build("1f1b", ScheduleRequest(after, NUM_MICROBATCHES, 2)))
    resumed.num_updates = run.num_updates
    for on_device in resumed.weights:
        for weights in on_device.values():
            load_stages(checkpoint.path, [weights])
    check_copies(resumed, model)
    for pipe in (run, resumed):
        pipe.run_window()
    for index, copies in layers_of(resumed).items():
        assert largest_difference(copies[0], layers_of(run)[index][0]) < 1e-12
    modules = load_modules(checkpoint, model)
    assert modules[0].get_parameter("linear.weight") is modules[3].get_parameter("linear.weight")


def test_a_checkpoint_of_a_model_without_the_tie_is_refused(tmp_path: Path) -> None:
    tied = tied_mlp((("layer-0", "linear.weight"), ("layer-1", "linear.weight")), num_layers=2)
    model = dataclasses.replace(tied, ties=())
    for one, other in ((tied, model), (model, tied)):
        cut, read = cut_of(one, 2), cut_of(other, 2)
        save(tmp_path, one, cut, [held(one, cut, stage) for stage in range(2)])
        weights = held(other, read, 1)
        with pytest.raises(InputError, match="another model"):
            load_stages(tmp_path, [weights])


# Errors


@pytest.mark.parametrize(
    ("tie", "problem"),
    [
        ((("layer-0", "linear.weight"),), "names 1 weights"),
        ((("layer-0", "linear.weight"), ("layer-x", "linear.weight")), r"no layer is called 'layer-x'.*did you mean 'layer-"),
        ((("layer-0", "linear.weight"), ("layer-0", "linear.weight")), "tied twice"),
    ],
)
def test_a_tie_that_names_no_two_weights_is_refused(tie: Tie, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tied_mlp(tie)


def test_a_weight_in_two_ties_is_refused() -> None:
    with pytest.raises(ConfigError, match="write one tie with all that share it"):
        tied_mlp(TIE, (("layer-0", "linear.weight"), ("layer-1", "linear.weight")))


@pytest.mark.parametrize("num_stages", [1, 8])
def test_weights_that_cannot_be_one_are_named_when_they_are_built(num_stages: int) -> None:
    model = tied_mlp((("layer-0", "linear.weight"), ("layer-7", "linear.bias")))
    stage = num_stages - 1
    with pytest.raises(ConfigError, match=r"'linear.bias' of layer 'layer-7' is float64 \[16\].* of layer 'layer-0'.*\[16, 16\]"):
        StageModule(model, cut_of(model, num_stages), stage, seed=0)
    model = tied_mlp((("layer-0", "linear.weight"), ("layer-7", "linear.weigth")))
    with pytest.raises(ConfigError, match=r"layer 'layer-7' is tied by its weight 'linear.weigth'.*did you mean 'linear.weight'"):
        StageModule(model, cut_of(model, num_stages), stage, seed=0)


def test_a_cut_or_a_schedule_that_does_not_know_the_ties_is_refused() -> None:
    model = tied_mlp()
    with pytest.raises(PlanError, match=r"ties=model\.tied_layers"):
        StageModule(model, Cut.equal(8, 4, model.edges()), 0, seed=0)
    run = LocalPipeline(
        model,
        cut=cut_of(model, 4),
        schedule=build("1f1b", ScheduleRequest(4, NUM_MICROBATCHES)),
        batches=RandomRows(),
        optimizer=adamw,
        learning_rate=lambda _: LEARNING_RATE,
    )
    with pytest.raises(PlanError, match=r"ties the stages \(\(0, 3\),\), the schedule \(\)"):
        run.run_window()


def test_the_unsplit_gpt_has_one_weight_less() -> None:
    sizes = [sum(weight.numel() for weight in unsplit(gpt(tie_embeddings=tied)).parameters()) for tied in (False, True)]
    assert sizes[0] - sizes[1] == 256 * 256


class WithSpare(nn.Module):
    """A layer and a weight that it computes nothing with."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = build()
        self.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("scope", [UpdateScope.GLOBAL, UpdateScope.STAGE])
def test_a_shared_weight_without_any_gradient_is_left_alone(stages: int, scope: UpdateScope) -> None:
    """As by torch's optimizers, which would else let it decay."""
    plain = mlp(num_layers=4, dtype="float64")
    layers = tuple(dataclasses.replace(layer, build=partial(WithSpare, layer.build)) for layer in plain.layers)
    tie: Tie = (("layer-0", "spare"), ("layer-3", "spare"))
    model = dataclasses.replace(plain, layers=layers, ties=(tie,))
    run = pipeline(model, build("1f1b", ScheduleRequest(stages, NUM_MICROBATCHES, 3, update_scope=scope)))
    before = {index: copies[0][1].clone() for index, copies in layers_of(run).items()}
    run.run_window()
    for index, copies in layers_of(run).items():
        for spare, weight, _ in copies:
            assert torch.equal(spare, torch.ones_like(spare))
            assert not torch.equal(weight, before[index])
