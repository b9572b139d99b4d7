"""Images to vectors, when they are arrays already: of files and pictures see `images`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import InvalidParameterError, NumericError, UnsupportedModelError, check, shown
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.image_info import ImageInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROWS = 512  # vectors that are computed in one call: between two of them Ctrl-C is obeyed


def encode(model: ModelFacts, pixels: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """The vectors that stand for images in a prompt: float32 (n, n_tokens, width).

    pixels: (n, channels, image_size, image_size) with values from 0 to 1.
    """
    seen = _info(model)
    return _computed(model, seen, pixels, lib.bn_image_encode, (seen.n_tokens, seen.width))


def embed(model: ModelFacts, pixels: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """A vector of length 1 for each image: float32 (n, width); pixels as in `encode`."""
    seen = _info(model)
    if not seen.pooled:
        raise UnsupportedModelError(
            f"{model.path.name} names no pooling of images, so they do not become one vector; use encode_image"
        )
    return _computed(model, seen, pixels, lib.bn_image_embed, (seen.width,))


def _info(model: ModelFacts) -> ImageInfo:
    if model.image is None:
        raise UnsupportedModelError(f"{model.path.name} sees no images, it takes text alone")
    return model.image


def _computed(
    model: ModelFacts, seen: ImageInfo, pixels: NDArray[np.floating[Any]], call: Any, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    import numpy as np

    given = _checked(pixels, seen)
    out = np.empty((len(given), *shape), np.float32)
    step = max(1, ROWS // seen.n_tokens)
    for start in range(0, len(given), step):
        some = ffi.from_buffer("float[]", given[start : start + step])
        handle = model._open  # in use, whoever closes the model meanwhile
        target = ffi.from_buffer("float[]", out[start : start + step], require_writable=True)
        status = call(handle.pointer, some, len(given[start : start + step]), target)
        if status == lib.BN_ERR_NUMERIC:
            raise NumericError(
                f"the vectors of an image are not finite; its pixels are from {given.min()} to {given.max()}, "
                "expected 0 to 1"
            )
        check(status)
    return out


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
