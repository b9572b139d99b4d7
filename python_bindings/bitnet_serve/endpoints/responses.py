"""/v1/responses: each holds all that it needs; nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.errors import shown
from bitnet_serve.endpoints import chat, fields, offers
from bitnet_serve.endpoints.answers import Block, Choice, Shape, Work
from bitnet_serve.errors import ApiError, refuse
from bitnet_serve.models.registry import Served

KNOWN = frozenset([
    "model", "input", "instructions", "stream", "stream_options", "text", "tools", "tool_choice", "parallel_tool_calls",
    "include", "reasoning", "truncation", "previous_response_id", "conversation", "background", "prompt",
    "max_tool_calls", "top_logprobs", "chat_template_kwargs",
])  # fmt: skip
NO_ANSWER_HAS = "reasoning.encrypted_content"  # and so it is left out, as agents ask for it whatever the model


def understand(served: Served, body: Mapping[str, Any]) -> Work:
    """Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN)
    fields.unsupported(body, "previous_response_id", "conversation", "prompt")
    if wanted := [each for each in fields.take(body, "include", list, []) if each != NO_ANSWER_HAS]:
        raise refuse(
            f"include has {shown(wanted[0])}, which no answer here has; leave it out",
            "include",
            "unsupported_parameter",
        )
    if body.get("background"):
        raise refuse("background is not supported by this server", "background", "unsupported_parameter")
    if body.get("truncation", "disabled") != "disabled":
        raise refuse("truncation is not supported, expected 'disabled'", "truncation", "unsupported_parameter")
    text: dict[str, Any] = fields.take(body, "text", dict, {})
    if fields.top(body, "top_logprobs"):
        raise refuse("top_logprobs is not supported here; see /v1/chat/completions", "top_logprobs")
    if unknown := set(text) - {"format", "verbosity"}:
        raise refuse(f"text has {shown(min(unknown), 80)}, expected format and verbosity", "text")
    stream = fields.with_usage(body) is not None  # every answer has the usage here
    said: dict[str, Any] = fields.take(text, "format", dict, {"type": "text"})
    kind = said.get("type")
    if kind not in ("text", "json_object", "json_schema") or (kind == "json_schema" and said.get("schema") is None):
        expected = '{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "schema": …}'
        raise refuse(f"text.format is {shown(said)}, expected {expected}", "text", "invalid_format")
    said = {**said, "json_schema": said}  # whose fields are not in an object of their own here
    options = fields.sampling({**body, "response_format": said}, served.model, None)
    ask = chat.asked(served.model, *chat.framed(body, conversation(body)), offers.of_responses(body), options)
    return Work(served, chat.several(served.model, [ask]), Responses(served, body), stream)


