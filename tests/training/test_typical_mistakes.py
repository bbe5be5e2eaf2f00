"""The typical mistakes of a new user: each is one clear message that names the place and the remedy, before any actor starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from raypipe.actors.execution.batches import MaskedTokenSource
from raypipe.config import DataConfig, OptimizerConfig, RunConfig, ScalingConfig, ScheduleConfig, WeightGroup
from raypipe.data.prepare import prepare
from raypipe.errors import ConfigError, InputError
from raypipe.model import Batch, Layer, Model
from raypipe.models.bert import bert
from raypipe.models.gpt import gpt
from raypipe.training.check_input import draft_layers
from raypipe.training.check_rows import CheckedRows
from raypipe.training.trainer import Trainer
from tests.models.transformers_models import save, small_config

SIZES = {"num_layers": 1, "d_model": 8, "num_heads": 2, "sequence_length": 16}


@dataclass(frozen=True)
class Rows:
    """Rows of fields by their trailing shapes; float ones are random, `tokens` and `targets` whole numbers below `num_tokens`."""

    shapes: Mapping[str, tuple[int, ...]]
    num_tokens: int = 256

    def __call__(self, split: str) -> Rows:
        return self

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        made: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            generator = torch.Generator().manual_seed(microbatch)
            made[name] = torch.randn(4, *shape, generator=generator)
            if name in {"tokens", "targets", "input_ids", "labels"}:
                made[name] = torch.full((4, *shape), self.num_tokens - 1)
        return made


def mean_square(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["targets"].float()).square().mean()


def by_row(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["targets"].float()).square().mean(-1)


def without_gradient(output: Tensor, batch: Batch) -> Tensor:
    return mean_square(output.detach(), batch)


def with_figures(output: Tensor, batch: Batch) -> Any:
    loss = mean_square(output, batch)
    return loss, {"loss": loss}


def by_name(output: Tensor, batch: Batch) -> Any:
    return {"loss": mean_square(output, batch)}


class OnGpuOnly(nn.Linear):
    """A layer whose kernel a machine without a GPU does not have."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError("no CUDA device is there")


def layer_for_gpus() -> Model:
    first = Layer("first", partial(OnGpuOnly, 16, 8), batch=("inputs",))
    return Model((first, Layer("second", partial(nn.Linear, 8, 16))), loss=mean_square)


def two_layers(*, width: int = 8, loss: Callable[[Tensor, Batch], Tensor] = mean_square) -> Model:
    first = Layer("first", partial(nn.Linear, 16, 8), batch=("inputs",))
    return Model((first, Layer("second", partial(nn.Linear, width, 16))), loss=loss)


class Returning(nn.Module):
    """A layer whose output another function makes."""

    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, inputs: Tensor) -> object:
        return self.make(inputs)


def returning(make: Callable[[Tensor], object]) -> Model:
    return Model((Layer("first", partial(Returning, make), batch=("inputs",)), Layer("second", partial(nn.Linear, 16, 16))), mean_square)


def tied(*tie: tuple[str, str]) -> Model:
    return replace(two_layers(), ties=(tie,))


ROWS = Rows({"inputs": (16,), "targets": (16,)})


@dataclass(frozen=True)
class Mistake:
    """What a user gives the trainer, and what the message must say."""

    says: str
    model: Any = two_layers
    given: Mapping[str, Any] = field(default_factory=lambda: {"batches": ROWS})
    model_options: Mapping[str, Any] = field(default_factory=dict)


def groups(*weights: str) -> OptimizerConfig:
    """Return one group of weights for each pattern."""
    return OptimizerConfig(groups=tuple(WeightGroup(weights=(pattern,), weight_decay=0.0) for pattern in weights))


