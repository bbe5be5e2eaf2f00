"""Checkpoints are complete or absent: kills while one is written, and folders that were altered."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from raypipe.actors.stage import snapshot
from raypipe.actors.stage.checkpoint import Checkpoint, load_stages
from raypipe.actors.stage.module import StageModule
from raypipe.actors.stage.snapshot import Snapshot
from raypipe.actors.stage.state import export_layers
from raypipe.actors.stage.tensor_file import write_tensors
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts.checkpoint_files import CheckpointIndex, checkpoint_name, layer_file
from raypipe.artifacts.cut import Cut
from raypipe.artifacts.storage import Storage
from raypipe.errors import FormatError, NonFiniteError, RunError
from raypipe.models.mlp import mlp
from raypipe.schedules.ir import WeightRule

NUM_LAYERS = 4
PIECE = 4096
KILLED = 9


def weights_of(seed: int = 0, width: int = 32) -> Weights:
    """A stage with all layers of a small model, after an update with random gradients."""
    model = mlp(num_layers=NUM_LAYERS, width=width)
    module = StageModule(model, Cut.equal(NUM_LAYERS, 1, model.edges()), 0, seed=seed)
    weights = Weights(module, optimizer=torch.optim.AdamW, rule=WeightRule.FLUSH)
    generator = torch.Generator().manual_seed(seed)
    for master in weights.masters:
        master.grad = torch.randn(master.shape, generator=generator, dtype=master.dtype)
    assert weights.optimizer is not None
    weights.optimizer.step()
    return weights


def save(run: Storage, weights: Weights, update: int) -> Checkpoint:
    folder = run / "checkpoints" / checkpoint_name(update)
    folder.make()
    taken = Snapshot()
    taken.take([weights])
    files = taken.write(folder)
    layers = tuple(weights.module.names[index] for index in range(NUM_LAYERS))
    return Checkpoint.finish(folder, CheckpointIndex(update=update, layers=layers, model="mlp", seed=0, files=files))


def latest(run: Storage, told: list[str] | None = None) -> Checkpoint:
    found = Checkpoint.latest(run, notice=(told if told is not None else []).append)
    assert found is not None
    return found


def test_a_snapshot_is_what_the_library_reads_and_does_not_follow_the_weights(tmp_path: Path) -> None:
    weights = weights_of()
    expected = {index: {name: tensor.clone() for name, tensor in state.items()} for index, state in export_layers(weights).items()}
    taken = Snapshot()
    taken.take([weights])
    assert taken.num_bytes == sum(tensor.nbytes for state in expected.values() for tensor in state.values())
    with torch.no_grad():
        for master in weights.masters:
            master.zero_()
    taken.write(Storage.at(tmp_path))
    for index, state in expected.items():
        read = load_file(tmp_path / layer_file(index, weights.module.names[index]))
        assert read.keys() == state.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


def test_a_second_copy_takes_the_memory_of_the_first(tmp_path: Path) -> None:
    weights, taken = weights_of(), Snapshot()
    taken.take([weights])
    places = {name: tensor.data_ptr() for name, tensor in taken._layers[0].items()}
    taken.take([weights])
    assert {name: tensor.data_ptr() for name, tensor in taken._layers[0].items()} == places


NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_type_of_numbers_is_written_as_the_library_writes_it(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": torch.arange(6).reshape(2, 3).to(dtype), "number": torch.tensor(1).to(dtype)}
    tensors["nothing"] = torch.zeros(0, 3).to(dtype)
    tensors["bytes"] = torch.arange(3, dtype=torch.uint8)
    with (tmp_path / "ours").open("wb") as file:
        sums = write_tensors(file.write, tensors, metadata={"layer": "0"})
    save_file(tensors, tmp_path / "theirs", metadata={"layer": "0"})
    read, expected = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == dtype for name, tensor in expected.items() if name != "bytes")
    assert sums.size_bytes == (tmp_path / "ours").stat().st_size


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is killed by its own end")
def test_a_kill_at_every_4_kb_leaves_the_checkpoint_before_or_the_whole_new_one(tmp_path: Path) -> None:
    """The process ends without a last word after so many bytes, as by SIGKILL; the files are those of real writes."""
    old, new = weights_of(0, width=64), weights_of(1, width=64)
    template = Storage.at(tmp_path / "template")
    save(template, old, 1)
    total = sum(path.stat().st_size for path in Path(save(Storage.at(tmp_path / "size"), new, 2).path).iterdir())
    num_kills, num_new = 0, 0
    for limit in (*range(0, total, PIECE), total - 1, total):
        run = Storage.at(tmp_path / "run")
        shutil.copytree(template.path, run.path)
        pid = os.fork()
        if not pid:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Storage, "writing", dying_after(limit, Storage.writing))
                    save(run, new, 2)
            except BaseException:  # no test goes on in this process
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (KILLED if limit < total else 0)
        told: list[str] = []
        found = latest(run, told)
        assert told == [], "what was never finished is no reason to speak"
        assert found.index.update in {1, 2}
        loaded = weights_of(2, width=64)
        load_stages(found.path, [loaded])
        expected = {1: old, 2: new}[found.index.update]
        assert all(torch.equal(one, other) for one, other in zip(loaded.masters, expected.masters, strict=True))
        num_kills, num_new = num_kills + 1, num_new + (found.index.update == 2)
        shutil.rmtree(run.path)
    assert num_kills > 20
    assert num_new == 1, "only the whole write makes a checkpoint"


def dying_after(limit: int, writing: Callable[..., Any]) -> Callable[..., Any]:
    """`Storage.writing`, but the process ends when this many bytes of all files have been written."""
    left = limit

    class Stream:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, data: Any) -> None:
            nonlocal left
            content = bytes(data)
            self.stream.write(content[:left])
            if len(content) > left:
                self.stream.flush()
                os._exit(KILLED)
            left -= len(content)

    @contextlib.contextmanager
    def dying(storage: Storage, name: str) -> Iterator[Stream]:
        with writing(storage, name) as stream:
            yield Stream(stream)

    return dying


# 1,000 altered folders


def flip_bit(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def cut_short(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def lengthen(path: Path, dice: random.Random) -> None:
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.randint(1, 100)))


def zero_block(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    length = min(512, len(content) - at)
    if not any(content[at : at + length]):
        return flip_bit(path, dice)
    content[at : at + length] = bytes(length)
    path.write_bytes(content)
    return None


def remove(path: Path, dice: random.Random) -> None:
    path.unlink()


def take_older(path: Path, dice: random.Random) -> None:
    path.write_bytes((path.parents[1] / checkpoint_name(1) / path.name).read_bytes())


def swap_halves(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[middle:] + content[:middle])


def lie_about_header(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", dice.choice([0, 1, 1 << 40, (1 << 64) - 1])) + content[8:])


ALTERATIONS = (flip_bit, cut_short, lengthen, zero_block, remove, take_older, swap_halves, lie_about_header)


def test_of_1000_altered_folders_each_is_noticed_and_the_one_before_taken(tmp_path: Path) -> None:
    dice = random.Random(0)
    template = Storage.at(tmp_path / "template")
    old, new = weights_of(0, width=8), weights_of(1, width=8)
    save(template, old, 1)
    save(template, new, 2)
    assert latest(template).index.update == 2
    names = sorted(os.listdir(f"{template.path}/checkpoints/{checkpoint_name(2)}"))
    for number in range(1000):
        run = Storage.at(tmp_path / "run")
        shutil.copytree(template.path, run.path)
        name = dice.choice(names)
        alter = ALTERATIONS[number % len(ALTERATIONS)]
        path = Path(run.path, "checkpoints", checkpoint_name(2), name)
        before = path.read_bytes()
        alter(path, dice)
        told: list[str] = []
        found = latest(run, told)
        if alter is take_older and name == "checkpoint.json":
            # A whole index of another checkpoint says what the files must be: they are not.
            assert found.path.endswith(checkpoint_name(1))
        assert found.index.update == 1, (number, alter.__name__, name)
        if not (alter is remove and name == "checkpoint.json"):  # this checkpoint was never finished
            assert len(told) == 1, (number, alter.__name__, name)
            assert path.name in told[0] or "checkpoint.json" in told[0] or "layer-" in told[0]
            assert not path.exists() or path.read_bytes() != before
        shutil.rmtree(run.path)


def test_an_altered_tensor_is_named_where_no_other_checkpoint_is_left(tmp_path: Path) -> None:
    run = Storage.at(tmp_path)
    checkpoint = save(run, weights_of(), 1)
    path = Path(checkpoint.path, layer_file(1, checkpoint.index.layers[1]))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the end of the last tensor
    path.write_bytes(content)
    with pytest.raises(FormatError, match="this tensor was altered since it was written; remove the folder") as caught:
        Checkpoint.latest(run)
    assert caught.value.path == str(path)
    assert caught.value.where in checkpoint.index.files[path.name].tensors


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path, value: float) -> None:
    weights = weights_of()
    with torch.no_grad():
        weights.masters[-1].view(-1)[3] = value
    taken = Snapshot()
    taken.take([weights])
    with pytest.raises(NonFiniteError, match=f"layer-{NUM_LAYERS - 1:04d}"):
        taken.write(Storage.at(tmp_path))


def test_large_finite_weights_are_saved(tmp_path: Path) -> None:
    weights = weights_of()
    with torch.no_grad():
        weights.masters[0].fill_(torch.finfo(torch.float32).max)
    taken = Snapshot()
    taken.take([weights])
    assert taken.write(Storage.at(tmp_path))


def test_a_full_disk_is_said_with_file_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(write: Any, tensors: Any, *, metadata: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "write_tensors", full)
    taken = Snapshot()
    taken.take([weights_of()])
    with pytest.raises(RunError, match=r"layer-0000.*safetensors cannot be written on node .*No space left"):
        taken.write(Storage.at(tmp_path))


def test_a_module_without_weights_has_a_file(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("wb") as file:
        sums = write_tensors(file.write, nn.ReLU().state_dict(), metadata={"layer": "0"})
    assert load_file(tmp_path / "empty") == {}
    assert sums.tensors == {}
