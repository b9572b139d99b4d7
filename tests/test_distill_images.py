"""Distillation of models that look at images: what a teacher sees and how it compares, by hand and in runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_vision
from bitnet.config import ModelConfig
from bitnet.data import tokenizer
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.source_settings import of_source
from bitnet.train import objective_rules, source_model
from bitnet.train.distill import Distillation
from bitnet.train.distill_images import divergence_of_pairs, lacking
from bitnet.train.errors import TrainingError
from bitnet.train.source_model import SourceModelError, Start
from picture_data import captions, questions
from training import bitnet, losses
from vision_models import CLIP, PALIGEMMA, TOWERS, VISION, pixels, prompt, seeded

torch.set_num_threads(1)


FLOATS: dict[str, Any] = {"ternary": (), "head_format": "f32"}


def start(config: ModelConfig, words: bool = True) -> Start:
    """A full-precision source whose layers matter."""
    config = config.replace(**FLOATS, **({"vision": {"ternary": ()}} if config.vision else {}))
    model, read = seeded(config), tokenizer.build("byte", [], 257) if words else None
    for name, parameter in model.named_parameters():
        if "layers." in name and parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return Start("a model", config, model.state_dict(), read)


def student(source: Start) -> Transformer:
    return source_model.build(source, of_source(source.config)[1])[0]


def distillation(source: Start, model: Transformer, **options: Any) -> Distillation:
    settings = Settings(device="cpu", source="x", quantize_warmup=0.5, **options)
    return Distillation(source, settings, model, tokenizer.build("byte", [], 257))


def batch(config: ModelConfig) -> tuple[Tensor, ...]:
    """Inputs, documents, prefixes, images; of a decoder one image each."""
    if config.image_token:
        row = prompt(config, 1, 8, rows=3)
        return row, torch.zeros_like(row), torch.full((3,), 12), pixels(3, config)
    texts = torch.randint(0, 257, (3, 7), generator=torch.Generator().manual_seed(1))
    return texts, torch.zeros_like(texts), torch.zeros(3, dtype=torch.int64), pixels(3, config)


# ---- by hand ----


def test_what_features_lack_by_hand() -> None:
    theirs = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])  # mean (2, 0), variance 2
    assert lacking(theirs, theirs) == 0 and lacking(torch.tensor([[[2.0, 0.0], [2.0, 0.0]]]), theirs) == 1
    assert lacking(torch.tensor([[[1.0, 0.0], [3.0, 1.0]]]), theirs) == 0.5
    none = torch.zeros(0, 4, 2, requires_grad=True)
    assert lacking(none, none) == 0


def test_divergence_of_pairs_by_hand() -> None:
    """Two texts and two images. Vectors of length 1, scale e^t = 1 and bias 0: cosines are the logits."""
    model = seeded(TOWERS)
    assert model.similarity
    with torch.no_grad():
        model.similarity.log_scale.zero_(), model.similarity.bias.zero_()
    eye, other = torch.eye(2), torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    taught, ours = torch.cat([eye, eye]), torch.cat([eye, other])  # texts, and behind them images
    model.requires_grad_(False)
    pairs = [(1.0, 0.6), (0.0, 0.8), (0.0, 0.0), (1.0, 1.0)]  # logits of teacher and student

    def kl(a: float, b: float) -> float:
        x, y = (1 / (1 + math.exp(-v)) for v in (a, b))
        return x * math.log(x / y) + (1 - x) * math.log((1 - x) / (1 - y))

    for t in (1.0, 2.0):
        found = divergence_of_pairs(model, ours, model, taught, "sigmoid", t)
        assert float(found) == pytest.approx(t * t * sum(kl(a / t, b / t) for a, b in pairs), rel=1e-5)
        tables = torch.tensor([[0.6, 0.8], [0.0, 1.0]]) / t, eye / t
        ways = sum(
            float((b.softmax(-1) * (b.log_softmax(-1) - a.log_softmax(-1))).sum())
            for a, b in (tables, tuple(table.T for table in tables))
        )
        found = divergence_of_pairs(model, ours, model, taught, "softmax", t)
        assert float(found) == pytest.approx(t * t * ways / 2, rel=1e-5)
    assert divergence_of_pairs(model, taught, model, taught, "softmax", 2.0).abs() < 1e-6


# ---- the teacher ----


@pytest.mark.parametrize("config", [TOWERS, CLIP, PALIGEMMA], ids=["siglip", "clip", "paligemma"])
def test_the_source_teaches(config: ModelConfig) -> None:
    """Nothing is lacking in full precision; ternary something is, and less after some steps."""
    source = start(config)
    model, (inputs, *told) = student(source), batch(config)
    targets = inputs if config.image_token else torch.arange(3)
    kind = {} if config.image_token else {"contrastive_loss": "softmax", "objective": "contrastive"}
    distilled = distillation(source, model, distill=0.5, distill_features=0.5, **kind)

    def terms() -> dict[str, Tensor]:
        return distilled.terms(model(inputs, *told), targets, inputs, *told)

    with model.partly_quantized(0.0), torch.no_grad():
        same = terms()
    assert same.keys() == {"divergence", "features"}
    assert all(float(term) / targets.numel() < 1e-5 for term in same.values())  # fp32 in another order
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for name in same:
        found = []
        for _ in range(30):
            loss = terms()[name] / targets.numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert 0 < found[-1] < 0.8 * found[0] and found[0] > 1e-4, (name, found[0], found[-1])
    assert all(parameter.grad is None for parameter in distilled.teacher.parameters())


def test_a_teacher_of_features_has_its_own_eyes() -> None:
    """Another mean and deviation, a class token and a pooling more, and no text: the same picture."""
    eyes = VISION.replace(class_token=True, pooling="first", pixel_mean=(0.1, 0.2, 0.3), pixel_std=(0.3, 0.2, 0.1))
    teacher, model, (inputs, *told) = start(eyes, words=False), student(start(PALIGEMMA)), batch(PALIGEMMA)
    distilled = distillation(teacher, model, distill_features=1.0)
    found = float(distilled.terms(model(inputs, *told), inputs, inputs, *told)["features"].detach()) / inputs.numel()
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (VISION.pixel_mean, VISION.pixel_std))
    theirs, their_std = (torch.tensor(x).view(-1, 1, 1) for x in (eyes.pixel_mean, eyes.pixel_std))
    picture = told[-1] * std + mean
    with torch.no_grad():
        assert model.vision
        seen = source_model.build(teacher, teacher.config)[0].hidden((picture - theirs) / their_std)
        expected = lacking(model.vision.hidden(told[-1]), seen[:, 1:])
    assert found == pytest.approx(float(expected), rel=1e-4)  # pixels are rounded once more in fp32
    assert not distillation(start(PALIGEMMA), model, distill_features=1.0).reads, "of a decoder only its eyes compute"


def test_a_teacher_of_words_alone_may_see_otherwise() -> None:
    other, model, (inputs, *told) = PALIGEMMA.replace(vision={"dim": 40}), student(start(PALIGEMMA)), batch(PALIGEMMA)
    distilled = distillation(start(other), model, distill=1.0)
    assert distilled.terms(model(inputs, *told), inputs, inputs, *told).keys() == {"divergence"}


@pytest.mark.parametrize(
    ("teacher", "options", "message"),
    [
        (TOWERS.stacks[0], {"distill_features": 1.0}, "has no vision stack, whose features could be learnt"),
        (TOWERS.replace(max_context=64), {"distill": 1.0}, "two towers, the model a decoder"),
        (VISION, {"distill": 1.0}, "reads no text; expected one with the same tokenizer, or --distill-features alone"),
        (VISION.replace(image_size=15), {"distill_features": 1.0}, "its image_size is 15, that of the model 14"),
        (VISION.replace(patch_size=7), {"distill_features": 1.0}, "makes 4 patches of 36 numbers .* the model 9 of 36"),
        (VISION.replace(dim=40), {"distill_features": 1.0}, "makes 9 patches of 40 numbers of an image"),
    ],
)  # fmt: skip
def test_teachers_that_are_refused(teacher: ModelConfig, options: dict[str, Any], message: str) -> None:
    source, model = start(teacher, words=teacher.input != "images"), student(start(PALIGEMMA))
    with pytest.raises(SourceModelError, match=f"^--teacher t:? {message}"):
        distillation(source, model, teacher="t", **options)


@pytest.mark.parametrize("options", [{"lora": 2}, {"vision": "y", "freeze_vision": True}])
def test_features_of_a_stack_that_stays_are_not_learnt(options: dict[str, Any]) -> None:
    more: dict[str, Any] = {"optimizer": "adamw", "source": "x", "quantize_warmup": 0.0, "distill_features": 0.3}
    with pytest.raises(TrainingError, match="--distill-features is of the vision stack, which stays as it is"):
        objective_rules.check(Settings(**more, **options), PALIGEMMA)


def test_a_draft_alone_is_named_as_it_was_asked_for() -> None:
    asked = Settings(source="x", quantize_warmup=0.0, draft=True, draft_only=True)
    with pytest.raises(TrainingError, match="but --draft-only is for causal models of the next token"):
        objective_rules.check(asked, PALIGEMMA)


# ---- runs ----

FAST = ("--threads", "1", "--steps", "4", "--batch", "4", "--save-every", "2", "--precision", "fp32", "--eval-every",
        "4", "--validation", "0.2")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "teacher", "shares"),
    [
        ("siglip, bytes", "", ("--distill", "0.3", "--distill-features", "0.3")),
        ("paligemma 2, bytes", "", ("--distill", "0.3", "--distill-features", "0.2", "--distill-relations", "0.1")),
        ("paligemma 2, bytes", "vit, classes", ("--distill-features", "0.5")),
        ("siglip, bytes", "clip, vision", ("--distill-features", "0.5")),
    ],
)
def test_a_published_model_teaches(name: str, teacher: str, shares: tuple[str, ...], tmp_path: Path) -> None:
    """A resumed run continues with the same teacher."""
    hf_vision.save(name, tmp_path / "model")
    hf_vision.bytes_beside(tmp_path / "model")
    more: list[object] = list(shares)
    if teacher:
        hf_vision.save(teacher, tmp_path / "teacher")
        more += ["--teacher", tmp_path / "teacher"]
    data = captions(tmp_path / "data", 30) if name.startswith("siglip") else questions(tmp_path / "data", 30)
    objective = ["--objective", "contrastive"] if name.startswith("siglip") else []
    out = tmp_path / "run"
    command = [tmp_path / "model", *objective, *more, *FAST, "--data", data, "--out", out]
    assert bitnet("finetune", *command) == 0
    assert bitnet("finetune", "--resume", "--out", out, "--steps", "6") == 0
    steps = [record for record in losses(out) if "loss" in record]
    named = {"--distill": "divergence", "--distill-features": "features", "--distill-relations": "relations"}
    terms = {"cross_entropy", *(named[word] for word in shares if word in named)}
    assert all(record["weights"].keys() == terms for record in steps) and len(steps) == 6
    assert all(0 < record[name] < 50 for record in steps for name in terms - {"cross_entropy"})
