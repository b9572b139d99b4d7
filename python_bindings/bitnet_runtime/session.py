"""A session: one text as tokens, its KV cache, and the logits after its last token."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.defaults import Sampling, resolve
from bitnet_runtime.embedding import pooling_number
from bitnet_runtime.errors import ClosedError, ContextLengthError, InvalidParameterError, check
from bitnet_runtime.handles import Handles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.model import Model

BLOCK = 128  # tokens of a prompt between two chances for Ctrl-C

Rows = Literal["last", "all", "none"]
_ROWS = {"none": lib.BN_LOGITS_NONE, "last": lib.BN_LOGITS_LAST, "all": lib.BN_LOGITS_ALL}


class Sampler:
    """Sampling options as the C struct, made once for many tokens."""

    def __init__(self, options: Sampling, vocab_size: int) -> None:
        bias = dict(options.logit_bias or {})
        outside = [token for token in bias if token >= vocab_size]
        if outside:
            raise InvalidParameterError(
                f"logit_bias names token {outside[0]}, expected ids from 0 to {vocab_size - 1}", "logit_bias"
            )
        self._arrays = ffi.new("int32_t[]", list(bias)), ffi.new("float[]", list(bias.values()))
        self.struct = ffi.new(
            "bn_sampler *",
            {
                "temperature": options.temperature,
                "top_k": options.top_k,
                "top_p": options.top_p,
                "min_p": options.min_p,
                "repeat_penalty": options.repeat_penalty,
                "presence_penalty": options.presence_penalty,
                "frequency_penalty": options.frequency_penalty,
                "penalty_window": options.repeat_last_n,
                "n_bias": len(bias),
                "bias_tokens": self._arrays[0],
                "bias_values": self._arrays[1],
            },
        )


class Session:
    """Token-level work; made by `Model.session()`. Use as a context manager, or `close()`.

    One text at a time: calls from several threads take turns, one call each, so share a session
    only if that makes sense for the text. Sessions of one model are independent of each other.
    A new session draws from seed 0.
    """

    def __init__(self, model: Model, handles: Handles, pointer: Any) -> None:
        self._model = model  # kept alive, and with it the C model
        self._handles = handles
        self._pointer = pointer  # None when closed
        self._key = handles.add(pointer, self)
        self._vocab_size = model.vocab_size
        self._lock = threading.RLock()
        self._token = ffi.new("int32_t *")

    def append(self, tokens: Sequence[int], logits: Rows = "last") -> NDArray[np.float32] | None:
        """Compute tokens. Returns logits as float32: [vocab_size] after the last token, or
        [len(tokens), vocab_size] after every token for "all", or None for "none".

        Raises ContextLengthError before any work. Ctrl-C is obeyed every 128 tokens; the session
        then holds the tokens that were finished.
        """
        if logits not in _ROWS:
            raise InvalidParameterError(f"logits is {logits!r}, expected 'last', 'all' or 'none'", "logits")
        if logits == "none":
            self.feed(tokens, keep_logits=False)
            return None
        import numpy as np

        if logits == "last":
            self.feed(tokens)
            return self.logits
        self._model.require_head()
        array = self._array(tokens)
        out = np.empty((len(array), self._vocab_size), np.float32)
        view = ffi.from_buffer("float[]", out)
        with self._lock:
            self._check_room(len(array))
            for start in range(0, len(array), BLOCK):
                n = min(BLOCK, len(array) - start)
                rows = view + start * self._vocab_size
                check(lib.bn_session_append(self._open, array + start, n, lib.BN_LOGITS_ALL, rows))
        return out

    def feed(self, tokens: Sequence[int], keep_logits: bool = True) -> None:
        """`append` without an array: what `sample` needs, and no numpy."""
        array = self._array(tokens)
        if keep_logits:
            self._model.require_head()
        with self._lock:
            self._check_room(len(array))
            for start in range(0, len(array), BLOCK):
                n = min(BLOCK, len(array) - start)
                last = keep_logits and start + n == len(array)
                rows = lib.BN_LOGITS_LAST if last else lib.BN_LOGITS_NONE
                check(lib.bn_session_append(self._open, array + start, n, rows, ffi.NULL))

    def embed(self, tokens: Sequence[int], pooling: str | None = None) -> NDArray[np.float32]:
        """Append tokens and return the vector of all tokens held, float32[dim]; see `Model.embed`.

        What the session holds already must have come by `embed` too. Leaves no logits.
        """
        import numpy as np

        kind = pooling_number(self._model, pooling)
        array = self._array(tokens)
        out = np.empty(self._model.info.dim, np.float32)
        with self._lock:
            self._check_room(len(array))
            for start in range(0, len(array), BLOCK):
                n = min(BLOCK, len(array) - start)
                check(lib.bn_session_embed(self._open, array + start, n, kind, ffi.from_buffer("float[]", out)))
        return out

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Append tokens and return the natural log of the probability of each, given all before it.

        The first is NaN when the session was empty.
        """
        array = self._array(tokens)
        out = ffi.new("float[]", len(array))
        with self._lock:
            self._check_room(len(array))
            for start in range(0, len(array), BLOCK):
                n = min(BLOCK, len(array) - start)
                check(lib.bn_session_score(self._open, array + start, n, out + start))
        return list(out)

    def sample(self, **sampling: Any) -> int:
        """Choose the next token from the current logits, without appending it.

        Options as in `Model.generate`, without max_tokens, seed and stop.
        """
        return self.draw(Sampler(resolve(sampling, self._model.defaults), self._vocab_size))

    def draw(self, sampler: Sampler) -> int:
        """`sample` with options prepared once."""
        with self._lock:
            status = lib.bn_session_sample(self._open, sampler.struct, self._token)
            if status:
                check(status)
            return int(self._token[0])

    def step(self, token: int) -> None:
        """Append one token and keep its logits; `feed` for the inner loop."""
        with self._lock:
            self._token[0] = token
            status = lib.bn_session_append(self._open, self._token, 1, lib.BN_LOGITS_LAST, ffi.NULL)
            if status:
                check(status)

    def advance(self, sampler: Sampler, draft: Sequence[int] = ()) -> list[int]:
        """Sample a token and append it; go on as long as `draft`, guesses of what comes, is right.

        Returns the tokens appended, at least one: those of as many single steps, whatever the draft.
        """
        guesses = ffi.new("int32_t[]", list(draft)) if draft else ffi.NULL
        out, n = ffi.new("int32_t[]", len(draft) + 1), self._token
        with self._lock:
            check(lib.bn_session_step(self._open, sampler.struct, guesses, len(draft), out, n))
            return list(ffi.unpack(out, n[0]))

    def seed(self, seed: int) -> None:
        """Start the random sequence again, from 0 to 2**64 - 1."""
        number = resolve({"seed": seed}).seed
        with self._lock:
            lib.bn_session_seed(self._open, number or 0)

    def fork(self) -> Session:
        """A new session with the same tokens, cache, logits and random state."""
        out = ffi.new("bn_session **")
        with self._lock:
            check(lib.bn_session_fork(self._open, out))
            return self._model.adopt(out[0])

    def rewind(self, n: int) -> None:
        """Forget all tokens from position n on. Logits are unavailable until the next append."""
        with self._lock:
            if not 0 <= n <= self.position:
                raise InvalidParameterError(f"n is {n}, expected a position from 0 to {self.position}", "n")
            check(lib.bn_session_rewind(self._open, n))

    def reset(self) -> None:
        """Forget all tokens and start at seed 0, as a new session does."""
        with self._lock:
            check(lib.bn_session_rewind(self._open, 0))
            lib.bn_session_seed(self._open, 0)

    @property
    def position(self) -> int:
        """Tokens held."""
        with self._lock:
            return int(lib.bn_session_position(self._open))

    @property
    def n_ctx(self) -> int:
        """Tokens that fit."""
        with self._lock:
            return int(lib.bn_session_context(self._open))

    @property
    def tokens(self) -> list[int]:
        """The tokens held, oldest first."""
        with self._lock:
            return list(ffi.unpack(lib.bn_session_tokens(self._open), self.position)) if self.position else []

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """A copy of the row after the last token, float32[vocab_size]; None when there is none."""
        import numpy as np

        with self._lock:
            row = lib.bn_session_logits(self._open)
            if row == ffi.NULL:
                return None
            return np.frombuffer(ffi.buffer(row, 4 * self._vocab_size), np.float32).copy()

    @property
    def nbytes(self) -> int:
        """Memory of the session in bytes."""
        with self._lock:
            return int(lib.bn_session_bytes(self._open))

    @property
    def skipped_bytes(self) -> int:
        """Bytes of weights that the tokens computed here did not need, because all of them are multiplied with 0;
        of models whose FFN is stored by lines (`bitnet export --sparse`)."""
        with self._lock:
            return int(lib.bn_session_skipped(self._open))

    def close(self) -> None:
        """Free the memory; waits for a call in another thread. Closing twice is fine."""
        with self._lock:
            self._pointer = None
            self._handles.free(self._key)

    @property
    def _open(self) -> Any:
        if self._pointer is None:
            raise ClosedError("this session is closed; make a new one with Model.session()")
        return self._pointer

    def _array(self, tokens: Sequence[int]) -> Any:
        """int32[n], n >= 1."""
        try:
            array = ffi.new("int32_t[]", tokens.tolist() if hasattr(tokens, "tolist") else list(tokens))
        except (TypeError, OverflowError) as error:
            raise InvalidParameterError(f"tokens: {error}, expected integers", "tokens") from None
        if not len(array):
            raise InvalidParameterError("tokens is empty, expected at least one token id", "tokens")
        low, high = min(array), max(array)
        if low < 0 or high >= self._vocab_size:
            raise InvalidParameterError(
                f"tokens has the id {low if low < 0 else high}, expected ids from 0 to {self._vocab_size - 1}", "tokens"
            )
        return array

    def _check_room(self, n: int) -> None:
        if self.position + n > self.n_ctx:
            raise ContextLengthError(self.position + n, self.n_ctx)

    def __repr__(self) -> str:
        return "<Session closed>" if self._pointer is None else f"<Session {self.position} of {self.n_ctx} tokens>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def append_batch(sessions: Sequence[Session], tokens: Sequence[int]) -> None:
    """Append tokens[i] to sessions[i], different sessions of one model, reading the weights once for all.

    Each session ends as after `feed([tokens[i]])`, bit for bit.
    """
    with contextlib.ExitStack() as stack:
        for session in sorted(sessions, key=id):  # one order for all callers, so that none waits in a circle
            stack.enter_context(session._lock)
        pointers = ffi.new("bn_session *[]", [session._open for session in sessions])
        check(lib.bn_append_batch(pointers, ffi.new("int32_t[]", list(tokens)), len(sessions)))
