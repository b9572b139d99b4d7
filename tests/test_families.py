"""Properties of the families other than the plain decoder: masks, documents, vectors for tokens, experts, dropout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import vision_models
from bitnet.config import ModelConfig
from bitnet.model.block import Block, routes
from bitnet.model.masks import positions, visible
from bitnet.model.positions import sinusoids
from bitnet.model.transformer import Transformer
from bitnet_export import PackedFile, random_model

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

SMALL = ModelConfig(
    vocab_size=61, dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=80, max_context=64,
)  # fmt: skip
ENCODER: dict[str, Any] = {"mask": "bidirectional", "norm": "layer", "norm_bias": True, "position": "learned"}
EXPERTS: dict[str, Any] = {"n_experts": 5, "experts_per_token": 2}


def seeded(config: ModelConfig) -> Transformer:
    torch.manual_seed(7)
    model = Transformer(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.double().eval()  # exact but for the staircase of int8, the same in both arms of a comparison


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(3))


def test_who_sees_whom() -> None:
    like = torch.zeros(1)
    causal = visible("causal", 3, 0, None, None, like)
    assert causal.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert visible("bidirectional", 3, 0, None, None, like).all()
    two = visible("prefix", 3, 0, None, torch.tensor([0, 2]), like)
    assert two[0, 0].equal(causal)
    assert two[1, 0].tolist() == [[True, True, False], [True, True, False], [True, True, True]]
    near = visible("bidirectional", 4, 2, None, None, like)
    assert near.tolist() == [[abs(i - j) < 2 for j in range(4)] for i in range(4)]
    documents = torch.tensor([[4, 4, 7]])
    apart = visible("bidirectional", 3, 0, documents, None, like)
    assert apart[0, 0].tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    assert positions(documents).tolist() == [[0, 1, 0]]
    again = visible("bidirectional", 3, 0, torch.tensor([[4, 7, 4]]), None, like)
    assert again[0, 0].equal(torch.eye(3, dtype=torch.bool))  # a document is a run: a number may come again


@pytest.mark.parametrize("changes", [{}, ENCODER, {"position": "sinusoidal"}, {"position": "none"}, EXPERTS])
def test_texts_in_one_row_are_as_alone(changes: dict[str, Any]) -> None:
    """So padding, which is a document of its own, changes nothing: this is the padding mask."""
    model, a, b = seeded(SMALL.replace(**changes)), tokens(1, 9), tokens(1, 20)[:, 13:]
    row, documents = torch.cat([a, b], 1), torch.tensor([[0] * 9 + [1] * 7])
    with torch.no_grad():
        together = model(row, documents)
        assert torch.allclose(together[:, :9], model(a), atol=1e-9)  # fp64, other order of sums
        assert torch.allclose(together[:, 9:], model(b), atol=1e-9)


def test_a_prefix_is_seen_whole_and_the_rest_is_causal() -> None:
    model, row = seeded(SMALL.replace(mask="prefix")), tokens(1, 12)
    prefix, later = torch.tensor([5]), row.clone()
    later[0, 4] += 1
    with torch.no_grad():
        before, after = model(row, prefix_B=prefix), model(later % 61, prefix_B=prefix)
        assert not torch.isclose(before[0, 0], after[0, 0]).all()  # the first token sees the fifth
        cut = model(row[:, :8], prefix_B=prefix)
        assert torch.allclose(before[:, :8], cut, atol=1e-9)  # and nothing behind the prefix
        assert model(row, prefix_B=torch.tensor([0])).equal(model(row))


@pytest.mark.parametrize("changes", [{}, {"position": "learned"}, {"embedding_scale": 3.0, "position": "sinusoidal"}])
def test_vectors_in_place_of_tokens(changes: dict[str, Any]) -> None:
    """Rows skip the embedding and its scale: the caller gives what enters the stack."""
    config = SMALL.replace(**changes, head_format="f32")
    model, row = seeded(config), tokens(2, 7)
    with torch.no_grad():
        vectors = config.embedding_scale * model.get_parameter("embedding.weight")[row]
        assert model(vectors).equal(model(row))
        tower = Transformer(config.replace(input="embeddings", has_head=False, pooling="mean"))
        assert "embedding.weight" not in tower.state_dict()
        assert tower.embed(vectors.float()).shape == (2, 48)
        with pytest.raises(ValueError, match="takes vectors"):
            tower.embed(row)


def test_sinusoids_by_hand() -> None:
    table = sinusoids(3, 5)
    a, b, c = 2.0, 2 / 10_000**0.4, 2 / 10_000**0.8
    expected = [math.sin(a), math.cos(a), math.sin(b), math.cos(b), math.sin(c)]
    assert table[2].tolist() == pytest.approx(expected, abs=6e-8)  # rounded to fp32
    assert table.dtype == torch.float32 and table[0].tolist() == [0, 1, 0, 1, 0]


def test_sinusoids_of_a_random_model(tmp_path: Path) -> None:
    """Computed by numpy, as it needs no torch; the two sines may differ in the last place of fp64."""
    random_model(SMALL.replace(position="sinusoidal", dim=47, max_context=50), tmp_path / "m.bitnet")
    file = PackedFile.open(tmp_path / "m.bitnet")
    table = next(file.values(record) for record in file.tensors.values() if record.key.name == "position.weight")
    assert torch.allclose(torch.from_numpy(table), sinusoids(50, 47), rtol=0, atol=6e-8)


@pytest.mark.parametrize("name", ["towers", "clip", "paligemma", "causal"])
def test_an_image_is_seen_the_same_whatever_else_is_in_the_batch(name: str) -> None:
    config = vision_models.FAMILIES[name]
    model, images = seeded(config).vision, vision_models.pixels(4, config).double()
    assert model
    with torch.no_grad():
        together = model.features(images)
        for i, image in enumerate(images):
            assert torch.allclose(together[i], model.features(image[None])[0], atol=1e-9)


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
def test_texts_of_a_tower_in_one_row_are_as_alone(pooling: str) -> None:
    """The vector of a row is that of its first text: filling, a document of its own, changes nothing."""
    model, text = seeded(vision_models.TOWERS.replace(pooling=pooling)), tokens(1, 9)
    filled, documents = torch.cat([text, tokens(1, 20)[:, 13:]], 1), torch.tensor([[0] * 9 + [1] * 7])
    with torch.no_grad():
        assert torch.allclose(model.embed(filled, documents_BT=documents), model.embed(text), atol=1e-9)


def test_images_in_rows_of_two_texts() -> None:
    """Each text of a row has its own images and its own positions."""
    model, config = seeded(vision_models.CAUSAL), vision_models.CAUSAL
    row, images = vision_models.prompt(config, 1, 5, rows=2), vision_models.pixels(2, config).double()
    documents = torch.tensor([[0] * 14 + [1] * 14])
    with torch.no_grad():
        together = model(row.reshape(1, 28), documents, images=images)
        assert torch.allclose(together.reshape(2, 14, -1), model(row, images=images), atol=1e-9)


def test_routes() -> None:
    config = SMALL.replace(n_experts=4, experts_per_token=2)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    experts, shares, p = routes(config, logits)
    assert experts.tolist() == [[1, 3], [0, 1]]  # of equal ones the first
    assert shares.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    _, shares, _ = routes(config.replace(normalize_routing=False), logits)
    assert shares[0].tolist() == pytest.approx([p[0, 1].item()] * 2) and shares[1].tolist() == [0.25, 0.25]


def test_a_token_takes_its_experts_whatever_else_is_in_the_batch() -> None:
    model, batch = seeded(SMALL.replace(**EXPERTS)), tokens(6, 10)
    with torch.no_grad():
        together = model(batch)
        for i, text in enumerate(batch):
            assert torch.allclose(together[i], model(text[None])[0], atol=1e-9)


def test_experts_learn_and_are_counted() -> None:
    model = seeded(SMALL.replace(**EXPERTS))
    model.loss(tokens(4, 16), tokens(4, 16)).backward()
    block = model.layers[0]
    assert isinstance(block, Block)
    assert block.load.sum().item() == pytest.approx(1) and (block.load >= 0).all()
    assert 0 < block.balance.item() <= 5
    for name, parameter in model.named_parameters():
        taken = not name.startswith("layers.0.experts") or block.load[int(name.split(".")[3])] > 0
        assert (parameter.grad is not None and bool(parameter.grad.any())) == taken, name


def test_balance_by_hand() -> None:
    """X · Σ (share of the choices) · (mean probability): 1 when all are taken as often, X when one takes all."""
    config = SMALL.replace(n_experts=2, experts_per_token=1, normalize_routing=False, dim=2, n_heads=1, n_kv_heads=1)
    block = Block(config)
    with torch.no_grad():
        block.router.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        block.mixture(torch.tensor([[[9.0, 0.0], [0.0, 9.0]]]))
        assert block.load.tolist() == [0.5, 0.5] and block.balance.item() == pytest.approx(1)
        block.mixture(torch.tensor([[[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]]]))
    p = 1 / (1 + math.exp(-2))  # of the likelier expert
    assert block.load.tolist() == [0.75, 0.25]
    first = (3 * p + (1 - p)) / 4
    assert block.balance.item() == pytest.approx(2 * (0.75 * first + 0.25 * (1 - first)))


def test_padding_has_no_part_in_the_balance() -> None:
    model, texts = seeded(SMALL.replace(**EXPERTS)), tokens(2, 6)
    padded = torch.cat([texts, torch.zeros(2, 10, dtype=torch.int64)], 1)
    documents = torch.where(torch.arange(16) < 6, 0, -1).expand(2, -1)
    with torch.no_grad():
        model(texts)
        balance, loads = model.balance, [block.load for block in model.blocks]
        model(padded)
        assert not torch.allclose(model.balance, balance)
        model(padded, documents)
    assert torch.allclose(model.balance, balance)
    assert all(torch.equal(block.load, load) for block, load in zip(model.blocks, loads, strict=True))


@pytest.mark.parametrize("changes", [{}, EXPERTS, {"attention_softcap": 4.0}])
def test_recomputed_gradients_are_the_same(changes: dict[str, Any]) -> None:
    """Also with dropout, which has to drop the same values again."""
    model = seeded(SMALL.replace(**changes, dropout=0.3)).train()
    found = []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad()
        torch.manual_seed(1)
        model.loss(tokens(2, 9), tokens(2, 9)).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) and all(a.equal(b) for a, b in zip(*found, strict=True))


def test_dropout_is_for_training_only() -> None:
    model, row = seeded(SMALL.replace(dropout=0.5)), tokens(1, 8)
    with torch.no_grad():
        assert model(row).equal(seeded(SMALL)(row))
        model.train()
        torch.manual_seed(0)
        first = model(row)
        assert not first.equal(model(row))
        torch.manual_seed(0)
        assert first.equal(model(row))
        with model.evaluating():
            assert model(row).equal(seeded(SMALL)(row))
    assert model.training
    with pytest.raises(ValueError, match="dropout is 1"):
        SMALL.replace(dropout=1)


@pytest.mark.parametrize("changes", [{}, ENCODER, {"mask": "prefix", "attention_softcap": 2.0}, {"sliding_window": 3}])
def test_attention_weights(changes: dict[str, Any]) -> None:
    model, row = seeded(SMALL.replace(**changes)), tokens(2, 8)
    plain = model(row)
    for weights in model.attention_weights(row):
        assert weights.shape == (2, 4, 8, 8)
        assert torch.allclose(weights.sum(-1), torch.ones((), dtype=weights.dtype))
        assert model.config.mask == "bidirectional" or not weights.triu(1).any()
        assert not changes.get("sliding_window") or not weights.tril(-3).any()
    assert model(row).equal(plain)  # nothing is left behind
