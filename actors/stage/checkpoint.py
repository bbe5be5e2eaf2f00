"""Checkpoints: reads what `snapshot` wrote, with any cut of the model; the files are those of `raypipe.artifacts.checkpoint_files`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.state import OPTIMIZER, import_layers, without_aliases
from raypipe.actors.stage.tensor_file import check_tensors
from raypipe.actors.stage.ties import tie_layers
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts import codec
from raypipe.artifacts.checkpoint_files import FORMAT, INDEX, CheckpointIndex, finished_folders, layer_file
from raypipe.artifacts.storage import Storage
from raypipe.errors import FormatError
from raypipe.model import Model

_NUM_CHECKING_THREADS = 4
_LOG = logging.getLogger("raypipe.checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint; `path` is its folder or URI, `storage` the same where it is at hand."""

    path: str
    index: CheckpointIndex
    storage: Storage | None = field(default=None, compare=False, repr=False)

    @property
    def folder(self) -> Storage:
        """The folder of its files."""
        return self.storage or Storage.at(self.path)

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Storage) -> Checkpoint:
        """Return the checkpoint in a folder, by its index alone; `check` reads the rest.

        Raises:
            FormatError: There is none, or its index cannot be read or was altered.
        """
        folder = _storage(path)
        name = f"{folder.name}/{INDEX}"
        try:
            text = folder.read(INDEX).decode()
        except FileNotFoundError:
            raise FormatError(name, "", "there is no such file; check the path") from None
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(name, "", f"cannot be read ({error}); remove the folder of this checkpoint") from None
        index = codec.from_json(CheckpointIndex, text, path=name, format_name=FORMAT)
        if index.digest != (index.sealed().digest if index.files or index.digest else ""):
            raise FormatError(name, "digest", "this file was altered since it was written; remove the folder of this checkpoint")
        return cls(folder.name, index, folder)

    @classmethod
    def latest(cls, folder: str | os.PathLike[str] | Storage, *, notice: Callable[[str], None] = _LOG.warning) -> Checkpoint | None:
        """Return the checkpoint with the most updates in a run's folder all of whose files are as they were written, if it has any.

        Each newer one is told to `notice`, with what is wrong with it. Every byte of the checkpoint is read.

        Raises:
            FormatError: None is whole: says what is wrong with the newest.
        """
        problems: list[tuple[str, FormatError]] = []
        checkpoints: list[Checkpoint] = []
        for candidate in finished_folders(_storage(folder)):
            try:
                checkpoints.append(cls.open(candidate))
            except FormatError as error:
                problems.append((candidate.name, error))
        for checkpoint in sorted(checkpoints, key=lambda one: (one.index.update, one.path), reverse=True):
            try:
                checkpoint.check()
            except FormatError as error:
                problems.append((checkpoint.path, error))
            else:
                for path, problem in problems:
                    notice(f"{path} is left out: {problem}")
                return checkpoint
        if problems:
            raise max(problems, key=lambda problem: problem[0])[1]
        return None

    @staticmethod
    def best_of(checkpoints: Iterable[Checkpoint], by: str) -> Checkpoint | None:
        """Return the checkpoint with the least of a loss, of equals the newest; `None` where none was saved with that loss."""
        scored = [checkpoint for checkpoint in checkpoints if by in checkpoint.index.metrics]
        return min(scored, key=lambda checkpoint: (checkpoint.index.metrics[by], -checkpoint.index.update), default=None)

    @classmethod
    def finish(cls, path: str | os.PathLike[str] | Storage, index: CheckpointIndex) -> Checkpoint:
        """Make a folder with the files of all layers a finished checkpoint; raises `OSError`."""
        folder = _storage(path)
        sealed = index.sealed() if index.files else index
        folder.sync()
        folder.write(INDEX, codec.to_json(sealed, format_name=FORMAT).encode())
        folder.sync()
        return cls(folder.name, sealed, folder)

    def check(self) -> None:
        """Read all files of the checkpoint, several at a time.

        Raises:
            FormatError: A file is missing or was altered: names it, and the tensor.
        """
        folder, names = self.folder, [layer_file(index, name) for index, name in enumerate(self.index.layers)]
        remedy = "remove the folder of this checkpoint"
        if not self.index.files:  # one of before checksums
            for name in names:
                _check_readable(folder, name)
            return
        if missing := sorted(set(names) ^ self.index.files.keys()):
            raise FormatError(f"{self.path}/{INDEX}", "files", f"expected one for each layer, got others ({missing[0]}); {remedy}")
        with ThreadPoolExecutor(_NUM_CHECKING_THREADS) as threads:
            try:
                list(threads.map(lambda name: check_tensors(folder, name, self.index.files[name]), names))
            except FormatError as error:
                raise FormatError(error.path, error.where, f"{error.problem}; {remedy}") from None

    def load_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the state of one layer, named as in `raypipe.actors.stage.state`.

        Raises:
            FormatError: The file is missing or damaged.
        """
        return _load_layer(self.folder, layer, self.index.layers[layer])

    def load_weights(self, layer: int) -> dict[str, Tensor]:
        """Return the weights and buffers of one layer; of a file on this machine, nothing else is read. Raises `FormatError`."""
        return _load_layer(self.folder, layer, self.index.layers[layer], is_wanted=lambda name: not name.startswith(OPTIMIZER))


def load_modules(checkpoint: Checkpoint, model: Model) -> list[nn.Module]:
    """Return a checkpoint's layers as modules, for models that fit into this process.

    Raises:
        FormatError: A file is missing, damaged or of another model.
    """
    modules = [build_layer(layer, index=index, seed=checkpoint.index.seed) for index, layer in enumerate(model.layers)]
    tie_layers(model, dict(enumerate(modules)), seed=checkpoint.index.seed)
    state = without_aliases(nn.ModuleList(modules))
    for index, (layer, module) in enumerate(zip(model.layers, modules, strict=True)):
        weights = checkpoint.load_weights(index)
        file = f"{checkpoint.path}/{layer_file(index, layer.name)}"
        expected = {name.partition(".")[2]: tensor for name, tensor in state.items() if name.partition(".")[0] == str(index)}
        _check_same(file, weights, expected)
        module.load_state_dict(weights, strict=False)  # a tied weight has one of its names there
    return modules


def _check_same(file: str, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name in sorted(weights.keys() | expected.keys()):
        saved, built = (f"has the shape {list(state[name].shape)}" if name in state else "is missing" for state in (weights, expected))
        if saved != built:
            problem = f"the file is of another model: this weight {saved} there, and {built} in the layer"
            raise FormatError(file, name, f"{problem}; check the model's function and options")


def load_stages(folder: str | os.PathLike[str] | Storage, stages: Iterable[Weights]) -> None:
    """Load the layers of stages, and their tied weights from other layers' files.

    Raises:
        FormatError: A file is missing, damaged or of another model.
        ConfigError: A tensor is missing, unknown or of another shape.
    """
    storage = _storage(folder)
    for weights in stages:
        module = weights.module
        states = {index: _load_layer(storage, index, module.names[index]) for index in module.needed_layers}
        _check_borrowed(storage, weights, states)
        import_layers(weights, states)


def _check_borrowed(folder: Storage, weights: Weights, states: Mapping[int, Mapping[str, Tensor]]) -> None:
    module = weights.module
    for parameter, stored in module.borrowed.items():
        _, index, name = parameter.split(".", 2)
        if name in states[int(index)]:
            path = f"{folder.name}/{layer_file(int(index), module.names[int(index)])}"
            owner = module.names[stored.layer]
            raise FormatError(path, "", f"is of another model: it has {name!r}, which in this one is tied to a weight of {owner!r}")


def _storage(folder: str | os.PathLike[str] | Storage) -> Storage:
    return folder if isinstance(folder, Storage) else Storage.at(folder)


def _load_layer(folder: Storage, index: int, name: str, *, is_wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    file = layer_file(index, name)
    path = f"{folder.name}/{file}"
    try:
        if folder.size(file) is None:
            raise FormatError(path, "", f"the checkpoint has no layer {index} {name!r}; was it made by another model?")
        if folder.is_local:
            opened: Any = safe_open(path, framework="pt")
            with opened as tensors:
                return {key: tensors.get_tensor(key) for key in tensors.keys() if is_wanted(key)}  # noqa: SIM118  # it is no mapping
        loaded = safetensors.torch.load(folder.read(file))
        return {key: tensor for key, tensor in loaded.items() if is_wanted(key)}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _check_readable(folder: Storage, name: str) -> None:
    # Full disks and power cuts truncate files.
    if folder.is_local and folder.size(name) is not None:
        try:
            opened: Any = safe_open(f"{folder.path}/{name}", framework="pt")
            with opened:
                pass
        except (SafetensorError, OSError) as error:
            raise _damaged(f"{folder.name}/{name}", error) from None


def _damaged(path: str, error: Exception) -> FormatError:
    return FormatError(path, "", f"cannot be read as safetensors ({error}); remove the folder of this checkpoint")
