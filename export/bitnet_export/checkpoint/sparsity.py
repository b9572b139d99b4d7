"""Decides when `up` and `down` are stored in lines (FORMAT.md §4), so that the engine reads only relevant ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.packed import encodings
from bitnet_export.packed.encodings import Encoding

from .findings import ZeroInputs
from .real_text import mask_token_of, real_tokens
from .scoring import texts_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bitnet.model.transformer import Transformer
    from bitnet.train.checkpoint import Checkpoint

RECTIFIERS = ("relu2", "relu")
TOKENS = 2048  # of real text, on which zeros are counted
GATHERED = 0.7  # speed at which listed lines come from memory; one stream is 1. Measured: 0.65 to 0.8
WORTH = 0.75  # share of the time for all of up and down that lines may take at most
SMALLEST = 32 << 20  # bytes of up and down; fewer stay in a cache, and little is gained


def rectified(config: ModelConfig) -> bool:
    """Whether the FFN multiplies by exact zeros, in matrices that can be stored in lines."""
    if config.input == "images" or config.ffn != "gated" or config.n_experts:  # rows of an image need all lines
        return False
    return (
        config.activation in RECTIFIERS
        and set(encodings.LINES) <= set(config.ternary)
        and config.weight_scale != "group"
    )


def require_zeros(config: ModelConfig, source: object) -> None:
    """Raises ValueError naming the source: lines of `up` and `down` would be no faster for the engine."""
    if not set(encodings.LINES) & set(config.ternary):
        raise ValueError(f"sparse stores ternary `up` and `down` by lines, those of {source} are floats; leave it out")
    if config.activation not in RECTIFIERS:
        raise ValueError(
            f"sparse leaves out what relu² makes 0, and {source} has activation = {config.activation!r}; "
            "leave the option out"
        )
    if config.weight_scale == "group":
        raise ValueError(f"sparse stores lines with one scale, and weights of {source} have one a group; leave it out")


def zero_inputs(checkpoint: Checkpoint) -> ZeroInputs:
    """The share of zero inputs of `down` in a checkpoint, on a little real text."""
    import torch

    model = checkpoint.model
    tokens, _ = real_tokens(checkpoint, TOKENS)
    length = min(model.config.max_context, len(tokens))
    windows = tokens[: len(tokens) // length * length].reshape(-1, length)
    texts = texts_of(model.config, windows, mask_token_of(checkpoint))
    with counting_zero_inputs(model) as counts, torch.inference_mode():
        model.hidden(torch.from_numpy(texts.inputs))
    return ZeroInputs.of(counts)


@contextmanager
def counting_zero_inputs(model: Transformer) -> Iterator[NDArray[np.int64]]:
    """Count the inputs of each layer's `down`, of all experts together, in the forward passes of the block.

    Yields (3, n_layers): zero before quantization, zero after it, all.
    """
    from bitnet.quant import activation_codes

    counts = np.zeros((3, model.config.n_layers), np.int64)
    quantized = "down" in model.config.ternary

    def counter(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            (x,) = inputs
            codes = activation_codes(x)[0] if quantized else x
            counts[:, layer] += int((x == 0).sum()), int((codes == 0).sum()), x.numel()

        return count

    handles = [
        module.register_forward_pre_hook(counter(i))
        for i, layer in enumerate(model.layers)
        for name, module in layer.named_modules()
        if name.split(".")[-1] == "down"  # of each expert
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def pays(config: ModelConfig, zeros: ZeroInputs, body: Encoding = encodings.TERNARY_2BIT) -> bool:
    """Whether lines are faster than the encoding `body`. A row of `up` is skipped where the input of `down` is zero
    before it is quantized, a column of `down` where it is zero after."""
    shape = config.ffn_dim, config.dim
    alive = (1 - sum(share) / len(share) for share in (zeros.before, zeros.after))
    lines = sum(alive) * encodings.LINES["up"].size(*shape) / GATHERED
    plain = body.size(*shape) + body.size(*shape[::-1])
    return config.n_layers * plain >= SMALLEST and lines <= WORTH * plain
