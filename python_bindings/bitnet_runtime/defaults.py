"""How tokens are chosen: the one table of sampling options.

The fields of `Sampling` are the table. Python, the command line and the tests read names,
defaults, ranges, aliases and help texts from here and nowhere else; `Options` repeats the names
for type checkers. An explicit argument wins over the model's own default (the `generation` object
of the file), which wins over the table.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from bitnet_runtime.errors import InvalidParameterError, ModelFormatError, nearest, shown
from bitnet_runtime.ids import token_ids
from bitnet_runtime.structured import formats
from bitnet_runtime.structured.formats import Schema

if TYPE_CHECKING:
    from bitnet_runtime.ids import Ids

SMALLEST = 1e-30  # least value of what must be above 0: the engine's floats end at 1e-38


def _option(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    flags: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Any:
    """A row of the table."""
    row = {"help": help, "low": low, "high": high, "flags": flags, "aliases": aliases}
    return dataclasses.field(default=default, metadata=row)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Every option of `generate`, `stream` and `chat`, with its default. A wrong value is an InvalidParameterError."""

    max_tokens: int | None = _option(
        256, "most tokens to generate; none or -1: until the context is full", low=-1, high=2**31 - 1,
        flags=("-n", "--max-tokens"),
        aliases=("max_new_tokens", "n_predict", "num_predict", "max_completion_tokens", "max_output_tokens"),
    )  # fmt: skip
    temperature: float = _option(
        0.8, "0 takes the most likely token", low=0, high=1e6, flags=("--temp", "--temperature"), aliases=("temp",)
    )
    top_k: int = _option(40, "keep the k most likely tokens; 0: all", low=0, high=2**31 - 1)
    top_p: float = _option(0.95, "keep the smallest set with this much probability; 0: the likeliest", low=0, high=1)
    min_p: float = _option(0.05, "drop what is less likely than this times the best", low=0, high=1)
    repeat_penalty: float = _option(
        1.0, "divides the logits of tokens already seen; 1: off", low=SMALLEST, high=1e6,
        aliases=("repetition_penalty",),
    )  # fmt: skip
    repeat_last_n: int = _option(
        64, "how many of the latest tokens the penalties look at; -1: all", low=-1, high=2**31 - 1,
        aliases=("penalty_window",),
    )  # fmt: skip
    presence_penalty: float = _option(0.0, "subtracted once from tokens already seen", low=-100, high=100)
    frequency_penalty: float = _option(0.0, "subtracted per occurrence", low=-100, high=100)
    seed: int | None = _option(
        None, "seed of the noise that chooses tokens; none or -1: random, and reported", low=-1, high=2**64 - 1,
        flags=("-s", "--seed"), aliases=("rng_seed", "random_seed"),
    )  # fmt: skip
    stop: tuple[str, ...] = _option(
        (), "text that ends the answer and is not part of it", aliases=("stop_strings", "stop_sequences", "until")
    )
    stop_token_ids: tuple[int, ...] = _option((), "token that ends the answer, as the model's end tokens do")
    min_tokens: int = _option(0, "least tokens of an answer: until then no token ends it", low=0, high=2**31 - 1)
    ignore_eos: bool = _option(False, "go on after the model's end tokens")
    draft: int | None = _option(
        None, "speculative decoding: most draft tokens, from n-gram lookup, then from the model's draft head; same "
        "result, faster if they are right; none: as many as save time", low=0, high=64,
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = _option(None, "added to the logit of a token; -inf bans it")
    json_schema: Schema | None = _option(None, "JSON schema that the answer follows")  # noqa: RUF009  a text by then
    regex: str | None = _option(None, "regular expression that the whole answer matches")
    grammar: str | None = _option(None, "grammar in Lark's notation that the answer follows")

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))


