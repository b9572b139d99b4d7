"""RoPE scaling of a GGUF file as options of ModelConfig."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_export.foreign.source import Floats, SourceError

from .container import Gguf

_FACTORS = "rope_freqs.weight"
_CLOSE = 1e-5  # relative: converters compute the factors in fp32, rounding each of some ten steps by 6e-8


def rope_options(file: Gguf, arch: str, dim: int) -> dict[str, Any]:
    """rope_theta and the fields of rope_scaling. dim: rotated dimensions of a head."""
    theta = _number(file, f"{arch}.rope.freq_base", 10_000.0, above=1)
    scaling = f"{arch}.rope.scaling."
    kind = file.value(scaling + "type", str, "linear")  # as in llama.cpp: a factor without a type is enough
    factor = _number(file, scaling + "factor", _number(file, f"{arch}.rope.scale_linear", 1.0))
    attention = _number(file, scaling + "attn_factor", 1.0)
    if kind != "yarn" and attention != 1:  # llama.cpp multiplies by it whatever the type is
        raise SourceError(f"{scaling}attn_factor is {attention} with type = {kind!r:.80}, expected 1 or type = 'yarn'")
    if _FACTORS in file.tensors:
        if kind not in ("none", "linear") or (kind == "linear" and factor != 1):
            raise SourceError(
                f"RoPE is scaled twice, by {scaling}type = {kind!r:.80} with factor {factor} and by the tensor "
                f"{_FACTORS}; expected one of them"
            )
        return {"rope_theta": theta, **_llama3(file, theta, dim)}
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_theta": theta}
    if kind == "linear":
        return {"rope_theta": theta, "rope_scaling": "linear", "rope_factor": factor}
    if kind != "yarn":
        raise SourceError(f"{scaling}type is {kind!r:.80}, expected none, linear or yarn")
    if factor < 1:
        raise SourceError(f"{scaling}factor is {factor}, expected at least 1")
    if (more := file.value(scaling + "yarn_log_multiplier", float, 0.0)) != 0:
        raise SourceError(f"{scaling}yarn_log_multiplier is {more}, expected no such key")
    original = scaling + "original_context_length"
    if original not in file.metadata:  # as in llama.cpp
        original = f"{arch}.context_length"
    context = file.value(original, int)
    if not 1 <= context <= 1 << 24:
        raise SourceError(f"{original} is {context}, expected 1 to {1 << 24}")
    return {
        "rope_theta": theta,
        "rope_scaling": "yarn",
        "rope_factor": factor,
        "rope_original_context": context,
        "rope_beta_fast": _number(file, scaling + "yarn_beta_fast", 32.0),
        "rope_beta_slow": _number(file, scaling + "yarn_beta_slow", 1.0),
        "rope_attention_factor": attention * (1 + 0.1 * math.log(factor)),
    }


def _number(file: Gguf, key: str, default: float, *, above: float = 0) -> float:
    value = file.value(key, float, default)
    if not (math.isfinite(value) and value > above):
        raise SourceError(f"{key} is {value}, expected a finite number above {above}")
    return value


def _llama3(file: Gguf, theta: float, dim: int) -> dict[str, Any]:
    """The parameters of Llama 3's rule, of which a GGUF stores only the resulting table of factors.

    Its frequencies are those of RoPE divided by the table. All published models have low = 1 and high = 4; the
    factor is the largest in the table, the original context a power of two, or one computed from a factor that is
    neither 1 nor the largest.
    """
    tensor = file.tensor(_FACTORS)
    if not isinstance(tensor, Floats) or tensor.shape != (dim // 2,):
        raise SourceError(f"tensor {_FACTORS} has shape {list(tensor.shape)}, expected {[dim // 2]} floats")
    factors = tensor.all().astype(np.float64)
    if (factors == 1).all():
        return {}
    options = {"rope_scaling": "llama3", "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
    factor = float(factors.max())
    if factor > 1:  # false for NaN
        for context in (*(1 << power for power in range(25)), *_contexts(factors, theta, dim)):
            if np.allclose(_llama3_factors(theta, dim, factor, context), factors, rtol=_CLOSE, atol=0):
                return options | {"rope_factor": factor, "rope_original_context": context}
    raise SourceError(
        f"tensor {_FACTORS} does not hold the factors of Llama 3's RoPE scaling, the only ones that are read"
    )


def _contexts(factors: NDArray[np.float64], theta: float, dim: int) -> list[int]:
    """Original contexts computed from factors between the least and the largest."""
    factor, waves = factors.max(), 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
    between = (factors > 1) & (factors < factor)
    keep = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    found = np.rint((1 + (4 - 1) * keep) * waves[between])
    return [int(context) for context in dict.fromkeys(found) if 1 <= context <= 1 << 24]


def _llama3_factors(theta: float, dim: int, factor: float, context: int) -> NDArray[np.float64]:
    turns = context * theta ** (-np.arange(0, dim, 2) / dim) / (2 * math.pi)
    keep = np.clip((turns - 1) / (4 - 1), 0, 1)
    return 1 / (keep + (1 - keep) / factor)
