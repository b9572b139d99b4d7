"""The tokenizer of a packed file, and the one that `--preset gguf` trains, as GGUF; compared with llama.cpp, too."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import bitnet_cli
from bitnet.data import tokenizer as built_in
from bitnet.presets import PRESETS
from bitnet_export import PackedFile
from bitnet_export.convert.incoming import open_source
from bitnet_export.foreign.gguf.splits import PRE
from bitnet_export.foreign.gguf.tokenizer import tokenizer_of
from bitnet_export.foreign.gguf.tokens import vocabulary
from bitnet_export.foreign.gguf.write import write_gguf
from bitnet_export.foreign.vocabulary import Vocabulary, sentencepiece_bpe
from bitnet_export.packed import records
from bitnet_runtime import Model
from bitnet_runtime.tokenizer import text as runtime
from gguf_written import BITNET, build
from packed_files import with_generation
from runtime_models import byte_tokenizer

gguf = pytest.importorskip("gguf")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(*steps: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Bytes, some merges, a special token; cut by `steps`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "Ġt", "he", "Ġthe"]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, spell])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def split(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(regex), behavior="isolated")


@pytest.mark.parametrize(
    ("steps", "pre"),
    [((split(LLAMA3),), "llama-bpe"), ((split(LLAMA3.replace("{1,3}", "")),), "qwen2"), ((), "gpt-2")],
)
def test_a_byte_level_vocabulary(steps: tuple[Any, ...], pre: str) -> None:
    tokenizer = byte_level(*steps)
    keys, _ = vocabulary(tokenizer.to_str().encode(), 262, {"eos_token_ids": [259], "bos_token_id": 259})
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list)
    assert tokens[:260] == [tokenizer.id_to_token(i) for i in range(260)]
    assert tokens[260:] == ["[PAD260]", "[PAD261]"]
    assert types == [1] * 259 + [3, 5, 5]
    assert keys["tokenizer.ggml.merges"] == ["Ġ t", "h e", "Ġt he"]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", pre)
    assert keys["tokenizer.ggml.eos_token_id"] == keys["tokenizer.ggml.bos_token_id"] == 259
    assert keys["tokenizer.ggml.add_bos_token"] is True


def test_a_rule_that_llama_cpp_follows_in_part_is_noted() -> None:
    for name, noted in (("gpt-4o", "only before ASCII ones"), ("kimi-k2", "々"), ("deepseek-v3", None)):
        steps = [split(step["pattern"]["Regex"]) for step in PRE[name].steps if step["type"] == "Split"]
        keys, notes = vocabulary(byte_level(*steps).to_str().encode(), 260, {"eos_token_ids": [259]})
        assert keys["tokenizer.ggml.pre"] == name
        assert len(notes) == (noted is not None) and (noted or "") in "".join(notes)


def test_the_words_of_gpt_2_with_nfc_are_olmos() -> None:
    """GPT-NeoX, which TriLM has."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    keys, _ = vocabulary(tokenizer.to_str().encode(), 260, {"eos_token_ids": [259]})
    assert keys["tokenizer.ggml.pre"] == "olmo"


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: ▁ for spaces, bytes for what has no token."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "▁t",
        "he",
        "▁the",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def test_a_sentencepiece_vocabulary() -> None:
    keys, _ = vocabulary(sentencepiece().to_str().encode(), 266, {"eos_token_ids": [2], "bos_token_id": 1})
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    scores, types = keys["tokenizer.ggml.scores"], keys["tokenizer.ggml.token_type"]
    assert isinstance(scores, list) and isinstance(types, list)
    assert scores[-3:] == [0.0, -1.0, -2.0]
    assert set(scores[:-3]) == {-3.0}
    assert types == [2, 3, 3] + [6] * 256 + [1] * 7


