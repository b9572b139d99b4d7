"""Text that a model generates itself, on which its draft head is trained (`--self-written`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bitnet import process
from bitnet.config import ModelConfig
from bitnet.data import dataset
from bitnet.model import parallel
from bitnet.settings import Settings
from bitnet.train import objectives
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say
from bitnet.train.source_model import Start, Writes

PROMPT = 4  # the first 1/PROMPT of a sequence comes from the data
ROUNDS = 20  # most rounds of generation, as a model may end its texts early


def added(
    settings: Settings, config: ModelConfig, words: Tokenizer, start: Start, batches: objectives.Batches
) -> objectives.Batches:
    """Batches of the source's continuations of pieces of the data, and of as many tokens of the data itself."""
    tokens, context = batches.tokens, batches.context
    if not isinstance(tokens, dataset.Tokens):
        raise TrainingError("self_written is of one text; give it with --data")
    if start.writer is None:
        raise TrainingError(f"{start.what} cannot be run by the engine, so it writes nothing; leave --self-written out")
    digest = _digest(settings, start, tokens, context)
    file = settings.run_folder / f"train-{digest}.bin"
    parallel.from_first(lambda: _write(file, settings, start, tokens, context))
    ids = np.memmap(file, tokens.ids.dtype, mode="r")
    n_bytes = round(len(ids) * tokens.bytes_per_token)
    mapped = dataset.Tokens.map(file, tokens.ids.dtype.name, n_bytes, digest)
    return objectives.batches(settings, config, words, mapped, context, start.generation)


def _write(file: Path, settings: Settings, start: Start, tokens: dataset.Tokens, context: int) -> None:
    if file.exists():
        return
    assert start.writer
    begin = max(1, context // PROMPT)
    rows = math.ceil(settings.self_written / max(1, context - begin))
    most = max(1, (len(tokens.ids) - 1) // context)
    say(f"the model generates {settings.self_written:,} tokens after {rows:,} pieces of the data")
    with start.writer() as writes, process.written(file) as out:
        for place in _places(min(rows, most), most, context):
            out.write(tokens.ids[place : place + context].tobytes())
        for row in _rows(tokens, writes, most, context, settings):
            out.write(np.array(row, tokens.ids.dtype).tobytes())


def _places(n: int, most: int, context: int, number: int = 0) -> list[int]:
    """Where `n` pieces of the data start, spread over all `most`; different ones in each round."""
    return [(i * most // n + number) % most * context for i in range(n)]


def _rows(tokens: dataset.Tokens, writes: Writes, most: int, context: int, settings: Settings) -> Iterator[list[int]]:
    """The generated texts, each after its piece of the data, in rows of `context` tokens. A text that ends early is
    followed by another in the same row."""
    begin = max(1, context // PROMPT)
    row: list[int] = []
    n = written = 0
    for number in range(ROUNDS):
        left = settings.self_written - written
        if left <= 0:
            break
        each = max(1.0, written / n) if n else context - begin
        places = _places(math.ceil(left / each), most, context, number)
        prompts = [tokens.ids[place : place + begin].tolist() for place in places]
        for text in writes(prompts, context - begin, settings.seed + n):
            kept = text[: context - len(row)]
            row, n, written = row + kept, n + 1, written + max(0, len(kept) - begin)
            if len(row) == context:
                yield row
                row = []
    if row:
        yield row


def _digest(settings: Settings, start: Start, tokens: dataset.Tokens, context: int) -> str:
    said = f"{tokens.digest}\0{settings.self_written}\0{context}\0{settings.seed}\0{start.digest}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]
