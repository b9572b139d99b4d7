"""A packed model, open."""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast, overload

from bitnet_runtime import machine
from bitnet_runtime._native import ffi, lib
from bitnet_runtime.defaults import Sampling, model_defaults, resolve
from bitnet_runtime.embedding import POOLING, embed
from bitnet_runtime.errors import (
    ClosedError,
    ContextLengthError,
    InvalidParameterError,
    ModelFormatError,
    TemplateError,
    TokenizerError,
    UnsupportedModelError,
    check,
    check_open,
)
from bitnet_runtime.generation import Result, Stream, generate_batch
from bitnet_runtime.handles import Handles
from bitnet_runtime.session import Session
from bitnet_runtime.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.chat import ChatTemplate

KV_TYPES = {"f16": lib.BN_KV_F16, "f32": lib.BN_KV_F32, "int8": lib.BN_KV_INT8}

Prompt = str | Sequence[int]
"""A text, or token ids."""

Message = Mapping[str, Any]
"""{"role": "user", "content": "…"}, as chat templates take it."""


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
    file_bytes: int
    ternary_weights: int
    bytes_per_token: int
    macs_per_token: int
    threads: int


class Model:
    """Made by `Model.load`; a context manager.

    Safe to share between threads: each call of `generate`, `stream`, `chat` and `score` works in
    a session of its own, and the sessions take turns on the model's threads.
    """

    def __init__(self, path: Path, handles: Handles, n_ctx: int | None, kv_type: str) -> None:
        self.path = path
        self._handles = handles
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        struct = ffi.new("bn_model_info *")
        check(lib.bn_model_get_info(self._open, struct))
        self.info = ModelInfo(*(int(getattr(struct, name)) for name in ModelInfo._fields))
        self.has_head = bool(struct.has_head)
        self.pooling = next((name for name, number in POOLING.items() if number == struct.pooling), None)
        self.isa: str = ffi.string(struct.isa).decode()
        if n_ctx is not None and not 1 <= n_ctx <= self.info.max_context:
            raise InvalidParameterError(
                f"n_ctx is {n_ctx}, expected 1 to {self.info.max_context}, the model's context", "n_ctx"
            )
        self.n_ctx = n_ctx or self.info.max_context
        self._kv_type = kv_type
        self.kv_bytes_per_token = int(struct.kv_bytes_per_token[KV_TYPES[kv_type]])
        self.metadata = self._json_section(lib.BN_SECTION_METADATA)
        generation = self.metadata.get("generation") or {}
        if not isinstance(generation, dict):
            raise ModelFormatError(f"{path}: `generation` in the metadata is {generation!r}, expected an object")
        self.defaults: Sampling = model_defaults(generation)
        self.end_tokens = frozenset(self._token_ids(generation, "eos_token_ids"))
        self.bos_token = next(iter(self._token_ids(generation, "bos_token_id")), None)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
        kv_type: str = "f16",
        verify: bool = True,
        mmap: bool = True,
    ) -> Self:
        """Open a packed file.

        n_ctx: context of new sessions, in tokens; None: the model's maximum.
        threads: None: physical cores, within what affinity and cgroup allow.
        isa: a tier name such as "avx2" or "scalar"; None: the best, or environment BITNET_ISA.
        kv_type: numbers in the cache: "f16"; "int8", half as large; "f32", for comparisons.
        verify: check every byte of the weights.
        mmap: False reads the file into memory, so that it may change or go away afterwards.

        Raises ModelFileError, ModelFormatError, ModelTooLargeError or InvalidParameterError.
        """
        file = Path(path)
        if threads is not None and not 1 <= threads <= 256:
            raise InvalidParameterError(f"threads is {threads}, expected 1 to 256", "threads")
        if "\0" in str(file):
            raise InvalidParameterError(f"path is {str(file)!r}, expected one without a zero byte", "path")
        if kv_type not in KV_TYPES:
            raise InvalidParameterError(f"kv_type is {kv_type!r}, expected one of {', '.join(KV_TYPES)}", "kv_type")
        if isa is not None and isa not in machine.available_isas():
            raise InvalidParameterError(f"isa is {isa!r}, expected one of {', '.join(machine.available_isas())}", "isa")
        name = ffi.new("char[]", isa.encode()) if isa else ffi.NULL
        fields = {"threads": threads or 0, "no_mmap": not mmap, "no_verify": not verify, "isa": name}
        out, detail = ffi.new("bn_model **"), ffi.new("char[]", lib.BN_DETAIL_SIZE)
        status = lib.bn_model_open(os.fsencode(file), ffi.new("bn_load_options *", fields), out, detail)
        check_open(status, ffi.string(detail).decode("utf-8", "replace") if status else "", file)
        handles = Handles(out[0])
        try:
            model = cls(file, handles, n_ctx, kv_type)
        except BaseException:
            handles.close()
            raise
        weakref.finalize(model, handles.close).atexit = False  # a daemon thread may still compute
        return model

    # ---- text ----

    @overload
    def generate(self, prompt: Prompt, *, session: Session | None = None, **sampling: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **sampling: Any) -> list[Result]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, session: Session | None = None, **sampling: Any
    ) -> Result | list[Result]:
        """Continue a text or a list of token ids. The options are the fields of `Sampling`.

        With a `session`, what it holds of the prompt's beginning is not computed again. A list of
        prompts gives a list of results, computed together: each is what its prompt gives alone.
        """
        if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], (str, Sequence)):
            return _finish(self.stream(cast(Prompt, prompt), session=session, **sampling))
        if session is not None or sampling.get("draft"):
            raise InvalidParameterError("several prompts take neither a session nor drafts", "session")
        return generate_batch([self.stream(one, **sampling) for one in cast(Sequence[Prompt], prompt)])

    def stream(self, prompt: str | Sequence[int], *, session: Session | None = None, **sampling: Any) -> Stream:
        """`generate` as an iterator of pieces. Wrong options are raised here, not on the first piece."""
        self.require_head()
        options = resolve(sampling, self.defaults)
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise InvalidParameterError(
                "the prompt is empty and the model has no start token; give at least one character", "prompt"
            )
        n_ctx = session.n_ctx if session else self.n_ctx
        if len(tokens) > n_ctx:
            raise ContextLengthError(len(tokens), n_ctx)
        return Stream(self, tokens, options, session)

    def chat(self, messages: Sequence[Message], *, session: Session | None = None, **sampling: Any) -> Result:
        """Answer a conversation, in the words of the file's chat template."""
        return _finish(self.stream_chat(messages, session=session, **sampling))

    def stream_chat(self, messages: Sequence[Message], *, session: Session | None = None, **sampling: Any) -> Stream:
        """`chat` as an iterator of pieces."""
        return self.stream(self.apply_template(messages), session=session, **sampling)

    def score(self, text: str | Sequence[int]) -> list[float]:
        """Natural log of the probability of each token, given all before it.

        One number a token of `tokenize(text)`; the first is NaN, as nothing comes before it.
        """
        self.require_head()
        tokens = self._tokens(text)
        if not tokens:
            return []
        with self.session(n_ctx=len(tokens)) as session:
            return session.score(tokens)

    def embed(self, text: Prompt | Sequence[Prompt], *, pooling: str | None = None) -> NDArray[np.float32]:
        """A vector of length 1 for each text, so that their product is the cosine: float32 (n, dim).

        text: one (n = 1) or a list, each a string or token ids. Strings get what the file's tokenizer
        adds around them, such as an end token.
        pooling: "last", "mean" or "first", of the tokens' states; None: as the file says. A decoder
        whose file says nothing can embed as well, if a pooling is given.
        """
        single = isinstance(text, str) or (len(text) > 0 and not isinstance(text[0], (str, Sequence)))
        texts = cast(Sequence[Prompt], [text] if single else text)
        return embed(self, [self._tokens(one) for one in texts], pooling)

    def _tokens(self, text: Prompt) -> list[int]:
        """Token ids of a text that is to fit the context."""
        tokens = self.tokenize(text) if isinstance(text, str) else list(text)
        if len(tokens) > self.n_ctx:
            raise ContextLengthError(len(tokens), self.n_ctx)
        return tokens

    def require_head(self) -> None:
        """Raises UnsupportedModelError if the model has no logits."""
        if not self.has_head:
            raise UnsupportedModelError(
                f"{self.path.name} has no head, so it gives no logits and no text: it turns a text into a vector, "
                "see Model.embed"
            )

    def tokenize(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. `add_bos`: begin with the model's start token, if it has one.

        Special tokens written in the text are plain text unless `parse_special`.
        """
        return self._tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(tokens, skip_special=skip_special)

    def apply_template(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the prompt that `chat` uses. What the messages say never becomes a special token."""
        return self._template.encode(messages, self._tokenizer, self._special_tokens)

    def render_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The same prompt as text, or without `add_generation_prompt` the messages alone; special tokens written out.

        What a message says becomes a special token when the text is parsed with special tokens.
        """
        return self._template.render(messages, self._special_tokens, add_generation_prompt=add_generation_prompt)

    # ---- tokens ----

    def session(self, n_ctx: int | None = None) -> Session:
        """A new session for token-level work, with room for `n_ctx` tokens; None: the model's `n_ctx`."""
        if n_ctx is not None and not 1 <= n_ctx <= self.info.max_context:
            raise InvalidParameterError(f"n_ctx is {n_ctx}, expected 1 to {self.info.max_context}", "n_ctx")
        options = {"n_ctx": n_ctx or self.n_ctx, "kv_type": KV_TYPES[self._kv_type]}
        out = ffi.new("bn_session **")
        with self._handles.lock:
            check(lib.bn_session_new(self._open, ffi.new("bn_session_options *", options), out))
            return self.adopt(out[0])

    def adopt(self, pointer: Any) -> Session:
        """A Session that owns a `bn_session *` of this model."""
        with self._handles.lock:
            session = Session(self, self._handles, pointer)
            self._open  # noqa: B018  closed meanwhile: raises, and the session is freed
            self._sessions.add(session)
            return session

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def threads(self) -> int:
        """Threads that compute, the caller's included."""
        return self.info.threads

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer as the `tokenizers` library writes it; empty when the file has none."""
        return self._section(lib.BN_SECTION_TOKENIZER)

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.tokenizer_json)

    @property
    def has_template(self) -> bool:
        return bool(self._section(lib.BN_SECTION_TEMPLATE))

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer | None:
        """Text token by token, continuing `prompt`; None when the file has no tokenizer."""
        return self._tokenizer.detokenizer(prompt) if self.has_tokenizer else None

    def close(self) -> None:
        """Close the model and all its sessions; waits for calls in other threads. Twice is fine."""
        with self._handles.lock:
            self._handles.closed = True  # no new sessions from here on
        for session in list(self._sessions):
            session.close()
        self._handles.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._handles.closed:
            return f"<Model {self.path.name} closed>"
        return (
            f"<Model {self.path.name}: {self.info.ternary_weights:,} ternary weights, "
            f"{self.info.file_bytes / 1e6:.1f} MB, context {self.n_ctx}, {self.isa}, threads {self.threads}>"
        )

    # ---- what the file carries ----

    @property
    def _open(self) -> Any:
        if self._handles.closed:
            raise ClosedError(f"the model {self.path.name} is closed; load it again")
        return self._handles.model

    def _section(self, kind: int) -> bytes:
        """A copy of an opaque section; empty when the file has none."""
        data, size = ffi.new("const uint8_t **"), ffi.new("size_t *")
        with self._handles.lock:
            check(lib.bn_model_get_section(self._open, kind, data, size))
            return bytes(ffi.buffer(data[0], size[0])) if size[0] else b""

    def _json_section(self, kind: int) -> dict[str, Any]:
        try:
            value = json.loads(
                self._section(kind) or b"{}", object_pairs_hook=_unique_keys, parse_constant=_no_constant
            )
        except (ValueError, RecursionError) as error:
            raise ModelFormatError(f"{self.path}: the metadata is not good JSON: {error}") from None
        if not isinstance(value, dict):
            raise ModelFormatError(f"{self.path}: the metadata is a {type(value).__name__}, expected a JSON object")
        return value

    def _token_ids(self, generation: Mapping[str, Any], key: str) -> list[int]:
        value = generation.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
            raise ModelFormatError(f"{self.path}: {key} is {value!r}, expected token ids below {self.vocab_size}")
        return ids

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        definition = self._section(lib.BN_SECTION_TOKENIZER)
        if not definition:
            raise TokenizerError(f"{self.path.name} has no tokenizer; give token ids in place of text")
        return Tokenizer(definition, self.vocab_size, self.bos_token)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """The texts of special tokens that a chat template may want, by its names for them."""
        ids = {"bos_token": self.bos_token, "eos_token": min(self.end_tokens, default=None)}
        texts = {name: self._tokenizer.token_text(token) for name, token in ids.items()}
        named = (self.metadata.get("generation") or {}).get("special_tokens") or {}
        if not isinstance(named, dict) or not all(
            name.endswith("_token") and isinstance(text, str) for name, text in named.items()
        ):
            raise ModelFormatError(f'{self.path}: special_tokens is {named!r:.100}, expected {{"eos_token": "…"}}')
        return named or texts

    @cached_property
    def _template(self) -> ChatTemplate:
        source = self._section(lib.BN_SECTION_TEMPLATE)
        if not source:
            raise TemplateError(f"{self.path.name} has no chat template; use generate() with a prompt of your own")
        from bitnet_runtime.chat import ChatTemplate

        return ChatTemplate(source.decode("utf-8", "replace"))


def _finish(stream: Stream) -> Result:
    with stream:
        for _ in stream:
            pass
    assert stream.result is not None  # it ended
    return stream.result


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """FORMAT.md §5: no key twice, or programs would differ in which one counts."""
    values = dict(pairs)
    if len(values) != len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r:.80} occurs {times} times, expected once")
    return values


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