def around(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The tokenizer with special tokens around a text."""
    special = [(word, tokenizer.token_to_id(word)) for word in template.split() if word != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("template", ["<s> $A", "$A </s>", "<s> $A </s>", "$A"])
@pytest.mark.parametrize("said", [{}, {"bos_token_id": 1}])
def test_what_goes_around_a_text_is_in_the_keys(template: str, said: dict[str, Any]) -> None:
    """Whether only the tokenizer says so or the generation defaults do."""
    tokenizer = around(sentencepiece(), template).to_str().encode()
    engine = runtime.Tokenizer(tokenizer, 266, said.get("bos_token_id"))
    keys, _ = vocabulary(tokenizer, 266, {"eos_token_ids": [2], **said})
    found, generation = tokenizer_of(keys)[0], tokenizer_of(keys)[2]
    back = runtime.Tokenizer(found, 266, generation.get("bos_token_id"))
    for text in ("the he", "x", ""):
        assert back.encode(text) == engine.encode(text), text
    assert keys["tokenizer.ggml.add_eos_token"] is template.endswith("</s>")
    assert keys["tokenizer.ggml.add_bos_token"] is ("<s>" in template or bool(said))


def test_more_around_a_text_than_llama_cpp_puts_there_is_refused() -> None:
    for template, said, message in (
        ("<s> <s> $A", {}, r"puts the tokens \[1, 1\] before a text and \[\] after it, llama.cpp at most one"),
        ("</s> $A", {"bos_token_id": 1}, r"puts the tokens \[1, 2\] before a text"),
        ("$A <s>", {"eos_token_ids": [2]}, "ends a text with '<s>', which ends no answer"),
    ):
        with pytest.raises(ValueError, match=message + ".*--no-tokenizer"):
            vocabulary(around(sentencepiece(), template).to_str().encode(), 266, said)


def test_three_tokens_that_end_an_answer_and_more() -> None:
    """Those that llama.cpp knows by name need no key."""
    tokenizer = byte_level(split(LLAMA3))
    tokenizer.add_special_tokens(["<|im_end|>", "<a>", "<b>", "<c>", "<d>"])
    assert not vocabulary(tokenizer.to_str().encode(), 270, {"eos_token_ids": [259, 260, 261]})[1]
    keys, notes = vocabulary(tokenizer.to_str().encode(), 270, {"eos_token_ids": [260, 261, 262, 263, 264]})
    ids = [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert ids == [260, 261, 262]
    assert notes == ["an answer does not end at <c>, <d>: llama.cpp has no more than three end tokens"]
    generation = {"eos_token_ids": [259, 260, 261, 262]}
    keys, notes = vocabulary(tokenizer.to_str().encode(), 270, generation)
    assert tokenizer_of(keys)[2]["eos_token_ids"] == generation["eos_token_ids"] and not notes


@pytest.mark.parametrize("legacy", [True, False])
def test_a_space_behind_special_tokens_is_noted(legacy: bool, tmp_path: Path) -> None:
    """Only if the engine, unlike llama.cpp, does not add one there."""
    words = Vocabulary(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "▁t"], [2, *[6] * 256, 1, 1, 1])
    tokenizer = sentencepiece_bpe(words, [float(i) for i in range(260)], legacy=legacy)
    path = build(tmp_path, BITNET.replace(vocab_size=260, n_layers=1), tokenizer=tokenizer)
    assert ("begins with a space in llama.cpp" in str(write_gguf(path, tmp_path / "m.gguf"))) is not legacy


def test_special_tokens_have_the_names_of_the_source() -> None:
    generation = {"eos_token_ids": [1, 2], "special_tokens": {"bos_token": "<s>", "eos_token": "</s>", "x": "none"}}
    keys, _ = vocabulary(sentencepiece().to_str().encode(), 266, generation)
    ids = {key.split(".")[-1]: value for key, value in keys.items() if key.endswith("_id")}
    assert ids == {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 1}
    assert keys["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_a_vocabulary_there_and_back(kind: str) -> None:
    """The tokenizer that our reader makes of the keys gives the same tokens."""
    tokenizer = byte_level(split(LLAMA3)) if kind == "byte level" else sentencepiece()
    keys, _ = vocabulary(tokenizer.to_str().encode(), 270, {"eos_token_ids": [2]})
    again = Tokenizer.from_str(tokenizer_of(keys)[0].decode())
    for text in ("the the thé", "  the\n\n 1234 t'he", "日本 🙂", "", " ", "hethehe"):
        assert again.encode(text).ids == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_other_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    def refused(tokenizer: Tokenizer, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            vocabulary(tokenizer.to_str().encode(), 512, {})

    refused(byte_level(split(r"\w+|\s+")), r"cuts text by split \\w\+\|\\s\+, llama.cpp has no name for this")
    refused(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "is a WordLevel model")
    lower = byte_level()
    lower.normalizer = normalizers.Lowercase()
    refused(lower, "normalizes text by Lowercase, llama.cpp's gpt-2 does not")
    refused(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), "neither byte-level nor SentencePiece")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        vocabulary(b'{"model": 3}', 512, {})
    with pytest.raises(ValueError, match="has token 259, the model 100 tokens"):
        vocabulary(byte_level().to_str().encode(), 100, {})


def test_the_vocabulary_of_a_file(tmp_path: Path) -> None:
    config = BITNET.replace(vocab_size=263)
    tokenizer = byte_level(split(LLAMA3)).to_str().encode()
    path = build(tmp_path, config, tokenizer=tokenizer, template=b"{{ messages }}")
    write_gguf(path, tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.ggml.tokens"].contents()[256:259] == ["Ġt", "he", "Ġthe"]
    for said in ({"bos_token_id": -1}, {"bos_token_id": 10**12}, {"eos_token_ids": [263]}):
        odd = with_generation(path, tmp_path / "odd.bitnet", **said)
        with pytest.raises(ValueError, match=r"special tokens in the metadata are .*, expected ids below 263"):
            write_gguf(odd, tmp_path / "odd.gguf")
    other = build(tmp_path, config, tokenizer=byte_tokenizer().to_str().encode())
    write_gguf(other, tmp_path / "plain.gguf", vocabulary=False)
    assert gguf.GGUFReader(tmp_path / "plain.gguf").fields["tokenizer.ggml.model"].contents() == "none"


def test_sampling_defaults_are_there_with_and_without_a_vocabulary(tmp_path: Path) -> None:
    said = {"temperature": 1, "top_k": 0, "top_p": 0.95, "repetition_penalty": 1.1, "repeat_last_n": -1}
    path = build(tmp_path, BITNET.replace(vocab_size=263), tokenizer=byte_tokenizer().to_str().encode())
    write_gguf(with_generation(path, tmp_path / "said.bitnet", **said), tmp_path / "m.gguf", vocabulary=False)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = {name.rpartition(".")[2]: field.contents() for name, field in fields.items() if ".sampling." in name}
    expected = {"temp": 1.0, "top_k": 0, "top_p": 0.95, "penalty_repeat": 1.1, "penalty_last_n": -1}
    assert found == pytest.approx(expected, rel=1e-7)  # -1: of all tokens, in llama.cpp, too; without the key of 64
    kinds = [fields[f"general.sampling.{name}"].types[0].name for name in ("temp", "top_k", "penalty_last_n")]
    assert kinds == ["FLOAT32", "UINT32", "INT32"]
    with open_source(tmp_path / "m.gguf") as source:
        names = ("temperature", "top_k", "top_p", "repeat_penalty", "repeat_last_n")
        assert [source.generation[name] for name in names] == [1, 0, 0.95, 1.1, -1]


# ---- what `bitnet train --preset gguf` makes ----

TEXTS = (
    "def read(self, size=-1):\n    \"\"\"Read 12345 bytes.\"\"\"\n\n    return self.it's\t#  end   \r\n",
    "thé 日本 🙂 ǅ ０１２ ½ don'T WE'LL x_y __init__ 1.5e-10 a\u00a0b\u2003c",
    "  leading, trailing  ",
    "\n\n\t\t \n",
    "<|endoftext|>",
    "",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed file and a GGUF file, by the commands that the documentation names."""
    folder = tmp_path_factory.mktemp("preset")
    text = "".join(Path(module.__file__ or "").read_text() for module in (argparse, dataclasses, typing))
    (folder / "text.txt").write_text(text)
    run, model, out = (str(folder / name) for name in ("run", "m.bitnet", "m.gguf"))
    few = ["--steps", "3", "--batch", "2", "--context", "64", "--threads", "1"]
    assert bitnet_cli.main(["train", "--preset", "gguf", "--data", str(folder / "text.txt"), "--out", run, *few]) == 0
    assert bitnet_cli.main(["export", run, model, "--tokens", "512"]) == 0
    assert bitnet_cli.main(["convert", model, out, "--to", "gguf"]) == 0
    return Path(model), Path(out)


def test_a_model_of_the_preset_becomes_a_file_that_takes_text(trained: tuple[Path, Path]) -> None:
    model, out = trained
    reader = gguf.GGUFReader(out)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["general.architecture"], fields["tokenizer.ggml.model"]) == ("bitnet", "gpt2")
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"] == built_in.END_ID
    assert {t.tensor_type.name for t in reader.tensors if "attn_q.weight" in t.name} == {"TQ2_0"}
    words = Tokenizer.from_str((PackedFile.open(model).section(records.TOKENIZER) or b"").decode())
    assert fields["tokenizer.ggml.tokens"] == [words.id_to_token(i) for i in range(PRESETS["gguf"].vocab_size)]
    with open_source(out) as source:
        again = Tokenizer.from_str((source.tokenizer or b"").decode())
    again.encode_special_tokens = True  # as the engine does: text that spells a special token stays text
    with Model.load(model) as engine:
        for text in TEXTS:
            assert again.encode(text, add_special_tokens=False).ids == engine.tokenize(text, add_bos=False), text
            assert again.encode(text).ids == engine.tokenize(text), text


