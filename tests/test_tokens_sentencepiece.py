"""Models of SentencePiece: tokens as SentencePiece and transformers have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import foreign_tokenizers as foreign
from bitnet_export.foreign.gguf.tokenizer import tokenizer_of as of_gguf
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.sentencepiece import read_sentencepiece
from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import NORMAL, Vocabulary, merges_of
from token_samples import LLAMA2, of_folder, runtime, same, spm, spm_texts, streamed, texts

GEMMA_IDS = {
    "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>",
    "pad_piece": "<pad>", "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"],
}  # fmt: skip


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
    """Except that transformers loses a space at the beginning of a text, and SentencePiece does not."""
    folder = foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **LLAMA2, legacy=False)
    definition, _, generation, assumptions = of_folder(Folder(folder))
    assert "a text begins with a space, what follows a special token does not (`legacy`)" in assumptions
    ours, theirs = runtime(definition, generation), spm()
    samples = [text for text in texts(["<s>", "</s>", "<unk>"], 24) if text[:1] not in (" ", "▁")]
    same(ours, AutoTokenizer.from_pretrained(folder), samples)
    for text in (*spm_texts(), " a", "  two", "▁a", " ", " <s> a"):
        expected = theirs.encode(text)
        assert ours.encode(text) == [theirs.bos_id(), *expected], text[:80]
        assert ours.decode(expected) == theirs.decode(expected)


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
    """As its class in transformers does, though its tokenizer.json is like Gemma's."""
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


def test_vocabularies_that_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a few megabytes can hold: a piece in two bytes each, or every piece made of every other."""
    with pytest.raises(SourceError, match="more than 524288 pieces"):
        read_sentencepiece(b"\x0a\x00" * (1 << 20), "tokenizer.model")
    pieces = ["x" * length for length in range(1, 301)]
    words, scores = Vocabulary(pieces, [NORMAL] * len(pieces)), [-float(i) for i in range(len(pieces))]
    assert len(merges_of(words, scores)) == 299 * 300 // 2
    written = sum(length * (length - 1) for length in range(1, 301))
    monkeypatch.setattr("bitnet_export.foreign.vocabulary.MAX_WRITTEN", written - 1)
    with pytest.raises(SourceError, match="in more than 2097152 ways, or in long ones"):
        merges_of(words, scores)
    monkeypatch.setattr("bitnet_export.foreign.vocabulary.MAX_WRITTEN", written)
    assert merges_of(words, scores)
    monkeypatch.setattr("bitnet_export.foreign.vocabulary.MAX_MERGES", 40_000)
    with pytest.raises(SourceError, match="make each other in more than 40000 ways"):
        merges_of(words, scores)
    monkeypatch.setattr("bitnet_export.foreign.vocabulary.MAX_CHARACTERS", 45_000)
    with pytest.raises(SourceError, match="has 45150 characters, expected at most 45000"):
        merges_of(words, scores)