PYTHON_MISTAKES = {
    "missing-field": Mistake(
        r"layer 'first' takes the field 'inputs'; did you mean 'input'\?; .* has input, targets",
        given={"batches": Rows({"input": (16,), "targets": (16,)})},
    ),
    "missing-field-of-the-loss": Mistake(r"the model's loss failed: KeyError: 'targets'", given={"batches": Rows({"inputs": (16,)})}),
    "wrong-shape-of-a-layer": Mistake(
        r"layer 'second' failed on the first rows: .*; it got an input of shape \[4, 8\]", model=partial(two_layers, width=9)
    ),
    "wrong-shape-of-rows": Mistake(
        r"layer 'first' failed on the first rows: .*; it got 'inputs' of shape \[4, 15\]",
        given={"batches": Rows({"inputs": (15,), "targets": (16,)})},
    ),
    "nested-tuple-of-a-layer": Mistake(
        r"layer 'first' .*: element 1 of its output is of type tuple; return a flat tuple of tensors",
        model=partial(returning, lambda inputs: (inputs, (inputs, inputs))),
    ),
    "dict-of-a-layer": Mistake(
        r"layer 'first' .*: its output is of type dict; return its tensors as a tuple",
        model=partial(returning, lambda inputs: {"x": inputs}),
    ),
    "list-of-a-layer": Mistake(
        r"layer 'first' .*: its output is of type list; return a tensor or a flat tuple", model=partial(returning, lambda inputs: [inputs])
    ),
    "loss-no-scalar": Mistake(r"the model's loss has shape \(4,\); expected a scalar", model=partial(two_layers, loss=by_row)),
    "loss-with-figures": Mistake(
        r"the model's loss is of type tuple; return the loss alone, .* in a callback with run.forward and run.log",
        model=partial(two_layers, loss=with_figures),
    ),
    "loss-by-name": Mistake(r"the model's loss is of type dict; return the loss alone", model=partial(two_layers, loss=by_name)),
    "loss-without-gradient": Mistake(r"the model's loss has no gradient", model=partial(two_layers, loss=without_gradient)),
    "loss-of-another-shape": Mistake(
        r"the model's loss failed: RuntimeError: .*; it got an output of shape \(4, 16\)",
        given={"batches": Rows({"inputs": (16,), "targets": (3,)})},
    ),
    "optimizer-unknown": Mistake(
        r"no optimizer is called 'adamv'; did you mean 'adam'\?; choose from: adamw, ",
        given={"batches": ROWS, "optimizer_config": OptimizerConfig(name="adamv")},
    ),
    "pattern-without-a-weight": Mistake(
        r"optimizer.groups\[0\].weights: 'first.wieght' gets no trained weight; did you mean 'first.weight'\?",
        given={"batches": ROWS, "optimizer_config": groups("first.wieght")},
    ),
    "pattern-behind-another": Mistake(
        r"'first.bias' gets no trained weight: earlier groups have all",
        given={"batches": ROWS, "optimizer_config": groups("*.bias", "first.bias")},
    ),
    "tied-weight-misspelt": Mistake(
        r"ties of the model: layer 'first' is tied by its weight 'wieght', but has no such weight; did you mean 'weight'\?",
        model=partial(tied, ("first", "wieght"), ("second", "weight")),
    ),
    "tied-weight-of-another-layer": Mistake(
        r"layer 'second' is tied by its weight 'tokens', but has no such weight; choose from weight, bias",
        model=partial(tied, ("first", "weight"), ("second", "tokens")),
    ),
    "tied-weights-of-unlike-shapes": Mistake(
        r"ties of the model: .* 'weight' of layer 'second' is float32 \[16, 8\], but it is tied to 'weight' of layer 'first', .* \[8, 16\]",
        model=partial(tied, ("first", "weight"), ("second", "weight")),
    ),
    "wrong-path": Mistake(r"no_such.parquet: there is no such file", given={"data_config": DataConfig(path="no_such.parquet")}),
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run come as far as its cluster."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the run has begun")

    monkeypatch.setattr("raypipe.training.fit.stage_actors", refuse)


def fit(model: Any, runs: Path, **given: Any) -> None:
    Trainer(
        model,
        schedule_config=ScheduleConfig(num_microbatches=2, microbatch_size=4),
        scaling_config=ScalingConfig(num_devices=2),
        run_config=RunConfig(storage_path=str(runs), num_updates=4),
        **given,
    ).fit()


