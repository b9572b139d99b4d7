"""What `bitnet train` refuses, and what it says then."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from bitnet.settings import Settings
from bitnet.setup import building
from bitnet.setup.given import Given
from bitnet.setup.start import train
from bitnet.train import loop, memory
from bitnet.train.errors import TrainingError
from training import MODEL, TINY
from training import bitnet as run


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--stpes", "3"], 2, "unknown option '--stpes', did you mean '--steps'?"),
        (["--schedule", "cosin"], 2, "did you mean 'cosine'?"),
        (["--steps", "many"], 2, "invalid int value: 'many'"),
        (["--set", "dimm=3"], 1, "unknown model option 'dimm', did you mean 'dim'?"),
        (["--set", "foo=1"], 1, "unknown model option 'foo'; docs/options.md lists them"),
        (
            ["--warmup", "0.6", "--warmdown", "0.6"],
            1,
            "--warmup 0.6 and --warmdown 0.6 are shares of one run, expected at",
        ),
        (["--set", "dim"], 1, "expected NAME=VALUE"),
        (
            ["--set", "n_experts=4", "--set", "experts_per_token=1"],
            1,
            "so the share of that expert is always 1 and no gradient reaches the router",
        ),
        (
            ["--preset", "tinny"],
            1,
            "unknown preset 'tinny', expected tiny, gguf, mini-gpt, mini-gpt-learned, thinker, thinker-moe, ",
        ),
        (["--lr", "-1"], 1, "--lr is -1.0, expected 1e-09 to 10"),
        (["--data", "nowhere"], 1, "no file, folder or glob matches 'nowhere'"),
        (
            ["--tokenizer", "words"],
            1,
            "tokenizer is 'words', which is not a file, expected bpe, llama-bpe, byte, char or a tokenizer.json",
        ),
        (["--batch", "100000"], 1, "one batch of 100000 × 32 needs"),
        (
            ["--config", "none.toml"],
            1,
            "--config none.toml: No such file or directory; expected a TOML file, or a Thinker's JSON",
        ),
    ],
)
def test_refusals(
    argv: list[str], code: int, message: str, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", *TINY, "--data", sentences, "--out", str(tmp_path / "run"), *argv) == code
    errors = capsys.readouterr().err
    lines = [line for line in errors.strip().splitlines() if "reading and tokenizing" not in line]
    assert message in errors and "error:" in lines[0] and len(lines) <= 2
    assert not (tmp_path / "run").exists()  # neither lock nor tokens


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context", "33"], "--context is 33, the model has at most 32; lower it, or add --set max_context=33"),
        (["--context", "1"], "--context is 1, expected 2 or more to learn the next token; raise it"),
        (["--set", "max_context=1"], "max_context is 1, expected 2 or more to learn the next token; raise it"),
        (
            ["--set", "max_context=2", "--draft"],
            "max_context is 2, expected 3 or more to learn the next token and a draft; raise it",
        ),
        (["--tokenizer", "missing.json"], "tokenizer is 'missing.json', which is not a file, expected bpe, "),
        (["--report-to", "tensorboard"], "needs tensorboard"),
        (["--report-to", "wandb"], "needs wandb"),
    ],
)
def test_what_is_refused_before_the_text_is_read(
    argv: list[str], message: str, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert run("train", *TINY, "--data", sentences, "--out", str(tmp_path / "run"), *argv) == 1
    errors = capsys.readouterr().err
    assert message in errors and "reading" not in errors


def test_an_occupied_folder(finished: Path, sentences: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", *TINY, "--data", sentences, "--out", str(finished)) == 1
    assert "already holds step-000020; add --resume to go on, or name another --out" in capsys.readouterr().err


# The limit counts from where torch is loaded: with CUDA that alone is more than the CPU build and a small model.
LIMITED = """
import resource, runpy
from pathlib import Path
import torch
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2_000_000_000, resource.RLIM_INFINITY))
runpy.run_module("bitnet", run_name="__main__")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limits of Linux")
@pytest.mark.parametrize(
    ("dim", "layers", "message"),
    [(2048, 20, "training 2,0"), (64, 1, "memory ran out; lower --batch or --context, or take a smaller model")],
)
def test_too_little_memory(dim: int, layers: int, message: str, sentences: str, tmp_path: Path) -> None:
    wide = ["--set", f"dim={dim}", "--set", "ffn_dim=16384", "--set", f"n_layers={layers}", "--set", "max_context=32"]
    words = [*TINY[: len(MODEL) * 2], *wide, "--batch", "300", "--threads", "1", "--data", sentences]
    limited = [sys.executable, "-c", LIMITED, "train", *words, "--out", str(tmp_path / "run")]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"bitnet: error: {message}" in result.stderr
    assert ("reading and tokenizing" in result.stderr) == (layers == 1)


