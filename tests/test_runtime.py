"""Models and sessions through Python: results and limits."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet_export import random_model
from bitnet_runtime import (
    CacheFullError,
    ContextLengthError,
    InvalidParameterError,
    Model,
    Sampling,
    Session,
    StateError,
    TokenizerError,
    available_isas,
)
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.steps import Entry, step_batch
from bitnet_runtime.shape import KV_TYPES
from runtime_models import SMALL, byte_tokenizer, small_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model.load(path, threads=2) as model:
        yield model


def test_what_a_model_says_of_itself(model: Model, path: Path) -> None:
    text = repr(model)
    for part in (path.name, "61,440 ternary weights", "context 256", model.isa, "threads 2"):
        assert part in text
    assert (model.vocab_size, model.n_ctx, model.threads) == (512, 256, 2)
    assert model.info.ternary_weights == SMALL.ternary_weights
    assert model.metadata["config"][0]["dim"] == 64


def test_session_logits_and_score_agree(model: Model) -> None:
    tokens = list(range(40, 60))
    with model.session() as session:
        rows = session.append(tokens, "all")
        assert rows is not None
        assert rows.shape == (20, 512)
        assert rows.dtype == np.float32
        assert session.tokens == tokens
        assert np.array_equal(session.logits, rows[-1])
    following = zip(rows[:-1].astype(float), tokens[1:], strict=True)
    expected = [row[token] - np.logaddexp.reduce(row) for row, token in following]
    scores = model.score(tokens)
    assert math.isnan(scores[0])
    assert scores[1:] == pytest.approx(expected, abs=1e-5)  # float32 logits, sums in another order


def test_same_bits_however_a_text_is_cut_forked_or_rewound(model: Model) -> None:
    tokens = [(7 * i) % 512 for i in range(200)]
    with model.session() as whole, model.session() as pieces:
        expected = whole.append(tokens)
        for start, end in itertools.pairwise((0, 1, 24, 47, 190, 200)):  # one is more than BLOCK
            pieces.feed(tokens[start:end])
        assert np.array_equal(pieces.logits, expected)
        pieces.rewind(100)
        assert pieces.logits is None
        with pytest.raises(StateError):
            pieces.sample()
        with pieces.fork() as copy:
            assert np.array_equal(copy.append(tokens[100:]), expected)
            assert (copy.position, pieces.position) == (200, 100)
        pieces.reset()
        assert pieces.tokens == []
        assert np.array_equal(pieces.append(np.array(tokens)), expected)
    assert repr(pieces) == "<Session closed>"


def test_a_fork_draws_what_the_original_would(model: Model) -> None:
    with model.session() as session:
        session.append([1, 2, 3])
        session.seed(5)
        drawn = []
        with session.fork() as copy:
            for _ in range(20):
                drawn.append(copy.sample())
                copy.step(drawn[-1])
        for token in drawn:
            assert session.sample() == session.sample() == token
            session.step(token)
        other = (drawn[-1] + 1) % 512
        session.step(other)
        assert session.tokens == [1, 2, 3, *drawn, other]
        assert len(set(drawn)) > 5


def test_texts_share_a_cache_of_limited_size(path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="cache_bytes is 0, expected"):
        Model.load(path, cache_bytes=0)
    with Model.load(path) as model:
        limit = 200 * model.kv_bytes_per_token  # three blocks of 64
    with Model.load(path, cache_bytes=limit) as model, model.session() as first, model.session() as other:
        first.feed([1] * 128)
        used = model.cache_bytes
        assert 0 < used == 128 * model.kv_bytes_per_token
        with first.fork() as copy:
            assert model.cache_bytes == used
            assert copy.append([2]) is not None
            with pytest.raises(CacheFullError, match="cache_bytes"):
                first.append([2])
            assert (first.position, first.sample()) == (128, first.sample())
            with pytest.raises(CacheFullError):
                other.append([5])
        other.feed([5])  # the copy is closed
        other.reset()
        assert model.cache_bytes == used


def test_a_text_that_finds_no_room_leaves_the_session_as_it_was(path: Path) -> None:
    """Also a text that the library gets in pieces, of which the first would fit."""
    with Model.load(path) as model:
        limit = 192 * model.kv_bytes_per_token
    with Model.load(path, cache_bytes=limit) as model, model.session() as session:
        before = session.append([1, 2, 3])
        long: Any = [1] * 200
        calls: list[Callable[[], Any]] = [
            lambda: session.append(long), lambda: session.append(long, "all"), lambda: session.feed(long),
            lambda: session.score(long),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(CacheFullError):
                call()
            assert session.position == 3 and session.logits is not None and (session.logits == before).all()
        session.reset()
        with pytest.raises(CacheFullError):
            session.embed(long, "mean")
        assert session.position == model.cache_bytes == 0


def test_an_answer_does_not_go_on_with_the_text_of_another(model: Model) -> None:
    sampled: Any = {"temperature": 1, "max_tokens": 20}
    others: list[Callable[[Session], Any]] = [
        lambda session: model.generate([4, 4, 4], session=session, **sampled),
        lambda session: session.append([1]),
        lambda session: session.step(1),
        lambda session: session.rewind(2),
        lambda session: session.seed(5),
    ]
    for other in others:
        with model.session() as session:
            stream = model.stream([1, 2, 5], session=session, seed=1, **sampled)
            next(stream)
            session.cancel()  # which is no other text
            session.rewind(session.position)
            while next(stream).token is None:
                pass
            other(session)
            with pytest.raises(StateError, match="a session of its own"):
                list(stream)
            tokens = model.generate([1, 2, 5], session=session, seed=1, **sampled).tokens
        assert tokens == model.generate([1, 2, 5], seed=1, **sampled).tokens


def test_append_none_keeps_no_logits(model: Model) -> None:
    with model.session() as session:
        assert session.append([1, 2], "none") is None
        assert session.logits is None
        with pytest.raises(InvalidParameterError, match="logits is 'some'"):
            session.append([1], "some")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "word"), [([], "empty"), ([512], "512"), ([-1], "-1"), ([2**40], "1099511627776"), (["a"], "has 'a'")]
)
def test_wrong_tokens(model: Model, tokens: list[int], word: str) -> None:
    with model.session() as session:
        for call in (session.append, session.feed, session.score):
            with pytest.raises(InvalidParameterError, match=f"^tokens.*{word}"):
                call(tokens)
        assert session.position == 0


def test_more_than_the_context(model: Model) -> None:
    for call in (model.generate, model.stream, model.score):
        with pytest.raises(ContextLengthError, match=r"257 tokens .* 256 tokens") as caught:
            call([1] * 257)
        assert (caught.value.n_prompt, caught.value.n_ctx) == (257, 256)
        assert str(caught.value).endswith("256 tokens; shorten the text")  # the model has no larger one
    with model.session(n_ctx=10) as session:
        session.feed([1] * 8)
        with pytest.raises(ContextLengthError) as caught:
            session.feed([1] * 3)
        assert (caught.value.n_prompt, caught.value.n_ctx) == (11, 10)
        assert "ask for a larger n_ctx: the model allows up to 256" in str(caught.value)
        assert session.position == 8
        session.feed([1, 2])
        entry = Entry(session, [5, 6], most=1)
        step_batch([entry])
        assert isinstance(entry.error, ContextLengthError) and entry.error.n_prompt == 12
        greedy = Sampler(Sampling(temperature=0), model.vocab_size)
        for full in (lambda: session.step(5), lambda: session.advance(greedy), lambda: session.append([5])):
            with pytest.raises(ContextLengthError, match=r"^11 tokens exceed .* is 10 tokens; .* allows up to 256"):
                full()
        assert session.tokens == [1] * 9 + [2]


def test_no_rows_are_made_for_more_than_the_context(model: Model) -> None:
    with model.session() as session:
        session.append([1], "all")  # what is made once
        tracemalloc.start()
        try:
            with pytest.raises(ContextLengthError):
                session.append([1] * 20_000, "all")
            assert tracemalloc.get_traced_memory()[1] < 4 * 20_000 * model.vocab_size / 8
        finally:
            tracemalloc.stop()


def test_a_list_where_one_is_expected(model: Model) -> None:
    for prompts in (["a", "b"], [[1, 2], [3]]):
        with pytest.raises(InvalidParameterError, match=r"^prompt is .* expected one: only generate takes a list"):
            model.stream(prompts)  # type: ignore[arg-type]
        with pytest.raises(InvalidParameterError, match=r"^text is .* score takes one text; call it for each"):
            model.score(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["max_tokens", "max_new_tokens", "seed"])
def test_options_of_a_text_are_not_of_a_token(model: Model, word: str) -> None:
    with model.session() as session:
        session.feed([1])
        with pytest.raises(InvalidParameterError, match=f"{word} is an option of a whole text, not of one token"):
            session.sample(**{word: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "made"), [(256, None, 1), (255, None, 2), (8, None, 249), (256, 9, 1), (8, 0, 0)]
)
def test_generation_ends_with_the_context(model: Model, n_prompt: int, max_tokens: int | None, made: int) -> None:
    result = model.generate([1] * n_prompt, max_tokens=max_tokens, seed=1)
    assert len(result.tokens) == made
    assert result.finish_reason == "length"
    assert result.usage == (n_prompt, made, n_prompt + made, 0)


def test_wrong_arguments_of_load(path: Path, model: Model) -> None:
    for name, value in (
        ("threads", 0),
        ("threads", 257),
        ("n_ctx", 0),
        ("n_ctx", 257),
        ("kv_type", "i8"),
        ("isa", "z80"),
    ):
        with pytest.raises(InvalidParameterError, match=f"^{name} is {value!r}, expected"):
            Model.load(path, **{name: value})
    with pytest.raises(InvalidParameterError, match=f"from 1 to 256, the context of {path.name}$"):  # which of several
        Model.load(path, n_ctx=257)
    with pytest.raises(InvalidParameterError, match="n_ctx is 300"):
        model.session(n_ctx=300)
    with pytest.raises(InvalidParameterError, match="pooling is not given, and the model names none"):
        model.embed("x")


def test_every_tier_thread_count_and_mapping_gives_the_same_tokens(path: Path) -> None:
    found = set()
    for isa in available_isas():
        for threads, mmap in ((1, True), (2, False)):
            with Model.load(path, isa=isa, threads=threads, mmap=mmap) as model:
                assert model.isa == isa
                found.add(tuple(model.generate("def f(x):", max_tokens=50, seed=3).tokens))
    assert len(found) == 1


def test_what_a_smaller_cache_costs(path: Path) -> None:
    """Any change to the cache turns some int8 activations over, which alone moves a log-probability
    by 0.02 here, up or down. int8 may double that (it adds 0.6 of it), and must not move the mean.
    4 bits of a key are 17 times as coarse as 8; what that costs is measured on trained models.
    """
    texts = np.random.default_rng(0).integers(0, SMALL.vocab_size, (12, 200)).tolist()
    scores, bytes_per_token = {}, {}
    for kv_type in KV_TYPES:
        with Model.load(path, kv_type=kv_type) as model:
            scores[kv_type] = np.concatenate([model.score(text)[1:] for text in texts])
            bytes_per_token[kv_type] = model.kv_bytes_per_token
    f16, int8 = (scores[kv_type] - scores["f32"] for kv_type in ("f16", "int8"))
    assert 0 < np.abs(f16).mean() < 0.03
    assert 0 < np.abs(int8).mean() < 2 * np.abs(f16).mean()
    assert abs(f16.mean()) < 5e-3
    assert abs(int8.mean()) < 5e-3
    rows = 2 * SMALL.n_layers * SMALL.n_kv_heads
    assert bytes_per_token["f32"] == 2 * bytes_per_token["f16"] == rows * 4 * SMALL.head_dim
    assert bytes_per_token["int8"] == rows * (SMALL.head_dim + 4)
    k4v8 = scores["k4v8"] - scores["f32"]
    assert np.abs(int8).mean() < np.abs(k4v8).mean() < 5 * np.abs(int8).mean()
    assert abs(k4v8.mean()) < 2e-2
    words = SMALL.head_dim // 8 + 1
    assert bytes_per_token["k4v8"] == rows / 2 * (4 * words + SMALL.head_dim + 4)


def test_no_tokenizer(tmp_path: Path) -> None:
    random_model(SMALL, tmp_path / "m")
    with Model.load(tmp_path / "m") as model:
        assert model.generate([1, 2], max_tokens=3).text == ""
        assert len(model.generate([1, 2], max_tokens=3).tokens) == 3
        with pytest.raises(TokenizerError, match="has no tokenizer; give token ids"):
            model.generate("x")
        with pytest.raises(TokenizerError, match="has no tokenizer, so no stop texts; give stop_token_ids"):
            model.generate([1, 2], stop="x")


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path: Path) -> None:
    random_model(SMALL.replace(vocab_size=100), tmp_path / "m", tokenizer=byte_tokenizer().to_str().encode())
    random_model(SMALL, tmp_path / "broken", tokenizer=b'{"version": "1.0"}')
    with Model.load(tmp_path / "m") as model, pytest.raises(TokenizerError, match=r"token id 259, .* has 100 tokens"):
        model.generate("x")
    with Model.load(tmp_path / "broken") as model, pytest.raises(TokenizerError, match="tokenizer of the file failed"):
        model.tokenize("x")
