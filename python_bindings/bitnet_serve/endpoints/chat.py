"""/v1/chat/completions"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from bitnet_runtime.abilities import require_images, require_next_token
from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.answers.ready import ready
from bitnet_runtime.chat.template import OWN, REASONING
from bitnet_runtime.chat.tools import ToolCall, Tools
from bitnet_runtime.defaults import Sampling, resolve
from bitnet_runtime.errors import InvalidParameterError, shown
from bitnet_runtime.facts import guide_of
from bitnet_runtime.images.files import is_data
from bitnet_runtime.images.prompts import images_of
from bitnet_runtime.model import Model
from bitnet_runtime.model_chat import begun_in, behind_thoughts, counting_tools, held_to_calls
from bitnet_serve.endpoints import fields, offers, older
from bitnet_serve.endpoints.answers import Block, Choice, Shape, Work
from bitnet_serve.endpoints.wording import chunk_of, head_of, receipt_of, timings, usage
from bitnet_serve.errors import refuse
from bitnet_serve.models.generation import Ask
from bitnet_serve.models.registry import Served

FRAME = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
KNOWN = frozenset([
    "model", "messages", "stream", "stream_options", "n", "logprobs", "top_logprobs", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "functions", "function_call", "receipt", "modalities", "audio",
    "web_search_options", *FRAME,
])  # fmt: skip
MOST_MESSAGES = 1024


def understand(served: Served, body: Mapping[str, Any]) -> Work:
    """Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN)
    fields.unsupported(body, "audio", "web_search_options")
    if others := [each for each in fields.take(body, "modalities", list, []) if each != "text"]:
        told = f'modalities has {shown(others[0], 80)}, and answers are text alone; expected ["text"], or nothing'
        raise refuse(told, "modalities", "unsupported_parameter")
    body, is_older = older.newer(body)
    model = served.model
    tools, n = offers.of_chat(body), fields.choices(body)
    options = fields.sampling(body, model, None)
    wanted = fields.take(body, "logprobs", bool, False)
    top = fields.top(body, "top_logprobs")
    if top and not wanted:
        raise refuse("top_logprobs needs logprobs: true", "top_logprobs")
    with_usage = fields.with_usage(body)
    ask = asked(model, *framed(body, messages(body)), tools, options)
    ask = replace(ask, top=top if wanted else None, receipt=fields.take(body, "receipt", bool, False))
    return Work(served, several(model, [ask], n), Chat(served, with_usage, is_older), with_usage is not None)


def messages(body: Mapping[str, Any], name: str = "messages") -> list[dict[str, Any]]:
    """The messages of a request. name: of the field."""
    if name not in body:
        raise refuse(f"{name} is missing, expected a list", name, "missing_required_parameter")
    given: list[Any] = fields.take(body, name, list, [])
    if not 0 < len(given) <= MOST_MESSAGES:
        raise refuse(f"{name} has {len(given)} entries, expected 1 to {MOST_MESSAGES}", name)
    for message in given:
        if not isinstance(message, dict):
            raise refuse(f'{name} has {shown(message)}, expected {{"role": "user", "content": "…"}}', name)
    return [_with_refusal(message) if message.get("role") == "assistant" else message for message in given]


def _with_refusal(message: dict[str, Any]) -> dict[str, Any]:
    """A refusal stands apart in OpenAI's form, and is text to a template: another model had the conversation before."""
    content, refusal = message.get("content"), message.get("refusal")
    if content is None and isinstance(refusal, str):
        return message | {"content": refusal}
    if not isinstance(content, list):
        return message
    return message | {"content": [_refusal(part) for part in content]}


def _refusal(part: Any) -> Any:
    is_one = isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
    return {"type": "text", "text": part["refusal"]} if is_one else part


class Frame(NamedTuple):
    """The prompt of a conversation, with the beginning of the answer unless only the messages are wanted."""

    begun: str = ""
    answers: bool = True
    variables: Mapping[str, Any] = MappingProxyType({})

    @property
    def asked(self) -> dict[str, Any]:
        return {"add_generation_prompt": self.answers, "variables": self.variables}


