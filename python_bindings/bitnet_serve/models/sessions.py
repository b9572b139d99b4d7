"""The prefix cache: sessions of a model, whose memory is counted, and of which some are kept for later texts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np  # here, and not in the first request, which would wait for it

from bitnet_runtime.errors import ModelTooLargeError
from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.model import Model
from bitnet_runtime.sessions.session import Session
from bitnet_serve.models.stored import Shelved

if TYPE_CHECKING:
    from numpy.typing import NDArray

EVERY = 60.0  # seconds, in which a text that is kept gets into the folder
BLOCK = 64  # tokens that the engine keeps together: fewer in common are not worth a copy
MOST = 16  # texts that are kept
LEASE = 1.0  # seconds for which no other model takes memory, when one asked and found none


class FullError(ModelTooLargeError):
    """Others have the memory, for a while. size: bytes that were asked for; lacks: how many of them are not free."""

    def __init__(self, message: str, size: int, lacks: int) -> None:
        super().__init__(message)
        self.size, self.lacks = size, lacks


class NeverError(ModelTooLargeError):
    """It is more than all texts may take: it will not fit later, either."""


class Kept(NamedTuple):
    """A text that was computed, for requests of the same asker."""

    model: Model
    session: Session
    tokens: NDArray[np.int32]
    who: object
    idle: int  # tokens that it keeps in memory and does not see
    size: int  # bytes that are counted for it

    def is_for(self, who: object, adapter: str | None) -> bool:
        """Whether a text of this asker may go on from it: with another adapter its cache would be another."""
        return self.who == who and self.session.adapter == adapter


class Memory:
    """What the sessions of all models may take together. The system gives memory when it is written to: without
    this count it would be promised to more of them than there is.

    Texts that are kept give way to answers, whichever model they are of: the least recently used first.
    share: of the memory, that they take at most; 0 keeps none."""

    def __init__(self, most: int, share: float) -> None:
        self.lock = threading.RLock()
        self.most, self.most_kept, self._left = most, int(most * share), most
        self.kept: list[Kept] = []  # the latest last
        self._first: object = None  # a model that found no room; no other takes any before it,
        self._until = 0.0  # if it asks again by then

    def take(self, n: int, whose: object, waits: bool = True) -> bool:
        """False: answers have too much of it, or another model asked before `whose`. waits: until there is enough."""
        with self.lock:
            now = time.monotonic()
            if self._first not in (None, whose) and now < self._until:
                return False
            fits = n <= self._left + sum(kept.size for kept in self.kept)
            if waits:
                self._first, self._until = None if fits else whose, now + LEASE
            while fits and n > self._left:
                self.drop(self.kept[0])
            self._left -= n * fits
        return fits

    def lacks(self, n: int, whose: object) -> int:
        """How many bytes have to be given back before `whose` can take so many; 0: another model is to have them."""
        with self.lock:
            free = self._left + sum(kept.size for kept in self.kept)
            return max(0, n - free) if self._first is whose else 0

    def give(self, n: int) -> None:
        with self.lock:
            self._left += n

    def keep(self, kept: Kept, instead: Sequence[Kept]) -> bool:
        """If there is room, in place of these and of the least recently used. size: at most `most_kept`."""
        with self.lock:
            if kept.size > self._left + sum(each.size for each in instead):
                return False
            for each in instead:
                self.drop(each)
            while len(self.kept) == MOST or sum(each.size for each in self.kept) + kept.size > self.most_kept:
                self.drop(self.kept[0])
            self._left -= kept.size
            self.kept.append(kept)
        return True

    def used(self, kept: Kept) -> None:
        """It is the latest now."""
        with self.lock:
            self.kept.remove(kept)
            self.kept.append(kept)

    def drop(self, kept: Kept) -> None:
        with self.lock:
            self.kept.remove(kept)
            self._left += kept.size
        kept.session.close()


class Sessions:
    """Those of a model, for the thread of its scheduler alone. shelved: where texts that are kept are from, and go
    to."""

    def __init__(self, model: Model, memory: Memory, shelved: Shelved | None = None) -> None:
        self._model, self._memory = model, memory
        self._taken: dict[Session, int] = {}
        self._idle: dict[Session, int] = {}  # see Kept
        self._closing = threading.Event()
        self._writing: threading.Thread | None = None
        if shelved:
            for session, who in shelved.read(model):
                self._keep(session, who, 0)
            self._writing = threading.Thread(target=self._write_at_times, args=(shelved,), daemon=True)
            self._writing.start()

    def new(self, room: int, adapter: str | None = None, waits: bool = True) -> Session:
        """An empty one for so many tokens. Raises FullError, which means to ask again if it `waits`; NeverError."""
        return self._counted(self._model.session(room, adapter=adapter), room, waits=waits)

    def begin(self, prompt: Sequence[int], room: int, who: object, adapter: str | None = None) -> tuple[Session, int]:
        """One that holds as much of the prompt as one that is kept, but for its last token; and how much that is.

        It is compared with each of them, to the token: some 2 ms for MOST texts of 128,000 tokens. Hashes of blocks,
        each chained to the one before, would pay from thousands of texts on.
        """
        text = np.array(prompt[:-1], np.int32)
        with self._memory.lock:  # so that no other model takes its place meanwhile
            best, same = max(
                ((kept, _same(kept.tokens, text)) for kept in self._kept if kept.is_for(who, adapter)),
                key=lambda pair: (pair[1], -pair[0].idle),
                default=(None, 0),
            )
            # The memory of a session goes as a whole, when none sees any of it: a fork keeps what it does not see, too.
            idle = best.idle + len(best.tokens) - same if best else 0
            if best is None or same < max(BLOCK, best.session.rewind_least) or idle > self._model.n_ctx:
                return self._counted(self._fresh(room, adapter), room), 0
            self._memory.used(best)
            session = best.session.fork()
        session.rewind(same)
        try:
            self._counted(session, room, idle)
        except ModelTooLargeError:
            if not idle:
                raise
            return self._counted(self._fresh(room, adapter), room), 0
        self._idle[session] = idle
        return session, same

    def end(self, session: Session, who: object) -> None:
        """It is not used any more, and is kept if it may be of use."""
        self._memory.give(self._taken.pop(session))
        self._keep(session, who, self._idle.pop(session, 0))

    def _keep(self, session: Session, who: object, idle: int) -> None:
        tokens = session.tokens
        size = self._size(session, len(tokens), idle)
        useful = len(tokens) > BLOCK and NO_TOKEN not in tokens and session.n_ctx == self._model.n_ctx
        if not useful or self._model.mask != "causal" or size > self._memory.most_kept:
            session.close()
            return
        text = np.array(tokens, np.int32)
        with self._memory.lock:
            alike = [kept for kept in self._kept if kept.is_for(who, session.adapter) and len(kept.tokens) <= len(text)]
            served = [kept for kept in alike if (kept.tokens == text[: len(kept.tokens)]).all()]  # by the new one, too
            there = self._memory.keep(Kept(self._model, session, text, who, idle, size), served)
        if not there:
            session.close()

    def taken(self, session: Session) -> int:
        """Bytes that are counted for it."""
        return self._taken[session]

    def release(self, session: Session) -> None:
        """It is not used any more."""
        self._memory.give(self._taken.pop(session))
        self._idle.pop(session, None)
        session.close()

    def close(self) -> None:
        """Nothing runs any more, and nothing is kept in memory."""
        self._closing.set()
        if self._writing:
            self._writing.join()
        with self._memory.lock:
            for kept in self._kept:
                self._memory.drop(kept)

    def _write_at_times(self, shelved: Shelved) -> None:
        """In a thread of its own, so that no answer waits; the last time when all have ended. A session that is kept
        does not change, and whoever goes on from one waits no longer than it takes to copy."""
        wait, last = EVERY, False
        while not last:
            last = self._closing.wait(wait)
            begin = time.monotonic()
            shelved.write([(kept.session, kept.who) for kept in self._kept])
            wait = max(EVERY, 20 * (time.monotonic() - begin))  # a slow disk has other work, too

    @property
    def kept(self) -> int:
        """Texts that are kept; from any thread."""
        return len(self._kept)

    @property
    def _kept(self) -> list[Kept]:
        with self._memory.lock:  # one that is used moves to the end, and would be missed
            return [kept for kept in self._memory.kept if kept.model is self._model]

    def _fresh(self, room: int, adapter: str | None) -> Session:
        """With all of the context, so that any text can go on from it; that costs nothing before it is used."""
        try:
            return self._model.session(adapter=adapter)
        except ModelTooLargeError:
            return self._model.session(room, adapter=adapter)

    def _counted(self, session: Session, room: int, idle: int = 0, waits: bool = True) -> Session:
        size, most = self._size(session, room, idle), self._memory.most
        if size > most:
            session.close()
            raise NeverError(
                f"{room:,} tokens take {-(-size // 1_000_000):,} MB, but the texts of all models may take "
                f"{most // 1_000_000:,}; ask for fewer, or give the server more, as --max-cache does"
            )
        if not self._memory.take(size, self, waits):
            session.close()
            said = f"there is no memory now for {room} tokens beside the answers that run"
            raise FullError(said, size, self._memory.lacks(size, self))
        self._taken[session] = size
        return session

    def _size(self, session: Session, n: int, idle: int) -> int:
        """Bytes that a session takes when it holds n tokens; what it shares with others is counted again."""
        cache = self._model.kv_bytes
        return session.nbytes - cache(session.n_ctx) + cache(min(n + BLOCK, session.n_ctx)) + cache(idle)


def _same(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Tokens with which both begin."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
