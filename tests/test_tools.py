"""Tools: how a model is told about them, and what constrains its output to the form of a call."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet_runtime import BitnetError, ContextLengthError, GrammarError, InvalidParameterError, Model, Sampling
from bitnet_runtime.chat.template import ChatTemplate
from bitnet_runtime.chat.thoughts import Begun
from bitnet_runtime.chat.tools import ToolCall, Tools
from bitnet_runtime.facts import guide_of
from bitnet_runtime.model_chat import behind_thoughts, call_reader, held_to_calls
from bitnet_runtime.tokenizer.text import Tokenizer
from image_models import packed
from runtime_models import SMALL, TEMPLATE, byte_tokenizer
from tool_models import ASK, CALL, CLOCK, LLAMA, QWEN, TEMPLATES, TOOLS, WEATHER, calling_model, unheld_model

# ---- telling ----


def prompt(template: str, messages: Any, tools: Any = TOOLS) -> str:
    return ChatTemplate(template).render(messages, {"bos_token": ""}, tools=Tools.of(tools))


def turn(arguments: Any, said: str | None = None) -> list[dict[str, Any]]:
    """A call, behind a text, and what came of it."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    return [*ASK, {"role": "assistant", "content": said, "tool_calls": [call]}, result]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_model_is_told_what_there_is_and_what_came_of_it(kind: str) -> None:
    given = ('{"town": "Köln"}', {"town": "Köln"})
    texts = {prompt(TEMPLATES[kind], turn(arguments, "I look.")) for arguments in given}
    (text,) = texts  # the arguments as JSON, as OpenAI has them, and as an object
    assert '"name": "clock"' in text and "The weather of a town." in text
    name = "parameters" if kind == "json" else "arguments"
    assert f'{{"name": "weather", "{name}": {{"town": "Köln"}}}}' in text
    assert "rain" in text and "weather?" in text
    assert ("I look." in text) == (kind != "json"), "Llama's has no place for it"
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
    unknown = "{% if tools %}<functools>{% endif %}"  # calls that nothing here reads
    assert prompt(unknown + TEMPLATE, system) == text


def test_what_we_say_beside_the_parts_of_a_message() -> None:
    """A template that takes parts is given them as they came, and ours behind them."""
    of_parts = "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}"
    template = "{% for m in messages %}<|{{ m.role }}|>" + of_parts + "{% endfor %}"
    messages = [{"role": "system", "content": "be kind"}, *turn("{}")]
    messages[2]["content"] = "let me see"
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert prompt(template, parts) == prompt(template, messages)


def test_a_result_is_one_text_for_a_template() -> None:
    messages = turn({})
    messages[2]["content"] = [{"type": "text", "text": "rain"}, {"type": "text", "text": "sun"}]
    assert "<tool_response>\nrain\nsun\n</tool_response>" in prompt(QWEN, messages)
    for wrong in ([], [{"type": "text", "text": 5}]):
        messages[2]["content"] = wrong
        with pytest.raises(InvalidParameterError, match="messages has the result"):
            prompt(QWEN, messages)


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
        ({"tools": [{"type": "custom", "function": {"name": "x"}}]}, "expected a function, or"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name of a tool is 'a b', expected up to 128"),
        ({"tools": [{"function": {"name": "none"}}], "tool_choice": "none"}, "expected none of the words"),
        ({"tools": [CLOCK, CLOCK]}, "tools has 'clock' twice"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "parameters of the tool f"),
        ({"tools": [{"function": {"name": "f", "parameters": {"a": float("nan")}}}]}, "tools: .*not JSON compliant"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "strict of the tool f is 1, expected true or false"),
        ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "has 129 entries, expected at most 128"),
        ({"tools": [{"function": {"name": "f", "description": "x" * 2**20}}]}, "tools are larger than 1,048,576 bytes"),
        ({"tools": TOOLS, "tool_choice": "rm"}, "tool_choice is 'rm', expected .*or one of the tools weather, clock"),
        ({"tool_choice": "required"}, "^tool_choice is 'required', and no tools are given; give"),
        ({"tools": TOOLS, "tool_choice": {"a": 1}}, "tool_choice is {'a': 1}"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls is 1, expected true or false"),
        ({"tools": TOOLS, "regex": "a"}, "tools go with json_schema, not with regex or grammar"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"x": 1}]}]}, "messages has the tool call {'x': 1}"),
        ({"messages": [{"role": "tool", "content": [{"type": "image"}]}]}, "messages has {'type': 'image'}"),
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


