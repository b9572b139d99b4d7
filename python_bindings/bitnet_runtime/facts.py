"""What the file of an open model holds besides the weights: defaults, tokenizer, template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.defaults import Sampling, model_defaults
from bitnet_runtime.errors import (
    InvalidParameterError,
    ModelFormatError,
    TemplateError,
    TokenizerError,
    check,
    shown,
    unique_keys,
)
from bitnet_runtime.handles import Handle
from bitnet_runtime.once import once
from bitnet_runtime.shape import ModelShape
from bitnet_runtime.structured.formats import held_to
from bitnet_runtime.tokenizer.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from bitnet_runtime.chat.template import ChatTemplate
    from bitnet_runtime.structured.guide import Grammars, Guide

SECTIONS = (lib.BN_SECTION_METADATA, lib.BN_SECTION_TOKENIZER, lib.BN_SECTION_TEMPLATE)


class ModelFacts(ModelShape):
    """The part of `Model` that computes nothing."""

    def _describe(
        self,
        path: Path,
        handle: Handle,
        n_ctx: int | None,
        kv_type: str,
        adapters: Mapping[str, Path],
        template: str | None = None,
    ) -> None:
        """Read everything that does not change. template: in place of the file's."""
        super()._describe(path, handle, n_ctx, kv_type, adapters)
        if template is not None and not (isinstance(template, str) and template):
            told = f"chat_template is {shown(template)}, expected the text of a template"
            raise InvalidParameterError(told, "chat_template")
        self._given_template = template
        self._present = {kind: bool(self._section(kind)) for kind in SECTIONS}
        self._metadata = self._json_section(lib.BN_SECTION_METADATA)
        generation = self._metadata.get("generation") or {}
        if not isinstance(generation, dict):
            raise ModelFormatError(f"{path}: `generation` in the metadata is {shown(generation)}, expected an object")
        self._generation = generation
        self._defaults = model_defaults(generation)
        self._end_tokens = frozenset(self._token_ids(generation, "eos_token_ids"))
        self._bos_token = next(iter(self._token_ids(generation, "bos_token_id")), None)

    @property
    def metadata(self) -> dict[str, Any]:
        """The METADATA section: the model's config, generation defaults, provenance."""
        return self._metadata

    @property
    def defaults(self) -> Sampling:
        """The default sampling options: those of the file, over those of the table."""
        return self._defaults

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._end_tokens

    @property
    def bos_token(self) -> int | None:
        """The token that every text begins with, if the model has one."""
        return self._bos_token

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer as the `tokenizers` library writes it; empty when the file has none."""
        return self._section(lib.BN_SECTION_TOKENIZER)

    @property
    def template_source(self) -> str:
        """The chat template, in Jinja's language: the one given, else the file's; empty when there is none."""
        return self._given_template or self._section(lib.BN_SECTION_TEMPLATE).decode("utf-8", "replace")

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model takes text, not only token ids."""
        return self._present[lib.BN_SECTION_TOKENIZER]

    @property
    def has_template(self) -> bool:
        """Whether the model takes conversations."""
        return bool(self._given_template) or self._present[lib.BN_SECTION_TEMPLATE]

    # ---- for the rest of the package ----

    def _section(self, kind: int) -> bytes:
        """A copy of an opaque section; empty when the file has none."""
        data, size = ffi.new("const uint8_t **"), ffi.new("size_t *")
        handle = self._open
        check(lib.bn_model_get_section(handle.pointer, kind, data, size))
        return bytes(ffi.buffer(data[0], size[0])) if size[0] else b""

    def _json_section(self, kind: int) -> dict[str, Any]:
        try:
            text = self._section(kind) or b"{}"
            value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ModelFormatError(f"{self.path}: the metadata is not good JSON: {error}") from None
        if not isinstance(value, dict):
            raise ModelFormatError(f"{self.path}: the metadata is {shown(value)}, expected a JSON object")
        return value

    def _token_ids(self, generation: Mapping[str, Any], key: str) -> list[int]:
        value = generation.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
            raise ModelFormatError(f"{self.path}: {key} is {shown(value)}, expected token ids below {self.vocab_size}")
        return ids

    @once
    def _tokenizer(self) -> Tokenizer:
        definition = self._section(lib.BN_SECTION_TOKENIZER)
        if not definition:
            raise TokenizerError(f"{self.path.name} has no tokenizer; give token ids instead of text")
        image_token = self.image.image_token if self.image else -1  # never made of what somebody wrote
        return Tokenizer(definition, self.vocab_size, self.bos_token, special=image_token)

    @once
    def _grammars(self) -> Grammars:
        from bitnet_runtime.structured.guide import Grammars

        return Grammars(self._tokenizer, self.end_tokens)

    @once
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens that a chat template may want, by its names for them."""
        ids = {"bos_token": self.bos_token, "eos_token": min(self.end_tokens, default=None)}
        texts = {name: self._tokenizer.token_text(token) for name, token in ids.items()}
        named = self._generation.get("special_tokens") or {}
        if not isinstance(named, dict) or not all(
            name.endswith("_token") and isinstance(text, str) for name, text in named.items()
        ):
            raise ModelFormatError(f'{self.path}: special_tokens is {named!r:.100}, expected {{"eos_token": "…"}}')
        return named or texts

    @once
    def _template(self) -> ChatTemplate:
        source = self.template_source
        if not source:
            raise TemplateError(
                f"{self.path.name} has no chat template: it continues a prompt, but cannot answer messages; "
                "chat_template of Model.load gives it one"
            )
        from bitnet_runtime.chat.template import ChatTemplate

        return ChatTemplate(source)


def detokenizer_of(model: ModelFacts, prompt: Sequence[int]) -> Detokenizer | None:
    """Text token by token, continuing `prompt`; None when the file has no tokenizer."""
    return model._tokenizer.detokenizer(prompt) if model.has_tokenizer else None


def guide_of(model: ModelFacts, options: Sampling) -> Guide | None:
    """The guide that constrains an answer to the format of the options, if they ask for one."""
    asked = held_to(options)
    return model._grammars.guide(*asked) if asked else None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
