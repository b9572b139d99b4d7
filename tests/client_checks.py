"""Third-party clients against a running server, in the environment of tests/clients.txt: client_checks.py ADDRESS

The server has the models of `clients.py`: "one" writes some text and then calls `weather`, "text" only talks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

sys.path.insert(0, str(Path(__file__).parent))
from docs_text import blocks

PAGE = Path(__file__).parents[1] / "docs/tools.md"
TEXT, SAID = "Nothing to call < here.", "Let me see."
ARGUMENTS = {"town": "Köln", "days": 3}
ASK: Any = [{"role": "user", "content": "weather?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "town": {"type": "string"}, "days": {"type": "integer"}}}}}]  # fmt: skip


def weather(town: str, days: int) -> str:
    """The weather forecast."""
    return f"{town}: {days}"


def check_openai(address: str) -> None:
    assert openai.__version__.startswith("2."), openai.__version__
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    assert {"one", "text"} <= {model.id for model in client.models.list()}
    answer = client.chat.completions.create(model="text", messages=ASK)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TEXT, "stop")
    chunks = list(client.chat.completions.create(model="text", messages=ASK, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    with client.chat.completions.stream(model="one", messages=ASK, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == SAID and message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    with client.responses.stream(model="one", input="weather?", tools=[{**TOOLS[0]["function"], "type": "function",
                                                                        "strict": False}]) as events:  # fmt: skip
        calls = [item for item in events.get_final_response().output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS]
    assert client.completions.create(model="text", prompt="x", max_tokens=3).choices[0].finish_reason == "length"
    for form in ("float", "base64"):
        vector = client.embeddings.create(
            model="text", input=["a", "b"], encoding_format=form, extra_body={"pooling": "mean"}
        )  # type: ignore[call-overload]
        assert len(vector.data) == 2
    try:
        client.chat.completions.create(model="none", messages=ASK)
        raise AssertionError("no error")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"


def check_langchain(address: str) -> None:
    model = ChatOpenAI(base_url=address, api_key="none", model="text")
    assert model.invoke("hi").content == TEXT
    assert "".join(str(piece.content) for piece in model.stream("hi")) == TEXT
    assert asyncio.run(model.ainvoke("hi")).content == TEXT
    calling = ChatOpenAI(base_url=address, api_key="none", model="one").bind_tools([tool(weather)])
    answer = calling.invoke("weather?")
    assert answer.content == SAID and answer.tool_calls[0]["args"] == ARGUMENTS
    assert answer.response_metadata["finish_reason"] == "tool_calls" and answer.usage_metadata is not None
    pieces = list(calling.stream("weather?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece  # type: ignore[assignment]
    assert whole.tool_calls[0]["args"] == ARGUMENTS and len(whole.tool_calls) == 1
    result = ToolMessage("rain", tool_call_id=answer.tool_calls[0]["id"])
    assert model.bind_tools([tool(weather)]).invoke([HumanMessage("weather?"), answer, result]).content == TEXT
    newer = ChatOpenAI(base_url=address, api_key="none", model="one", use_responses_api=True)
    free = newer.bind_tools([tool(weather)], strict=False)  # strict would force other tokens than the script's
    assert free.invoke("weather?").tool_calls[0]["args"] == ARGUMENTS
    vectors = OpenAIEmbeddings(
        base_url=address, api_key="none", model="text", check_embedding_ctx_length=False,
        model_kwargs={"extra_body": {"pooling": "mean"}},
    )  # fmt: skip
    assert len(vectors.embed_documents(["a", "b"])) == 2


def check_llama_index(address: str) -> None:
    shape: dict[str, Any] = {"api_base": address, "api_key": "none", "is_chat_model": True, "context_window": 2048}
    model = OpenAILike(model="text", **shape)
    assert model.complete("hi").text == TEXT
    assert model.chat([ChatMessage(role="user", content="hi")]).message.content == TEXT
    assert list(model.stream_complete("hi"))[-1].text == TEXT
    calling = OpenAILike(model="one", is_function_calling_model=True, **shape)
    asked = calling.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="weather?")
    (call,) = calling.get_tool_calls_from_response(asked)
    assert (call.tool_name, call.tool_kwargs) == ("weather", ARGUMENTS)
    plain = OpenAILike(model="text", api_base=address, api_key="none", is_chat_model=False, max_tokens=5)
    assert plain.complete("hi").text


def check_litellm(address: str) -> None:
    shape: dict[str, Any] = {"api_base": address, "api_key": "none"}
    answer = litellm.completion(model="openai/text", messages=ASK, **shape)
    assert answer.choices[0].message.content == TEXT
    chunks = list(litellm.completion(model="openai/one", messages=ASK, tools=TOOLS, stream=True, **shape))
    whole = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert whole is not None
    message = whole.choices[0].message
    assert message.content == SAID and json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    assert whole.choices[0].finish_reason == "tool_calls"
    assert (
        litellm.text_completion(model="text-completion-openai/text", prompt="x", max_tokens=4, **shape).choices[0].text
    )
    try:
        litellm.completion(model="openai/none", messages=ASK, **shape)
        raise AssertionError("no error")
    except litellm.NotFoundError:
        pass
    try:
        litellm.completion(model="openai/text", messages=[{"role": "user", "content": "long " * 2048}], **shape)
        raise AssertionError("no error")
    except litellm.ContextWindowExceededError:
        pass


def check_page(address: str) -> None:
    """Run the example for clients in docs/tools.md."""
    (snippet,) = [block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if "langchain" in block.text]
    found: dict[str, Any] = {}
    exec(snippet.replace("http://127.0.0.1:8080/v1", address).replace('"model"', '"one"'), found)
    assert found["chain"].bind_tools([tool(weather)]).invoke("weather?").tool_calls[0]["args"] == ARGUMENTS
    asked = found["index"].chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="weather?")
    assert found["index"].get_tool_calls_from_response(asked)[0].tool_kwargs == ARGUMENTS


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    for check in (check_openai, check_langchain, check_llama_index, check_litellm, check_page):
        check(f"{sys.argv[1]}/v1")
        print(f"{check.__name__.removeprefix('check_')}: passed")
