"""An image tower and a text tower that learn which image belongs to which text (CLIP: Radford et al. 2021, arXiv 2103.00020).

    image-embedding -- image-block-0 -- ... -- image-head --.
                                                             joint
    text-embedding --- text-block-0 --- ... -- text-head ---'

Unlike there, images and texts become vectors by a weighted mean over positions. Letters of tensor names: B rows, E embedding size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.model import Layer, Model
from raypipe.models.arguments import check_positive, float_type
from raypipe.models.streams import Pool, image_embedding, stream, text_embedding

if TYPE_CHECKING:
    from raypipe.model import Batch

_FIRST_SCALE = 1 / 0.07
_MOST_SCALE = 100.0


def clip(
    *,
    num_image_layers: int = 3,
    num_text_layers: int = 3,
    image_width: int = 64,
    text_width: int = 64,
    head_size: int = 32,
    embedding_size: int = 128,
    image_size: int = 32,
    patch_size: int = 8,
    num_channels: int = 1,
    sequence_length: int = 80,
    span: int = 4,
    vocabulary_size: int = 128,
    image_field: str = "glyph",
    text_field: str = "name",
    dtype: str = "float32",
) -> Model:
    """Return the branches `image` and `text`, the layer `joint` in which they meet, and the contrastive loss of a microbatch's rows.

    The defaults are for `raypipe data prepare glyphs`. Batch fields: images, uint8 [B, image_size, image_size] with channels last if there
    are several; texts, integers below `vocabulary_size` [B, sequence_length], of which `span` neighbors make one position. The output is
    [B, 2, embedding_size], the embeddings of image and text; products of them are logits.

    Raises:
        ConfigError: A size is less than 1, or `head_size`, `patch_size` or `span` does not divide what it cuts.
        UnknownNameError: There is no such `dtype`.
    """
    check_positive(num_image_layers=num_image_layers, num_text_layers=num_text_layers, head_size=head_size, embedding_size=embedding_size)
    floats = float_type(dtype)
    embeddings = {
        "image": image_embedding(image_size=image_size, patch_size=patch_size, num_channels=num_channels, width=image_width, dtype=floats),
        "text": text_embedding(sequence_length=sequence_length, span=span, vocabulary_size=vocabulary_size, width=text_width, dtype=floats),
    }

    def tower(branch: str, *, field: str, num_layers: int, width: int) -> tuple[Layer, ...]:
        head = partial(Pool, width=width, embedding_size=embedding_size, dtype=floats)
        body = stream(branch, embeddings[branch], field=field, num_layers=num_layers, width=width, head_size=head_size, dtype=floats)
        return (*body, Layer(f"{branch}-head", head, branch=branch))

    return Model(
        layers=(
            *tower("image", field=image_field, num_layers=num_image_layers, width=image_width),
            *tower("text", field=text_field, num_layers=num_text_layers, width=text_width),
            Layer("joint", partial(Joint, dtype=floats), inputs=("image-head", "text-head")),
        ),
        loss=contrastive,
        loss_couples_rows=True,
    )


def clip_vit_b_32() -> Model:
    """Return `clip` in the size of CLIP ViT-B/32: images of 224 pixels, 77 tokens of 49,408, 151 million parameters."""
    return clip(
        num_image_layers=12,
        num_text_layers=12,
        image_width=768,
        text_width=512,
        head_size=64,
        embedding_size=512,
        image_size=224,
        patch_size=32,
        num_channels=3,
        sequence_length=77,
        span=1,
        vocabulary_size=49_408,
        image_field="image",
        text_field="text",
    )


def contrastive(output_B2E: Tensor, _: Batch) -> Tensor:
    """Return the mean cross entropy of finding each image's text and each text's image among those of all rows, in float32 at least."""
    image_BE, text_BE = output_B2E.to(torch.promote_types(output_B2E.dtype, torch.float32)).unbind(1)
    logits_BB = image_BE @ text_BE.T
    own_B = torch.arange(len(logits_BB), device=logits_BB.device)
    return (functional.cross_entropy(logits_BB, own_B) + functional.cross_entropy(logits_BB.T, own_B)) / 2


class Joint(nn.Module):
    """Both embeddings at a learned length, whose square is the inverse of CLIP's temperature: twice [B, E] to [B, 2, E]."""

    def __init__(self, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(_FIRST_SCALE), dtype=dtype))

    def forward(self, image_BE: Tensor, text_BE: Tensor) -> Tensor:
        """Return the embeddings."""
        length = (self.log_scale.clamp(max=math.log(_MOST_SCALE)) / 2).exp()
        return length * functional.normalize(torch.stack((image_BE, text_BE), dim=1), dim=-1)
