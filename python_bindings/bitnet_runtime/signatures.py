"""A Python function as a tool for a model: name, description, and a JSON schema of its parameters."""

from __future__ import annotations

import enum
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

from bitnet_runtime.errors import InvalidParameterError

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, None: {"type": "null"}, Any: {}, object: {}, dict: {"type": "object"},
    list: {"type": "array"}, inspect.Parameter.empty: {},
}  # fmt: skip
_ARGUMENT = re.compile(r"(\s*)(?::param\s+(?:\w+\s+)?)?\*{0,2}(\w+)(?:\s*\([^)]*\))?(\s*):\s+(\S.*)")


def described(function: Callable[..., Any]) -> tuple[str, str, dict[str, Any]]:
    """Name, description, parameters. Raises InvalidParameterError: a parameter has no schema.

    The description is the first paragraph of the documentation; lines "name: text" of it describe parameters, with
    the lines indented below them. Below "name : type", NumPy's form, only those lines count. `Annotated[int, "text"]`
    describes a parameter, too.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise InvalidParameterError(f"the tool {name} has no signature to read: {error}", "tools") from None
    said = inspect.getdoc(function) or ""
    texts = _texts(said, parameters)
    properties = {}
    for each in parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise InvalidParameterError(
                f"the tool {name} has the parameter {str(each)!r}, expected such as can be given by name", "tools"
            )
        schema = _schema(hints.get(each.name, each.annotation), f"{name}.{each.name}")
        if each.name in texts:
            schema = {"description": texts[each.name]} | schema
        properties[each.name] = schema
    required = [each.name for each in parameters.values() if each.default is each.empty]
    shape = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return name, " ".join(said.partition("\n\n")[0].split()), shape


def _texts(said: str, names: Collection[str]) -> dict[str, str]:
    """What the documentation says of each of these parameters."""
    texts = dict[str, str]()
    lines = said.splitlines()
    for at, line in enumerate(lines):
        found = _ARGUMENT.fullmatch(line)
        if not found or found[2] not in names or found[2] in texts:
            continue
        indent = re.compile(rf"{found[1]}\s+\S")
        below = [each.strip() for each in itertools.takewhile(indent.match, lines[at + 1 :])]
        texts[found[2]] = " ".join(below if found[3] and below else [found[4], *below])  # a type, or a text
    return texts


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type. where: its place, for errors."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin and not arguments:  # typing.List is list
        return _schema(origin, where)
    if origin is None and hint in _PLAIN:
        return _PLAIN[hint]
    if origin is typing.Annotated:
        about = [{"description": each} for each in arguments[1:] if isinstance(each, str)]
        return _schema(arguments[0], where) | (about[0] if about else {})
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in arguments]}
    if origin in (list, set, frozenset) or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": _schema(arguments[0], where)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1], where)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [each.value for each in hint]}
    raise InvalidParameterError(
        f"the tool parameter {where} is of type {hint!r:.80}, expected str, int, float, bool, None, Literal, Enum, or "
        "list, dict and unions of these; or give the tool as a dictionary with a JSON schema",
        "tools",
    )
