"""One layer of the transformer: attention, then a feed-forward network or a mixture of experts (MoE).

Shape letters as in `bitnet.model.transformer`, and N = B·T tokens, X experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from bitnet.bitlinear import BitLinear, FloatLinear, project
from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet.model.attention import attention_in_bf16, attention_in_blocks, bf16_attention
from bitnet.model.layers import ACTIVATIONS, gated, norm_of, rotate
from bitnet.model.masks import Mask


class Linears(nn.Module):
    """Linear layers named by role, each ternary where the configuration says so."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def norm(self, dim: int, wanted: bool = True) -> nn.Module:
        return norm_of(self.config, dim) if wanted else nn.Identity()

    def linear(self, role: str, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        if role in self.config.ternary:
            rank = self.config.adapter_rank if role in self.config.adapters else 0
            return BitLinear(inputs, outputs, bias, self.config.weight_scale, rank)
        return FloatLinear(inputs, outputs, bias)

    def add_linear_norms(self) -> None:
        """With `linear_norm`, a norm for each linear layer that exists."""
        for role in TERNARY_LINEARS if self.config.linear_norm else ():
            if hasattr(self, role):
                setattr(self, f"{role}_linear_norm", self.norm(getattr(self, role).in_features))

    def own_norm(self, role: str, x: Tensor) -> Tensor:
        """x through the norm of linear layer `role`, if the model has `linear_norm`."""
        y: Tensor = getattr(self, f"{role}_linear_norm")(x) if self.config.linear_norm else x
        return y

    def project(self, x: Tensor, *roles: str) -> tuple[Tensor, ...]:
        """Linear layers on the same input, each after its own norm."""
        layers = [getattr(self, role) for role in roles]
        if self.config.linear_norm:
            return tuple(layer(self.own_norm(role, x)) for role, layer in zip(roles, layers, strict=True))
        return project(x, *layers)

    def add_feed_forward(self) -> None:
        d, f, bias = self.config.dim, self.config.ffn_dim, self.config.ffn_bias
        if self.config.ffn == "gated":
            self.gate = self.linear("gate", d, f, bias)
        self.up = self.linear("up", d, f, bias)
        self.ffn_sub_norm = self.norm(f, self.config.sub_norm)
        self.down = self.linear("down", f, d, bias)

    def feed_forward(self, x: Tensor) -> Tensor:
        """down(act(gate) · up), or down(act(up)). x: (..., D); returns the same shape."""
        if self.config.ffn == "gated":
            gate, up = self.project(x, "gate", "up")
            h = gated(self.config.activation, gate, up)
        else:
            (up,) = self.project(x, "up")
            h = ACTIVATIONS[self.config.activation](up)
        h = self.own_norm("down", self.ffn_sub_norm(self.dropped(h)))
        out: Tensor = self.down(h)
        return out

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout) if self.training and self.config.dropout else x


class Expert(Linears):
    """One of the feed-forward networks of a mixture-of-experts layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.add_feed_forward()
        self.add_linear_norms()

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.feed_forward(x_ND)


def routes(config: ModelConfig, logits_NX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The experts of each token, most probable first, (N, k); their shares, (N, k); all shares, (N, X).

    p = softmax over all experts; ties go to the first. The shares are the values of p, with `normalize_routing` divided
    by their sum. Source: arXiv 2401.04088 (whose softmax over the chosen experts is the same), 2101.03961.
    """
    p_NX = logits_NX.softmax(-1)
    sorted_NX, experts_NX = p_NX.sort(dim=-1, descending=True, stable=True)
    shares_NK, experts_NK = sorted_NX[:, : config.experts_per_token], experts_NX[:, : config.experts_per_token]
    if config.normalize_routing:
        shares_NK = shares_NK / shares_NK.sum(-1, keepdim=True)
    return experts_NK, shares_NK, p_NX


