"""`bitnet serve` byte by byte: streams against strict shapes, metrics, the page; the same bits in any company."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from PIL import Image
from pydantic import BaseModel, ConfigDict
from tokenizers.normalizers import NFC

from bitnet.config import ModelConfig
from bitnet_runtime import Model
from bitnet_runtime.answers.logprobs import score
from bitnet_serve.endpoints import sending
from bitnet_serve.endpoints.answers import Choice
from bitnet_serve.server import Serving
from image_models import IMAGE, VOCAB, packed
from runtime_models import TEMPLATE, byte_tokenizer, scripted_model, small_model
from servers import events, port, post, request, served, wait
from test_image_prompts import PARTS
from vision_models import CAUSAL, PALIGEMMA

MESSAGES: Any = [{"role": "user", "content": "go"}]
EURO = [b"Good", b" day", b", \xe2\x82", b"\xac!"]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    script = scripted_model(folder / "script.bitnet", EURO, template=TEMPLATE, max_context=256)
    with served(script, small_model(folder), queue=200) as serving:
        yield serving


@pytest.fixture
def model(serving: Serving) -> Model:
    return serving.models["small-0-256"].model


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Delta(Strict):
    role: str | None = None
    content: str | None = None


class ChatChoice(Strict):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: str | None


class Usage(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatChunk(Strict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None


@pytest.mark.parametrize("usage", [False, True])
def test_chunks_of_a_chat(serving: Serving, usage: bool) -> None:
    asked = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": usage}}
    found = events(serving, "/v1/chat/completions", asked)
    for data in found:
        ChatChunk.model_validate(data)
        assert ("usage" in data) == usage
    assert len({(data["id"], data["created"], data["model"], data["system_fingerprint"]) for data in found}) == 1
    last = found.pop() if usage else None
    deltas = [data["choices"][0]["delta"] for data in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [data["choices"][0]["finish_reason"] for data in found] == [None] * (len(found) - 1) + ["stop"]
    if last is not None:
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 9
        assert all(data["usage"] is None for data in found)


def test_of_equally_likely_tokens_the_lowest_ids_are_told() -> None:
    (scored,) = score(np.array([[1, 3, 0, 3, 4]], np.float32), [2], 2)
    assert [token for token, _ in scored.top] == [4, 1]


def test_text_ends_no_line_of_an_event() -> None:
    """httpx reads lines as Python's splitlines does."""
    said = {"type": "text", "text": "".join(map(chr, range(0x3000)))}
    name, data, end = sending.event(said).decode().splitlines()
    assert (name, end) == ("event: text", "") and json.loads(data.removeprefix("data: ")) == said


def test_timings_tell_the_seed(serving: Serving) -> None:
    asked: dict[str, Any] = {"model": "small-0-256", "prompt": [1], "max_tokens": 30}
    _, first = post(serving, "/v1/completions", asked)
    _, again = post(serving, "/v1/completions", asked | {"seed": first["timings"]["seed"]})
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["timings"]["predicted_n"] == 30 and first["timings"]["prompt_ms"] > 0


