"""Tools: how a model is told about them, how its output is read, and what constrains it to the form of a call."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_runtime import BitnetError, ContextLengthError, GrammarError, InvalidParameterError, Model, ToolCallError
from bitnet_runtime.chat.calls import MOST_HELD, CallReader
from bitnet_runtime.chat.dialects import dialect
from bitnet_runtime.chat.template import ChatTemplate
from bitnet_runtime.chat.tools import ToolCall, Tools
from bitnet_runtime.facts import guide_of
from bitnet_runtime.model_chat import call_reader, held_to_calls
from bitnet_runtime.tokenizer.text import Tokenizer
from runtime_models import SMALL, TEMPLATE, byte_tokenizer
from test_model_images import packed
from tool_models import ASK, CALL, CLOCK, FALCON, LLAMA, QWEN, SECOND, TOOLS, WEATHER, calling_model, unheld_model

TEMPLATES = {"told by us": TEMPLATE, "tags": QWEN, "list": FALCON, "json": LLAMA}


def read(template: str, text: str, step: int, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls in an output that arrives in steps."""
    reader = CallReader(dialect(template), {"weather", "clock"}, most)
    said = "".join(reader.push(text[i : i + step]) for i in range(0, len(text), step)) + reader.push("", final=True)
    parts = reader.take()
    texts = ["".join(part.text for part in parts if part.number == i) for i in range(len(reader.calls))]
    assert texts == [call.text for call in reader.calls], "the parts are the whole"
    assert [part.text for part in parts if part.number == 0][:1] in ([], [""])
    return said, [(call.name, call.text) for call in reader.calls]


# ---- reading ----

