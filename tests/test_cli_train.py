"""The `bitnet` command itself: exit codes, streams, and what it says when it cannot."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bitnet_cli
from bitnet_cli import advice, verbs
from bitnet_cli.table import VERBS


def bitnet(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bitnet", *argv], capture_output=True, text=True, timeout=60)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet_cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "bitnet VERB --help shows the options of a verb. A first model: bitnet train" in " ".join(text.split())
    for verb in VERBS:
        assert f"\n    {verb.name} " in text
        assert bitnet_cli.main([verb.name, "--help"]) == 0


def test_each_verb_is_a_module_and_a_line_of_the_table() -> None:
    files = {path.stem for path in Path(verbs.__path__[0]).glob("*.py")} - {"__init__"}
    assert files == {verb.name.replace("-", "_") for verb in VERBS}
    assert all(" 'torch>=" in advice.install(verb.extra) for verb in VERBS if verb.extra not in ("images", "serve"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: VERB"),
        (["trian"], "did you mean 'train'?"),
        (["--verison"], "unknown option '--verison', did you mean '--version'?"),
        (["eval"], "the following arguments are required: SRC"),
        (["eval", "x", "--jsn"], "unknown option '--jsn', did you mean '--json'?"),
        (["eval", "x", "--tok=3"], "unknown option '--tok', did you mean '--tokens'?"),
        (["train", "--lora", "3"], "unknown option '--lora', which is of bitnet finetune"),
        (["finetune", "x", "--tokenizer", "byte"], "unknown option '--tokenizer', which is of bitnet train"),
        (["train", "--learning-rate", "1"], "unknown option '--learning-rate', which is --lr here\n"),
        (["train", "--max_steps=5"], "unknown option '--max_steps', which is --steps here\n"),
        (["finetune", "x", "--num-train-epochs", "3"],
         "'--num-train-epochs', which is --tokens here: those of the text, times the passes over it\n"),
        (["train", "--n-layer", "4"], "'--n-layer', which is n_layers here, of the model: --set n_layers=VALUE, or "),
        (["train", "--dim", "64"], "unknown option '--dim', which is of the model: --set dim=VALUE, or "),
        (["finetune", "x", "--vocab-size=9"], "'--vocab-size', which is of the model: --set vocab_size=VALUE"),
        (["eval", "x", "y"], "unexpected argument 'y'; text to read follows --data\n"),
        (["inspect", "x", "y"], "unexpected argument 'y'\n"),
        (["generate", "x", "-p", "-y"], "expected one argument; one that begins with - is given as --prompt=VALUE\n"),
        (["generate", "x", "some text"], "unexpected argument 'some text'; a prompt follows -p\n"),
        (["generate", "x", "- some text"], "unexpected argument '- some text'; a prompt follows -p\n"),
        (["chat", "x", "--json"], "unknown option '--json'\n"),
        (["convert", "", "x"], "an argument is empty, expected a value\n"),
        (["train", "--out", ""], "--out is empty, expected a value\n"),
        (["train", "--data="], "--data is empty, expected a value\n"),
    ],
)  # fmt: skip
def test_wrong_usage_is_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet_cli.main(argv) == 2
    out, errors = capsys.readouterr()
    assert not out and message in errors and errors.count("\n") == 2


@pytest.mark.parametrize("verb", [[], ["generate"]])
def test_a_file_that_begins_like_an_option(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash.bitnet").touch()
    assert bitnet_cli.main([*verb, "-dash.bitnet"]) == 2
    assert "unknown option '-dash.bitnet'; the file of that name is ./-dash.bitnet\n" in capsys.readouterr().err


def test_a_failure_is_1_and_one_line() -> None:
    result = bitnet("eval", "no-such-folder")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("bitnet: error: no-such-folder does not exist") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError(), ""),
        (MemoryError("std::bad_alloc"), " (std::bad_alloc)"),
        (RuntimeError("mmap: Cannot allocate memory (12)\nof C++"), " (mmap: Cannot allocate memory (12))"),
    ],
)
def test_memory_that_ran_out_is_one_line_that_says_what_to_do(
    error: Exception, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise error

    monkeypatch.setattr("bitnet_cli.verbs.report.run", fails)
    assert bitnet_cli.main(["report", "a run"]) == 1
    said = f"bitnet: error: memory ran out{found}; end other programs, raise the limit, or take a smaller model\n"
    assert capsys.readouterr().err == said


def test_a_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    code = f"import os, sys, bitnet_cli; os.rmdir({str(gone)!r}); sys.exit(bitnet_cli.main(sys.argv[1:]))"
    for words, exit_code, said in ((["eval", str(tmp_path)], 1, "the current folder was removed"), (["--help"], 0, "")):
        command = [sys.executable, "-c", code, *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=gone, timeout=60)
        assert result.returncode == exit_code and result.stderr.count("\n") == exit_code and said in result.stderr
        gone.mkdir(exist_ok=True)


def test_version() -> None:
    assert bitnet("--version").stdout.startswith("bitnet-edge ")


@pytest.mark.parametrize(("verb", "extra"), [("train", "train"), ("eval", "train"), ("export", "export")])
def test_a_missing_extra_is_named(verb: str, extra: str) -> None:
    arguments = {"train": [], "eval": ["."], "export": [".", "y"]}[verb]
    code = f"import sys; sys.modules['torch'] = None; from bitnet_cli import main; sys.exit(main({[verb, *arguments]}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    command = result.stderr.removeprefix(f"bitnet: error: `bitnet {verb}` needs torch: ")
    assert command.endswith("\n") and command.count("\n") == 1
    # It works in a clone, with an installed wheel, and in any folder: it names the interpreter and the packages.
    program, *pip = shlex.split(command)[:4]
    assert program == sys.executable and pip == ["-m", "pip", "install"]
    assert " 'torch>=" in command and " 'safetensors>=" in command
    assert ("onnxruntime>=" in command) == (extra == "export")


def test_another_package_of_the_same_import_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "bitnet").mkdir()
    (tmp_path / "bitnet/__init__.py").write_text("import what_the_other_one_needs\n")
    (tmp_path / "bitnet-0.2.5.dist-info").mkdir()
    (tmp_path / "bitnet-0.2.5.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: bitnet\nVersion: 0.2.5\n")
    code = """