def test_health_and_metrics(serving: Serving) -> None:
    assert request(serving, "GET", "/health")[::2] == (200, {"status": "ok"})
    _, headers, text = request(serving, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in text.splitlines():
        assert line.startswith("# ") or math.isfinite(float(line.rpartition(" ")[2]))
    assert 'bitnet_tokens_predicted_total{model="script"}' in text


def test_how_long_answers_took(tmp_path: Path) -> None:
    """As Prometheus counts: each bucket includes the smaller ones, the last one everything. A failed answer is not
    counted."""
    with served(small_model(tmp_path)) as serving:
        for most in (1, 5, 5):
            assert post(serving, "/v1/completions", {"prompt": [1], "max_tokens": most})[0] == 200
        assert post(serving, "/v1/completions", {"prompt": [1], "stop_token_ids": [9999]})[0] == 400
        assert post(serving, "/v1/embeddings", {"input": "a", "pooling": "mean"})[0] == 200
        expected = {"time_to_first_token": 3, "time_per_output_token": 2, "e2e_request_latency": 3}
        (served_one,) = serving.models.values()
        wait(lambda: served_one.scheduler.finished == 5)
        text = request(serving, "GET", "/metrics")[2]
        for name, n in expected.items():
            name = f"bitnet_{name}_seconds"
            assert f"# TYPE {name} histogram" in text
            found = re.findall(rf'{name}_bucket{{model="small-0-256",le="(.*?)"}} (\d+)', text)
            counts = [int(count) for _, count in found]
            assert [float(bound) for bound, _ in found] == sorted({float(bound) for bound, _ in found})
            assert counts == sorted(counts) and counts[-1] == n and found[-1][0] == "+Inf"
            assert f'{name}_count{{model="small-0-256"}} {n}\n' in text
            (total,) = re.findall(rf'{name}_sum{{model="small-0-256"}} (.*)', text)
            assert 0 < float(total) < 60


def test_the_page_needs_nothing_from_elsewhere(serving: Serving) -> None:
    status, headers, text = request(serving, "GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in text and "https://" not in text and "src=" not in text


# ---- company ----


def test_the_same_bits_in_any_company(serving: Serving, model: Model) -> None:
    """Random requests at once, each against itself alone: tokens, texts, and every bit of the log-probabilities."""
    rng = random.Random(1)

    def some() -> dict[str, Any]:
        n = rng.choice([1, 2, 7, 33, 64, 150])
        return {
            "model": "small-0-256",
            "prompt": [rng.randrange(256) for _ in range(n)],
            "max_tokens": rng.choice([1, 5, 20, 40]),
            "temperature": rng.choice([0, 0.7, 1.5]),
            "seed": rng.randrange(1000),
            "logprobs": rng.choice([0, 3]),
            "echo": rng.random() < 0.3,
            "presence_penalty": rng.choice([0, 0.5]),
        }

    asked = [some() for _ in range(200)]

    async def together() -> list[Any]:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port(serving)}/v1", api_key="none") as client:
            return await asyncio.gather(*(client.completions.create(**one) for one in asked))

    for one, found in zip(asked, asyncio.run(together()), strict=True):
        _, alone = post(serving, "/v1/completions", one)
        assert found.choices[0].model_dump() == alone["choices"][0] | {"index": 0}
        options = {key: one[key] for key in ("max_tokens", "temperature", "seed", "presence_penalty")}
        expected = model.generate(one["prompt"], **options)
        assert alone["choices"][0]["text"].endswith(expected.text)
        assert alone["usage"]["completion_tokens"] == len(expected.tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_where_tokens_begin(serving: Serving, stream: bool, echo: bool) -> None:
    """A random model writes halves of characters, and special tokens that a text does not show."""
    asked = {"model": "small-0-256", "prompt": "\u00e9 abc", "max_tokens": 60, "temperature": 1.5, "logprobs": 0}
    asked |= {"logit_bias": {"257": 8, "226": 8, "65": 8}}
    for seed in range(10):
        asked |= {"seed": seed, "echo": echo, "stream": stream}
        answers = events(serving, "/v1/completions", asked) if stream else [post(serving, "/v1/completions", asked)[1]]
        choices = [answer["choices"][0] for answer in answers]
        text = "".join(choice["text"] for choice in choices)
        scores = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        names, offsets = ([value for part in scores for value in part[key]] for key in ("tokens", "text_offset"))
        assert len(names) >= 60 and "\ufffd" in text and any(name.startswith("<|") for name in names)
        shown = [(name, at) for name, at in zip(names, offsets, strict=True) if not name.startswith(("bytes:", "<|"))]
        assert all(text.startswith(name, at) for name, at in shown)
        assert offsets == sorted(offsets) and offsets[-1] <= len(text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_start_token_has_a_place_in_the_text_only_if_the_text_shows_it(tmp_path: Path, stream: bool) -> None:
    """Given as an id it is shown. Its name in a text is spelled by other tokens, behind the one that is not shown. A
    tokenizer may shorten a text."""
    tokenizer, user = byte_tokenizer([b"es"]), 258
    tokenizer.normalizer = NFC()
    generation = {"bos_token_id": user}
    path = scripted_model(tmp_path / "starts.bitnet", [b"y", b"es"], generation=generation, tokenizer=tokenizer)
    prompts: dict[str | tuple[int, ...], list[int]] = {"ab": [0, 0, 1], "<|user|>a": [0, *range(9)]}
    prompts |= {"e\u0301a": [0, 0, 0, 1], (user, 97): [0, 8], (97,): [0]}
    with served(path) as serving:
        for prompt, places in prompts.items():
            asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "logprobs": 0, "echo": True}
            if stream:
                answers = events(serving, "/v1/completions", asked | {"stream": True})
            else:
                answers = [post(serving, "/v1/completions", asked)[1]]
            choices = [answer["choices"][0] for answer in answers]
            shown = prompt if isinstance(prompt, str) else "<|user|>a" if len(prompt) == 2 else "a"
            assert "".join(choice["text"] for choice in choices) == f"{shown}yes"
            found = [at for choice in choices if choice["logprobs"] for at in choice["logprobs"]["text_offset"]]
            assert found == [*places, len(shown), len(shown) + 1]


def test_a_stream_with_scores_joins_no_whole_text(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each token it would take as long as the text is."""
    joined: list[Choice] = []
    monkeypatch.setattr(Choice, "text", property(joined.append))
    asked = {"model": "small-0-256", "prompt": "abc", "max_tokens": 20, "logprobs": 1, "stream": True, "seed": 1}
    answers = events(serving, "/v1/completions", asked | {"logit_bias": {"65": 100}})
    assert answers[-2]["choices"][0]["logprobs"]["text_offset"][-1] == 19 and not joined


# ---- images ----


@pytest.mark.parametrize("config", [PALIGEMMA, CAUSAL], ids=["prefix", "causal"])
def test_pictures_in_a_chat(tmp_path: Path, config: ModelConfig) -> None:
    """An answer about a picture has the bits of `Model.chat`, computed with others; so have answers to texts."""
    path = packed(tmp_path / "sees.bitnet", config.replace(vocab_size=VOCAB, image_token=IMAGE), template=PARTS)
    png = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)).save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    picture: Any = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    said: Any = [{"role": "user", "content": [{"type": "text", "text": "what?"}, picture]}]
    plain: Any = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
    with served(path) as serving:
        model = serving.models["sees"].model
        asked: dict[str, Any] = {"max_tokens": 6, "seed": 3}
        expected = {id(each): model.chat(each, **asked).text for each in (said, plain)}

        async def together() -> None:
            async with AsyncOpenAI(base_url=f"{serving.address}/v1", api_key="none") as client:

                async def one(messages: Any) -> None:
                    answer = await client.chat.completions.create(model="sees", messages=messages, **asked)
                    assert answer.choices[0].message.content == expected[id(messages)]

                await asyncio.gather(*(one(messages) for messages in [said, plain] * 5))

        asyncio.run(together())
        broken = [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
        ]
        status, answer = post(serving, "/v1/chat/completions", {"messages": broken})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "messages", "invalid_image")