# ruff: noqa: E501  a line of a table cannot be cut
ARGUMENTS = '{"town": "a}</tool_call>\\"{", "list": [1, {"c": null}]}'
LIST = '<tool_call>\n[\n  {"name": "weather", "arguments": {"town": "x"}},\n  {"name": "clock", "arguments": {}}\n]\n</tool_call>'
OTHER = '[{"arguments": {}, "name": "clock"}, {"arguments": {}, "name": "rm"}]'  # of which one was not offered
READ: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("tags", "no call ", "no call ", []),
    ("tags", "a <tool_cal of tools\n", "a <tool_cal of tools\n", []),
    ("tags", f"Well.\n{CALL}", "Well.", [("weather", '{"town": "Köln", "days": 3}')]),
    ("tags", f"{CALL}\n{SECOND}\n so.", "so.", [("weather", '{"town": "Köln", "days": 3}'), ("clock", "{}")]),
    ("tags", f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>', "", [("weather", ARGUMENTS)]),
    ("tags", '<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>', "", [("clock", '{"a": 1}')]),
    ("tags", '<tool_call>{"function": {"name": "clock", "arguments": "{}"}}</tool_call>', "", [("clock", "{}")]),
    ("tags", '<tool_call>{"name": "clock"}', "", [("clock", "{}")]),
    ("list", LIST + "ok", "ok", [("weather", '{"town": "x"}'), ("clock", "{}")]),
    ("json", ' {"name": "clock", "parameters": {"a": 1}}', "", [("clock", '{"a": 1}')]),
    ("json", '{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"town": ""}}', "",
     [("clock", "{}"), ("weather", '{"town": ""}')]),
    ("json", '{"town": 5} is JSON', '{"town": 5} is JSON', []),
    ("json", 'so {"name": "clock", "parameters": {}}', 'so {"name": "clock", "parameters": {}}', []),
    # what is wrong
    ("tags", "<tool_call>no JSON</tool_call>.", "<tool_call>no JSON</tool_call>.", []),
    ("tags", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    ("list", f"<tool_call>{OTHER}</tool_call>", f"<tool_call>{OTHER}</tool_call>", []),
    ("tags", '<tool_call>{"name": "clock", "arguments": 5}</tool_call>', '<tool_call>{"name": "clock", "arguments": 5}</tool_call>', []),
    ("tags", '<tool_call>{"name": "clock", "arguments": {"a": 1}\n</tool_call>so', "so", [("clock", '{"a": 1}')]),
    ("tags", '<tool_call>{"name": "clock", "arguments": {"a": <b>}}</tool_call>so', "so", [("clock", '{"a": ')]),
    ("tags", '<tool_call>{"name": "clock", "arguments": {"a": "x\ny"}}</tool_call>so', "so", [("clock", '{"a": "x')]),
    ("tags", '<tool_call>{"name": "clock", "arguments": {"a": [1}}</tool_call>so', "so", [("clock", '{"a": [1')]),
    ("tags", '<tool_call>{"name": "clock", "arguments": {"a": "b', "", [("clock", '{"a": "b')]),
    ("tags", "To do: \n\n<tool_call>no JSON</tool_call>", "To do: \n\n<tool_call>no JSON</tool_call>", []),
    ("tags", f"I may <tool_call> it. {SECOND}", "I may <tool_call> it.", [("clock", "{}")]),
    ("tags", f"<tool_call>\n{SECOND}", "<tool_call>", [("clock", "{}")]),
    ("tags", '<tool_call>{"name": "clock", "arguments": {}, "id": "</tool_call>"}</tool_call>so', "so", [("clock", "{}")]),
    ("list", LIST.replace("{}", '{}, "id": {"n": [1]} '), "", [("weather", '{"town": "x"}'), ("clock", "{}")]),
    ("json", '{"name": "clock", "parameters": {}, "id": 1}', "", [("clock", "{}")]),
    ("json", '{"name": "clock", "parameters": {},{"name": "clock", "parameters": {}}.', ".", [("clock", "{}")] * 2),
    ("tags", SECOND.replace("}}", "}}" + SECOND[11:-12]), "", [("clock", "{}"), ("clock", "{}")]),
    ("tags", SECOND.replace("{}", '{"a": 1e999}'), "", [("clock", '{"a": 1e999}')]),
    ("tags", '<tool_call>{"arguments": {"a": NaN}, "name": "clock"}', '<tool_call>{"arguments": {"a": NaN}, "name": "clock"}', []),
    ("tags", SECOND.removesuffix("</tool_call>") + CALL, "", [("clock", "{}"), ("weather", '{"town": "Köln", "days": 3}')]),
    ("json", '{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
    ("json", '{"name": "clock", "parameters": {}} and so', "and so", [("clock", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "said", "calls"), READ)
def test_what_is_said_and_what_is_called(kind: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    for step in (1, 2, 3, 7, 1000):
        assert read(TEMPLATES[kind], text, step) == (said, calls), step


PARTS = [CALL, SECOND, SECOND[12:-14], ', "id": 1']


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([*PARTS, LIST, "<tool_call>", "</tool_call>", "{", '"', "x", " ", "\n", "}", ","])),
    st.lists(st.integers(1, 40), min_size=1),
    st.sampled_from(sorted(TEMPLATES)),
)
def test_it_does_not_matter_how_a_text_comes(parts: list[str], steps: list[int], kind: str) -> None:
    text, reader, at = "".join(parts), CallReader(dialect(TEMPLATES[kind]), {"weather", "clock"}), 0
    said = ""
    while at < len(text):
        step = steps[at % len(steps)]
        said += reader.push(text[at : at + step])
        at += step
    said += reader.push("", final=True)
    whole, calls = read(TEMPLATES[kind], text, 10**6)
    assert (said, [(call.name, call.text) for call in reader.calls]) == (whole, calls)
    if "<tool_call>" not in text and "{" not in text:
        assert said == text


def test_one_call_alone_ends_an_answer() -> None:
    assert read(QWEN, CALL + SECOND, 1, most=1) == ("", [("weather", '{"town": "Köln", "days": 3}')])
    twice = f"<tool_call>{OTHER.replace('rm', 'weather')}</tool_call>"
    assert read(QWEN, twice + SECOND, 1, most=1) == ("", [("clock", "{}")])


@pytest.mark.parametrize(
    "text", ["<tool_call>" + "[" * 100_000, "<tool_call>" * 10_000, "<tool_call>{" + '"a":1,' * 15_000]
)
def test_long_nonsense_is_read_in_time_that_grows_with_it(text: str) -> None:
    begin = time.process_time()
    said, calls = read(QWEN, text, 8)
    assert time.process_time() - begin < 10
    assert (said.replace(" ", ""), calls) == (text, []) and len(text) > MOST_HELD


def test_a_name_that_does_not_end_is_tried_at_the_same_cost_with_every_token() -> None:
    begin = time.process_time()
    for text in (
        '<tool_call>{"name": "' + "a" * MOST_HELD,
        "<tool_call>" + " " * MOST_HELD,
        "<tool_call>{" + "\n" * MOST_HELD,
    ):
        said, calls = read(QWEN, text, 4)
        assert said.strip() == text.strip() and not calls
    assert time.process_time() - begin < 10  # 1 s; with names of any length more than a minute


@pytest.mark.parametrize(
    ("kind", "before", "after", "said"),
    [
        ("tags", "", "so", "{}so"),
        ("tags", "a", "<tool_call>no JSON", "a{}<tool_call>no JSON"),
        ("tags", "a", SECOND, "a"),
        ("tags", SECOND, "so", "so"),
        ("tags", SECOND[:-14], CALL, ""),
        ("tags", SECOND[:-13], CALL, ""),
        ("tags", SECOND[:-14] + ",", '"id": 1}', ""),
        ("json", "", "so", "{}so"),
        ("json", "", '{"a": 5}', '{}{"a": 5}'),
        ("json", '{"name": "clock", "parameters": {}', "}so", "so"),
        ("json", '{"name": "clock", "parameters": {}}', "so", "so"),
        ("json", '{"name": "clock", "parameters": {}};', "}so", "}so"),
    ],
)
def test_white_space_is_looked_at_once(kind: str, before: str, after: str, said: str) -> None:
    """It was again with each that followed, so a long run of it cost the square of its length."""
    reader = CallReader(dialect(TEMPLATES[kind]), {"weather", "clock"})
    text = reader.push(before)
    for space in (spaces := " \n" * 50):
        text += reader.push(space)
        assert len(reader._text) <= 2
    text += reader.push(after) + reader.push("", final=True)
    assert text == said.replace("{}", spaces, 1)


def test_arguments_that_are_none() -> None:
    assert ToolCall("1", "f", '{"a": [1]}').arguments == {"a": [1]}
    for text in ('{"a": ', "5", "", "[" * 100_000, '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'):
        with pytest.raises(ToolCallError, match=r"the model called f with .*expected a JSON object; more max_tokens"):
            _ = ToolCall("1", "f", text).arguments


def test_a_call_that_was_cut_as_it_opened_is_no_text() -> None:
    for begin, said in (
        (f"{CALL}\n<too", ""),
        ("a <too", "a <too"),
        ("<too", ""),
        ("\n<", ""),
        ("ab", "ab"),
        ("a \n<tool_call>{", "a"),
    ):
        reader = CallReader(dialect(QWEN), {"weather"})
        assert reader.push(begin) + reader.push("", final=True, cut=True) == said


# ---- telling ----


def prompt(template: str, messages: Any, tools: Any = TOOLS) -> str:
    return ChatTemplate(template).render(messages, {"bos_token": ""}, tools=Tools.of(tools))


def turn(arguments: Any) -> list[dict[str, Any]]:
    """A call, and what came of it."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    return [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_model_is_told_what_there_is_and_what_came_of_it(kind: str) -> None:
    texts = {prompt(TEMPLATES[kind], turn(arguments)) for arguments in ('{"town": "Köln"}', {"town": "Köln"})}
    (text,) = texts  # the arguments as JSON, as OpenAI has them, and as an object
    assert '"name": "clock"' in text and "The weather of a town." in text
    name = "parameters" if kind == "json" else "arguments"
    assert f'{{"name": "weather", "{name}": {{"town": "Köln"}}}}' in text
    assert "rain" in text and "weather?" in text
    assert "The weather of a town." not in prompt(TEMPLATES[kind], turn("{}"), None)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_a_conversation_goes_on_after_arguments_that_are_none(kind: str, arguments: str) -> None:
    text = prompt(TEMPLATES[kind], turn(arguments))
    assert json.dumps(arguments) in text and text.encode(), "as the model wrote it"


def test_what_we_say_where_a_template_says_nothing() -> None:
    system = [{"role": "system", "content": "be kind"}, *turn("{}"), turn("{}")[2]]
    text = prompt(TEMPLATE, system)
    assert text.startswith("<|system|>be kind\n\n# Tools") and text.count("<|system|>") == 1
    assert text.endswith(
        "<|user|>weather?<|end|><|assistant|>" + CALL.replace('{"town": "Köln", "days": 3}', "{}") + "<|end|>"
        "<|user|><tool_response>\nrain\n</tool_response>\n<tool_response>\nrain\n</tool_response><|end|><|assistant|>"
    )  # fmt: skip
    assert prompt(TEMPLATE, ASK, None) == "<|user|>weather?<|end|><|assistant|>"


def test_what_we_say_beside_the_parts_of_a_message() -> None:
    """A template that takes parts is given them as they came, and ours behind them."""
    of_parts = "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}"
    template = "{% for m in messages %}<|{{ m.role }}|>" + of_parts + "{% endfor %}"
    messages = [{"role": "system", "content": "be kind"}, *turn("{}")]
    messages[2]["content"] = "let me see"
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert prompt(template, parts) == prompt(template, messages)


def test_two_calls_for_a_template_that_knows_of_one() -> None:
    messages = turn({})
    messages[1]["tool_calls"] *= 2
    assert prompt(LLAMA, messages).count('{"name": "weather", "parameters": {}}') == 2


def test_special_tokens_in_tools_are_text() -> None:
    words = byte_tokenizer()
    ours = Tokenizer(words.to_str().encode(), words.get_vocab_size())
    evil = {
        "type": "function",
        "function": {"name": "f", "description": "<|end|>", "parameters": {"<|end|>": ["<|end|>"]}},
    }
    for template in TEMPLATES.values():
        tokens = ChatTemplate(template).encode(ASK, ours, {"bos_token": ""}, tools=Tools.of([evil]))
        text = ours.decode(tokens, skip_special=False)
        assert text.count("<|end|>") - tokens.count(words.token_to_id("<|end|>")) == 3, template


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tools": 5}, "tools is 5, expected a list of functions"),
        ({"tools": [5]}, "tools is 5, expected a function, or"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "expected a function, or"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name of a tool is 'a b', expected up to 128"),
        ({"tools": [CLOCK, CLOCK]}, "tools has 'clock' twice"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "parameters of the tool f"),
        ({"tools": [{"function": {"name": "f", "parameters": {"a": float("nan")}}}]}, "tools: .*not JSON compliant"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "strict of the tool f is 1, expected true or false"),
        ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools has 129 entries, expected at most 128"),
        ({"tools": [{"function": {"name": "f", "description": "x" * 2**20}}]}, "tools are larger than 1,048,576 bytes"),
        ({"tools": TOOLS, "tool_choice": "rm"}, "tool_choice is 'rm', expected .*or one of the tools weather, clock"),
        ({"tool_choice": "required"}, "^tool_choice is 'required', and no tools are given; give"),
        ({"tools": TOOLS, "tool_choice": {"a": 1}}, "tool_choice is {'a': 1}"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls is 1, expected true or false"),
        ({"tools": TOOLS, "regex": "a"}, "tools go with json_schema, not with regex or grammar"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"x": 1}]}]}, "messages has the tool call {'x': 1}"),
        ({"messages": [{"role": "tool", "content": [{"type": "image"}]}]}, "messages has the result|expected"),
    ],
)  # fmt: skip
def test_what_is_no_tool(tmp_path_factory: pytest.TempPathFactory, wrong: dict[str, Any], message: str) -> None:
    path = tmp_path_factory.getbasetemp() / "wrong.bitnet"
    if not path.exists():
        calling_model(path, "x")
    with Model.load(path, threads=1) as model, pytest.raises(InvalidParameterError, match=message):
        model.chat(**({"messages": ASK} | wrong))


def test_too_long_a_prompt_says_what_the_tools_take(tmp_path: Path) -> None:
    with Model.load(calling_model(tmp_path / "m.bitnet", CALL), threads=1) as model:
        long = [{"type": "function", "function": {"name": "f", "description": "y" * 3000}}]
        with pytest.raises(ContextLengthError, match=r"; 3\d{3} of them tell of the tools; shorten the text"):
            model.chat(ASK, tools=long)


# ---- holding ----


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def anyhow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, str]]:
    """A model that writes anything, and how it is told of tools."""
    path = tmp_path_factory.mktemp("models") / "any.bitnet"
    unheld_model(path, TEMPLATES[request.param])
    with Model.load(path, threads=1) as model:
        yield model, request.param


def check(call: ToolCall) -> None:
    arguments = call.arguments
    if call.name == "weather":
        assert set(arguments) <= {"town", "days"} and len(arguments["town"]) <= 6
        assert type(arguments.get("days", 0)) is int and arguments.get("days", 0) <= 9


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_what_has_to_be_called_is(anyhow: tuple[Model, str], choice: str) -> None:
    model, _ = anyhow
    closed = [
        WEATHER,
        {"type": "function", "function": {"name": "clock", "parameters": {"additionalProperties": False}}},
    ]
    names = set()
    for seed in range(6):
        result = model.chat(ASK, tools=closed, tool_choice=choice, parallel_tool_calls=False, seed=seed, top_k=0)
        assert (result.text, len(result.tool_calls), result.finish_reason) == ("", 1, "stop")
        check(result.tool_calls[0])
        names.add(result.tool_calls[0].name)
    assert names <= {"weather", "clock"} if choice == "required" else names == {"weather"}


def test_what_may_be_called_is_called_in_its_form(anyhow: tuple[Model, str]) -> None:
    """A strict tool: whatever the model begins with, a call that it begins is one."""
    model, kind = anyhow
    strict = [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]
    tools = Tools.of(strict)
    options = held_to_calls(model, tools, model.defaults)
    guide = guide_of(model, options)
    assert guide is not None
    begin = b'{"name": "weather", "parameters": ' if kind == "json" else b"so\n<tool_call>"
    guide.take(list(begin))
    forced = bytes(guide.forced())
    expected = (
        b'{"town": "' if kind == "json" else b'\n[{"name"' if kind == "list" else b'\n{"name": "weather", "arguments": '
    )
    assert forced.startswith(expected), forced
    free = model.chat(ASK, tools=strict, seed=1, max_tokens=30)
    assert free.usage.completion_tokens > 0 and free.tool_calls == []


def test_a_schema_for_answers_without_calls(anyhow: tuple[Model, str]) -> None:
    model, _ = anyhow
    for seed in range(4):
        result = model.chat(ASK, tools=TOOLS, json_schema={"enum": ["yes", "no"]}, seed=seed, max_tokens=400)
        if not result.tool_calls:
            assert result.text in ('"yes"', '"no"')


def test_a_stop_text_that_was_held_back_to_the_last_token(tmp_path: Path) -> None:
    """White space may stand before a call, so it is text only once no more can come."""
    model = Model.load(calling_model(tmp_path / "m", "So.\n"), threads=1)
    most = len(model.chat(ASK).tokens)
    for tools in (None, TOOLS):
        result = model.chat(ASK, tools=tools, stop="\n", max_tokens=most)
        assert (result.text, result.finish_reason) == ("So.", "stop")


def test_bombs_in_parameters(tmp_path: Path) -> None:
    model = Model.load(calling_model(tmp_path / "m", CALL), threads=1)
    deep: Any = {"type": "object"}
    for _ in range(900):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {"a": {"enum": [f"{i:09}" * 4 for i in range(20_000)]}}}
    never = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}
    for parameters in (deep, wide, never, {"type": "object", "properties": {"a": {"pattern": "(a{1,9999}){1,9999}"}}}):
        begin = time.monotonic()
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
        try:
            model.chat(ASK, tools=[tool], tool_choice="required", max_tokens=3, seed=1)
        except BitnetError as error:
            assert isinstance(error, (GrammarError, InvalidParameterError)) or "context" in str(error)
        assert time.monotonic() - begin < 60  # a second of CPU time, on a busy machine
    assert model.chat(ASK, tools=[CLOCK], max_tokens=3, seed=1).usage.completion_tokens > 0


@pytest.mark.parametrize("strict", [False, True])
def test_the_tool_with_a_wrong_schema_is_named(tmp_path: Path, strict: bool) -> None:
    model = Model.load(calling_model(tmp_path / "m", CALL), threads=1)
    passed_over = {"type": "object", "properties": {"a": {"not": {}}}}
    wrong = {"type": "object", "properties": {"a": {"type": "text"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict and name == "g"}}
        for name, parameters in (("f", passed_over), ("g", wrong))
    ]
    with pytest.raises(GrammarError, match="the schema of the tool g is refused: Invalid type: text"):
        model.chat(ASK, tools=tools, tool_choice="required", max_tokens=3)


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    """They are not part of an answer's text, but calls are found by them."""
    words = byte_tokenizer([b'\n{"name": "clock"', b', "arguments": {', b'"a": "', b"b\xc3", b'\xa9"}}\n'])
    words.add_special_tokens(["<tool_call>", "</tool_call>"])
    config = SMALL.replace(vocab_size=words.get_vocab_size(), max_context=1024)
    path = packed(tmp_path / "m.bitnet", config, template=QWEN, words=words)
    with Model.load(path, threads=1) as model:
        result = model.chat(ASK, tools=TOOLS, tool_choice="weather", parallel_tool_calls=False, seed=1)
        assert result.text == "" and result.tokens[0] == words.token_to_id("<tool_call>")
        check(result.tool_calls[0])
        reader = call_reader(model, Tools.of(TOOLS))
        assert reader is not None and set(reader.shown.values()) == {"<tool_call>", "</tool_call>"}
