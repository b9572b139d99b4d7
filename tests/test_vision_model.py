"""Vision models in torch: the configuration of two stacks, their inputs and outputs, and which parts learn."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitnet.config import ModelConfig, not_yet
from bitnet.model.images import patches_of
from bitnet.model.pooling import Pool
from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from bitnet.settings import Settings
from bitnet.setup.given import Given
from bitnet.setup.resolve import resolve
from bitnet.train import optimizers
from bitnet.train.source_model import Start
from vision_models import CAUSAL, CLIP, FAMILIES, PALIGEMMA, TOWERS, VISION, loss_of, pixels, prompt, seeded

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work


# ---- the configuration ----


@pytest.mark.parametrize("name", FAMILIES)
def test_two_stacks_round_trip(name: str) -> None:
    config = FAMILIES[name]
    again = ModelConfig.from_dict(json.loads(config.to_json()))
    assert again == config and hash(again) == hash(config)
    assert ModelConfig.of_stacks(config.stacks) == config
    assert [stack.vision for stack in config.stacks] == [None, None] and not_yet(config) == []
    assert config.vision and config.ternary_weights == sum(stack.ternary_weights for stack in config.stacks)


def test_a_change_of_one_option_leaves_the_others() -> None:
    config = TOWERS.replace(vision={"dim": 40, "patch_size": 7}, out_dim=40)
    assert config.vision == VISION.replace(dim=40, patch_size=7)
    assert config.vision.max_context == 4 and config.vision.ternary == VISION.ternary
    assert VISION.replace(class_token=True).max_context == 10
    assert CAUSAL.replace(global_every=2, sliding_window=4).of_layer(0).vision == CAUSAL.vision


def test_options_of_the_stack_that_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "towers", TOWERS)
    file = tmp_path / "my.toml"
    file.write_text('preset = "towers"\n[model]\nout_dim = 48\n[model.vision]\ndim = 40\nn_layers = 3\n')
    given = Given(options={}, config=str(file), model=["vision.dim=48", "vision.patch_bias=no", "dim=64"])
    config = resolve(given)[1]
    assert config == TOWERS.replace(dim=64, out_dim=48, vision={"dim": 48, "n_layers": 3, "patch_bias": False})
    for text, message in (
        ("vision.dimm=4", "unknown model option 'vision.dimm', did you mean 'vision.dim'?"),
        ("vision.vision=4", "unknown model option 'vision.vision'"),
        ("vision=4", "unknown model option 'vision'"),
        ("vision.dim=0", "vision: dim is 0, expected an integer from 1"),
        ("vision.patch_size=x", "vision: patch_size is 'x'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            resolve(Given(options={"preset": "towers"}, model=[text]))
    file.write_text('preset = "towers"\n[model]\nvision = 3\n')
    with pytest.raises(ValueError, match=r"vision is 3, expected a table \[model.vision\]"):
        resolve(Given(options={}, config=str(file)))
    with pytest.raises(ValueError, match="vision: model option 'n_layers' is missing"):
        resolve(Given(options={}, model=["vision.dim=48"]))
    saved = {"settings": Settings(preset="towers").to_dict(), "model": TOWERS.to_dict(), "step": 3, "seconds": 1.0}
    saved |= {"tokens": 9, "parameters": 9}
    with pytest.raises(ValueError, match=r"keeps its model, which has vision.n_layers = 2;"):
        resolve(Given(options={}, model=["vision.n_layers=3"]), saved)
    assert resolve(Given(options={}, model=["vision.n_layers=2"]), saved)[1] == TOWERS


@pytest.mark.parametrize(
    ("options", "model", "tower", "ternary", "warmup"),
    [({}, [], (), True, 0.5), ({"quantize_warmup": 0.3}, [], (), True, 0.3),
     ({"freeze_vision": True}, [], (), False, 0), ({}, ["ternary=[]"], (), False, 0),
     ({}, ["vision.ternary=['q']"], (), True, 0.5), ({}, [], ("q",), True, 0)],
)  # fmt: skip
def test_a_stack_in_full_precision_becomes_ternary_where_the_rest_is(
    options: dict[str, Any], model: list[str], tower: tuple[str, ...], ternary: bool, warmup: float
) -> None:
    """And gradually, though a decoder's preset is ternary from the first step."""
    start = Start("a tower", VISION.replace(ternary=tower), {}, None)
    given = Given(options={"preset": "paligemma-tiny", "vision": "tower", **options}, model=model)
    settings, config = resolve(given, tower=start)
    assert config.vision and bool(config.vision.ternary) == ternary and settings.quantize_warmup == warmup
    assert config.vision.pooling == "none" and config.vision.out_dim == config.dim
    with pytest.raises(ValueError, match=r"--vision tower has no vision stack; name a model that sees images"):
        resolve(given, tower=Start("a text", TOWERS.stacks[0], {}, None))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (TOWERS, {"vision": {"out_dim": 35}}, "images give vectors of 35 numbers and texts of 36, expected as many"),
        (TOWERS, {"pooling": "none"}, "pooling is 'none', expected a pooling to one vector"),
        (TOWERS, {"vision": {"pooling": "none"}}, "vision.pooling is 'none', expected a pooling to one vector"),
        (TOWERS, {"has_head": True}, "has_head is True with vision and image_token = 0, expected an image_token"),
        (TOWERS, {"name": "vision"}, "name and vision.name are both 'vision'"),
        (TOWERS, {"vision": TOWERS.stacks[0]}, "vision.input is 'tokens', expected 'images' of a model with vision"),
        (TOWERS, {"vision": TOWERS}, "vision.input is 'tokens'"),
        (TOWERS, {"vision": 7}, "vision is 7, expected a table of options"),
        (TOWERS, {"vision": []}, "vision is [], expected a table of options"),
        (TOWERS, {"vision": {"patch_size": 15}}, "vision: patch_size is 15 with input = 'images', expected an integer"),
        (TOWERS, {"vision": {"has_head": True, "vocab_size": 9}}, "vision: has_head is True of images, expected"),
        (PALIGEMMA, {"mask": "bidirectional"}, "expected a decoder: a head, and the mask 'prefix' or 'causal'"),
        (
            VISION,
            {"image_size": 4730},
            "image_size is 4730 with 3 channels, expected at most 67108864 values of pixels",
        ),
        (VISION, {"image_size": 1028}, "an image has 66049 tokens, expected at most 65536; use larger patches"),
        (PALIGEMMA, {"vision": {"out_dim": 0}}, "vision gives vectors of 36 numbers, expected 42, the dim of the"),
        (PALIGEMMA, {"input": "embeddings"}, "input is 'embeddings', expected 'tokens' of a model with vision"),
        (PALIGEMMA, {"image_token": 257}, "image_token is 257, expected an integer from 0 to 256"),
        (VISION, {"patch_size": 4.0}, "patch_size is 4.0"),
        (VISION, {"vision": VISION.replace(name="other")}, "input is 'images', expected 'tokens'"),
    ],
)
def test_stacks_that_do_not_go_together(config: ModelConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config.replace(**changes)


def test_a_vision_stack_has_none_of_its_own() -> None:
    object.__setattr__(vision := VISION.replace(), "vision", VISION.replace(name="inner"))
    with pytest.raises(ValueError, match=re.escape("expected None of a model with vision")):
        TOWERS.replace(vision=vision)
    values = TOWERS.to_dict()
    values["vision"]["vision"] = TOWERS.stacks[0].to_dict() | {"input": "tokens"}
    with pytest.raises(ValueError, match=re.escape("vision.vision is given, expected none")):
        ModelConfig.from_dict(values)


def test_an_image_token_without_images_is_refused() -> None:
    with pytest.raises(ValueError, match="image_token is 250 without vision, expected a stack that sees images"):
        Transformer(PALIGEMMA.stacks[0])


@pytest.mark.parametrize(
    ("preset", "whole", "seeing"),
    [
        ("siglip-base", 203_155_970, 92_884_224),
        ("clip-base", 151_277_313 + 1, 87_849_216),  # and a bias, which it does not have
        ("paligemma-3b", 2_923_466_480, 414_803_696),  # of which the projector has 2,361,344
    ],
)
def test_published_shapes_have_their_published_sizes(preset: str, whole: int, seeing: int) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[preset])
    assert sum(p.numel() for p in model.parameters()) == whole
    assert model.vision and sum(p.numel() for p in model.vision.parameters()) == seeing


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [(VISION, {"mask": "causal"}, "mask is 'causal' of images, expected 'bidirectional'"),
     (VISION, {"mask": "prefix"}, "mask is 'prefix' of images, expected 'bidirectional'"),
     (VISION, {"has_head": True, "vocab_size": 9}, "has_head is True of images, expected False"),
     (TOWERS, {"pooling": "attention"}, "pooling is 'attention' for texts, expected none, last, mean or first")],
)  # fmt: skip
def test_what_no_model_has(config: ModelConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.replace(**changes)


# ---- what enters ----


def test_patches_by_hand() -> None:
    config = VISION.replace(image_size=5, patch_size=2, channels=2, pixel_mean=(0.0, 0.0), pixel_std=(1.0, 1.0))
    image = torch.arange(50.0).reshape(1, 2, 5, 5)  # 25·channel + 5·y + x
    patches = patches_of(config, image)
    assert patches.shape == (1, 4, 8)
    assert patches[0, 0].tolist() == [0, 1, 5, 6, 25, 26, 30, 31]
    assert patches[0, 1].tolist() == [2, 3, 7, 8, 27, 28, 32, 33]  # x = 4 and y = 4 are left out
    assert patches[0, 2].tolist() == [10, 11, 15, 16, 35, 36, 40, 41]


def test_a_patch_matrix_is_a_convolution() -> None:
    model, image = seeded(VISION).double(), pixels(2, VISION).double()
    weight = model.patch.weight.reshape(36, 3, 4, 4)
    expected = F.conv2d(image, weight, model.patch.bias, stride=4).flatten(2).mT
    assert torch.allclose(model.patch(patches_of(VISION, image)), expected, atol=1e-12)
    entering = model.entering(image)
    assert torch.allclose(entering, expected + model.position.weight, atol=1e-12)


def test_a_class_token_comes_first() -> None:
    config = VISION.replace(class_token=True, embedding_norm=True)
    model, image = seeded(config), pixels(2, config)
    x = torch.cat([model.class_embedding.expand(2, 1, 36), model.patch(patches_of(config, image))], 1)
    assert model.entering(image).equal(model.embedding_norm(x + model.position.weight))
    assert model.hidden(image).shape == (2, 10, 36)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 14, 13), torch.float32), ((2, 14, 14, 3), torch.float32), ((3, 14, 14), torch.float32),
     ((2, 3, 14, 14), torch.uint8), ((2, 27, 48), torch.float32)],
)  # fmt: skip
def test_pixels_of_another_shape_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = f"images are {dtype} of shape {shape}, expected floats of shape (batch, 3, 14, 14)"
    with pytest.raises(ValueError, match=re.escape(expected)):
        seeded(VISION).embed(torch.zeros(shape, dtype=dtype))


