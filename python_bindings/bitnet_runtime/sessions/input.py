"""The part of `Session` that computes tokens, or vectors in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.abilities import require_embedding, require_head, require_next_token
from bitnet_runtime.errors import (
    InvalidParameterError,
    StateError,
    UnsupportedModelError,
    shown,
)
from bitnet_runtime.handles import Handle
from bitnet_runtime.ids import NO_TOKEN, embedding_rows, token_ids
from bitnet_runtime.sessions.state import SessionState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.ids import Ids

BLOCK = 128  # tokens of a prompt between two chances for Ctrl-C


class SessionInput(SessionState):
    """Append, embed and score."""

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
        n, call = self._prefix(tokens, embeddings)
        with self._lock:
            if self.position:
                raise StateError(f"a prefix begins a text, and this one has {self.position} tokens; reset() it before")
            return self._append(n, logits, call, whole=True)

    def feed(self, tokens: Ids, keep_logits: bool = True) -> None:
        """`append` without returning an array: all that `sample` needs, and without numpy."""
        array, call = self._array(tokens), lib.bn_session_append
        self._run(len(array), keep_logits, lambda s, at, *rest: call(s, array + at, *rest))

    def _prefix(self, tokens: Ids, embeddings: object) -> tuple[int, Callable[..., int]]:
        """The length of a prefix, and what appends it as one whole."""
        array, view = self._array(tokens, vectors=True), ffi.NULL
        missing = list(array).count(NO_TOKEN)
        if missing or embeddings is not None:
            view = self._vectors(embeddings, missing)
        return len(array), lambda s, _, *rest: lib.bn_session_append_prefix(s, array, view, *rest)

    def _append(self, n: int, logits: str, call: Callable[..., int], whole: bool = False) -> NDArray[np.float32] | None:
        """What the methods above have in common. call(session, first, n, bn_logits, out): one of the library."""
        if logits not in ("last", "all", "none"):
            raise InvalidParameterError(f"logits is {shown(logits)}, expected 'last', 'all' or 'none'", "logits")
        with self._lock:
            if logits != "all":
                self._run(n, logits == "last", call, whole)
                return self._row() if logits == "last" else None
            import numpy as np

            require_head(self._model)
            handle = self._room(n)
            out = np.empty((n, self._vocab_size), np.float32)
            view = ffi.from_buffer("float[]", out)
            for start, size in self._pieces(n, whole):
                rows = view + start * self._vocab_size
                self._check(call(handle.pointer, start, size, lib.BN_LOGITS_ALL, rows))
            return out

    def _run(self, n: int, keep_logits: bool, call: Callable[..., int], whole: bool = False) -> None:
        if keep_logits:
            require_head(self._model)
        with self._lock:
            handle = self._room(n)
            for start, size in self._pieces(n, whole):
                last = keep_logits and start + size == n
                rows = lib.BN_LOGITS_LAST if last else lib.BN_LOGITS_NONE
                self._check(call(handle.pointer, start, size, rows, ffi.NULL))

    def _pieces(self, n: int, whole: bool = False) -> Iterator[tuple[int, int]]:
        """Starts and lengths of the pieces for the library: a bidirectional text is one piece."""
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
                        "this session holds tokens not appended by embed with this pooling; call reset() first"
                    )
                self._check(status)
        return out

    def score(self, tokens: Ids) -> list[float]:
        """Append tokens and return the natural log of the probability of each, given all before it.

        The first is NaN when the session was empty. Raises UnsupportedModelError for a bidirectional model, StateError
        when the session has tokens and no logits, as after `rewind`.
        """
        require_next_token(self._model)
        array = self._array(tokens)
        out = ffi.new("float[]", len(array))
        with self._lock:
            handle = self._room(len(array))
            for start, n in self._pieces(len(array)):
                status = lib.bn_session_score(handle.pointer, array + start, n, out + start)
                self._check_row(status, "score a token with")
        return list(out)

    def _check_row(self, status: int, use: str) -> None:
        """`_check` of a call that reads the logits there are."""
        if status == lib.BN_ERR_STATE and self.logits is None:
            raise StateError(
                f"there are no logits after position {self.position} to {use}; append a token first, as after rewind, "
                "and not with logits='none'"
            )
        self._check(status)

    def _array(self, tokens: Ids, *, vectors: bool = False) -> Any:
        """int32[n], n >= 1. vectors: with -1 for some of them."""
        if not vectors:
            require_embedding(self._model)
        ids = token_ids(tokens, "tokens", self._vocab_size, vectors=vectors)
        if any(token != NO_TOKEN for token in ids):
            require_embedding(self._model)
        if not ids:
            raise InvalidParameterError("tokens is empty, expected at least one token id", "tokens")
        return ffi.new("int32_t[]", ids)

    def _vectors(self, embeddings: object, rows: int | None = None) -> Any:
        """float[n * dim], which keeps the array that it points into."""
        return ffi.from_buffer("float[]", embedding_rows(embeddings, self._model.info.dim, rows))

    def _room(self, n: int) -> Handle:
        """The handle, with memory reserved for n more tokens, because they go to the library in pieces."""
        handle = self._fit(n)
        self._check(lib.bn_session_reserve(handle.pointer, n))
        self._changes += 1
        return handle

    def _fit(self, n: int) -> Handle:
        """The handle, if n more tokens fit the context. Raises ContextLengthError."""
        if self._model.mask == "bidirectional" and self.position:
            raise StateError(
                "a bidirectional text is appended in one call, and this session already holds one; call reset() first"
            )
        if self.position + n > self.n_ctx:
            self._check(lib.BN_ERR_CONTEXT, n)
        return self._open
