"""`bitnet chat` as a person at a terminal and a script with a pipe use it."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bitnet.data import conversations
from bitnet.presets import PRESETS
from bitnet_cli import main
from bitnet_export import random_model
from bitnet_runtime.answers.writer import Writer
from command import Terminal, bitnet
from runtime_models import TEMPLATE, scripted_model
from talks import ANSWER, AROUND, piped, prompts, size, talking_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_models(tmp_path_factory.mktemp("models"))


def test_through_a_pipe(models: Path) -> None:
    typed = ["hello", '"""two', 'lines"""', "", "/help", "/clear", "again", "/exit", "never"]
    done = bitnet("chat", models / "chat", stdin="\n".join(typed))
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n" * 3)
    assert "begin a new conversation" in done.stderr and "lists the commands" not in done.stderr
    assert prompts(done.stderr) == [size("hello"), size("hello", "two\nlines"), size("again")]


def test_messages_that_look_like_commands(models: Path) -> None:
    done = piped(models / "chat", "//clear", "/nothing", "/clear all", '"""/exit"""', '"""', "/a", "/b", '"""')
    assert (done.returncode, done.stdout) == (1, f"{ANSWER}\n" * 3)
    assert prompts(done.stderr) == [size("/clear"), size("/clear", "/exit"), size("/clear", "/exit", "/a\n/b")]
    assert re.findall("unknown command (.*);.*a second / in front", done.stderr) == ["/nothing"]
    assert re.findall("(.*) stands alone;.*a second / in front", done.stderr) == ["error: /clear"]


@pytest.mark.parametrize(("typed", "sent"), [('"""one\ntwo', "one\ntwo"), ('"""\none\n', "one"), ("one", "one")])
def test_the_end_of_input_ends_a_message(models: Path, typed: str, sent: str) -> None:
    done = piped(models / "chat", typed)
    assert (done.returncode, done.stdout, prompts(done.stderr)) == (0, f"{ANSWER}\n", [size(sent)])
    assert piped(models / "chat", '"""').stdout == ""


def test_a_paste_is_one_message(models: Path) -> None:
    readline = pytest.importorskip("readline")
    if "GNU" not in (readline.__doc__ or ""):
        pytest.skip("libedit knows no pastes")
    with Terminal("chat", models / "chat") as terminal:
        begun = terminal.prompt()
        assert "/help lists the commands" in begun and "\x1b[?2004h" in begun  # asks the terminal to mark pastes
        for pasted, sent in (("one\n\n\ttwo\n", "one\n\n\ttwo"), ("/exit\n/exit\n", "/exit\n/exit"), ("a", "a")):
            terminal.type("/clear\n")
            terminal.prompt()
            terminal.type(f"\x1b[200~{pasted}\x1b[201~\n")
            assert prompts(terminal.prompt()) == [size(sent)]
        terminal.type("/help\n")
        assert "A paste of several lines is one message." in terminal.prompt()
        terminal.type("\x04")
        terminal.rest()
        assert terminal.exit_code() == 0


def test_a_message_that_is_no_text_ends_itself_only(models: Path) -> None:
    command = [sys.executable, "-m", "bitnet", "chat", str(models / "chat")]
    done = subprocess.run(command, input=b"a\xff\nhello\n", capture_output=True, timeout=120)
    assert (done.returncode, done.stdout.decode()) == (1, f"{ANSWER}\n")
    assert b"not UTF-8" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_pipe_has_utf8_in_every_locale(models: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = prompts(piped(models / "chat", "né", "日本").stderr)
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    command = [sys.executable, "-m", "bitnet", "chat", str(models / "chat")]
    typed = "né\n日本\n".encode("utf-8-sig")  # as editors of Windows write it
    done = subprocess.run(command, input=typed, capture_output=True)
    assert (done.returncode, prompts(done.stderr.decode(encoding))) == (0, sent)


# ---- the context ----


def test_the_oldest_turns_give_way(models: Path) -> None:
    messages = [f"{i}: {'x' * 20}" for i in range(12)]
    done = piped(models / "chat", *messages, args=("--system", "Be kind.", "-c", 128, "-n", 40))
    assert done.stdout == f"{ANSWER}\n" * 12
    seen = prompts(done.stderr)
    for i, tokens in enumerate(seen):
        kept = (tokens - size("", system="Be kind.") - 23 + AROUND) // (23 + AROUND + len(ANSWER) + 1)
        assert tokens == size(*messages[max(i - kept, 0) : i + 1], system="Be kind."), i
        assert tokens <= 128 - 32
    notices = re.findall(r"\[the context of 128 tokens is full: the model no longer sees the oldest (\d+) of (\d+)",
                         done.stderr)  # fmt: skip
    assert len(notices) > 1, "not dropped one at a time"
    assert len(notices) <= 5
    assert "-c N allows up to 256; /clear starts over]" in done.stderr
    quiet = piped(models / "chat", *messages, args=("-c", 128, "--quiet"))
    assert (quiet.stdout, quiet.stderr) == (f"{ANSWER}\n" * 12, "")


@pytest.mark.parametrize(
    ("name", "most", "hint"), [("chat", 100, "; -c N allows up to 256"), ("chat", 256, ""), ("text", 64, "")]
)
def test_a_message_that_alone_is_too_long(models: Path, name: str, most: int, hint: str) -> None:
    done = piped(models / name, "hello", "x" * 300, "bye", args=("-c", most, "--quiet"))
    assert (done.returncode, done.stdout) == (1, f"{ANSWER}\n" * 2)
    tokens = 300 + (AROUND if name == "chat" else 0)
    assert done.stderr == f"error: the message has {tokens} tokens, the context holds {most}; shorten it{hint}\n"
    told = piped(models / "chat", "x" * 300, args=("--system", "Be kind.", "--quiet"))
    assert "the message with the system message has 313 tokens, the context" in told.stderr


def test_answers_that_are_cut_off_say_so(models: Path) -> None:
    done = piped(models / "chat", "hello", args=("-n", 1))
    assert "\n[stopped after 1 token; -n N allows more]\n" in done.stderr
    done = piped(models / "chat", "x" * 253)
    assert "\n[stopped: the context of 256 tokens is full]\n" in done.stderr
    assert "stopped" not in piped(models / "chat", "hello").stderr
    done = bitnet("generate", models / "slow", "-p", "x", "-n", 1000, "-c", 50, "--temp", 0)
    assert "\n[stopped: the context of 50 tokens is full; -c N allows up to 65,536]\n" in done.stderr
    asked, by_default = bitnet("generate", models / "text", "-p", "x", "-n", 1), bitnet(
        "generate", models / "slow", "-p", "x", "--temp", 0)  # fmt: skip
    assert "stopped" not in asked.stderr
    assert "\n[stopped after 256 tokens; -n N allows more]\n" in by_default.stderr


# ---- commands ----


def test_retry(models: Path) -> None:
    done = piped(models / "chat", "/retry", "hello", "bye", "/retry", "more", args=("-s", 7))
    assert done.stdout == f"{ANSWER}\n" * 4
    assert "no message to answer again" in done.stderr
    assert prompts(done.stderr) == [size("hello"), *[size("hello", "bye")] * 2, size("hello", "bye", "more")]
    seeds = re.findall(r"Seed: (\d+)", done.stderr)
    assert seeds[:2] == ["7", "7"] and seeds[2] != "7" and seeds[3] == "7"


def test_retry_at_temperature_0_says_that_it_changes_nothing(models: Path) -> None:
    done = piped(models / "chat", "hello", "/retry", args=("--temp", 0))
    assert done.stdout == f"{ANSWER}\n" * 2
    assert done.stderr.count("at temperature 0 the answer is the same for every seed") == 1


def test_system(models: Path, tmp_path: Path) -> None:
    done = piped(models / "chat", "hello", "/system Be kind.", "bye", "/system", "more")
    assert prompts(done.stderr) == [
        size("hello"),
        size("hello", "bye", system="Be kind."),
        size("hello", "bye", "more"),
    ]
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
    path = scripted_model(tmp_path / "m", [b"Good", b" day"], template=refuses)
    done = piped(path, "hello", "/system x", "bye")
    assert done.stdout == f"{ANSWER}\n" * 2 and "no system here" in done.stderr
    for model, message in (
        (path, "no system here"),
        (models / "text", "text has no chat template, so no system message"),
    ):
        done = piped(model, "hello", args=("--system", "x"))
        assert (done.returncode, done.stdout) == (1, "") and message in done.stderr


def test_save_writes_what_training_reads(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "our talks.jsonl"
    done = piped(models / "chat", f"/save {file}", "é", '"""a\nb"""', f"/save {file}", "/clear", "/system Be kind.",
                 "x", f"/save  {file} ", args=("-n", 40))  # fmt: skip
    assert "nothing to save" in done.stderr and done.stderr.count(f"added to {file}") == 2
    assert "will not read it" not in done.stderr
    user, answer = (
        [{"role": "user", "content": text} for text in ("é", "a\nb")],
        {"role": "assistant", "content": ANSWER},
    )
    first, second = (found.messages for found in conversations.read([file]))
    assert first == [user[0], answer, user[1], answer]
    assert second == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}, answer]

    file.write_text(file.read_text().removesuffix("\n"))  # as some editors leave it
    piped(models / "chat", "x", f"/save {file}")
    assert len(list(conversations.read([file]))) == 3