class TokenOptions(TypedDict, total=False):
    """The options for choosing one token: those of `Session.sample`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None


class Options(TokenOptions, total=False):
    """The options of `generate`, `stream` and `chat`, by their names here; aliases work, and are not typed."""

    max_tokens: int | None
    seed: int | None
    stop: str | list[str] | tuple[str, ...] | None
    stop_token_ids: Ids
    min_tokens: int
    ignore_eos: bool
    draft: int | None
    json_schema: Schema | None
    regex: str | None
    grammar: str | None


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Sampling)}
ALIASES: dict[str, str] = {alias: name for name, field in FIELDS.items() for alias in field.metadata["aliases"]}


def is_whole(name: str) -> bool:
    """Whether an option is a whole number, or none."""
    return type(FIELDS[name].default) is int or name in ("seed", "draft")


def whole(name: str, value: Any, low: int, high: int, about: str = "") -> int:
    """`value` as an int from `low` to `high`, or InvalidParameterError."""
    if hasattr(value, "__index__") and not isinstance(value, bool):
        try:
            number = int(value.__index__())
        except TypeError:  # an array
            number = low - 1
        if low <= number <= high:
            return number
    raise InvalidParameterError(f"{name} is {shown(value)}, expected an integer from {low} to {high}{about}", name)


def truth(name: str, value: Any) -> bool:
    """`value`, or InvalidParameterError where it is neither True nor False: "no" would be yes."""
    if isinstance(value, bool):
        return value
    raise InvalidParameterError(f"{name} is {shown(value)}, expected true or false", name)


def _checked(name: str, value: Any) -> Any:
    """`value` as the type of the field, or InvalidParameterError."""
    if name == "stop":
        return _stop(value)
    if name == "logit_bias":
        return _logit_bias(value)
    if name == "stop_token_ids":
        return tuple(token_ids(value, name, 2**31))
    if name == "ignore_eos":
        return truth(name, value)
    if name in formats.KINDS:
        return formats.format_text(name, value)
    row = FIELDS[name].metadata
    if value is None and name in ("max_tokens", "seed", "draft"):
        return None
    low, high = row["low"], row["high"]
    if is_whole(name):
        count = whole(name, value, low, high)
        return None if count == -1 and name in ("max_tokens", "seed") else count  # as llama.cpp's clients write none
    if hasattr(value, "__float__") and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, OverflowError):  # an array, or an integer beyond all floats
            number = math.nan
        if low <= number <= high:
            return number
    raise InvalidParameterError(f"{name} is {shown(value)}, expected a number from {low:g} to {high:g}", name)


def _stop(value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts):
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:  # bytes of a command line that are not UTF-8: no answer has them
            raise InvalidParameterError(f"stop is {shown(value)}, which is not valid Unicode", "stop") from None
        return tuple(texts)
    raise InvalidParameterError(
        f"stop is {shown(value)}, expected a text or a list of texts, none of them empty", "stop"
    )


def _logit_bias(value: Any) -> Mapping[int, float] | None:
    if value is None:
        return None
    try:
        bias = {token.__index__(): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        bias = {-1: 0.0}
    if all(token >= 0 and number < 2.0**128 - 2.0**103 for token, number in bias.items()):  # what float32 rounds to inf
        return bias
    raise InvalidParameterError(
        f"logit_bias is {shown(value)}, expected a dictionary from token ids to finite numbers or -inf", "logit_bias"
    )


DEFAULTS = Sampling()


def resolve(explicit: Mapping[str, Any], given: Sampling | None = None, model: Sampling = DEFAULTS) -> Sampling:
    """The options of one call: `explicit` over those `given` as a whole, or else the model's own over the table.

    Raises InvalidParameterError for an unknown name (with the nearest valid one), for an option
    given twice, and for a value out of range (with the range).
    """
    if not isinstance(given, Sampling | None):
        raise InvalidParameterError(f"options is {shown(given)}, expected a Sampling", "options")
    values: dict[str, Any] = {}
    for word, value in explicit.items():
        name = ALIASES.get(word, word)
        if name not in FIELDS:
            near = nearest(word, [*FIELDS, *ALIASES])
            hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(FIELDS)}"
            raise InvalidParameterError(f"unknown parameter {word!r}; {hint}", word)
        if name in values:
            other = next(each for each in explicit if ALIASES.get(each, each) == name)
            raise InvalidParameterError(f"parameter {name!r} is given twice, as {other!r} and as {word!r}", name)
        try:
            values[name] = _checked(name, value)
        except InvalidParameterError as error:
            if word == name:
                raise
            raise InvalidParameterError(str(error).replace(name, word, 1), word) from None
    base, options = given or model, object.__new__(Sampling)  # everything else about it was checked
    vars(options).update(vars(base) | values)
    return options


def model_defaults(generation: Mapping[str, Any]) -> Sampling:
    """The table with the sampling options of a file's `generation` object; other keys are not ours."""
    known = {key: value for key, value in generation.items() if ALIASES.get(key, key) in FIELDS}
    try:
        return resolve(known)
    except InvalidParameterError as error:
        raise ModelFormatError(f"generation defaults of the file: {error}") from None


def help_of(name: str) -> str:
    """The help of an option and its default, in one line."""
    field = FIELDS[name]
    default = "none" if field.default is None or field.default == () else field.default
    return f"{field.metadata['help']} (default: {default})"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_options(function: _Function) -> _Function:
    """The function, its documentation completed with a line for each option."""
    options = "".join(f"\n    {name}: {help_of(name)}" for name in FIELDS)
    text = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = f"{text}\n\nOptions, with defaults that the file of a model may change:{options}"
    return function
