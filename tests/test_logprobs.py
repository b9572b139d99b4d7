"""`logprobs`: what answers say of the probability of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet_export import random_model
from bitnet_runtime import InvalidParameterError, Model, Piece, Result, Scored
from bitnet_runtime.answers.logprobs import score
from runtime_models import SMALL, TEMPLATE, byte_tokenizer, scripted_model

PROMPT = [5, 6, 7]
ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 4, "logit_bias": {9: 2.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("models") / "model.bitnet"
    random_model(SMALL, path, 3, tokenizer=byte_tokenizer().to_str().encode())
    with Model.load(path, threads=1) as model:
        yield model


def expected(model: Model, result: Result, top: int, prompt: list[int] = PROMPT) -> list[Scored]:
    """Of the rows that the engine gives for the whole text."""
    with model.session() as session:
        rows = session.append(prompt + result.tokens, "all")
    assert rows is not None
    return score(rows[len(prompt) - 1 : -1], result.tokens, top)


@pytest.mark.parametrize("top", [0, 3, 20])
def test_each_token_has_its_own(model: Model, top: int) -> None:
    """Those of the model itself, whatever the options do to them; and tokens are those of an answer without."""
    plain, result = model.generate(PROMPT, **ASKED), model.generate(PROMPT, logprobs=top, **ASKED)
    assert plain.logprobs is None and plain.tokens == result.tokens
    assert result.logprobs == expected(model, result, top) and {len(each.top) for each in result.logprobs} == {top}
    scores = model.score(PROMPT + result.tokens)[len(PROMPT) :]
    np.testing.assert_allclose([each.logprob for each in result.logprobs], scores, rtol=1e-6)


def test_the_best_and_of_equals_the_lowest_ids() -> None:
    shares = np.array([0.1, 0.4, 0.2, 0.2, 0.1])
    (scored,) = score(np.log(shares, dtype=np.float32)[None] + 5, [4], 3)
    assert [token for token, _ in scored.top] == [1, 2, 3]
    assert np.exp([scored.logprob, *(logprob for _, logprob in scored.top)]) == pytest.approx([0.1, 0.4, 0.2, 0.2])
    alike = np.zeros((1, 999), np.float32)
    alike[0, 500] = 1
    assert [token for token, _ in score(alike, [0], 20)[0].top] == [500, *range(19)]


def test_every_form_has_them(model: Model) -> None:
    one = model.generate(PROMPT, logprobs=2, **ASKED)
    several = model.generate([PROMPT, [8]], logprobs=2, **ASKED)
    assert [each.logprobs for each in several] == [one.logprobs, expected(model, several[1], 2, [8])]
    assert asyncio.run(model.agenerate(PROMPT, logprobs=2, **ASKED)).logprobs == one.logprobs
    with model.stream(PROMPT, logprobs=2, **ASKED) as stream:
        assert [piece.scored for piece in stream if piece.token is not None] == one.logprobs
    with model.session() as session:
        assert model.generate(PROMPT, logprobs=2, session=session, **ASKED).logprobs == one.logprobs
    with model.batch() as batch:
        texts = [batch.add(PROMPT, logprobs=2, **ASKED), batch.add([8], **ASKED)]
        pieces: dict[Any, list[Piece]] = {text: [] for text in texts}
        for text, piece, _ in batch:
            pieces[text].append(piece)
    assert [piece.scored for piece in pieces[texts[0]] if piece.token is not None] == one.logprobs
    assert {piece.scored for piece in pieces[texts[1]]} == {None}


def test_tokens_that_a_grammar_leaves_no_choice_of(model: Model) -> None:
    prompt = model.tokenize("x")
    result = model.generate(prompt, regex="abc[0-9]{3}def", max_tokens=20, seed=1, logprobs=1)
    assert result.text[:3] == "abc" and result.text[6:] == "def"
    assert result.logprobs == expected(model, result, 1, prompt)


def test_of_a_conversation_and_its_end_token(tmp_path: Path) -> None:
    path = scripted_model(tmp_path / "chat.bitnet", [b"a", b"b"], template=TEMPLATE)
    messages = [{"role": "user", "content": "x"}]
    with Model.load(path, threads=1) as model:
        result = model.chat(messages, temperature=0, logprobs=0)
        with model.stream_chat(messages, temperature=0, logprobs=0) as stream:
            pieces = list(stream)
    assert result.finish_reason == "stop" and result.logprobs is not None
    assert [each.token for each in result.logprobs] == result.tokens
    assert [piece.scored for piece in pieces if piece.token is not None] == result.logprobs


@pytest.mark.parametrize("value", [21, -1, True, 2.5, "5"])
def test_a_number_that_cannot_be(model: Model, value: Any) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(InvalidParameterError, match=r"^logprobs is .*, expected an integer from 0 to 20") as caught:
            call(PROMPT, logprobs=value)  # type: ignore[operator]
        assert caught.value.param == "logprobs"
