"""Images to vectors, when they are arrays already: of files and pictures see `images`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.abilities import require_images
from bitnet_runtime.errors import InvalidParameterError, NumericError, UnsupportedModelError, check, shown
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.handles import Handle
from bitnet_runtime.images.info import ImageInfo
from bitnet_runtime.stops import Stops

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROWS = 512  # vectors that are computed in one call
PIXELS = 64 << 20  # bytes of the pixels that they are made of: a file may name large images of one vector each


class Asking(Protocol):
    """A model, or a session of it: closing it, or cancelling, ends what it asked for."""

    _stops: Stops

    def _go_on(self) -> None:
        """Raises if it was closed or cancelled."""


def encode(model: ModelFacts, pixels: NDArray[np.floating[Any]], session: Asking | None = None) -> NDArray[np.float32]:
    """The vectors that stand for images in a prompt: float32 (n, n_tokens, width).

    pixels: (n, channels, image_size, image_size) with values from 0 to 1. session: whose prompt it is.
    """
    seen = require_images(model)
    shape = (seen.n_tokens, seen.width)
    return _computed(model, seen, pixels, lib.bn_image_encode, shape, session or model)


def embed(model: ModelFacts, pixels: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """A vector of length 1 for each image: float32 (n, width); pixels as in `encode`."""
    seen = require_images(model)
    if not seen.pooled:
        raise UnsupportedModelError(
            f"{model.path.name} names no pooling of images, so they do not become one vector; use encode_image"
            + ", or ask about them: Model.generate (`bitnet generate --image`)" * model.has_head
        )
    return _computed(model, seen, pixels, lib.bn_image_embed, (seen.width,), model)


def at_once(seen: ImageInfo) -> int:
    """Images that are computed in one call."""
    nbytes = 4 * seen.channels * seen.image_size**2
    return max(1, min(ROWS // seen.n_tokens, PIXELS // nbytes))


def _computed(
    model: ModelFacts,
    seen: ImageInfo,
    pixels: NDArray[np.floating[Any]],
    call: Any,
    shape: tuple[int, ...],
    asking: Asking,
) -> NDArray[np.float32]:
    import numpy as np

    given = _checked(pixels, seen)
    out = np.empty((len(given), *shape), np.float32)
    step = at_once(seen)
    for start in range(0, len(given), step):
        with asking._stops.call() as stop:
            asking._go_on()
            status = _obeying(call, model._open, given[start : start + step], out[start : start + step], stop)
        if status == lib.BN_ERR_CANCELLED:
            asking._go_on()
        if status == lib.BN_ERR_NUMERIC:
            low, high = given.min(), given.max()
            found = f"{low} to {high}, expected 0 to 1"
            if low >= 0 and high <= 1:
                found = f"0 to 1, so the fault is in {model.path.name}: its weights, pixel_mean or pixel_std"
            raise NumericError(f"the vectors of an image are not finite; its pixels are from {found}")
        check(status)
    return out


def _obeying(call: Any, model: Handle, pixels: NDArray[np.float32], out: NDArray[np.float32], stop: Any) -> int:
    """The status of a call, which Ctrl-C stops: Python hears it in the main thread, so another one computes."""
    status = list[int]()

    def compute() -> None:  # keeps all that is in use, whoever closes the model meanwhile
        some = ffi.from_buffer("float[]", pixels)
        target = ffi.from_buffer("float[]", out, require_writable=True)
        status.append(call(model.pointer, some, len(pixels), target, stop))

    if threading.current_thread() is not threading.main_thread():
        compute()
        return status[0]
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        thread.join()
    except BaseException:
        lib.bn_stop_now(stop)
        thread.join()
        raise
    return status[0]


def _checked(pixels: object, seen: ImageInfo) -> NDArray[np.float32]:
    """As the library takes them."""
    import numpy as np

    shape = (seen.channels, seen.image_size, seen.image_size)
    if not isinstance(pixels, np.ndarray) or pixels.dtype.kind != "f" or pixels.shape[1:] != shape:
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else shown(pixels)
        raise InvalidParameterError(f"pixels is {found}, expected an array of floats (n, {str(shape)[1:]}", "pixels")
    with np.errstate(over="ignore"):  # what it becomes is refused
        given = np.ascontiguousarray(pixels, np.float32)
    if not np.isfinite(given).all():
        raise InvalidParameterError("a pixel is NaN or infinite, expected values from 0 to 1", "pixels")
    return given
