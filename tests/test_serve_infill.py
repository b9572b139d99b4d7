"""What editors ask of a server: the bodies that they send, and the page of docs about them."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from openai import OpenAI

from bitnet.data.tokenizer import FIM
from bitnet_export import random_model
from bitnet_runtime import Model
from bitnet_serve.server import Serving
from docs_text import blocks, commands_of
from runtime_models import SMALL, byte_tokenizer
from servers import port, post, served

PAGE = (Path(__file__).parent.parent / "docs/editors.md").read_text(encoding="utf-8")
BEFORE, BEHIND = "import os\n\ndef f(", "):\n    return 1\n"
SEED = {"seed": 7, "temperature": 0.9}
VIM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": BEFORE, "input_suffix": BEHIND, "prompt": "se", "n_predict": 8, "stop": [],
    "input_extra": [{"text": "class A:\n" + "    a = 1\n" * 5, "time": [1, 2], "filename": "a.py"}, {"text": "B = 2"}],
    "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
    "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms", "timings/prompt_per_second",
        "timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms",
        "timings/predicted_per_second", "truncated", "tokens_cached",
    ],
}  # fmt: skip
CODE: dict[str, Any] = {
    "input_prefix": BEFORE, "input_suffix": BEHIND, "input_extra": [], "prompt": "", "n_predict": 8, "top_k": 40,
    "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip
WARM: dict[str, Any] = {
    "input_prefix": "", "input_suffix": "", "input_extra": [{"text": "x" * 70, "filename": "a.py"}], "prompt": "",
    "n_predict": 0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1,
}  # fmt: skip
CONTINUE: dict[str, Any] = {
    "model": "mine", "prompt": BEFORE, "suffix": BEHIND, "max_tokens": 8, "temperature": 0.9, "top_p": 1,
    "frequency_penalty": 0, "presence_penalty": 0, "stop": ["\n\n"], "stream": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    words = byte_tokenizer()
    words.add_special_tokens(list(FIM))
    path = tmp_path_factory.mktemp("models") / "mine.bitnet"
    random_model(SMALL, path, tokenizer=words.to_str().encode())
    with served(path) as serving:
        yield serving


@pytest.fixture
def model(serving: Serving) -> Model:
    return serving.models["mine"].model


def test_what_llama_vim_sends(serving: Serving, model: Model) -> None:
    status, answer = post(serving, "/infill", VIM | SEED)
    assert status == 200 and list(answer) == VIM["response_fields"]
    before = f"a.py\n{VIM['input_extra'][0]['text']}\n\nB = 2\n\n{BEFORE}"
    prompt = [*model.infill_prompt(before, BEHIND, 8), ord("s"), ord("e")]
    expected = model.generate(prompt, max_tokens=8, top_k=40, top_p=0.9, seed=7, temperature=0.9)
    assert (answer["content"], answer["truncated"]) == (expected.text, False)
    n, taken = answer["timings/predicted_n"], answer["timings/predicted_ms"]
    assert n == len(expected.tokens) and answer["timings/predicted_per_token_ms"] == round(taken / n, 3)
    _, again = post(serving, "/infill", VIM | SEED | {"prompt": "sel"})
    assert again["tokens_cached"] >= len(prompt)  # what was typed alone is computed


def test_what_llama_vscode_sends(serving: Serving, model: Model) -> None:
    status, answer = post(serving, "/infill", WARM)
    assert (status, answer["content"], answer["tokens_predicted"]) == (200, "", 0)
    status, answer = post(serving, "/infill", CODE | SEED)
    expected = model.infill(BEFORE, BEHIND, max_tokens=8, top_k=40, top_p=0.99, **SEED)
    assert status == 200 and answer["content"] == expected.text and answer["stop"] is True
    assert answer["stop_type"] == ("limit" if expected.finish_reason == "length" else "eos")
    assert (answer["model"], answer["stopping_word"]) == ("mine", "")
    _, stopped = post(serving, "/infill", CODE | SEED | {"stop": [expected.text[1]]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", expected.text[1])
    assert post(serving, "/infill", CODE | {"input_extra": [{"text": ""}] * 257})[0] == 400
    connection = HTTPConnection("127.0.0.1", port(serving))
    body = json.dumps(CODE | SEED | {"stream": True})
    connection.request("POST", "/infill", body, {"content-type": "application/json"})
    pieces = [json.loads(line[6:]) for line in connection.getresponse().read().split(b"\n\n") if line]
    connection.close()
    assert "".join(piece["content"] for piece in pieces) == expected.text
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["tokens_predicted"] == len(expected.tokens)
    status, answer = post(serving, "/infill", CODE | SEED | {"n_predict": -1})
    assert status == 200 and answer["tokens_predicted"] > 8


def test_what_continue_sends(serving: Serving, model: Model) -> None:
    connection = HTTPConnection("127.0.0.1", port(serving))
    headers = {"content-type": "application/json", "accept": "application/json", "x-api-key": "none"}
    connection.request("POST", "/v1/fim/completions", json.dumps(CONTINUE | {"random_seed": 7}), headers)
    lines = [line[6:] for line in connection.getresponse().read().split(b"\n\n") if line]
    connection.close()
    assert lines[-1] == b"[DONE]"
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])
    expected = model.infill(BEFORE, BEHIND, max_tokens=8, top_p=1, stop=["\n\n"], **SEED)
    assert text == expected.text


def test_a_suffix(serving: Serving, model: Model) -> None:
    client = OpenAI(base_url=f"{serving.address}/v1", api_key="none")
    answer = client.completions.create(model="mine", prompt=BEFORE, suffix=BEHIND, max_tokens=8, **SEED)  # type: ignore[call-overload]
    assert answer.choices[0].text == model.infill(BEFORE, BEHIND, max_tokens=8, **SEED).text
    status, error = post(serving, "/v1/completions", {"prompt": "a", "suffix": "b", "echo": True})
    assert (status, error["error"]["param"]) == (400, "suffix")


def test_a_large_file_is_cut_to_what_is_near(serving: Serving, model: Model) -> None:
    status, answer = post(
        serving, "/infill", CODE | SEED | {"input_prefix": "x" * 100_000, "input_suffix": "y" * 100_000}
    )
    assert status == 200 and answer["tokens_evaluated"] == model.n_ctx - 8


def test_what_was_cut_is_told(serving: Serving, model: Model) -> None:
    """Texts that just fit are whole; with one character more they are truncated."""
    room = model.n_ctx - 8 - len(model.infill_prompt("", "", 8))
    long, line = "x" * (room - room // 4), "z" * (model.n_ctx // 4)
    for more, truncated in (
        ({"input_prefix": long, "input_suffix": "y" * (room // 4)}, False),
        ({"input_prefix": long + "x", "input_suffix": "y" * (room // 4)}, True),
        ({"input_prefix": long, "input_suffix": "y" * (room // 4 + 1)}, True),
        ({"input_prefix": "", "input_suffix": "y" * 100_000}, True),
        ({"prompt": line}, False),
        ({"prompt": line + "z"}, True),
    ):
        asked = CODE | SEED | more
        status, answer = post(serving, "/infill", asked)
        assert (status, answer["truncated"]) == (200, truncated), {name: len(text) for name, text in more.items()}


def test_the_page_of_docs_works(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    done = 0
    monkeypatch.chdir(serving.models["mine"].model.path.parent)
    for block in blocks(PAGE):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(block.text, {})
            done += 1
        for words in map(shlex.split, commands_of(block)):
            if words[0] == "curl":
                url = words[1].replace("http://127.0.0.1:8080", serving.address)
                with urlopen(Request(url, words[5].encode(), dict([words[3].split(": ")]))) as answer:
                    assert answer.status == 200 and answer.read()
                done += 1
    assert done == 3


def test_a_line_that_is_longer_than_the_context(serving: Serving) -> None:
    """Its end is kept, like the end of the text before the gap."""
    model = serving.models["mine"].model
    for most in (None, 1, 10**6):
        asked = {"input_prefix": "a" * 300, "input_suffix": "b" * 300, "prompt": "ab " * 300, "temperature": 0}
        status, answer = post(serving, "/infill", asked | ({"n_predict": most} if most else {}))
        assert status == 200 and 0 < answer["tokens_evaluated"] < model.n_ctx
        assert answer["tokens_predicted"] > 0
        assert min(value for value in answer["timings"].values()) >= 0
