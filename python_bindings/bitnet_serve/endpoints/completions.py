"""/v1/completions"""

from __future__ import annotations

import codecs
import itertools
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitnet_runtime.abilities import require_next_token
from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.answers.ready import ready
from bitnet_runtime.errors import naming, shown
from bitnet_runtime.facts import detokenizer_of
from bitnet_runtime.model import Model
from bitnet_serve.endpoints import fields
from bitnet_serve.endpoints.answers import Block, Choice, Shape, Work
from bitnet_serve.endpoints.chat import several
from bitnet_serve.endpoints.wording import chunk_of, head_of, receipt_of, timings, usage
from bitnet_serve.errors import refuse
from bitnet_serve.models.generation import Ask
from bitnet_serve.models.registry import Served

KNOWN = frozenset([
    "model", "prompt", "suffix", "stream", "stream_options", "n", "best_of", "echo", "logprobs", "response_format",
    "receipt",
])  # fmt: skip
MAX_TOKENS = 16  # OpenAI's default
MOST_SCORED = 1 << 21  # log-probabilities of prompts in one answer: 300 bytes each


def understand(served: Served, body: Mapping[str, Any]) -> Work:
    """Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN)
    model = served.model
    require_next_token(model)
    given = prompts(body)
    n = fields.choices(body, len(given))
    if fields.whole(body, "best_of", n, 1, fields.MOST_CHOICES) != n:
        raise refuse(f"best_of is {body['best_of']}, expected n, which is {n}", "best_of", "unsupported_parameter")
    top = fields.top(body, "logprobs") if "logprobs" in body else None
    echo = fields.take(body, "echo", bool, False)
    if echo and top is not None and model.mask == "prefix":
        raise refuse("the tokens of a prompt see all of it in this model, so they have no log-probabilities", "echo")
    options = fields.sampling(body, model, MAX_TOKENS)
    with_usage = fields.with_usage(body)
    receipt = fields.take(body, "receipt", bool, False)
    asks, echoes, scores = [], list[str](), echo and top is not None
    for place, prompt in enumerate(given):
        with naming(f"prompt {place}" if len(given) > 1 else ""):
            tokens = _tokens(model, prompt, body, options.max_tokens)
        asks.append(Ask(tokens, options, None, top, scores, score_end=True, receipt=receipt))
        echoes += [_shown(model, prompt)] * n if echo else []
    if scores and top is not None and (scored := n * (top + 1) * sum(len(ask.prompt) for ask in asks)) > MOST_SCORED:
        raise refuse(
            f"echo and logprobs ask for {scored:,} log-probabilities of prompts, expected at most {MOST_SCORED:,}; "
            "ask for fewer choices, prompts or logprobs",
            "logprobs",
        )
    shape = Completion(served, with_usage, echoes)
    asks = several(model, asks, n)
    if scores and with_usage is None:  # one of n scores the common prompt; in a stream none waits for another
        asks = [replace(ask, score_prompt=place % n == 0) for place, ask in enumerate(asks)]
    return Work(served, asks, shape, with_usage is not None)


def prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of these."""
    given = body.get("prompt")
    if given is None:
        raise refuse("prompt is missing, expected a text or token ids", "prompt", "missing_required_parameter")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given or not all(isinstance(one, str | list) for one in given):
        raise refuse(
            f"prompt is {shown(given)}, expected a text, token ids, or a list of these", "prompt", "invalid_type"
        )
    for one in given:
        if isinstance(one, list) and not all(type(token) is int for token in one):
            raise refuse(f"prompt has {shown(one)}, expected token ids, as in [1, 2, 3]", "prompt", "invalid_type")
    return given


def _tokens(model: Model, prompt: str | list[int], body: Mapping[str, Any], max_tokens: int | None) -> list[int]:
    """The prompt to continue; with a suffix, the gap between the two to fill."""
    if not (suffix := fields.take(body, "suffix", str, "")):
        return ready(model, prompt).tokens
    if not isinstance(prompt, str) or body.get("echo"):
        raise refuse("suffix needs a prompt that is a text, and no echo", "suffix")
    return model.infill_prompt(prompt, suffix, max_tokens)


