"""Does a packed file compute what the published model computes? Checked on every conversion.

As `verify` does for checkpoints, but the source is read one layer at a time (`reference.py`), and
of the short prompts every logit is compared, so that each row of the head counts. A few hundred
tokens hold too few rounding events for a fixed limit of what they may do, and it depends on the
model; so it is measured: noise of 1e-5 on the embedding, ten times what fp32 arithmetic leaves
there, makes such events everywhere. The engine has to be closer to the reference than that.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from . import packed
from .packed import Key
from .reader import PackedFile
from .reference import Pass, Windows, hidden_states, logits, pooled
from .report import Agreement, Checked, HeadCost, Scores
from .source import Source, Ternary
from .source import Tensor as Stored
from .verify import EXACT, LOSS, SHORT, VerificationError, check_limit, engine_scores

if TYPE_CHECKING:
    from bitnet_runtime import Model

PROMPTS = 16
WINDOW = 256  # tokens of a window of the long text
NOISE = 1e-5
REF32, REF64 = 0, 1  # of the passes

Progress = Callable[[str], None]


def verify_source(source: Source, path: Path, *, tokens: int, progress: Progress = lambda _: None) -> Checked:
    """Compare a packed file with the source it was made from; `tokens` is the length of the long text.

    Raises VerificationError saying what differs.
    """
    from bitnet_runtime import Model

    file = PackedFile.open(path)
    config = file.configs[0]
    weights = _Weights(file)
    ids, origin = _tokens(source, config, PROMPTS * SHORT + tokens)
    length = min(config.max_context, WINDOW, max(tokens, SHORT))
    texts = [_windows(ids[: PROMPTS * SHORT], SHORT), _windows(ids[PROMPTS * SHORT :], length)]
    stored = config.head_format
    passes = [
        Pass(texts, torch.float32, stored),
        Pass(texts, torch.float64, stored),
        Pass(texts[1:], torch.float32, stored, NOISE),
        Pass(texts[1:], torch.float32, "f32"),
    ]
    progress("comparing with the source: the engine")
    with Model.load(path, kv_type="f32", verify=False) as engine:
        found = _run(engine, *texts) if config.has_head else _embed(engine, *texts)
    progress("comparing with the source: the reference, layer by layer")
    with torch.inference_mode():
        states = hidden_states(source, passes, weights.compare)
        result = (_compare_logits if config.has_head else _compare_vectors)(source, passes, states, found)
    short, long = result.short, result.long
    check_limit("median difference in short prompts", short.median, EXACT + 1.5 * short.floor_median)
    check_limit("mean difference in a long text", long.mean, EXACT + 1.5 * max(long.floor_mean, result.noise))
    check_limit("difference of the loss", abs(long.loss_engine - long.loss_torch), LOSS + 3 * long.loss_error)
    return Checked(origin, weights.tensors, weights.ternary, *result)


class _Weights:
    """Counts what was found equal; the source's tensors are compared as the reference loads them."""

    def __init__(self, file: PackedFile) -> None:
        self.file, self.tensors, self.ternary = file, 0, 0

    def compare(self, key: Key, tensor: Stored) -> None:
        record = self.file.tensors[key]
        pairs: list[tuple[str, NDArray[Any], NDArray[Any]]]
        if isinstance(tensor, Ternary):
            pairs = [
                ("codes", self.file.codes(record), tensor.codes),
                ("scales", self.file.scales(record), tensor.scales),
            ]
            self.ternary += tensor.codes.size
        else:
            values = tensor.all()
            if record.encoding == packed.F16:
                values = values.astype(np.float16).astype(np.float32)
            pairs = [("values", self.file.values(record), values)]
        for what, found, expected in pairs:
            if not np.array_equal(found.ravel(), expected.ravel()):
                raise VerificationError(f"{key.name}: {what} in the file differ from the source's")
        self.tensors += 1


# ---- texts ----


def _tokens(source: Source, config: ModelConfig, n: int) -> tuple[NDArray[np.int64], str]:
    """Real text where the source has a tokenizer, else random ids."""
    if source.tokenizer is None:
        return np.random.default_rng(0).integers(0, config.vocab_size, n), "random tokens (the source has no tokenizer)"
    from tokenizers import Tokenizer

    words = Tokenizer.from_buffer(source.tokenizer)
    ids = words.encode(inspect.getsource(difflib), add_special_tokens=False).ids
    return np.resize(np.array(ids, np.int64), n), "Python's difflib"


