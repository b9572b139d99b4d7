"""`bitnet train` and `bitnet eval` end to end, on a model that takes a second."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnet import checkpoint, cli, runlog, schedule, train
from bitnet.settings import Settings

torch.set_num_threads(1)

MODEL = ["vocab_size=300", "dim=32", "n_layers=2", "n_heads=2", "n_kv_heads=1", "head_dim=16", "ffn_dim=48"]
TINY = [word for option in MODEL for word in ("--set", option)]
TINY += ["--set", "max_context=32", "--threads", "1"]
TINY += ["--steps", "20", "--batch", "4", "--eval-every", "10", "--save-every", "10"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of made-up sentences: enough structure to learn something in 20 steps."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(30):
        words = [rng.choice(["the", "cat", "dog", "sees", "a", "red", "house", "and", "runs"]) for _ in range(400)]
        (folder / f"{i}.txt").write_text(" ".join(words), encoding="utf-8")
    return str(folder)


def run(*argv: str) -> int:
    return cli.main([str(word) for word in argv])


def losses(folder: Path) -> list[dict[str, Any]]:
    """The log without its clock."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in runlog.read(folder / "log.jsonl")]


@pytest.fixture(scope="module")
def finished(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run("train", *TINY, "--data", text, "--out", str(folder)) == 0
    return folder


# ---- a run and what it leaves ----


def test_a_run_learns_and_leaves_everything(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"log.jsonl", "loss.png", "step-000010", "step-000020"} <= names
    assert not [name for name in names if "partial" in name]
    assert {file.name for file in (finished / "step-000020").iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json", "state.json",
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
    copy = tmp_path / "copy"
    shutil.copytree(finished / "step-000020", copy)
    config = json.loads((copy / "config.json").read_text())
    tensors = load_file(copy / "model.safetensors")
    tensors["embedding.weight"] = tensors["embedding.weight"][:200].contiguous()
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    assert run("eval", str(copy)) == 1
    assert "the model 200; they do not belong together" in capsys.readouterr().err


# ---- resume ----


def test_resume_is_bit_for_bit(finished: Path, text: str, tmp_path: Path) -> None:
    """Killed after step 13, resumed from step 10: same weights, moments and log as the run that was not."""
    folder = tmp_path / "killed"

    def kill(self: train.Run, *_: Any) -> Any:
        if self.state["step"] == 13:
            raise KeyboardInterrupt  # as abrupt as a kill: nothing is saved
        return update(self)

    update = train.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", kill)
        assert run("train", *TINY, "--data", text, "--out", str(folder)) == 130
    assert [p.name for p in checkpoint.all_of(folder)] == ["step-000010"] and losses(folder)[-1]["step"] == 13
    torch.rand(99)  # the state of torch's own generator plays no part
    assert run("train", "--data", text, "--out", str(folder), "--resume") == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (folder / "step-000020" / name).read_bytes() == (finished / "step-000020" / name).read_bytes()
    assert losses(folder) == losses(finished)


def test_muon(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns, resumes bit for bit from half-way, and is not mixed with the moments of another optimizer."""
    folder = tmp_path / "muon"
    command = ("train", "--data", text, "--out", str(folder))
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


def test_resume_of_a_finished_run_only_evaluates(finished: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = losses(finished)
    assert run("train", "--data", text, "--out", str(finished), "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20 and losses(finished) == before


def test_resume_can_lengthen_a_run(finished: Path, text: str, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "longer")
    assert run("train", "--data", text, "--out", str(tmp_path / "longer"), "--resume", "--steps", "22") == 0
    assert checkpoint.load_state(tmp_path / "longer")["step"] == 22


def test_resume_refuses_other_model_or_text(
    finished: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "--out", str(finished), "--resume", "--set", "dim=64") == 1
    assert "a resumed run keeps its model" in capsys.readouterr().err
    (tmp_path / "other.txt").write_text("something else " * 3000)
    assert run("train", "--out", str(finished), "--resume", "--data", str(tmp_path)) == 1
    assert "was trained on other text" in capsys.readouterr().err


def test_accumulation_is_one_larger_batch(text: str, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    options = [*TINY, "--data", text, "--precision", "fp32", "--steps", "1", "--warmup", "0", "--clip", "0"]
    assert run("train", *options, "--out", str(a)) == 0
    assert run("train", *options, "--out", str(b), "--batch", "2", "--accumulate", "2") == 0
    (first, *_), (second, *_) = losses(a), losses(b)
    assert first["tokens"] == second["tokens"] == 128
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)


# ---- stopping ----


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_stop(number: signal.Signals, code: int, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    argv = [*TINY, "--data", text, "--out", str(folder), "--steps", "1000000", "--save-every", "1000000"]
    process = subprocess.Popen([sys.executable, "-m", "bitnet", "train", *argv], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "log.jsonl").exists() or len(runlog.read(folder / "log.jsonl")) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code and "stopped and saved at step" in errors and "Traceback" not in errors
    assert checkpoint.load_state(folder)["step"] >= 3
    assert checkpoint.load_model(folder).config.dim == 32


def test_nan_stops_and_keeps_the_last_good(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, update = tmp_path / "run", train.update

    def poisoned(self: train.Run) -> tuple[float, float]:
        if self.state["step"] == 12:
            with torch.no_grad():
                self.model.layers[0].q.weight[0, 0] = float("nan")  # type: ignore[union-attr, index]
        return update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", poisoned)
        assert run("train", *TINY, "--data", text, "--out", str(folder)) == 1
    errors = capsys.readouterr().err
    assert "at step 13" in errors and "lower --lr" in errors and "step-000010 is the last good checkpoint" in errors
    assert [p.name for p in checkpoint.all_of(folder)] == ["step-000010"]
    assert checkpoint.load_model(folder).config.dim == 32


def test_minutes(text: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    assert (
        run("train", *TINY, "--data", text, "--out", str(tmp_path / "run"), "--minutes", "0.03", "--lr", "0.003") == 0
    )
    state = checkpoint.load_state(tmp_path / "run")
    assert 1.8 <= state["seconds"] < time.monotonic() - begin
    rates = [record["lr"] for record in losses(tmp_path / "run") if "lr" in record]
    assert max(rates) == pytest.approx(0.003) and rates[-1] < 0.5 * max(rates)  # the clock drives the schedule


# ---- refusals ----


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--stpes", "3"], 2, "unknown option '--stpes', did you mean '--steps'?"),
        (["--schedule", "cosin"], 2, "did you mean 'cosine'?"),
        (["--steps", "many"], 2, "invalid int value: 'many'"),
        (["--set", "dimm=3"], 1, "unknown model option 'dimm', did you mean 'dim'?"),
        (["--set", "dim"], 1, "expected NAME=VALUE"),
        (["--set", "n_experts=4", "--set", "experts_per_token=1"], 1, "cannot be built for training: n_experts = 4"),
        (
            ["--preset", "tinny"],
            1,
            "unknown preset 'tinny', expected tiny, mini-gpt",
        ),
        (["--lr", "-1"], 1, "lr is -1.0, expected 1e-09 to 10"),
        (["--data", "nowhere"], 1, "no file, folder or glob matches 'nowhere'"),
        (["--tokenizer", "words"], 1, "tokenizer is 'words', expected bpe, llama-bpe, byte, char or a tokenizer.json"),
        (["--batch", "100000"], 1, "one batch of 100000 × 32 needs"),
        (["--config", "none.toml"], 1, "No such file or directory: none.toml"),
    ],
)
def test_refusals(
    argv: list[str], code: int, message: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", *TINY, "--data", text, "--out", str(tmp_path / "run"), *argv) == code
    errors = capsys.readouterr().err
    assert message in errors and "error:" in errors and len(errors.strip().splitlines()) <= 2
    assert not checkpoint.all_of(tmp_path / "run")


def test_an_occupied_folder(finished: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", *TINY, "--data", text, "--out", str(finished)) == 1
    assert "already holds step-000020; add --resume to go on, or name another --out" in capsys.readouterr().err


def test_two_runs_in_one_folder(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bitnet import process

    with process.locked(tmp_path):
        assert run("train", *TINY, "--data", text, "--out", str(tmp_path)) == 1
    assert "another run is writing to" in capsys.readouterr().err


# ---- settings ----


def test_flags_win_over_the_file_and_the_file_over_the_preset(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'preset = "mini-gpt"\n[train]\nlr = 0.01\nsteps = 2\nbatch = 2\n'
        "[model]\ndim = 32\nn_layers = 1\nmax_context = 16\nffn_dim = 40\n"
    )
    folder = tmp_path / "run"
    assert run("train", "--config", str(tmp_path / "c.toml"), "--data", text, "--out", str(folder), "--lr", "0.02",
               "--set", "ffn_dim=48", "--threads", "1") == 0  # fmt: skip
    settings, config = checkpoint.load_state(folder)["settings"], checkpoint.load_config(folder)
    assert (settings["preset"], settings["tokenizer"], settings["batch"]) == ("mini-gpt", "char", 2)
    assert (settings["lr"], config.ffn_dim, config.dim, config.n_heads) == (0.02, 48, 32, 4)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[train]\nlearning_rate = 1.0\n", "unknown training option 'learning_rate'"),
        ("[train]\nlrr = 1.0\n", "did you mean 'lr'?"),
        ("[train]\nsteps = 1.5\n", "steps is 1.5, expected int"),
        ("[models]\ndim = 3\n", "unknown name 'models', expected preset, [train] or [model]"),
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
        return [round(schedule.learning_rate(settings, p), 6) for p in (0, 0.05, 0.1, 0.45, 0.5, 0.7, 0.85, 1.0)]

    assert rates() == [0, 0.5, 1, 1, 1, 1, 0.5, 0]
    assert rates(schedule="two_stage") == [0, 0.475, 0.9, 0.55, 0.333333, 0.2, 0.1, 0]
    assert rates(schedule="cosine")[4] == 0.5 and rates(schedule="cosine")[-1] == 0
    assert [schedule.weight_decay(Settings(), p) for p in (0.49, 0.5)] == [0.1, 0.0]


# ---- checkpoints ----


def test_saving_is_all_or_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint.load_model(finished)
    optimizer = torch.optim.AdamW(model.parameters())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for step, name in ((1, "save_file"), (2, "_flush")):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, full)
            with pytest.raises(OSError, match="No space left"):
                checkpoint.save(tmp_path, model, "{}", optimizer, {"step": step})
    assert not list(tmp_path.iterdir())
    assert checkpoint.save(tmp_path, model, "{}", optimizer, {"step": 3}).name == "step-000003"
    assert checkpoint.find(tmp_path).name == "step-000003"


def _without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: _without(t, "layers.1.q.weight"), "tensor layers.1.q.weight is missing"),
        (lambda t: t | {"extra": torch.ones(1)}, "tensor extra is there"),
        (lambda t: t | {"final_norm.weight": torch.ones(7)}, "final_norm.weight is 7, config.json calls for 32"),
        (lambda t: t | {"final_norm.weight": torch.full((32,), torch.nan)}, "final_norm.weight holds NaN"),
    ],
)
def test_strict_loading(change: Any, message: str, finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished / "step-000020", copy)
    save_file(change(load_file(copy / "model.safetensors")), copy / "model.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load_model(copy)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "state.json"])
def test_damaged_files(name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished / "step-000020", copy)
    os.truncate(copy / name, (copy / name).stat().st_size // 2)
    assert run("eval", str(copy)) == 1
    assert f"{name} is damaged" in capsys.readouterr().err
    (copy / name).unlink()
    assert run("eval", str(copy)) == 1
    assert "model.safetensors" in (error := capsys.readouterr().err) or f"{name} is missing" in error


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", str(tmp_path / "none")) == 1
    assert "does not exist, expected a checkpoint or a run folder" in capsys.readouterr().err
    assert run("eval", str(tmp_path)) == 1
    assert "has no model.safetensors and no step-* folder" in capsys.readouterr().err