def test_a_second_call_may_follow_where_several_may_come(anyhow: tuple[Model, str]) -> None:
    model, kind = anyhow
    name = "parameters" if kind == "json" else "arguments"
    one = f'{{"name": "clock", "{name}": {{}}}}'
    if kind != "json":
        one = f"<tool_call>\n[{one}]\n</tool_call>" if kind == "list" else f"<tool_call>\n{one}\n</tool_call>"
    for parallel in (False, True):
        guide = guide_of(model, held_to_calls(model, Tools.of(TOOLS, "required", parallel), model.defaults))
        assert guide is not None and guide.admits(list(one.encode()))
        assert guide.admits(list(f"{one}\n{one}".encode())) == (parallel and kind != "json")


def test_a_schema_for_answers_without_calls(anyhow: tuple[Model, str]) -> None:
    model, _ = anyhow
    for seed in range(4):
        result = model.chat(ASK, tools=TOOLS, json_schema={"enum": ["yes", "no"]}, seed=seed, max_tokens=400)
        if not result.tool_calls:
            assert result.text in ('"yes"', '"no"')


def test_an_answer_may_begin_like_a_call(anyhow: tuple[Model, str]) -> None:
    """Where a call is an object without tags, all objects of a schema do."""
    model, _ = anyhow

    def person(key: str) -> dict[str, Any]:
        properties = {key: {"enum": ["Bob", "Ann"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    for key in ("name", "nam", "x"):
        for schema in (person(key), {"type": "object"}):
            guide = guide_of(model, held_to_calls(model, Tools.of(TOOLS), Sampling(json_schema=schema)))
            assert guide is not None and guide.admits(list(f'{{"{key}": "Ann", "age": 5}}'.encode()))
    no_calls = {ord(letter): -math.inf for letter in "<cw"}
    result = model.chat(ASK, tools=TOOLS, json_schema=person("name"), seed=1, max_tokens=100, logit_bias=no_calls)
    assert (result.finish_reason, result.tool_calls) == ("stop", [])
    assert json.loads(result.text)["name"] in ("Bob", "Ann"), "complete, and no half of a call"


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


def test_a_wrong_schema_beside_tools_is_named_by_its_own_name(tmp_path: Path) -> None:
    model = Model.load(calling_model(tmp_path / "m", CALL), threads=1)
    wrong: list[tuple[Any, str]] = [({"type": "text"}, "Invalid type: text"), ({"not": {}}, "Unimplemented keys")]
    for schema, why in wrong:
        with pytest.raises(GrammarError, match=f"^json_schema is refused: {why}") as caught:
            model.chat(ASK, tools=TOOLS, json_schema=schema, max_tokens=3)
        assert caught.value.param == "json_schema"


def test_calls_that_are_too_costly_together_are_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each schema compiles, and the grammar of all does not, which nobody has written."""
    model = Model.load(calling_model(tmp_path / "m", CALL), threads=1)
    compiled = model._grammars._compile

    def costly(kind: str, text: str) -> Any:
        if kind == "grammar":
            raise GrammarError("grammar is refused: too many states; correct or simplify it", kind)
        return compiled(kind, text)

    monkeypatch.setattr(model._grammars, "_compile", costly)
    for schema, name in ((None, "tools"), ({"type": "string"}, "tools with json_schema")):
        with pytest.raises(GrammarError, match=rf"^the form of {name} is refused: too many states; ") as caught:
            model.chat(ASK, tools=TOOLS, tool_choice="auto" if schema else "required", json_schema=schema)
        assert caught.value.param == "tools"


def test_calls_that_cannot_be_followed_are_of_tools(anyhow: tuple[Model, str]) -> None:
    model, _ = anyhow
    held = held_to_calls(model, Tools.of(TOOLS, "required"), model.defaults)
    for options in (held, behind_thoughts(model, Begun(True, "", False), held)[1]):
        guide = guide_of(model, options)
        assert guide is not None
        with pytest.raises(GrammarError, match=r"^tools cannot be followed further: ") as caught:
            guide.take(model.tokenize("</think>" * (options is not held) + "%"))
        assert caught.value.param == "tools"


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