def test_save_harms_nothing(models: Path, tmp_path: Path) -> None:
    (tmp_path / "model.bitnet").write_bytes(b"x")
    (tmp_path / "d.jsonl").mkdir()
    names = (
        tmp_path / "model.bitnet",
        tmp_path / "d.jsonl",
        tmp_path / "none" / "a.jsonl",
        "~nobody/a.jsonl",
        "\0.jsonl",
    )
    done = piped(models / "chat", "x", "/save", *(f"/save {name}" for name in names), "bye", args=("--quiet",))
    assert (done.returncode, done.stdout) == (1, f"{ANSWER}\n" * 2)
    assert done.stderr.count("needs the name of a .jsonl file") == 2
    assert "error: Is a directory: " in done.stderr and done.stderr.count("error: No such file or directory: ") == 2
    assert (tmp_path / "model.bitnet").read_bytes() == b"x"


def test_save_has_what_the_model_no_longer_sees(models: Path, tmp_path: Path) -> None:
    piped(models / "chat", *["x" * 30] * 12, f"/save {tmp_path}/all.jsonl", args=("-c", 128))
    (saved,) = conversations.read([tmp_path / "all.jsonl"])
    assert len(saved.messages) == 24


# ---- models ----


def test_without_a_template(models: Path) -> None:
    done = piped(models / "text", "go", "/retry", "go on")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n" * 3)
    assert "has no chat template" in done.stderr
    assert prompts(done.stderr) == [2, 2, 5]


def test_a_template_from_a_file(models: Path, tmp_path: Path) -> None:
    """As with that in the model; what is wrong with it is told before the first message."""
    (tmp_path / "good").write_text(TEMPLATE)
    (tmp_path / "broken").write_text("{% if %}")
    (tmp_path / "empty").write_text("")
    typed = "\n".join(["go", "on"])
    done = bitnet("chat", models / "text", "--chat-template", tmp_path / "good", stdin=typed)
    same = bitnet("chat", models / "chat", stdin=typed)
    assert done.returncode == 0 and done.stdout == same.stdout and prompts(done.stderr) == prompts(same.stderr)
    assert "has no chat template" not in done.stderr
    for name, said in (
        ("broken", "the chat template is broken"), ("none", "none: No such file or directory; expected the name"),
        ("empty", "empty is empty, expected a chat template"),
    ):  # fmt: skip
        done = bitnet("chat", models / "text", "--chat-template", tmp_path / name, stdin="go")
        assert done.returncode in (1, 2) and not done.stdout and said in done.stderr and "Traceback" not in done.stderr
        assert "roles" not in done.stderr, "no other messages would help"


