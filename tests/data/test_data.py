"""Text to token files to rows: contents, order, and every refusal."""

from __future__ import annotations

import errno
import fcntl
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.data.prepare import prepare
from raypipe.data.samples import permutation
from raypipe.data.tokenizers import FileTokenizer
from raypipe.data.tokens import FORMAT, SCHEMA, TokenDataset
from raypipe.errors import ConfigError, FormatError, InputError, UnknownNameError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 40 short texts, one of them empty, and files that are no text."""
    root = tmp_path / "texts"
    for index in range(40):
        path = root / f"part-{index % 3}" / f"text-{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"Text {index}. ".encode() * (5 + index))
    (root / "empty.txt").write_bytes(b"")
    (root / "picture.png").write_bytes(b"\0\1\2")
    (root / ".hidden.txt").write_bytes(b"hidden")
    (root / ".git").mkdir()
    (root / ".git" / "log.txt").write_bytes(b"hidden too")
    return root


@pytest.fixture
def token_file(tmp_path: Path, folder: Path) -> Path:
    path = tmp_path / "tokens.parquet"
    prepare(folder, output=path, validation_fraction=0.25)
    return path


def write_tokens(path: Path, *, tokens: bytes = b"abcdefghij", metadata: Mapping[str, str] | None = None) -> Path:
    """Writes a token file of one training document, with its metadata changed."""
    header = {"format": FORMAT, "vocabulary_size": "256", "num_train_tokens": str(len(tokens)), "num_validation_tokens": "0"}
    table = pa.table({"document": ["a"], "split": ["train"], "tokens": pa.array([tokens], pa.binary())}, schema=SCHEMA)
    pq.write_table(table.replace_schema_metadata({**header, **(metadata or {})}), path)
    return path


class TestPrepare:
    def test_a_folder_becomes_one_row_a_text_in_the_order_of_the_names(self, folder: Path, token_file: Path) -> None:
        table = pq.read_table(token_file)
        names = table["document"].to_pylist()
        assert names == sorted(f"part-{index % 3}/text-{index:02}.txt" for index in range(40))
        assert table["tokens"].to_pylist() == [(folder / name).read_bytes() + b"\0" for name in names]
        assert set(table["split"].to_pylist()) == {"train", "validation"}

    def test_the_metadata_states_format_source_licence_and_token_counts(self, folder: Path, token_file: Path) -> None:
        table = pq.read_table(token_file)
        metadata = table.schema.metadata
        counts = {"train": 0, "validation": 0}
        for row in table.to_pylist():
            counts[row["split"]] += len(row["tokens"])
        assert {key: metadata[key.encode()].decode() for key in ("format", "tokenizer", "vocabulary_size", "separator", "source")} == {
            "format": "raypipe.tokens/1",
            "tokenizer": "bytes",
            "vocabulary_size": "256",
            "separator": "0",
            "source": "texts",
        }
        assert metadata[b"license"]
        assert int(metadata[b"num_train_tokens"]) == counts["train"]
        assert int(metadata[b"num_validation_tokens"]) == counts["validation"]

    def test_the_summary_says_what_was_written(self, tmp_path: Path, folder: Path) -> None:
        path = tmp_path / "made" / "for it" / "tokens.parquet"
        prepared = prepare(folder, output=path, validation_fraction=0.25)
        rows = pq.read_table(path).to_pylist()
        assert prepared.path == str(path)
        assert prepared.num_documents == len(rows) == 40
        assert prepared.num_train_tokens == sum(len(row["tokens"]) for row in rows if row["split"] == "train")
        assert prepared.num_validation_tokens == sum(len(row["tokens"]) for row in rows if row["split"] == "validation")
        assert prepared.file_bytes == path.stat().st_size
        assert [found.name for found in path.parent.iterdir()] == ["tokens.parquet"]

    def test_the_same_text_gives_the_same_bytes_wherever_it_lies(self, tmp_path: Path, folder: Path, token_file: Path) -> None:
        moved = tmp_path / "elsewhere" / "texts"
        for path in sorted(folder.rglob("*.txt"), reverse=True):
            (moved / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (moved / path.relative_to(folder)).write_bytes(path.read_bytes())
        other = tmp_path / "other.parquet"
        prepare(str(moved), output=str(other), validation_fraction=0.25)
        assert other.read_bytes() == token_file.read_bytes()

    def test_a_document_keeps_its_split_when_others_come_and_go(self, tmp_path: Path, folder: Path, token_file: Path) -> None:
        before = {row["document"]: row["split"] for row in pq.read_table(token_file).to_pylist()}
        for path in sorted(folder.rglob("text-*.txt"))[::2]:
            path.unlink()
        (folder / "aaa.txt").write_text("new text")
        prepare(folder, output=tmp_path / "less.parquet", validation_fraction=0.25)
        after = {row["document"]: row["split"] for row in pq.read_table(tmp_path / "less.parquet").to_pylist()}
        assert len(after) == 21
        assert all(before[name] == split for name, split in after.items() if name != "aaa.txt")

    def test_a_larger_fraction_only_adds_documents_to_validation(self, tmp_path: Path, folder: Path) -> None:
        chosen: list[set[str]] = []
        for fraction in (0.0, 0.1, 0.5):
            path = tmp_path / f"{fraction}.parquet"
            prepare(folder, output=path, validation_fraction=fraction)
            chosen.append({row["document"] for row in pq.read_table(path).to_pylist() if row["split"] == "validation"})
        assert not chosen[0]
        assert chosen[1] < chosen[2]

    def test_a_single_file_is_cut_at_line_ends_so_that_it_has_both_splits(self, tmp_path: Path) -> None:
        text = b"".join(b"line %d of a long text\n" % index for index in range(10_000))
        (tmp_path / "book.text").write_bytes(text)
        prepared = prepare(tmp_path / "book.text", output=tmp_path / "book.parquet")
        rows = pq.read_table(tmp_path / "book.parquet").to_pylist()
        assert [row["document"] for row in rows] == [f"book.text#{index}" for index in range(len(rows))]
        assert b"".join(row["tokens"].removesuffix(b"\0") for row in rows) == text
        assert all(row["tokens"].endswith(b"\n\0") for row in rows)
        assert 0.01 < prepared.num_validation_tokens / len(text) < 0.15

    def test_a_text_without_line_ends_is_cut_all_the_same(self, tmp_path: Path) -> None:
        (tmp_path / "line.txt").write_bytes(b"x" * 20_000)
        prepare(tmp_path / "line.txt", output=tmp_path / "line.parquet", validation_fraction=0)
        assert [len(row["tokens"]) for row in pq.read_table(tmp_path / "line.parquet").to_pylist()] == [8193, 8193, 3617]

    def test_a_text_that_fills_a_piece_exactly_stays_whole(self, tmp_path: Path) -> None:
        (tmp_path / "line.txt").write_bytes(b"x" * 4096)
        prepare(tmp_path / "line.txt", output=tmp_path / "line.parquet", validation_fraction=0)
        assert pq.read_table(tmp_path / "line.parquet")["document"].to_pylist() == ["line.txt"]

    def test_suffixes_choose_the_files_of_a_folder(self, tmp_path: Path, folder: Path) -> None:
        (folder / "notes.log").write_text("a log")
        prepare(folder, output=tmp_path / "log.parquet", suffixes=[".log"], validation_fraction=0)
        assert pq.read_table(tmp_path / "log.parquet")["document"].to_pylist() == ["notes.log"]

    def test_python_stdlib_gives_millions_of_tokens_without_tests_and_packages(self, tmp_path: Path) -> None:
        prepared = prepare("python-stdlib", output=tmp_path / "tokens.parquet")
        table = pq.read_table(tmp_path / "tokens.parquet", columns=["document"])
        names = table["document"].to_pylist()
        folders = {part for name in names for part in name.split("/")[:-1]}
        assert prepared.num_train_tokens > 5_000_000
        assert 0.01 < prepared.num_validation_tokens / prepared.num_train_tokens < 0.15
        assert {"argparse.py", "json/decoder.py", "pydoc_data/topics/with"} <= set(names)
        assert "pydoc_data/topics.py" not in names
        assert not folders & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
        assert "Python Software Foundation License" in prepared.license
        assert prepared.source.startswith("python-stdlib 3.")

    def test_neither_data_module_loads_torch(self) -> None:
        code = "import sys, raypipe.data.prepare, raypipe.data.tokens; sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


class TestPrepareRefuses:
    def test_an_unknown_source_and_suggests_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no text source 'pyhton-stdlib'; did you mean 'python-stdlib'.*or of a folder"):
            prepare("pyhton-stdlib", output=tmp_path / "tokens.parquet")

    def test_a_folder_without_text_files(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError, match=r"empty: the folder holds no file that ends with \.txt"):
            prepare(tmp_path / "empty", output=tmp_path / "tokens.parquet")

    def test_files_that_are_all_empty(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"")
        with pytest.raises(InputError, match=r"a\.txt: it holds no text; give more text"):
            prepare(tmp_path / "a.txt", output=tmp_path / "tokens.parquet")
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]

    def test_a_source_that_falls_to_validation_as_a_whole(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"short")
        with pytest.raises(InputError, match="all of its documents fell to the validation split; lower the validation fraction"):
            prepare(tmp_path / "a.txt", output=tmp_path / "tokens.parquet", validation_fraction=0.999999)

    def test_a_file_that_is_no_text_and_keeps_the_output_that_was_there(self, tmp_path: Path, folder: Path) -> None:
        output = tmp_path / "tokens.parquet"
        prepare(folder, output=output)
        before = output.read_bytes()
        (folder / "utf16.txt").write_bytes("text".encode("utf-16"))
        with pytest.raises(FormatError, match=r"utf16\.txt: it holds a zero byte, so it is not text; convert it to UTF-8"):
            prepare(folder, output=output)
        assert output.read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tokens.parquet"]

    def test_a_file_that_cannot_be_read(self, tmp_path: Path, folder: Path) -> None:
        (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
        with pytest.raises(FormatError, match=r"gone\.txt: it cannot be read"):
            prepare(folder, output=tmp_path / "tokens.parquet")

    def test_a_file_name_that_utf_8_cannot_hold(self, tmp_path: Path, folder: Path) -> None:
        try:
            (folder / "caf\udce9.txt").write_text("text")
        except OSError as error:
            if error.errno != errno.EILSEQ:
                raise
            pytest.skip("this file system takes only names in UTF-8")
        with pytest.raises(InputError, match=r"the name of the file 'caf.udce9\.txt' is not UTF-8"):
            prepare(folder, output=tmp_path / "tokens.parquet")

    def test_an_output_below_a_file(self, tmp_path: Path, folder: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(InputError, match=r"tokens\.parquet: cannot be written"):
            prepare(folder, output=tmp_path / "file" / "tokens.parquet")

    def test_an_output_that_is_a_folder(self, folder: Path) -> None:
        with pytest.raises(InputError, match=r"the output is a folder; name a file in it"):
            prepare(folder, output=folder)

    def test_an_output_that_would_replace_its_source(self, folder: Path) -> None:
        text = folder / "part-0" / "text-00.txt"
        before = text.read_bytes()
        for source in (folder, text):
            with pytest.raises(InputError, match="would replace the text"):
                prepare(source, output=text)
        assert text.read_bytes() == before

    @pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
    def test_a_validation_fraction_out_of_range(self, tmp_path: Path, folder: Path, fraction: float) -> None:
        with pytest.raises(ConfigError, match="validation_fraction must be at least 0 and less than 1"):
            prepare(folder, output=tmp_path / "tokens.parquet", validation_fraction=fraction)


class TestTokenDataset:
    def test_validation_is_read_in_order_and_sequences_share_their_border_token(self, token_file: Path) -> None:
        dataset = TokenDataset(token_file, sequence_length=8, seed=0, split="validation")
        rows = [row for row in pq.read_table(token_file).to_pylist() if row["split"] == "validation"]
        tokens = np.frombuffer(b"".join(row["tokens"] for row in rows), dtype=np.uint8)
        assert dataset.num_tokens == len(tokens)
        assert dataset.num_sequences == (len(tokens) - 1) // 8
        samples = dataset.rows(0, dataset.num_sequences)
        assert samples.dtype == np.int64
        assert samples.shape == (dataset.num_sequences, 9)
        for index, sample in enumerate(samples):
            np.testing.assert_array_equal(sample, tokens[8 * index : 8 * index + 9])
        np.testing.assert_array_equal(dataset.rows(dataset.num_sequences, 3), samples[:3])

    def test_the_splits_hold_different_documents(self, token_file: Path) -> None:
        expected = pq.read_table(token_file)["split"].to_pylist()
        for split in ("train", "validation"):
            dataset = TokenDataset(token_file, sequence_length=1, seed=0, split=split)
            targets = dataset.rows(0, dataset.num_sequences)[:, 1]
            assert int((targets == 0).sum()) == expected.count(split)  # each document ends with one separator

    def test_each_epoch_is_another_permutation_of_the_same_sequences(self, token_file: Path) -> None:
        dataset = TokenDataset(token_file, sequence_length=16, seed=5)
        size = dataset.num_sequences
        first, second = dataset.rows(0, size), dataset.rows(size, size)
        assert not np.array_equal(first, second)
        np.testing.assert_array_equal(np.sort(permutation(5, 0, size)), np.arange(size))
        np.testing.assert_array_equal(first[np.argsort(permutation(5, 0, size))], second[np.argsort(permutation(5, 1, size))])

    def test_the_order_is_a_pure_function_of_seed_and_sample(self, token_file: Path) -> None:
        dataset = TokenDataset(token_file, sequence_length=16, seed=5)
        size = dataset.num_sequences
        whole = dataset.rows(0, 3 * size + 7)
        other = TokenDataset(str(token_file), sequence_length=16, seed=5)
        for first in (3 * size, size - 2, 0, 2 * size - 1, 5):
            np.testing.assert_array_equal(other.rows(first, 7), whole[first : first + 7])

    def test_rows_may_span_many_epochs_and_may_be_none(self, tmp_path: Path) -> None:
        dataset = TokenDataset(write_tokens(tmp_path / "a.parquet"), sequence_length=3, seed=1)
        rows = dataset.rows(0, 12)
        assert [sorted(bytes(row.astype(np.uint8)) for row in epoch) for epoch in rows.reshape(4, 3, 4)] == [
            [b"abcd", b"defg", b"ghij"]
        ] * 4
        assert dataset.rows(3, 0).shape == (0, 4)

    def test_another_seed_gives_another_order(self, token_file: Path) -> None:
        one, two = (TokenDataset(token_file, sequence_length=16, seed=seed).rows(0, 20) for seed in (1, 2))
        assert not np.array_equal(one, two)

    def test_the_order_stays_the_same_under_every_version_of_numpy(self) -> None:
        assert permutation(7, 3, 10).tolist() == [2, 4, 7, 3, 5, 1, 8, 9, 0, 6]
        with pytest.raises(ValueError, match="read-only"):
            permutation(7, 3, 10)[0] = 0

    def test_a_file_of_several_row_groups_is_read_whole(self, tmp_path: Path, folder: Path, token_file: Path) -> None:
        table = pq.read_table(token_file)
        pq.write_table(table, tmp_path / "groups.parquet", row_group_size=7)
        for split in ("train", "validation"):
            one, many = (TokenDataset(path, sequence_length=8, seed=0, split=split) for path in (token_file, tmp_path / "groups.parquet"))
            np.testing.assert_array_equal(one.rows(0, 50), many.rows(0, 50))


class TestTokenDatasetRefuses:
    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            FormatError, match=r"no\.parquet: there is no such file; make it with `raypipe data prepare python-stdlib -o .*no"
        ):
            TokenDataset(tmp_path / "no.parquet", sequence_length=8, seed=0)

    @pytest.mark.parametrize("size", [0, 3, 5000])
    def test_random_bytes(self, tmp_path: Path, size: int) -> None:
        (tmp_path / "noise").write_bytes(np.random.default_rng(0).bytes(size))
        with pytest.raises(FormatError, match=r"noise: it cannot be read as Parquet .*raypipe data prepare"):
            TokenDataset(tmp_path / "noise", sequence_length=8, seed=0)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="it cannot be read as Parquet"):
            TokenDataset(tmp_path, sequence_length=8, seed=0)

    @pytest.mark.parametrize("share", [0.3, 0.9])
    def test_a_file_that_was_cut_off(self, tmp_path: Path, token_file: Path, share: float) -> None:
        content = token_file.read_bytes()
        (tmp_path / "cut.parquet").write_bytes(content[: int(share * len(content))])
        with pytest.raises(FormatError, match="it cannot be read as Parquet"):
            TokenDataset(tmp_path / "cut.parquet", sequence_length=8, seed=0)

    def test_damaged_names_of_columns(self, tmp_path: Path, token_file: Path) -> None:
        (tmp_path / "damaged.parquet").write_bytes(token_file.read_bytes().replace(b"tokens", b"toke\xffs"))
        with pytest.raises(FormatError, match="it cannot be read as Parquet"):
            TokenDataset(tmp_path / "damaged.parquet", sequence_length=8, seed=0)

    def test_a_damaged_page(self, tmp_path: Path, token_file: Path) -> None:
        content = bytearray(token_file.read_bytes())
        column = pq.ParquetFile(token_file).metadata.row_group(0).column(2)
        middle = column.data_page_offset + column.total_compressed_size // 2
        content[middle - 50 : middle + 50] = b"\xff" * 100
        (tmp_path / "damaged.parquet").write_bytes(content)
        with pytest.raises(FormatError, match="it cannot be read as Parquet"):
            TokenDataset(tmp_path / "damaged.parquet", sequence_length=8, seed=0)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"format": "raypipe.tokens/9"}, r"metadata\.format: expected 'raypipe.tokens/1', got 'raypipe.tokens/9'"),
            ({"vocabulary_size": "many"}, r"metadata\.vocabulary_size: expected a whole number from 0 to 256, got 'many'"),
            ({"vocabulary_size": "257"}, r"metadata\.vocabulary_size: expected a whole number from 0 to 256, got '257'"),
            ({"vocabulary_size": "100"}, r"tokens: holds token 106, but the vocabulary has 100"),
            ({"num_train_tokens": "-1"}, r"metadata\.num_train_tokens: expected a whole number"),
            ({"num_train_tokens": "9" * 5000}, r"metadata\.num_train_tokens: expected a whole number"),
            ({"num_train_tokens": "9"}, r"metadata\.num_train_tokens: states 9, but the rows hold 10"),
            ({"num_train_tokens": "11"}, r"metadata\.num_train_tokens: states 11, but the rows hold 10"),
        ],
    )
    def test_metadata_that_is_wrong_or_contradicts_the_rows(self, tmp_path: Path, metadata: dict[str, str], message: str) -> None:
        path = write_tokens(tmp_path / "a.parquet", metadata=metadata)
        with pytest.raises(FormatError, match=message + r".*raypipe data prepare"):
            TokenDataset(path, sequence_length=3, seed=0)

    def test_parquet_that_holds_something_else(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "other.parquet")
        with pytest.raises(FormatError, match=r"metadata\.format: expected 'raypipe\.tokens/1', got ''"):
            TokenDataset(tmp_path / "other.parquet", sequence_length=3, seed=0)

    def test_a_column_of_another_type(self, tmp_path: Path) -> None:
        table = pa.table({"document": ["a"], "split": ["train"], "tokens": [[1, 2, 3]]})
        pq.write_table(table.replace_schema_metadata({"format": FORMAT}), tmp_path / "lists.parquet")
        with pytest.raises(FormatError, match=r"tokens: expected a column of type binary, got list"):
            TokenDataset(tmp_path / "lists.parquet", sequence_length=3, seed=0)

    def test_a_column_that_is_missing(self, tmp_path: Path) -> None:
        table = pq.read_table(write_tokens(tmp_path / "a.parquet"))
        pq.write_table(table.drop_columns(["split"]), tmp_path / "b.parquet")
        with pytest.raises(FormatError, match=r"split: expected a column of type string, got no such column"):
            TokenDataset(tmp_path / "b.parquet", sequence_length=3, seed=0)

    def test_a_document_without_tokens(self, tmp_path: Path) -> None:
        header = pq.read_schema(write_tokens(tmp_path / "a.parquet")).metadata
        table = pa.table({"document": ["a"], "split": ["train"], "tokens": pa.array([None], pa.binary())})
        pq.write_table(table.replace_schema_metadata(header), tmp_path / "b.parquet")
        with pytest.raises(FormatError, match="row group 0 holds a document without tokens"):
            TokenDataset(tmp_path / "b.parquet", sequence_length=3, seed=0)

    def test_too_few_tokens_for_one_sequence(self, tmp_path: Path) -> None:
        path = write_tokens(tmp_path / "a.parquet")
        assert TokenDataset(path, sequence_length=9, seed=0).num_sequences == 1
        with pytest.raises(FormatError, match=r"its train split has 10 tokens, too few for one sequence of 10 \+ 1; lower sequence_length"):
            TokenDataset(path, sequence_length=10, seed=0)
        with pytest.raises(FormatError, match=r"its validation split has 0 tokens.*or a larger validation fraction"):
            TokenDataset(path, sequence_length=3, seed=0, split="validation")

    def test_arguments_out_of_range(self, token_file: Path) -> None:
        with pytest.raises(ConfigError, match="sequence_length must be at least 1, not 0"):
            TokenDataset(token_file, sequence_length=0, seed=0)
        with pytest.raises(ConfigError, match="seed of the data order must be at least 0, not -1"):
            TokenDataset(token_file, sequence_length=8, seed=-1)
        with pytest.raises(UnknownNameError, match=r"no split is called 'valid'.*choose from: train, validation"):
            TokenDataset(token_file, sequence_length=8, seed=0, split="valid")


WORDS = [f"w{number}" for number in range(400)]


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """One token a word, each of two bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<unk>", *WORDS, "<|endoftext|>", "<stop>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


