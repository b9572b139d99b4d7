"""Steps that nobody waits for: results are read once the next step has started, and batches are made in a thread. The
bits, log and errors are those of steps that are read at once. On a CPU there is nothing to wait for, so `late` makes a
run behave as it does on a GPU."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitnet.data import dataset
from bitnet.presets import PRESETS
from bitnet.settings import Settings
from bitnet.setup import hardware
from bitnet.train import checkpoint, loop, passes, profiling, replay
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.pipeline import Ahead, Made, Work
from training import TINY, bitnet, bits, losses

torch.set_num_threads(1)

WAITING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_consecutive", "repeat_interleave")
"""Operators of which a GPU has to give the result before Python can go on."""


class Reads(TorchDispatchMode):
    """Counts what would make a GPU wait, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found += [name] if name in WAITING else []
        self.found += ["index of bools"] if name == "index" and any(_is_mask(i) for i in args[1]) else []
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype == torch.bool


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are read as on a GPU: the first at once, others when the next is on its way."""
    waits = loop.waits

    def on_gpu(run: loop.Run) -> bool:
        object.__setattr__(run.settings, "device", "cuda")
        try:
            return waits(run)
        finally:
            object.__setattr__(run.settings, "device", "cpu")

    monkeypatch.setattr(loop, "waits", on_gpu)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.usefixtures("late")
def test_a_step_reads_nothing_and_the_run_ends_in_the_same_bits(
    finished: Path, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, order = loop.update, []
    read = Made.read.func

    def watched(run: loop.Run) -> Made:
        with Reads() as reads:
            made = update(run)
        order.append((run.state["step"] + 1, reads.found))
        return made

    def noted(made: Made) -> Any:
        order.append(("read", made.at.get("step")))
        return read(made)

    monkeypatch.setattr(loop, "update", watched)
    monkeypatch.setattr(Made.read, "func", noted)
    assert bitnet("train", *TINY, "--data", sentences, "--out", tmp_path / "run") == 0
    # The first is read at once, those at evaluations and checkpoints before them, others behind the next one.
    assert order[:2] == [("read", None), (1, [])] and order[2:6] == [(2, []), (3, []), ("read", 2), (4, [])]
    assert order.index(("read", 9)) < order.index(("read", 10)) < order.index((11, []))
    assert [step for step, _ in order if step != "read"] == list(range(1, 21)) and order[-1] == ("read", 20)
    assert not any(found for step, found in order if step != "read")
    assert bits(tmp_path / "run" / "step-000020") == bits(finished / "step-000020")
    assert losses(tmp_path / "run") == losses(finished)


@pytest.mark.parametrize("more", [["--on-bad-step", "skip"], ["--spike", "9"]])
@pytest.mark.usefixtures("late")
def test_a_step_that_others_depend_on_is_read_at_once(
    more: list[str], sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, open_steps = loop.settle, []

    def settled(run: loop.Run, *rest: Any) -> None:
        open_steps.append(run.unread)
        settle(run, *rest)

    monkeypatch.setattr(loop, "settle", settled)
    argv = [*TINY[:-1], "3", "--warmdown", "0", "--data", sentences, *more]
    assert bitnet("train", *argv, "--out", tmp_path / "run") == 0
    assert [made is None for made in open_steps] == [True, False] * 3 + [True]


@pytest.mark.parametrize(("step", "good"), [(13, 10), (20, 14)])
@pytest.mark.usefixtures("late")
def test_a_bad_step_is_named_and_nothing_is_saved_after_it(
    step: int,
    good: int,
    sentences: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loss_terms = passes.loss_terms

    def spoiled(run: loop.Run, *batch: Any) -> Any:
        bad = run.state["step"] + 1 == step
        return {name: term * (float("nan") if bad else 1) for name, term in loss_terms(run, *batch).items()}

    monkeypatch.setattr(passes, "loss_terms", spoiled)
    assert bitnet("train", *TINY, "--data", sentences, "--out", tmp_path / "run") == 1
    errors = capsys.readouterr().err
    assert f"loss is nan, gradient norm nan at step {step}; lower --lr" in errors
    assert f"step-{good:06d} is the last good checkpoint" in errors and not threads()
    assert checkpoint.all_of(tmp_path / "run")[-1].name == f"step-{good:06d}"
    assert losses(tmp_path / "run")[-1]["step"] == step - 1


@pytest.mark.usefixtures("late")
def test_a_signal_reads_first(sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = loop.update

    def interrupted(run: loop.Run) -> Made:
        if run.state["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(run)

    monkeypatch.setattr(loop, "update", interrupted)
    assert bitnet("train", *TINY, "--data", sentences, "--out", tmp_path / "run") == 143
    assert Checkpoint.open(tmp_path / "run").state["step"] == losses(tmp_path / "run")[-1]["step"] == 4
    assert len(Checkpoint.open(tmp_path / "run").state["recent"]) == 4 and not threads()


# ---- batches ----


@pytest.mark.parametrize("error", [dataset.DataError("the disk is gone"), KeyboardInterrupt()])
def test_data_that_fails_does_so_at_its_step(
    error: BaseException, sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sequences = dataset.Batches.sequences

    def failing(self: dataset.Batches, first: int, last: int) -> tuple[torch.Tensor, ...]:
        if first == 4 * 5 and isinstance(error, Exception):
            raise error
        return sequences(self, first, last)

    update = loop.update

    def stopped(run: loop.Run) -> Made:
        if run.state["step"] == 5 and not isinstance(error, Exception):
            raise error  # a second Ctrl-C
        return update(run)

    monkeypatch.setattr(dataset.Batches, "sequences", failing)
    monkeypatch.setattr(loop, "update", stopped)
    code = bitnet("train", *TINY, "--data", sentences, "--out", tmp_path / "run")
    assert code == (1 if isinstance(error, Exception) else 130)
    assert ("bitnet: error: the disk is gone" in capsys.readouterr().err) == isinstance(error, Exception)
    assert losses(tmp_path / "run")[-1]["step"] == 5 and not threads()


def test_batches_come_in_order_and_are_made_ahead() -> None:
    made: list[int] = []
    ready = threading.Semaphore(0)

    def make(step: int) -> Work:
        assert threading.current_thread() is not threading.main_thread() and torch.get_num_threads() == 1
        made.append(step)
        ready.release()
        return Work([step], [], step)

    with Ahead.of(make) as ahead:
        for step in (3, 4, 5, 9, 9):  # a step may be asked for again, or another one
            assert ahead.take(step).counted == step
            if step < 9:
                assert ready.acquire(timeout=10) and ready.acquire(timeout=10) and made[-1] == step + 1
                ready.release()
    assert made[:5] == [3, 4, 5, 6, 9] and not threads()


def test_the_table_of_a_profile() -> None:
    def operation(key: str, us: float, count: int, device: str = "CPU", there: float = 0.0) -> Any:
        kind = SimpleNamespace(name=device)
        times = {"self_cpu_time_total": us, "self_device_time_total": there}
        return SimpleNamespace(key=key, count=count, device_type=kind, **times)

    made = [
        operation("aten::mm", 6000, 8),
        operation("ProfilerStep#11", 1000, 1),
        operation("ProfilerStep#12", 1000, 1),
    ]
    _, first, second = (line.split(maxsplit=3) for line in profiling.table(made, 2).splitlines())
    assert first == ["3.00", "75.0%", "4", "aten::mm"]
    assert second == ["1.00", "25.0%", "1", "Python, between operations"]
    on_gpu = [
        operation("aten::mm", 10, 8, there=500),
        operation("gemm", 0, 8, "CUDA", 500),
        operation("aten::add", 90, 1),
    ]
    assert profiling.table(on_gpu, 1).splitlines()[1].split()[:2] == ["0.50", "100.0%"]


def test_a_few_steps_are_profiled(sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--profile", "2", "--data", sentences, "--out", tmp_path / "run"]
    assert bitnet("train", *TINY, *argv) == 0
    shown = (tmp_path / "run" / "profile.txt").read_text().splitlines()
    assert shown[0].split() == ["ms", "a", "step", "share", "calls", "operation"] and len(shown) == 16
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("aten::embedding") in (2, 3)  # an evaluation is not among them
    assert {name for name in names if name.startswith("Profiler")} == {"ProfilerStep#11", "ProfilerStep#12"}
    assert bitnet("train", "--resume", "--steps", "21", "--out", tmp_path / "run") == 0  # it keeps --profile, and ends
    short = tmp_path / "short"
    capsys.readouterr()
    assert bitnet("train", *TINY[:-2], "--steps", "12", "--profile", "2", "--data", sentences, "--out", short) == 1
    assert "it takes 13, and the run has 12 left; make it longer" in capsys.readouterr().err
    assert not short.exists()
    argv = ["--minutes", "0.001", "--profile", "2", "--data", sentences, "--out", short]
    assert bitnet("train", *TINY[:-2], *argv) == 0
    assert "no trace.json: it begins after 11 steps, and there were " in capsys.readouterr().err
    assert not (short / "trace.json").exists()


def test_emulated_bf16_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU before Ampere emulates it, slower than fp32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert hardware.choose_precision("auto", "cuda") == "fp32" and hardware.choose_precision("bf16", "cuda") == "bf16"


def test_passes_of_two_shapes_are_not_replayed() -> None:
    """A graph is recorded for one shape: with two in a step, each would be recorded again in every step."""
    settings, config = Settings(device="cuda", compile=True, batch=16), PRESETS["tiny"]
    found = {n: replay.possible(settings, config, n, processes=1) for n in (8, 16, 24, 32)}
    assert found == {8: True, 16: True, 24: False, 32: True}
