"""Fields of a request: their names and types, and the sampling options among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from bitnet_runtime.answers.logprobs import MOST
from bitnet_runtime.defaults import ALIASES, FIELDS, Sampling, resolve
from bitnet_runtime.errors import nearest, shown
from bitnet_runtime.model import Model
from bitnet_runtime.structured.formats import response_format
from bitnet_serve.errors import refuse

IGNORED = frozenset([
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "cache_control", "reasoning_effort", "verbosity", "prediction", "cache_prompt",
    "return_progress", "timings_per_token",
])  # fmt: skip
"""Fields that change no answer here: who asks, what a cloud stores, hints. docs/server.md lists them."""

SAMPLING = frozenset({*FIELDS, *ALIASES})
MOST_STOPS, MOST_BIASES, MOST_CHOICES = 16, 1024, 128

T = TypeVar("T")


def check_known(body: Mapping[str, Any], known: Collection[str], samples: bool = True) -> None:
    """Raises ApiError: a field that would be silently ignored. samples: sampling options are allowed, too."""
    known = [*known, *(SAMPLING if samples else ())]
    for name in body:
        if name not in known and name not in IGNORED:
            near = nearest(name, known)
            few = "" if samples else f", expected {', '.join(known)}"
            hint = f"; did you mean {near!r}?" if near else few
            raise refuse(f"unknown parameter {name[:80]!r}{hint}", name[:80], "unknown_parameter")


def take(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field of one type; one that is null counts as missing. Raises ApiError."""
    value = default if body.get(name) is None else body[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise refuse(f"{name} is {shown(value)}, expected {_WORDS[kind]}", name, "invalid_type")
    if isinstance(value, str):
        check_unicode(name, value)
    return value


def check_unicode(name: str, value: str) -> None:
    """Raises ApiError: it has a half of a character, as JSON may."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refuse(f"{name} is not valid Unicode: {error}", name) from None


def whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = take(body, name, int, default)
    if not low <= value <= high:
        raise refuse(f"{name} is {shown(value)}, expected an integer from {low} to {high}", name)
    return value


def text(body: Mapping[str, Any], name: str) -> str:
    if body.get(name) is None:
        raise refuse(f"{name} is missing, expected a text", name, "missing_required_parameter")
    return take(body, name, str, "")


def unsupported(body: Mapping[str, Any], *names: str) -> None:
    """Raises ApiError for fields that are not supported here. An empty list asks for nothing."""
    for name in names:
        if body.get(name) not in (None, [], ""):
            raise refuse(f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")


def sampling(body: Mapping[str, Any], model: Model, max_tokens: int | None) -> Sampling:
    """The options: those asked, over the model's own, over the table. max_tokens: unless it is said.

    Raises ApiError or InvalidParameterError.
    """
    asked = {word: value for word, value in body.items() if word in SAMPLING}
    if all(ALIASES.get(word, word) != "max_tokens" for word in asked):
        asked["max_tokens"] = max_tokens
    elif "max_tokens" in asked and asked["max_tokens"] == asked.get("max_completion_tokens"):
        del asked["max_completion_tokens"]  # some clients send both
    if (format := response_format(body.get("response_format"))) and "json_schema" in asked:
        told = "json_schema is given beside another format of the answer, expected one of them"
        raise refuse(told, "json_schema", "invalid_format")
    asked |= format
    for word, given in asked.items():
        stops = ALIASES.get(word, word) in ("stop", "stop_token_ids") and isinstance(given, list)
        if stops and len(given) > MOST_STOPS:
            raise refuse(f"{word} has {len(given)} entries, expected at most {MOST_STOPS}", word)
    bias = asked.get("logit_bias", {})
    if isinstance(bias, dict):
        if len(bias) > MOST_BIASES:
            raise refuse(f"logit_bias has {len(bias)} tokens, expected at most {MOST_BIASES}", "logit_bias")
        if bias:
            asked["logit_bias"] = {_token(key, model.vocab_size): value for key, value in bias.items()}
    return resolve(asked, None, model.defaults)


def choices(body: Mapping[str, Any], prompts: int = 1) -> int:
    n = whole(body, "n", 1, 1, MOST_CHOICES)
    if n * prompts > MOST_CHOICES:
        raise refuse(
            f"{prompts} prompts with n {n} ask for {n * prompts} answers, expected at most {MOST_CHOICES}", "n"
        )
    return n


def top(body: Mapping[str, Any], name: str) -> int:
    return whole(body, name, 0, 0, MOST)


def with_usage(body: Mapping[str, Any]) -> bool | None:
    """Whether a stream ends with its usage, as stream_options.include_usage says; None: no stream is asked for."""
    stream = take(body, "stream", bool, False)
    options: dict[str, Any] = take(body, "stream_options", dict, {})
    if "stream_options" in body and not stream:
        raise refuse("stream_options needs stream: true", "stream_options")
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown:
        name = f"stream_options.{min(unknown)[:80]}"
        raise refuse(f"unknown parameter {name!r}", name, "unknown_parameter")
    included = take(options, "include_usage", bool, False)
    return included if stream else None


def _token(key: str, vocab_size: int) -> int:
    written = key.isdecimal() and len(key) <= 10 and str(int(key)) == key  # 03 would be 3 again
    if not written or int(key) >= vocab_size:
        raise refuse(f"logit_bias names {shown(key)}, expected token ids from 0 to {vocab_size - 1}", "logit_bias")
    return int(key)


_WORDS: dict[type, str] = {
    str: "a text", int: "an integer", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip
