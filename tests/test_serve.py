"""`bitnet serve` as its clients see it: the openai package, and plain requests."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from bitnet_runtime import Model
from bitnet_runtime.answers import logprobs
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.sessions.steps import Entry, step_batch
from bitnet_serve.endpoints import completions
from bitnet_serve.server import Serving
from runtime_models import TEMPLATE, scripted_model, small_model
from servers import events, port, post, request, served

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


def test_an_answer_does_not_wait_for_the_network(serving: Serving) -> None:
    """Small writes are sent at once: else each request of a connection waits 40 ms for an acknowledgement."""
    connection = HTTPConnection("127.0.0.1", port(serving))
    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - begin)
    connection.close()
    assert min(seconds[5:]) < 0.03


# ---- the official client ----


def test_models(client: OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["script", "small-0-256"]
    assert client.models.retrieve("script").object == "model"
    with pytest.raises(openai.NotFoundError, match="expected one of: script, small-0-256") as error:
        client.models.retrieve("gpt-4")
    assert error.value.code == "model_not_found"


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="script", messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Good day, €!", "assistant", "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 4, 9)


def test_chat_as_a_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="script", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2
    )
    chunks = list(stream)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Good day, €!", 1: "Good day, €!"}
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_chat_as_an_asynchronous_stream(serving: Serving) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{serving.address}/v1", api_key="none") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="script", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(20)))

    assert set(asyncio.run(run())) == {"Good day, €!"}


def test_log_probabilities_of_a_chat_spell_its_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="script", messages=MESSAGES, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    spelled = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content)
    assert spelled.decode() == choice.message.content
    assert [each.token for each in choice.logprobs.content][2:] == [r"bytes:\x2c\x20\xe2\x82", r"bytes:\xac\x21"]
    for each in choice.logprobs.content:
        assert len(each.top_logprobs) == 3 and each.top_logprobs[0].token == each.token
        assert each.logprob == each.top_logprobs[0].logprob > -1e-6 > each.top_logprobs[1].logprob


def test_stop(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="script", messages=MESSAGES, stop=["ay"], logprobs=True)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Good d", "stop")
    stream = client.chat.completions.create(model="script", messages=MESSAGES, stop="y, €", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Good da"


def test_scores_of_completions_hold_the_chosen_token_and_end_with_the_text(serving: Serving) -> None:
    asked = {"model": "small-0-256", "prompt": [1], "logprobs": 1, "temperature": 2, "seed": 1, "max_tokens": 20}
    text = post(serving, "/v1/completions", asked)[1]["choices"][0]["text"]
    (choice,) = post(serving, "/v1/completions", asked | {"stop": [text[5:7]]})[1]["choices"]
    scores = choice["logprobs"]
    for name, logprob, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert top[name] == logprob
    assert min(map(len, scores["top_logprobs"])) == 1 and max(map(len, scores["top_logprobs"])) == 2
    assert max(scores["text_offset"]) <= len(choice["text"]) == text.index(text[5:7])


def test_completions_are_what_generate_gives(client: OpenAI, model: Model) -> None:
    for prompt in ("Once", [1, 2, 3]):
        sampling: dict[str, Any] = {"temperature": 0.7, "seed": 5, "top_p": 0.9, "max_tokens": 20}
        answer = client.completions.create(model="small-0-256", prompt=prompt, **sampling)
        expected = model.generate(prompt, **sampling)
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    defaults = client.completions.create(model="small-0-256", prompt="x")
    assert defaults.usage is not None and defaults.usage.completion_tokens == 16


@pytest.mark.parametrize("draft", [0, 5])
def test_guesses_are_as_many_as_asked_for(
    serving: Serving, model: Model, draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they change nothing."""
    asked: Any = {"prompt": [1, 2] * 8, "max_tokens": 20, "temperature": 0}
    told = []

    def recorded(model: Model, prompt: list[int], options: Sampling, *more: Any, **given: Any) -> Writer:
        told.append(options.draft)
        return Writer(model, prompt, options, *more, **given)

    monkeypatch.setattr("bitnet_serve.models.generation.Writer", recorded)
    expected = model.generate(asked["prompt"], max_tokens=20, temperature=0).text
    status, answer = post(serving, "/v1/completions", asked | {"model": "small-0-256", "draft": draft})
    assert (status, answer["choices"][0]["text"], told) == (200, expected, [draft])
    status, answer = post(serving, "/v1/completions", asked | {"draft": 65})
    assert (status, answer["error"]["param"]) == (400, "draft")


