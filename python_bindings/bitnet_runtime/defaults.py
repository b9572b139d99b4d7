"""How tokens are chosen: the one table of sampling options.

The fields of `Sampling` are the table. Python, the command line and the tests read names,
defaults, ranges, aliases and help texts from here and nowhere else. An explicit argument wins
over the model's own default (the `generation` object of the file), which wins over the table.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitnet_runtime.errors import InvalidParameterError, ModelFormatError


def _option(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    flags: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Any:
    """A row of the table. `open_low`: `low` itself is not allowed."""
    row = {"help": help, "low": low, "high": high, "open_low": open_low, "flags": flags, "aliases": aliases}
    return dataclasses.field(default=default, metadata=row)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Every option of `generate`, `stream` and `chat`, with its default."""

    max_tokens: int | None = _option(
        256, "most tokens to generate; none: until the context is full", low=0, high=2**31 - 1,
        flags=("-n", "--max-tokens"), aliases=("max_new_tokens", "n_predict", "num_predict", "max_completion_tokens"),
    )  # fmt: skip
    temperature: float = _option(
        0.8, "0 takes the most likely token", low=0, high=1e6, flags=("--temp", "--temperature"), aliases=("temp",)
    )
    top_k: int = _option(40, "keep the k most likely tokens; 0: all", low=0, high=2**31 - 1)
    top_p: float = _option(0.95, "keep the smallest set with this much probability", low=0, high=1, open_low=True)
    min_p: float = _option(0.05, "drop what is less likely than this times the best", low=0, high=1)
    repeat_penalty: float = _option(
        1.0, "divides the logits of tokens already seen; 1: off", low=0, high=1e6, open_low=True,
        aliases=("repetition_penalty",),
    )  # fmt: skip
    repeat_last_n: int = _option(
        64, "how many of the latest tokens the penalties look at; -1: all", low=-1, high=2**31 - 1,
        aliases=("penalty_window",),
    )  # fmt: skip
    presence_penalty: float = _option(0.0, "subtracted once from tokens already seen", low=-100, high=100)
    frequency_penalty: float = _option(0.0, "subtracted per occurrence", low=-100, high=100)
    seed: int | None = _option(
        None, "start of the random sequence; none: random, and reported", low=0, high=2**64 - 1,
        flags=("-s", "--seed"), aliases=("rng_seed",),
    )  # fmt: skip
    stop: tuple[str, ...] = _option(
        (), "text that ends the answer and is not part of it", aliases=("stop_strings", "until")
    )
    draft: int = _option(
        0, "guess so many tokens from repetitions in the text; same result, faster where it repeats", low=0, high=64
    )
    logit_bias: Mapping[int, float] | None = _option(None, "added to the logit of a token; -inf bans it")


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Sampling)}
ALIASES: dict[str, str] = {alias: name for name, field in FIELDS.items() for alias in field.metadata["aliases"]}
DEFAULTS = Sampling()


def resolve(explicit: Mapping[str, Any], model: Sampling = DEFAULTS) -> Sampling:
    """The options of one call: `explicit` over the model's own over the table.

    Raises InvalidParameterError for an unknown name (with the nearest valid one), for an option
    given twice, and for a value out of range (with the range).
    """
    if not explicit:
        return model
    values: dict[str, Any] = {}
    for given, value in explicit.items():
        name = ALIASES.get(given, given)
        if name not in FIELDS:
            near = difflib.get_close_matches(given, [*FIELDS, *ALIASES], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(FIELDS)}"
            raise InvalidParameterError(f"unknown parameter {given!r}; {hint}", given)
        if name in values:
            raise InvalidParameterError(f"parameter {name!r} is given twice, once as {given!r}", name)
        values[name] = _checked(name, value)
    return dataclasses.replace(model, **values)


def model_defaults(generation: Mapping[str, Any]) -> Sampling:
    """The table with the sampling options of a file's `generation` object; other keys are not ours."""
    known = {key: value for key, value in generation.items() if ALIASES.get(key, key) in FIELDS}
    try:
        return resolve(known)
    except InvalidParameterError as error:
        raise ModelFormatError(f"generation defaults of the file: {error}") from None


def _checked(name: str, value: Any) -> Any:
    """`value` as the type of the field, or InvalidParameterError."""
    if name == "stop":
        return _stop(value)
    if name == "logit_bias":
        return _logit_bias(value)
    field, row = FIELDS[name], FIELDS[name].metadata
    integer = isinstance(field.default, int) or name == "seed"
    if value is None and name in ("max_tokens", "seed"):
        return None
    low, high = row["low"], row["high"]
    kind = "an integer" if integer else "a number"
    ok = hasattr(value, "__index__") if integer else isinstance(value, (int, float)) or hasattr(value, "__float__")
    if ok and not isinstance(value, (bool, str)):
        number = value.__index__() if integer else float(value)
        if low <= number <= high and not (row["open_low"] and number == low):
            return number
    span = f"above {low:g} and at most {high:g}" if row["open_low"] else f"from {low:g} to {high:g}"
    if integer:
        span = f"from {low} to {high}"
    raise InvalidParameterError(f"{name} is {value!r}, expected {kind} {span}", name)


def _stop(value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts):
        return tuple(texts)
    raise InvalidParameterError(f"stop is {value!r}, expected a text or a list of texts, none of them empty", "stop")


def _logit_bias(value: Any) -> Mapping[int, float] | None:
    if value is None:
        return None
    try:
        bias = {token.__index__(): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError):
        bias = {-1: 0.0}
    if all(token >= 0 and number < math.inf for token, number in bias.items()):
        return bias
    raise InvalidParameterError(
        f"logit_bias is {value!r}, expected a dictionary from token ids to finite numbers or -inf", "logit_bias"
    )
