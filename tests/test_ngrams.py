"""benchmarks/ngrams.py against its definition, and as a distribution."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
ngrams = importlib.import_module("ngrams")


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
