"""A Python function as a tool for a model: name, description, and a JSON schema of its parameters."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Collection, Hashable, Mapping
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
    describes a parameter, too. What `functools.partial` gives already is no parameter. A TypedDict or a dataclass has
    its fields.
    """
    given: Collection[str] = ()
    if isinstance(function, functools.partial):  # of another such it is one, too
        arguments, keywords, function = function.args, function.keywords, function.func
        given = {*list(_signed(function, _name(function))[1])[: len(arguments)], *keywords}
    name = _name(function)
    try:
        shape = _object(function, name, given)
    except RecursionError:
        raise InvalidParameterError(f"the tool {name} has a type within itself, expected an end", "tools") from None
    return name, " ".join(_documentation(function).partition("\n\n")[0].split()), shape


def _object(function: Callable[..., Any], name: str, given: Collection[str] = ()) -> dict[str, Any]:
    """The JSON schema of its parameters, or of the fields of a class. given: those that it has already."""
    hints, parameters = _signed(function, name)
    texts = _texts(_documentation(function), parameters)
    properties = {}
    left = [each for each in parameters.values() if each.name not in given]
    for each in left:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise InvalidParameterError(
                f"the tool {name} has the parameter {str(each)!r}, expected such as can be given by name", "tools"
            )
        schema = _schema(hints.get(each.name, each.annotation), f"{name}.{each.name}")
        if each.name in texts:
            schema = {"description": texts[each.name]} | schema
        properties[each.name] = schema
    required = [each.name for each in left if each.default is each.empty]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _signed(function: Callable[..., Any], name: str) -> tuple[dict[str, Any], Mapping[str, inspect.Parameter]]:
    """Types and parameters by name."""
    plain = isinstance(function, type) or inspect.isroutine(function)
    try:
        hints = typing.get_type_hints(function if plain else type(function).__call__, include_extras=True)
        return hints, _typed_dict(function, hints) or inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise InvalidParameterError(f"the tool {name} has no signature to read: {error}", "tools") from None


def _typed_dict(function: Any, hints: dict[str, Any]) -> dict[str, inspect.Parameter]:
    """The keys of a TypedDict as parameters, without Required and NotRequired in `hints`; {}: it is none."""
    if not typing.is_typeddict(function):
        return {}
    found = {}
    for key, hint in hints.items():
        origin, needed = typing.get_origin(hint), key in function.__required_keys__
        if origin in (typing.Required, typing.NotRequired):  # which that attribute does not see in annotations as texts
            needed, hints[key] = origin is typing.Required, typing.get_args(hint)[0]
        default = inspect.Parameter.empty if needed else None
        found[key] = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default)
    return found


def _documentation(function: Callable[..., Any]) -> str:
    if not isinstance(function, type):
        return inspect.getdoc(function) or ""
    said = function.__doc__ or ""  # not that of a class it derives from, nor the signature that a dataclass has for one
    made = dataclasses.is_dataclass(function) and said.startswith(f"{function.__name__}(")
    return "" if made else inspect.cleandoc(said)


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
    if origin is None and isinstance(hint, Hashable) and hint in _PLAIN:
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
    if typing.is_typeddict(hint) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return _object(hint, where)
    raise InvalidParameterError(
        f"the tool parameter {where} is of type {hint!r:.80}, expected str, int, float, bool, None, Literal, Enum, a "
        "TypedDict or dataclass, or list, dict and unions of these; or give the tool as a dictionary with a "
        "JSON schema",
        "tools",
    )
