"""What tokens see, in the engine and in torch: every mask with and without windows, and vectors in place of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet_export import random_model
from bitnet_runtime import (
    CacheFullError,
    ContextLengthError,
    InvalidParameterError,
    Model,
    NumericError,
    Session,
    StateError,
    UnsupportedModelError,
    available_isas,
)
from bitnet_runtime.answers.answer import Lookup
from bitnet_runtime.embedding import MOST_TOKENS
from drawn_models import made

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

PLAIN = ModelConfig(
    vocab_size=301, dim=40, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=12, ffn_dim=71, max_context=700,
    sub_norm=False, activation="silu", embedding_scale=3.7, pooling="mean",
)  # fmt: skip
LOCAL = PLAIN.replace(n_heads=3, n_kv_heads=1, head_dim=10, sliding_window=9)
MIXED = LOCAL.replace(n_layers=4, sliding_window=37, global_every=2, rope_theta=1e6, rope_local_theta=1e4, qk_norm=True)
BERT = PLAIN.replace(
    position="learned", norm="layer", norm_bias=True, pre_norm=False, residual_norm=True, embedding_norm=True,
    final_norm=False, activation="gelu_erf", ffn="plain", qkv_bias=True, o_bias=True, ffn_bias=True, n_heads=3,
    n_kv_heads=3, pooling="first",
)  # fmt: skip
EXPERTS = LOCAL.replace(n_experts=5, experts_per_token=2)
KINDS = {"plain": PLAIN, "local": LOCAL, "mixed": MIXED, "bert": BERT, "experts": EXPERTS}
MASKS = ("causal", "bidirectional", "prefix")


Pair = tuple[Transformer, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    """The model of a kind and a mask, made once."""
    found: dict[tuple[str, str], Pair] = {}

    def pair(kind: str, mask: str) -> Pair:
        if (kind, mask) not in found:
            config = KINDS[kind].replace(mask=mask)
            found[kind, mask] = made(config, tmp_path_factory.mktemp(f"{kind}-{mask}"), std=0, words=True)
        return found[kind, mask]

    return pair


def reference(model: Transformer, tokens: Tensor, prefix: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Log-probabilities of torch, (T, V), in the precision of the model."""
    lengths = torch.tensor([prefix]) if prefix else None
    with torch.no_grad():
        return model(tokens[None], prefix_B=lengths)[0].double().log_softmax(-1).numpy()


