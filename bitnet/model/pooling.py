"""Pooling of the states of a text or an image to one vector. Shape letters as in `bitnet.model.transformer`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.model.layers import ACTIVATIONS, norm_of
from bitnet.model.masks import begins

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda x: x[:, -1], "mean": lambda x: x.mean(1), "first": lambda x: x[:, 0],
}  # fmt: skip


def gathered(hidden_BTD: Tensor, pool: Callable[[Tensor], Tensor], documents_BT: Tensor | None) -> Tensor:
    """The pooled hidden states of each text, (B, D): those of the first document of each row."""
    if documents_BT is None:
        return pool(hidden_BTD)
    lengths = (begins(documents_BT).cumsum(1) == 1).sum(1).tolist()
    return torch.cat([pool(row[None, :n]) for row, n in zip(hidden_BTD, lengths, strict=True)])


class Pool(nn.Module):
    """Attention pooling with one learned query, the probe: a vector for each image or text (B, D).

    y = o · attention(q · probe, k · h, v · h), then y + down · act(up · norm(y)). None of it is quantized.
    Source: the MAP head of arXiv 2106.04560.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d, heads, f = config.dim, config.n_heads * config.head_dim, config.ffn_dim
        self.probe = nn.Parameter(torch.empty(d))
        self.q, self.k, self.v = (nn.Linear(d, heads, config.qkv_bias) for _ in range(3))
        self.o = nn.Linear(heads, d, config.o_bias)
        self.norm = norm_of(config, d)
        self.up = nn.Linear(d, f, config.ffn_bias)
        self.down = nn.Linear(f, d, config.ffn_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        probe_B1D = self.probe.expand(len(x_BTD), 1, -1)
        q, k, v = self.q(probe_B1D), self.k(x_BTD), self.v(x_BTD)
        q, k, v = (y.unflatten(-1, (self.config.n_heads, -1)).transpose(1, 2) for y in (q, k, v))
        y_BH1E = F.scaled_dot_product_attention(q, k, v, scale=self.config.attention_scale)
        y_BD = self.o(y_BH1E.flatten(1))
        out: Tensor = y_BD + self.down(ACTIVATIONS[self.config.activation](self.up(self.norm(y_BD))))
        return out