def test_a_token_that_its_letters_do_not_make() -> None:
    """Llama 3's cuts stand for ignore_merges in llama.cpp, GPT-2's for merges: refused where that matters alone."""
    for steps, pre in (([split(LLAMA3)], "llama-bpe"), ([], "gpt-2")):
        definition = json.loads(byte_level(*steps).to_str())
        for ignores in (False, True):
            definition["model"]["ignore_merges"] = ignores
            kept, _ = vocabulary(json.dumps(definition).encode(), 260, {"eos_token_ids": [259]})
            assert kept["tokenizer.ggml.pre"] == pre
        definition["model"]["merges"].pop()
        definition["model"]["ignore_merges"] = pre == "llama-bpe"
        vocabulary(json.dumps(definition).encode(), 260, {"eos_token_ids": [259]})
        definition["model"]["ignore_merges"] = pre != "llama-bpe"
        with pytest.raises(ValueError, match=f"'Ġthe', which is a token, .* llama.cpp's {pre}"):
            vocabulary(json.dumps(definition).encode(), 260, {"eos_token_ids": [259]})


# ---- llama.cpp ----


@pytest.mark.parametrize("kind", ["llama-bpe", "gpt-2", "sentencepiece"])
def test_llama_cpp_has_the_same_tokens(tmp_path: Path, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = sentencepiece() if kind == "sentencepiece" else byte_level(*[split(LLAMA3)] * (kind == "llama-bpe"))
    generation = {"eos_token_ids": [2], "bos_token_id": 1}
    config = BITNET.replace(vocab_size=270, n_layers=1)
    definition = tokenizer.to_str().encode()
    write_gguf(build(tmp_path, config, tokenizer=definition, generation=generation), tmp_path / "m.gguf", body="F16")
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, verbose=False, vocab_only=True)
    for text in ("the the thé", "  the\n\n 1234 t'he", "日本 🙂", "hethehe", "a\r\n\tthe 's"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert theirs.tokenize(text.encode(), add_bos=False) == ids, text
        assert theirs.tokenize(text.encode(), add_bos=True) == [1, *ids], text


def test_llama_cpp_takes_the_text_of_the_preset(trained: tuple[Path, Path]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model, out = trained
    theirs = llama_cpp.Llama(str(out), n_ctx=256, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0)
    with Model.load(model, kv_type="f32") as engine:
        for text in TEXTS:
            ids = engine.tokenize(text)
            assert theirs.tokenize(text.encode(), special=False) == ids, text
        ids = engine.tokenize(TEXTS[0])
        theirs.eval(ids)
        ours = engine.session().append(ids, "all")
        assert np.corrcoef(theirs.scores[: len(ids)].ravel(), ours.ravel())[0, 1] > 0.998
