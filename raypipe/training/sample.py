"""Generates text with a byte-level model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NUM_BYTES = 256
"""Size of the vocabulary."""

SENTINEL = 0
"""Byte that ends a document; pads short contexts."""


def generate(
    logits_of: Callable[[Tensor], Tensor],
    *,
    prompt: bytes,
    num_bytes: int,
    sequence_length: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> bytes:
    """Return the prompt, followed by bytes drawn from the model.

    Args:
        logits_of: From tokens int64 [1, sequence_length] to logits [1, sequence_length, 256].
        prompt: Bytes to begin with; a document's end if empty.
        num_bytes: Number of bytes to draw.
        sequence_length: Context of the model.
        temperature: Divisor of the logits.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt or bytes([SENTINEL]))
    for _ in range(num_bytes):
        context = tokens[-sequence_length:]
        # The model is causal: padding after the context changes nothing.
        padded = context + [SENTINEL] * (sequence_length - len(context))
        logits_v = logits_of(torch.tensor([padded]))[0, len(context) - 1]
        probabilities = torch.softmax(logits_v.double() / temperature, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens if prompt else tokens[1:])
