"""Sampling options as the C library takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bitnet_runtime._native import ffi
from bitnet_runtime.defaults import SMALLEST, Sampling, whole
from bitnet_runtime.errors import InvalidParameterError, shown
from bitnet_runtime.formats import held_to


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


def ends_of(options: Sampling, own: frozenset[int], vocab_size: int) -> frozenset[int]:
    """Tokens that end an answer. own: those of the model. Raises InvalidParameterError: the options contradict."""
    if (options.min_tokens or options.ignore_eos) and held_to(options):
        name = "min_tokens" if options.min_tokens else "ignore_eos"
        raise InvalidParameterError(
            f"{name} is given beside a format or calls that have to come, which say where it ends; leave one out", name
        )
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise InvalidParameterError(
            f"min_tokens is {options.min_tokens}, expected at most max_tokens, which is {options.max_tokens}",
            "min_tokens",
        )
    if outside := [token for token in options.stop_token_ids if token >= vocab_size]:
        raise InvalidParameterError(
            f"stop_token_ids has {outside[0]}, expected ids from 0 to {vocab_size - 1}", "stop_token_ids"
        )
    return frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else own)


def struct_of(sampler: object) -> Any:
    """The C struct of a Sampler. Raises InvalidParameterError: it is something else."""
    if not isinstance(sampler, Sampler):
        raise InvalidParameterError(
            f"sampler is {shown(sampler)}, expected a Sampler: Sampler(Sampling(temperature=0), model.vocab_size)",
            "sampler",
        )
    return sampler.struct
