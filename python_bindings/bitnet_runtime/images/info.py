"""Facts on how an open model sees images."""

from __future__ import annotations

from typing import NamedTuple

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import check
from bitnet_runtime.handles import Handle


class ImageInfo(NamedTuple):
    """Facts on a model that sees images; names and units as in `bn_image_info` of the C header."""

    image_size: int
    patch_size: int
    channels: int
    n_tokens: int
    width: int
    pooled: bool
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    image_token: int
    similarity_scale: float
    similarity_bias: float
    macs_per_image: int


def read_image_info(handle: Handle) -> ImageInfo | None:
    """None: the model sees no images."""
    struct = ffi.new("bn_image_info *")
    status = lib.bn_model_get_image_info(handle.pointer, struct)
    if status == lib.BN_ERR_INPUT:
        return None
    check(status)
    values = {name: getattr(struct, name) for name in ImageInfo._fields}
    for name in ("pixel_mean", "pixel_std"):
        values[name] = tuple(values[name])[: struct.channels]
    return ImageInfo(**values | {"pooled": bool(struct.pooled)})
