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
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.checkpoint.verify import EXACT, ROUNDED, SHORT, VerificationError
from bitnet_export.packed import records
from bitnet_export.packed.reader import PackedFile

from .graph import writes
from .session import Cache, Floats, OnnxModel, Text

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


class _Reader(Protocol):
    """A program that reads one text, (T,) tokens or (T, D) vectors, in parts."""

    def restart(self) -> None: ...

    def read(self, part: Text, prefix: bool) -> Floats:
        """Logits (T, V). prefix: the part is the text's prefix."""

    def embed(self, text: Text) -> Floats:
        """The vector (1, D) of a whole text."""


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
    prompts, text = _drawn(config)
    try:
        engine = Model.load(path, kv_type="f32")
    except UnsupportedModelError:
        return {"compared": 0}
    with engine, engine.session(n_ctx=text.shape[1]) as session:
        threads = engine.threads
        expected = _found(_Engine(session, config), config, prompts, text)
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
    first, length = _first(config, text.shape[1]), text.shape[1]
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


def _drawn(config: ModelConfig) -> tuple[Text, Text]:
    """Prompts (PROMPTS, SHORT, ...) and one text (1, TEXT, ...)."""
    random = np.random.default_rng(0)
    shapes = [(n, min(length, config.max_context)) for n, length in ((PROMPTS, SHORT), (1, TEXT))]

    def drawn(shape: tuple[int, int]) -> Text:
        if config.input == "tokens":
            return random.integers(0, config.vocab_size, shape)
        return random.standard_normal((*shape, config.dim), np.float32)

    prompts, text = map(drawn, shapes)
    return prompts, text


def _first(config: ModelConfig, length: int) -> int:
    """How many tokens of a text are read together; the others follow one by one."""
    return length // 2 or 1 if writes(config) else length


def _found(reader: _Reader, config: ModelConfig, prompts: Text, text: Text) -> _Found:
    """A prefix, where the model has one, is half of a prompt, and what is read together of the text."""

    def whole(prompt: Text) -> Floats:
        reader.restart()
        if not config.has_head:
            return reader.embed(prompt)
        if config.mask != "prefix":
            return reader.read(prompt, False)
        first, rest = np.split(prompt, [len(prompt) // 2 or 1])
        return np.concatenate([reader.read(first, True)] + [reader.read(rest, False)] * (len(rest) > 0))

    short = np.concatenate([whole(prompt) for prompt in prompts])
    first = _first(config, text.shape[1])
    start = time.perf_counter()
    reader.restart()
    together = text[0, :first]
    rows = [reader.read(together, config.mask == "prefix") if config.has_head else reader.embed(together)]
    middle = time.perf_counter()
    rows += [reader.read(token[None], False) for token in text[0, first:]]
    return _Found(short, np.concatenate(rows), middle - start, time.perf_counter() - middle)


class _Engine:
    def __init__(self, session: Any, config: ModelConfig) -> None:
        self.session, self.config = session, config

    def restart(self) -> None:
        self.session.reset()

    def read(self, part: Text, prefix: bool) -> Floats:
        session, rows = self.session, "all"
        if part.ndim == 1:
            found: Floats = (session.append_prefix if prefix else session.append)(part.tolist(), logits=rows)
        elif prefix:
            found = session.append_prefix([-1] * len(part), part, logits=rows)
        else:
            found = session.append_embeddings(part, logits=rows)
        return found

    def embed(self, text: Text) -> Floats:
        pooling = "last" if self.config.pooling == "none" else self.config.pooling
        found: NDArray[np.float32] = self.session.embed(text.tolist() if text.ndim == 1 else text, pooling)
        return np.asarray(found[None])


class _Graph:
    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.cache: Cache | None = None

    def restart(self) -> None:
        self.cache = None

    def read(self, part: Text, prefix: bool) -> Floats:
        rows, self.cache = self.model.run(part[None], self.cache, prefix=len(part) if prefix else 0)
        return rows[0]

    def embed(self, text: Text) -> Floats:
        if self.model.config.pooling != "none":
            return self.model.embed(text[None])
        last = self.model.run(text[None])[0][:, -1]
        length: Floats = np.linalg.norm(last, axis=-1, keepdims=True)
        return last / length


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
