"""A pass over tokens of several sessions of one model, which reads the weights once for all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import BitnetError
from bitnet_runtime.sampler import Sampler
from bitnet_runtime.session import Session
from bitnet_runtime.session_state import take_turns


class Entry:
    """What a session has in a pass: tokens, behind which up to `most` are chosen.

    draft: guesses of these. Without any the model's own draft may guess, if it has one.
    """

    __slots__ = ("chosen", "draft", "error", "most", "sampler", "seconds", "session", "tokens")

    def __init__(
        self,
        session: Session,
        tokens: Sequence[int],
        sampler: Sampler | None = None,
        draft: Sequence[int] = (),
        most: int = 0,
    ) -> None:
        self.session, self.tokens, self.sampler, self.draft, self.most = session, tokens, sampler, draft, most
        self.chosen: list[int] = []  # then the session holds the tokens and all of these but the last
        self.error: BitnetError | None = None
        self.seconds = 0.0  # that the pass took


def step_batch(entries: Sequence[Entry]) -> None:
    """Compute and choose, for different sessions of one model. An error of one is in its entry; the others go on."""
    begin = time.perf_counter()
    if len(entries) == 1:
        with entries[0].session._lock:
            _step(entries)
    else:
        with contextlib.ExitStack() as stack:
            take_turns([entry.session for entry in entries], stack)
            _step(entries)
    seconds = time.perf_counter() - begin
    for entry in entries:
        entry.seconds = seconds


def _step(entries: Sequence[Entry]) -> None:
    """In the turns of all."""
    going = []
    for entry in entries:
        try:
            going.append((entry, entry.session._open))
        except BitnetError as error:
            entry.error = error
    if not going:
        return
    array, kept = ffi.new("bn_entry[]", len(going)), []
    for each, (entry, handle) in zip(array, going, strict=True):
        tokens, chosen = ffi.new("int32_t[]", entry.tokens), ffi.new("int32_t[]", entry.most or 1)
        kept.append((tokens, chosen))
        each.session, each.tokens, each.n_tokens = handle.pointer, tokens, len(tokens)
        each.most, each.chosen = entry.most, chosen
        if entry.draft:
            draft = ffi.new("int32_t[]", entry.draft)
            kept.append((draft, draft))
            each.draft, each.n_draft = draft, len(draft)
        if entry.sampler:
            each.sampler = entry.sampler.struct
    status = lib.bn_step_batch(array, len(going))
    refused = 0 if any(each.status for each in array) else status  # all of them, before any work
    for each, (entry, _) in zip(array, going, strict=True):
        if each.n_chosen:
            entry.chosen = ffi.unpack(each.chosen, each.n_chosen)
        if each.status or refused:
            try:
                entry.session._check(each.status or refused)
            except BitnetError as error:
                entry.error = error.with_traceback(None)  # it holds this frame, and so the memory of all sessions
