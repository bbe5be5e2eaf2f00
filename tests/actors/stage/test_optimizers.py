"""The optimizers that a configuration names, against their formulas, and trained with by pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.actors.execution.report import mean_losses
from raypipe.actors.local import LocalPipeline
from raypipe.actors.stage.joined_optimizer import JoinedOptimizer
from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.named_weights import NamedWeights
from raypipe.actors.stage.optimizers import build_optimizer, check_optimizer, check_patterns
from raypipe.actors.stage.state import export_layers
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts.cut import Cut
from raypipe.config import OptimizerConfig, OptimizerName, WeightGroup
from raypipe.errors import ConfigError, InputError
from raypipe.models.gpt import gpt
from raypipe.models.mlp import mlp
from raypipe.schedules.catalogue import build
from raypipe.schedules.ir import WeightRule
from raypipe.schedules.passes import shard_optimizer
from raypipe.schedules.request import ScheduleRequest
from tests.actors.oracles import RandomRows, largest_difference, layers_of, train_unsplit

RATE, DECAY, EPSILON = 1e-2, 0.1, 1e-8


def config(name: OptimizerName, *, beta1: float = 0.95) -> OptimizerConfig:
    return OptimizerConfig(name=name, learning_rate=RATE, beta1=beta1, beta2=0.99, epsilon=EPSILON, weight_decay=DECAY)


ADAM_LIKE = (OptimizerName.ADAMW, OptimizerName.NADAMW)


@pytest.mark.parametrize("name", ADAM_LIKE)
def test_steps_are_those_of_the_formula(name: OptimizerName) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((3, 2), (2,))]
    optimizer = build_optimizer(
        config(name), NamedWeights((("layer.matrix", weights[0]), ("layer.bias", weights[1])), outer=["layer.matrix"])
    )
    expected = [weight.detach().clone() for weight in weights]
    first = [torch.zeros_like(weight) for weight in expected]
    second = [torch.zeros_like(weight) for weight in expected]
    beta1, beta2 = 0.95, 0.99
    for step in range(1, 30):
        for position, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.grad = gradient
            m = first[position] = beta1 * first[position] + (1 - beta1) * gradient
            v = second[position] = beta2 * second[position] + (1 - beta2) * gradient**2
            mean = m / (1 - beta1**step)
            if name is OptimizerName.NADAMW:
                mean = beta1 * m / (1 - beta1 ** (step + 1)) + (1 - beta1) * gradient / (1 - beta1**step)
            decayed = expected[position] * (1 - RATE * (DECAY if position == 0 else 0.0))
            expected[position] = decayed - RATE * mean / ((v / (1 - beta2**step)).sqrt() + EPSILON)
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        assert torch.allclose(weight, value, rtol=0, atol=1e-7), "torch keeps the product of NAdam's momenta in float32"


@pytest.mark.parametrize("sharded", [False, True], ids=["all-update", "owner-publishes"])
@pytest.mark.parametrize("name", ADAM_LIKE)
def test_copies_of_a_stage_equal_the_unsplit_model(name: OptimizerName, sharded: bool) -> None:
    model = mlp(num_layers=4, dtype="float64")
    schedule = build("chimera", ScheduleRequest(4, 4, 3))
    run = LocalPipeline(
        model,
        cut=Cut.equal(4, 4, model.edges()),
        schedule=shard_optimizer(schedule) if sharded else schedule,
        batches=RandomRows(),
        optimizer=partial(build_optimizer, config(name)),
        learning_rate=lambda _: RATE,
        max_grad_norm=0.5,
    )
    losses = [loss for _ in range(4) for loss in mean_losses(run.run_window(), num_microbatches=4)]
    expected = train_unsplit(
        model,
        RandomRows(),
        num_updates=12,
        num_microbatches=4,
        learning_rate=RATE,
        max_grad_norm=0.5,
        optimizer=partial(build_optimizer, config(name)),
    )
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    for index, copies in layers_of(run).items():
        assert all(largest_difference(copy, expected.layers[index]) < 1e-10 for copy in copies)


OWN = "tests.actors.stage.own_optimizers"


def options(**values: Any) -> OptimizerConfig:
    return OptimizerConfig(**values)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (options(name="adamx"), r"no optimizer is called 'adamx'; did you mean 'adamax'\?; choose from: adamw, nadamw, muon, .*sgd"),
        (options(name="LBFGS"), "'LBFGS' cannot train a pipeline: it evaluates the loss several times in a step"),
        (options(name="torch.optim.SparseAdam"), "cannot train a pipeline: it takes sparse gradients only"),
        (options(name="sgd", options={"momentun": 0.9}), r"optimizer.options: sgd takes no 'momentun'; did you mean 'momentum'\?"),
        (options(name="sgd", options={"lr": 0.9}), "optimizer.options: 'lr' .*; set optimizer.learning_rate"),
        (options(name="sgd", options={"weight_decay": 0.9}), "set optimizer.weight_decay, or that of a group"),
        (options(name="sgd", options={"differentiable": True}), "raypipe does not differentiate updates"),
        (options(name="sgd", options={"nesterov": True}), "optimizer.name 'sgd' with .*nesterov=True.*: ValueError: Nesterov momentum"),
        (options(name="sgd", beta1=0.9), r"optimizer.beta1: sgd has nothing like that; leave it out. Its options are momentum, "),
        (options(name="rprop", weight_decay=0.1), "optimizer.weight_decay: rprop has no weight decay; leave it out"),
        (options(beta2=0.9, options={"betas": [0.9, 0.9]}), "optimizer.beta2 and the option 'betas' say the same"),
        (options(name="muon", options={"momentun": 0.9}), r"optimizer.options: muon takes no 'momentun'; did you mean 'momentum'\?"),
        (options(name="torch.optim.Muon", weight_decay=0.0, options={"ns_steps": 200}), "'torch.optim.Muon' cannot make a step: .*100"),
        (
            options(groups=(WeightGroup(weights=("a",), optimizer="sgd", options={"x": 1}),)),
            r"optimizer.groups\[0\].options: sgd takes no 'x'",
        ),
        (options(learning_rate_schedule=f"{OWN}:forgotten"), "optimizer.learning_rate_schedule .* no function 'forgotten'"),
        (options(name=f"{OWN}:Forgotten"), "no function 'Forgotten'"),
        (options(name=f"{OWN}:halved", options={"momentums": 1}), r"takes no 'momentums'; did you mean 'momentum'\?"),
    ],
)
def test_what_cannot_be_is_refused_before_there_are_devices(config: OptimizerConfig, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        check_optimizer(config)


@pytest.mark.parametrize("name", ["adamw", "NAdamW", "muon", "sgd", "torch.optim.Adafactor", "torch.optim.Muon", f"{OWN}:halved"])
def test_what_can_be_is_not(name: str) -> None:
    check_optimizer(OptimizerConfig(name=name, groups=(WeightGroup(weights=("*.bias",), weight_decay=0.0),)))


@pytest.mark.parametrize(
    ("name", "problem"), [("no_optimizer", "made a list, expected a torch.optim.Optimizer"), ("forgetful", "pass all on")]
)
def test_a_function_that_makes_no_optimizer_of_all_weights_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_optimizer(OptimizerConfig(name=f"{OWN}:{name}"), some_weights())


def some_weights() -> NamedWeights:
    shapes = {"embedding.weight": (5, 3), "block.weight": (3, 3), "block.norm": (3,), "block.kernel": (3, 3, 2), "head.weight": (5, 3)}
    return NamedWeights(
        ((name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()), outer=["embedding.weight", "head.weight"]
    )


def described(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """For each weight its weight decay and factor of the learning rate."""
    return {
        name: (group["weight_decay"], group.get("learning_rate_factor", 1.0))
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def test_a_weight_belongs_to_the_first_group_that_matches_and_vectors_do_not_decay() -> None:
    config = OptimizerConfig(
        weight_decay=0.2,
        groups=(
            WeightGroup(weights=("embedding.*",), learning_rate_factor=0.1),
            WeightGroup(weights=("*.weight", "*.norm"), weight_decay=0.5),
        ),
    )
    optimizer = build_optimizer(config, some_weights())
    assert isinstance(optimizer, torch.optim.AdamW), "one optimizer with groups"
    assert described(optimizer) == {
        "embedding.weight": (0.2, 0.1),
        "block.weight": (0.5, 1.0),
        "block.norm": (0.5, 1.0),
        "block.kernel": (0.2, 1.0),
        "head.weight": (0.5, 1.0),
    }
    assert described(build_optimizer(OptimizerConfig(), some_weights()))["block.norm"] == (0.0, 1.0)


def test_an_optimizer_of_a_group_takes_the_keys_of_the_section_that_it_has() -> None:
    config = OptimizerConfig(
        beta1=0.7,
        epsilon=1e-3,
        weight_decay=0.2,
        groups=(
            WeightGroup(weights=("embedding.*",), optimizer="rprop"),
            WeightGroup(weights=("block.*",), optimizer="torch.optim.Adam", options={"eps": 1e-5}),
        ),
    )
    check_optimizer(config)
    groups = {name: group for group in build_optimizer(config, some_weights()).param_groups for name in group["param_names"]}
    assert "weight_decay" not in groups["embedding.weight"]
    assert "betas" not in groups["embedding.weight"]
    assert [(groups[name]["betas"], groups[name]["eps"]) for name in ("block.weight", "head.weight")] == [
        ((0.7, 0.999), 1e-5),
        ((0.7, 0.95), 1e-3),
    ]
    assert groups["block.weight"]["weight_decay"] == 0.2


def muon_weights(*groups: WeightGroup) -> set[str]:
    made = build_optimizer(OptimizerConfig(name="muon", groups=groups), some_weights())
    parts = made.parts if isinstance(made, JoinedOptimizer) else [made]
    return {name for part in parts if isinstance(part, torch.optim.Muon) for group in part.param_groups for name in group["param_names"]}


def test_muon_steps_the_matrices_between_embeddings_and_last_layer_and_what_it_is_told_to() -> None:
    assert muon_weights() == {"block.weight"}
    assert muon_weights(WeightGroup(weights=("head.*",), learning_rate_factor=0.5)) == {"block.weight"}
    assert muon_weights(WeightGroup(weights=("head.*", "*.kernel"), optimizer="muon")) == {"block.weight", "head.weight"}
    assert muon_weights(WeightGroup(weights=("block.*",), optimizer="sgd")) == set()


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        ([("*.bias",)], r"optimizer.groups\[0\].weights: '\*.bias' gets no trained weight; there are embedding.weight, "),
        ([("block.wieght",)], r"'block.wieght' gets no trained weight; did you mean 'block.weight'\?"),
        ([("block.*",), ("block.norm",)], r"optimizer.groups\[1\].weights: 'block.norm' gets no .*: earlier groups have all"),
    ],
)
def test_a_pattern_that_gets_no_weight_is_refused(patterns: list[tuple[str, ...]], problem: str) -> None:
    groups = tuple(WeightGroup(weights=weights) for weights in patterns)
    with pytest.raises(ConfigError, match=problem):
        check_patterns(OptimizerConfig(groups=groups), [name for name, _ in some_weights()])
    check_patterns(OptimizerConfig(groups=(WeightGroup(weights=("block.*", "head.*")),)), [name for name, _ in some_weights()])


def test_full_names_and_outer_weights_are_those_of_the_model_whatever_the_cut() -> None:
    model = gpt(num_layers=2, d_model=8, num_heads=2, sequence_length=4, tie_embeddings=True)
    found: list[NamedWeights] = []

    def noting(weights: NamedWeights) -> torch.optim.Optimizer:
        found.append(weights)
        return torch.optim.SGD(weights, lr=0.1)

    for num_stages in (1, 2, 4):
        found.clear()
        cut = Cut.equal(len(model.layers), num_stages, model.edges(), model.tied_layers())
        for stage in range(num_stages):
            Weights(StageModule(model, cut, stage, seed=0), optimizer=noting, rule=WeightRule.FLUSH)
        names = {name for weights in found for name, _ in weights}
        assert "block-0.mlp_in.weight" in names
        assert "head.logits.weight" not in names, "it is the embedding's"
        outer = {"embedding.token.weight", "embedding.position.weight", "head.norm.weight", "head.norm.bias"}
        assert {name for weights in found for name in weights.outer} == outer
        assert [[name for name, _ in weights if name == "embedding.token.weight"] for weights in (found[0], found[-1])] == [
            ["embedding.token.weight"]
        ] * 2


def test_state_elsewhere_than_by_weight_is_refused_when_it_is_saved() -> None:
    model = mlp(num_layers=1)
    module = StageModule(model, Cut.equal(1, 1, model.edges()), 0, seed=0)
    weights = Weights(module, optimizer=partial(build_optimizer, OptimizerConfig(name=f"{OWN}:Counting")), rule=WeightRule.FLUSH)
    export_layers(weights)
    weights.update(0, scale=1.0, learning_rate=0.1, keep_old=False)
    with pytest.raises(ConfigError, match="changes 'num_steps' of its groups"):
        export_layers(weights)
