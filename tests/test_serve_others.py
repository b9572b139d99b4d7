"""The server's other APIs: /v1/responses through the openai package, /v1/messages through that of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from bitnet_serve import application
from bitnet_serve.errors import ApiError
from bitnet_serve.server import Serving
from runtime_models import TEMPLATE, scripted_model
from servers import post, request, served
from tool_models import FLAT

if TYPE_CHECKING:
    from anthropic import Anthropic

SCRIPT = [b"Good", b" day", b", \xe2\x82", b"\xac!"]
MESSAGES: Any = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("models") / "script.bitnet"
    with served(scripted_model(path, SCRIPT, template=TEMPLATE, max_context=256), api_keys=["key"]) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(serving: Serving) -> OpenAI:
    return OpenAI(base_url=f"{serving.address}/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def claude(serving: Serving) -> Anthropic:
    from anthropic import Anthropic

    return Anthropic(base_url=serving.address, api_key="key", max_retries=0)


def streamed(serving: Serving, path: str, body: Any) -> list[Any]:
    """Events, each with its name before its data."""
    _, _, text = request(serving, "POST", path, body | {"stream": True}, {"x-api-key": "key"})
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for name, data in (block.split("\n") for block in blocks):
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


# ---- /v1/responses ----


def test_responses(client: OpenAI) -> None:
    parts: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    for asked in ("go", parts):
        answer = client.responses.create(model="script", input=asked, instructions="be kind", store=False)
        assert (answer.output_text, answer.status) == ("Good day, €!", "completed")
        assert answer.usage is not None and answer.usage.output_tokens == 4
    cut = client.responses.create(model="script", input="go", max_output_tokens=2)
    assert (cut.output_text, cut.status) == ("Good day", "incomplete")
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_a_response_repeats_what_was_asked(serving: Serving) -> None:
    asked: dict[str, Any] = {
        "instructions": "be kind", "max_output_tokens": 2, "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "temperature": 0.5, "text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none",
        "tools": FLAT, "top_p": 0.75,
    }  # fmt: skip
    told = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "repeat " * 20}]
    n = len(serving.models["script"].model.apply_template(told))
    for _ in range(2):
        _, answer = post(serving, "/v1/responses", {**asked, "input": told[1]["content"]}, **{"x-api-key": "key"})
        assert {name: answer[name] for name in asked} == asked
        usage = answer["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (n, 2, n + 2)
    for text in ({"verbosity": "low"}, {"verbosity": "low", "format": None}):
        _, answer = post(serving, "/v1/responses", {"input": "go", "text": text}, **{"x-api-key": "key"})
        assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert usage["input_tokens_details"]["cached_tokens"] == n - 1


@pytest.mark.usefixtures("token_by_token")
def test_responses_as_a_stream(client: OpenAI, serving: Serving) -> None:
    with client.responses.stream(model="script", input="go") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert deltas == ["Good", " day", ", ", "€!"]
        assert stream.get_final_response().output_text == "Good day, €!"
    events = streamed(serving, "/v1/responses", {"input": "go"})
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    Response.model_validate(events[-1]["response"])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "max_output_token": 5}, "max_output_token"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": None}}}, "text"),
        # The model sees no images, which is no fault of a field.
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "/etc/passwd"}]}]}, None),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input"),
    ],
)
def test_wrong_responses(serving: Serving, asked: Any, param: str | None) -> None:
    status, answer = post(serving, "/v1/responses", asked, **{"x-api-key": "key"})
    assert (status, answer["error"]["param"]) == (400, param)


# ---- /v1/messages ----


def test_messages(claude: Anthropic) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
    for asked in (MESSAGES, parts):
        answer = claude.messages.create(model="script", max_tokens=50, messages=asked, system="be kind")
        (block,) = answer.content
        assert block.type == "text" and block.text == "Good day, €!"
        assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("end_turn", None, 4)
    cut = claude.messages.create(model="script", max_tokens=2, messages=MESSAGES)
    assert cut.stop_reason == "max_tokens"
    stopped = claude.messages.create(model="script", max_tokens=50, messages=MESSAGES, stop_sequences=["zz", "ay"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ay")
    counted = claude.messages.count_tokens(model="script", messages=MESSAGES)
    assert counted.input_tokens == 5


def test_a_list_of_no_system_texts_is_none(serving: Serving) -> None:
    def counted(**system: Any) -> int:
        body = {"messages": MESSAGES, **system}
        status, answer = post(serving, "/v1/messages/count_tokens", body, **{"x-api-key": "key"})
        assert status == 200
        return int(answer["input_tokens"])

    assert counted(system=[]) == counted() < counted(system="") == counted(system=[{"type": "text", "text": ""}])


def test_tokens_of_what_does_not_fit_are_counted(claude: Anthropic, serving: Serving) -> None:
    from anthropic import BadRequestError

    model = serving.models["script"].model
    long: Any = [{"role": "user", "content": "go " * model.n_ctx}]
    counted = claude.messages.count_tokens(model="script", messages=long)
    assert counted.input_tokens == len(model.apply_template(long)) > model.n_ctx
    with pytest.raises(BadRequestError, match=f"{counted.input_tokens} tokens exceed"):
        claude.messages.create(model="script", max_tokens=1, messages=long)


def test_reused_tokens_are_told(claude: Anthropic, serving: Serving) -> None:
    model = serving.models["script"].model
    asked: Any = {"model": "script", "max_tokens": 1, "messages": [{"role": "user", "content": "reuse " * 20}]}
    n = len(model.apply_template(asked["messages"]))
    first = claude.messages.create(**asked).usage
    assert (first.input_tokens, first.cache_read_input_tokens) == (n, None)
    with claude.messages.stream(**asked) as stream:
        usage = [claude.messages.create(**asked).usage, stream.get_final_message().usage]
    assert [(each.input_tokens, each.cache_read_input_tokens) for each in usage] == [(1, n - 1)] * 2


def test_an_answer_that_is_begun_goes_on(claude: Anthropic, serving: Serving) -> None:
    model = serving.models["script"].model
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "Good"}]
    answer = claude.messages.create(model="script", max_tokens=50, messages=begun, extra_body={"temperature": 0})
    prompt = [*model.apply_template(MESSAGES), *model.tokenize("Good", add_bos=False)]
    assert answer.usage.input_tokens == len(prompt)
    expected = model.generate(prompt, max_tokens=50, temperature=0)
    assert "".join(block.text for block in answer.content if block.type == "text") == expected.text
    assert claude.messages.count_tokens(model="script", messages=begun).input_tokens == len(prompt)


def test_thinking_is_left_to_the_model(claude: Anthropic) -> None:
    asked: Any = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    answer = claude.messages.create(model="script", max_tokens=50, messages=MESSAGES, **asked)
    assert [block.text for block in answer.content if block.type == "text"] == ["Good day, €!"]


def test_wishes_about_caching_change_no_answer(claude: Anthropic, client: OpenAI) -> None:
    hint: Any = {"extra_body": {"cache_control": {"type": "ephemeral"}}}
    answer = claude.messages.create(model="script", max_tokens=50, messages=MESSAGES, **hint)
    assert [block.text for block in answer.content if block.type == "text"] == ["Good day, €!"]
    hint = {"extra_body": {"prompt_cache_options": {"mode": "explicit"}}}
    assert client.responses.create(model="script", input="go", **hint).output_text == "Good day, €!"


@pytest.mark.usefixtures("token_by_token")
def test_messages_as_a_stream(claude: Anthropic, serving: Serving) -> None:
    with claude.messages.stream(model="script", max_tokens=50, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == "Good day, €!"
        assert stream.get_final_message().stop_reason == "end_turn"
    events = streamed(serving, "/v1/messages", {"messages": MESSAGES, "max_tokens": 50})
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"] == {"input_tokens": 5, "output_tokens": 0}
    events = streamed(serving, "/v1/messages", {"messages": MESSAGES, "max_tokens": 50, "stop_sequences": ["ay"]})
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "ay"}


def test_errors_of_messages_have_their_classes(claude: Anthropic, serving: Serving) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="expected one of: script"):
        claude.messages.create(model="claude", max_tokens=5, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is missing"):
        claude.post("/v1/messages", body={"messages": MESSAGES}, cast_to=object)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="other").models.list()
    status, answer = post(serving, "/v1/messages", {}, **{"x-api-key": "other"})
    assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{serving.address}/v1", api_key="other", max_retries=0).models.list()
    status, answer = post(serving, "/v1/messages", b" " * (application.TEXT_BODY + 1), **{"x-api-key": "key"})
    assert (status, answer["type"], answer["error"]["type"]) == (413, "error", "request_too_large")
    kinds = [
        ApiError(500, "", "engine_error").body(path)["error"]["type"] for path in ("/v1/messages", "/v1/responses")
    ]
    assert kinds == ["api_error", "server_error"]
    for wrong in (
        {"system": 5},
        {"messages": [{"role": "user", "content": []}]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"tools": [{"name": "x"}]},
        {"output_config": {"format": {"type": "text"}}},
        {"output_config": {"format": {"type": "json_schema", "schema": None}}},
        {"output_config": {"efort": "low"}},
        {"thread": {"type": "create"}},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Good "}]},
        {"messages": [{"role": "assistant", "content": "Good"}]},
    ):
        asked = {"messages": MESSAGES, "max_tokens": 5} | wrong
        status, answer = post(serving, "/v1/messages", asked, **{"x-api-key": "key"})
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")


def test_models_have_what_anthropics_client_counts_on(claude: Anthropic, serving: Serving) -> None:
    from anthropic.types import ModelInfo

    (model,) = claude.models.list()
    for found in (model, claude.models.retrieve("script")):
        TypeAdapter(ModelInfo).validate_python(found.to_dict())
        assert (found.id, found.display_name, found.type) == ("script", "script", "model")
        assert found.created_at.timestamp() == serving.models["script"].created
    page = claude.models.list()
    assert (page.has_more, page.first_id, page.last_id, page.has_next_page()) == (False, "script", "script", False)


@pytest.mark.parametrize(
    ("asked", "text"),
    [({}, "Good day, €!"), ({"stop_sequences": ["day"]}, "Good "), ({"stop": ["day"]}, "Good "),
     ({"until": ["day"]}, "Good "), ({"stop_sequences": None}, "Good day, €!")],
)  # fmt: skip
def test_stop_texts_by_every_name(serving: Serving, asked: dict[str, Any], text: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 50} | asked
    status, answer = post(serving, "/v1/messages", body, **{"x-api-key": "key"})
    assert (status, answer["content"][0]["text"]) == (200, text)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "stop": [], "stop_sequences": ["a"]}, "stop"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "until": ["a"] * 17}, "until"),
        ("/v1/responses", {"input": "go", "max_tokens": 5, "max_output_tokens": 5}, "max_tokens"),
        ("/v1/responses", {"input": "go", "max_output_tokens": "x"}, "max_output_tokens"),
        ("/v1/fim/completions", {"prompt": "go", "random_seed": "x"}, "random_seed"),
        ("/v1/responses", {"input": "go", "\ud800": 5}, "\\ud800"),
        (
            "/v1/completions",
            {"prompt": "go", "stream": True, "stream_options": {"\ud800": 5}},
            "stream_options.\\ud800",
        ),
        ("/v1/responses", {"input": "go", "text": {"form": {}}}, "text"),
        ("/v1/responses", {"input": "go", "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/responses", {"input": "go", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "system": 5}, "system"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "system": [5]}, "system"),
        ("/tokenize", {"messages": MESSAGES, "prompt": "go"}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_fields_that_are_refused(serving: Serving, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = post(serving, path, body, **{"x-api-key": "key"})
    assert (status, answer["error"]["param"]) == (400, param)


def test_parts_that_are_refused_are_named_by_the_field_that_has_them(serving: Serving) -> None:
    said = [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]
    for path, field in (("/v1/responses", "input"), ("/v1/chat/completions", "messages")):
        status, answer = post(serving, path, {field: said}, **{"x-api-key": "key"})
        assert (status, answer["error"]["param"]) == (400, field)
        assert answer["error"]["message"].startswith(f"{field} has {{'type': 'input_file'")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": None}}),
        ("/v1/responses", {"input": "go", "text": {"format": None, "verbosity": None}}),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 5, "tool_choice": {"type": "auto", "disable_parallel_tool_use": None}},
        ),
    ],
)
def test_null_counts_as_missing_within_fields_too(serving: Serving, path: str, asked: dict[str, Any]) -> None:
    assert post(serving, path, asked, **{"x-api-key": "key"})[0] == 200


def test_agents_may_ask_for_thoughts_that_there_are_not(client: OpenAI) -> None:
    """As Codex does in each request."""
    answer = client.responses.create(model="script", input="go", include=["reasoning.encrypted_content"], store=False)
    assert answer.output_text == "Good day, €!" and [item.type for item in answer.output] == ["message"]
    with pytest.raises(
        openai.BadRequestError, match=r"include has 'message.output_text.logprobs', which no answer here has"
    ):
        client.responses.create(model="script", input="go", include=["message.output_text.logprobs"])
