"""benchmarks/ngrams.py against its definition, and as a distribution; what benchmarks/own_code.py makes of a model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime_models import SMALL, small_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
ngrams, own_code = importlib.import_module("ngrams"), importlib.import_module("own_code")


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_of_what_may_follow_add_up_to_one(order: int) -> None:
    draw = np.random.default_rng(order)
    model = ngrams.NGrams(draw.integers(0, 6, 400) * draw.integers(0, 2, 400), order, 7)
    for context in draw.integers(0, 7, (20, 4)):  # 6 never occurs: some contexts are unseen
        following = [model.probabilities(np.append(context, word))[-1] for word in range(7)]
        assert min(following) > 0 and sum(following) == pytest.approx(1)


def test_two_ids_worked_by_hand() -> None:
    """0 1 0 1 0 0: 01 and 10 twice, 00 once; D = 1/(1 + 2·2) = 0.2 for pairs. After 0: 01 twice, 00 once, of 3.

    For single ids counts what stands before: 0 behind 0 and 1, 1 behind 0: 2 and 1 of 3, D = 1/(1 + 2·1) = 1/3.
    """
    model = ngrams.NGrams(np.array([0, 1, 0, 1, 0, 0]), 2, 2)
    of_one = (1 - 1 / 3) / 3 + (1 / 3 * 2 / 3) / 2
    assert model.probabilities(np.array([0, 1])) == pytest.approx([1 - of_one, (2 - 0.2) / 3 + 0.2 * 2 / 3 * of_one])


def test_a_long_context_tells_what_a_short_one_cannot() -> None:
    ids = np.tile([0, 0, 0, 1], 500)
    bits = [-np.log2(ngrams.NGrams(ids, order, 2).probabilities(ids)[8:]).mean() for order in (1, 3, 4)]
    assert bits[1] > 0.3 and bits[2] < 0.01


def test_a_model_beside_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a text that repeats the training text, n-grams predict best. `bitnet eval` is replaced by a stand-in."""
    for name, lines in (("code", 60), ("held-out", 30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("x = [number for number in range(10)]\n" * lines)
    monkeypatch.setattr(own_code, "BEFORE", 40)
    monkeypatch.setattr(own_code.training_runs, "bitnet", lambda *words: {"bits_per_byte": 7.5, "of": words})
    model = small_model(tmp_path, config=SMALL.replace(max_context=128))
    assert own_code.main(["--text", str(tmp_path), "--models", f"mine={model}", "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "own_code.json").read_text())
    rows = {name: row["bits_per_byte"] for name, row in results["rows"].items()}
    assert rows["mine"] == 7.5 and rows["5-grams of bytes"] < 0.5 and rows["5-grams of tokens"] < 0.5
    assert len(results["completions"]) == own_code.PLACES
    assert all(len(place["prompt"]) == 40 and place["stood"][0] == "\n" for place in results["completions"])
    assert "| mine |" in (tmp_path / "out" / "own_code.md").read_text()
