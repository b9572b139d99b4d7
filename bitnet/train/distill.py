"""Knowledge distillation: a student learns from the outputs of a frozen teacher on the same tokens.

Terms of the loss besides the cross-entropy, each per position that counts:

    divergence   T²·KL(teacher ‖ student) of the next token's probabilities, in nats
    relations    in one layer: how much of the similarities among the teacher's queries, among its keys and
                 among its values the student lacks. 0: none; 1: it is no better than attending to all tokens alike

Relations are those of MiniLMv2 (arXiv 2012.15828) on normalized vectors, as in BitNet Distillation
(arXiv 2510.13998). Facts and figures: docs/finetune.md. Terms of vision models: `distill_images`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.model import parallel
from bitnet.model.head import portions
from bitnet.model.masks import visible
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train.distill_images import Sights, divergence_of_pairs, lacking
from bitnet.train.source_model import SourceModelError, Start, build
from bitnet.train.watched import Watched

KEPT = 0.95  # decay of the running means per step: they cover about 20 steps
LEARNT = 0.01  # below this size the weight of a term stops growing: there is little left to learn
HIDDEN = -1e4  # a similarity whose softmax is exactly 0 in fp32


class Distillation:
    """The teacher of a run, and its terms of the loss.

    The teacher is frozen and computes as its source does. words: the tokenizer of the student.
    Raises SourceModelError if the teacher has another tokenizer, image format or width, or too short a context or
    too few layers.
    """

    def __init__(self, start: Start, settings: Settings, student: Transformer, words: Tokenizer) -> None:
        self.settings, self.student, name = settings, student, settings.teacher or settings.source
        self.relates = _relates(settings)
        towers = student.similarity is not None
        problem = check_reads(start, settings, words.get_vocab(), student.config)
        self.reads = self.relates or (towers and not problem)  # otherwise only its image features are used
        config = start.config
        if self.reads:
            config = config.replace(vocab_size=max(student.config.vocab_size, config.vocab_size))
            if config.vision and config.image_token and student.config.image_token:
                config = config.replace(image_token=student.config.image_token)  # another unused row
        self.teacher = _frozen(start, config, settings)
        if self.reads and (self.teacher.similarity is not None) != towers:
            if self.relates:
                raise SourceModelError(f"--teacher {name}: {_kind(self.teacher)}, the model {_kind(student)}")
            self.reads = False
        self.sights = Sights(student, self.teacher, name) if student.vision else None
        if self.sights and settings.distill_features:
            self.sights.watch(name)
        if self.reads and towers and student.config.width != config.width and settings.distill_features:
            raise SourceModelError(
                f"--teacher {name}: its vectors have {config.width} numbers, the model's {student.config.width}; "
                "expected as many for --distill-features"
            )
        self.watched: list[Watched] = []
        if settings.distill_relations:
            self._watch(start.config)

    def _watch(self, theirs: ModelConfig) -> None:
        """Record queries, keys and values of one layer of both models."""
        ours, settings = self.student.config, self.settings
        layers = min(ours.n_layers, theirs.n_layers)
        place = settings.distill_layer or max(1, ours.n_layers // 3)
        if place > layers:
            raise SourceModelError(
                f"--distill-layer {place}, but student and teacher have {ours.n_layers} and "
                f"{theirs.n_layers} layers; expected 1, the last, to {layers}"
            )
        for model in (self.student, self.teacher):
            self.watched.append(Watched())
            model.layers[-place].register_module("qkv", self.watched[-1])
        self.window = ours.of_layer(ours.n_layers - place).sliding_window
        queries, keys = math.gcd(ours.n_heads, theirs.n_heads), math.gcd(ours.n_kv_heads, theirs.n_kv_heads)
        self.heads = queries, keys, keys

    def terms(self, output: Tensor, targets: Tensor, inputs: Tensor, *told: Tensor) -> dict[str, Tensor]:
        """Sums over the targets that count. output: the student's output for `inputs` (B, T), logits or vectors, just
        computed; told: documents, prefixes, images."""
        terms, settings, counted = {}, self.settings, (targets >= 0).sum()
        with torch.no_grad():
            if self.sights:
                told = (*told[:2], self.sights.as_taught(told[2]), *told[3:])
            if self.reads:
                taught = self.teacher(inputs, *told)
            elif self.sights:
                self.sights.teacher.hidden(told[2])
        if settings.distill and self.student.similarity is not None:
            both = self.student, output, self.teacher, taught
            terms["divergence"] = divergence_of_pairs(*both, settings.contrastive_loss, settings.distill_temperature)
        elif settings.distill:
            rows = output.flatten(0, 1), taught.flatten(0, 1), targets.flatten()
            terms["divergence"] = divergence(*rows, settings.distill_temperature)
        if self.watched:
            ours, theirs = (watched.seen for watched in self.watched)
            documents, prefix = (*told[:2], None, None)[:2]
            seen = visible(self.student.config.mask, inputs.shape[1], self.window, documents, prefix, inputs)
            triples = zip(ours, theirs, self.heads, strict=True)
            parts = [relations(*triple, targets >= 0, seen) for triple in triples]
            terms["relations"] = counted * torch.stack(parts).mean()
        if self.sights and settings.distill_features:
            parts = [self.sights.lacking()]
            if self.reads and self.student.similarity is not None:
                parts.append(lacking(output[: len(inputs)], taught[: len(inputs)]))
            terms["features"] = counted * torch.stack(parts).mean()
        return terms


def _frozen(start: Start, config: ModelConfig, settings: Settings) -> Transformer:
    """The teacher; sharded if the student is, except one with a vision stack, which may be called without the rest."""
    sharded = parallel.launched() and settings.parallel == "fsdp" and not config.vision
    if sharded and not parallel.is_first():
        with torch.device("meta"):
            teacher = Transformer(config)
    else:
        teacher = build(start, config)[0]
    teacher.requires_grad_(False).eval()
    if sharded:
        parallel.shard(teacher, settings.device)
    return teacher if sharded else teacher.to(settings.device)


def _kind(model: Transformer) -> str:
    return "two towers" if model.similarity is not None else "a decoder" if model.config.has_head else "one stack"


def _relates(settings: Settings) -> bool:
    return settings.distill > 0 or settings.distill_relations > 0


def check_early(start: Start, settings: Settings, words: Tokenizer, config: ModelConfig) -> None:
    """`check_reads` before the text is read, which may bring tokens that the teacher has."""
    theirs = start.words.get_vocab() if start.tokenizer else {}
    check_reads(start, settings, theirs | words.get_vocab(), config)


def check_reads(start: Start, settings: Settings, ours: Mapping[str, int], config: ModelConfig) -> str:
    """Why a teacher cannot read the text of a student with these tokens; "" if it can. Raises SourceModelError where it
    has to."""
    problem = _reads_otherwise(start, ours, settings.context or config.max_context)
    if problem and _relates(settings):
        raise SourceModelError(f"--teacher {settings.teacher or settings.source}{problem}")
    return problem


def _reads_otherwise(start: Start, ours: Mapping[str, int], context: int) -> str:
    if start.tokenizer is None:
        return " reads no text; expected one with the same tokenizer, or --distill-features alone"
    theirs = start.words.get_vocab()
    others = [(token, text) for text, token in theirs.items() if ours.get(text) != token]
    if others:
        token, text = min(others)
        return (
            f": its token {text!r:.40} has the id {token}, in the source "
            f"{ours.get(text, 'there is no such token')}; expected a teacher with the same tokenizer"
        )
    if context > start.config.max_context:
        return f" takes {start.config.max_context:,} tokens, a sequence has {context:,}; lower --context"
    return ""


def balanced(settings: Settings) -> dict[str, float]:
    """Shares of the terms whose units differ from those of the cross-entropy."""
    shares = {"relations": settings.distill_relations, "features": settings.distill_features}
    return {name: share for name, share in shares.items() if share}


def weights(settings: Settings, sizes: Mapping[str, float]) -> dict[str, float]:
    """The weight of each term of the loss.

    sizes: running means of the terms (`running_means`); the first step with a term, perhaps after a resume, only
    measures it.
    The divergence needs no balancing: its gradient is a difference of probabilities, like that of the
    cross-entropy. Relations and features have other units, so their shares are relative to measured sizes.
    """
    weights = {"cross_entropy": 1 - settings.distilled}
    if settings.distill:
        weights["divergence"] = settings.distill
    for name, share in balanced(settings).items():
        weights[name] = share * sizes["cross_entropy"] / max(sizes[name], LEARNT) if name in sizes else 0.0
    return weights


def running_means(sizes: Mapping[str, float], terms: Mapping[str, float]) -> dict[str, float]:
    return {name: KEPT * sizes.get(name, term) + (1 - KEPT) * term for name, term in terms.items()}


class _Divergence(torch.autograd.Function):
    """Computed in portions of the rows, each with its gradient, the only other tensor as large as the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
        grad, total = torch.empty_like(logits), torch.zeros((), device=logits.device)
        for here in portions(logits, logits.shape[-1]):
            student = F.log_softmax(logits[here].float() / temperature, -1)
            expected = F.log_softmax(taught[here, : logits.shape[-1]].float() / temperature, -1)
            counts, shares = (targets[here] >= 0)[:, None], expected.exp()
            total += (shares * (expected - student) * counts).sum()
            grad[here] = student.exp_().sub_(shares).mul_(counts).mul_(temperature)
        ctx.save_for_backward(grad)
        return temperature**2 * total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return kept * grad, None, None, None


