"""The log of a run, with damage at its end too, and what TensorBoard and trackers get of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.train import runlog
from test_telemetry import learn


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file, rng = tmp_path_factory.mktemp("text") / "a.txt", random.Random(0)
    file.write_text(" ".join(rng.choice(["the", "cat", "sees", "a", "red", "house"]) for _ in range(9000)))
    return str(file)


def test_tensorboard_gets_the_log(text: str, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert learn(text, tmp_path / "run", "--report-to", "tensorboard") == 0
    assert learn(text, tmp_path / "run", "--resume", "--steps", "44") == 0  # goes on with it
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    records = runlog.read(tmp_path / "run" / "log.jsonl")
    losses = [(r["step"], r["loss"]) for r in records if "loss" in r]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(s, pytest.approx(v, rel=1e-6)) for s, v in losses]
    flips = [(r["step"], r["layers"]["flips"]["down"][1]) for r in records if "layers" in r]
    found = [(e.step, e.value) for e in events.Scalars("layers/flips/down/1")]
    assert len(flips) == 2 and found == [(s, pytest.approx(v, rel=1e-6)) for s, v in flips]  # events are fp32


def test_tensorboard_that_is_not_there(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorboard" or n == "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert learn(text, tmp_path / "run", "--report-to", "tensorboard") == 1
    assert re.search(r"needs tensorboard: .* -m pip install .*'tensorboard>=", capsys.readouterr().err)


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_trackers_get_the_log(
    library: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The libraries are large: a module with the functions that are called takes their place."""
    made: list[dict[str, Any]] = []
    numbers: dict[int, dict[str, float]] = {}
    ended: list[bool] = []
    functions = SimpleNamespace(
        init=lambda **options: made.append(options),
        log=lambda metrics, step: numbers.setdefault(step, {}).update(metrics),
        finish=lambda: ended.append(True),
    )

    def refused(**_: Any) -> None:
        raise ConnectionError("no account")

    monkeypatch.setitem(sys.modules, library, functions)  # type: ignore[arg-type]
    run = tmp_path / "run"
    assert learn(text, run, "--report-to", library) == 0
    (options,) = made
    assert options["project"] == "bitnet" and options["name"] == "run" and options["config"]["report_to"] == library
    assert ended == [True] and options.get("dir") == (str(run) if library == "wandb" else None)
    losses = {r["step"]: r["loss"] for r in runlog.read(run / "log.jsonl") if "loss" in r}
    assert {step: each["loss"] for step, each in numbers.items()} == losses
    assert "validation/nats_per_token" in numbers[max(numbers)]
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(init=refused))  # type: ignore[arg-type]
    assert learn(text, tmp_path / "other", "--report-to", library) == 1
    assert f"--report-to {library} cannot start: no account; see its own help" in capsys.readouterr().err
    assert not list((tmp_path / "other").glob("step-*"))  # so that the same command may be tried again


def test_a_tracker_that_fails_ends_no_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("the network is gone")

    broken = SimpleNamespace(__name__="trackio", init=lambda **_: None, log=fails, finish=fails)
    monkeypatch.setitem(sys.modules, "trackio", broken)  # type: ignore[arg-type]
    assert learn(text, tmp_path / "run", "--report-to", "trackio") == 0
    assert capsys.readouterr().err.count("trackio failed: the network is gone; the run continues, and log.jsonl") == 1


def test_a_signal_while_a_tracker_ends_leaves_the_result(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have much to send still. It ends once."""
    ended: list[bool] = []

    def finish() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(True)

    slow = SimpleNamespace(__name__="trackio", init=lambda **_: None, log=lambda *_, **__: None, finish=finish)
    monkeypatch.setitem(sys.modules, "trackio", slow)  # type: ignore[arg-type]
    assert learn(text, tmp_path / "run", "--report-to", "trackio") == 130
    assert re.search(r"step-\d+: validation ", capsys.readouterr().out) and ended == [True]


@pytest.fixture(scope="module")
def two_steps(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "two steps"
    assert learn(text, run, "--steps", "2") == 0
    return run


@pytest.mark.parametrize(
    "damage", [b'{"step": 41, "lo', b"\0" * 300, b"[1]\n", b'{"step": "x"}\n', b"\xff\xfe\n", b"[" * 99_999]
)
def test_a_damaged_log_does_not_stop_a_resume(damage: bytes, text: str, two_steps: Path, tmp_path: Path) -> None:
    file = Path(shutil.copytree(two_steps, tmp_path / "run")) / "log.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + damage)
    assert [json.dumps(r) for r in runlog.read(file)] == whole.decode().splitlines()
    assert learn(text, tmp_path / "run", "--steps", "3", "--resume") == 0
    assert [r["step"] for r in runlog.read(file)] == [1, 2, 3, 3]


def test_a_long_log_takes_no_memory(tmp_path: Path) -> None:
    record = {"step": 1, "tokens": 256, "loss": 3.5, "lr": 1e-3}
    with contextlib.closing(runlog.Log(tmp_path / "log.jsonl", 0, None)) as log:
        tracemalloc.start()
        for step in range(2000):
            log.write({**record, "step": step})
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert kept < 20_000 and len(runlog.read(tmp_path / "log.jsonl")) == 2000
