"""The form of /v1/chat/completions before there were tools: `functions`, and a `function_call` in messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_serve.endpoints import fields
from bitnet_serve.errors import refuse


def newer(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The request in today's form, and whether the answer has to be in the older one. Raises ApiError."""
    asked = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    if isinstance(asked.get("messages"), list):
        asked["messages"] = _messages(asked["messages"])
    if len(asked) == len(body):
        return asked, False
    if both := {"tools", "tool_choice"} & set(asked):
        raise refuse(f"functions and {min(both)} are given, expected one of both", "functions")
    functions: list[Any] = fields.take(body, "functions", list, [])
    choice = body.get("function_call", "auto")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    asked["tools"] = [{"type": "function", "function": each} for each in functions]
    return asked | {"tool_choice": choice, "parallel_tool_calls": False}, True


def _messages(given: list[Any]) -> list[Any]:
    """A result belongs to the call before it."""
    found, calls = [], 0
    for message in given:
        if isinstance(message, dict) and isinstance(call := message.get("function_call"), dict):
            calls += 1
            message = {name: value for name, value in message.items() if name != "function_call"}
            message |= {"tool_calls": [{"id": f"call_{calls}", "type": "function", "function": call}]}
        elif isinstance(message, dict) and message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": f"call_{calls}"}
        found.append(message)
    return found
