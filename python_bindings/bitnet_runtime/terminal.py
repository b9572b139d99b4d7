"""Between a person's terminal and `bitnet generate` and `bitnet chat`: what is shown, what is read.

Answers go to stdout, everything else to stderr. What a model or a file says is shown with `escape`,
so that it cannot move the cursor, change colours or titles, or turn the direction of the line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from bitnet_runtime.generation import Result
    from bitnet_runtime.model import Model

T = TypeVar("T")

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, line separators, what overrides the direction of text, halves of characters."""


def escape(text: str, keep: str = "") -> str:
    """Text for a terminal: control characters but those to `keep` become \\x1b and the like."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if found[0] in keep else found[0].encode("unicode_escape").decode()

    return _CONTROLS.sub(shown, text)


def show(text: str) -> None:
    """A piece of an answer to stdout: to a file or a pipe as the model said it, to a terminal with `escape`."""
    sys.stdout.write(escape(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Lines for the person, to stderr."""
    print(escape(text, keep="\n\t"), file=sys.stderr, flush=True)


def cut_off(result: Result, model: Model) -> str:
    """Why an answer is not complete and what allows more, in one line; "" for a complete one."""
    if result.finish_reason != "length":
        return ""
    if result.usage.total_tokens >= model.n_ctx:
        return f"[stopped: the context of {model.n_ctx:,} tokens is full{larger_context(model)}]"
    return f"[stopped after {result.usage.completion_tokens:,} tokens; -n N allows more]"


def too_long(what: str, tokens: int, model: Model) -> str:
    """Of a text that does not fit the context, for an error."""
    return f"the {what} has {tokens:,} tokens, the context holds {model.n_ctx:,}; shorten it{larger_context(model)}"


def larger_context(model: Model) -> str:
    """How to get one, as the end of a sentence; "" when the model has no larger one."""
    return f"; -c N allows up to {model.info.max_context:,}" if model.n_ctx < model.info.max_context else ""


def fitting(model: Model, make: Callable[[], T], note: Callable[[str], None]) -> T:
    """What `make` makes with a session of its own. One that does not fit in memory gets less context, and a note."""
    from bitnet_runtime.errors import ModelTooLargeError

    try:
        return make()
    except ModelTooLargeError:
        if not model._shrink():
            raise
        note(
            f"[a context of {model.n_ctx:,} tokens, as the model's {model.info.max_context:,} do not fit in memory; "
            "-c N sets another]"
        )
        return make()


def end_line(result: Result) -> str:
    """Speed, memory and seed of a result in one line."""
    from bitnet_runtime.machine import peak_memory

    usage, timings = result.usage, result.timings
    return (
        f"Prompt: {usage.prompt_tokens} tokens, {timings.prompt_tokens_per_second:.1f} tok/s · "
        f"Generation: {usage.completion_tokens} tokens, {timings.generation_tokens_per_second:.1f} tok/s · "
        f"Peak memory: {peak_memory() / 1e9:.2f} GB · Seed: {result.seed}"
    )


class Lines:
    """Lines of standard input, with editing and history when a person types them."""

    def __init__(self, quiet: bool) -> None:
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        """By a person at a terminal."""
        self.pastes = False
        """A paste comes as one line with line breaks in it."""
        self._prompts = not quiet
        self._readline: Any = None
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")  # one wrong byte ends a message, not the program
        if self.typed and sys.stdout.isatty():
            self._edit()

    def _edit(self) -> None:
        try:
            import readline
        except ImportError:
            return
        self._readline = readline
        if "GNU" in (readline.__doc__ or "") and os.environ.get("TERM") != "dumb":
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
            self.pastes = True

    def read(self, prompt: str) -> str:
        """The next line, without its end. Raises EOFError, and KeyboardInterrupt for Ctrl-C."""
        if sys.stdin is None:
            raise EOFError
        if self.typed and sys.stdout.isatty():
            return input(prompt)
        if self.typed and self._prompts:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def discarded(self) -> bool:
        """After Ctrl-C: whether there was something on the line."""
        return bool(self._readline and self._readline.get_line_buffer())
