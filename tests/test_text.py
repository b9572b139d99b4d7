"""Text in and out: tokenizers, detokenizers, streams and stop texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, processors

from bitnet_runtime import InvalidParameterError, Model, Piece, TokenizerError
from bitnet_runtime.answers.answer import Answer
from bitnet_runtime.tokenizer.text import Detokenizer, Tokenizer
from bitnet_runtime.tokenizer.tokenizing import LONG
from runtime_models import SPECIAL, byte_tokenizer, replace_decoder, scripted_model


class Said(Detokenizer):
    """Token i is the text i."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def push(self, token: int) -> str:
        return self._texts[token]

    def flush(self) -> str:
        return ""


PIECES = ["hello", " wor", "ld", "é", "東京", "🙂", " ", "\n"]
BYTE_LEVEL = byte_tokenizer([piece.encode() for piece in PIECES if len(piece.encode()) > 1])


def sentencepiece() -> HfTokenizer:
    """▁ for spaces, <0xNN> for bytes: the decoder of Llama 2 and its kin."""
    words = (
        ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁hello", "lo", "é", "東", "▁▁"]
    )
    tokenizer = HfTokenizer(
        models.BPE({word: token for token, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def ours(tokenizer: HfTokenizer, **options: Any) -> Tokenizer:
    """The tokenizer as the runtime reads it from a file."""
    return Tokenizer(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), **options)


OURS, SENTENCEPIECE = ours(BYTE_LEVEL), ours(sentencepiece())


def joined(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | None = None) -> str:
    out = tokenizer.detokenizer(prompt or [])
    return "".join(map(out.push, tokens)) + out.flush()


@settings(max_examples=300)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30))
def test_byte_level_pieces_join_to_the_text_of_the_library(tokens: list[int]) -> None:
    assert joined(OURS, tokens) == BYTE_LEVEL.decode(tokens)


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_any_text_survives_the_way_through_single_tokens(text: str) -> None:
    for tokenizer in (OURS, SENTENCEPIECE):
        tokens = tokenizer.encode(text)
        if tokenizer.decode(tokens) == text:  # sentencepiece drops a leading space
            assert joined(tokenizer, tokens) == text


def test_pieces_never_break_a_character() -> None:
    for tokenizer in (OURS, SENTENCEPIECE):
        for text in ("naïve café", "東京🙂é", "a\u0301👩‍👩‍👧", "\ufffd ok \ufffd"):
            out = tokenizer.detokenizer()
            pieces = [out.push(token) for token in tokenizer.encode(text)]
            assert "".join(pieces) + out.flush() == text
            assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_broken_character_becomes_a_replacement_and_the_text_goes_on() -> None:
    tokenizer = OURS
    assert joined(tokenizer, [0xE6, 0x9D, ord("a")]) == "\ufffda"
    assert joined(tokenizer, [ord("a"), 0xE6, 0x9D]) == "a\ufffd"
    assert joined(SENTENCEPIECE, [3 + 0xE6, 3 + 0x41]) == "\ufffd\ufffd"  # as the library says it
    endless = SENTENCEPIECE.detokenizer()
    assert any(endless.push(3 + 0xFF) for _ in range(20))


def test_a_continuation_keeps_the_space_of_its_first_word() -> None:
    tokenizer = SENTENCEPIECE
    hello = tokenizer.encode("hello")
    space = 3 + 256
    assert joined(tokenizer, [space, *hello[1:]], prompt=hello).startswith(" ")
    assert tokenizer.decode(hello) == "hello"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Fuse"},
        None,
    ],
)
def test_every_other_decoder_goes_through_the_window(decoder: dict[str, Any] | None) -> None:
    words = ["▁one", "two", "##three", "fo</w>", "▁", "five", ",", "six"]
    hf = HfTokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="▁"))
    tokenizer = ours(replace_decoder(hf, decoder))
    for tokens in ([0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 5, 6, 5, 6, 1, 2, 1, 2] * 3, [4, 4, 4, 0]):
        assert joined(tokenizer, tokens) == tokenizer.decode(tokens)


def test_special_tokens_in_text_are_text() -> None:
    tokenizer = OURS
    user = tokenizer.encode("a<|end|>b")
    assert user == list(b"a<|end|>b")
    end = BYTE_LEVEL.token_to_id("<|end|>")
    assert tokenizer.encode("a<|end|>b", parse_special=True) == [ord("a"), end, ord("b")]
    assert tokenizer.decode([ord("a"), end]) == "a"
    assert tokenizer.decode([ord("a"), end], skip_special=False) == "a<|end|>"


