"""The decoder written again without torch, in fp64, one head at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

Array = NDArray[np.float64]


def ternary(w: Array) -> Array:
    w = w.astype(np.float32)
    gamma = max(np.float32(np.abs(w).astype(np.float64).mean()), np.float32(1e-5))
    return np.asarray(np.clip(np.rint(w / gamma), -1, 1) * np.float64(gamma))


def int8_rows(w: Array) -> Array:
    w = w.astype(np.float32)
    sigma = np.maximum(np.abs(w).max(1, keepdims=True), np.float32(1e-5)) / np.float32(127)
    return np.asarray(np.clip(np.rint(w / sigma), -127, 127) * sigma.astype(np.float64))


def int8_tokens(x: Array) -> Array:
    x = x.astype(np.float32)
    s = np.float32(127) / np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-5))
    return np.asarray(np.clip(np.rint(x * s), -127, 127) / s.astype(np.float64))


TABLES = {"int8": int8_rows, "ternary": ternary}

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "gelu_erf": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
}


def numpy_hidden(config: ModelConfig, weights: dict[str, Array], tokens: list[int], prefix: int = 0) -> Array:
    """(T, D) in fp64, one head at a time."""
    T, E, group = len(tokens), config.head_dim, config.n_heads // config.n_kv_heads

    def norm(x: Array, name: str, there: bool = True) -> Array:
        if not there:
            return x
        x = x - x.mean(-1, keepdims=True) if config.norm == "layer" else x
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weights[f"{name}.weight"]
        return np.asarray(y + weights.get(f"{name}.bias", np.zeros(1)))

    def added(x: Array, y: Array, name: str) -> Array:
        """The residual addition, with what follows a sublayer."""
        if config.residual_norm:
            return norm(x + config.residual_scale * y, name)
        return x + config.residual_scale * norm(y, name, config.post_norm)

    def network(y: Array, at: str) -> Array:
        act, up = ACTIVATIONS[config.activation], linear(y, f"{at}.up")
        h = act(linear(y, f"{at}.gate")) * up if config.ffn == "gated" else act(up)
        return linear(norm(h, f"{at}.ffn_sub_norm", config.sub_norm), f"{at}.down")

    def experts(y: Array, at: str) -> Array:
        """Token by token, expert by expert."""
        out = np.zeros_like(y)
        for t in range(T):
            z = weights[f"{at}.router.weight"] @ y[t]
            p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            chosen = sorted(range(len(p)), key=lambda e: (-p[e], e))[: config.experts_per_token]
            total = sum(p[e] for e in chosen) if config.normalize_routing else 1.0
            for e in chosen:
                out[t] += p[e] / total * network(y[t : t + 1], f"{at}.experts.{e}")[0]
        return out

    def hidden_from(i: int, j: int, window: int) -> bool:
        """Whether token i does not see token j."""
        seen = {"causal": j <= i, "bidirectional": True, "prefix": j <= i or j < prefix}[config.mask]
        return not seen or abs(i - j) >= window

    def linear(x: Array, name: str) -> Array:
        x = norm(x, f"{name}_linear_norm", config.linear_norm)
        return int8_tokens(x) @ ternary(weights[f"{name}.weight"]).T + weights.get(f"{name}.bias", np.zeros(1))

    def turn(x: Array, theta: float) -> Array:
        y = x.copy()
        for t, i in itertools.product(range(T), range(E // 2)):
            angle = float(np.float32(t) * np.float32(theta ** (-2 * i / E)))
            pair = complex(x[t, i], x[t, i + E // 2]) * complex(math.cos(angle), math.sin(angle))
            y[t, i], y[t, i + E // 2] = pair.real, pair.imag
        return y

    x = TABLES[config.head_format](weights["embedding.weight"])[tokens] * config.embedding_scale
    if config.position == "learned":
        x = x + weights["position.weight"][:T]
    if config.position == "sinusoidal":
        for t, i in itertools.product(range(T), range(config.dim)):
            angle = t / 10_000 ** ((i - i % 2) / config.dim)
            x[t, i] += np.float32(math.cos(angle) if i % 2 else math.sin(angle))
    x = norm(x, "embedding_norm", config.embedding_norm)
    for layer in range(config.n_layers):
        at = f"layers.{layer}"
        is_global = config.global_every and layer % config.global_every == config.global_every - 1
        window = config.sliding_window if config.sliding_window and not is_global else T
        local = config.global_every and not is_global
        theta = config.rope_local_theta if local and config.rope_local_theta else config.rope_theta
        y = norm(x, f"{at}.attn_norm", config.pre_norm)
        q, k, v = (linear(y, f"{at}.{role}") for role in "qkv")
        heads = []
        for h in range(config.n_heads):
            qh, kh, vh = (z[:, i * E : (i + 1) * E] for z, i in ((q, h), (k, h // group), (v, h // group)))
            if config.qk_norm:
                qh, kh = norm(qh, f"{at}.q_norm"), norm(kh, f"{at}.k_norm")
            if config.position == "rope":
                qh, kh = turn(qh, theta), turn(kh, theta)
            scores, cap = qh @ kh.T * config.attention_scale, config.attention_softcap
            scores = cap * np.tanh(scores / cap) if cap else scores
            scores[[[hidden_from(i, j, window) for j in range(T)] for i in range(T)]] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ vh)
        y = np.concatenate(heads, axis=-1)
        y = linear(norm(y, f"{at}.attn_sub_norm", config.sub_norm), f"{at}.o")
        x = added(x, y, f"{at}.attn_post_norm")
        y = norm(x, f"{at}.ffn_norm", config.pre_norm)
        x = added(x, experts(y, at) if config.n_experts else network(y, at), f"{at}.ffn_post_norm")
    return norm(x, "final_norm", config.final_norm)


def numpy_logits(config: ModelConfig, weights: dict[str, Array], tokens: list[int], prefix: int = 0) -> Array:
    """(T, V) in fp64."""
    head = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
    hidden = numpy_hidden(config, weights, tokens, prefix)
    logits = int8_tokens(hidden) @ TABLES[config.head_format](head).T + weights.get("head.bias", np.zeros(1))
    cap = config.logit_softcap
    return cap * np.tanh(logits / cap) if cap else logits
