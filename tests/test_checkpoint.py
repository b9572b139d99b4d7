"""Checkpoints that disks, copies and full volumes have damaged, and what a run goes on from."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnet.train import checkpoint, runlog, saving
from bitnet.train.checkpoint import Checkpoint, CheckpointError
from training import TINY, bitnet, bits, edited, losses

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def finished(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, but for the checkpoint from before its learning rate fell."""
    run = tmp_path_factory.mktemp("run") / "whole"
    return Path(shutil.copytree(finished, run, ignore=shutil.ignore_patterns("step-000014")))


# ---- whole or not at all ----


def test_saving_is_all_or_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Checkpoint.open(finished).model
    optimizer = torch.optim.AdamW(model.parameters())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for step, name in ((1, "save_file"), (2, "flush")):
        with monkeypatch.context() as patch:
            patch.setattr(saving, name, full)
            with pytest.raises(OSError, match="No space left"):
                saving.write(tmp_path, saving.Snapshot.of(model, "{}", optimizer, {"step": step}))
    assert not list(tmp_path.iterdir())
    assert saving.write(tmp_path, saving.Snapshot.of(model, "{}", optimizer, {"step": 3})).name == "step-000003"
    assert Checkpoint.open(tmp_path).folder.name == "step-000003"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_of_a_checkpoint_are_as_readable_as_the_umask_says(finished: Path, tmp_path: Path, umask: int) -> None:
    model = Checkpoint.open(finished).model
    before = os.umask(umask)
    try:
        snapshot = saving.Snapshot.of(model, "{}", torch.optim.AdamW(model.parameters()), {"step": 1})
        written = saving.write(tmp_path, snapshot)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in written.iterdir()} == {0o666 & ~umask}


def _without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: _without(t, "layers.1.q.weight"), "tensor layers.1.q.weight is missing"),
        (lambda t: t | {"extra": torch.ones(1)}, "tensor extra is there"),
        (lambda t: t | {"final_norm.weight": torch.ones(7)}, "final_norm.weight is 7, config.json calls for 32"),
        (lambda t: t | {"final_norm.weight": torch.full((32,), torch.nan)}, "final_norm.weight holds NaN"),
    ],
)
def test_strict_loading(change: Any, message: str, finished: Path, tmp_path: Path) -> None:
    copy = edited(Path(shutil.copytree(finished / "step-000020", tmp_path / "copy")))
    save_file(change(load_file(copy / "model.safetensors")), copy / "model.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match=message):
        assert Checkpoint.open(copy).model


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "state.json"])
def test_damaged_files(name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished / "step-000020", copy)
    os.truncate(copy / name, (copy / name).stat().st_size // 2)
    assert bitnet("eval", str(copy)) == 1
    assert f"copy is damaged: {name} has" in capsys.readouterr().err
    edited(copy)
    assert bitnet("eval", str(copy)) == 1
    assert f"{name} is damaged" in capsys.readouterr().err
    (copy / name).unlink()
    assert bitnet("eval", str(copy)) == 1
    assert "model.safetensors" in (error := capsys.readouterr().err) or f"{name} is missing" in error


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet("eval", str(tmp_path / "none")) == 1
    assert "does not exist, expected a checkpoint or a run folder" in capsys.readouterr().err
    (tmp_path / "run/step-000040").mkdir(parents=True)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"step-000020 does not exist, expected one of step-000040; --k"
    ):
        Checkpoint.open(tmp_path / "run/step-000020")
    assert bitnet("eval", str(tmp_path)) == 1
    assert "has no model.safetensors and no step-* folder" in capsys.readouterr().err
    (tmp_path / "m.bitnet").write_bytes(b"\x89BITNET\n and more")
    with pytest.raises(checkpoint.CheckpointError, match=r"m\.bitnet is a file, expected a checkpoint or a run folder"):
        Checkpoint.open(tmp_path / "m.bitnet")
    assert bitnet("train", "--vision", str(tmp_path / "m.bitnet"), "--out", str(tmp_path / "run")) == 1
    assert "name the run folder or checkpoint that it was exported from" in capsys.readouterr().err


