"""A Llama-like language model as a model of one's own (Touvron et al. 2023, arXiv 2302.13971), with grouped queries (arXiv 2305.13245).

Letters of tensor names: B rows, T positions, D d_model, N heads, G groups of heads with keys and values of their own, H d_model / heads,
V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe import Layer, Model
from raypipe.models.gpt import cross_entropy


def llama(
    *,
    vocabulary_size: int,
    num_layers: int = 8,
    d_model: int = 256,
    num_heads: int = 8,
    num_groups: int = 4,
    d_hidden: int = 688,
    rope_base: float = 10_000.0,
    tie_embeddings: bool = True,
) -> Model:
    """Return layers `embedding`, `block-0` ... and `head`, for `tokens` and `targets`, int64 [B, T].

    By default 8 M parameters for a vocabulary of 4,096; with 49,152, 30, 576, 9, 3 and 1,536 those of SmolLM-135M.
    """
    block = partial(Block, d_model=d_model, num_heads=num_heads, num_groups=num_groups, d_hidden=d_hidden, rope_base=rope_base)
    return Model(
        layers=(
            Layer("embedding", partial(Embedding, vocabulary_size, d_model), inputs=(), batch=("tokens",)),
            *(Layer(f"block-{index}", block) for index in range(num_layers)),
            Layer("head", partial(Head, vocabulary_size, d_model)),
        ),
        loss=cross_entropy,
        ties=((("embedding", "token.weight"), ("head", "logits.weight")),) if tie_embeddings else (),
    )


class Embedding(nn.Module):
    """Tokens, int64 [B, T], to [B, T, D]."""

    def __init__(self, vocabulary_size: int, d_model: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, d_model)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the hidden states."""
        x_BTD: Tensor = self.token(tokens_BT)
        return x_BTD


class Block(nn.Module):
    """Attention with rotary positions and a gated network, each after an RMSNorm and added to its input: [B, T, D] to [B, T, D]."""

    def __init__(self, *, d_model: int, num_heads: int, num_groups: int, d_hidden: int, rope_base: float) -> None:
        super().__init__()
        self.num_heads, self.num_groups, self.rope_base = num_heads, num_groups, rope_base
        size = d_model // num_heads
        self.attention_norm = nn.RMSNorm(d_model, eps=1e-5)
        self.queries = nn.Linear(d_model, num_heads * size, bias=False)
        self.keys = nn.Linear(d_model, num_groups * size, bias=False)
        self.values = nn.Linear(d_model, num_groups * size, bias=False)
        self.attention_out = nn.Linear(num_heads * size, d_model, bias=False)
        self.mlp_norm = nn.RMSNorm(d_model, eps=1e-5)
        self.gate = nn.Linear(d_model, d_hidden, bias=False)
        self.up = nn.Linear(d_model, d_hidden, bias=False)
        self.down = nn.Linear(d_hidden, d_model, bias=False)
        for part in (self.queries, self.keys, self.values, self.attention_out, self.gate, self.up, self.down):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the next hidden states."""
        x_BTD = x_BTD + self._attention(self.attention_norm(x_BTD))
        y_BTD = self.mlp_norm(x_BTD)
        y_BTD = self.down(functional.silu(self.gate(y_BTD)) * self.up(y_BTD))
        output_BTD: Tensor = x_BTD + y_BTD
        return output_BTD

    def _attention(self, x_BTD: Tensor) -> Tensor:
        q_BNTH = self._rotated(self.queries(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        k_BGTH = self._rotated(self.keys(x_BTD).unflatten(-1, (self.num_groups, -1)).transpose(1, 2))
        v_BGTH = self.values(x_BTD).unflatten(-1, (self.num_groups, -1)).transpose(1, 2)
        y_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BGTH, v_BGTH, is_causal=True, enable_gqa=True)
        y_BTD: Tensor = self.attention_out(y_BNTH.transpose(1, 2).flatten(-2))
        return y_BTD

    def _rotated(self, x: Tensor) -> Tensor:
        # Pairs of numbers turn with the position, the later ones more slowly (Su et al. 2021, arXiv 2104.09864).
        length, half = x.shape[-2], x.shape[-1] // 2
        rates = self.rope_base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * rates
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class Head(nn.Module):
    """A last RMSNorm and the logits: [B, T, D] to [B, T, V]."""

    def __init__(self, vocabulary_size: int, d_model: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.logits = nn.Linear(d_model, vocabulary_size, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the logits."""
        logits_BTV: Tensor = self.logits(self.norm(x_BTD))
        return logits_BTV
