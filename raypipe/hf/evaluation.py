"""Text from a trained model, and how well it predicts texts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from raypipe.callbacks import events
from raypipe.errors import ConfigError
from raypipe.hf.piped import Window, described_of, piped
from raypipe.hf.tokenizer import tokenizer_of, written
from raypipe.hf.trained import Run, Trained
from raypipe.models.huggingface.layers import quiet
from raypipe.models.huggingface.losses import IGNORED
from raypipe.models.huggingface.model import Described
from raypipe.models.huggingface.source import library


def generate(
    run: Run | events.Run,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    checkpoint: int | None = None,
    max_new_tokens: int = 50,
    **settings: Any,
) -> str:
    """Return a text that a trained model begins with `prompt` and goes on with, by transformers' rules; or its answer in a conversation.

    From a folder, the model runs in this process. From the `run` that a callback receives, its stages run it: each token then takes a
    forward over the last tokens, as many as the training rows have, since stages keep no keys and values.

    Args:
        run: Folder or URI of the run, or what a callback receives.
        prompt: Beginning of the text; or messages, each with a `role` and a `content`, which the model's chat template writes.
        checkpoint: Number of updates after which the checkpoint was made; left out for the newest. Only for a folder.
        max_new_tokens: Most tokens to add.
        settings: Further arguments of transformers' `generate`, such as `do_sample=True`.

    Raises:
        ConfigError: It is no run of a causal model of Hugging Face, has no such checkpoint, or the model has no tokenizer, or for messages
            no chat template.
    """
    model, described = _model_of(run, checkpoint)
    tokenizer = tokenizer_of(described.source)
    if isinstance(prompt, str):
        tokens, first = tokenizer(prompt, return_tensors="pt"), 0
    else:
        tokens = written(tokenizer, prompt, described.source, what="the conversation", add_generation_prompt=True, return_tensors="pt")
        first = tokens["input_ids"].shape[1]
    cached = {} if isinstance(run, (str, os.PathLike)) else {"use_cache": False}
    with quiet(library()), torch.inference_mode():
        found = model.generate(**tokens, max_new_tokens=max_new_tokens, **cached, **settings)
    text: str = tokenizer.decode(found[0, first:], skip_special_tokens=True)
    return text


def perplexity(run: Run | events.Run, texts: Iterable[str], *, checkpoint: int | None = None, max_length: int = 512) -> float:
    """Return the exponential of the mean loss over all tokens of some texts but their first.

    From a folder, the model runs in this process; from the `run` that a callback receives, its stages run it.

    Args:
        run: Folder or URI of the run, or what a callback receives.
        texts: Texts; what is longer than `max_length` tokens is read in pieces, of which each begins with the last token of the one before.
        checkpoint: Number of updates after which the checkpoint was made; left out for the newest. Only for a folder.
        max_length: Most tokens that the model reads at once; stages read no more than the training rows have.

    Raises:
        ConfigError: As `generate`; or the texts have no token to predict.
    """
    model, described = _model_of(run, checkpoint)
    tokenizer = tokenizer_of(described.source)
    if not isinstance(run, (str, os.PathLike)):
        max_length = min(max_length, Window.of(run.forward).length) if run.forward is not None else max_length
    total, count = 0.0, 0
    with quiet(library()), torch.inference_mode():
        for text in texts:
            for piece in _pieces(tokenizer(text, return_tensors="pt", truncation=False)["input_ids"], max_length):
                logits, targets = model(input_ids=piece).logits[:, :-1].float(), piece[:, 1:]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
                total, count = total + float(loss), count + piece.shape[1] - 1
    if not count:
        raise ConfigError("the texts have no token to predict; each needs two tokens at least")
    return math.exp(total / count)


def _pieces(tokens: torch.Tensor, max_length: int) -> Iterator[torch.Tensor]:
    """Yield pieces of [1, positions] in which each token but the first is predicted once."""
    if max_length < 2:  # one token to predict another
        raise ConfigError(f"max_length is {max_length}; a model predicts a token from those before it, so it takes 2 at least")
    for first in range(0, tokens.shape[1] - 1, max_length - 1):
        yield tokens[:, first : first + max_length]


def _model_of(run: Run | events.Run, checkpoint: int | None) -> tuple[Any, Described]:
    if isinstance(run, (str, os.PathLike)):
        trained = Trained.of(run, checkpoint)
        model, described = trained.model(), trained.described
    else:
        described = described_of(run)
        model = piped(run, described)
    if not model.can_generate():
        raise ConfigError(f"hf:{described.source.path} is no causal model, which predicts the next token of a text")
    return model, described