class TestTokenizer:
    def test_its_tokens_come_back_as_they_were_whatever_their_width(self, tmp_path: Path, word_tokenizer: Path) -> None:
        text = tmp_path / "words.txt"
        text.write_text(" ".join(WORDS[number * 7 % 400] for number in range(1000)))
        path = tmp_path / "tokens.parquet"
        done = prepare(text, output=path, validation_fraction=0.0, tokenizer=FileTokenizer(word_tokenizer))
        # 1000 words are less than a piece of a single file.
        assert (done.num_documents, done.num_train_tokens) == (1, 1001)
        metadata = pq.read_schema(path).metadata
        assert (metadata[b"vocabulary_size"], metadata[b"token_bytes"], metadata[b"separator"]) == (b"403", b"2", b"401")
        assert metadata[b"tokenizer"].startswith(b"tokenizer.json sha256:")
        data = TokenDataset(path, sequence_length=1000, seed=0)
        assert data.vocabulary_size == 403
        assert data.rows(0, 1).tolist() == [[*(1 + number * 7 % 400 for number in range(1000)), 401]]

    def test_lengths_that_its_file_sets_neither_cut_nor_fill_a_text(self, word_tokenizer: Path) -> None:
        text = " ".join(WORDS[:10]).encode()
        expected = FileTokenizer(word_tokenizer).encode(text)
        library = pytest.importorskip("tokenizers")
        for change, options in (("enable_truncation", {"max_length": 4}), ("enable_padding", {"length": 32})):
            made = library.Tokenizer.from_file(str(word_tokenizer))
            getattr(made, change)(**options)
            made.save(str(word_tokenizer))
            assert FileTokenizer(word_tokenizer).encode(text) == expected

    def test_documents_end_with_the_token_that_is_named(self, tmp_path: Path, word_tokenizer: Path, folder: Path) -> None:
        path = tmp_path / "tokens.parquet"
        prepare(folder, output=path, validation_fraction=0.0, tokenizer=FileTokenizer(word_tokenizer, separator="<stop>"))
        for tokens in pq.read_table(path)["tokens"].to_pylist():
            assert np.frombuffer(tokens, dtype="<u2")[-1] == 402

    def test_a_character_is_not_cut_where_a_text_without_line_ends_is(self, tmp_path: Path, word_tokenizer: Path) -> None:
        text = tmp_path / "long.txt"
        text.write_text("x" + "\u20ac" * 20_000, encoding="utf-8")  # three bytes each
        for tokenizer in (FileTokenizer(word_tokenizer), None):
            prepare(text, output=tmp_path / "tokens.parquet", validation_fraction=0.0, tokenizer=tokenizer)
        pieces = pq.read_table(tmp_path / "tokens.parquet")["tokens"].to_pylist()
        assert len(pieces) > 2
        assert "".join(piece[:-1].decode() for piece in pieces) == text.read_text(encoding="utf-8")

    def test_what_is_not_utf8_is_refused_by_name(self, tmp_path: Path, word_tokenizer: Path) -> None:
        text = tmp_path / "latin.txt"
        text.write_bytes("caf\u00e9 au lait".encode("latin-1"))
        with pytest.raises(FormatError, match=r"latin.txt.*is not UTF-8"):
            prepare(text, output=tmp_path / "tokens.parquet", tokenizer=FileTokenizer(word_tokenizer))

    def test_files_that_are_no_tokenizers_are_refused(self, tmp_path: Path, word_tokenizer: Path) -> None:
        (tmp_path / "broken.json").write_text("{}")
        with pytest.raises(FormatError, match=r"broken.json.*no tokenizer.json"):
            FileTokenizer(tmp_path / "broken.json")
        with pytest.raises(FormatError, match="there is no such file"):
            FileTokenizer(tmp_path / "none.json")
        with pytest.raises(ConfigError, match=r"no token '<stob>'.*did you mean '<stop>'"):
            FileTokenizer(word_tokenizer, separator="<stob>")

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"token_bytes": "3"}, "metadata.token_bytes: expected one of 1, 2, 4, got 3"),
            ({"token_bytes": "2", "vocabulary_size": "70000"}, "metadata.vocabulary_size: expected a whole number from 0 to 65536"),
            ({"token_bytes": "4", "vocabulary_size": "70000"}, "ends within a token of 4 bytes"),
        ],
    )
    def test_a_file_that_contradicts_itself_is_refused(self, tmp_path: Path, metadata: dict[str, str], message: str) -> None:
        path = write_tokens(tmp_path / "tokens.parquet", tokens=b"abcdefghij", metadata=metadata)
        with pytest.raises(FormatError, match=message):
            TokenDataset(path, sequence_length=2, seed=0)


