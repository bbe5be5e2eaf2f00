"""A GPT whose input also looks up tables of hashed 2-grams and 3-grams.

    tokens --.-- token + position embedding --.
             |-- hash of 2 tokens -- table ---+-- block-0 -- ... -- head
             '-- hash of 3 tokens -- table ---'

As in the Over-Tokenized Transformer (Huang et al. 2025, arXiv 2501.16975); Engram (Cheng et al. 2026, arXiv 2601.07372) reads such tables
in later layers. The tables are most of the weights, and an update reads few of their rows. Letters of tensor names as in `gpt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.errors import ConfigError
from raypipe.model import Model
from raypipe.models.arguments import check_positive, float_type
from raypipe.models.gpt import INIT_STD, Embedding, gpt


def ngram_gpt(
    *,
    num_layers: int = 4,
    d_model: int = 128,
    num_heads: int = 4,
    sequence_length: int = 128,
    vocabulary_size: int = 256,
    orders: Sequence[int] = (2, 3),
    table_rows: int = 20_011,
    dropout: float = 0.0,
    dtype: str = "float32",
) -> Model:
    """Return `gpt`, whose layer `embedding` adds a row of one table for each of `orders`; 6 million parameters by default.

    Batch fields, outputs and other arguments as `gpt`. A position's n-gram is its token and the n - 1 before it, a number in base
    `vocabulary_size`; its row is the rest of a division by `table_rows`. A prime uses the rows most evenly.

    Raises:
        ConfigError: A size is out of range, `num_heads` does not divide `d_model`, or an order is less than 2 or stands twice.
        UnknownNameError: There is no such `dtype`.
    """
    check_positive(table_rows=table_rows)
    orders = tuple(orders)
    if not orders or min(orders) < 2 or len(set(orders)) < len(orders):
        raise ConfigError(f"orders must be different numbers from 2 on, not {list(orders)}")
    model = gpt(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        dropout=dropout,
        dtype=dtype,
    )
    rows = {order: partial(ngram_rows, order=order, vocabulary_size=vocabulary_size, table_rows=table_rows) for order in orders}
    build = partial(
        NgramEmbedding,
        orders=orders,
        table_rows=table_rows,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        d_model=d_model,
        dropout=dropout,
        dtype=float_type(dtype),
    )
    embedding = replace(model.layers[0], build=build, looked_up={f"tables.{order}.weight": of_order for order, of_order in rows.items()})
    return replace(model, layers=(embedding, *model.layers[1:]))


def ngram_rows(tokens_BT: Tensor, *, order: int, vocabulary_size: int, table_rows: int) -> Tensor:
    """Return the row that each position's n-gram has in its table: int64 [B, T]; before the first token stand zeros."""
    row_BT = torch.zeros_like(tokens_BT)
    for before in reversed(range(order)):
        # Reduced at every token, so that no order overflows.
        row_BT = (row_BT * vocabulary_size + functional.pad(tokens_BT, (before, 0))[:, : tokens_BT.shape[1]]) % table_rows
    return row_BT


class NgramEmbedding(nn.Module):
    """Token, position and n-gram embeddings, added: int64 [B, T] to [B, T, D]."""

    def __init__(
        self,
        *,
        orders: Sequence[int],
        table_rows: int,
        vocabulary_size: int,
        sequence_length: int,
        d_model: int,
        dropout: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.table_rows = table_rows
        self.single = Embedding(vocabulary_size=vocabulary_size, sequence_length=sequence_length, d_model=d_model, dropout=0.0, dtype=dtype)
        self.tables = nn.ModuleDict({str(order): nn.Embedding(table_rows, d_model, dtype=dtype) for order in orders})
        self.dropout = nn.Dropout(dropout)
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=INIT_STD)  # type: ignore[arg-type]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the hidden states."""
        x_BTD: Tensor = self.single(tokens_BT)
        for order, table in self.tables.items():
            rows_BT = ngram_rows(tokens_BT, order=int(order), vocabulary_size=self.vocabulary_size, table_rows=self.table_rows)
            x_BTD = x_BTD + table(rows_BT)
        dropped_BTD: Tensor = self.dropout(x_BTD)
        return dropped_BTD
