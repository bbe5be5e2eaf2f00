"""Rows of every kind of data are the same, in the same order, wherever reading goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from raypipe.actors.data.reader import RowReader, unpacked
from raypipe.actors.data.source import DataSource
from raypipe.actors.data.streams import Position, RowStream
from raypipe.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")  # torchdata calls what torch no longer wants called

NUM_ROWS = 23
SIZE = 4
"""Rows of a microbatch; an epoch is no whole number of them."""
WHOLE = (0.0, 1.0)


class Numbers(Dataset[dict[str, Tensor]]):
    """A table whose rows draw from all generators."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        drawn = torch.rand(2, dtype=torch.float64) + random.random() + np.random.rand()
        return {"x": torch.tensor(place), "drawn": drawn}


class Iterated(IterableDataset[dict[str, Tensor]]):
    """A stream whose rows draw from all generators."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        table = Numbers()
        return (table[place] for place in range(NUM_ROWS))


class Stateful(Iterated):
    """A stream that counts its rows; its state is that number."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.at, self.begin = self.begin, 0
        table = Numbers()
        while self.at < NUM_ROWS:
            self.at += 1
            yield table[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def generated() -> Iterator[dict[str, Tensor]]:
    yield from Iterated()


def stateful_loader() -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Numbers(), batch_size=3, shuffle=True)


class Places(Numbers):
    """A table of numbers alone: torchdata does not restore the generators of its workers."""

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(place), "drawn": torch.tensor(place / 7)}


def stateful_loader_of_workers() -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Places(), batch_size=3, shuffle=True, num_workers=2)


def arrow() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(NUM_ROWS)), "drawn": [[at / 7, at / 3] for at in range(NUM_ROWS)]})


def streamed() -> Any:
    return arrow().to_iterable_dataset(num_shards=3)


def shuffled_stream() -> Any:
    return streamed().shuffle(seed=3, buffer_size=5)


KINDS: dict[str, Callable[[], Any]] = {
    "table": Numbers,
    "list": lambda: [{"x": at, "drawn": [at / 7]} for at in range(NUM_ROWS)],
    "columns": lambda: {"x": np.arange(NUM_ROWS), "drawn": np.random.default_rng(0).normal(size=(NUM_ROWS, 2))},
    "iterable": Iterated,
    "iterable-with-state": Stateful,
    "generator-function": generated,
    "loader": lambda: DataLoader(Numbers(), batch_size=5, shuffle=True),
    "loader-of-rows": lambda: DataLoader(Iterated(), batch_size=None),
    "loader-of-workers": lambda: DataLoader(Numbers(), batch_size=5, shuffle=True, num_workers=2),
    "stateful-loader": stateful_loader,
    "stateful-loader-of-workers": stateful_loader_of_workers,
    "arrow": arrow,
    "arrow-stream": streamed,
    "shuffled-arrow-stream": shuffled_stream,
}


def reader(kind: str, *, start: str = "", seed: int = 1) -> RowReader:
    source = DataSource({"train": KINDS[kind]}, seed=seed)
    return RowReader(source.packed(), "train", num_kept=4, mark_every=2 * SIZE, start=lambda: start)


def rows_of(of: RowReader, first: int, count: int = SIZE) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in unpacked(of.rows(first, count, WHOLE)).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_with_the_very_next_row_in_another_process(kind: str) -> None:
    straight = reader(kind)
    expected = [rows_of(straight, number * SIZE) for number in range(15)]  # three epochs
    for update in (1, 2, 5):
        row = update * 2 * SIZE
        first = reader(kind)
        ahead = [rows_of(first, number * SIZE) for number in range(2 * update + 3)]
        assert ahead == expected[: 2 * update + 3], "reading ahead of the checkpoint"
        again = reader(kind, start=first.position(row))
        assert rows_of(again, 0) == expected[0], "as layers are measured with the first rows"
        assert [rows_of(again, number * SIZE) for number in range(2 * update, 15)] == expected[2 * update :]


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_has_every_row_once(kind: str) -> None:
    of = reader(kind)
    found = [place for number in range(12) for place in rows_of(of, number * SIZE)["x"]]
    for epoch in range(2):
        assert sorted(found[epoch * NUM_ROWS : (epoch + 1) * NUM_ROWS]) == list(range(NUM_ROWS))


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_back_and_divides_rows_otherwise(kind: str) -> None:
    of = reader(kind)
    before = [rows_of(of, number * SIZE) for number in range(8)]
    assert [rows_of(of, number * SIZE) for number in range(3, 8)] == before[3:]
    assert rows_of(of, 8, 8)["x"] == before[2]["x"] + before[3]["x"]
    assert rows_of(of, 8, 8)["drawn"] == before[2]["drawn"] + before[3]["drawn"]
    halves = [unpacked(of.rows(8, 8, rows))["x"].tolist() for rows in ((0.0, 0.5), (0.5, 1.0))]
    assert halves[0] + halves[1] == rows_of(of, 8, 8)["x"]


