"""Input from a person or a pipe: lines, and the messages and commands of a chat."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from bitnet_runtime.terminal import escape


class Lines:
    """Lines of standard input, with editing and history when a person types them."""

    def __init__(self, quiet: bool) -> None:
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        """Whether a person types at a terminal."""
        self.pastes = False
        """Whether a paste arrives as one line with line breaks in it."""
        self._unfinished = False  # Ctrl-C ended a message that had earlier lines
        self._prompts = not quiet
        self._asked = ""  # before the line that is being typed
        self._readline: Any = None
        if hasattr(sys.stdin, "reconfigure"):
            # A pipe has UTF-8 in every locale, as a file has; one invalid byte should end a message, not the program.
            sys.stdin.reconfigure(encoding=None if self.typed else "utf-8-sig", errors="surrogateescape")
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
        if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._pause)

    def _pause(self, *_: object) -> None:
        """Ctrl-Z, until fg, after which the terminal has the shell's modes, and a screen without our line."""
        import termios

        modes = termios.tcgetattr(sys.stdin)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._pause)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)
        if self._asked:
            pastes, line = "\x1b[?2004h" * self.pastes, escape(self._readline.get_line_buffer())
            print(pastes + self._asked + line, end="", flush=True)

    def _read(self, prompt: str) -> str:
        """The next line, without its end."""
        if sys.stdin is None:
            raise EOFError
        if self.typed and sys.stdout.isatty():
            self._asked = prompt
            try:
                return input(prompt)
            finally:
                self._asked = ""
        if self.typed and self._prompts:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def entry(self) -> tuple[str, bool]:
        """The next message, which may have several lines, or a command and True.

        Raises EOFError, and KeyboardInterrupt for Ctrl-C.
        """
        text = self._read("> ")
        if "\n" in text:  # a paste
            return text.strip("\n"), False
        if text.startswith('"""'):
            return self._block(text[3:]), False
        text = text.strip()
        if text.startswith("//"):
            return text[1:], False
        return text, text.startswith("/")

    def _block(self, text: str) -> str:
        """The rest of a message of several lines, to the closing quotes or the end of input."""
        try:
            while not text.endswith('"""'):
                text += "\n" + self._read("… ")
        except EOFError:
            return text.strip("\n")
        except KeyboardInterrupt:
            self._unfinished = True
            raise
        return text[:-3].strip("\n")

    def discarded(self) -> bool:
        """After Ctrl-C: whether there was something on the line, or before it."""
        there = self._unfinished or bool(self._readline and self._readline.get_line_buffer())
        self._unfinished = False
        return there
