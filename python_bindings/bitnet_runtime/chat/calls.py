"""Splits a model's output into text and tool calls, as it arrives.

Only calls of offered tools count. Anything else in the place of a call, such as broken JSON or a name that was not
offered, stays text. Text that may turn out to be a call is held back until that is decided.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from bitnet_runtime.chat.dialects import Dialect
from bitnet_runtime.chat.thoughts import without_begin
from bitnet_runtime.chat.tools import ToolCall, loaded

MOST_HELD = 1 << 16  # characters that may become a call
_NAME = r'"(?:[^"\\\x00-\x1f]|\\.){1,128}"'
_GAP = r"\s{0,64}"
_COLON = f"{_GAP}:{_GAP}"
_HEAD = re.compile(
    rf'[\s\[]{{0,64}}\{{{_GAP}"name"{_COLON}({_NAME}){_GAP},{_GAP}"(?:arguments|parameters)"{_COLON}(?=\{{)'
)
"""Everything in it is bounded, so retrying with every token costs the same however much text is held back."""
_BEGUN = re.compile(r'[\s\[]*\{\s*("name"|$)')
_STRUCTURE = frozenset('{}[]:,+-.eEtrufalsn0123456789 \t\r\n"')  # all that JSON has outside of strings


class CallPart(NamedTuple):
    """A part of a call, whose arguments come in pieces. The first part has none of them."""

    number: int  # of the call in the answer
    id: str
    name: str
    text: str  # more of the arguments


class CallReader:
    """Text in; text and parts of calls out. A state machine: each step names the next."""

    def __init__(
        self, dialect: Dialect, names: Collection[str], most: int | None = None, shown: Mapping[int, str] | None = None
    ) -> None:
        """names: that may be called; most: calls, with which the answer ends; shown: special tokens that stand around
        calls, and what they say."""
        self._opens, self._closes = dialect.opens, dialect.closes
        self._names, self._most, self.shown = names, most, shown or {}
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, and arguments as they came
        self.done = False  # no more can come
        self._cut = False
        self._parts: list[CallPart] = []
        self._text = ""  # not yet understood
        self._said: list[str] = []
        self._gap: list[str] = []  # white space before what may be a call
        self._after = False  # a call was the last thing
        self._spoke = False  # there was text
        self._json = _Object()
        self._step: Callable[[bool], bool] = self._outside if self._opens else self._first

    def push(self, text: str, final: bool = False, cut: bool = False) -> str:
        """What of it, and of what was held back, is text. final: nothing follows; cut: though more would have."""
        self._text += text
        self._cut = cut
        while not self.done and self._step(final):
            pass
        said, self._said = "".join(self._said), []
        return said

    @property
    def calls(self) -> list[ToolCall]:
        """All calls so far."""
        return [ToolCall(id, name, "".join(texts)) for id, name, texts in self._calls]

    def take(self) -> tuple[CallPart, ...]:
        """Parts of calls since the last time."""
        parts, self._parts = tuple(self._parts), []
        return parts

    # ---- steps: each takes from the front of the text, and says whether there is more to do ----

    def _outside(self, final: bool) -> bool:
        """Read text until a call opens. White space around a call is dropped."""
        self._hold(len(self._text) - len(self._text.lstrip()))
        place = self._text.find(self._opens)
        cut = self._cut and (self._after or not self._spoke)  # it may be the begin of a call
        whole = place < 0 and final and not cut
        end = place if place >= 0 else len(self._text) if whole else without_begin(self._text, self._opens)
        bare = end if whole else len(self._text[:end].rstrip())
        if bare or whole:
            self._say(self._text[:bare])
        if place < 0:
            return self._wait(bare)
        self._text = self._text[bare:]
        self._hold(end - bare)
        return self._go(self._inside, len(self._opens))

    def _first(self, final: bool) -> bool:
        """An answer is text, or nothing but calls if it begins with a brace."""
        self._hold(len(self._text) - len(self._text.lstrip()))
        if not self._text and not final:
            return False
        return self._go(self._inside if self._text[:1] == "{" else self._rest)

    def _rest(self, final: bool) -> bool:
        """Read text to the end."""
        self._say(self._text)
        return self._wait(len(self._text))

    def _inside(self, final: bool) -> bool:
        """Read to the arguments of a call, or to the end of what turns out to be text."""
        head = _HEAD.match(self._text)
        name = _loaded(head[1]) if head else None
        if head and name in self._names:
            self._begin(str(name))
            return self._go(self._arguments, head.end())
        place = self._text.find(self._closes) if self._closes else -1
        if place < 0 and not final and len(self._text) < MOST_HELD:
            return False
        end = place if place >= 0 else len(self._text)
        body, closes = self._text[:end], self._closes if place >= 0 else ""
        spoken, again, _ = body.partition(self._opens) if self._opens else (body, "", "")
        half = self._cut and not closes and not again and (self._opens or _BEGUN.match(body))
        if half:
            self._gap = []
        elif not self._whole_calls(body):
            if again:  # this one was only spoken of
                body, closes = spoken.rstrip(), ""
                end = len(body)
            self._say(self._opens + body + closes)
        return self._go(self._outside if self._opens else self._rest, end + len(closes))

    def _arguments(self, final: bool) -> bool:
        """Read an object, which ends when it is complete or not JSON."""
        end = self._json.end(self._text)
        self._add(self._text[:end])
        if not self._json.ended:
            return self._wait(end)
        self._json, self._after = _Object(), True
        self.done = len(self._calls) == self._most
        return self._go(self._behind, end)

    def _behind(self, final: bool) -> bool:
        """Read to the brace that ends a call. White space means nothing here."""
        self._text = self._text.lstrip()
        if self._text[:1] in ("}", ","):
            self._text = self._text[0] + self._text[1:].lstrip()
        if self._text == ",":
            return False
        if self._text.startswith(',"'):
            self._json = _Object("}")
            return self._go(self._keys, 1)
        end = int(self._text.startswith("}"))
        if not self._opens:
            rest = self._text[end:].lstrip(" ;,\t\r\n")
            self._text = rest or self._text[: end + 1]
            return bool(rest) and self._go(self._inside if rest[0] == "{" else self._rest)
        follows = self._text[end : end + 1]
        if not follows:
            return False
        if follows in ",{":
            return self._go(self._inside, end + (follows == ","))
        return self._go(self._between)

    def _keys(self, final: bool) -> bool:
        """What a call has behind its arguments, such as an id: nobody asked for it."""
        end = self._json.end(self._text)
        if not self._json.ended:
            return self._wait(end)
        self._json = _Object()
        return self._go(self._behind, end)

    def _between(self, final: bool) -> bool:
        """To the end of what calls stand in; what is there else is nothing that anybody said."""
        closed, opened = self._text.find(self._closes), self._text.find(self._opens)
        if closed >= 0 and not 0 <= opened < closed:
            return self._go(self._outside, closed + len(self._closes))
        if opened >= 0:
            return self._go(self._outside, opened)
        return self._wait(max(0, len(self._text) - len(self._closes)))

    def _go(self, step: Callable[[bool], bool], end: int = 0) -> bool:
        self._text, self._step = self._text[end:], step
        return True

    def _wait(self, end: int) -> bool:
        self._text = self._text[end:]
        return False

    def _hold(self, end: int) -> None:
        """Hold white space at the front back, apart, so that it is not looked at again."""
        self._gap.append(self._text[:end])
        self._text = self._text[end:]

    # ---- what comes of it ----

    def _say(self, text: str) -> None:
        """Text, behind the white space that was held back."""
        text, self._gap = "".join([*self._gap, text]), []
        text = text.lstrip() if self._after else text
        if text:
            self._said.append(text)
            self._after, self._spoke = False, True

    def _begin(self, name: str) -> None:
        self._gap = []
        self._calls.append((f"call_{secrets.token_hex(12)}", name, []))
        self._parts.append(CallPart(len(self._calls) - 1, *self._calls[-1][:2], ""))

    def _add(self, text: str) -> None:
        """Add arguments to the last call."""
        id, name, texts = self._calls[-1]
        if text:
            texts.append(text)
            self._parts.append(CallPart(len(self._calls) - 1, id, name, text))

    def _whole_calls(self, body: str) -> bool:
        """Whether this is a call, or a list of some, in an order or a form of its own; then they are taken."""
        found = _loaded(body)
        calls = [_understood(each) for each in (found if isinstance(found, list) else [found])]
        if not calls or not all(name in self._names for name, _ in calls):
            return False
        for name, arguments in calls[: self._most and self._most - len(self._calls)]:
            self._begin(name)
            self._add(arguments)
        self._after, self.done = True, len(self._calls) == self._most
        return True


class _Object:
    """A JSON object that arrives in pieces."""

    def __init__(self, opened: str = "") -> None:
        self._open = list(opened)  # brackets, by what closes them
        self._quoted = self._escaped = False
        self.ended = False

    def end(self, text: str) -> int:
        """How many characters of the text belong to the object."""
        for place, char in enumerate(text):
            if not self._goes_on(char):
                self.ended = True
                return place + (char == "}" and not self._open)
        return len(text)

    def _goes_on(self, char: str) -> bool:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            else:
                self._escaped, self._quoted = char == "\\", char != '"'
            return char >= " "
        self._quoted = char == '"'
        if char in "{[":
            self._open.append("}" if char == "{" else "]")
        elif char in "}]":
            if self._open[-1] != char:
                return False
            self._open.pop()
        return bool(self._open) and char in _STRUCTURE


def _loaded(text: str) -> Any:
    try:
        return loaded(text)
    except (ValueError, RecursionError):
        return None


def _understood(call: Any) -> tuple[str, str]:
    """The name and the arguments in an object; "": it has none."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "", ""
    arguments: Any = next((call[name] for name in ("arguments", "parameters") if name in call), {})
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else ("", "")
