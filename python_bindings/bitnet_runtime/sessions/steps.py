"""A pass over tokens of a batch of sessions of one model, which reads the weights once for all."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import BitnetError, StateError
from bitnet_runtime.handles import Handle
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.sessions.state import turns

_NONE = ffi.new("int32_t[]", 0)


class Entry:
    """What a session has in a pass: tokens, behind which up to `most` are chosen.

    draft: draft tokens for these. Without any the model's draft head may give some, if it has one.
    """

    __slots__ = (
        "_changes", "_chosen", "_draft", "_sampler", "_tokens", "chosen", "error", "passes", "seconds", "session",
        "struct", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        tokens: Sequence[int],
        sampler: Sampler | None = None,
        draft: Sequence[int] = (),
        most: int = 0,
        changes: int | None = None,
    ) -> None:
        """changes: those of the session when it got the text that goes on here; None: it is not asked whose it is."""
        self.session, self.struct, self._changes = session, ffi.new("bn_entry *"), changes
        self._tokens = self._draft = self._chosen = _NONE
        self.chosen: list[int] = []  # then the session holds the tokens and all of these but the last
        self.error: BitnetError | None = None
        self.passes, self.seconds = 0, 0.0  # that the call took
        self.ask(tokens, sampler, draft, most)

    def ask(
        self, tokens: Sequence[int], sampler: Sampler | None = None, draft: Sequence[int] = (), most: int = 0
    ) -> None:
        """Be in another pass, with the same memory: to get some takes as long as layers of a small model."""
        struct, n = self.struct, len(tokens)
        if n > len(self._tokens):
            struct.tokens = self._tokens = ffi.new("int32_t[]", n)
        if most > len(self._chosen):
            struct.chosen = self._chosen = ffi.new("int32_t[]", most)
        if len(draft) > len(self._draft):
            struct.draft = self._draft = ffi.new("int32_t[]", len(draft))
        self.tokens = tokens
        self._tokens[0:n] = tokens
        if draft:
            self._draft[0 : len(draft)] = draft
        struct.n_tokens, struct.n_draft, struct.most = n, len(draft), most
        struct.sampler, self._sampler = sampler.struct if sampler else ffi.NULL, sampler

    def handle(self) -> Handle:
        """Of the session. Raises StateError: it has another text by now; ClosedError."""
        if self._changes not in (None, self.session._changes):
            raise StateError(
                "another call used the session while this answer was made; give each answer a session of its own"
            )
        return self.session._open

    @property
    def memory(self) -> tuple[object, ...]:
        """Everything the struct points to. Whoever holds it can use a copy of the struct whatever happens meanwhile."""
        return self._tokens, self._draft, self._chosen, self._sampler


def step_batch(entries: Sequence[Entry]) -> None:
    """Compute and choose tokens, for different sessions of one model. If one fails, its entry has the error; the others
    continue."""
    begin = time.perf_counter()
    with turns([entry.session for entry in entries]) if len(entries) > 1 else entries[0].session._lock:
        _step(entries)
    seconds = time.perf_counter() - begin
    for entry in entries:
        entry.seconds = seconds


def _step(entries: Sequence[Entry]) -> None:
    """In the turns of all."""
    going, kept = [], []
    for entry in entries:
        entry.chosen, entry.error = [], None
        try:
            handle = entry.handle()
        except BitnetError as error:
            entry.error = error
            continue
        entry.struct.session = handle.pointer
        going.append(entry)
        kept.append((handle, entry.memory))  # what the library uses
    if not going:
        return
    array = going[0].struct
    if len(going) > 1:
        array = ffi.new("bn_entry[]", [entry.struct[0] for entry in going])
    status = lib.bn_step_batch(array, len(going))
    for i, entry in enumerate(going):
        entry.passes = array[i].n_passes
        if n := array[i].n_chosen:
            entry.chosen = ffi.unpack(array[i].chosen, n)
    if status:
        _take_errors(going, [array[i].status for i in range(len(going))])


def _take_errors(entries: Sequence[Entry], found: Sequence[int]) -> None:
    """found: what became of each."""
    for entry, status in zip(entries, found, strict=True):
        try:
            entry.session._check(status, len(entry.tokens))
        except BitnetError as error:
            entry.error = error.with_traceback(None)  # it holds this frame, and so the memory of all sessions
