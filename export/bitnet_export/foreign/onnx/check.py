"""Does an exported graph compute what the engine computes? Checked on every export, in onnxruntime.

The matrix products of both are exact, but norms, softmax and exponentials are not, and int8
rounding is a staircase: see `verify`. What two correct fp32 programs differ by is measured with
onnxruntime alone: the graph against itself with each gain of a norm moved to a neighbouring
number, about what a norm that rounds in another order does.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.checkpoint.verify import EXACT, ROUNDED, SHORT, VerificationError
from bitnet_export.packed import records
from bitnet_export.packed.reader import PackedFile

PROMPTS = 32  # of SHORT tokens, as one batch
FEW = 3  # times ROUNDED: a text this short has few rounding events, and their mean a long tail
TEXT = 128  # tokens of the long text; half as a prompt, the others one by one

Logits = NDArray[np.float32]
Cache = list[NDArray[np.float32]]


@dataclass(frozen=True)
class OnnxReport:
    """What was written, and how far it agrees with the engine: differences of log-probabilities, in nats.

    Of a position in a prompt the largest counts, as most have none but fp32 noise; in the text the mean over
    the vocabulary, which is what to expect of one token.
    """

    form: str
    packed_bytes: int
    onnx_bytes: int  # graph and weights
    compared: int  # tokens; 0: the engine cannot run the model
    threads: int = 0  # of both
    prompts_median: float = 0.0  # of |onnxruntime - engine|
    text_mean: float = 0.0
    text_worst: float = 0.0
    floor_mean: float = 0.0  # of |onnxruntime - onnxruntime with its norms moved by one step of fp32|
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
                f"(rounding the norms otherwise: {self.floor_mean:.1e} on average)",
                f"speed      prompt {self.prefill[0]:.0f} tok/s in onnxruntime, {self.prefill[1]:.0f} in the engine; "
                f"single tokens {self.decode[0]:.1f}, {self.decode[1]:.1f}; {self.threads} threads",
            ]
        )


class OnnxDecoder:
    """An exported graph in onnxruntime, on the CPU."""

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        *,
        threads: int = 0,
        replaced: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> None:
        """threads: 0: as many as there are cores. replaced: weights by name, in place of the file's."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.replaced = {k: onnxruntime.OrtValue.ortvalue_from_numpy(v) for k, v in (replaced or {}).items()}
        for name, value in self.replaced.items():  # the session does not keep them
            options.add_initializer(name, value)
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


def compare(path: Path, file: PackedFile, model: Path) -> dict[str, Any]:
    """The fields of OnnxReport that tell of logits and speed, of `model` made from `file`, which is at `path`.

    Raises VerificationError when they differ from the engine's by more than rounding explains.
    """
    from bitnet_runtime import Model, UnsupportedModelError

    config, random = file.configs[0], np.random.default_rng(0)
    prompts = random.integers(0, config.vocab_size, (PROMPTS, min(SHORT, config.max_context)))
    text = random.integers(0, config.vocab_size, (1, min(TEXT, config.max_context)))
    half = text.shape[1] // 2 or 1
    try:
        engine = Model.load(path, kv_type="f32")
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
    decoder = OnnxDecoder(model, config, threads=threads, replaced=_moved_gains(file))
    moved_prompts, moved = np.concatenate(decoder.run(prompts)[0]), decoder.run(text)[0][0]

    prompt, moved_prompt = (_difference(found_prompts, x) for x in (np.concatenate(expected_prompts), moved_prompts))
    difference, floor = _difference(found, expected), _difference(found, moved)
    median, floor_median = float(np.median(prompt.worst)), float(np.median(moved_prompt.worst))
    mean, floor_mean = float(difference.mean.mean()), float(floor.mean.mean())
    _limit("median difference in short prompts", median, EXACT + 1.5 * floor_median)
    _limit("mean difference in a text", mean, FEW * ROUNDED + 1.5 * floor_mean)
    pairs = tuple(zip(seconds, engine_seconds, strict=True))
    return {
        "compared": prompts.size + text.size,
        "threads": threads,
        "prompts_median": median,
        "text_mean": mean,
        "text_worst": float(difference.worst.max()),
        "floor_mean": floor_mean,
        "prefill": tuple(half / s for s in pairs[0]),
        "decode": tuple((text.shape[1] - half) / s for s in pairs[1]),
    }


def _moved_gains(file: PackedFile) -> dict[str, NDArray[np.float32]]:
    """Each gain of a norm moved up or down by one step of fp32."""
    random, moved = np.random.default_rng(1), {}
    for key, record in file.tensors.items():
        if records.ROLES[key.role].endswith("norm") and key.part == 0:
            gain = file.values(record)[0]
            moved[key.name] = np.nextafter(gain, np.where(random.random(gain.size) < 0.5, np.inf, -np.inf), dtype="f4")
    return moved


def _rows(session: Any, tokens: NDArray[np.int64]) -> Logits:
    rows: Logits = session.append(tokens.tolist(), "all")
    return rows


class _Difference(NamedTuple):
    """Of log-probabilities, in nats, over the vocabulary; one number a row of logits."""

    mean: NDArray[np.float64]
    worst: NDArray[np.float64]


def _difference(a: Logits, b: Logits) -> _Difference:
    rows = [np.abs(_log_softmax(x) - _log_softmax(y)) for x, y in zip(a, b, strict=True)]
    return _Difference(np.array([row.mean() for row in rows]), np.array([row.max() for row in rows]))


def _log_softmax(row: Logits) -> NDArray[np.float64]:
    x = row.astype(np.float64) - row.max()
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return result


def _limit(what: str, found: float, limit: float) -> None:
    if not found <= limit:  # NaN fails too
        raise VerificationError(
            f"onnxruntime against the engine: {what} is {found:.1e} nats, expected at most {limit:.1e}; "
            "the exported graph does not compute this model right here, please report it"
        )
