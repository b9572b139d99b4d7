"""Every byte of every kind of stream compared with a strict schema: which events come, in which order, with which
fields. Third-party clients ignore what they do not know, so they prove little about it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from bitnet_serve.server import Serving
from servers import request, served
from tool_models import ASK, CALL, FLAT, SECOND, TOOLS, calling_model

TEXT = "Nothing to call < here."
MODELS = {"text": TEXT, "both": f"So:\n{CALL}\n{SECOND}\nThat is all."}
USE: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    with served(*(calling_model(folder / f"{name}.bitnet", text) for name, text in MODELS.items())) as serving:
        yield serving


def keep(shape: Any, value: Any, where: str = "") -> None:
    """Raises AssertionError: the value has another shape. A shape: a type, a set of values, a dictionary whose every
    key is there, or may be where it ends with ?; or a list of what each entry is."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        names = {name.rstrip("?"): name for name in shape}
        assert value.keys() <= names.keys(), f"{where} has {value.keys() - names.keys()}"
        for name, full in names.items():
            if name in value or not full.endswith("?"):
                keep(shape[full], value[name], f"{where}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for entry in value:
            keep(shape[0], entry, f"{where}[]")
    elif isinstance(shape, (set, frozenset)):
        assert value in shape, f"{where} is {value!r}"
    else:
        assert isinstance(value, shape) and (type(value) is not bool or shape is bool), f"{where} is {value!r}"


COUNTS = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int,
          "prompt_tokens_details?": {"cached_tokens": int}}  # fmt: skip
TIMES = dict.fromkeys(
    ("queue_ms", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second",
     "seed"), (int, float),
)  # fmt: skip
REASONS = {None, "stop", "length", "tool_calls"}


