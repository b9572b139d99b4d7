"""benchmarks/copying.py: what it counts as copying, and the checkpoints of a run."""

from __future__ import annotations

import importlib
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitnet_cli

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
copying = importlib.import_module("copying")
VOCABULARY = 50


class Copies:
    """Sure by `sharpness` nats that what followed a token the last time follows it again."""

    def __init__(self, sharpness: float) -> None:
        self.sharpness = sharpness

    def evaluating(self) -> Any:
        return nullcontext()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*rows.shape, VOCABULARY)
        for row, of_row in zip(rows.tolist(), logits, strict=True):
            followed: dict[int, int] = {}
            for i, token in enumerate(row):
                if token in followed:
                    of_row[i, followed[token]] = self.sharpness
                if i + 1 < len(row):
                    followed[token] = row[i + 1]
        return logits


def test_only_what_is_said_again_is_copied() -> None:
    """No id occurs twice in a piece: the first occurrence is a guess, the second as certain as the model is."""
    ids = np.tile(np.arange(VOCABULARY), 20).astype(np.uint16)
    rows = copying.twice(ids, 10, 40)
    assert rows.shape == (40, 21) and (rows[:, 1:11] == rows[:, 11:]).all() and (rows[:, 0] == ids[0]).all()
    of_none = copying.losses(Copies(0.0), rows)
    assert of_none == pytest.approx([math.log(VOCABULARY)] * 2)
    rows = rows[rows[:, 1] != 0]  # a piece that begins with the start token has it twice
    first, second = copying.losses(Copies(5.0), rows)
    assert first == pytest.approx(math.log(VOCABULARY))
    assert second == pytest.approx(math.log(math.exp(5) + VOCABULARY - 1) - 5)


def test_the_checkpoints_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each checkpoint that was kept; one that cannot be measured is one error."""
    text = "the red cat sees a dog and a dog sees the house " * 200
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name + text, encoding="utf-8")
    run = tmp_path / "run"
    model = ["vocab_size=300", "dim=32", "n_layers=1", "n_heads=2", "n_kv_heads=1", "head_dim=16", "ffn_dim=48"]
    sets = [word for value in [*model, "max_context=32"] for word in ("--set", value)]
    often = ["--steps", "4", "--save-every", "2", "--keep", "9", "--batch", "2", "--threads", "1"]
    assert bitnet_cli.main(["train", "--data", str(tmp_path), "--out", str(run), *sets, *often]) == 0
    capsys.readouterr()
    assert copying.main([str(run), "--length", "16", "--texts", "8", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"run \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", printed)
    assert [int(tokens) for tokens, *_ in rows] == [0, 128, 192, 256]  # 192: before the learning rate falls
    assert set(printed.splitlines()[2:]) < set((tmp_path / "copying.md").read_text().splitlines())
    assert (tmp_path / "copying.png").is_file()
    assert all(float(nats) == pytest.approx(math.log(300), abs=1.5) for _, *both in rows for nats in both)
    for more, fault in (
        (["--length", "17"], "takes 32 tokens, expected 34; lower --length"),
        (["--texts", "0"], "1 or"),
    ):
        with pytest.raises(SystemExit):
            copying.main([str(run), *more])
        assert fault in capsys.readouterr().err
    with pytest.raises(SystemExit):
        copying.main([str(tmp_path / "nothing")])
    assert "nothing does not exist" in capsys.readouterr().err


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="has 9 tokens, expected at least 10"):
        copying.twice(np.arange(9), 10, 1)
