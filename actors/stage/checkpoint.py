"""Checkpoints: a folder with one file per layer, so that any cut of the model can load what any other saved.

checkpoint/update-000200/
checkpoint.json              `raypipe.checkpoint/1`; written last: a folder without it is never read
layer-0000-embedding.safetensors
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.state import OPTIMIZER, export_layers, import_layers, without_aliases
from raypipe.actors.stage.ties import tie_layers
from raypipe.actors.stage.weights import Weights
from raypipe.artifacts import codec
from raypipe.artifacts.record import record
from raypipe.errors import FormatError
from raypipe.model import Model

FORMAT = "raypipe.checkpoint/1"
_INDEX = "checkpoint.json"
_LOG = logging.getLogger("raypipe.checkpoint")


@record()
class CheckpointIndex:
    """Updates done, names of the layers in order, the model function's name, the run's seed."""

    update: int
    layers: tuple[str, ...]
    model: str
    seed: int


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint."""

    path: str
    index: CheckpointIndex

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint in a folder.

        Raises:
            FormatError: There is none, or it cannot be read.
        """
        return cls(os.fspath(path), codec.load_json(CheckpointIndex, Path(path) / _INDEX, format_name=FORMAT))

    @classmethod
    def latest(cls, folder: str | os.PathLike[str]) -> Checkpoint | None:
        """Return the readable checkpoint with the most updates in a run's folder, if it has any.

        Raises:
            FormatError: None can be read.
        """
        checkpoints: list[Checkpoint] = []
        problem: FormatError | None = None
        for file in Path(folder).glob(f"checkpoints/*/{_INDEX}"):
            try:
                checkpoints.append(cls.open(file.parent))
            except FormatError as error:
                problem = error
        for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.index.update, reverse=True):
            try:
                checkpoint._check()
            except FormatError as error:
                _LOG.warning("%s is left out: %s", checkpoint.path, error)
                problem = error
            else:
                return checkpoint
        if problem is not None:
            raise problem
        return None

    def _check(self) -> None:
        # Full disks and power cuts truncate files; this node may not see all.
        for index, name in enumerate(self.index.layers):
            path = Path(self.path) / layer_file(index, name)
            if path.is_file():
                try:
                    with safe_open(path, framework="pt"):
                        pass
                except (SafetensorError, OSError) as error:
                    raise _damaged(path, error) from None

    @classmethod
    def finish(cls, path: str | os.PathLike[str], index: CheckpointIndex) -> Checkpoint:
        """Make a folder with the files of all layers a finished checkpoint."""
        file = Path(path) / _INDEX
        partial = file.with_suffix(".partial")
        codec.save_json(index, partial, format_name=FORMAT)
        partial.rename(file)
        return cls(os.fspath(path), index)

    def load_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the state of one layer, named as in `raypipe.actors.stage.state`.

        Raises:
            FormatError: The file is missing or damaged.
        """
        return _load_layer(self.path, layer, self.index.layers[layer])


def load_modules(checkpoint: Checkpoint, model: Model) -> list[nn.Module]:
    """Return a checkpoint's layers as modules, for models that fit into this process.

    Raises:
        FormatError: A file is missing, damaged or of another model.
    """
    modules = [build_layer(layer, index=index, seed=checkpoint.index.seed) for index, layer in enumerate(model.layers)]
    tie_layers(model, dict(enumerate(modules)), seed=checkpoint.index.seed)
    state = without_aliases(nn.ModuleList(modules))
    for index, (layer, module) in enumerate(zip(model.layers, modules, strict=True)):
        weights = {name: tensor for name, tensor in checkpoint.load_layer(index).items() if not name.startswith(OPTIMIZER)}
        file = str(Path(checkpoint.path) / layer_file(index, layer.name))
        expected = {name.partition(".")[2]: tensor for name, tensor in state.items() if name.partition(".")[0] == str(index)}
        if {name: tensor.shape for name, tensor in expected.items()} != {name: tensor.shape for name, tensor in weights.items()}:
            raise FormatError(file, "", f"is of another model: it has {sorted(weights)}, the layer {sorted(expected)}")
        module.load_state_dict(weights, strict=False)  # a tied weight has one of its names there
    return modules


def save_stage(
    folder: str | os.PathLike[str], weights: Weights, stepped: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})
) -> list[str]:
    """Write the state of each layer of a stage, with what other copies have of the optimizer's (`export_stepped`).

    Returns the names of the files.
    """
    names: list[str] = []
    for index, own in export_layers(weights).items():
        tensors = {**own, **stepped.get(index, {})}
        name = layer_file(index, weights.module.names[index])
        partial = Path(folder) / f"{name}.partial"
        save_file(_in_separate_memory(tensors), partial, metadata={"layer": str(index)})
        partial.rename(Path(folder) / name)
        names.append(name)
    return names


def _in_separate_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    separate: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()  # safetensors takes no views, and no two tensors in the same memory
        separate[name] = whole.clone() if whole.untyped_storage().data_ptr() in memory else whole
        memory.add(whole.untyped_storage().data_ptr())
    return separate


def load_stage(folder: str | os.PathLike[str], weights: Weights) -> None:
    """Load the layers of a stage, and its tied weights from other layers' files.

    Raises:
        FormatError: A file is missing, damaged or of another model.
        ConfigError: A tensor is missing, unknown or of another shape.
    """
    module = weights.module
    states = {index: _load_layer(folder, index, module.names[index]) for index in module.needed_layers}
    for parameter, stored in module.borrowed.items():
        _, index, name = parameter.split(".", 2)
        if name in states[int(index)]:
            path = Path(folder) / layer_file(int(index), module.names[int(index)])
            owner = module.names[stored.layer]
            raise FormatError(str(path), "", f"is of another model: it has {name!r}, which in this one is tied to a weight of {owner!r}")
    import_layers(weights, states)


def layer_file(index: int, name: str) -> str:
    """Return the name of a layer's file."""
    return f"layer-{index:04d}-{name}.safetensors"


def _load_layer(folder: str | os.PathLike[str], index: int, name: str) -> dict[str, Tensor]:
    path = Path(folder) / layer_file(index, name)
    if not path.is_file():
        raise FormatError(str(path), "", f"the checkpoint has no layer {index} {name!r}; was it made by another model?")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> FormatError:
    return FormatError(str(path), "", f"cannot be read as safetensors ({error}); remove the folder of this checkpoint")
