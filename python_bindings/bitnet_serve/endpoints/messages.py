"""/v1/messages, in the form of Anthropic's API."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.chat.thoughts import are_written
from bitnet_runtime.chat.tools import ToolCall
from bitnet_runtime.errors import ToolCallError, shown
from bitnet_runtime.model import Model
from bitnet_serve.endpoints import chat, fields, offers
from bitnet_serve.endpoints.answers import Block, Choice, Shape, Work
from bitnet_serve.errors import MESSAGES, ApiError, refuse
from bitnet_serve.models.registry import Served

KNOWN = frozenset([
    "model", "messages", "system", "max_tokens", "stream", "tools", "tool_choice", "thinking", "container",
    "mcp_servers", "context_management", "output_config", "inference_geo", "thread",
])  # fmt: skip


def understand(served: Served, body: Mapping[str, Any]) -> Work:
    """Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN)
    if "max_tokens" not in body:
        raise refuse("max_tokens is missing, expected an integer", "max_tokens", "missing_required_parameter")
    fields.unsupported(body, "mcp_servers", "container")
    if body.get("thread"):
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # clients go on without
        told = "thread is not supported by this server: send all messages"
        raise ApiError(400, told, "unsupported_parameter", "thread", more={"details": details})
    options = fields.sampling({**body, "response_format": _format(body)}, served.model, None)
    ask = chat.asked(served.model, *_framed(served.model, body), offers.of_messages(body), options)
    return Work(served, chat.several(served.model, [ask]), Messages(served), fields.take(body, "stream", bool, False))


def counted(served: Served, body: Mapping[str, Any]) -> dict[str, int]:
    """/v1/messages/count_tokens: asked to find out whether a conversation fits, so it may be too long."""
    fields.check_known(body, KNOWN)
    said, frame = _framed(served.model, body)
    return {"input_tokens": len(chat.prompt_tokens(served.model, said, frame, offers.of_messages(body)))}


def _format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The format in output_config, in OpenAI's form. Its effort is ignored."""
    config: dict[str, Any] = fields.take(body, "output_config", dict, {})
    if unknown := set(config) - {"effort", "format"}:
        raise refuse(f"output_config has {shown(min(unknown), 80)}, expected effort and format", "output_config")
    given = config.get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or given.get("schema") is None:
        expected = '{"type": "json_schema", "schema": …}'
        raise refuse(f"output_config.format is {shown(given)}, expected {expected}", "output_config")
    return {"type": "json_schema", "json_schema": given}


def _variables(model: Model, body: Mapping[str, Any]) -> dict[str, Any]:
    """What `thinking` sets in a template that can turn thoughts on and off."""
    thinking: dict[str, Any] = fields.take(body, "thinking", dict, {"type": "adaptive"})  # leaves it to the template
    kind, template = thinking.get("type"), model.template_source or ""
    if kind not in ("enabled", "disabled", "adaptive"):
        expected = "a type of enabled, disabled or adaptive"
        raise refuse(f"thinking is {shown(thinking)}, expected {expected}", "thinking")
    if kind == "enabled" and model.has_template and not are_written(template):
        told = f'{model.path.name} has a chat template without thoughts, expected thinking {{"type": "disabled"}}'
        raise refuse(told, "thinking", "unsupported_parameter")
    if kind == "adaptive" or "enable_thinking" not in template:
        return {}
    return {"enable_thinking": kind == "enabled"}


def _framed(model: Model, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], chat.Frame]:
    """A conversation, and the beginning of the answer, if the last message is one."""
    said, begun = chat.begun_of(conversation(body))
    if begun != begun.rstrip():
        raise refuse(
            "the last message begins the answer and ends in white space; leave the white space out", "messages"
        )
    return said, chat.Frame(begun, variables=_variables(model, body))


