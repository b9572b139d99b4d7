"""Thoughts of models in the forms of each API: whole, as streams, and in the messages of a request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from bitnet_serve.endpoints import messages, responses
from bitnet_serve.server import Serving
from servers import post, served
from test_serve_streams import USE, chunks, events
from test_serve_streams import ask as streamed
from test_thoughts import SAID, TEXT, THOUGHT, thinking_models

if TYPE_CHECKING:
    from anthropic import Anthropic
from tool_models import ASK, CALL, FLAT, TOOLS


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(*thinking_models(tmp_path_factory.mktemp("models")).values()) as serving:
        yield serving


@pytest.mark.parametrize("model", ["thinks", "opened"])
def test_chat_completions(serving: Serving, model: str) -> None:
    client = OpenAI(base_url=f"{serving.address}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=model, messages=ASK)
    message = answer.choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == (SAID, THOUGHT)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    n = answer.usage.completion_tokens_details.reasoning_tokens
    assert n is not None and 0 < n < answer.usage.completion_tokens

    deltas = [each["choices"][0]["delta"] for each in chunks(streamed(serving, "/v1/chat/completions",
                                                                     {"model": model, "messages": ASK}))]  # fmt: skip
    names = " ".join(name for delta in deltas for name in delta if name != "role")
    assert re.fullmatch("content( reasoning_content)+( content)+", names)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == SAID


def test_an_answer_without_thoughts_has_no_field_of_them(serving: Serving) -> None:
    _, answer = post(serving, "/v1/chat/completions", {"model": "plain", "messages": ASK})
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT, "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    ("model", "begun", "reasoning", "content"),
    [("thinks", "<think>", True, SAID), ("thinks", "<think>so</think>", False, TEXT), ("thinks", "so", False, TEXT),
     ("opened", "so", True, SAID), ("opened", "so</think>", False, TEXT.removeprefix("<think>\n"))],
)  # fmt: skip
def test_an_answer_that_goes_on(serving: Serving, model: str, begun: str, reasoning: bool, content: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": begun}]
    asked = {"model": model, "messages": messages, "continue_final_message": True}
    _, answer = post(serving, "/v1/chat/completions", asked)
    message = answer["choices"][0]["message"]
    assert ("reasoning_content" in message, message["content"]) == (reasoning, content)


def test_messages(claude: Anthropic, serving: Serving) -> None:
    answer = claude.messages.create(model="thinks", max_tokens=500, messages=ASK)
    assert [block.to_dict() for block in answer.content] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""}, {"type": "text", "text": SAID},
    ]  # fmt: skip
    with claude.messages.stream(model="thinks", max_tokens=500, messages=ASK) as stream:
        assert "".join(stream.text_stream) == SAID
        assert stream.get_final_message().content[0] == answer.content[0]
    found = events(streamed(serving, "/v1/messages", {"model": "thinks", "messages": ASK, "max_tokens": 500}))
    begun = [(each["index"], each["content_block"]["type"]) for each in found if each["type"] == "content_block_start"]
    assert begun == [(0, "thinking"), (1, "text")]
    kinds = [each["delta"]["type"] for each in found if each["type"] == "content_block_delta" and each["index"] == 0]
    assert set(kinds) == {"thinking_delta"}


def test_messages_with_thoughts_before(serving: Serving) -> None:
    model = serving.models["thinks"].model
    blocks: Any = [{"type": "thinking", "thinking": "why", "signature": ""}, {"type": "text", "text": "so"}]
    conversation = [*ASK, {"role": "assistant", "content": blocks[:1]}]
    assert messages.conversation({"messages": conversation})[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "why"}  # many templates take no other content
    ]
    asked = {"model": "thinks", "messages": [*ASK, {"role": "assistant", "content": blocks}, *ASK], "max_tokens": 500}
    told = [*ASK, {"role": "assistant", "content": "so", "reasoning_content": "why"}, *ASK]
    status, answer = post(serving, "/v1/messages/count_tokens", asked)
    assert (status, answer) == (200, {"input_tokens": len(model.apply_template(told))})
    hidden = {"type": "redacted_thinking", "data": "AA=="}  # of a cloud model that had the conversation before
    for content, said in (([hidden, *blocks], "why"), ([hidden, blocks[1]], ""), ([blocks[0], hidden], "why")):
        conversation = [*ASK, {"role": "assistant", "content": content}]
        assert messages.conversation({"messages": conversation})[1]["reasoning_content"] == said
        status, _ = post(serving, "/v1/messages", asked | {"messages": [*conversation, *ASK]})
        assert status == 200
    asked["messages"] = [{"role": "user", "content": [hidden]}]
    assert post(serving, "/v1/messages", asked)[0] == 400
    asked["messages"] = [{"role": "user", "content": blocks}]
    status, answer = post(serving, "/v1/messages", asked)
    assert status == 400 and "thinking" in answer["error"]["message"]


def test_thoughts_are_turned_on_and_off(serving: Serving) -> None:
    model = serving.models["thinks"].model
    for kind, variables in (("enabled", {"enable_thinking": True}), ("disabled", {"enable_thinking": False})):
        asked = {"messages": ASK, "max_tokens": 5, "thinking": {"type": kind, "budget_tokens": 1024}}
        status, answer = post(serving, "/v1/messages/count_tokens", asked | {"model": "thinks"})
        assert (status, answer["input_tokens"]) == (200, len(model.apply_template(ASK, variables=variables)))
        asked_openai = {"model": "thinks", "input": ASK, "max_output_tokens": 5, "chat_template_kwargs": variables}
        status, answer = post(serving, "/v1/responses", asked_openai)
        assert status == 200, answer
        assert answer["usage"]["input_tokens"] == len(model.apply_template(ASK, variables=variables))
    status, answer = post(serving, "/v1/messages", asked | {"model": "plain", "thinking": {"type": "enabled"}})
    assert (status, answer["error"]["message"].count("without thoughts")) == (400, 1)
    _, answer = post(serving, "/v1/messages", asked | {"model": "untold", "thinking": {"type": "enabled"}})
    assert "has no chat template" in answer["error"]["message"]
    status, answer = post(serving, "/v1/messages", asked | {"model": "opened", "thinking": {"type": "enabled"}})
    assert status == 200
    status, answer = post(serving, "/v1/messages", asked | {"model": "thinks", "thinking": {"type": "on"}})
    assert status == 400


@pytest.mark.parametrize(
    ("path", "more"), [("chat/completions", {"continue_final_message": True}), ("messages", {"max_tokens": 5})]
)
def test_thoughts_apart_from_a_begun_answer_are_refused(serving: Serving, path: str, more: dict[str, Any]) -> None:
    """A template writes them in its own way, which is not known here; to lose them would change the answer."""
    begun = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    status, answer = post(serving, f"/v1/{path}", {"model": "thinks", "messages": [*ASK, begun], **more})
    assert status == 400 and "put them into the text" in answer["error"]["message"]


def test_thoughts_before_calls(serving: Serving) -> None:
    asked = {"model": "calls", "max_tokens": 500, "messages": ASK, "tools": USE}
    found = events(streamed(serving, "/v1/messages", asked))
    begun = [(each["index"], each["content_block"]["type"]) for each in found if each["type"] == "content_block_start"]
    assert begun == [(0, "thinking"), (1, "tool_use")]
    _, answer = post(serving, "/v1/messages", asked)
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
    assert answer["content"][0]["thinking"] == f"So: {CALL}" and answer["stop_reason"] == "tool_use"
    _, answer = post(serving, "/v1/chat/completions", {"model": "calls", "messages": ASK, "tools": TOOLS})
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, f"So: {CALL}")
    _, answer = post(serving, "/v1/responses", {"model": "calls", "input": "weather?", "tools": FLAT})
    assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]


@pytest.mark.parametrize("stop", [[], [f"{TEXT[-2:]} and"]])
def test_every_token_is_scored_once(serving: Serving, stop: list[str]) -> None:
    """And an end token is none of the answer, even if text that was held back comes with it."""
    asked = {"model": "thinks", "messages": ASK, "logprobs": True, "n": 2, "stop": stop}
    _, answer = post(serving, "/v1/chat/completions", asked)
    for choice in answer["choices"]:
        assert bytes(byte for each in choice["logprobs"]["content"] for byte in each["bytes"]) == TEXT.encode()
    found = chunks(streamed(serving, "/v1/chat/completions", asked))
    for index in (0, 1):
        scored = [each["choices"][0]["logprobs"] for each in found if each["choices"][0]["index"] == index]
        tokens = [token for each in scored if each for token in each["content"]]
        assert tokens == answer["choices"][index]["logprobs"]["content"]


def test_answers_cut_within_thoughts(serving: Serving) -> None:
    _, answer = post(serving, "/v1/chat/completions", {"model": "thinks", "messages": ASK, "max_tokens": 4})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert THOUGHT.startswith(choice["message"]["reasoning_content"])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    _, answer = post(serving, "/v1/messages", {"model": "thinks", "messages": ASK, "max_tokens": 4})
    assert [block["type"] for block in answer["content"]] == ["thinking"] and answer["stop_reason"] == "max_tokens"
    _, answer = post(serving, "/v1/responses", {"model": "thinks", "input": "weather?", "max_output_tokens": 4})
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("reasoning", "incomplete")]


def test_responses(serving: Serving) -> None:
    asked = {"model": "thinks", "input": "weather?"}
    found = events(streamed(serving, "/v1/responses", asked))
    for each in found:
        TypeAdapter(ResponseStreamEvent).validate_python(each)
    names = [each["type"].removeprefix("response.") for each in found if "delta" not in each["type"]]
    item = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert names == ["created", "in_progress", *item[0], "reasoning_text.done", *item[1],
                     *item[0], "output_text.done", *item[1], "completed"]  # fmt: skip
    assert "".join(each["delta"] for each in found if each["type"] == "response.reasoning_text.delta") == THOUGHT
    response = Response.model_validate(found[-1]["response"])
    assert response.output_text == SAID and response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    first, second = found[-1]["response"]["output"]
    assert first | {"id": ""} == {
        "id": "", "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }  # fmt: skip
    assert first["id"] != second["id"]
    client = OpenAI(base_url=f"{serving.address}/v1", api_key="none", max_retries=0)
    with client.responses.stream(model="thinks", input="weather?") as stream:
        assert stream.get_final_response().output_text == SAID


# ---- formats behind thoughts ----

ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FORMAT: dict[str, Any] = {"type": "json_schema", "name": "one", "schema": ONE}
HELD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": FORMAT}}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 60, "output_config": {"format": FORMAT}}),
    ("/v1/responses", {"input": "weather?", "text": {"format": FORMAT}}),
]


def parts(path: str, found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Of a stream of any of the APIs: what is thought or said, piece by piece."""
    if path == "/v1/chat/completions":
        deltas = [choice["delta"] for each in found for choice in each["choices"]]
        return [(name, text) for each in deltas for name, text in each.items() if name != "role" and text]
    if path == "/v1/messages":
        deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
        names = {"thinking": "reasoning_content", "text": "content"}
        return [(names[name], each[name]) for each in deltas for name in names if name in each]
    names = {"response.reasoning_text.delta": "reasoning_content", "response.output_text.delta": "content"}
    return [(names[each["type"]], each["delta"]) for each in found if each["type"] in names]


