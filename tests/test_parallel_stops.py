"""Two processes of one run that are stopped by signals, or killed; and torchrun itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import bitnet_cli
from bitnet.model import parallel
from bitnet.setup import prepare
from bitnet.train import loop, runlog, saving
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.run import Run
from in_two_processes import TINY, Process, finish, free_port, run_pair, some_text, start


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return some_text(tmp_path_factory.mktemp("text"))


def steps_made(run: Path) -> int:
    file = run / "log.jsonl"
    return len(runlog.read(file)) if file.exists() else 0


def wait_for_steps(run: Path, n: int, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while steps_made(run) < n:
        assert alive() and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def endless(text: str, tmp_path: Path) -> Iterator[tuple[list[Process], Path]]:
    run = tmp_path / "run"
    argv = ["train", "--out", str(run), *TINY, "--data", text, "--steps", "1000000", "--save-every", "1000000"]
    pair = start(run, bitnet_cli.main, argv)
    try:
        wait_for_steps(run, 3, lambda: all(each.is_alive() for each in pair))
        yield pair, run
    finally:
        finish(pair)


def test_a_signal_to_one_process_stops_both(endless: tuple[list[Process], Path]) -> None:
    pair, run = endless
    assert pair[1].pid
    os.kill(pair[1].pid, signal.SIGTERM)
    assert finish(pair) == [143, 143]
    assert (run / ".errors").read_text().count("stopped and saved at step") == 1
    assert Checkpoint.open(run).state["step"] >= 3 and Checkpoint.open(run).model


def saving_slowly(argv: list[str]) -> int:
    """A run whose second process gets SIGTERM in its second step, and that takes a while to write what it saves."""
    write, update = saving.write, loop.update

    def slow(run: Path, snapshot: saving.Snapshot) -> Path:
        time.sleep(1 if snapshot.step else 0)
        return write(run, snapshot)

    def stopped(run: loop.Run) -> Any:
        if run.state["step"] == 1 and parallel.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(run)

    saving.write, loop.update = slow, stopped
    return bitnet_cli.main(argv)


def test_a_process_that_is_stopped_ends_after_all_is_saved(text: str, tmp_path: Path) -> None:
    """Its end makes torchrun send a signal to the first, which would end without a word."""
    run = tmp_path / "run"
    pair = start(run, saving_slowly, ["train", "--out", str(run), *TINY, "--data", text])
    pair[1].join(90)
    saved = (run / "step-000002").exists()
    assert finish(pair) == [143, 143] and saved


def test_ctrl_c_reaches_both_and_is_answered_once(endless: tuple[list[Process], Path]) -> None:
    pair, run = endless
    for each in pair:
        assert each.pid
        os.kill(each.pid, signal.SIGINT)
    assert finish(pair) == [130, 130]
    assert (run / ".errors").read_text().count("saving after this step") == 1


def test_a_process_that_is_stopped_needs_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first one writes it; another machine may not have it."""
    monkeypatch.setattr(parallel, "is_first", lambda: False)
    monkeypatch.setattr(loop, "loop", lambda *_: signal.SIGTERM)
    run = SimpleNamespace(state={"step": 1}, folder=tmp_path / "not here", open_log=runlog.Silent, now=dict)
    assert loop.carry_out(cast(Run, run), None) == loop.Outcome(signal.SIGTERM)


def test_a_process_that_is_killed_ends_the_others(endless: tuple[list[Process], Path]) -> None:
    pair, run = endless
    pair[1].kill()
    assert finish(pair) == [1, -signal.SIGKILL]
    errors = re.findall("bitnet: error: .*", (run / ".errors").read_text())
    assert errors == ["bitnet: error: another process of this run ended without an error; perhaps memory ran out"]


def stopped_early(argv: list[str]) -> int:
    """A run whose second process gets SIGTERM before its first step."""
    if os.environ["RANK"] == "1":
        prepare.check_options = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[assignment]
    return bitnet_cli.main(argv)


def test_a_signal_to_one_process_before_the_first_step(text: str, tmp_path: Path) -> None:
    codes, errors = run_pair(tmp_path / "run", *TINY, "--data", text, work=stopped_early)
    assert codes == [1, 143] and "Traceback" not in errors
    assert re.findall("bitnet: error: .*", errors) == [
        "bitnet: error: another process of this run was stopped by a signal"
    ]


def test_torchrun_and_sigterm(text: str, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    argv = [*TINY, "--data", text, "--out", str(run), "--steps", "1000000", "--parallel", "fsdp"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with (tmp_path / ".errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *torchrun, "-m", "bitnet", "train", *argv], stderr=errors, start_new_session=True
        )
        try:
            wait_for_steps(run, 3, lambda: process.poll() is None)
            process.terminate()
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path / ".errors").read_text()
    assert process.returncode != 0 and said.count("stopped and saved at step") == 1 and "bitnet: error" not in said
    step = Checkpoint.open(run).state["step"]
    assert step >= 3 and f"saved at step {step:,}" in said
