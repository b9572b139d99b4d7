"""The verb `bitnet convert`: what it refuses, replaces and leaves behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bitnet.config import ModelConfig
from bitnet_cli import main
from bitnet_export import PackedFile, random_model
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.foreign.outgoing import replacing_folder
from bitnet_export.packed import encodings
from packed_source import ODD
from runtime_models import byte_tokenizer
from vision_models import PALIGEMMA, VISION


@pytest.mark.parametrize(("to", "found"), [("hf", "config.json"), ("onnx", "model.onnx"), ("gguf", "")])
def test_the_verb_out_and_back(tmp_path: Path, to: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = ODD.replace(activation="silu", dim=256, head_dim=64, n_heads=4, n_kv_heads=2, ffn_dim=512)
    first, out, back = tmp_path / "first.bitnet", tmp_path / "out", tmp_path / "back.bitnet"
    random_model(config, first, 5, tokenizer=byte_tokenizer().to_str().encode())
    words = ["--to", to, *(["--no-tokenizer"] if to == "gguf" else [])]
    assert main(["convert", str(first), str(out), *words, "--json"]) == 0
    assert (out / found if found else out).is_file()
    assert json.loads(capsys.readouterr().out)["file"] == str(out)
    if to == "onnx":
        return
    assert main(["convert", str(out), str(back), "--tokens", "64"]) == 0
    lines = capsys.readouterr().err.splitlines()
    begun = ("writing tensor 1 of ", "comparing with the source: the engine", "converted ")
    assert all(sum(line.startswith(words) for line in lines) == 1 for words in begun)  # a log has each step once
    before, after = PackedFile.open(first), PackedFile.open(back)
    for key, record in after.tensors.items():
        if record.encoding in encodings.TERNARY.values():
            assert np.array_equal(after.codes(record), before.codes(before.tensors[key]))
            assert np.array_equal(after.scales(record), before.scales(before.tensors[key]))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and the one line on stderr, behind those that say what is done."""
    code = main(["convert", *map(str, words)])
    captured = capsys.readouterr()
    *done, last = captured.err.splitlines()
    assert all(line.startswith("writing ") for line in done) and not captured.out
    return code, last