def engine(session: Session, tokens: Any, prefix: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    session.reset()
    parts = [session.append_prefix(tokens[:prefix], logits="all")] if prefix else []
    if prefix < len(tokens):
        parts.append(session.append(tokens[prefix:], logits="all"))
    rows = np.concatenate([part for part in parts if part is not None]).astype(float)
    return (
        rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_short_texts_are_those_of_torch(pairs: Callable[[str, str], Pair], kind: str, mask: str) -> None:
    model, path = pairs(kind, mask)
    texts = torch.randint(0, 301, (24, 8), generator=torch.Generator().manual_seed(1))
    worst = []
    with Model.load(path, kv_type="f32") as runtime, runtime.session(16) as session:
        for i, text in enumerate(texts):
            prefix = i % 9 if mask == "prefix" else 0
            found = engine(session, text.numpy(), prefix)
            worst.append(np.abs(found - reference(model, text, prefix)).max())
    # Two fp32 programs differ by 1e-6 until one activation falls on the other side of a rounding edge, and
    # then by up to 0.03 (design: the noise floor).
    assert np.median(worst) < 1e-5 and max(worst) < 0.1


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_within_the_floor(pairs: Callable[[str, str], Pair], kind: str, mask: str) -> None:
    model, path = pairs(kind, mask)
    texts = torch.randint(0, 301, (3, 601), generator=torch.Generator().manual_seed(2))
    floor, distance = [], []
    with Model.load(path, kv_type="f32") as runtime, runtime.session() as session:
        for i, text in enumerate(texts):
            prefix = (601, 433, 1)[i] if mask == "prefix" else 0
            fp32 = reference(model, text, prefix)
            fp64 = reference(model.double(), text, prefix)
            model.float()
            floor.append(np.abs(fp64 - fp32).mean())
            distance.append(np.abs(engine(session, text.numpy(), prefix) - fp32).mean())
    assert np.mean(distance) <= 1.5 * np.mean(floor) + 1e-6  # torch's own distance between fp32 and fp64


@pytest.mark.parametrize("mask", ["bidirectional", "prefix"])
def test_what_is_behind_counts(pairs: Callable[[str, str], Pair], mask: str) -> None:
    _, path = pairs("plain", mask)
    with Model.load(path) as model, model.session() as session:
        rows = []
        for last in (5, 6):
            session.reset()
            text = [1, 2, 3, last]
            append = session.append_prefix if mask == "prefix" else session.append
            found = append(text, logits="all")
            assert found is not None
            rows.append(found)
    assert not np.array_equal(rows[0][0], rows[1][0])


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_encoders(pairs: Callable[[str, str], Pair], kind: str) -> None:
    model, path = pairs(kind, "bidirectional")
    texts = torch.randint(0, 301, (24, 7), generator=torch.Generator().manual_seed(4))
    for pooling in (None, "last", "mean", "first"):
        with torch.no_grad(), Model.load(path, kv_type="f32") as runtime:
            expected = model.embed(texts, pooling or "").numpy()
            found = runtime.embed(texts.tolist(), pooling=pooling)
        worst = np.abs(found - expected).max(axis=1)
        assert np.median(worst) < 1e-5 and worst.max() < 0.05


def test_encoders_have_the_same_bits_for_every_tier_thread_count_and_list(
    pairs: Callable[[str, str], Pair],
) -> None:
    lengths = (1, 2, 130, 17, 300, 700, MOST_TOKENS, *[1, 2, 3] * 30)
    texts = [[(i * i + j) % 301 for i in range(n)] for j, n in enumerate(lengths)]
    found = set()
    for isa in available_isas():
        for threads in (1, 2):
            with Model.load(pairs("local", "bidirectional")[1], isa=isa, threads=threads) as model:
                found.add(model.embed(texts).tobytes())
                found.add(np.concatenate([model.embed(text) for text in texts]).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("mask", MASKS)
def test_vectors_in_place_of_tokens(pairs: Callable[[str, str], Pair], mask: str) -> None:
    model, path = pairs("local", mask)
    vectors = torch.randn(40, 40, generator=torch.Generator().manual_seed(5)) * 0.3
    with torch.no_grad():
        lengths = torch.tensor([30]) if mask == "prefix" else None
        expected = model(vectors[None], prefix_B=lengths)[0].log_softmax(-1).numpy()
        short = model(vectors[None, :6], prefix_B=lengths and lengths.clamp(max=6))[0].log_softmax(-1).numpy()
    with Model.load(path, kv_type="f32") as runtime, runtime.session(50) as session:

        def logits(n: int) -> Any:
            session.reset()
            if mask != "prefix":
                return session.append_embeddings(vectors[:n].double().numpy(), logits="all")
            first = session.append_prefix([-1] * min(n, 30), vectors[: min(n, 30)], logits="all")
            return np.concatenate([first, session.append_embeddings(vectors[30:n], "all")]) if n > 30 else first

        worst = np.abs(torch.from_numpy(logits(6)).log_softmax(-1).numpy() - short).max()
        assert worst < 1e-5
        difference = np.abs(torch.from_numpy(logits(40)).log_softmax(-1).numpy() - expected).mean()
        assert difference < 5e-3  # the noise floor of one text: see test_short_texts_are_those_of_torch
        assert session.tokens == [-1] * 40
        session.reset()
        with torch.no_grad():
            pooled = model.embed(vectors[None, :6]).numpy()[0] if mask != "prefix" else None
        found = session.embed_embeddings(vectors[:6].numpy())
        assert found.shape == (40,) and (pooled is None or np.abs(found - pooled).max() < 1e-5)


def test_a_prompt_is_a_prefix(pairs: Callable[[str, str], Pair]) -> None:
    _, path = pairs("mixed", "prefix")
    with Model.load(path) as model, model.session() as session:
        prompt = model.tokenize("ab naïve prompt ab naïve")
        result = model.generate(prompt, temperature=0, max_tokens=12)
        expected = []
        session.append_prefix(prompt)
        for _ in range(12):
            token = session.sample(temperature=0)
            expected.append(token)
            session.append([token])
        assert result.tokens == expected
        assert model.generate([prompt, "x"], temperature=0, max_tokens=12)[0].tokens == expected
        assert model.generate(prompt, temperature=0, max_tokens=12, draft=4).tokens == expected
        for _ in range(2):  # the second finds the first one's prompt and answer there
            assert model.generate(prompt, temperature=0, max_tokens=12, session=session).tokens == expected
        assert len(model.score(prompt)) == len(prompt)


def test_a_prefix_is_not_cut(pairs: Callable[[str, str], Pair]) -> None:
    _, path = pairs("plain", "prefix")
    with Model.load(path) as model, model.session() as session:
        session.append_prefix([1, 2, 3, 4])
        with pytest.raises(StateError, match=r"a prefix begins a text, and this one has 4 tokens; reset\(\)"):
            session.append_prefix([1])
        session.append([5, 6, 7])
        assert session.rewind_least == 4
        with pytest.raises(StateError, match="n is 3, expected 0 or 4 to 7"):
            session.rewind(3)
        assert session.position == 7
        session.rewind(4)
        session.rewind(0)
        assert session.rewind_least == 0


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_what_windows_take_of_the_cache(pairs: Callable[[str, str], Pair], kv_type: str) -> None:
    """As docs/python.md has it; the window has 9 tokens, and all layers have it."""
    _, path = pairs("local", "causal")
    with Model.load(path, kv_type=kv_type) as model, model.session() as session:
        block = 64 * model.kv_window_bytes_per_token
        assert model.kv_bytes_per_token == 0 < block
        for blocks in (1, 2, 3, 4, 4, 4):
            session.append([1] * 64, logits="none")
            assert model.cache_bytes == blocks * block
    with Model.load(path, kv_type=kv_type, cache_bytes=block) as model, model.session() as session:
        session.append([1] * 64)
        with pytest.raises(CacheFullError):
            session.append([1])


def test_windows_forget(pairs: Callable[[str, str], Pair], tmp_path: Path) -> None:
    _, path = pairs("local", "causal")
    text = [(i * i + 3) % 301 for i in range(690)]
    with Model.load(path) as model, model.session() as session, model.session() as fresh:
        session.append(text)
        least = session.rewind_least
        assert 0 < least < 690 and model.kv_bytes_per_token == 0
        assert model.kv_bytes(5) * 9 == model.kv_bytes(9) * 5 and model.kv_bytes(100) == model.kv_bytes(9)
        with pytest.raises(StateError, match=f"n is {least - 1}, expected 0 or {least} to 690"):
            session.rewind(least - 1)
        result = model.generate(text[:20], session=session, temperature=0, max_tokens=5)  # begins anew
        assert result.tokens == model.generate(text[:20], temperature=0, max_tokens=5).tokens
        session.reset()
        session.append(text)
        result = model.generate(text[:650], session=session, temperature=0, max_tokens=5)  # goes back
        fresh.append(text[:650])
        assert result.tokens[0] == fresh.sample(temperature=0)
    _, plain = pairs("plain", "causal")
    with Model.load(plain) as model, model.session() as session:
        assert model.kv_bytes(100) == 100 * model.kv_bytes_per_token > 0 == model.kv_bytes(0)
        with pytest.raises(InvalidParameterError, match="n_tokens is -3, expected an integer from 0"):
            model.kv_bytes(-3)
        session.append(text)
        assert session.rewind_least == 0


def test_bidirectional_texts_have_no_next_token(pairs: Callable[[str, str], Pair]) -> None:
    _, path = pairs("plain", "bidirectional")
    with Model.load(path) as model, model.session() as session:
        assert model.mask == "bidirectional" and model.has_embedding
        for call in (
            lambda: model.generate("abc"),
            lambda: model.generate(["abc"]),
            lambda: model.stream("abc"),
            lambda: model.score("abc"),
            lambda: session.score([1, 2]),
        ):
            with pytest.raises(UnsupportedModelError, match="bidirectional: its tokens see those that follow"):
                call()
        with pytest.raises(UnsupportedModelError, match=r"the mask of m\.bitnet is bidirectional, expected prefix"):
            session.append_prefix([1])
        session.append([1, 2, 3])
        with pytest.raises(UnsupportedModelError, match="bidirectional text has no next token"):
            session.sample()
        for more in (lambda: session.append([1]), lambda: session.embed([1])):
            with pytest.raises(StateError, match=r"a bidirectional text is appended in one call.*reset\(\)"):
                more()
        with pytest.raises(StateError, match="n is 2, expected 0 or 3 to 3"):
            session.rewind(2)
        assert session.fork().position == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros((2, 39), np.float32), r"float32 of shape \(2, 39\), expected float32 of shape \(n, 40\)"),
        (np.zeros(40, np.float32), r"float32 of shape \(40,\)"),
        (np.zeros((0, 40), np.float32), r"float32 of shape \(0, 40\)"),
        (np.zeros((1, 40), np.int64), r"int64 of shape \(1, 40\)"),
        ([["a"] * 40], "<U1 of shape"),
        ([[1.0, 2.0], [3.0]], "expected float32 of shape"),
        (None, "embeddings are None, expected float32"),
        (np.full((1, 40), np.nan), "embeddings have nan in row 0, column 0, expected finite numbers"),
        (np.full((1, 40), 1e300), "embeddings have inf in row 0, column 0"),
    ],
)
def test_wrong_vectors(pairs: Callable[[str, str], Pair], wrong: Any, message: str) -> None:
    _, path = pairs("plain", "prefix")
    with Model.load(path) as model, model.session(10) as session:
        for call in (
            lambda: session.append_embeddings(wrong),
            lambda: session.embed_embeddings(wrong),
        ):
            with pytest.raises(InvalidParameterError, match=message) as caught:
                call()
            assert caught.value.param == "embeddings"
        assert session.position == 0


