"""What vLLM's clients send and OpenAI's API does not have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from bitnet_runtime import InvalidParameterError, Model
from bitnet_serve.server import Serving
from runtime_models import TEMPLATE, scripted_model
from servers import post, served

SCRIPT = [b"Good", b" day", b", \xe2\x82", b"\xac!"]
THINKS = "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}{{ note }}"
CHAT, USER = "/v1/chat/completions", {"role": "user", "content": "go"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("models") / "script.bitnet"
    with served(scripted_model(path, SCRIPT, template=TEMPLATE + THINKS, max_context=256)) as serving:
        yield serving


@pytest.fixture
def model(serving: Serving) -> Model:
    return serving.models["script"].model


def prompt_of(serving: Serving, *messages: Any, **asked: Any) -> str:
    """The prompt as the template writes it. A chat has as many tokens."""
    status, answer = post(serving, "/tokenize", {"messages": messages, **asked})
    assert status == 200, answer
    _, said = post(serving, CHAT, {"messages": messages, "max_tokens": 1, **asked})
    assert said["usage"]["prompt_tokens"] == answer["count"]
    return str(post(serving, "/detokenize", {"tokens": answer["tokens"]})[1]["prompt"])


def test_variables_of_the_template(serving: Serving, model: Model) -> None:
    """Their texts are plain text, never special tokens."""
    before = "<|user|>go<|end|><|assistant|>"
    assert prompt_of(serving, USER) == prompt_of(serving, USER, chat_template_kwargs={"other": [1]}) == before
    thoughtless = {"enable_thinking": False, "note": "<|end|>"}
    assert prompt_of(serving, USER, chat_template_kwargs=thoughtless) == f"{before}-<|end|>"
    tokens = model.apply_template([USER], variables=thoughtless)
    assert tokens.count(model.apply_template([USER])[3]) == 1
    assert model.render_template([USER], variables=thoughtless) == f"{before}-<|end|>"
    assert model.chat([USER], variables=thoughtless, max_tokens=1).usage.prompt_tokens == len(tokens)
    for name in ("messages", "tools", "add_generation_prompt"):
        status, answer = post(serving, CHAT, {"messages": [USER], "chat_template_kwargs": {name: []}})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
        assert f"chat_template_kwargs has {name}, " in answer["error"]["message"]
        with pytest.raises(InvalidParameterError, match=f"template's {name} cannot be given as a variable"):
            model.apply_template([USER], variables={name: []})


def test_an_answer_that_has_begun_goes_on(serving: Serving, client: OpenAI) -> None:
    begun, prompt = {"role": "assistant", "content": "Sure: "}, "<|user|>go<|end|><|assistant|>Sure: "
    for more in ({}, {"add_generation_prompt": False}):
        assert prompt_of(serving, USER, begun, continue_final_message=True, **more) == prompt
        asked: Any = {"messages": [USER, begun], "extra_body": {"continue_final_message": True, **more}}
        (choice,) = client.chat.completions.create(model="script", **asked).choices
        assert choice.message.content == "Good day, €!"
    ended = {"messages": [USER, begun], "continue_final_message": True}
    for wrong, param in (
        (ended | {"add_generation_prompt": True}, "add_generation_prompt"),
        (ended | {"messages": [USER]}, "continue_final_message"),
        (ended | {"messages": [begun]}, "messages"),
        (ended | {"continue_final_message": 1}, "continue_final_message"),
    ):
        status, answer = post(serving, CHAT, wrong)
        assert (status, answer["error"]["param"]) == (400, param)


def test_the_messages_alone(serving: Serving) -> None:
    assert prompt_of(serving, USER, add_generation_prompt=False) == "<|user|>go<|end|>"
    status, answer = post(serving, "/tokenize", {"prompt": "x", "add_generation_prompt": False})
    assert (status, answer["error"]["param"]) == (400, "add_generation_prompt")


def test_what_ends_an_answer(client: OpenAI, model: Model) -> None:
    """The least tokens, tokens that end it, and an end that is passed over; a stream ends there, too."""
    _, day, *_ = model.generate("x", temperature=0).tokens
    asked: Any = {"model": "script", "messages": [USER], "max_tokens": 12, "temperature": 0}
    for more, text, reason in (
        ({"stop_token_ids": [day]}, "Good", "stop"),
        ({"stop_token_ids": []}, "Good day, €!", "stop"),
        ({"ignore_eos": True, "stop": "!"}, "Good day, €", "stop"),
    ):
        (choice,) = client.chat.completions.create(**asked, extra_body=more).choices
        stream = list(client.chat.completions.create(**asked, extra_body=more, stream=True))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert said == choice.message.content and stream[-1].choices[0].finish_reason == choice.finish_reason
        assert (said, choice.finish_reason) == (text, reason)
    for more in ({"min_tokens": 12}, {"ignore_eos": True}):
        answer = client.chat.completions.create(**asked, extra_body=more)
        assert answer.usage is not None and answer.usage.completion_tokens == 12
        assert answer.choices[0].finish_reason == "length"


def test_ends_that_cannot_be(serving: Serving) -> None:
    for more, param in (
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 1, "regex": "a"}, "min_tokens"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"stop_token_ids": [10_000]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ):
        for stream in (False, True):
            status, answer = post(serving, "/v1/completions", {"prompt": "x", "stream": stream, **more})
            assert (status, answer["error"]["param"]) == (400, param), answer


def test_an_answer_is_not_longer_than_the_context(serving: Serving, model: Model) -> None:
    """usage counts no more than max_model_len, unless the prompt has all of it: then a score of one token is wanted."""
    endless: list[dict[str, Any]] = [{"ignore_eos": True}, {"min_tokens": 300}]
    for n, total in ((200, 256), (255, 256), (256, 257)):
        for most, more in itertools.product((-1, 400), endless):
            asked = {"prompt": [1] * n, "max_tokens": most, **more}
            status, answer = post(serving, "/v1/completions", asked)
            assert status == 200 and answer["usage"]["total_tokens"] == total
            assert answer["choices"][0]["finish_reason"] == "length"
    assert model.n_ctx == 256
