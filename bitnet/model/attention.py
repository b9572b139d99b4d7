"""Attention whose matrix products take bf16 operands, for CPUs that multiply bf16.

torch's own attention on CPUs stores nothing of size T·T, so it computes the weights twice, and it multiplies in fp32.
Training sequences are short: here the weights are kept in bf16, and a step's attention takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bitnet import kernels
from bitnet.config import ModelConfig

LONGEST = 1024
"""Sequence length up to which the T·T weights of each head are no larger than a layer's other saved activations."""


class _Attention(torch.autograd.Function):
    """softmax(q·kᵀ·scale, masked)·v; query heads that share a KV head are multiplied as one taller matrix."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, mask: Tensor | None, causal: bool, scale: float,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        b, h, t, e = q_BHTE.shape
        g, n_keys = k_BGTE.shape[1:3]
        q = q_BHTE.to(dtype).reshape(b * g, h // g * t, e)  # not -1: a batch may have no pictures
        k, v = (x.to(dtype).reshape(b * g, n_keys, e) for x in (k_BGTE, v_BGTE))
        p = _weights((q @ k.mT).view(b, h, t, n_keys), mask, causal, scale).view(b * g, h // g * t, n_keys)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.shapes, ctx.dtypes = scale, (q_BHTE.shape, k_BGTE.shape), (q_BHTE.dtype, v_BGTE.dtype)
        return (p @ v).to(q_BHTE.dtype).view(b, h, t, e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        (of_q, of_k), (dtype, v_dtype) = ctx.shapes, ctx.dtypes
        g = grad.to(p.dtype).reshape(q.shape)
        grad_v = (p.mT @ g).to(v_dtype).view(of_k)
        grad_s = torch._softmax_backward_data(g @ v.mT, p, -1, p.dtype)
        grad_q = (grad_s @ k).to(dtype).mul_(ctx.scale).view(of_q)
        grad_k = (grad_s.mT @ q).to(dtype).mul_(ctx.scale).view(of_k)
        return grad_q, grad_k, grad_v, None, None, None, None


def _weights(scores_BHTT: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """softmax(scores·scale) where tokens see each other, in the dtype of the scores."""
    t, n_keys = scores_BHTT.shape[2:]
    bias = None if mask is None else mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    fits = n_keys <= kernels.MOST_KEYS and (t == n_keys or not causal)
    if fits and kernels.possible(scores_BHTT, dtype=torch.bfloat16):
        return kernels.attention_weights(scores_BHTT, bias, causal, scale)
    if bias is None:
        bias = torch.full((t, t), -torch.inf).triu_(1) if causal else torch.zeros(t, n_keys)
    return torch.add(bias, scores_BHTT, alpha=scale).softmax(-1).to(scores_BHTT.dtype)


_attention: Callable[..., Tensor] = _Attention.apply


def attention_in_bf16(q_BHTE: Tensor) -> bool:
    """Whether to use `bf16_attention`: under autocast. Evaluations have none: they compute in fp32, as the engine does.

    With or without a gradient, as a run compares its passes with those of a reference or a teacher.
    """
    return (
        q_BHTE.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and q_BHTE.shape[2] <= LONGEST
    )


def takes_blocks(config: ModelConfig) -> bool:
    """Whether its attention can use torch's `flex_attention`, whose kernels are compiled for a GPU."""
    return not (config.attention_softcap or config.dropout) and config.head_dim >= 16


def attention_in_blocks(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """The result of torch's scaled_dot_product_attention; blocks in which every token is masked are skipped."""
    device = q_BHTE.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q_BHTE.dtype
    q, k, v = (x.to(dtype) for x in (q_BHTE, k_BGTE, v_BGTE))
    return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


def bf16_attention(
    q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """The result of torch's scaled_dot_product_attention. mask: true where a token sees another; with a mask there
    may be more keys than queries."""
    return _attention(q_BHTE, k_BGTE, v_BGTE, mask, causal, scale, torch.bfloat16)
