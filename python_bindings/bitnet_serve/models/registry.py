"""The models of a server, by name. Not all of them need be in memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitnet_runtime.errors import BitnetError
from bitnet_runtime.model import Model
from bitnet_runtime.shape import checksum_of
from bitnet_serve.errors import ApiError
from bitnet_serve.models.scheduler import Scheduler
from bitnet_serve.models.sessions import Sessions
from bitnet_serve.turns import Turns

Loader = Callable[[bool, Collection[str]], Model]
"""Opens a file without these of its adapters. True: only to look at it, so its weights need not be checked."""

log = logging.getLogger("bitnet_serve")


class Served:
    """A name, its scheduler, and the model while it is loaded: see `Shelf.enter`."""

    def __init__(
        self, name: str, model: Model, load: Loader, scheduler: Scheduler, sessions: Callable[[Model], Sessions]
    ) -> None:
        """model: opened only to inspect it. sessions: makes the sessions of a loaded model."""
        self.name, self.scheduler = name, scheduler
        # One has the process of the template. Another may count its tokens meanwhile, but no more wait in threads.
        self.conversations = Turns("chat templates of other requests are being filled in", 30, 2)
        self.adapter: str | None = None  # that the texts of a request have
        self._load, self._new_sessions = load, sessions
        self._model: Model | None = None
        self._sessions: Sessions | None = None
        self._tokens: dict[int, tuple[str, bytes]] = {}
        self.created = int(time.time())
        self._paths = model.files
        self._files = self._look()
        self.loaded = False  # and may be used
        self.replaced = 0.0  # when its file was first seen to be another one; 0: it is the same
        self.users = self.used = 0  # requests that need it now; when the latest came
        self.loads = 0  # how often it was loaded, or that was tried
        self.failures = 0  # of these
        self.failure: Exception | None = None  # of the latest try
        self.adapters = model.adapters
        self.wrong: dict[str, str] = {}  # of these, which could not be loaded with the model, and why
        self._describe(model)

    @property
    def model(self) -> Model:
        assert self._model is not None, "only for a request that has entered"
        return self._model

    @property
    def sessions(self) -> Sessions:
        assert self._sessions is not None, "only for a request that has entered"
        return self._sessions

    @property
    def is_open(self) -> bool:
        return self._model is not None

    @property
    def nbytes(self) -> int:
        """Of its file and those of its adapters: the ones that are loaded, or else would be."""
        return sum(found[2] for found in (self._files if self.is_open else self._look()) if found)

    def open(self) -> None:
        """Load the model, in any thread."""
        self.loads += 1
        self._files = self._look()
        model = self._loaded()
        try:
            self._describe(model)
            if model.has_tokenizer:
                model.tokenize("")  # one that does not fit the model is no error of the first who asks
            self._model, self._sessions = model, self._new_sessions(model)
        except BaseException:
            model.close()
            raise
        if model.has_template:
            threading.Thread(target=_start_template, args=(model,), daemon=True).start()

    def _loaded(self) -> Model:
        """The model with those of its adapters that are of it: another one fails only those who ask for it."""
        self.wrong = {}
        files = dict(zip(self.adapters, self._paths[1:], strict=True))
        while True:
            try:
                return self._load(False, self.wrong)
            except (BitnetError, OSError) as error:
                name = next((name for name, path in files.items() if f" {path}: " in f" {error}"), None)
                if name is None or name in self.wrong:
                    raise
                self.wrong[name] = str(error)
                log.error("the adapter %s of the model %s cannot be loaded: %s", name, self.name, error)

    def close(self) -> None:
        """Unload the model. Nothing may be running: see `Scheduler.at_rest`."""
        model, sessions, self._model, self._sessions = self._model, self._sessions, None, None
        self._tokens = {}
        if sessions is not None:
            sessions.close()
        if model is not None:
            model.close()

    @property
    def change(self) -> str:
        """Of the files that it was loaded from: "" where none is another now, "replaced", or "written" where one was
        written to, and what is computed with it is of no file."""
        other = [(now, then) for now, then in zip(self._look(), self._files, strict=True) if now and now != then]
        written = any(then and now[:2] == then[:2] for now, then in other)
        return "written" if written else "replaced" if other else ""

    def _look(self) -> list[tuple[int, ...] | None]:
        """Identity of the files: device and inode, size, time of writing; None: missing or not accessible."""
        return [_identity(path) for path in self._paths]

    def adapted(self, adapter: str | None) -> Served:
        """This model for a request that has entered, with an adapter or without. Raises ApiError: it is not loaded."""
        if adapter is None:
            return self
        if adapter in self.wrong:
            said = f"the adapter {adapter} of the model {self.name} cannot be loaded: {self.wrong[adapter]}"
            raise ApiError(500, said, "model_load_failed", "model")
        other = copy.copy(self)
        other.name, other.adapter = f"{self.name}:{adapter}", adapter
        other.fingerprint += f"-{checksum_of(self.model, adapter)}"
        return other

    def token(self, token: int) -> tuple[str, bytes]:
        """A token as text and as bytes. A part of a character is written as OpenAI writes it."""
        if token not in self._tokens:
            data = self.model.token_bytes(token)
            try:
                self._tokens[token] = data.decode(), data
            except UnicodeDecodeError:
                self._tokens[token] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data
        return self._tokens[token]

    def entry(self, adapter: str | None = None) -> dict[str, Any]:
        """The entry in /v1/models of the model, or of one of its adapters: OpenAI's and Anthropic's form in one."""
        name = self.name if adapter is None else f"{self.name}:{adapter}"
        return {
            "id": name,
            **({} if adapter is None else {"parent": self.name}),
            "object": "model",
            "created": self.created,
            "owned_by": "bitnet-edge",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "context_length": self._meta["n_ctx"],  # where some clients look for it,
            "max_model_len": self._meta["n_ctx"],  # and others
            "meta": self._meta | {"loaded": self.loaded},
        }

    def _describe(self, model: Model) -> None:
        info = model.info
        self.sees = model.image is not None
        self.fingerprint = f"bitnet-{model.checksum}"
        """What answers depend on besides the request: `system_fingerprint`."""
        self._meta: dict[str, Any] = {
            "n_ctx": model.n_ctx, "n_ctx_train": info.max_context, "n_vocab": info.vocab_size, "n_embd": info.dim,
            "n_params": info.parameters, "size": info.file_bytes, "isa": model.isa,
            "chat": model.has_template, "images": self.sees, "head": model.has_head,
        }  # fmt: skip


def _start_template(model: Model) -> None:
    """The process of its template, for which the first who asks would wait some tenths of a second."""
    with contextlib.suppress(BitnetError):  # whoever asks is told
        model.apply_template([{"role": "user", "content": ""}])


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
