"""A residual network for small images, cut at its blocks (He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2).

Group normalization takes the place of batch normalization (Wu and He 2018, arXiv 1803.08494): it does not depend on how many rows of a
microbatch a device sees. Letters of tensor names: B rows, C channels, H and W pixels, K classes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.errors import ConfigError
from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive, float_type

if TYPE_CHECKING:
    from raypipe.model import Batch

_GROUP = 8  # channels that are normalized together
_NUM_SHADES = 255.0


def cnn(
    *, num_classes: int, blocks_per_size: int = 2, width: int = 32, num_sizes: int = 3, num_channels: int = 3, dtype: str = "float32"
) -> Model:
    """Return layers `stem`, `block-0` ... and `head`, and the mean cross entropy of classes.

    Batch fields: `pixels`, uint8 [B, H, W, C], or [B, H, W] for one channel; `label`, integers [B]. There are `num_sizes` times
    `blocks_per_size` blocks; each size has half the height and width and twice the channels of the one before, from `width`.

    Raises:
        ConfigError: A size is out of range, or `width` is no multiple of 8.
        UnknownNameError: There is no such `dtype`.
    """
    check_positive(num_classes=num_classes, blocks_per_size=blocks_per_size, width=width, num_sizes=num_sizes, num_channels=num_channels)
    if width % _GROUP:
        raise ConfigError(f"width must be a multiple of {_GROUP}, the channels of a group, not {width}")
    kind = float_type(dtype)
    stem = Layer("stem", partial(Stem, num_channels=num_channels, width=width, dtype=kind), inputs=(), batch=("pixels",))
    blocks: list[Layer] = []
    before = width
    for size in range(num_sizes):
        for number in range(blocks_per_size):
            now = width * 2**size
            build = partial(Block, before, now, stride=2 if size and not number else 1, dtype=kind)
            blocks.append(Layer(f"block-{len(blocks)}", build))
            before = now
    head = Layer("head", partial(Head, before, num_classes=num_classes, dtype=kind))
    return Model(layers=(stem, *blocks, head), loss=cross_entropy)


def cross_entropy(logits_BK: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross entropy against `label` [B], in nats per image."""
    return functional.cross_entropy(logits_BK, batch["label"].long())


class Stem(nn.Module):
    """Shades in [-1, 1] and a first convolution: uint8 [B, H, W, C] or [B, H, W] to [B, C', H, W]."""

    def __init__(self, *, num_channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_channels, width, 3, padding=1, bias=False, dtype=dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the first channels."""
        pixels_BHWC = pixels[..., None] if pixels.dim() == 3 else pixels
        if pixels_BHWC.shape[-1] != self.convolution.in_channels:
            raise ConfigError(f"the images have {pixels_BHWC.shape[-1]} channels, the model num_channels={self.convolution.in_channels}")
        x_BCHW: Tensor = pixels_BHWC.movedim(-1, 1).to(self.convolution.weight.dtype) * (2 / _NUM_SHADES) - 1
        x_BCHW = self.convolution(x_BCHW)
        return x_BCHW


class Block(nn.Module):
    """Two convolutions, each after a group normalization, added to its input."""

    def __init__(self, before: int, now: int, *, stride: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(before // _GROUP, before, dtype=dtype)
        self.first = nn.Conv2d(before, now, 3, stride=stride, padding=1, bias=False, dtype=dtype)
        self.second_norm = nn.GroupNorm(now // _GROUP, now, dtype=dtype)
        self.second = nn.Conv2d(now, now, 3, padding=1, bias=False, dtype=dtype)
        is_same = before == now and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(before, now, 1, stride=stride, bias=False, dtype=dtype)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the next channels."""
        y_BCHW = self.first(functional.relu(self.first_norm(x_BCHW)))
        y_BCHW = self.second(functional.relu(self.second_norm(y_BCHW)))
        x_BCHW = self.shortcut(x_BCHW)
        output_BCHW: Tensor = x_BCHW + y_BCHW
        return output_BCHW


class Head(nn.Module):
    """The mean over all pixels and the logits of classes: [B, C, H, W] to [B, K]."""

    def __init__(self, width: int, *, num_classes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(width // _GROUP, width, dtype=dtype)
        self.logits = nn.Linear(width, num_classes, dtype=dtype)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits."""
        logits_BK: Tensor = self.logits(functional.relu(self.norm(x_BCHW)).mean(dim=(-2, -1)))
        return logits_BK
