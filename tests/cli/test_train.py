"""What `raypipe train` refuses before anything is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.checkpoint_files import CheckpointIndex, FileSums
from raypipe.cli import main
from raypipe.cli.screen import console
from raypipe.cli.train import _report, _show
from raypipe.config import TrainConfig
from raypipe.data.prepare import prepare
from raypipe.errors import RunError
from raypipe.training.result import Result
from raypipe.training.run_folder import RunFolder
from raypipe.training.run_lock import RunLock
from raypipe.training.trainer import Trainer
from tests.callbacks.events import PLAN

CONFIG = """
format: raypipe.train/1
model: {{function: "raypipe.models.gpt:gpt", options: {{num_layers: 4, d_model: 32, num_heads: 2, sequence_length: 32}}}}
data: {{path: "{tokens}", sequence_length: 32}}
run: {{storage_path: "{runs}"}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text("a rose is a rose is a rose\n" * 50)
    prepare(str(folder / "text"), output=folder / "tokens.parquet", validation_fraction=0.3)
    (folder / "random.parquet").write_bytes(bytes(range(256)) * 20)
    (folder / "broken.py").write_text("import no_such_module_of_mine\n")
    (folder / "model.py").write_text("def raises(): raise ValueError('too narrow')\n")
    (folder / "forwards.csv").write_text("\n".join(",".join(f"{stage}F{microbatch}" for microbatch in range(8)) for stage in range(4)))
    (folder / "order.py").write_text("def returns_none(size): pass\n")
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(tokens=folder / "tokens.parquet", runs=folder / "runs"))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.name=zb-h9", "no schedule is called 'zb-h9'; did you mean"),
        ("schedule.name={folder}/none.csv", "none.csv: there is no such file"),
        ("schedule.name=examples/own_schedule.py", "name the function in it"),
        ("schedule.name={folder}/forwards.csv", "this order holds no backward; it cannot train"),
        (
            "schedule.name={folder}/order.py:returns_none",
            "order.py:returns_none' returned NoneType, expected a raypipe.schedules.ir.Schedule",
        ),
        ("schedul.name=1f1b", "schedul: unknown key; did you mean 'schedule'"),
        ("schedule.num_microbatches=0", "schedule.num_microbatches: expected a number > 0, got 0"),
        ("schedule.num_chunks=2", "1f1b holds one stage a device"),
        ("optimizer.beta1=1.5", "optimizer.beta1: expected a number < 1, got 1.5"),
        ("run.name=../elsewhere", "run.name: expected a name for a folder"),
        ("run.num_updates=many", "run.num_updates: expected a whole number, got 'many'"),
        ("scaling.num_devices=7", "has 7 stages, the model only 6 layers"),
        ("scaling.layers_per_stage=[1, 2, 3]", "it needs 4 numbers with the sum 6"),
        ("scaling.replicas=3", "scaling.replicas 3 does not divide scaling.num_devices 4"),
        ("model.function=nothing", "expected module:function"),
        ("model.function=no_such_module:f", "no module 'no_such_module'"),
        ("model.function=raypipe.models.gpt:gtp", "no function 'gtp'; did you mean 'gpt'"),
        ("model.function={folder}/none.py:f", "there is no file"),
        ("model.function={folder}/broken.py:f", "no module 'no_such_module_of_mine'"),
        ("model.function={folder}/model.py:raises", "unexpected keyword argument"),
        ("model.options.num_heads=7", "num_heads must divide d_model"),
        ("model.options.depth=7", "unexpected keyword argument 'depth'"),
        ("data.path={folder}/none.parquet", "there is no such file"),
        ("data.path={folder}/random.parquet", "cannot be read as Parquet"),
        ("data.sequence_length=100000000", "sequence"),
        ("model.options.vocabulary_size=100", "model.options.vocabulary_size is 100, "),
        ("run.storage_path={folder}/config.yaml", "no folder can be made there"),
        ("no-equals-sign", "expected key=value"),
    ],
)
def test_bad_input_is_one_clear_message(config: Path, capsys: pytest.CaptureFixture[str], override: str, message: str) -> None:
    assert main(["train", str(config), "--set", override.format(folder=config.parent)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    *noticed, error = output.err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert all(line == "loading torch and Ray" or line.startswith("the training data has ") for line in noticed)
    assert not (config.parent / "runs").exists() or not list((config.parent / "runs").iterdir())


def test_resuming_what_was_never_begun_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "--resume"]) == 2
    assert "has a checkpoint to resume from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.num_microbatches=4", "is of a run with 64 rows an update, got 32"),
        ("data.sequence_length=16", "is of a run with data.sequence_length=32, got 16"),
        ("optimizer.name=nadamw", "set it to adamw"),
        ("run.seed=3", "is of a run with run.seed=0, got 3"),
        ("model.options.num_layers=3", "is of a model with the layers"),
        ("run.num_updates=4", "has done 4 updates already"),
    ],
)
def test_what_cannot_go_on_is_refused_and_loses_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    changes = (f"run.storage_path={tmp_path}", "schedule.num_microbatches=8", "schedule.microbatch_size=8")
    folder = RunFolder.create(str(tmp_path), "run")
    folder.begin(TrainConfig.load(config, overrides=changes))
    layers = ("embedding", *(f"block-{number}" for number in range(4)), "head")
    Checkpoint.finish(folder.new_checkpoint(4), CheckpointIndex(update=4, layers=layers, model="raypipe.models.gpt:gpt", seed=0))
    folder.add_metrics({"update": 5, "loss": 1.0})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = [part for change in (*changes, override) for part in ("--set", change)]
    assert main(["train", str(config), *given, "--resume"]) == 2
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [
        (["CONFIG"], False),
        (["CONFIG", "--resume"], True),
        (["--resume", "CONFIG"], True),
        (["--resume", "--json", "CONFIG"], True),
        (["CONFIG", "--resume", "auto"], "auto"),
        (["--resume", "auto", "CONFIG"], "auto"),
        (["--resume=auto", "CONFIG"], "auto"),
        (["--json", "CONFIG", "--resume", "--set", "run.seed=1"], True),
    ],
)
def test_resume_stands_before_and_behind_the_configuration(
    config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], resume: bool | str
) -> None:
    asked: list[bool | str] = []

    def fit(trainer: Trainer, *, resume: bool | str) -> NoReturn:
        asked.append(resume)
        raise RunError("far enough")

    monkeypatch.setattr(Trainer, "fit", fit)
    assert main(["train", *(str(config) if argument == "CONFIG" else argument for argument in arguments)]) == 1
    assert asked == [resume]


