"""The output of generation: pieces as they come, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.answers.receipt import Finish, Receipt
from bitnet_runtime.chat.calls import CallPart
from bitnet_runtime.chat.tools import ToolCall


class Piece(NamedTuple):
    """One step of a stream. The texts of all pieces joined are `Result.text`, their reasoning `Result.reasoning`."""

    text: str  # "" while a character or a possible stop text is incomplete
    token: int | None  # None for a last piece that only brings text held back
    calls: tuple[CallPart, ...] = ()  # more of the tools that are called
    scored: Scored | None = None  # if `logprobs` was given; where `token` is None, of the end token, if one came
    reasoning: str = ""  # more of the thoughts before the text


class Usage(NamedTuple):
    """Numbers of tokens. `prompt_tokens` includes those found in the session's cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int = 0  # of the completion, those of thoughts and their tags


class Timings(NamedTuple):
    """Seconds in the engine, and tokens computed per second. The caller's own time is not counted."""

    prompt_seconds: float
    prompt_tokens_per_second: float
    generation_seconds: float
    generation_tokens_per_second: float


@dataclass(frozen=True)
class Result:
    """The result of `generate` and `chat`; `str` of it is its text."""

    text: str
    tokens: list[int]  # as sampled, with those of a stop text, without the end token
    finish_reason: Finish
    usage: Usage
    timings: Timings
    seed: int  # the one used; the same call with it gives the same tokens
    receipt: Receipt | None = None  # if it was asked for
    tool_calls: list[ToolCall] = field(default_factory=list)  # what `text` leaves out of the tokens
    logprobs: list[Scored] | None = None  # of each of the tokens, if they were asked for
    reasoning: str = ""  # thoughts before the text, of a conversation

    def __str__(self) -> str:
        return self.text

    def message(self) -> dict[str, Any]:
        """The answer as a message, to continue the conversation."""
        said = {"role": "assistant", "content": self.text}
        said |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return said | ({"tool_calls": [call.message() for call in self.tool_calls]} if self.tool_calls else {})
