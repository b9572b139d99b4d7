"""/v1/responses: each holds all that it needs; nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitnet_runtime.errors import shown
from bitnet_serve import chat, fields
from bitnet_serve.answers import Choice, Work
from bitnet_serve.errors import ApiError, refuse
from bitnet_serve.generation import Ask
from bitnet_serve.logprobs import Scored
from bitnet_serve.models import Served

KNOWN = frozenset([
    "model", "input", "instructions", "max_output_tokens", "stream", "stream_options", "text", "tools", "tool_choice",
    "include", "reasoning", "truncation", "previous_response_id", "conversation", "background", "prompt",
    "max_tool_calls", "top_logprobs",
])  # fmt: skip


def understand(served: Served, body: Mapping[str, Any]) -> Work:
    """Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN)
    if body.get("tool_choice") != "none":
        fields.unsupported(body, "tools")
    fields.unsupported(body, "previous_response_id", "conversation", "prompt", "include")
    if body.get("background"):
        raise refuse("background is not supported by this server", "background", "unsupported_parameter")
    if body.get("truncation", "disabled") != "disabled":
        raise refuse("truncation is not supported, expected 'disabled'", "truncation", "unsupported_parameter")
    text: dict[str, Any] = fields.take(body, "text", dict, {})
    if fields.top(body, "top_logprobs"):
        raise refuse("top_logprobs is not supported here; see /v1/chat/completions", "top_logprobs")
    said: dict[str, Any] = fields.take(text, "format", dict, {"type": "text"})
    if said.get("type") == "json_schema":  # its fields are not in an object of their own here
        said = {"type": "json_schema", "json_schema": said}
    asked = {**body, "response_format": said}
    if "max_output_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_output_tokens")
    options = fields.sampling(asked, served.model, None)
    ready = chat.prompt(served.model, conversation(body))
    asks = chat.several(served.model, [Ask(ready.tokens, options, ready.pixels)])
    return Work(served, asks, Responses(served, body), fields.take(body, "stream", bool, False))


def conversation(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As chat templates take it."""
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise refuse(f"input is {shown(given)}, expected a text or a list of messages", "input", "invalid_type")
    said = [_message(item) for item in chat.messages({"messages": given})]
    if "instructions" in body:
        said.insert(0, {"role": "system", "content": fields.text(body, "instructions")})
    return said


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        raise refuse(f"input has an item of type {shown(item['type'])}, expected messages", "input")
    content = item.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict)
        and part.get("type") in ("input_text", "output_text")
        and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "\n".join(part["text"] for part in content)
    return {"role": item.get("role"), "content": content}


@dataclass
class Responses:
    """The words of it."""

    served: Served
    body: Mapping[str, Any]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    number: int = 0  # of events

    def start(self, choice: Choice) -> Iterable[Any]:
        begun = self._response("in_progress", [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._of_part("response.content_part.added", part=self._text(""))

    def piece(self, choice: Choice, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        yield self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, choice: Choice) -> Iterable[Any]:
        item = self._whole_item(choice)
        yield self._of_part("response.output_text.done", text=choice.text, logprobs=[])
        yield self._of_part("response.content_part.done", part=self._text(choice.text))
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{self._status(choice)}", response=self.whole([choice]))

    def close(self, choices: Sequence[Choice]) -> Iterable[Any]:
        return ()

    def error(self, error: ApiError) -> Iterable[Any]:
        yield self._event("error", message=str(error), code=error.code, param=error.param)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        return self._response(self._status(choice), [self._whole_item(choice)], choice)

    def _status(self, choice: Choice) -> str:
        return "incomplete" if choice.ended().finish_reason == "length" else "completed"

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **more}

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=f"msg_{self.id}", output_index=0, content_index=0, **more)

    def _text(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        head = {"id": f"msg_{self.id}", "type": "message", "role": "assistant"}
        return head | {"status": status, "content": content}

    def _whole_item(self, choice: Choice) -> dict[str, Any]:
        return self._item(self._status(choice), [self._text(choice.text)])

    def _response(self, status: str, output: list[Any], choice: Choice | None) -> dict[str, Any]:
        usage = None
        if choice is not None:
            end = choice.ended()
            usage = {
                "input_tokens": end.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.reused, "cache_write_tokens": 0},
                "output_tokens": end.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": end.prompt_tokens + end.completion_tokens,
            }
        asked, defaults = self.body, self.served.model.defaults
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.get("temperature", defaults.temperature),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": asked.get("top_p", defaults.top_p),
            "truncation": "disabled",
            "usage": usage,
        }
