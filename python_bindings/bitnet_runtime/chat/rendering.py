"""Chat templates in Jinja's sandbox: the program of a worker.

The environment is that of `apply_chat_template` in transformers. What a template may cost is the
worker's matter.
"""

from __future__ import annotations

import bisect
import codecs
import contextlib
import datetime
import functools
import html.entities  # noqa: F401
import itertools
import json
import re
import textwrap  # noqa: F401
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes, runtime
from jinja2 import constants as constants
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MARK = "\ufdd0"  # of `definitions`


def answer(request: bytes) -> bytes:
    """{"source": template, "variables": …, "most": characters} to {"text": …} or {"error": …}."""
    asked = json.loads(request.decode("utf-8", "surrogatepass"))
    stage = "is broken"
    try:
        template = _compiled(asked["source"])
        stage = "failed"
        variables = asked["variables"]
        given = {name: _marked(variables.pop(name)) for name in ("messages", "tools", "more")}
        reply = {"text": template.render(variables | given.pop("more") | given)}
        if len(reply["text"]) > asked["most"]:
            reply = {"error": f"failed: it made {len(reply['text'])} characters, expected at most {asked['most']}"}
    except MemoryError:
        raise
    except Exception as error:
        said = "it opens a file" if isinstance(error, OSError) else str(error)
        reason = (said or type(error).__name__)[:500]
        reply = {"error": f"{stage}{_line(error)}: {reason}"}
    return json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")


class _Text(str):
    """Text with marks of `Tokenizer.shield`: it is printed and joined with them, and looked at without.

    A mark goes with the character before it, wherever a template cuts.
    """

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        shown = repr(self._plain)
        for char in {self._plain[place] for place in self._marks if place >= 0}:
            shown = shown.replace(char, char + MARK)
        return shown

    @functools.cached_property
    def _plain(self) -> str:
        return str.replace(self, MARK, "")

    @functools.cached_property
    def _marks(self) -> list[int]:
        """The places of marked characters in the plain text."""
        ends = itertools.accumulate(len(part) for part in str.split(self, MARK)[:-1])
        return [end - 1 for end in ends]

    def __getitem__(self, key: Any) -> str:
        if not isinstance(key, slice):
            key = range(len(self))[key]
            key = slice(key, key + 1)
        start, stop, step = key.indices(len(self))
        if step != 1:
            return _Text("".join(self[i] for i in range(start, stop, step)))
        start, stop = (place + bisect.bisect_left(self._marks, place) for place in (start, max(start, stop)))
        return _Text(str.__getitem__(self, slice(start, stop)))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: Any) -> str:
        return _Text(str.__add__(self, other))

    def __radd__(self, other: Any) -> str:
        return _Text(str.__add__(other, self))

    def _cut(self, parts: Iterable[str], gap: int = 0) -> list[str]:
        """Itself, cut where its plain text is cut into `parts` that have so many characters between them."""
        found, start = [], 0
        for part in parts:
            found.append(self[start : start + len(part)])
            start += len(part) + gap
        return found

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        if sep is None:
            return [_Text(part) for part in str.split(self, None, maxsplit)]
        return self._cut(self._plain.split(_unmarked(sep), maxsplit), len(sep))

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        if sep is None:
            return [_Text(part) for part in str.rsplit(self, None, maxsplit)]
        return self._cut(self._plain.rsplit(_unmarked(sep), maxsplit), len(sep))

    def splitlines(self, keepends: Any = False) -> list[str]:
        return [_Text(line) for line in str.splitlines(self, keepends)]

    def partition(self, sep: str) -> Any:
        return tuple(self._cut(self._plain.partition(_unmarked(sep))))

    def rpartition(self, sep: str) -> Any:
        return tuple(self._cut(self._plain.rpartition(_unmarked(sep))))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        if old:
            return _Text(new.join(self.split(old, count)))
        return _Text(re.sub(f"(?!{MARK})", lambda _: new, self, count=max(count, 0))) if count else self

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(self._plain.lstrip(_unmarked(chars))) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(self._plain.rstrip(_unmarked(chars)))]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self


def _look(name: str) -> Any:
    """A method of str that tells something about a text, asked of the plain one."""
    method = getattr(str, name)

    def look(self: _Text, *args: Any) -> Any:
        return method(self._plain, *map(_unmarked, args))

    return look


_COMPARE = ("__hash__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "__len__")
_LOOKS = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count")
for _name in (*_COMPARE, *_LOOKS, *(name for name in dir(str) if name.startswith("is"))):
    setattr(_Text, _name, _look(_name))


def _unmarked(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_unmarked, value))
    return value._plain if isinstance(value, _Text) else value


def _marked(value: Any) -> Any:
    """`value` with `_Text` for the texts that have marks."""
    if type(value) is str:
        return _Text(value) if MARK in value else value
    if type(value) is dict:
        return {_marked(key): _marked(item) for key, item in value.items()}
    return [_marked(item) for item in value] if type(value) is list else value


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but a text that it makes of texts with marks is one again."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return _Text(made) if type(made) is str and MARK in made else made

    return call


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
    made = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        made = re.sub(rf"[^\x00-\x7f{MARK}]", lambda found: json.dumps(found[0])[1:-1], made)
    return made


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


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "%"})
    call_binop = _keeping(ImmutableSandboxedEnvironment.call_binop)
    call = _keeping(ImmutableSandboxedEnvironment.call)
    concat = staticmethod(_keeping("".join))


runtime.str_join = _keeping(runtime.str_join)  # what `~` does
_environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
_environment.filters["tojson"] = _tojson
_environment.filters.update({name: _keeping(each) for name, each in _environment.filters.items()})
_environment.globals.update(
    raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
)
_compiled = functools.lru_cache(8)(_environment.from_string)

# A worker opens no files, so what is imported on first use is used here.
for _codec in ("ascii", "latin-1", "cp1252", "utf-8-sig", "utf-16", "utf-32", "idna", "punycode"):
    codecs.lookup(_codec)
_environment.from_string(r"{{ '\n' | pprint | urlize }}{{ strftime_now('%c') }}").render()
with contextlib.suppress(TemplateError):
    _environment.from_string("{{ raise_exception('') }}").render()