def chunks(data: str) -> list[Any]:
    """The data of OpenAI's older streams, which end with a last word."""
    assert re.fullmatch(r"(data: \{[^\n]*\}\n\n)+data: \[DONE\]\n\n", data)
    return [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n")[:-2]]


def events(data: str) -> list[Any]:
    """The events of the other streams, each with its name."""
    found = re.findall(r"event: ([\w.]+)\ndata: (\{[^\n]*\})\n\n", data)
    assert "".join(f"event: {name}\ndata: {text}\n\n" for name, text in found) == data
    parsed = [json.loads(text) for _, text in found]
    assert [each["type"] for each in parsed] == [name for name, _ in found]
    return parsed


def ask(serving: Serving, path: str, body: dict[str, Any]) -> str:
    status, headers, text = request(serving, "POST", path, body | {"stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_older_streams(serving: Serving, path: str, usage: bool) -> None:
    chat = "chat" in path
    more: dict[str, Any] = {"messages": ASK, "tools": TOOLS} if chat else {"prompt": "x", "max_tokens": 5}
    scored = {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    token = {"token": str, "logprob": float, "bytes": [int]}
    shape_of_scores: dict[str, Any] = (
        {"content": [token | {"top_logprobs": [token]}], "refusal": {None}} if chat else
        {"tokens": [str], "token_logprobs": [float], "top_logprobs": [dict], "text_offset": [int]}
    )  # fmt: skip
    call = {"index": int, "id?": str, "type?": {"function"}, "function": {"name?": str, "arguments": str}}
    delta = {"role?": {"assistant"}, "content?": str, "tool_calls?": [call]}
    for model in MODELS:
        for scores in ({}, scored):
            options = {"stream_options": {"include_usage": True}} if usage else {}
            found = chunks(ask(serving, path, {"model": model, **more, **options, **scores}))
            for each in found:
                choice = {"index": {0}, "finish_reason": REASONS, "logprobs": (dict, type(None))}
                choice |= {"delta": delta} if chat else {"text": str}
                keep({
                    "id": str, "object": {"chat.completion.chunk" if chat else "text_completion"}, "created": int,
                    "model": {model}, "system_fingerprint": str, "choices": [choice], "timings?": TIMES,
                    **({"usage": (dict, type(None))} if usage else {}),
                }, each)  # fmt: skip
                if each["choices"] and (given := each["choices"][0]["logprobs"]) is not None:
                    keep(shape_of_scores, given)
            if usage:
                keep(COUNTS, found[-1]["usage"])
                assert found.pop()["choices"] == [] and all(each["usage"] is None for each in found)
            assert [each["choices"][0]["finish_reason"] is None for each in found] == [True] * (len(found) - 1) + [
                False
            ]
            assert all(("timings" in each) == (each is found[-1] and not usage) for each in found)
            assert len({each["id"] for each in found}) == 1
            if chat:
                steps = [next(iter(each["choices"][0]["delta"].items()), ("", "")) for each in found]
                assert [name for name, _ in steps].count("role") == 1 and steps[0] == ("role", "assistant")
                whole = "".join(each["choices"][0]["delta"].get("content", "") for each in found)
                assert whole == (TEXT if model == "text" else "So:That is all.")


RESPONSE = {
    "id": str, "object": {"response"}, "created_at": int, "status": {"in_progress", "completed"},
    "background": {False}, "error": {None}, "incomplete_details": {None}, "instructions": {None},
    "max_output_tokens": {None}, "metadata": dict, "model": {*MODELS}, "output": list, "parallel_tool_calls": {True},
    "previous_response_id": {None}, "store": {False}, "temperature": float, "text": {"format": {"type": {"text"}}},
    "tool_choice": {"auto"}, "tools": list, "top_p": float, "truncation": {"disabled"},
    "usage": (dict, type(None)),
}  # fmt: skip
PART = {"type": {"output_text"}, "text": str, "annotations": list, "logprobs": list}
ITEMS = {
    "message": {"id": str, "type": {"message"}, "role": {"assistant"}, "status": {"in_progress", "completed"},
                "content": [PART]},
    "function_call": {"id": str, "type": {"function_call"}, "status": {"in_progress", "completed"}, "call_id": str,
                      "name": {"weather", "clock"}, "arguments": str},
}  # fmt: skip
AT: dict[str, Any] = {"item_id": str, "output_index": int}
RESPONSES: dict[str, Any] = {
    "response.created": {"response": RESPONSE},
    "response.in_progress": {"response": RESPONSE},
    "response.output_item.added": {"output_index": int, "item": dict},
    "response.content_part.added": {**AT, "content_index": {0}, "part": PART},
    "response.output_text.delta": {**AT, "content_index": {0}, "delta": str, "logprobs": list},
    "response.output_text.done": {**AT, "content_index": {0}, "text": str, "logprobs": list},
    "response.content_part.done": {**AT, "content_index": {0}, "part": PART},
    "response.function_call_arguments.delta": {**AT, "delta": str},
    "response.function_call_arguments.done": {**AT, "arguments": str},
    "response.output_item.done": {"output_index": int, "item": dict},
    "response.completed": {"response": RESPONSE},
}
SAID = "output_item.added content_part.added( output_text.delta)+ output_text.done content_part.done output_item.done"
CALLED = r"output_item.added( function_call_arguments.delta)+ function_call_arguments.done output_item.done"


@pytest.mark.parametrize("model", MODELS)
def test_responses(serving: Serving, model: str) -> None:
    found = events(ask(serving, "/v1/responses", {"model": model, "input": "weather?", "tools": FLAT}))
    for number, each in enumerate(found):
        keep({"type": str, "sequence_number": {number}, **RESPONSES[each["type"]]}, each, each["type"])
        if "item" in each:
            keep(ITEMS[each["item"]["type"]], each["item"])
    names = " ".join(each["type"].removeprefix("response.") for each in found)
    items = SAID if model == "text" else f"{SAID} {CALLED} {CALLED} {SAID}"
    assert re.fullmatch(f"created in_progress {items} completed", names)
    for item in found[-1]["response"]["output"]:
        keep(ITEMS[item["type"]], item)
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"] and len({item["id"] for item in done}) == len(done)
    for each in found:
        if "item_id" in each:
            assert each["item_id"] == done[each["output_index"]]["id"]
    keep({"input_tokens": int, "input_tokens_details": {"cached_tokens": int, "cache_write_tokens": int},
          "output_tokens": int, "output_tokens_details": {"reasoning_tokens": int}, "total_tokens": int},
         found[-1]["response"]["usage"])  # fmt: skip


BLOCKS = {
    "text": {"type": {"text"}, "text": {""}},
    "tool_use": {"type": {"tool_use"}, "id": str, "name": {"weather", "clock"}, "input": dict},
}
DELTAS = {"text_delta": {"type": str, "text": str}, "input_json_delta": {"type": str, "partial_json": str}}
USAGE = {"input_tokens": int, "cache_read_input_tokens?": int, "output_tokens": int}
MESSAGES: dict[str, Any] = {
    "message_start": {"message": {"id": str, "type": {"message"}, "role": {"assistant"}, "model": {*MODELS},
                                  "content": list, "stop_reason": {None}, "stop_sequence": {None}, "usage": USAGE}},
    "content_block_start": {"index": int, "content_block": dict},
    "content_block_delta": {"index": int, "delta": dict},
    "content_block_stop": {"index": int},
    "message_delta": {"delta": {"stop_reason": {"end_turn", "tool_use"}, "stop_sequence": {None}}, "usage": USAGE},
    "message_stop": {},
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_messages(serving: Serving, model: str) -> None:
    asked = {"model": model, "messages": ASK, "tools": USE, "max_tokens": 500}
    found = events(ask(serving, "/v1/messages", asked))
    for each in found:
        keep({"type": str, **MESSAGES[each["type"]]}, each, each["type"])
        if "content_block" in each:
            keep(BLOCKS[each["content_block"]["type"]], each["content_block"])
        if each["type"] == "content_block_delta":
            keep(DELTAS[each["delta"]["type"]], each["delta"])
    names = " ".join(each["type"] for each in found)
    block = "content_block_start( content_block_delta)+ content_block_stop "
    assert re.fullmatch(f"message_start ({block}){{{1 if model == 'text' else 4}}}message_delta message_stop", names)
    places = [each["index"] for each in found if "index" in each]
    assert places == sorted(places) and set(places) == set(range(places[-1] + 1))