@pytest.mark.parametrize(("n", "most"), [(1, 64), (2, 16), (3, 10)])
def test_guesses_leave_the_others_their_time(
    serving: Serving, n: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together make no more guesses than a piece has tokens; one alone as many as asked for."""
    guesses = []

    def noted(entries: Sequence[Entry]) -> None:
        guesses.append((len(entries), max(entry.struct.n_draft for entry in entries)))
        step_batch(entries)

    monkeypatch.setattr("bitnet_runtime.answers.together.step_batch", noted)
    monkeypatch.setattr("bitnet_serve.models.generation.MOMENT", 0)  # else texts go on without guesses
    asked = {"prompt": [1], "n": n, "max_tokens": 90, "draft": 64, "logit_bias": {"7": 100}}  # a text of sevens
    status, answer = post(serving, "/v1/completions", asked)
    assert status == 200 and len(answer["choices"]) == n
    assert max(guessed for running, guessed in guesses if running == n) == most


def test_several_prompts_and_answers(client: OpenAI, model: Model) -> None:
    prompts = ["a", "b"]
    answer = client.completions.create(model="small-0-256", prompt=prompts, n=2, seed=7, max_tokens=5)
    expected = [model.generate(prompts[i // 2], seed=7 + i, max_tokens=5).text for i in range(4)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2  # each once


def test_logit_bias_and_penalties(client: OpenAI, model: Model) -> None:
    forced = client.completions.create(
        model="small-0-256", prompt=[5], logit_bias={"65": 100}, max_tokens=3, temperature=0
    )
    assert forced.choices[0].text == "AAA"
    more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3}  # not of OpenAI's, as other servers take them
    asked: dict[str, Any] = {"seed": 1, "max_tokens": 20, "presence_penalty": 0.5}
    answer = client.completions.create(model="small-0-256", prompt=[5], **asked, extra_body=more)
    assert answer.choices[0].text == model.generate([5], **asked, **more).text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(serving: Serving, model: Model, stream: bool) -> None:
    """As lm-eval asks: the prompt as ids, and one more token; the prompt's tokens need scores, too."""
    prompts = [[random.Random(seed).randrange(256) for _ in range(n)] for seed, n in enumerate((2, 40, 255))]
    asked = {"model": "small-0-256", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    if stream:
        found = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in prompts]
        for chunk in events(serving, "/v1/completions", asked | {"stream": True}):
            (choice,) = chunk["choices"]
            for key, values in (choice["logprobs"] or {}).items():
                found[choice["index"]][key] += values
    else:
        _, answer = post(serving, "/v1/completions", asked)
        found = [choice["logprobs"] for choice in answer["choices"]]
    for prompt, scores in zip(prompts, found, strict=True):
        assert all(len(values) == len(prompt) + 1 for values in scores.values())
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        expected = model.score([*prompt, *model.generate(prompt, max_tokens=1, temperature=0).tokens])
        np.testing.assert_allclose(scores["token_logprobs"][1:], expected[1 : len(prompt) + 1], rtol=0, atol=1e-6)
        last = scores["token_logprobs"][-1]
        assert last == max(scores["top_logprobs"][-1].values())  # greedy
        assert scores["text_offset"] == sorted(scores["text_offset"])


def test_several_answers_score_their_prompt_once(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the scores are those of each answer alone, also in a stream."""
    fed = []
    for where in ("bitnet_serve.models.generation", "bitnet_runtime.answers.writer"):  # of prompts, and of answers
        monkeypatch.setattr(f"{where}.score", lambda rows, *more: fed.append(len(rows)) or logprobs.score(rows, *more))
    prompts = [[random.Random(seed).randrange(256) for _ in range(50)] for seed in range(2)]
    asked = {"model": "small-0-256", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 3, "n": 3}
    _, answer = post(serving, "/v1/completions", asked)
    assert sum(fed) == 2 * 49 + 6  # of each prompt all but the first token, and one of each answer
    chunks = events(serving, "/v1/completions", asked | {"stream": True})
    for choice in answer["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        told = [one["logprobs"]["token_logprobs"] for one in own if one["logprobs"]]
        assert choice["logprobs"]["token_logprobs"] == [*itertools.chain(*told)]
        assert len(choice["logprobs"]["token_logprobs"]) == 51


def test_scores_of_prompts_have_an_end(serving: Serving) -> None:
    """Each takes 300 bytes in the response, which --max-cache does not count."""
    asked = {"prompt": [1] * 200, "n": 128, "max_tokens": 1, "logprobs": 20, "echo": True}
    status, _ = post(serving, "/v1/completions", asked | {"n": 2})
    assert status == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completions, "MOST_SCORED", 100_000)
        status, answer = post(serving, "/v1/completions", asked)
    assert status == 400 and answer["error"]["message"].startswith(
        "echo and logprobs ask for 537,600 log-probabilities of prompts, expected at most 100,000; "
    )


def test_an_end_token_is_scored_too(serving: Serving) -> None:
    """A program that leaves the last score out would else lose one of the text."""
    asked = {"prompt": [*b"Good", 256, 257, 258, 259], "max_tokens": 1, "logprobs": 0, "echo": True, "temperature": 0}
    _, answer = post(serving, "/v1/completions", asked)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == 9
    assert choice["logprobs"]["tokens"][-1] == "<|end|>"


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(client: OpenAI, model: Model, pooling: str) -> None:
    texts = ["a", "bcd", "x" * 200, "e", "fg" * 20, *(f"text {i}" for i in range(20))]
    expected = model.embed(texts, pooling=pooling)
    more = {"pooling": pooling}
    for form in ("float", "base64"):
        answer = client.embeddings.create(
            model="small-0-256",
            input=texts,
            encoding_format=form,
            extra_body=more,  # type: ignore[arg-type]
        )
        found = [
            np.frombuffer(base64.b64decode(each.embedding), "<f4")
            if isinstance(each.embedding, str)
            else each.embedding
            for each in answer.data
        ]
        assert (np.array(found, np.float32) == expected).all()
    by_default = client.embeddings.create(model="small-0-256", input=[1, 2, 3], extra_body=more)
    assert (np.array(by_default.data[0].embedding, np.float32) == model.embed([1, 2, 3], pooling=pooling)[0]).all()
    assert (by_default.model, by_default.usage.prompt_tokens, by_default.usage.total_tokens) == ("small-0-256", 3, 3)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_vectors_are_written_one_at_a_time(serving: Serving, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Together they held up all answers for seconds: 2,048 of 2,560 numbers each are 100 MB."""
    asked = {"model": "small-0-256", "input": ["a"] * 50, "pooling": "mean", "encoding_format": form}
    write, written = json.dumps, list[int]()

    def dumps(*given: Any, **more: Any) -> str:
        text = write(*given, **more)
        written.append(len(text))
        return text

    monkeypatch.setattr(json, "dumps", dumps)
    status, _, answer = request(serving, "POST", "/v1/embeddings", write(asked).encode())
    assert (status, [each["index"] for each in answer["data"]]) == (200, list(range(50)))
    one = len(write(answer["data"][0]))
    assert 0 < max(written) <= one + 1


def test_too_many_texts_are_counted(serving: Serving) -> None:
    """A list of thousands is not a wrong type."""
    asked = {"input": ["a"] * 2049, "pooling": "mean"}
    status, answer = post(serving, "/v1/embeddings", asked)
    assert (status, answer["error"]["param"]) == (400, "input")
    found = "input has 2,049 texts, expected at most 2048; send them in several requests"
    assert answer["error"]["message"] == found


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_may_be_shorter(serving: Serving, model: Model, form: str) -> None:
    """As in OpenAI's API: the first numbers, scaled to length 1 again."""
    asked = {"model": "small-0-256", "input": ["a", "bcd"], "pooling": "mean", "dimensions": 5, "encoding_format": form}
    status, answer = post(serving, "/v1/embeddings", asked)
    assert status == 200
    found = [each["embedding"] for each in answer["data"]]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
    first = model.embed(["a", "bcd"], pooling="mean")[:, :5].astype(np.float64)
    np.testing.assert_allclose(found, first / np.linalg.norm(first, axis=1, keepdims=True), rtol=0, atol=1e-7)
    for wrong in (0, 65, 1.5, True):
        status, answer = post(serving, "/v1/embeddings", asked | {"dimensions": wrong})
        assert (status, answer["error"]["param"]) == (400, "dimensions")
        assert "dimensions is " in answer["error"]["message"]


def test_tokens(serving: Serving) -> None:
    _, answer = post(serving, "/tokenize", {"prompt": "hé", "add_special_tokens": False})
    assert answer == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 256}
    assert post(serving, "/detokenize", {"tokens": [104, 195, 169]}) == (200, {"prompt": "hé"})
    _, answer = post(serving, "/tokenize", {"messages": MESSAGES})
    assert answer["count"] == 5


def test_what_a_program_asks_of_the_tokenizer(serving: Serving) -> None:
    status, _, answer = request(serving, "GET", "/tokenizer_info")
    assert (status, answer["eos_token"], answer["bos_token"]) == (200, "<|end|>", None)
    assert answer["chat_template"] == TEMPLATE
    status, _, answer = request(serving, "GET", "/tokenizer_info?model=small-0-256")
    assert (status, answer["chat_template"], answer["model_max_length"]) == (200, None, 256)


def test_a_model_without_a_template_is_asked_for_texts(serving: Serving) -> None:
    for path, asked in (
        ("chat/completions", {"messages": MESSAGES}),
        ("responses", {"input": "x"}),
        ("messages", {"messages": MESSAGES, "max_tokens": 1}),
    ):
        status, answer = post(serving, f"/v1/{path}", {"model": "small-0-256", **asked})
        assert (status, answer["error"]["code"]) == (400, "template_error")
        for words in ("no chat template", "/v1/completions continues a text", "bitnet finetune --chat teaches"):
            assert words in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_receipts_are_those_that_can_be_verified(serving: Serving, model: Model, stream: bool) -> None:
    prompt = [random.Random(9).randrange(256) for _ in range(90)]
    asked = {"model": "small-0-256", "prompt": prompt, "receipt": True, "max_tokens": 12, "stream": stream, "n": 2}
    for _ in range(2):  # the second goes on from the first
        if stream:
            found = [chunk["choices"][0] for chunk in events(serving, "/v1/completions", asked)]
        else:
            found = post(serving, "/v1/completions", asked)[1]["choices"]
        receipts = [choice["receipt"] for choice in found if choice["finish_reason"]]
        assert len(receipts) == 2
        for receipt in receipts:
            assert len(receipt["tokens"]) == 12
            assert model.verify_receipt(receipt).valid
            changed = receipt | {"tokens": [*receipt["tokens"][:-1], (receipt["tokens"][-1] + 1) % 256]}
            assert not model.verify_receipt(json.dumps(changed)).valid
    status, answer = post(serving, "/v1/completions", {"prompt": "x", "receipt": "yes"})
    assert (status, answer["error"]["param"]) == (400, "receipt")
