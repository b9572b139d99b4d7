"""Distillation in runs: resumed with the same bits, with the teacher that they started with, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_cli
from bitnet.settings import Settings
from bitnet.setup import prepare
from bitnet.train import distill, loop, runlog
from bitnet.train.checkpoint import Checkpoint
from test_distill import SHAPE

torch.set_num_threads(1)

FAST = ["--threads", "1", "--steps", "8", "--batch", "4", "--context", "24", "--save-every", "4", "--eval-every", "8"]
RELATIONS = ["--distill", "0.3", "--distill-relations", "0.2", "--distill-layer", "1"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A full-precision run and its text."""
    folder = tmp_path_factory.mktemp("a source")
    words = ["red", "cat", "sees", "a", "house"]
    (folder / "text.txt").write_text(" ".join(words[i * i % 7 % 5] for i in range(3000)))
    shape = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value!r}")]
    data = ["--data", str(folder / "text.txt"), "--tokenizer", "byte"]
    assert bitnet_cli.main(["train", *shape, *data, *FAST, "--out", str(folder / "run")]) == 0
    return folder / "run", folder / "text.txt"


def convert(source: tuple[Path, Path], out: Path, *more: str) -> int:
    return bitnet_cli.main(["finetune", str(source[0]), "--data", str(source[1]), *FAST, "--out", str(out), *more])


