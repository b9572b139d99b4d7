"""Guesses from the text itself: tokens computed together with guesses are those computed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet_runtime import Model
from bitnet_runtime.answers.answer import Lookup
from runtime_models import counted_steps, scripted_model, small_model
from test_together import DRAWN, FEW, GREEDY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(small_model(tmp_path_factory.mktemp("models")), threads=2) as model:
        yield model


@pytest.mark.parametrize("sampling", [GREEDY, GREEDY | FEW, DRAWN, DRAWN | FEW])
@pytest.mark.parametrize("draft", [None, 1, 4, 16])
def test_a_draft_changes_nothing(model: Model, sampling: dict[str, Any], draft: int | None) -> None:
    prompt = [7, 8, 9, 10, 11, 12] * 4
    plain = model.generate(prompt, max_tokens=150, draft=0, **sampling)
    drafted = model.generate(prompt, max_tokens=150, draft=draft, **sampling)
    assert (drafted.tokens, drafted.text, drafted.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)


def test_right_guesses_save_steps(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = counted_steps(monkeypatch)
    result = model.generate([1, 2, 3], max_tokens=200, draft=8, **GREEDY, **FEW)
    assert sum(lengths) >= len(result.tokens) - 1
    assert max(lengths) > 1  # otherwise the comparison above shows nothing
    assert len(lengths) < len(result.tokens)


def test_repetitions_are_guessed_when_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is known how long a pass takes, as many guesses as repeat; never any with `draft=0`."""
    lengths, same = counted_steps(monkeypatch), {"logit_bias": {7: 1000.0}, **GREEDY}
    with Model.load(small_model(tmp_path), threads=1) as model:
        assert model.generate([7] * 20, max_tokens=9, draft=0, **same).tokens == [7] * 9
        assert lengths == [1] * 9
    lengths.clear()
    with Model.load(small_model(tmp_path), threads=1) as model:
        assert model.generate([7] * 20, max_tokens=9, **same).tokens == [7] * 9
        assert len(lengths) == 2 and lengths[0] == 1


def test_a_draft_stops_where_single_steps_stop(tmp_path: Path) -> None:
    script = [b"ab", b"cd", b"ef", b"gh", b"ij", b"kl"]
    with Model.load(scripted_model(tmp_path / "m", script), threads=1) as model:
        prompt = [*model.tokenize("x"), *range(256, 262), *model.tokenize("x")]  # the script occurred before
        plain, drafted = (model.generate(prompt, draft=draft, **GREEDY) for draft in (0, 8))
        assert plain.text == drafted.text == "abcdefghijkl"
        assert drafted.finish_reason == "stop"
        assert model.generate(prompt, draft=8, stop="ghi", **GREEDY).text == "abcdef"
        for most in range(8):
            short = model.generate(prompt, draft=8, max_tokens=most, **GREEDY)
            assert (short.text, short.usage.completion_tokens) == ("abcdefghijkl"[: 2 * most], min(most, 6))


def test_a_draft_fills_the_context_and_no_more(model: Model) -> None:
    prompt = [1, 2, 3] * 80
    plain, *drafted = (model.generate(prompt, max_tokens=None, draft=draft, **GREEDY) for draft in (0, 8, None))
    assert [each.tokens for each in drafted] == [plain.tokens] * 2
    assert len(prompt) + len(plain.tokens) == model.n_ctx + 1


def test_lookup_finds_what_followed_the_longest_match() -> None:
    lookup = Lookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    assert lookup.guess(3) == [4, 9, 2]  # after 1 2 3, not after the later 2 3
    assert lookup.guess(0) == []
    lookup.add(7)
    assert lookup.guess(3) == []
