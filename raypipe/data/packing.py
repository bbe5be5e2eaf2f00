"""Sequence packing: rows of one length, each filled by several documents, without attention between them.

    documents   aaa bbbbb cc dddd          position_ids  0 1 2 0 1 2 3 4   0 1 0 1 2 3 0 0
    rows of 8   aaabbbbb  ccdddd..         document_ids  1 1 1 2 2 2 2 2   1 1 2 2 2 2 0 0

The fields are those that models of transformers take: `position_ids` begin again with each document, from which flash attention and SDPA
find that several are packed. `labels` are those of the documents, or else the tokens; the first of each document and the filling are -100,
since no token predicts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raypipe.data.collation import IGNORED
from raypipe.errors import ConfigError, suggestion

PackedRow = dict[str, npt.NDArray[np.int64]]


class Document(NamedTuple):
    """A document, or a piece of one.

    Attributes:
        tokens: Its tokens.
        labels: What each is to be predicted as: as many.
    """

    tokens: Sequence[int]
    labels: Sequence[int]

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def piece(self, first: int, end: int) -> Document:
        """Return a part of it."""
        return Document(self.tokens[first:end], self.labels[first:end])

    @classmethod
    def of(cls, document: Any, field: str = "input_ids") -> Document:
        """Return a document that is a list of tokens, or a mapping with a field of tokens and perhaps `labels`.

        Raises:
            ConfigError: It has no such field, or not as many labels as tokens.
        """
        if not isinstance(document, Mapping):
            return cls(document, document)
        if field not in document:
            raise ConfigError(f"a document has no field {field!r}, only {', '.join(document)}{suggestion(field, document)}")
        tokens, labels = document[field], document.get("labels", document[field])
        if len(labels) != len(tokens):
            raise ConfigError(f"a document has {len(tokens)} tokens and {len(labels)} labels; each token needs one, {IGNORED} for none")
        return cls(tokens, labels)


def pack(documents: Sequence[Document], length: int, *, filling: int = 0) -> PackedRow:
    """Return one row of `length` tokens: `input_ids`, `labels`, `position_ids` and `document_ids`, each int64 [length].

    `document_ids` are 1, 2, ... and 0 for the filling behind the last document.

    Raises:
        ConfigError: The documents are longer than the row.
    """
    total = sum(document.size for document in documents)
    if total > length:
        raise ConfigError(f"documents of {total} tokens do not fit into a row of {length}")
    row: PackedRow = {
        "input_ids": np.full(length, filling, dtype=np.int64),
        "labels": np.full(length, IGNORED, dtype=np.int64),
        "position_ids": np.zeros(length, dtype=np.int64),
        "document_ids": np.zeros(length, dtype=np.int64),
    }
    first = 0
    for number, document in enumerate(documents, start=1):
        end = first + document.size
        row["input_ids"][first:end] = document.tokens
        row["labels"][first + 1 : end] = document.labels[1:]
        row["position_ids"][first:end] = np.arange(document.size)
        row["document_ids"][first:end] = number
        first = end
    return row


class PackedTable:
    """A table of packed rows of a table of documents; which documents share a row is worked out once.

    Documents go, the longest first, into the row with the least room that has enough (best-fit decreasing), which leaves little unfilled.
    Those longer than a row are cut into pieces of its length. The same documents always give the same rows.

    Args:
        documents: Table of token lists, or of mappings with a field of tokens and perhaps `labels`.
        length: Tokens of a row.
        field: Field of the tokens.
        lengths: Length of each document, if known; otherwise each document is read once.
        filling: Token that fills rows.
    """

    def __init__(
        self, documents: Any, length: int, *, field: str = "input_ids", lengths: Sequence[int] | None = None, filling: int = 0
    ) -> None:
        self._documents, self._length, self._field, self._filling = documents, length, field, filling
        sizes = lengths if lengths is not None else [Document.of(documents[at], field).size for at in range(len(documents))]
        self._rows = _best_fit(_pieces(sizes, length), length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> PackedRow:
        parts = [Document.of(self._documents[at], self._field).piece(first, end) for at, first, end in self._rows[place]]
        return pack(parts, self._length, filling=self._filling)


_Piece = tuple[int, int, int]
"""Document, first token and end."""


def _pieces(sizes: Sequence[int], length: int) -> list[_Piece]:
    return [(at, first, min(first + length, size)) for at, size in enumerate(sizes) for first in range(0, size, length)]


def _best_fit(pieces: Sequence[_Piece], length: int) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r: some row has room for r tokens
    for piece in sorted(pieces, key=lambda piece: (piece[1] - piece[2], piece)):
        size = piece[2] - piece[1]
        if fitting := rooms >> size << size:
            room = (fitting & -fitting).bit_length() - 1
            number = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, number = length, len(rows)
            rows.append([])
        rows[number].append(piece)
        by_room[room - size].append(number)
        rooms |= 1 << (room - size)
    return [sorted(row) for row in rows]


class PackedStream:
    """Packed rows of a stream of documents, in its order: a document that does not fit begins the next row.

    Documents longer than a row are cut into pieces of its length. A run goes on from the state of the documents, if they have one.

    Args:
        documents: Iterable of token lists, or of mappings with a field of tokens and perhaps `labels`.
        length: Tokens of a row.
        field: Field of the tokens.
        filling: Token that fills rows.
    """

    def __init__(self, documents: Iterable[Any], length: int, *, field: str = "input_ids", filling: int = 0) -> None:
        self._documents, self._length, self._field, self._filling = documents, length, field, filling
        self._loaded: Sequence[Document] = ()
        self._left: deque[Document] = deque()
        """Pieces of documents that are in no row yet."""

    def __iter__(self) -> Iterator[PackedRow]:
        left = self._left = deque(self._loaded)
        self._loaded = ()
        documents = iter(self._documents)
        held: list[Document] = []
        while True:
            if not left:
                given = next(documents, None)
                if given is None:
                    break
                document = Document.of(given, self._field)
                left.extend(document.piece(first, end) for _, first, end in _pieces([document.size], self._length))
                continue
            if sum(each.size for each in held) + left[0].size > self._length:
                row, held = pack(held, self._length, filling=self._filling), []
                yield row
            held.append(left.popleft())
        if held:
            yield pack(held, self._length, filling=self._filling)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch on to the documents."""
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any] | None:
        """Return from where the iteration goes on; `None` if the documents have no such state."""
        if not hasattr(self._documents, "state_dict"):
            return None
        left = [(list(map(int, piece.tokens)), list(map(int, piece.labels))) for piece in self._left]
        return {"documents": self._documents.state_dict(), "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a state that `state_dict` returned."""
        assert hasattr(self._documents, "load_state_dict"), "a state comes from documents that have one"
        self._documents.load_state_dict(state["documents"])
        self._loaded = [Document(tokens, labels) for tokens, labels in state["left"]]
