"""Text from a model or a file never controls the terminal, while a file or a pipe gets it unchanged."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from bitnet_cli import main
from bitnet_runtime.terminal import escape
from command import Terminal
from runtime_models import scripted_model

ACTS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
EVIL = [b"a\x1b[31m", b"\xc2", b"\x9b", b"2J\x07\x08", "\x0b\x0c\r\x7f\u202e".encode(), b"\tb\n", "é\u200d".encode()]
SHOWN = "a\\x1b[31m\\x9b2J\\x07\\x08\\x0b\\x0c\\r\\x7f\\u202e\tb\né\u200d"


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says escape sequences, one cut in two, in a file whose name has one."""
    return scripted_model(tmp_path_factory.mktemp("models") / "m\x1b[31m\x9b", EVIL)


def test_escape_of_every_character() -> None:
    for c in map(chr, range(sys.maxunicode + 1)):
        acts = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in ACTS
        assert (escape(c) == c) is not acts, ascii(c)
        assert escape(c).isascii() or not acts
    assert escape("a\n\x1b\tb", keep="\n\t") == "a\n\\x1b\tb"


def test_a_pipe_gets_what_the_model_said(evil: Path) -> None:
    command = [sys.executable, "-m", "bitnet", "generate", str(evil), "-p", "x"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.stdout == b"".join(EVIL) + b"\n"
    assert b"<Model m\\x1b[31m\\x9b:" in done.stderr and b"\x1b" not in done.stderr


@pytest.mark.parametrize("verb", ["generate", "eval"])
def test_a_terminal_is_never_acted_on(evil: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "text.txt").write_text("some text " * 20)
    args = {
        "generate": ("-p", "x"),
        "eval": ("--data", tmp_path / "text.txt", "--context", 16, "--samples", 1, "--prompt", "x"),
    }
    with Terminal(verb, evil, *args[verb]) as terminal:
        seen = terminal.rest()
        assert terminal.exit_code() == 0, seen
    assert SHOWN in seen
    assert not set(seen) & set("\x1b\x9b\x07\x08\x0b\x0c\r\x7f\u202e")


def test_json_on_a_terminal_says_the_same(evil: Path) -> None:
    with Terminal("generate", evil, "-p", "x", "--json", "--quiet") as terminal:
        seen = terminal.rest()
    assert seen.isascii() and "\x1b" not in seen
    assert json.loads(seen)["text"] == b"".join(EVIL).decode()


def test_chat_and_its_errors(evil: Path) -> None:
    with Terminal("chat", evil) as terminal:
        terminal.prompt()
        terminal.type("hello\n")
        seen = terminal.prompt()
        terminal.type("/x\x16\x1b[31m\n")  # Ctrl-V takes the next key as it is
        seen += terminal.prompt()
        terminal.type("\x04")
    assert SHOWN in seen
    assert "unknown command /x\\x1b[31m" in seen
    assert not set(seen) & set("\x9b\x0b\x0c\x7f\u202e") and "\x1b[31m" not in seen


def test_ctrl_z_and_fg_leave_the_line_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell has its own modes of the terminal meanwhile, and writes on the screen."""
    monkeypatch.setenv("PS1", "shell: ")
    model = scripted_model(tmp_path / "m.bitnet", [b"Good"])
    with Terminal("--norc", "--noprofile", "-i", program=["bash"]) as terminal:
        terminal.prompt("shell: ")
        terminal.type(shlex.join([sys.executable, "-m", "bitnet", "chat", str(model)]) + "\n")
        terminal.prompt()
        terminal.type("hel")
        terminal.prompt("hel")
        terminal.type("\x1a")
        terminal.prompt("shell: ")
        terminal.type("fg\n")
        terminal.prompt("> hel")
        terminal.type("\x15/x\n")  # Ctrl-U deletes the line
        assert "unknown command /x;" in terminal.prompt()
        terminal.type("/exit\n")
        terminal.prompt("shell: ")
        terminal.type("exit\n")
        terminal.rest()


def test_ctrl_c_in_a_message_of_several_lines_ends_that_alone(evil: Path) -> None:
    with Terminal("chat", evil) as terminal:
        terminal.prompt()
        terminal.type('"""first\n')
        terminal.prompt("… ")
        terminal.type("\x03")
        seen = terminal.prompt()
        terminal.type("\x03")
        seen_then = terminal.prompt()
        terminal.type("\x04")
    assert "leaves" not in seen and "Ctrl-C again, Ctrl-D or /exit leaves" in seen_then


@pytest.mark.parametrize("verb", ["generate", "chat", "bench", "inspect", "eval"])
def test_names_in_errors(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(tmp_path / "a\x1b[31m\x9b\u202e"), *(["-p", "x"] if verb == "generate" else [])]) == 1
    printed = capsys.readouterr().err
    assert "\\x1b[31m\\x9b\\u202e" in printed
    assert printed.count("\n") == 1 and "\x1b" not in printed


def test_a_new_line_in_a_name_begins_no_line_of_the_report(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(evil), str(evil.with_name("there\nweights    all"))]) == 0
    assert "/there\\nweights    all\n" in capsys.readouterr().err
