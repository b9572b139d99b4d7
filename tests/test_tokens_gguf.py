"""Tokenizers in the metadata of GGUF files: the same tokens as the tokenizers they were made from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import foreign_tokenizers as foreign
from bitnet_export.foreign.gguf.tokenizer import tokenizer_of as of_gguf
from bitnet_export.foreign.gguf.tokens import vocabulary
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.source import SourceError
from bitnet_runtime.tokenizer.text import Tokenizer
from token_samples import LLAMA2, of_folder, runtime, same, texts

GGUF: dict[str, dict[str, Any]] = {}


def as_gguf(kind: str) -> dict[str, Any]:
    """Metadata as llama.cpp's converter writes it (base.py of its conversion package: get_vocab_base)."""
    if kind not in GGUF:
        definition = json.loads(foreign.byte_level(kind).to_str())
        size = foreign.byte_level(kind).get_vocab_size() + 3  # tables are padded
        names = {token: text for text, token in definition["model"]["vocab"].items()}
        kinds = dict.fromkeys(names, 1)
        for added in definition["added_tokens"]:
            names[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
        special = {text: token for token, text in names.items()}
        GGUF[kind] = {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": kind,
            "tokenizer.ggml.tokens": [names.get(i, f"[PAD{i}]") for i in range(size)],
            "tokenizer.ggml.token_type": [kinds.get(i, 5) for i in range(size)],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in definition["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": special[foreign.BYTE_LEVEL[kind][1][0]],
            "tokenizer.ggml.eos_token_id": special[foreign.BYTE_LEVEL[kind][1][-1]],
            "tokenizer.ggml.add_bos_token": kind == "llama-bpe",
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        }  # fmt: skip
    return GGUF[kind]


@cache
def engines(kind: str) -> Tokenizer:
    """The tokenizer of the engine; to make one starts a process, for its template."""
    return runtime(*of_gguf(as_gguf(kind))[::2])


@settings(max_examples=100)
@given(st.text(max_size=60), st.sampled_from(["llama-bpe", "qwen2", "falcon"]))
def test_any_text_through_gguf_and_back(text: str, kind: str) -> None:
    ours = engines(kind)
    original = foreign.byte_level(kind)
    assert ours.encode(text, parse_special=True) == original.encode(text).ids
    assert ours.decode(ours.encode(text)) == original.decode(original.encode(text).ids)


@pytest.mark.parametrize("kind", foreign.BYTE_LEVEL)
def test_gguf_metadata_gives_the_tokenizer_that_it_was_made_of(kind: str, tmp_path: Path) -> None:
    definition, template, generation, assumptions = of_gguf(as_gguf(kind))
    theirs = AutoTokenizer.from_pretrained(
        foreign.save(
            tmp_path / "m",
            foreign.byte_level(kind),
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token=foreign.BYTE_LEVEL[kind][1][0],
        )
    )
    special = [*foreign.BYTE_LEVEL[kind][1], *foreign.BYTE_LEVEL[kind][2]]
    same(runtime(definition, generation), theirs, texts(special, 12))
    assert template == "{{ bos_token }}{{ messages[0].content }}"
    names = foreign.BYTE_LEVEL[kind][1]
    assert generation["special_tokens"] == {"bos_token": names[0], "eos_token": names[-1]}
    known = {"<|end_of_text|>", "<|eot_id|>", "<|endoftext|>", "<|im_end|>"}
    assert {theirs.convert_ids_to_tokens(i) for i in generation["eos_token_ids"]} == known.intersection(names) | {
        names[-1]
    }
    assert len(assumptions) == len(known.intersection(names) - {names[-1]} and [1])


def test_an_empty_template_is_none() -> None:
    assert of_gguf(as_gguf("gpt-2") | {"tokenizer.chat_template": ""})[1] is None


def test_llama_cpps_default_cuts_as_its_source_says() -> None:
    ours = runtime(*of_gguf(as_gguf("gpt-2") | {"tokenizer.ggml.pre": "default"})[::2])
    pieces = [ours.decode([token]) for token in ours.encode("ab  12345...$x")]
    assert "".join(pieces) == "ab  12345...$x"
    assert not any(len(piece.strip()) > 3 and piece.strip().isdigit() for piece in pieces)


def test_gguf_without_pre_is_told_by_its_vocabulary() -> None:
    for kind in ("llama-bpe", "falcon3", "qwen2"):
        metadata = {key: value for key, value in as_gguf(kind).items() if key != "tokenizer.ggml.pre"}
        definition, _, _, assumptions = of_gguf(metadata)
        assert definition == of_gguf(as_gguf(kind))[0]
        assert any(f"no key tokenizer.ggml.pre: {kind}" in line for line in assumptions)
    metadata = {key: value for key, value in as_gguf("gpt-2").items() if key != "tokenizer.ggml.pre"}
    with pytest.raises(SourceError, match="no key tokenizer"):
        of_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "bert", "model is 'bert', expected one of gpt2, llama"),
        ("model", None, "model is None, expected str"),
        (
            "pre",
            "gemma4",
            "pre is 'gemma4', expected one of llama-bpe, .*, default; .*: convert the Hugging Face folder",
        ),
        ("pre", 7, "pre is 7"),
        ("tokens", "abc", "tokens is not an array of str"),
        ("tokens", [1, 2], "tokens is not an array of str"),
        ("tokens", ["a", "b"], "token_type has"),
        ("token_type", [9] * 10_000, "token_type has"),
        ("token_type", [7] * len(as_gguf("gpt-2")["tokenizer.ggml.tokens"]), "token_type has 7, expected 1 to 6"),
        ("merges", ["a b", 3], "merges is not an array"),
        ("merges", ["ab"], "expected two tokens with a space"),
        ("merges", ["ab zzzzzzzzz"], "refused by the tokenizers library"),
        ("bos_token_id", 1 << 20, "bos_token_id is 1048576, expected an id below"),
        ("eos_token_id", -1, "eos_token_id is -1"),
        ("eos_token_id", "x", "eos_token_id is 'x'"),
        ("add_bos_token", 1, "add_bos_token is 1, expected bool"),
    ],
)
def test_hostile_metadata(key: str, value: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        of_gguf(as_gguf("gpt-2") | {f"tokenizer.ggml.{key}": value})


def test_gguf_without_merges() -> None:
    """As Kimi-K2's may be; an empty array is that of a tokenizer without merges."""
    metadata = {key: value for key, value in as_gguf("gpt-2").items() if key != "tokenizer.ggml.merges"}
    with pytest.raises(SourceError, match=r"no key tokenizer\.ggml\.merges, .* of one byte; convert the model again"):
        of_gguf(metadata)
    ours = runtime(*of_gguf(metadata | {"tokenizer.ggml.merges": []})[::2])
    assert len(ours.encode("the é")) == 6


def test_gguf_without_types_and_scores() -> None:
    """Byte-level tokens are recognized by their names; SentencePiece's cannot be."""
    metadata = {key: value for key, value in as_gguf("llama-bpe").items() if key != "tokenizer.ggml.token_type"}
    definition, _, _, assumptions = of_gguf(metadata)
    added = [json.loads(each or b"{}")["added_tokens"] for each in (definition, of_gguf(as_gguf("llama-bpe"))[0])]
    assert added[0] == added[1] and len(added[0]) > 1
    assert "no key tokenizer.ggml.token_type: tokens like <|this|> are special, others are not" in assumptions
    with pytest.raises(
        SourceError, match=r"no key tokenizer\.ggml\.token_type, which tokenizer\.ggml\.model = llama needs"
    ):
        of_gguf(metadata | {"tokenizer.ggml.model": "llama"})
    with pytest.raises(
        SourceError, match=r"no key tokenizer\.ggml\.scores, which tokenizer\.ggml\.model = llama needs"
    ):
        of_gguf(as_gguf("llama-bpe") | {"tokenizer.ggml.model": "llama"})


@pytest.mark.parametrize("kind", [1, 4, 5])
def test_ends_of_answers_that_the_file_has_as_text(kind: int) -> None:
    """As in llama.cpp, which finds them by name and makes control tokens of them: no answer would end otherwise."""
    metadata = dict(as_gguf("qwen2"))
    end = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    types = [kind if i == end else each for i, each in enumerate(metadata["tokenizer.ggml.token_type"])]
    eos = {"tokenizer.ggml.eos_token_id": 5}
    definition, _, generation, assumptions = of_gguf(metadata | {"tokenizer.ggml.token_type": types} | eos)
    assert definition == of_gguf(metadata)[0] and end in generation["eos_token_ids"]
    assert "<|im_end|> is made a control token, by its name: the file has it as text" in assumptions


def test_ends_of_a_gap_are_ends_of_an_answer() -> None:
    """As in llama.cpp: told by their keys, and without them by their names."""
    metadata, texts = dict(as_gguf("qwen2")), list(as_gguf("qwen2")["tokenizer.ggml.tokens"])
    named = {len(texts), len(texts) + 1, len(texts) + 2}
    texts += ["<|fim_pad|>", "<|file_sep|>", "<EOT>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 1, 1]
    keys = {f"tokenizer.ggml.fim_{name}_token_id": 50 + i for i, name in enumerate(("pad", "rep", "sep"))}
    before = of_gguf(as_gguf("qwen2"))[2]
    found = of_gguf(metadata | {"tokenizer.ggml.tokens": texts} | keys)[2]
    assert set(found["eos_token_ids"]) - set(before["eos_token_ids"]) == {*named, 50, 51, 52}


def test_tokens_that_are_there_twice_and_templates_that_are_none() -> None:
    metadata = dict(as_gguf("gpt-2"))
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][4]
    with pytest.raises(SourceError, match="twice, as 4 and 5"):
        of_gguf(metadata)
    with pytest.raises(SourceError, match="chat_template is 5"):
        of_gguf(as_gguf("gpt-2") | {"tokenizer.chat_template": 5})


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "gpt-2", "smollm", "sentencepiece"])
def test_out_to_gguf_and_in_again(kind: str, tmp_path: Path) -> None:
    if kind == "sentencepiece":
        made = of_folder(Folder(foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **LLAMA2)))[0]
        assert made is not None
    else:
        made = foreign.byte_level(kind).to_str().encode()
    size = foreign.Tokenizer.from_str(made.decode()).get_vocab_size()
    again = of_gguf(vocabulary(made, size + 5, {"eos_token_ids": [2]})[0])[0]
    first, second = Tokenizer(made, size), Tokenizer(again, size)
    for text in texts([], 12):
        assert first.encode(text) == second.encode(text), text[:80]


def test_ids_that_a_sentencepiece_vocabulary_does_not_say_are_llama_cpps(tmp_path: Path) -> None:
    """A text begins with token 1, and an answer ends at 2."""
    made = of_folder(Folder(foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **LLAMA2)))[0]
    assert made is not None
    size = foreign.Tokenizer.from_str(made.decode()).get_vocab_size()
    keys, _ = vocabulary(made, size, {"eos_token_ids": [2], "bos_token_id": 1})
    few = {key: value for key, value in keys.items() if not key.endswith(("bos_token_id", "eos_token_id"))}
    (definition, _, generation, _), (other, _, found, said) = of_gguf(keys), of_gguf(few)
    assert (other, found) == (definition, generation)
    assert runtime(other, found).encode("ab")[0] == 1
    for role, token in (("bos", "1 ('<s>')"), ("eos", "2 ('</s>')")):
        assert f"no key tokenizer.ggml.{role}_token_id: {token}, as in llama.cpp" in said
