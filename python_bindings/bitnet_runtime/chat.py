"""The chat template of a file: messages in, prompt text out, within limits.

A template is a program by whoever made the file. It runs in Jinja's immutable sandbox on a
budget: a loop turn, a call and every character made cost one each, and after a second it is
over. Only filters and string methods whose cost is known beforehand are offered.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from bitnet_runtime.errors import InvalidParameterError, MissingDependencyError, TemplateError
from bitnet_runtime.text import Tokenizer

try:
    from jinja2 import Template, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer
except ImportError as error:
    raise MissingDependencyError(f"chat needs the `jinja2` library ({error}): pip install 'jinja2>=3.1.6'") from error

MAX_BYTES = 256 * 1024  # of a template, as in the format
BUDGET = 1 << 22  # and 64 for each character of the messages
SECONDS = 1.0
MAX_BITS = 4096  # of an integer

FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe",
    "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
)  # fmt: skip
METHODS = (
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isspace",
    "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper",
)  # fmt: skip


class ChatTemplate:
    """A compiled chat template. Safe to share between threads."""

    def __init__(self, source: str) -> None:
        if len(source.encode()) > MAX_BYTES:
            raise TemplateError(f"the chat template has {len(source)} characters, expected at most {MAX_BYTES} bytes")
        self._environment = _Environment()
        self._lock = threading.Lock()
        _templates.add(self)
        try:
            tree = _Guards().visit(self._environment.parse(source))
            code = self._environment.compile(tree, filename="<template>")
            self._template = Template.from_code(self._environment, code, self._environment.globals)
        except Exception as error:
            raise TemplateError(f"the chat template of the file is broken{_line(error)}: {_reason(error)}") from None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The tokens of the prompt that asks for the next answer; or of the messages alone, to learn from.

        special_tokens: variables of the template such as eos_token, and the texts of these tokens.
        What the messages say stays plain text, even where it spells a special token.
        """
        text = self.render(
            messages, special_tokens, add_generation_prompt=add_generation_prompt, change=tokenizer.shield
        )
        return tokenizer.encode(text, add_bos=False, shielded=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool = True,
        change: Callable[[str], str] = str,
    ) -> str:
        """The same as text. change: what is done to every text of a message before."""
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise InvalidParameterError(f"messages is {messages!r:.100}, expected a list of messages", "messages")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidParameterError(
                    f'messages has {message!r:.100}, expected {{"role": "user", "content": "…"}}', "messages"
                )
        try:
            changed = [_map_text(_as_templates_expect(message), change) for message in messages]
            size = len(json.dumps(changed, default=str))
        except (RecursionError, TypeError, ValueError) as error:  # TypeError: a key that JSON has not
            raise InvalidParameterError(f"messages: {error}", "messages") from None
        more: dict[str, Any] = {"tools": None, "documents": None}  # as apply_chat_template has it
        more |= {"add_generation_prompt": add_generation_prompt, **special_tokens}
        return self._render(size, **more, messages=changed)

    def _render(self, size: int, messages: list[Any], **variables: Any) -> str:
        with self._lock:
            self._environment.restart(BUDGET + 64 * size)
            try:
                return self._template.render(messages=messages, **variables)
            except Exception as error:
                roles = ", ".join(str(message["role"]) for message in messages[:8])
                raise TemplateError(
                    f"the chat template of the file failed{_line(error)}: {_reason(error)}; the roles given were "
                    f"{roles}{', …' if len(messages) > 8 else ''}; most templates take user and assistant in turn, "
                    f"after at most one system message"
                ) from None


_templates: weakref.WeakSet[ChatTemplate] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child: a thread that was rendering is not there, and its budget begins anew with the next."""
    for template in list(_templates):
        template._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class _LimitError(Exception):
    """The template asked for more than it may."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a price on everything that makes work or memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [loopcontrols, _Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self.made, extensions=extensions
        )
        self.restart(BUDGET)
        own = {"join": self.join, "replace": self.replace, "tojson": self.tojson}
        offered = {name: self.filters[name] for name in FILTERS}
        self.filters = {name: self._priced(function) for name, function in (offered | own).items()}
        offered = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals.clear()
        self.globals.update(offered, raise_exception=_raise_exception, strftime_now=_strftime_now)

    def restart(self, budget: int) -> None:
        self._left = budget
        self._deadline = time.monotonic() + SECONDS

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0 or time.monotonic() > self._deadline:
            raise _LimitError("it asks for more work than a template may")

    def made(self, value: Any) -> Any:
        """Pay for a value, shared parts as often as they occur (printing writes them so often)."""
        self.spend(1)
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, Mapping):
            for item in value.items():
                self.made(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.made(item)
        return value

    def tilde(self, *values: Any) -> str:
        return "".join([str(self.made(value)) for value in values])

    def join(self, values: Iterable[Any], separator: str = "") -> str:
        items = [str(self.made(value)) for value in values]
        self.spend(len(separator) * len(items))
        return separator.join(items)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        self.spend(text.count(old) * len(new))
        return text.replace(old, new, count)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and not 0 <= indent <= 8:
            raise _LimitError(f"it indents JSON by {indent}, expected 0 to 8")
        if separators is not None and sum(map(len, separators)) > 8:
            raise _LimitError(f"it separates JSON by {separators!r:.80}, expected up to 8 characters")
        return json.dumps(
            value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
        )

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self.spend(len(owner))
            if function.__name__ == "join":
                return self.made(self.join(args[0], owner))
            if function.__name__ == "replace":
                return self.made(self.replace(owner, *args))
        return self.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise _LimitError(f"it uses the operator {operator}, which templates may not")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    self.spend(len(sequence) * max(times, 0))
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
                raise _LimitError("it makes a number too large")
        return self.made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """No str.format: a width in it makes text of any length."""

    def _priced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for what it takes and for what it makes."""

        @functools.wraps(function)  # keeps Jinja's marks on the function
        def priced(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if isinstance(value, (str, list, tuple, Mapping)):
                    self.made(value)
            return self.made(function(*args, **kwargs))

        return priced


class _Guards(NodeTransformer):
    """Put a price where the sandbox has no hook: loop turns, macro calls, `~`, literal containers."""

    def _paid(self, node: Any) -> Any:
        self.generic_visit(node)
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("spend", [nodes.Const(1 + text)])))
        return node

    visit_For = visit_Macro = visit_CallBlock = _paid  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("tilde", node.nodes)

    def _made(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _call("made", [node])

    visit_List = visit_Tuple = visit_Dict = _made  # noqa: N815

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        if node.name in ("varargs", "kwargs"):
            raise _LimitError(f"it uses {node.name}, which templates may not")
        return node


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


class _Generation(Extension):
    """`{% generation %}` marks the answer for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is None, its reasoning under the names that templates know (as in transformers 5)."""
    given = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((given[name] for name in names if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _raise_exception(message: str) -> NoReturn:
    raise _LimitError(str(message)[:500])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form[:64])


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:500]


def _line(error: Exception) -> str:
    """The line of the template where it happened, in words; "" when unknown."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else 0
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f" in line {line}" if line else ""


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every text inside dictionaries and lists."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value
