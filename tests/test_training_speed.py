"""What a ternary layer keeps for its backward pass, and that benchmarks/training_speed.py runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from bitnet.model.transformer import Transformer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
training_speed = importlib.import_module("training_speed")

torch.set_num_threads(1)


def test_saved_bytes_by_hand() -> None:
    linear = torch.nn.Linear(8, 4, bias=False)
    x = torch.randn(3, 8, requires_grad=True)
    parameters = list(linear.parameters())
    assert training_speed.saved_bytes(lambda: linear(x), parameters) == 3 * 8 * 4  # its input
    assert training_speed.saved_bytes(lambda: linear(x).square(), parameters) == 3 * 8 * 4 + 3 * 4 * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_ternary_layer_keeps_less_than_a_float_one(precision: str) -> None:
    args = training_speed.parsed(["--batch", "8", "--context", "64", "--device", "cpu"])
    configs = [training_speed.config_of(64, kind, args.context) for kind in ("ternary", "full precision")]
    ternary, full = (training_speed.block_bytes(config, args, precision) for config in configs)
    assert 0 < ternary < full


def test_recomputing_keeps_the_inputs_of_layers() -> None:
    model = Transformer(training_speed.config_of(64, "ternary", 64))
    tokens = torch.randint(0, 2048, (4, 64))
    kept = []
    for model.recompute in (False, True):
        kept.append(training_speed.saved_bytes(lambda: model.hidden(tokens), list(model.parameters())))
    inputs = 4 * 64 * 64 * 4
    assert 4 * inputs <= kept[1] < 8 * inputs < kept[0] / 4  # those of four layers, and of the last norm; tables


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training_speed.main(["--quick", "--precision", "fp32", "--device", "cpu", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "training_speed.json").read_text())
    (row,) = results["rows"]
    assert (row["width"], row["precision"], row["compiled"]) == (64, "fp32", False)
    speeds, times = row["tok_s"], row["seconds"]
    assert speeds["ternary"] == pytest.approx(2 * 32 / times["ternary"][0])
    assert row["cost"] == pytest.approx(speeds["full precision"] / speeds["ternary"])
    assert results["origin"]["command"].startswith("python benchmarks/training_speed.py --quick")
    assert f"{row['cost']:.2f} ×" in capsys.readouterr().out
    assert (tmp_path / "training_speed.png").read_bytes().startswith(b"\x89PNG")


def test_flops_by_hand() -> None:
    config = training_speed.config_of(128, "ternary", 64)
    q_and_o, k_and_v, ffn = 2 * 128 * 128, 2 * 128 * 64, 3 * 128 * config.ffn_dim
    assert training_speed.flops_per_token(config) == 6 * (4 * (q_and_o + k_and_v + ffn) + 128 * 2048)
