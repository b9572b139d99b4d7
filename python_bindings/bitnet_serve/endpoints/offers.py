"""Tools of a request, from the form of each API to that of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bitnet_runtime.chat.tools import CHOICES, MOST, Tools
from bitnet_runtime.errors import shown
from bitnet_runtime.structured.formats import KINDS
from bitnet_serve.endpoints import fields
from bitnet_serve.errors import refuse


def of_chat(body: Mapping[str, Any]) -> Tools | None:
    """{"type": "function", "function": {"name": …}}; what is chosen is so, too. Raises InvalidParameterError."""
    return _offer(body, lambda tool: tool, lambda choice: _name(choice.get("function")))


def of_responses(body: Mapping[str, Any]) -> Tools | None:
    """{"type": "function", "name": …}: the function's fields are not in an object of their own."""

    def tool(given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "function" or "name" not in given:
            raise refuse(f'tools has {shown(given)}, expected {{"type": "function", "name": …}}', "tools")
        return {"type": "function", "function": {"strict": True} | given}  # unless it is said

    return _offer(body, tool, _name)


def of_messages(body: Mapping[str, Any]) -> Tools | None:
    """{"name": …, "input_schema": …}; what is chosen is {"type": "auto"}, "any", "tool" or "none"."""
    choice = fields.take(body, "tool_choice", dict, {"type": "auto"})
    words = {"auto": "auto", "any": "required", "none": "none", "tool": choice}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in words:
        raise refuse(f"tool_choice is {shown(choice)}, expected a type of {', '.join(words)}", "tool_choice")
    parallel = not fields.take(choice, "disable_parallel_tool_use", bool, False)
    given = {**body, "tool_choice": words[kind], "parallel_tool_calls": parallel}

    def tool(given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type", "custom") != "custom" or "input_schema" not in given:
            raise refuse(f'tools has {shown(given)}, expected {{"name": …, "input_schema": …}}', "tools")
        told = {name: given[name] for name in ("name", "description", "strict") if name in given}
        return {"type": "function", "function": told | {"parameters": given["input_schema"]}}

    return _offer(given, tool, _name)


def may_be_held(body: Mapping[str, Any]) -> bool:
    """Whether an answer may be held to a format, in any of the APIs, before anything is checked: to compile one takes
    seconds if it is malicious. Tools that are called freely need none."""
    within = [_of(body.get(name), "format") for name in ("text", "output_config")]
    formats = [each for each in (body.get("response_format"), *within) if _of(each, "type") != "text"]
    choice = body.get("tool_choice", body.get("function_call", "auto"))
    kind = _of(choice, "type") if isinstance(choice, dict) else choice
    older = [{"function": each} for each in _few(body.get("functions"))]
    free = kind in ("auto", "none") and not any(map(_may_be_strict, [*_few(body.get("tools")), *older]))
    return not free or any(each is not None for each in (*formats, *map(body.get, KINDS)))


def _few(given: Any) -> list[Any]:
    """As many tools as may be given: more are refused, and the thread of all connections waits."""
    return given[:MOST] if isinstance(given, list) else []


def _may_be_strict(tool: Any) -> bool:
    """One of /v1/responses is, unless it is said."""
    of_responses = isinstance(tool, dict) and tool.keys().isdisjoint({"function", "input_schema"})
    return bool(_of(_of(tool, "function") or tool, "strict", of_responses))


def _of(value: Any, name: str, default: Any = None) -> Any:
    return value.get(name, default) if isinstance(value, dict) else None


def _offer(
    body: Mapping[str, Any], tool: Callable[[Any], Any], name: Callable[[dict[str, Any]], str | None]
) -> Tools | None:
    """tool: one as the runtime takes it; name: of the function that is chosen."""
    choice = body.get("tool_choice", "auto")
    given: list[Any] = fields.take(body, "tools", list, [])
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        given, choice = _allowed(given, choice.get("allowed_tools", choice), name)
    chosen = name(choice) if isinstance(choice, dict) else choice if choice in CHOICES else None
    if not chosen:
        raise refuse(
            f"tool_choice is {shown(choice)}, expected {', '.join(CHOICES)}, or a function by its name", "tool_choice"
        )
    return Tools.of([tool(each) for each in given], chosen, fields.take(body, "parallel_tool_calls", bool, True))


def _allowed(given: list[Any], choice: Any, name: Callable[[dict[str, Any]], str | None]) -> tuple[list[Any], str]:
    """The tools that this request may call, and its "mode". The model does not see the others."""
    mode, tools = (choice.get("mode"), choice.get("tools")) if isinstance(choice, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise refuse(f"allowed_tools is {shown(choice)}, expected a mode of auto or required, and tools", "tool_choice")
    named = {name(each): each for each in given if isinstance(each, dict)}
    wanted = [name(each) if isinstance(each, dict) else None for each in tools]
    if unknown := [tool for tool, found in zip(tools, wanted, strict=True) if found is None or found not in named]:
        raise refuse(f"allowed_tools has {shown(unknown[0])}, expected some of tools by their names", "tool_choice")
    return [tool for found, tool in named.items() if found in wanted], str(mode)


def _name(choice: Any) -> str | None:
    name = choice.get("name") if isinstance(choice, dict) else None
    return name if isinstance(name, str) else None
