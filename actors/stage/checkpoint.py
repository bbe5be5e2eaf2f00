"""Checkpoints: a folder with one file a layer, so that any cut of the model can read what any other wrote.

A weight that layers share is in the file of the first of them, whatever the cut.

    checkpoint/update-000200/
        checkpoint.json              `raypipe.checkpoint/1`: the update, the layers, the model; written last
        layer-0000-embedding.safetensors
        layer-0001-block-0.safetensors
        ...

A folder without `checkpoint.json` is one whose writing was interrupted, and is never read.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from raypipe.actors.stage.layers import build_layer
from raypipe.actors.stage.state import OPTIMIZER, import_layers, without_aliases
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
    """What a checkpoint holds.

    Attributes:
        update: updates done.
        layers: names in order.
        model: the model function, in text.
        seed: of the run.
    """

    update: int
    layers: tuple[str, ...]
    model: str
    seed: int


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint.

    Attributes:
        path: its folder.
        index: what it holds.
    """

    path: str
    index: CheckpointIndex

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a folder.

        Raises:
            FormatError: there is none, or it cannot be read.
        """
        file = Path(path) / _INDEX
        index = codec.load_json(CheckpointIndex, file, format_name=FORMAT)
        return cls(os.fspath(path), index)

    @classmethod
    def latest(cls, folder: str | os.PathLike[str]) -> Checkpoint | None:
        """The readable checkpoint with the most updates in a run's folder; `None` where there is none.

        Raises:
            FormatError: there are some, and none can be read.
        """
        found: list[Checkpoint] = []
        problem: FormatError | None = None
        for file in Path(folder).glob(f"checkpoints/*/{_INDEX}"):
            try:
                found.append(cls.open(file.parent))
            except FormatError as error:
                problem = error
        for checkpoint in sorted(found, key=lambda one: one.index.update, reverse=True):
            try:
                checkpoint.check()
            except FormatError as error:
                _LOG.warning("%s is left out: %s", checkpoint.path, error)
                problem = error
            else:
                return checkpoint
        if problem is not None:
            raise problem
        return None

    def check(self) -> None:
        """Sees that the files of its layers are whole, those that are here: a full disk or a power cut leaves parts of them.

        Raises:
            FormatError: one is not.
        """
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
        """Declares a folder, whose layers are all written, a finished checkpoint."""
        file = Path(path) / _INDEX
        partial = file.with_suffix(".partial")
        codec.save_json(index, partial, format_name=FORMAT)
        partial.rename(file)
        return cls(os.fspath(path), index)

    def load_layer(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one layer: weights and buffers by name, optimizer state as `optimizer/KEY/NAME`.

        Raises:
            FormatError: the file is missing or damaged.
        """
        return load_layer(self.path, layer, self.index.layers[layer])


def load_modules(checkpoint: Checkpoint, model: Model) -> list[nn.Module]:
    """The layers of a checkpoint as modules in this process, in order and with their weights, for models that fit in it.

    Raises:
        FormatError: a file is missing, damaged or of another model.
    """
    modules = [build_layer(layer, index=index, seed=checkpoint.index.seed) for index, layer in enumerate(model.layers)]
    tie_layers(model, dict(enumerate(modules)), seed=checkpoint.index.seed)
    known = without_aliases(nn.ModuleList(modules))
    for index, (layer, module) in enumerate(zip(model.layers, modules, strict=True)):
        tensors = load_layer(checkpoint.path, index, layer.name)
        weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER)}
        file = str(Path(checkpoint.path) / layer_file(index, layer.name))
        own = {name.partition(".")[2]: tensor for name, tensor in known.items() if name.partition(".")[0] == str(index)}
        if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in weights.items()}:
            raise FormatError(file, "", f"is of another model: it has {sorted(weights)}, the layer {sorted(own)}")
        module.load_state_dict(weights, strict=False)  # a tied weight has one of its names there
    return modules


def load_stage(folder: str | os.PathLike[str], weights: Weights) -> None:
    """Load the layers of a stage, and the tied weights that other layers' files have, from a checkpoint.

    Raises:
        FormatError: A file is missing, damaged or of a model in which these weights are not tied.
        ConfigError: A tensor is missing, unknown or of another shape.
    """
    module = weights.module
    states = {index: load_layer(folder, index, module.names[index]) for index in module.needed_layers}
    for parameter, stored in module.borrowed.items():
        _, index, name = parameter.split(".", 2)
        if name in states[int(index)]:
            path = Path(folder) / layer_file(int(index), module.names[int(index)])
            owner = module.names[stored.layer]
            raise FormatError(str(path), "", f"is of another model: it has {name!r}, which in this one is tied to a weight of {owner!r}")
    import_layers(weights, states)


def layer_file(index: int, name: str) -> str:
    """The file of a layer in a checkpoint."""
    return f"layer-{index:04d}-{name}.safetensors"


def load_layer(folder: str | os.PathLike[str], index: int, name: str) -> dict[str, Tensor]:
    """The tensors of one layer of a checkpoint.

    Raises:
        FormatError: the file is missing or damaged.
    """
    path = Path(folder) / layer_file(index, name)
    if not path.is_file():
        raise FormatError(str(path), "", f"the checkpoint has no layer {index} {name!r}; was it made by another model?")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> FormatError:
    return FormatError(str(path), "", f"cannot be read as safetensors ({error}); remove the folder of this checkpoint")
