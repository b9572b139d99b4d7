"""The part of `Model` that encodes images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bitnet_runtime.abilities import require_images
from bitnet_runtime.errors import ImageError, ModelFormatError, shown
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.images import vision
from bitnet_runtime.images.info import ImageInfo
from bitnet_runtime.images.processor import Processor, count
from bitnet_runtime.once import once

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.images.processor import Image

    Compute = Callable[[ModelFacts, NDArray[np.float32]], NDArray[np.float32]]


class ModelImages(ModelFacts):
    """What an image becomes. A picture is a file's name or the open file, its bytes, a data: URL, an image of Pillow or
    an array: see `bitnet_runtime.images.processor`."""

    @once
    def processor(self) -> Processor:
        """Turns pictures into the numbers that the model takes: `model.processor.floats("cat.png")`."""
        seen = require_images(self)
        said = self._generation.get("pictures") or {}
        if not isinstance(said, dict) or not {*said} <= {"resize", "filter"}:
            raise ModelFormatError(
                f'{self.path}: pictures is {shown(said)}, expected {{"resize": "stretch", "filter": "bicubic"}}'
            )
        try:
            return Processor(seen.image_size, seen.channels, **said)
        except ImageError as error:
            raise ModelFormatError(f"{self.path}: pictures: {error}") from None

    def encode_image(self, images: Image | Sequence[Image]) -> NDArray[np.float32]:
        """The vectors of pictures, which stand for them in a prompt: float32 (n, tokens, width).

        One picture (n = 1) or a list. Raises ImageError, and UnsupportedModelError when the model sees none.
        """
        seen = require_images(self)
        return self._computed(images, vision.encode, (seen.n_tokens, seen.width))

    def embed_images(self, images: Image | Sequence[Image]) -> NDArray[np.float32]:
        """A vector of length 1 for each picture, comparable with those of texts by `embed`: float32 (n, width)."""
        return self._computed(images, vision.embed, (require_images(self).width,))

    def _computed(
        self, images: Image | Sequence[Image], compute: Compute, shape: tuple[int, ...]
    ) -> NDArray[np.float32]:
        """The vectors of pictures, encoded in groups: the pixels of a long list would fill the memory."""
        import numpy as np

        out = np.empty((count(images), *shape), np.float32)
        done = 0
        for pixels in self.processor.batches(images, vision.at_once(require_images(self))):
            out[done : done + len(pixels)] = compute(self, pixels)
            done += len(pixels)
        return out


def cosines(images: NDArray[np.float32], texts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cosines (images, texts) of vectors of length 1. Each is one sum in one order, however many others there are."""
    import numpy as np

    out = np.empty((len(images), len(texts)), np.float32)
    exact = texts.astype(np.float64)
    for row, image in zip(out, images, strict=True):
        row[:] = (exact * image).sum(1)
    return out


def scaled(cosines: NDArray[np.float32], seen: ImageInfo) -> NDArray[np.float32]:
    """The learnt scale and bias applied to cosines; the cosines themselves, if the model has none."""
    return cosines * seen.similarity_scale + seen.similarity_bias if seen.similarity_scale else cosines


def is_of_pairs(seen: ImageInfo) -> bool:
    """Whether the model judges each pair by itself, for which it needs a bias; else texts compete for an image."""
    return seen.similarity_bias != 0


def likely(logits: NDArray[np.float32], seen: ImageInfo) -> NDArray[np.float32]:
    """Probabilities of (pictures, texts)."""
    import numpy as np

    if is_of_pairs(seen):
        odds = np.exp(-np.abs(logits))  # no overflow
        made: NDArray[np.float32] = np.where(logits >= 0, np.float32(1), odds) / (1 + odds)
    else:
        powers = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
        made = powers / powers.sum(1, keepdims=True)
    return made
