"""`bitnet train` and `bitnet eval` end to end, on a model that takes a second."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnet.settings import Settings
from bitnet.train import checkpoint, loop, schedule
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.schedule import Place
from training import TINY, edited, killed_before, losses
from training import bitnet as run

torch.set_num_threads(1)

# ---- a run and what it leaves ----


def test_a_run_learns_and_leaves_everything(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"log.jsonl", "loss.png", "step-000010", "step-000020"} <= names
    assert not [name for name in names if "partial" in name]
    assert {file.name for file in (finished / "step-000020").iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json", "state.json", "manifest.json",
    }  # fmt: skip
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = losses(finished)
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5 and steps[-1]["tokens"] == 20 * 4 * 32
    final = records[-1]
    assert final["final"] and 0 < final["validation"]["bits_per_byte"] < 8 and 0.1 < final["zeros"] < 0.6


def test_eval_repeats_the_final_loss(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", str(finished), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    final = losses(finished)[-1]["validation"]
    assert {k: result[k] for k in final} == final
    assert run("eval", str(finished / "step-000010")) == 0
    assert "bits/byte" in capsys.readouterr().out


def test_eval_on_other_text(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the red cat sees the house " * 40)
    assert run("eval", str(finished), "--data", str(tmp_path / "a.txt"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] % 32 == 0
    (tmp_path / "b.txt").write_text("no")
    assert run("eval", str(finished), "--data", str(tmp_path / "b.txt")) == 1
    assert "one window needs 33" in capsys.readouterr().err


def test_a_damaged_or_foreign_tokenizer_is_noticed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = edited(Path(shutil.copytree(finished / "step-000020", tmp_path / "copy")))
    config = json.loads((copy / "config.json").read_text())
    tensors = load_file(copy / "model.safetensors")
    tensors["embedding.weight"] = tensors["embedding.weight"][:200].contiguous()
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    assert run("eval", str(copy)) == 1
    assert "the model has 200; they do not belong together" in capsys.readouterr().err


# ---- resume ----


def test_resume_is_bit_for_bit(finished: Path, sentences: str, tmp_path: Path) -> None:
    """Killed after step 13, resumed from step 10: same weights, moments and log as the run that was not."""
    folder = tmp_path / "killed"

    killed_before(13, "train", *TINY, "--data", sentences, "--out", folder)
    assert [p.name for p in checkpoint.all_of(folder)] == ["step-000000", "step-000010"]
    assert losses(folder)[-1]["step"] == 13
    torch.rand(99)  # the state of torch's own generator plays no part
    assert run("train", *TINY, "--data", sentences, "--out", folder, "--resume") == 0  # as first given
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (folder / "step-000020" / name).read_bytes() == (finished / "step-000020" / name).read_bytes()
    assert losses(folder) == losses(finished)


def test_muon(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns, resumes bit for bit from half-way, and is not mixed with the moments of another optimizer."""
    folder = tmp_path / "muon"
    command = ("train", "--data", sentences, "--out", str(folder))
    assert run(*command, *TINY, "--optimizer", "muon") == 0
    whole, last = losses(folder), (folder / "step-000020" / "optimizer.safetensors").read_bytes()
    assert whole[-1]["validation"]["nats_per_token"] < whole[0]["loss"] - 0.5
    names = load_file(folder / "step-000020" / "optimizer.safetensors").keys()
    assert "layers.0.q.weight.momentum_buffer" in names and "embedding.weight.exp_avg" in names
    shutil.rmtree(folder / "step-000020")
    assert run(*command, "--resume", "--optimizer", "adamw") == 1
    assert "holds the moments of muon; go on without --optimizer adamw" in capsys.readouterr().err
    assert run(*command, "--resume") == 0
    assert losses(folder) == whole and (folder / "step-000020" / "optimizer.safetensors").read_bytes() == last


def test_resume_of_a_finished_run_only_evaluates(
    finished: Path, sentences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = losses(finished)
    assert run("train", "--data", sentences, "--out", str(finished), "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20 and losses(finished) == before


def test_resume_can_lengthen_a_run(finished: Path, sentences: str, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "longer")
    assert run("train", "--data", sentences, "--out", str(tmp_path / "longer"), "--resume", "--steps", "22") == 0
    assert Checkpoint.open(tmp_path / "longer").state["step"] == 22


def test_accumulation_is_one_larger_batch(sentences: str, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    options = [*TINY, "--data", sentences, "--precision", "fp32", "--steps", "1", "--warmup", "0", "--clip", "0"]
    assert run("train", *options, "--out", str(a)) == 0
    assert run("train", *options, "--out", str(b), "--batch", "2", "--accumulate", "2") == 0
    (first, *_), (second, *_) = losses(a), losses(b)
    assert first["tokens"] == second["tokens"] == 128
    assert Checkpoint.open(a).state["quantized"] == 1.0  # the run has ended, short as it was: `export` adds no warning
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)


# ---- stopping ----


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_stop(
    number: signal.Signals,
    code: int,
    sentences: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    update = loop.update

    def interrupted(self: loop.Run) -> tuple[float, float]:
        if self.state["step"] == 3:
            os.kill(os.getpid(), number)
        return update(self)  # the step is finished

    before = signal.getsignal(number)
    monkeypatch.setattr(loop, "update", interrupted)
    assert run("train", *TINY, "--data", sentences, "--out", tmp_path / "run") == code
    assert "stopped and saved at step 4; --resume continues from here" in capsys.readouterr().err
    assert Checkpoint.open(tmp_path / "run").state["step"] == 4 and signal.getsignal(number) == before
    assert Checkpoint.open(tmp_path / "run").model.config.dim == 32


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_last_evaluation_is_answered(
    number: signal.Signals, code: int, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupted(*_: object, last: bool = False) -> Any:
        assert last
        os.kill(os.getpid(), number)
        time.sleep(60)

    words = ["train", *TINY, "--eval-every", "100", "--data", sentences, "--out", tmp_path / "run"]
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "evaluate", interrupted)
        assert run(*words) == code
    told = "stopped in the last evaluation: the run is saved, and --resume evaluates it again"
    assert told in capsys.readouterr().err and Checkpoint.open(tmp_path / "run").state["step"] == 20
    assert run("train", "--resume", "--out", tmp_path / "run") == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_finished_says_so_though_a_signal_arrives(
    number: signal.Signals, code: int, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupted(records: Any, file: Path, title: str) -> None:
        os.kill(os.getpid(), number)
        file.write_text(title)

    before = signal.getsignal(number)
    monkeypatch.setattr(loop.runlog, "plot", interrupted)
    assert run("train", *TINY, "--data", sentences, "--out", tmp_path / "run") == code
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path}/run/step-000020: validation ") and "unsaved" not in said.err
    assert (tmp_path / "run" / "loss.png").read_text().startswith("run: ") and signal.getsignal(number) == before


def test_nan_stops_and_keeps_the_last_good(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, update = tmp_path / "run", loop.update

    def poisoned(self: loop.Run) -> tuple[float, float]:
        if self.state["step"] == 12:
            with torch.no_grad():
                self.model.layers[0].q.weight[0, 0] = float("nan")  # type: ignore[union-attr, index]
        return update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", poisoned)
        assert run("train", *TINY, "--data", sentences, "--out", str(folder)) == 1
    errors = capsys.readouterr().err
    assert "at step 13" in errors and "lower --lr" in errors and "step-000010 is the last good checkpoint" in errors
    assert [p.name for p in checkpoint.all_of(folder)] == ["step-000000", "step-000010"]
    assert Checkpoint.open(folder).model.config.dim == 32


@pytest.mark.parametrize(("rate", "told"), [("0.01", False), ("10", True)])
def test_a_loss_above_that_of_guessing_is_told(
    rate: str, told: bool, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", *TINY, "--data", sentences, "--out", str(tmp_path / "run"), "--lr", rate) == 0
    line = r"the last loss, [\d.]+ nats, is above the [\d.]+ of guessing: .* lower --lr\n"
    assert bool(re.search(line, capsys.readouterr().err)) == told


def test_too_little_validation_text_is_told_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.jsonl"
    lines = [f"the red cat {i} sees the house " * (80 if i else 1) for i in range(20)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    argv = ["--data", str(text), "--validation", "0.001", "--out", str(tmp_path / "run"), "--context", "1000"]
    assert run("train", *TINY, "--set", "max_context=1000", *argv) == 1
    said = capsys.readouterr().err
    assert "the validation text has " in said and "one window needs 1,001; add data, raise --validation" in said
    assert "step 1" not in said


def test_what_the_lines_speak_of_is_explained(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train", *TINY, "--data", sentences, "--out", tmp_path / "run")
    said = capsys.readouterr().err
    assert said.index("λ is how much of the quantization counts") < said.index("step 1 of")
    assert "the learning rate falls from here on; step-000014 is kept: a longer run goes on from it\n" in said
    assert (tmp_path / "run/step-000014").is_dir()
    run("train", *TINY, "--data", sentences, "--out", tmp_path / "ternary", "--quantize-warmup", "0")
    assert "λ" not in capsys.readouterr().err


def test_minutes(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert (
        run("train", *TINY[:-2], "--data", sentences, "--out", tmp_path / "run", "--minutes", "0.03", "--lr", "0.003")
        == 0
    )
    assert re.search(r"\nstep 1, \d+% of 2 s: loss 5\..*, about \d+ s left\n", capsys.readouterr().err)
    state = Checkpoint.open(tmp_path / "run").state
    assert 1.8 <= state["seconds"] < time.monotonic() - begin
    rates = [record["lr"] for record in losses(tmp_path / "run") if "lr" in record]
    step = state["step"] + 2
    assert max(rates) == pytest.approx(0.003) and rates[-1] < max(rates)  # the clock drives the schedule
    assert run("train", "--resume", "--out", tmp_path / "run", "--minutes", "0.03") == 0  # it is only at its end
    assert Checkpoint.open(tmp_path / "run").state["step"] == state["step"]
    assert run("train", "--resume", "--out", tmp_path / "run", "--steps", step) == 0
    assert Checkpoint.open(tmp_path / "run").state["step"] == step


# ---- settings ----


def test_flags_win_over_the_file_and_the_file_over_the_preset(sentences: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'preset = "mini-gpt"\n[train]\nlr = 0.01\nsteps = 2\nbatch = 2\n'
        "[model]\ndim = 32\nn_layers = 1\nmax_context = 16\nffn_dim = 40\n"
    )
    folder = tmp_path / "run"
    assert run("train", "--config", str(tmp_path / "c.toml"), "--data", sentences, "--out", str(folder), "--lr", "0.02",
               "--set", "ffn_dim=48", "--threads", "1") == 0  # fmt: skip
    settings, config = Checkpoint.open(folder).state["settings"], Checkpoint.open(folder).config
    assert (settings["preset"], settings["tokenizer"], settings["batch"]) == ("mini-gpt", "char", 2)
    assert (settings["lr"], config.ffn_dim, config.dim, config.n_heads) == (0.02, 48, 32, 4)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[train]\nlearning_rate = 1.0\n", "unknown training option 'learning_rate', which is --lr here"),
        ("[train]\nfrobnicate = 1\n", "unknown training option 'frobnicate'; docs/options.md lists them"),
        ("[model]\nn_embd = 64\n", "c.toml: unknown model option 'n_embd', which is dim here, of the model: --set dim"),
        ("[train]\ndim = 3\n", "c.toml: unknown training option 'dim', which is of the model: --set dim=VALUE"),
        ("[model]\nlr = 1.0\n", "c.toml: unknown model option 'lr', which is of training: --lr, or [train] in a file"),
        ("[train]\nlrr = 1.0\n", "c.toml: unknown training option 'lrr', did you mean 'lr'?"),
        ("[model]\ndimm = 3\n", "c.toml: unknown model option 'dimm', did you mean 'dim'?"),
        ("train = 3\n", "c.toml: train is 3, expected a table [train]"),
        ("[train]\nsteps = 1.5\n", "c.toml: steps is 1.5, expected a whole number"),
        ("[train]\nlr = -1\n", "c.toml: --lr is -1, expected 1e-09 to 10"),
        ('[train]\nschedule = "cosin"\n', "c.toml: schedule is 'cosin', expected one of constant, cosine, two_stage"),
        ("[train]\nwarmup = 3\n", "c.toml: --warmup is 3, expected 0 to 1, a share of the run, or 1,000 and more"),
        ("[models]\ndim = 3\n", "name 'models', expected preset, [train] or [model], did you mean 'model'?"),
        ("steps = 3\n", "name 'steps', expected preset, [train] or [model]; it belongs into [train]"),
        ("dim = 3\n", "name 'dim', expected preset, [train] or [model]; it belongs into [model]"),
        ("preset\n", "is not TOML"),
    ],
)
def test_bad_files(toml: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(toml)
    assert run("train", "--config", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")) == 1
    assert message in capsys.readouterr().err


def test_schedules() -> None:
    def rates(**options: Any) -> list[float]:
        settings = Settings(lr=1.0, warmup=0.1, **options)
        return [
            round(schedule.learning_rate(settings, Place(p, p)), 6) for p in (0, 0.05, 0.1, 0.45, 0.5, 0.7, 0.85, 1.0)
        ]

    assert rates() == [0, 0.5, 1, 1, 1, 1, 0.5, 0]
    assert rates(schedule="two_stage") == [0, 0.475, 0.9, 0.55, 0.333333, 0.2, 0.1, 0]
    assert rates(schedule="cosine")[4] == 0.5 and rates(schedule="cosine")[-1] == 0
    assert [schedule.weight_decay(Settings(), Place(p, p)) for p in (0.49, 0.5)] == [0.1, 0.0]
    # 1 is the whole run, not one token
    assert schedule.fall(Settings(warmdown=1.0), Place(0.5, 0.5, horizon=9e9)) == 0.5
    assert schedule.behind(1.0, 0.5, 9e9) == 0.5
