"""Pictures, in whatever form a caller has them, as the numbers that a model takes.

    processor = Processor(224)
    processor.floats("cat.png")  # float32 (3, 224, 224), from 0 to 1

Resized as the image processors of transformers do it with Pillow: the same numbers of the same file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bitnet_runtime.errors import ImageError, shown
from bitnet_runtime.image_files import MOST_PIXELS, check_size, decode, is_pillow_image, pillow_image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image as PillowImage

    Image = str | os.PathLike[str] | bytes | PillowImage.Image | NDArray[Any]
    """A picture: the name of a file, its bytes, a data: URL, an image of Pillow, or an array.

    Arrays are (height, width), or (height, width, 1, 3 or 4): channels last, the fourth is alpha. uint8, or float
    from 0 to 1.
    """

__all__ = ["MOST_PIXELS", "Image", "ImageError", "Processor", "is_one"]

RESIZES = ("stretch", "crop")
FILTERS = ("bicubic", "bilinear")
BAND = 64  # rows that are converted at a time, so that a large picture is not in memory several times


@dataclass(frozen=True)
class Processor:
    """What becomes of a picture: turned as EXIF says, put on white where it is transparent, made grey (channels 1) or
    RGB (3), resized. Of an animation the first frame.
    """

    size: int  # pixels of a side
    channels: int = 3
    resize: str = "stretch"  # to the square, as SigLIP; crop: shortest side to `size`, then the middle, as CLIP
    filter: str = "bicubic"
    most_pixels: int = MOST_PIXELS  # of a picture, looked up in its header before it is decoded

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ImageError(f"channels is {shown(self.channels)}, expected 1 (grey) or 3 (RGB)")
        for field, words in (("resize", RESIZES), ("filter", FILTERS)):
            if getattr(self, field) not in words:
                raise ImageError(f"{field} is {shown(getattr(self, field))}, expected one of {', '.join(words)}")

    def floats(self, image: Image) -> NDArray[np.float32]:
        """float32 (channels, size, size), from 0 to 1: what a model takes."""
        import numpy as np

        made = self._made(image)
        return np.divide(made, np.float32(255), dtype=np.float32) if made.dtype == np.uint8 else made

    def bytes(self, image: Image) -> NDArray[np.uint8]:
        """uint8 (channels, size, size): the same in a quarter of the memory. A float array is rounded."""
        import numpy as np

        made = self._made(image)
        return made if made.dtype == np.uint8 else np.rint(made * np.float32(255)).astype(np.uint8)

    def batch(self, images: Image | Sequence[Image]) -> NDArray[np.float32]:
        """float32 (n, channels, size, size) of a list, or of one picture (n = 1)."""
        import numpy as np

        if is_one(images):
            return self.floats(cast("Image", images))[None]
        several = cast("Sequence[Image]", images)
        out = np.empty((len(several), self.channels, self.size, self.size), np.float32)
        for place, image in enumerate(several):
            try:
                out[place] = self.floats(image)
            except ImageError as error:
                named = isinstance(image, (str, os.PathLike))
                raise ImageError(str(error) if named else f"images[{place}]: {error}") from None
        return out

    def _made(self, image: Image) -> NDArray[Any]:
        """(channels, size, size), uint8 or float32."""
        import numpy as np

        array = _array(image, self.most_pixels)
        coloured = np.empty((*array.shape[:2], self.channels), np.uint8 if array.dtype == np.uint8 else np.float32)
        for top in range(0, len(array), BAND):
            coloured[top : top + BAND] = _coloured(array[top : top + BAND], self.channels)
        return np.ascontiguousarray(self._resized(coloured).transpose(2, 0, 1))

    def _resized(self, array: NDArray[Any]) -> NDArray[Any]:
        """(height, width, channels) to (size, size, channels)."""
        height, width = array.shape[:2]
        if self.resize == "crop":  # rounded as transformers does
            short = min(height, width)
            height, width = int(self.size * height / short), int(self.size * width / short)
            if height * width > self.most_pixels:
                raise ImageError(
                    f"{array.shape[1]:,} × {array.shape[0]:,} pixels, too long for a middle of "
                    f"{self.size} × {self.size}; cut it first"
                )
        else:
            height = width = self.size
        if (height, width) != array.shape[:2]:
            array = _scaled(array, width, height, self.filter)
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return array[top : top + self.size, left : left + self.size]


def is_one(images: object) -> bool:
    """Whether it is one picture, and not several: a list, a tuple, or an array of four dimensions."""
    return not isinstance(images, (list, tuple)) and getattr(images, "ndim", 0) != 4


def _array(image: Image, most_pixels: int) -> NDArray[Any]:
    """(height, width, 1, 3 or 4), uint8 or float from 0 to 1."""
    import numpy as np

    if isinstance(image, np.ndarray):
        array: NDArray[Any] = np.asarray(image)
    elif isinstance(image, (bytearray, memoryview)):
        array = decode(bytes(image), most_pixels)
    elif isinstance(image, (str, bytes, os.PathLike)) or is_pillow_image(image):
        array = decode(image, most_pixels)
    else:
        raise ImageError(
            f"a {type(image).__name__}, expected the name of a file, its bytes, an image of Pillow, or a numpy array"
        )
    _check_array(array, most_pixels)
    return array if array.ndim == 3 else array[:, :, None]


def _check_array(array: NDArray[Any], most_pixels: int) -> None:
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        raise ImageError(
            f"an array of shape {array.shape}, expected (height, width), or (height, width, 1, 3 or 4)"
            + ("; .transpose(1, 2, 0) puts the channels last" if first else "")
        )
    check_size(array.shape[1], array.shape[0], most_pixels)
    if array.dtype == "uint8":
        return
    if array.dtype.kind != "f":
        raise ImageError(f"an array of {array.dtype}, expected uint8, or float from 0 to 1")
    low, high = array.min(), array.max()
    if not (low >= 0 and high <= 1):  # NaN is neither
        hint = "; divide by 255" if low >= 0 and 1 < high <= 255 else ""
        raise ImageError(f"an array with numbers from {low} to {high}, expected finite ones from 0 to 1{hint}")


def _coloured(rows: NDArray[Any], channels: int) -> NDArray[Any]:
    """Rows of a picture as grey or RGB: (rows, width, channels), uint8 or float32."""
    import numpy as np

    floats = rows.dtype != np.uint8
    if floats:
        rows = rows.astype(np.float32)
    if rows.shape[2] == 4:
        colour, alpha = rows[:, :, :3], rows[:, :, 3:]
        if floats:
            rows = colour * alpha + (1 - alpha)
        else:
            wide = alpha.astype(np.uint16)
            rows = ((colour * wide + 255 * (255 - wide) + 127) // 255).astype(np.uint8)
    if channels == 1 and rows.shape[2] == 3:  # as Pillow: the weights of ITU-R 601, in 1/65536
        red, green, blue = rows.transpose(2, 0, 1).astype(np.float32 if floats else np.uint32)
        grey = red * 19595 + green * 38470 + blue * 7471
        rows = (grey / 65536 if floats else ((grey + 0x8000) >> 16).astype(np.uint8))[:, :, None]
    return rows


def _scaled(array: NDArray[Any], width: int, height: int, filter: str) -> NDArray[Any]:
    """Pillow's resizing of (height, width, channels)."""
    import numpy as np

    pillow = pillow_image()
    kind = {"bicubic": pillow.Resampling.BICUBIC, "bilinear": pillow.Resampling.BILINEAR}[filter]

    def one(part: NDArray[Any]) -> NDArray[Any]:
        return np.array(pillow.fromarray(part).resize((width, height), kind))

    if array.dtype == np.uint8:
        return one(array) if array.shape[2] == 3 else one(array[:, :, 0])[:, :, None]
    channels = [one(channel) for channel in array.transpose(2, 0, 1)]
    clipped: NDArray[Any] = np.clip(np.stack(channels, 2), 0, 1)  # bicubic goes beyond what it is given
    return clipped
