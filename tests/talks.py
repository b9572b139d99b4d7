"""Models that chat with known answers, and `bitnet chat` with a pipe."""

from __future__ import annotations

import io
import re
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from bitnet.presets import PRESETS
from bitnet_cli import main
from bitnet_export import random_model
from runtime_models import TEMPLATE, byte_tokenizer, scripted_model

ANSWER = "Good day"
AROUND = 3  # tokens of the template around a message and before its answer


def talking_models(folder: Path) -> Path:
    """The folder, with `chat` (answers "Good day", 2 tokens), `text` (the same without a template), `slow` (random)."""
    scripted_model(folder / "chat", [b"Good", b" day"], template=TEMPLATE, max_context=256)
    scripted_model(folder / "text", [b"Good", b" day"])
    slow = PRESETS["tiny"].replace(max_context=1 << 16)
    random_model(slow, folder / "slow", tokenizer=byte_tokenizer().to_str().encode())
    return folder


def piped(model: Path, *lines: str, args: tuple[object, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`bitnet chat` with these lines as its input, in this process."""
    stdin = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()), encoding="utf-8")
    with mock.patch("sys.stdin", stdin), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(["chat", str(model), *map(str, args)])
    return subprocess.CompletedProcess((), code, out.getvalue(), err.getvalue())


def prompts(errors: str) -> list[int]:
    return [int(n) for n in re.findall(r"^Prompt: (\d+) tokens", errors, re.M)]


def size(*messages: str, system: str = "") -> int:
    """Tokens of a prompt with these user messages, of which all but the last are answered."""
    told = len(system.encode()) + 2 if system else 0
    return told + sum(len(m.encode()) + AROUND for m in messages) + (len(messages) - 1) * (len(ANSWER) + 1)


# ---- what a message is ----
