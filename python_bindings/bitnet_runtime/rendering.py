"""Chat templates in Jinja's sandbox: the program of a worker.

The environment is that of `apply_chat_template` in transformers. What a template may cost is the
worker's matter.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def answer(request: bytes) -> bytes:
    """{"source": template, "variables": …, "most": characters} to {"text": …} or {"error": …, "line": …}."""
    asked = json.loads(request.decode("utf-8", "surrogatepass"))
    reply: dict[str, Any]
    stage = "is broken"
    try:
        template = _compiled(asked["source"])
        stage = "failed"
        reply = {"text": template.render(asked["variables"])}
        if len(reply["text"]) > asked["most"]:
            reply = {"error": f"failed: it made {len(reply['text'])} characters, expected at most {asked['most']}"}
    except MemoryError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__)[:500]
        reply = {"error": f"{stage}{_line(error)}: {reason}"}
    return json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")


@functools.lru_cache(8)
def _compiled(source: str) -> Template:
    return _environment.from_string(source)


class _Generation(Extension):
    """`{% generation %}` marks the answer for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` of a template: a function alone, not the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` of a template: without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's, so that `self` can be a name
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no {name!r:.80}, names begin with a letter")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _line(error: Exception) -> str:
    """The line of the template where it happened, in words; "" when unknown."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else 0
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f" in line {line}" if line else ""


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
)
_environment.filters["tojson"] = _tojson
_environment.globals.update(
    raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
)

# A worker opens no files, so what is imported on first use is used here.
_environment.from_string(r"{{ '\n' | pprint | urlize }}{{ strftime_now('%c') }}").render()
with contextlib.suppress(TemplateError):
    _environment.from_string("{{ raise_exception('') }}").render()
