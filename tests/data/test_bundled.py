"""The bundled sources of named fields: what they hold, and that no split knows the rows of another."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from raypipe.data.fields import FieldDataset
from raypipe.data.prepare import PreparedRows, prepare_rows
from raypipe.errors import ConfigError, InputError, UnknownNameError

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> PreparedRows:
    return prepare_rows("glyphs", output=tmp_path_factory.mktemp("glyphs") / "glyphs.parquet")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> PreparedRows:
    return prepare_rows("easy-vqa", output=tmp_path_factory.mktemp("easy-vqa") / "made" / "questions.parquet")


def row_names(prepared: PreparedRows, split: str) -> list[str]:
    table = pq.read_table(prepared.path, columns=["row", "split"])
    return [row["row"] for row in table.to_pylist() if row["split"] == split]


class TestGlyphs:
    def test_there_are_about_47000_pairs_of_6700_names(self, glyphs: PreparedRows) -> None:
        assert set(glyphs.num_rows) == set(SPLITS)
        assert sum(glyphs.num_rows.values()) == pytest.approx(47_000, rel=0.02)
        names = {bytes(name) for split in SPLITS for name in FieldDataset(glyphs.path, seed=0, split=split).values["name"].values}
        assert len(names) == pytest.approx(6_700, rel=0.02)

    def test_a_face_belongs_to_one_split(self, glyphs: PreparedRows) -> None:
        faces = {split: {row.split()[0] for row in row_names(glyphs, split)} for split in SPLITS}
        assert [len(faces[split]) for split in SPLITS] == [10, 1, 1]
        assert len(set.union(*faces.values())) == 12

    def test_a_row_has_the_image_and_the_name_of_its_character(self, glyphs: PreparedRows) -> None:
        dataset = FieldDataset(glyphs.path, seed=0, split="test")
        rows = dataset.rows(0, dataset.num_rows)
        assert rows["glyph"].shape[1:] == (32, 32)
        for name, row in zip(rows["name"], row_names(glyphs, "test"), strict=True):
            assert bytes(name).rstrip(b"\0").decode() == unicodedata.name(chr(int(row.partition("U+")[2], 16)))
        assert rows["glyph"].any(axis=(1, 2)).all()

    def test_the_image_shows_where_on_its_line_a_glyph_stands(self, glyphs: PreparedRows) -> None:
        dataset = FieldDataset(glyphs.path, seed=0, split="test")
        images = dict(zip(row_names(glyphs, "test"), dataset.rows(0, dataset.num_rows)["glyph"], strict=True))

        def inked(character: str) -> tuple[int, int]:
            lines = np.flatnonzero(images[f"DejaVuSerif-BoldItalic U+{ord(character):04X}"].any(axis=1))
            return int(lines[0]), int(lines[-1])

        assert inked("'")[1] < inked(",")[0]
        assert inked("H")[1] == inked("x")[1] < inked("p")[1]
        assert inked("H")[0] < inked("x")[0]
        assert images["DejaVuSerif-BoldItalic U+0048"].max() > 200

    def test_a_fraction_is_refused_as_a_whole_face_is_held_out(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="glyphs keeps a whole face for validation"):
            prepare_rows("glyphs", output=tmp_path / "g.parquet", validation_fraction=0.1)


class TestEasyVqa:
    def test_the_test_questions_are_those_of_the_package(self, questions: PreparedRows) -> None:
        assert questions.num_rows["test"] == 9_673
        assert questions.num_rows["train"] + questions.num_rows["validation"] == 38_575
        assert 0.03 < questions.num_rows["validation"] / 38_575 < 0.07

    def test_no_image_is_in_two_splits(self, questions: PreparedRows) -> None:
        images = {
            split: {image.tobytes() for image in FieldDataset(questions.path, seed=0, split=split).values["image"].values}
            for split in SPLITS
        }
        assert sum(map(len, images.values())) == len(set.union(*images.values())) == 5_000
        assert len(images["test"]) == 1_000

    def test_words_and_answers_have_labels(self, questions: PreparedRows) -> None:
        dataset = FieldDataset(questions.path, seed=0, split="test")
        words, answers = dataset.fields["question"].labels, dataset.fields["answer"].labels
        assert len(answers) == 13
        assert words[0] == ""
        rows = dataset.rows(0, 1000)
        texts = [" ".join(words[word] for word in question if word) for question in rows["question"]]
        assert "what color is the shape" in texts
        yes_or_no = {"does", "is"}
        for text, answer in zip(texts, rows["answer"], strict=True):
            assert (answers[answer] in {"yes", "no"}) is (text.split()[0] in yes_or_no)

    def test_answers_are_to_be_seen_in_the_images(self, questions: PreparedRows) -> None:
        dataset = FieldDataset(questions.path, seed=0, split="test")
        answers = dataset.fields["answer"].labels
        colors = {"red": (255, 0, 0), "yellow": (255, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}
        rows = dataset.rows(0, 2000)
        for image, answer in zip(rows["image"], rows["answer"], strict=True):
            if answers[answer] in colors:
                assert (image == colors[answers[answer]]).all(axis=-1).sum() > 5

    def test_the_same_bytes_come_again_and_a_larger_fraction_only_adds_images(self, questions: PreparedRows, tmp_path: Path) -> None:
        more = prepare_rows("easy-vqa", output=tmp_path / "more.parquet", validation_fraction=0.2)
        assert set(row_names(questions, "validation")) < set(row_names(more, "validation"))
        prepare_rows("easy-vqa", output=tmp_path / "more.parquet", validation_fraction=0.05)
        assert (tmp_path / "more.parquet").read_bytes() == Path(questions.path).read_bytes()

    def test_a_fraction_out_of_range_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="validation_fraction must be at least 0 and less than 1, not 1"):
            prepare_rows("easy-vqa", output=tmp_path / "q.parquet", validation_fraction=1.0)


@pytest.mark.parametrize(
    ("source", "missing"), [("easy-vqa", "easy_vqa"), ("easy-vqa", "PIL"), ("glyphs", "matplotlib"), ("glyphs", "PIL")]
)
def test_a_missing_package_is_named_with_what_installs_it(
    source: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"{source} needs the packages .*: pip install 'raypipe\[branches\]' \(.*{missing}"):
        prepare_rows(source, output=tmp_path / "f.parquet")
    assert not list(tmp_path.iterdir())


def test_an_unknown_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no source of named fields is called 'glyph'; did you mean 'glyphs'"):
        prepare_rows("glyph", output=tmp_path / "f.parquet")