@pytest.mark.parametrize(("path", "asked"), HELD)
def test_a_format_holds_behind_thoughts(serving: Serving, path: str, asked: dict[str, Any]) -> None:
    read = chunks if path == "/v1/chat/completions" else events
    found = parts(path, read(streamed(serving, path, asked | {"model": "held"})))
    names = [name for name, _ in found]
    assert names == sorted(names, reverse=True)  # thoughts first
    for name, expected in (("reasoning_content", "so far"), ("content", '{"a": 1}')):
        assert "".join(text for each, text in found if each == name) == expected


def test_a_whole_answer_in_a_format_behind_thoughts(serving: Serving) -> None:
    path, asked = HELD[0]
    for variables, thought in (({}, "so far"), ({"enable_thinking": False}, None)):
        asked = asked | {"model": "held", "chat_template_kwargs": variables, "receipt": True}
        _, answer = post(serving, path, asked)
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": 1}', "stop")
        assert choice["message"].get("reasoning_content") == thought
        assert serving.models["held"].model.verify_receipt(choice["receipt"]).valid
    _, answer = post(serving, path, asked | {"chat_template_kwargs": {}, "max_tokens": 3})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(("begun", "thinks"), [("<think>", True), ("<think>so</think>", False), ("so", False)])
def test_a_format_of_an_answer_that_goes_on(serving: Serving, begun: str, thinks: bool) -> None:
    told = {"messages": [*ASK, {"role": "assistant", "content": begun}], "continue_final_message": True}
    _, answer = post(serving, HELD[0][0], HELD[0][1] | told | {"model": "held"})
    message = answer["choices"][0]["message"]
    assert (message["content"], "reasoning_content" in message) == ('{"a": 1}', thinks)


