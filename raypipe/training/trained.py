"""The trained model of a run in this process, without actors and without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raypipe.actors.stage.checkpoint import Checkpoint, load_modules
from raypipe.artifacts.checkpoint_files import FOLDER, INDEX, finished_folders
from raypipe.artifacts.storage import Location, Storage
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.model import Batch, Model
from raypipe.training.run_folder import CONFIG
from raypipe.user_code import make_model

Which = int | Literal["newest", "best"]
"""A checkpoint of a run: the number of updates after which it was made, the newest, or the best by `run.keep_best_by`."""


@dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a checkpoint, in the memory of this process. Call it with a batch for the output of its last layer.

    Attributes:
        model: Layers and loss.
        modules: Module of each layer by the layer's name, on the CPU and in eval mode. Layers share the weights that the model ties.
        checkpoint: Checkpoint that the weights are from.
    """

    model: Model
    modules: Mapping[str, nn.Module]
    checkpoint: Checkpoint

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights and buffers of all layers by `LAYER.WEIGHT`, tied weights under each of their names.

        The tensors are those of `modules`, not copies; tied weights share their memory.
        """
        return {f"{layer}.{name}": tensor for layer, module in self.modules.items() for name, tensor in module.state_dict().items()}

    def __call__(self, batch: Batch) -> Tensor:
        """Return the output of the last layer, which the loss takes.

        Args:
            batch: Fields that the layers take, each [rows, ...].

        Raises:
            ConfigError: A field is missing.
        """
        self.model.check_fields(batch, where="the batch")
        edges = self.model.edges()
        outputs: list[tuple[Tensor, ...]] = []
        for index, layer in enumerate(self.model.layers):
            for field in layer.batch:
                if field not in batch:
                    raise ConfigError(f"layer {layer.name!r} takes the field {field!r}; the batch has {', '.join(batch) or 'none'}; add it")
            inputs = [tensor for source, target in edges if target == index for tensor in outputs[source]]
            optional = {field: batch[field] for field in layer.batch_if_present if field in batch}
            output = self.modules[layer.name](*inputs, *(batch[field] for field in layer.batch), **optional)
            outputs.append(output if isinstance(output, tuple) else (output,))
        return outputs[-1][0]


def load(
    path: Location,
    model: str | Callable[..., Model] | None = None,
    *,
    model_options: Mapping[str, Any] | None = None,
    checkpoint: Which = "newest",
) -> TrainedModel:
    """Return a trained model, with all of its weights in the memory of this process. Starts no actors and no Ray.

    Args:
        path: Folder or URI of a run, or of one of its checkpoints.
        model: Function that returns the model, or its name, `module:function` or `path/to/file.py:function`; left out for that of the run.
        model_options: Keyword arguments of the function; left out for those of the run.
        checkpoint: Of a run, the checkpoint: `newest`, `best` for that with the least `run.keep_best_by`, or the number of updates after
            which it was made.

    Raises:
        ConfigError: There is no run and no checkpoint, the run has no such checkpoint, or the model has other layers.
        FormatError: The checkpoint is damaged, or a layer of the model has other weights.

    Example:
        torch.save(raypipe.load("runs/run").state_dict(), "weights.pt")
    """
    folder = Storage.at(path, key="the run")
    found, config = _found(folder, checkpoint)
    function = model if model is not None else config.model.function if config else found.index.model
    options = model_options if model_options is not None else config.model.options if config else {}
    try:
        described = make_model(function, options)
    except ConfigError as error:
        if model is None:
            raise ConfigError(f"{error}; or give the function of the model, as in raypipe.load({str(path)!r}, my_model)") from error
        if model_options is None and options:
            raise ConfigError(f"{error}; its options are those of the run: give model_options, or model_options={{}} for none") from error
        raise
    _check_layers(found, described)
    with torch.random.fork_rng(devices=[]):  # layers are built from seeds of their own
        modules = load_modules(found, described)
    return TrainedModel(
        described, {layer.name: module.eval() for layer, module in zip(described.layers, modules, strict=True)}, checkpoint=found
    )


def chosen_checkpoint(run: Storage, which: Which, *, best_by: str | None = None) -> Checkpoint:
    """Return a checkpoint of a run all of whose files are as they were written.

    Args:
        run: Folder of the run.
        which: The checkpoint.
        best_by: Loss by which one is the best.

    Raises:
        ConfigError: The run has no such checkpoint.
        FormatError: It is damaged.
    """
    if which == "newest":
        newest = Checkpoint.latest(run)
        if newest is None:
            raise ConfigError(f"{run.name} has no checkpoint yet; set run.checkpoint_every, or wait for the end of the run")
        return newest
    checkpoints = {one.index.update: one for one in map(Checkpoint.open, finished_folders(run))}
    there = ", ".join(map(str, sorted(checkpoints))) or "none"
    if which == "best":
        found = Checkpoint.best_of(checkpoints.values(), best_by) if best_by is not None else None
        if found is None:
            loss = f"{best_by}, by which one would be the best" if best_by is not None else "run.keep_best_by"
            raise ConfigError(f"{run.name} has no best checkpoint, since it was saved without {loss}; choose one by its update: {there}")
    elif which in checkpoints:
        found = checkpoints[which]
    else:
        raise ConfigError(f"{run.name} has no checkpoint after update {which}; it has {there}")
    found.check()
    return found


def _found(folder: Storage, which: Which) -> tuple[Checkpoint, TrainConfig | None]:
    """Return the checkpoint, and the configuration of its run where that is at hand."""
    try:
        if folder.size(INDEX) is not None:
            if which != "newest":
                raise ConfigError(f"{folder.name} is a checkpoint; to choose one by {which!r}, name the folder of its run")
            checkpoint = Checkpoint.open(folder)
            checkpoint.check()
            above = folder.parent
            return checkpoint, run_config(above.parent) if above.path.rpartition("/")[2] == FOLDER else None
        config = run_config(folder)
        if config is None and not finished_folders(folder):
            raise ConfigError(
                f"{folder.name} is no folder of a run and none of a checkpoint: it has no {CONFIG} and no {INDEX}; name one below "
                f"run.storage_path, such as runs/run or runs/run/{FOLDER}/update-000100"
            )
        return chosen_checkpoint(folder, which, best_by=config.run.keep_best_by if config else None), config
    except OSError as error:
        raise ConfigError(f"{folder.name} cannot be read ({error.strerror or error}); check the path") from None


def run_config(run: Storage) -> TrainConfig | None:
    """Return the configuration of a run as its folder has it, `None` if it has none; raises `OSError`, `FormatError` for a damaged one."""
    if run.size(CONFIG) is None:
        return None
    return TrainConfig.from_text(run.read(CONFIG).decode(errors="replace"), path=f"{run.name}/{CONFIG}")


def _check_layers(checkpoint: Checkpoint, model: Model) -> None:
    for number, (saved, layer) in enumerate(zip_longest(checkpoint.index.layers, model.layers)):
        name = layer.name if layer is not None else None
        if saved != name:
            theirs, ours = (repr(one) if one is not None else "missing" for one in (saved, name))
            raise ConfigError(
                f"{checkpoint.path} is of another model: its layer {number} is {theirs}, that of the model {ours}; give the function and "
                "the options that the run was started with"
            )