def check(mistake: Mistake, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=mistake.says) as told:
        fit(mistake.model, tmp_path / "runs", model_options=mistake.model_options, **mistake.given)
    assert "\n" not in str(told.value), "a message is one sentence or two"
    assert not (tmp_path / "runs").exists(), "no folder of a run is made"


@pytest.mark.parametrize("mistake", PYTHON_MISTAKES.values(), ids=PYTHON_MISTAKES)
def test_a_mistake_is_told_before_actors_start(mistake: Mistake, tmp_path: Path) -> None:
    check(mistake, tmp_path)


def test_the_run_without_a_mistake_begins(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the run has begun"):
        fit(two_layers, tmp_path / "runs", batches=ROWS, optimizer_config=groups("*.bias"))


def test_layers_for_gpus_are_not_tried_without_one() -> None:
    trainer = Trainer(layer_for_gpus, batches=ROWS, scaling_config=ScalingConfig(num_devices=2))
    model, rows = layer_for_gpus(), CheckedRows(first=ROWS.batch(0, (0.0, 1.0)))
    with pytest.raises(ConfigError, match="layer 'first' failed on the first rows: RuntimeError: no CUDA device"):
        draft_layers(trainer.config, model, rows)
    on_gpus = replace(trainer.config, scaling=replace(trainer.config.scaling, use_gpu=True))
    assert draft_layers(on_gpus, model, rows) is not None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (two_layers(), r"^model is a Model; give the function that returns it"),
        (
            nn.Sequential(nn.Linear(16, 16)),
            r"^model is a torch module of type Sequential; give a function that returns raypipe.Model\(layers=",
        ),
        (None, r"^model is of type NoneType; give a function"),
    ],
)
def test_what_is_no_function_that_makes_a_model_is_told_at_once(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(given, batches=ROWS)


def test_a_name_of_a_model_and_a_function_that_returns_a_module_are_told(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("from tests.training.test_typical_mistakes import two_layers\nmodel = two_layers()\n")
    check(Mistake(r"made.py:model' is a Model; give the function that returns it", model=f"{tmp_path}/made.py:model"), tmp_path)
    check(Mistake(r"returned Linear, expected a raypipe.Model; give a function", model=partial(nn.Linear, 16, 16)), tmp_path)


@pytest.fixture
def bytes_file(tmp_path: Path) -> str:
    """Return a file of 1,000 tokens, each a byte."""
    (tmp_path / "text.txt").write_text("Many words, and more." * 50)
    return prepare(str(tmp_path / "text.txt"), output=str(tmp_path / "bytes.parquet"), validation_fraction=0.1).path


def test_tokens_that_the_model_does_not_know_are_told(bytes_file: str, tmp_path: Path) -> None:
    small: dict[str, Any] = {"model": gpt, "model_options": SIZES | {"vocabulary_size": 100}}
    file = {"data_config": DataConfig(path=bytes_file, sequence_length=16, num_validation_microbatches=0)}
    check(Mistake(r"vocabulary_size is 100, .* has 256 different tokens", given=file, **small), tmp_path)
    pytest.importorskip("transformers")
    folder = save(small_config("llama"), tmp_path / "model")
    rows = {"batches": Rows({"input_ids": (12,), "labels": (12,)}, num_tokens=300)}
    check(Mistake(r"has the token 299, but the model knows 61 tokens, .* own tokenizer", model=f"hf:{folder}", given=rows), tmp_path)


def test_a_disk_without_room_for_a_checkpoint_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("raypipe.training.run_folder.shutil.disk_usage", lambda _: usage._replace(free=1000))
    check(
        Mistake(r"a checkpoint of this model takes about .*, but .* are free there; make room, or choose another run.storage_path"),
        tmp_path,
    )


def test_data_shorter_than_the_run_is_told_with_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"inputs": torch.zeros(16), "targets": torch.zeros(16)}] * 20
    with pytest.raises(AssertionError, match="the run has begun"):
        fit(two_layers, tmp_path / "runs", train_data=rows)
    assert "the training data has 20 rows, which is 2.5 updates: 4 updates read it 1.6 times" in capsys.readouterr().err


