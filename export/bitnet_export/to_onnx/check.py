"""Does an exported graph compute what the engine computes? Checked on every export, in onnxruntime.

The matrix products of both are exact, but norms, softmax and exponentials are not, and int8
rounding is a staircase: see `verify`. What two correct fp32 programs differ by is measured with
onnxruntime alone, as the graph with its optimizations (fused norms, folded constants) against
the graph node by node.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.verify import EXACT, ROUNDED, SHORT, VerificationError

PROMPTS = 32  # of SHORT tokens, as one batch
TEXT = 128  # tokens of the long text; half as a prompt, the others one by one

Logits = NDArray[np.float32]
Cache = list[NDArray[np.float32]]


@dataclass(frozen=True)
class OnnxReport:
    """What was written, and how far it agrees with the engine.

    Differences are of log-probabilities, in nats: of each position that of the token where it is largest.
    """

    form: str
    packed_bytes: int
    onnx_bytes: int  # graph and weights
    compared: int  # tokens; 0: the engine cannot run the model
    threads: int = 0  # of both
    prompts_median: float = 0.0  # of |onnxruntime - engine|
    text_mean: float = 0.0
    text_worst: float = 0.0
    floor_mean: float = 0.0  # of |onnxruntime - onnxruntime without optimizations| on the text
    prefill: tuple[float, float] = (0.0, 0.0)  # tokens a second in onnxruntime and in the engine, a glance at both
    decode: tuple[float, float] = (0.0, 0.0)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        size = (
            f"size       {self.onnx_bytes / 1e6:.2f} MB in the form {self.form}, from {self.packed_bytes / 1e6:.2f} MB"
        )
        if not self.compared:
            return size + "\nlogits     not compared: the engine cannot run this model"
        return "\n".join(
            [
                size,
                f"prompts    {PROMPTS} of at most {SHORT} tokens: log-probabilities differ from the engine's by "
                f"{self.prompts_median:.1e} (median)",
                f"text       {self.text_mean:.1e} on average, {self.text_worst:.1e} at worst, prompt and single tokens "
                f"(onnxruntime without optimizations: {self.floor_mean:.1e} on average)",
                f"speed      prompt {self.prefill[0]:.0f} tok/s in onnxruntime, {self.prefill[1]:.0f} in the engine; "
                f"single tokens {self.decode[0]:.1f}, {self.decode[1]:.1f}; {self.threads} threads",
            ]
        )


class OnnxDecoder:
    """An exported graph in onnxruntime, on the CPU."""

    def __init__(self, model: Path, config: ModelConfig, *, threads: int = 0, optimize: bool = True) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        if not optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self.names = [f"past_key_values.{i}.{kind}" for i in range(config.n_layers) for kind in ("key", "value")]
        self.empty = (config.n_kv_heads, 0, config.head_dim)

    def run(
        self, tokens: NDArray[np.int64], cache: Cache | None = None, mask: NDArray[np.int64] | None = None
    ) -> tuple[Logits, Cache]:
        """Logits (B, T, V) of tokens (B, T) behind those in the cache, and the new cache.

        mask: (B, past + T), 0 for padding, which stands before a text; None: no padding.
        """
        batch, length = tokens.shape
        cache = cache or [np.zeros((batch, *self.empty), np.float32)] * len(self.names)
        if mask is None:
            mask = np.ones((batch, cache[0].shape[2] + length), np.int64)
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -length:]
        feeds = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        logits, *cache = self.session.run(None, feeds | dict(zip(self.names, cache, strict=True)))
        return logits, cache


def compare(packed_file: Path, model: Path, config: ModelConfig) -> dict[str, Any]:
    """The fields of OnnxReport that tell of logits and speed. Raises VerificationError."""
    from bitnet_runtime import Model, UnsupportedModelError

    random = np.random.default_rng(0)
    prompts = random.integers(0, config.vocab_size, (PROMPTS, min(SHORT, config.max_context)))
    text = random.integers(0, config.vocab_size, (1, min(TEXT, config.max_context)))
    half = text.shape[1] // 2 or 1
    try:
        engine = Model.load(packed_file, kv_type="f32")
    except UnsupportedModelError:
        return {"compared": 0}
    with engine, engine.session(n_ctx=text.shape[1]) as session:
        threads = engine.threads
        start = time.perf_counter()
        rows = [_rows(session, text[0, :half])]
        middle = time.perf_counter()
        rows += [_rows(session, token) for token in text[0, half:, None]]
        engine_seconds = middle - start, time.perf_counter() - middle
        expected = np.concatenate(rows)
        expected_prompts = []
        for prompt in prompts:
            session.reset()
            expected_prompts.append(_rows(session, prompt))

    decoder = OnnxDecoder(model, config, threads=threads)
    found_prompts = np.concatenate(decoder.run(prompts)[0])
    start = time.perf_counter()
    logits, cache = decoder.run(text[:, :half])
    middle = time.perf_counter()
    rows = [logits[0]]
    for token in text[0, half:, None]:
        logits, cache = decoder.run(token[None], cache)
        rows.append(logits[0])
    seconds = middle - start, time.perf_counter() - middle
    found = np.concatenate(rows)
    del decoder, cache
    decoder = OnnxDecoder(model, config, threads=threads, optimize=False)
    plain_prompts, plain = np.concatenate(decoder.run(prompts)[0]), decoder.run(text)[0][0]

    median = float(np.median(_difference(found_prompts, np.concatenate(expected_prompts))))
    difference, floor = _difference(found, expected), _difference(found, plain)
    mean, floor_mean = float(difference.mean()), float(floor.mean())
    floor_median = float(np.median(_difference(found_prompts, plain_prompts)))
    _limit("median difference in short prompts", median, EXACT + 1.5 * floor_median)
    _limit("mean difference in a text", mean, ROUNDED + 1.5 * floor_mean)
    pairs = tuple(zip(seconds, engine_seconds, strict=True))
    return {
        "compared": prompts.size + text.size,
        "threads": threads,
        "prompts_median": median,
        "text_mean": mean,
        "text_worst": float(difference.max()),
        "floor_mean": floor_mean,
        "prefill": tuple(half / s for s in pairs[0]),
        "decode": tuple((text.shape[1] - half) / s for s in pairs[1]),
    }


def _rows(session: Any, tokens: NDArray[np.int64]) -> Logits:
    rows: Logits = session.append(tokens.tolist(), "all")
    return rows


def _difference(a: Logits, b: Logits) -> NDArray[np.float64]:
    """|log softmax a - log softmax b| of rows (n, V), worst of each row."""
    x, y = (row - row.max(-1, keepdims=True) for row in (a.astype(np.float64), b.astype(np.float64)))
    x, y = (row - np.log(np.exp(row).sum(-1, keepdims=True)) for row in (x, y))
    worst: NDArray[np.float64] = np.abs(x - y).max(-1)
    return worst


def _limit(what: str, found: float, limit: float) -> None:
    if not found <= limit:  # NaN fails too
        raise VerificationError(
            f"onnxruntime against the engine: {what} is {found:.1e} nats, expected at most {limit:.1e}; "
            "the exported graph does not compute this model right here, please report it"
        )
