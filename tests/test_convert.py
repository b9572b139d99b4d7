"""Conversion and its verification, independent of any foreign format; and the verb `bitnet convert`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bitnet.config import ModelConfig
from bitnet_cli import main
from bitnet_export import PackedFile, VerificationError, random_model
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.convert.verify_source import verify_source
from bitnet_export.foreign.gguf.write import write_gguf
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.foreign.outgoing import replacing_folder
from bitnet_export.foreign.source import SourceError
from bitnet_export.packed import encodings
from bitnet_export.packed.content import Content
from packed_source import flipped, source_of
from runtime_models import byte_tokenizer
from vision_models import PALIGEMMA, VISION

ODD = ModelConfig(
    vocab_size=531, dim=40, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=20, ffn_dim=72, max_context=300,
)  # fmt: skip
CONFIGS = {
    "relu2": ODD,
    "silu, untied, no sub norms": ODD.replace(activation="silu", sub_norm=False, tie_embeddings=False),
    "rows": ODD.replace(weight_scale="row"),
    "groups": ODD.replace(weight_scale="group", ffn_dim=200),
    "gemma": ODD.replace(
        activation="gelu", sub_norm=False, post_norm=True, qk_norm=True, embedding_scale=6.3, sliding_window=5,
        global_every=2, rope_local_theta=100.0,
    ),
    "norm before every projection": ODD.replace(linear_norm=True, sub_norm=False),
    "embeddings": ODD.replace(has_head=False, pooling="last"),
    "soft cap": ODD.replace(logit_softcap=2.0, qkv_bias=True),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.bitnet"
    random_model(CONFIGS[request.param], path, 5, tokenizer=byte_tokenizer().to_str().encode())
    return path


@pytest.mark.parametrize("head", ["int8", "f16", "f32"])
def test_what_is_packed_is_what_was_read(model: Path, tmp_path: Path, head: str) -> None:
    source, out = source_of(model), tmp_path / "out.bitnet"
    checks = []
    pack_source(source, out, head=head, check=lambda file: checks.append(verify_source(source, file, tokens=300)))
    before, after = PackedFile.open(model), PackedFile.open(out)
    for key, record in after.tensors.items():
        if record.encoding in encodings.TERNARY.values():
            assert np.array_equal(after.codes(record), before.codes(before.tensors[key]))
            assert np.array_equal(after.scales(record), before.scales(before.tensors[key]))
    (checked,) = checks
    assert checked.short.tokens == 128 and checked.long.tokens == 256
    assert checked.ternary_weights == before.configs[0].ternary_weights
    assert (checked.head.cost == 0) == (head == "f32")  # only this holds the published floats exactly


def test_an_encoding_that_does_not_hold_the_scales_is_refused(tmp_path: Path) -> None:
    """As in `bitnet export`; `bitnet convert` once ignored the option silently."""
    random_model(ODD.replace(weight_scale="group"), tmp_path / "m.bitnet", 5)
    source, out = source_of(tmp_path / "m.bitnet"), tmp_path / "out.bitnet"
    with pytest.raises(SourceError, match=r"q\.weight cannot be stored as TERNARY_5TRIT with group scale .*--encoding"):
        pack_source(source, out, encoding="1.6")
    with pytest.raises(SourceError, match=r"up\.weight cannot be stored as TERNARY_2BIT_ROWS with group scale"):
        pack_source(source, out, sparse=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.bitnet"]


def test_ternary_tables_are_of_two_bits_whatever_the_layers_are(tmp_path: Path) -> None:
    random_model(ODD.replace(head_format="ternary"), tmp_path / "m.bitnet", 5)
    pack_source(source_of(tmp_path / "m.bitnet"), tmp_path / "out.bitnet", encoding="1.6")
    kinds = {key.name: record.encoding for key, record in PackedFile.open(tmp_path / "out.bitnet").tensors.items()}
    assert kinds["embedding.weight"] == encodings.TERNARY_2BIT
    assert kinds["layers.0.q.weight"] == encodings.TERNARY_5TRIT


def cut_short(monkeypatch: pytest.MonkeyPatch, file: Path, read: int) -> list[int]:
    """The sizes of what is read of a file; before the read of that number it loses all but 100 bytes."""
    original, sizes = Content.read, []

    def counting(content: Content, start: int, size: int) -> np.ndarray:
        if content._what == str(file):
            if len(sizes) == read:
                os.truncate(file, 100)
            sizes.append(size)
        return original(content, start, size)

    monkeypatch.setattr(Content, "read", counting)
    return sizes


@pytest.mark.parametrize("kind", ["folder", "gguf", "packed to hf", "packed to gguf", "packed to onnx", "packed"])
def test_a_source_that_is_cut_short_meanwhile(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Truncated by another program: one error, where a mapped file would end this process with a signal."""
    (tmp_path / "in").mkdir()
    model, out = tmp_path / "in" / "m.bitnet", tmp_path / "out"
    random_model(ODD.replace(dim=64, head_dim=32, n_heads=2, ffn_dim=128, activation="silu"), model, 5)
    source, words = model, ["export" if kind == "packed" else "convert"]
    if kind.startswith("packed to"):
        words += ["--to", kind.rpartition(" ")[2]]
        words += ["--type", "F16"] * kind.endswith("gguf")
    if kind == "folder":
        write_folder(model, tmp_path / "in" / "hf")
        source = tmp_path / "in" / "hf"
    if kind == "gguf":
        source = tmp_path / "in" / "m.gguf"
        write_gguf(model, source, body="F16", head="F32")
    file = source / "model.safetensors" if source.is_dir() else source
    words += [str(source), str(out)]
    with monkeypatch.context() as patch:
        sizes = cut_short(patch, file, -1)
        assert main(words) == 0
    (shutil.rmtree if out.is_dir() else os.remove)(out)
    capsys.readouterr()
    cut_short(monkeypatch, file, len(sizes) // 2)
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bitnet: error: {file} had ") and "it was cut short while it was read" in error
    assert error.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_short_context_and_few_tokens(tmp_path: Path) -> None:
    random_model(ODD.replace(max_context=4), tmp_path / "a", 5)
    source, checks = source_of(tmp_path / "a"), []
    pack_source(source, tmp_path / "b", check=lambda file: checks.append(verify_source(source, file, tokens=3)))
    assert (checks[0].short.windows, checks[0].long.tokens) == (32, 8)


@pytest.mark.parametrize("role", ["q", "down", "ffn_norm"])
def test_a_difference_in_the_layers_is_found(tmp_path: Path, role: str) -> None:
    random_model(ODD, tmp_path / "a", 5)
    source, out = source_of(tmp_path / "a"), tmp_path / "out"
    with pytest.raises(VerificationError, match=rf"layers\.0\.{role}\.weight: (codes|values) in the file differ"):
        pack_source(source, out, check=lambda file: verify_source(flipped(source, role), file, tokens=64))
    assert not out.exists()


def test_a_difference_in_the_head_is_found(tmp_path: Path) -> None:
    random_model(ODD.replace(tie_embeddings=False), tmp_path / "a", 5)
    source, out = source_of(tmp_path / "a"), tmp_path / "out"
    with pytest.raises(VerificationError, match="all logits"):
        pack_source(source, out, check=lambda file: verify_source(flipped(source, "head"), file, tokens=64))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is an empty file"),
        (b"PK\x03\x04....", "is a zip archive, such as a torch checkpoint"),
        (b"what is this", "is a file of an unknown kind"),
        (b"\x89BITNET\n\1\0\0\0\1\0\0\0" + bytes(48), "is an adapter, expected the model that it belongs to"),
        (b"\x89BITNET\n", "is a packed file already; say what it should become: --to hf, gguf or onnx"),
    ],
)
def test_what_is_no_published_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    (tmp_path / "model").write_bytes(content)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    with pytest.raises(SourceError), open_source(tmp_path / "model"):
        pass
    assert not (tmp_path / "out").exists()


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
    assert "found" in capsys.readouterr().err
    before, after = PackedFile.open(first), PackedFile.open(back)
    for key, record in after.tensors.items():
        if record.encoding in encodings.TERNARY.values():
            assert np.array_equal(after.codes(record), before.codes(before.tensors[key]))
            assert np.array_equal(after.scales(record), before.scales(before.tensors[key]))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    code = main(["convert", *map(str, words)])
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    return code, captured.err


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


@pytest.mark.parametrize("to", ["hf", "onnx"])
def test_a_folder_is_on_disk_before_it_has_its_name(own: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    out, done = own.with_name("out"), []
    fsync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def renamed(source: Path, target: Path) -> None:
        assert {str(source), *(str(file) for file in source.iterdir())} <= set(done)
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
