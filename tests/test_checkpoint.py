"""Checkpoints that disks, copies and full volumes have damaged, and what a run goes on from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnet import checkpoint
from training import TINY, bitnet, bits, edited, killed_before, losses

torch.set_num_threads(1)


# ---- whole or not at all ----


def test_saving_is_all_or_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint.load_model(finished)
    optimizer = torch.optim.AdamW(model.parameters())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for step, name in ((1, "save_file"), (2, "flush")):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, full)
            with pytest.raises(OSError, match="No space left"):
                checkpoint.save(tmp_path, model, "{}", optimizer, {"step": step})
    assert not list(tmp_path.iterdir())
    assert checkpoint.save(tmp_path, model, "{}", optimizer, {"step": 3}).name == "step-000003"
    assert checkpoint.find(tmp_path).name == "step-000003"


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
        checkpoint.load_model(copy)


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
    assert bitnet("eval", str(tmp_path)) == 1
    assert "has no model.safetensors and no step-* folder" in capsys.readouterr().err