import importlib.machinery, sys, bitnet_cli

class First:  # also before an editable installation
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [sys.argv[1]]) if name == "bitnet" else None

sys.meta_path.insert(0, First)
sys.path.insert(0, sys.argv[1])
sys.exit(bitnet_cli.main(["train", "--help"]))
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("bitnet: error: the package `bitnet` 0.2.5, another project, is installed too")
    assert "pip uninstall bitnet, then install bitnet-edge again" in result.stderr


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "bitnet", "--help"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(argv, stdout=write, stderr=subprocess.PIPE, env=buffered)
    os.close(write)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors == b""


@pytest.mark.parametrize("words", [["--version"], ["train", "--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(unbuffered: str, words: list[str]) -> None:
    """Also if the disk turns out to be full only when Python exits, and for argparse, which would ignore it."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    argv = [sys.executable, "-m", "bitnet", *words]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with full.open("w") as out:
        done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("bitnet: error: No space left on device") and done.stderr.count("\n") == 1


def test_every_library_that_may_be_missing_is_in_the_command_for_it() -> None:
    for library, extra in advice.EXTRAS.items():
        assert f" '{library.replace('_', '-')}>=" in advice.install(extra)


def test_a_place_where_nothing_may_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    assert bitnet_cli.main(["train", "--preset", "tiny", "--out", str(tmp_path / "run")]) == 1
    expected = f"bitnet: error: Permission denied: {tmp_path}/run; no file may be made there; name another folder\n"
    assert capsys.readouterr().err.endswith(expected)


SWALLOWED = """
import os, signal, sys

class Swallows:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[2]:
            try:
                os.kill(os.getpid(), getattr(signal, sys.argv[1]))
                for _ in range(1000): pass  # Python calls a handler between two of its steps
            except BaseException:
                pass

sys.meta_path.insert(0, Swallows())
import bitnet_cli
sys.exit(bitnet_cli.main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("sent", "library", "words"),
    [
        ("SIGINT", "argparse", "--version"),
        ("SIGTERM", "numpy", "convert --help"),
        ("SIGINT", "numpy", "inspect file"),
        ("SIGTERM", "tokenizers", "tokenize folder --data text"),
        *((sent, "torch", "train --out run") for sent in ("SIGINT", "SIGTERM")),
        ("SIGTERM", "torch", "eval ."),
        ("SIGINT", "torch", "export . out"),
        ("SIGTERM", "torch", "convert . out"),
        ("SIGINT", "onnxruntime", "convert . out --to onnx"),
        ("SIGINT", "torch", "report ."),
        *(("SIGTERM", "bitnet_runtime._native", f"{verb} file") for verb in ("chat", "bench", "serve")),
        ("SIGINT", "bitnet_runtime._native", "generate file -p x"),
        ("SIGTERM", "bitnet_runtime._native", "eval file"),
    ],
)
def test_a_signal_is_not_lost_while_libraries_are_loaded(sent: str, library: str, words: str, tmp_path: Path) -> None:
    """Their C code may swallow the exception of a handler: torch does, as it loads numpy."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", SWALLOWED, sent, library, *words.split()]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (-getattr(signal, sent), b"", ["file"])


def test_threads_of_torch_wait_asleep_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert bitnet_cli.main(["inspect", "no such file"]) == 1
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    del os.environ["GOMP_SPINCOUNT"]
    assert bitnet_cli.main(["inspect", "no such file"]) == 1
    assert os.environ["GOMP_SPINCOUNT"] == "2000"