def test_refusals_of_mixed_prefixes(pairs: Callable[[str, str], Pair]) -> None:
    _, path = pairs("plain", "prefix")
    one = np.ones((1, 40), np.float32)
    with Model.load(path) as model, model.session(10) as session:
        for tokens, vectors, message in (
            ([1, -1], None, r"embeddings are None, expected float32 of shape \(1, 40\)"),
            ([1, 2], one, r"expected float32 of shape \(0, 40\)"),
            ([-1, -1], one, r"expected float32 of shape \(2, 40\)"),
            ([-2], one, "tokens has the id -2, expected ids from 0 to 300, or -1 for a row of embeddings"),
            ([301], one, "tokens has the id 301"),
            ([], None, "tokens is empty"),
        ):
            with pytest.raises(InvalidParameterError, match=message):
                session.append_prefix(tokens, vectors)
        with pytest.raises(InvalidParameterError, match=r"expected ids from 0 to 300$"):
            session.append([-1])
        with pytest.raises(ContextLengthError):
            session.append_prefix([1] * 11)
        with pytest.raises(NumericError):
            session.append_embeddings(np.full((1, 40), 3e38, np.float32))
        assert session.position == 0
        session.append_prefix([1, -1, 2], one)
        assert session.tokens == [1, -1, 2]
        assert 0 <= session.sample(repeat_penalty=1.3, temperature=0) < 301
        session.reset()
        session.append_prefix([1, 2], one[:0])  # none, and none is asked for
        assert session.tokens == [1, 2]


