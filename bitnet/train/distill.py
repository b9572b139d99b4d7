"""Distillation: a student learns from what a frozen teacher computes of the same tokens.

Terms of the loss besides the cross-entropy, each per position that counts:

    divergence   T²·KL(teacher ‖ student) of the next token's probabilities, in nats
    relations    of one layer: how much of the similarities between the teacher's queries, between its keys and
                 between its values the student's lack. 0: none; 1: it might as well attend to all tokens alike

Relations are those of MiniLMv2 (arXiv 2012.15828) on normalised vectors, as in BitNet Distillation
(arXiv 2510.13998). Facts and figures: docs/finetune.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet.model.masks import visible
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train.source_model import SourceModelError, Start, build

KEPT = 0.95  # of a running mean at a step: it remembers about 20
LEARNT = 0.01  # below this the weight of `relations` grows no further: there is little left to learn
HIDDEN = -1e4  # a similarity whose softmax is exactly 0 in fp32


class Distillation:
    """The teacher of a run, and the terms of the loss that come from it.

    The teacher is frozen and computes as its source does. words: the tokenizer of the student.
    Raises SourceModelError when the teacher has other tokens, a shorter context or too few layers.
    """

    def __init__(self, start: Start, settings: Settings, student: Transformer, words: Tokenizer) -> None:
        theirs, ours = start.words.get_vocab(), words.get_vocab()
        other = next((text for text, token in theirs.items() if ours.get(text) != token), None)
        if other is not None:
            raise SourceModelError(
                f"--teacher {settings.teacher}: its token {other!r:.40} has the id {theirs[other]}, that of the source "
                f"{ours.get(other)}; expected a teacher with the same tokenizer"
            )
        context = settings.context or student.config.max_context
        if context > start.config.max_context:
            raise SourceModelError(
                f"--teacher {settings.teacher} takes {start.config.max_context:,} tokens, a sequence has {context:,}; "
                "lower --context"
            )
        rows = max(student.config.vocab_size, start.config.vocab_size)
        model = build(start, start.config.replace(vocab_size=rows))[0]
        self.teacher = model.requires_grad_(False).eval().to(settings.device)
        self.settings = settings
        self.watched: list[Watched] = []
        if settings.distill_relations:
            layers = min(student.config.n_layers, start.config.n_layers)
            place = settings.distill_layer or max(1, student.config.n_layers // 3)
            if place > layers:
                raise SourceModelError(
                    f"--distill-layer {place}, but student and teacher have {student.config.n_layers} and "
                    f"{start.config.n_layers} layers; expected 1, the last, to {layers}"
                )
            for model in (student, self.teacher):
                self.watched.append(Watched())
                model.layers[-place].register_module("qkv", self.watched[-1])
            queries = math.gcd(student.config.n_heads, start.config.n_heads)
            keys = math.gcd(student.config.n_kv_heads, start.config.n_kv_heads)
            self.heads = queries, keys, keys

    def terms(self, logits_NV: Tensor, targets: Tensor, inputs: Tensor, *documents: Tensor) -> dict[str, Tensor]:
        """Sums over the targets that count. logits_NV: what the student has just made of `inputs` (B, T)."""
        terms = {}
        with torch.no_grad():
            taught_NV = self.teacher(inputs, *documents).flatten(0, 1)
        if self.settings.distill:
            temperature = self.settings.distill_temperature
            terms["divergence"] = divergence(logits_NV, taught_NV, targets.flatten(), temperature)
        if self.watched:
            ours, theirs = (watched.seen for watched in self.watched)
            triples = zip(ours, theirs, self.heads, strict=True)
            parts = [relations(*triple, targets >= 0, *documents) for triple in triples]
            terms["relations"] = (targets >= 0).sum() * torch.stack(parts).mean()
        return terms


class Watched(nn.Module):
    """Takes the place of `Block.qkv` and keeps what passes: `seen`, (B, T, heads·E) each.

    (A hook would do that too, but compiled layers leave out those that others like them do not have.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[Tensor, ...] = ()

    def forward(self, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.seen = qkv
        return qkv


def weights(settings: Settings, sizes: Mapping[str, float]) -> dict[str, float]:
    """What each term of the loss is multiplied by.

    sizes: running means of the terms (`running_means`); empty before the first step, which only measures.
    The divergence needs no balance: its gradient is a difference of probabilities, as that of the
    cross-entropy is. That of the relations has another unit, so their share is one of measured size.
    """
    share = settings.distill_relations
    weights = {"cross_entropy": 1 - (settings.distill + share)}
    if settings.distill:
        weights["divergence"] = settings.distill
    if share:
        weights["relations"] = share * sizes["cross_entropy"] / max(sizes["relations"], LEARNT) if sizes else 0.0
    return weights


def running_means(sizes: Mapping[str, float], terms: Mapping[str, float]) -> dict[str, float]:
    return {name: KEPT * sizes.get(name, term) + (1 - KEPT) * term for name, term in terms.items()}


def divergence(logits: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Σ T²·KL(teacher ‖ student) in nats over the positions that count. logits, taught: (n, V), targets: (n,).

    T² keeps the size of the gradient (arXiv 1503.02531 §2.1). A teacher may have more rows than tokens.
    """
    student = F.log_softmax(logits.float() / temperature, -1)
    expected = F.log_softmax(taught[:, : logits.shape[-1]].float() / temperature, -1)
    each = F.kl_div(student, expected, reduction="none", log_target=True).sum(-1)
    return temperature**2 * (each * (targets >= 0)).sum()  # to take those that count out, a GPU would wait for them


def relations(ours: Tensor, theirs: Tensor, heads: int, counts_BT: Tensor, *documents: Tensor) -> Tensor:
    """ΣKL(teacher ‖ student) / ΣKL(teacher ‖ uniform) over the positions that count and the relation heads.

    A relation is the softmax over the tokens that a position sees of the cosines between its vector and theirs.
    ours, theirs: queries, keys or values, (B, T, W) of any two widths, cut into `heads` parts.
    """
    with torch.autocast(ours.device.type, enabled=False):  # cosines rounded to bf16 would differ by more than is learnt
        seen = visible("causal", ours.shape[1], 0, documents[0] if documents else None, None, ours)
        student, teacher = (log_relations(x, heads, seen) for x in (ours, theirs))
        missed = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        known = (teacher.exp() * teacher).sum(-1) + seen.sum(-1).log()
        counts = counts_BT[:, None]
        return (missed * counts).sum() / (known * counts).sum().clamp(min=1e-5)  # less is rounding


def log_relations(x_BTW: Tensor, heads: int, seen: Tensor) -> Tensor:
    """Logarithms of the relations, (B, heads, T, T)."""
    x_BRTE = F.normalize(x_BTW.float().unflatten(-1, (heads, -1)).transpose(1, 2), dim=-1)
    return (x_BRTE @ x_BRTE.mT).masked_fill(~seen, HIDDEN).log_softmax(-1)
