"""Text from a trained model, and how well it predicts texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from raypipe.errors import ConfigError
from raypipe.hf.trained import Run, Trained
from raypipe.models.huggingface.layers import quiet
from raypipe.models.huggingface.losses import IGNORED
from raypipe.models.huggingface.source import Source, library


def generate(run: Run, prompt: str, *, checkpoint: int | None = None, max_new_tokens: int = 50, **settings: Any) -> str:
    """Return a text that a trained model begins with `prompt` and goes on with; the model runs in this process.

    Args:
        run: Folder or URI of the run.
        prompt: Beginning of the text.
        checkpoint: Number of updates after which the checkpoint was made; left out for the newest.
        max_new_tokens: Most tokens to add.
        settings: Further arguments of transformers' `generate`, such as `do_sample=True`.

    Raises:
        ConfigError: It is no run of a causal model of Hugging Face, has no such checkpoint, or the model has no tokenizer.
    """
    trained = Trained.of(run, checkpoint)
    tokenizer = tokenizer_of(trained.described.source)
    model = _causal(trained)
    tokens = tokenizer(prompt, return_tensors="pt")
    with quiet(library()), torch.inference_mode():
        written = model.generate(**tokens, max_new_tokens=max_new_tokens, **settings)
    text: str = tokenizer.decode(written[0], skip_special_tokens=True)
    return text


def perplexity(run: Run, texts: Iterable[str], *, checkpoint: int | None = None, max_length: int = 512) -> float:
    """Return the exponential of the mean loss over all tokens of some texts but their first; the model runs in this process.

    Args:
        run: Folder or URI of the run.
        texts: Texts; what is longer than `max_length` tokens is read in pieces.
        checkpoint: Number of updates after which the checkpoint was made; left out for the newest.
        max_length: Most tokens that the model reads at once.

    Raises:
        ConfigError: As `generate`; or the texts have no token to predict.
    """
    trained = Trained.of(run, checkpoint)
    tokenizer = tokenizer_of(trained.described.source)
    model = _causal(trained)
    total, count = 0.0, 0
    with quiet(library()), torch.inference_mode():
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt", truncation=False)["input_ids"]
            for piece in tokens.split(max_length, dim=1):
                if piece.shape[1] > 1:
                    logits = model(input_ids=piece).logits[:, :-1].float()
                    loss = torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), piece[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
                    )
                    total, count = total + float(loss), count + piece.shape[1] - 1
    if not count:
        raise ConfigError("the texts have no token to predict; each needs two tokens at least")
    return math.exp(total / count)


def _causal(trained: Trained) -> Any:
    model = trained.model()
    if not model.can_generate():
        raise ConfigError(f"hf:{trained.described.source.path} is no causal model, which predicts the next token of a text")
    return model


def tokenizer_of(source: Source) -> Any:
    """Return the tokenizer of a model; raises `ConfigError` if it has none."""
    try:
        return library().AutoTokenizer.from_pretrained(source.name, revision=source.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"hf:{source.path} has no tokenizer that transformers can read ({first}); put its tokenizer.json there"
        ) from error
