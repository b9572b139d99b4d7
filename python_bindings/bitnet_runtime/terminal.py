"""`bitnet chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from bitnet_runtime.commands import end_line
from bitnet_runtime.errors import BitnetError
from bitnet_runtime.model import Model

HELP = '''/clear   begin a new conversation
/help    this text
/exit    leave (or Ctrl-D)
"""      begin and end a text of several lines
Ctrl-C   stop the answer'''

NO_TEMPLATE = "This model has no chat template and does not know turns: it continues your text as it stands."


class Conversation:
    """Messages so far, and a session that holds them, so that only what is new is computed."""

    def __init__(self, model: Model, system: str | None, sampling: dict[str, Any], quiet: bool = False) -> None:
        self._model = model
        self._opening = [{"role": "system", "content": system}] if system else []
        self._sampling = sampling
        self._quiet = quiet
        self._messages = list(self._opening)
        self._session = model.session()

    def run(self) -> int:
        """Read, answer, again, until /exit or the end of input. Returns the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        if not self._model.has_template:
            self._say(NO_TEMPLATE)
        self._say("/help lists the commands")
        while (text := self._read()) is not None:
            if text == "/exit":
                break
            if text == "/help":
                self._say(HELP)
            elif text == "/clear":
                self._messages = list(self._opening)
                self._say("a new conversation")
            elif text.startswith("/"):
                self._say(f"unknown command {text.split()[0]}; /help lists the commands")
            elif text:
                self._answer(text)
        self._session.close()
        return 0

    def _read(self) -> str | None:
        """One entry, of several lines when it begins with three quotes; None at the end of input."""
        try:
            text = self._line("> ")
            if text.startswith('"""'):
                text = text[3:]
                while not text.endswith('"""'):
                    text += "\n" + self._line("… ")
                text = text[:-3]
            return text.strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._say("\n(Ctrl-D or /exit leaves)")
            return ""

    def _answer(self, text: str) -> None:
        try:
            if self._model.has_template:
                self._messages.append({"role": "user", "content": text})
                stream = self._model.stream_chat(self._messages, session=self._session, **self._sampling)
            else:
                stream = self._model.stream(text, session=self._session, **self._sampling)
        except BitnetError as error:
            if self._model.has_template:
                self._messages.pop()
            self._say(f"error: {error}")
            return
        try:
            with stream:
                for piece in stream:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        except BitnetError as error:
            self._say(f"\nerror: {error}")
        print(flush=True)
        result = stream.result
        assert result is not None  # the stream is closed
        if self._model.has_template:
            self._messages.append({"role": "assistant", "content": result.text})
        self._say(end_line(result))

    def _line(self, prompt: str) -> str:
        """A line of input. The prompt goes to stderr when stdout is not the terminal."""
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input(prompt)
        if sys.stdin.isatty() and not self._quiet:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)