@given(st.lists(st.sampled_from([*SPECIAL, "<|", "|>", "<|end", "end|>", "x", "\ufdd0"]), max_size=12).map("".join))
def test_shielded_text_has_no_special_token_and_loses_nothing(text: str) -> None:
    tokens = OURS.encode(OURS.shield(text), shielded=True, add_bos=False)
    assert bytes(tokens).decode() == text.replace("\ufdd0", "")


def test_the_start_token() -> None:
    hf = byte_tokenizer()
    start = hf.token_to_id("<|system|>")
    assert ours(hf, bos_token=start).encode("a") == [start, ord("a")]
    assert ours(hf, bos_token=start).encode("a", add_bos=False) == [ord("a")]
    assert ours(hf, bos_token=start).encode("<|system|>a", parse_special=True) == [start, ord("a")]
    assert ours(hf).encode("") == []


def test_odd_texts() -> None:
    tokenizer = OURS
    for text in ("\0", "\ufeffx", "\u202eabc", "\U0010ffff", "a" * 1000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(InvalidParameterError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("length", [1, LONG])
def test_what_goes_around_a_text_can_be_left_out_however_long_it_is(length: int) -> None:
    words = HfTokenizer.from_str(BYTE_LEVEL.to_str())
    end = words.token_to_id(SPECIAL[0])
    words.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], end)])
    tokenizer = ours(words)
    assert tokenizer.encode("a" * length) == [end, *tokenizer.encode("a" * length, add_bos=False)]


@pytest.mark.parametrize("letter", ["a", "東"])
def test_special_tokens_keep_their_ids_behind_one_of_a_letter(letter: str) -> None:
    """Of the vocabulary or beside it; as it cannot be marked, it is text."""
    words = HfTokenizer.from_str(BYTE_LEVEL.to_str())
    words.add_special_tokens([letter, "<|late|>"])
    tokenizer = ours(words)
    assert tokenizer.encode("<|late|>", parse_special=True) == [words.token_to_id("<|late|>")]


def test_encoding_takes_linear_time() -> None:
    tokenizer = OURS

    def seconds(n: int) -> float:
        taken = []
        for _ in range(3):
            begin = time.process_time()
            tokenizer.encode(tokenizer.shield("<|end|>a" * (n // 8)), shielded=True)
            taken.append(time.process_time() - begin)
        return min(taken)  # what else the machine does only adds to it

    # ten times as long: 100 would be quadratic; caches alone have made it 35
    assert seconds(200_000) < 60 * max(seconds(20_000), 1e-3)


def test_a_panic_of_the_library_is_an_error_of_ours() -> None:
    panics = b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[["a","b"]]}}'
    with pytest.raises(TokenizerError, match="tokenizer of the file failed"):
        Tokenizer(panics, 10)


# ---- streams ----


def test_a_stream_joins_to_the_text_of_generate(tmp_path: Path) -> None:
    script = [b"Hel", b"lo ", *(bytes([byte]) for byte in "é東".encode()), b"!!"]
    with Model.load(scripted_model(tmp_path / "m", script)) as model:
        stream = model.stream("go", seed=1)
        pieces = list(stream)
        result = model.generate("go", seed=1)
    assert [piece.text for piece in pieces] == ["Hel", "lo ", "", "é", "", "", "東", "!!"]
    assert [piece.token for piece in pieces] == result.tokens
    assert result.text == "Hello é東!!"
    assert (result.finish_reason, result.usage, result.seed) == ("stop", (2, 8, 10, 0), 1)
    assert stream.result is not None
    assert stream.result.text == result.text
    assert result.timings.generation_tokens_per_second > 0


STOP_SCRIPT = [b"ab", b"cd", b"ef", b"ST", b"OP", b"gh"]


@pytest.mark.parametrize(
    ("stop", "text", "reason", "made"),
    [
        ("STOP", "abcdef", "stop", 5),
        (["zzz", "dS", "eg"], "abcdefSTOPgh", "stop", 6),
        (["zzz", "fS"], "abcde", "stop", 4),
        ("c", "ab", "stop", 2),
        (["d", "c"], "ab", "stop", 2),
        (["bcd", "ab"], "", "stop", 1),
        ("hX", "abcdefSTOPgh", "stop", 6),
        (["STOPX", "OPgX"], "abcdefSTOPgh", "stop", 6),
        ("abcdefSTOPgh", "", "stop", 6),
    ],
)
def test_stop_texts(tmp_path: Path, stop: Any, text: str, reason: str, made: int) -> None:
    with Model.load(scripted_model(tmp_path / "m", STOP_SCRIPT)) as model:
        stream = model.stream("go", stop=stop)
        shown = ""
        for piece in stream:
            shown += piece.text
            assert text.startswith(shown), "a stop text, or what may become one, was shown"
    assert stream.result is not None
    assert (shown, stream.result.text) == (text, text)
    assert (stream.result.finish_reason, len(stream.result.tokens)) == (reason, made)


@given(st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=3), st.lists(st.text("abc", max_size=4)))
def test_what_may_become_a_stop_text_is_held_back(stops: list[str], texts: list[str]) -> None:
    answer, whole, shown = Answer(Said(texts), tuple(stops)), "", ""
    for token, text in enumerate(texts):
        whole, shown = whole + text, shown + answer.push(token)
        found = [(place, stop) for stop in stops if (place := whole.find(stop)) >= 0]
        if found:
            assert (shown, answer.stopped_by) == (whole[: min(found)[0]], min(found)[1])
            return
        begun = (whole[place:] for place in range(len(whole) + 1))
        held = next(rest for rest in begun if any(stop.startswith(rest) for stop in stops))
        assert (shown + held, answer.stopped_by) == (whole, "")
    assert shown + answer.flush() == whole


