"""What models with several branches are made of: images and tokens to hidden states, blocks, and hidden states to one vector.

Letters of tensor names: B rows, T positions, D width, E embedding size; C channels, H and W pixels, P numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError
from raypipe.model import Layer
from raypipe.models.arguments import check_positive
from raypipe.models.gpt import INIT_STD, Block, linear


def stream(
    branch: str, embedding: Callable[[], nn.Module], *, field: str, num_layers: int, width: int, head_size: int, dtype: torch.dtype
) -> tuple[Layer, ...]:
    """Return a branch's layers `BRANCH-embedding`, which takes a field of the batch, and `BRANCH-block-0` ... of self-attention.

    Raises:
        ConfigError: `head_size` does not divide `width`.
    """
    if width % head_size:
        raise ConfigError(f"head_size must divide the width: {width} is no multiple of {head_size}")
    block = partial(Block, d_model=width, num_heads=width // head_size, dropout=0.0, residual_std=INIT_STD, dtype=dtype, causal=False)
    return (
        Layer(f"{branch}-embedding", embedding, batch=(field,), branch=branch),
        *(Layer(f"{branch}-block-{index}", block, branch=branch) for index in range(num_layers)),
    )


def image_embedding(*, image_size: int, patch_size: int, num_channels: int, width: int, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Return what builds `Patches`.

    Raises:
        ConfigError: A size is less than 1, or `patch_size` does not divide `image_size`.
    """
    check_positive(image_size=image_size, patch_size=patch_size, num_channels=num_channels, width=width)
    if image_size % patch_size:
        raise ConfigError(f"patch_size must divide image_size: {image_size} is no multiple of {patch_size}")
    return partial(Patches, image_size=image_size, patch_size=patch_size, num_channels=num_channels, width=width, dtype=dtype)


def text_embedding(*, sequence_length: int, span: int, vocabulary_size: int, width: int, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Return what builds `Tokens`.

    Raises:
        ConfigError: A size is less than 1, or `span` does not divide `sequence_length` and `width`.
    """
    check_positive(sequence_length=sequence_length, span=span, vocabulary_size=vocabulary_size, width=width)
    if sequence_length % span or width % span:
        raise ConfigError(f"span must divide sequence_length and width: {sequence_length} or {width} is no multiple of {span}")
    return partial(Tokens, sequence_length=sequence_length, span=span, vocabulary_size=vocabulary_size, width=width, dtype=dtype)


class Patches(nn.Module):
    """Square patches of an image, each with its position: uint8 [B, H, W] or [B, H, W, C] to [B, T, D]."""

    def __init__(self, *, image_size: int, patch_size: int, num_channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.image_size = image_size
        self.patch_size = patch_size
        self.num_channels = num_channels
        num_inputs = num_channels * patch_size**2
        self.patch = linear(num_inputs, width, std=num_inputs**-0.5, dtype=dtype)
        self.position = nn.Parameter(INIT_STD * torch.randn((image_size // patch_size) ** 2, width, dtype=dtype))

    def forward(self, image: Tensor) -> Tensor:
        """Return the hidden states; raise `ConfigError` for images of another size."""
        size, patch, channels = self.image_size, self.patch_size, self.num_channels
        if image.shape[1:3] != (size, size) or image[0].numel() != size * size * channels:
            raise ConfigError(
                f"the data's images are {list(image.shape[1:])}, the model's have image_size {size} and num_channels {channels}; set the "
                "model's to the data's"
            )
        # Rows of patches, pixel rows of each, patches in a row, and what a patch has of a pixel row.
        cut = image.reshape(-1, size // patch, patch, size // patch, patch * channels)
        x_BTP = cut.transpose(2, 3).flatten(3).flatten(1, 2)
        x_BTD: Tensor = self.patch(x_BTP.to(self.position.dtype) / 255) + self.position
        return x_BTD


class Tokens(nn.Module):
    """Tokens, `span` neighbors in one hidden state, each with its position: integers [B, T * span] to [B, T, D]."""

    def __init__(self, *, sequence_length: int, span: int, vocabulary_size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.span = span
        self.token = nn.Embedding(vocabulary_size, width // span, dtype=dtype)
        self.join = linear(width, width, std=width**-0.5, dtype=dtype)
        self.position = nn.Parameter(INIT_STD * torch.randn(sequence_length // span, width, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states; raise `ConfigError` for sequences of another length."""
        if tokens.shape[1] != self.sequence_length:
            raise ConfigError(
                f"the data's sequences have {tokens.shape[1]} tokens, the model's sequence_length is {self.sequence_length}; set it to that"
            )
        neighbors = self.token(tokens.long()).unflatten(1, (-1, self.span)).flatten(2)
        x_BTD: Tensor = self.join(neighbors) + self.position
        return x_BTD


class Pool(nn.Module):
    """A LayerNorm, a mean over positions with weights that the positions decide, and a Linear: [B, T, D] to [B, E]."""

    def __init__(self, *, width: int, embedding_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.weight = nn.Linear(width, 1, bias=False, dtype=dtype)
        self.out = linear(width, embedding_size, std=width**-0.5, dtype=dtype)
        nn.init.normal_(self.weight.weight, std=INIT_STD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return one vector for each row."""
        x_BTD = self.norm(x_BTD)
        weights_BT1 = self.weight(x_BTD).softmax(dim=1)
        x_BE: Tensor = self.out((weights_BT1 * x_BTD).sum(dim=1))
        return x_BE
