"""BitLinear: a linear layer for quantization-aware training, whose forward pass is ternary × int8."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from bitnet.float_product import linear
from bitnet.straight_through import raised, ternary_linear


class FloatLinear(nn.Linear):
    """`nn.Linear`, with the faster of torch's products."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class BitLinear(nn.Linear):
    """`nn.Linear` with float master weights that computes with their ternary codes (`bitnet.quant`).

    x: (..., in_features). Returns (..., out_features), fp32; on a GPU under autocast in its dtype. Raises ValueError
    if x has another width.
    `amount` is λ as in `bitnet.straight_through`: below 1 only while quantizers are phased in.
    """

    amount: float | Tensor = 1.0

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, scope: str = "tensor", rank: int = 0
    ) -> None:
        """rank: of an adapter, which adds nothing at first; 0: no adapter."""
        super().__init__(in_features, out_features, bias)
        self.scope = scope
        self.adapter_in = nn.Parameter(torch.empty(rank, in_features)) if rank else None
        self.adapter_out = nn.Parameter(torch.zeros(rank, out_features)) if rank else None
        if self.adapter_in is not None:
            with torch.random.fork_rng(devices=[]):  # a model draws the same other weights as without adapters
                nn.init.normal_(self.adapter_in, std=in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {list(x.shape)}, expected (..., {self.in_features})")
        return project(x, self)[0] if x.dim() > 1 else project(x[None], self)[0][0]


def project(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Several linear layers on one input, which the ternary ones and their adapters quantize once."""
    ternary = [layer for layer in layers if isinstance(layer, BitLinear)]
    if not ternary:
        return tuple(layer(x) for layer in layers)
    weights, (first, *_) = (layer.weight for layer in ternary), ternary
    lowering = [layer.adapter_in for layer in ternary if layer.adapter_in is not None]
    ys = ternary_linear(x, *weights, scope=first.scope, amount=first.amount, by_row=lowering)
    products, lows = iter(ys[: len(ternary)]), iter(ys[len(ternary) :])

    def of(layer: nn.Linear) -> Tensor:
        if not isinstance(layer, BitLinear):
            return cast(Tensor, layer(x))
        y = next(products)
        y = y if layer.bias is None else y + layer.bias
        return y if layer.adapter_out is None else y + raised(next(lows), layer.adapter_out)

    return tuple(of(layer) for layer in layers)
