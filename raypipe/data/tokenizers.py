"""Tokenizers: one token per byte, or those of the library `tokenizers`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from raypipe.artifacts.files import read_bytes
from raypipe.data.tokens import bytes_of_token
from raypipe.errors import ConfigError, FormatError, suggestion

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # usual names of the token that ends a text


class Tokenizer(Protocol):
    """Turns the texts of a source into tokens."""

    @property
    def name(self) -> str:
        """Return the name that token files record."""

    @property
    def vocabulary_size(self) -> int:
        """Return the number of tokens; every token is less."""

    @property
    def separator(self) -> int:
        """Return the token that ends each document."""

    def encode(self, text: bytes) -> bytes:
        """Return a document's tokens and separator in bytes, little-endian, or raise `ValueError` if it is not text."""


class Bytes:
    """One token per byte; documents end with the byte that no text holds."""

    name = "bytes"
    vocabulary_size = 256
    separator = 0

    def encode(self, text: bytes) -> bytes:
        """See `Tokenizer`."""
        end = bytes([self.separator])
        if end in text:
            raise ValueError("it holds a zero byte, so it is not text")
        return text + end


class FileTokenizer:
    """A tokenizer in the format of the library `tokenizers`, such as a published model's `tokenizer.json`.

    `separator` is the token that ends each document, by default its usual name.

    Raises:
        ConfigError: The library is not installed, or the tokenizer has no such token.
        FormatError: The file cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], *, separator: str | None = None) -> None:
        try:
            import tokenizers  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise ConfigError("a tokenizer's file needs the library tokenizers: pip install 'raypipe[tokenizers]'") from error
        try:
            content = read_bytes(path)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            # The file may say that texts are cut or filled up to a length; a document is to keep all of its tokens and no others.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except FormatError:
            raise
        except Exception as error:  # the library has no classes of its own for them
            raise FormatError(os.fspath(path), "", f"it is no tokenizer.json of the library tokenizers ({error})") from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = f"{Path(path).name} sha256:{hashlib.sha256(content).hexdigest()}"
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        name = separator or next((end for end in _ENDS if end in vocabulary), None)
        if name is None:
            raise ConfigError(f"{os.fspath(path)} has none of the tokens {', '.join(_ENDS)} to end documents with; name one (--separator)")
        if name not in vocabulary:
            raise ConfigError(f"{os.fspath(path)} has no token {name!r} to end documents with{suggestion(name, list(vocabulary))}")
        self.separator = vocabulary[name]
        self._type = np.dtype(f"<u{bytes_of_token(self.vocabulary_size)}")

    def encode(self, text: bytes) -> bytes:
        """See `Tokenizer`."""
        try:
            tokens = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 ({error})") from error
        return np.array([*tokens, self.separator], dtype=self._type).tobytes()
