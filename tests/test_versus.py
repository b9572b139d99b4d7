"""benchmarks/versus_trainers.py with stand-ins for the other trainers, and the script for them compared with
transformers itself."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
versus, theirs = importlib.import_module("versus_trainers"), importlib.import_module("their_trainers")

SHAPE = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip
STAND_IN = """
import json, sys
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
said = {"seconds": [0.5, 0.1, 0.2], "linears": {}}
if given["--validation"]:
    said["loss"] = 5 + abs(float(given["--lr"]) - 0.003)
print("noise")
print(json.dumps(said))
"""


@pytest.mark.usefixtures("quick_gc")  # their trainer collects many times
@pytest.mark.parametrize(
    ("arm", "linears"), [("plain", "Linear of Tensor"), ("transformers", "AutoBitLinear of Tensor")]
)
def test_their_trainer(
    arm: str, linears: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It quantizes all but the head, learns a text that repeats, and every step has a time."""
    np.tile(np.arange(20, 30, dtype=np.uint16), 200).tofile(tmp_path / "ids")
    words = [arm, "--model", json.dumps(SHAPE), "--train", tmp_path / "ids", "--validation", tmp_path / "ids"]
    words += ["--context", 16, "--batch", 8, "--steps", 40, "--lr", 0.01]
    monkeypatch.setattr(sys, "argv", ["their_trainers.py", *map(str, words)])
    with torch.compiler.set_stance("force_eager"):
        theirs.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["linears"] == {linears: 14} and len(said["seconds"]) == 39 and min(said["seconds"]) > 0
    assert said["loss"] < 1  # log 60 is 4.1, log 10 2.3


def test_the_best_of_their_rates_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "python"
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/stand_in.py" "$@"\n')
    program.chmod(0o755)
    options: dict[str, Any] = {"validation": "ids"}
    trainers = versus.Theirs(program, tmp_path, versus.SIZES["quick"], 1, options)
    runs = {f"plain-lr{rate:g}": ("plain", rate) for rate in versus.RATES}
    found = {rate: trainers.all(runs)[f"plain-lr{rate:g}"]["loss"] for rate in versus.RATES}
    assert versus.best(found) == {"lr": 3e-3, "loss": 5.0, "tried": {"0.001": 5.002, "0.003": 5.0, "0.009": 5.006}}
    assert capsys.readouterr().err.count("nats/token") == 3  # once each: the results are kept
    program.write_text("#!/bin/sh\necho wrong >&2; exit 3")
    assert trainers.all(runs)["plain-lr0.003"]["loss"] == 5.0
    with pytest.raises(RuntimeError, match="plain failed: wrong"):
        trainers.train("plain", lr=1)


def test_the_page() -> None:
    rows = {arm: {"loss": 4.0, "lr": 0.01, "tried": {"0.01": 4.0}} for arm in [*versus.OURS, *versus.THEIRS]}
    results = {"rows": rows, "speeds": {"bitnet": 12345.0}, "parameters": 1000, "tokens": 2048, "threads": 2}
    page = versus.markdown(results)
    assert "| bitnet train | 4.000 | 0.01 | 0.01: 4.000 | 12,345 |" in page
    assert page.count("not measured") == len(rows) - 1