def test_a_model_that_cannot_chat_is_refused_at_once(tmp_path: Path) -> None:
    broken = scripted_model(tmp_path / "broken", [b"ab"], template="{{ raise_exception('a\\x1b[31m') }}")
    random_model(PRESETS["tiny"].replace(vocab_size=64), tmp_path / "mute")
    for path, message in (
        (broken, "the chat template failed.*a\\\\x1b"),
        (tmp_path / "mute", "no tokenizer"),
    ):
        done = piped(path, "hello")
        assert done.returncode == 1 and done.stdout == ""
        assert re.search(message, done.stderr.splitlines()[-1])


# ---- Ctrl-C and Ctrl-D ----


def test_ctrl_c_stops_the_answer_and_then_the_program(models: Path) -> None:
    with Terminal("chat", models / "slow", "-n", "none", "-t", 1, "-s", 0) as terminal:
        terminal.prompt()
        terminal.type("abc\n")
        terminal.until(lambda seen: len(seen) > 40)
        terminal.type("\x03")
        assert "Seed:" in terminal.prompt()
        terminal.type("half a mess")
        terminal.prompt("mess")
        terminal.type("\x03")  # discards the line
        assert "again" not in terminal.prompt()
        terminal.type("\x03")
        assert "(Ctrl-C again, Ctrl-D or /exit leaves)" in terminal.prompt()
        terminal.type("half a mess")
        terminal.prompt("mess")
        terminal.type("\x03")  # discards the line now, too
        assert "again" not in terminal.prompt()
        terminal.type("\x03")
        assert "again" in terminal.prompt()
        terminal.type("/help\n")
        terminal.prompt()
        terminal.type("\x03")
        terminal.prompt()
        terminal.type("\x03")
        assert "Traceback" not in terminal.rest()
        assert terminal.exit_code() == 130


def test_ctrl_d_leaves(models: Path) -> None:
    with Terminal("chat", models / "chat") as terminal:
        terminal.prompt()
        terminal.type('"""one\n')
        terminal.until(lambda seen: "… " in seen)
        terminal.type("two\n\x04")  # ends the message
        assert prompts(terminal.prompt()) == [size("one\ntwo")]
        terminal.type("\x04")  # leaves
        assert terminal.rest().endswith("\n")
        assert terminal.exit_code() == 0


def test_ctrl_c_ends_a_pipe(models: Path) -> None:
    command = [sys.executable, "-m", "bitnet", "chat", str(models / "slow"), "-n", "none", "-t", "1", "-s", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"abc\nabc\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


class Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


def interrupt(monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    """Ctrl-C at the beginning of the answers that are "c", not ".", in their order."""
    calls, original = iter(answers), Writer.begin

    def begin(self: Writer) -> None:
        if not self.begun and next(calls) == "c":
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(Writer, "begin", begin)


def test_a_message_without_an_answer_is_forgotten(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, "c.c")
    monkeypatch.setattr("sys.stdin", Typed(f"hello\n/retry\nbye\n/retry\n/save {tmp_path}/t.jsonl\n"))
    assert main(["chat", str(models / "chat"), "-t", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{ANSWER}\n"
    assert printed.err.count("forgotten]") == 2, printed.err and "no message to answer again" in printed.err
    (saved,) = conversations.read([tmp_path / "t.jsonl"])
    assert [message["content"] for message in saved.messages] == ["bye", ANSWER]


def test_a_retried_turn_is_seen_though_all_were_dropped_for_a_forgotten_message(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, ".c..")
    monkeypatch.setattr("sys.stdin", Typed(f"hello\n{'x' * 90}\n/retry\nbye\n"))
    assert main(["chat", str(models / "chat"), "-t", "1", "-c", "128"]) == 0
    printed = capsys.readouterr()
    assert "no longer sees the oldest 1 of 1 turns" in printed.err and "forgotten]" in printed.err
    assert prompts(printed.err.replace("> ", ""))[-1] == size("hello", "bye")


def test_a_retry_that_ends_a_pipe_loses_no_turn(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, ".c")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/retry\n"))
    chat = ["chat", str(models / "chat"), "-t", "1", "--session", str(tmp_path / "talk")]
    assert main(chat) == 130
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(chat) == 0
    assert "[1 turn so far]" in capsys.readouterr().err
