"""The docs can be searched with the words of the field: each stands on the page of what it names."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TERMS = {
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
        "no tensor or pipeline parallelism",
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
}


@pytest.mark.parametrize("name", TERMS)
def test_the_page_has_the_words_of_the_field(name: str) -> None:
    page = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert [term for term in TERMS[name] if term not in page] == []
