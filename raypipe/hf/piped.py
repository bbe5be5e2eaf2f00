"""A transformers model whose forward is that of a run's stages, so that transformers' own rules write text while the run goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypipe.callbacks.events import Forward, Run
from raypipe.errors import ConfigError
from raypipe.models.huggingface.layers import quiet
from raypipe.models.huggingface.model import Described, describe
from raypipe.models.huggingface.source import library
from raypipe.user_code import HUGGING_FACE

_TOKENS = ("input_ids", "tokens")


def described_of(run: Run) -> Described:
    """Return what is known of the model of a run that goes on; raises `ConfigError` if it is none of Hugging Face."""
    model = run.config.model
    if not model.function.startswith(HUGGING_FACE):
        raise ConfigError(f"the run is one of {model.function!r}, which is no model of Hugging Face (hf:...)")
    options = {name: value for name, value in model.options.items() if name != "weights"}
    return describe(model.function.removeprefix(HUGGING_FACE), **options)


def piped(run: Run, described: Described) -> Any:
    """Return a model of the run's class without weights, which the stages compute; each new token takes a forward over all tokens.

    Raises:
        ConfigError: The stages do not hold the model now, or the rows of the run have no tokens.
    """
    forward = run.forward
    if forward is None:
        raise ConfigError("the run has not begun; take text from a callback's on_window, on_evaluation or on_checkpoint")
    window = Window.of(forward)
    kind = described.kind

    def forward_of_stages(self: Any, input_ids: Tensor | None = None, **_: Any) -> Any:
        assert input_ids is not None, "transformers gives tokens to a model without a cache"
        return library().modeling_outputs.CausalLMOutput(logits=window.logits(input_ids))

    namespace = {"forward": forward_of_stages, "device": torch.device("cpu"), "__module__": kind.__module__}
    with quiet(library()), torch.device("meta"):
        model = type(kind.__name__, (kind,), namespace)(described.skeleton.config)
    return model.eval()


class Window:
    """The tokens that stages take at once, as many as the rows of the training data have.

    Attributes:
        length: Number of tokens.
    """

    def __init__(self, forward: Forward, name: str, length: int) -> None:
        self._forward = forward
        self._name = name
        self.length = length

    @classmethod
    def of(cls, forward: Forward) -> Window:
        """Return the window of a run; raises `ConfigError` if its rows have no tokens."""
        found = [(name, shape[0]) for name, shape in forward.shapes.items() if name in _TOKENS and len(shape) == 1]
        if not found:
            has = ", ".join(forward.shapes) or "fields that the driver cannot read"
            raise ConfigError(f"the rows of the run have no tokens ('input_ids'); they have {has}")
        return cls(forward, *found[0])

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, positions, vocabulary] of the last `length` tokens; what follows a token changes none of its logits."""
        tokens = tokens[:, -self.length :]
        filled = torch.nn.functional.pad(tokens, (0, self.length - tokens.shape[1]))
        return self._forward({self._name: filled})[:, : tokens.shape[1]]