class Block(Linears):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)).

    config: the configuration of this layer, `ModelConfig.of_layer`.
    With experts, after a forward pass `balance` is the load-balancing loss (arXiv 2101.03961 eq. 4: 1 when all experts
    are chosen equally often, X at most), and `load` (X,) is each expert's share of the tokens' choices.
    """

    balance: Tensor
    load: Tensor
    attention_weights: Tensor | None = None  # (B, H, T, T) of the last pass, when `keep_weights`
    keep_weights = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d, e = config.dim, config.head_dim
        queries, keys = config.n_heads * e, config.n_kv_heads * e
        after = config.post_norm or config.residual_norm

        self.attn_norm = self.norm(d, config.pre_norm)
        self.q = self.linear("q", d, queries, config.qkv_bias)
        self.k = self.linear("k", d, keys, config.qkv_bias)
        self.v = self.linear("v", d, keys, config.qkv_bias)
        self.qkv = nn.Identity()  # all three pass through it, so that a hook can see them (`bitnet.train.distill`)
        self.q_norm = self.norm(e, config.qk_norm)
        self.k_norm = self.norm(e, config.qk_norm)
        self.attn_sub_norm = self.norm(queries, config.sub_norm)
        self.o = self.linear("o", queries, d, config.o_bias)
        self.attn_post_norm = self.norm(d, after)

        self.ffn_norm = self.norm(d, config.pre_norm)
        if config.n_experts:
            self.router = nn.Linear(d, config.n_experts, bias=False)
            self.experts = nn.ModuleList(Expert(config) for _ in range(config.n_experts))
        else:
            self.add_feed_forward()
        self.ffn_post_norm = self.norm(d, after)
        self.add_linear_norms()

    def forward(
        self, x_BTD: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Mask = None, text_BT: Tensor | None = None
    ) -> Tensor:
        """cos, sin: (T, rope_dim/2), or (B, 1, T, ...); None without RoPE. mask: see `bitnet.model.masks`. text: as in
        `mixture`."""
        x_BTD = self.added(x_BTD, self.attention(self.attn_norm(x_BTD), cos, sin, mask), self.attn_post_norm)
        h_BTD = self.ffn_norm(x_BTD)
        y_BTD = self.mixture(h_BTD, text_BT) if self.config.n_experts else self.feed_forward(h_BTD)
        return self.added(x_BTD, y_BTD, self.ffn_post_norm)

    def added(self, x_BTD: Tensor, y_BTD: Tensor, after: nn.Module) -> Tensor:
        """x + y; a norm after the sublayer, if the model has one, is applied to y or to the sum."""
        y_BTD, scale = self.dropped(y_BTD), self.config.residual_scale
        if self.config.residual_norm:
            out: Tensor = after(torch.add(x_BTD, y_BTD, alpha=scale))
            return out
        return torch.add(x_BTD, after(y_BTD), alpha=scale)

    def attention(self, x_BTD: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Mask = None) -> Tensor:
        qkv = self.qkv(self.project(x_BTD, "q", "k", "v"))
        q, k, v = (y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for y in qkv)
        q_BHTE, k_BGTE = self.q_norm(q), self.k_norm(k)
        if cos is not None and sin is not None:
            q_BHTE, k_BGTE = rotate(q_BHTE, cos, sin), rotate(k_BGTE, cos, sin)
        y_BHTE = self.attend(q_BHTE, k_BGTE, v.to(q_BHTE), mask)
        y_BTHE = self.attn_sub_norm(y_BHTE.transpose(1, 2).flatten(2))
        out_BTD: Tensor = self.o(self.own_norm("o", y_BTHE))
        return out_BTD

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, BlockMask):
            return attention_in_blocks(q_BHTE, k_BGTE, v_BGTE, mask, self.config.attention_scale)
        causal = mask is None and self.config.mask != "bidirectional"
        dropout = self.config.dropout if self.training else 0.0
        plain = not (self.config.attention_softcap or self.keep_weights or dropout)
        in_bf16 = plain and attention_in_bf16(q_BHTE)
        with torch.autocast("cpu", enabled=False):  # the casts are made explicitly, or values stay fp32
            if in_bf16:
                return bf16_attention(q_BHTE, k_BGTE, v_BGTE, mask, causal, self.config.attention_scale)
            return self.attend_in_floats(q_BHTE, k_BGTE, v_BGTE, mask, causal, dropout)

    def attend_in_floats(
        self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> Tensor:
        scale = self.config.attention_scale
        if not self.config.attention_softcap and not self.keep_weights:
            if q_BHTE.is_cuda and (mask is not None or q_BHTE.dtype == torch.float32):
                # Here kernels with linear memory cannot share KV heads; the one that can would write all T·T weights.
                shared = q_BHTE.shape[1] // k_BGTE.shape[1]
                k_BGTE, v_BGTE = (kv.repeat_interleave(shared, 1) for kv in (k_BGTE, v_BGTE))
            return F.scaled_dot_product_attention(
                q_BHTE, k_BGTE, v_BGTE, mask, dropout, is_causal=causal, scale=scale, enable_gqa=True
            )
        group, cap = q_BHTE.shape[1] // k_BGTE.shape[1], self.config.attention_softcap
        scores_BHTT = q_BHTE @ k_BGTE.repeat_interleave(group, 1).mT * scale
        if cap:
            scores_BHTT = cap * torch.tanh(scores_BHTT / cap)
        if causal:
            mask = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=scores_BHTT.device).tril()
        if mask is not None:
            scores_BHTT = scores_BHTT.masked_fill(~mask, -torch.inf)
        weights_BHTT = scores_BHTT.softmax(-1)
        self.attention_weights = weights_BHTT if self.keep_weights else None
        return F.dropout(weights_BHTT, dropout) @ v_BGTE.repeat_interleave(group, 1)

    def mixture(self, x_BTD: Tensor, text_BT: Tensor | None = None) -> Tensor:
        """Σ share · expert(x) over the experts of a token, added in the order of their shares.

        Each expert computes its tokens as one batch. The router is never quantized.
        text: bool, the tokens that `balance` and `load` count, which are not padding; None: all.
        """
        x_ND, k, n_experts = x_BTD.flatten(0, -2), self.config.experts_per_token, self.config.n_experts
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NX = F.linear(x_ND.to(self.router.weight.dtype), self.router.weight)
        experts_NK, shares_NK, p_NX = routes(self.config, logits_NX)
        taken = experts_NK.flatten()
        order = taken.argsort(stable=True)
        counts = torch.bincount(taken, minlength=n_experts)
        counted = slice(None) if text_BT is None else text_BT.flatten()
        chosen = experts_NK[counted].flatten()
        self.load = (torch.bincount(chosen, minlength=n_experts) / chosen.numel()).detach()
        self.balance = n_experts * (self.load * p_NX[counted].mean(0)).sum()
        rows = x_ND[order // k].split(counts.tolist())
        outputs = [expert(part) for expert, part in zip(self.experts, rows, strict=True)]
        y_NKD = torch.cat(outputs)[order.argsort()].unflatten(0, (-1, k))
        y_ND: Tensor = (shares_NK.to(y_NKD)[..., None] * y_NKD).sum(1)
        return y_ND.view_as(x_BTD)