class TestFlatCopies:
    """Of large splits; here of all."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("raypipe.data.tokens._MAPPED_BYTES", 1)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache" / "raypipe" / "tokens"

    @pytest.mark.parametrize("token_bytes", [1, 2, 4])
    def test_hold_the_tokens_of_the_file(self, token_bytes: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tokens = np.arange(240 // token_bytes, dtype=f"<u{token_bytes}").tobytes()
        header = {"num_train_tokens": str(240 // token_bytes), "token_bytes": str(token_bytes)}
        path = write_tokens(tmp_path / "a.parquet", tokens=tokens, metadata=header)
        mapped = [TokenDataset(path, sequence_length=7, seed=1).rows(0, 9) for _ in range(2)]
        assert [file.read_bytes() for file in cache.glob("*.tokens")] == [tokens]
        monkeypatch.setattr("raypipe.data.tokens._MAPPED_BYTES", 2**28)
        held = TokenDataset(path, sequence_length=7, seed=1).rows(0, 9)
        assert np.array_equal(mapped[0], held)
        assert np.array_equal(mapped[1], held)

    def test_are_written_by_one_process_of_all(self, cache: Path, tmp_path: Path) -> None:
        path = write_tokens(tmp_path / "a.parquet", tokens=bytes(range(200)) * 1000, metadata={"num_train_tokens": "200000"})
        code = (
            "import logging, sys; logging.basicConfig(level='INFO'); from raypipe.data import tokens; tokens._MAPPED_BYTES = 1; "
            f"print(tokens.TokenDataset({str(path)!r}, sequence_length=100, seed=1).rows(0, 50).sum())"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
        ]
        ended = [process.communicate(timeout=60) for process in processes]
        assert len({out for out, _ in ended}) == 1
        assert sum(err.count("wrote a flat copy") for _, err in ended) == 1
        assert not list(cache.glob("*.part"))

    def test_of_what_the_file_held_before_are_removed(self, cache: Path, tmp_path: Path) -> None:
        for tokens in (b"abcdefghij", b"klmnopqrst"):
            before = list(cache.glob("*"))
            path = write_tokens(tmp_path / "a.parquet", tokens=tokens)
            other = write_tokens(tmp_path / "b.parquet")
            TokenDataset(other, sequence_length=3, seed=1)
            assert bytes(np.sort(TokenDataset(path, sequence_length=3, seed=1).rows(0, 3)[:, 0]).astype(np.uint8)) == tokens[0:9:3]
        assert len(before) == 4
        assert len(list(cache.glob("*.tokens"))) == 2

    def test_that_are_damaged_are_written_again(self, cache: Path, tmp_path: Path) -> None:
        path = write_tokens(tmp_path / "a.parquet")
        rows = TokenDataset(path, sequence_length=3, seed=1).rows(0, 3)
        next(cache.glob("*.tokens")).write_bytes(b"a")
        assert np.array_equal(TokenDataset(path, sequence_length=3, seed=1).rows(0, 3), rows)

    def test_of_files_that_contradict_themselves_are_not_made(self, cache: Path, tmp_path: Path) -> None:
        for key, value in (("num_train_tokens", "11"), ("vocabulary_size", "99")):
            path = write_tokens(tmp_path / "a.parquet", metadata={key: value})
            with pytest.raises(FormatError):
                TokenDataset(path, sequence_length=3, seed=1)
        assert {file.suffix for file in cache.glob("*")} == {".lock"}

    def test_are_done_without_where_they_cannot_be_written(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "cache").write_text("no folder", encoding="utf-8")
        assert TokenDataset(write_tokens(tmp_path / "a.parquet"), sequence_length=3, seed=1).num_tokens == 10
        assert re.search(r"held in memory, since there can be no flat copy of them: .*cache.*: Not a directory", caplog.text)

    def test_that_another_process_does_not_end_are_not_waited_for(
        self, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_tokens(tmp_path / "a.parquet")
        TokenDataset(path, sequence_length=3, seed=1)
        next(cache.glob("*.tokens")).unlink()
        monkeypatch.setattr("raypipe.data.flat._PATIENCE_S", 0.5)
        with next(cache.glob("*.lock")).open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert TokenDataset(path, sequence_length=3, seed=1).num_tokens == 10
        assert re.search(r"another process holds .*\.lock, and .*\.part has not grown for 0.5 s", caplog.text)

    def test_of_a_process_that_forked_meanwhile_are_waited_for_no_longer_than_they_take(self, cache: Path, tmp_path: Path) -> None:
        path = write_tokens(tmp_path / "a.parquet")
        TokenDataset(path, sequence_length=3, seed=1)
        whole = next(cache.glob("*.tokens"))
        with next(cache.glob("*.lock")).open("a") as held:  # as a child has it that knows of no copy
            fcntl.flock(held, fcntl.LOCK_EX)
            content = whole.read_bytes()
            whole.unlink()
            timer = threading.Timer(0.5, whole.write_bytes, (content,))
            timer.start()
            assert TokenDataset(path, sequence_length=3, seed=1).rows(0, 1).shape == (1, 4)
            timer.join()
