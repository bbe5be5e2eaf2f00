"""Writes the model of a run as transformers reads it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError, UnknownNameError
from raypipe.hf.trained import Run, Trained
from raypipe.models.huggingface.layers import quiet
from raypipe.models.huggingface.source import Source, dtype_of, library

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


class Adapters(StrEnum):
    """What is written of a model whose adapters were trained."""

    MERGED = "merged"
    """One model, with the adapters added to its weights."""
    ADAPTERS = "adapters"
    """The adapters alone, as PEFT reads them."""


def export(
    run: Run,
    to: str | os.PathLike[str],
    *,
    checkpoint: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    adapters: str = Adapters.MERGED,
) -> Path:
    """Write configuration, weights, tokenizer and generation settings of a trained model into a folder that `from_pretrained` reads.

    Args:
        run: Folder or URI of the run.
        to: Folder to make.
        checkpoint: Number of updates after which the checkpoint was made; left out for the newest.
        dtype: Type of the weights; left out for that in which they were trained.
        max_shard_size: Largest size of one file of weights, such as `5GB`.
        adapters: For a run with `lora`, `merged` for one model, or `adapters` for the adapters alone.

    Returns:
        The folder.

    Raises:
        ConfigError: It is no run of a model of Hugging Face, has no such checkpoint, or the folder is there already.
        FormatError: The checkpoint is damaged or of another model.
    """
    folder = Path(to).resolve()
    if adapters not in set(Adapters):
        raise UnknownNameError("form of adapters", adapters, [str(form) for form in Adapters])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty; choose another folder to export to, or remove it")
    trained = Trained.of(run, checkpoint)
    described = trained.described
    model = trained.model()
    if described.lora is not None and adapters == Adapters.MERGED:
        model = model.merge_and_unload()
    if dtype is not None:
        model.to(dtype_of(dtype, described.config))
    # Under another name until all is there, so that a folder of this name is whole.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as own, quiet(library()):
        partial = Path(own) / "model"  # made as any folder, while `own` is for this user alone
        _set_generation(model, described.source)
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        _copy_tokenizer(described.source, partial)
        _move(partial, folder)
    return Path(to)


def _move(partial: Path, folder: Path) -> None:
    if not folder.exists():
        partial.replace(folder)
        return
    # An empty folder stays the one that it is: somebody may stand in it. What makes it a model comes last.
    for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
        shutil.move(file, folder)


def _set_generation(model: Any, source: Source) -> None:
    try:
        model.generation_config = library().GenerationConfig.from_pretrained(source.name, revision=source.revision)
    except OSError:  # it has none, and the model's own defaults are written
        return


def _copy_tokenizer(source: Source, folder: Path) -> None:
    if source.is_folder:
        for file in _tokenizer_files(Path(source.name)):
            shutil.copy(file, folder)
        return
    try:
        library().AutoTokenizer.from_pretrained(source.name, revision=source.revision, trust_remote_code=False).save_pretrained(folder)
    except (OSError, ValueError):  # a model without a tokenizer
        return


def _tokenizer_files(folder: Path) -> Iterator[Path]:
    for pattern in _TOKENIZER_FILES:
        yield from (file for file in folder.glob(pattern) if file.is_file())
