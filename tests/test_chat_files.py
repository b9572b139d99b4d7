"""Conversations in files: every form that is read, what is refused, and their two sides."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import bitnet_cli
from bitnet.data import conversations, dataset, files
from training import TALK


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"3", 'line 3: 3; expected an object with "messages"'),
        (b'{"question": "x", "answer": "y"}', 'line 3: question, answer; expected an object with "messages"'),
        (b'{"messages": []}', "line 3: messages is []; expected an object with"),
        (b'{"messages": [3]}', "a message is 3, expected"),
        (b'{"messages": [{"role": "user"}]}', "a message is"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}',
         "has a picture, and the model sees none"),
        (b'{"system": "s", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]}',
         '"system" stands beside the messages and would not be learnt, expected it as the first message'),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}', "a message is"),
        (b'{"messages": [{"role": "user", "content": []}]}', "a message is {'role': 'user', 'content': []}, expected"),
        (b'{"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}', "a message is"),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], "tools": [3]}',
         "tools is 3, expected a function"),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], "functions": [{}]}',
         'functions are of an older form, expected "tools"'),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "x", "content": "", "function_call": {"a": 1}}]}',
         'functions are of an older form, expected "tools"'),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "the roles are user; expected an answer"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "the roles are assistant; expected an answer"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(line: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_bytes(json.dumps({"messages": TALK}).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(dataset.DataError, match="line 3") as error:
        list(conversations.read([file]))
    assert message in str(error.value)


def test_a_content_in_parts_is_that_of_its_texts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}))
    (found,) = conversations.read([tmp_path / "talks.jsonl"])
    assert [message["content"] for message in found.messages] == ["a\nb", "c"]


def test_options_of_text_are_not_of_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALK}))
    for option, message in (
        (["--fim", "0.5"], "--fim is for text, and --chat is given"),
        (["--documents"], "--documents is for text, and --chat is given"),
        (["--column", "x"], "--column has no effect without --data"),
    ):
        assert bitnet_cli.main(["train", "--chat", str(tmp_path / "talks.jsonl"), *option]) == 1
        assert message in capsys.readouterr().err


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dataset.DataError, match=r"is not a \.jsonl file"):
        list(conversations.read([tmp_path / "a.txt"]))
    with pytest.raises(dataset.DataError, match=r"; for a list: jq -c '\.\[\]' \S+/a\.json > \S+/a\.jsonl$"):
        list(conversations.read([tmp_path / "a.json"]))
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    with pytest.raises(dataset.DataError, match="1 conversation, expected at least 2 different ones"):
        conversations.split([*conversations.read([tmp_path / "c.jsonl"])] * 2, 0.1)
    monkeypatch.setattr(files, "MOST_OF_RECORD", 50)
    with pytest.raises(dataset.DataError, match="line 1: more than 50 bytes; cut it"):
        list(conversations.read([tmp_path / "c.jsonl"]))


def test_compressed_and_in_capitals(tmp_path: Path) -> None:
    file = tmp_path / "C.JSONL.GZ"
    file.write_bytes(gzip.compress(b"\n" + json.dumps({"messages": TALK}).encode()))
    (found,) = conversations.read([file])
    assert found.messages == TALK and found.where == f"{file}, line 2"
    assert conversations.among([str(file)], "") == [file]


def test_half_a_character_is_named_before_a_tokenizer_sees_it(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    with pytest.raises(dataset.DataError, match=r"a.jsonl, line 1: a text holds half of a surrogate pair"):
        list(conversations.read([tmp_path / "a.jsonl"]))


def test_a_tokenizer_learns_what_is_said_and_called() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    talk = [*TALK[:1], {"role": "assistant", "content": None, "tool_calls": [call]}, TALK[1]]
    assert list(conversations.said_in([conversations.Conversation(talk, "here")])) == [
        "hi",
        json.dumps([call]),
        "Good day",
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"name": "clok", "arguments": "{}"}, "an answer calls 'clok', expected one of the tools clock"),
        ({"name": "clock", "arguments": "{zone: 1}"}, "calls clock with '{zone: 1}', expected a JSON object"),
        ({"name": "clock", "arguments": "[1]"}, r"calls clock with '\[1\]', expected a JSON object"),
        ({"name": "clock", "arguments": [1]}, r"calls clock with \[1\], expected a JSON object"),
    ],
)
def test_a_call_that_nobody_could_make_is_not_learnt(function: dict[str, Any], message: str, tmp_path: Path) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    record = {"tools": tools, "messages": [TALK[0], answer, {"role": "tool", "content": "no"}, TALK[1]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(dataset.DataError, match=f"a.jsonl, line 1: .*{message}"):
        list(conversations.read([tmp_path / "a.jsonl"]))
    no_arguments, for_the_template = [{"function": {"name": "clock", "arguments": ""}}], [3]
    for allowed in ({"weight": 0}, {"tool_calls": no_arguments}, {"tool_calls": for_the_template}):
        record["messages"][1] = answer | allowed  # of weight 0: a failure that is only seen
        (tmp_path / "a.jsonl").write_text(json.dumps(record))
        assert len(list(conversations.read([tmp_path / "a.jsonl"]))) == 1


def test_split_is_by_content() -> None:
    talks = [conversations.Conversation([{"role": "user", "content": str(i)}], str(i)) for i in range(40)]
    train, held_out = conversations.split(talks, 0.3)
    assert len(train) + len(held_out) == 40 and 6 <= len(held_out) <= 18
    assert conversations.split(talks[::-1], 0.3)[1] == held_out
    assert [[len(side) for side in conversations.split(talks[:n], 1e-6)] for n in (2, 9)] == [[1, 1], [8, 1]]


def test_conversations_need_a_template(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    assert bitnet_cli.main(["eval", str(finished), "--data", str(tmp_path / "talks.jsonl")]) == 1
    assert "talks.jsonl, line 1 is a conversation, and " in (said := capsys.readouterr().err)
    assert "has no chat template; give it text, or teach it conversations: bitnet finetune --chat" in said
