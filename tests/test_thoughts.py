"""Thoughts of models that write them before their answers: how they are told apart, in Python and over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from bitnet_runtime import Model, Sampling
from bitnet_runtime.answers.answer import Answer
from bitnet_runtime.chat.thoughts import Begun, ThoughtReader
from bitnet_runtime.chat.tools import Tools
from bitnet_runtime.model_chat import begun_in
from bitnet_serve.endpoints import messages, responses
from bitnet_serve.server import Serving
from runtime_models import TEMPLATE, byte_tokenizer, scripted_model
from servers import post, served
from talks import piped, prompts
from test_serve_streams import USE, chunks, events
from test_serve_streams import ask as streamed
from tool_models import ASK, CALL, FLAT, TOOLS, calling_model

# In the style of Qwen3, and of one that always thinks.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = THINKS.replace("{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
                        "{{ '<think>\\n' }}")  # fmt: skip
THOUGHT, SAID = "The town, köln…\n\nit is.", "Good day, €!"
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"


def split(text: str, opened: bool = False, begun: str = "", step: int = 1000) -> tuple[str, str]:
    reader, found = ThoughtReader(Begun(opened, begun)), []
    found += [reader.push(text[i : i + step]) for i in range(0, len(text), step)]
    found.append(reader.push("", final=True))
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


# ---- reading ----

READ: list[tuple[str, bool, str, str]] = [
    (TEXT, False, THOUGHT, SAID),
    (f"\n {TEXT}", False, THOUGHT, SAID),
    (TEXT.removeprefix("<think>\n"), True, THOUGHT, SAID),
    (TEXT, True, THOUGHT, SAID),
    ("<think>\n\n</think>\n\nyes ", False, "", "yes "),
    ("</think>yes", True, "", "yes"),
    (" yes <think> no </think>", False, "", " yes <think> no </think>"),
    ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    ("<think>a<think>b</think>c</think>", False, "a<think>b", "c</think>"),
    ("<think>\n a </thin \n", False, "a </thin \n", ""),
    (" a", True, "a", ""),
    ("<think>a</think> \n", False, "a", ""),
    ("<thin", False, "", "<thin"),
    (" <thinker>", False, "", " <thinker>"),
    (" ", False, "", " "),
    (" ", True, "", ""),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "thought", "said"), READ)
def test_what_is_thought_and_what_is_said(text: str, opened: bool, thought: str, said: str) -> None:
    for step in (1, 2, 3, 7, 1000):
        assert split(text, opened, step=step) == (thought, said), step


PARTS = ["<think>", "</think>", "<", "think", ">", "/", " ", "\n", "a", "é"]


def expected(text: str, opened: bool) -> tuple[str, str]:
    """The same, of a whole text at a time."""
    tag = re.match(r"\s*<think>", text)
    if not tag and not opened:
        return "", text
    thought, close, rest = text[tag.end() if tag else 0 :].partition("</think>")
    return (thought.strip(), rest.lstrip()) if close else (thought.lstrip(), "")


@given(st.lists(st.sampled_from(PARTS)), st.booleans(), st.lists(st.integers(1, 12), min_size=1))
def test_it_does_not_matter_how_thoughts_come(parts: list[str], opened: bool, steps: list[int]) -> None:
    text, reader, at, found = "".join(parts), ThoughtReader(Begun(opened)), 0, []
    while at < len(text):
        step = steps[at % len(steps)]
        found.append(reader.push(text[at : at + step]))
        at += step
    found.append(reader.push("", final=True))
    thought, said = ("".join(each) for each in zip(*found, strict=True))
    assert (thought, said) == expected(text, opened)


class Parts:
    """A detokenizer whose tokens are the places of these texts."""

    def __init__(self, texts: list[str]) -> None:
        self.push = texts.__getitem__
        self.flush = str


@given(st.lists(st.sampled_from([*PARTS, "<th", "ink>a"])), st.booleans(), st.integers(0, 30))
def test_pieces_with_stop_texts_are_those_of_the_whole(parts: list[str], opened: bool, most: int) -> None:
    answer = Answer(Parts(parts), ("a ", "<<"), thinker=ThoughtReader(Begun(opened)))
    thought, said, read = "", "", 0
    while read < min(most, len(parts)) and not answer.stopped:
        said += answer.push(read)
        thought += answer.take_thoughts()
        read += 1
    said += answer.flush(cut=read < len(parts))
    thought += answer.take_thoughts()
    whole = expected("".join(parts[:read]), opened)
    assert (thought, said) == (whole[0], re.split("a |<<", whole[1])[0])


BEGUN = [
    ("answer ", False, " on", "", " on"),
    ("<think>\nso", False, "\n far</think>\n\nyes", "\n far", "yes"),
    ("<think>a</think>", False, "\n\nyes", "", "yes"),
    ("so", True, " far</think>yes", " far", "yes"),
    ("so</think>", True, "yes", "", "yes"),
    ("<", False, "b>", "", "b>"),
]


@pytest.mark.parametrize(("begun", "opened", "text", "thought", "said"), BEGUN)
def test_output_that_has_begun(begun: str, opened: bool, text: str, thought: str, said: str) -> None:
    assert split(text, opened, begun) == (thought, said)


# ---- from Python ----


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    texts = {
        "thinks": (TEXT, THINKS), "opened": (TEXT.removeprefix("<think>\n"), OPENED), "plain": (TEXT, TEMPLATE),
        "calls": (f"<think>So: {CALL}</think>{CALL}", THINKS), "opened-json": ('{"a": 1}', OPENED),
        "half": ("<think>so </thi", THINKS), "untold": ("so", None),
    }  # fmt: skip
    return {name: calling_model(folder / f"{name}.bitnet", *each) for name, each in texts.items()}


@pytest.mark.parametrize("name", ["thinks", "opened"])
def test_a_conversation(models: dict[str, Path], name: str) -> None:
    with Model.load(models[name]) as model:
        result = model.chat(ASK)
        assert (result.reasoning, result.text, result.finish_reason) == (THOUGHT, SAID, "stop")
        assert result.message() == {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
        n = result.usage.reasoning_tokens
        assert "</think>" in model.detokenize(result.tokens[:n])
        assert "</think>" not in model.detokenize(result.tokens[: n - 1])
        stream = model.stream_chat(ASK)
        found = list(stream)
        assert "".join(piece.reasoning for piece in found) == THOUGHT
        assert "".join(piece.text for piece in found) == SAID
        assert stream.result is not None and stream.result.reasoning == THOUGHT

        raw = model.generate(model.apply_template(ASK))
        assert (raw.reasoning, raw.usage.reasoning_tokens, raw.tokens) == ("", 0, result.tokens)
        assert raw.text == (TEXT if name == "thinks" else TEXT.removeprefix("<think>\n"))


def test_an_answer_that_is_cut_within_a_thought(models: dict[str, Path]) -> None:
    with Model.load(models["thinks"]) as model:
        n = len(model.chat(ASK).tokens)
        for most in range(n + 1):
            result = model.chat(ASK, max_tokens=most)
            assert (result.reasoning, result.text) == expected(model.detokenize(result.tokens), False)
            assert result.usage.reasoning_tokens <= most


def test_a_template_without_thoughts_leaves_them_in_the_text(models: dict[str, Path]) -> None:
    with Model.load(models["plain"]) as model:
        result = model.chat(ASK)
        assert (result.reasoning, result.text, result.message()) == ("", TEXT, {"role": "assistant", "content": TEXT})


def test_stop_texts_and_calls_are_those_of_the_answer(models: dict[str, Path]) -> None:
    with Model.load(models["thinks"]) as model:
        result = model.chat(ASK, stop=["\n\n", "day"])
        assert (result.reasoning, result.text, result.finish_reason) == (THOUGHT, "Good ", "stop")
        assert model.generate(model.apply_template(ASK), stop="\n\n").text == "<think>\nThe town, köln…"
    with Model.load(models["calls"]) as model:
        result = model.chat(ASK, tools=TOOLS)
        assert (result.reasoning, result.text) == (f"So: {CALL}", "")
        assert [call.name for call in result.tool_calls] == ["weather"]


@pytest.mark.parametrize(("stop", "finish"), [("\n\n", "stop"), ("day", "cancelled")])
def test_a_receipt_is_true(models: dict[str, Path], stop: str, finish: str) -> None:
    with Model.load(models["thinks"]) as model:
        receipt = model.chat(ASK, stop=stop, receipt=True).receipt
        assert receipt is not None and receipt.finish_reason == finish
        assert model.verify_receipt(receipt.to_json()).valid


def test_a_format_is_an_answer_even_if_the_prompt_opens_a_thought(models: dict[str, Path]) -> None:
    with Model.load(models["opened-json"]) as model:
        assert (model.chat(ASK).reasoning, model.chat(ASK).text) == ('{"a": 1}', "")
        held = model.chat(ASK, json_schema={"type": "object"}, max_tokens=100)
        assert (held.reasoning, held.text) == ("", '{"a": 1}')


def test_calls_that_have_to_come_are_an_answer(models: dict[str, Path]) -> None:
    with Model.load(models["opened"]) as model:
        prompt = model.apply_template(ASK)
        for choice, opened in (("auto", True), ("required", False), ("weather", False)):
            assert begun_in(model, prompt, Tools.of(TOOLS, choice), Sampling()) == Begun(opened)
        assert begun_in(model, prompt, None, Sampling(json_schema="{}")) == Begun(False)


def test_the_end_of_a_stream_brings_what_was_held_back(models: dict[str, Path]) -> None:
    with Model.load(models["half"]) as model:
        pieces = list(model.stream_chat(ASK))
        assert "".join(piece.reasoning for piece in pieces) == model.chat(ASK).reasoning == "so </thi"
        assert (pieces[-1].reasoning, pieces[-1].token) == (" </thi", None)


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    script = [b"<think>", b"why", b"</think>", b"so", b"be"]
    words = byte_tokenizer(script)
    words.add_special_tokens(["<think>", "</think>"])
    with Model.load(scripted_model(tmp_path / "m", script, template=THINKS, tokenizer=words)) as model:
        result = model.chat(ASK)
        assert (result.reasoning, result.text, result.usage.reasoning_tokens) == ("why", "sobe", 3)
        assert model.generate(model.apply_template(ASK)).text == "whysobe"


# ---- over HTTP ----


@pytest.fixture(scope="module")
def serving(models: dict[str, Path]) -> Iterator[Serving]:
    with served(*models.values()) as serving:
        yield serving


@pytest.mark.parametrize("model", ["thinks", "opened"])
def test_chat_completions(serving: Serving, model: str) -> None:
    client = OpenAI(base_url=f"{serving.address}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=model, messages=ASK)
    message = answer.choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == (SAID, THOUGHT)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    n = answer.usage.completion_tokens_details.reasoning_tokens
    assert n is not None and 0 < n < answer.usage.completion_tokens

    deltas = [each["choices"][0]["delta"] for each in chunks(streamed(serving, "/v1/chat/completions",
                                                                     {"model": model, "messages": ASK}))]  # fmt: skip
    names = " ".join(name for delta in deltas for name in delta if name != "role")
    assert re.fullmatch("content( reasoning_content)+( content)+", names)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == SAID


def test_an_answer_without_thoughts_has_no_field_of_them(serving: Serving) -> None:
    _, answer = post(serving, "/v1/chat/completions", {"model": "plain", "messages": ASK})
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT, "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    ("model", "begun", "reasoning", "content"),
    [("thinks", "<think>", True, SAID), ("thinks", "<think>so</think>", False, TEXT), ("thinks", "so", False, TEXT),
     ("opened", "so", True, SAID), ("opened", "so</think>", False, TEXT.removeprefix("<think>\n"))],
)  # fmt: skip
def test_an_answer_that_goes_on(serving: Serving, model: str, begun: str, reasoning: bool, content: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": begun}]
    asked = {"model": model, "messages": messages, "continue_final_message": True}
    _, answer = post(serving, "/v1/chat/completions", asked)
    message = answer["choices"][0]["message"]
    assert ("reasoning_content" in message, message["content"]) == (reasoning, content)


def test_messages(serving: Serving) -> None:
    claude = Anthropic(base_url=serving.address, api_key="none", max_retries=0)
    answer = claude.messages.create(model="thinks", max_tokens=500, messages=ASK)
    assert [block.to_dict() for block in answer.content] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""}, {"type": "text", "text": SAID},
    ]  # fmt: skip
    with claude.messages.stream(model="thinks", max_tokens=500, messages=ASK) as stream:
        assert "".join(stream.text_stream) == SAID
        assert stream.get_final_message().content[0] == answer.content[0]
    found = events(streamed(serving, "/v1/messages", {"model": "thinks", "messages": ASK, "max_tokens": 500}))
    begun = [(each["index"], each["content_block"]["type"]) for each in found if each["type"] == "content_block_start"]
    assert begun == [(0, "thinking"), (1, "text")]
    kinds = [each["delta"]["type"] for each in found if each["type"] == "content_block_delta" and each["index"] == 0]
    assert set(kinds) == {"thinking_delta"}


def test_messages_with_thoughts_before(serving: Serving) -> None:
    model = serving.models["thinks"].model
    blocks: Any = [{"type": "thinking", "thinking": "why", "signature": ""}, {"type": "text", "text": "so"}]
    conversation = [*ASK, {"role": "assistant", "content": blocks[:1]}]
    assert messages.conversation({"messages": conversation})[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "why"}  # many templates take no other content
    ]
    asked = {"model": "thinks", "messages": [*ASK, {"role": "assistant", "content": blocks}, *ASK], "max_tokens": 500}
    told = [*ASK, {"role": "assistant", "content": "so", "reasoning_content": "why"}, *ASK]
    status, answer = post(serving, "/v1/messages/count_tokens", asked)
    assert (status, answer) == (200, {"input_tokens": len(model.apply_template(told))})
    asked["messages"] = [{"role": "user", "content": blocks}]
    status, answer = post(serving, "/v1/messages", asked)
    assert status == 400 and "thinking" in answer["error"]["message"]


def test_thoughts_are_turned_on_and_off(serving: Serving) -> None:
    model = serving.models["thinks"].model
    for kind, variables in (("enabled", {"enable_thinking": True}), ("disabled", {"enable_thinking": False})):
        asked = {"messages": ASK, "max_tokens": 5, "thinking": {"type": kind, "budget_tokens": 1024}}
        status, answer = post(serving, "/v1/messages/count_tokens", asked | {"model": "thinks"})
        assert (status, answer["input_tokens"]) == (200, len(model.apply_template(ASK, variables=variables)))
    status, answer = post(serving, "/v1/messages", asked | {"model": "plain", "thinking": {"type": "enabled"}})
    assert (status, answer["error"]["message"].count("without thoughts")) == (400, 1)
    _, answer = post(serving, "/v1/messages", asked | {"model": "untold", "thinking": {"type": "enabled"}})
    assert "has no chat template" in answer["error"]["message"]
    status, answer = post(serving, "/v1/messages", asked | {"model": "opened", "thinking": {"type": "enabled"}})
    assert status == 200
    status, answer = post(serving, "/v1/messages", asked | {"model": "thinks", "thinking": {"type": "on"}})
    assert status == 400


@pytest.mark.parametrize(
    ("path", "more"), [("chat/completions", {"continue_final_message": True}), ("messages", {"max_tokens": 5})]
)
def test_thoughts_apart_from_a_begun_answer_are_refused(serving: Serving, path: str, more: dict[str, Any]) -> None:
    """A template writes them in its own way, which is not known here; to lose them would change the answer."""
    begun = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    status, answer = post(serving, f"/v1/{path}", {"model": "thinks", "messages": [*ASK, begun], **more})
    assert status == 400 and "put them into the text" in answer["error"]["message"]


def test_thoughts_before_calls(serving: Serving) -> None:
    asked = {"model": "calls", "max_tokens": 500, "messages": ASK, "tools": USE}
    found = events(streamed(serving, "/v1/messages", asked))
    begun = [(each["index"], each["content_block"]["type"]) for each in found if each["type"] == "content_block_start"]
    assert begun == [(0, "thinking"), (1, "tool_use")]
    _, answer = post(serving, "/v1/messages", asked)
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
    assert answer["content"][0]["thinking"] == f"So: {CALL}" and answer["stop_reason"] == "tool_use"
    _, answer = post(serving, "/v1/chat/completions", {"model": "calls", "messages": ASK, "tools": TOOLS})
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, f"So: {CALL}")
    _, answer = post(serving, "/v1/responses", {"model": "calls", "input": "weather?", "tools": FLAT})
    assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]


def test_every_token_is_scored_once(serving: Serving) -> None:
    asked = {"model": "thinks", "messages": ASK, "logprobs": True, "n": 2}
    _, answer = post(serving, "/v1/chat/completions", asked)
    for choice in answer["choices"]:
        assert bytes(byte for each in choice["logprobs"]["content"] for byte in each["bytes"]) == TEXT.encode()
    found = chunks(streamed(serving, "/v1/chat/completions", asked))
    for index in (0, 1):
        scored = [each["choices"][0]["logprobs"] for each in found if each["choices"][0]["index"] == index]
        tokens = [token for each in scored if each for token in each["content"]]
        assert tokens == answer["choices"][index]["logprobs"]["content"]


def test_answers_cut_within_thoughts(serving: Serving) -> None:
    _, answer = post(serving, "/v1/chat/completions", {"model": "thinks", "messages": ASK, "max_tokens": 4})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert THOUGHT.startswith(choice["message"]["reasoning_content"])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    _, answer = post(serving, "/v1/messages", {"model": "thinks", "messages": ASK, "max_tokens": 4})
    assert [block["type"] for block in answer["content"]] == ["thinking"] and answer["stop_reason"] == "max_tokens"
    _, answer = post(serving, "/v1/responses", {"model": "thinks", "input": "weather?", "max_output_tokens": 4})
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("reasoning", "incomplete")]


def test_responses(serving: Serving) -> None:
    asked = {"model": "thinks", "input": "weather?"}
    found = events(streamed(serving, "/v1/responses", asked))
    for each in found:
        TypeAdapter(ResponseStreamEvent).validate_python(each)
    names = [each["type"].removeprefix("response.") for each in found if "delta" not in each["type"]]
    item = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert names == ["created", "in_progress", *item[0], "reasoning_text.done", *item[1],
                     *item[0], "output_text.done", *item[1], "completed"]  # fmt: skip
    assert "".join(each["delta"] for each in found if each["type"] == "response.reasoning_text.delta") == THOUGHT
    response = Response.model_validate(found[-1]["response"])
    assert response.output_text == SAID and response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    first, second = found[-1]["response"]["output"]
    assert first | {"id": ""} == {
        "id": "", "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }  # fmt: skip
    assert first["id"] != second["id"]
    client = OpenAI(base_url=f"{serving.address}/v1", api_key="none", max_retries=0)
    with client.responses.stream(model="thinks", input="weather?") as stream:
        assert stream.get_final_response().output_text == SAID


CALLED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
TURNS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "assistant", "content": "so"}], [{"role": "assistant", "content": "so", "reasoning_content": "why"}]),
    ([], [{"role": "assistant", "content": "", "reasoning_content": "why"}]),
    ([CALLED], [{"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]}]),
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
      {"role": "assistant", "content": "so"}],
     [{"role": "assistant", "content": "so", "reasoning_content": "why\nx"}]),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "go"}],
     [{"role": "assistant", "content": "", "reasoning_content": "why"}, {"role": "user", "content": "go"}]),
]  # fmt: skip


@pytest.mark.parametrize(("items", "told"), TURNS)
def test_responses_with_thoughts_before(items: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
    assert responses.conversation({"input": [{"role": "user", "content": "?"}, thought, *items]})[1:] == told


# ---- in the terminal ----


def test_chat_shows_them_and_keeps_them_apart(models: dict[str, Path], tmp_path: Path) -> None:
    session, saved = tmp_path / "talk", tmp_path / "talks.jsonl"
    done = piped(models["thinks"], "weather?", "weather?", f"/save {saved}", args=("--session", session))
    assert (done.returncode, done.stdout) == (0, f"{TEXT}\n" * 2)
    answer = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
    assert json.loads(saved.read_text(encoding="utf-8")) == {"messages": [*ASK, answer] * 2}
    with Model.load(models["thinks"]) as model:
        told = [ASK, [*ASK, answer, *ASK], [*([*ASK, answer] * 2), *ASK]]
        lengths = [len(model.apply_template(messages)) for messages in told]
        assert prompts(done.stderr) == lengths[:2]
        assert prompts(piped(models["thinks"], "weather?", args=("--session", session)).stderr) == lengths[2:]
        with model.load_session(session) as kept:
            note = json.loads(kept.note)
            note["turns"][1]["reasoning_content"] = 5
            kept.save(session, json.dumps(note).encode())
    done = piped(models["thinks"], "weather?", args=("--session", session))
    assert (done.returncode, done.stdout) == (1, "") and "no conversation" in done.stderr
