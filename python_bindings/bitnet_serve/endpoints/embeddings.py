"""/v1/embeddings"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bitnet_runtime.abilities import require_images
from bitnet_runtime.answers.ready import text_tokens
from bitnet_runtime.embedding import embed_batch
from bitnet_runtime.errors import ModelTooLargeError, naming, shown
from bitnet_runtime.images import vision
from bitnet_runtime.images.files import is_data
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.shape import POOLING
from bitnet_serve.endpoints import fields
from bitnet_serve.errors import ApiError, refuse
from bitnet_serve.models.generation import End, Event, Failure, Mailbox, Timings
from bitnet_serve.models.registry import Served
from bitnet_serve.models.scheduler import PIECE_ALONE
from bitnet_serve.models.task import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KNOWN = frozenset({"model", "input", "encoding_format", "dimensions", "pooling"})
MOST_TEXTS = 2048
MOST_IMAGES = 64
TOGETHER = 16  # short texts that share the reading of the weights


class Vectors(Task):
    """On its way to vectors."""

    def __init__(self, served: Served, mailbox: Mailbox) -> None:
        self._served, self._model, self._mailbox = served, served.model, mailbox
        self.vectors: list[NDArray[np.float32]] = []
        self._failed = False

    def fail(self, error: Exception) -> None:
        self._failed = True
        self._mailbox.put(0, Failure(error))

    def close(self) -> None:
        if not self._failed:
            reason = "stop" if self.done else "cancelled"
            self._mailbox.put(0, End(reason, self.prompt_tokens, 0, Timings(0, 0, 0, 0)))


class Embedding(Vectors):
    """Texts: long ones in pieces, short ones several at a time."""

    def __init__(self, served: Served, texts: Sequence[list[int]], pooling: str | None, mailbox: Mailbox) -> None:
        super().__init__(served, mailbox)
        self._texts, self._pooling = texts, pooling
        self._sessions: list[Session] = []
        self._at = self._held = 0  # texts that are done, and tokens of the next one

    def open(self) -> None:
        self._sessions.append(self._served.sessions.new(max(map(len, self._texts)), self._served.adapter))

    @property
    def nbytes(self) -> int:
        return sum(map(self._served.sessions.taken, self._sessions))

    def piece(self, most: int) -> None:
        text = self._texts[self._at]
        if self._held == 0 and (group := self._group(most)) > 1:
            for session in self._sessions[:group]:
                session.reset()
            some = self._texts[self._at : self._at + group]
            names = [f"input {place}" for place in range(self._at, self._at + group)]
            self.vectors += list(embed_batch(self._sessions[:group], some, self._pooling, names))
            self._at += group
        else:
            (session, *_) = self._sessions
            if self._held == 0:
                session.reset()
            end = len(text) if self._model.mask == "bidirectional" else min(self._held + most, len(text))
            with naming(f"input {self._at}" if len(self._texts) > 1 else ""):
                vector = session.embed(text[self._held : end], self._pooling)
            self._held = end
            if end == len(text):
                self.vectors.append(vector)
                self._at, self._held = self._at + 1, 0
        self.done = self._at == len(self._texts)

    def _group(self, most: int) -> int:
        """How many of the next texts to compute together, each in a session of its own."""
        n = tokens = 0
        for text in self._texts[self._at : self._at + TOGETHER]:
            tokens += len(text)
            if tokens > most:
                break
            n += 1
        try:
            while len(self._sessions) < n:
                most = min(PIECE_ALONE, self._model.n_ctx)
                self._sessions.append(self._served.sessions.new(most, self._served.adapter, waits=False))
        except ModelTooLargeError:  # fewer at a time work, too
            pass
        return min(n, len(self._sessions))

    def close(self) -> None:
        for session in self._sessions:
            self._served.sessions.release(session)
        self._sessions.clear()
        self.prompt_tokens = sum(map(len, self._texts[: self._at])) + self._held
        super().close()


class Pictures(Vectors):
    """Pictures, one at a time."""

    def __init__(self, served: Served, pixels: NDArray[np.float32], mailbox: Mailbox) -> None:
        super().__init__(served, mailbox)
        self._pixels = pixels

    def piece(self, most: int) -> None:
        at = len(self.vectors)
        self.vectors += list(vision.embed(self._model, self._pixels[at : at + 1]))
        self.done = len(self.vectors) == len(self._pixels)


class Asked(NamedTuple):
    """What to embed: token ids of texts, or pixels of images; whether vectors are sent as base64, and how many
    numbers of each."""

    texts: list[list[int]]
    pooling: str | None
    as_base64: bool
    dimensions: int
    pixels: NDArray[np.float32] | None = None


def understand(served: Served, body: Mapping[str, Any]) -> Asked:
    """Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN, samples=False)
    model = served.model
    form = fields.take(body, "encoding_format", str, "float")
    if form not in ("float", "base64"):
        raise refuse(f"encoding_format is {shown(form)}, expected 'float' or 'base64'", "encoding_format")
    width = model.info.width
    dimensions = fields.whole(body, "dimensions", width, 1, width)
    images = _images(body.get("input"))
    if images:
        require_images(model)
        if len(images) > MOST_IMAGES:
            raise refuse(f"input has {len(images)} images, expected at most {MOST_IMAGES}", "input")
        return Asked([], None, form == "base64", dimensions, model.processor.batch(images))
    pooling = body.get("pooling", model.pooling)
    if pooling not in [*POOLING]:  # it may be unhashable
        found = "not given, and the model names none" if pooling is None else shown(pooling)
        raise refuse(f"pooling is {found}; expected one of {', '.join(POOLING)}", "pooling")
    given = body.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if isinstance(given, list) and len(given) > MOST_TEXTS:
        found = f"input has {len(given):,} texts, expected at most {MOST_TEXTS}; send them in several requests"
        raise refuse(found, "input")
    if not isinstance(given, list) or not given:
        raise refuse(f"input is {shown(given)}, expected a text, token ids, or 1 to {MOST_TEXTS} of these", "input")
    texts = []
    for place, one in enumerate(given):
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise refuse(f"input has {shown(one)}, expected a text or token ids", "input", "invalid_type")
        with naming(f"input {place}" if len(given) > 1 else ""):
            texts.append(text_tokens(model, one))
        if not texts[-1]:
            raise refuse("input has a text without tokens; give at least one character", "input")
    return Asked(texts, pooling, form == "base64", dimensions)


