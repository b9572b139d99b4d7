"""Parts of a vision stack, and how its vectors are put into the input of a decoder.

Shape letters as in `bitnet.model.transformer`, and C channels, S pixels of a side, N vectors of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bitnet.config import ModelConfig


class Shared(NamedTuple):
    """Images of which some occur at several places, or in several texts: each is encoded once."""

    pixels: Tensor  # (u, C, S, S)
    which: Tensor  # int (n,), the image at each place in the batch, in order


Images = Tensor | Sequence[Tensor] | Shared
"""For a batch of texts, in order: (B, n, C, S, S), or (n, C, S, S) for all, or (n, C, S, S) for each text."""


def patches_of(config: ModelConfig, pixels_BCSS: Tensor) -> Tensor:
    """Patches row by row, each a vector in the order (channel, y, x): (B, patches, C·p²). A remainder is cut off."""
    expected, size = (config.channels, config.image_size, config.image_size), config.patch_size
    found = tuple(pixels_BCSS.shape)
    if found[1:] != expected or not pixels_BCSS.is_floating_point():
        raise ValueError(
            f"images are {pixels_BCSS.dtype} of shape {found}, expected floats of shape (batch, "
            f"{', '.join(map(str, expected))}): channels, height, width"
        )
    side = config.image_size // size
    whole = pixels_BCSS[:, :, : side * size, : side * size]
    grid = whole.reshape(len(whole), config.channels, side, size, side, size)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class Similarity(nn.Module):
    """e^t · (image · text) + b for vectors of length 1, with t and b learned: arXiv 2303.15343.

    They start from the configuration's values, or ln 10 and -10; a packed file has its values in its configuration.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        said = config.similarity_scale > 0
        self.log_scale = nn.Parameter(torch.tensor([math.log(config.similarity_scale if said else 10.0)]))
        self.bias = nn.Parameter(torch.tensor([config.similarity_bias if said else -10.0]))

    def forward(self, images_BD: Tensor, texts_BD: Tensor) -> Tensor:
        """Shape (images, texts)."""
        return self.log_scale.exp() * (images_BD @ texts_BD.T) + self.bias


def one_batch(images: Images) -> tuple[Tensor, list[int] | None]:
    """All images of a batch of texts, (n, C, S, S), and how many each text has, None if unknown."""
    if isinstance(images, Shared):
        return images.pixels, None
    if isinstance(images, Tensor):
        return (images.flatten(0, 1), [images.shape[1]] * len(images)) if images.dim() == 5 else (images, None)
    return torch.cat(list(images)), [len(of_text) for of_text in images]


def looked_at(images: Images, features: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[int] | None]:
    """Their vectors in the order of their places, (n, N, D), and how many images each text has, None if unknown."""
    pixels, counts = one_batch(images)
    seen_nND = features(pixels)
    return (seen_nND[images.which] if isinstance(images, Shared) else seen_nND), counts


def put_in_place(
    x_BTD: Tensor, tokens_BT: Tensor, image_token: int, features_nND: Tensor | None, counts: list[int] | None
) -> Tensor:
    """x with the vectors of images in place of the rows of `image_token`, in order.

    counts: how many images each text has. Raises ValueError if the number of places is not that of the vectors.
    """
    here_BT = tokens_BT == image_token
    n, size = (0, 0) if features_nND is None else (len(features_nND), features_nND.shape[1])
    if counts is None:
        of_texts = [("the texts have", int(here_BT.sum()), n)]
    elif len(counts) != len(tokens_BT):
        raise ValueError(f"there are images of {len(counts)} texts, expected those of {len(tokens_BT)}")
    else:
        found = here_BT.sum(1).tolist()
        of_texts = [(f"text {i} has", *each) for i, each in enumerate(zip(found, counts, strict=True))]
    for what, places, count in of_texts:
        if places != count * size:
            raise ValueError(
                f"{what} {places} places for vectors of images (token {image_token}), "
                f"expected {count * size}: {count} images of {size} vectors each"
            )
    if features_nND is None:
        return x_BTD
    return x_BTD.masked_scatter(here_BT[..., None], features_nND.to(x_BTD).flatten(0, 1))
