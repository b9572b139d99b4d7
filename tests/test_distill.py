"""Distillation: what a student learns from a teacher, computed by hand and on tiny models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.data import tokenizer
from bitnet.model import compiler
from bitnet.model.head import PORTION
from bitnet.model.masks import visible
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import distill, source_model

torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": 257, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 48,
    "max_context": 64, "ternary": [], "head_format": "f32",
}  # fmt: skip


def start(seed: int = 0, **changes: Any) -> source_model.Start:
    """A full-precision model with random weights."""
    torch.manual_seed(seed)
    config = ModelConfig.from_dict(SHAPE | changes)
    return source_model.Start("a model", config, Transformer(config).state_dict(), tokenizer.build("byte", [], 257))


def student(source: source_model.Start) -> Transformer:
    return source_model.build(source, source.defaults()[1])[0]


def distillation(source: source_model.Start, model: Transformer, **options: Any) -> distill.Distillation:
    settings = Settings(device="cpu", source="x", quantize_warmup=0.5, **options)
    return distill.Distillation(source, settings, model, source.words)


def tokens(rows: int = 4, length: int = 24) -> Tensor:
    return torch.randint(0, 257, (rows, length), generator=torch.Generator().manual_seed(0))


# ---- the teacher ----


def test_a_teacher_with_another_tokenizer() -> None:
    source = start()
    other = tokenizer.build("char", ["xyz"], 300)
    with pytest.raises(source_model.SourceModelError, match="in the source there is no such token; expected a teacher"):
        distill.Distillation(
            source, Settings(device="cpu", source="x", quantize_warmup=0.5, distill=0.5), student(source), other
        )


def test_a_token_that_the_text_may_bring_is_refused_once_it_is_read() -> None:
    source, words = start(), tokenizer.build("byte", [], 257)
    source.words.add_tokens(["<more>"])
    settings = Settings(device="cpu", source="x", quantize_warmup=0.5, distill=0.5)
    distill.check_early(source, settings, words, source.config)
    with pytest.raises(source_model.SourceModelError, match="its token '<more>' has the id 257, in the source there"):
        distill.check_reads(source, settings, words.get_vocab(), source.config)


def test_a_teacher_with_a_shorter_context() -> None:
    with pytest.raises(source_model.SourceModelError, match="takes 32 tokens, a sequence has 64; lower --context"):
        distillation(start(max_context=32), student(start()), distill=0.5)
    distillation(start(max_context=32), student(start()), distill=0.5, context=32)


def test_distillation_lowers_the_divergence() -> None:
    source = start()
    model, inputs = student(source), tokens()
    distilled = distillation(source, model, distill=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    found = []
    for _ in range(40):
        terms = distilled.terms(model(inputs), inputs, inputs)
        loss = terms["divergence"] / inputs.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.5 * found[0]
    assert all(parameter.grad is None for parameter in distilled.teacher.parameters())


# ---- divergence ----


def test_divergence_by_hand() -> None:
    teacher, learner = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    both = torch.cat([learner, learner]), torch.cat([teacher, teacher * 9])
    # fp32 logarithms of numbers of order 1
    assert float(distill.divergence(*both, torch.tensor([1, -100]), 1.0)) == pytest.approx(kl, rel=1e-6)
    wide = torch.cat([teacher, torch.tensor([[5.0]])], dim=1)  # a row without a token
    assert float(distill.divergence(learner, wide, torch.tensor([0]), 1.0)) == pytest.approx(kl, rel=1e-6)
    halved = torch.softmax(teacher / 2, -1)
    kl = float((halved * (halved.log() - math.log(0.5))).sum())
    assert float(distill.divergence(learner, teacher, torch.tensor([0]), 2.0)) == pytest.approx(4 * kl, rel=1e-5)


def test_positions_that_do_not_count_have_no_gradient() -> None:
    learner, teacher = random(6, 9, seed=0).requires_grad_(), random(6, 11, seed=1)
    targets = torch.tensor([3, -100, 0, -100, -100, 8])
    loss = distill.divergence(learner, teacher, targets, 1.5)
    loss.backward()
    assert learner.grad is not None and (learner.grad != 0).any(1).tolist() == (targets >= 0).tolist()
    alone = distill.divergence(learner[targets >= 0], teacher[targets >= 0], targets[targets >= 0], 1.5)
    assert float(loss) == pytest.approx(float(alone), rel=1e-6)  # a sum of six fp32 numbers
    assert float(distill.divergence(learner, teacher, torch.full((6,), -100), 1.5)) == 0


def test_a_divergence_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value and gradient of the formula, and no more kept for the backward pass than a gradient."""
    learner, teacher, targets = random(7, 9, seed=0), random(7, 11, seed=1), torch.tensor([3, -100, 0, 1, -100, 8, 2])
    plain, ours = (learner.clone().requires_grad_() for _ in range(2))
    student, expected = F.log_softmax(plain / 1.5, -1), F.log_softmax(teacher[:, :9] / 1.5, -1)
    counted = F.kl_div(student, expected, reduction="none", log_target=True)[targets >= 0]
    (3 * 1.5**2 * counted.sum()).backward()
    monkeypatch.setitem(PORTION, "cpu", 20)  # two rows
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = distill.divergence(ours, teacher, targets, 1.5)
    (3 * loss).backward()
    assert sum(tensor.numel() for tensor in kept) == learner.numel()
    assert float(loss) == pytest.approx(float(1.5**2 * counted.sum()), rel=1e-6)  # sums of 45 fp32 numbers
    assert plain.grad is not None and ours.grad is not None
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-5, atol=1e-6)  # differences of fp32 shares, below 1


