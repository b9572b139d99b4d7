"""Mixtures of experts and dropout in training: the same bits after an interruption, the balance, the log."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from bitnet.report.experts import of_experts
from bitnet.train import telemetry
from bitnet.train.checkpoint import Checkpoint
from training import TINY, bitnet, bits, killed_before, losses

torch.set_num_threads(1)

EXPERTS = ("--set", "n_experts=4", "--set", "experts_per_token=2", "--set", "ffn_dim=24")
MODEL = (*TINY, *EXPERTS, "--set", "dropout=0.2", "--accumulate", "2")


@pytest.fixture(scope="module")
def run(sentences: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "run"
    assert bitnet("train", *MODEL, "--balance-loss", "0.05", "--data", sentences, "--out", folder) == 0
    return folder


@pytest.mark.parametrize("more", [(), ("--recompute",)], ids=["", "recompute"])
def test_interrupted_and_resumed_is_as_uninterrupted(
    run: Path, sentences: str, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Also with dropout: which values are dropped is a function of seed and sequence, in the recomputed pass too."""
    options = (*MODEL, "--balance-loss", "0.05", *more)
    killed_before(13, "train", *options, "--data", sentences, "--out", tmp_path / "run")
    assert bitnet("train", "--resume", "--out", tmp_path / "run") == 0
    assert bits(tmp_path / "run" / "step-000020") == bits(run / "step-000020")
    assert losses(tmp_path / "run") == losses(run)


def test_dropout_drops_something_else_in_every_pass(run: Path, sentences: str, tmp_path: Path) -> None:
    """Two passes a step, each with a seed of its own; the first seed of a run is that of its weights."""
    drawn: list[int] = []
    seed = torch.manual_seed

    def watch(number: int) -> torch.Generator:
        drawn.append(number)
        return seed(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", watch)
        assert bitnet("train", *MODEL, "--steps", "3", "--data", sentences, "--out", tmp_path / "run") == 0
    assert len(drawn) == 1 + 3 * 2 and len(set(drawn[1:])) == 6


@pytest.mark.usefixtures("no_figures")  # the PNG has the same
def test_records(run: Path, sentences: str, tmp_path: Path) -> None:
    """Load and balance are in the log and on the page, and the loss is what is said of its parts."""
    records = losses(run)
    steps = [record for record in records if "loss" in record]
    for record in steps:
        assert record["loss"] == pytest.approx(record["cross_entropy"] + 0.05 * record["balance"])
        assert 0.9 < record["balance"] <= 4 and record["weights"] == {"cross_entropy": 1.0, "balance": 0.05}
    tables = [record["experts"] for record in records if "experts" in record]
    assert len(tables) == 4 and all(sum(layer) == pytest.approx(1, abs=1e-4) for t in tables for layer in t)
    tokens, loads = of_experts(records)
    assert loads.shape == (4, 2, 4) and len(tokens) == 4
    assert np.allclose(loads.mean(-1), 1, atol=1e-3)
    assert bitnet("report", run, "--tokens", "5", "--out", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<figure>") == 13
    assert bitnet("report", run, "--tokens", "0", "--out", tmp_path / "page.png") == 0


def test_damaged_records_of_experts_are_left_out() -> None:
    whole = {"tokens": 5, "experts": [[0.5, 0.5]]}
    others = ["x", [], [[]], [[0.5], [0.1, 0.2]], [[None, 1.0]], [0.5], {"a": 1}]
    records = [{"tokens": 1, "experts": value} for value in others]
    assert of_experts(records)[1].size == 0
    tokens, loads = of_experts([*records, whole])
    assert tokens.tolist() == [5] and loads.tolist() == [[[1.0, 1.0]]]


def test_the_balance_loss_balances(sentences: str, tmp_path: Path) -> None:
    """Without quantizers, starting from a router that prefers one expert."""
    found = {}
    for weight in ("0", "1"):
        out = tmp_path / weight
        options = (*TINY, *EXPERTS, "--quantize-warmup", "0.9", "--balance-loss", weight, "--steps", "30")
        assert bitnet("train", *options, "--data", sentences, "--out", out) == 0
        found[weight] = statistics.mean(r["balance"] for r in losses(out)[-10:] if "balance" in r)
    assert found["1"] < found["0"] and found["1"] < 1.05


def test_every_expert_counts_as_ternary(run: Path) -> None:
    model = Checkpoint.open(run).model
    layers = [layer for block in model.blocks for role in "qkvo" for _, layer in telemetry.layers_of(block, role)]
    ffn = [telemetry.layers_of(block, role) for block in model.blocks for role in ("gate", "up", "down")]
    pairs = list(itertools.chain.from_iterable(ffn))
    assert len(pairs) == 2 * 3 * 4
    assert model.config.ternary_weights == sum(p.weight.numel() for p in [*layers, *[layer for _, layer in pairs]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--balance-loss", "0.01"), "this model has no experts to balance; leave it out, or add --set n_experts=8"),
        (
            ("--set", "n_experts=4", "--set", "experts_per_token=1"),
            "no gradient reaches the router; add --set normalize_routing=no",
        ),
    ],
)
def test_refusals(options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet("train", *TINY, *options, "--out", tmp_path / "run") == 1
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_one_expert_a_token_learns_its_router(sentences: str, tmp_path: Path) -> None:
    options = ("--set", "n_experts=3", "--set", "experts_per_token=1", "--set", "normalize_routing=no", "--steps", "3")
    assert bitnet("train", *TINY, *options, "--data", sentences, "--out", tmp_path / "run") == 0
    first, last = (
        Checkpoint(tmp_path / "run" / name).tensor("layers.0.router.weight") for name in ("step-000000", "step-000003")
    )
    assert not first.equal(last)