def test_every_option_of_images_is_used() -> None:
    base, image = VISION.replace(pooling="first", out_dim=5), pixels(1, VISION)
    for changes in (
        {"class_token": True}, {"patch_size": 5}, {"patch_bias": False}, {"projector_bias": True}, {"out_dim": 4},
        {"out_dim": 0}, {"pooling": "attention"}, {"pooling": "mean"},
    ):  # fmt: skip
        before, after = (seeded(config).embed(image) for config in (base, base.replace(**changes)))
        assert before.shape != after.shape or not before.allclose(after), changes


# ---- what leaves ----


@pytest.mark.parametrize("n_kv_heads", [3, 1])
def test_a_pool_is_multi_head_attention_with_a_probe(n_kv_heads: int) -> None:
    """It has as many heads for keys as for queries, whatever the layers have."""
    pool = seeded(VISION.replace(n_kv_heads=n_kv_heads)).double().pool
    assert isinstance(pool, Pool)
    other = nn.MultiheadAttention(36, 3, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 9, 36, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        other.in_proj_weight.copy_(torch.cat([pool.q.weight, pool.k.weight, pool.v.weight]))
        other.in_proj_bias.copy_(torch.cat([pool.q.bias, pool.k.bias, pool.v.bias]))
        other.out_proj.weight.copy_(pool.o.weight)
        other.out_proj.bias.copy_(pool.o.bias)
        y = other(pool.probe.expand(2, 1, 36), x, x)[0][:, 0]
        expected = y + pool.down(F.gelu(pool.up(pool.norm(y)), approximate="tanh"))
        assert torch.allclose(pool(x), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["towers", "clip"])
def test_vectors_of_two_towers(name: str) -> None:
    model, images = seeded(FAMILIES[name]), pixels(3, FAMILIES[name])
    texts = torch.randint(0, 257, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        both = model(texts, images=images)
        assert both.shape == (5, model.config.width)
        assert both.norm(dim=1).allclose(torch.ones(5))
        assert both[:2].equal(model(texts)) and both[2:].equal(model.vision.embed(images))  # type: ignore[union-attr]
        hidden = model.hidden(texts)[:, -1]
        assert both[:2].equal(F.normalize(model.projector(hidden), dim=-1))  # type: ignore[misc]
        one = model.vision.embed(images[1:2])  # type: ignore[union-attr]
        assert one.allclose(both[3], atol=2e-3)  # a code of int8 may fall on the other side in another batch


def test_similarity_begins_as_siglip_does_or_as_it_is_told() -> None:
    similarity = seeded(TOWERS).similarity
    assert similarity and similarity.log_scale.item() == pytest.approx(math.log(10)) and similarity.bias.item() == -10
    told = seeded(CLIP).similarity
    assert told and told.log_scale.exp().item() == pytest.approx(14.3) and told.bias.item() == 0
    a, b = torch.eye(4)[:2], torch.eye(4)
    assert told(a, b).allclose(14.3 * a @ b.T) and similarity(a, b)[0].tolist() == pytest.approx([0, -10, -10, -10])
    assert seeded(PALIGEMMA).similarity is None


# ---- images in a decoder ----


def test_images_take_the_places_of_their_token() -> None:
    model, row, images = seeded(PALIGEMMA), prompt(PALIGEMMA, 2, 6, rows=2), pixels(4, PALIGEMMA)
    with torch.no_grad():
        features = model.vision.features(images)  # type: ignore[union-attr]
        assert features.shape == (4, 9, 42)

        x = model.entering(row, images=images)
        assert x[:, :18].equal(features.reshape(2, 18, 42))  # as they are: no scale of the embedding
        assert x[:, 18:].equal(model.entering(row[:, 18:]))
        expected = model(row, images=images)
        assert model(row, images=images.unflatten(0, (2, 2))).equal(expected)
        assert model(row, images=[images[:2], images[2:]]).equal(expected)
        vectors = model(x, prefix_B=None)  # the same as vectors that someone else gives
        assert vectors.equal(expected)
        assert not model(row, images=images.flip(0)).allclose(expected)


def test_images_anywhere_in_the_text_and_a_text_without() -> None:
    model, images = seeded(CAUSAL), pixels(1, CAUSAL)
    row = prompt(CAUSAL, 1, 6)
    spread = torch.cat([row[:, 9:12], row[:, :4], row[:, 12:13], row[:, 4:9], row[:, 13:]], 1)
    with torch.no_grad():
        x, features = model.entering(spread, images=images), model.vision.features(images)[0]  # type: ignore[union-attr]
        assert x[0, 3:7].equal(features[:4]) and x[0, 8:13].equal(features[4:])
        two, without = torch.cat([row, row[:, 9:].repeat(1, 3)[:, :15]]), row[:, 9:].repeat(1, 3)[:, :15]
        assert model(two, images=[images, images[:0]])[1].allclose(model(without)[0], atol=1e-5)


def test_the_prefix_of_images_and_prompt_sees_itself() -> None:
    model, row, images = seeded(PALIGEMMA), prompt(PALIGEMMA, 1, 6), pixels(2, PALIGEMMA)
    prefix, other = torch.tensor([12]), row.clone()
    other[0, 11] += 1
    with torch.no_grad():
        first, second = (model.hidden(r, None, prefix, images[:1]) for r in (row, other))
        assert not first[0, 0].allclose(second[0, 0])  # an image sees the prompt
        other[0, 11:13] += torch.tensor([-1, 1])
        assert model.hidden(other, None, prefix, images[:1])[0, :12].equal(first[0, :12])  # and not the answer


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (None, "the texts have 18 places for vectors of images (token 250), expected 0: 0 images of 0 vectors"),
        (pixels(1, PALIGEMMA), "the texts have 18 places for vectors of images (token 250), expected 9: 1 images of 9"),
        (pixels(3, PALIGEMMA), "the texts have 18 places for vectors of images (token 250), expected 27: 3 images"),
        ([pixels(2, PALIGEMMA), pixels(0, PALIGEMMA)], "text 0 has 9 places for vectors of images (token 250), expected"
         " 18: 2 images of 9 vectors each"),
        ([pixels(2, PALIGEMMA)], "there are images of 1 texts, expected those of 2"),
    ],
)  # fmt: skip
def test_a_count_that_does_not_fit(images: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        seeded(PALIGEMMA)(prompt(PALIGEMMA, 1, 4, rows=2), images=images)


# ---- training ----


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_learns(name: str) -> None:
    config = FAMILIES[name]
    torch.manual_seed(0)
    model = Transformer(config)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = loss_of(model, config)
        optimizer.zero_grad()
        loss.backward()
        unmoved = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not losses or unmoved == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("name", ["towers", "paligemma"])
def test_recomputed_gradients_are_the_same_with_dropout(name: str) -> None:
    config = FAMILIES[name].replace(dropout=0.2, vision={"dropout": 0.2})
    model, found = seeded(config).train(), []
    for recompute in (False, True):
        model.recompute = recompute
        assert [stack.recompute for stack in model.stacks] == [recompute] * 2
        model.zero_grad()
        torch.manual_seed(1)
        loss_of(model, config).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) and all(a.equal(b) for a, b in zip(*found, strict=True))


