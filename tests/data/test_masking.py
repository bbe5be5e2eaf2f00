"""Masked rows: how many tokens, which, what stands in their place, and that nothing but seed and sample number decides it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raypipe.actors.execution.batches import FileSource, MaskedTokenSource
from raypipe.data.masking import NO_TARGET, mask_rows, num_masked
from raypipe.data.tokens import FORMAT, SCHEMA

VOCABULARY_SIZE = 256


def rows(count: int, num_tokens: int = 128) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, VOCABULARY_SIZE, (count, num_tokens))


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (8, 1), (20, 3), (128, 19)])
def test_every_row_has_the_same_share_of_targets(num_tokens: int, expected: int) -> None:
    _, targets_BT = mask_rows(rows(5, num_tokens), first=0, seed=0, vocabulary_size=VOCABULARY_SIZE)
    assert num_masked(num_tokens) == expected
    assert ((targets_BT != NO_TARGET).sum(axis=1) == expected).all()


def test_targets_are_the_tokens_and_all_else_stays() -> None:
    tokens_BT = rows(50)
    inputs_BT, targets_BT = mask_rows(tokens_BT, first=0, seed=0, vocabulary_size=VOCABULARY_SIZE)
    told_BT = targets_BT != NO_TARGET
    assert (targets_BT[told_BT] == tokens_BT[told_BT]).all()
    assert (inputs_BT[~told_BT] == tokens_BT[~told_BT]).all()


def test_of_ten_targets_eight_are_masked_and_one_is_random() -> None:
    tokens_BT = rows(1000)
    inputs_BT, targets_BT = mask_rows(tokens_BT, first=0, seed=0, vocabulary_size=VOCABULARY_SIZE)
    told_BT = targets_BT != NO_TARGET
    masked = inputs_BT[told_BT] == VOCABULARY_SIZE
    kept = inputs_BT[told_BT] == targets_BT[told_BT]
    assert masked.mean() == pytest.approx(0.8, abs=0.01)
    assert kept.mean() == pytest.approx(0.1, abs=0.01)
    others = inputs_BT[told_BT][~masked & ~kept]
    assert np.histogram(others, bins=8, range=(0, 256))[0].min() > len(others) / 16
    # Each position is as likely as any other.
    assert told_BT.sum(axis=0).min() > 90


def test_a_row_is_masked_by_seed_and_sample_alone() -> None:
    tokens_BT = rows(10)

    def masked(first: int, end: int, seed: int = 3) -> npt.NDArray[np.int64]:
        return mask_rows(tokens_BT[first:end], first=40 + first, seed=seed, vocabulary_size=VOCABULARY_SIZE)[0]

    assert (masked(0, 10)[4:7] == masked(4, 7)).all()
    assert (masked(0, 10) != masked(0, 10, seed=4)).any(axis=1).all()
    same_BT = np.zeros_like(tokens_BT)
    _, targets_BT = mask_rows(same_BT, first=0, seed=0, vocabulary_size=VOCABULARY_SIZE)
    assert len({tuple(row) for row in targets_BT}) == len(same_BT)


def test_masked_batches_have_the_rows_of_plain_ones_and_parts_of_them_the_same_masks(tmp_path: Path) -> None:
    path, tokens = tmp_path / "tokens.parquet", bytes(range(256)) * 8
    header = {"format": FORMAT, "vocabulary_size": "256", "num_train_tokens": str(len(tokens)), "num_validation_tokens": "0"}
    table = pa.table({"document": ["a"], "split": ["train"], "tokens": pa.array([tokens], pa.binary())}, schema=SCHEMA)
    pq.write_table(table.replace_schema_metadata(header), path)
    options = {"sequence_length": 16, "seed": 1, "microbatch_size": 4}
    plain, masked = (source(str(path), **options)("train") for source in (FileSource, MaskedTokenSource))
    batch, told = masked.batch(7, (0.0, 1.0)), masked.batch(7, (0.0, 1.0))["targets"] != NO_TARGET
    assert torch.equal(batch["targets"][told], plain.batch(7, (0.0, 1.0))["tokens"][told])
    for field, whole in batch.items():
        assert torch.equal(masked.batch(7, (0.5, 1.0))[field], whole[2:])
