"""Tokenizers by strangers: what they cost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers

import foreign_tokenizers as foreign
from bitnet.data import tokenizer as trained
from bitnet_export.foreign import vocabulary
from bitnet_export.foreign.gguf.splits import PRE
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.tokenizer import tokenizer_of
from bitnet_runtime import ContextLengthError, Model, TokenizerError
from bitnet_runtime.tokenizer.costs import LINEAR, costly
from bitnet_runtime.tokenizer.expressions import JAIS2
from bitnet_runtime.tokenizer.text import Tokenizer
from bitnet_runtime.tokenizer.tokenizing import Library
from runtime_models import byte_tokenizer, small_model

Json = dict[str, Any]


def definition(**changes: Any) -> Json:
    made: Json = json.loads(byte_tokenizer([b"aa", b"hello"]).to_str())
    return made | changes


def runtime(made: Json) -> Tokenizer:
    return Tokenizer(json.dumps(made).encode(), 1 << 20)


def split(expression: str) -> Json:
    pattern = {"Regex": expression}
    cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, bytes_]}


def replace(old: str, new: str) -> Json:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def bpe(vocab: Any) -> Json:
    return {"type": "BPE", "vocab": vocab, "merges": []}


def nested(depth: int) -> Json:
    step: Json = {"type": "NFC"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


# ---- what runs here ----


def test_published_tokenizers_run_in_this_process(tmp_path: Path) -> None:
    made = [foreign.byte_level(kind) for kind in foreign.BYTE_LEVEL] + [byte_tokenizer()]
    made += [trained.build(kind, ["a text " * 9], 300) for kind in trained.KINDS]
    found = [json.loads(each.to_str()) for each in made]
    for prefix in (True, False):
        folder = foreign.save(tmp_path / f"{prefix}", foreign.sentencepiece_model(prefix), eos_token="</s>")
        found.append(json.loads(tokenizer_of(Folder(folder), 1000)[0] or b""))
    steps = [step for pre in PRE.values() for step in pre.steps if step["type"] == "Split"]
    # The first two look at the rest of a number from each of its digits, the last at all spaces from each 512th.
    apart = {r"\d{1,3}(?=(?:\d{3})*\b)", r"(?=(\d{3})+(?!\d))", JAIS2}
    assert {step["pattern"]["Regex"] for step in steps if costly(definition(pre_tokenizer=step))} == apart
    assert [costly(each) for each in found] == [""] * len(found)


def test_cheap_steps_run_in_this_process() -> None:
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    mask = added("<mask>") | {"lstrip": True}
    doubling = [definition(normalizer={"type": "Sequence", "normalizers": [replace("a", "aa")] * n}) for n in (3, 4)]
    cheap = [definition(pre_tokenizer=mark), definition(added_tokens=[mask]), doubling[0]]
    assert [costly(each) for each in cheap] == [""] * len(cheap)
    assert "lengthen a text" in costly(doubling[1])  # 16 times, and bytes as letters of two


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_the_expressions_of_published_tokenizers_are_known() -> None:
    assert {foreign.LLAMA3, foreign.QWEN2, trained.PIECES, O200K, TEKKEN, QWEN35} <= LINEAR


def seconds(expression: str, text: str) -> float:
    tokenizer = HfTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(foreign.Regex(expression), "isolated")
    begin = time.process_time()
    tokenizer.encode(text)
    return time.process_time() - begin


@pytest.mark.parametrize("expression", sorted(LINEAR))
def test_known_expressions_take_linear_time(expression: str) -> None:
    runs = [" ", "\n", "\t", "A", "a", "a ", "東", "\u0301", "1", "!", "'", "\u00a0", "A\u0301"]
    text = "x".join(run * (20_000 // len(run)) for run in runs)
    assert seconds(expression, text) < 3  # 0.1 s; a quadratic one on one run takes that


# ---- what runs apart ----

HOSTILE: dict[str, tuple[Json, str]] = {
    "exponential": (definition(pre_tokenizer=split("(a+)+b")), "a" * 60),
    "quadratic": (definition(pre_tokenizer=split("(?:.|\\n)*\x01")), "hello " * 50_000),
    "repeats of repeats": (definition(pre_tokenizer=split("(?:(?:(?:a{1000}){1000}){1000}){1000}")), "a" * 1000),
    "in a normalizer": (
        definition(normalizer={"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""}), "a" * 60,
    ),
    "a letter becomes a book": (definition(normalizer=replace("a", "a" * 1_000_000)), "a" * 10_000),
    "doubling": (
        definition(normalizer={"type": "Sequence", "normalizers": [replace("a", "aa")] * 40}), "a",
    ),
    "bytes of bytes": (
        definition(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}), "é",
    ),
    "long words": (
        definition(model={"type": "WordPiece", "vocab": {"[U]": 0} | {"a" * n: n for n in range(1, 50)},
            "unk_token": "[U]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9},
            pre_tokenizer=None, decoder=None, added_tokens=[]), "a" * 30_000,
    ),
    "suffix": (
        definition(model=definition()["model"] | {"end_of_word_suffix": "x" * 1_000_000}), "a b c d " * 5000,
    ),
    "spaces": (
        definition(added_tokens=[{"id": 258, "content": " ", "single_word": False, "lstrip": True, "rstrip": True,
            "normalized": False, "special": False}]), " " * 40_000,
    ),
    "around": (
        definition(post_processor={"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]
            * 100_000, "pair": [], "special_tokens": {}}), "hello" * 1000,
    ),
    "around around": (
        definition(post_processor={"type": "Sequence", "processors": [{"type": "TemplateProcessing", "single":
            [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [], "special_tokens": {}}] * 40}), "hello",
    ),
    "pieces": (
        definition(model={"type": "Unigram", "unk_id": 0, "vocab": [["a" * n, -1.0] for n in range(1, 1200)],
            "byte_fallback": False}, pre_tokenizer=None, decoder=None, added_tokens=[]), "a" * 100_000,
    ),
    "no length": (definition(pre_tokenizer={"type": "FixedLength", "length": 0}), "hello"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_costly_tokenizer_is_stopped_and_the_process_goes_on(name: str) -> None:
    made, text = HOSTILE[name]
    assert costly(made)
    begin = time.monotonic()
    try:
        assert runtime(made).encode(text)
    except TokenizerError as error:
        assert len(str(error)) < 1500
        assert "the tokenizer of the file failed" in str(error)
    assert time.monotonic() - begin < 40  # about a second of CPU time each; a busy machine
    assert runtime(definition()).encode("a") == [ord("a")]


def test_the_error_names_the_expression() -> None:
    with pytest.raises(TokenizerError, match=r"retry-limit.*; it runs apart.*\(a\+\)\+b"):  # the library's own limit
        runtime(definition(pre_tokenizer=split("(a+)+b"))).encode("a" * 60)
    with pytest.raises(TokenizerError, match=r"takes more than 1\.8 s; it runs apart.*a\*\?\[bc\]"):
        runtime(definition(pre_tokenizer=split("a*?[bc]"))).encode("a" * 200_000 + "\nb")


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (replace("a", "a" * 1_000_000), "a" * 10_000),
        ({"type": "Sequence", "decoders": [replace("a", "b" * 16)] * 4}, "a" * 10_000),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, *[replace("a", "aa")] * 40]}, "a"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"},
          {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}]}, "a" * 60),
        ({"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}, "aaa"),
        ({"type": "BPEDecoder", "suffix": ""}, "hello"),
        ({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}, "hello"),
    ],
)  # fmt: skip
def test_a_costly_decoder_is_stopped(decoder: Json, text: str) -> None:
    made = definition(decoder=decoder)
    assert costly(made)
    tokenizer = runtime(made)
    tokens = tokenizer.encode(text)
    begin = time.monotonic()
    try:
        tokenizer.decode(tokens)
    except TokenizerError as error:
        assert len(str(error)) < 1500
    assert time.monotonic() - begin < 20


def test_long_tokens_that_a_decoder_lengthens_run_apart() -> None:
    vocab = {"a": 0, "b": 1, "a" * 4096: 2}
    plain = {"pre_tokenizer": None, "added_tokens": [], "decoder": replace("a", "b" * 16)}
    assert "long tokens" in costly(definition(model=bpe(vocab), **plain))
    assert costly(definition(model=bpe({"a": 0, "b": 1}), **plain)) == ""
    tokenizer = runtime(definition(model=bpe(vocab), **plain))
    with pytest.raises(TokenizerError, match="it runs apart"):
        tokenizer.decode([2] * 40_000)
    assert tokenizer.decode([0]) == "b" * 16


def test_an_expression_that_is_not_known_gives_the_tokens_of_the_library() -> None:
    made = definition(pre_tokenizer=split(r"\w+|[^\w\s]+|\s+"))
    tokenizer = runtime(made)
    theirs = HfTokenizer.from_str(json.dumps(made))
    text = "hello, naïve <|end|> 東京 🙂\r\n\n  x"
    assert costly(made)
    assert tokenizer.encode(text, parse_special=True) == theirs.encode(text).ids
    theirs.encode_special_tokens = True
    assert tokenizer.encode(text) == theirs.encode(text).ids
    assert tokenizer.encode(text * 1000) == theirs.encode(text * 1000).ids, "a long one, without the library's threads"
    assert tokenizer.encode(tokenizer.shield(text), shielded=True) == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(list(np.array(tokenizer.encode(text)))) == text
    out = tokenizer.detokenizer()
    assert "".join(map(out.push, tokenizer.encode(text))) + out.flush() == text
    assert tokenizer.token_text(theirs.token_to_id("<|end|>")) == "<|end|>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not as the tokenizers library writes it"),
        (b"\xff", "not as the tokenizers library writes it"),
        (b"[]", "is an array, expected a JSON object"),
        (b"{}", "model"),
        (b'{"model": {"type": "BPE"}}', "model"),
        (b'{"model": {"vocab": {}}}', "failed"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs 2 times"),
        (b"[" * 100_000, "not as the tokenizers library writes it"),
        (b'{"added_tokens": 5}', "added_tokens"),
        (b'{"added_tokens": [{"content": "x"}]}', "added_tokens"),
        (json.dumps(definition(normalizer=nested(300))).encode(), "failed"),
        (json.dumps(definition(model=bpe(5))).encode(), "model"),
        (json.dumps(definition(model=bpe({"x" * 1_000_000: 0}))).encode(), "1000000 characters"),
        (json.dumps(definition(model=bpe({"a": 1 << 31}))).encode(), "token id 2147483648"),
    ],
)  # fmt: skip
def test_what_is_no_definition_is_refused_in_one_line(content: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(content, 1 << 20)


@pytest.mark.parametrize("merge", [["a", "é"], "a é", ["a", ""], ["a", "bx"], ["a", "x"]])
def test_a_merge_whose_cut_ends_the_process_of_the_library(merge: Any) -> None:
    vocab = {"a": 0, "é": 1, "xb": 2, "ab": 3}
    made = bpe(vocab) | {"merges": [["a", "xb"], merge], "continuing_subword_prefix": "xb" if merge[-1] == "x" else "x"}
    content = json.dumps(definition(model=made)).encode()
    for read in (
        lambda: Tokenizer(content, 1 << 20),
        lambda: vocabulary.load(content, "tokenizer.json"),
        lambda: trained.parse(content.decode(), "tokenizer.json"),
    ):
        with pytest.raises(ValueError, match=r"has the merge .*, expected a right side that begins with"):
            read()
    honest = bpe(vocab) | {"merges": [["a", "xb"]], "continuing_subword_prefix": "x"}
    assert vocabulary.load(json.dumps(definition(model=honest)).encode(), "it").encode("ab").ids == [3]


def test_tokens_around_a_text_that_the_model_does_not_have() -> None:
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"x": {"id": "x", "ids": [1 << 30], "tokens": ["x"]}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    step = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    with pytest.raises(TokenizerError, match="token id 1073741824"):
        runtime(definition(post_processor=step))


def added(content: str, special: bool = True) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": 0, "content": content, "special": special, **flags}


# ---- prompts that cannot fit ----


def test_a_long_text_leaves_time_to_other_threads() -> None:
    """A server that reads a prompt of 1 MB sent no token to anybody for 3 s."""
    library, text = Library(byte_tokenizer().to_str(), False), "def read(self, size): " * 10_000
    counts: list[int] = []
    reading = threading.Thread(target=lambda: counts.append(len(library.encode(text, True))))
    reading.start()
    turns = 0
    while reading.is_alive():
        turns += 1
        time.sleep(0.001)
    assert counts == [len(text)] and turns > 10, "1 to 3 while the library holds on to the interpreter"


def test_a_text_that_cannot_fit_is_refused_before_it_is_cut(tmp_path: Path) -> None:
    with Model.load(small_model(tmp_path)) as model:
        calls: list[Callable[[str], object]] = [model.generate, model.stream, model.score, model.embed]
        for call in calls:
            begin = time.process_time()
            with pytest.raises(ContextLengthError, match=r"^at least 769231 tokens exceed"):
                call("a" * 10_000_000)
            assert time.process_time() - begin < 3  # milliseconds; cutting it took ten seconds
            with pytest.raises(ContextLengthError, match=r"^1000 tokens exceed"):
                call("a" * 1000)


def test_the_fewest_tokens_are_no_more_than_there_are(tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "m", foreign.sentencepiece_model(), eos_token="</s>")
    spm = tokenizer_of(Folder(folder), 1000)[0] or b""
    made = [foreign.byte_level(kind).to_str().encode() for kind in foreign.BYTE_LEVEL]
    proven = 0
    for each in [*made, spm, byte_tokenizer().to_str().encode()]:
        tokenizer = Tokenizer(each, 1 << 20)
        for text in (
            "",
            "x",
            " " * 5000,
            "hello world " * 100,
            "\u1100\u1161\u11a8" * 1000,
            "α\u0313\u0300\u0345" * 1000,
            "東" * 999,
        ):
            fewest = tokenizer.fewest_tokens(text)
            proven += fewest > 1
            assert fewest <= len(tokenizer.encode(text, add_bos=False))
    assert proven > 20
    words = definition(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, pre_tokenizer=None)
    assert runtime(words).fewest_tokens("a" * 10_000) == 0, "one word"
    cut = split("a") | {}
    cut["pretokenizers"][0]["behavior"] = "Removed"
    assert runtime(definition(pre_tokenizer=cut)).fewest_tokens("a" * 10_000) == 0, "left out"
    for side in ("lstrip", "rstrip"):
        mask = added("<mask>") | {side: True}
        assert runtime(definition(added_tokens=[mask])).fewest_tokens("a" * 10_000) == 0, "spaces beside it"
