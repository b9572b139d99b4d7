"""Muon: the update of a matrix is its momentum, orthogonalized (arXiv 2502.16982 eq. 1-4).

Matrices of one shape are orthogonalized together, as a stack: on a GPU a few large kernels instead of thousands
of small ones. A step reads nothing back to the host, and the rates may be tensors, so that a GPU can replay it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bitnet.model import parallel

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic polynomial that, applied STEPS times to singular values in (0, 1], takes them near 1."""
STEPS = 5
MOMENTUM = 0.95
SIZE = 0.2
"""Times √(longer side): the update's RMS is then that of a typical AdamW update, so one rate serves both (§2.2)."""


class Muon(torch.optim.Optimizer):
    """For matrices only, with Nesterov momentum and decoupled weight decay like AdamW's.

    precise: multiply in fp32, for CPUs without bf16 instructions.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], precise: bool = False) -> None:
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})
        self.dtype = torch.float32 if precise else torch.bfloat16

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            updates = self._momentum(group["params"])
            alike: dict[Any, list[Tensor]] = {}
            for p in updates:
                together = id(p) if parallel.is_sharded(p) else (p.shape, p.dtype)  # a sharded matrix stays by itself
                alike.setdefault(together, []).append(p)
            for matrices in alike.values():
                self._turn(matrices, [updates[p] for p in matrices], group["lr"], group["weight_decay"])

    def _momentum(self, parameters: list[Tensor]) -> dict[Tensor, Tensor]:
        """The Nesterov momentum of each parameter that has a gradient; updates the buffers. It is 0 if the gradient is,
        as that of an expert without a token: normalized, the old momentum would be a step of full size."""
        having = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in having if p.grad is not None]
        if not having:
            return {}
        for p in having:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        kept = [self.state[p]["momentum_buffer"] for p in having]
        torch._foreach_lerp_(kept, gradients, 1 - MOMENTUM)
        updates = torch._foreach_lerp(gradients, kept, MOMENTUM)
        torch._foreach_mul_(updates, [norm.sign() for norm in torch._foreach_norm(gradients)])
        return dict(zip(having, updates, strict=True))

    def _turn(self, matrices: list[Tensor], updates: list[Tensor], lr: float | Tensor, decay: float | Tensor) -> None:
        alone, dtype = len(matrices) == 1, matrices[0].dtype
        turned = orthogonal((updates[0] if alone else torch.stack(updates)).to(self.dtype))
        steps = turned.to(dtype) * (SIZE * max(matrices[0].shape) ** 0.5 * lr)
        torch._foreach_mul_(matrices, 1 - lr * decay)
        torch._foreach_sub_(matrices, [steps] if alone else list(steps.unbind()))


def orthogonal(x: Tensor) -> Tensor:
    """U·Vᵀ for x = U·S·Vᵀ by Newton-Schulz, approximately: singular values are 0.7 to 1.2 instead of 1.

    x: (rows, columns), or a stack (n, rows, columns). Source: Jordan et al., "Muon", 2024.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.square().sum((-2, -1), keepdim=True, dtype=torch.float32).sqrt().clamp(min=1e-7).to(x.dtype)
    add = torch.baddbmm if x.dim() == 3 else torch.addmm
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
