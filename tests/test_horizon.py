"""How long a run is, in steps or tokens; and what happens to learning rate and λ when it gets longer, or is
branched."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet.settings import Settings
from bitnet.setup.given import Given, options_of
from bitnet.train import checkpoint, saving, schedule
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.horizon import Horizon
from bitnet.train.schedule import Place
from training import TINY, bitnet, bits, killed_before, losses

torch.set_num_threads(1)
SHORT = TINY[:-2]  # without --steps
EACH = 4 * 32  # tokens of a step


def steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in losses(run) if "loss" in record]


def final(run: Path) -> float:
    return float(losses(run)[-1]["validation"]["nats_per_token"])


# ---- budgets and lengths ----


def test_a_run_that_ends_before_it_is_ternary_says_so(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", *SHORT, "--data", sentences, "--out", tmp_path / "run", "--tokens", EACH]
    assert bitnet(*argv, "--quantize-warmup", 4 * 1024) == 0
    said = capsys.readouterr().err
    assert "before its weights are ternary: after 128 tokens λ is 0.031, with --quantize-warmup 4,096 it is 1\n" in said
    assert bitnet("train", "--resume", "--out", tmp_path / "run", "--tokens", 4 * 1024) == 0
    assert "before its weights" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--warmup", "4e3"], "rises for 4,000 tokens and falls for 768, and the run has 2,560; lower --warmup or"),
        (["--warmdown", "2.4e3", "--warmup", "0.2"], "rises for 512 tokens and falls for 2,400, and the run has 2,560"),
        (["--warmup", "1e3", "--warmdown", "1e3"], ""),
        (["--warmup", "2e3", "--schedule", "cosine"], ""),
        (["--warmup", "0.6", "--warmdown", "0.4"], ""),
    ],
)
def test_a_rate_that_falls_before_it_has_risen(
    argv: list[str], line: str, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_before(0, "train", *TINY, *argv, "--data", sentences, "--out", tmp_path / "run")
    said = capsys.readouterr().err
    assert (line in said) if line else "the learning rate does not reach" not in said


@pytest.mark.parametrize("tokens", [20 * EACH, 19 * EACH + 1])
def test_tokens_are_steps(
    tokens: int, finished: Path, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step is whole, and the bits are the same; per parameter, all trained ones count."""
    argv = ["--data", sentences, "--out", tmp_path / "run"]
    assert bitnet("train", *SHORT, *argv, "--tokens", f"{tokens:g}") == 0
    assert losses(tmp_path / "run") == losses(finished)
    assert bits(tmp_path / "run" / "step-000020") == bits(finished / "step-000020")
    assert "step 1 of 20: " in capsys.readouterr().err
    state = Checkpoint.open(finished).state
    assert state["parameters"] == sum(p.numel() for p in Checkpoint.open(finished).model.parameters())
    settings = Settings(tokens_per_parameter=tokens / state["parameters"])
    assert Horizon.of(settings, state | {"step": 0, "tokens": 0}, EACH).tokens == 20 * EACH


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "1e6", "--steps", "5"], "both --tokens and --steps are given, expected one of them"),
        (["--tokens", "1e6", "--minutes", "5"], "both --minutes and --tokens are given, expected one of them"),
        (["--minutes", "0"], "--minutes is 0, expected more; leave it out, or give --steps N"),
        (["--tokens", "0", "--minutes", "0"], "--minutes is 0, expected more"),
        (["--tokens-per-parameter", "0"], "--tokens-per-parameter is 0, expected more"),
        (["--tokens-per-parameter", "-1"], "--tokens-per-parameter is -1.0, expected 0 to"),
        (["--warmup", "70"], "--warmup is 70, expected 0 to 1, a share of the run, or 1,000 and more, tokens"),
        (["--quantize-warmup", "0.95"], "--quantize-warmup is 0.95, expected 0 to 0.9, a share of the run, or 1,000"),
    ],
)
def test_budgets_and_lengths_that_cannot_be(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bitnet("train", *SHORT, *argv, "--out", tmp_path / "run") == 1
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_zero_beside_another_budget_is_not_one(tmp_path: Path) -> None:
    """Nor is one in a file, which may list all options."""
    file = tmp_path / "run.toml"
    file.write_text("[train]\nminutes = 0\ntokens = 0\n")
    for options, steps in (({"minutes": 0.0, "steps": 7}, 7), ({}, Settings().steps)):
        train, _ = options_of(Given(options=options, config=str(file)))
        assert Settings.from_dict(train).budget == ("steps", steps)


def test_a_budget_that_is_behind(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--tokens", "1000"), ("--tokens-per-parameter", "0.01")):
        assert bitnet("train", "--resume", "--out", finished, option, value) == 1
        said = capsys.readouterr().err
        assert f"{option} is {value}, but the run already has " in said and "e+" not in said


def test_lengths_in_tokens_are_those_shares() -> None:
    """For a budget of a million tokens, whatever the run; a warm-down is counted from its end."""
    shares = Settings(warmup=0.1, warmdown=0.2, quantize_warmup=0.5)
    tokens = Settings(warmup=100_000, warmdown=200_000, quantize_warmup=500_000)
    for share in (0.0, 0.05, 0.2, 0.5, 0.8, 0.9, 0.99):
        at = Place(share, share, share * 1e6, 1e6)
        for of in (schedule.learning_rate, schedule.quantization):
            assert of(tokens, at) == pytest.approx(of(shares, at), abs=1e-12)
        longer = Place(share / 4, share / 4, share * 1e6, 4e6)
        assert schedule.quantization(tokens, longer) == pytest.approx(schedule.quantization(shares, at))
    assert schedule.fall(tokens, Place(0.96, 0.96, 3.84e6, 4e6)) == pytest.approx(0.8)
    assert schedule.fall(shares, Place(0.95, 0.95, since=0.9)) == pytest.approx(0.5)  # over the rest, which is short
    assert schedule.fall(shares, Place(0.42, 0.42, since=0.4, fallen=0.5)) == pytest.approx(0.7)  # rises again


# ---- longer runs ----


def test_a_finished_run_goes_on_from_before_its_rate_fell(
    finished: Path, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """λ never falls, the rate never rises, the loss gets better; a run that is killed on the way ends with the same
    bits."""
    assert [p.name for p in checkpoint.all_of(finished)] == ["step-000010", "step-000014", "step-000020"]
    for name in ("whole", "killed"):
        shutil.copytree(finished, tmp_path / name)
    longer = ("train", "--resume", "--tokens", 60 * EACH)
    assert bitnet(*longer, "--out", tmp_path / "whole") == 0
    said = capsys.readouterr().err
    assert "step-000020 and all others after step-000014 are set aside, as step-*.fallen" in said
    assert "from step 14" in said
    assert bits(tmp_path / "whole" / "step-000020.fallen") == bits(finished / "step-000020")
    found = steps(tmp_path / "whole")
    assert [r["step"] for r in found] == list(range(1, 61)) and found[:14] == steps(finished)[:14]
    amounts, rates = [r["quantized"] for r in found], [r["lr"] for r in found]
    assert amounts == sorted(amounts) and amounts[14:] == [1.0] * 46
    assert rates[14:42] == [max(rates)] * 28 and rates[42:] == sorted(rates[42:], reverse=True) and rates[-1] < 1e-3
    assert final(tmp_path / "whole") < final(finished) - 0.03
    saved = [p.name for p in checkpoint.all_of(tmp_path / "whole")]
    assert saved == ["step-000042", "step-000050", "step-000060"]

    killed_before(15, *longer, "--out", tmp_path / "killed")  # before anything else was saved
    assert bitnet("train", "--resume", "--out", tmp_path / "killed") == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert bits(tmp_path / "killed" / "step-000060") == bits(tmp_path / "whole" / "step-000060")


def test_a_run_that_gets_longer_before_its_rate_falls_keeps_its_course(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """λ rises as first planned. A run that gets shorter is ternary at its end, and its rate falls from where it is."""
    run = tmp_path / "run"
    killed_before(11, "train", *TINY, "--data", sentences, "--out", run)
    shutil.copytree(run, tmp_path / "short")
    assert bitnet("train", "--resume", "--out", run, "--steps", "40") == 0
    assert "in one step" not in capsys.readouterr().err
    found = steps(run)
    assert [r["quantized"] for r in found] == pytest.approx([min(1.0, (i + 0.5) / 20 / 0.7) for i in range(40)])
    assert [r["lr"] for r in found[1:28]] == [found[1]["lr"]] * 27 and found[28]["lr"] < found[27]["lr"]
    assert bitnet("train", "--resume", "--out", tmp_path / "short", "--steps", "12") == 0
    assert "λ goes from 0.75 to 1 in one step, and the loss with it" in capsys.readouterr().err
    assert [r["quantized"] for r in steps(tmp_path / "short")[10:]] == [1.0, 1.0]
    assert [r["lr"] / found[1]["lr"] for r in steps(tmp_path / "short")[9:]] == pytest.approx([1, 0.75, 0.25])


@pytest.mark.parametrize("argv", [["--batch", "8"], ["--accumulate", "2"], ["--batch-tokens", 2 * EACH]])
def test_larger_steps_make_a_run_longer(
    argv: list[str], finished: Path, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate does not jump up: the run continues from before it fell."""
    run = tmp_path / "run"
    killed_before(19, "train", *TINY, "--save-every", "18", "--data", sentences, "--out", run)
    assert bitnet("train", "--resume", "--out", run, *argv) == 0
    assert "step-000018 and all others after step-000014 are set aside" in capsys.readouterr().err
    found = steps(run)
    rates = [r["lr"] / found[13]["lr"] for r in found[14:]]
    assert [r["tokens"] for r in found[13:16]] == [14 * EACH, 16 * EACH, 18 * EACH]
    assert rates == pytest.approx([min(1.0, (26 - 14 - 2 * i - 1) / (0.3 * 26)) for i in range(6)])


def test_smaller_steps_make_a_run_shorter(sentences: str, tmp_path: Path) -> None:
    """Its rate begins to fall where it is, as in a run with fewer steps."""
    run = tmp_path / "run"
    killed_before(11, "train", *TINY, "--data", sentences, "--out", run)
    assert bitnet("train", "--resume", "--out", run, "--batch", "1") == 0
    found = steps(run)
    assert [r["lr"] / found[1]["lr"] for r in found[9:]] == pytest.approx([1, *((19 - 2 * i) / 20 for i in range(10))])


def test_options_given_on_the_way_stay(
    finished: Path, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the run continues from a checkpoint that is older than they are."""
    run = tmp_path / "run"
    killed_before(15, "train", *TINY, "--data", sentences, "--out", run)  # its newest is that before the rate falls
    assert bitnet("train", "--resume", "--out", run, "--lr", "0.001") == 0
    assert bitnet("train", "--resume", "--out", run) == 0
    assert "the run is finished, after 20 steps; give more with --steps to go on" in capsys.readouterr().err
    for source in ("--resume", "--from"):
        out = run if source == "--resume" else tmp_path / "branch"
        words = [source] if source == "--resume" else [source, run]
        assert bitnet("train", *words, "--out", out, "--steps", "30" if source == "--resume" else "40") == 0
        assert [r["lr"] for r in steps(out)[14:20]] == [0.001] * 6


def test_a_rate_that_has_to_rise_does_so_slowly_and_says_it(
    sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    argv = ["--schedule", "cosine", "--warmup", "0.1", "--quantize-warmup", "0.5"]
    assert bitnet("train", *TINY, *argv, "--data", sentences, "--out", run) == 0
    assert bitnet("train", "--resume", "--out", run, "--steps", "80") == 0
    assert "fallen to 0.2%, and there is no checkpoint from before that: it rises again" in capsys.readouterr().err
    found = steps(run)
    rates = [r["lr"] / 8e-3 for r in found]
    assert rates[19] < 0.01 and rates[20] < 0.1 and rates[20:27] == sorted(rates[20:27]) and max(rates[20:]) < 0.9
    assert [r["quantized"] for r in found[20:]] == [1.0] * 60


def test_what_a_longer_run_sets_aside_comes_back_when_it_cannot_begin(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise an older and worse checkpoint would be exported."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", full)
        assert bitnet("train", "--resume", "--out", run, "--steps", "30") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert checkpoint.all_of(run)[-1].name == "step-000020" and not list(run.glob("*.fallen"))


# ---- branches ----


def test_a_warm_down_is_branched_from_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    branch = tmp_path / "branch"
    assert bitnet("train", "--from", finished / "step-000010", "--out", branch, "--steps", "14") == 0
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    rates = [r["lr"] / 8e-3 for r in steps(branch)]
    assert steps(branch)[:10] == steps(finished)[:10] and rates[9:] == pytest.approx([1, 0.875, 0.625, 0.375, 0.125])
    assert [p.name for p in checkpoint.all_of(branch)] == ["step-000010", "step-000014"]
    # As it is: a run of its own, which ends where the other one does.
    assert bitnet("train", "--from", finished / "step-000010", "--out", tmp_path / "same") == 0
    assert bits(tmp_path / "same" / "step-000020") == bits(finished / "step-000020")
    assert losses(tmp_path / "same") == losses(finished)


def test_a_longer_branch_leaves_the_finished_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("longer", "again"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(finished, tmp_path / "run")
        argv = ["--out", tmp_path / "longer", "--from"] if name == "longer" else ["--out", tmp_path / "run", "--resume"]
        words = [*argv, tmp_path / "run"] if name == "longer" else argv
        assert bitnet("train", "--steps", "30", *words) == 0
    assert losses(tmp_path / "longer") == losses(tmp_path / "run")
    assert "continues from" in capsys.readouterr().err
    assert bitnet("train", "--from", finished, "--out", tmp_path / "longer") == 1
    assert "already holds step-000030; add --resume to go on" in capsys.readouterr().err
    assert bitnet("train", "--from", finished, "--out", tmp_path / "longer", "--resume") == 1
    assert "--from starts a run and --resume continues one; give one of them" in capsys.readouterr().err
    assert bitnet("train", "--from", tmp_path / "none", "--out", tmp_path / "new") == 1
    assert "none does not exist" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert bitnet("train", "--from", finished, "--out", tmp_path / "new", "--optimizer", "adamw") == 1
    assert "holds the moments of muon" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_what_a_branch_copies_is_whole_under_its_name(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever ends the branch: a run that starts in the folder uses the token ids that are there."""
    there: list[list[Path]] = []

    def cut_off(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:99])
        there.append([*target.parent.glob("*.bin"), *target.parent.glob("*.jsonl")])
        raise OSError(28, "No space left on device", str(source), None, str(target))  # as shutil does

    monkeypatch.setattr(shutil, "copy", cut_off)
    assert bitnet("train", "--from", finished, "--out", tmp_path / "branch") == 1
    assert re.search(rf"No space left on device: {finished}/\S+ -> {tmp_path}/branch/", capsys.readouterr().err)
    assert there == [[]]
    assert not (tmp_path / "branch").exists()
