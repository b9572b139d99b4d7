"""What `bitnet bench` times: generating text, turning texts into vectors, and images."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bitnet_runtime import Model
from bitnet_runtime._native import lib
from bitnet_runtime.abilities import require_embedding
from bitnet_runtime.defaults import resolve
from bitnet_runtime.embedding import MOST_TEXTS, MOST_TOKENS
from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.images import vision
from bitnet_runtime.images.info import ImageInfo
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.session import Session

USUAL = 128  # tokens of a prompt or of a text, and of what follows a prompt
COMPUTED = lib.BN_REPEATED  # tokens of a depth that are computed; the rest are copies, see Session.repeat
SPAN = 0.05  # seconds; what takes less is repeated, as the first time, after the limits were measured, caches are cold
MOST_ROWS, PASSES = 8, 8  # rows in a pass, such as guesses and joint texts; passes measured for each number


class Work(Protocol):
    """Something that a model does."""

    def run(self) -> None:
        """Measure it once more."""

    def figures(self) -> dict[str, Any]:
        """Medians of all runs, by what it is called in the result."""


def works_of(model: Model, prompt: int | None, gen: int | None, depth: int, added: int) -> list[Work]:
    """What is measured of a model. added: bytes of its adapter. Raises UnsupportedModelError or InvalidParameterError:
    it cannot be."""
    works: list[Work] = []
    if model.has_text:
        require_embedding(model)
    generates = model.has_text and model.has_head and model.mask != "bidirectional"
    if generates:
        works.append(Generation(model, prompt, gen, depth, added))
    elif gen or depth:
        raise InvalidParameterError(f"{model.path.name} generates no text: leave out {'--gen' if gen else '--depth'}")
    elif model.has_text:
        works.append(_texts(model, prompt))
    elif prompt:
        raise InvalidParameterError(f"{model.path.name} takes no text: leave out --prompt")
    if model.image:
        works.append(_images(model, model.image))
    return works


class Generation:
    """A prompt, tokens that follow it, and passes of several rows."""

    def __init__(self, model: Model, prompt: int | None, gen: int | None, depth: int, added: int) -> None:
        self.prompt, self.gen, needed = _lengths(model, prompt, gen, depth)
        self.model, self.depth, self.added = model, depth, added
        self.session = model.session(n_ctx=needed, adapter=next(iter(model.adapters), None))
        self.tokens = _tokens(model, needed)
        if depth:
            self.session.feed(self.tokens[: min(depth, COMPUTED)], keep_logits=False)
        if depth > COMPUTED:
            self.session.repeat(depth)
        self.prefill = list[float]()  # tokens a second
        self.decode = list[float]()  # tokens a second
        self.skipped = list[float]()  # bytes of weights that a decoded token did not need
        self.rows = list[list[float]]()  # seconds of a pass of 1, 2, … rows

    def run(self) -> None:
        first = self.tokens[self.depth]
        prompt = self.tokens[self.depth : self.depth + self.prompt]
        self.prefill.append(self.prompt / _prefill(self.session, self.depth, prompt))
        seconds, skipped = _decode(self.session, self.depth, first, self.gen)
        self.decode.append(self.gen / seconds)
        self.skipped.append(skipped / self.gen)
        self.rows.append(_rows(self.model, self.session, self.depth, first, self.gen))

    def figures(self) -> dict[str, Any]:
        info, left_out = self.model.info, statistics.median(self.skipped)
        cache = self.model.kv_bytes(self.depth + self.gen // 2)
        bytes_per_token = info.bytes_per_token + self.added + cache - left_out
        decode, prefill = statistics.median(self.decode), statistics.median(self.prefill)
        seconds = [statistics.median(times) for times in zip(*self.rows, strict=True)]
        return {
            "session_mb": self.session.nbytes / 1e6,
            "decode": {
                "n": self.gen,
                "depth": self.depth,
                "tok_s": decode,
                "runs": self.decode,
                "bytes_per_token": bytes_per_token,
                "skipped_bytes_per_token": left_out,
                "gb_s": decode * bytes_per_token / 1e9,
            },
            "prefill": {
                "n": self.prompt,
                "tok_s": prefill,
                "runs": self.prefill,
                "gmac_s": prefill * info.macs_per_token / 1e9,
            },
            "rows": {"ms": [1e3 * took for took in seconds], "ratio": [took / seconds[0] for took in seconds]},
        }


@dataclass
class Vectors:
    """Vectors of texts or of images: of one, and of as many as are computed together."""

    name: str  # in the result
    encode: Callable[[int], object]  # computes those of the first n
    together: int
    macs: int  # of one
    rate: str  # what its speed is called,
    each: int  # and how much of that one is
    facts: dict[str, Any] = field(default_factory=dict)
    one: list[float] = field(default_factory=list)  # seconds
    all: list[float] = field(default_factory=list)  # seconds

    def run(self) -> None:
        # One of them comes last, so that it finds the caches warm, too.
        self.all.append(warm_seconds(lambda: self.encode(self.together)))
        self.one.append(warm_seconds(lambda: self.encode(1)))

    def figures(self) -> dict[str, Any]:
        runs = [self.together * self.each / took for took in self.all]
        speed = statistics.median(runs)
        gmacs = speed * self.macs / self.each / 1e9
        own = self.facts | {"together": self.together, "ms": 1e3 * statistics.median(self.one)}
        return {self.name: own | {self.rate: speed, "runs": runs, "gmac_s": gmacs}}


def _texts(model: Model, n: int | None) -> Vectors:
    """Texts of n tokens."""
    if n and n > model.n_ctx:
        raise InvalidParameterError(f"--prompt {n} is more than the {model.n_ctx} tokens that a text can have")
    n = n or min(USUAL, model.n_ctx)
    together = max(1, min(MOST_TEXTS, MOST_TOKENS // n))
    tokens = _tokens(model, n * together)
    texts = [tokens[i : i + n] for i in range(0, len(tokens), n)]
    pooling, adapter = model.pooling or "mean", next(iter(model.adapters), None)

    def encode(some: int) -> object:
        return model.embed(texts[:some], pooling=pooling, adapter=adapter)

    return Vectors("embed", encode, together, n * model.info.macs_per_token, "tok_s", n, {"n": n})


def _images(model: Model, seen: ImageInfo) -> Vectors:
    """Images that are arrays already."""
    import numpy as np

    together = vision.at_once(seen)
    pixels = np.random.default_rng(0).random((together, seen.channels, seen.image_size, seen.image_size), np.float32)
    compute = vision.embed if seen.pooled else vision.encode
    return Vectors("image", lambda some: compute(model, pixels[:some]), together, seen.macs_per_image, "images_s", 1)


def _lengths(model: Model, prompt: int | None, gen: int | None, depth: int) -> tuple[int, int, int]:
    """Tokens of the prompt, of what follows, and in all. Raises InvalidParameterError: there is no room for them."""
    room = model.n_ctx - depth
    asked = [f"--depth {depth}"] if depth else []
    asked += [f"--{word} {n}" for word, n, more in (("prompt", prompt, 0), ("gen", gen, 1)) if n and n + more > room]
    prompt = prompt or max(1, min(USUAL, room))
    gen = gen or max(1, min(USUAL, room - 1))
    needed = depth + max(prompt, gen + 1)
    if needed > model.n_ctx:
        raise InvalidParameterError(
            f"{' with '.join(asked) or 'what is measured'} needs {needed} tokens, the context holds "
            f"{model.n_ctx}; lower {'it' if len(asked) == 1 else 'them'}"
        )
    return prompt, gen, needed


def _tokens(model: Model, n: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(model.vocab_size) for _ in range(n)]


def skipped_bytes(session: Session) -> int:
    """Bytes of weights that the tokens computed here did not need, because all of them are multiplied by 0;
    of models whose FFN is stored by lines (`bitnet export --sparse`)."""
    return session._ask(lib.bn_session_skipped)


def _prefill(session: Session, depth: int, prompt: Sequence[int]) -> float:
    """Seconds of a prompt. What else was measured has emptied the caches: a token reads all that a prompt does."""
    session.rewind(depth)
    session.feed(prompt[:1])
    return warm_seconds(lambda: session.feed(prompt), lambda: session.rewind(depth))


def _decode(session: Session, depth: int, first: int, n: int) -> tuple[float, float]:
    """Seconds of `n` tokens, and the bytes of weights that they did not need."""
    took: list[float] = []
    skipped: list[float] = []

    def generate() -> None:
        for _ in range(n):
            session.step(session.sample(temperature=0))

    while sum(took) < SPAN:
        session.rewind(depth)
        session.feed([first])
        before = skipped_bytes(session)
        took.append(seconds(generate))
        skipped.append(skipped_bytes(session) - before)
    return statistics.median(took), statistics.median(skipped)


def _rows(model: Model, session: Session, depth: int, first: int, gen: int) -> list[float]:
    """Seconds of a pass that computes 1, 2, … rows of a text and chooses a token behind each."""
    greedy = Sampler(resolve({"temperature": 0}), model.vocab_size)

    def begin() -> None:
        session.rewind(depth)
        session.feed([first])

    begin()
    known = [session.advance(greedy)[0] for _ in range(gen)]
    times: list[float] = []
    for n in range(1, min(MOST_ROWS, gen) + 1):
        begin()
        took = []
        for at in range(0, min(PASSES * n, gen - n + 1), n):
            start = time.perf_counter()
            if len(session.advance(greedy, known[at : at + n])) < n:  # a large vocabulary has no room for more
                return times
            took.append(time.perf_counter() - start)
        times.append(statistics.median(took))
    return times


def warm_seconds(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds of some work, repeated until SPAN has passed. before: what comes before each time, and does not count."""
    took: list[float] = []
    while sum(took) < SPAN:
        before()
        took.append(seconds(work))
    return statistics.median(took)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
