"""Calls of tools over HTTP, as the clients of OpenAI and Anthropic see them: whole, and as streams."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import OpenAI

from bitnet.data import conversations
from bitnet_serve.server import Serving
from docs_text import blocks, commands_of
from servers import post, request, served
from tool_models import ASK, CALL, CLOCK, FLAT, LLAMA, SECOND, TOOLS, WEATHER, calling_model, unheld_model

if TYPE_CHECKING:
    from anthropic import Anthropic

PAGE = Path(__file__).parents[1] / "docs/tools.md"
ARGUMENTS = {"town": "Köln", "days": 3}
USE: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
ANSWERS = {
    "one": "Let me see.\n" + CALL,
    "two": f"{CALL}\n{SECOND}\nThat is all.",
    "broken": 'So: <tool_call>\n{"name": "weather", "arguments": {"town": Köln}}\n</tool_call>',
    "endless": CALL.replace("3", "1e999"),
    "unknown": CALL.replace("weather", "rm"),
    "text": "Nothing to call < here.",
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    paths = [calling_model(folder / f"{name}.bitnet", answer) for name, answer in ANSWERS.items()]
    llama = '{"name": "weather", "parameters": {"town": "Köln", "days": 3}}'
    paths.append(calling_model(folder / "llama.bitnet", llama, LLAMA))
    paths.append(unheld_model(folder / "any.bitnet"))
    with served(*paths) as serving:
        yield serving


def test_too_long_tools_are_told_from_messages(serving: Serving) -> None:
    long = [{"type": "function", "function": {"name": "f", "description": "y" * 3000}}]
    for path, asked in (("chat/completions", {"messages": ASK}), ("responses", {"input": "weather?"})):
        tools: Any = long if "messages" in asked else [{"type": "function", **long[0]["function"], "strict": False}]
        _, answer = post(serving, f"/v1/{path}", {"model": "any", "tools": tools, **asked})
        n, of_tools = answer["error"]["n_prompt_tokens"], int(answer["error"]["message"].split("; ")[1].split()[0])
        assert 3000 < of_tools < n < of_tools + 100 and answer["error"]["message"].count("tell of the tools") == 1


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


# ---- /v1/chat/completions ----


def test_calls(client: OpenAI) -> None:
    for model, text in (("one", "Let me see."), ("llama", None)):
        (choice,) = client.chat.completions.create(model=model, messages=ASK, tools=TOOLS).choices
        assert (choice.message.content, choice.finish_reason) == (text, "tool_calls")
        assert calls_of(choice.message) == [("weather", ARGUMENTS)]
    (choice,) = client.chat.completions.create(model="two", messages=ASK, tools=TOOLS).choices
    assert choice.message.content == "That is all."
    assert calls_of(choice.message) == [("weather", ARGUMENTS), ("clock", {})]
    (choice,) = client.chat.completions.create(
        model="two", messages=ASK, tools=TOOLS, parallel_tool_calls=False
    ).choices
    assert calls_of(choice.message) == [("weather", ARGUMENTS)] and choice.finish_reason == "tool_calls"
    for none in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}):
        (choice,) = client.chat.completions.create(model="one", messages=ASK, **none).choices
        assert (choice.message.content, choice.finish_reason) == (ANSWERS["one"], "stop")
        assert choice.message.tool_calls is None


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.parametrize("model", [*ANSWERS, "llama"])
def test_calls_as_a_stream_are_those_of_the_whole(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": ASK, "tools": TOOLS, "n": 2}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    for found, choice in zip(final.choices, whole.choices, strict=True):
        assert (found.message.content or None) == choice.message.content
        assert found.finish_reason == choice.finish_reason
        both = [[(call.function.name, call.function.arguments) for call in each.message.tool_calls or []]
                for each in (found, choice)]  # fmt: skip
        assert both[0] == both[1]
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == len(ids)
    deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
    if whole.choices[0].message.tool_calls:
        pieces = [call for delta in deltas for call in delta.tool_calls or []]
        assert all("<" not in (delta.content or "") for delta in deltas), "no part of a call is text"
        assert sum(piece.id is not None for piece in pieces) == len(ids) and len(pieces) > len(ids) + 4
        assert all(piece.function is not None and piece.function.name for piece in pieces if piece.id)


def test_what_is_no_call(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="unknown", messages=ASK, tools=TOOLS).choices
    assert (choice.message.content, choice.finish_reason) == (ANSWERS["unknown"], "stop")
    (choice,) = client.chat.completions.create(model="broken", messages=ASK, tools=TOOLS).choices
    assert choice.message.content == "So:" and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"town": ', "what the model wrote, as far as it is JSON"  # type: ignore[union-attr]
    (choice,) = client.chat.completions.create(model="one", messages=ASK, tools=TOOLS, max_tokens=17).choices
    assert choice.finish_reason == "length" and "<" not in (choice.message.content or "")


def test_what_has_to_be_called(client: OpenAI, serving: Serving) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    strict: Any = [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]
    for choice, tools in (("required", strict), (named, TOOLS)):
        asked: dict[str, Any] = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
        answer = client.chat.completions.create(model="any", messages=ASK, **asked)
        ((name, arguments),) = calls_of(answer.choices[0].message)
        assert name == "weather" and len(arguments["town"]) <= 6 and set(arguments) <= {"town", "days"}
        model = serving.models["any"].model
        expected = model.chat(
            ASK, **asked | {"tool_choice": choice if choice == "required" else "weather"}, max_tokens=None
        )
        assert expected.tool_calls[0].arguments == arguments, "as Model.chat has it"


def test_a_turn_with_results(client: OpenAI, serving: Serving) -> None:
    (choice,) = client.chat.completions.create(model="two", messages=ASK, tools=TOOLS).choices
    assert choice.message.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in choice.message.tool_calls]
    parts = [{**results[0], "content": [{"type": "text", "text": "rain"}]}, results[1]]
    for more in (results, parts):
        said: Any = [*ASK, choice.message.model_dump(), *more]
        answer = client.chat.completions.create(model="text", messages=said, tools=TOOLS)
        assert answer.choices[0].message.content == ANSWERS["text"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(serving.models["text"].model.apply_template(said, TOOLS))


def test_receipts_and_scores_of_calls(serving: Serving) -> None:
    asked = {"model": "one", "messages": ASK, "tools": TOOLS, "receipt": True, "logprobs": True, "temperature": 0}
    _, answer = post(serving, "/v1/chat/completions", asked)
    (choice,) = answer["choices"]
    assert serving.models["one"].model.verify_receipt(choice["receipt"]).valid
    spelled = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
    assert spelled.decode() == ANSWERS["one"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "regex": "a"}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"messages": [{"role": "tool", "content": [5]}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}, "strict": True}}]},
         "tools"),
    ],
)  # fmt: skip
def test_wrong_tools(serving: Serving, wrong: Any, param: str) -> None:
    status, answer = post(serving, "/v1/chat/completions", {"model": "one", "messages": ASK} | wrong)
    assert (status, answer["error"]["param"]) == (400, param), answer


# ---- /v1/responses ----


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.parametrize("model", ["one", "two", "llama", "text"])
def test_responses(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "weather?", "tools": FLAT}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    shown = [[(item.type, getattr(item, "name", ""), getattr(item, "arguments", "")) for item in each.output]
             for each in (whole, final)]  # fmt: skip
    assert shown[0] == shown[1] and whole.output_text == final.output_text and whole.status == "completed"
    calls = [item for item in whole.output if item.type == "function_call"]
    expected = {"one": ["weather"], "two": ["weather", "clock"], "llama": ["weather"], "text": []}[model]
    assert [call.name for call in calls] == expected
    assert not calls or json.loads(calls[0].arguments) == ARGUMENTS
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert (len(deltas) > 3) == bool(calls)
    given: Any = [{"role": "user", "content": "weather?"}, *(item.model_dump() for item in whole.output)]
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    answer = client.responses.create(model="text", input=given, tools=FLAT)
    assert answer.output_text == ANSWERS["text"]


def test_one_turn_of_a_model_is_one_message(client: OpenAI) -> None:
    whole = client.responses.create(model="two", input="weather?", tools=FLAT)
    given: Any = [{"role": "user", "content": "weather?"}, *(item.model_dump() for item in whole.output)]
    counts = []
    for model, tools in (("text", FLAT), ("text", openai.omit)):
        answer = client.responses.create(model=model, input=given, tools=tools)
        assert answer.usage is not None
        counts.append(answer.usage.input_tokens)
    assert counts[0] > counts[1] > 100


def test_strict_is_the_rule_of_responses(client: OpenAI) -> None:
    """A tool of which nothing else is said keeps to its parameters."""
    tools: Any = [{key: value for key, value in FLAT[0].items() if key != "strict"}]
    answer = client.responses.create(
        model="any", input="x", tools=tools, tool_choice={"type": "function", "name": "weather"}, temperature=1.5,
        parallel_tool_calls=False, max_output_tokens=600,
    )  # fmt: skip
    (call,) = answer.output
    assert call.type == "function_call" and (answer.status == "incomplete" or "town" in json.loads(call.arguments))


# ---- /v1/messages ----


def test_the_client_runs_tools(claude: Anthropic) -> None:
    """It asks for a thread first, and goes on without."""
    from anthropic import beta_tool

    asked: list[tuple[str, int]] = []

    @beta_tool
    def weather(town: str, days: int) -> str:
        """The weather to come."""
        asked.append((town, days))
        return "rain"

    runner = claude.beta.messages.tool_runner(
        model="one", max_tokens=100, tools=[weather], messages=ASK, max_iterations=2
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 2
    assert asked == [("Köln", 3)] * 2


@pytest.mark.parametrize("model", ["one", "two", "llama", "text", "broken", "unknown"])
def test_messages(claude: Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": ASK, "tools": USE, "max_tokens": 500}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    fields = [[(block.type, getattr(block, "text", ""), getattr(block, "name", ""), getattr(block, "input", 0))
               for block in each.content] for each in (whole, final)]  # fmt: skip
    assert fields[0] == fields[1]
    assert whole.stop_reason == final.stop_reason
    used = [(block.name, block.input) for block in whole.content if block.type == "tool_use"]
    said = [block.text for block in whole.content if block.type == "text"]
    both = [("weather", ARGUMENTS), ("clock", {})]
    assert used == {"one": both[:1], "two": both, "llama": both[:1]}.get(model, [])
    assert whole.stop_reason == ("tool_use" if used else "end_turn")
    if model == "broken":
        assert said == ["So:", '{"name": "weather", "arguments": {"town": '], "arguments that are no object are text"
    results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
                    for block in whole.content if block.type == "tool_use"]  # fmt: skip
    more: Any = [*ASK, {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
                 {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]}]  # fmt: skip
    answer = claude.messages.create(model="text", max_tokens=50, messages=more, tools=USE)
    assert answer.content[0].type == "text" and answer.content[0].text == ANSWERS["text"]
    counted = claude.messages.count_tokens(model="text", messages=more, tools=USE)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_messages_are_json_whatever_a_model_writes(serving: Serving) -> None:
    _, answer = post(serving, "/v1/messages", {"model": "endless", "messages": ASK, "tools": USE, "max_tokens": 500})
    assert [block["type"] for block in answer["content"]] == ["text"] and "1e999" in answer["content"][0]["text"]


def test_what_messages_has_to_call(claude: Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    answer = claude.messages.create(model="any", messages=ASK, tools=USE, max_tokens=900, tool_choice=choice)
    (block,) = answer.content
    assert (block.type == "tool_use" and len(block.input["town"]) <= 6) or answer.stop_reason == "max_tokens"  # type: ignore[arg-type]
    none = claude.messages.create(model="one", messages=ASK, tools=USE, max_tokens=90, tool_choice={"type": "none"})
    assert none.stop_reason == "end_turn" and none.content[0].type == "text"


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": USE, "tool_choice": {"type": "all"}},
        {"tools": USE, "tool_choice": "auto"},
        {"tools": USE, "tool_choice": {"type": "tool", "name": "rm"}},
        {"tools": USE, "tool_choice": {"type": "tool"}},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [5]}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 5}]}]},
    ],
)
def test_wrong_messages(serving: Serving, wrong: Any) -> None:
    asked = {"model": "one", "messages": ASK, "max_tokens": 5} | wrong
    status, _, answer = request(serving, "POST", "/v1/messages", asked)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer


@pytest.mark.parametrize("tool", [{"type": "web_search"}, CLOCK, 5])
def test_the_form_that_tools_of_responses_have_is_told(serving: Serving, tool: Any) -> None:
    """One of /v1/chat/completions too: in that form it would get the next error."""
    status, answer = post(serving, "/v1/responses", {"model": "one", "input": "weather?", "tools": [tool]})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert answer["error"]["message"].endswith('expected {"type": "function", "name": …}')


# ---- the page of docs ----


def test_the_page_of_docs_works(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except for third-party clients, which `make clients` runs."""
    calling_model(tmp_path / "assistant.bitnet", CALL)
    monkeypatch.chdir(tmp_path)
    found = blocks(PAGE.read_text(encoding="utf-8"))
    python, _ = (block.text for block in found if block.language == "python")
    exec(compile(python, "tools", "exec"), {"__name__": "tools"})
    assert "<tool_call>" not in capsys.readouterr().out
    (command,) = (command for block in found for command in commands_of(block) if command.startswith("curl"))
    words = shlex.split(command)
    status, answer = post(serving, "/v1/chat/completions", json.loads(words[words.index("-d") + 1]))
    assert status == 200 and answer["choices"][0]["message"]["role"] == "assistant"
    (record,) = (block.text for block in found if block.language == "json")
    (tmp_path / "talks.jsonl").write_text(record)
    (talk,) = conversations.read([tmp_path / "talks.jsonl"])
    assert talk.tools is not None and talk.messages[1]["tool_calls"][0]["function"]["name"] == "clock"