@pytest.fixture
def own(tmp_path: Path) -> Path:
    random_model(ODD.replace(activation="silu", dim=256, head_dim=64, n_heads=4, ffn_dim=512), tmp_path / "own", 5)
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--type F16", "--type is for --to gguf, not for packed files"),
        ("--no-tokenizer", "--no-tokenizer is for --to gguf, not for packed files"),
        ("--to hf --head f16", "--head is for packed files and --to gguf, not for --to hf"),
        ("--to onnx --type F16", "--type is for --to gguf, not for --to onnx"),
        ("--to gguf --form 2bit", "--form is for --to onnx, not for --to gguf"),
        ("--to gguf --tokens 5", "--tokens is for packed files, not for --to gguf"),
        ("--to hf --encoding 1.6", "--encoding is for packed files, not for --to hf"),
        ("--to onnx --sparse off", "--sparse is for packed files, not for --to onnx"),
    ],
)
def test_options_that_would_say_nothing_are_refused(
    own: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    code, error = run(capsys, own, own.with_name("out"), *words.split())
    assert code == 2 and said in error and not own.with_name("out").exists()


def test_a_source_is_not_replaced(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf, link, folder = own.with_name("a.gguf"), own.with_name("link"), own.with_name("folder")
    before = own.read_bytes()
    link.symlink_to(own)
    for source, out in ((own, own), (own, link), (link, own)):
        assert "is the source and would be replaced" in run(capsys, source, out, "--to", "gguf")[1]
    assert own.read_bytes() == before
    assert main(["convert", str(own), str(gguf), "--to", "gguf"]) == 0
    assert main(["convert", str(own), str(folder), "--to", "hf"]) == 0
    capsys.readouterr()
    for source, out in ((gguf, gguf), (folder, folder / "model.safetensors")):
        before = out.read_bytes()
        assert "the source and would be replaced; give another name" in run(capsys, source, out)[1]
        assert out.read_bytes() == before
    assert main(["convert", str(folder), str(folder / "model.bitnet"), "--tokens", "3"]) == 0  # a new file is welcome


@pytest.mark.parametrize("out", ["m.gguf", "m.onnx", "m.bitnet"])
def test_to_what_is_asked_of_a_packed_file_whatever_the_name(
    own: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run(capsys, own, own.with_name(out))
    assert code == 1 and "is a packed file already; say what it should become: --to hf, gguf or onnx" in error


@pytest.mark.parametrize("to", [(), ("--to", "gguf")])
def test_a_source_that_is_not_there_is_said_at_once(
    to: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "a packed file" if to else "a Hugging Face folder or a GGUF file; get one with: hf download OWNER/MODEL"
    assert main(["convert", str(tmp_path / "no"), str(tmp_path / "out"), *to]) == 1
    assert f"{tmp_path / 'no'} does not exist, expected {expected}" in capsys.readouterr().err


def test_only_an_older_result_is_replaced(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, other, gguf = (own.with_name(name) for name in ("thesis.txt", "other.bitnet", "a.gguf"))
    text.write_text("years of work")
    other.write_bytes(own.read_bytes())
    for _ in range(2):  # the second replaces what the first wrote
        assert main(["convert", str(own), str(gguf), "--to", "gguf"]) == 0
    capsys.readouterr()
    published = own.with_name("published.gguf")
    published.write_bytes(b"GGUF" + bytes(300))
    for out, found in (
        (text, "is not a GGUF file of our own"),
        (other, "is a packed file, expected a GGUF file of our own"),
        (published, "is a GGUF file of another program, expected a GGUF file of our own"),
    ):
        assert f"{out} exists and {found}; give another name" in run(capsys, own, out, "--to", "gguf")[1]
    for source in (gguf, own):
        verb = "convert" if source == gguf else "export"
        assert main([verb, str(source), str(text)]) == 1
        assert f"{text} exists and is not a packed file; give another name" in capsys.readouterr().err
        assert main([verb, str(source), str(other)]) == 0
    assert text.read_text() == "years of work"


@pytest.mark.parametrize("config", [PALIGEMMA, VISION], ids=["two stacks", "images alone"])
def test_images_do_not_go_into_a_gguf_file(
    config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model(config, tmp_path / "m.bitnet", 5)
    _, error = run(capsys, tmp_path / "m.bitnet", tmp_path / "m.gguf", "--to", "gguf")
    assert "m.bitnet sees images, which no GGUF file of ours can; --to onnx writes them, and --to hf for" in error


def test_pipes_are_neither_read_nor_replaced(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = own.with_name("pipe")
    os.mkfifo(pipe)
    assert "is a device or pipe" in run(capsys, pipe, own.with_name("out"))[1]
    assert "is a device or pipe" in run(capsys, own, pipe, "--to", "gguf")[1]
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", [".", "step-000004"])
def test_what_training_wrote_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004" / "state.json").write_text("{}")
    assert "bitnet export makes a packed file of it" in run(capsys, tmp_path / place, tmp_path / "out")[1]


def test_a_published_folder_is_not_exported(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own.with_name("folder")
    assert main(["convert", str(own), str(folder), "--to", "hf"]) == 0
    capsys.readouterr()
    assert main(["export", str(folder), str(own.with_name("out"))]) == 1
    assert (
        "is a Hugging Face folder, expected a checkpoint; bitnet convert and bitnet finetune read those"
        in capsys.readouterr().err
    )


def test_what_a_file_says_reaches_no_terminal_unescaped(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own.with_name("folder")
    assert main(["convert", str(own), str(folder), "--to", "hf"]) == 0
    capsys.readouterr()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"red\x1b[31m": 1}))
    assert main(["convert", str(folder), str(own.with_name("out")), "--tokens", "8"]) == 0
    assert r"config.json has red\x1b[31m = 1" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["a\n\x1b[31m"]}))
    code, error = run(capsys, folder, own.with_name("out"))
    assert code == 1 and "\x1b" not in error


@pytest.mark.parametrize("to", ["hf", "onnx"])
def test_a_folder_on_a_full_disk(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, error = run(capsys, own, own.with_name("out"), "--to", to)
    assert code == 1 and f"no space left while writing {own.with_name('out')}; free some" in error
    assert os.listdir(own.parent) == ["own"]


def test_errors_of_writing_name_what_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing_folder(tmp_path / "out") as folder:
        (folder / "none" / "x").write_text("")
    assert caught.value.filename == str(tmp_path / "out" / "none" / "x")
    assert os.listdir(tmp_path) == []


def test_a_folder_without_a_name_of_its_own(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even an empty one: a shell in it would be left in a deleted folder."""
    own.with_name("empty").mkdir()
    monkeypatch.chdir(own.with_name("empty"))
    with pytest.raises(FileExistsError, match="has no name of its own; give the name of a new folder"):
        write_folder(own, ".")
    assert not any(Path.cwd().iterdir())


@pytest.fixture
def heard() -> Iterator[None]:
    """Under nohup the tests, and so the program, would not hear SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("to", ["hf", "gguf", "onnx", None])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, to: str | None, sent: signal.Signals
) -> None:
    def pressed(_: int) -> None:
        signal.raise_signal(sent)

    source = own
    if to is None:
        source = own.with_name("source")
        assert main(["convert", str(own), str(source), "--to", "hf"]) == 0
    before = sorted(os.listdir(own.parent))
    monkeypatch.setattr("os.fsync", pressed)
    assert main(["convert", str(source), str(own.with_name("out")), *(["--to", to] if to else [])]) == 128 + sent
    assert signal.getsignal(sent) in (signal.SIG_DFL, signal.default_int_handler)
    assert sorted(os.listdir(own.parent)) == before


@pytest.mark.parametrize("to", ["hf", "onnx", "gguf"])
def test_all_is_on_disk_before_it_has_its_name(own: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    out, done = own.with_name("out"), []
    fsync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def renamed(source: Path, target: Path) -> None:
        assert {str(source), *(str(file) for file in source.rglob("*"))} <= set(done)
        assert str(target.parent) not in done
        done.append("renamed")
        replace(source, target)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.replace", renamed)
    assert main(["convert", str(own), str(out), "--to", to]) == 0
    assert done[-2:] == ["renamed", str(out.parent)]


KILLED = """
import os, signal, sys
from pathlib import Path
import bitnet.model.transformer, bitnet_export.foreign.hf.write  # once, before the forks
from bitnet_cli import main

source, out = Path(sys.argv[1]), Path(sys.argv[2])
for step in range(40):
    if (child := os.fork()) == 0:
        left = step
        def until(function):
            def call(*arguments):
                global left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*arguments)
            return call
        os.fsync, os.replace = until(os.fsync), until(os.replace)
        os._exit(main(["convert", str(source), str(out), "--to", "hf"]))
    status = os.waitpid(child, 0)[1]
    print(step, os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status), out.exists())
    if out.exists():
        break
"""


def test_a_killed_export_leaves_nothing_under_its_name(own: Path) -> None:
    """Killed at each step that puts something on disk: the folder is not there until it is complete."""
    whole, out = own.parent / "whole/out", own.with_name("out")  # the card's title is the folder's name
    whole.parent.mkdir()
    assert main(["convert", str(own), str(whole), "--to", "hf"]) == 0
    command = [sys.executable, "-c", KILLED, str(own), str(out)]
    steps = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    # Files, folder, its new name; only then, at the step that makes the name last, the folder is there.
    files = len(list(whole.iterdir()))
    assert steps == [f"{i} 9 {i == files + 2}" for i in range(files + 3)]
    same = {file.name: file.read_bytes() for file in whole.iterdir()}
    assert {file.name: file.read_bytes() for file in out.iterdir()} == same
