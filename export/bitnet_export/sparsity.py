"""When `up` and `down` are stored by lines (FORMAT.md §4), so that the engine reads only those that matter."""

from __future__ import annotations

from pathlib import Path

from bitnet.config import ModelConfig

from . import encodings
from .encodings import Encoding
from .report import ZeroInputs

TOKENS = 2048  # of real text, on which zeros are counted
GATHERED = 0.7  # speed at which listed lines come from memory; one stream is 1. Measured: 0.65 to 0.8
WORTH = 0.75  # of the time for all of up and down: no more may be left, or the plain encoding stays
SMALLEST = 32 << 20  # bytes of up and down; fewer stay in a cache, where there is little to win


def rectified(config: ModelConfig) -> bool:
    """Whether the FFN multiplies with exact zeros, in matrices that can be stored by lines."""
    gated = config.ffn == "gated" and config.activation in ("relu2", "relu") and config.n_experts == 0
    return gated and set(encodings.LINES) <= set(config.ternary) and config.weight_scale != "group"


def zero_inputs(folder: Path, config: ModelConfig) -> ZeroInputs:
    """The zero inputs of `down` of a checkpoint on a little real text."""
    import torch

    from bitnet.checkpoint import load_model

    from .verify import counting_zero_inputs, real_tokens

    model = load_model(folder)
    tokens, _ = real_tokens(folder, config.vocab_size, TOKENS)
    length = min(config.max_context, len(tokens))
    with counting_zero_inputs(model) as counts, torch.inference_mode():
        for start in range(0, len(tokens) - length + 1, length):
            model(torch.from_numpy(tokens[None, start : start + length]))
    return ZeroInputs.of(counts)


def pays(config: ModelConfig, zeros: ZeroInputs, body: Encoding = encodings.TERNARY_2BIT) -> bool:
    """Whether lines promise more than they cost, next to the encoding `body`. A row of `up` is left out where the
    input of `down` is zero before it is quantized, a column of `down` where it is zero after."""
    shape = config.ffn_dim, config.dim
    alive = (1 - sum(share) / len(share) for share in (zeros.before, zeros.after))
    lines = sum(alive) * encodings.LINES["up"].size(*shape) / GATHERED
    plain = body.size(*shape) + body.size(*shape[::-1])
    return config.n_layers * plain >= SMALLEST and lines <= WORTH * plain
