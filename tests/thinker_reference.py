"""An independent implementation of the Thinker, as the reference for converted checkpoints.

Formulas: pre-norm with RMSNorm, eps 1e-5; one matrix for q, k and v, or three with half as many KV heads; RoPE of
halves, or of neighbours, as is often taught; SwiGLU, or GELU with biases; the best two of eight experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rope(x: Tensor, theta: float, interleaved: bool) -> Tensor:
    """x: (B, heads, T, size). Rotates complex numbers, independent of the method under test."""
    tokens, size = x.shape[-2:]
    angle = torch.outer(torch.arange(tokens), theta ** (-torch.arange(0, size, 2) / size))
    if interleaved:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


class Attention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, self.heads = c["d_model"], c["n_heads"]
        self.size, self.groups, self.c = d // self.heads, self.heads, c
        if c["use_gqa"]:
            self.groups = max(1, self.heads // 2)
            self.q = nn.Linear(d, d, bias=False)
            self.k, self.v = (nn.Linear(d, self.groups * self.size, bias=False) for _ in range(2))
        else:
            self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q(x), self.k(x), self.v(x)) if self.c["use_gqa"] else self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in parts)
        q, k = (rope(y, self.c["rope_theta"], self.c.get("rope_interleaved", False)) for y in (q, k))
        k, v = (y.repeat_interleave(self.heads // self.groups, 1) for y in (k, v))
        scores = q @ k.mT / math.sqrt(self.size)
        causal = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        y = scores.masked_fill(~causal, -math.inf).softmax(-1) @ v
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Network(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, ff, self.gated = c["d_model"], c["d_ff"], c["use_swiglu"]
        if self.gated:
            self.gate_proj, self.up_proj = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
            self.down_proj = nn.Linear(ff, d, bias=False)
        else:
            self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate = self.gate_proj(x)
            out: Tensor = self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))
        else:
            out = self.fc2(F.gelu(self.fc1(x)))
        return out


class Mixture(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.taken = c["num_experts_per_tok"]
        self.router = nn.Linear(c["d_model"], c["num_experts"], bias=False)
        self.experts = nn.ModuleList(Network(c) for _ in range(c["num_experts"]))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(self.taken, -1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(
            -1, chosen, shares / shares.sum(-1, keepdim=True)
        )
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + weights[..., i : i + 1] * expert(x)
        return out


class Block(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = Norm(c["d_model"]), Attention(c), Norm(c["d_model"])
        if c["use_moe"]:
            self.moe = Mixture(c)
        else:
            self.mlp = Network(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + (self.moe if hasattr(self, "moe") else self.mlp)(self.norm2(x))
        return out


class Thinker(nn.Module):
    def __init__(self, c: dict[str, Any], head_bias: bool = False) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(c["vocab_size"], c["d_model"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["n_layers"]))
        self.norm = Norm(c["d_model"])
        self.lm_head = nn.Linear(c["d_model"], c["vocab_size"], bias=head_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits
