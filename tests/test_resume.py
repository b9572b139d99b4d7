"""What `--resume` continues from, from where, and with which options; and what a failed start leaves behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitnet import source_settings
from bitnet.data import dataset, finding, tokenizer
from bitnet.presets import PRESETS
from bitnet.settings import Settings
from bitnet.setup import hardware, resolve
from bitnet.setup.given import Given
from bitnet.train import checkpoint, loop, progress
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.horizon import Horizon
from bitnet.train.state import State
from bitnet_export.checkpoint.real_text import real_tokens
from training import TINY, bitnet, bits, edited, killed_before, losses

torch.set_num_threads(1)


# ---- from what, from where ----


def test_before_the_first_step_from_elsewhere_and_without_the_text(
    sentences: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sentences, tmp_path / "here" / "text")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    killed_before(3, "train", *TINY, "--data", "text", "--out", "run")
    run = Path("../moved")
    (tmp_path / "here" / "run").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "there")
    assert [p.name for p in checkpoint.all_of(run)] == ["step-000000"]
    state = Checkpoint.open(run).state
    assert state["settings"]["data"] == [str(tmp_path / "here" / "text")] and state["settings"]["steps"] == 20
    assert state["quantized"] < 0.1
    shutil.rmtree(tmp_path / "here")
    capsys.readouterr()

    assert bitnet("train", "--resume", "--out", run) == 0
    assert "\nstep 1 of 20: loss 5." in capsys.readouterr().err  # at once, not only after some hundred steps
    assert bits(run / "step-000020") == bits(finished / "step-000020") and losses(run) == losses(finished)
    assert bitnet("eval", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["nats_per_token"] == losses(run)[-1]["validation"]["nats_per_token"]
    assert real_tokens(Checkpoint.open(run), 300)[1] == "validation text"  # that `export` compares on

    (file,) = run.glob("validation-*.bin")
    file.write_bytes(file.read_bytes()[:-2] + b"\xff\xff")
    assert bitnet("eval", run) == 1
    assert f"{file.name} is damaged (SHA-256); remove it" in capsys.readouterr().err
    file.unlink()
    text = real_tokens(Checkpoint.open(run), 300)[1]
    assert text.startswith("the standard library's source (the validation text cannot be read: no file, folder or glob")
    assert bitnet("train", "--resume", "--out", run, "--steps", "21") == 1
    assert f"matches '{tmp_path / 'here' / 'text'}'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_nothing_to_resume(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name, found in (("typo", "does not exist"), ("empty", "has no step-* folder in it")):
        assert bitnet(verb, "--resume", "--out", tmp_path / name) == 1
        assert f"nothing to resume: {tmp_path / name} {found}" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]
    assert bitnet("finetune", "--resume") == 1
    assert "--resume without SRC needs the run; name its folder with --out" in capsys.readouterr().err
    assert bitnet("finetune") == 1
    assert "finetune needs SRC" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", ["fall", "parameters"])
def test_a_checkpoint_of_an_earlier_version(
    lacking: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused with the way out, and nothing is written; its weights still begin a run."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    newest = edited(checkpoint.all_of(run)[-1])
    state = json.loads((newest / "state.json").read_text())
    del state[lacking]
    (newest / "state.json").write_text(json.dumps(state))
    before = {path.name for path in run.rglob("*")}
    for argv in (["--resume", "--out", run, "--steps", "30"], ["--from", newest, "--out", tmp_path / "new"]):
        capsys.readouterr()
        assert bitnet("train", *argv) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"{newest}/state.json has no '{lacking}'" in said and f"bitnet finetune {newest}" in said
    assert {path.name for path in run.rglob("*")} - before <= {"lock"} and not (tmp_path / "new").exists()
    assert (
        bitnet("finetune", newest, "--out", tmp_path / "new", "--steps", "1", "--data", __file__, "--batch", "1") == 0
    )


def test_a_state_that_lacks_what_came_later(finished: Path, tmp_path: Path) -> None:
    """The state is as its type says, and keys that an earlier version did not write begin as in a new run."""
    state = Checkpoint.open(finished).state
    assert State.__required_keys__ <= state.keys() <= State.__required_keys__ | State.__optional_keys__
    ends = []
    for lacking in ((), ("course", "sizes", "phased", "best_tasks", "skipped", "teacher", "held_out", "vocab_size")):
        run = tmp_path / str(len(lacking))
        shutil.copytree(finished, run)
        newest = edited(checkpoint.all_of(run)[-1])
        (newest / "state.json").write_text(json.dumps({k: v for k, v in state.items() if k not in lacking}))
        assert bitnet("train", "--resume", "--out", run, "--steps", "30") == 0
        last = Checkpoint.open(run)
        ends.append((bits(last.folder), last.state.keys(), last.state["data"], last.state["model"]))
    assert ends[0] == ends[1]


# ---- with which options ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "mini-gpt"], "--preset is mini-gpt, but a resumed run keeps its own, tiny"),
        (["--tokenizer", "byte"], "--tokenizer is byte, but a resumed run keeps its own, bpe"),
        (
            ["--set", "dim=64", "--set", "n_layers=2"],
            "a resumed run keeps its model, which has dim = 32; start another",
        ),
        (["--steps", "5"], "--steps is 5, but the run already has 20"),
        (["--minutes", "1e-6"], "--minutes is 1e-06, but the run already has"),
        (["--steps", "30", "--minutes", "1"], "both --minutes and --steps are given, expected one of them"),
        (["--optimizer", "adamw"], "holds the moments of muon; go on without --optimizer adamw"),
        (["--data", __file__], "another --validation; start another run with --out, from its weights with `bitnet"),
        (["--mixture", __file__], "a resumed run keeps its text, which --mixture would change; start another"),
        (["--fim", "0.5"], "a resumed run keeps its tokenizer, which has no tokens for --fim; start another"),
        (["--documents"], "--documents is True, but a resumed run keeps its own, False; start another"),
        (["--validation", "0.3"], "--validation is 0.3, but a resumed run keeps its own, 0.05; start another run"),
    ],
)
def test_options_that_a_run_cannot_follow(
    argv: list[str], message: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != "lock"}
    assert bitnet("train", "--resume", "--out", finished, *argv) == 1
    errors = capsys.readouterr().err
    assert message in errors.splitlines()[-1] and errors.count("error") == 1
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != "lock"} == before


def test_other_text_is_refused_however_short(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not tokenized before, which takes most of the time."""
    monkeypatch.delattr(dataset, "encoder")
    (tmp_path / "short.txt").write_text("the cat")
    assert bitnet("train", "--resume", "--out", finished, "--data", tmp_path / "short.txt") == 1
    assert "was trained on other text" in capsys.readouterr().err


def resolved(flags: dict[str, Any], file: str, tmp_path: Path, **more: Any) -> Settings:
    (tmp_path / "c.toml").write_text(file)
    return resolve.resolve(Given(config=str(tmp_path / "c.toml"), options=flags), **more)[0]


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("", {}, {"steps": 1500, "minutes": 0.0}),
        ("", {"minutes": 3.0}, {"minutes": 3.0}),
        ("[train]\nminutes = 2\n", {"steps": 7}, {"steps": 7, "minutes": 0.0}),
        ("[train]\nsteps = 9\n", {"minutes": 3.0}, {"minutes": 3.0}),
        ("[train]\nbatch_tokens = 4096\n", {"accumulate": 3}, {"accumulate": 3, "batch_tokens": 0}),
        ('preset = "bitnet-2b4t"\n', {"batch_tokens": 8192}, {"batch_tokens": 8192, "steps": 100_000}),
        ('preset = "mini-gpt"\n', {"preset": "tiny"}, {"tokenizer": "bpe"}),
    ],
)
def test_what_is_given_last_counts(file: str, flags: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = resolved(flags, file, tmp_path)
    assert {name: getattr(found, name) for name in expected} == expected


def test_one_budget_at_a_time(tmp_path: Path) -> None:
    for file, flags in (("[train]\nsteps = 9\nminutes = 1\n", {}), ("", {"steps": 9, "minutes": 1.0})):
        with pytest.raises(ValueError, match="both --minutes and --steps are given"):
            resolved(flags, file, tmp_path)
    with pytest.raises(ValueError, match="tokenizer is an option of `bitnet train`"):
        resolved(
            {"source": "x"}, '[train]\ntokenizer = "byte"\n', tmp_path, base=source_settings.of_source(PRESETS["tiny"])
        )


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "t.txt").touch()
    monkeypatch.chdir(tmp_path)
    for path, expected in (
        ("a b", f"{tmp_path}/a b"), ("*.txt", f"{tmp_path}/*.txt"), ("hf:a b:train", f"hf:{tmp_path}/a b:train"),
        ("hf:roneneldan/TinyStories", "hf:roneneldan/TinyStories"), ("none.txt", "none.txt"), ("bpe", "bpe"), ("", ""),
    ):  # fmt: skip
        assert finding.absolute(path) == expected


def test_a_folder_that_is_called_as_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "char").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = resolved({"tokenizer": "char"}, "", tmp_path)
    assert settings.tokenizer == "char"
    saved = {"step": 0, "tokens": 0, "seconds": 0.0, "parameters": 1}
    saved |= {"settings": settings.to_dict(), "model": PRESETS["tiny"].to_dict()}
    assert resolved({"tokenizer": "char"}, "", tmp_path, saved=saved).tokenizer == "char"


def test_checkpoints_by_time(sentences: str, tmp_path: Path) -> None:
    argv = [*TINY[:-2], "--save-every", "1000", "--save-minutes", "1e-6", "--steps", "3", "--keep", "9"]
    assert bitnet("train", *argv, "--data", sentences, "--out", tmp_path / "run") == 0
    assert [p.name for p in checkpoint.all_of(tmp_path / "run")] == [f"step-00000{i}" for i in range(4)]


def test_minutes_count_from_the_newest_checkpoint(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from that before the learning rate falls. A step takes a minute here."""
    clock, update = [0.0], loop.update

    def slow(run: loop.Run) -> Any:
        clock[0] += 60.0
        return update(run)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop, "update", slow)
    argv = [*TINY, "--save-every", "1000", "--save-minutes", "4", "--keep", "9", "--warmdown", "0.3"]
    assert bitnet("train", *argv, "--data", sentences, "--out", tmp_path / "run") == 0
    found = [int(each.name.rpartition("-")[2]) for each in checkpoint.all_of(tmp_path / "run")]
    assert found == [0, 4, 8, 12, 14, 18, 20]


# ---- while it goes on ----


def test_a_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A day of steps of a second: the first line at once, then further and further apart, up to a minute."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
    with progress.Progress(Horizon(86_400 * 100, 0.0, 100), state) as shown:
        for i in range(1, 4000):
            clock[0] += 1.0
            state |= {"step": i, "tokens": 100 * i, "seconds": float(i)}
            shown.step("loss 2.000")
    lines = capsys.readouterr().err.splitlines()
    steps = [int(line.split()[1].replace(",", "")) for line in lines]
    assert steps[:7] == [1, 2, 4, 8, 16, 32, 64] and 60 <= len(lines) <= 80
    assert lines[0] == "step 1 of 86,400: loss 2.000, 100 tokens/s, about 24 h 0 min left"


def test_speed_is_that_of_recent_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose first 1,000 steps took an hour goes on with ten steps a second: that is said, and slower again."""
    state: dict[str, Any] = {"step": 1000, "tokens": 100_000, "seconds": 3600.0}
    with progress.Progress(Horizon(11_000 * 100, 0.0, 100), state) as shown:
        for seconds, steps in ((0.1, 2000), (10.0, 30)):
            for _ in range(steps):
                state |= {"step": state["step"] + 1, "tokens": state["tokens"] + 100}
                state["seconds"] += seconds
                shown.step("loss 2.000")
            rate = 100 / seconds
            assert shown.speed == f"{rate:,.0f} tokens/s"
            assert shown.left == pytest.approx(seconds * (11_000 - state["step"]), rel=1e-6)
    assert "step 1,001 of 11,000: loss 2.000, 1,000 tokens/s, about 17 min left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(40.4, "40 s"), (200, "3 min"), (7500, "2 h 5 min"), (273_600, "3 d 4 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert progress.lasting(seconds) == text


def test_threads_are_bounded_by_the_cores(capsys: pytest.CaptureFixture[str]) -> None:
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    try:
        hardware.set_threads(1000)
        assert torch.get_num_threads() == cores
        assert f"--threads 1,000: only {cores} cores are available here" in capsys.readouterr().err
        hardware.set_threads(1)
        assert torch.get_num_threads() == 1 and not capsys.readouterr().err
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("error:Glyph")  # which quote the character
def test_what_a_run_is_called_reaches_no_terminal_unescaped(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, shown = tmp_path / "a\x1b]0;b\x07$^$", f"{tmp_path}/a\\x1b]0;b\\x07$^$"
    argv = ["train", *TINY[:-2], "--steps", "1", "--data", sentences, "--out", run]
    assert bitnet(*argv) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.err and f"{shown}: reading and tokenizing {sentences}\n" in printed.err
    assert printed.out.startswith(f"{run}/step-000001: validation")  # to a pipe as it is
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    (run / "step-000001" / "manifest.json").write_text("")
    assert bitnet("train", "--resume", "--out", run) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.err + printed.out and f"{shown}/step-000001 is damaged" in printed.err
    assert printed.out.startswith(f"{shown}/step-000001: validation")


# ---- starts that fail ----


@pytest.mark.parametrize("argv", [["--batch", "100000"], ["--data", "nowhere"], ["--set", "n_heads=4096"]])
def test_a_start_that_fails_leaves_what_was_there(argv: list[str], sentences: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    for run in (tmp_path / "mine", tmp_path / "new" / "run"):
        assert bitnet("train", *TINY, "--data", sentences, "--out", run, *argv) == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["mine", "notes.txt"]


def test_a_tokenizer_of_others(
    sentences: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with <s> and </s> instead of our end token: refused with the remedy, then used for training."""
    words = tokenizer.build("byte", [], 257).to_str().replace(tokenizer.END, "<s>")
    (tmp_path / "tokenizer.json").write_text(words)
    argv = ["train", *TINY[:-2], "--steps", "1", "--data", sentences, "--out", tmp_path / "run"]
    argv += ["--tokenizer", tmp_path / "tokenizer.json"]
    assert bitnet(*argv) == 1
    assert "put a tokenizer_config.json" in capsys.readouterr().err
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<s>"}')
    assert bitnet(*argv, "--set", "vocab_size=256") == 1
    assert "tokenizer.json needs 257 tokens, the model has 256; add --set vocab_size=257" in capsys.readouterr().err
    assert bitnet(*argv) == 0
    assert Checkpoint.open(tmp_path / "run").generation == {"bos_token_id": 0, "eos_token_ids": [0]}


def test_a_file_is_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.bitnet").touch()
    assert bitnet("train", "--out", tmp_path / "m.bitnet") == 1
    assert "m.bitnet is a file, expected a run folder" in capsys.readouterr().err
