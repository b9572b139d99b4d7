"""Tokens of foreign models: as transformers, SentencePiece and the publishers' own files have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import foreign_tokenizers as foreign
from bitnet_export.foreign.gguf.tokenizer import PRE
from bitnet_export.foreign.gguf.tokenizer import tokenizer_of as of_gguf
from bitnet_export.foreign.gguf.tokens import vocabulary
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.sentencepiece import read_sentencepiece
from bitnet_export.foreign.hf.tokenizer import tokenizer_of
from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import NORMAL, Vocabulary, merges_of
from bitnet_runtime.text import Tokenizer

CODE = "def f(a: int) -> str:\n\tif a != 0:\n        return f'{a:04d}'  # don't\r\n\r\n\n   \n"
EDGES = ["", " ", "  ", "   a", "a  b   c    d", "\n\n \n\t x", "I'LL we've 'S", "1234567 12 ½ ² ٣٤", "é e\u0301 Å",
         "👩‍👩‍👧‍👦🏳️‍🌈 👍🏽", "\0\x01\x7f", "\ufeffx\u200b\u00a0y\u3000z", CODE, "ſ'ſ 'ſa", "a" * 500,
         "日本語のテキスト", "$x+=<y>^~|`"]  # fmt: skip


def of_folder(folder: Folder) -> tuple[bytes | None, str | None, dict[str, Any], list[str]]:
    return tokenizer_of(folder, 1000)


def all_of_unicode(step: int = 1) -> Iterator[str]:
    """Every code point that is no surrogate, in pieces and between letters.

    step: for the planes with nothing but ideographs, and those with nothing; they differ in no property.
    """
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0xE0000, step), *range(0xE0000, 0xE0200)]
    points += range(0xE0200, 0x110000, step)
    for first in range(0, len(points), 1024):
        yield "".join(map(chr, points[first : first + 4096]))
    for first in range(0, 0x3000, 512):
        yield " ".join(f"a{chr(point)}1" for point in points[first : first + 512])


def texts(special: list[str], pieces: int | None = None) -> list[str]:
    return [*EDGES, *islice(all_of_unicode(64), pieces), *special, "x" + "".join(special) + "y", " ".join(special)]


def runtime(definition: bytes | None, generation: dict[str, Any]) -> Tokenizer:
    assert definition is not None
    return Tokenizer(definition, 1 << 21, generation.get("bos_token_id"))


def same(ours: Tokenizer, theirs: Any, samples: list[str]) -> None:
    """Encode with and without special tokens seen, decode with and without them shown, and one at a time."""
    for text in samples:
        for special in (False, True) if len(text) < 1000 else (False,):
            expected = theirs.encode(text, split_special_tokens=not special)
            if special and theirs.bos_token and expected[:2] == [theirs.bos_token_id] * 2:
                del expected[0]  # the start token is written out, and ours does not repeat it
            assert ours.encode(text, parse_special=special) == expected, (special, text[:80])
            shown = [theirs.decode(expected, skip_special_tokens=skip) for skip in (True, False)]
            assert [ours.decode(expected, skip_special=skip) for skip in (True, False)] == shown
            if len(expected) < 700:
                assert streamed(ours, expected) == shown[0]


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> str:
    out = tokenizer.detokenizer()
    return "".join(map(out.push, tokens)) + out.flush()


@pytest.fixture(scope="module", params=foreign.BYTE_LEVEL)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind = request.param
    tokenizer, special = foreign.byte_level(kind), foreign.BYTE_LEVEL[kind][1]
    added = {str(i): t.__getstate__() for i, t in tokenizer.get_added_tokens_decoder().items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1], "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": True,
    }  # fmt: skip
    if kind == "llama-bpe":
        config["bos_token"] = special[0]
    if kind == "qwen2":
        config |= {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "bos_token": None}
    model_type = {"qwen2": "qwen3", "gpt-2": "gpt2"}.get(kind, "llama")
    return kind, foreign.save(tmp_path_factory.mktemp(kind) / "m", tokenizer, model_type=model_type, **config)


def test_a_folder_gives_the_tokens_of_transformers(published: tuple[str, Path]) -> None:
    kind, folder = published
    definition, template, generation, _ = of_folder(Folder(folder))
    special = [*foreign.BYTE_LEVEL[kind][1], *foreign.BYTE_LEVEL[kind][2]]
    pieces = None if kind in ("llama-bpe", "qwen2") else 12
    same(runtime(definition, generation), AutoTokenizer.from_pretrained(folder), texts(special, pieces))
    assert template is None
    assert generation["eos_token_ids"] == [foreign.byte_level(kind).token_to_id(foreign.BYTE_LEVEL[kind][1][-1])]
    assert ("bos_token_id" in generation) == (kind == "llama-bpe")


@settings(max_examples=100)
@given(st.text(max_size=60), st.sampled_from(["llama-bpe", "qwen2", "falcon"]))
def test_any_text_through_gguf_and_back(text: str, kind: str) -> None:
    ours = runtime(*of_gguf(as_gguf(kind))[::2])
    original = foreign.byte_level(kind)
    assert ours.encode(text, parse_special=True) == original.encode(text).ids
    assert ours.decode(ours.encode(text)) == original.decode(original.encode(text).ids)


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
        ("pre", "kimi-k2", "pre is 'kimi-k2', expected one of"),
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


def test_gguf_without_types_and_scores() -> None:
    """Those of byte-level tokens are told by their names; SentencePiece's cannot be told."""
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