# ---- relations ----


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relations(ours: Tensor, theirs: Tensor, heads: int, counts: Tensor, documents: Tensor | None = None) -> Tensor:
    seen = visible("causal", ours.shape[1], 0, documents, None, ours)
    return distill.relations(ours, theirs, heads, counts, seen)


def all_of(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


def test_relations_by_hand() -> None:
    """Two tokens: the first sees itself alone, the second both, with cosines 0 and 1 (teacher), 0.6 and 1 (student)."""
    theirs, ours = torch.tensor([[[0.0, 2.0], [3.0, 0.0]]]), torch.tensor([[[3.0, 4.0], [7.0, 0.0]]])
    teacher, learner = 1 / (1 + math.e), 1 / (1 + math.exp(0.4))  # what the second gives to the first
    missed = teacher * math.log(teacher / learner) + (1 - teacher) * math.log((1 - teacher) / (1 - learner))
    known = teacher * math.log(teacher) + (1 - teacher) * math.log(1 - teacher) + math.log(2)
    # fp32 logarithms of numbers of order 1, whose sum is 0.03
    assert float(relations(ours, theirs, 1, all_of(ours))) == pytest.approx(missed / known, rel=1e-5)
    uniform = torch.ones(1, 2, 2)
    assert float(relations(uniform, theirs, 1, all_of(ours))) == pytest.approx(1, rel=1e-5)
    second_alone = torch.tensor([[False, True]])
    assert float(relations(ours, theirs, 1, second_alone)) == pytest.approx(missed / known, rel=1e-5)
    assert float(relations(ours, theirs, 1, ~second_alone)) == 0  # a token alone has no relations to learn
    assert float(relations(ours, theirs, 1, all_of(ours) & False)) == 0


def test_relations_know_neither_length_nor_rotation_nor_width() -> None:
    ours, theirs = random(2, 12, 32, seed=0), random(2, 12, 48, seed=1)
    found = relations(ours, theirs, 2, all_of(ours))
    turn = torch.linalg.qr(random(16, 16, seed=2))[0]
    turned = (ours.unflatten(-1, (2, 16)) @ turn).flatten(2) * random(2, 12, 1, seed=3).abs()
    # fp32 sums of 16 products of order 1, in logarithms of order 1
    assert torch.allclose(relations(turned, theirs, 2, all_of(ours)), found, rtol=1e-4)
    padded = torch.cat([ours.unflatten(-1, (2, 16)), torch.zeros(2, 12, 2, 5)], dim=-1).flatten(2)
    assert torch.allclose(relations(padded, theirs, 2, all_of(ours)), found, rtol=1e-4)
    assert float(relations(theirs, theirs, 2, all_of(ours))) == 0
    assert not torch.allclose(relations(ours, theirs, 4, all_of(ours)), found, rtol=0.01)


def test_relations_see_no_later_token_and_no_other_document() -> None:
    ours, theirs, documents = (
        random(1, 8, 16, seed=0),
        random(1, 8, 16, seed=1),
        torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]]),
    )
    first = torch.arange(8)[None] < 3

    def found(x: Tensor, counts: Tensor, *documents: Tensor) -> float:
        return float(relations(x, theirs, 2, counts, *documents))

    later = ours.clone()
    later[:, 3:] = random(1, 5, 16, seed=2)
    assert found(later, first) == found(ours, first)
    assert found(later, all_of(ours)) != found(ours, all_of(ours))
    # Two documents of a row are as two rows; sums of the same numbers in another order.
    together = found(ours, all_of(ours), documents)
    rows = [relations(ours[:, a:b], theirs[:, a:b], 2, all_of(ours[:, a:b])) for a, b in ((0, 3), (3, 7))]
    assert min(map(float, rows)) < together < max(map(float, rows))
    earlier = ours.clone()
    earlier[:, :3] = random(1, 3, 16, seed=2)
    assert found(earlier, ~first, documents) == found(ours, ~first, documents)
    alone = torch.arange(8)[None] == 7
    assert found(ours, alone, documents) == 0


