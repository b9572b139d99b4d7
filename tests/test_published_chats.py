"""Conversations in the forms of ShareGPT and Alpaca, in which many are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitnet.data import conversations
from bitnet.data.files import DataError

TALK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Good day"}]
SAID = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Good day"}]
SYSTEM = {"role": "system", "content": "s"}


def written(folder: Path, *records: Any) -> Path:
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"id": "1", "conversations": SAID}, TALK),
        ({"conversations": [{"from": "system", "value": "s"}, *SAID], "system": ""}, [SYSTEM, *TALK]),
        ({"conversations": [SAID[0] | {"from": "user"}, SAID[1] | {"from": "assistant"}]}, TALK),
        ({"conversations": [*SAID, *SAID[:1], SAID[1] | {"weight": 0}]}, [*TALK, TALK[0], TALK[1] | {"weight": 0}]),
        ({"conversations": TALK}, TALK),
        ({"conversations": TALK, "conversation_id": 3, "input": "", "inputs": ""}, TALK),
        ({"instruction": "hi", "input": "", "output": "Good day"}, TALK),
        ({"instruction": "hi", "output": "Good day", "text": "all of it", "output_en": ""}, TALK),
        ({"instruction": "hi", "input": "you", "output": "Good day"}, [TALK[0] | {"content": "hi\nyou"}, TALK[1]]),
    ],
)
def test_forms(record: dict[str, Any], messages: list[dict[str, Any]], tmp_path: Path) -> None:
    (found,) = conversations.read([written(tmp_path, record)])
    assert found.messages == messages


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": []}, "messages is []; expected an object with"),
        ({"conversations": "hi"}, 'conversations; expected an object with "messages"'),
        ({"conversations": [3]}, "a message is 3, expected"),
        ({"conversations": [*SAID, {"from": "observation", "value": "x"}]}, "a message is {'from': 'observation'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "a message is {'from': ['gpt']"),
        ({"conversations": [SAID[0], {"from": "gtp", "value": "x"}]}, '\'x\'}, expected {"from": "human"'),
        ({"conversatons": SAID}, '"conversatons" would be lost, expected "conversations"; rename or remove it'),
        ({"messages": TALK, "tool": []}, '"tool" would be lost, expected "tools"'),
        ({"messages": [TALK[0], TALK[1] | {"weigth": 0}]}, '"weigth" would be lost, expected "weight"'),
        ({"instruction": "x", "inptu": "z", "output": "y"}, '"inptu" would be lost, expected "input"'),
        ({"conversations": [{"from": "human"}, SAID[1]]}, "a message is {'from': 'human'}"),
        ({"conversations": SAID, "system": "s"}, '"system" stands beside the messages'),
        ({"conversations": SAID[::-1]}, "the roles are assistant, user; expected an answer of assistant after others"),
        ({"instruction": "x", "output": "y", "history": [["a", "b"]]}, 'history; expected an object with "messages"'),
        ({"instruction": "x", "input": [1], "output": "y"}, "instruction, input, output; expected an object with"),
        ({"instruction": "", "output": "y"}, "messages is []; expected an object with"),
        ({"instruction": "x", "output": None}, "line 1: output is None, expected a text"),
    ],
)
def test_what_would_be_lost_is_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1") as error:
        list(conversations.read([written(tmp_path, record)]))
    assert message in str(error.value)


def test_an_evaluation_tells_them_from_text(tmp_path: Path) -> None:
    for record, column, is_talk in (
        ({"conversations": SAID}, "", True),
        ({"instruction": "x", "output": "y"}, "", True),
        ({"instruction": "x", "output": "y", "text": "z"}, "", False),
        ({"instruction": "x", "output": "y"}, "output", False),
    ):
        file = written(tmp_path, record)
        assert conversations.among([str(file)], column) == [file] * is_talk


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        ({"content": ""}, 1),
        ({"content": " \n"}, 1),
        ({"content": "", "weight": 0}, 0),
        ({"content": "x"}, 0),
        ({"content": "", "reasoning_content": "why"}, 0),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, 0),
    ],
)
def test_empty_answers_are_named(answer: dict[str, Any], counted: int, tmp_path: Path) -> None:
    talk = [*TALK, TALK[0], {"role": "assistant"} | answer]
    lines: list[str] = []
    file = written(tmp_path, {"messages": talk}, {"messages": TALK})
    conversations.split(conversations.read([file]), 0.5, lines.append)
    told = '1 of 3 answers is empty, and the model learns to say nothing there; leave it out, or give it "weight": 0'
    assert lines == [told] * counted
