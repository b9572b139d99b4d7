"""Pictures in any form that a caller may have, as the numbers that a model takes.

    processor = Processor(224)
    processor.floats("cat.png")  # float32 (3, 224, 224), from 0 to 1

Resized as the image processors of transformers do it with Pillow: the same numbers of the same file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from bitnet_runtime.errors import ImageError, naming, shown
from bitnet_runtime.images.files import (
    MOST_PIXELS,
    Decoded,
    check_size,
    content_of,
    is_data,
    is_pillow_image,
    pillow_image,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image as PillowImage

    class Arrays(Protocol):
        """An array of numpy, or what becomes one, such as a tensor of torch on the CPU."""

        def __array__(self) -> NDArray[Any]: ...

    Image = str | os.PathLike[str] | bytes | BinaryIO | PillowImage.Image | Arrays
    """A picture: the name of a file, its bytes, a file open for bytes, a data: URL, an image of Pillow, or an array.

    Arrays are (height, width), or (height, width, 1, 3 or 4): channels last, the fourth is alpha. uint8, or float
    from 0 to 1.
    """

    Rows = Callable[[int, int], NDArray[Any]]  # from the first to before the second
    Size = tuple[int, int]  # width and height

RESIZES = ("stretch", "crop")
FILTERS = ("bicubic", "bilinear")
BAND = 64  # rows that are converted at a time


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
        if type(self.size) is not int or self.size < 1:
            raise ImageError(f"size is {shown(self.size)}, expected a number of pixels, 1 or more")
        for field, words in (("resize", RESIZES), ("filter", FILTERS)):
            if getattr(self, field) not in words:
                raise ImageError(f"{field} is {shown(getattr(self, field))}, expected one of {', '.join(words)}")

    def floats(self, image: Image) -> NDArray[np.float32]:
        """float32 (channels, size, size), from 0 to 1, as a model takes it."""
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
        if is_one(images):
            return self.floats(cast("Image", images))[None]
        several = cast("Sequence[Image]", images)
        return self._several(several, 0, len(several))

    def batches(self, images: Image | Sequence[Image], most: int) -> Iterator[NDArray[np.float32]]:
        """`batch` in pieces of at most `most` pictures, each made when it is asked for."""
        if is_one(images):
            yield self.batch(images)
            return
        several = cast("Sequence[Image]", images)
        for start in range(0, len(several) or 1, most):  # of none there is one piece, too
            yield self._several(several, start, min(start + most, len(several)))

    def _several(self, images: Sequence[Image], start: int, end: int) -> NDArray[np.float32]:
        import numpy as np

        out = np.empty((end - start, self.channels, self.size, self.size), np.float32)
        for place in range(start, end):
            image = images[place]
            path = isinstance(image, (str, os.PathLike)) and not is_data(str(image))  # which the error names
            with naming("" if path else f"images[{place}]"):
                out[place - start] = self.floats(image)
        return out

    def _made(self, image: Image) -> NDArray[Any]:
        """(channels, size, size), uint8 or float32."""
        import numpy as np

        height, width, rows, name = _opened(image, self.most_pixels)
        with naming(name):
            tall, wide = self._before_cutting(height, width)

        def band(top: int) -> NDArray[Any]:
            some = rows(top, min(top + BAND, height))  # an error in there has the name
            with naming(name):
                return _coloured(some, self.channels)

        bands = map(band, range(0, height, BAND))
        if (tall, wide) == (height, width):
            array = np.concatenate([*bands])
        else:
            array = _scaled(bands, (width, height), (wide, tall), self.filter)
        if array.dtype != np.uint8:
            array = np.clip(array, 0, 1)  # bicubic goes beyond what it is given
        top, left = (tall - self.size) // 2, (wide - self.size) // 2
        middle = array[top : top + self.size, left : left + self.size].transpose(2, 0, 1)
        return np.array(np.broadcast_to(middle, (self.channels, self.size, self.size)), order="C")

    def _before_cutting(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to which a picture is resized."""
        if self.resize == "stretch":
            return self.size, self.size
        short = min(height, width)
        tall, wide = int(self.size * height / short), int(self.size * width / short)  # rounded as transformers does
        if tall * wide > self.most_pixels:
            raise ImageError(
                f"{width:,} × {height:,} pixels, too long for a middle of {self.size} × {self.size}; cut it first"
            )
        return tall, wide


