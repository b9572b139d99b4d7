"""From events of answers to events of a stream: which tokens are sent together, and when a comment is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.chat.calls import CallPart
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.errors import BitnetError
from bitnet_serve.endpoints import sending
from bitnet_serve.endpoints.answers import Block, Choice, Shape
from bitnet_serve.endpoints.chat import Chat
from bitnet_serve.endpoints.messages import Messages
from bitnet_serve.endpoints.responses import Responses
from bitnet_serve.endpoints.sending import stream_events
from bitnet_serve.errors import ApiError
from bitnet_serve.models import generation
from bitnet_serve.models.generation import Ask, End, Event, Failure, Mailbox, Text, Timings
from bitnet_serve.models.registry import Served

MODEL = cast(Served, SimpleNamespace(name="m", fingerprint="f", model=SimpleNamespace(defaults=Sampling())))


def streamed(shape: Shape, *batches: Sequence[tuple[int, Event]], choices: int = 1) -> list[list[Any]]:
    """The data sent after each of these batches of events of a mailbox, and then at the end or for an error."""

    async def sent() -> list[bytes]:
        mailbox, found = Mailbox(), list[bytes]()
        waiting = iter(batches)

        def come() -> None:
            for index, event in next(waiting, ()):
                mailbox.put(index, event)

        come()
        try:
            asked = [Choice(index, Ask([1], Sampling(), top=0)) for index in range(choices)]
            async for data in stream_events(shape, mailbox, asked):
                found.append(data)
                come()
        except ApiError as error:
            found.append(sending.event(error.body()))
        return found

    return [
        [json.loads(line.removeprefix("data: ")) for line in data.decode().split("\n\n") if line.startswith("data: {")]
        for data in asyncio.run(sent())
    ]


def deltas(chunks: list[Any]) -> list[Any]:
    """Of each choice: its index, new text and end."""
    return [
        (choice["index"], choice["delta"].get("content"), choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ]


def test_tokens_that_have_come_meanwhile_are_one_event() -> None:
    """A small model writes faster than events can be sent; tokens of one answer and one block are joined."""
    model = SimpleNamespace(defaults=Sampling(), bos_token=None, tokenizer=None)
    named = SimpleNamespace(name="m", fingerprint="f", model=model, token=lambda token: (chr(token), b"?"))
    scores = [Scored(token, -1.0, []) for token in b"abc"]
    a, b, c = (Text(chr(scored.token), scored) for scored in scores)
    end = End("stop", 1, 3, Timings(0, 0, 0, 0))
    first, second, last = streamed(
        Chat(cast(Served, named), None), [(0, a), (1, a), (0, b)], [(1, b), (0, c), (0, end), (1, end)], choices=2
    )
    assert deltas(first) == [(0, "", None), (1, "", None), (0, "ab", None), (1, "a", None)]
    said = [one["logprobs"]["content"] for chunk in first for one in chunk["choices"] if one["logprobs"]]
    assert [[token["token"] for token in one] for one in said] == [["a", "b"], ["a"]]
    assert deltas(second) == [(0, "c", None), (0, None, "stop"), (1, "b", None), (1, None, "stop")] and not last


def test_what_came_before_a_failure_is_sent() -> None:
    first, failure = streamed(Chat(MODEL, None), [(0, Text("a")), (0, Text("b")), (0, Failure(BitnetError("broken")))])
    assert [chunk["choices"][0]["delta"].get("content") for chunk in first] == ["", "ab"]
    assert "broken" in failure[0]["error"]["message"]


@pytest.mark.parametrize("pace", [0.0, 1e-6, 3600.0])
def test_the_loop_looks_at_its_pace_or_when_an_answer_ends(monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    monkeypatch.setattr(generation, "PACE", pace)
    text, end = Text("a"), End("stop", 1, 3, Timings(0, 0, 0, 0))

    async def looks() -> list[list[tuple[int, Event]]]:
        mailbox, found = Mailbox(), list[list[tuple[int, Event]]]()
        for come in ([text], [text, text], [end], [text, end]):  # of several answers
            for event in come:
                await asyncio.to_thread(mailbox.put, 0, event)
            if pace < 1 or end in come or not found:  # the first token does not wait
                found.append(await mailbox.get())
        return found

    counts = [len(each) for each in asyncio.run(looks())]
    assert counts == ([1, 3, 2] if pace > 1 else [1, 2, 1, 2])


def test_a_long_prefill_keeps_the_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "KEEP_ALIVE", 0.0)

    async def sent() -> list[bytes]:
        mailbox, found = Mailbox(), list[bytes]()
        async for data in stream_events(Chat(MODEL, None), mailbox, [Choice(0, Ask([1], Sampling()))]):
            found.append(data)
            if len(found) == 3:
                mailbox.put(0, End("stop", 1, 0, Timings(0, 0, 0, 0)))
        return found

    *comments, _, last = asyncio.run(sent())
    assert set(comments) == {b": still working\n\n"} and len(comments) >= 3 and last == b"data: [DONE]\n\n"


def test_a_call_that_is_sent_when_it_is_complete_keeps_the_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """In /v1/messages. Its tokens come all the time, and nothing was sent for as long as it took to write it."""
    clock = 0.0

    async def feed(mailbox: Mailbox) -> None:
        nonlocal clock
        for text in ("{", *" " * 23, "}"):  # one a second
            mailbox.put(0, Text("", calls=[CallPart(0, "call_1", "clock", text)]))
            await asyncio.sleep(0)
            clock += 1
        mailbox.put(0, End("stop", 1, 25, Timings(0, 0, 0, 0)))

    async def sent() -> list[bytes]:
        mailbox = Mailbox()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock)
        feeding = asyncio.create_task(feed(mailbox))
        shape, choices = Messages(cast(Served, SimpleNamespace(name="m"))), [Choice(0, Ask([1], Sampling()))]
        found = [data async for data in stream_events(shape, mailbox, choices)]
        await feeding
        return found

    start, *comments, call, stop = asyncio.run(sent())
    assert b"message_start" in start and b"tool_use" in call and b"message_stop" in stop
    assert comments == [b": still working\n\n"] * 2


class Walked(list[Block]):
    """Counts how often somebody goes through it."""

    walks = 0

    def __iter__(self) -> Iterator[Block]:
        self.walks += 1
        return super().__iter__()

    def index(self, *args: Any) -> int:
        self.walks += 1
        return super().index(*args)


@pytest.mark.usefixtures("token_by_token")
@pytest.mark.parametrize(
    "shape", [Chat(MODEL, None), Messages(MODEL), Responses(MODEL, {})], ids=lambda it: type(it).__name__
)
def test_a_token_costs_the_same_behind_many_calls(shape: Shape) -> None:
    """All streams of the server wait meanwhile."""
    choice = Choice(0, Ask([1], Sampling()), Walked())

    async def sent() -> int:
        mailbox = Mailbox()
        for call in range(100):
            for text in ("{", "}"):
                mailbox.put(0, Text("", calls=[CallPart(call, f"call_{call}", "clock", text)]))
        mailbox.put(0, End("stop", 1, 200, Timings(0, 0, 0, 0)))
        return len([data async for data in stream_events(shape, mailbox, [choice])])

    assert asyncio.run(sent()) > 100
    assert len(choice.calls) == 100 and cast(Walked, choice.blocks).walks < 10
