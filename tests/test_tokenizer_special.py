"""Plain text never becomes a special token, whatever the tokenizer of a stranger."""

from __future__ import annotations

import json
import time

import pytest
from tokenizers import Tokenizer as HfTokenizer

from bitnet_runtime import TokenizerError
from test_tokenizer_limits import Json, added, definition, runtime


def test_special_tokens_that_would_break_shielding_are_refused() -> None:
    for content, message in (("a\ufdd0", r"U\+FDD0"), ("x" * 200, "200 characters")):
        with pytest.raises(TokenizerError, match=message):
            runtime(definition(added_tokens=[added(content), added("~")]))


def test_opening_and_shielding_take_linear_time_with_any_special_tokens() -> None:
    begin = time.process_time()
    many = runtime(definition(added_tokens=[added(f"e{i}") for i in range(50_000)]))
    long = runtime(definition(added_tokens=[added("a" * n) for n in range(2, 128)]))
    many.shield("eeee e1 " * 10_000)
    long.shield("a" * 50_000)
    runs = runtime(
        definition(added_tokens=[added(a * n) for a in "abcdefghijklmnopqrstuvwxyz " for n in range(2, 128)])
    )
    llama = runtime(definition(added_tokens=[added(f"<|reserved_{i}|>") for i in range(250)]))
    for tokenizer, text in ((runs, "the quick brown fox " * 10_000), (llama, "<" * 500_000), (runs, "a" * 100_000)):
        tokenizer._settle(tokenizer.shield(text))
    assert time.process_time() - begin < 20  # 1 s; alternatives at each letter or vocabularies for each took a minute


SPECIAL = ["<s>", "</s>", "[CLS]"]
WORDS = ["<unk>", *SPECIAL, "hello", "x", "<", "/", "s", ">", "[", "]", "C", "L", "S", "</", "</s", "▁"]


def model_of(kind: str) -> Json:
    ids = {word: token for token, word in enumerate(WORDS)}
    match kind:
        case "WordLevel":
            return {"type": kind, "vocab": ids, "unk_token": "<unk>"}
        case "WordPiece":
            more = {"continuing_subword_prefix": "", "max_input_chars_per_word": 100}
            return {"type": kind, "vocab": ids, "unk_token": "<unk>", **more}
        case "Unigram":
            return {"type": kind, "unk_id": 0, "vocab": [[word, 0.0] for word in WORDS], "byte_fallback": False}
    merges = [["<", "/"], ["</", "s"], ["</s", ">"]]
    return {
        "type": "BPE", "vocab": ids, "merges": merges, "unk_token": "<unk>", "dropout": None, "fuse_unk": False,
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": False,
        "ignore_merges": kind == "BPE that ignores merges",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram", "BPE", "BPE that ignores merges"])
def test_plain_text_never_gives_a_special_token(kind: str) -> None:
    made: Json = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "model": model_of(kind),
        "added_tokens": [
            *(added(text) | {"id": i + 1} for i, text in enumerate(SPECIAL)), added("<new>") | {"id": len(WORDS)},
            added("<other>", special=False) | {"id": len(WORDS) + 1},
        ],
    }  # fmt: skip
    tokenizer, theirs = runtime(made), HfTokenizer.from_str(json.dumps(made))
    text = "hello </s> <s> [CLS] <new> <other> x"
    ids = {theirs.token_to_id(special) for special in [*SPECIAL, "<new>"]}
    assert not ids.intersection(tokenizer.encode(text))
    assert not ids.intersection(tokenizer.encode(tokenizer.shield(text), shielded=True))
    assert theirs.token_to_id("<other>") in tokenizer.encode(text)
    assert tokenizer.encode("hello x") == theirs.encode("hello x").ids
    assert tokenizer.encode(text, parse_special=True) == theirs.encode(text).ids
    half = tokenizer.encode(tokenizer.shield("</s> x") + "</s>", shielded=True)
    assert [token for token in half if token in ids] == [theirs.token_to_id("</s>")]
    assert half[-1] == theirs.token_to_id("</s>")
    tokens = list(range(theirs.get_vocab_size()))
    for skip in (True, False):
        assert tokenizer.decode(tokens, skip_special=skip) == theirs.decode(tokens, skip_special_tokens=skip)
    assert [tokenizer.token_text(token) for token in tokens] == [theirs.id_to_token(token) for token in tokens]
