"""One vector per text: the engine compared with torch, and what both refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_cli import main
from bitnet_export import VerificationError, export_checkpoint
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_runtime import (
    CacheFullError,
    ContextLengthError,
    InvalidParameterError,
    Model,
    NumericError,
    StateError,
    TokenizerError,
    UnsupportedModelError,
    available_isas,
)
from drawn_models import drawn, made
from runtime_models import small_model
from servers import post, served

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

QWEN = ModelConfig(
    vocab_size=301, dim=40, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=12, ffn_dim=72, max_context=320,
    has_head=False, pooling="last", linear_norm=True, qk_norm=True, sub_norm=False, activation="silu", norm_eps=1e-6,
)  # fmt: skip
GEMMA = QWEN.replace(
    n_heads=3, n_kv_heads=1, ffn_dim=71, activation="gelu", post_norm=True, embedding_scale=6.3, sliding_window=9,
    global_every=3, rope_theta=1e6, rope_local_theta=1e4, pooling="mean",
)  # fmt: skip


@pytest.fixture(scope="module", params=["qwen", "gemma"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    config = {"qwen": QWEN, "gemma": GEMMA}[request.param]
    return made(config, tmp_path_factory.mktemp("embed"), std=0, words=True)


@pytest.fixture
def embedder(pair: tuple[Transformer, Path]) -> Iterator[Model]:
    with Model.load(pair[1], threads=2) as model:
        yield model


@pytest.mark.parametrize("pooling", [None, "last", "mean", "first"])
def test_vectors_are_those_of_torch(pair: tuple[Transformer, Path], pooling: str | None) -> None:
    reference, path = pair
    texts = torch.randint(0, 301, (32, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Model.load(path, kv_type="f32") as model:
        expected = reference.embed(texts, pooling or "").numpy()
        found = model.embed(texts.tolist(), pooling=pooling)
    assert found.dtype == np.float32 and found.shape == (32, 40)
    worst = np.abs(found - expected).max(axis=1)
    # Two fp32 programs differ by 1e-6 until one activation falls on the other side of a rounding edge.
    assert np.median(worst) < 1e-5 and worst.max() < 0.02
    # as the length is 1, of 40 squares each rounded to 2**-24 relative
    assert np.abs(np.linalg.norm(found.astype(float), axis=1) - 1).max() < 1e-6


def test_long_texts_are_within_the_floor(pair: tuple[Transformer, Path]) -> None:
    """A vector is either the same to 1e-7 or has met a rounding edge: of the means of many texts enough have."""
    reference, path = pair
    texts = torch.randint(0, 301, (96, 300), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), Model.load(path, kv_type="f32") as model:
        fp32 = reference.embed(texts, "mean").double().numpy()
        fp64 = reference.double().embed(texts, "mean").numpy()
        reference.float()
        found = model.embed(texts.tolist(), pooling="mean").astype(float)
    floor, distance = (np.linalg.norm(x - fp32, axis=1).mean() for x in (fp64, found))
    assert distance <= 1.5 * floor + 1e-5  # the noise floor: torch's own distance between fp32 and fp64


def test_same_bits_for_every_tier_thread_count_list_and_cut(pair: tuple[Transformer, Path]) -> None:
    lengths = (1, 2, 130, 17, 300, 256, *[1, 2, 3] * 30)  # alone, and up to 64 together
    texts = [[(i * i + j) % 301 for i in range(n)] for j, n in enumerate(lengths)]
    found = set()
    for isa in available_isas():
        for threads in (1, 2):
            with Model.load(pair[1], isa=isa, threads=threads) as model:
                found.add(model.embed(texts).tobytes())
                found.add(np.concatenate([model.embed(text) for text in texts]).tobytes())
                with model.session() as session:
                    rows = []
                    for text in texts:
                        session.reset()
                        rows.append([session.embed(text[start : start + 37]) for start in range(0, len(text), 37)][-1])
                    found.add(np.stack(rows).tobytes())
    assert len(found) == 1


def test_export_compares_vectors(tmp_path: Path) -> None:
    for name, config in (("own", GEMMA), ("none", QWEN.replace(pooling="none"))):
        drawn(config, tmp_path / name, std=0, words=True)
        report = export_checkpoint(tmp_path / name, tmp_path / f"{name}.bitnet", tokens=512)
        assert report.short.vectors and report.long.vectors and report.short.tokens == 64 * 8
        assert report.short.median <= 1e-5 and 0 < report.long.worst < 0.1
        assert "8 tokens: vectors differ by" in str(report)


def test_export_finds_an_engine_that_pools_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(QWEN, tmp_path / "checkpoint", std=0, words=True)
    right = Model.embed
    monkeypatch.setattr(Model, "embed", lambda model, texts, pooling: right(model, texts, pooling="first"))
    with pytest.raises(VerificationError, match="engine against torch: median difference in short prompts"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "m.bitnet", tokens=512)
    assert not (tmp_path / "m.bitnet").exists()


def test_texts_and_tokens(embedder: Model) -> None:
    whole = embedder.embed(["abc", embedder.tokenize("naïve"), "abc"])
    assert np.array_equal(whole[0], whole[2]) and not np.array_equal(whole[0], whole[1])
    assert np.array_equal(embedder.embed("naïve"), whole[1:2])
    assert embedder.embed([]).shape == (0, 40)
    if embedder.tokenize(""):
        assert np.array_equal(embedder.embed(""), embedder.embed([""])) and embedder.embed("").shape == (1, 40)
    else:
        with pytest.raises(InvalidParameterError, match=r"text\[0\] has no tokens"):
            embedder.embed("")
    assert (embedder.has_head, embedder.pooling in ("last", "mean")) == (False, True)


def test_no_head_no_text(embedder: Model) -> None:
    calls: tuple[Any, ...] = (
        lambda: embedder.generate("abc"),
        lambda: embedder.generate(["abc", "de"]),
        lambda: embedder.stream("abc"),
        lambda: embedder.score("abc"),
    )
    for call in calls:
        with pytest.raises(UnsupportedModelError, match=r"has no head, .* see Model\.embed"):
            call()
    with embedder.session() as session:
        for rows in ("last", "all"):
            with pytest.raises(UnsupportedModelError, match="has no head"):
                session.append(list(range(200)), rows)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedModelError, match="has no head"):
            session.score([1, 2])
        assert session.position == 0
        session.append([1, 2], "none")
        with pytest.raises(StateError):
            session.sample()
        with pytest.raises(StateError):
            session.embed([3])  # the session holds tokens that came another way


@pytest.mark.parametrize("verb", [["generate", "-p", "abc"], ["chat"]])
def test_verbs_that_need_a_head_say_so(
    verb: list[str], pair: tuple[Transformer, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb[0], str(pair[1]), *verb[1:]]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1].startswith("bitnet: error: m.bitnet has no head")


def test_chat_refuses_an_encoder_with_a_head_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_model(tmp_path, config=QWEN.replace(has_head=True, mask="bidirectional", vocab_size=512))
    assert main(["chat", str(path)]) == 1
    assert "is bidirectional: its tokens see those that follow" in capsys.readouterr().err


def test_a_packed_encoder_is_not_measured(pair: tuple[Transformer, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(pair[1])]) == 1
    assert "is a packed encoder, which is not measured; measure its run" in capsys.readouterr().err


def test_inspect_shows_what_the_model_is_for(
    pair: tuple[Transformer, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(pair[1])]) == 0
    shown = capsys.readouterr().out
    assert "has_head=false" in shown and f"pooling={pair[0].config.pooling}" in shown


def test_refusals(embedder: Model) -> None:
    with pytest.raises(InvalidParameterError, match="pooling is 'max'; expected one of last, mean, first"):
        embedder.embed("abc", pooling="max")
    with pytest.raises(InvalidParameterError, match=r"text\[1\] has no tokens"):
        embedder.embed(["abc", ""])
    with pytest.raises(InvalidParameterError, match=r"text\[1\], None: text is None, expected a text, or token ids"):
        embedder.embed(["abc", None])  # type: ignore[list-item]
    with pytest.raises(InvalidParameterError, match="id 301, expected ids from 0 to 300"):
        embedder.embed([[1, 301]])
    with pytest.raises(ContextLengthError, match="321 tokens"):
        embedder.embed([[1], [1] * 321])


def test_a_decoder_embeds_when_a_pooling_is_named(tmp_path: Path) -> None:
    with Model.load(small_model(tmp_path)) as model:
        assert model.has_head and model.pooling is None
        with pytest.raises(InvalidParameterError, match="pooling is not given, and the model names none"):
            model.embed("abc")
        last, mean = (model.embed("abc", pooling=pooling) for pooling in ("last", "mean"))
        assert last.shape == mean.shape == (1, 64) and not np.array_equal(last, mean)
        assert model.generate("abc", max_tokens=3, temperature=0).usage.completion_tokens == 3


def test_a_list_is_embedded_as_far_as_the_cache_has_room(tmp_path: Path) -> None:
    path, texts = small_model(tmp_path), [[1 + i] * 30 for i in range(7)]
    with Model.load(path, threads=1) as model:
        expected = model.embed(texts, pooling="mean")
        limit = 3 * 64 * model.kv_bytes_per_token
    with Model.load(path, threads=1, cache_bytes=limit) as model:
        assert np.array_equal(model.embed(texts, pooling="mean"), expected)
        with pytest.raises(CacheFullError):
            model.embed([[1], [2] * 200], pooling="mean")
        assert model.cache_bytes == 0


def test_a_text_that_overflows_is_named(tmp_path: Path) -> None:
    weights = drawn(QWEN, tmp_path / "checkpoint", std=0).state_dict()
    weights["embedding.weight"][7] = 3e38
    save_file(weights, tmp_path / "checkpoint/model.safetensors")
    pack_checkpoint(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "m.bitnet")
    with Model.load(tmp_path / "m.bitnet", threads=1) as engine:
        texts = [[1, 2], [3], [4, 5, 6], [8, 7], [9]]
        with pytest.raises(NumericError, match=r"^text\[3\]: "):
            engine.embed(texts)
        with pytest.raises(NumericError, match=r"^(?!text)"):
            engine.embed(texts[3])
        assert engine.embed([*texts[:3], texts[4]]).shape == (4, QWEN.dim)
    with served(tmp_path / "m.bitnet") as serving:
        for given, said in ((texts, "input 3: "), ([[8] * 200, *texts[3:]], "input 1: "), (texts[3], "")):
            status, answer = post(serving, "/v1/embeddings", {"input": given, "pooling": "mean"})
            message = answer["error"]["message"]
            assert status == 500 and message.startswith(said) and message.startswith("input") == bool(said)


def test_a_file_without_a_tokenizer_takes_tokens(tmp_path: Path) -> None:
    drawn(QWEN, tmp_path / "checkpoint", std=0, words=True)
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    pack_checkpoint(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "m.bitnet")
    with Model.load(tmp_path / "m.bitnet") as model:
        assert math.isclose(float((model.embed([1, 2, 3]) ** 2).sum()), 1, rel_tol=1e-5)  # fp32 sum of 40
        with pytest.raises(TokenizerError, match="has no tokenizer"):
            model.embed("abc")
