"""/v1/messages, as Anthropic words it."""

from __future__ import annotations

import secrets
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
    "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
    "container", "mcp_servers", "context_management", "output_config", "inference_geo",
])  # fmt: skip


def understand(served: Served, body: Mapping[str, Any]) -> Work:
    """Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN)
    if "max_tokens" not in body:
        raise refuse("max_tokens is missing, expected an integer", "max_tokens", "missing_required_parameter")
    fields.unsupported(body, "tools", "mcp_servers", "container", "output_config")
    thinking: dict[str, Any] = fields.take(body, "thinking", dict, {"type": "disabled"})
    if thinking.get("type") != "disabled":
        raise refuse('thinking is not supported, expected {"type": "disabled"}', "thinking", "unsupported_parameter")
    asked = {name: value for name, value in body.items() if name not in ("stop", "stop_sequences")}
    options = fields.sampling(asked | {"stop": body.get("stop_sequences", [])}, served.model, None)
    ready = chat.prompt(served.model, conversation(body))
    asks = chat.several(served.model, [Ask(ready.tokens, options, ready.pixels)])
    return Work(served, asks, Messages(served), fields.take(body, "stream", bool, False))


def counted(served: Served, body: Mapping[str, Any]) -> dict[str, int]:
    """/v1/messages/count_tokens"""
    fields.check_known(body, KNOWN)
    fields.unsupported(body, "tools")
    return {"input_tokens": len(chat.prompt(served.model, conversation(body)).tokens)}


def conversation(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As chat templates take it."""
    given = [message | {"content": _content(message.get("content"))} for message in chat.messages(body)]
    if "system" in body:
        given.insert(0, {"role": "system", "content": _content(body["system"])})
    return given


def _content(content: Any) -> Any:
    """A text stays one, and parts of text become one; images get a data: URL."""
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = part.get("source") if kind == "image" else None
    if isinstance(source, dict) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return {"type": "image", "image": f"data:{source.get('media_type')};base64,{source['data']}"}
    raise refuse(f"messages has {shown(part)}, expected a text, or an image with a base64 source", "messages")


def error_body(error: ApiError) -> dict[str, Any]:
    return {"type": "error", **error.body()}


@dataclass
class Messages:
    """The words of it."""

    served: Served
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def start(self, choice: Choice) -> Iterable[Any]:
        usage = {"input_tokens": len(choice.ask.prompt), "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}

    def piece(self, choice: Choice, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    def end(self, choice: Choice) -> Iterable[Any]:
        reason, stop = self._reason(choice)
        yield {"type": "content_block_stop", "index": 0}
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage(choice)}

    def close(self, choices: Sequence[Choice]) -> Iterable[Any]:
        yield {"type": "message_stop"}

    def error(self, error: ApiError) -> Iterable[Any]:
        yield error_body(error)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        text = [{"type": "text", "text": choice.text}]
        return self._message(text, *self._reason(choice), self._usage(choice))

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.served.name}
        return head | {"content": content, "stop_reason": reason, "stop_sequence": stop, "usage": usage}

    def _reason(self, choice: Choice) -> tuple[str, str | None]:
        end = choice.ended()
        if end.stopped_by:
            return "stop_sequence", end.stopped_by
        return ("max_tokens" if end.finish_reason == "length" else "end_turn"), None

    def _usage(self, choice: Choice) -> dict[str, int]:
        end = choice.ended()
        return {"input_tokens": end.prompt_tokens, "output_tokens": end.completion_tokens}
