"""The draft in the engine: what it guesses is what PyTorch says, and no token depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.straight_through import embedding_rows
from bitnet_export.packed.random_model import random_model
from bitnet_runtime import Model
from bitnet_runtime.defaults import resolve
from bitnet_runtime.sessions.sampler import Sampler
from drawn_models import made
from runtime_models import counted_steps

SMALL = ModelConfig(vocab_size=61, dim=36, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=10, ffn_dim=50, max_context=64)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 4},
    "global": {"sliding_window": 5, "global_every": 3, "rope_local_theta": 100.0},
    "norms": {"norm": "layer", "norm_bias": True, "qk_norm": True, "post_norm": True, "tie_embeddings": False,
              "head_bias": True, "logit_softcap": 5.0},
    "positions": {"position": "learned", "embedding_scale": 3.0},
    "experts": {"n_experts": 3, "experts_per_token": 2, "ffn": "plain"},
}  # fmt: skip
STEPS = 3
GREEDY = Sampler(resolve({"temperature": 0}), SMALL.vocab_size)


def packed(changes: dict[str, Any], floats: bool, folder: Path) -> tuple[Transformer, Path]:
    config = SMALL.replace(**changes).with_draft()
    if floats:
        assert config.draft
        plain: dict[str, Any] = {"ternary": (), "head_format": "f32"}
        config = config.replace(**plain, draft=config.draft.replace(**plain))
    return made(config, folder)


def of_torch(model: Transformer, texts: list[list[int]], dtype: torch.dtype) -> NDArray[np.float64]:
    """log p(texts, STEPS, vocab_size) of a chain whose guesses are the last STEPS - 1 tokens of each text."""
    tokens, config = torch.tensor(texts), model.config
    model.to(dtype)
    assert model.draft and model.embedding
    with torch.no_grad():
        hidden = model.hidden(tokens)[:, :-1]
        rows = embedding_rows(tokens, model.embedding.weight, config.head_format, model.amount)[:, 1:]
        states = model.draft.states(hidden, rows, None, STEPS)
        last = [state[:, step - STEPS] for step, state in enumerate(states)]
        found: NDArray[np.float64] = model.own_head.logits(torch.stack(last, 1)).double().log_softmax(-1).numpy()
    model.float()
    return found


@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_guesses_are_those_of_torch(changes: dict[str, Any], floats: bool, tmp_path: Path) -> None:
    """PyTorch is given the guesses of a chain, and their confidence is compared."""
    model, path = packed(changes, floats, tmp_path)
    drawn, texts, ours = np.random.default_rng(1), [], []
    with Model.load(path, kv_type="f32", threads=1) as engine, engine.session() as session:
        assert engine.has_draft
        for _ in range(60):
            text: list[int] = drawn.integers(0, SMALL.vocab_size, 7).tolist()
            session.reset()
            session.feed(text[:-1])
            guesses = session.guess(GREEDY, text[-1], STEPS)
            assert len(guesses) == STEPS
            ours.append(np.log([sure for _, sure in guesses]))
            texts.append(text + [token for token, _ in guesses])
    chosen = np.array(texts)[:, -STEPS:, None]
    in_32, in_64 = (of_torch(model, [text[:-1] for text in texts], dtype) for dtype in (torch.float32, torch.float64))
    theirs = np.take_along_axis(in_64, chosen, -1)[..., 0]
    distance = np.abs(ours - theirs)
    assert (in_64.max(-1) - theirs).max() < 0.1  # what was chosen is the likeliest, or as good as
    if floats:  # four layers of sums of 72 terms, each rounded to 6e-8, and the norms of what they add up to
        assert distance.max() < 1e-4
        return
    # Design §10, the noise floor: exact where no activation changed its code, else like fp32 against fp64.
    floor = np.abs(np.take_along_axis(in_32, chosen, -1)[..., 0] - theirs)
    assert np.median(distance) < 1e-5
    assert distance.mean() < max(1.5 * floor.mean(), 3e-3)


@pytest.fixture(scope="module", params=["2.0", "1.6"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("models") / "m.bitnet"
    random_model(SMALL.replace(max_context=300).with_draft(), path, encoding=request.param)
    with Model.load(path, threads=2) as model:
        yield model


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 500, "top_p": 1.0}])
def test_a_draft_layer_changes_no_token(model: Model, options: dict[str, Any]) -> None:
    prompt, asked = list(range(1, 40)), {"max_tokens": 150, "seed": 4, **options}
    expected = model.generate(prompt, draft=0, **asked).tokens
    assert [model.generate(prompt, draft=most, **asked).tokens for most in (None, 1, 5)] == [expected] * 3
    assert model.generate([prompt, [3]], **asked)[0].tokens == expected
    receipt = model.generate(prompt, receipt=True, **asked).receipt
    assert receipt and model.verify_receipt(receipt).valid


def test_guesses_that_are_right_save_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a text decided by noise, which is the same for a guess and for a token. Until it knows how long steps take, a
    model makes all guesses."""
    random_model(SMALL.with_draft(), tmp_path / "m.bitnet")
    steps = counted_steps(monkeypatch)
    with Model.load(tmp_path / "m.bitnet", threads=1) as model:
        model.generate([1, 2, 3], max_tokens=20, seed=1, temperature=1e6, top_k=0, top_p=1.0, min_p=0)
    assert steps[:2] == [1, 9]


def test_of_a_large_vocabulary_frequent_tokens_are_guessed(tmp_path: Path) -> None:
    """Unless the text has many others. Guesses depend only on the text, and no token depends on them."""
    frequent = 32768
    config = SMALL.replace(vocab_size=70_000, n_layers=1, max_context=400)
    random_model(config.with_draft(), tmp_path / "m.bitnet")
    noisy = Sampler(resolve({"temperature": 1e6, "top_k": 40}), config.vocab_size)
    with Model.load(tmp_path / "m.bitnet", threads=1) as model, model.session() as session:
        said: dict[int, list[int]] = {}
        for others in (0, 12, 13, 100):  # of 100 tokens
            text = [*range(frequent, frequent + others), *range(100 - others)]
            session.rewind(0)
            session.feed(text)
            for seed in range(6):
                session.seed(seed)
                said.setdefault(others, []).extend(token for token, _ in session.guess(noisy, 5, 3))
            with session.fork() as other:
                other.rewind(50)
                other.feed(text[50:])
                assert [token for token, _ in other.guess(noisy, 5, 3)] == said[others][-3:]
        assert all((max(tokens) < frequent) == (others <= 12) for others, tokens in said.items())
        for first in (0, frequent):
            prompts = [list(range(first, first + n)) for n in (30, 50)]
            expected = model.generate(prompts, max_tokens=60, seed=1, draft=0)
            found = model.generate(prompts, max_tokens=60, seed=1)
            assert [result.tokens for result in found] == [result.tokens for result in expected]