def test_quantizers_of_both_stacks_are_phased_in_together() -> None:
    model, image = seeded(TOWERS), pixels(1, TOWERS)
    assert model.vision
    with torch.no_grad(), model.partly_quantized(0.0):
        plain = Transformer(TOWERS.replace(ternary=(), vision={"ternary": ()}))
        plain.load_state_dict(model.state_dict())
        assert plain.vision and plain.vision.embed(image).allclose(model.vision.embed(image), atol=1e-6)
    with torch.no_grad():
        assert not plain.vision.embed(image).allclose(model.vision.embed(image), atol=1e-4)


def test_an_optimizer_has_the_matrices_of_both_stacks() -> None:
    matrices, others = optimizers.of_layers(model := seeded(TOWERS))
    ids = {id(p) for p in matrices}
    names = {name for name, p in model.named_parameters() if id(p) in ids}
    assert len(names) == 2 * 2 * 6 and {name.split(".")[-2] for name in names} == {"q", "k", "v", "o", "up", "down"}
    assert len(matrices) + len(others) == len(list(model.parameters()))


def test_fields_are_those_of_both() -> None:
    """A new field of a stack belongs to both: nothing is left out of the nested dictionary."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    values = TOWERS.to_dict()
    assert set(values) == names == set(values["vision"]) and values["vision"]["vision"] is None