# ---- damage ----


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a changed bit": (lambda c: _flip(c / "model.safetensors"), "model.safetensors holds other bytes than were saved"),
    "a cut file": (lambda c: os.truncate(c / "state.json", 100), "state.json has 100 bytes, manifest.json says"),
    "an empty file": (lambda c: os.truncate(c / "optimizer.safetensors", 0), "optimizer.safetensors has 0 bytes"),
    "a missing file": (lambda c: (c / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "a cut manifest": (lambda c: os.truncate(c / "manifest.json", 30), "manifest.json is damaged"),
    "an older version's": (
        lambda c: os.truncate(edited(c) / "optimizer.safetensors", 40), "optimizer.safetensors is damaged or not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_whole_checkpoint_counts(
    kind: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (damage, message) = Path(shutil.copytree(finished, tmp_path / "run")), DAMAGE[kind]
    damage(run / "step-000020")
    assert Checkpoint.open(run).folder == run / "step-000010"
    said = capsys.readouterr().err
    assert said.startswith(f"{run}/step-000020 is damaged: {message}") and said.endswith("; taking step-000010\n")
    assert said.count("\n") == 1
    with pytest.raises(checkpoint.CheckpointError, match="step-000020 is damaged"):  # as it was named explicitly
        Checkpoint.open(run / "step-000020")
    damage(run / "step-000010")
    shutil.rmtree(run / "step-000000", ignore_errors=True)
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint is whole: .*step-000020.*; .*step-000010"):
        Checkpoint.open(run)


def test_eval_export_and_resume_take_it(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    _flip(run / "step-000020" / "optimizer.safetensors")
    said = "step-000020 is damaged: optimizer.safetensors holds other bytes than were saved (SHA-256); taking step-0000"
    assert bitnet("eval", run, "--tokens", "64") == 0
    assert capsys.readouterr().err.count(said) == 1
    assert bitnet("export", run, tmp_path / "m.bitnet", "--tokens", "64") == 0
    assert capsys.readouterr().err.count(said) == 1
    assert bitnet("train", "--resume", "--out", run, "--steps", "5") == 1  # refused, and nothing is lost
    assert capsys.readouterr().err.count(said) == 1
    assert (run / "step-000020.damaged").is_dir()
    assert bitnet("train", "--resume", "--out", run, "--keep", "1") == 0
    assert [p.name for p in checkpoint.all_of(run)] == ["step-000014", "step-000020"]
    assert (run / "step-000020.damaged").is_dir()  # only the user may remove it
    assert bits(run / "step-000020") == bits(finished / "step-000020") and losses(run) == losses(finished)
    for command in (("eval",), ("export",), ("finetune", "--data", "x", "--out", tmp_path / "more")):
        more = [tmp_path / "n.bitnet"] if command[0] == "export" else []
        assert bitnet(command[0], run / "step-000020.damaged", *more, *command[1:]) == 1
        assert "step-000020.damaged is damaged: optimizer.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "read", "stat"])
def test_what_cannot_be_read_now_is_not_damaged(
    number: int, call: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends, and goes on from the same checkpoint when the file can be read again."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    file, original = run / "step-000020" / "model.safetensors", getattr(Path, {"read": "open"}.get(call, call))

    class Gone(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, _: Any) -> int:
            raise OSError(number, os.strerror(number))

    def failing(self: Path, *args: Any, **options: Any) -> Any:
        if os.path.realpath(self) != os.path.realpath(file):
            return original(self, *args, **options)
        if call == "read":
            return Gone()
        raise OSError(number, os.strerror(number), str(self))

    before = sorted(path for path in run.rglob("*") if path.name != "lock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open" if call == "read" else call, failing)
        for command in (["train", "--resume", "--out", run, "--steps", "21"], ["eval", run, "--tokens", "64"]):
            assert bitnet(*command) == 1
            assert capsys.readouterr().err == f"bitnet: error: {os.strerror(number)}: {file}\n"
    assert sorted(path for path in run.rglob("*") if path.name != "lock") == before
    assert Checkpoint.open(run).folder == file.parent


def test_what_was_set_aside_stays(tmp_path: Path) -> None:
    for content in ("first", "second", "third"):
        for name in ("step-000010", "step-000020"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "step-000020" / "it").write_text(content)
        saving.set_aside(tmp_path, tmp_path / "step-000010")
    kept = {path.parent.name: path.read_text() for path in tmp_path.glob("*/it")}
    assert kept == {"step-000020.damaged": "first", "step-000020.damaged2": "second", "step-000020.damaged3": "third"}
    assert checkpoint.all_of(tmp_path) == [tmp_path / "step-000010"]


@pytest.mark.parametrize("kept", [0, 5])
def test_moments_are_all_there_or_none(
    kept: int, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    file = edited(run / "step-000020") / "optimizer.safetensors"
    save_file(dict(sorted(load_file(file).items())[:kept]), file)
    assert bitnet("train", "--resume", "--out", run, "--steps", "22") == 1
    assert "optimizer.safetensors lacks " in capsys.readouterr().err


# ---- the same step again; a full disk ----


def test_a_step_is_replaced_only_by_a_whole_one(finished: Path, tmp_path: Path) -> None:
    """Stopped before each rename by an error, or by a kill, which nothing is done after."""
    model = Checkpoint.open(finished).model
    optimizer = torch.optim.AdamW(model.parameters())
    rename, seen = Path.rename, []

    def save(text: str) -> None:
        saving.write(tmp_path, saving.Snapshot.of(model, text, optimizer, {"step": 1}))

    save("old")
    for stop_at in (1, 2):
        for killed in (False, True):

            def stopping(self: Path, to: Path, stop_at: int = stop_at) -> Path:
                seen.append(self.name)
                if len(seen) == stop_at:
                    raise OSError(28, "No space left on device")
                return rename(self, to)

            seen.clear()
            with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space"):
                patch.setattr(Path, "rename", stopping)
                save("new")
            assert len(seen) >= stop_at
            if killed:
                (tmp_path / "step-000001").rename(tmp_path / ".step-000001.replaced")
                (tmp_path / ".step-000001.partial").mkdir()
            saving.recover(tmp_path)
            assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
            assert (Checkpoint.open(tmp_path).folder / "tokenizer.json").read_text() == "old"
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".step-000001.replaced")
    save("new")
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    (tmp_path / ".step-000001.replaced").mkdir()  # killed when the new one was in place
    (tmp_path / ".step-000001.replaced" / "tokenizer.json").write_text("old")
    saving.recover(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert (Checkpoint.open(tmp_path).folder / "tokenizer.json").read_text() == "new"


def test_a_full_disk(
    sentences: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the checkpoint of step 20, and then, after a resume, in the log at step 17."""
    run, save, write = tmp_path / "run", saving.write, runlog.Log.write

    def full(folder: Path, snapshot: saving.Snapshot) -> Path:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if snapshot.step == 20:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
        try:
            return save(folder, snapshot)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def full_log(log: runlog.Log, record: dict[str, Any]) -> None:
        if record["step"] == 17:
            raise OSError(28, "No space left on device")
        write(log, record)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", full)
        assert bitnet("train", *TINY, "--data", sentences, "--out", run) == 1
    with monkeypatch.context() as patch:
        patch.setattr(runlog.Log, "write", full_log)
        assert bitnet("train", "--resume", "--out", run) == 1
    first, second = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert f"{run} cannot be written at step 20: " in first and "File too large" in first
    assert f"{run} cannot be written at step 17: No space left on device" in second
    for line in (first, second):
        assert f"; {run}/step-000014 is the last good checkpoint, from which --resume continues" in line
    assert not list(run.glob(".*")) and bits(run / "step-000010") == bits(finished / "step-000010")
    assert bitnet("train", "--resume", "--out", run) == 0
    assert bits(run / "step-000020") == bits(finished / "step-000020") and losses(run) == losses(finished)


def test_a_branch_that_finds_the_disk_full_is_not_told_to_resume(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write", full)
    assert bitnet("train", "--from", finished, "--out", tmp_path / "branch", "--steps", "30") == 1
    assert capsys.readouterr().err.endswith("No space left on device; no checkpoint was saved\n")
    assert not (tmp_path / "branch").exists()


def test_what_is_no_state_of_a_run_is_refused_by_name(tmp_path: Path) -> None:
    """A folder without a run may be exported; to resume, or to measure as the run did, its state is needed."""
    folder = tmp_path / "step-000001"
    folder.mkdir()
    for text, name in (("{}", "model"), ('{"model": {}, "settings": 5}', "settings")):
        (folder / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"state.json has no '{name}', expected what `bitnet train` writes"):
            _ = Checkpoint(folder).state_of_run
    (folder / "config.json").write_text('{"vocab_size": "5"}')
    with pytest.raises(CheckpointError, match=r"config\.json: model option 'dim' is missing"):
        _ = Checkpoint(folder).config
