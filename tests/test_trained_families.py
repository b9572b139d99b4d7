"""Trained models of every family: the packed file has the loss of its checkpoint, within 1e-4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.data import dataset
from bitnet.data.views import ViewedTokens
from bitnet.evaluate.loss import chosen_windows, log_probabilities
from bitnet.settings import Settings
from bitnet.setup import measured
from bitnet.train.checkpoint import Checkpoint
from bitnet_runtime import Model
from training import TINY, bitnet

TWO = ("--set", "n_kv_heads=2")  # those that have as many as heads
ORIGINAL = (*TWO, "--set", "embedding_scale=5.66", "--lr", "0.01")
DECODERS = {
    "experts": ("--preset", "thinker-moe", *TINY, *TWO, "--set", "n_experts=4"),
    "transformer-2017": ("--preset", "transformer-2017", *TINY, *ORIGINAL),
    "mini-gpt-learned": ("--preset", "mini-gpt-learned", *TINY, *TWO),
}
OTHERS = {
    "masked": (*TINY, "--set", "mask=bidirectional", "--objective", "mlm"),
    "transformer-2017-encoder": ("--preset", "transformer-2017-encoder", *TINY, *ORIGINAL, "--objective", "mlm"),
    "prefix": (*TINY, "--set", "mask=prefix"),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(options: tuple[str, ...], text: str, folder: Path) -> tuple[Path, Path]:
    run, packed = folder / "run", folder / "m.bitnet"
    assert bitnet("train", *options, "--data", text, "--out", run) == 0
    assert bitnet("export", run, packed, "--tokens", "320") == 0
    return run, packed


def figures(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert bitnet("eval", *argv, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("family", DECODERS)
def test_eval_of_both(family: str, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, packed = trained(DECODERS[family], sentences, tmp_path)
    asked = ("--data", sentences, "--tokens", "4000")
    before, after = figures(capsys, run, *asked), figures(capsys, packed, *asked)
    assert before["tokens"] == after["tokens"] > 3900
    assert before["nats_per_token"] == pytest.approx(after["nats_per_token"], abs=1e-4, rel=0)


@pytest.mark.parametrize("family", OTHERS)
def test_eval_and_the_engine(family: str, sentences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bitnet eval` of a packed file hides nothing and knows no prefix, so the engine is asked here."""
    run, packed = trained(OTHERS[family], sentences, tmp_path)
    asked = ("--data", sentences, "--tokens", "4000")
    before = figures(capsys, run, *asked)
    checkpoint, total, counted = Checkpoint.open(run), 0.0, 0
    context, settings = checkpoint.config.max_context, Settings.from_dict(checkpoint.state_of_run["settings"])
    text = measured.of_checkpoint(checkpoint, settings, [sentences], context, tmp_path, lambda _: None)
    assert isinstance(text, ViewedTokens)
    with Model.load(packed, threads=1, kv_type="f32") as model, model.session() as session:
        for i in chosen_windows(text.windows(context), 4000 // context):
            (inputs,), (targets,), *told = text.window([i], context)
            session.reset()
            if family == "prefix":
                cut = int(told[1])
                rows = [session.append_prefix(inputs[:cut].tolist(), logits="all")]
                rows += [session.append(inputs[cut:].tolist(), "all")] if cut < context else []
            else:
                rows = [session.append(inputs.tolist(), "all")]
            counts = (targets != dataset.IGNORED).numpy()
            total -= log_probabilities(np.concatenate(rows)[counts], targets.numpy()[counts].tolist()).sum()
            counted += int(counts.sum())
    assert before["tokens"] == counted > 500
    assert before["nats_per_token"] == pytest.approx(total / counted, abs=1e-4, rel=0)
