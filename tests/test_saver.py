"""Checkpoints are written while training continues: each has the state from when it was begun, one at a time, and no
failure is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from bitnet.setup import building
from bitnet.train import loop, memory, saver, saving
from bitnet.train.checkpoint import all_of
from training import TINY, bitnet, bits, losses


def slow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Checkpoints are written when a later step was made, or when nothing else is left to do. Returns what happened."""
    update, write, copied = loop.update, saving.write, saving.Snapshot.copied
    stepped = threading.Event()
    seen: dict[str, Any] = {"beside": 0, "copies": 0, "most": 0}

    def copy(snapshot: saving.Snapshot) -> saving.Snapshot:
        seen["copies"] += 1
        seen["most"] = max(seen["most"], seen["copies"])
        stepped.clear()
        return copied(snapshot)

    def late(folder: Path, snapshot: saving.Snapshot) -> Path:
        if threading.current_thread() is threading.main_thread():
            return write(folder, snapshot)
        seen["beside"] += snapshot.step < 20 and stepped.wait(60)  # after the last one no step comes
        try:
            return write(folder, snapshot)
        finally:
            seen["copies"] -= 1

    def step(run: loop.Run) -> Any:
        made = update(run)
        stepped.set()
        return made

    monkeypatch.setattr(saving.Snapshot, "copied", copy)
    monkeypatch.setattr(saving, "write", late)
    monkeypatch.setattr(loop, "update", step)
    return seen


def test_a_checkpoint_is_of_its_step(
    sentences: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    seen = slow(monkeypatch)
    assert bitnet("train", *TINY, "--save-every", "2", "--keep", "20", "--data", sentences, "--out", run) == 0
    assert seen["beside"] == 9 and seen["most"] == 1 and seen["copies"] == 0
    assert bits(run / "step-000010") == bits(finished / "step-000010")
    assert bits(run / "step-000020") == bits(finished / "step-000020") and losses(run) == losses(finished)
    assert [int(path.name[5:]) for path in all_of(run)] == list(range(0, 21, 2))  # 14, before the rate falls, too


def test_a_failure_comes_at_the_next_step(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, write, put, failed = tmp_path / "run", saving.write, saving._move, threading.Event()

    def full(work: Path, final: Path) -> None:
        if final.name == "step-000004":
            raise OSError(28, "No space left on device")
        put(work, final)

    def told(folder: Path, snapshot: saving.Snapshot) -> Path:
        try:
            return write(folder, snapshot)
        finally:
            if snapshot.step == 4:
                failed.set()

    update = loop.update

    def step(run: loop.Run) -> Any:
        if run.state["step"] == 4:
            assert failed.wait(60)
        return update(run)

    monkeypatch.setattr(saving, "_move", full)
    monkeypatch.setattr(saving, "write", told)
    monkeypatch.setattr(loop, "update", step)
    assert bitnet("train", *TINY, "--save-every", "2", "--data", sentences, "--out", run) == 1
    said = capsys.readouterr().err
    assert f"{run} cannot be written at step 4: No space left on device" in said
    assert f"; {run}/step-000002 is the last good checkpoint, from which --resume continues" in said
    assert max(record["step"] for record in losses(run)) <= 6 and not list(run.glob(".*"))


def test_a_run_that_stops_knows_what_was_being_written(
    sentences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, write, wait, waited = tmp_path / "run", saving.write, saver.Saver.wait, threading.Event()

    def late(folder: Path, snapshot: saving.Snapshot) -> Path:
        if snapshot.step == 4:
            waited.wait(10)
        return write(folder, snapshot)

    monkeypatch.setattr(saving, "write", late)
    monkeypatch.setattr(saver.Saver, "wait", lambda self: (waited.set(), wait(self)))
    monkeypatch.setattr(loop, "bad_step", lambda run, *_: "loss is nan" if run.state["step"] == 5 else "")
    assert bitnet("train", *TINY, "--save-every", "2", "--data", sentences, "--out", run) == 1
    assert f"; {run}/step-000004 is the last good checkpoint" in capsys.readouterr().err


def test_without_room_for_a_copy_the_steps_wait(
    sentences: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: saving.Snapshot) -> saving.Snapshot:
        raise AssertionError

    gb = 1 << 30
    stat = f"anon {2 * gb}\ninactive_file {gb}\nactive_file {gb}\n"
    for name, text in {"max": f"{4 * gb + 200}", "current": f"{6 * gb + 100}", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "GROUP", tmp_path)  # what only caches files is no use of memory
    assert memory.available() == (100, "the memory limit of the control group (container)")
    monkeypatch.setattr(building, "check_memory", lambda *_: None)
    monkeypatch.setattr(saving.Snapshot, "copied", refuse)
    assert bitnet("train", *TINY, "--data", sentences, "--out", tmp_path / "run") == 0
    assert bits(tmp_path / "run" / "step-000020") == bits(finished / "step-000020")
