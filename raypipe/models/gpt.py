"""A GPT-2-like language model, cut at its blocks (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Letters of tensor names: B rows, T positions, D d_model, N heads, H d_model / heads, V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.data.masking import NO_TARGET
from raypipe.errors import ConfigError
from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive, float_type

if TYPE_CHECKING:
    from raypipe.model import Batch

INIT_STD = 0.02


def gpt(
    *,
    num_layers: int = 4,
    d_model: int = 256,
    num_heads: int = 4,
    sequence_length: int = 128,
    vocabulary_size: int = 256,
    dropout: float = 0.0,
    dtype: str = "float32",
    tie_embeddings: bool = False,
) -> Model:
    """Return layers `embedding`, `block-0` ... and `head`, and the mean cross entropy; 3.3 million parameters by default.

    Batch fields: `tokens` and `targets`, int64 [B, T], T at most `sequence_length`. Layers pass on [B, T, d_model]; the last returns
    logits [B, T, vocabulary_size]. Dropout acts after the embedding, in the attention and before each residual sum. `tie_embeddings`: the
    head's logits share the token embedding's weights (Press and Wolf 2017, arXiv 1608.05859).

    Raises:
        ConfigError: A size is out of range, or `num_heads` does not divide `d_model`.
        UnknownNameError: There is no such `dtype`.
    """
    body = embedding_and_blocks(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        dropout=dropout,
        dtype=float_type(dtype),
    )
    head = partial(Head, d_model=d_model, vocabulary_size=vocabulary_size, dtype=float_type(dtype))
    return Model(
        layers=(*body, Layer("head", head)),
        loss=cross_entropy,
        ties=((("embedding", "token.weight"), ("head", "logits.weight")),) if tie_embeddings else (),
    )


def embedding_and_blocks(
    *,
    num_layers: int,
    d_model: int,
    num_heads: int,
    sequence_length: int,
    vocabulary_size: int,
    dropout: float,
    dtype: torch.dtype,
    causal: bool = True,
) -> tuple[Layer, ...]:
    """Return the layers before a head; arguments and errors as `gpt`. Without `causal`, a position sees later ones."""
    check_positive(
        num_layers=num_layers, d_model=d_model, num_heads=num_heads, sequence_length=sequence_length, vocabulary_size=vocabulary_size
    )
    if d_model % num_heads:
        raise ConfigError(f"num_heads must divide d_model: {d_model} is no multiple of {num_heads}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be at least 0 and less than 1, not {dropout}")
    embedding = partial(
        Embedding, vocabulary_size=vocabulary_size, sequence_length=sequence_length, d_model=d_model, dropout=dropout, dtype=dtype
    )
    block = partial(
        Block,
        d_model=d_model,
        num_heads=num_heads,
        dropout=dropout,
        # Each block adds to the hidden state twice; so scaled, the variance of the sum does not grow with the depth (Radford et al.).
        residual_std=INIT_STD / math.sqrt(2 * num_layers),
        dtype=dtype,
        causal=causal,
    )
    return (
        Layer("embedding", embedding, inputs=(), batch=("tokens",)),
        *(Layer(f"block-{index}", block) for index in range(num_layers)),
    )


def cross_entropy(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross entropy against `targets` [B, T], less `NO_TARGET`, in nats per token, in float32 at least."""
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return functional.cross_entropy(logits_BTV.flatten(0, -2), batch["targets"].flatten(), ignore_index=NO_TARGET)


class Embedding(nn.Module):
    """Token plus position embedding: int64 [B, T] to [B, T, D]; raises `ConfigError` if T exceeds `sequence_length`."""

    def __init__(self, *, vocabulary_size: int, sequence_length: int, d_model: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, d_model, dtype=dtype)
        self.position = nn.Embedding(sequence_length, d_model, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=INIT_STD)
        nn.init.normal_(self.position.weight, std=INIT_STD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the hidden states."""
        length = tokens_BT.shape[1]
        if length > self.position.num_embeddings:
            raise ConfigError(
                f"the data's sequences have {length} tokens, but the model's sequence_length is {self.position.num_embeddings}; "
                "set the model's to the data's"
            )
        x_BTD: Tensor = self.dropout(self.token(tokens_BT) + self.position.weight[:length])
        return x_BTD


class Block(nn.Module):
    """Self-attention and a GELU network, each after a LayerNorm and added to its input: [B, T, D] to [B, T, D]."""

    def __init__(
        self, *, d_model: int, num_heads: int, dropout: float, residual_std: float, dtype: torch.dtype, causal: bool = True
    ) -> None:
        super().__init__()
        self.causal = causal
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(d_model, dtype=dtype)
        self.attention_in = linear(d_model, 3 * d_model, std=INIT_STD, dtype=dtype)
        self.attention_out = linear(d_model, d_model, std=residual_std, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(d_model, dtype=dtype)
        self.mlp_in = linear(d_model, 4 * d_model, std=INIT_STD, dtype=dtype)
        self.mlp_out = linear(4 * d_model, d_model, std=residual_std, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the next hidden states."""
        x_BTD = x_BTD + self.dropout(self._attention(self.attention_norm(x_BTD)))
        y_BTD: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_BTD)), approximate="tanh"))
        x_BTD = x_BTD + self.dropout(y_BTD)
        return x_BTD

    def _attention(self, x_BTD: Tensor) -> Tensor:
        q_BNTH, k_BNTH, v_BNTH = (
            part_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part_BTD in self.attention_in(x_BTD).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        y_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, dropout_p=dropout, is_causal=self.causal)
        y_BTD: Tensor = self.attention_out(y_BNTH.transpose(1, 2).flatten(-2))
        return y_BTD


class Head(nn.Module):
    """A last LayerNorm and the logits: [B, T, D] to [B, T, V]."""

    def __init__(self, *, d_model: int, vocabulary_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model, dtype=dtype)
        self.logits = nn.Linear(d_model, vocabulary_size, bias=False, dtype=dtype)
        nn.init.normal_(self.logits.weight, std=INIT_STD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the logits."""
        logits_BTV: Tensor = self.logits(self.norm(x_BTD))
        return logits_BTV


def linear(in_features: int, out_features: int, *, std: float, dtype: torch.dtype) -> nn.Linear:
    """Return a linear layer with normally distributed weights and zero bias."""
    linear = nn.Linear(in_features, out_features, dtype=dtype)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear
