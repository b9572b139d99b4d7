"""What a resumed run keeps: its place in the data, its best checkpoint, its end."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitnet.process import ECHO, Interruption
from bitnet.settings import Settings
from bitnet.train import checkpoint, horizon, loop, schedule
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.pipeline import work_of
from bitnet.train.run import Run
from bitnet.train.state import State, beginning
from training import TINY, bitnet, bits, edited, killed_before, losses

torch.set_num_threads(1)


@pytest.mark.parametrize("batch", [2, 8])
def test_with_another_batch_nothing_is_left_out_and_nothing_comes_twice(
    batch: int, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(batches: Any, begin: int, sequences: int, pinned: bool) -> Any:
        seen.append((begin, begin + sequences))
        return work_of(batches, begin, sequences, pinned)

    killed_before(10, "train", *TINY, "--data", sentences, "--out", tmp_path / "run")
    monkeypatch.setattr(loop, "work_of", noted)
    argv = ("--out", tmp_path / "run", "--batch", batch, "--eval-tokens", "32")
    assert bitnet("train", "--resume", *argv, "--steps", "13") == 0
    assert seen[:3] == [(40 + i * batch, 40 + (i + 1) * batch) for i in range(3)]


def test_a_best_checkpoint_that_is_another_runs(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--data", sentences, "--keep-best", "--eval-every", "2", "--eval-tokens", "64", "--precision", "fp32")
    assert bitnet("train", *TINY, *argv, "--steps", "6", "--warmdown", "0.2", "--out", tmp_path / "a") == 0
    capsys.readouterr()
    begun = ("train", "--from", tmp_path / "a", "--out", tmp_path / "b", "--steps", "10", "--lr", "3")
    assert bitnet(*begun) == 0
    said = capsys.readouterr().err
    best = Checkpoint.open(tmp_path / "b").state["best"]["step"]
    assert best > 4 and (tmp_path / "b" / f"step-{best:06}").is_dir()
    assert f"step-{best:06}, which is kept" in said


def test_a_run_that_patience_ended_stays_ended(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--data", sentences, "--eval-every", "2", "--patience", "2", "--lr", "1", "--quantize-warmup", "0")
    argv += ("--eval-tokens", "64")
    assert bitnet("train", *TINY, *argv, "--steps", "40", "--out", tmp_path / "whole") == 0
    evaluate = Run.evaluate

    def cut(run: Run, log: Any, last: bool = False) -> Any:
        if last:
            raise KeyboardInterrupt
        return evaluate(run, log, last)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", cut)
        assert bitnet("train", *TINY, *argv, "--steps", "40", "--out", tmp_path / "cut") == 130
    capsys.readouterr()
    assert bitnet("train", "--resume", "--out", tmp_path / "cut") == 0
    assert "give a larger --patience to go on" in capsys.readouterr().err
    last = checkpoint.all_of(tmp_path / "whole")[-1].name
    assert checkpoint.all_of(tmp_path / "cut")[-1].name == last != "step-000040"
    assert bits(tmp_path / "cut" / last) == bits(tmp_path / "whole" / last)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_branch_of_a_run_that_is_finished_says_so(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = ("--eval-every", "2", "--patience", "1", "--lr", "1", "--quantize-warmup", "0", "--eval-tokens", "64")
    for name, argv, said in (("steps", (), "more with --steps"), ("patience", worse, "a larger --patience")):
        run = tmp_path / name
        assert bitnet("train", *TINY, *argv, "--data", sentences, "--out", run) == 0
        capsys.readouterr()
        longer = ("--steps", "40") if argv else ()
        assert bitnet("train", "--from", run, "--out", tmp_path / f"{name}-branch", *longer) == 0
        assert f"steps; give {said} to go on" in capsys.readouterr().err


def test_where_the_rate_fell_is_looked_for_again_when_the_end_moves(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step that takes as long as twenty others makes a run of minutes seem to be nearly over."""
    step, clock = loop.step, [0.0]

    def slow(run: Run, log: Any, started: float) -> None:
        clock[0] += 0.05 if run.state["step"] else 1.0
        step(run, log, started)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop, "step", slow)
    argv = ("--data", sentences, "--minutes", "0.06", "--warmdown", "2000", "--eval-tokens", "32")
    assert bitnet("train", *TINY[:-2], *argv, "--out", tmp_path / "run") == 0
    state = Checkpoint.open(tmp_path / "run").state
    assert (state["step"], state["stable"]) == (54, 26)  # it fell for good at 38; sooner costs a little, 1 cost all


@pytest.mark.parametrize("name", ["step", "tokens", "seconds", "evaluated", "fall"])
def test_a_state_that_someone_edited(
    name: str, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bitnet("train", *TINY[:-2], "--steps", "1", "--data", sentences, "--out", tmp_path / "run") == 0
    newest = edited(checkpoint.all_of(tmp_path / "run")[-1])
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps(state | {name: [1]}))
    capsys.readouterr()
    assert bitnet("train", "--resume", "--out", tmp_path / "run", "--steps", "3") == 1
    assert f"state.json: {name} is [1], expected a number" in capsys.readouterr().err


def test_the_echo_of_a_ctrl_c_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.signal == signal.SIGINT
        assert capfd.readouterr().err.startswith("\nsaving after this step or evaluation; Ctrl-C again")
        time.sleep(ECHO + 0.1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_draft_that_learnt_alone_is_measured(
    finished: Path, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--data", sentences, "--draft-only", "--steps", "2", "--batch", "2", "--threads", "1")
    assert bitnet("finetune", finished, *argv, "--out", tmp_path / "drafted") == 0
    capsys.readouterr()
    assert bitnet("eval", tmp_path / "drafted", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nats_per_guess"] > 0
    assert bitnet("eval", tmp_path / "drafted") == 0
    assert " accepted, " in capsys.readouterr().out
    assert bitnet("eval", tmp_path / "drafted", "--stride", "8") == 1
    assert "--stride is for text" in capsys.readouterr().err


def test_tokens_that_are_added_get_a_bias_too(sentences: str, tmp_path: Path) -> None:
    argv = ("--data", sentences, "--steps", "1", "--set", "head_bias=yes", "--set", "tie_embeddings=no")
    assert bitnet("train", *TINY[:-2], *argv, "--out", tmp_path / "run") == 0
    more = ("--data", sentences, "--fim", "0.5", "--steps", "1", "--batch", "2", "--threads", "1")
    assert bitnet("finetune", tmp_path / "run", *more, "--out", tmp_path / "more") == 0
    before, after = (len(Checkpoint.open(tmp_path / name).model.head.bias) for name in ("run", "more"))
    assert after > before


def test_a_document_that_token_ids_hold_out_a_part_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A book alone is cut: a folder of its token ids holds out the end, which another source may not teach."""
    more = tmp_path / "more"
    more.mkdir()
    for i in range(40):
        (more / f"{i}.txt").write_text(f"{i} " + " ".join(f"w{(i * j) % 97}" for j in range(200)))
    book = more / "book.txt"
    book.write_text(" ".join(f"w{j * j % 997}" for j in range(4000)))
    assert bitnet("tokenize", tmp_path / "ids", "--data", book, "--vocab-size", "300") == 0
    stages = "[[stages]]\nweights={a=0.5,b=0.5}\n"
    (tmp_path / "mix.toml").write_text(f'[sources.a]\ndata=["ids"]\n[sources.b]\ndata=["more"]\n{stages}')
    argv = ("train", *TINY[:-2], "--steps", "1", "--mixture", tmp_path / "mix.toml", "--out", tmp_path / "run")
    assert bitnet(*argv) == 1
    assert "source b learns from a document of which source a holds out a part or all" in capsys.readouterr().err
    book.unlink()
    assert bitnet(*argv) == 0


def test_a_vocabulary_that_the_text_does_not_fill(sentences: str, tmp_path: Path, capsys: Any) -> None:
    argv = ("--set", "vocab_size=9000", "--steps", "1", "--data", sentences, "--out", tmp_path / "run")
    assert bitnet("train", *TINY[:-2], *argv) == 0
    assert "for a vocabulary of" in capsys.readouterr().err


@pytest.mark.parametrize(("first", "then"), [({"minutes": 1.0}, {"steps": 400}), ({"steps": 40}, {"minutes": 10.0})])
def test_a_budget_of_another_kind_begins_no_second_warm_up(first: dict[str, Any], then: dict[str, Any]) -> None:
    """At 1.5 seconds a step either first budget is 40 steps, of which 20 were made, and either second one is 400."""
    each = 128
    settings = Settings(**first, warmup=0.1, quantize_warmup=0.8)
    state = beginning(settings.to_dict(), {"vocab_size": 1, "max_context": each}, 100)
    horizon.begin(settings, state, each, None)
    state |= {"step": 20, "tokens": 20 * each, "seconds": 30.0, "quantized": 0.6}
    before: State = {**state, "resumed": {**state["resumed"]}}
    longer = dataclasses.replace(settings, **({"steps": 1000, "minutes": 0.0} | then))
    place = horizon.begin(longer, state, each, before)[0].place(state)
    assert schedule.learning_rate(longer, place) == longer.lr
    assert place.begun == pytest.approx(0.5, abs=0.02)
    assert schedule.quantization(longer, place) == pytest.approx(0.5 / 0.8, abs=0.03)


def test_a_run_begun_again_has_a_log_of_its_own(finished: Path, sentences: str, tmp_path: Path) -> None:
    """In a folder whose checkpoints were removed; what it measures of its source is not that of the run before."""
    argv = ("finetune", "--steps", "1", "--data", sentences, "--out", tmp_path / "run")
    assert bitnet(*argv, finished / "step-000010") == 0
    first = [record for record in losses(tmp_path / "run") if "start" in record]
    for each in checkpoint.all_of(tmp_path / "run"):
        shutil.rmtree(each)
    assert bitnet(*argv, finished / "step-000020") == 0
    second = [record for record in losses(tmp_path / "run") if "start" in record]
    assert len(first) == len(second) == 1 and first != second