def test_tokens_that_are_there_twice_and_templates_that_are_none() -> None:
    metadata = dict(as_gguf("gpt-2"))
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][4]
    with pytest.raises(SourceError, match="twice, as 4 and 5"):
        of_gguf(metadata)
    with pytest.raises(SourceError, match="chat_template is 5"):
        of_gguf(as_gguf("gpt-2") | {"tokenizer.chat_template": 5})


# ---- SentencePiece ----

LLAMA2 = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    "add_bos_token": True, "add_eos_token": False,
}  # fmt: skip
GEMMA_IDS = {
    "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>",
    "pad_piece": "<pad>", "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"],
}  # fmt: skip


def spm(prefix: bool = True, **options: Any) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=foreign.sentencepiece_model(prefix, **options))


def spm_texts(pieces: int | None = None) -> list[str]:
    return [text for text in texts(["<s>", "</s>", "<unk>"], pieces) if text and "\0" not in text and "▁" not in text]


def test_code_points_of_every_plane(published: tuple[str, Path]) -> None:
    kind, folder = published
    if kind == "llama-bpe":
        ours, original = runtime(*of_folder(Folder(folder))[::2]), foreign.byte_level(kind)
        for text in all_of_unicode(16):
            tokens = ours.encode(text)
            assert tokens == original.encode(text).ids
            assert ours.decode(tokens) == text


def test_a_sentencepiece_model_gives_the_tokens_of_sentencepiece(tmp_path: Path) -> None:
    theirs = spm()
    folder = foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **LLAMA2)
    definition, _, generation, assumptions = of_folder(Folder(folder))
    ours = runtime(definition, generation)
    for text in spm_texts():
        expected = theirs.encode(text)
        assert ours.encode(text) == [theirs.bos_id(), *expected], text[:80]
        assert ours.decode(expected) == theirs.decode(expected)
        if len(expected) < 700:
            assert streamed(ours, expected) == theirs.decode(expected)
    assert generation == {
        "bos_token_id": 1, "eos_token_ids": [2],
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    }  # fmt: skip
    assert len(assumptions) == 1
    assert "a text begins with a space" in assumptions[0]


def test_a_llama_that_is_not_legacy_is_as_in_transformers(tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **LLAMA2, legacy=False)
    definition, _, generation, _ = of_folder(Folder(folder))
    same(runtime(definition, generation), AutoTokenizer.from_pretrained(folder), texts(["<s>", "</s>", "<unk>"], 24))


def test_a_tokenizer_json_of_llama_2_loses_no_space(tmp_path: Path) -> None:
    """transformers 5 has rules of its own for LlamaTokenizer, which agree where no text begins with a space."""
    made = of_folder(Folder(foreign.save(tmp_path / "a", foreign.sentencepiece_model(), **LLAMA2)))
    assert made[0] is not None
    folder = foreign.save(tmp_path / "b", foreign.Tokenizer.from_str(made[0].decode()), **LLAMA2)
    definition, _, generation, _ = of_folder(Folder(folder))
    ours = runtime(definition, generation)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in spm_texts():
        if text[0] != " " and not any(special in text for special in ("<s>", "</s>", "<unk>")):
            assert ours.encode(text) == theirs.encode(text), text[:80]
    assert ours.encode(" a") == [1, *spm().encode(" a")] != theirs.encode(" a")


