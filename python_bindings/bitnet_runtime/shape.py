"""Facts on an open model: sizes, costs and abilities."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.defaults import truth, whole
from bitnet_runtime.errors import ClosedError, InvalidParameterError, check, shown
from bitnet_runtime.handles import Handle, Unique
from bitnet_runtime.images.info import ImageInfo, read_image_info
from bitnet_runtime.once import once
from bitnet_runtime.stops import Stops

KV_TYPES = {ffi.string(lib.bn_kv_name(number)).decode(): number for number in range(lib.BN_KV_TYPES)}
POOLING = {"last": lib.BN_POOL_LAST, "mean": lib.BN_POOL_MEAN, "first": lib.BN_POOL_FIRST}
MASKS = {lib.BN_MASK_CAUSAL: "causal", lib.BN_MASK_BIDIRECTIONAL: "bidirectional", lib.BN_MASK_PREFIX: "prefix"}


class ModelInfo(NamedTuple):
    """Facts on an open model; names and units as in `bn_model_info` of the C header."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_context: int
    width: int
    file_bytes: int
    parameters: int
    ternary_weights: int
    bytes_per_token: int
    macs_per_token: int
    threads: int


class ModelShape(Unique):
    """The part of `Model` that the engine reports, without tokenizer and template."""

    def _describe(
        self, path: Path, handle: Handle, n_ctx: int | None, kv_type: str, adapters: Mapping[str, Path]
    ) -> None:
        """Read everything that does not change."""
        self._adapters = dict(adapters)
        self._stops = Stops()
        self._path, self._kv_type = path, kv_type
        self._handle: Handle | None = handle  # None when closed
        self._process = os.getpid()
        struct = ffi.new("bn_model_info *")
        check(lib.bn_model_get_info(handle.pointer, struct))
        self._info = ModelInfo(*(int(getattr(struct, name)) for name in ModelInfo._fields))
        self._has_head, self._has_embedding = bool(struct.has_head), bool(struct.has_embedding)
        self._has_text, self._has_draft = bool(struct.has_text), bool(struct.has_draft)
        self._mask, self._window = MASKS[struct.mask], int(struct.sliding_window)
        self._pooling = next((name for name, number in POOLING.items() if number == struct.pooling), None)
        self._isa: str = ffi.string(struct.isa).decode()
        most = self._info.max_context
        self._n_ctx = most if n_ctx is None else whole("n_ctx", n_ctx, 1, most, f", the context of {path.name}")
        self._kv_bytes_per_token = int(struct.kv_bytes_per_token[KV_TYPES[kv_type]])
        self._kv_window_bytes_per_token = int(struct.kv_window_bytes_per_token[KV_TYPES[kv_type]])

    @property
    def path(self) -> Path:
        """The packed file."""
        return self._path

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that the model was loaded with; a text can have one."""
        return tuple(self._adapters)

    @property
    def files(self) -> tuple[Path, ...]:
        """The packed file, and those of its adapters."""
        return self._path, *self._adapters.values()

    @property
    def info(self) -> ModelInfo:
        """Shapes, sizes and costs; units as in `bn_model_info` of the C header."""
        same = self._process == os.getpid()
        return self._info if same else self._info._replace(threads=1)  # the others are not there after a fork

    @property
    def vocab_size(self) -> int:
        """The number of tokens; ids are below it."""
        return self._info.vocab_size

    @property
    def n_ctx(self) -> int:
        """Tokens of context of a new session, unless it asks for fewer."""
        return self._n_ctx

    @property
    def isa(self) -> str:
        """The instruction set tier in use, such as "avx2"."""
        return self._isa

    @property
    def threads(self) -> int:
        """Threads that compute, the caller's included; 1 in a forked child, which loads the model again for more."""
        return self.info.threads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of cache that each token of context adds, however long it is."""
        return self._kv_bytes_per_token

    @property
    def kv_window_bytes_per_token(self) -> int:
        """What layers with a window add for each token, until they hold the window and a piece of a prompt."""
        return self._kv_window_bytes_per_token

    @property
    def cache_bytes(self) -> int:
        """Bytes of cache that the sessions take now, in blocks of 64 tokens; blocks shared by forks count once."""
        handle = self._open
        return int(lib.bn_model_cache_bytes(handle.pointer))

    def kv_bytes(self, n_tokens: int) -> int:
        """Bytes of cache that the last of `n_tokens` tokens reads; layers with a window read only their window."""
        n_tokens = whole("n_tokens", n_tokens, 0, 2**31 - 1)
        return self._kv_bytes_per_token * n_tokens + self._kv_window_bytes_per_token * min(n_tokens, self._window)

    @property
    def mask(self) -> str:
        """What a token sees: "causal", itself and what is before it; "bidirectional", all of its text; "prefix",
        as causal, and all of the prompt."""
        return self._mask

    @property
    def has_draft(self) -> bool:
        """Whether the model has a draft head, for speculative decoding."""
        return self._has_draft

    @property
    def has_embedding(self) -> bool:
        """Whether the model takes tokens; else it takes vectors (`Session.append_embeddings`)."""
        return self._has_embedding

    @property
    def has_head(self) -> bool:
        """Whether the model gives logits, and so text; else it only embeds."""
        return self._has_head

    @property
    def has_text(self) -> bool:
        """Whether the model takes texts, tokens or vectors; else it only sees images, see `image`."""
        return self._has_text

    @property
    def pooling(self) -> str | None:
        """The file's pooling of token states into one vector; None: it names none."""
        return self._pooling

    @once
    def image(self) -> ImageInfo | None:
        """How the model sees images: sizes, tokens, abilities; None if it sees none."""
        return read_image_info(self._open)

    @once
    def digest(self) -> str:
        """SHA-256 of the packed file, as it was opened."""
        return digest_of(self)

    @once
    def checksum(self) -> str:
        """Checksum of the packed file's header, which holds those of all sections, as `bitnet inspect` shows it."""
        return checksum_of(self)

    # ---- for the rest of the package ----

    def _go_on(self) -> None:
        """Raises ClosedError if the model was closed."""
        self._open  # noqa: B018  raises

    @property
    def _open(self) -> Handle:
        if self._handle is None:
            raise ClosedError(f"the model {self._path.name} is closed; load it again")
        return self._handle

    def _pooling_number(self, pooling: str | None) -> int:
        """`bn_pooling` of a name; None: the model's own, which then must exist."""
        name = self.pooling if pooling is None else pooling
        if not isinstance(name, str) or name not in POOLING:
            found = "pooling is not given, and the model names none" if name is None else f"pooling is {shown(name)}"
            raise InvalidParameterError(f"{found}; expected one of {', '.join(POOLING)}", "pooling")
        return int(POOLING[name])

    def _session_options(
        self,
        n_ctx: int | None = None,
        kv_type: str | None = None,
        adapter: str | None = None,
        draft: bool = True,
    ) -> Any:
        """`bn_session_options *` of a session with room for `n_ctx` tokens; None: the model's own number, and type."""
        room = self.n_ctx if n_ctx is None else whole("n_ctx", n_ctx, 1, self.info.max_context, ", the model's context")
        fields = {"n_ctx": room, "kv_type": KV_TYPES[kv_type or self._kv_type], "no_draft": not truth("draft", draft)}
        return ffi.new("bn_session_options *", fields | {"adapter": adapter_number(self, adapter)})


