"""The models that a server has, by name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitnet_runtime.errors import shown
from bitnet_runtime.model import Model
from bitnet_serve.errors import ApiError
from bitnet_serve.scheduler import Scheduler
from bitnet_serve.sessions import Sessions


@dataclass
class Served:
    """A model and who runs it."""

    name: str
    model: Model
    scheduler: Scheduler
    sessions: Sessions
    created: int = field(default_factory=lambda: int(time.time()))
    _tokens: dict[int, tuple[str, bytes]] = field(default_factory=dict)

    def token(self, token: int) -> tuple[str, bytes]:
        """A token as a text of its own, and as bytes. A part of a character is written as OpenAI writes it."""
        if token not in self._tokens:
            data = self.model.token_bytes(token)
            try:
                self._tokens[token] = data.decode(), data
            except UnicodeDecodeError:
                self._tokens[token] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data
        return self._tokens[token]

    @property
    def fingerprint(self) -> str:
        """What answers depend on beside the request: `system_fingerprint`."""
        return f"bitnet-{self.model.info.file_bytes:x}-{self.model.info.ternary_weights:x}"

    def entry(self) -> dict[str, Any]:
        """Its row of /v1/models."""
        info = self.model.info
        meta = {
            "n_ctx": self.model.n_ctx, "n_ctx_train": info.max_context, "n_vocab": info.vocab_size, "n_embd": info.dim,
            "n_params": info.ternary_weights, "size": info.file_bytes, "isa": self.model.isa,
            "chat": self.model.has_template, "images": self.model.image is not None, "head": self.model.has_head,
        }  # fmt: skip
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "bitnet-edge",
            "context_length": self.model.n_ctx,  # where some clients look for it,
            "max_model_len": self.model.n_ctx,  # and others
            "meta": meta,
        }


def find(models: Mapping[str, Served], body: Mapping[str, Any]) -> Served:
    """The model that a request names; the first if it names none. Raises ApiError."""
    name = body.get("model", next(iter(models)))
    if not isinstance(name, str):
        raise ApiError(400, f"model is {shown(name)}, expected a text", "invalid_type", "model")
    return named(models, name)


def named(models: Mapping[str, Served], name: str) -> Served:
    if name not in models:
        known = ", ".join(models)
        raise ApiError(404, f"there is no model {shown(name)}, expected one of: {known}", "model_not_found", "model")
    return models[name]