def test_models_of_vectors(tmp_path: Path) -> None:
    config = PLAIN.replace(input="embeddings", tie_embeddings=False, mask="causal")
    model, path = made(config, tmp_path, std=0, words=True)
    vectors = torch.randn(6, 40, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = model(vectors[None])[0].log_softmax(-1).numpy()
    with Model.load(path, kv_type="f32") as runtime, runtime.session(10) as session:
        found = session.append_embeddings(vectors.numpy(), logits="all")
        assert found is not None
        assert np.abs(torch.from_numpy(found).log_softmax(-1).numpy() - expected).max() < 1e-5
        assert not runtime.has_embedding
        for call in (
            lambda: runtime.generate("abc"),
            lambda: runtime.score([1]),
            lambda: runtime.embed("abc"),
            lambda: session.append([1]),
            lambda: session.embed([1]),
        ):
            with pytest.raises(UnsupportedModelError, match="has no embedding of tokens: it takes vectors"):
                call()
    random_model(config.replace(has_head=False, vocab_size=0), tmp_path / "no words.bitnet")
    with Model.load(tmp_path / "no words.bitnet") as runtime, runtime.session(10) as session:
        for call in (lambda: session.append([1], "none"), lambda: session.embed([1]), lambda: runtime.embed([1])):
            with pytest.raises(UnsupportedModelError, match=r"it takes vectors, see .* and embed_embeddings"):
                call()
        with pytest.raises(UnsupportedModelError, match=r"it turns vectors into one, see Session\.embed_embeddings"):
            runtime.generate("abc")
        with pytest.raises(UnsupportedModelError, match="it takes vectors alone"):
            runtime.embed_images([vectors.numpy()])


def test_nothing_is_guessed_where_vectors_stand() -> None:
    lookup = Lookup([5, 6, -1, 7, 5, 6])
    assert lookup.guess(3) == []  # what followed 5, 6 was no token
    lookup = Lookup([5, 6, 8, -1, 9, 5, 6])
    assert lookup.guess(3) == [8, 8, 8]
    lookup = Lookup([-1, 5, 8, -1, 5])
    assert lookup.guess(3) == []
