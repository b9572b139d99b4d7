"""`bitnet chat --session`: conversations that are continued later."""

from __future__ import annotations

import errno
import io
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bitnet_cli import main
from bitnet_cli.kept import ENDS, Kept, add, alone, at_the_end
from bitnet_runtime import Model
from bitnet_runtime.sessions import saved
from command import Terminal
from talks import ANSWER, piped, prompts, size, talking_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_models(tmp_path_factory.mktemp("models"))


def test_a_conversation_goes_on_another_day(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    args = ("--session", file, "--temp", "0")
    first = piped(models / "chat", "hello", args=(*args, "--system", "be kind"))
    assert (first.returncode, prompts(first.stderr)) == (0, [size("hello", system="be kind")])
    second = piped(models / "chat", "again", args=args)
    assert (second.returncode, second.stdout) == (0, f"{ANSWER}\n")
    assert "[1 turn so far]" in second.stderr
    assert prompts(second.stderr) == [size("hello", "again", system="be kind")]
    assert "cache stays" not in second.stderr
    third = piped(models / "chat", "more", args=(*args, "--system", "be short", "--kv-type", "int8"))
    assert "[its cache stays f16, as it was saved]" in third.stderr
    assert prompts(third.stderr) == [size("hello", "again", "more", system="be short")]
    with Model.load(models / "chat", threads=1) as model, model.load_session(file) as session:
        assert session.position > size("hello")


def test_of_two_conversations_in_one_file_none_is_lost(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    with Terminal("chat", models / "chat", "--session", file) as first:
        first.prompt()
        first.type("hello\n")
        first.prompt()
        assert piped(models / "chat", "a", "b", args=("--session", file)).returncode == 0
        first.type("/exit\n")
        assert "another chat has written" in first.rest()
    assert "[2 turns so far]" in piped(models / "chat", "again", args=("--session", file)).stderr
    other = tmp_path / "talk-2.session"
    assert "[1 turn so far]" in piped(models / "chat", "again", args=("--session", other)).stderr


def test_a_file_that_is_deleted_meanwhile_is_written_again(tmp_path: Path) -> None:
    (path := tmp_path / "talk.session").write_bytes(b"before")
    keep = Kept(path)
    path.unlink()
    assert keep.place() == path
    path.write_bytes(b"from another chat")
    assert keep.place() == tmp_path / "talk-2.session"


def test_chats_that_end_together_keep_all(tmp_path: Path) -> None:
    keeps = [Kept(tmp_path / "talk.session") for _ in range(4)]
    together = threading.Barrier(len(keeps))

    def end(keep: Kept) -> Path:
        together.wait()
        with alone(tmp_path):
            place = keep.place()
            time.sleep(0.02)  # to write takes time
            place.write_text("said")
        return place

    with ThreadPoolExecutor(len(keeps)) as pool:
        assert len(set(pool.map(end, keeps))) == len(keeps)


def test_what_cannot_be_written_is_said_first(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", refused)
        with pytest.raises(OSError, match="Read-only file system") as caught:
            saved.writable(tmp_path / "talk")
    assert caught.value.filename == str(tmp_path / "talk")
    name = "日" * 83 + ".s"  # 251 bytes
    assert piped(models / "chat", "hello", args=("--session", tmp_path / name)).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_conversation_that_a_full_disk_cuts_off_is_not_in_the_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    file, turns = tmp_path / "a.jsonl", [{"role": "user", "content": "x" * 100}]
    add(file, turns)
    whole, (_, most) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, most))
    try:
        with pytest.raises(OSError, match="too large"):
            add(file, turns)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert file.read_bytes() == whole
    add(file, turns)
    assert file.read_bytes() == 2 * whole


@pytest.mark.parametrize("spare", [True, False])
def test_a_conversation_whose_place_is_gone_at_the_end_is_kept_elsewhere(
    spare: bool, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "folder" / "talk"
    file.parent.mkdir()

    class Typed(io.StringIO):
        def readline(self, *_: object) -> str:
            if not (line := super().readline()):
                file.parent.rmdir()
            return line

    monkeypatch.setattr("sys.stdin", Typed("hello\n"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path) if spare else str(tmp_path / "none"))
    assert main(["chat", str(models / "chat"), "-t", "1", "--session", str(file)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"folder {file.parent} does not exist" in error
    kept = [*tmp_path.glob("bitnet-chat-*/talk")]
    assert len(kept) == spare == len([*tmp_path.iterdir()])
    if spare:
        assert f"; the conversation is in {kept[0]}, and goes on with that --session" in error
        assert "[1 turn so far]" in piped(models / "chat", "again", args=("--session", kept[0])).stderr


def test_a_session_keeps_its_context(models: Path, tmp_path: Path) -> None:
    args = ("--session", tmp_path / "talk")
    assert piped(models / "chat", "hello", args=(*args, "-c", 64)).returncode == 0
    larger = piped(models / "chat", "a" * 64, args=(*args, "-c", 128))
    assert "[its context stays 64 tokens, as it was saved]" in larger.stderr
    assert "the context holds 64; shorten it\n" in larger.stderr and larger.returncode == 1
    full = piped(models / "chat", "a" * 61, args=args)
    assert "[stopped: the context of 64 tokens is full]\n" in full.stderr


@pytest.mark.parametrize("raised", [False, True])
def test_nothing_disturbs_what_is_written_at_the_end(raised: bool) -> None:
    """Closing a terminal may send two signals; the second arrives while the file is written."""
    before = {sent: signal.getsignal(sent) for sent in (*ENDS, signal.SIGINT)}
    saved = []

    def save() -> None:
        for sent in before:
            signal.raise_signal(sent)
        saved.append(1)

    if raised:
        with pytest.raises(SystemExit) as stop, at_the_end(save):
            signal.raise_signal(signal.SIGHUP)
        assert stop.value.code == 128 + signal.SIGHUP
    else:
        with at_the_end(save):
            pass
    assert saved == [1] and before == {sent: signal.getsignal(sent) for sent in before}


@pytest.mark.parametrize("sent", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_is_closed_loses_nothing(models: Path, tmp_path: Path, sent: signal.Signals) -> None:
    with Terminal("chat", models / "chat", "--session", tmp_path / "talk") as terminal:
        terminal.prompt()
        terminal.type("hello\n")
        terminal.prompt()
        terminal.send(sent)
        assert "Traceback" not in terminal.rest()
        assert terminal.exit_code() == 128 + sent
    assert "[1 turn so far]" in piped(models / "chat", "again", args=("--session", tmp_path / "talk")).stderr


def test_a_place_that_takes_no_file_is_told_before_the_conversation(models: Path, tmp_path: Path) -> None:
    for file, message in (
        (tmp_path / "no" / "talk", "no does not exist; create it first"),
        (tmp_path, "is a directory"),
    ):
        done = piped(models / "chat", "hello", args=("--session", file))
        assert (done.returncode, done.stdout) == (1, "") and message in done.stderr


def test_files_that_are_no_conversations(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    turn = {"role": "user", "content": "a"}
    notes: list[Any] = [None, [], {}, {"opening": [], "turns": [turn], "unseen": 0}]
    notes += [{"opening": {}, "turns": {}, "unseen": 0}]
    notes += [
        {"opening": [], "turns": [turn, {"role": "assistant", "content": content}], "unseen": 0}
        for content in (1, [1], [{}])
    ]
    notes += [{"opening": [], "turns": [], "unseen": unseen} for unseen in (2, -2, "0", None)]
    for note in notes:
        with Model.load(models / "chat", threads=1) as model, model.session() as session:
            session.save(file, json.dumps(note).encode())
        before = file.read_bytes()
        done = piped(models / "chat", "hello", args=("--session", file))
        assert (done.returncode, done.stdout) == (1, "") and "no conversation of `bitnet chat`" in done.stderr, note
        assert file.read_bytes() == before
    done = piped(models / "text", "hello", args=("--session", file))
    assert done.returncode == 1 and "the session belongs to a model of" in done.stderr
