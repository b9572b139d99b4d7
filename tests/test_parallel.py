"""Two processes on one CPU give the run of one process, however it is divided and resumed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bitnet_cli
from bitnet.data import dataset, pairs
from bitnet.data.frames import Frame
from bitnet.evaluate import contrast
from bitnet.model import parallel
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import loop, manifest, optimizers, runlog, saving
from bitnet.train.checkpoint import Checkpoint
from in_two_processes import FLOAT, TINY, finish, run_pair, some_text, start, steps
from picture_data import DECODER, TOWERS, VISION, captions, questions

# Sums of gradients are taken in another order, so they differ in their last bits. With AdamW a float model keeps that
# small. Muon adds in bf16: there another order moves an update by 2 %, and with it codes, and the loss by this much
# while it falls fast. Before the first update there is nothing of the kind, ternary or not.
FLOAT_TOLERANCE, TERNARY_TOLERANCE, FIRST_TOLERANCE = 1e-5, 0.03, 1e-6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return some_text(tmp_path_factory.mktemp("text"))


def assert_same_curve(run: Path, whole: Path, tolerance: float, first: int = 0) -> None:
    found, expected = steps(run)[first:], steps(whole)[first:]
    assert [(r["step"], r["tokens"]) for r in found] == [(r["step"], r["tokens"]) for r in expected]
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=tolerance if a["step"] > 1 else FIRST_TOLERANCE)
    last, other = (runlog.read(r / "log.jsonl")[-1] for r in (run, whole))
    assert last["final"] and last["validation"]["tokens"] == other["validation"]["tokens"]
    assert last["validation"]["nats_per_token"] == pytest.approx(other["validation"]["nats_per_token"], abs=tolerance)


# ---- the same run ----


def test_a_sharded_encoder_is_measured(text: str, tmp_path: Path) -> None:
    """Its vectors are those of the unsharded model."""
    run = tmp_path / "run"
    argv = [*TINY, "--objective", "contrastive", "--set", "has_head=no", "--set", "pooling=mean", "--validation", "0.3"]
    codes, errors = run_pair(run, *argv, "--batch-tokens", "512", "--data", text, "--steps", "2", "--parallel", "fsdp")
    assert codes == [0, 0], errors
    found = runlog.read(run / "log.jsonl")[-1]
    assert found["step"] == 2 and found["final"]
    checkpoint = Checkpoint.open(run)
    held_out = dataset.recorded(checkpoint.state, "validation", run)
    assert held_out
    compared = contrast.cosines(0.05), contrast.softmax
    whole = contrast.evaluate(checkpoint.model, pairs.Pairs(held_out, 0, given=False, frame=Frame((0,))), 32, *compared)
    assert found["validation"]["nats_per_pair"] == pytest.approx(whole.nats_per_pair, abs=1e-4)  # sums in another order


@pytest.mark.parametrize("make", [captions, questions])
def test_two_processes_learn_from_images_what_one_does(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Two passes of four records each, in one process or in two."""
    seeing = TOWERS if make is captions else [*DECODER, *VISION, "--set", "vision.pooling=none"]
    argv = [*seeing, *FLOAT, "--set", "vision.ternary=[]", "--batch", "4", "--steps", "4", "--precision", "fp32"]
    argv += ["--data", str(make(tmp_path / "data"))]
    assert bitnet_cli.main(["train", *argv, "--accumulate", "2", "--out", str(tmp_path / "one")]) == 0
    codes, errors = run_pair(tmp_path / "two", *argv, "--accumulate", "2", "--parallel", "ddp")
    assert codes == [0, 0], errors
    found, expected = (steps(tmp_path / name) for name in ("two", "one"))
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], abs=FLOAT_TOLERANCE)
    last, other = (runlog.read(tmp_path / name / "log.jsonl")[-1]["validation"] for name in ("two", "one"))
    assert last == pytest.approx(other, abs=1e-4)