def adapter_number(model: ModelShape, name: str | None) -> int:
    """The number of an adapter in the C library; 0 for None. Raises InvalidParameterError: no such adapter."""
    if name is None:
        return 0
    if not isinstance(name, str) or name not in model.adapters:
        known = f"expected one of {', '.join(model.adapters)}" if model.adapters else "this model has none"
        raise InvalidParameterError(
            f"adapter is {shown(name)}, {known}; Model.load(path, adapters=[…]) loads them", "adapter"
        )
    return 1 + model.adapters.index(name)


def digest_of(model: ModelShape, adapter: str | None = None) -> str:
    """SHA-256 of the packed file, or of that of an adapter, as it was opened."""
    with _file(model, adapter) as file:
        return hashlib.sha256(file).hexdigest()


def checksum_of(model: ModelShape, adapter: str | None = None) -> str:
    """Checksum of the header of the packed file, or of that of an adapter (FORMAT.md §1)."""
    with _file(model, adapter) as file:
        return bytes(file[60:64])[::-1].hex()


@contextmanager
def _file(model: ModelShape, adapter: str | None) -> Iterator[Any]:
    """All bytes of one of the files as a buffer, for the time of the block."""
    data, size = ffi.new("const uint8_t **"), ffi.new("size_t *")
    handle = model._open
    if adapter is None:
        check(lib.bn_model_get_file(handle.pointer, data, size))
    else:
        check(lib.bn_model_get_adapter(handle.pointer, adapter_number(model, adapter), data, size))
    yield ffi.buffer(data[0], size[0])