@pytest.mark.parametrize("kind", ["iterable-with-state", "stateful-loader"])
def test_a_state_saves_reading_the_epoch_again(kind: str) -> None:
    first = reader(kind)
    rows_of(first, 4 * SIZE)
    position = Position.from_text(first.position(4 * SIZE))
    assert position.state is not None
    assert 4 * SIZE - position.row < 2 * SIZE, "at most an update is read again"


class Live(Stateful):
    """A stream that goes on changing the state that it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"at": 0}

    def state_dict(self) -> dict[str, int]:
        self.state["at"] = self.at
        return self.state


def test_a_stream_goes_far_back_without_reading_all_of_it_again_and_to_the_same_rows() -> None:
    stream = RowStream(Live, seed=0, mark_every=1)
    num_rows = 40 * NUM_ROWS
    rows = [row["x"] for row in stream.read(0, num_rows)]
    for back in (1, 10, 100, num_rows // 2):
        position = stream.position(num_rows - back)
        assert num_rows - back - position.row <= back
        assert [row["x"] for row in stream.read(num_rows - back, 1)] == rows[num_rows - back : num_rows - back + 1]
        stream.read(num_rows - 1, 1)


def test_a_table_is_shuffled_anew_by_seed_and_epoch() -> None:
    orders = {seed: [rows_of(reader("table", seed=seed), number * SIZE)["x"] for number in range(10)] for seed in (1, 2)}
    assert orders[1] != orders[2]
    found = [place for piece in orders[1] for place in piece]
    assert found[:NUM_ROWS] != found[NUM_ROWS : 2 * NUM_ROWS][: len(found) - NUM_ROWS]


def test_data_shorter_than_a_microbatch_begins_anew_within_it() -> None:
    source = DataSource({"train": [{"x": 0}, {"x": 1}]})
    of = RowReader(source.packed(), "train", num_kept=1, mark_every=1)
    assert sorted(rows_of(of, 0, 4)["x"]) == [0, 0, 1, 1]
    stream = RowStream(IteratedTwice, seed=0, mark_every=1)
    assert stream.read(0, 5) == [0, 1, 0, 1, 0]


class IteratedTwice:
    def __iter__(self) -> Iterator[int]:
        return iter((0, 1))


class Empty:
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param([], r"the train data has no row", id="an-empty-table"),
        pytest.param(Empty(), r"epoch 0 of the data has no row; give data that can be iterated again", id="an-empty-stream"),
        pytest.param(7, r"data.train is of type int; expected a table", id="no-data"),
        pytest.param({"x": [1, 2], "y": [1]}, r"columns of the data have different lengths: x 2, y 1", id="uneven-columns"),
        pytest.param([(1, 2)], r"a row of the data is of type tuple, .* give `collate`", id="a-tuple"),
        pytest.param([{"x": 1}, {"y": 1}], r"one row of the data has the fields", id="a-missing-field"),
        pytest.param([{"x": [1]}, {"x": [1, 2]}], r"'x' of rows of one microbatch has the shapes \[1\] and \[2\]; .*Pad", id="lengths"),
        pytest.param([{"x": "a"}], r"'x' of a row is no number or array .* leave it out", id="text"),
        pytest.param("my_data:rows", r"data.train 'my_data:rows': no module 'my_data'", id="an-unknown-module"),
        pytest.param("no_file.py:rows", r"data.train 'no_file.py:rows': there is no file", id="a-missing-file"),
        pytest.param(lambda: 1 / 0, r"the function of data.train, .* failed: ZeroDivisionError", id="a-function-that-fails"),
    ],
)
def test_what_cannot_be_read_is_refused(data: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RowReader(DataSource({"train": data}).packed(), "train", num_kept=1, mark_every=1).rows(0, 2, WHOLE)


@pytest.mark.parametrize(
    ("collate", "problem"),
    [
        pytest.param(lambda rows: [1], r"`collate` returned list; expected a dict", id="a-list"),
        pytest.param(lambda rows: {"x": torch.zeros(3)}, r"`collate` made of 2 rows the fields x \[3\]; the first dimension", id="rows"),
        pytest.param(lambda rows: rows[0]["y"], r"rows 0 to 1 of the train data: KeyError: 'y'", id="an-error"),
    ],
)
def test_a_collation_that_gives_no_fields_is_refused(collate: Any, problem: str) -> None:
    source = DataSource({"train": [{"x": 1}, {"x": 2}]}, collate=collate)
    with pytest.raises(ConfigError, match=problem):
        RowReader(source.packed(), "train", num_kept=1, mark_every=1).rows(0, 2, WHOLE)


def test_rows_of_another_shape_are_refused_where_they_come() -> None:
    class Growing:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> dict[str, Any]:
            return {"x": [0] * (1 + place // 2)}

    of = RowReader(DataSource({"validation": Growing()}).packed(), "validation", num_kept=1, mark_every=1)
    of.rows(0, 2, WHOLE)
    with pytest.raises(ConfigError, match=r"rows 2 to 3 .* 'x' of a row is int64 \[2\], but was int64 \[1\] in the first rows"):
        of.rows(2, 2, WHOLE)


def test_data_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to the processes that read it .* give a function"):
        DataSource({"train": generated()}).packed()
