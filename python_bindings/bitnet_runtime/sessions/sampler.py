"""Sampling options as the C library takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bitnet_runtime._native import ffi
from bitnet_runtime.defaults import SMALLEST, Sampling, whole
from bitnet_runtime.errors import InvalidParameterError, shown


class Sampler:
    """Sampling options as the C struct, made once for many tokens: `Session.draw`, `advance` and `guess` take it.

    Those of a whole text, such as stop or a schema, decide nothing there.
    """

    def __init__(self, options: Sampling, vocab_size: int, banned: Iterable[int] = ()) -> None:
        """vocab_size: `Model.vocab_size`. banned: tokens that are never chosen."""
        if not isinstance(options, Sampling):
            raise InvalidParameterError(
                f"options is {shown(options)}, expected a Sampling, as in Sampling(temperature=0)", "options"
            )
        vocab_size = whole("vocab_size", vocab_size, 1, 2**31 - 1)
        bias = dict(options.logit_bias or {}) | dict.fromkeys(banned, -math.inf)
        outside = [token for token in bias if token >= vocab_size]
        if outside:
            raise InvalidParameterError(
                f"logit_bias names token {outside[0]}, expected ids from 0 to {vocab_size - 1}", "logit_bias"
            )
        self._arrays = ffi.new("int32_t[]", list(bias)), ffi.new("float[]", list(bias.values()))
        self.struct = ffi.new(
            "bn_sampler *",
            {
                "temperature": options.temperature,
                "top_k": options.top_k,
                "top_p": max(options.top_p, SMALLEST),  # 0 is all of them there
                "min_p": options.min_p,
                "repeat_penalty": options.repeat_penalty,
                "presence_penalty": options.presence_penalty,
                "frequency_penalty": options.frequency_penalty,
                "penalty_window": options.repeat_last_n,
                "n_bias": len(bias),
                "bias_tokens": self._arrays[0],
                "bias_values": self._arrays[1],
            },
        )


def struct_of(sampler: object) -> Any:
    """The C struct of a Sampler. Raises InvalidParameterError: it is something else."""
    if not isinstance(sampler, Sampler):
        raise InvalidParameterError(
            f"sampler is {shown(sampler)}, expected a Sampler: Sampler(Sampling(temperature=0), model.vocab_size)",
            "sampler",
        )
    return sampler.struct
