"""Which tools may be called, and functions as clients sent them before there were tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from bitnet_serve.server import Serving
from servers import post, served
from test_serve_tools import ANSWERS, ARGUMENTS, calls_of
from tool_models import ASK, CALL, FLAT, TOOLS, calling_model, unheld_model


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    paths = [calling_model(folder / f"{name}.bitnet", ANSWERS[name]) for name in ("one", "two", "text")]
    paths.append(unheld_model(folder / "any.bitnet"))
    with served(*paths) as serving:
        yield serving


def prompt_tokens(client: OpenAI, model: str, **asked: Any) -> int:
    usage = client.chat.completions.create(**{"model": model, "messages": ASK} | asked).usage
    assert usage is not None
    return int(usage.prompt_tokens)


def allowed(mode: str, names: list[str]) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_are_allowed(client: OpenAI) -> None:
    """To describe the others to the model would offer them."""
    only_clock = allowed("auto", ["clock"])
    assert prompt_tokens(client, "two", tools=TOOLS, tool_choice=only_clock) == prompt_tokens(
        client, "two", tools=TOOLS[1:]
    )
    choice: Any = {"tools": TOOLS, "tool_choice": only_clock}
    (answer,) = client.chat.completions.create(model="two", messages=ASK, **choice).choices
    assert calls_of(answer.message) == [("clock", {})] and answer.message.content == f"{CALL}That is all."
    choice = {"tools": TOOLS, "tool_choice": allowed("required", ["clock"]), "parallel_tool_calls": False, "seed": 1}
    (answer,) = client.chat.completions.create(model="any", messages=ASK, max_tokens=60, **choice).choices
    assert not answer.message.content and [name for name, _ in calls_of(answer.message)] == ["clock"]
    flat: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
    response = client.responses.create(model="two", input="weather?", tools=FLAT, tool_choice=flat)
    assert [item.name for item in response.output if item.type == "function_call"] == ["clock"]


def test_tokens_with_tools_are_those_of_the_chat(serving: Serving, client: OpenAI) -> None:
    """As in vLLM: a client can find out whether its tools fit."""
    status, answer = post(serving, "/tokenize", {"model": "two", "messages": ASK, "tools": TOOLS})
    assert status == 200 and answer["count"] == prompt_tokens(client, "two", tools=TOOLS) > prompt_tokens(client, "two")
    older: Any = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": "{}"}},
        {"role": "function", "name": "clock", "content": "noon"},
    ]
    status, answer = post(serving, "/tokenize", {"model": "two", "messages": older})
    assert status == 200 and answer["count"] == prompt_tokens(client, "two", messages=older)
    status, answer = post(serving, "/tokenize", {"model": "two", "prompt": "x", "tools": TOOLS})
    assert (status, answer["error"]["param"]) == (400, "tools")


def test_functions_as_they_were_before_tools(client: OpenAI) -> None:
    functions: Any = [tool["function"] for tool in TOOLS]
    asked: dict[str, Any] = {"messages": ASK, "functions": functions}
    for model in ("one", "two"):
        (choice,) = client.chat.completions.create(model=model, **asked).choices
        call = choice.message.function_call
        assert choice.finish_reason == "function_call" and call is not None and choice.message.tool_calls is None
        assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(model=model, stream=True, **asked)]
        pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
        assert "".join(piece.name or "" for piece in pieces) == "weather"
        assert "".join(piece.arguments or "" for piece in pieces) == call.arguments
        assert chunks[-1].finish_reason == "function_call" and all(chunk.delta.tool_calls is None for chunk in chunks)
    named: Any = {**asked, "function_call": {"name": "weather"}, "seed": 5}
    (choice,) = client.chat.completions.create(model="any", **named).choices
    assert choice.message.function_call and "town" in json.loads(choice.message.function_call.arguments)
    (choice,) = client.chat.completions.create(model="one", **asked, function_call="none").choices
    assert choice.message.content == ANSWERS["one"]

    said: Any = {"role": "assistant", "content": None, "function_call": call.model_dump()}
    older = [*ASK, said, {"role": "function", "name": "weather", "content": "rain"}]
    calls: Any = [{"id": "1", "type": "function", "function": call.model_dump()}]
    today = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls},
             {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "rain"}]  # fmt: skip
    assert prompt_tokens(client, "text", messages=older) == prompt_tokens(client, "text", messages=today)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ({"functions": {"name": "f"}}, "functions"),
        ({"functions": [{"name": "f"}, 5]}, "tools"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "tool_choice"),
        ({"function_call": "always"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "function_call": {"arguments": 5}}]}, "messages"),
        ({"tools": TOOLS, "tool_choice": allowed("none", ["clock"])}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", ["rm"])}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", [])}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice"),
    ],
)
def test_wrong_choices(serving: Serving, wrong: Any, param: str) -> None:
    status, answer = post(serving, "/v1/chat/completions", {"model": "one", "messages": ASK} | wrong)
    assert (status, answer["error"]["param"]) == (400, param), answer
