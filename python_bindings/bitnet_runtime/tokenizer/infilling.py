"""Prompts with a gap in the text, for models trained to fill it in.

Such a model has three tokens: one before what is before the gap, one before what is behind it, and one after which
it writes what belongs into it, to an end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bitnet_runtime.abilities import require_next_token
from bitnet_runtime.errors import InvalidParameterError, UnsupportedModelError, shown
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.tokenizer.text import Tokenizer

NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # of `bitnet train --fim`, and of Qwen and Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    (">>PREFIX<<", ">>SUFFIX<<", ">>MIDDLE<<"),  # Falcon
)
FARTHEST = 32  # characters for a token of the context: what is farther from a gap is not looked at


class Gap(NamedTuple):
    """The tokens that mark the parts of such a prompt."""

    prefix: int
    suffix: int
    middle: int


def gap_of(tokenizer: Tokenizer) -> Gap | None:
    """The tokens of a tokenizer, if it has all three."""
    for names in NAMES:
        prefix, suffix, middle = map(tokenizer.added, names)
        if prefix is not None and suffix is not None and middle is not None:
            return Gap(prefix, suffix, middle)
    return None


def around(gap: Gap, start: int | None, before: Sequence[int], behind: Sequence[int], room: int) -> list[int]:
    """The prompt, in at most `room` tokens, 4 or more: of what does not fit the nearest to the gap is kept, three times
    as much before it as behind."""
    room -= len(gap) + (start is not None)
    n_behind = min(len(behind), max(room // 4, room - len(before)))
    before = before[max(0, len(before) - (room - n_behind)) :]
    head = [] if start is None else [start]
    return [*head, gap.prefix, *before, gap.suffix, *behind[:n_behind], gap.middle]


def prompt_around(model: ModelFacts, before: str, behind: str, max_tokens: int | None = None) -> tuple[list[int], bool]:
    """`Model.infill_prompt`, and whether part of either text was left out."""
    require_next_token(model)
    gap = gap_of(model._tokenizer) if model.has_tokenizer else None
    if gap is None:
        raise UnsupportedModelError(
            f"{model.path.name} cannot fill in the middle: its tokenizer has no tokens for that, such as "
            "<|fim_prefix|>; `bitnet train --fim 0.5` makes a model that can"
        )
    for name, text in (("before", before), ("behind", behind)):
        if not isinstance(text, str):
            raise InvalidParameterError(f"{name} is {shown(text)}, expected a string", name)
    answer = model.n_ctx // 4 if max_tokens is None else min(max_tokens, model.n_ctx // 2)
    room = max(model.n_ctx - answer, 4)
    most = FARTHEST * room
    head, tail = before[max(0, len(before) - most) :], behind[:most]
    tokens = [model._tokenizer.encode(text, add_bos=False, parse_special=False) for text in (head, tail)]
    prompt = around(gap, model.bos_token, tokens[0], tokens[1], room)
    whole = len(gap) + (model.bos_token is not None) + len(tokens[0]) + len(tokens[1])
    return prompt, len(prompt) < whole or len(head) < len(before) or len(tail) < len(behind)