@pytest.fixture(scope="module")
def runs(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same training by one process, and by two in both ways."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, more in (("", []), (" of floats", FLOAT)):
        assert bitnet_cli.main(["train", *TINY, *more, "--data", text, "--out", str(folder / f"one{kind}")]) == 0
        for way in ("ddp", "fsdp") if not kind else ("fsdp",):
            codes, errors = run_pair(folder / f"{way}{kind}", *TINY, *more, "--data", text, "--parallel", way)
            assert codes == [0, 0], errors
    return {path.name: path for path in folder.iterdir()}


def test_a_sharded_float_model_learns_what_a_whole_one_does(runs: dict[str, Path]) -> None:
    assert_same_curve(runs["fsdp of floats"], runs["one of floats"], FLOAT_TOLERANCE)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(way: str, runs: dict[str, Path]) -> None:
    assert_same_curve(runs[way], runs["one"], TERNARY_TOLERANCE)
    losses = [record["loss"] for record in steps(runs[way])]
    assert losses[-1] < losses[0] - 10 * TERNARY_TOLERANCE
    errors = (runs[way] / ".errors").read_text()
    assert errors.count("from step 0") == errors.count("step 4:") == 1 and "Warning" not in errors


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_telemetry_is_of_the_whole_model(way: str, runs: dict[str, Path]) -> None:
    found, expected = (steps(runs[name])[0]["layers"] for name in (way, "one"))
    for quantity, of_roles in expected.items():
        for role, values in of_roles.items():
            assert found[quantity][role] == pytest.approx(values, rel=0.01, abs=0.01)  # some codes of 512 may differ


def test_a_checkpoint_does_not_say_who_wrote_it(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    names = {name: {file.name for file in Checkpoint.open(run).folder.iterdir()} for name, run in runs.items()}
    assert len(set(map(frozenset, names.values()))) == 1
    assert not any(manifest.damage(Checkpoint.open(run).folder) for run in runs.values())
    for way in ("ddp", "fsdp"):
        for file in ("model.safetensors", "optimizer.safetensors"):
            found, expected = (load_file(Checkpoint.open(runs[name]).folder / file) for name in (way, "one"))
            assert {k: t.numel() for k, t in found.items()} == {k: t.numel() for k, t in expected.items()}
        assert Checkpoint.open(runs[way]).state["settings"]["parallel"] == way
    assert bitnet_cli.main(["eval", str(runs["fsdp"]), "--json"]) == 0
    nats = json.loads(capsys.readouterr().out)["nats_per_token"]
    final = runlog.read(runs["fsdp"] / "log.jsonl")[-1]["validation"]["nats_per_token"]
    assert nats == pytest.approx(final, rel=1e-12)  # the same sums of windows, added in another order, in fp64


# ---- resume ----


def begun(run: Path, copy: Path) -> Path:
    """A run as it was after four of its steps."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("step-00000[5-8]", ".errors", "loss.png"))
    return copy


@pytest.mark.parametrize(("before", "way"), [("one", "fsdp"), ("fsdp", "ddp")])
def test_two_processes_go_on_from_any_checkpoint(
    before: str, way: str, runs: dict[str, Path], text: str, tmp_path: Path
) -> None:
    run = begun(runs[f"{before} of floats"], tmp_path / "run")
    damaged = Path(shutil.copytree(runs[f"{before} of floats"] / "step-000008", run / "step-000008"))
    os.truncate(damaged / "optimizer.safetensors", 0)
    codes, errors = run_pair(run, "--data", text, "--resume", "--parallel", way)
    assert codes == [0, 0] and "from step 4" in errors
    assert errors.count("step-000008 is damaged: optimizer.safetensors has 0 bytes") == 1
    assert_same_curve(run, runs["one of floats"], FLOAT_TOLERANCE)


def test_one_process_goes_on_from_two(runs: dict[str, Path], text: str, tmp_path: Path) -> None:
    run = begun(runs["fsdp of floats"], tmp_path / "run")
    assert bitnet_cli.main(["train", "--out", str(run), "--data", text, "--resume"]) == 0
    assert_same_curve(run, runs["one of floats"], FLOAT_TOLERANCE)


def load_and_save(folder: Path, out: Path) -> int:
    checkpoint = Checkpoint.open(folder)
    with parallel.joined():
        with torch.device("cpu" if parallel.is_first() else "meta"):
            model = Transformer(checkpoint.config)
        parallel.shard(model, "cpu")
        optimizer = optimizers.build(model, Settings(optimizer="adamw"))
        checkpoint.load_weights(model)
        checkpoint.load_optimizer(optimizer, model)
        kept = [parallel.kept(p).numel() for p in model.parameters()]
        assert sum(kept) < 0.6 * sum(p.numel() for p in model.parameters())
        moments = [t for of in optimizer.state.values() for t in of.values() if t.dim()]
        assert sum(parallel.kept(t).numel() for t in moments) == 2 * sum(kept)
        saving.write(out, saving.Snapshot.of(model, "{}", optimizer, checkpoint.state))
    return 0


def test_shards_lose_no_bit(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = Checkpoint.open(runs["one of floats"]).folder
    assert finish(start(tmp_path, load_and_save, folder, tmp_path)) == [0, 0], (tmp_path / ".errors").read_text()
    for file in ("model.safetensors", "optimizer.safetensors"):
        found, expected = load_file(tmp_path / folder.name / file), load_file(folder / file)
        assert found.keys() == expected.keys()
        assert all(found[name].reshape(t.shape).equal(t) for name, t in expected.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".errors", folder.name]


def test_a_teacher_is_sharded_too(runs: dict[str, Path], text: str, tmp_path: Path) -> None:
    """Relations besides, whose vectors are watched in one of its layers."""
    words = ["finetune", str(runs["one of floats"]), "--data", text, *TINY[TINY.index("--threads") :], "--lr", "1e-3"]
    words += ["--distill", "0.5", "--distill-relations", "0.1", "--set", "ternary=[]", "--steps", "4"]
    assert bitnet_cli.main([*words, "--out", str(tmp_path / "one")]) == 0
    pair = start(tmp_path / "two", distilled_in_shards, [*words, "--parallel", "fsdp", "--out", str(tmp_path / "two")])
    assert finish(pair) == [0, 0], (tmp_path / "two" / ".errors").read_text()
    assert_same_curve(tmp_path / "two", tmp_path / "one", FLOAT_TOLERANCE)


def distilled_in_shards(argv: list[str]) -> int:
    """A teacher whose layers are sharded; its embedding and head stay whole from the first pass on."""
    step, teachers = loop.update, []

    def seen(run: loop.Run) -> Any:
        assert run.distillation
        teachers.append(
            [parallel.is_sharded(p) and p.grad is None for p in run.distillation.teacher.layers.parameters()]
        )
        return step(run)

    loop.update = seen
    return bitnet_cli.main(argv) or int(len(teachers) != 4 or not all(map(all, teachers)))


# ---- conversations, a clock ----


def test_the_loss_counts_every_answer_once(tmp_path: Path) -> None:
    """For rows with very different numbers of targets: the mean over all, not the mean of the processes' means."""
    lines = []
    for i in range(40):
        answer = "yes " * (1 if i % 2 else 15)
        talk = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": talk}))
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(lines))
    argv = [*TINY, *FLOAT, "--set", "max_context=96", "--set", "vocab_size=270", "--batch-tokens", "384"]
    argv += ["--chat", str(file), "--steps", "4"]
    assert bitnet_cli.main(["train", *argv, "--out", str(tmp_path / "one")]) == 0
    codes, errors = run_pair(tmp_path / "two", *argv)
    assert codes == [0, 0], errors
    assert_same_curve(tmp_path / "two", tmp_path / "one", FLOAT_TOLERANCE)


def test_processes_agree_when_time_is_up(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY[:-2], "--data", text, "--minutes", "0.02")
    assert codes == [0, 0], errors
    assert Checkpoint.open(tmp_path / "run").state["seconds"] >= 1.2