def test_a_gemma_folder_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = foreign.sentencepiece_model(False, **{**GEMMA_IDS, "user_defined_symbols": ("<start_of_turn>",)})
    config = {
        "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>",
        "pad_token": "<pad>", "add_bos_token": True,
    }  # fmt: skip
    made = of_folder(Folder(foreign.save(tmp_path / "a", model, model_type="gemma3_text", **config)))
    assert made[0] is not None
    tokenizer = foreign.Tokenizer.from_str(made[0].decode())
    folder = foreign.save(tmp_path / "b", tokenizer, model_type="gemma3_text", **config)
    definition, _, generation, _ = of_folder(Folder(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    same(runtime(definition, generation), theirs, texts(["<bos>", "<eos>", "<start_of_turn>"], 24))
    assert generation["bos_token_id"] == 2


def test_a_siglip_2_takes_texts_in_lower_case(tmp_path: Path) -> None:
    """As its class in transformers does, where tokenizer.json is as Gemma has it."""
    model = foreign.sentencepiece_model(False, **{**GEMMA_IDS, "user_defined_symbols": ("<mask>",)})
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = names | {"tokenizer_class": "Siglip2Tokenizer", "mask_token": "<mask>", "add_bos_token": False}
    made = of_folder(Folder(foreign.save(tmp_path / "a", model, **(config | {"tokenizer_class": "GemmaTokenizer"}))))
    assert made[0] is not None
    words = foreign.Tokenizer.from_str(made[0].decode())
    folder = foreign.save(tmp_path / "b", words, model_type="siglip2", **config)
    definition, _, generation, _ = of_folder(Folder(folder))
    ours, theirs = runtime(definition, generation), AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__ == "Siglip2Tokenizer"
    for text in ("A Cat ON a MAT", "ÄÖ İstanbul ΣΑΣ", "  two  spaces ", *foreign.SAMPLE):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text[:80]
    assert ours.encode("A Cat") == ours.encode("a cat") != words.encode("A Cat").ids


@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_of_a_sentencepiece_model(prefix: bool) -> None:
    theirs = spm(prefix)
    ids = range(theirs.get_piece_size())
    kinds = [2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in ids]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in ids], "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip
    definition, _, generation, assumptions = of_gguf(metadata)
    ours = runtime(definition, generation)
    for text in spm_texts(12):
        expected = theirs.encode(text)
        assert ours.encode(text) == [1, *expected], text[:80]
        assert ours.decode(expected) == theirs.decode(expected)
    assert any("add_bos_token: a text begins with the start token" in line for line in assumptions)
    for key, value, message in (
        ("scores", [0.0] * len(ids), "same score"),
        ("scores", [1], "not an array of float"),
        ("scores", [1.0], "has 1 values"),
        ("remove_extra_whitespaces", True, "remove_extra_whitespaces is set"),
        ("tokens", ["x" * 1000, *metadata["tokenizer.ggml.tokens"][1:]], None),
    ):
        if message:
            with pytest.raises(SourceError, match=message):
                of_gguf(metadata | {f"tokenizer.ggml.{key}": value})
    long = [*metadata["tokenizer.ggml.tokens"][:-1], "x" * 1000]
    with pytest.raises(SourceError, match="piece of 1000 characters"):
        of_gguf(metadata | {"tokenizer.ggml.tokens": long})


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "gpt-2", "smollm", "sentencepiece"])
def test_out_to_gguf_and_in_again(kind: str, tmp_path: Path) -> None:
    if kind == "sentencepiece":
        made = of_folder(Folder(foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **LLAMA2)))[0]
        assert made is not None
    else:
        made = foreign.byte_level(kind).to_str().encode()
    size = foreign.Tokenizer.from_str(made.decode()).get_vocab_size()
    again = of_gguf(vocabulary(made, size + 5, {"bos_token_id": 1, "eos_token_ids": [2]}))[0]
    first, second = Tokenizer(made, size), Tokenizer(again, size)
    for text in texts([], 12):
        assert first.encode(text, add_bos=False) == second.encode(text, add_bos=False), text[:80]


# ---- folders that are damaged, and sides of them ----


def test_every_kind_of_pre_is_tested() -> None:
    assert set(PRE) - {"llama3", "llama-v3", "falcon_e"} == set(foreign.BYTE_LEVEL) | {"default"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "the model is unigram, expected BPE"),
        ({"byte_fallback": False}, "no byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes text"),
        ({"remove_extra_whitespaces": True}, "changes text"),
    ],
)
def test_sentencepiece_models_that_could_not_be_run_exactly(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = foreign.save(tmp_path / "m", foreign.sentencepiece_model(**options), **LLAMA2)
    with pytest.raises(SourceError, match=message):
        of_folder(Folder(folder))


def test_what_tokenizer_config_leaves_out(tmp_path: Path) -> None:
    """Without add_bos_token a text begins with the start token; tokens that are only named there are added."""
    config = {key: value for key, value in LLAMA2.items() if key != "add_bos_token"}
    folder = foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **config, extra_special_tokens=["<x>"])
    definition, _, generation, assumptions = of_folder(Folder(folder))
    assert any("does not say add_bos_token" in line for line in assumptions)
    rules = json.loads(definition or b"{}")
    added = {token["content"]: token["id"] for token in rules["added_tokens"]}
    assert generation["bos_token_id"] == added["<s>"]
    assert added["<x>"] == max(rules["model"]["vocab"].values()) + 1
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(SourceError, match=r"chat_template\.jinja is not UTF-8"):
        of_folder(Folder(folder))


