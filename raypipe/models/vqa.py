"""Answers to questions about images by co-attention (ViLBERT: Lu et al. 2019, arXiv 1908.02265; LXMERT: Tan and Bansal 2019, 1908.07490).

Each stream has blocks of its own, then blocks that also read what the other stream had before them:

    image-embedding ---- image-block-0 ---- ... - image-co-0 ---- image-co-1 --- ... -.
                                                             x              x          answer
    question-embedding - question-block-0 - ... - question-co-0 - question-co-1 ... --'

Letters of tensor names: B rows, T positions, S positions of the other stream, D width, N heads, H width / heads, A answers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive, float_type
from raypipe.models.gpt import INIT_STD, Block, linear
from raypipe.models.streams import Pool, image_embedding, stream, text_embedding

if TYPE_CHECKING:
    from raypipe.model import Batch


def vqa(
    *,
    num_image_layers: int = 1,
    num_question_layers: int = 1,
    num_co_layers: int = 2,
    width: int = 64,
    head_size: int = 32,
    image_size: int = 64,
    patch_size: int = 8,
    num_channels: int = 3,
    sequence_length: int = 9,
    vocabulary_size: int = 27,
    num_answers: int = 13,
    dtype: str = "float32",
) -> Model:
    """Return the branches `image` and `question`, the layer `answer` in which they meet, and the mean cross entropy of the answers.

    The defaults are for `raypipe data prepare easy-vqa`. Batch fields: `image`, uint8 [B, image_size, image_size] with channels last if
    there are several; `question`, integers below `vocabulary_size` [B, sequence_length]; `answer`, int64 [B]. The output is logits
    [B, num_answers].

    Raises:
        ConfigError: A size is less than 1, or `head_size` or `patch_size` does not divide what it cuts.
        UnknownNameError: There is no such `dtype`.
    """
    check_positive(num_image_layers=num_image_layers, num_question_layers=num_question_layers, num_co_layers=num_co_layers)
    check_positive(head_size=head_size, num_answers=num_answers)
    floats = float_type(dtype)
    image = image_embedding(image_size=image_size, patch_size=patch_size, num_channels=num_channels, width=width, dtype=floats)
    question = text_embedding(sequence_length=sequence_length, span=1, vocabulary_size=vocabulary_size, width=width, dtype=floats)
    own = partial(stream, width=width, head_size=head_size, dtype=floats)
    co_block = partial(CoBlock, width=width, num_heads=width // head_size, dtype=floats)
    layers = [
        *own("image", image, field="image", num_layers=num_image_layers),
        *own("question", question, field="question", num_layers=num_question_layers),
    ]
    images, questions = f"image-block-{num_image_layers - 1}", f"question-block-{num_question_layers - 1}"
    for index in range(num_co_layers):
        layers += [
            Layer(f"image-co-{index}", co_block, inputs=(images, questions), branch="image"),
            Layer(f"question-co-{index}", co_block, inputs=(questions, images), branch="question"),
        ]
        images, questions = f"image-co-{index}", f"question-co-{index}"
    answer = partial(Answer, width=width, num_answers=num_answers, dtype=floats)
    return Model(layers=(*layers, Layer("answer", answer, inputs=(images, questions))), loss=answer_loss)


def vqa_lxmert() -> Model:
    """Return `vqa` in the size of LXMERT: 9 question, 5 image and 5 co-attention layers of width 768, VQA's 3,129 answers."""
    return vqa(
        num_image_layers=5,
        num_question_layers=9,
        num_co_layers=5,
        width=768,
        head_size=64,
        image_size=224,
        patch_size=32,
        num_channels=3,
        sequence_length=20,
        vocabulary_size=30_522,
        num_answers=3_129,
    )


def answer_loss(logits_BA: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross entropy against `answer` [B], in float32 at least."""
    return functional.cross_entropy(logits_BA.to(torch.promote_types(logits_BA.dtype, torch.float32)), batch["answer"])


class CoBlock(nn.Module):
    """Attention to the other stream, added to the input, and a block of self-attention: [B, T, D] and [B, S, D] to [B, T, D]."""

    def __init__(self, *, width: int, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.other_norm = nn.LayerNorm(width, dtype=dtype)
        self.query = linear(width, width, std=INIT_STD, dtype=dtype)
        self.key_and_value = linear(width, 2 * width, std=INIT_STD, dtype=dtype)
        self.out = linear(width, width, std=INIT_STD, dtype=dtype)
        self.block = Block(d_model=width, num_heads=num_heads, dropout=0.0, residual_std=INIT_STD, dtype=dtype, causal=False)

    def forward(self, x_BTD: Tensor, other_BSD: Tensor) -> Tensor:
        """Return the next hidden states."""
        read = (self.query(self.norm(x_BTD)), *self.key_and_value(self.other_norm(other_BSD)).chunk(2, dim=-1))
        q_BNTH, k_BNSH, v_BNSH = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in read)
        y_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH)
        x_BTD = x_BTD + self.out(y_BNTH.transpose(1, 2).flatten(-2))
        x_BTD = self.block(x_BTD)
        return x_BTD


class Answer(nn.Module):
    """The product of a vector of each stream, and the logits: [B, T, D] and [B, S, D] to [B, A]."""

    def __init__(self, *, width: int, num_answers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.image = Pool(width=width, embedding_size=width, dtype=dtype)
        self.question = Pool(width=width, embedding_size=width, dtype=dtype)
        self.logits = linear(width, num_answers, std=INIT_STD, dtype=dtype)

    def forward(self, image_BTD: Tensor, question_BSD: Tensor) -> Tensor:
        """Return the logits."""
        logits_BA: Tensor = self.logits(self.image(image_BTD) * self.question(question_BSD))
        return logits_BA
