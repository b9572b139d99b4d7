"""The transformer, read from top to bottom like the paper.

Shape letters: B batch, T tokens, D width of the residual stream, H query heads, G key/value
heads, E head size, F width of the feed-forward network, V vocabulary. `q_BHTE` has shape
(B, H, T, E).

Parameter names are the roles of export/FORMAT.md: `layers.{i}.q.weight` is role q of layer i,
`embedding.weight`, `final_norm.weight`, and `head.weight` when it is not the embedding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitnet.bitlinear import BitLinear, project
from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet.layers import ACTIVATIONS, RMSNorm, gated, rotate
from bitnet.masks import attention_mask, positions
from bitnet.quant import embedding_rows, output_logits


def unsupported(config: ModelConfig) -> list[str]:
    """What `Transformer` cannot build of a configuration, by name; empty when it can build all."""
    limits: dict[str, tuple[object, ...]] = {
        "input": ("tokens",),
        "mask": ("causal",),
        "attention_softcap": (0.0,),
        "norm": ("rms",),
        "norm_bias": (False,),
        "n_experts": (0,),
        "position": ("rope",),
        "head_bias": (False,),
        "head_format": ("int8", "f16", "f32"),
    }
    return [
        f"{field} = {getattr(config, field)!r} (only {' or '.join(repr(value) for value in allowed)})"
        for field, allowed in limits.items()
        if getattr(config, field) not in allowed
    ]


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians that pair i of a head turns per position: fp32 (rope_dim/2,), scaling included.

    Computed in fp64 and rounded once. Sources: arXiv 2104.09864; position interpolation
    arXiv 2306.15595; Llama 3.1; YaRN arXiv 2309.00071 eq. 16-23.
    """
    dim, base, factor = config.rope_dim, config.rope_theta, config.rope_factor
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = config.rope_original_context * frequency / (2 * math.pi)  # over the context it was trained on
    if config.rope_scaling == "linear":
        frequency = frequency / factor
    elif config.rope_scaling == "llama3":  # slow pairs are interpolated, fast ones kept, smooth between
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * keep + frequency / factor * (1 - keep)
    elif config.rope_scaling == "yarn":  # the same, linear in the index of the pair instead of its turns

        def pair_that_turns(times: float) -> float:
            return dim * math.log(config.rope_original_context / (times * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(pair_that_turns(config.rope_beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(config.rope_beta_slow)), dim - 1)
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 0.001)).clamp(0, 1)
        frequency = frequency * keep + frequency / factor * (1 - keep)
    return frequency.float()


def frequency_tables(config: ModelConfig) -> dict[str, Tensor]:
    """Every table of `rope_frequencies` that the packed file stores, by role (export/FORMAT.md §3)."""
    tables = {"rope_frequencies": rope_frequencies(config)}
    if config.global_every:
        tables["rope_local_frequencies"] = rope_frequencies(config.of_layer(0))
    return tables