def framed(body: Mapping[str, Any], said: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Frame]:
    """The messages before the answer, and the beginning of the answer if there is one, by vLLM's fields."""
    variables: dict[str, Any] = fields.take(body, "chat_template_kwargs", dict, {})
    if own := OWN & variables.keys():
        told = f"chat_template_kwargs has {min(own)}, expected other variables of the template; that is a field"
        raise refuse(told, "chat_template_kwargs")
    answers = fields.take(body, "add_generation_prompt", bool, True)
    if not fields.take(body, "continue_final_message", bool, False):
        return said, Frame("", answers, variables)
    if "add_generation_prompt" in body and answers:
        told = "add_generation_prompt is true beside continue_final_message, expected false: an answer has begun"
        raise refuse(told, "add_generation_prompt")
    said, begun = begun_of(said)
    if not begun:
        told = "continue_final_message needs a last message of the assistant that is a text, and one before it"
        raise refuse(told, "continue_final_message")
    return said, Frame(begun, True, variables)


def begun_of(said: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """A conversation without its last message, and that message: the beginning of an answer to continue."""
    last = said[-1]
    if last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(last.get("content"), str):
        return said, ""
    if any(last.get(name) for name in REASONING):
        told = "the last message begins the answer and has its thoughts apart; put them into the text, with their tags"
        raise refuse(told, "messages")
    if len(said) == 1:
        raise refuse("messages has only the beginning of an answer, expected a user message before it", "messages")
    return said[:-1], last["content"]


def asked(model: Model, said: Sequence[Mapping[str, Any]], frame: Frame, tools: Tools | None, options: Sampling) -> Ask:
    """What to generate after a conversation."""
    tokens = prompt_tokens(model, said, frame, tools)
    with counting_tools(model, said, tools, tokens, **frame.asked):
        made = ready(model, tokens, images_of(said))
    held = held_to_calls(model, tools, options)
    before = tokens[: len(tokens) - len(_begun_tokens(model, frame))]
    begun, held = behind_thoughts(model, begun_in(model, before, frame.begun), held)
    return Ask(made.tokens, held, made.pixels, tools=tools, begun=begun)


def prompt_tokens(model: Model, said: Sequence[Mapping[str, Any]], frame: Frame, tools: Tools | None) -> list[int]:
    """The prompt of a conversation of any length. Images are given as data, never as file names or addresses."""
    require_next_token(model)
    images = images_of(said)
    if not model.has_template:
        instead = "/v1/completions continues a text"
        if images:
            instead = "`bitnet generate --image` and Model.generate(images=…) ask it about a picture"
        raise refuse(
            f"{model.path.name} has no chat template, so it cannot answer messages; {instead}, bitnet finetune --chat "
            "teaches a model to answer, bitnet serve --chat-template FILE gives it a template",
            code="template_error",
        )
    if images:
        require_images(model)
    for place, image in enumerate(images):
        if not isinstance(image, str) or not is_data(image):
            told = f"images[{place}] is {shown(image, 40)}, expected a data: URL with its bytes"
            raise InvalidParameterError(told, "messages")
    tokens = model.apply_template(said, tools, **frame.asked)
    return tokens + _begun_tokens(model, frame)


def _begun_tokens(model: Model, frame: Frame) -> list[int]:
    return model.tokenize(frame.begun, add_bos=False) if frame.begun else []


def several(model: Model, asks: Sequence[Ask], n: int = 1) -> list[Ask]:
    """n of each, with the seed of the request and one more for each that follows. Formats are compiled."""
    base = asks[0].options.seed
    first = secrets.randbits(32) if base is None else base

    def limited(ask: Ask, index: int) -> Sampling:
        """Limit the tokens to those that fit the context. One more could be sampled, and is if the prompt fills it."""
        room, options = max(1, model.n_ctx - len(ask.prompt)), ask.options
        most = room if options.max_tokens is None else min(options.max_tokens, room)
        least = min(options.min_tokens, room)
        changed = {"seed": (first + index) % 2**64, "max_tokens": most, "min_tokens": least}
        return resolve(changed, options)

    each = [ask for ask in asks for _ in range(n)]
    for ask in each:
        if ask.receipt and ask.pixels is not None:
            raise refuse("a receipt is of tokens alone, and images are given", "receipt")
        if ask.receipt:
            model.digest  # noqa: B018  hashes the file now, and not while others wait for tokens
    return [
        replace(ask, options=limited(ask, index), guide=guide_of(model, ask.options)) for index, ask in enumerate(each)
    ]


@dataclass
class Chat(Shape):
    """The form of its answers. usage: see `fields.with_usage`. older: a call is a `function_call`."""

    served: Served
    usage: bool | None
    older: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def start(self, choice: Choice) -> Iterable[Any]:
        yield self._chunk(choice, {"role": "assistant", "content": ""})

    def begin(self, choice: Choice, block: Block) -> Iterable[Any]:
        if block.call and self.older:
            yield self._chunk(choice, {"function_call": {"name": block.call.name, "arguments": ""}})
        elif block.call:
            head = {"index": block.call.number, "id": block.call.id, "type": "function"}
            yield self._chunk(choice, {"tool_calls": [head | {"function": {"name": block.call.name, "arguments": ""}}]})

    def piece(self, choice: Choice, block: Block, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        more: dict[str, Any] = {"reasoning_content" if block.thinks else "content": text}
        if block.call:
            call = {"arguments": text}
            whole = {"tool_calls": [{"index": block.call.number, "function": call}]}
            more = {"function_call": call} if self.older else whole
        yield self._chunk(choice, more, self._logprobs(choice, scored))

    def end(self, choice: Choice) -> Iterable[Any]:
        rest = self._rest(choice)
        logprobs = self._logprobs(choice, rest) if rest else None
        yield self._chunk(choice, {}, logprobs, self._reason(choice))

    def close(self, choices: Sequence[Choice]) -> Iterable[Any]:
        if self.usage:
            last = self._head("chat.completion.chunk") | {"choices": [], "usage": usage(choices)}
            yield last | {"timings": timings(choices)}
        yield "data: [DONE]\n\n"

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        answers = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": self._logprobs(choice, [*choice.scored, *self._rest(choice)]),
                "finish_reason": self._reason(choice),
                **receipt_of(choice),
            }
            for choice in choices
        ]
        head = self._head("chat.completion")
        return head | {"choices": answers, "usage": usage(choices), "timings": timings(choices)}

    def _message(self, choice: Choice) -> dict[str, Any]:
        said = {"role": "assistant", "content": choice.text, "refusal": None}
        said |= {"reasoning_content": choice.reasoning} if choice.reasoning else {}
        if not choice.calls:
            return said
        calls = [ToolCall(call.id, call.name, block.text) for block in choice.calls if (call := block.call)]
        said["content"] = choice.text or None
        if self.older:
            return said | {"function_call": calls[0].message()["function"]}
        return said | {"tool_calls": [call.message() for call in calls]}

    def _reason(self, choice: Choice) -> str:
        return "function_call" if self.older and choice.finish_reason == "tool_calls" else choice.finish_reason

    def _head(self, kind: str) -> dict[str, Any]:
        return head_of(kind, self.id, self.created, self.served)

    def _chunk(
        self, choice: Choice, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return chunk_of(self._head("chat.completion.chunk"), choice, {"delta": delta}, logprobs, reason, self.usage)

    def _logprobs(self, choice: Choice, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if choice.ask.top is None:
            return None
        content = [
            self._token(each.token, each.logprob) | {"top_logprobs": [self._token(*other) for other in each.top]}
            for each in scored
        ]
        return {"content": content, "refusal": None}

    def _rest(self, choice: Choice) -> list[Scored]:
        """Of a character that was never completed, or a tag. After a stop text the rest is not part of the answer."""
        return [] if choice.ended().stopped_by else choice.held

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        name, data = self.served.token(token)
        return {"token": name, "logprob": logprob, "bytes": list(data)}