def conversation(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As chat templates take it."""
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if given is None:
        raise refuse("input is missing, expected a text or a list of messages", "input", "missing_required_parameter")
    if not isinstance(given, list):
        raise refuse(f"input is {shown(given)}, expected a text or a list of messages", "input", "invalid_type")
    said: list[dict[str, Any]] = []
    for item in chat.messages({"input": given}, "input"):
        message = _message(item)
        last = said[-1] if said and said[-1]["role"] == "assistant" else {}
        if last and "tool_calls" in message:  # one turn of the model
            said[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
        elif _thinks_only(last) and message["role"] == "assistant":
            thoughts = [each["reasoning_content"] for each in (last, message) if each.get("reasoning_content")]
            said[-1] = {**message, "reasoning_content": "\n".join(thoughts)}
        elif message.get("reasoning_content") != "":
            said.append(message)
    if not said:
        raise refuse("input has only items of reasoning without a text, expected a message", "input")
    if "instructions" in body:
        said.insert(0, {"role": "system", "content": fields.text(body, "instructions")})
    return said


def _thinks_only(message: Mapping[str, Any]) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _reasoning(item: dict[str, Any]) -> str:
    """The thoughts of an item, or their summary. Those of a cloud model may be encrypted: then there are none."""
    for name in ("content", "summary"):
        parts: list[Any] = fields.take(item, name, list, [])
        if parts:
            return "\n".join(fields.text(part if isinstance(part, dict) else {}, "text") for part in parts)
    return ""


def _message(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {name: fields.text(item, name) for name in ("name", "arguments")}
        call = {"id": fields.text(item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": fields.text(item, "call_id"), "content": item.get("output")}
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _reasoning(item)}
    if kind != "message":
        expected = "messages, reasoning, and calls of functions"
        raise refuse(f"input has an item of type {shown(kind)}, expected {expected}", "input")
    return {"role": item.get("role"), "content": item.get("content")}


@dataclass
class Responses(Shape):
    """The form of its answers."""

    served: Served
    body: Mapping[str, Any]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    number: int = 0  # of events

    def start(self, choice: Choice) -> Iterable[Any]:
        begun = self._response("in_progress", [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def begin(self, choice: Choice, block: Block) -> Iterable[Any]:
        item = self._item(block, "in_progress", "")
        if block.call is None:
            item["content"] = []
        yield self._of(block, "response.output_item.added", item=item)
        if block.call is None:
            yield self._of_part(block, "response.content_part.added", part=self._part(block, ""))

    def piece(self, choice: Choice, block: Block, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        if block.call is None:
            kind, more = self._kind(block)
            yield self._of_part(block, f"response.{kind}.delta", delta=text, **more)
        else:
            at = {"item_id": self._id(block), "delta": text}
            yield self._of(block, "response.function_call_arguments.delta", **at)

    def finish(self, choice: Choice, block: Block) -> Iterable[Any]:
        if block.call is None:
            kind, more = self._kind(block)
            yield self._of_part(block, f"response.{kind}.done", text=block.text, **more)
            yield self._of_part(block, "response.content_part.done", part=self._part(block, block.text))
        else:
            at = {"item_id": self._id(block), "arguments": block.text}
            yield self._of(block, "response.function_call_arguments.done", **at)
        yield self._of(block, "response.output_item.done", item=self._whole_item(choice, block))

    def end(self, choice: Choice) -> Iterable[Any]:
        yield self._event(f"response.{self._status(choice)}", response=self.whole([choice]))

    def error(self, error: ApiError) -> Iterable[Any]:
        yield self._event("error", message=str(error), code=error.code, param=error.param)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        output = [self._whole_item(choice, block) for block in choice.blocks]
        return self._response(self._status(choice), output, choice)

    def _status(self, choice: Choice) -> str:
        return "incomplete" if choice.ended().finish_reason == "length" else "completed"

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **more}

    def _of(self, block: Block, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, output_index=block.place, **more)

    def _of_part(self, block: Block, kind: str, **more: Any) -> dict[str, Any]:
        return self._of(block, kind, item_id=self._id(block), content_index=0, **more)

    def _kind(self, block: Block) -> tuple[str, dict[str, Any]]:
        """What its text is called, and a field that only some have."""
        return ("reasoning_text", {}) if block.thinks else ("output_text", {"logprobs": []})

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        kind, more = self._kind(block)
        return {"type": kind, "text": text, **({} if block.thinks else {"annotations": []}), **more}

    def _id(self, block: Block) -> str:
        kind = "fc" if block.call else "rs" if block.thinks else "msg"
        return f"{kind}_{self.id}{block.place}"

    def _item(self, block: Block, status: str, text: str) -> dict[str, Any]:
        head = {"id": self._id(block), "status": status}
        if block.thinks:
            return head | {"type": "reasoning", "summary": [], "content": [self._part(block, text)]}
        if block.call is None:
            return head | {"type": "message", "role": "assistant", "content": [self._part(block, text)]}
        return head | {
            "type": "function_call", "call_id": block.call.id, "name": block.call.name, "arguments": text,
        }  # fmt: skip

    def _whole_item(self, choice: Choice, block: Block) -> dict[str, Any]:
        last = choice.end is not None and block is choice.blocks[-1]
        return self._item(block, self._status(choice) if last else "completed", block.text)

    def _response(self, status: str, output: list[Any], choice: Choice | None) -> dict[str, Any]:
        usage = None
        if choice is not None:
            end = choice.ended()
            usage = {
                "input_tokens": end.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.reused, "cache_write_tokens": 0},
                "output_tokens": end.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": end.prompt_tokens + end.completion_tokens,
            }
        asked, defaults = self.body, self.served.model.defaults
        text = asked.get("text", {})
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata", {}),
            "model": self.served.name,
            "output": output,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "temperature": asked.get("temperature", defaults.temperature),
            "text": {"format": {"type": "text"}} | {name: one for name, one in text.items() if one is not None},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_p": asked.get("top_p", defaults.top_p),
            "truncation": "disabled",
            "usage": usage,
        }