def divergence(logits: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Σ T²·KL(teacher ‖ student) in nats over the positions that count. logits, taught: (n, V), targets: (n,).

    T² keeps the size of the gradient (arXiv 1503.02531 §2.1). A teacher may have more logits than the student.
    """
    apply: Callable[..., Tensor] = _Divergence.apply
    return apply(logits, taught, targets, temperature)


def relations(ours: Tensor, theirs: Tensor, heads: int, counts_BT: Tensor, seen: Tensor) -> Tensor:
    """ΣKL(teacher ‖ student) / ΣKL(teacher ‖ uniform) over the positions that count and the relation heads.

    A relation is the softmax, over the tokens that a position sees, of the cosines between its vector and theirs.
    ours, theirs: queries, keys or values, (B, T, W) of any two widths, cut into `heads` parts. seen: which tokens a
    position sees, (T, T) or (B, 1, T, T).
    """
    with torch.autocast(ours.device.type, enabled=False):  # bf16 cosines would be too coarse
        student, teacher = (log_relations(x, heads, seen) for x in (ours, theirs))
        missed = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        known = (teacher.exp() * teacher).sum(-1) + seen.sum(-1).log()
        counts = counts_BT[:, None]
        return (missed * counts).sum() / (known * counts).sum().clamp(min=1e-5)  # anything smaller is rounding error


def log_relations(x_BTW: Tensor, heads: int, seen: Tensor) -> Tensor:
    """Logarithms of the relations, (B, heads, T, T)."""
    x_BRTE = F.normalize(x_BTW.float().unflatten(-1, (heads, -1)).transpose(1, 2), dim=-1)
    return (x_BRTE @ x_BRTE.mT).masked_fill(~seen, HIDDEN).log_softmax(-1)
