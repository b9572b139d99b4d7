"""Pictures from files, bytes and Pillow's images, as arrays. Untrusted data is decoded within limits."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import logging
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from bitnet_runtime.errors import ImageError, MissingDependencyError, naming, shown, to_install
from bitnet_runtime.images.tiff import tile_size

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image as PillowImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The formats that are decoded. Decoders of others, such as EPS, start programs."""

MOST_PIXELS = 50_331_648  # 8192 × 6144: of a picture, unless a caller says otherwise
MOST_SIDE = 1 << 16  # pixels; resizing takes memory for each
MOST_BYTES = 256 << 20  # of a file
ORIENTATION = 0x112  # of EXIF


class Decoded:
    """A picture, decoded and upright; the first of several frames. Raises ImageError."""

    def __init__(self, source: str | os.PathLike[str] | bytes | PillowImage.Image, most_pixels: int) -> None:
        pillow, operations = _libraries()
        self.name = _name(source)  # how messages call it
        with self._decoding(), contextlib.ExitStack() as stack:
            if isinstance(source, (str, bytes, os.PathLike)):
                file = stack.enter_context(_file(source))
                if tiles := tile_size(file):
                    with naming("its tiles"):
                        check_size(*tiles, most_pixels)
                image: Any = pillow.open(file, formats=FORMATS)
            else:
                image = source
            if image.format not in (None, "MPO", *FORMATS):  # Pillow has not decoded it yet
                raise ImageError(f"{image.format}, expected one of {', '.join(FORMATS)}; convert() decodes others")
            width, height = image.size
            check_size(width, height, most_pixels)
            image.load()
            if _is_turned(image):  # or it would be copied
                image = operations.exif_transpose(image)
            self._image = image
            self.width, self.height = image.size

    def rows(self, top: int, bottom: int) -> NDArray[Any]:
        """The pixels of some rows, so that a large picture is in memory once, as it was decoded.

        uint8 (rows, width) of grey ones, (rows, width, 3), or (rows, width, 4) with alpha; or float (rows, width).
        Numbers of 16 bits without the lower 8.
        """
        with self._decoding():
            return _pixels(self._image.crop((0, top, self.width, bottom)))

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn any exception of a decoder into an ImageError that names the picture."""
        try:
            with _quiet:
                yield
        except ImageError as error:
            raise ImageError(f"{self.name}: {error}") from None
        except Exception as error:  # there is no list of them
            raise ImageError(f"{self.name}: {_why(error)}") from None


def _why(error: Exception) -> str:
    """What an exception of Pillow means to the caller."""
    said, kind = str(error), type(error).__name__
    if kind == "UnidentifiedImageError":
        return f"it is damaged or cut short, or another kind of file; expected one of {', '.join(FORMATS)}"
    if kind == "DecompressionBombError":  # before anything was decoded
        return f"{said.partition(',')[0]}; make it smaller first"
    return f"it is damaged or cut short: {said or kind:.200}"


def _is_turned(image: Any) -> bool:
    try:
        return bool(image.getexif().get(ORIENTATION, 1) != 1)
    except Exception:  # there is no list of them; and a picture is seen without, too
        return False


def check_size(width: int, height: int, most_pixels: int) -> None:
    """Raises ImageError: the picture is empty, or too large to be decoded or resized."""
    if width < 1 or height < 1:
        raise ImageError(f"{width} × {height} pixels, expected at least 1 × 1")
    if width * height > most_pixels or max(width, height) > MOST_SIDE:
        raise ImageError(
            f"{width:,} × {height:,} pixels, expected at most {most_pixels:,} in all and {MOST_SIDE:,} on a side; "
            "make it smaller first"
        )


def is_pillow_image(value: object) -> bool:
    """Whether this is an image of Pillow, which is not imported for the check."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def pillow_image() -> Any:
    """The module PIL.Image."""
    return _libraries()[0]


def _libraries() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError(
            f"pictures in files, and of another size than the model's, need the `Pillow` library ({error}): "
            f"{to_install('pillow>=11')}; Python may pass uint8 arrays of the model's size instead"
        ) from error
    logging.getLogger("PIL").addHandler(_SILENT)  # or errors that are raised here are printed, too
    return Image, ImageOps


_SILENT = logging.NullHandler()


