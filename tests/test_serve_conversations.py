"""Conversations of /v1/messages and /v1/responses as chat templates take them."""

from __future__ import annotations

from bitnet_serve.endpoints import chat, messages, responses

QUESTION = {"role": "user", "content": "weather?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Köln"}}},
]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain\nand wind"}


def text(*said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in said]


def test_messages() -> None:
    thoughts = [{"type": "thinking", "thinking": each, "signature": ""} for each in ("why", "how")]
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"town": "Köln"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": text("rain", "and wind")}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    given = [
        QUESTION,
        {"role": "assistant", "content": [*thoughts, *text("I look.", "So:"), call]},
        {"role": "user", "content": [*text("and then?"), result]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": [picture, *text("and here?")]},
    ]
    assert messages.conversation({"messages": given, "system": text("be kind", "be brief")}) == [
        {"role": "system", "content": "be kind\nbe brief"},
        QUESTION,
        {**CALLED, "content": "I look.\nSo:", "reasoning_content": "why\nhow"},
        RESULT,  # stands directly behind its call
        {"role": "user", "content": "and then?"},
        CALLED,
        RESULT,
        {"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,AA=="}, *text("and here?")]},
    ]


def test_responses() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": each} for each in ("why", "how")]}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town": "Köln"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": RESULT["content"]}
    function = {"name": "weather", "arguments": call["arguments"]}
    calls = [{"id": "c1", "type": "function", "function": function}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    asked = {"input": [QUESTION, reasoning, call, result, call, call], "instructions": "be kind"}
    assert responses.conversation(asked) == [
        {"role": "system", "content": "be kind"},
        QUESTION,
        {**called, "content": "", "reasoning_content": "why\nhow"},
        RESULT,
        {**called, "tool_calls": calls * 2},
    ]
    assert responses.conversation({"input": "weather?"}) == [QUESTION]


def test_a_refusal_of_another_model_is_what_the_assistant_said() -> None:
    refused = {"role": "assistant", "content": [*text("No."), {"type": "refusal", "refusal": "I will not."}]}
    said = {"role": "assistant", "content": text("No.", "I will not.")}
    assert chat.messages({"messages": [QUESTION, refused]}) == [QUESTION, said]
    assert responses.conversation({"input": [QUESTION, refused]}) == [QUESTION, said]
    whole = {"role": "assistant", "content": None, "refusal": "I will not."}
    assert chat.messages({"messages": [QUESTION, whole]})[1]["content"] == "I will not."
    others = [refused | {"role": "user"}, {"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}]
    assert chat.messages({"messages": others}) == others, "which no client sends, and the template refuses"
