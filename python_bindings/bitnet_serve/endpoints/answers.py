"""The answer to a request as its events come in, and the form that an API gives it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.chat.calls import CallPart
from bitnet_serve.errors import ApiError, api_error
from bitnet_serve.models.generation import Ask, End, Failure, Scores, Text
from bitnet_serve.models.registry import Served


@dataclass(eq=False)
class Block:
    """A part of an answer: text, thoughts, or a tool call with its arguments."""

    call: CallPart | None = None
    texts: list[str] = field(default_factory=list)
    thinks: bool = False
    place: int = 0  # among the blocks of the answer

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Choice:
    """The answer to one `Ask`, as far as it has come."""

    index: int
    ask: Ask
    blocks: list[Block] = field(default_factory=list)
    prompt_scored: list[Scored] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    called: int = 0  # blocks that are calls
    made: int = 0  # tokens that have come
    end: End | None = None
    begun = False
    open: Block | None = None  # the block whose events are being sent, in a stream
    unsent: list[str] = field(default_factory=list)  # what has come of its text since the last of them
    unsent_scores: list[Scored] = field(default_factory=list)
    length: int = 0  # of its texts, which would take a while to join for each token
    held: list[Scored] = field(default_factory=list)  # scores of tokens whose text has not come; an end token has none

    @property
    def text(self) -> str:
        """The text of the answer, without thoughts and tool calls."""
        return "".join(block.text for block in self.blocks if block.call is None and not block.thinks)

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.thinks)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.call is not None]

    def ended(self) -> End:
        assert self.end is not None  # all choices have ended
        return self.end

    @property
    def finish_reason(self) -> str:
        """The finish reason in OpenAI's terms."""
        reason = self.ended().finish_reason
        return "tool_calls" if reason == "stop" and self.calls else reason

    def take(self, found: Text) -> list[tuple[Block, str]]:
        """Add an event. Returns the blocks that grew, with their new text; all but the last block are complete."""
        going = [part for part in found.calls if part.number < self.called]
        new = found.calls[len(going) :]
        out = [(self.blocks[-1], part.text) for part in going]
        for text, thinks in ((found.reasoning, True), (found.text, False)):
            if text:
                if not self.blocks or self.blocks[-1].call is not None or self.blocks[-1].thinks != thinks:
                    self.blocks.append(Block(thinks=thinks, place=len(self.blocks)))
                out.append((self.blocks[-1], text))
        for part in new:
            if part.number == self.called:
                self.blocks.append(Block(part, place=len(self.blocks)))
                self.called += 1
            out.append((self.blocks[-1], part.text))
        for block, text in out:
            block.texts.append(text)
            self.length += len(text)
        return out


class Shape(Protocol):
    """The form that an API gives an answer. An event is a dictionary, or its JSON text."""

    def start(self, choice: Choice) -> Iterable[Any]:
        """The events before the first piece of a choice."""
        return ()

    def begin(self, choice: Choice, block: Block) -> Iterable[Any]:
        """The events before the first piece of a block."""
        return ()

    def piece(self, choice: Choice, block: Block, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        """The events for a part of a block's text, with the scores of its tokens."""

    def finish(self, choice: Choice, block: Block) -> Iterable[Any]:
        """The events after the last piece of a block."""
        return ()

    def end(self, choice: Choice) -> Iterable[Any]:
        """The events after the last piece of a choice."""

    def close(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """The events after all choices."""
        return ()

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def error(self, error: ApiError) -> Iterable[Any]:
        """The events for a stream that breaks off."""
        return (error.body(),)


@dataclass
class Work:
    """A parsed request: what is asked of which model, and the form of the answer."""

    served: Served
    asks: list[Ask]
    shape: Shape
    stream: bool


def take(choices: Sequence[Choice], index: int, found: object) -> tuple[Choice, list[tuple[Block, str]], list[Scored]]:
    """Write an event down. Returns the choice, what is new of its blocks, and the scores of tokens whose text is
    complete with it."""
    choice = choices[index]
    if isinstance(found, Failure):
        raise api_error(found.error)
    if isinstance(found, Scores):
        choice.prompt_scored.extend(found.scored)
    elif isinstance(found, End):
        choice.made = found.completion_tokens  # an end token is none of them
        if found.finish_reason == "cancelled":
            raise ApiError(503, "the answer was cancelled: the server is shutting down", "shutting_down", retry_after=5)
        choice.end = found
        if not choice.blocks:  # nothing was said
            choice.blocks.append(Block())
            return choice, [(choice.blocks[0], "")], []
    elif isinstance(found, Text):
        choice.made += 1
        if found.scored:
            choice.held.append(found.scored)
        if pieces := choice.take(found):
            scored, choice.held = choice.held, []
            choice.scored += scored
            return choice, pieces, scored
    return choice, [], []