def _shown(model: Model, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else model.detokenize(prompt, skip_special=False)


class _Place:
    """The position in an answer's text, token by token."""

    def __init__(self, model: Model, prompt: Sequence[int], start: int) -> None:
        self._detokenizer, self._offset = detokenizer_of(model, prompt), start

    def pass_by(self, token: int, name: str) -> int:
        """Where the text of this one begins: behind what it shows to be half a character, if its own is whole."""
        text = self._detokenizer.push(token) if self._detokenizer else ""
        before = len(text) - len(name) if text.endswith(name) else 0
        self._offset += len(text)
        return self._offset - len(text) + before


@dataclass
class Completion(Shape):
    """The form of its answers. usage: see `fields.with_usage`. echoes: what comes before each answer."""

    served: Served
    usage: bool | None
    echoes: Sequence[str] = ()
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _places: dict[int, _Place] = field(default_factory=dict)  # of choices

    def start(self, choice: Choice) -> Iterable[Any]:
        if self.echoes:
            yield self._chunk(choice, self.echoes[choice.index], self._logprobs(choice, (), True))

    def piece(self, choice: Choice, block: Block, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        yield self._chunk(choice, text, self._logprobs(choice, scored, False))

    def end(self, choice: Choice) -> Iterable[Any]:
        logprobs = self._logprobs(choice, choice.held, False) if choice.held else None
        yield self._chunk(choice, "", logprobs, choice.ended().finish_reason)

    def close(self, choices: Sequence[Choice]) -> Iterable[Any]:
        if self.usage:
            yield self._head() | {"choices": [], "usage": usage(choices), "timings": timings(choices)}
        yield "data: [DONE]\n\n"

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        scored = {id(choice.ask.prompt): choice.prompt_scored for choice in choices if choice.ask.score_prompt}
        for choice in choices:
            choice.prompt_scored = scored.get(id(choice.ask.prompt), choice.prompt_scored)
        answers = [
            {
                "index": choice.index,
                "text": self._echo(choice) + choice.text,
                "logprobs": self._logprobs(choice, [*choice.scored, *choice.held], bool(self.echoes)),
                "finish_reason": choice.ended().finish_reason,
                **receipt_of(choice),
            }
            for choice in choices
        ]
        return self._head() | {"choices": answers, "usage": usage(choices), "timings": timings(choices)}

    def _echo(self, choice: Choice) -> str:
        return self.echoes[choice.index] if self.echoes else ""

    def _head(self) -> dict[str, Any]:
        return head_of("text_completion", self.id, self.created, self.served)

    def _chunk(self, choice: Choice, text: str, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        return chunk_of(self._head(), choice, {"text": text}, logprobs, reason, self.usage)

    def _logprobs(self, choice: Choice, scored: Sequence[Scored], prompt: bool) -> dict[str, Any] | None:
        """Of tokens that follow those of the last call, an end token too: programs that score texts count on as many
        as were asked for. prompt: with those of the prompt before, of which the first has none."""
        if choice.ask.top is None:
            return None
        given = [None, *choice.prompt_scored] if prompt else []
        every: list[Scored | None] = [*given, *scored]
        named = [self.served.token(choice.ask.prompt[0] if each is None else each.token) for each in every]
        offsets = self._of_prompt(choice, [data for _, data in named[: len(given)]])
        if choice.index not in self._places:
            self._places[choice.index] = _Place(self.served.model, choice.ask.prompt, len(self._echo(choice)))
        place = self._places[choice.index]
        offsets += [
            place.pass_by(each.token, name) for each, (name, _) in zip(scored, named[len(given) :], strict=True)
        ]
        limit = len(self._echo(choice)) + choice.length
        tokens, offsets = [name for name, _ in named], [min(offset, limit) for offset in offsets]
        tops = [None if each is None else self._top(each) for each in every]
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else each.logprob for each in every],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _of_prompt(self, choice: Choice, said: Sequence[bytes]) -> list[int]:
        """Where each token begins in its text. A start token is not part of the text, unless it was given as an id."""
        first, echo = choice.ask.prompt[0], self._echo(choice)
        read = codecs.getincrementaldecoder("utf-8")("replace").decode
        lengths = [len(read(data)) for data in said]
        # a text may begin with the name of the start token, which other tokens then spell
        spelled = sum(lengths[1:]) >= len(echo) or not echo.startswith(self.served.token(first)[0])
        if spelled and first == self.served.model.bos_token:
            lengths[:1] = [0]
        return list(itertools.accumulate(lengths, initial=0))[: len(said)]

    def _top(self, scored: Scored) -> dict[str, float]:
        """The likeliest tokens, and the chosen one, which may not be among them."""
        both = [*scored.top, (scored.token, scored.logprob)]
        return {self.served.token(token)[0]: logprob for token, logprob in both}
