"""Wrong requests: each gets an error that says what is wrong. What is no HTTP: test_serve_http; requests without
permission: test_serve_guard; many requests: test_serve_load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitnet_serve.endpoints import chat, completions, embeddings, fields, messages, responses
from bitnet_serve.server import Serving
from runtime_models import TEMPLATE, scripted_model, small_model
from servers import idle, post, request, served, wait

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    script = scripted_model(folder / "script.bitnet", [b"Good", b" day"], template=TEMPLATE, max_context=256)
    with served(script, small_model(folder)) as serving:
        yield serving


@pytest.mark.parametrize(
    ("path", "data", "param", "code"),
    [
        (CHAT, b'{"messages": [{"ro', None, "invalid_json"),
        (CHAT, b"[" * 100_000, None, "invalid_json"),
        (CHAT, b'{"a":' * 100_000, None, "invalid_json"),
        (CHAT, b"[]", None, "invalid_json"),
        (CHAT, b"\xff\xfe\x00", None, "invalid_json"),
        (CHAT, b'{"n": NaN}', None, "invalid_json"),
        ("/v1/responses", b'{"input": "x", "metadata": {"a": 1e999}}', None, "invalid_json"),
        (CHAT, b'{"seed": 1' + b"0" * 5000 + b"}", None, "invalid_json"),
        (CHAT, b'{"n": 1, "n": 2}', None, "invalid_json"),
        (CHAT, {}, "messages", "missing_required_parameter"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (CHAT, {"messages": MESSAGES * 1025}, "messages", "invalid_value"),
        (CHAT, {"messages": ["go"]}, "messages", "invalid_value"),
        (CHAT, {"messages": "go"}, "messages", "invalid_type"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "n": 129}, "n", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "n": 0}, "n", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "n": True}, "n", "invalid_type"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "temperature": "hot"}, "temperature", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "temperature": 1e400}, "temperature", "invalid_json"),
        (CHAT, {"messages": MESSAGES, "max_tokens": -2}, "max_tokens", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2**63}, "max_tokens", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "stop": ["x"] * 17}, "stop", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "stop": ""}, "stop", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"03": 1, "3": 2}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": [1]}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "temprature": 1}, "temprature", "unknown_parameter"),
        (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream", "invalid_type"),
        (CHAT, {"messages": MESSAGES, "modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        (CHAT, {"messages": MESSAGES, "modalities": "text"}, "modalities", "invalid_type"),
        (CHAT, {"messages": MESSAGES, "stream_options": {}}, "stream_options", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format", "invalid_format"),
        (CHAT, {"messages": MESSAGES, "response_format": 5}, "response_format", "invalid_format"),
        (COMPLETE, {"prompt": "x", "json_schema": {"type": "x"}}, "json_schema", "invalid_format"),
        (
            COMPLETE,
            {"prompt": "x", "json_schema": {}, "response_format": {"type": "json_object"}},
            "json_schema",
            "invalid_format",
        ),
        (
            "/v1/responses",
            {"input": "x", "json_schema": {}, "text": {"format": {"type": "json_object"}}},
            "json_schema",
            "invalid_format",
        ),
        (COMPLETE, {"prompt": "x", "regex": "("}, "regex", "invalid_format"),
        (COMPLETE, {"prompt": "x", "regex": "a", "grammar": "start: x"}, "grammar", "invalid_format"),
        (CHAT, {"messages": MESSAGES, "model": 5}, "model", "invalid_type"),
        (COMPLETE, {}, "prompt", "missing_required_parameter"),
        (COMPLETE, {"prompt": []}, "prompt", "invalid_type"),
        (COMPLETE, {"prompt": [[]]}, "prompt", "invalid_value"),
        (COMPLETE, {"prompt": [1, "x"]}, "prompt", "invalid_type"),
        ("/detokenize", {"tokens": [1, False]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1], "top_k": 5}, "top_k", "unknown_parameter"),
        (COMPLETE, {"prompt": [1, 10**6]}, "prompt", "invalid_value"),
        (COMPLETE, {"prompt": [1, -1]}, "prompt", "invalid_value"),
        (COMPLETE, {"prompt": "\ud800"}, "prompt", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "invalid_value"),
        ("/infill", {"input_prefix": "\ud800", "input_suffix": "x"}, "input_prefix", "invalid_value"),
        ("/infill", {"input_prefix": "x", "input_suffix": "\ud800"}, "input_suffix", "invalid_value"),
        ("/infill", {"input_extra": [{"text": "\ud800"}], "input_suffix": "x"}, "input_extra", "invalid_value"),
        ("/infill", {"input_prefix": "x", "prompt": "\ud800"}, "prompt", "invalid_value"),
        ("/v1/fim/completions", {"prompt": "\ud800"}, "prompt", "invalid_value"),
        ("/v1/fim/completions", {"prompt": "x", "suffix": "\ud800"}, "suffix", "invalid_value"),
        (COMPLETE, {"prompt": ["x"] * 100, "n": 2}, "n", "invalid_value"),
        (COMPLETE, {"prompt": "x", "suffix": "y"}, None, "unsupported_by_model"),
        (COMPLETE, {"prompt": [1], "suffix": "y"}, "suffix", "invalid_value"),
        (COMPLETE, {"prompt": "x", "suffix": 5}, "suffix", "invalid_type"),
        ("/infill", {"input_prefix": "x"}, None, "unsupported_by_model"),
        ("/infill", {"input_extra": ["x"]}, "input_extra", "invalid_value"),
        ("/infill", {"input_prefx": "x"}, "input_prefx", "unknown_parameter"),
        ("/v1/fim/completions", {"suffix": "x"}, "prompt", "missing_required_parameter"),
        (COMPLETE, {"prompt": "x", "best_of": 3}, "best_of", "unsupported_parameter"),
        (COMPLETE, {"prompt": "x" * 257}, "prompt", "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 257}]}, "messages", "context_length_exceeded"),
        ("/v1/responses", {"input": "x" * 257}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x" * 257, "pooling": "mean"}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x"}, "pooling", "invalid_value"),
        ("/v1/embeddings", {"input": [], "pooling": "mean"}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": "x", "pooling": "mean", "dimensions": 129}, "dimensions", "invalid_value"),
        ("/tokenize", {"prompt": 5}, "prompt", "invalid_type"),
        ("/detokenize", {"tokens": ["x"]}, "tokens", "invalid_value"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(
    serving: Serving, path: str, data: Any, param: str | None, code: str
) -> None:
    status, answer = post(serving, path, data)
    assert status == 400
    error = answer["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["param"] == param or code == "invalid_json"
    assert len(error["message"]) < 500
    wait(lambda: idle(serving))


def test_what_is_passed_over_is_in_the_docs(serving: Serving) -> None:
    docs = (Path(__file__).parent.parent / "docs/server.md").read_text(encoding="utf-8")
    for name in fields.IGNORED:
        assert f"`{name}`" in docs, name
    nothing = {"modalities": ["text"], "timings_per_token": True, "return_progress": True, "reasoning_effort": "low"}
    nothing |= {"max_completion_tokens": 1}  # as max_tokens says
    assert post(serving, CHAT, {"messages": MESSAGES, "max_tokens": 1} | nothing)[0] == 200


@pytest.mark.parametrize("stop", ["more than sixteen characters", [str(i) for i in range(16)]])
def test_as_many_stop_texts_as_allowed(serving: Serving, stop: Any) -> None:
    assert post(serving, COMPLETE, {"prompt": "x", "max_tokens": 1, "stop": stop})[0] == 200


def test_what_one_path_alone_passes_over_is_told_with_the_path(serving: Serving) -> None:
    docs = " ".join((Path(__file__).parent.parent / "docs/server.md").read_text(encoding="utf-8").split())
    only = {
        "/v1/responses": {"input": "x", "max_output_tokens": 1, "reasoning": {"effort": "low"}},
        "/v1/messages": {
            "messages": MESSAGES, "max_tokens": 1, "output_config": {"effort": "low"}, "context_management": {},
            "inference_geo": "eu",
        },
    }  # fmt: skip
    for path, body in only.items():
        told = docs.partition(f"; in `{path}` ")[2].partition(";")[0]
        passed_over = [name for name in body if f"`{name}`" in told]
        assert passed_over and post(serving, path, body)[0] == 200
        for name in passed_over:
            assert post(serving, CHAT, {"messages": MESSAGES, "max_tokens": 1, name: body[name]})[0] == 400, name


def test_an_address_with_and_without_v1(serving: Serving) -> None:
    """A client that was given another address than it expects is told so."""
    for asked, meant in (("/chat/completions", CHAT), ("/v1/v1/messages", "/v1/messages"), ("/v1/metrics", "/metrics")):
        _, answer = post(serving, asked, {})
        assert answer["error"]["message"] == f"there is no POST {asked!r}; did you mean {meant}?"


def test_a_path_that_is_not_there(serving: Serving) -> None:
    near = {
        "/completion": "/v1/completions", "/v1/chat/completion": CHAT, "/chat/completion": CHAT,
        "/v1/embedding": "/v1/embeddings", "/metric": "/metrics",
    }  # fmt: skip
    for asked, meant in near.items():
        told = post(serving, asked, {})[1]["error"]["message"]
        assert told == f"there is no POST {asked!r}; did you mean {meant}?"
    for path, shown in (("/api/chat", "/api/chat"), ("/v1/moderations",) * 2, ("/v1/chat%3F/x", "/v1/chat?/x")):
        told = post(serving, path, {})[1]["error"]["message"]
        assert told == f"there is no POST {shown!r}; /openapi.json lists what there is"


def test_a_slash_at_the_end_is_no_redirect(serving: Serving) -> None:
    """It would have the scheme and the path that a proxy in front has replaced."""
    assert post(serving, f"{CHAT}/", {"messages": MESSAGES, "max_tokens": 1})[0] == 200
    assert request(serving, "GET", "/v1/models/")[2] == request(serving, "GET", "/v1/models")[2]
    assert request(serving, "GET", "/nothing/")[0] == 404


def test_the_opposite_is_not_proposed(serving: Serving) -> None:
    for name, expected in (("max_p", ""), ("max_tokns", "; did you mean 'max_tokens'?")):
        _, answer = post(serving, CHAT, {"messages": MESSAGES, name: 1})
        assert answer["error"]["message"] == f"unknown parameter {name!r}{expected}"


def test_where_few_parameters_are_known_all_are_named(serving: Serving) -> None:
    told = {name: post(serving, "/detokenize", {name: [1]})[1]["error"]["message"] for name in ("content", "token")}
    assert told["content"] == "unknown parameter 'content', expected model, tokens"
    assert told["token"] == "unknown parameter 'token'; did you mean 'tokens'?"
    _, answer = post(serving, "/tokenize", {"content": "x"})  # llama.cpp's name
    assert answer["error"]["message"].startswith("unknown parameter 'content', expected model, prompt, messages")


def test_too_long_a_prompt_is_told_in_numbers(serving: Serving) -> None:
    _, answer = post(serving, COMPLETE, {"prompt": [1] * 300})
    assert (answer["error"]["n_prompt_tokens"], answer["error"]["n_ctx"]) == (300, 256)
    assert "this model's maximum context length is 256 tokens" in answer["error"]["message"]  # as litellm looks for it
    assert "shorten prompt" in answer["error"]["message"] and "n_ctx" not in answer["error"]["message"]
    _, answer = post(serving, COMPLETE, {"prompt": ["x", [1] * 300]})
    assert answer["error"]["message"].startswith("prompt 1: 300 tokens")
    _, answer = post(serving, "/v1/embeddings", {"input": ["x", [1] * 300], "pooling": "mean"})
    assert answer["error"]["message"].startswith("input 1: 300 tokens")


def test_other_paths_methods_and_types(serving: Serving) -> None:
    assert request(serving, "GET", "/v1/nothing")[0] == 404
    status, headers, answer = request(serving, "GET", CHAT)
    assert (status, headers["allow"], answer["error"]["code"]) == (405, "POST", "wrong_method")
    status, answer = post(serving, CHAT, {}, **{"content-type": "text/plain"})
    assert status == 415
    told = "content-type is 'text/plain', expected application/json; with curl add -H 'content-type: application/json'"
    assert answer["error"]["message"] == told
    status, answer = post(serving, CHAT, {}, **{"content-encoding": "gzip"})
    assert (status, answer["error"]["message"]) == (415, "content-encoding is 'gzip', expected none")
    assert post(serving, CHAT, {"model": "x\r\ny", "messages": MESSAGES})[0] == 404


def test_a_model_that_sees_no_images_says_so_whatever_they_are(serving: Serving) -> None:
    for url in ("/etc/passwd", "http://localhost/x.png", "data:,x"):
        part = {"type": "image_url", "image_url": url}
        status, answer = post(serving, CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert (status, answer["error"]["code"]) == (400, "unsupported_by_model")
        assert "sees no images" in answer["error"]["message"]


def test_nesting_where_a_word_is_expected(serving: Serving) -> None:
    """In a body that another thread parses, nested deeper than Python's repr can go."""
    deep = b"[" * 950 + b"]" * 950
    body = b'{"user": "' + b"x" * 20_000 + b'", "messages": [{"role": "user", "content": [{"type": ' + deep + b"}]}]}"
    status, answer = post(serving, CHAT, body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_fields_that_are_null_are_missing(serving: Serving) -> None:
    """As clients send all that they know."""
    names = ("stream", "stream_options", "stop", "temperature", "tools", "tool_choice", "response_format", "n")
    assert post(serving, CHAT, {"messages": MESSAGES, "max_tokens": 1} | dict.fromkeys(names))[0] == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"null", "the body is None, expected a JSON object"), (b'{"n": ' + b"9" * 5000 + b"}", "5,000 digits")],
)
def test_bodies_of_another_kind(serving: Serving, body: bytes, said: str) -> None:
    status, _, answer = request(serving, "POST", COMPLETE, body)
    assert status == 400 and said in answer["error"]["message"] and "sys." not in answer["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(chat.KNOWN | completions.KNOWN | embeddings.KNOWN | messages.KNOWN | responses.KNOWN | fields.SAMPLING)
STARTS = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    COMPLETE: {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/embeddings": {"input": "x", "pooling": "mean"},
    "/tokenize": {"prompt": "x"},
}


@given(st.sampled_from(sorted(STARTS)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_fields_say_is_answered_or_refused(serving: Serving, path: str, more: dict[str, Any]) -> None:
    status, answer = post(serving, path, STARTS[path] | more)
    assert status in (200, 400, 404), answer
