"""One client's requests keep nobody else's from the queue, nor from the compiler of formats."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.requests import Request
from starlette.types import Message

from bitnet_serve import app
from bitnet_serve.app import Api, has_pictures
from bitnet_serve.models.registry import Served
from bitnet_serve.models.scheduler import OverloadedError, Scheduler
from bitnet_serve.models.shelf import Shelf
from bitnet_serve.turns import Turns
from runtime_models import slow_model
from servers import as_http, connect, idle, post, served, wait


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(places=4, queue=6, name="")
    yield made
    made.close()


def enters(scheduler: Scheduler, client: str) -> int:
    """How often he is let in."""
    for count in range(99):
        try:
            scheduler.enter(client)
        except OverloadedError:
            return count
    raise AssertionError("no end")


def test_a_client_alone_has_the_whole_queue(scheduler: Scheduler) -> None:
    assert enters(scheduler, "greedy") == 10 and scheduler.requests == 10


def test_others_come_in_when_one_has_it(scheduler: Scheduler) -> None:
    enters(scheduler, "greedy")
    assert [enters(scheduler, name) for name in ("a", "b", "c", "d", "greedy")] == [2, 1, 1, 0, 0]
    assert scheduler.requests == 14 and scheduler.refused == 6


def test_who_leaves_makes_room(scheduler: Scheduler) -> None:
    leave = scheduler.enter("greedy")
    enters(scheduler, "greedy")
    enters(scheduler, "a")
    leave()
    assert [enters(scheduler, name) for name in ("greedy", "b")] == [0, 2]


async def order(arrivals: list[str]) -> list[str]:
    """The order in which requests have their turns, all but the first waiting for it."""
    made, served = Turns("others work", 9), list[str]()
    gate = asyncio.Event()

    async def work(name: str) -> None:
        async with made.turn(name[0]):
            served.append(name)
            await gate.wait()

    tasks = []
    for name in arrivals:
        tasks.append(asyncio.create_task(work(name)))
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    return served


def test_clients_take_turns() -> None:
    arrivals = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    assert asyncio.run(order(arrivals)) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    async def run() -> list[str]:
        made, served = Turns("others work", 9), list[str]()

        async def work(name: str) -> None:
            async with made.turn(name):
                served.append(name)

        async with made.turn("a"):
            tasks = [asyncio.create_task(work(name)) for name in "bcde"]
            await asyncio.sleep(0)
            tasks[0].cancel()  # while it waits
            await asyncio.sleep(0)
        tasks[1].cancel()  # when it has just arrived
        await asyncio.gather(*tasks, return_exceptions=True)
        async with made.turn("f"):  # and it is free again
            return served

    assert asyncio.run(run()) == ["d", "e"]


def test_a_turn_that_does_not_come() -> None:
    async def run() -> None:
        made = Turns("others work", 0.01)
        async with made.turn("a"):
            with pytest.raises(OverloadedError, match="others work; try again later"):
                async with made.turn("b"):
                    pass
        async with made.turn("b"):
            pass

    asyncio.run(run())


def test_a_client_with_all_places_makes_room_for_others(tmp_path: Path) -> None:
    """Whether his answers are long, or his texts to embed many. All of them waited for the end of one."""
    many = {"input": [[1, 2, 3] * 1000] * 100, "pooling": "mean"}
    key = b"\r\nauthorization: Bearer a"
    with served(slow_model(tmp_path), parallel=2, api_keys=["a", "b"]) as serving:
        scheduler = serving.models["slow"].scheduler
        for path, asked in (("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 60_000}), ("/v1/embeddings", many)):
            data = as_http(path, asked).replace(b"localhost", b"localhost" + key)
            with connect(serving, data), connect(serving, data):
                wait(lambda: scheduler.load == (2, 0))
                assert (
                    post(serving, "/v1/completions", {"prompt": "x", "max_tokens": 5}, authorization="Bearer b")[0]
                    == 200
                )
                found = post(serving, "/v1/embeddings", {"input": "x", "pooling": "mean"}, authorization="Bearer b")
                assert (found[0], scheduler.load) == (200, (2, 0))
            wait(lambda: idle(serving))


UNUSED = Mock(spec=Served)  # the model, as nobody asks for a conversation


def asking(client: str, long: bool) -> Request:
    """A request whose client stays."""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    state = {"client": client, "size": app.LONG * long}
    return Request({"type": "http", "path": "/v1/completions", "headers": [], "state": state}, receive)


FREE_TOOL: Any = {"type": "function", "function": {"name": "f"}}
STRICT_TOOL: Any = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    ("asked", "waits"),
    [
        ({"tools": [FREE_TOOL]}, False),
        ({"tools": [FREE_TOOL], "tool_choice": "none"}, False),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"}}, False),
        ({"tools": [{"type": "function", "name": "f", "strict": False}], "text": {"verbosity": "low"}}, False),
        ({"functions": [{"name": "f"}]}, False),
        ({"functions": [{"name": "f", "strict": True}]}, True),
        ({"response_format": {"type": "text"}, "output_config": {"effort": "low"}}, False),
        ({"text": {"format": {"type": "text"}}, "tools": 5}, False),
        ({"tools": [FREE_TOOL], "tool_choice": "required"}, True),
        ({"tools": [FREE_TOOL, STRICT_TOOL]}, True),
        ({"tools": [{"type": "function", "name": "f"}]}, True),  # as /v1/responses has it
        ({"tools": [{"name": "f", "input_schema": {}, "strict": True}]}, True),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"}}, True),
        ({"tools": [{"name": "f", "input_schema": {}}] * 127 + [{"type": "function", "name": "f"}]}, True),
        ({"tools": [{"name": "f", "input_schema": {}}] * 128 + [{"type": "function", "name": "f"}]}, False),  # refused
        ({"functions": [{"name": "f"}], "function_call": {"name": "f"}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, True),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, True),
        ({"regex": "a"}, True),
    ],
)
def test_whoever_needs_no_format_waits_for_none(asked: dict[str, Any], waits: bool) -> None:
    api = Api(Shelf({}, 0), 1 << 20)
    api._formats = Turns("others compile", 0.01)
    request = asking("a", False)

    async def run() -> None:
        async with api._formats.turn("another"), api._turn(request, UNUSED, asked):
            pass

    with pytest.raises(OverloadedError) if waits else contextlib.nullcontext():
        asyncio.run(run())


@pytest.mark.parametrize("kind", ["_pictures", "_long"])
@pytest.mark.parametrize("asked", [{}, {"regex": "a"}])
def test_pictures_and_long_texts_wait_for_others_with_a_format_too(kind: str, asked: dict[str, Any]) -> None:
    api, pictures = Api(Shelf({}, 0), 1 << 20), kind == "_pictures"
    turns = Turns("others work", 0.01)
    setattr(api, kind, turns)
    whole = asked | ({"input": {"image": "data:"}} if pictures else {})
    request = asking("a", not pictures)

    async def run() -> None:
        async with turns.turn("another"), api._turn(request, UNUSED, whole):
            pass

    with pytest.raises(OverloadedError, match="others work"):
        asyncio.run(run())


def test_long_texts_take_turns() -> None:
    """Each may hold Python's lock for a second, and take 300 MB."""
    api = Api(Shelf({}, 0), 1 << 20)

    async def run() -> list[str]:
        served, gate = list[str](), asyncio.Event()

        async def work(client: str, long: bool) -> None:
            async with api._turn(asking(client, long), UNUSED, {"prompt": "a"}):
                served.append(client)
                await gate.wait()

        tasks = [asyncio.create_task(work(*each)) for each in (("a", True), ("a", True), ("b", True), ("c", False))]
        for _ in range(100):  # passes of the loop, of which whoever may begin needs a few
            await asyncio.sleep(0)
        found = list(served)
        gate.set()
        await asyncio.gather(*tasks)
        return sorted(found) + served[2:]

    assert asyncio.run(run()) == ["a", "c", "b", "a"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, True),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}, {"type": "input_image"}]}]}, True),
        ({"input": [{"image": "data:"}]}, True),
        ({"input": {"image": "data:"}}, True),
        ({"input": [{"type": "text"}] * 20_000 + [{"image": "data:"}]}, True),
        ({"messages": [{"role": "user", "content": "image"}, 5], "input": "image"}, False),
        ({"input": ["image", 7, [1, 2]], "messages": None}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "image"}]}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": ["image"]}]}]}, False),
    ],
)
def test_what_may_be_a_picture(asked: dict[str, Any], expected: bool) -> None:
    assert has_pictures(asked) == expected
