"""Answers with a given format over HTTP: those of `Model.generate`, computed together, in every API."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from bitnet_runtime import Model
from bitnet_runtime.structured.guide import Grammars
from bitnet_serve.server import Serving
from image_models import VOCAB, packed
from runtime_models import SMALL, TEMPLATE
from servers import post, served, wait

if TYPE_CHECKING:
    from anthropic import Anthropic

MESSAGES: Any = [{"role": "user", "content": "go"}]
ASKED: dict[str, Any] = {"seed": 3, "max_tokens": 100, "temperature": 0.7}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=9)


class Town(BaseModel):
    name: Literal["Köln", "Bonn"]  # limits of numbers and lengths stay with Anthropic's client


SCHEMA = Person.model_json_schema()
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("models") / "any.bitnet"
    with served(packed(path, SMALL.replace(vocab_size=VOCAB), template=TEMPLATE)) as serving:
        yield serving


@pytest.fixture
def model(serving: Serving) -> Model:
    return serving.models["any"].model


def test_the_official_clients_parse_what_comes(client: OpenAI, claude: Anthropic, model: Model) -> None:
    parsed = client.chat.completions.parse(model="any", messages=MESSAGES, response_format=Person, **ASKED)
    person = parsed.choices[0].message.parsed
    assert person is not None and len(person.name) <= 5 and parsed.choices[0].finish_reason == "stop"
    response = client.responses.parse(model="any", input="go", text_format=Person, temperature=0.7)
    assert isinstance(response.output_parsed, Person)
    message = claude.messages.parse(
        model="any", max_tokens=200, messages=MESSAGES, output_format=Town, extra_body={"temperature": 0.7}
    )
    assert isinstance(message.parsed_output, Town)


def test_each_is_what_generate_gives(client: OpenAI, model: Model) -> None:
    chat = client.chat.completions.create(model="any", messages=MESSAGES, response_format=FORMAT, **ASKED, n=2)
    expected = [model.chat(MESSAGES, json_schema=SCHEMA, **ASKED | {"seed": seed}).text for seed in (3, 4)]
    assert [choice.message.content for choice in chat.choices] == expected
    anything = client.chat.completions.create(
        model="any", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=12
    )
    assert (anything.choices[0].message.content or "").startswith("{")


def test_in_company(serving: Serving, model: Model) -> None:
    forms: list[dict[str, Any]] = [
        {}, {"json_schema": SCHEMA}, {"regex": "[a-c]{3,9}x"}, {"grammar": 'start: "one" | "two" /[0-9]{2}/'},
    ]  # fmt: skip
    rng = random.Random(0)
    asked = [
        {"prompt": [rng.randrange(256) for _ in range(rng.choice([1, 9, 40]))], "max_tokens": 60, "seed": seed}
        | rng.choice(forms)
        for seed in range(40)
    ]

    async def together() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{serving.address}/v1", api_key="none") as client:
            each = (client.post("/completions", body={"model": "any", **one}, cast_to=object) for one in asked)
            return await asyncio.gather(*each)

    for one, found in zip(asked, asyncio.run(together()), strict=True):
        (choice,) = found["choices"]
        assert choice["text"] == model.generate(**one).text
        if "json_schema" in one and choice["finish_reason"] == "stop":
            Person.model_validate_json(choice["text"])


def test_scores_of_forced_tokens_are_the_models_own(serving: Serving, model: Model) -> None:
    asked = {"prompt": "x", "regex": "abcdef", "max_tokens": 20, "logprobs": 0}
    _, answer = post(serving, "/v1/completions", asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcdef", "stop")
    expected = model.score([*model.tokenize("x"), *b"abcdef"])[1:]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-6)
    assert json.dumps(choice["logprobs"]["tokens"]) == '["a", "b", "c", "d", "e", "f"]'


def test_who_asks_for_no_format_does_not_wait_for_those_of_others(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others there are; and each of those is answered soon, too."""
    slow, compile = threading.Event(), Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *given: (slow.wait(60), compile(*given))[1])
    asked = [{"prompt": "x", "regex": f"[ab]{{{n}}}", "max_tokens": 50} for n in range(1, 41)]
    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(post, serving, "/v1/completions", each) for each in asked]
        wait(lambda: sum(each.done() for each in answers) >= 39)
        assert post(serving, "/v1/completions", {"prompt": "x"})[0] == 200
        slow.set()
        found = [each.result() for each in answers]
    assert sorted(status for status, _ in found) == [200, *[503] * 39]
    assert {answer["error"]["code"] for status, answer in found if status == 503} == {"overloaded"}