def test_data_shorter_than_an_update_is_told_with_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"inputs": torch.zeros(16), "targets": torch.zeros(16)}] * 3
    with pytest.raises(AssertionError, match="the run has begun"):
        fit(two_layers, tmp_path / "runs", train_data=rows)
    told = capsys.readouterr().err
    assert "the training data has 3 rows, but an update reads 8" in told
    assert "4 updates read it 10.7 times" in told


def test_next_tokens_as_targets_of_hidden_ones_are_told(bytes_file: str, tmp_path: Path) -> None:
    file = {"data_config": DataConfig(path=bytes_file, sequence_length=16, num_validation_microbatches=0)}
    says = (
        r"predicts hidden tokens, but the targets of the token file .* are the next tokens; "
        r".*data.train: FILE.py:FUNCTION .*MaskedTokenSource"
    )
    check(Mistake(says, model=bert, model_options=SIZES, given=file), tmp_path)
    source = MaskedTokenSource(bytes_file, sequence_length=16, seed=0, microbatch_size=4)
    with pytest.raises(AssertionError, match="the run has begun"):
        fit(bert, tmp_path / "runs", model_options=SIZES, batches=source)
    pytest.importorskip("transformers")
    import transformers

    config = small_config("bert", vocab_size=256)
    folder = save(config, tmp_path / "model", kind=transformers.MODEL_FOR_MASKED_LM_MAPPING[type(config)])
    check(Mistake(says, model=f"hf:{folder}", given=file), tmp_path / "again")


def test_rows_without_labels_are_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save(small_config("llama"), tmp_path / "model")
    rows = {"batches": Rows({"input_ids": (12,)}, num_tokens=61)}
    check(
        Mistake(r"needs the field 'labels' or 'targets', but .* has input_ids; add the field", model=f"hf:{folder}", given=rows), tmp_path
    )


def test_a_classifier_with_a_token_file_is_told(bytes_file: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = small_config("llama", num_labels=3, vocab_size=256, pad_token_id=0)
    folder = save(config, tmp_path / "model", kind=transformers.LlamaForSequenceClassification)
    file = {"data_config": DataConfig(path=bytes_file, sequence_length=16, num_validation_microbatches=0)}
    check(Mistake(r"needs the field 'labels', .*model.options.head set to causal-lm", model=f"hf:{folder}", given=file), tmp_path)
    with pytest.raises(AssertionError, match="the run has begun"):
        fit(f"hf:{folder}", tmp_path / "runs", model_options={"head": "causal-lm", "weights": "random"}, **file)


def test_a_pattern_without_a_weight_of_a_transformers_model_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save(small_config("gpt2", tie_word_embeddings=True), tmp_path / "model", dtype=torch.float32)
    rows = {"batches": Rows({"input_ids": (12,), "labels": (12,)}, num_tokens=61)}
    wrong = {**rows, "optimizer_config": groups("head.lm_head.weight")}  # tied, so it is the embedding's
    check(Mistake(r"'head.lm_head.weight' gets no trained weight", model=f"hf:{folder}", given=wrong), tmp_path)
    with pytest.raises(AssertionError, match="the run has begun"):
        fit(f"hf:{folder}", tmp_path / "runs", **{**rows, "optimizer_config": groups("embedding.transformer.wte.weight", "*.bias")})


def test_a_model_without_a_plan_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small_config("bloom", n_head=4, n_layer=2).save_pretrained(tmp_path / "model")
    rows = {"batches": Rows({"input_ids": (12,), "labels": (12,)}, num_tokens=61)}
    mistake = Mistake(r"'bloom' .* has no pipeline plan .* such as llama", model=f"hf:{tmp_path / 'model'}", given=rows)
    check(replace(mistake, model_options={"weights": "random"}), tmp_path)
