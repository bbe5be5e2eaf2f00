"""Text from a model of bytes, generated through the pipeline itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NUM_BYTES = 256
"""The size of the vocabulary."""

SENTINEL = 0
"""The byte that ends a document, with which a context is filled up."""


def generate(
    logits_of: Callable[[Tensor], Tensor],
    *,
    prompt: bytes,
    num_bytes: int,
    sequence_length: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> bytes:
    """The prompt and what the model makes of it.

    Args:
        logits_of: from tokens int64 [1, sequence_length] to logits [1, sequence_length, 256].
        prompt: what to begin with; an end of document where it is empty.
        num_bytes: how many to add.
        sequence_length: the model's context.
        temperature: logits are divided by it.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt or bytes([SENTINEL]))
    for _ in range(num_bytes):
        context = tokens[-sequence_length:]
        # The model is causal: what stands behind the context does not matter.
        padded = context + [SENTINEL] * (sequence_length - len(context))
        logits_v = logits_of(torch.tensor([padded]))[0, len(context) - 1]
        probabilities = torch.softmax(logits_v.double() / temperature, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens if prompt else tokens[1:])
