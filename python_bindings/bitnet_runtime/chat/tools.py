"""Function calling: tools that a model may ask for, told to it by name, purpose and parameters.

Nothing here calls one. The model asks, a `ToolCall` says for what, and the program decides.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_runtime.chat.signatures import described
from bitnet_runtime.errors import InvalidParameterError, ToolCallError, shown

Tool = Mapping[str, Any] | Callable[..., Any]
"""{"type": "function", "function": {"name": …, "description": …, "parameters": a JSON schema, "strict": bool}}, as
OpenAI has it; or a function of Python, whose signature and documentation say the same."""

MOST = 128  # tools
MOST_BYTES = 1 << 20  # of all of them, as JSON
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class Function:
    """A tool, checked. strict: a call keeps to its parameters whatever `choice` is."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def entry(self) -> dict[str, Any]:
        """As chat templates take it."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}


@dataclass(frozen=True)
class Tools:
    """What may be called in an answer, and what has to be. choice: one of CHOICES, or the name of a function."""

    functions: tuple[Function, ...]
    choice: str = "auto"
    parallel: bool = True  # more than one call in an answer

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, choice: str = "auto", parallel: bool = True) -> Tools | None:
        """Checked; None: there is nothing to call. Raises InvalidParameterError."""
        if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
            raise _wrong("tools", tools, "a list of functions")
        if not isinstance(parallel, bool):
            raise _wrong("parallel_tool_calls", parallel, "true or false")
        functions = tuple(map(_function, tools or ()))
        names = [function.name for function in functions]
        if len(names) > MOST:
            raise InvalidParameterError(f"tools has {len(names)} entries, expected at most {MOST}", "tools")
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise InvalidParameterError(f"tools has {twice!r} twice, expected different names", "tools")
        if (choice not in CHOICES and choice not in names) or (choice == "required" and not names):
            known = f"{', '.join(CHOICES)}, or one of the tools {', '.join(names):.200}"
            expected = f"expected {known}" if names else "and no tools are given; give some, or auto or none"
            raise InvalidParameterError(f"tool_choice is {shown(choice)}, {expected}", "tool_choice")
        if len(_json([function.entry() for function in functions])) > MOST_BYTES:
            raise InvalidParameterError(f"tools are larger than {MOST_BYTES:,} bytes as JSON", "tools")
        return None if choice == "none" or not names else cls(functions, choice, parallel)

    def callable(self) -> tuple[Function, ...]:
        """Those that an answer may call."""
        return tuple(each for each in self.functions if self.choice in ("auto", "required", each.name))


@dataclass(frozen=True)
class ToolCall:
    """What a model asks for. text: the arguments as it wrote them."""

    id: str
    name: str
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        """By their names. Raises ToolCallError: the model wrote no JSON object."""
        try:
            found = loaded(self.text)
        except (ValueError, RecursionError) as error:
            found = error
        if not isinstance(found, dict):
            raise ToolCallError(
                f"the model called {self.name} with {shown(self.text)}, expected a JSON object; "
                'more max_tokens complete one that was cut off, and "strict": true of the tool holds it to JSON'
            )
        return found

    def message(self) -> dict[str, Any]:
        """Within "tool_calls" of a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}

    def answer(self, result: Any) -> dict[str, Any]:
        """The message that tells the model what came of it: a text, or what becomes JSON."""
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


def loaded(text: str) -> Any:
    """JSON that any program reads: no NaN, no 1e999, no half of a character. Raises ValueError, RecursionError."""
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    return found


def arguments_of(given: Any) -> Any:
    """The arguments of a call, from the text that mostly has them as JSON; "" has none. Any other text as it is."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            return loaded(given or "{}")
    return given


def _function(tool: Tool) -> Function:
    if callable(tool):
        name, purpose, shape = described(tool)
        return Function(_named(name), purpose, shape)
    told = tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
    if not isinstance(told, Mapping):
        raise _wrong("tools", tool, 'a function, or {"type": "function", "function": {"name": …}}')
    name, parameters = _named(told.get("name")), told.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise _wrong(f"parameters of the tool {name}", parameters, 'a JSON schema of "type": "object"')
    description, strict = told.get("description"), told.get("strict")
    if not isinstance(description, str | None):
        raise _wrong(f"description of the tool {name}", description, "a text")
    if not isinstance(strict, bool | None):
        raise _wrong(f"strict of the tool {name}", strict, "true or false")
    _json(parameters)
    return Function(name, description or "", {"type": "object", **parameters}, bool(strict))


def _named(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong("the name of a tool", name, "up to 128 letters, digits, _, . or -")
    if name in CHOICES:  # a choice of it would be taken for the word
        raise _wrong("the name of a tool", name, f"none of the words of tool_choice: {', '.join(CHOICES)}")
    return name


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(f"tools: {error}", "tools") from None


def _wrong(what: str, found: object, expected: str) -> InvalidParameterError:
    param = what if what == "parallel_tool_calls" else "tools"
    return InvalidParameterError(f"{what} is {shown(found)}, expected {expected}", param)