def steps(folder: Path) -> list[dict[str, Any]]:
    records = runlog.read(folder / "log.jsonl")
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records if "loss" in r]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_balanced_run_is_resumed_to_the_same_bits(
    source: tuple[Path, Path], tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*RELATIONS, "--precision", precision, "--lr", "0.002", "--accumulate", "2", "--seed", "8"]
    assert convert(source, tmp_path / "whole", *options) == 0
    update = loop.update

    def kill(run: Any) -> Any:
        if run.state["step"] == 5:
            raise KeyboardInterrupt
        return update(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", kill)
        assert convert(source, tmp_path / "killed", *options) == 130
    assert Checkpoint.open(tmp_path / "killed").state["step"] == 4
    assert bitnet_cli.main(["finetune", str(source[0]), "--out", str(tmp_path / "killed"), "--resume"]) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole, killed = (tmp_path / run / "step-000008" / name for run in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()
    found = steps(tmp_path / "whole")
    assert found == steps(tmp_path / "killed")

    sizes: dict[str, float] = {}
    for record in found:
        names, weights = ("cross_entropy", "divergence", "relations"), record["weights"]
        assert record["loss"] == sum(weights[name] * record[name] for name in names)
        assert weights == distill.weights(
            Settings(source="x", quantize_warmup=0.5, distill=0.3, distill_relations=0.2), sizes
        )
        sizes = distill.running_means(sizes, {name: record[name] for name in names})
    assert Checkpoint.open(tmp_path / "whole").state["sizes"] == sizes
    last = found[-1]
    share = last["weights"]["relations"] * last["relations"] / last["cross_entropy"]
    # 0.2 of the running means, which lag behind while λ rises: with 13 seeds, in both precisions, 0.36 to 0.56
    assert 0.2 < share < 0.7  # without balance 0.005


@pytest.mark.parametrize("option", ["the source", "--teacher"])
def test_a_teacher_that_has_learnt_more_is_not_the_teacher(
    option: str, source: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on learns from what it began with, also where that was set aside; without it not at all."""
    teacher, text = tmp_path / "teacher", source[1]
    shutil.copytree(source[0], teacher)
    begun_with = (teacher, text) if option == "the source" else source
    more = ["--distill", "0.5", "--lr", "0.002", *(["--teacher", str(teacher)] if option == "--teacher" else [])]
    assert convert(begun_with, tmp_path / "whole", *more) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "step-000008")
    assert bitnet_cli.main(["train", "--resume", "--out", str(teacher), "--steps", "16"]) == 0
    assert not (teacher / "step-000008").exists() and (teacher / "step-000008.fallen").exists()
    for name in ("none", "other"):
        shutil.copytree(tmp_path / "half", tmp_path / name)
    assert bitnet_cli.main(["finetune", "--resume", "--out", str(tmp_path / "half")]) == 0
    whole, half = (tmp_path / run / "step-000008" / "model.safetensors" for run in ("whole", "half"))
    assert whole.read_bytes() == half.read_bytes()
    shutil.rmtree(teacher / "step-000008.fallen")
    assert bitnet_cli.main(["finetune", "--resume", "--out", str(tmp_path / "none")]) == 1
    assert f"{teacher} no longer has step-000008, which this run learns from" in capsys.readouterr().err
    other = ["finetune", "--resume", "--out", str(tmp_path / "other"), "--teacher", str(source[0])]
    assert bitnet_cli.main(other) == 0  # one that was renamed
    assert bitnet_cli.main([*other[:4], "--steps", "12"]) == 0


def test_accumulated_terms_are_those_of_one_batch(source: tuple[Path, Path], tmp_path: Path) -> None:
    """The same rows in one forward pass and in two."""
    options = [*RELATIONS, "--precision", "fp32", "--steps", "2"]
    assert convert(source, tmp_path / "one", *options) == 0
    assert convert(source, tmp_path / "two", *options, "--batch", "2", "--accumulate", "2") == 0
    one, two = (steps(tmp_path / name)[0] for name in ("one", "two"))
    for name in ("cross_entropy", "divergence"):
        assert one[name] == pytest.approx(two[name], rel=1e-5)  # fp32 sums in another order
    # Quotients of sums over half of the rows each; of a few words each.
    assert one["relations"] == pytest.approx(two["relations"], rel=0.1)


def test_conversations(source: tuple[Path, Path], tmp_path: Path) -> None:
    """Documents in a row, positions that do not count, and two tokens that the teacher does not have."""
    talk = [{"role": "user", "content": "a cat?"}, {"role": "assistant", "content": "a red cat"}]
    lines = [{"messages": [*talk, {"role": "user", "content": f"{i}?"}, talk[1]]} for i in range(40)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--chat", str(tmp_path / "talks.jsonl"), *FAST, "--context", "64", *RELATIONS]
    assert bitnet_cli.main(["finetune", str(source[0]), *words, "--out", str(tmp_path / "run")]) == 0
    found = steps(tmp_path / "run")
    assert all(0 < r["relations"] < 5 for r in found[1:])


def test_layers_that_are_computed_twice(source: tuple[Path, Path], tmp_path: Path) -> None:
    """--recompute changes no bit."""
    assert convert(source, tmp_path / "once", *RELATIONS) == 0
    assert convert(source, tmp_path / "twice", *RELATIONS, "--recompute") == 0
    assert steps(tmp_path / "once") == steps(tmp_path / "twice")


def test_a_bad_step_leaves_the_running_means(source: tuple[Path, Path], tmp_path: Path, monkeypatch: Any) -> None:
    terms = distill.Distillation.terms

    def broken(self: distill.Distillation, *args: Tensor) -> dict[str, Tensor]:
        found = terms(self, *args)
        calls.append(0)
        return found | {"relations": found["relations"] * (math.nan if len(calls) == 3 else 1)}

    calls: list[int] = []
    monkeypatch.setattr(distill.Distillation, "terms", broken)
    assert convert(source, tmp_path / "run", *RELATIONS, "--on-bad-step", "skip") == 0
    assert [r["step"] for r in runlog.read(tmp_path / "run" / "log.jsonl") if "skipped" in r] == [3]
    assert all(math.isfinite(size) for size in Checkpoint.open(tmp_path / "run").state["sizes"].values())


def test_options_that_cannot_be(source: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in [
        (["--distill", "0.7", "--distill-relations", "0.5"], "are shares of one loss, expected at most 1 together"),
        (["--distill-relations", "0.5", "--distill-layer", "9"], "have 2 and 2 layers; expected 1, the last, to 2"),
        (["--distill-layer", "-1"], "--distill-layer is -1, expected 0 to 10000"),
        (["--distill-layer", "1"], "--distill-layer has no effect without --distill-relations; add that, or leave"),
        (["--distill-temperature", "2"], "--distill-temperature has no effect without --distill; add that, or leave"),
        (["--tasks-every", "9"], "--tasks-every has no effect without --tasks; add that, or leave it out"),
        (["--schedule", "cosine", "--warmdown", "0.2"], "--warmdown has no effect with --schedule cosine, which falls"),
        (["--beta", "0.5"], "--beta has no effect without --preference; add that, or leave it out"),
        (
            ["--teacher", str(source[0])],
            "nothing is distilled; add --distill, --distill-relations or --distill-features",
        ),
        (
            ["--distill", "0.5", "--teacher", str(tmp_path)],
            "has no config.json and no checkpoint; expected a run folder, a checkpoint or a",
        ),
    ]:
        assert convert(source, tmp_path / "run", *options) == 1
        assert message in capsys.readouterr().err


def test_a_teacher_that_does_not_fit_is_refused_before_the_text_is_read(
    source: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a house sees a red cat. " * 200)
    other = ["train", "--tokenizer", "char", "--set", "dim=32", "--set", "n_layers=2", "--data", str(text), *FAST]
    assert bitnet_cli.main([*other, "--out", str(tmp_path / "other")]) == 0
    monkeypatch.setattr(prepare, "read_data", None)
    for teacher, message in (
        (tmp_path / "other", "expected a teacher with the same tokenizer"),
        (source[0], "takes 64 tokens, a sequence has 65; lower --context"),
    ):
        longer = ["--set", "max_context=65", "--context", "65"] if teacher == source[0] else []
        assert convert(source, tmp_path / "run", "--distill", "0.5", "--teacher", str(teacher), *longer) == 1
        assert message in capsys.readouterr().err
