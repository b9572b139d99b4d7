"""Does an exported graph compute what the engine computes? Checked on every export, in onnxruntime.

The matrix products of both are exact, but norms, softmax and exponentials are not, and int8
rounding is a staircase: see `verify`. The difference between two correct fp32 programs is measured
with only onnxruntime: the graph against itself with each norm gain moved to a neighbouring
number, about the effect of a norm that rounds in another order. Without norms the projections move.

It compares log-probabilities; without a head the vectors of texts, and with vision those of images.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.checkpoint.pictures import drawn_images, engine_sees, pixels_of
from bitnet_export.checkpoint.reading import EngineReader, Floats, Reader, Text, drawn, whole
from bitnet_export.checkpoint.scoring import of_length_1
from bitnet_export.checkpoint.verify import EXACT, ROUNDED, SHORT, VerificationError
from bitnet_export.packed import encodings, records
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import Record

from .graph import writes
from .report import PROMPTS
from .session import Cache, OnnxModel

if TYPE_CHECKING:
    from bitnet_runtime import Model

FEW = 3  # times ROUNDED: such a short text has few rounding events, and their mean has a long tail
TEXT = 128  # tokens of the long text
IMAGES = 8
MOVES = 8  # most variants of moved gains: one variant may meet no rounding event in a text


class _Found(NamedTuple):
    """Rows of logits, or vectors, for all texts in one array."""

    prompts: Floats
    text: Floats
    prefill: float  # seconds
    decode: float


def compare(path: Path, file: PackedFile, models: Sequence[Path]) -> dict[str, Any]:
    """The fields of OnnxReport on logits and speed. models: one for each stack of `file`, which is at `path`.

    Raises VerificationError if they differ from the engine's by more than rounding explains.
    """
    from bitnet_runtime import Model, UnsupportedModelError

    try:
        engine = Model.load(path, kv_type="f32")
    except UnsupportedModelError:
        return {"compared": 0}
    with engine:
        pairs = [_Pair(model, file, stack, engine.threads) for stack, model in enumerate(models)]
        facts: dict[str, Any] = {"compared": 0, "threads": engine.threads}
        if file.configs[0].input != "images":
            facts |= _compare_texts(engine, pairs[0])
        if file.configs[-1].input == "images":
            facts |= _compare_images(engine, pairs)
    return facts


class _Pair:
    """The graph of a stack, and variants with its norm gains, or projections, moved by one step of fp32."""

    def __init__(self, model: Path, file: PackedFile, stack: int, threads: int) -> None:
        self.config = file.configs[stack]
        self.graph = OnnxModel(model, self.config, threads=threads)
        self._moved = functools.cache(
            lambda seed: OnnxModel(model, self.config, threads=threads, replaced=_moved(file, stack, seed))
        )

    def moved(self, seed: int = 1) -> OnnxModel:
        return self._moved(seed)


def _compare_texts(engine: Model, pair: _Pair) -> dict[str, Any]:
    config = pair.config
    random, length = np.random.default_rng(0), min(TEXT, config.max_context)
    prompts = drawn(config, random, PROMPTS, min(SHORT, length))
    text = drawn(config, random, length)
    with engine.session(n_ctx=length) as session:
        expected = _found(EngineReader(session, config), config, prompts, text)
    found = _found(_Graph(pair.graph), config, prompts, text)
    moved = _found(_Graph(pair.moved()), config, prompts, text)

    vectors = not config.has_head
    prompt, moved_prompt = (_difference(found.prompts, x.prompts, vectors) for x in (expected, moved))
    difference = _difference(found.text, expected.text, vectors)
    median, floor_median = float(np.median(prompt.worst)), float(np.median(moved_prompt.worst))
    _limit("median difference in short prompts", median, EXACT + 1.5 * floor_median)

    def floor(seed: int) -> float:
        other = moved if seed == 1 else _found(_Graph(pair.moved(seed)), config, prompts, text)
        return float(_difference(found.text, other.text, vectors).mean.mean())

    mean = float(difference.mean.mean())
    floor_mean = _floor_that_explains(mean, "mean difference in a text", FEW * ROUNDED, floor)
    first = _first(config, length)
    return {
        "compared": prompts.shape[0] * prompts.shape[1] + length,
        "vectors": vectors,
        "prompts_median": median,
        "text_mean": mean,
        "text_worst": float(difference.worst.max()),
        "floor_mean": floor_mean,
        "prefill": tuple(first / run.prefill for run in (found, expected)),
        "decode": tuple((length - first) / run.decode for run in (found, expected)),  # 0 without single tokens
    }


def _compare_images(engine: Model, pairs: Sequence[_Pair]) -> dict[str, Any]:
    """Compare vectors of images, normalized to length 1, and a decoder's logits after an image."""
    seeing, given = pairs[-1], drawn_images(pairs[-1].config, IMAGES)
    pixels = pixels_of(seeing.config, given)
    expected = engine_sees(engine, seeing.config, given)
    rows = [of_length_1(x) for x in (expected, seeing.graph.see(pixels), seeing.moved().see(pixels))]
    difference, floor = (float(np.abs(rows[1] - x).mean()) for x in (rows[0], rows[2]))
    _limit("mean difference in images", difference, ROUNDED + 1.5 * floor)
    facts = {"images": IMAGES, "images_mean": difference, "images_floor": floor}
    config = pairs[0].config
    n, room = expected.shape[-2], config.max_context - expected.shape[-2]
    if not config.image_token or room < 2:
        return facts
    text = drawn(config, np.random.default_rng(0), min(TEXT, room))
    first = len(text) // 2
    with engine.session(n_ctx=n + len(text)) as session:
        said = EngineReader(session, config).behind(expected[0], text[:first])
        said = np.concatenate([said, session.append(text[first:].tolist(), logits="all")])
    behind = _behind(pairs[0].graph, text, first, expected[:1])

    def floor_behind(seed: int) -> float:
        moved = _behind(pairs[0].moved(seed), text, first, expected[:1])
        return float(_difference(behind, moved, False).mean.mean())

    mean = float(_difference(behind, said, False).mean.mean())
    floor = _floor_that_explains(mean, "mean difference behind an image", FEW * ROUNDED, floor_behind)
    return facts | {"behind": len(text), "behind_mean": mean, "behind_floor": floor}


