"""Answers in a format behind thoughts: the thoughts are free, what follows them is the format and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet_runtime import GrammarError, Model
from bitnet_runtime.answers.result import Result
from bitnet_runtime.chat.thoughts import GAP, Begun
from bitnet_runtime.defaults import resolve
from bitnet_runtime.facts import guide_of
from bitnet_runtime.model_chat import behind_thoughts
from bitnet_runtime.structured.formats import KINDS
from image_models import packed
from runtime_models import SMALL, TEMPLATE, byte_tokenizer, scripted_model
from test_structured import LIST, PERSON, is_person
from test_thoughts import OPENED, THINKS, split, thinking_models
from tool_models import ASK, TOOLS

TAGS = ("<think>", "</think>")
FORMATS: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": PERSON}, is_person),
    ({"regex": "[ \n]{1,2}(yes|no)/[0-9]"}, re.compile("[ \n]{1,2}(yes|no)/[0-9]").fullmatch),
    ({"regex": "[<>/a-z]{1,20}"}, re.compile("[<>/a-z]{1,20}").fullmatch),  # which admits a tag
    ({"grammar": LIST}, re.compile(r"[a-c]{1,3}(,[a-c]{1,3}){0,3}\.").fullmatch),
    ({"grammar": 'start: "{" A "}" // }\nA: /[a-c{]/\n%ignore /[ \n]/'}, re.compile(r"\{[ \n]*[a-c{][ \n]*\}").match),
]


def inclined_model(path: Path, template: str, special: bool) -> tuple[Path, dict[int, float]]:
    """A random model, and what inclines it to write tags. special: they are such tokens."""
    words = byte_tokenizer([tag.encode() for tag in TAGS] + [b">\n\n", b'>\n\n{"', b"><"])
    if special:
        words.add_special_tokens(list(TAGS))
    config = SMALL.replace(vocab_size=words.get_vocab_size(), max_context=1024)
    ends = {"eos_token_ids": [words.token_to_id("<|end|>")]}
    packed(path, config, template=template, generation=ends, words=words)
    return path, {256: 7.0, 257: 6.0, ord("<"): 2.0}


@pytest.fixture(scope="module", params=[(THINKS, False), (THINKS, True), (OPENED, False), (OPENED, True)])
def inclined(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, dict[str, Any], bool]]:
    template, special = request.param
    path, bias = inclined_model(tmp_path_factory.mktemp("models") / "m.bitnet", template, special)
    with Model.load(path, threads=1) as model:
        yield model, {"logit_bias": bias, "max_tokens": 400, "top_k": 0, "top_p": 1, "min_p": 0}, template == OPENED


def parted(model: Model, result: Result, opened: bool) -> tuple[str, str]:
    """Thoughts and text by the words of all tokens."""
    whole = model._tokenizer.decode(result.tokens, skip_special=False)
    if not opened and not whole.startswith(TAGS[0]):
        return "", whole
    thought, _, text = whole.removeprefix("" if opened else TAGS[0]).partition(TAGS[1] + GAP)
    return thought.strip(), text


@pytest.mark.parametrize("held", range(len(FORMATS)))
def test_every_answer_fits_whatever_is_thought(inclined: tuple[Model, dict[str, Any], bool], held: int) -> None:
    model, options, opened = inclined
    asked, fits = FORMATS[held]
    thought = 0
    for seed in range(16):
        result = model.chat(ASK, seed=seed, **asked, **options)
        if result.finish_reason == "length" and not result.text:
            continue  # a thought without an end
        assert result.finish_reason == "stop" and fits(result.text), result.text
        if not opened or not result.text.startswith(TAGS[0]):
            assert parted(model, result, opened) == (result.reasoning.strip(), result.text)
        thought += bool(result.usage.reasoning_tokens)
    assert thought


def test_it_is_the_same_however_it_is_computed(inclined: tuple[Model, dict[str, Any], bool]) -> None:
    model, options, _ = inclined
    for seed in range(4):
        alone = model.chat(ASK, seed=seed, json_schema=PERSON, receipt=True, **options)
        for draft in (0, 1, 5, 64):
            assert model.chat(ASK, seed=seed, json_schema=PERSON, draft=draft, **options).tokens == alone.tokens
        pieces = list(model.stream_chat(ASK, seed=seed, json_schema=PERSON, **options))
        assert "".join(piece.reasoning for piece in pieces) == alone.reasoning
        assert "".join(piece.text for piece in pieces) == alone.text
        said = [bool(piece.text) for piece in pieces if piece.text or piece.reasoning]
        assert said == sorted(said)  # thoughts first

        receipt = alone.receipt
        assert receipt is not None and model.verify_receipt(receipt.to_json()).valid
        told = json.loads(receipt.to_json())
        told["sampling"] |= {"grammar": None, "json_schema": json.dumps(PERSON)}
        if alone.reasoning:
            assert not model.verify_receipt(told).valid


@pytest.mark.parametrize("special", [False, True])
def test_thoughts_are_those_without_a_format(tmp_path: Path, special: bool) -> None:
    path, bias = inclined_model(tmp_path / "m.bitnet", OPENED, special)
    with Model.load(path) as model:
        never = {*range(128, 256), 256, *model._tokenizer.special_ids()} - {257}  # halves of characters, and ends
        bias |= dict.fromkeys(never, float("-inf"))
        compared = 0
        for seed in range(16):
            free, held = (
                model.chat(ASK, seed=seed, logit_bias=bias, max_tokens=300, **each) for each in ({}, {"regex": "a|b"})
            )
            n = held.usage.reasoning_tokens
            assert held.tokens[:n] == free.tokens[:n]
            compared += n > 3
        assert compared > 1


def test_the_end_of_an_answer_within_thoughts(inclined: tuple[Model, dict[str, Any], bool]) -> None:
    model, options, opened = inclined
    bias = dict.fromkeys([257, ord("<"), ord(">")], float("-inf")) | ({} if opened else {256: 60.0})
    for most in (0, 1, 5, 40):
        result = model.chat(ASK, json_schema=PERSON, **options | {"logit_bias": bias, "max_tokens": most})
        assert (result.text, result.finish_reason, len(result.tokens)) == ("", "length", most)
        assert result.usage.reasoning_tokens == (most if result.reasoning else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_thoughts_the_format_holds_from_the_first_token(tmp_path: Path, kind: str) -> None:
    asked = dict(next(each for each, _ in FORMATS if kind in each), seed=1)
    path, bias = inclined_model(tmp_path / "m.bitnet", THINKS, False)
    with Model.load(path) as model:
        off: Any = {"enable_thinking": False}
        found = model.chat(ASK, variables=off, logit_bias=bias, **asked)
        plain = model.generate(model.apply_template(ASK, variables=off), logit_bias=bias, **asked)
        assert (found.tokens, found.text, found.reasoning) == (plain.tokens, plain.text, "")
    with Model.load(path, chat_template=TEMPLATE) as model:  # it knows no thoughts
        plain = model.generate(model.apply_template(ASK), logit_bias=bias, **asked)
        assert model.chat(ASK, logit_bias=bias, **asked).tokens == plain.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_behind_thoughts_names_the_format_that_was_given(
    inclined: tuple[Model, dict[str, Any], bool], kind: str
) -> None:
    model, asked = inclined[0], next(each for each, _ in FORMATS if kind in each)
    _, held = behind_thoughts(model, Begun(True, "", False), resolve(asked))
    guide = guide_of(model, held)
    assert guide is not None and held.grammar is not None
    guide.take(model.tokenize("so</think>\n\n", parse_special=True))
    with pytest.raises(GrammarError, match=f"^{kind} cannot be followed further: ") as caught:
        guide.take(model.tokenize("%"))
    assert caught.value.param == kind


def test_calls_that_have_to_come_follow_thoughts(inclined: tuple[Model, dict[str, Any], bool]) -> None:
    model, options, _ = inclined
    thought = 0
    for seed in range(8):
        result = model.chat(ASK, tools=TOOLS, tool_choice="weather", parallel_tool_calls=False, seed=seed, **options)
        if result.finish_reason == "stop":
            assert result.text == "" and [call.name for call in result.tool_calls] == ["weather"]
            assert set(result.tool_calls[0].arguments) <= {"town", "days"}
            thought += bool(result.reasoning)
    assert thought


def test_a_call_within_open_thoughts_is_held_to_nothing(tmp_path: Path) -> None:
    tool = {"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}
    script = [b"<tool_call>", b" so", b"</think>"]
    with Model.load(scripted_model(tmp_path / "m", script, template=OPENED, max_context=2048)) as model:
        result = model.chat(ASK, tools=[tool], max_tokens=9)
        assert (result.reasoning, result.tool_calls) == ("<tool_call> so", [])


def test_a_grammar_that_admits_the_tag_is_of_thoughts_too(tmp_path: Path) -> None:
    words = 'start: "<think>" /[a-z]{3}/ "</think>" /[0-9]/'
    for special in (False, True):
        path, _ = inclined_model(tmp_path / f"{special}.bitnet", THINKS, special)
        with Model.load(path) as model:
            held = words.replace('"<think>"', "<[256]>").replace('"</think>"', "<[257]>") if special else words
            result = model.chat(ASK, grammar=held)
            assert re.fullmatch("[a-z]{3}", result.reasoning) and re.fullmatch("[0-9]", result.text)


def test_a_tag_that_is_a_token_is_not_spelled_in_thoughts(tmp_path: Path) -> None:
    """For whoever reads the text it would end them."""
    script = [b"so ", b"</th", b"ink>", b"end"]
    words = byte_tokenizer(script)
    words.add_special_tokens(list(TAGS))
    asked: dict[str, Any] = {"regex": "a|b", "seed": 1, "logit_bias": {words.token_to_id(TAGS[1]): 4}}
    with Model.load(scripted_model(tmp_path / "m", script, template=OPENED, tokenizer=words, max_context=256)) as model:
        result = model.chat(ASK, **asked)
        assert result.text in ("a", "b") and "</th" in result.reasoning


def test_a_large_schema_is_followed_behind_thoughts(tmp_path: Path) -> None:
    properties = {f"p{i}": {"const": i} for i in range(300)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    with Model.load(scripted_model(tmp_path / "m", [b"so", b"</think>"], template=OPENED, max_context=256)) as model:
        result = model.chat(ASK, json_schema=schema, max_tokens=40, seed=1)
        assert result.reasoning == "so" and re.match(r'\{("p\d+": \d|\})', result.text)


def test_a_wrong_format_is_named_as_it_was_given(tmp_path: Path) -> None:
    with Model.load(thinking_models(tmp_path)["thinks"]) as model:
        for kind, text in (("json_schema", {"not": {}}), ("regex", "(a"), ("grammar", "start: b")):
            with pytest.raises(GrammarError, match=f"^{kind} is refused: ") as caught:
                model.chat(ASK, **{kind: text})
            assert caught.value.param == kind


@pytest.mark.parametrize(
    ("text", "opened", "thought", "said"),
    [("<think>\na\n</think>\n\n\n b", False, "a", "\n b"), ("a</think>\n\n", True, "a", ""), (" b", False, "", " b"),
     (" <think>b", False, "", " <think>b"), ("a</think>\n", True, "a", ""), ("</think>\n\n<", True, "", "<")],
)  # fmt: skip
def test_what_is_read_behind_the_gap(text: str, opened: bool, thought: str, said: str) -> None:
    for step in (1, 2, 5, 1000):
        assert split(text, Begun(opened, held=True), step) == (thought, said), step
