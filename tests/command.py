"""Runs the `bitnet` command for tests, with pipes and on a pseudo-terminal; and other commands."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

CC = os.environ.get("CC", "cc")
ARM_CC = CC if os.uname().machine in ("aarch64", "arm64") else "aarch64-linux-gnu-gcc"


def run(*command: str | Path, **options: str) -> str:
    """Standard output of a command; if it fails, its standard error is the message."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, input=options.get("stdin"))
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def bitnet(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitnet", *map(str, args)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


class Terminal:
    """The command, or another program, on its own pseudo-terminal."""

    def __init__(self, *args: object, program: Sequence[str] = (sys.executable, "-m", "bitnet")) -> None:
        self._process, self._fd = pty.fork()
        if self._process == 0:
            os.environ.update(TERM="xterm", INPUTRC="/dev/null")
            os.execvp(program[0], [*program, *map(str, args)])
        self._seen = b""

    def until(self, done: Callable[[str], bool], seconds: float = 60) -> str:
        """The output since the last call, once it is `done`."""
        end = time.monotonic() + seconds
        while not done(self._text):
            ready, _, _ = select.select([self._fd], [], [], max(end - time.monotonic(), 0))
            assert ready, f"waited {seconds} s, saw {self._text[-500:]!r}"
            try:
                self._seen += os.read(self._fd, 4096)
            except OSError:  # the command ended
                break
        text, self._seen = self._text, b""
        return text

    def prompt(self, end: str = "> ") -> str:
        """The output up to a prompt."""
        seen = self.until(lambda seen: seen.endswith(end))
        time.sleep(0.5)  # Ctrl-C while readline still writes is only handled at the next key
        return seen

    def rest(self) -> str:
        return self.until(lambda seen: False)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process, number)

    def exit_code(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        self._process = 0
        return code

    @property
    def _text(self) -> str:
        return self._seen.decode(errors="replace").replace("\r\n", "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            self.exit_code()
        os.close(self._fd)
