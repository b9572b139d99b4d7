"""Views: what is masked, how often, that it is the same each time, and where prefixes end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitnet.data.dataset import IGNORED, Batches, Tokens
from bitnet.data.views import Masking, Prefixing, ViewedTokens

MASK, WORDS = 300, 300
TEXT = Tokens(np.random.default_rng(0).integers(0, WORDS, 40_000).astype(np.uint16), 90_000, "digest")


def test_shares() -> None:
    """Of the 15 % that count 80 are masked, 10 replaced and 10 kept, in 100: within 4 standard deviations."""
    rows = TEXT.window(range(100), 384)[0]
    inputs, targets = Masking(MASK, WORDS, 1)(rows, rows, range(100))
    counts = targets != IGNORED
    assert targets[counts].equal(rows[counts]) and inputs[~counts].equal(rows[~counts])
    n, m = rows.numel(), int(counts.sum())
    assert m == pytest.approx(0.15 * n, abs=4 * (n * 0.15 * 0.85) ** 0.5)
    hidden, kept = (inputs[counts] == MASK).sum().item(), (inputs[counts] == rows[counts]).sum().item()
    assert hidden == pytest.approx(0.8 * m, abs=4 * (m * 0.8 * 0.2) ** 0.5)
    # A token drawn at random is now and then the one that was there.
    kept_share = 0.1 + 0.1 / WORDS
    assert kept == pytest.approx(kept_share * m, abs=4 * (m * kept_share * (1 - kept_share)) ** 0.5)
    assert int(inputs.max()) <= MASK


def test_a_sequence_is_a_function_of_its_number_and_the_seed() -> None:
    batches = Batches(TEXT, 4, 64, 5, Masking(MASK, WORDS, 5))
    whole, parts = batches.sequences(0, 8), [batches.sequences(i, i + 1) for i in range(8)]
    for i, tensor in enumerate(whole):
        assert tensor.equal(torch.cat([part[i] for part in parts]))
    other = Batches(TEXT, 4, 64, 5, Masking(MASK, WORDS, 6)).sequences(0, 8)
    assert not whole[0].equal(other[0])
    held_out = ViewedTokens(TEXT, Masking(MASK, WORDS, 0))
    assert held_out.window([3], 64)[0].equal(held_out.window([3], 64)[0])
    assert held_out.windows(64) == TEXT.windows(64) and held_out.n_tokens == TEXT.n_tokens


def test_every_row_has_a_target() -> None:
    for number in range(200):
        row = torch.zeros(1, 3, dtype=torch.long)
        _, targets = Masking(MASK, WORDS, 0)(row, row, [number])
        assert (targets != IGNORED).any()


def test_a_prefix_is_not_learnt() -> None:
    """Its last token predicts the next one; lengths go from 1 to all but one."""
    view = Prefixing(3)
    inputs, following = TEXT.window(range(300), 16)
    seen, targets, documents, prefix = view(inputs, following, range(300))
    assert seen.equal(inputs) and not documents.any() and (prefix.min(), prefix.max()) == (1, 15)
    for row, length in enumerate(prefix.tolist()):
        assert (targets[row, : length - 1] == IGNORED).all()
        assert targets[row, length - 1 :].equal(following[row, length - 1 :])
    again = [view(inputs[i : i + 1], following[i : i + 1], [i])[3] for i in range(300)]
    assert prefix.equal(torch.cat(again)) and not prefix.equal(Prefixing(4)(inputs, following, range(300))[3])
