"""The feed-forward network of a layer, or a mixture of experts, each of which computes only its own tokens."""

from __future__ import annotations

from bitnet_export.packed.records import NONE

from .ops import Value
from .parts import Parts


def feed_forward(parts: Parts, x: Value, layer: int) -> Value:
    """x: (B, T, D), normed; returns the addition to the residual stream."""
    network = _mixture if parts.config.n_experts else _network
    return network(parts, x, layer)


def _network(parts: Parts, x: Value, layer: int, expert: int = NONE) -> Value:
    """down(act(gate) · up), or down(act(up))."""
    if parts.config.ffn == "gated":
        h = parts.activation(parts.project(x, "gate", layer, expert)) * parts.project(x, "up", layer, expert)
    else:
        h = parts.activation(parts.project(x, "up", layer, expert))
    return parts.project(parts.norm(h, "ffn_sub_norm", layer, expert), "down", layer, expert)


def _mixture(parts: Parts, x_BTD: Value, layer: int) -> Value:
    """Σ share · expert(x) over the k experts of a token, as in bitnet/model/block.py.

    There are N·k choices: token n's most probable expert is choice n·k. For ties TopK takes the first.
    An expert without tokens is not run: onnxruntime's reductions return wrong shapes for zero rows.
    """
    g, c = parts.g, parts.config
    k, x = c.experts_per_token, x_BTD.reshape(1, -1, c.dim)  # (1, N, D)
    p = g.op("Softmax", parts.matrices.linear(x, parts.record("router", layer)), axis=-1)
    shares, experts = g.largest(p, k)
    if c.normalize_routing:
        shares = shares / g.op("ReduceSum", shares, [-1], keepdims=1)
    taken = experts.reshape(-1)
    outputs, choices = [], []
    for expert in range(c.n_experts):
        mine = g.op("Squeeze", g.op("NonZero", g.op("Equal", taken, expert)), [0])

        def run(mine: Value = mine, expert: int = expert) -> Value:
            return _network(parts, g.op("Gather", x, g.op("Div", mine, k), axis=1), layer, expert)

        def nothing() -> Value:
            return g.op("ConstantOfShape", [1, 0, c.dim])

        outputs.append(g.either(g.op("Greater", g.op("Size", mine), 0), run, nothing))
        choices.append(mine)
    order = g.op("Unsqueeze", g.op("Concat", *choices, axis=0), [-1])
    by_expert = g.op("Squeeze", g.op("Concat", *outputs, axis=1), [0])  # (N·k, D)
    y = g.op("ScatterND", by_expert, order, by_expert).reshape(1, -1, k, c.dim)  # by choice: all are overwritten
    y = g.op("ReduceSum", y * g.op("Unsqueeze", shares, [-1]), [2], keepdims=0)
    return g.op("Reshape", y, g.op("Shape", x_BTD))
