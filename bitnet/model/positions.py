"""Position encodings: RoPE, which rotates queries and keys, or a vector added to the embedding."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from bitnet.config import ModelConfig
from bitnet.model.masks import Mask, attention_mask, positions


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position by which pair i of a head rotates: fp32 (rope_dim/2,), scaling included.

    Computed in fp64 and rounded once. Sources: arXiv 2104.09864; position interpolation
    arXiv 2306.15595; Llama 3.1; YaRN arXiv 2309.00071 eq. 16-23.
    """
    dim, base, factor = config.rope_dim, config.rope_theta, config.rope_factor
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = config.rope_original_context * frequency / (2 * math.pi)  # rotations over the original context
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
    if config.position != "rope":
        return {}
    tables = {"rope_frequencies": rope_frequencies(config)}
    if config.global_every:
        tables["rope_local_frequencies"] = rope_frequencies(config.of_layer(0))
    return tables


def position_tables(config: ModelConfig) -> dict[str, Tensor]:
    """Tables that training computes and the packed file stores, by tensor name."""
    if config.position == "sinusoidal":
        return {"position.weight": sinusoids(config.max_context, config.dim)}
    return frequency_tables(config)


def rope_tables(config: ModelConfig, n_tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, rope_dim/2), fp32; fp64 for fp64. The angle is an fp32 product, position · frequency."""
    return _rope_tables(config, n_tokens, like.device, torch.promote_types(like.dtype, torch.float32))


@functools.lru_cache(maxsize=8)
def _rope_tables(config: ModelConfig, n_tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cached, because they are computed on the CPU and a GPU would wait for them in every step."""
    with torch.inference_mode(False), torch.device("cpu"):  # one table serves evaluation and training
        position = torch.arange(n_tokens, dtype=torch.float32) + config.first_position
        angle = torch.outer(position, rope_frequencies(config)).double()
        cos, sin = angle.cos() * config.rope_attention_factor, angle.sin() * config.rope_attention_factor
        return cos.to(device, dtype), sin.to(device, dtype)


def places(
    config: ModelConfig,
    x_BTD: Tensor,
    documents_BT: Tensor | None = None,
    prefix_B: Tensor | None = None,
    in_blocks: bool = False,
) -> tuple[Tensor | None, Tensor | None, Mask]:
    """RoPE tables and attention mask of the tokens of x, for layers with this configuration: cos, sin, mask."""
    n_tokens = x_BTD.shape[1]
    mask = attention_mask(config, n_tokens, documents_BT, prefix_B, x_BTD, in_blocks)
    if config.position != "rope":
        return None, None, mask
    cos, sin = rope_tables(config, n_tokens, like=x_BTD)
    if documents_BT is not None:
        at = positions(documents_BT)[:, None]  # the same for all heads
        cos, sin = cos[at], sin[at]
    return cos, sin, mask


def sinusoids(n_positions: int, dim: int) -> Tensor:
    """sin at 2i and cos at 2i + 1 of position / 10000^(2i/dim), fp32 (positions, dim); computed in fp64, rounded once.

    Source: arXiv 1706.03762 §3.5. With an odd dim the last is a sine.
    """
    position = torch.arange(n_positions, dtype=torch.float64)[:, None]
    angle = position * 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    table = torch.empty(n_positions, dim, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()[:, : dim // 2]
    return table.float()
