"""Products and rows of quantized numbers (`bitnet.quant`) that learn: in the backward pass every quantizer is the
identity, the straight-through estimator (STE, arXiv 1308.3432).

`amount` is λ of gradual quantization (docs/finetune.md): every quantizer Q computes v + λ·(Q(v) − v). A tensor () may
change without recompilation, and never counts as exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bitnet import kernels
from bitnet.float_product import linear, product
from bitnet.quant import (
    activation_codes,
    activation_values,
    expand_scale,
    integer_product,
    row_codes,
    stored_rows,
    ternary_codes,
)


def _codes(w: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """int8 codes (N, K) and fp32 scale of a matrix (N, K). kind: the scope of ternary codes, or "int8", per row."""
    return row_codes(w) if kind == "int8" else ternary_codes(w, kind)


def _outputs(x: Tensor) -> torch.dtype:
    """The dtype of a product with x: fp64 for fp64, in a reference model; on a GPU under autocast that of a float
    linear layer there, half the bytes to write and keep; else fp32."""
    if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return torch.promote_types(x.dtype, torch.float32)


def _operands(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of operands of float products with x: that of autocast, else `dtype`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


class _IntegerLinear(torch.autograd.Function):
    """Several projections of one input, which is quantized once.

    Forward is `integer_product`; backward is the straight-through estimator (STE), every quantizer the identity:
    grad_x = Σ g·W_q, grad_W = gᵀ·x_q. Saves int8 codes, not float copies, and never forms
    `w + (w_q - w)`, which is inexact in bf16. Under autocast the two products of the backward
    pass take W_q and x_q rounded to bf16; the forward pass is always integer.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """given: the input, a kind of each matrix (`_codes`), and the matrices. They are no parameters, because
        torch.compile believes that a function has no ctx if it has one parameter less than arguments."""
        x, kinds, *weights = given
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, weights[0].dtype
        ctx.dtype = _operands(x, torch.float32)
        q, s = activation_codes(x.flatten(0, -2))
        pairs = [_codes(w, kind) for w, kind in zip(weights, kinds, strict=True)]
        saved = (q, s) if any(ctx.needs_input_grad[2:]) else (None, None)
        ctx.save_for_backward(*saved, *(tensor for pair in pairs for tensor in pair))
        ys = (
            integer_product(q, *pair, s, _outputs(x), ternary=kind != "int8")
            for pair, kind in zip(pairs, kinds, strict=True)
        )
        return tuple(y.unflatten(0, x.shape[:-1]) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, s, *flat = ctx.saved_tensors
        ws = [_values(*pair).to(ctx.dtype) for pair in zip(flat[::2], flat[1::2], strict=True)]
        grad_x, grad_ws = _gradients(ctx, grads, ws, lambda: activation_values(q, s, ctx.dtype))
        return grad_x, None, *grad_ws


class _PartlyLinear(torch.autograd.Function):
    """The same with λ below 1: a float product of values between x and x_q, W and W_q. Saves what was multiplied."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """given: the same, with λ before the matrices."""
        x, kinds, amount, *weights = given
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, weights[0].dtype
        ctx.dtype = _operands(x, x.dtype)
        between = _between(x.flatten(0, -2), amount, ctx.dtype)
        pairs = (_codes(w, kind) for w, kind in zip(weights, kinds, strict=True))
        ws = [toward(w, _values(*pair), amount).to(ctx.dtype) for w, pair in zip(weights, pairs, strict=True)]
        ctx.save_for_backward(between if any(ctx.needs_input_grad[3:]) else None, *ws)
        ys = (product(between, w.mT).to(_outputs(x)) for w in ws)
        return tuple(y.unflatten(0, x.shape[:-1]) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *ws = ctx.saved_tensors
        grad_x, grad_ws = _gradients(ctx, grads, ws, lambda: x)
        return grad_x, None, None, *grad_ws


def _gradients(
    ctx: Any, grads: Sequence[Tensor], ws: list[Tensor], x: Callable[[], Tensor]
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Of the input and of each matrix, if they learn. ws, x: the operands of the product, (N_i, K) and (M, K)."""
    gs, learns, grad_x = [grad.flatten(0, -2) for grad in grads], ctx.needs_input_grad[-len(ws) :], None
    sizes = [g.shape[1] for g in gs]
    if gs[0].dtype != ctx.dtype:  # they are copied anyway: side by side, so that one product suffices
        gs, ws = [_side_by_side(gs, ctx.dtype)], [torch.cat(ws)]
    if ctx.needs_input_grad[0]:
        grad_x = product(gs[0], ws[0])
        for g, w in zip(gs[1:], ws[1:], strict=True):
            grad_x = product(g, w, onto=grad_x)
        grad_x = grad_x.to(ctx.x_dtype).view(ctx.x_shape)
    if not any(learns):
        return grad_x, [None] * len(learns)
    if len(gs) == 1 and all(learns):
        return grad_x, product(gs[0].T, x()).to(ctx.w_dtype).split(sizes)
    gs, inputs = gs if len(gs) > 1 else list(gs[0].split(sizes, 1)), x()
    return grad_x, [
        product(g.T, inputs).to(ctx.w_dtype) if wanted else None for g, wanted in zip(gs, learns, strict=True)
    ]


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights that codes and their scale, of any scope, stand for: fp32 (N, K)."""
    return codes * expand_scale(scale, *codes.shape)


def _between(x: Tensor, amount: float | Tensor, dtype: torch.dtype) -> Tensor:
    """x + λ·(x_q − x), rounded to dtype. x: (M, K)."""
    if kernels.possible(x) and dtype in kernels.FLOATS:
        return kernels.between(x, amount, dtype)
    q, s = activation_codes(x)
    return toward(x, q / s, amount).to(dtype)


def _side_by_side(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices (M, N_i) as one (M, ΣN_i), converted to dtype."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    if torch.compiler.is_compiling():  # fused with its inputs, unlike copies into slices
        return torch.cat([part.to(dtype) for part in parts], 1)
    widths = [part.shape[1] for part in parts]
    whole = parts[0].new_empty(len(parts[0]), sum(widths), dtype=dtype)
    for place, part in zip(whole.split(widths, 1), parts, strict=True):
        place.copy_(part)
    return whole


def toward(v: Tensor, v_q: Tensor, amount: float | Tensor) -> Tensor:
    """v + λ·(v_q − v), without a gradient of its own."""
    return torch.lerp(v, v_q.to(v.dtype), amount.to(v.dtype) if isinstance(amount, Tensor) else amount)


class _Partly(torch.autograd.Function):
    """v + λ·(v_q − v) with the straight-through estimator: v itself at λ = 0, v_q at λ = 1, bit for bit."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, v_q: Tensor, amount: float | Tensor) -> Tensor:
        return toward(v, v_q, amount)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


_partly: Callable[[Tensor, Tensor, float | Tensor], Tensor] = _Partly.apply
_integer_linear: Callable[..., tuple[Tensor, ...]] = _IntegerLinear.apply
_partly_linear: Callable[..., tuple[Tensor, ...]] = _PartlyLinear.apply


def _is_whole(amount: float | Tensor) -> bool:
    """Whether quantizers apply fully. Never for a tensor, which may change without recompilation."""
    return isinstance(amount, float) and amount == 1.0


def _quantized_linear(x: Tensor, amount: float | Tensor, kinds: Sequence[str], *weights: Tensor) -> tuple[Tensor, ...]:
    return _integer_linear(x, kinds, *weights) if _is_whole(amount) else _partly_linear(x, kinds, amount, *weights)


def ternary_linear(
    x: Tensor, *weights: Tensor, scope: str = "tensor", amount: float | Tensor = 1.0, by_row: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """y_i = x_q · W_iᵀ with ternary W_i, each with its own γ, then with the matrices `by_row`, int8 per row.

    x: (..., K), W_i: (N_i, K); y_i: (..., N_i).
    """
    return _quantized_linear(x, amount, [scope] * len(weights) + ["int8"] * len(by_row), *weights, *by_row)


def output_logits(x: Tensor, w: Tensor, storage: str, amount: float | Tensor = 1.0, scope: str = "tensor") -> Tensor:
    """The head: x · Wᵀ with W as stored; if codes are stored, the activations are int8, too.

    x: (..., K), w: (N, K). scope: of γ, if the storage is "ternary".
    """
    if storage == "ternary":
        return ternary_linear(x, w, scope=scope, amount=amount)[0]
    if storage == "int8":
        return _quantized_linear(x, amount, ["int8"], w)[0]
    return linear(x, _partly(w, stored_rows(w, storage), amount))


def raised(low: Tensor, adapter_out: Tensor) -> Tensor:
    """The output of an adapter: Bᵀ·(A·x_q), A and B as stored, int8 per row; the outer sum in fp32.

    low: A·x_q, (..., rank), from `ternary_linear`; B: (rank, N). Returns (..., N).
    """
    b = _partly(adapter_out, stored_rows(adapter_out, "int8"), 1.0)
    with torch.autocast(low.device.type, enabled=False):
        return low.to(b.dtype) @ b


def head_operands(
    w: Tensor, storage: str, amount: float | Tensor, scope: str, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The operands of `output_logits`: the weights as quantized at λ, (N, K), and at λ = 1 their codes and scale."""
    if storage not in ("ternary", "int8"):
        return toward(w, stored_rows(w, storage), amount).to(dtype), None
    codes, scale = ternary_codes(w, scope) if storage == "ternary" else row_codes(w)
    stored = _values(codes, scale)
    if _is_whole(amount):
        return stored.to(dtype), (codes, scale)
    return toward(w, stored, amount).to(dtype), None


def embedding_rows(
    tokens: Tensor, w: Tensor, storage: str, amount: float | Tensor = 1.0, scope: str = "tensor"
) -> Tensor:
    """The embedding rows of token ids, as stored. tokens: (...), w: (N, K), scope: as above. Returns (..., K)."""
    rows = F.embedding(tokens.flatten(), w)
    if storage == "ternary":
        codes, gamma = ternary_codes(w, scope)
        stored = F.embedding(tokens.flatten(), codes * expand_scale(gamma, *codes.shape))
    else:
        stored = stored_rows(rows, storage)
    return _partly(rows, stored, amount).reshape(*tokens.shape, w.shape[1])
