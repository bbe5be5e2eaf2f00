"""Files of named fields: what is written is read, in which order, and every refusal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raypipe.actors.execution.batches import FileSource
from raypipe.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from raypipe.data.fields import FORMAT, FieldDataset, NumberType, Repeated, Rows, holds_fields, write_rows
from raypipe.data.prepare import prepare
from raypipe.data.samples import permutation
from raypipe.errors import ConfigError, FormatError
from raypipe.model import Layer, Model
from raypipe.training.checks import check_data

NUM_ROWS = 60
SPLITS = [("train", "train", "validation", "test")[number % 4] for number in range(NUM_ROWS)]


def numbered() -> dict[str, npt.NDArray[Any]]:
    """Fields whose values tell the number of their row."""
    number = np.arange(NUM_ROWS)
    return {"number": number, "image": (number[:, None, None] + np.zeros((1, 3, 2))).astype(np.uint8), "half": number[:, None] / 2}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_rows(tmp_path / "fields.parquet", Rows(numbered(), SPLITS, labels={"number": ("none", "one")}))
    return tmp_path / "fields.parquet"


def source(path: Path, *, seed: int = 3, microbatch_size: int = 8) -> FileSource:
    return FileSource(str(path), sequence_length=128, seed=seed, microbatch_size=microbatch_size)


def edited(path: Path, *, metadata: Mapping[str, str] | None = None, **columns: pa.Array | None) -> Path:
    """Writes a file of two fields, one row, with other metadata, and with columns replaced or left out."""
    write_rows(path, Rows({"left": np.zeros((1, 2), np.uint8), "right": np.zeros(1)}, ["train"]))
    table = pq.read_table(path)
    for name, column in columns.items():
        table = table.drop_columns(name)
        table = table if column is None else table.append_column(name, column)
    changed = {name.encode(): value for name, value in (metadata or {}).items()}
    pq.write_table(table.replace_schema_metadata(table.schema.metadata | changed), path)
    return path


class TestFieldDataset:
    def test_it_has_the_rows_of_a_split_with_types_and_shapes(self, file: Path) -> None:
        for split in ("train", "validation", "test"):
            dataset = FieldDataset(file, seed=0, split=split)
            rows = dataset.rows(0, dataset.num_rows)
            assert sorted(rows["number"]) == [number for number in range(NUM_ROWS) if SPLITS[number] == split]
            assert {name: (values.dtype.name, values.shape[1:]) for name, values in rows.items()} == {
                "number": ("int64", ()),
                "image": ("uint8", (3, 2)),
                "half": ("float64", (1,)),
            }
            assert (rows["image"] == rows["number"][:, None, None]).all()
            assert (rows["half"][:, 0] == rows["number"] / 2).all()
        assert dataset.fields["number"].labels == ("none", "one")

    @pytest.mark.parametrize("dtype", list(NumberType))
    def test_every_type_reaches_the_layers_as_it_is(self, dtype: NumberType, tmp_path: Path) -> None:
        fields = {"array": np.arange(8).reshape(4, 2).astype(dtype.numpy), "number": np.arange(4).astype(dtype.numpy)}
        write_rows(tmp_path / "f.parquet", Rows(fields, ["train"] * 4))
        batch = source(tmp_path / "f.parquet", microbatch_size=4)("train").batch(0, (0.0, 1.0))
        assert {values.dtype for values in batch.values()} == {getattr(torch, dtype.value)}
        assert sorted(batch["array"].flatten().tolist()) == list(range(8))

    def test_training_rows_are_shuffled_in_every_epoch_by_the_seed_alone(self, file: Path) -> None:
        size = NUM_ROWS // 2
        in_order = np.argsort(permutation(5, 0, size))
        epochs = [FieldDataset(file, seed=5).rows(epoch * size, size)["number"] for epoch in (0, 1, 0)]
        assert sorted(epochs[0]) == sorted(epochs[1])
        assert not np.array_equal(epochs[0], epochs[1])
        assert np.array_equal(epochs[0], epochs[2])
        assert np.array_equal(epochs[0][in_order], epochs[1][np.argsort(permutation(5, 1, size))])
        assert not np.array_equal(epochs[0], FieldDataset(file, seed=6).rows(0, size)["number"])

    def test_other_splits_stay_in_order(self, file: Path) -> None:
        one, two = (FieldDataset(file, seed=seed, split="validation") for seed in (1, 2))
        assert np.array_equal(one.rows(0, 40)["number"], two.rows(15, 40)["number"])

    def test_the_order_in_the_file_is_no_order_of_the_rows(self, file: Path, tmp_path: Path) -> None:
        numbers = FieldDataset(file, seed=0, split="validation").rows(0, 15)["number"]
        assert numbers.tolist() != sorted(numbers)
        order = np.arange(NUM_ROWS)[::-1]
        names = [str(row) for row in order]
        fields = {name: values[order] for name, values in numbered().items()}
        turned = Rows(fields, [SPLITS[row] for row in order], names=names, labels={"number": ("none", "one")})
        write_rows(tmp_path / "turned.parquet", turned)
        assert (tmp_path / "turned.parquet").read_bytes() == file.read_bytes()

    def test_values_that_repeat_are_stored_and_held_once(self, tmp_path: Path) -> None:
        images = np.random.default_rng(0).integers(0, 256, (5, 100, 100), dtype=np.uint8)
        indices = np.arange(1000) % 5
        write_rows(tmp_path / "f.parquet", Rows({"image": Repeated(images, indices), "number": indices}, ["train"] * 1000))
        assert (tmp_path / "f.parquet").stat().st_size < 2 * images.nbytes
        dataset = FieldDataset(tmp_path / "f.parquet", seed=0)
        assert sum(repeated.values.nbytes for repeated in dataset.values.values()) < 2 * images.nbytes
        rows = dataset.rows(0, 1000)
        assert np.array_equal(rows["image"], images[rows["number"]])

    def test_row_groups_and_columns_for_people_do_not_matter(self, file: Path, tmp_path: Path) -> None:
        table = pq.read_table(file)
        pq.write_table(table.append_column("note", pa.array(["seen"] * NUM_ROWS)), tmp_path / "groups.parquet", row_group_size=7)
        one, two = (FieldDataset(path, seed=0).rows(0, 50) for path in (file, tmp_path / "groups.parquet"))
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[name], two[name]) for name in one)

    def test_it_loads_no_torch(self) -> None:
        code = "import sys, raypipe.data.fields, raypipe.data.prepare; sys.exit(bool({'torch', 'matplotlib', 'PIL'} & set(sys.modules)))"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


class TestFileSource:
    def test_a_microbatch_has_the_same_rows_whenever_and_wherever_it_is_asked_for(self, file: Path) -> None:
        opened = source(file)("train")
        before = [opened.batch(number, (0.0, 1.0)) for number in range(9)]
        other = source(file)("train")
        for number in (8, 0, 3, 8):
            again = other.batch(number, (0.0, 1.0))
            assert all(torch.equal(again[name], values) for name, values in before[number].items())

    def test_parts_of_a_microbatch_are_its_rows(self, file: Path) -> None:
        opened = source(file)("train")
        whole = opened.batch(6, (0.0, 1.0))
        for name, values in whole.items():
            parts = [opened.batch(6, rows)[name] for rows in ((0.0, 0.25), (0.25, 1.0))]
            assert [len(part) for part in parts] == [2, 6]
            assert torch.equal(torch.cat(parts), values)

    def test_it_reads_tokens_and_fields_by_what_the_file_says(self, file: Path, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("to be or not to be\n" * 1000)
        prepare(tmp_path / "text.txt", output=tmp_path / "tokens.parquet")
        assert source(tmp_path / "tokens.parquet")("train").batch(0, (0.0, 1.0)).keys() == {"tokens", "targets"}
        assert source(file)("train").batch(0, (0.0, 1.0)).keys() == {"number", "image", "half"}
        assert not holds_fields(tmp_path / "missing.parquet")


class TestRefused:
    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"no\.parquet: there is no such file; make such a file with `raypipe data prepare glyphs`"):
            FieldDataset(tmp_path / "no.parquet", seed=0)

    def test_random_bytes(self, tmp_path: Path) -> None:
        (tmp_path / "noise").write_bytes(np.random.default_rng(0).bytes(500))
        with pytest.raises(FormatError, match="it cannot be read as Parquet"):
            FieldDataset(tmp_path / "noise", seed=0)

    def test_a_split_that_no_row_has(self, file: Path) -> None:
        with pytest.raises(FormatError, match=r"split: holds no row of 'tets'; did you mean 'test'\?; its splits are"):
            FieldDataset(file, seed=0, split="tets")

    def test_a_negative_seed(self, file: Path) -> None:
        with pytest.raises(ConfigError, match="the seed of the data order must be at least 0, not -1"):
            FieldDataset(file, seed=-1)

    @pytest.mark.parametrize(
        ("columns", "problem"),
        [
            ({"left": None}, "left: expected a column of type binary, got no such column"),
            ({"split": None}, "split: expected a column of type string, got no such column"),
            ({"left": pa.array(["ab"])}, "left: expected a column of type binary, got string"),
            ({"right": pa.array([1])}, "right: expected a column of type double, got int64"),
            ({"left": pa.array([b"abc"])}, r"left: a value has not the 2 bytes of \[2\] uint8"),
            ({"left": pa.array([None], pa.binary())}, "left: 1 rows have no value"),
            ({"right": pa.array([None], pa.float64())}, "right: 1 rows have no value"),
        ],
    )
    def test_columns_that_are_not_as_the_file_says(self, tmp_path: Path, columns: dict[str, Any], problem: str) -> None:
        with pytest.raises(FormatError, match=problem):
            FieldDataset(edited(tmp_path / "f.parquet", **columns), seed=0)

    @pytest.mark.parametrize(
        ("metadata", "problem"),
        [
            ({"format": "raypipe.fields/9"}, f"metadata.format: expected '{FORMAT}', got 'raypipe.fields/9'"),
            ({"fields": "["}, "metadata.fields"),
            ({"fields": "{}"}, "metadata.fields: names no field"),
            ({"fields": '{"left": {"dtype": "uint9"}}'}, "metadata.fields: left.dtype: expected 'uint8', "),
            ({"fields": '{"left": {"dtype": "uint8", "shap": [2]}}'}, "left.shap: unknown key; did you mean 'shape'"),
            ({"fields": '{"left": {"dtype": "uint8", "shape": [0]}}'}, r"left.shape\[0\]: expected a number > 0, got 0"),
        ],
    )
    def test_metadata_that_cannot_be_used(self, tmp_path: Path, metadata: dict[str, str], problem: str) -> None:
        with pytest.raises(FormatError, match=problem):
            FieldDataset(edited(tmp_path / "f.parquet", metadata=metadata), seed=0)

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"split": np.zeros(2)}, "a field is called 'split', as the column that every file of fields has"),
            ({"a": np.zeros((3, 2))}, "the field 'a' has 3 rows, for 2 splits"),
            ({"a": Repeated(np.zeros((2, 2)), np.zeros(3, np.int64))}, "the field 'a' has 3 rows, for 2 splits"),
            ({"a": np.zeros(2, np.complex64)}, "the field 'a' has numbers of type complex64; convert them to one of uint8"),
        ],
    )
    def test_rows_that_cannot_be_written(self, tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            write_rows(tmp_path / "f.parquet", Rows(fields, ["train"] * 2))
        assert not list(tmp_path.iterdir())


class TestRunsRead:
    def model(self, field: str) -> Model:
        return Model((Layer("first", torch.nn.Identity, inputs=(), batch=(field,)),), loss=lambda output, _: output.mean())

    def config(self, file: Path, **values: Any) -> TrainConfig:
        return TrainConfig(model=ModelConfig(function="a:b"), data=DataConfig(path=str(file)), **values)

    def test_fields_that_the_file_has(self, file: Path) -> None:
        assert check_data(self.config(file), self.model("image"), vocabulary_size=None) == 1

    def test_no_others(self, file: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"layer 'first' takes the field 'imagee'; did you mean 'image'\?; .* has number, image, half"
        ):
            check_data(self.config(file), self.model("imagee"), vocabulary_size=None)

    def test_no_text_to_go_on_with(self, file: Path) -> None:
        with pytest.raises(ConfigError, match=r"run.sample_bytes needs a file of tokens, .* holds named fields; set it to 0"):
            check_data(self.config(file, run=RunConfig(sample_bytes=9)), self.model("image"), vocabulary_size=None)

    def test_validation_rows_if_there_is_an_evaluation(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "f.parquet", Rows({"image": np.zeros((2, 2))}, ["train"] * 2))
        with pytest.raises(FormatError, match="split: holds no row of 'validation'"):
            check_data(self.config(tmp_path / "f.parquet"), self.model("image"), vocabulary_size=None)