def _behind(model: OnnxModel, text: Text, first: int, features: Floats) -> Floats:
    """Logits of a text after an image, as in `EngineReader.behind`: some tokens together, then the others."""
    places = np.full(features.shape[1], model.config.image_token)
    together = np.concatenate([places, text[:first]])[None]
    prefix = together.shape[1] if model.config.mask == "prefix" else 0
    rows, cache = model.run(together, prefix=prefix, features=features)
    return np.concatenate([rows[0, len(places) :], model.run(text[None, first:], cache)[0][0]])


def _first(config: ModelConfig, length: int) -> int:
    """How many tokens of a text are computed together; the others follow one by one."""
    return length // 2 or 1 if writes(config) else length


def _found(reader: Reader, config: ModelConfig, prompts: Text, text: Text) -> _Found:
    """The outputs of a reader. With the mask "prefix", half of a prompt, and the part of the text computed together,
    are the prefix."""
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


def _moved(file: PackedFile, stack: int, seed: int) -> dict[str, Floats]:
    """The norm gains of a stack, each moved up or down by one step of fp32; without norms its projections."""
    of_stack = {key: record for key, record in file.tensors.items() if key.stack == stack and key.part == 0}
    gains = {
        key.name: file.values(record)[0] for key, record in of_stack.items() if records.ROLES[key.role].endswith("norm")
    }
    random = np.random.default_rng(seed)

    def moved(x: Floats) -> Floats:
        return np.nextafter(x, np.where(random.random(x.shape) < 0.5, np.inf, -np.inf), dtype="f4")

    return {name: moved(x) for name, x in (gains or _projections(file, of_stack)).items()}


def _projections(file: PackedFile, tensors: Mapping[records.Key, Record]) -> dict[str, Floats]:
    """What the graph of a model without norms has in fp32: projections of floats, as `Matrices.linear` holds them, and
    scales; not those of groups, which are within the codes."""
    found = {}
    for key, record in tensors.items():
        if key.layer == records.NONE or records.ROLES[key.role] not in TERNARY_LINEARS:
            continue
        if not record.quantized:
            found[key.name] = file.values(record).T
        elif record.scope != encodings.SCALE_GROUP:
            found[f"{key.name}.scale"] = file.scales(record)
    return found


class _Difference(NamedTuple):
    """Mean and largest difference within each row."""

    mean: NDArray[np.float64]
    worst: NDArray[np.float64]


def _difference(a: Floats, b: Floats, vectors: bool) -> _Difference:
    """Difference of log-probabilities, in nats, over the vocabulary; or of vectors."""
    numbers = _as_they_are if vectors else _log_softmax
    rows = [np.abs(numbers(x) - numbers(y)) for x, y in zip(a, b, strict=True)]
    return _Difference(np.array([row.mean() for row in rows]), np.array([row.max() for row in rows]))


def _as_they_are(row: Floats) -> NDArray[np.float64]:
    return row.astype(np.float64)


def _log_softmax(row: Floats) -> NDArray[np.float64]:
    x = row.astype(np.float64) - row.max()
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return result


def _floor_that_explains(found: float, what: str, events: float, floor: Callable[[int], float]) -> float:
    """The noise floor that explains a difference: of the first variant of the gains, or the worst of several."""
    worst = 0.0
    for seed in range(1, MOVES + 1):
        worst = max(worst, floor(seed))
        if found <= events + 1.5 * worst:
            break
    _limit(what, found, events + 1.5 * worst)
    return worst


def _limit(what: str, found: float, limit: float) -> None:
    if not found <= limit:  # also for NaN
        raise VerificationError(
            f"onnxruntime against the engine: {what} is {found:.1e} (nats, or of a number of a vector), expected at "
            f"most {limit:.1e}; the exported graph does not compute this model correctly here, please report it"
        )
