"""Images on which a packed file is compared with its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from .reading import Floats

if TYPE_CHECKING:
    import torch

    from bitnet_runtime import Model

BLOCKS = 8  # of one colour each, per side


def drawn_images(config: ModelConfig, n: int) -> Floats:
    """Blocks of colours with some noise, (n, C, S, S) from 0 to 1: always the same."""
    random, size = np.random.default_rng(4), config.image_size
    colours = random.integers(0, 224, (n, config.channels, BLOCKS, BLOCKS), np.uint8)
    at = np.arange(size) * BLOCKS // size
    values: NDArray[np.uint8] = colours[:, :, at[:, None], at] + random.integers(
        0, 32, (n, config.channels, size, size), np.uint8
    )
    return np.divide(values, np.float32(255), dtype=np.float32)


def engine_sees(engine: Model, config: ModelConfig, images: Floats) -> Floats:
    """The vectors of images by the engine: (n, width), or (n, N, width) without pooling."""
    from bitnet_runtime.images import vision

    return (vision.encode if config.pooling == "none" else vision.embed)(engine, images)


def pixels_of(config: ModelConfig, images: Floats) -> Floats:
    """The images as an exported graph takes them: normalized."""
    mean, std = (np.array(x, np.float32)[:, None, None] for x in (config.pixel_mean, config.pixel_std))
    return (images - mean) / std


def normalized(config: ModelConfig, images: Floats, like: torch.Tensor) -> torch.Tensor:
    """The images as torch takes them: normalized, in the precision of the model."""
    import torch

    mean, std = (torch.tensor(x, dtype=like.dtype)[:, None, None] for x in (config.pixel_mean, config.pixel_std))
    return (torch.from_numpy(images).to(like.dtype) - mean) / std