def test_damaged_files(tmp_path: Path) -> None:
    model = foreign.sentencepiece_model()
    folder = foreign.save(tmp_path / "m", model, **LLAMA2)
    for end in (0, 1, 2, 5, 20, 100, len(model) // 2, len(model) - 1):
        (folder / "tokenizer.model").write_bytes(model[:end])
        with pytest.raises(SourceError, match=r"tokenizer\.model"):
            of_folder(Folder(folder))
    (folder / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
    with pytest.raises(SourceError, match="not a SentencePiece model"):
        of_folder(Folder(folder))
    for content in (b"", b"{}", b"\xff", b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}'):
        (folder / "tokenizer.json").write_bytes(content)
        with pytest.raises(SourceError, match=r"tokenizer\.json is refused"):
            of_folder(Folder(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 5}, "eos_token is 5"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "expected a token"),
        ({"added_tokens_decoder": {"9999": {"content": "<new>", "special": True}}}, "of different models"),
        ({"added_tokens_decoder": {"601": {"content": "<new>", "lstrip": 3}}}, "expected true or false"),
        ({"chat_template": 5}, "chat_template is 5"),
        ({"extra_special_tokens": ["<x>"] * 70_000}, "adds 70000 tokens, expected at most 65536"),
    ],
)
def test_wrong_tokenizer_config(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        of_folder(Folder(foreign.save(tmp_path / "m", foreign.byte_level("gpt-2"), **config)))


def test_generation_config_and_templates(tmp_path: Path) -> None:
    folder = foreign.save(
        tmp_path / "m", foreign.byte_level("llama-bpe"), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
        chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    )  # fmt: skip
    end, eot = (foreign.byte_level("llama-bpe").token_to_id(name) for name in ("<|end_of_text|>", "<|eot_id|>"))
    said = {"eos_token_id": end, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(said))
    _, template, generation, assumptions = of_folder(Folder(folder))
    assert template == "a"
    assert generation["eos_token_ids"] == [end, eot]
    assert (generation["temperature"], generation["top_p"]) == (0.6, 0.9)
    assert any("tool_use" in line for line in assumptions)
    assert any("also ends at <|eot_id|>" in line for line in assumptions)
    (folder / "chat_template.jinja").write_text("c")
    (folder / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": [1, 2]}')
    _, template, generation, _ = of_folder(Folder(folder))
    assert (template, generation["temperature"], generation["eos_token_ids"]) == ("c", 0.0, [1, 2, eot])
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1000]}')
    _, _, generation, assumptions = of_folder(Folder(folder))
    assert generation["eos_token_ids"] == [eot]
    assert any("was left out: not token ids below 1000" in line for line in assumptions)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 7}')
    with pytest.raises(SourceError, match="top_p is 7"):
        of_folder(Folder(folder))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    definition, template, generation, assumptions = of_folder(folder)
    assert (definition, template, generation) == (None, None, {})
    assert "no tokenizer in the folder" in assumptions[0]
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no tokenizer\.json"):
        of_folder(folder)


def test_vocabularies_that_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a few megabytes can ask for: a piece in two bytes, every piece made of every other."""
    with pytest.raises(SourceError, match="more than 524288 pieces"):
        read_sentencepiece(b"\x0a\x00" * (1 << 20), "tokenizer.model")
    pieces = ["x" * length for length in range(1, 301)]
    words, scores = Vocabulary(pieces, [NORMAL] * len(pieces)), [-float(i) for i in range(len(pieces))]
    assert len(merges_of(words, scores)) == 299 * 300 // 2
    monkeypatch.setattr("bitnet_export.foreign.vocabulary.MAX_MERGES", 40_000)
    with pytest.raises(SourceError, match="make each other in more than 40000 ways"):
        merges_of(words, scores)
    monkeypatch.setattr("bitnet_export.foreign.vocabulary.MAX_CHARACTERS", 45_000)
    with pytest.raises(SourceError, match="has 45150 characters, expected at most 45000"):
        merges_of(words, scores)
