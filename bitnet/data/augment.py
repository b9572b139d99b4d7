"""Images, augmented a little each time they are seen. The seed decides how, so a resumed run sees the same.

A crop keeps at least 80 % of the area, with an aspect ratio up to 4:3, and is resized to the full size. More would
make the text wrong, which says what is in an image and where.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST, RATIO = 0.8, 4 / 3
TRIES = 10


def changed(pixels: Tensor, how: str, seed: int) -> Tensor:
    """Images (n, C, S, S) with values 0 to 1, each augmented. how: "none", "crop" or "crop-flip"."""
    if how == "none" or not len(pixels):
        return pixels
    random = torch.Generator().manual_seed(seed)
    cropped = torch.cat([_crop(picture, random) for picture in pixels])
    if how == "crop":
        return cropped
    flips = torch.rand(len(pixels), generator=random) < 0.5
    return torch.where(flips[:, None, None, None], cropped.flip(-1), cropped)


def _crop(picture: Tensor, random: torch.Generator) -> Tensor:
    size = picture.shape[-1]
    height, width = size, size
    for _ in range(TRIES):
        area, turn = torch.rand(2, generator=random).tolist()
        area, ratio = size**2 * (LEAST + (1 - LEAST) * area), RATIO ** (2 * turn - 1)
        sides = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if max(sides) <= size:
            height, width = max(1, sides[0]), max(1, sides[1])
            break
    top = int(torch.randint(size - height + 1, (), generator=random))
    left = int(torch.randint(size - width + 1, (), generator=random))
    part = picture[None, :, top : top + height, left : left + width]
    return F.interpolate(part, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
