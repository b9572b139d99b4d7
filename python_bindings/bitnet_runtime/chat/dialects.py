"""The notation in which a model calls tools: that of its chat template, or the one we describe to it.

Three notations are known, which published ternary models share with most others. For a template that has another, or
knows no tools, everything about tools in a conversation becomes plain text, in the first notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_runtime.chat.tools import Function, Tools, arguments_of
from bitnet_runtime.errors import InvalidParameterError, shown
from bitnet_runtime.structured.formats import OF_TOOLS
from bitnet_runtime.structured.schemas import exact

Message = Mapping[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOGETHER = 16  # calls of one answer, or lists of them and calls in each, where only calls may come
ITEM, KEY = ", ", ": "  # separators, as json.dumps writes
SPACES = {"whitespace_flexible": False, "item_separator": ITEM, "key_separator": KEY}
_TAGS = re.compile(r'<tool_call>(?:\\n|\s)*(\[)?(?:\\n|\s)*\{\s*\\?"name\\?"')
_JSON = re.compile(r'\{\s*\\?"name\\?"\s*:[^{}]{1,80}\\?"parameters\\?"\s*:')
_TEXT = r"TEXT: /(.|\n)*/" + "\n"


@dataclass(frozen=True)
class Dialect:
    """opens, closes: around the calls; "": an answer that begins with { is one. listed: the calls are a list.

    told: the template tells the model of tools; else we do.
    """

    opens: str
    closes: str
    arguments: str  # what they are called
    listed: bool = False
    told: bool = True

    # ---- conversations ----

    def messages(self, messages: Sequence[Message], tools: Tools | None, history: bool) -> list[Message]:
        """The messages as the template expects them. history: it knows calls in messages."""
        found = [_plain_result(message) for message in messages]
        if not self.told and (tools is not None or not history):
            return _told(found, tools)
        return [each for message in found for each in self._called(message)]

    def _called(self, message: Message) -> list[Message]:
        """The calls of a message with their arguments as objects."""
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            return [message]
        calls = [_as_object(call) for call in _calls(message)]
        message = {**message, "content": message.get("content") or ""}
        if self.listed:
            return [{**message, "tool_calls": [call["function"] for call in calls]}]
        if self.opens:
            return [{**message, "tool_calls": calls}]
        return [{**message, "tool_calls": [call]} for call in calls]  # the template can express only one call a message

    # ---- what an answer may be ----

    def grammar(self, tools: Tools, schema: str | None, special: Mapping[str, int]) -> str | None:
        """In Lark's notation, of an answer that calls tools as it has to; None: any answer will do.

        schema: of an answer without calls. special: tokens that no text spells, by their names.
        """
        free = tools.choice == "auto"
        if free and schema is None and not any(each.strict for each in tools.functions):
            return None
        opens, closes = (_literal(tag, special) for tag in (self.opens, self.closes))
        many = tools.parallel and self.opens
        gap = r'"\n"' if self.opens else ""
        body = f"({gap} one {gap})"
        if self.listed:
            more = f'(", " one){{0,{TOGETHER - 1}}}' if many else ""
            body = f'({gap} "[" one {more} "]" {gap})'
        called = f"{body} {closes}"
        calls = f"{opens} {called}" + (f' ("\\n" {opens} {called}){{0,{TOGETHER - 1}}}' if many else "")
        if not free:
            start = calls
        elif schema is not None:
            start = f"{calls} | %json {json.dumps(spaced(json.loads(schema)))}"
        elif not self.opens:
            start = f"{calls} | ANSWER"
        elif many:
            start = f"(head {called})* TEXT"
        else:
            start = f"head {called} | TEXT"
        rules = [f"start: {start}", *_functions(tools.callable(), self.arguments), _TEXT]
        lazy = "" if self.opens in special else "[lazy]"
        rules.append(f"head{lazy}: TEXT {opens}" if self.opens else r"ANSWER: /([^{\s](.|\n)*)?/")
        return OF_TOOLS + "\n".join(rules) + "\n"


def dialect(template: str) -> Dialect:
    """The notation of a chat template."""
    if re.search(r"\btools\b", template):
        if found := _TAGS.search(template):
            return Dialect(OPEN, CLOSE, "arguments", listed=bool(found[1]))
        if _JSON.search(template):
            return Dialect("", "", "parameters")
    return Dialect(OPEN, CLOSE, "arguments", told=False)


def _functions(functions: Sequence[Function], arguments: str) -> list[str]:
    """Rules: `one` is a call of one of them.

    Its terminals are those that a schema has for the same text: a longer one would go on where theirs end, and what
    begins like a call could be nothing else.
    """
    names = " | ".join(f"one_{i}" for i in range(len(functions)))
    rules = [f'one: {_terminals("{", json.dumps("name"), KEY)} ({names}) "}}"']
    for i, each in enumerate(functions):
        try:
            schema = json.dumps(spaced(exact(each.parameters), lenient=not each.strict))
        except (RecursionError, ValueError) as error:
            raise InvalidParameterError(f"tools: the parameters of {each.name}: {error}", "tools") from None
        begin = _terminals(json.dumps(each.name), ITEM, json.dumps(arguments), KEY)
        rules += [f"one_{i}: {begin} json_{i}", f"json_{i}: %json {schema}"]
    return rules


def _terminals(*texts: str) -> str:
    return " ".join(map(json.dumps, texts))


def spaced(schema: Any, lenient: bool = False) -> Any:
    """A schema for JSON with fixed white space. lenient: ignore what the library does not know."""
    if not isinstance(schema, Mapping):
        return schema
    return {**schema, "x-guidance": SPACES | ({"lenient": True} if lenient else {})}


def _literal(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else json.dumps(text) if text else ""


# ---- messages ----


def _calls(message: Message) -> list[Mapping[str, Any]]:
    """The tool calls of a message, each with a function that has a name. Raises InvalidParameterError."""
    calls = message["tool_calls"]
    for call in calls if isinstance(calls, (list, tuple)) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidParameterError(
                f'messages has the tool call {shown(call)}, expected {{"function": {{"name": "…", "arguments": …}}}}',
                "messages",
            )
    return list(calls)


def _as_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, if they are the JSON of one."""
    function = dict(call["function"])
    if "arguments" in function:
        function["arguments"] = arguments_of(function["arguments"])
    return {**call, "function": function}


def _plain_result(message: Message) -> Message:
    """The result of a tool as one text."""
    content = message.get("content")
    if message.get("role") != "tool" or isinstance(content, str):
        return message
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if not texts or len(texts) != len(parts):
        raise InvalidParameterError(f"messages has the result {shown(content)}, expected a text", "messages")
    return {**message, "content": "\n".join(texts)}


def _told(messages: Sequence[Message], tools: Tools | None) -> list[Message]:
    """A conversation in which tools, calls and results are plain text of a system, an assistant and a user."""
    out: list[Message] = []
    results = False  # the last message is some
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if results:
                out[-1] = {"role": "user", "content": f"{out[-1]['content']}\n{text}"}
            else:
                out.append({"role": "user", "content": text})
        elif role == "assistant" and message.get("tool_calls"):
            written = [f"{OPEN}\n{_written(_as_object(call)['function'])}\n{CLOSE}" for call in _calls(message)]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            out.append(rest | {"content": _with(content, "\n".join(written), "\n")})
        else:
            out.append(message)
        results = role == "tool"
    if tools is None:
        return out
    system = out[:1] if out[0].get("role") == "system" else []
    said = system[0].get("content") if system else None
    return [{"role": "system", "content": _with(said, _explained(tools), "\n\n")}, *out[len(system) :]]


def _with(content: Any, text: str, gap: str) -> Any:
    """The content of a message, which may be nothing, a text, or parts, and behind it a text."""
    if isinstance(content, (list, tuple)):
        return [*content, {"type": "text", "text": gap + text}]
    return f"{content}{gap}{text}" if content else text


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return json.dumps(call, ensure_ascii=False, allow_nan=False)


def _explained(tools: Tools) -> str:
    """The description of tools for a model whose template has none."""
    each = "\n".join(json.dumps(function.entry(), ensure_ascii=False) for function in tools.functions)
    return (
        f"# Tools\n\nThese functions can be called:\n<tools>\n{each}\n</tools>\n\nA call is written like this, one for "
        f'each function needed:\n{OPEN}\n{{"name": "…", "arguments": {{…}}}}\n{CLOSE}\n'
        "The result comes back within <tool_response> and </tool_response>."
    )