def conversation(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As chat templates take it."""
    given = [part for message in chat.messages(body) for part in _turn(message)]
    if "system" in body:
        system = body["system"]
        if not isinstance(system, (str, list)):
            raise refuse(f"system is {shown(system)}, expected a text or a list of them", "system", "invalid_type")
        if system != []:  # which says that there is none; an empty text takes the place of a template's own
            given.insert(0, {"role": "system", "content": _content(system, "system")})
    return given


def _turn(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message; those before it of results that it holds, and with its thoughts and the calls that it makes."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    if not content:
        raise refuse("messages has a content that is an empty list, expected a text or some blocks", "messages")
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    results = [_result(part) for part, kind in zip(content, kinds, strict=True) if kind == "tool_result"]
    calls = [_call(part) for part, kind in zip(content, kinds, strict=True) if kind == "tool_use"]
    thinking = ("thinking", "redacted_thinking") if message.get("role") == "assistant" else ()
    apart = ("tool_result", "tool_use", *thinking)
    thoughts = [_thought(part) for part, kind in zip(content, kinds, strict=True) if kind in thinking]
    rest = [part for part, kind in zip(content, kinds, strict=True) if kind not in apart]
    if results and not rest:
        return results
    said = message | {"content": _content(rest) if rest else None}
    if thoughts:
        said |= {"content": said["content"] or "", "reasoning_content": "\n".join(filter(None, thoughts))}
    return [*results, said | {"tool_calls": calls} if calls else said]


def _thought(part: dict[str, Any]) -> str:
    """Those of a cloud model may be encrypted: then there are none."""
    return fields.text(part, "thinking") if part["type"] == "thinking" else ""


def _result(part: dict[str, Any]) -> dict[str, Any]:
    content = _content(part.get("content", ""))
    if not isinstance(content, str):
        raise refuse(f"a tool_result is {shown(content)}, expected a text", "messages")
    return {"role": "tool", "tool_call_id": fields.text(part, "tool_use_id"), "content": content}


def _call(part: dict[str, Any]) -> dict[str, Any]:
    function = {"name": fields.text(part, "name"), "arguments": fields.take(part, "input", dict, {})}
    return {"id": fields.text(part, "id"), "type": "function", "function": function}


def _content(content: Any, name: str = "messages") -> Any:
    """A text stays one, and parts of text become one; images get a data: URL. name: of the field."""
    if not isinstance(content, list):
        return content
    parts = [_part(part, name) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, name: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = part.get("source") if kind == "image" else None
    if isinstance(source, dict) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return {"type": "image", "image": f"data:{source.get('media_type')};base64,{source['data']}"}
    raise refuse(f"{name} has {shown(part)}, expected a text, or an image with a base64 source", name)


def _content_block(block: Block) -> dict[str, Any]:
    """A text, or the use of a tool; a text too, if the model wrote no object of arguments."""
    if block.thinks:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": block.text}
    call = ToolCall(block.call.id, block.call.name, block.text)
    try:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
    except ToolCallError:
        return {"type": "text", "text": f'{{"name": "{call.name}", "arguments": {call.text}'}


@dataclass
class Messages(Shape):
    """The form of its answers."""

    served: Served
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def start(self, choice: Choice) -> Iterable[Any]:
        usage = {"input_tokens": len(choice.ask.prompt), "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}

    def begin(self, choice: Choice, block: Block) -> Iterable[Any]:
        if block.call is None:
            yield self._of(block, "start", content_block=_content_block(Block(thinks=block.thinks)))

    def piece(self, choice: Choice, block: Block, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        if block.call is None:
            kind = "thinking" if block.thinks else "text"
            yield self._of(block, "delta", delta={"type": f"{kind}_delta", kind: text})

    def finish(self, choice: Choice, block: Block) -> Iterable[Any]:
        """A call is sent when it is complete, because broken arguments are not a call here."""
        if block.call is not None:
            whole = _content_block(block)
            text = {"type": "text_delta", "text": whole.get("text")}
            if whole["type"] == "tool_use":
                text = {"type": "input_json_delta", "partial_json": block.text}
            empty: dict[str, Any] = {"input": {}} if whole["type"] == "tool_use" else {"text": ""}
            yield self._of(block, "start", content_block=whole | empty)
            yield self._of(block, "delta", delta=text)
        yield self._of(block, "stop")

    def end(self, choice: Choice) -> Iterable[Any]:
        reason, stop = self._reason(choice)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage(choice)}

    def close(self, choices: Sequence[Choice]) -> Iterable[Any]:
        yield {"type": "message_stop"}

    def error(self, error: ApiError) -> Iterable[Any]:
        yield error.body(MESSAGES)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        content = [_content_block(block) for block in choice.blocks]
        return self._message(content, *self._reason(choice), self._usage(choice))

    def _of(self, block: Block, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": block.place, **more}

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.served.name}
        return head | {"content": content, "stop_reason": reason, "stop_sequence": stop, "usage": usage}

    def _reason(self, choice: Choice) -> tuple[str, str | None]:
        end = choice.ended()
        if end.stopped_by:
            return "stop_sequence", end.stopped_by
        if end.finish_reason == "length":
            return "max_tokens", None
        used = any(_content_block(block)["type"] == "tool_use" for block in choice.calls)
        return ("tool_use" if used else "end_turn"), None

    def _usage(self, choice: Choice) -> dict[str, int]:
        """What was there already counts apart, and clients add the two."""
        end = choice.ended()
        reused = {"cache_read_input_tokens": end.reused} if end.reused else {}
        return {"input_tokens": end.prompt_tokens - end.reused, **reused, "output_tokens": end.completion_tokens}