def test_calls_that_have_to_come_follow_thoughts(serving: Serving) -> None:
    one = {"type": "function", "function": {"name": "one", "parameters": ONE}}
    asked = {"model": "held", "messages": ASK, "tools": [one], "tool_choice": "required", "parallel_tool_calls": False}
    _, answer = post(serving, "/v1/chat/completions", asked)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so far", None)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "one", "arguments": '{"a": 1}'}]


def test_formats_behind_thoughts_in_company(serving: Serving) -> None:
    asked = {"model": "held", "messages": ASK, "regex": "[a-z]{20}", "temperature": 2}
    _, together = post(serving, "/v1/chat/completions", asked | {"n": 4, "seed": 5})
    alone = [post(serving, "/v1/chat/completions", asked | {"seed": 5 + i})[1]["choices"][0] for i in range(4)]
    messages = [choice["message"] for choice in together["choices"]]
    assert messages == [choice["message"] for choice in alone]
    assert len({message["content"] for message in messages}) == 4
    assert all(re.fullmatch("[a-z]{20}", message["content"]) for message in messages)


CALLED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
TURNS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "assistant", "content": "so"}], [{"role": "assistant", "content": "so", "reasoning_content": "why"}]),
    ([], [{"role": "assistant", "content": "", "reasoning_content": "why"}]),
    ([CALLED], [{"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]}]),
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
      {"role": "assistant", "content": "so"}],
     [{"role": "assistant", "content": "so", "reasoning_content": "why\nx"}]),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "go"}],
     [{"role": "assistant", "content": "", "reasoning_content": "why"}, {"role": "user", "content": "go"}]),
]  # fmt: skip


@pytest.mark.parametrize(("items", "told"), TURNS)
def test_responses_with_thoughts_before(items: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
    assert responses.conversation({"input": [{"role": "user", "content": "?"}, thought, *items]})[1:] == told
