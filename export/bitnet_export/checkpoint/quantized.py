"""Master weights quantized as in training, in the numbers that an encoding holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.packed import encodings
from bitnet_export.packed.encodings import Encoding

if TYPE_CHECKING:
    import torch


class Quantized(NamedTuple):
    numbers: NDArray[Any]  # codes, or floats, in the shape of the weight
    scales: NDArray[np.float32] | None
    scope: int


def quantized(weight: torch.Tensor, stored: Encoding, config: ModelConfig) -> Quantized:
    """A float beyond the range of `stored` becomes infinite."""
    from bitnet.quant import row_codes, ternary_codes

    if stored.kind == "float":
        with np.errstate(over="ignore"):
            return Quantized(weight.detach().float().numpy().astype(stored.dtype), None, encodings.SCALE_NONE)
    scope = encodings.SCOPE_NAMES.index(config.weight_scale) if stored.ternary else encodings.SCALE_ROW
    codes, scales = ternary_codes(weight, config.weight_scale) if stored.ternary else row_codes(weight)
    return Quantized(codes.numpy(), scales.numpy(), scope)
