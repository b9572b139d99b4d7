"""A checkpoint of a vision model as a packed file: its content, and what the engine computes from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint, CheckpointError
from bitnet_export import PackedFile, VerificationError, export_checkpoint, random_model
from bitnet_export.checkpoint import real_text, repack, scoring
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_export.checkpoint.pictures import drawn_images, engine_sees, normalized
from bitnet_export.checkpoint.scoring import NOTHING, behind_images, images_of, torch_scores
from bitnet_export.checkpoint.verify import _check_weights
from bitnet_runtime import Model
from picture_data import DECODER, questions
from picture_data import VISION as VISION_OPTIONS
from training import bitnet, saved
from vision_models import CAUSAL, FAMILIES, PALIGEMMA, TOWERS, VISION, captions, loss_of, prompt, seeded

torch.set_num_threads(1)

ALL = FAMILIES | {
    "alone": VISION,
    "features": VISION.replace(pooling="none"),
    "pooled": CAUSAL.replace(vision={"pooling": "mean"}),  # a decoder is shown what is not pooled
}


def checkpoint_of(run: Path, config: ModelConfig) -> Path:
    model = seeded(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".o.weight", ".down.weight")):
                parameter.normal_(std=0.02)
        if model.similarity:
            model.similarity.log_scale.fill_(math.log(7.5))
            model.similarity.bias.fill_(-3.25)
    return saved(run, model)


@pytest.mark.parametrize("name", ALL)
def test_every_number_of_both_stacks(name: str, tmp_path: Path) -> None:
    config, checkpoint = ALL[name], Checkpoint.open(checkpoint_of(tmp_path / "run", ALL[name]))
    pack_checkpoint(checkpoint, tmp_path / "m.bitnet")
    file = PackedFile.open(tmp_path / "m.bitnet")
    towers = config.vision and not config.image_token
    learnt: dict[str, Any] = {"similarity_scale": pytest.approx(7.5, rel=1e-6), "similarity_bias": -3.25}
    assert {field: getattr(file.config, field) for field in learnt} == (
        learnt if towers else {field: getattr(config, field) for field in learnt}
    )
    assert file.config.replace(**{field: getattr(config, field) for field in learnt}) == config
    facts = _check_weights(file, checkpoint.model)  # codes, scales and floats, each against training's
    assert facts["ternary_weights"] == config.ternary_weights
    assert len(facts["zero_fraction"]) == sum(stack.n_layers for stack in config.stacks)
    stored = {key.parameter(config.stacks) for key in file.tensors if not key.name.endswith("frequencies")}
    assert stored == {name for name in checkpoint.tensor_names() if not name.startswith("similarity")}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vision.patch.weight", None, "tensor vision.patch.weight is missing"),
        ("vision.pool.probe", None, "tensor vision.pool.probe is missing"),
        ("similarity.bias", None, "tensor similarity.bias is missing"),
        ("similarity.log_scale", torch.tensor([90.0]), "similarity.log_scale is "),
        ("similarity.bias", torch.tensor([math.nan]), "similarity.bias is "),
        ("vision.pool.k.weight", torch.zeros(12, 36), r"tensor vision.pool.k.weight has shape \(12, 36\)"),
        ("vision.vision.patch.weight", torch.zeros(1), "tensor vision.vision.patch.weight is there"),
    ],
)
def test_a_checkpoint_that_is_not_what_its_configuration_says(
    name: str, change: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    folder = checkpoint_of(tmp_path / "run", TOWERS)
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    save_file(weights | ({} if change is None else {name: change}), folder / "model.safetensors")
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=message):
        pack_checkpoint(Checkpoint.open(folder), tmp_path / "m.bitnet")
    assert not (tmp_path / "m.bitnet").exists()


# ---- what is asked ----


@pytest.mark.parametrize("config", [PALIGEMMA, CAUSAL], ids=["prefix", "causal"])
def test_tokens_behind_an_image(config: ModelConfig) -> None:
    """Each token as predicted by a model that is given only the text and the image."""
    ids = np.random.default_rng(5).integers(0, 249, (4, 12))
    model, texts, at = seeded(config), behind_images(config, ids), 0
    scores = torch_scores(model, texts)
    assert texts.what == "tokens behind an image" and texts.images is not None and config.vision
    assert texts.prefixes is None or texts.prefixes.tolist() == [10, 13, 16, 20]
    pixels = normalized(config.vision, texts.images, torch.empty(0))
    for row, (text, image) in enumerate(zip(texts.inputs, pixels, strict=True)):
        prefix = None if texts.prefixes is None else torch.from_numpy(texts.prefixes[row : row + 1])
        with torch.no_grad():
            logits = model(torch.from_numpy(text)[None], None, prefix, image[None])[0].log_softmax(-1)
        assert text[9:].tolist() == ids[row, :-1].tolist() and (text[:9] == 250).all()
        for position in range(0 if prefix is None else int(prefix) - 9, 12):
            assert scores[at] == pytest.approx(float(logits[8 + position, ids[row, position]]), abs=1e-5)
            at += 1
    assert at == len(scores) and texts.targets is not None and at == (texts.targets != NOTHING).sum()


def test_images_are_those_of_an_8_bit_file_and_normalized_as_said() -> None:
    images = drawn_images(VISION, 3)
    assert images.shape == (3, 3, 14, 14) and images.min() >= 0 and images.max() <= 1 and images.std() > 0.1
    assert np.array_equal(np.rint(images * 255).astype(np.float32) / np.float32(255), images)
    pixels = normalized(VISION, images, torch.empty(0, dtype=torch.float64))
    assert pixels[1, 2, 3, 4].item() == pytest.approx((float(images[1, 2, 3, 4]) - 0.3) / 0.3, rel=1e-12)
    assert images_of(VISION, 2).what == "vectors of images"


# ---- the engine ----


@pytest.mark.parametrize("name", ALL)
def test_the_engine_computes_what_torch_does(name: str, tmp_path: Path) -> None:
    config = ALL[name]
    report = export_checkpoint(checkpoint_of(tmp_path / "run", config), tmp_path / "m.bitnet", tokens=480)
    asked = "vectors of images" if not config.vision else "tokens behind an image" if config.image_token else None
    assert report.asked == (asked or "vectors of texts")
    assert report.short.median <= 1e-5 + 1.5 * report.short.floor_median
    assert abs(report.long.loss_engine - report.long.loss_torch) <= 1e-4 + 3 * report.long.loss_error
    assert (report.images is None) == (config.vision is None)
    if report.images is not None and config.vision:
        assert (report.images.windows, report.images.tokens) == (16, 16 * config.vision.max_context)
        assert report.images.mean <= 3e-3 and "images     16 of" in str(report)


@pytest.mark.parametrize("name", ["towers", "paligemma", "alone"])
def test_an_engine_that_sees_something_else_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scoring.engine_sees
    monkeypatch.setattr(scoring, "engine_sees", lambda engine, config, images: seen(engine, config, images[:, :, ::-1]))
    with pytest.raises(VerificationError, match="engine against torch: m"):
        export_checkpoint(checkpoint_of(tmp_path / "run", ALL[name]), tmp_path / "m.bitnet", tokens=480)
    assert not (tmp_path / "m.bitnet").exists()


@pytest.mark.parametrize("name", ["towers", "paligemma", "alone"])
def test_in_another_encoding_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model(ALL[name], tmp_path / "m.bitnet")
    made = repack.repack(tmp_path / "m.bitnet", tmp_path / "n.bitnet", encoding="1.6")
    assert made.ternary_weights == ALL[name].ternary_weights and made.logits_equal > 0
    assert PackedFile.open(tmp_path / "n.bitnet").config == PackedFile.open(tmp_path / "m.bitnet").config
    seen = iter([0.0, 1.0])
    monkeypatch.setattr(repack, "engine_sees", lambda *_: np.full(3, next(seen), np.float32))
    with pytest.raises(VerificationError, match="the engine computes other vectors of images"):
        repack.repack(tmp_path / "m.bitnet", tmp_path / "o.bitnet", encoding="1.6")


@pytest.mark.parametrize("name", ["towers", "clip", "paligemma"])
def test_the_loss_of_training_is_that_of_the_engine(name: str, tmp_path: Path) -> None:
    """Trained on four images, then asked about them: the loss by torch and by the engine."""
    config = FAMILIES[name]
    torch.manual_seed(2)
    model = Transformer(config)
    assert config.vision
    images = drawn_images(config.vision, 4)
    given = normalized(config.vision, images, torch.empty(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = loss_of(model, config, given).item()
    for _ in range(15):
        loss = loss_of(model, config, given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        trained = loss_of(model.eval(), config, given).item()
    assert trained < 0.8 * first
    export_checkpoint(saved(tmp_path / "run", model), tmp_path / "m.bitnet", tokens=480)
    with Model.load(tmp_path / "m.bitnet", kv_type="f32") as engine:
        seen = engine_sees(engine, config.vision, images)
        if config.image_token:
            said: list[float] = []
            for text, features in zip(prompt(config, 1, 6, rows=4).tolist(), seen, strict=True):
                with engine.session() as session:
                    session.append_prefix([-1] * 9 + text[9:11], features)
                    said += session.score(text[11:])
            found = -float(np.mean(said))
        else:
            texts, facts = engine.embed(captions().tolist()), engine.image
            assert facts
            z = facts.similarity_scale * (seen @ texts.T).astype(np.float64) + facts.similarity_bias
            found = float(np.logaddexp(0, -(2 * np.eye(4) - 1) * z).sum() / 4)
    with torch.no_grad():  # how far fp32 alone is from it, where an activation falls on another side of an edge
        exact = loss_of(model.double(), config, given.double()).item()
    assert found == pytest.approx(trained, abs=1e-4 + 2 * abs(exact - trained))


def test_the_text_is_that_of_the_run_and_shows_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a text contains the token that stands for a vector of an image."""
    (tmp_path / "files").mkdir()
    data = questions(tmp_path / "files")
    run = tmp_path / "run"
    sees = ("--set", "image_token=1", "--set", "vision.out_dim=24", "--set", "vision.pooling=none")
    assert bitnet("train", *DECODER, *VISION_OPTIONS, *sees, "--data", data, "--steps", "2", "--out", run) == 0
    checkpoint = Checkpoint.open(run)
    ids, source = real_text.real_tokens(checkpoint, 12)
    said = checkpoint.words.decode(ids.tolist())
    assert source == "validation text" and "?" in said
    ids, source = real_text.real_tokens(checkpoint, 3000)
    assert source == "validation text and the standard library's source" and len(ids) == 3000
    given = np.array([3, checkpoint.config.image_token, 4])
    monkeypatch.setattr(real_text, "_tokens", lambda *_: (given, "text"))
    assert real_text.real_tokens(checkpoint, 3)[0].tolist() == [3, 0, 4]
