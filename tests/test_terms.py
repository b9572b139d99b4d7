"""The docs can be searched with the words of the field: each stands on the page of what it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bitnet import BitLinear
from bitnet_runtime import Model, Session
from command import bitnet
from docs_text import FENCE, sentences

ROOT = Path(__file__).parent.parent
TERMS = {
    "docs/options.md": (
        "(WSD)",
        "gradient accumulation",
        "activation checkpointing",
        "document masking",
        "data parallel",
        "ZeRO-3",
        "load-balancing loss",
        "speculative decoding",
        "for DPO",
        "(SFT)",
        "LoRA",
        "KL divergence",
        "GQA",
    ),
    "docs/drafts.md": (
        "# Speculative decoding",
        "draft head",
        "multi-token prediction (MTP)",
        "n-gram lookup, also called prompt lookup",
        "acceptance rate",
        "sliding window",
        "attention sinks",
    ),
    "docs/performance.md": ("Prefill, decode", "roofline", "Random weights", "memory-mapped", "## Which KV cache?"),
    "docs/python.md": ("continuous batching", "KV cache is paged", "copy on write", "prefix", "## Embeddings", "RAG"),
    "docs/server.md": (
        "## Continuous batching",
        "## Prefix caching",
        "Prefill is chunked",
        "paged",
        "## Throughput and latency",
        "time to first token (TTFT)",
        "structured output",
        "function calling",
        "RAG",
    ),
    "docs/train.md": (
        "quantization-aware training (QAT)",
        "W1.58A8",
        "WSD (warmup, stable, decay)",
        "activation checkpointing",
        "straight-through estimator, STE",
        "acceptance rate",
        "MFU",
    ),
    "docs/gpu.md": (
        "## Throughput",
        "fused",
        "Activation checkpointing",
        "MFU",
    ),
    "docs/several-machines.md": (
        "data parallel",
        "DDP",
        "FSDP2, as ZeRO-3",
        "tensor parallelism",
        "gradient accumulation",
        "prefix cache",
        "KV cache",
    ),
    "docs/data.md": (
        "Deduplication",
        "MinHash",
        "masks documents",
        "packed",
    ),
    "docs/precision.md": (
        "quantization-aware training",
        "STE",
        "WSD",
        "group-wise scales",
        "absmean",
    ),
    "docs/finetune.md": (
        "quantization-aware training (QAT)",
        "### Knowledge distillation",
        "supervised fine-tuning (SFT)",
        "Sequence packing",
        "direct preference optimization (DPO)",
        "reference model",
    ),
    "docs/train-python.md": (
        "W1.58A8",
        "straight-through estimator (STE)",
        "absmean",
        "absmax per token",
        "group-wise",
        "Gradient accumulation",
    ),
    "docs/experts.md": (
        "mixture of experts (MoE)",
        "top-k routing",
        "load-balancing loss",
    ),
    "docs/encoders.md": (
        "embedding",
        "RAG",
        "InfoNCE",
        "Masked language modelling",
        "gradient accumulation",
    ),
    "docs/adapters.md": (
        "LoRA (low-rank adaptation)",
        "prefix cache",
        "prefill",
    ),
    "docs/structured.md": (
        "# Structured output",
        "Constrained decoding",
    ),
    "docs/tools.md": ("# Tools: function calling",),
    "docs/command-line.md": (
        "speculative decoding",
        "n-gram lookup",
        "KV cache",
        "structured output",
    ),
    "docs/c.md": (
        "## The KV cache",
        "paged",
        "copied on write",
        "prefix",
    ),
    "docs/why-fast.md": (
        "LUT",
        "prefill",
        "A batch shares one pass over the weights",
        "speculative decoding",
        "W1.58A8",
        "absmax per token",
    ),
    "docs/scaling.md": (
        "QAT",
        "weight-only",
        "W1.58A8",
    ),
    "docs/families.md": (
        "mixture of experts (MoE)",
        "masked language model",
        "embeddings of texts",
        "LoRA adapters",
        "draft head",
        "sliding windows",
    ),
    "docs/convert.md": (
        "group-wise",
        "weight-only",
        "KV cache",
    ),
    "docs/evaluate.md": (
        "perplexity (PPL)",
        "KV cache",
    ),
    "docs/onnx.md": (
        "KV cache",
        "decoded",
    ),
    "docs/editors.md": ("fill in the middle (FIM)",),
    "docs/images.md": ("vision transformer (ViT)",),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_page_has_the_words_of_the_field(name: str) -> None:
    page = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert [term for term in TERMS[name] if term not in page] == []


@pytest.mark.parametrize(
    ("verb", "terms"),
    [
        ("generate", ("speculative decoding", "draft tokens", "n-gram lookup", "KV cache")),
        ("serve", ("batch", "prefix cache", "KV caches")),
        ("train", ("gradient accumulation", "activation checkpointing", "document masking", "draft head")),
    ],
)
def test_help_has_them_too(verb: str, terms: tuple[str, ...]) -> None:
    said = " ".join(bitnet(verb, "--help").stdout.split())
    assert [term for term in terms if term not in said] == [] and "guess" not in said


@pytest.mark.parametrize(
    ("described", "term"),
    [
        (Model.batch, "Continuous batching"),
        (Model.batch, "Prefill is chunked"),
        (Model.embed, "embedding"),
        (Session.fork, "KV cache is paged"),
        (Session.advance, "speculative decoding"),
        (BitLinear, "master weights"),
    ],
)
def test_docstrings_have_them(described: object, term: str) -> None:
    said = " ".join((described.__doc__ or "").split())
    assert term in said and not re.search(r"\bguess", said)


NO_DRAFTS = ("That is worse than guessing.", "and a guess at 0.33 million.")


def test_draft_tokens_are_not_called_guesses() -> None:
    """Names of functions and of fields are in code."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        page = FENCE.sub("", path.read_text(encoding="utf-8"))
        tables = [line for line in page.splitlines() if line.startswith("|")]
        for text in [*tables, *sentences(page)]:
            found = re.search(r"\bguess", re.sub(r"`[^`]*`", "", text))
            assert not found or text.endswith(NO_DRAFTS), f"{path.name}: {text}"