def _name(source: object) -> str:
    """The name of the picture in messages."""
    if isinstance(source, bytes):
        return f"a picture of {len(source):,} bytes"
    if isinstance(source, (str, os.PathLike)):
        text = str(source) or "a picture without a name"
        return "a data: URL" if is_data(text) else text if len(text) <= 300 else f"{text[:299]}…"
    return "an image of Pillow"


def _file(source: str | os.PathLike[str] | bytes) -> BinaryIO:
    """The bytes as an open file that begins like a picture."""
    if isinstance(source, str) and is_data(source):
        source = _data(source)
    elif isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source):
        raise ImageError("a URL, expected a file, or data:image/png;base64,…; nothing is fetched from a network")
    file = io.BytesIO(source) if isinstance(source, bytes) else _regular(source)
    begin, size = file.read(16), file.seek(0, os.SEEK_END)
    file.seek(0)
    found = "" if _FIRST_BYTES.match(begin) else f"begins with {begin!r}"
    if begin[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypavif"):  # as phones and browsers write
        found = "is HEIC or AVIF"
    if size > MOST_BYTES or size == 0:
        found = f"has {size:,} bytes"
    if found:
        file.close()
        raise ImageError(f"it {found}, expected a picture: {', '.join(FORMATS)}, at most {MOST_BYTES >> 20} MiB")
    return file


_FIRST_BYTES = re.compile(rb"\x89PNG|\xff\xd8\xff|RIFF....WEBP|GIF8|BM|II[*+]\0|MM\0[*+]|P[1-6]", re.DOTALL)


def _regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file, and never wait for a FIFO or a device."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # a zero byte is a ValueError
        raise ImageError(getattr(error, "strerror", None) or str(error)) from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        raise ImageError(f"it is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}, expected a picture")
    return open(number, "rb")


def content_of(file: Any) -> bytes:
    """The bytes of an open file, such as io.BytesIO, from its beginning if it can be sought. Raises ImageError."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a pipe; reading says that it is closed
        file.seek(0)
    try:
        found = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # closed, or of text and no UTF-8
        raise ImageError(f"{shown(file)} cannot be read: {error}; expected a file open for bytes") from None
    if not isinstance(found, bytes):
        raise ImageError(f'{shown(file)} gives {shown(found, 40)}, expected bytes: open it with "rb"')
    return found


def is_data(text: str) -> bool:
    return text[:5].lower() == "data:"


def _data(url: str) -> bytes:
    """The bytes of data:image/png;base64,…"""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(f"it is {shown(head, 60)}, expected data:image/png;base64,…")
    if len(body) > MOST_BYTES // 3 * 4 + 4:
        raise ImageError(f"it has {len(body):,} characters, expected at most {MOST_BYTES >> 20} MiB of a picture")
    try:
        return base64.b64decode("".join(body.split()), validate=True)  # many encoders break lines
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"its base64 is broken: {error}") from None


def _pixels(image: Any) -> NDArray[Any]:
    import numpy as np

    if image.mode == "F":
        return np.array(image)
    if image.mode.startswith("I"):  # 16 bits; I holds 32, of which files use 16
        wide = np.array(image)
        if wide.min() < 0 or wide.max() > 0xFFFF:
            raise ImageError(f"its numbers are from {wide.min()} to {wide.max()}, expected 0 to 65535")
        grey = (wide >> 8).astype(np.uint8)
        if (clear := image.info.get("transparency")) is None:
            return grey
        return np.stack([grey, grey, grey, np.where(wide == clear, 0, 255).astype(np.uint8)], axis=-1)
    if image.mode == "La":  # alpha is in the grey already; of RGBa Pillow knows the way
        image = image.convert("LA")
    if image.has_transparency_data:
        return np.array(image.convert("RGBA"))
    return np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))


class _Quiet:
    """Silence warnings while decoding, as errors say what matters. Safe for several threads."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._filters: warnings.catch_warnings[None] | None = None  # those to come back

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._come_back()

    def _come_back(self) -> None:
        if self._filters:
            self._filters.__exit__(None, None, None)
        self._filters = None

    def after_fork(self) -> None:
        """In the child: threads that decoded, and one that had the lock, are not there."""
        self._lock, self._inside = threading.Lock(), 0
        with contextlib.suppress(RuntimeError):  # it was about to begin
            self._come_back()


_quiet = _Quiet()
os.register_at_fork(after_in_child=_quiet.after_fork)
