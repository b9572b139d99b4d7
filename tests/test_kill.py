"""`kill -9` of a training run at random moments: what is left is complete, and resuming gives the same bits.
BITNET_KILLS sets the number of kills; continuous integration makes 8."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import bitnet_cli
from bitnet.train import checkpoint, runlog, saving
from bitnet.train.checkpoint import Checkpoint

STEPS, KILLS = 24, int(os.environ.get("BITNET_KILLS", "8"))
MODEL = ("vocab_size=257", "dim=32", "n_layers=2", "n_heads=2", "n_kv_heads=1", "head_dim=16", "ffn_dim=48")

# A server with torch loaded, from which every run is forked: a process of its own that starts in milliseconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["bitnet.setup.start", "torch._dynamo", "matplotlib.pyplot"])


def start(text: Path, run: Path, *more: str) -> multiprocessing.process.BaseProcess:
    """A run that saves after every step, or its continuation."""
    words = ["train", "--data", str(text), "--out", str(run), "--threads", "1", "--steps", str(STEPS)]
    words += ["--resume"] if checkpoint.all_of(run) or list(run.glob(f".*{saving.REPLACED}")) else []
    words += [w for option in (*MODEL, "max_context=32") for w in ("--set", option)]
    words += ["--batch", "4", "--save-every", "1", "--eval-every", "10", "--layers-every", "7"]
    words += ["--tokenizer", "byte", *more]
    process = processes.Process(target=bitnet_cli.main, args=(words,))
    process.start()
    return process


def bits(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file, rng = tmp_path_factory.mktemp("text") / "a.txt", random.Random(0)
    file.write_text(" ".join(rng.choice(["the", "cat", "sees", "a", "red", "house"]) for _ in range(9000)))
    return file


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never killed, with the checkpoint of every step."""
    run = tmp_path_factory.mktemp("whole") / "run"
    process = start(text, run, "--keep", str(STEPS + 1))
    process.join(120)
    assert process.exitcode == 0 and len(checkpoint.all_of(run)) == STEPS + 1
    return run


def log_of(run: Path) -> list[dict[str, Any]]:
    """The log without times."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in runlog.read(run / "log.jsonl")]


def check_left(run: Path, whole: Path) -> int:
    """Check that every checkpoint of a killed run loads, and equals that of the uninterrupted run. Returns their
    number."""
    for folder in checkpoint.all_of(run):
        assert bits(folder) == bits(whole / folder.name)
        assert Checkpoint.open(folder).state["step"] == int(folder.name.removeprefix("step-"))
        expected = load_file(whole / folder.name / "model.safetensors")
        found = Checkpoint.open(folder).model.state_dict()
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
    return len(checkpoint.all_of(run))


def check_finished(run: Path, whole: Path) -> None:
    last = f"step-{STEPS:06d}"
    assert bits(run / last) == bits(whole / last)
    assert log_of(run) == log_of(whole)
    assert not list(run.glob("*.partial")) and not list(run.glob(".*partial"))  # the kills left nothing behind


def test_kills_at_random_moments(text: Path, whole: Path, tmp_path: Path) -> None:
    rng, run, killed, found = random.Random(), tmp_path / "run", 0, 0
    longest = 1.0
    while killed < KILLS:
        process = start(text, run)
        process.join(rng.uniform(0.1, longest))  # from its first file to the end of the run, however busy the machine
        process.kill()
        process.join()
        if process.exitcode == 0:  # it had ended before: the next one starts over
            check_finished(run, whole)
            shutil.rmtree(run)
        else:
            killed += 1
            found += (saved := check_left(run, whole))
            longest *= 1.0 if saved else 1.5
    process = start(text, run)
    process.join(120)
    assert process.exitcode == 0
    check_finished(run, whole)
    assert found or KILLS < 8  # eight kills, all before the first step was saved, test nothing


def test_a_second_run_waits_for_the_first_to_die(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    process = start(text, run, "--steps", "100000")
    try:
        deadline = time.monotonic() + 60
        while not checkpoint.all_of(run):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.02)
        assert bitnet_cli.main(["train", "--out", str(run), "--data", str(text), "--resume"]) == 1
        assert f"another run is writing to {run}" in capsys.readouterr().err
    finally:
        process.kill()
        process.join()
    step = Checkpoint.open(run).state["step"]
    assert bitnet_cli.main(["train", "--out", str(run), "--data", str(text), "--resume", "--steps", str(step + 1)]) == 0
    assert Checkpoint.open(run).state["step"] == step + 1
