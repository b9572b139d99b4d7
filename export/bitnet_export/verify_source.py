"""Does a packed file compute what the published model computes? Checked on every conversion.

As `verify` does for checkpoints, and with its limits; but the source is read one layer at a time
(`reference.py`), and of the short prompts every logit is compared, so that each row of the head
counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from . import packed
from .packed import Key
from .reader import PackedFile
from .reference import Stream, Windows, hidden_states, logits, pooled
from .report import Agreement, Checked, HeadCost
from .source import Source, Ternary
from .source import Tensor as Stored
from .verify import EXACT, LOSS, ROUNDED, SHORT, VerificationError, check_limit, engine_scores

if TYPE_CHECKING:
    from bitnet_runtime import Model

PROMPTS = 16
WINDOW = 256  # tokens of a window of the long text

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
    formats = ((torch.float32, config.head_format), (torch.float64, config.head_format), (torch.float32, "f32"))
    streams = [Stream(*each) for each in formats]
    with torch.inference_mode(), Model.load(path, kv_type="f32", verify=False) as engine:
        progress("comparing with the source, layer by layer")
        states = hidden_states(source, streams, texts, weights.compare)
        compare = _compare_logits if config.has_head else _compare_vectors
        result = compare(source, streams, states, texts, engine)
    short, long = result.short, result.long
    check_limit("median difference in short prompts", short.median, EXACT + 1.5 * short.floor_median)
    check_limit("mean difference in a long text", long.mean, ROUNDED + 1.5 * long.floor_mean)
    check_limit("difference of the loss", abs(long.loss_engine - long.loss_torch), LOSS + 3 * long.loss_error)
    return Checked(origin, weights.tensors, weights.ternary, *result)


class _Weights:
    """Counts what was found equal; the source's tensors are compared as the reference loads them."""

    def __init__(self, file: PackedFile) -> None:
        self.file, self.tensors, self.ternary = file, 0, 0

    def compare(self, key: Key, tensor: Stored) -> None:
        record = self.file.tensors[key]
        if isinstance(tensor, Ternary):
            pairs = [("codes", self.file.codes(record), tensor.codes), ("scales", self.file.scales(record), tensor.scales)]
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

    from bitnet import data

    words = Tokenizer.from_buffer(source.tokenizer)
    ids: list[int] = []
    for text in data.documents(data.files_of([])):
        ids += words.encode(text, add_special_tokens=False).ids
        if len(ids) >= n:
            break
    return np.resize(np.array(ids, np.int64), n), "the standard library's source"


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


class _Result(NamedTuple):
    short: Agreement
    long: Agreement
    head: HeadCost


def _compare_logits(
    source: Source, streams: list[Stream], states: list[list[torch.Tensor]], texts: list[Windows], engine: Model
) -> _Result:
    """Every logit of the prompts; log-probabilities of all texts."""
    logits_of_engine = np.stack([_engine_logits(engine, row) for row in texts[0]])
    sums = [[_Sums(windows) for windows in texts] for _ in streams]
    apart, floor = np.zeros(texts[0].shape), np.zeros(texts[0].shape)
    for rows, parts in logits(source, streams, states):
        for total, part in zip(itertools.chain(*sums), itertools.chain(*parts), strict=True):
            total.add(rows, part)
        ref32, ref64 = parts[0][0], parts[1][0]
        apart += np.abs(logits_of_engine[:, :, rows] - ref32.numpy()).sum(-1)
        floor += (ref64 - ref32).abs().sum(-1).numpy()
    found, expected = (float(np.median(d)) / source.config.vocab_size for d in (apart, floor))
    check_limit("median difference of all logits of a token in short prompts", found, EXACT + 1.5 * expected)
    short, long = (
        Agreement.of(engine_scores(engine, windows), *(sums[stream][i].scores() for stream in (0, 1)))
        for i, windows in enumerate(texts)
    )
    stored, published = (sums[stream][1].scores() for stream in (0, 2))
    return _Result(short, long, HeadCost.of(streams[0].head_format, "published", stored, published))


def _engine_logits(engine: Model, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    with engine.session(n_ctx=len(tokens)) as session:
        rows = session.append(tokens.tolist(), "all")
    assert rows is not None
    return rows


# ---- embedding models: vectors of length 1, their components in place of log-probabilities ----


def _compare_vectors(
    source: Source, streams: list[Stream], states: list[list[torch.Tensor]], texts: list[Windows], engine: Model
) -> _Result:
    results = []
    for i, windows in enumerate(texts):
        found = np.stack([_engine_vector(engine, row) for row in windows])
        results.append([found, *(pooled(state[i], source.config.pooling).double().numpy() for state in states)])
    short, long = (Agreement.of(found, ref32, ref64) for found, ref32, ref64, _ in results)
    _, stored, _, published = results[1]
    return _Result(short, long, HeadCost.of(streams[0].head_format, "published", stored, published))
