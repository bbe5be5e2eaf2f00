"""A BERT-like masked language model, cut at its blocks (Devlin et al. 2019, arXiv 1810.04805).

Unlike there, LayerNorms come first, as in Megatron's BERT; no segments, no next-sentence loss; the head has its own weights. Letters of
tensor names: B rows, T positions, D d_model, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive, float_type
from raypipe.models.gpt import INIT_STD, Head, cross_entropy, embedding_and_blocks, linear


def bert(
    *,
    num_layers: int = 4,
    d_model: int = 256,
    num_heads: int = 4,
    sequence_length: int = 128,
    vocabulary_size: int = 256,
    dropout: float = 0.0,
    dtype: str = "float32",
) -> Model:
    """Return layers `embedding`, `block-0` ... and `head`, and the mean cross entropy of the masked tokens.

    Batch fields (`MaskedTokenSource`): `tokens` and `targets`, int64 [B, T], T at most `sequence_length`; the mask is the token
    `vocabulary_size`. Layers pass on [B, T, d_model]; the last returns logits [B, T, vocabulary_size]. Arguments and errors as `gpt`.
    """
    check_positive(vocabulary_size=vocabulary_size)
    body = embedding_and_blocks(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size + 1,  # one more is the mask
        dropout=dropout,
        dtype=float_type(dtype),
        causal=False,
    )
    head = partial(MaskedHead, d_model=d_model, vocabulary_size=vocabulary_size, dtype=float_type(dtype))
    return Model(layers=(*body, Layer("head", head)), loss=cross_entropy, is_masked=True)


class MaskedHead(nn.Module):
    """A last LayerNorm, a dense GELU layer, and GPT's head (LayerNorm and logits): [B, T, D] to [B, T, V]."""

    def __init__(self, *, d_model: int, vocabulary_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model, dtype=dtype)
        self.transform = linear(d_model, d_model, std=INIT_STD, dtype=dtype)
        self.head = Head(d_model=d_model, vocabulary_size=vocabulary_size, dtype=dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the logits."""
        x_BTD = functional.gelu(self.transform(self.norm(x_BTD)), approximate="tanh")
        logits_BTV: Tensor = self.head(x_BTD)
        return logits_BTV
