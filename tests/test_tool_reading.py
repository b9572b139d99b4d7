"""What a model writes around tool calls: which of it is text, which are calls, and at what cost that is found."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_runtime import ToolCallError
from bitnet_runtime.chat.calls import MOST_HELD, CallReader
from bitnet_runtime.chat.dialects import dialect
from bitnet_runtime.chat.tools import ToolCall
from tool_models import CALL, QWEN, SECOND, TEMPLATES


def read(template: str, text: str, step: int, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls in an output that arrives in steps."""
    reader = CallReader(dialect(template), {"weather", "clock"}, most)
    said = "".join(reader.push(text[i : i + step]) for i in range(0, len(text), step)) + reader.push("", final=True)
    parts = reader.take()
    texts = ["".join(part.text for part in parts if part.number == i) for i in range(len(reader.calls))]
    assert texts == [call.text for call in reader.calls], "the parts are the whole"
    assert [part.text for part in parts if part.number == 0][:1] in ([], [""])
    return said, [(call.name, call.text) for call in reader.calls]


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
    ("tags", SECOND[:-14] + CALL, "", [("clock", "{}"), ("weather", '{"town": "Köln", "days": 3}')]),
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