def rope_tables(config: ModelConfig, n_tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, rope_dim/2). The angle is an fp32 product, position · frequency."""
    position = torch.arange(n_tokens, dtype=torch.float32)
    angle = torch.outer(position, rope_frequencies(config)).double()
    cos, sin = angle.cos() * config.rope_attention_factor, angle.sin() * config.rope_attention_factor
    return cos.to(like), sin.to(like)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda x: x[:, -1], "mean": lambda x: x.mean(1), "first": lambda x: x[:, 0],
}  # fmt: skip


def pooled(hidden_BTD: Tensor, pooling: str) -> Tensor:
    """One vector of length 1 for each text, (B, D), of its hidden states."""
    return F.normalize(POOLS[pooling](hidden_BTD), dim=-1)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)).

    config: what the model's says of this layer, `ModelConfig.of_layer`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d, f, e = config.dim, config.ffn_dim, config.head_dim
        queries, keys = config.n_heads * e, config.n_kv_heads * e

        def norm(dim: int, wanted: bool = True) -> nn.Module:
            return RMSNorm(dim, config.norm_eps) if wanted else nn.Identity()

        def linear(role: str, inputs: int, outputs: int, bias: bool) -> nn.Linear:
            if role in config.ternary:
                return BitLinear(inputs, outputs, bias, config.weight_scale)
            return nn.Linear(inputs, outputs, bias)

        self.attn_norm = norm(d, config.pre_norm)
        self.q = linear("q", d, queries, config.qkv_bias)
        self.k = linear("k", d, keys, config.qkv_bias)
        self.v = linear("v", d, keys, config.qkv_bias)
        self.qkv = nn.Identity()  # the three of them pass here, for whoever watches (`bitnet.distill`)
        self.q_norm = norm(e, config.qk_norm)
        self.k_norm = norm(e, config.qk_norm)
        self.attn_sub_norm = norm(queries, config.sub_norm)
        self.o = linear("o", queries, d, config.o_bias)
        self.attn_post_norm = norm(d, config.post_norm)

        self.ffn_norm = norm(d, config.pre_norm)
        if config.ffn == "gated":
            self.gate = linear("gate", d, f, config.ffn_bias)
        self.up = linear("up", d, f, config.ffn_bias)
        self.ffn_sub_norm = norm(f, config.sub_norm)
        self.down = linear("down", f, d, config.ffn_bias)
        self.ffn_post_norm = norm(d, config.post_norm)

        for role in TERNARY_LINEARS if config.linear_norm else ():
            if hasattr(self, role):
                setattr(self, f"{role}_linear_norm", norm(getattr(self, role).in_features))

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        scale = self.config.residual_scale
        y_BTD = self.attn_post_norm(self.attention(self.attn_norm(x_BTD), cos, sin, documents_BT))
        x_BTD = torch.add(x_BTD, y_BTD, alpha=scale)
        return torch.add(x_BTD, self.ffn_post_norm(self.feed_forward(self.ffn_norm(x_BTD))), alpha=scale)

    def own_norm(self, role: str, x: Tensor) -> Tensor:
        """The norm that linear layer `role` has for itself, with `linear_norm`."""
        y: Tensor = getattr(self, f"{role}_linear_norm")(x) if self.config.linear_norm else x
        return y

    def project(self, x: Tensor, *roles: str) -> tuple[Tensor, ...]:
        """Linear layers of one input, each behind its own norm."""
        layers = [getattr(self, role) for role in roles]
        if self.config.linear_norm:
            return tuple(layer(self.own_norm(role, x)) for role, layer in zip(roles, layers, strict=True))
        return project(x, *layers)

    def attention(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        e, window, n_tokens = self.config.head_dim, self.config.sliding_window, x_BTD.shape[1]
        qkv = self.qkv(self.project(x_BTD, "q", "k", "v"))
        q, k, v = (y.unflatten(-1, (-1, e)).transpose(1, 2) for y in qkv)
        q_BHTE = rotate(self.q_norm(q), cos, sin)
        k_BGTE = rotate(self.k_norm(k), cos, sin)
        mask = attention_mask(n_tokens, window, documents_BT, q_BHTE)
        scale, causal = self.config.attention_scale, mask is None
        with torch.autocast("cpu", enabled=False):  # fp32 is faster on CPUs up to 512 tokens, and needs no casts
            y_BHTE = F.scaled_dot_product_attention(
                q_BHTE, k_BGTE, v.to(q_BHTE), mask, is_causal=causal, scale=scale, enable_gqa=True
            )
        y_BTHE = self.attn_sub_norm(y_BHTE.transpose(1, 2).flatten(2))
        out_BTD: Tensor = self.o(self.own_norm("o", y_BTHE))
        return out_BTD

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        if self.config.ffn == "gated":
            gate_BTF, up_BTF = self.project(x_BTD, "gate", "up")
            h_BTF = gated(self.config.activation, gate_BTF, up_BTF)
        else:
            (up_BTF,) = self.project(x_BTD, "up")
            h_BTF = ACTIVATIONS[self.config.activation](up_BTF)
        out_BTD: Tensor = self.down(self.own_norm("down", self.ffn_sub_norm(h_BTF)))
        return out_BTD


class Transformer(nn.Module):
    """A causal decoder; without a head, a model that turns a text into one vector (`embed`).

    Raises ValueError naming every option of `config` it cannot build.

    `Transformer(config).double()` is a reference in fp64 around the same quantizers.
    documents: int (B, T), when a row holds several texts: equal numbers in a row for the tokens of one. A
    token sees its own text only, at the positions it would have alone.
    recompute: keep only the input of each layer for the backward pass, and compute the layer there again.
    """

    amount: float | Tensor = 1.0
    recompute = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        problems = unsupported(config)
        if problems:
            raise ValueError("this model cannot be built for training: " + "; ".join(problems))
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config.of_layer(i)) for i in range(config.n_layers))
        self.final_norm = RMSNorm(config.dim, config.norm_eps)
        own_head = config.has_head and not config.tie_embeddings
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if own_head else None
        self.init_weights()

    def init_weights(self) -> None:
        """Normal weights, gains 1, biases 0.

        Ternary codes do not depend on the deviation, but the learning rate counts in its units,
        and γ does: o and down begin small, so that the token itself, of size D**-0.5, is not
        drowned in the residual stream by what random layers add to it. (Against 0.02 everywhere:
        5.3 nats instead of 5.8 after 150,000 tokens, three layers of width 128.)
        """
        small = 0.02 / (2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                role = name.split(".")[-2]
                std = {"embedding": self.config.dim**-0.5, "o": small, "down": small}.get(role, 0.02)
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @contextlib.contextmanager
    def partly_quantized(self, amount: float) -> Iterator[None]:
        """Inside, every quantizer Q computes v + amount·(Q(v) − v): 0 is the float model, 1 the quantized one.

        With `recompute` the backward pass has to be inside, too.
        """
        value = 1.0 if amount == 1 else torch.tensor(amount, device=self.embedding.weight.device)
        parts: list[Transformer | BitLinear] = [self]
        parts += [module for module in self.modules() if isinstance(module, BitLinear)]
        try:
            for part in parts:
                part.amount = value
            yield
        finally:
            for part in parts:
                part.amount = 1.0

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, (B, T, D)."""
        config = self.config
        n_tokens = tokens_BT.shape[1]
        if n_tokens > config.max_context:
            raise ValueError(f"{n_tokens} tokens do not fit the context of {config.max_context}")
        rows_BTD = embedding_rows(tokens_BT, self.embedding.weight, config.head_format, self.amount)
        x_BTD = config.embedding_scale * rows_BTD
        of_layers = [config.of_layer(i) for i in range(config.n_layers)]
        tables = {of_layer: rope_tables(of_layer, n_tokens, like=x_BTD) for of_layer in set(of_layers)}
        if documents_BT is not None:
            places = positions(documents_BT)[:, None]  # the same for all heads
            tables = {of_layer: (cos[places], sin[places]) for of_layer, (cos, sin) in tables.items()}
        for layer, of_layer in zip(self.layers, of_layers, strict=True):
            inputs = x_BTD, *tables[of_layer], documents_BT
            if self.recompute and torch.is_grad_enabled():
                x_BTD = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD = layer(*inputs)
        normed_BTD: Tensor = self.final_norm(x_BTD)
        return normed_BTD

    def embed(self, tokens_BT: Tensor, pooling: str = "") -> Tensor:
        """One vector of length 1 for each text, (B, D). pooling: "last", "mean" or "first"; "": the model's own."""
        pooling = pooling or self.config.pooling
        if pooling not in POOLS:
            raise ValueError(f"pooling is {pooling!r}, expected one of {', '.join(POOLS)}")
        return pooled(self.hidden(tokens_BT), pooling)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each position. Raises ValueError without a head."""
        config = self.config
        if not config.has_head:
            raise ValueError("this model has no head and so no logits; use embed or hidden")
        head = self.embedding if self.head is None else self.head
        logits_BTV = output_logits(self.hidden(tokens_BT, documents_BT), head.weight, config.head_format, self.amount)
        if config.logit_softcap:
            logits_BTV = config.logit_softcap * torch.tanh(logits_BTV / config.logit_softcap)
        return logits_BTV

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token."""
        return F.cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())