def test_relations_are_the_same_under_bf16() -> None:
    ours, theirs = random(1, 8, 16, seed=0), random(1, 8, 16, seed=1)
    expected = relations(ours, theirs, 2, all_of(ours))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(relations(ours, theirs, 2, all_of(ours)), expected)


@pytest.mark.parametrize("changes", [{}, {"n_layers": 3, "n_heads": 4, "head_dim": 12, "n_kv_heads": 2}])
def test_terms_of_a_teacher(changes: dict[str, Any]) -> None:
    """For the source itself and a teacher with other layers, heads, widths and rows; only the student gets
    gradients."""
    source, teacher = start(vocab_size=260 if changes else 257), start(seed=1 if changes else 0, **changes)
    model, inputs = student(source), tokens()
    targets = inputs.clone()
    targets[:, :5] = -100
    distilled = distillation(teacher, model, distill=0.5, distill_relations=0.5, distill_layer=1)
    terms = distilled.terms(model(inputs), targets, inputs)
    assert sorted(terms) == ["divergence", "relations"]
    assert 0.05 < terms["relations"].item() / int((targets >= 0).sum()) < 5
    terms["relations"].backward()
    above = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"layers.1.q.weight", "layers.1.k.weight", "layers.1.v.weight", "layers.0.down.weight"} <= above
    assert not above & {"layers.1.o.weight", "layers.1.up.weight", "final_norm.weight"}
    assert all(p.grad is None for p in distilled.teacher.parameters())
    with model.partly_quantized(0.0):
        same = distilled.terms(model(inputs), targets, inputs)
    if not changes:  # the student is the teacher: fp32 in another order
        assert same["relations"].item() < 1e-4
        assert same["divergence"].item() < 1e-4


def test_relations_of_a_causal_model_have_no_prefix() -> None:
    """Records of images tell every decoder the lengths of their prefixes."""
    source = start()
    model, inputs = student(source), tokens()
    distilled = distillation(start(seed=1), model, distill_relations=0.5)
    told = torch.zeros_like(inputs), torch.full((len(inputs),), 20)
    found = [distilled.terms(model(inputs), inputs, inputs, *more)["relations"] for more in ((), told)]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(("layer", "window"), [(1, 0), (2, 4)])