def _windows(ids: NDArray[np.int64], length: int) -> Windows:
    return ids[: max(len(ids) // length, 1) * length].reshape(-1, length)


# ---- decoders: logits ----


class _Sums:
    """Log-probabilities of the next tokens of a text while the vocabulary goes by in parts."""

    def __init__(self, windows: Windows) -> None:
        self.targets = torch.from_numpy(windows[:, 1:])
        self.total = torch.full(self.targets.shape, -math.inf, dtype=torch.float64)
        self.chosen = torch.zeros(self.targets.shape, dtype=torch.float64)

    def add(self, rows: slice, part: torch.Tensor) -> None:
        """part: logits (n, T, rows)."""
        part = part[:, :-1].double()
        self.total = torch.logaddexp(self.total, part.logsumexp(-1))
        inside = (self.targets >= rows.start) & (self.targets < rows.stop)
        place = (self.targets - rows.start).clamp(0, part.shape[-1] - 1)
        self.chosen += torch.where(inside, part.gather(-1, place[..., None])[..., 0], 0.0)

    def scores(self) -> NDArray[np.float64]:
        return (self.chosen - self.total).numpy()


class _Engine(NamedTuple):
    """What the engine computes."""

    logits: NDArray[np.float32]  # of the prompts, (n, T, V)
    prompts: Scores
    text: Scores


def _run(engine: Model, prompts: Windows, text: Windows) -> _Engine:
    rows = []
    with engine.session(n_ctx=SHORT) as session:
        for tokens in prompts.tolist():
            session.reset()
            rows.append(session.append(tokens, "all"))
    return _Engine(np.array(rows), engine_scores(engine, prompts), engine_scores(engine, text))


class _Result(NamedTuple):
    short: Agreement
    long: Agreement
    noise: float  # mean difference that NOISE makes in the long text
    head: HeadCost

    @classmethod
    def of(cls, short: Agreement, engine: Scores, scores: Sequence[Scores], stored: str) -> _Result:
        """Scores of the long text, by the engine and by each pass."""
        ref32, ref64, noisy, published = scores
        long, noise = Agreement.of(engine, ref32, ref64), float(np.abs(noisy - ref32).mean())
        return cls(short, long, noise, HeadCost.of(stored, "published", ref32, published))


def _compare_logits(
    source: Source, passes: Sequence[Pass], states: list[list[torch.Tensor]], engine: _Engine
) -> _Result:
    """Every logit of the prompts; log-probabilities of all texts."""
    sums = [[_Sums(windows) for windows in each.texts] for each in passes]
    apart, floor = np.zeros(engine.logits.shape[:2]), np.zeros(engine.logits.shape[:2])
    for rows, parts in logits(source, passes, states):
        for total, part in zip(itertools.chain(*sums), itertools.chain(*parts), strict=True):
            total.add(rows, part)
        ref32, ref64 = parts[REF32][0], parts[REF64][0]
        apart += np.abs(engine.logits[:, :, rows] - ref32.numpy()).sum(-1)
        floor += (ref64 - ref32).abs().sum(-1).numpy()
    found, expected = (float(np.median(d)) / source.config.vocab_size for d in (apart, floor))
    check_limit("median difference of all logits of a token in short prompts", found, EXACT + 1.5 * expected)
    short = Agreement.of(engine.prompts, sums[REF32][0].scores(), sums[REF64][0].scores())
    return _Result.of(short, engine.text, [each[-1].scores() for each in sums], passes[REF32].head_format)


# ---- embedding models: vectors of length 1, their components in place of log-probabilities ----


def _embed(engine: Model, prompts: Windows, text: Windows) -> _Engine:
    vectors = [np.array(engine.embed(windows.tolist()), np.float64) for windows in (prompts, text)]
    return _Engine(np.empty((0, 0, 0), np.float32), *vectors)


def _compare_vectors(
    source: Source, passes: Sequence[Pass], states: list[list[torch.Tensor]], engine: _Engine
) -> _Result:
    def vectors(state: torch.Tensor) -> Scores:
        return pooled(state, source.config.pooling).double().numpy()

    short = Agreement.of(engine.prompts, vectors(states[REF32][0]), vectors(states[REF64][0]))
    return _Result.of(short, engine.text, [vectors(state[-1]) for state in states], passes[REF32].head_format)
