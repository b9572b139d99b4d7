"""The tokenizer in the metadata of a GGUF file, as one of the `tokenizers` library.

Keys and their meaning: docs/gguf.md of ggml and llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    Vocabulary,
    byte_level,
    note_others,
    sentencepiece_bpe,
    whole_template,
)
from bitnet_export.foreign.vocabulary import ENDS as NAMED_ENDS

from .splits import PRE

T = TypeVar("T", str, int, float)

_TOLD_BY = {">>ABSTRACT<<": "falcon3", "<|begin_of_text|>": "llama-bpe", "<|im_start|>": "qwen2"}
"""Tokens that identify a vocabulary without tokenizer.ggml.pre, and the rules it was trained with."""

ENDS = (
    *NAMED_ENDS, "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|fim_pad|>",
    "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
"""Tokens at which llama.cpp ends answers by their name: the last four in code, where the gap is filled."""

_NAMED = "tokenizer.chat_template."  # and a name: of one that is not the default
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_LLAMA_IDS = {"bos": 1, "eos": 2}  # with tokenizer.ggml.model = llama, if the file does not say
_FORMS = {"gpt2": byte_level, "llama": sentencepiece_bpe}


def tokenizer_of(metadata: Mapping[str, Any]) -> tuple[bytes, str | None, dict[str, Any], list[str]]:
    """Definition of the tokenizer, chat template, generation defaults, and assumptions.

    metadata: of a file that has tokenizer.ggml.tokens, arrays as lists. Raises SourceError for a value of
    another type, ids beyond the vocabulary, or an unknown kind of tokenizer.
    """
    return _Reading(metadata).result()


class _Reading:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.assumptions: list[str] = []
        self.model = self._value("model", str)
        if self.model not in _FORMS:
            raise SourceError(f"tokenizer.ggml.model is {self.model!a:.80}, expected one of {', '.join(_FORMS)}")
        self.tokens = self._array("tokens", str)
        self.kinds = self._array("token_type", int, len(self.tokens)) or [NORMAL] * len(self.tokens)
        if wrong := [kind for kind in self.kinds if not NORMAL <= kind <= BYTE]:
            raise SourceError(f"tokenizer.ggml.token_type has {wrong[0]}, expected {NORMAL} to {BYTE}")
        self.ids = {role: self._id(key) for key, role in _ROLES.items()}
        if self.model == "llama":
            self._default_ids()
        if "tokenizer.ggml.token_type" not in metadata:
            self._guess_kinds()
        self._mend_ends()

    def result(self) -> tuple[bytes, str | None, dict[str, Any], list[str]]:
        definition = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        template = self.metadata.get("tokenizer.chat_template")
        if template is not None and type(template) is not str:
            raise SourceError(f"tokenizer.chat_template is {template!a:.80}, expected a text")
        others = [key.removeprefix(_NAMED) for key in self.metadata if key.startswith(_NAMED)]
        note_others([ascii(name)[1:-1] for name in others], bool(template), self.assumptions)
        return definition, whole_template(template, self.assumptions), self._generation(), self.assumptions

    def _byte_level(self) -> bytes:
        name = self._pre()
        pre = PRE[name]
        if "tokenizer.ggml.merges" not in self.metadata:
            raise SourceError(
                "metadata has no key tokenizer.ggml.merges, without which all tokens of a text would be of one byte; "
                "convert the model again with a newer converter, or from the Hugging Face folder"
            )
        merges = [self._merge(merge) for merge in self._array("merges", str)]
        words = self._words(pre.add_bos, f"for tokenizer.ggml.pre = {name}")
        return byte_level(words, merges, pre.steps, nfc=pre.nfc, ignore_merges=pre.ignore_merges)

    def _sentencepiece(self) -> bytes:
        for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
            if self.metadata.get(f"tokenizer.ggml.{key}"):
                raise SourceError(f"tokenizer.ggml.{key} is set: text would be changed before it is cut; not supported")
        prefix = self._flag("add_space_prefix", True)
        scores = self._array("scores", float, len(self.tokens))
        if not scores:
            raise SourceError("metadata has no key tokenizer.ggml.scores, which tokenizer.ggml.model = llama needs")
        if prefix:
            self.assumptions.append("what follows a special token begins with a space, as in llama.cpp")
        return sentencepiece_bpe(self._words(True, "for tokenizer.ggml.model = llama"), scores, prefix=prefix)

    def _words(self, add_bos: bool, why: str) -> Vocabulary:
        """The vocabulary, with the tokens before and after a text."""
        bos = self.ids["bos"]
        if bos is not None and "tokenizer.ggml.add_bos_token" not in self.metadata:
            word = "begins" if add_bos else "does not begin"
            self.assumptions.append(f"no key tokenizer.ggml.add_bos_token: a text {word} with the start token, {why}")
        before = bos if self._flag("add_bos_token", add_bos) else None
        after = self.ids["eos"] if self._flag("add_eos_token", False) else None
        self.adds_bos = before is not None
        kinds = list(self.kinds)
        for token in (before, after):
            if token is not None and kinds[token] != UNKNOWN:
                kinds[token] = CONTROL
        return Vocabulary(self.tokens, kinds, before, after)

    def _pre(self) -> str:
        name = self.metadata.get("tokenizer.ggml.pre")
        if name is not None:
            if type(name) is not str or name not in PRE:
                raise SourceError(
                    f"tokenizer.ggml.pre is {name!a:.80}, expected one of {', '.join(PRE)}; how a text is cut by "
                    f"another name is not known: convert the Hugging Face folder of the model, which says it"
                )
            return name
        known = set(self.tokens)
        for token, pre in _TOLD_BY.items():
            if token in known:
                self.assumptions.append(f"no key tokenizer.ggml.pre: {pre}, because the vocabulary has {token}")
                return pre
        raise SourceError(
            "metadata has no key tokenizer.ggml.pre, and the vocabulary is of no kind that is known: how a text is "
            "cut cannot be told; convert the model again with a newer converter, or from the Hugging Face folder"
        )

    @staticmethod
    def _merge(merge: str) -> tuple[str, str]:
        space = merge.find(" ", 1)
        if space < 0 or space == len(merge) - 1:
            raise SourceError(f"tokenizer.ggml.merges has {merge!a:.80}, expected two tokens with a space between")
        return merge[:space], merge[space + 1 :]

    def _guess_kinds(self) -> None:
        named = {token for token in self.ids.values() if token is not None}
        if self.model == "llama":
            raise SourceError("metadata has no key tokenizer.ggml.token_type, which tokenizer.ggml.model = llama needs")
        marked = {i for i, text in enumerate(self.tokens) if text.startswith("<|") and text.endswith("|>")}
        self.kinds = [CONTROL if i in named | marked else NORMAL for i in range(len(self.tokens))]
        self.assumptions.append("no key tokenizer.ggml.token_type: tokens like <|this|> are special, others are not")

    def _default_ids(self) -> None:
        for role, token in _LLAMA_IDS.items():
            if f"tokenizer.ggml.{role}_token_id" not in self.metadata and token < len(self.tokens):
                self.ids[role] = token
                found = f"{token} ({self.tokens[token]!r:.40})"
                self.assumptions.append(f"no key tokenizer.ggml.{role}_token_id: {found}, as in llama.cpp")

    def _mend_ends(self) -> None:
        """Like llama.cpp, make the tokens that end answers by their name control tokens, whatever their type."""
        plain = [i for i, text in enumerate(self.tokens) if text in ENDS and self.kinds[i] not in (CONTROL, UNKNOWN)]
        for token in plain:
            self.kinds[token] = CONTROL
        if plain:
            names = ", ".join(self.tokens[i] for i in plain)
            self.assumptions.append(f"{names} is made a control token, by its name: the file has it as text")

    def _generation(self) -> dict[str, Any]:
        declared = [self.ids["eos"], *map(self._id, ("eot", "eom", "fim_pad", "fim_rep", "fim_sep"))]
        ends = {token for token in declared if token is not None}
        more = {i for i, text in enumerate(self.tokens) if text in ENDS and self.kinds[i] == CONTROL} - ends
        if more:
            names = ", ".join(self.tokens[i] for i in sorted(more))
            self.assumptions.append(f"an answer also ends at {names}, by the name of the token")
        found: dict[str, Any] = {"eos_token_ids": sorted(ends | more)} if ends | more else {}
        if self.adds_bos:
            found["bos_token_id"] = self.ids["bos"]
        texts = {f"{role}_token": self.tokens[i] for role, i in self.ids.items() if i is not None}
        return found | ({"special_tokens": texts} if texts else {})

    # ---- values, checked ----

    def _value(self, key: str, kind: type[T]) -> T:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if type(value) is not kind:
            raise SourceError(f"tokenizer.ggml.{key} is {value!a:.80}, expected {kind.__name__}")
        return value

    def _array(self, key: str, kind: type[T], length: int | None = None) -> list[T]:
        """An array, of `length` if given; empty if the key is missing."""
        values = self.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise SourceError(f"tokenizer.ggml.{key} is not an array of {kind.__name__} alone")
        if values and length is not None and len(values) != length:
            raise SourceError(f"tokenizer.ggml.{key} has {len(values)} values, tokenizer.ggml.tokens {length}")
        return values

    def _flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if type(value) is not bool:
            raise SourceError(f"tokenizer.ggml.{key} is {value!a:.80}, expected bool")
        return value

    def _id(self, role: str) -> int | None:
        """The id of a special token; None if the file has none, which may also be written as 2³² − 1."""
        value = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if value is None or value == 0xFFFFFFFF:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise SourceError(
                f"tokenizer.ggml.{role}_token_id is {value!a:.80}, expected an id below {len(self.tokens)}"
            )
        return value