def test_relations_are_within_the_window_of_their_layer(layer: int, window: int) -> None:
    source = start(n_layers=3, sliding_window=4, global_every=3)
    model, inputs = student(source), tokens()
    distilled = distillation(start(seed=1), model, distill_relations=0.5, distill_layer=layer)
    found = distilled.terms(model(inputs), inputs, inputs)["relations"] / inputs.numel()
    ours, theirs = (watched.seen for watched in distilled.watched)
    seen = visible("causal", inputs.shape[1], window, None, None, inputs)
    triples = zip(ours, theirs, distilled.heads, strict=True)
    each = [distill.relations(*triple, inputs >= 0, seen) for triple in triples]
    torch.testing.assert_close(found, torch.stack(each).mean())


def test_layer_is_counted_from_the_end() -> None:
    source, teacher = start(), start(seed=1, n_layers=4)
    model = student(source)
    for place in (1, 2):
        student_, teacher_ = distillation(teacher, model, distill_relations=0.1, distill_layer=place).watched
        inputs = tokens()
        model(inputs)
        seen = student_.seen
        assert seen[0].shape == (4, 24, 32) and seen[1].shape == seen[2].shape == (4, 24, 16)
        assert model.layers[2 - place].qkv is student_ and teacher_.seen == ()
    with pytest.raises(
        source_model.SourceModelError, match="student and teacher have 2 and 4 layers; expected 1, the last"
    ):
        distillation(teacher, model, distill_relations=0.1, distill_layer=3)


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("before", [False, True])
def test_compiled_layers_are_watched(before: bool) -> None:
    """The graph is one for all layers alike, and may have been made for them before one is watched."""
    source = start()
    plain, compiled, inputs, found = student(source), student(source), tokens(), []
    compiler.compile_layers(compiled, backend="eager")
    if before:
        compiled(inputs)
    for model in (plain, compiled):
        distilled = distillation(source, model, distill_relations=0.5)
        distilled.terms(model(inputs), inputs, inputs)["relations"].backward()
        found.append(model.layers[1].q.weight.grad)
    assert torch.equal(*found) and found[0].any()


# ---- balance ----


def test_relations_have_the_share_asked_for() -> None:
    settings = Settings(source="x", quantize_warmup=0.5, distill=0.3, distill_relations=0.2)
    assert distill.weights(settings, {}) == {"cross_entropy": 0.5, "divergence": 0.3, "relations": 0.0}
    found = distill.weights(settings, {"cross_entropy": 4.0, "divergence": 1.0, "relations": 0.5})
    assert found == {"cross_entropy": 0.5, "divergence": 0.3, "relations": 0.2 * 4.0 / 0.5}
    learnt = distill.weights(settings, {"cross_entropy": 4.0, "divergence": 1.0, "relations": 0.0})
    assert learnt["relations"] == 0.2 * 4.0 / 0.01
    assert distill.weights(Settings(), {}) == {"cross_entropy": 1.0}


def test_a_term_that_is_added_by_a_resume_is_measured_first() -> None:
    settings = Settings(source="x", quantize_warmup=0.5, distill_relations=0.2, distill_features=0.1)
    found = distill.weights(settings, {"cross_entropy": 4.0, "relations": 0.5})
    assert found == {"cross_entropy": pytest.approx(0.7), "relations": 0.2 * 4.0 / 0.5, "features": 0.0}


def test_running_means() -> None:
    sizes: dict[str, float] = {}
    for value in [2.0, *[4.0] * 200]:
        sizes = distill.running_means(sizes, {"relations": value})
        if len(sizes) == 1 and value == 2.0:
            assert sizes["relations"] == 2.0
    assert sizes["relations"] == pytest.approx(4 - 2 * 0.95**200, rel=1e-9)  # fp64, 200 roundings