@pytest.mark.parametrize(
    ("said", "ran_out"),
    [
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", True),  # pinned memory, a graph
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_that_say_that_memory_ran_out(said: str, ran_out: bool) -> None:
    assert memory.ran_out(RuntimeError(said)) == ran_out


@pytest.mark.parametrize(("said", "shown"), [("", ""), ("8 bytes\nof C++", " (8 bytes)")])
def test_memory_that_ran_out_without_a_word(said: str, shown: str) -> None:
    def read(_: object) -> NoReturn:
        raise MemoryError(said)

    with pytest.raises(TrainingError, match=re.escape(f"take a smaller model{shown}") + "$"):
        train(Given(options={"source": "any"}), read)


def test_what_is_frozen_needs_memory_for_its_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, sees = (PRESETS[name] for name in ("tiny", "siglip-tiny"))
    trained = {"source": "x", "quantize_warmup": 0.5, "optimizer": "adamw"}
    for config, frozen in (
        (texts.with_draft(), {"draft": True, "draft_only": True}),
        (texts.replace(adapter_rank=2, adapters=["q"]), {"lora": 2}),
        (sees, {"vision": "x", "freeze_vision": True}),
    ):
        n = sum(p.numel() for p in Transformer(config).parameters())
        monkeypatch.setattr(memory, "available", lambda n=n: (12.0 * n, "a limit"))
        building.check_memory(config, Settings(**trained, **frozen))
        with pytest.raises(TrainingError, match="make the model smaller"):
            building.check_memory(config, Settings(**trained))


def test_a_folder_of_something_else(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("text")
    assert run("train", *TINY, "--data", sentences, "--out", str(tmp_path)) == 1
    assert "holds thesis.txt and is not a run folder; name a new or empty folder with --out" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_with_runs_in_it_is_read_again(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sentences, "text")
    for name in ("one", "two"):
        assert run("train", *TINY, "--steps", "1", "--data", ".", "--out", f"runs/{name}") == 0
    assert "what runs wrote was left out" in capsys.readouterr().err
    assert run("eval", "runs/one", "--data", ".") == 0
    assert run("train", "--resume", "--out", "runs/one", "--data", ".", "--steps", "2") == 0


def test_a_little_text_that_is_seen_often(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "carry_out", lambda *_: loop.Outcome())
    for steps, often in ((20, False), (10_000, True)):
        assert run("train", *TINY[:-2], "--steps", steps, "--data", sentences, "--out", tmp_path / str(steps)) == 0
        found = re.search(r"each of the ([\d,]+) training tokens is seen about (\d+) times", capsys.readouterr().err)
        assert bool(found) == often
    assert found and int(found[2]) == pytest.approx(10_000 * 4 * 32 / int(found[1].replace(",", "")), rel=0.05)


def test_a_file_that_takes_more_than_the_run_learns(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "carry_out", lambda *_: loop.Outcome())
    for context, said in (("32", False), ("16", True)):
        assert run("train", *TINY, "--data", sentences, "--context", context, "--out", tmp_path / context) == 0
        assert ("texts of 32, whose end is untrained; --set max_context=16" in capsys.readouterr().err) == said


def test_two_runs_in_one_folder(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bitnet import process

    with process.locked(tmp_path):
        assert run("train", *TINY, "--data", sentences, "--out", str(tmp_path)) == 1
    assert "another run is writing to" in capsys.readouterr().err