def _images(given: object) -> list[str]:
    """The data: URLs of images, if they are asked for: {"image": URL}, or as a chat has it {"type": "image_url", …}."""
    each = given if isinstance(given, list) else [given]
    if not any(isinstance(one, dict) for one in each):
        return []
    found = []
    for one in each:
        url = one.get("image", one.get("image_url")) if isinstance(one, dict) else None
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) or not is_data(url):  # never a file name or an address
            said = f'input has {shown(one, 40)}, expected {{"image": "data:…"}}, and texts in a request of their own'
            raise refuse(said, "input")
        found.append(url)
    return found


async def compute(served: Served, asked: Asked, client: object) -> tuple[int, bytes]:
    """Tokens of the texts, and the body of the answer."""
    mailbox = Mailbox()
    task: Vectors
    if asked.pixels is None:
        task = Embedding(served, asked.texts, asked.pooling, mailbox)
    else:
        task = Pictures(served, asked.pixels, mailbox)
    served.scheduler.submit([task], client)
    event: Event
    try:
        [(_, event)] = await mailbox.get()
    except asyncio.CancelledError:
        served.scheduler.cancel([task])
        raise
    if isinstance(event, Failure):
        raise event.error
    if not task.done:
        raise ApiError(503, "cancelled: the server is shutting down", "shutting_down", retry_after=5)
    tokens = sum(map(len, asked.texts))
    return tokens, await asyncio.to_thread(lambda: b"".join(_body(served.name, asked, task.vectors, tokens)))


def _body(name: str, asked: Asked, vectors: Sequence[NDArray[np.float32]], tokens: int) -> Iterator[bytes]:
    """A vector at a time: nothing else runs while Python writes one JSON, and all may be a hundred MB."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield json.dumps({"object": "list", "model": name, "usage": usage, "data": []})[:-2].encode()
    for index, vector in enumerate(vectors):
        first = _first(vector, asked.dimensions)
        numbers = base64.b64encode(first.astype("<f4").tobytes()).decode() if asked.as_base64 else first.tolist()
        one = {"object": "embedding", "index": index, "embedding": numbers}
        yield b", " * (index > 0) + json.dumps(one, allow_nan=False).encode()
    yield b"]}"


def _first(vector: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """The first n numbers of a vector, scaled to length 1 again."""
    import numpy as np

    if n == len(vector):
        return vector
    exact = vector[:n].astype(np.float64)
    return (exact / (np.linalg.norm(exact) or 1)).astype(np.float32)