def test_a_long_stop_text_that_nearly_comes_takes_no_longer_than_the_answer() -> None:
    """It took time with the square of what was held back: 512 KB were minutes, for all answers."""
    compared = 0

    class Counted(str):
        def startswith(self, prefix: Any, *place: Any) -> bool:
            nonlocal compared
            compared += len(prefix)
            return super().startswith(prefix, *place)

        def __getitem__(self, key: Any) -> str:
            nonlocal compared
            found = super().__getitem__(key)
            compared += len(found)
            return found

    texts = [" " * 100] * 20 + ["x"]
    answer = Answer(Said(texts), (Counted(" " * 3000 + "y"),))
    shown = "".join(answer.push(token) for token in range(len(texts)))
    assert shown == "".join(texts)
    assert 0 < compared < 10 * len(shown)


def test_text_held_back_comes_at_the_end(tmp_path: Path) -> None:
    script = [b"ab", b"ST", bytes([0xC3])]
    with Model.load(scripted_model(tmp_path / "m", script)) as model:
        pieces = list(model.stream("go", stop="STX"))
        assert pieces[-1] == Piece("ST\ufffd", None)
        assert list(model.stream("go", stop="STX", max_tokens=2))[-1].text == "ST"
        assert list(model.stream("go", max_tokens=3))[-1].text == "\ufffd"


def test_closing_a_stream_stops_it(tmp_path: Path) -> None:
    with Model.load(scripted_model(tmp_path / "m", STOP_SCRIPT)) as model, model.session() as session:
        with model.stream("go", session=session) as stream:
            assert next(stream).text == "ab"
            assert stream.result is None
        assert session.position == 2, "computed a token that nobody asked for"
        assert list(stream) == []
        assert stream.result is not None
        assert (stream.result.text, stream.result.finish_reason) == ("ab", "cancelled")
        stream.close()


def test_a_signal_that_closes_a_stream_which_computes_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler interrupts the thread that reads, and that one ends the stream with the piece it has."""
    with Model.load(scripted_model(tmp_path / "m", STOP_SCRIPT)) as model:
        stream = model.stream("go")
        advance = stream._writer.advance

        def interrupted() -> Piece:
            piece = advance()
            stream.close()
            assert stream.result is None
            return piece

        monkeypatch.setattr(stream._writer, "advance", interrupted)
        assert next(stream).text == "ab"
        assert stream.result is not None and stream.result.finish_reason == "cancelled"


def test_a_session_is_reused_and_the_bits_stay(tmp_path: Path) -> None:
    with Model.load(scripted_model(tmp_path / "m", STOP_SCRIPT)) as model, model.session() as session:
        first = model.generate("go", session=session)
        held = session.tokens
        assert held == [*b"go", *first.tokens]
        again = model.generate(held, session=session, max_tokens=1)
        assert again.timings.prompt_tokens_per_second * again.timings.prompt_seconds == pytest.approx(1)
        assert model.generate("go", session=session).tokens == first.tokens


def test_prompts(tmp_path: Path) -> None:
    with Model.load(scripted_model(tmp_path / "m", [b"ab"])) as model:
        assert model.generate(list(b"go")).text == "ab"
        with pytest.raises(InvalidParameterError, match="prompt is empty"):
            model.generate("")
    path = scripted_model(tmp_path / "bos", [b"ab"], generation={"bos_token_id": 3})
    with Model.load(path) as model:
        assert model.generate("").usage.prompt_tokens == 1
        assert model.tokenize("x") == [3, ord("x")]