def is_one(images: object) -> bool:
    """Whether it is one picture, and not several: a list, a tuple, or an array of four dimensions."""
    return not isinstance(images, (list, tuple)) and getattr(images, "ndim", 0) != 4


def count(images: Image | Sequence[Image]) -> int:
    return 1 if is_one(images) else len(cast("Sequence[Image]", images))


def _opened(image: Image, most_pixels: int) -> tuple[int, int, Rows, str]:
    """Height, width, and what gives rows: (rows, width) or (rows, width, 1, 3 or 4), uint8 or float. And its name,
    which an array does not have."""

    if not is_pillow_image(image) and hasattr(image, "__array__"):
        array = _array_of(image)
        _check_array(array, most_pixels)
        return array.shape[0], array.shape[1], lambda top, bottom: array[top:bottom], ""
    if isinstance(image, (bytearray, memoryview)):
        image = bytes(image)
    if hasattr(image, "read"):
        image = content_of(image)
    if not (isinstance(image, (str, bytes, os.PathLike)) or is_pillow_image(image)):
        raise ImageError(
            f"{shown(image)}, expected the name of a file, its bytes, an open file, an image of Pillow, or an array"
        )
    decoded = Decoded(cast(Any, image), most_pixels)
    return decoded.height, decoded.width, decoded.rows, decoded.name


def _array_of(image: Any) -> NDArray[Any]:
    """An array, or what makes one, such as a tensor of torch. Raises ImageError: it cannot."""
    import numpy as np

    try:
        return np.asarray(image)
    except Exception as error:  # there is no list of them: of another device, or of numbers that numpy lacks
        raise ImageError(f"{shown(image, 40)}, a {type(image).__name__} that is no array: {error}") from None


def _check_array(array: NDArray[Any], most_pixels: int) -> None:
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        raise ImageError(
            f"an array of shape {array.shape}, expected (height, width), or (height, width, 1, 3 or 4)"
            + ("; .transpose(1, 2, 0), of a tensor .permute(1, 2, 0), puts the channels last" if first else "")
        )
    check_size(array.shape[1], array.shape[0], most_pixels)
    if array.dtype != "uint8" and array.dtype.kind != "f":
        raise ImageError(f"an array of {array.dtype}, expected uint8, or float from 0 to 1")


def _check_floats(array: NDArray[Any]) -> None:
    low, high = array.min(), array.max()
    if not (low >= 0 and high <= 1):  # NaN is neither
        hint = "; divide by 255" if low >= 0 and 1 < high <= 255 else ""
        raise ImageError(f"an array with numbers from {low} to {high}, expected finite ones from 0 to 1{hint}")


def _coloured(rows: NDArray[Any], channels: int) -> NDArray[Any]:
    """Rows of a picture as grey or RGB: (rows, width, 1 or 3), uint8 or float32."""
    import numpy as np

    rows = rows if rows.ndim == 3 else rows[:, :, None]
    floats = rows.dtype != np.uint8
    if floats:
        _check_floats(rows)
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


def _scaled(bands: Iterable[NDArray[Any]], old: Size, new: Size, filter: str) -> NDArray[Any]:
    """Pillow's resizing of rows: (height, width, 1 or 3).

    In one call, for Pillow decides whether it begins across or down.
    """
    import numpy as np

    pillow = pillow_image()
    kind = {"bicubic": pillow.Resampling.BICUBIC, "bilinear": pillow.Resampling.BILINEAR}[filter]
    planes: list[Any] = []
    top = 0
    for band in bands:
        parts = [band] if band.dtype == np.uint8 and band.shape[2] == 3 else [*band.transpose(2, 0, 1)]
        for place, part in enumerate(map(pillow.fromarray, parts)):
            if not top:
                planes.append(pillow.new(part.mode, old))
            planes[place].paste(part, (0, top))
        top += len(band)
    return np.dstack([np.asarray(plane.resize(new, kind)) for plane in planes])
