"""BitLinear: a linear layer whose forward pass is ternary × int8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitnet.float_product import linear
from bitnet.quant import low_rank, ternary_linear


class FloatLinear(nn.Linear):
    """`nn.Linear`, by the faster of torch's products."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class BitLinear(nn.Linear):
    """`nn.Linear` with float master weights that computes with their ternary codes (`bitnet.quant`).

    x: (..., in_features). Returns (..., out_features), fp32; on a GPU under autocast in its dtype.
    `amount` is that of `bitnet.quant`: below 1 only while a float model is being converted.
    """

    amount: float | Tensor = 1.0

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, scope: str = "tensor", rank: int = 0
    ) -> None:
        """rank: of an adapter, which adds nothing at first; 0: there is none."""
        super().__init__(in_features, out_features, bias)
        self.scope = scope
        self.adapter_in = nn.Parameter(torch.empty(rank, in_features)) if rank else None
        self.adapter_out = nn.Parameter(torch.zeros(rank, out_features)) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(ternary_linear(x, self.weight, scope=self.scope, amount=self.amount)[0], x)

    def finish(self, y: Tensor, x: Tensor) -> Tensor:
        y = y if self.bias is None else y + self.bias
        if self.adapter_in is None or self.adapter_out is None:
            return y
        return y + low_rank(x, self.adapter_in, self.adapter_out)


def project(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Several linear layers of one input. The ternary ones share one quantization of it."""
    ternary = [layer for layer in layers if isinstance(layer, BitLinear)]
    if not ternary:
        return tuple(layer(x) for layer in layers)
    weights, (first, *_) = (layer.weight for layer in ternary), ternary
    products = iter(ternary_linear(x, *weights, scope=first.scope, amount=first.amount))
    return tuple(layer.finish(next(products), x) if isinstance(layer, BitLinear) else layer(x) for layer in layers)
