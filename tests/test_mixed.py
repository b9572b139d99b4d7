"""The sequences of a mixture: each source has its share of them, in an order of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from bitnet.data.corpus import DataError
from bitnet.data.dataset import Batches, Tokens
from bitnet.data.mixed import Mixed, counts
from bitnet.data.mixture import Mixture, Source, Sources, Stage
from bitnet.train import mixtures


@examples(max_examples=200)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6).filter(any), st.integers(0, 400))
def test_counts_are_those_of_dealing_one_after_another(units: list[int], n: int) -> None:
    found = [0] * len(units)
    for _ in range(n):
        quotients = [unit / (2 * count + 1) for unit, count in zip(units, found, strict=True)]
        found[quotients.index(max(quotients))] += 1
    assert counts(units, n) == found


def test_counts_far_ahead_keep_the_shares() -> None:
    found = counts([700_000, 299_999, 1], 10**13)
    assert sum(found) == 10**13
    assert all(abs(a - b) <= 1 for a, b in zip(found, [7 * 10**12, 2_999_990_000_000, 10_000_000], strict=True))


def sources(**sizes: int) -> Sources:
    """Sources of which each token says where it is from and where it stands: 100,000 × source + place."""
    parts = {
        name: Tokens(np.arange(size, dtype=np.uint32) + np.uint32(100_000 * i), size, name)
        for i, (name, size) in enumerate(sizes.items())
    }
    weights = dict.fromkeys(sizes, 1 / len(sizes))
    return Sources(Mixture({name: Source(["x"]) for name in sizes}, [Stage(weights)]), parts)


def test_every_source_is_read_in_its_own_order_however_the_weights_change() -> None:
    mixed = Mixed(sources(a=500, b=2000, c=90), 8, 4, seed=3)
    weights = [{"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 0.0, "b": 0.9, "c": 0.1}, {"a": 1.0, "b": 0.0, "c": 0.0}]
    mixed.course = ((0, weights[0]), (100, weights[1]), (133, weights[2]))
    inputs, targets = mixed.sequences(0, 200)
    assert torch.equal(inputs + 1, targets)
    of = inputs[:, 0] // 100_000
    for i, each in enumerate(mixed._each):
        mine = inputs[of == i]
        assert torch.equal(mine, each.sequences(0, len(mine))[0])
    shares = [(torch.bincount(of[a:b], minlength=3)).tolist() for a, b in ((0, 100), (100, 133), (133, 200))]
    assert shares == [[50, 25, 25], [0, 30, 3], [67, 0, 0]]
    for cuts in ([0, 1, 99, 101, 140, 200], [0, 133, 200]):
        parts = [mixed.sequences(a, b)[0] for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), inputs)
    assert mixed.passes(200) == max(117 / 123, 55 / 498, 28 / 21)
    with pytest.raises(DataError, match=r"source c: the training text has 4 tokens, one batch of 1 × 4 needs 9"):
        Mixed(sources(a=500, c=4), 8, 4, seed=3)


def test_sources_of_the_same_size_have_orders_of_their_own() -> None:
    """The first has that of a run on it alone; a mixture of equal halves would see the same places side by side."""
    mixed = Mixed(sources(a=500, b=500, c=500), 8, 4, seed=3)
    seen = [each.sequences(0, 123)[0][:, 0] % 100_000 for each in mixed._each]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
    alone = Batches(mixed.tokens.parts["a"], 1, 4, seed=3)
    assert torch.equal(alone.sequences(0, 123)[0][:, 0], seen[0])


def test_how_often_a_source_is_seen() -> None:
    found = sources(a=1000, b=4000)
    stages = [Stage({"a": 1.0, "b": 0.0}, 0.25), Stage({"a": 0.5, "b": 0.5}, 6000), Stage({"a": 0.0, "b": 1.0})]
    found = Sources(Mixture(found.mixture.sources, stages), found.parts)
    assert found.times(8000) == {"a": 2 + 2, "b": 0.5 + 0.5}
    assert found.times(4000) == {"a": 1 + 1.5, "b": 0.375}  # it ends in the second stage
    assert mixtures.sizes(found, 4000).endswith(
        "\nstage 3 of the mixture is not reached: stage 2 lasts until 6,000 tokens, and the run has 4,000; "
        "lower its until"
    )
    assert not any("not reached" in mixtures.sizes(found, planned) for planned in (8000, 0))
