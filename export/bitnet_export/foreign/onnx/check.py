"""Does an exported graph compute what the engine computes? Checked on every export, in onnxruntime.

The matrix products of both are exact, but norms, softmax and exponentials are not, and int8
rounding is a staircase: see `verify`. What two correct fp32 programs differ by is measured with
onnxruntime alone: the graph against itself with each gain of a norm moved to a neighbouring
number, about what a norm that rounds in another order does.

Compared are log-probabilities; of a model without a head the vectors of texts.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.checkpoint.reading import EngineReader, Floats, Reader, Text, drawn, whole
from bitnet_export.checkpoint.verify import EXACT, ROUNDED, SHORT, VerificationError
from bitnet_export.packed import records
from bitnet_export.packed.reader import PackedFile

from .graph import writes
from .session import Cache, OnnxModel

PROMPTS = 32  # of SHORT tokens
FEW = 3  # times ROUNDED: a text this short has few rounding events, and their mean a long tail
TEXT = 128  # tokens of the long text


@dataclass(frozen=True)
class OnnxReport:
    """What was written, and how far it agrees with the engine: differences of log-probabilities, in nats.

    Of a position in a prompt the largest counts, as most have none but fp32 noise; in the text the mean over
    the vocabulary, which is what to expect of one token. Of a model without a head: of the numbers of the texts'
    vectors of length 1.
    """

    form: str
    packed_bytes: int
    onnx_bytes: int  # graph and weights
    compared: int  # tokens; 0: the engine cannot run the model
    vectors: bool = False  # were compared
    threads: int = 0  # of both
    prompts_median: float = 0.0  # of |onnxruntime - engine|
    text_mean: float = 0.0
    text_worst: float = 0.0
    floor_mean: float = 0.0  # of |onnxruntime - onnxruntime with its norms moved by one step of fp32|
    prefill: tuple[float, float] = (0.0, 0.0)  # tokens a second in onnxruntime and in the engine, a glance at both
    decode: tuple[float, float] = (0.0, 0.0)  # 0: it does not write

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        size = (
            f"size       {self.onnx_bytes / 1e6:.2f} MB in the form {self.form}, from {self.packed_bytes / 1e6:.2f} MB"
        )
        what = "vectors" if self.vectors else "log-probabilities"
        if not self.compared:
            return size + "\nlogits     not compared: the engine cannot run this model"
        single = f"single tokens {self.decode[0]:.1f}, {self.decode[1]:.1f}; " if any(self.decode) else ""
        return "\n".join(
            [
                size,
                f"prompts    {PROMPTS} of at most {SHORT} tokens: {what} differ from the engine's by "
                f"{self.prompts_median:.1e} (median)",
                f"text       {self.text_mean:.1e} on average, {self.text_worst:.1e} at worst"
                f"{', prompt and single tokens' if single else ''} "
                f"(rounding the norms otherwise: {self.floor_mean:.1e} on average)",
                f"speed      prompt {self.prefill[0]:.0f} tok/s in onnxruntime, {self.prefill[1]:.0f} in the engine; "
                f"{single}{self.threads} threads",
            ]
        )


class _Found(NamedTuple):
    """Rows of logits, or vectors, of all texts in one array."""

    prompts: Floats
    text: Floats
    prefill: float  # seconds
    decode: float


def compare(path: Path, file: PackedFile, model: Path) -> dict[str, Any]:
    """The fields of OnnxReport that tell of logits and speed, of `model` made from `file`, which is at `path`.

    Raises VerificationError when they differ from the engine's by more than rounding explains.
    """
    from bitnet_runtime import Model, UnsupportedModelError

    config = file.configs[0]
    random, length = np.random.default_rng(0), min(TEXT, config.max_context)
    prompts = drawn(config, random, PROMPTS, min(SHORT, length))
    text = drawn(config, random, length)
    try:
        engine = Model.load(path, kv_type="f32")
    except UnsupportedModelError:
        return {"compared": 0}
    with engine, engine.session(n_ctx=length) as session:
        threads = engine.threads
        expected = _found(EngineReader(session, config), config, prompts, text)
    found = _found(_Graph(OnnxModel(model, config, threads=threads)), config, prompts, text)
    other = OnnxModel(model, config, threads=threads, replaced=_moved_gains(file))
    moved = _found(_Graph(other), config, prompts, text)

    vectors = not config.has_head
    prompt, moved_prompt = (_difference(found.prompts, x.prompts, vectors) for x in (expected, moved))
    difference, floor = (_difference(found.text, x.text, vectors) for x in (expected, moved))
    median, floor_median = float(np.median(prompt.worst)), float(np.median(moved_prompt.worst))
    mean, floor_mean = float(difference.mean.mean()), float(floor.mean.mean())
    _limit("median difference in short prompts", median, EXACT + 1.5 * floor_median)
    _limit("mean difference in a text", mean, FEW * ROUNDED + 1.5 * floor_mean)
    first = _first(config, length)
    return {
        "compared": prompts.shape[0] * prompts.shape[1] + length,
        "vectors": vectors,
        "threads": threads,
        "prompts_median": median,
        "text_mean": mean,
        "text_worst": float(difference.worst.max()),
        "floor_mean": floor_mean,
        "prefill": tuple(first / run.prefill for run in (found, expected)),
        "decode": tuple((length - first) / run.decode for run in (found, expected)),  # 0 where none follow
    }


def _first(config: ModelConfig, length: int) -> int:
    """How many tokens of a text are read together; the others follow one by one."""
    return length // 2 or 1 if writes(config) else length


def _found(reader: Reader, config: ModelConfig, prompts: Text, text: Text) -> _Found:
    """A prefix, where the model has one, is half of a prompt, and what is read together of the text."""
    short = np.concatenate([whole(reader, config, prompt) for prompt in prompts])
    first = _first(config, len(text))
    start = time.perf_counter()
    reader.restart()
    together = text[:first]
    rows = [reader.read(together, config.mask == "prefix") if config.has_head else reader.embed(together)[None]]
    middle = time.perf_counter()
    rows += [reader.read(token[None], False) for token in text[first:]]
    return _Found(short, np.concatenate(rows), middle - start, time.perf_counter() - middle)


class _Graph:
    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.cache: Cache | None = None

    def restart(self) -> None:
        self.cache = None

    def read(self, part: Text, prefix: bool) -> Floats:
        logits, self.cache = self.model.run(part[None], self.cache, prefix=len(part) if prefix else 0)
        rows: Floats = logits[0]
        return rows

    def embed(self, text: Text) -> Floats:
        if self.model.config.pooling == "none":
            last = self.model.run(text[None])[0][0, -1]
            vector: Floats = last / np.linalg.norm(last)
        else:
            vector = self.model.embed(text[None])[0]
        return vector


def _moved_gains(file: PackedFile) -> dict[str, Floats]:
    """Each gain of a norm moved up or down by one step of fp32."""
    random, moved = np.random.default_rng(1), {}
    for key, record in file.tensors.items():
        if records.ROLES[key.role].endswith("norm") and key.part == 0:
            gain = file.values(record)[0]
            moved[key.name] = np.nextafter(gain, np.where(random.random(gain.size) < 0.5, np.inf, -np.inf), dtype="f4")
    return moved


class _Difference(NamedTuple):
    """Of a row's numbers; one number a row."""

    mean: NDArray[np.float64]
    worst: NDArray[np.float64]


def _difference(a: Floats, b: Floats, vectors: bool) -> _Difference:
    """Of log-probabilities, in nats, over the vocabulary; or of vectors."""
    numbers = _as_they_are if vectors else _log_softmax
    rows = [np.abs(numbers(x) - numbers(y)) for x, y in zip(a, b, strict=True)]
    return _Difference(np.array([row.mean() for row in rows]), np.array([row.max() for row in rows]))


def _as_they_are(row: Floats) -> NDArray[np.float64]:
    return row.astype(np.float64)


def _log_softmax(row: Floats) -> NDArray[np.float64]:
    x = row.astype(np.float64) - row.max()
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return result


def _limit(what: str, found: float, limit: float) -> None:
    if not found <= limit:  # NaN fails too
        raise VerificationError(
            f"onnxruntime against the engine: {what} is {found:.1e} (nats, or of a number of a vector), expected at "
            f"most {limit:.1e}; the exported graph does not compute this model right here, please report it"
        )
