"""What a run reports of its evaluations: passes over the data, the best one, and early stopping."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitnet.evaluate.loss import Result
from bitnet.settings import Settings
from bitnet.train import checkpoint, objectives, validation
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.horizon import Horizon
from training import TINY, bitnet, bits, killed_before, losses

torch.set_num_threads(1)


def words(*more: object) -> list[object]:
    """Arguments of a run with the usual evaluations."""
    cut = TINY.index("--eval-every")
    return [*TINY[:cut], *TINY[cut + 2 : -2], *more]


def evaluated(run: Path) -> list[int]:
    return [r["step"] for r in losses(run) if "validation" in r and not r.get("final")]


@pytest.mark.parametrize(("budget", "steps"), [(("--steps", "30"), range(3, 31, 3)), (("--steps", "5"), range(1, 6))])
def test_there_are_ten_evaluations_in_a_short_run(
    budget: tuple[str, str], steps: range, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*words(*budget), "--eval-tokens", "64", "--data", sentences, "--out", tmp_path / "run"]
    assert bitnet("train", *argv) == 0
    assert evaluated(tmp_path / "run") == list(steps)


@pytest.mark.parametrize(
    ("steps", "each", "expected", "last"),  # a step learns from 128 tokens
    [
        (20, 160, [3, 6, 9, 12, 15, 18], 8 * 160),
        (10, 320, [5, 10], 640),
        (9, 384, [5], 9 * 64),
        (1, 640, [1], 640),
    ],
)
def test_they_read_no_more_than_a_run_learns_from(
    steps: int, each: int, expected: list[int], last: int, sentences: str, tmp_path: Path
) -> None:
    """Otherwise they would take most of a run of few steps. At least one comes before the last."""
    argv = [*words("--steps", steps), "--validation", "0.5", "--eval-tokens", each, "--data", sentences]
    assert bitnet("train", *argv, "--out", tmp_path / "whole") == 0
    assert evaluated(tmp_path / "whole") == expected
    *some, final = [r["validation"]["tokens"] for r in losses(tmp_path / "whole") if "validation" in r]
    assert some == [each] * len(expected) and final == last
    killed_before(steps - 1, "train", *argv, "--save-every", "1", "--out", tmp_path / "killed")
    assert bitnet("train", "--resume", "--out", tmp_path / "killed") == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_on_little_text_there_are_ten(sentences: str, tmp_path: Path) -> None:
    """What counts is what an evaluation reads, not what --eval-tokens would let it read."""
    argv = [*words("--steps", "20"), "--data", f"{sentences}/[0-5].txt", "--out", tmp_path / "run"]
    assert bitnet("train", *argv) == 0 and evaluated(tmp_path / "run") == list(range(2, 21, 2))


def test_what_is_asked_for_is_done(sentences: str, tmp_path: Path) -> None:
    argv = [*words("--steps", "4"), "--eval-every", "1", "--validation", "0.5", "--eval-tokens", "640"]
    assert bitnet("train", *argv, "--data", sentences, "--out", tmp_path / "run") == 0
    assert evaluated(tmp_path / "run") == [1, 2, 3, 4]


def test_of_minutes_there_are_ten_too(sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "USUAL", 10**6)  # a quick machine takes 200 steps meanwhile
    monkeypatch.setattr(validation, "RARELY", 0)  # on a slow one evaluations take a part of such a short run
    assert bitnet("train", *words("--minutes", "0.03"), "--data", sentences, "--out", tmp_path / "run") == 0
    assert 3 <= len(evaluated(tmp_path / "run")) <= 10  # one step may take more than a tenth


@pytest.mark.parametrize(("each", "expected"), [(0, 9), (1, 9), (15, 2), (1000, 1)])
def test_of_minutes_they_take_a_part(each: int, expected: int) -> None:
    """Otherwise a run of minutes on a slow machine would be little but evaluations. each: seconds."""
    run: Any = SimpleNamespace(
        settings=Settings(minutes=2), horizon=Horizon(0, 100.0, 1), state={"step": 0, "seconds": 0.0, "evaluated": 0.0}
    )
    made = 0
    while (before := run.state["seconds"] / 100) < 1:
        run.state["step"] += 1
        run.state["seconds"] += 1.0
        run.progress = run.state["seconds"] / 100
        if run.progress < 1 and validation.due(run, before):
            made += 1
            run.state["seconds"] += each
            run.state["evaluated"] += each
    assert made == expected


def test_the_time_of_evaluations_is_noted(sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    monkeypatch.setattr(validation, "note", lambda run, _: noted.append(run.state["evaluated"]) or "")
    argv = ["train", *words("--warmdown", "0", "--eval-tokens", "64", "--data", sentences, "--out", tmp_path / "run")]
    assert bitnet(*argv, "--steps", "2") == 0 and bitnet(*argv, "--steps", "4", "--resume") == 0
    assert len(noted) == 4 and 0 < noted[0] < noted[1] < noted[2] < noted[3]  # a resumed run goes on counting


def test_the_last_one_is_of_a_part_of_a_long_text(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With eight times as many tokens as the others, always the same ones; `bitnet eval` uses all."""
    run = tmp_path / "run"
    argv = [*words("--steps", "8"), "--data", sentences, "--validation", "0.5", "--eval-tokens", "64", "--out", run]
    assert bitnet("train", *argv) == 0
    said = capsys.readouterr().err
    *first, last = [record["validation"] for record in losses(run) if "validation" in record]
    assert [found["tokens"] for found in first] == [64] * 8 and last["tokens"] == 8 * 64
    (shown,) = re.findall(r"evaluating on 512 of ([\d,]+) tokens of validation", said)
    assert f"standard error {last['standard_error']:.4f}; bitnet eval {run} uses all" in said
    assert bitnet("eval", run, "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["standard_error"] == 0 and 0 <= int(shown.replace(",", "")) - whole["tokens"] <= 32
    assert abs(whole["nats_per_token"] - last["nats_per_token"]) < 4 * last["standard_error"]
    assert bitnet("eval", run, "--tokens", "512") == 0
    said = capsys.readouterr().out
    assert f"{last['nats_per_token']:.4f} nats/token" in said and f"(± {last['standard_error']:.4f} nats, " in said


# ---- the best one ----


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Evaluations give these losses, one after the other, and the last one from then on."""

    def script(*found: float) -> None:
        evaluate, left = objectives.evaluate, list(found)

        def said(*args: Any) -> Any:
            result = evaluate(*args)
            assert isinstance(result, Result)
            return dataclasses.replace(result, nats_per_token=left.pop(0) if len(left) > 1 else left[0])

        monkeypatch.setattr(objectives, "evaluate", said)

    return script


def test_the_best_is_kept_and_patience_ends_a_run(
    scripted: Any, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(5.0, 3.0, 4.0, 3.5, 3.1, 9.0)
    run = tmp_path / "run"
    argv = [*words("--steps", "30"), "--quantize-warmup", "0", "--data", sentences, "--out", run, "--keep", "1"]
    assert bitnet("train", *argv, "--eval-tokens", "64", "--keep-best", "--patience", "3") == 0
    said = capsys.readouterr().err
    assert evaluated(run) == [3, 6, 9, 12, 15]
    assert [p.name for p in checkpoint.all_of(run)] == ["step-000006", "step-000015"]
    assert re.search(r"step 9: .*tokens/s, best 3.0000 at step 6\n", said)
    assert "3 evaluations without a better one: the run ends at step 15" in said
    best = f"the best of the evaluations was 3.0000, of step-000006, which is kept: export {run}/step-000006"
    assert best in said
    assert Checkpoint.open(run).state["best"] == {"step": 6, "loss": 3.0, "since": 3, "told": False}
    assert bitnet("train", "--resume", "--out", run, "--patience", "0") == 0
    assert [p.name for p in checkpoint.all_of(run)] == ["step-000006", "step-000021", "step-000030"]
    assert best in capsys.readouterr().err


def test_the_best_is_not_advised_if_the_last_is_better(
    scripted: Any, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(5.0, 3.0)
    run = tmp_path / "run"
    argv = [*words("--steps", "6"), "--quantize-warmup", "0", "--data", sentences, "--out", run, "--eval-every", "4"]
    assert bitnet("train", *argv, "--eval-tokens", "64", "--keep-best") == 0
    assert Checkpoint.open(run).state["best"]["loss"] == 5 and "which is kept" not in capsys.readouterr().err


def test_the_last_step_is_not_advised_in_place_of_itself(
    scripted: Any, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its evaluation during the run was of fewer tokens than the last one, and better by chance."""
    scripted(5.0, 3.0, 4.0)
    argv = [*words("--steps", "6"), "--quantize-warmup", "0", "--data", sentences, "--out", tmp_path / "run"]
    assert bitnet("train", *argv, "--eval-every", "3", "--eval-tokens", "64", "--keep-best") == 0
    assert Checkpoint.open(tmp_path / "run").state["best"]["step"] == 6
    assert "which is kept" not in capsys.readouterr().err


def test_without_an_evaluation_there_is_no_best(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first weights, of step 0, are not kept as the best ones."""
    argv = ["--keep-best", "--eval-every", "99", "--save-every", "1", "--data", sentences, "--out", tmp_path / "run"]
    assert bitnet("train", *words("--steps", "4"), *argv) == 0
    assert "the best of the evaluations" not in capsys.readouterr().err
    saved = [p.name for p in checkpoint.all_of(tmp_path / "run")]
    assert "step-000000" not in saved and saved[-2:] == ["step-000003", "step-000004"]


def test_a_run_that_gets_worse_with_each_pass_says_so_once(
    scripted: Any, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(3.0, 3.05, 3.5, 3.6, 3.7)
    argv = ["--steps", "48", "--eval-every", "12", "--quantize-warmup", "0", "--validation", "0.2"]
    argv += ["--data", f"{sentences}/[0-5].txt"]
    assert bitnet("train", *words(*argv), "--out", tmp_path / "run") == 0
    said = capsys.readouterr().err
    assert said.count("validation was better at step 12: in pass ") == 1
    assert said.index("step 24: ") < said.index("validation was better") < said.index("step 36: ")
    passes = [float(n) for n in re.findall(r"tokens/s, pass ([\d.]+)", said)]
    n_tokens = int(re.search(r"([\d,]+) training tokens", said)[1].replace(",", ""))  # type: ignore[index]
    assert passes[-1] == pytest.approx(48 * 4 * 32 / n_tokens, rel=0.05)


def test_what_is_best_is_not_forgotten(sentences: str, tmp_path: Path) -> None:
    argv = [*TINY, "--data", sentences, "--keep-best", "--eval-every", "3"]
    assert bitnet("train", *argv, "--out", tmp_path / "whole") == 0
    killed_before(17, "train", *argv, "--out", tmp_path / "killed")
    assert bitnet("train", "--resume", "--out", tmp_path / "killed") == 0
    states = [Checkpoint.open(tmp_path / name).state for name in ("whole", "killed")]
    assert states[0]["best"] == states[1]["best"]
    assert bits(tmp_path / "whole" / "step-000020") == bits(tmp_path / "killed" / "step-000020")


def test_what_was_measured_otherwise_is_no_longer_the_best(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], scripted: Any
) -> None:
    """Fewer tokens may have an easier loss, which would end the run, and keep a checkpoint that is none of the best."""
    scripted(2.0, 3.0, 3.0, 2.5)
    run, argv = tmp_path / "run", ["--data", sentences, "--keep-best", "--patience", "2", "--eval-every", "2"]
    killed_before(5, "train", *words("--steps", "8"), *argv, "--eval-tokens", "64", "--out", run)
    assert Checkpoint.open(run).state["best"]["step"] == 2
    assert bitnet("train", "--resume", "--out", run, "--eval-tokens", "128") == 0
    assert "--eval-tokens has changed, so step-000002 no longer counts as the best one" in capsys.readouterr().err
    assert evaluated(run) == [2, 4, 6, 8] and Checkpoint.open(run).state["best"]["step"] == 6


def test_a_run_without_quantizers_says_nothing_of_them(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for head, told in (("int8", True), ("f32", False)):  # int8 codes are phased in, too
        run = tmp_path / head
        argv = [*words("--steps", "2"), "--set", "ternary=[]", "--set", f"head_format={head}", "--out", run]
        assert bitnet("train", *argv, "--data", sentences) == 0
        assert (" at λ " in capsys.readouterr().err) == told == any("quantized" in record for record in losses(run))


# ---- a finetuning ----


def test_a_finetuning_says_how_good_its_source_is_and_names_the_terms(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [
        *TINY,
        "--set",
        "ternary=[]",
        "--set",
        "head_format=f32",
        "--data",
        sentences,
        "--out",
        tmp_path / "float",
    ]
    assert bitnet("train", *source) == 0
    before = losses(tmp_path / "float")[-1]["validation"]
    capsys.readouterr()
    run = tmp_path / "run"
    argv = ["finetune", tmp_path / "float", "--data", sentences, "--out", run, "--steps", "4", "--batch", "4"]
    assert bitnet(*argv, "--distill", "0.5", "--validation", "0.05", "--eval-every", "1") == 0
    said = capsys.readouterr().err
    assert f"before the first step, in full precision: validation {before['nats_per_token']:.4f} nats/token" in said
    assert re.search(r"step 1 of 4: loss [\d.]+ at λ 0\.\d\d \(cross-entropy [\d.]+, divergence [\d.]+\), ", said)
    assert re.search(r"step 4: loss [\d.]+ \(cross-entropy [\d.]+, divergence [\d.]+\), validation ", said)
    (start,) = [r for r in losses(run) if "start" in r]
    assert start["step"] == 0 and start["start"]["nats_per_token"] == pytest.approx(before["nats_per_token"])
    first = json.loads((run / "log.jsonl").read_text().splitlines()[1])
    assert first["cross_entropy"] == pytest.approx(before["nats_per_token"], rel=0.1)
