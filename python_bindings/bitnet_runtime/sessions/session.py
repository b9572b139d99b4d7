"""A session: one text as tokens, its KV cache, and the logits after its last token."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Unpack

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.abilities import require_text
from bitnet_runtime.defaults import ALIASES, FIELDS, Sampling, TokenOptions, resolve, whole
from bitnet_runtime.errors import InvalidParameterError, check, check_session
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.handles import Handle
from bitnet_runtime.ids import token_ids
from bitnet_runtime.paths import path_of
from bitnet_runtime.sessions import saved
from bitnet_runtime.sessions.input import SessionInput
from bitnet_runtime.sessions.sampler import Sampler, struct_of

if TYPE_CHECKING:
    from bitnet_runtime.ids import Ids

MOST = 2**31 - 1  # most tokens that a call can return


class Session(SessionInput):
    """Token-level work; made by `Model.session()`. Use as a context manager, or `close()`.

    One text at a time: calls from several threads take turns, one call each, so share a session
    only if that makes sense for the text. Sessions of one model are independent of each other.
    `cancel` and `close` may come from any thread at any moment. A new session has seed 0.

    After a fork the child goes on with it, unless another thread of the parent was computing:
    then it is closed in the child.
    """

    @classmethod
    def _new(
        cls,
        model: ModelFacts,
        n_ctx: int | None,
        kv_type: str | None = None,
        adapter: str | None = None,
        draft: bool = True,
    ) -> Session:
        """`Model.session`. kv_type: not the model's."""
        require_text(model)
        options = model._session_options(n_ctx, kv_type, adapter, draft)
        handle, new = model._open, Handle("session")
        check_session(lib.bn_session_new(handle.pointer, options, new.cell), handle.pointer, options)
        return cls(model, new)

    @classmethod
    def _load(cls, model: ModelFacts, path: str | os.PathLike[str]) -> Session:
        """`Model.load_session`."""
        require_text(model)
        handle, new = model._open, Handle("session")
        note = saved.load(handle.pointer, path_of(path, "saved session"), new)
        session = cls(model, new)
        session._note = note
        return session

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
        struct = struct_of(sampler)
        with self._lock:
            handle = self._open
            status = lib.bn_session_sample(handle.pointer, struct, self._token)
            if status:
                self._check_row(status, "choose a token from")
            return int(self._token[0])

    def step(self, token: int) -> None:
        """Append one token and keep its logits: `feed` for the inner loop."""
        token = whole("token", token, 0, self._vocab_size - 1)
        with self._lock:
            handle = self._open
            self._changes += 1
            self._token[0] = token
            status = lib.bn_session_append(handle.pointer, self._token, 1, lib.BN_LOGITS_LAST, ffi.NULL)
            if status:
                self._check(status)

    def advance(self, sampler: Sampler, draft: Ids = (), most: int = 1) -> list[int]:
        """Sample a token and append it; go on as long as `draft`, which holds draft tokens, is right (speculative
        decoding). Without any the engine goes on with draft tokens of its own, up to `most` tokens.

        Returns the tokens appended, at least one: those of as many single steps, whatever the draft.
        """
        struct, ids = struct_of(sampler), token_ids(draft, "draft", self._vocab_size)
        guesses, most = ffi.new("int32_t[]", ids) if ids else ffi.NULL, max(whole("most", most, 1, MOST), len(ids))
        with self._lock:
            handle = self._open
            most = min(most, self.n_ctx)
            out, n = ffi.new("int32_t[]", most), self._token
            self._changes += 1
            status = lib.bn_session_step(handle.pointer, struct, guesses, len(ids), out, most, n)
            self._check_row(status, "choose a token from")
            return list(ffi.unpack(out, n[0]))

    def guess(self, sampler: Sampler, token: int, most: int) -> list[tuple[int, float]]:
        """Draft tokens of the model's draft head after `token`, if that were the next: up to `most`, each with the
        probability that it gives it. Nothing is appended."""
        struct, token = struct_of(sampler), whole("token", token, 0, self._vocab_size - 1)
        most = whole("most", most, 0, MOST)
        with self._lock:
            handle = self._open
            most = min(most, self.n_ctx)
            guesses, sure, n = ffi.new("int32_t[]", most), ffi.new("float[]", most), self._token
            self._check(lib.bn_session_guess(handle.pointer, struct, token, most, guesses, sure, n))
            return list(zip(ffi.unpack(guesses, n[0]), ffi.unpack(sure, n[0]), strict=True)) if n[0] else []

    def fork(self) -> Session:
        """A new session with the same tokens, cache, logits and seed: until it is given another, it goes on alike.

        The KV cache is paged: of its blocks of 64 tokens only that in which the texts part is copied, on write.
        """
        new = Handle("session")
        with self._lock:
            handle = self._open
            check(lib.bn_session_fork(handle.pointer, new.cell))
            return Session(self._model, new)

    def save(self, path: str | os.PathLike[str], note: bytes = b"") -> None:
        """Write tokens, cache and seed to a file, for `Model.load_session`: it goes on as if never interrupted.

        A file that is there is replaced once all is written. note: whatever you want to keep with it. Vectors
        of `embed` that are not complete are not saved. Raises OSError.
        """
        file = path_of(path, "file to write")
        with self._lock:
            handle = self._open
            data = saved.packed(handle.pointer, note)
        saved.replace(file, data)  # which others need not wait for
        self._note = note
