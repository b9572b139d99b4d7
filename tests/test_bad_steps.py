"""A step whose loss is NaN, infinite or far above those before it is skipped, or ends the run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitnet.train import checkpoint, loop, passes, runlog
from bitnet.train.checkpoint import Checkpoint
from test_telemetry import learn


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file, rng = tmp_path_factory.mktemp("text") / "a.txt", random.Random(0)
    file.write_text(" ".join(rng.choice(["the", "cat", "sees", "a", "red", "house"]) for _ in range(9000)))
    return str(file)


def spoil(monkeypatch: pytest.MonkeyPatch, steps: range, how: float) -> None:
    """Losses of these steps (counted from 1) times `how`."""
    inner, calls = passes.loss_terms, iter(range(1, 10_000))

    def spoiled(run: loop.Run, *batch: Tensor) -> dict[str, Tensor]:
        factor = how if next(calls) in steps else 1.0
        return {name: factor * term for name, term in inner(run, *batch).items()}

    monkeypatch.setattr(passes, "loss_terms", spoiled)


@pytest.mark.parametrize(("how", "spike"), [(float("nan"), "0"), (float("inf"), "0"), (10.0, "5")])
def test_a_bad_step_is_skipped(
    how: float,
    spike: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = []
    inner = loop.update

    def update(run: loop.Run) -> tuple[float, float]:
        weights = [p.detach().clone() for p in run.model.parameters()]
        result = inner(run)
        before.append(all(map(torch.equal, weights, run.model.parameters())))
        return result

    monkeypatch.setattr(loop, "update", update)
    spoil(monkeypatch, range(25, 27), how)
    assert learn(text, tmp_path / "run", "--on-bad-step", "skip", "--spike", spike) == 0
    assert [i for i, unchanged in enumerate(before, start=1) if unchanged] == [25, 26]
    records = runlog.read(tmp_path / "run" / "log.jsonl")
    assert [r["step"] for r in records if "skipped" in r] == [25, 26]
    assert [r["step"] for r in records if "loss" in r] == [s for s in range(1, 41) if s not in (25, 26)]
    assert "NaN" not in (tmp_path / "run" / "log.jsonl").read_text()
    assert "at step 25; skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "more", "message", "good"),
    [
        (range(25, 26), ["--spike", "5"], "above the median of 20 steps at step 25; lower --lr", 20),
        (range(25, 99), ["--on-bad-step", "skip"], "at step 34, the 10th bad step in a row; lower --lr", 28),
    ],
)
def test_a_bad_step_stops(
    steps: range, more: list[str], message: str, good: int,
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spoil(monkeypatch, steps, 10.0 if "--spike" in more else float("nan"))
    assert learn(text, tmp_path / "run", *more) == 1
    errors = capsys.readouterr().err
    assert message in errors and f"step-{good:06} is the last good checkpoint" in errors
    assert checkpoint.all_of(tmp_path / "run")[-1].name == f"step-{good:06}"


def test_nan_weights_are_never_saved(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = loop.update

    def update(run: loop.Run) -> tuple[float, float]:
        result = inner(run)
        if run.state["step"] == 39:  # after the last step, of which the loss was good
            with torch.no_grad():
                run.model.final_norm.weight[3] = float("nan")
        return result

    monkeypatch.setattr(loop, "update", update)
    assert learn(text, tmp_path / "run", "--eval-every", "1000") == 1
    errors = capsys.readouterr().err
    assert "final_norm.weight holds NaN or infinity, not saved" in errors
    assert "step-000028 is the last good checkpoint" in errors  # from before the learning rate fell
    assert Checkpoint.open(tmp_path / "run").state["step"] == 28 and Checkpoint.open(tmp_path / "run").model
