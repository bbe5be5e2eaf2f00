from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.data.collation import IGNORED, Pad
from raypipe.data.packing import Document, PackedStream, PackedTable, pack
from raypipe.errors import ConfigError

documents = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=20), min_size=1, max_size=30)


def unpacked(row: dict[str, Any]) -> list[list[int]]:
    """The documents of a row, found by their positions alone, as attention does."""
    tokens, ids = row["input_ids"], row["document_ids"]
    starts = [at for at, position in enumerate(row["position_ids"]) if position == 0 and ids[at]]
    ends = [*starts[1:], int((ids > 0).sum())]
    return [tokens[first:end].tolist() for first, end in zip(starts, ends, strict=True)]


def pieces(document: list[int], length: int) -> list[list[int]]:
    return [document[first : first + length] for first in range(0, len(document), length)]


def test_a_row_has_positions_and_labels_of_each_document() -> None:
    row = pack([Document.of([5, 6, 7]), Document.of([8, 9])], 7, filling=1)
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 1, 1]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert row["document_ids"].tolist() == [1, 1, 1, 2, 2, 0, 0]
    assert row["labels"].tolist() == [IGNORED, 6, 7, IGNORED, 9, IGNORED, IGNORED]


LABELED = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [IGNORED, IGNORED, 7, 8, IGNORED]},
    {"input_ids": [1, 2], "labels": [IGNORED, 2]},
    {"input_ids": [3], "labels": [3]},
]


def labels_by_token(rows: list[dict[str, Any]]) -> dict[int, int]:
    return {
        int(token): int(label)
        for row in rows
        for token, label, document in zip(row["input_ids"], row["labels"], row["document_ids"], strict=True)
        if document
    }


def test_documents_keep_labels_of_their_own_but_for_what_no_token_of_theirs_predicts() -> None:
    table = PackedTable(LABELED, 3)
    expected = {5: IGNORED, 6: IGNORED, 7: 7, 8: IGNORED, 9: IGNORED, 1: IGNORED, 2: 2, 3: IGNORED}
    assert labels_by_token([table[place] for place in range(len(table))]) == expected
    assert labels_by_token(list(PackedStream(LABELED, 3))) == expected


def test_labels_that_wait_for_the_next_row_are_in_the_state_of_a_stream() -> None:
    stream = PackedStream(Documents(LABELED), 3)
    rows = iter(stream)
    first = next(rows)
    again = PackedStream(Documents(LABELED), 3)
    state = stream.state_dict()
    assert state is not None
    again.load_state_dict(state)
    assert labels_by_token([first, *again]) == labels_by_token([first, *rows])


def test_a_document_with_fewer_labels_than_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 3 tokens and 2 labels; each token needs one, -100 for none"):
        PackedTable([{"input_ids": [1, 2, 3], "labels": [1, 2]}], 4)


def test_what_does_not_fit_into_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"documents of 5 tokens do not fit into a row of 4"):
        pack([Document.of([1, 2, 3]), Document.of([4, 5])], 4)


@given(documents, st.integers(1, 12))
def test_a_packed_table_has_every_token_once(source: list[list[int]], length: int) -> None:
    table = PackedTable(source, length)
    rows = [table[place] for place in range(len(table))]
    found = sorted(piece for row in rows for piece in unpacked(row))
    assert found == sorted(piece for document in source for piece in pieces(document, length))
    total = sum(map(len, source))
    assert len(rows) <= 2 * total / length + 1, "two rows that are half empty would be one"


def test_a_packed_table_fills_rows_where_documents_fit_together() -> None:
    table = PackedTable([{"input_ids": [at] * size} for at, size in enumerate((5, 3, 6, 2, 8))], 8)
    assert len(table) == 3
    assert all((table[place]["document_ids"] > 0).all() for place in range(3))


class Documents:
    """Documents that go on from a state."""

    def __init__(self, source: Sequence[Any]) -> None:
        self.source, self.at, self.begin = source, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.source):
            self.at += 1
            yield self.source[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


@given(documents, st.integers(1, 12), st.integers(0, 40))
def test_a_packed_stream_goes_on_from_a_state_with_the_very_next_row(source: list[list[int]], length: int, num_read: int) -> None:
    stream = PackedStream(Documents(source), length)
    whole = [row["input_ids"].tolist() for row in stream]
    order = [piece for document in source for piece in pieces(document, length)]
    assert [piece for row in stream for piece in unpacked(row)] == order
    iterator, read = iter(stream), []
    for row in iterator:
        read.append(row["input_ids"].tolist())
        if len(read) > num_read:
            break
    state = stream.state_dict()
    again = PackedStream(Documents(source), length)
    assert state is not None
    again.load_state_dict(state)
    assert read + [row["input_ids"].tolist() for row in again] == whole
    assert [row["input_ids"].tolist() for row in again] == whole, "the next epoch begins at its beginning"


def test_a_document_without_the_field_of_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no field 'input_ids', only input_id; did you mean 'input_id'\?"):
        PackedTable([{"input_id": [1]}], 4)


def test_pad_fills_rows_to_one_length_and_says_what_is_filled() -> None:
    batch = Pad(4, mask="mask")([
        {"input_ids": [1, 2], "labels": [1, 2], "at": 7},
        {"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6], "at": 8},
    ])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    assert batch["labels"].tolist() == [[1, 2, IGNORED, IGNORED], [3, 4, 5, 6]]
    assert batch["mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["at"].tolist() == [7, 8]


def test_pad_refuses_longer_rows_unless_it_cuts_them() -> None:
    rows = [{"x": np.ones((5, 2))}]
    with pytest.raises(ConfigError, match=r"'x' of a row has the length 5, Pad fills to 4; raise it, or set cut=True"):
        Pad(4)(rows)
    assert Pad(4, cut=True)(rows)["x"].shape == (1, 4, 2)
    with pytest.raises(ConfigError, match=r"lacks the field 'x'"):
        Pad(4)([*rows, {"y": np.ones(1)}])
