"""Formats of structured output as they are requested: a JSON schema, a regular expression, a grammar.

`guide.py` enforces them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bitnet_runtime.errors import GrammarError, shown
from bitnet_runtime.structured.schemas import exact

Schema = str | bytes | bool | Mapping[str, Any] | type
"""A JSON schema: its JSON, an object, or a class of pydantic."""

KINDS = ("json_schema", "regex", "grammar")
MOST = 1 << 20  # bytes of one
OF_TOOLS = "// of tools\n"  # the first line of a grammar that nobody wrote: errors name what it was made of
FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}  # of a schema
UUIDS = {  # which a pattern says, by the names of pydantic
    f"uuid{version}": f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
    for version in range(1, 9)
}
SCHEMA = 'a JSON schema: a dictionary such as {"type": "object"}, its JSON, or a pydantic model'


def format_text(kind: str, value: Any) -> str | None:
    """`value` of one of KINDS as a text, or GrammarError."""
    if value is None:
        return None
    if kind == "json_schema":
        text = _schema(value)
    elif isinstance(value, str) and value:
        text = value
        if kind == "regex" and (len(text) - len(text.rstrip("\\"))) % 2:
            raise GrammarError(f"regex is {shown(value)}, which ends in a backslash that escapes nothing", kind)
    else:
        expected = "a regular expression" if kind == "regex" else "a grammar in Lark's notation"
        raise GrammarError(f"{kind} is {shown(value)}, expected {expected}", kind)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"{kind} is not valid Unicode: {error}", kind) from None
    if size > MOST:
        raise GrammarError(f"{kind} has {size:,} bytes, expected at most {MOST:,}", kind)
    return text


def _schema(value: Any) -> str:
    if hasattr(value, "model_json_schema"):  # a class of pydantic, which need not be installed
        value = _closed(value.model_json_schema())
    try:
        schema = json.loads(value) if isinstance(value, (str, bytes)) else value
        if not isinstance(schema, (Mapping, bool)):
            raise TypeError(f"a {type(schema).__name__}")
        if isinstance(schema, bool):  # the library takes one within another alone
            schema = {} if schema else {"enum": []}
        return json.dumps(exact(schema), ensure_ascii=False, allow_nan=False, default=_plain)
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"json_schema is {shown(value)}, expected {SCHEMA} ({error})", "json_schema") from None


def _plain(value: Any) -> dict[str, Any]:
    """What JSON has for a value that it does not know: of a mapping an object."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _closed(schema: Any) -> Any:
    """A schema with no other properties than those named, where it leaves that open: pydantic would drop them. What
    only pydantic knows, such as the format of a path, or that a set has nothing twice, is left to it."""
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False, **schema} if "properties" in schema else dict(schema)
    closed.pop("uniqueItems", None)
    written = closed.pop("format", None)
    if written in FORMATS:
        closed["format"] = written
    elif written in UUIDS:
        closed["pattern"] = UUIDS[written]
    for word in ("properties", "$defs"):
        if word in schema:
            closed[word] = {name: _closed(part) for name, part in schema[word].items()}
    for word in ("anyOf", "allOf", "oneOf", "prefixItems"):
        if word in schema:
            closed[word] = [_closed(part) for part in schema[word]]
    return closed | {word: _closed(schema[word]) for word in ("items", "additionalProperties") if word in schema}


def response_format(value: Any) -> dict[str, Any]:
    """The options of `generate` for OpenAI's `response_format`: none, {"type": "text"}, "json_object", or
    "json_schema" with the schema. llama.cpp's clients send a schema beside "json_object". Raises GrammarError, whose
    `param` is "response_format"."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    given = value.get("json_schema") if kind == "json_schema" else None
    if value is None or kind == "text":
        return {}
    if kind == "json_object":
        schema = value.get("schema")
        return {"json_schema": format_text("json_schema", {"type": "object"} if schema is None else schema)}
    if isinstance(given, Mapping) and given.get("schema") is not None:
        return {"json_schema": format_text("json_schema", given["schema"])}
    raise GrammarError(
        f'response_format is {shown(value)}, expected {{"type": "text"}}, {{"type": "json_object"}}, or '
        '{"type": "json_schema", "json_schema": {"schema": …}}',
        "response_format",
    )


def held_to(options: object) -> tuple[str, str] | None:
    """The kind and the text of what the options, a `Sampling`, hold an answer to, if they do. Raises GrammarError."""
    given = [(kind, text) for kind in KINDS if (text := getattr(options, kind)) is not None]
    if len(given) > 1:
        raise GrammarError(f"{' and '.join(kind for kind, _ in given)} are given, expected one of them", given[1][0])
    return given[0] if given else None


def behind_thoughts(
    kind: str, text: str, begun: bool, tags: tuple[str, str], special: Mapping[str, int], gap: str
) -> str:
    """A grammar of thoughts, then a gap, then a text in a format. `compiling.py` reads it.

    begun: the thoughts are open; else there may be none. tags: around them; special: those that are tokens.
    """
    opens, closes = (json.dumps(tag) + (f"<[{special[tag]}]>" if tag in special else "") for tag in tags)
    return f"%thoughts {kind} {'begun' if begun else 'possible'} {opens} {closes} {json.dumps(gap)}\n{text}"


def given_as(kind: str, text: str) -> str:
    """The parameter that gave a format, which may be a grammar that was made of it: behind thoughts, or of tools."""
    if kind == "grammar" and text.startswith("%thoughts "):
        head, _, text = text.partition("\n")
        kind = head.split()[1]
    return "tools" if kind == "grammar" and text.startswith(OF_TOOLS) else kind
