"""The models of `replicas.py`; actors load this file by its path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stretched import stretched

from raypipe.model import Model
from raypipe.models.gpt import gpt
from raypipe.models.ngram_gpt import ngram_gpt

LENGTH = 128


def gpt_model(*, dense: bool = False, stretch: float = 1.0) -> Model:
    """Return the GPT of 5.3 million parameters, whose layers take `stretch` times their CPU seconds."""
    return _made(gpt(num_layers=6, vocabulary_size=1024, sequence_length=LENGTH), dense=dense, stretch=stretch)


def ngram_model(*, dense: bool = False, stretch: float = 1.0) -> Model:
    """Return the GPT with n-gram tables; if `dense`, without what it says of rows that are looked up."""
    return _made(ngram_gpt(sequence_length=LENGTH), dense=dense, stretch=stretch)


def _made(model: Model, *, dense: bool, stretch: float) -> Model:
    if dense:
        model = replace(model, layers=tuple(replace(layer, looked_up={}) for layer in model.layers))
    return model if stretch == 1.0 else stretched(model, stretch)


@dataclass(frozen=True)
class Task:
    """A model and its cut: layers of each stage, and the rate of ports over that at which A is `SUM_SHARE` of C for `gpt`."""

    name: str
    make: Callable[..., Model]
    sizes: tuple[int, ...]
    rate: float

    @property
    def function(self) -> str:
        """The function that makes the model, as configurations name it."""
        return f"{Path(__file__).resolve()}:{self.make.__name__}"


TASKS = {"gpt": Task("gpt", gpt_model, (4, 4), 1.0), "ngram": Task("ngram", ngram_model, (3, 3), 2.0)}