@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "auto"]])
def test_a_second_writer_is_refused_by_name_and_host_and_the_lock_stays(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: list[str]
) -> None:
    folder = RunFolder.create(str(tmp_path), "run")
    folder.begin(TrainConfig.load(config, overrides=(f"run.storage_path={tmp_path}",)))
    Checkpoint.finish(folder.new_checkpoint(4), CheckpointIndex(update=4, layers=(), model="raypipe.models.gpt:gpt", seed=0))
    lock = RunLock(folder.storage)
    lock.acquire(print)
    try:
        assert main(["train", str(config), "--set", f"run.storage_path={tmp_path}", *resume]) == 2
        message = f"{folder.path} is being written by process {os.getpid()} on host {os.uname().nodename}"
        assert message in capsys.readouterr().err
        assert folder.file("run.lock").exists()
    finally:
        lock.release()


def test_a_uri_that_nothing_serves_is_refused_in_a_sentence(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for resume in ([], ["--resume"], ["--resume", "auto"]):
        assert main(["train", str(config), "--set", "run.storage_path=s4://bucket/runs", *resume]) == 2
        error = capsys.readouterr().err
        assert "run.storage_path 's4://bucket/runs': pyarrow has no file system for this URI" in error
        assert "Traceback" not in error
    assert not Path("s4:").exists()


def test_only_altered_checkpoints_are_refused_before_any_actor_starts(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"run.storage_path={tmp_path}",)
    folder = RunFolder.create(str(tmp_path), "run")
    folder.begin(TrainConfig.load(config, overrides=overrides))
    checkpoint = folder.new_checkpoint(4)
    sums = {"layer-0000-a.safetensors": FileSums(size_bytes=8, header="00000000", tensors={})}
    Checkpoint.finish(checkpoint, CheckpointIndex(update=4, layers=("a",), model="raypipe.models.gpt:gpt", seed=0, files=sums))
    checkpoint.write("layer-0000-a.safetensors", b"short")
    assert main(["train", str(config), "--set", overrides[0], "--resume", "auto"]) == 2
    error = capsys.readouterr().err
    assert "layer-0000-a.safetensors: has 5 bytes, but 8 were written" in error
    assert "starting" not in error
    assert not folder.file("run.lock").exists()


def test_random_bytes_are_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(bytes(range(255, 0, -1)))
    assert main(["train", str(path)]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_a_run_that_a_callback_ended_says_so_even_without_an_update_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    index = CheckpointIndex(update=4, layers=(), model="m", seed=0)
    result = Result(
        path="runs/gpt",
        metrics={},
        losses=[],
        validation_losses=[(4, 2.0)],
        checkpoint=Checkpoint("runs/gpt/checkpoints/update-000004", index),
        plan=PLAN,
        figures=[],
        sample="",
        stop_reason="validation_loss has not fallen for 3 evaluations",
        callback_errors=("callback WandB failed in on_window: OSError: no network",),
    )
    _show(result, console(plain=True))
    shown = capsys.readouterr().out
    assert "\nvalidation loss 2.000 -> 2.000\nended early: validation_loss has not fallen" in shown
    assert "went on without a callback: callback WandB" in shown
    assert _report(result).document()["stop_reason"].startswith("validation_loss")
