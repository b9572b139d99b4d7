"""Answers constrained to a JSON schema, a regular expression or a grammar: each one fits, however it is computed."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from bitnet_export import random_model
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.tokenizer import tokenizer_of
from bitnet_runtime import GrammarError, InvalidParameterError, MissingDependencyError, Model, TokenizerError
from bitnet_runtime.defaults import resolve
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.structured import guide
from bitnet_runtime.structured.formats import response_format
from bitnet_runtime.tokenizer.text import Tokenizer as Ours
from command import bitnet
from foreign_tokenizers import byte_level, save, sentencepiece_model
from runtime_models import SMALL, TEMPLATE, byte_tokenizer, replace_decoder, scripted_model

PIECES = (b'{"', b'"name', b'": "', b'", "', b'": ', b"ab", b"12", b"}}", b" the", b'"}')
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'start: item ("," item){0,3} "."\nitem: /[a-c]{1,3}/\n'
END = 256 + len(PIECES)  # <|end|>


class Emptied(OrderedDict[Any, Any]):
    """What another thread empties at the moment in which this one wants to drop something."""

    def popitem(self, last: bool = True) -> tuple[Any, Any]:
        self.clear()
        return super().popitem(last)


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    return len(value["tags"]) <= 2 and set(value["tags"]) <= {"red", "green"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.bitnet"
    random_model(SMALL, path, 3, tokenizer=byte_tokenizer(PIECES).to_str().encode())
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    """It has no end token: an answer ends where nothing can follow."""
    with Model.load(path, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def ending(path: Path) -> Any:
    """It has an end token."""
    with Model.load(path, threads=1) as model:
        model._end_tokens = frozenset({END})
        yield model


# ---- answers ----


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 2}])
def test_every_answer_fits_the_schema(model: Model, options: dict[str, Any]) -> None:
    for seed in range(8):
        answer = model.generate("Who? ", json_schema=PERSON, seed=seed, max_tokens=200, **options)
        assert is_person(answer.text), answer.text
        assert answer.finish_reason == "stop"


def test_a_regular_expression_and_a_grammar(model: Model) -> None:
    for seed in range(8):
        assert re.fullmatch("(yes|no)[0-9]{2,3}!", model.generate("x", regex="(yes|no)[0-9]{2,3}!", seed=seed).text)
        assert re.fullmatch(r"[a-c]{1,3}(,[a-c]{1,3}){0,3}\.", model.generate("x", grammar=LIST, seed=seed).text)


def test_other_ways_to_compute_give_the_same(model: Model) -> None:
    prompts = ["Who? ", 'He is {"name": "ab", "age": 12, "tags": []}. Who? ', "abc"]
    options = [resolve({"json_schema": PERSON, "seed": seed, "max_tokens": 60}) for seed in range(6)]
    for each in options:
        alone = [model.generate(prompt, options=each).tokens for prompt in prompts]
        assert [answer.tokens for answer in model.generate(prompts, options=each)] == alone
        for draft in (1, 5, 64):
            with_draft = resolve({"draft": draft}, each)
            assert [model.generate(prompt, options=with_draft).tokens for prompt in prompts] == alone
        pieces = list(model.stream(prompts[0], options=each))
        assert [piece.token for piece in pieces if piece.token is not None] == alone[0]


def test_every_tier_gives_the_same(path: Path, model: Model) -> None:
    from bitnet_runtime import available_isas

    expected = [model.generate("Who? ", json_schema=PERSON, seed=seed).tokens for seed in range(4)]
    for isa in available_isas():
        with Model.load(path, isa=isa, threads=2) as other:
            assert [other.generate("Who? ", json_schema=PERSON, seed=seed).tokens for seed in range(4)] == expected


def test_tokens_without_a_choice_are_not_sampled(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], Session.draw
    monkeypatch.setattr(Session, "draw", lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1])
    answer = model.generate("x", regex='\\{"name": "(ab|cd)", "the": 12\\}')
    assert answer.text in ('{"name": "ab", "the": 12}', '{"name": "cd", "the": 12}')
    assert len(drawn) <= 3 < len(answer.tokens)  # of ab or cd
    whole = model.tokenize(answer.text)
    assert answer.tokens[:10] == whole[:10]  # as the tokenizer writes them, and not as PIECES might


def test_an_end_token_comes_when_the_grammar_allows_it(ending: Model) -> None:
    lengths = set()
    for seed in range(30):
        answer = ending.generate("x", regex="(ab)+", seed=seed, max_tokens=40, temperature=8)
        assert re.fullmatch("(ab)*a?", answer.text)
        assert answer.finish_reason == ("stop" if answer.text.endswith("b") and len(answer.tokens) < 40 else "length")
        assert END not in answer.tokens
        lengths.add(len(answer.text))
    assert len(lengths) > 1
    assert is_person(ending.generate("x", json_schema=PERSON, max_tokens=200).text)


def test_the_length_of_an_answer(model: Model) -> None:
    for most in range(8):
        answer = model.generate("x", json_schema=PERSON, max_tokens=most, seed=1)
        assert (len(answer.tokens), answer.finish_reason) == (most, "length")
    exact = model.generate("x", regex="abc12")
    assert exact.text == "abc12"
    again = model.generate("x", regex="abc12", max_tokens=len(exact.tokens))
    assert (again.text, again.finish_reason) == ("abc12", "stop")
    assert model.generate("x", regex="abc12", stop="c1").text == "ab"


def test_a_session_goes_on_behind_it(model: Model) -> None:
    with model.session() as session:
        first = model.generate("x", regex="(ab|ba)[0-9]{3}", seed=4, session=session)
        longer = "x" + first.text + "?"
        assert model.generate(longer, seed=4, session=session).tokens == model.generate(longer, seed=4).tokens


def test_chat(tmp_path: Path) -> None:
    path = tmp_path / "chat.bitnet"
    scripted_model(path, [b"Four", b"."], template=TEMPLATE)
    with Model.load(path, threads=1) as model:
        answer = model.chat([{"role": "user", "content": "2 + 2?"}], json_schema={"enum": ["four", "five"]})
    assert answer.text in ('"four"', '"five"')


# ---- how it is asked for ----


def test_a_schema_comes_in_several_forms(model: Model) -> None:
    expected = model.generate("x", json_schema=PERSON, seed=1).tokens
    assert model.generate("x", json_schema=json.dumps(PERSON), seed=1).tokens == expected
    assert model.generate("x", json_schema=json.dumps(PERSON).encode(), seed=1).tokens == expected
    asked = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    assert model.generate("x", **response_format(asked), seed=1).tokens == expected


def test_a_class_of_pydantic(model: Model) -> None:
    pydantic = pytest.importorskip("pydantic")
    point = pydantic.create_model("Point", x=(int, pydantic.Field(ge=0, le=9)), red=(bool, ...))
    kind = pydantic.create_model("Line", ends=(tuple[point, point], ...))
    for seed in range(4):
        value = kind.model_validate_json(model.generate("x", json_schema=kind, seed=seed).text)
        assert len(value.ends) == 2


def test_what_only_pydantic_can_check_is_left_to_it(model: Model) -> None:
    pydantic = pytest.importorskip("pydantic")
    kind = pydantic.create_model(
        "Kind",
        place=(Path, ...),
        raw=(bytes, ...),
        some=(set[bool], pydantic.Field(max_length=2)),
        of=(pydantic.UUID4, ...),
    )
    found = kind.model_validate_json(model.generate("x", json_schema=kind, max_tokens=None, seed=2, temperature=1).text)
    assert isinstance(found.place, Path) and isinstance(found.some, set)


def test_response_formats() -> None:
    assert response_format(None) == response_format({"type": "text"}) == {}
    assert response_format({"type": "json_object"}) == {"json_schema": '{"type": "object"}'}
    assert response_format({"type": "json_object", "schema": PERSON}) == {"json_schema": json.dumps(PERSON)}
    with pytest.raises(GrammarError, match="expected a JSON schema"):
        response_format({"type": "json_object", "schema": 5})
    of = [None, PERSON, {"name": "x", "schema": None}]
    for wrong in ("json", {"type": "xml"}, 3, *({"type": "json_schema", "json_schema": each} for each in of)):
        with pytest.raises(GrammarError, match=r"^response_format is .*, expected") as caught:
            response_format(wrong)
        assert caught.value.param == "response_format"


def test_the_command_line(path: Path, tmp_path: Path) -> None:
    (tmp_path / "person.json").write_text(json.dumps(PERSON), "utf-8")
    done = bitnet("generate", path, "-p", "x", "--json-schema", tmp_path / "person.json", "--quiet", "-n", "200")
    assert done.returncode == 0, done.stderr
    assert is_person(done.stdout.removesuffix("\n"))
    done = bitnet("generate", path, "-p", "x", "--json-schema", tmp_path / "person.json", "-n", "3")
    assert "[stopped after 3 tokens; -n N allows more]" in done.stderr  # a part of a form is not that form
    (tmp_path / "person.json").write_text("[1]", "utf-8")
    done = bitnet("generate", path, "-p", "x", "--json-schema", tmp_path / "person.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a JSON schema" in done.stderr
    done = bitnet("generate", path, "-p", "x", "--grammar", tmp_path / "none")
    assert done.returncode == 2 and "No such file or directory; expected the name of a file" in done.stderr


# ---- what is refused ----


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json_schema": "{"}, "expected a JSON schema"),
        ({"json_schema": 3}, "expected a JSON schema"),
        ({"json_schema": {"type": {1, 2}}}, "expected a JSON schema"),
        ({"json_schema": {"a": float("nan")}}, "expected a JSON schema"),
        ({"json_schema": {"enum": {7}}}, r"\(a set cannot be written as JSON\)"),
        ({"json_schema": {"type": "objekt"}}, "objekt"),
        ({"json_schema": {"type": "string", "format": "no such"}}, "no such"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "refused"),
        ({"json_schema": {"$ref": "#"}}, "no text matches it"),
        ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "a oneOf may overlap; write anyOf"),
        ({"json_schema": {"$ref": "https://example.org/x"}}, "refused"),
        ({"regex": ""}, "expected a regular expression"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a\\"}, "ends in a backslash that escapes nothing"),
        ({"regex": "a\ud800"}, "not valid Unicode"),
        ({"grammar": "nonsense"}, "Expected"),
        ({"grammar": 'start: other'}, "other"),
        ({"grammar": 'root ::= "a" | "b"'}, "looks like llama.cpp's GBNF; `python -m llguidance.gbnf_to_lark FILE`"),
        ({"regex": "a", "json_schema": {}}, "expected one of them"),
    ],
)  # fmt: skip
def test_what_is_wrong(model: Model, asked: dict[str, Any], expected: str) -> None:
    with pytest.raises(GrammarError, match=expected) as caught:
        model.stream("x", **asked)
    assert caught.value.param in asked
    assert isinstance(caught.value, InvalidParameterError)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


MANY = " | ".join(f'"{i}x"' for i in range(2000))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"grammar": f"start: {MANY}"}, "2,001 alternatives are open at one place, expected at most 500 .*CAPITALS"),
        (
            {"json_schema": {"type": "object", "properties": {f"k{i}": {} for i in range(1000)}}},
            "[34],[0-9]{3} alternatives are open at one place, expected at most 2,000 .* require properties",
        ),
    ],
    ids=["grammar", "json_schema"],
)
def test_too_many_alternatives(model: Model, asked: dict[str, Any], expected: str) -> None:
    with pytest.raises(GrammarError, match=expected):
        model.generate("x", **asked, max_tokens=4)


def test_a_terminal_holds_many_alternatives(model: Model) -> None:
    assert model.generate("x", grammar=f"start: ONE\nONE: {MANY}", max_tokens=9).text[-1] == "x"


def deep(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels


def many(n: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(n)]}


BOMBS: dict[str, dict[str, Any]] = {
    "deep": {"json_schema": deep(20_000)},
    "long": {"json_schema": {"enum": ["x" * (1 << 20)]}},
    "expression": {"regex": "|".join(f"{i:x}[a-f]*{i * i:x}" for i in range(40_000))},
    "branches": {"json_schema": many(8_000)},
    "properties": {"json_schema": {"type": "object", "properties": {f"k{i}": {} for i in range(30_000)}}},
    "many readings": {"grammar": 'start: a\na: a a a a | "x" | "x" a | a "x"', "max_tokens": 200},
    "groups": {"regex": "(" * 60_000 + ")" * 60_000},
    "nested groups in a grammar": {"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000},
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_time(model: Model, name: str) -> None:
    begin = time.process_time()
    with pytest.raises(GrammarError):
        model.generate("x", **{"max_tokens": 4} | BOMBS[name])
    assert time.process_time() - begin < 5
    assert model.generate("x", regex="ab").text == "ab"


@pytest.mark.parametrize(
    "regex", ["a{0,1000000000}b", "((a{1,1000}){1,1000}){1,1000}", "(a|a)*" * 50 + "b", "(x+x+)+y"]
)
def test_costly_expressions_cost_little(model: Model, regex: str) -> None:
    """An automaton has no catastrophes."""
    begin = time.process_time()
    assert model.generate("x", regex=regex, max_tokens=20, seed=0).tokens
    assert time.process_time() - begin < 2


def test_without_the_library(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "bitnet_runtime.structured.compiling", raising=False)
    with Model.load(path, threads=1) as model:
        with pytest.raises(MissingDependencyError, match=r"-m pip install 'llguidance>=1\.9'"):
            model.generate("x", regex="ab")
        assert model.generate("x", max_tokens=3).tokens


# ---- tokens as bytes ----


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_bytes_of_tokens_are_those_of_texts(kind: str, tmp_path: Path) -> None:
    if kind == "byte-level":
        definition = byte_level("llama-bpe").to_str()
    else:
        folder = save(tmp_path, sentencepiece_model(), eos_token="</s>")
        definition = (tokenizer_of(Folder(folder), 1000)[0] or b"").decode()
    size = Tokenizer.from_str(definition).get_vocab_size()
    tokenizer = Ours(definition.encode(), size)
    table = tokenizer.all_bytes
    assert table is not None and len(table) == size
    for text in ('Hello, world! {"name": 12}', "naïve 東京 🙂", "  two  spaces\n\nlines\t"):
        ids = tokenizer.encode(text, add_bos=False)
        assert b"".join(table[token] for token in ids).decode() in (text, " " + text)


def test_tokens_that_are_no_bytes(tmp_path: Path) -> None:
    words = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    random_model(SMALL, tmp_path / "m", tokenizer=words.to_str().encode())
    with Model.load(tmp_path / "m", threads=1) as model, pytest.raises(TokenizerError, match="are not bytes"):
        model.generate("a", regex="a")


def test_a_sentencepiece_model_answers(tmp_path: Path) -> None:
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]}  # fmt: skip
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {text: 257 + i for i, text in enumerate(["▁", "{", "▁the", "ab", '"', ":"])}
    bpe = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    spaced = replace_decoder(Tokenizer(bpe), decoder)
    random_model(SMALL, tmp_path / "m", tokenizer=spaced.to_str().encode())
    with Model.load(tmp_path / "m", threads=1) as model:
        assert is_person(model.generate("x", json_schema=PERSON, max_tokens=250, seed=2).text)
        assert re.fullmatch(" the( ab|é)", model.generate("x", regex=" the( ab|é)").text)


def test_the_grammars_asked_for_last_are_kept(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_one = list[str](), model._grammars._compile

    def compiling(kind: str, text: str) -> Any:
        compiled.append(text)
        return compile_one(kind, text)

    monkeypatch.setattr(model._grammars, "_compile", compiling)
    monkeypatch.setattr(guide, "KEPT", 2)
    for regex in "abacabc":
        model._grammars.guide("regex", regex)
    assert "".join(compiled) == "abcbc"


def test_threads_drop_grammars_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are too long to be kept ended in a KeyError."""
    monkeypatch.setattr(guide, "KEPT_BYTES", 3)
    with Model.load(path, threads=1) as model:
        vars(model._grammars)["_kept"] = Emptied()
        for _ in range(2):
            assert model.generate("x", regex="abcd").text == "abcd"
