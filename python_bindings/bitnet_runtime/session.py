"""A session: one text as tokens, its KV cache, and the logits after its last token."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from bitnet_runtime import saved
from bitnet_runtime._native import ffi, lib
from bitnet_runtime.defaults import ALIASES, FIELDS, Sampling, TokenOptions, resolve, whole
from bitnet_runtime.errors import (
    CancelledError,
    ClosedError,
    ContextLengthError,
    InvalidParameterError,
    StateError,
    UnsupportedModelError,
    check,
    check_session,
    shown,
)
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.handles import Handle, Unique
from bitnet_runtime.ids import NO_TOKEN, embedding_rows, token_ids
from bitnet_runtime.sampler import Sampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.ids import Ids

BLOCK = 128  # tokens of a prompt between two chances for Ctrl-C


class Session(Unique):
    """Token-level work; made by `Model.session()`. Use as a context manager, or `close()`.

    One text at a time: calls from several threads take turns, one call each, so share a session
    only if that makes sense for the text. Sessions of one model are independent of each other.
    `cancel` and `close` may come from any thread at any moment. A new session has seed 0.

    After a fork the child goes on with it, unless another thread of the parent was computing:
    then it is closed in the child.
    """

    def __init__(self, model: ModelFacts, handle: Handle) -> None:
        self._model = model
        self._handle: Handle | None = handle  # None when closed
        self._cancelled = False
        self._closed = "this session is closed; make a new one with Model.session()"
        self._vocab_size = model.vocab_size
        self._lock = threading.RLock()  # re-entrant, for signal handlers
        self._ending = threading.RLock()  # of a Stream that ends or is closed; held for a moment only
        self._token = ffi.new("int32_t *")
        self._note = b""
        _sessions[id(self)] = self
        model._open  # noqa: B018  raises if close() came before it could see this session

    @classmethod
    def _new(cls, model: ModelFacts, n_ctx: int | None = None, kv_type: str | None = None) -> Session:
        """`Model.session`. kv_type: not the model's."""
        model.require_text()
        options, out = model._session_options(n_ctx, kv_type), ffi.new("bn_session **")
        handle = model._open
        check_session(lib.bn_session_new(handle.pointer, options, out), handle.pointer, options)
        return cls(model, Handle(out[0], handle))

    @classmethod
    def _load(cls, model: ModelFacts, path: str | os.PathLike[str]) -> Session:
        """`Model.load_session`."""
        model.require_text()
        handle = model._open
        pointer, note = saved.load(handle.pointer, path)
        session = cls(model, Handle(pointer, handle))
        session._note = note
        return session

    @overload
    def append(self, tokens: Ids, logits: Literal["last", "all"] = "last") -> NDArray[np.float32]: ...
    @overload
    def append(self, tokens: Ids, logits: Literal["none"]) -> None: ...

    def append(self, tokens: Ids, logits: Literal["last", "all", "none"] = "last") -> NDArray[np.float32] | None:
        """Compute tokens. Returns logits as float32: [vocab_size] after the last token, or
        [len(tokens), vocab_size] after every token for "all", or None for "none".

        Raises ContextLengthError before any work. Ctrl-C is obeyed every 128 tokens, and so is
        `cancel`, with CancelledError; the session then holds the tokens that were finished.
        """
        array = self._array(tokens)
        call = lib.bn_session_append
        return self._append(len(array), logits, lambda s, at, *rest: call(s, array + at, *rest))

    def append_embeddings(
        self, embeddings: NDArray[np.floating[Any]], logits: Literal["last", "all", "none"] = "last"
    ) -> NDArray[np.float32] | None:
        """`append` for vectors in place of tokens: float32[n, dim], what enters the first layer, without the scale
        that a model may give its own. Other float types are converted.

        `tokens` then has -1 where they stand; penalties and drafts pass these by. Raises InvalidParameterError
        for another shape or type, and for what is not finite.
        """
        view, dim, call = self._vectors(embeddings), self._model.info.dim, lib.bn_session_append_embeddings
        return self._append(len(view) // dim, logits, lambda s, at, *rest: call(s, view + at * dim, *rest))

    def append_prefix(
        self,
        tokens: Ids,
        embeddings: NDArray[np.floating[Any]] | None = None,
        logits: Literal["last", "all", "none"] = "last",
    ) -> NDArray[np.float32] | None:
        """`append` for the prefix of a text, of a model whose `mask` is "prefix": its tokens all see each other.
        The session must be empty.

        A token -1 takes the next row of `embeddings`, float32[number of -1, dim]. All is one step, which Ctrl-C
        waits for; `cancel` ends it. Raises UnsupportedModelError with another mask, StateError when the session
        is not empty; else as `append_embeddings`. What is appended later is causal.
        """
        if self._model.mask != "prefix":
            raise UnsupportedModelError(f"the mask of {self._model.path.name} is {self._model.mask}, expected prefix")
        array, view = self._array(tokens, vectors=True), ffi.NULL
        missing = list(array).count(NO_TOKEN)
        if missing or embeddings is not None:
            view = self._vectors(embeddings, missing)
        call = lib.bn_session_append_prefix
        with self._lock:
            if self.position:
                raise StateError(f"a prefix begins a text, and this one has {self.position} tokens; reset() it before")
            return self._append(len(array), logits, lambda s, _, *rest: call(s, array, view, *rest), whole=True)

    def feed(
        self,
        tokens: Ids,
        keep_logits: bool = True,
        *,
        prefix: bool = False,
        rows: NDArray[np.floating[Any]] | None = None,
    ) -> None:
        """`append`, or `append_prefix`, without an array: what `sample` needs, and no numpy but for `rows`."""
        array, call = self._array(tokens, vectors=rows is not None), lib.bn_session_append
        if prefix:
            view = ffi.NULL if rows is None else self._vectors(rows, list(array).count(NO_TOKEN))
            self._run(
                len(array),
                keep_logits,
                lambda s, _, *rest: lib.bn_session_append_prefix(s, array, view, *rest),
                whole=True,
            )
        else:
            self._run(len(array), keep_logits, lambda s, at, *rest: call(s, array + at, *rest))

    def _append(self, n: int, logits: str, call: Callable[..., int], whole: bool = False) -> NDArray[np.float32] | None:
        """What the methods above have in common. call(session, first, n, bn_logits, out): one of the library."""
        if logits not in ("last", "all", "none"):
            raise InvalidParameterError(f"logits is {shown(logits)}, expected 'last', 'all' or 'none'", "logits")
        with self._lock:
            if logits != "all":
                self._run(n, logits == "last", call, whole)
                return self._row() if logits == "last" else None
            import numpy as np

            self._model.require_head()
            out = np.empty((n, self._vocab_size), np.float32)
            view = ffi.from_buffer("float[]", out)
            handle = self._room(n)
            for start, size in self._pieces(n, whole):
                rows = view + start * self._vocab_size
                self._check(call(handle.pointer, start, size, lib.BN_LOGITS_ALL, rows))
            return out

    def _run(self, n: int, keep_logits: bool, call: Callable[..., int], whole: bool = False) -> None:
        if keep_logits:
            self._model.require_head()
        with self._lock:
            handle = self._room(n)
            for start, size in self._pieces(n, whole):
                last = keep_logits and start + size == n
                rows = lib.BN_LOGITS_LAST if last else lib.BN_LOGITS_NONE
                self._check(call(handle.pointer, start, size, rows, ffi.NULL))

    def _pieces(self, n: int, whole: bool = False) -> Iterator[tuple[int, int]]:
        """Beginnings and lengths of what goes to the library at a time: all of a text whose tokens see all."""
        most = n if whole or self._model.mask == "bidirectional" else BLOCK
        return ((start, min(most, n - start)) for start in range(0, n, most))

    def embed(self, tokens: Ids, pooling: str | None = None) -> NDArray[np.float32]:
        """Append tokens and return the vector of all tokens held, float32[width]; see `Model.embed`.

        What the session holds already must have come by `embed` too, or it is a StateError; of a bidirectional
        model it holds nothing. Leaves no logits.
        """
        array, call = self._array(tokens), lib.bn_session_embed
        return self._embed(len(array), pooling, lambda s, at, *rest: call(s, array + at, *rest))

    def embed_embeddings(
        self, embeddings: NDArray[np.floating[Any]], pooling: str | None = None
    ) -> NDArray[np.float32]:
        """`embed` for vectors in place of tokens, float32[n, dim], as `append_embeddings` takes them."""
        view, dim, call = self._vectors(embeddings), self._model.info.dim, lib.bn_session_embed_embeddings
        return self._embed(len(view) // dim, pooling, lambda s, at, *rest: call(s, view + at * dim, *rest))

    def _embed(self, n: int, pooling: str | None, call: Callable[..., int]) -> NDArray[np.float32]:
        """call(session, first, n, bn_pooling, out): one of the library."""
        import numpy as np

        kind = self._model._pooling_number(pooling)
        out = np.empty(self._model.info.width, np.float32)
        view = ffi.from_buffer("float[]", out)
        with self._lock:
            handle = self._room(n)
            for start, size in self._pieces(n):
                status = call(handle.pointer, start, size, kind, view)
                if status == lib.BN_ERR_STATE:
                    raise StateError(
                        "this session holds tokens that did not come by embed with this pooling; call reset() before"
                    )
                self._check(status)
        return out

    def score(self, tokens: Ids) -> list[float]:
        """Append tokens and return the natural log of the probability of each, given all before it.

        The first is NaN when the session was empty. Raises UnsupportedModelError for a bidirectional model.
        """
        self._model.require_next_token()
        array = self._array(tokens)
        out = ffi.new("float[]", len(array))
        with self._lock:
            handle = self._room(len(array))
            for start, n in self._pieces(len(array)):
                self._check(lib.bn_session_score(handle.pointer, array + start, n, out + start))
        return list(out)

    def sample(self, *, options: Sampling | None = None, **sampling: Unpack[TokenOptions]) -> int:
        """Choose the next token from the current logits, without appending it. Asked again it is the same: what
        decides is the seed, the position, and the logits.

        Options as in `Model.generate`, without max_tokens, seed, stop and draft.
        """
        for word in sampling:
            name = ALIASES.get(word, word)
            if name in FIELDS and name not in TokenOptions.__annotations__:
                raise InvalidParameterError(f"{word} is an option of a whole text, not of one token", word)
        return self.draw(Sampler(resolve(sampling, options, self._model.defaults), self._vocab_size))

    def draw(self, sampler: Sampler) -> int:
        """`sample` with options prepared once."""
        with self._lock:
            handle = self._open
            status = lib.bn_session_sample(handle.pointer, sampler.struct, self._token)
            if status:
                self._check(status)
            return int(self._token[0])

    def step(self, token: int) -> None:
        """Append one token and keep its logits; `feed` for the inner loop."""
        with self._lock:
            handle = self._open
            self._token[0] = token
            status = lib.bn_session_append(handle.pointer, self._token, 1, lib.BN_LOGITS_LAST, ffi.NULL)
            if status:
                self._check(status)

    def advance(self, sampler: Sampler, draft: Sequence[int] = ()) -> list[int]:
        """Sample a token and append it; go on as long as `draft`, guesses of what comes, is right.

        Returns the tokens appended, at least one: those of as many single steps, whatever the draft.
        """
        guesses = ffi.new("int32_t[]", list(draft)) if draft else ffi.NULL
        out, n = ffi.new("int32_t[]", len(draft) + 1), self._token
        with self._lock:
            handle = self._open
            self._check(lib.bn_session_step(handle.pointer, sampler.struct, guesses, len(draft), out, n))
            return list(ffi.unpack(out, n[0]))

    def seed(self, seed: int) -> None:
        """Choose tokens with the noise of this seed from now on, 0 to 2**64 - 1.

        Fork a session and seed its copies to have several answers to one text.
        """
        number = whole("seed", seed, 0, 2**64 - 1)
        with self._lock:
            handle = self._open
            lib.bn_session_seed(handle.pointer, number)

    def fork(self) -> Session:
        """A new session with the same tokens, cache, logits and seed: until it is given another, it goes on alike.

        The cache is not copied but for the block of 64 tokens in which the texts part.
        """
        out = ffi.new("bn_session **")
        with self._lock:
            handle = self._open
            check(lib.bn_session_fork(handle.pointer, out))
            return Session(self._model, Handle(out[0], handle))

    def save(self, path: str | os.PathLike[str], note: bytes = b"") -> None:
        """Write tokens, cache and seed to a file, for `Model.load_session`: it goes on as if never interrupted.

        A file that is there is replaced once all is written. note: whatever you want to keep with it. Vectors
        of `embed` that are not complete are not saved. Raises OSError.
        """
        with self._lock:
            handle = self._open
            saved.save(handle.pointer, note, path)
            self._note = note

    @property
    def kv_type(self) -> str:
        """The type of numbers in its cache."""
        with self._lock:
            handle = self._open
            return str(ffi.string(lib.bn_kv_name(lib.bn_session_kv_type(handle.pointer))).decode())

    @property
    def note(self) -> bytes:
        """What was given to `save`; b"" for a session that was neither saved nor loaded."""
        return self._note

    # ---- cancel, forget ----

    def cancel(self) -> None:
        """Stop what this session does. From any thread and at once: it waits for nothing.

        A generation ends with finish_reason "cancelled", and with it the cancelling. Any other call
        raises CancelledError, one that is running after at most 128 more tokens, until `rewind` or
        `reset`. A session that rests stays cancelled for the next generation.
        """
        handle = self._handle  # keeps it, if another thread closes the session
        self._cancelled = True  # before the C library knows, see _cut
        if handle is not None:
            lib.bn_session_cancel(handle.pointer)

    def rewind(self, n: int) -> None:
        """Forget all tokens from position n on; then logits are unavailable until the next append. Ends a `cancel`.

        n is 0, or from `rewind_least` to the position, else it is a StateError.
        """
        with self._lock:
            n = whole("n", n, 0, self.position, ", the position")
            if 0 < n < self.rewind_least:
                raise StateError(
                    f"n is {n}, expected 0 or {self.rewind_least} to {self.position}: a text that came whole cannot "
                    "be cut, and layers with a window have forgotten what is long past; rewind(0) and append again"
                )
            self._cancelled = False
            self._cut(n)

    def reset(self) -> None:
        """Forget all tokens and take seed 0, as a new session does. Ends a `cancel`."""
        with self._lock:
            self.rewind(0)
            self.seed(0)

    def _keep(self, prompt: Sequence[int]) -> int:
        """Forget what the prompt does not begin with, and at least its last token; how many are held then.

        A cancelled session stays so.
        """
        with self._lock:
            held, same = self.tokens, 0
            while same < min(len(held), len(prompt) - 1) and held[same] == prompt[same] != NO_TOKEN:
                same += 1  # vectors may be others
            same = same if same >= self.rewind_least else 0
            self._cut(same)
            return same

    def _resume(self) -> None:
        """End a `cancel`, and forget nothing."""
        with self._lock:
            if self._cancelled and self._handle is not None:
                self.rewind(self.position)

    def _cut(self, n: int) -> None:
        handle = self._open
        check(lib.bn_session_rewind(handle.pointer, n))  # ends a cancel, which may have come this moment
        if self._cancelled:
            lib.bn_session_cancel(handle.pointer)

    # ---- what it holds ----

    @property
    def position(self) -> int:
        """Tokens held."""
        with self._lock:
            handle = self._open
            return int(lib.bn_session_position(handle.pointer))

    @property
    def rewind_least(self) -> int:
        """The least n, but for 0, that `rewind` takes."""
        with self._lock:
            handle = self._open
            return int(lib.bn_session_rewind_least(handle.pointer))

    @property
    def n_ctx(self) -> int:
        """Tokens that fit."""
        with self._lock:
            handle = self._open
            return int(lib.bn_session_context(handle.pointer))

    @property
    def tokens(self) -> list[int]:
        """The tokens held, oldest first; -1 for a vector in place of one."""
        with self._lock:
            handle, n = self._open, self.position
            return list(ffi.unpack(lib.bn_session_tokens(handle.pointer), n)) if n else []

    def _digests(self, first: int, n: int) -> list[int]:
        """Hashes of the states behind the last layer, of n tokens from one on; 0 of those without logits."""
        with self._lock:
            handle = self._open
            return list(ffi.unpack(lib.bn_session_digests(handle.pointer) + first, n))

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """A copy of the row after the last token, float32[vocab_size]; None when there is none."""
        with self._lock:
            handle = self._open
            return None if lib.bn_session_logits(handle.pointer) == ffi.NULL else self._row()

    def _row(self) -> NDArray[np.float32]:
        import numpy as np

        handle = self._open
        row = lib.bn_session_logits(handle.pointer)
        if row == ffi.NULL:
            check(lib.BN_ERR_NUMERIC)
        return np.frombuffer(ffi.buffer(row, 4 * self._vocab_size), np.float32).copy()

    @property
    def nbytes(self) -> int:
        """Memory of the session in bytes, without the scratch memory that all sessions of a model share."""
        with self._lock:
            handle = self._open
            return int(lib.bn_session_bytes(handle.pointer))

    @property
    def skipped_bytes(self) -> int:
        """Bytes of weights that the tokens computed here did not need, because all of them are multiplied with 0;
        of models whose FFN is stored by lines (`bitnet export --sparse`)."""
        with self._lock:
            handle = self._open
            return int(lib.bn_session_skipped(handle.pointer))

    # ---- life ----

    def close(self) -> None:
        """Free the memory. A call in another thread is cancelled, waited for, and raises ClosedError.

        Closing twice is fine.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.bn_session_cancel(handle.pointer)
        with self._lock:
            pass

    @property
    def _open(self) -> Handle:
        if self._handle is None:
            raise ClosedError(self._closed)
        return self._handle

    def _check(self, status: int) -> None:
        check_all((self,), status)

    def _array(self, tokens: Ids, *, vectors: bool = False) -> Any:
        """int32[n], n >= 1. vectors: with -1 for some of them."""
        if not vectors:
            self._model.require_embedding()
        ids = token_ids(tokens, "tokens", self._vocab_size, vectors=vectors)
        if any(token != NO_TOKEN for token in ids):
            self._model.require_embedding()
        if not ids:
            raise InvalidParameterError("tokens is empty, expected at least one token id", "tokens")
        return ffi.new("int32_t[]", ids)

    def _vectors(self, embeddings: object, rows: int | None = None) -> Any:
        """float[n * dim], which keeps the array that it points into."""
        return ffi.from_buffer("float[]", embedding_rows(embeddings, self._model.info.dim, rows))

    def _room(self, n: int) -> Handle:
        """The handle, when n more tokens fit."""
        if self._model.mask == "bidirectional" and self.position:
            raise StateError(
                "a bidirectional text comes whole, in one call, and this session holds one; reset() it before"
            )
        if self.position + n > self.n_ctx:
            raise ContextLengthError(self.position + n, self.n_ctx, most=self._model.info.max_context)
        return self._open

    def __repr__(self) -> str:
        return "<Session closed>" if self._handle is None else f"<Session {self.position} of {self.n_ctx} tokens>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_all(sessions: Iterable[Session], status: int) -> None:
    """`errors.check` of a call with sessions, that tells those cancelled from those closed by another thread."""
    if status == lib.BN_ERR_CANCELLED:
        for session in sessions:
            session._open  # noqa: B018  raises
        raise CancelledError("this session was cancelled; rewind() or reset() ends that")
    check(status)


_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


def all_sessions() -> list[Session]:
    """The sessions of all models that exist now."""
    return [session for reference in _sessions.valuerefs() if (session := reference()) is not None]


def _after_fork() -> None:
    """In the child: threads that held a lock are not there, and what they were computing is half done."""
    for session in all_sessions():
        session._ending = threading.RLock()
        if session._lock.acquire(blocking=False):
            session._lock.release()
        else:
            session._lock = threading.RLock()
            session._handle = None
            session._closed = "another thread was using this session when the process forked; make a new one"


os.register_at_fork(after_in_child=_after_fork)
