"""The whole model of a checkpoint in one process, as an object of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypipe.actors.stage.checkpoint import Checkpoint
from raypipe.artifacts.storage import Storage
from raypipe.errors import ConfigError, FormatError
from raypipe.models.huggingface.layers import quiet
from raypipe.models.huggingface.model import Described, describe
from raypipe.models.huggingface.source import library
from raypipe.training.run_folder import CONFIG
from raypipe.training.trained import chosen_checkpoint, run_config
from raypipe.user_code import HUGGING_FACE

Run = str | os.PathLike[str]
"""Folder or URI of a run."""


def load(run: Run, *, checkpoint: int | None = None) -> Any:
    """Return the trained model as transformers or PEFT has it, with all of its weights in the memory of this process.

    Args:
        run: Folder or URI of the run.
        checkpoint: Number of updates after which the checkpoint was made; left out for the newest.

    Returns:
        A `PreTrainedModel` in eval mode, or a `PeftModel` around it if adapters were trained.

    Raises:
        ConfigError: It is no run of a model of Hugging Face, or has no such checkpoint.
        FormatError: The checkpoint is damaged or of another model.
    """
    return Trained.of(run, checkpoint).model()


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a run, and what its model is."""

    checkpoint: Checkpoint
    described: Described

    @classmethod
    def of(cls, run: Run, checkpoint: int | None) -> Trained:
        """Return a checkpoint of a run; arguments and errors are those of `load`."""
        folder = Storage.at(run, key="the run")
        try:
            config = run_config(folder)
        except OSError as error:
            raise ConfigError(f"{folder.name} cannot be read ({error.strerror or error}); check the path") from None
        if config is None:
            raise ConfigError(f"{folder.name} is no folder of a run: it has no {CONFIG}; name one below run.storage_path, such as runs/run")
        model = config.model
        if not model.function.startswith(HUGGING_FACE):
            raise ConfigError(
                f"{folder.name} is a run of {model.function!r}, which is no model of Hugging Face (hf:...); load it by raypipe.load"
            )
        options = {name: value for name, value in model.options.items() if name != "weights"}
        chosen = chosen_checkpoint(folder, "newest" if checkpoint is None else checkpoint)
        return cls(chosen, describe(model.function.removeprefix(HUGGING_FACE), **options))

    def model(self) -> Any:
        """Return the model; raises `FormatError` if the checkpoint is damaged or of another model."""
        described = self.described
        weights = self._weights()
        if described.lora is None:
            return self._loaded(weights)
        adapters = {name: tensor for name, tensor in weights.items() if described.lora.is_adapter(name)}
        frozen = {described.lora.original_name(name): tensor for name, tensor in weights.items() if name not in adapters}
        return described.lora.around(self._loaded(frozen), adapters)

    def _loaded(self, weights: Mapping[str, Tensor]) -> Any:
        described = self.described
        expected = dict(described.skeleton.state_dict())
        tied = {name for pair in described.skeleton.all_tied_weights_keys.items() for name in pair}
        wrong = weights.keys() - expected.keys() or expected.keys() - weights.keys() - tied
        if wrong:
            raise FormatError(self.checkpoint.path, min(wrong), f"does not fit hf:{described.source.path}; is it another model by now?")
        with quiet(library()), torch.no_grad():
            model = described.kind.from_pretrained(None, config=described.config, dtype=described.dtype, state_dict=dict(weights))
        model.name_or_path = model.config.name_or_path = described.source.name
        return model.eval()

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for index in range(len(self.checkpoint.index.layers)):
            weights |= self.checkpoint.load_weights(index)
        return weights
