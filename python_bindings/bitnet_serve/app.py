"""The endpoints: which path does what."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from bitnet_runtime import __version__
from bitnet_runtime.errors import BitnetError
from bitnet_serve import body, metrics, openapi, page
from bitnet_serve.endpoints import chat, completions, embeddings, infill, messages, offers, responses, tokens
from bitnet_serve.endpoints.answers import Work
from bitnet_serve.endpoints.sending import respond, unless_gone
from bitnet_serve.errors import ApiError, api_error
from bitnet_serve.models.registry import Served
from bitnet_serve.models.scheduler import OverloadedError
from bitnet_serve.models.shelf import Shelf
from bitnet_serve.request_log import LEFT
from bitnet_serve.turns import Turns

Understand = Callable[[Served, Mapping[str, Any]], Work]
GENERATING: dict[str, Understand] = {
    "/v1/chat/completions": chat.understand,
    "/v1/completions": completions.understand,
    "/v1/responses": responses.understand,
    "/v1/messages": messages.understand,
    "/v1/fim/completions": infill.understand_fim,
    "/infill": infill.understand,
}
TEXT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/fim/completions": "prompt",
    "/v1/messages/count_tokens": "messages",
    "/tokenize": "messages",  # a prompt there is named by itself
    "/v1/embeddings": "input",
}
"""The field of each path that holds the text, for errors about a context that is too small."""
BODIES = 32  # how many of the largest bodies may be on their way at a time
AT_ONCE = 16 << 10  # bytes: a smaller body is parsed sooner than another thread would start; of others few are read
LONG = 128 << 10  # bytes: larger texts are tokenized one at a time, as 1 MiB may take a second and 300 MB
MOST_PARTS = 10_000  # parts of messages that the event loop's thread searches for pictures; there may be some in more

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
Compute = Callable[[Served, Mapping[str, Any]], Any]


class Api:
    """The endpoints. draining: new requests are refused."""

    def __init__(self, shelf: Shelf, most_body: int) -> None:
        self._shelf, self._most_body = shelf, most_body
        self.draining = False
        self._formats = Turns("formats of other requests are being compiled", 2.5)
        self._pictures = Turns("pictures of other requests are being decoded", 30)
        self._bodies = body.Room(BODIES * most_body)
        self._texts = Turns("texts of other requests are being read", 30, 2)
        self._long = Turns("long texts of other requests are being read", 30)

    def application(self) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.computing(messages.counted), methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/tokenize", self.computing(tokens.tokenized), methods=["POST"]),
            Route("/detokenize", self.computing(tokens.detokenized), methods=["POST"]),
            *(Route(path, self.generating(how), methods=["POST"]) for path, how in GENERATING.items()),
        ]
        expected = (ApiError, BitnetError, OverloadedError, HTTPException)
        handlers: dict[Any, Any] = dict.fromkeys(expected, failed) | {ClientDisconnect: nobody, Exception: failed}
        return Starlette(routes=routes, exception_handlers=handlers)

    # ---- about the server ----

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page.HTML, headers=page.HEADERS)

    async def health(self, request: Request) -> Response:
        if self.draining:
            raise shutting_down()
        if dead := [each.name for each in self._shelf if not each.scheduler.lives]:
            told = f"{dead[0]} answers no more, after a mistake of the server; its log says more; restart the server"
            raise ApiError(503, told, "internal_error")
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics.page(self._shelf), media_type=metrics.KIND)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.document())

    async def models(self, request: Request) -> Response:
        entries = self._shelf.entries()
        page = {"has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}  # as Anthropic has pages
        return JSONResponse({"object": "list", "data": entries, **page})

    async def model(self, request: Request) -> Response:
        served, adapter = self._shelf.named(request.path_params["name"])
        return JSONResponse(served.entry(adapter))

    async def tokenizer_info(self, request: Request) -> Response:
        """For programs that score texts over HTTP, with vLLM's names."""
        served, leave = await self._entered(request, dict(request.query_params))
        try:
            return JSONResponse(await asyncio.to_thread(tokens.tokenizer_info, served.model))
        finally:
            leave()

    # ---- work ----

    def generating(self, understand: Understand) -> Endpoint:
        """The endpoint of an API that answers with text."""

        async def endpoint(request: Request) -> Response:
            served, asked, leave = await self._asked(request)
            try:
                async with self._turn(request, served, asked):
                    return Answer(await asyncio.to_thread(understand, served, asked), leave)
            except BaseException:
                leave()
                raise

        return endpoint

    @contextlib.asynccontextmanager
    async def _turn(self, request: Request, served: Served, asked: Mapping[str, Any]) -> AsyncIterator[None]:
        """At a time one format is compiled, one request's pictures are decoded, one long text and few shorter ones are
        tokenized, and few chat templates filled in: other requests do not wait for threads, and memory is bounded."""
        needed = list[Turns]()
        if has_pictures(asked):  # whose bytes are long, and no text
            needed.append(self._pictures)
        elif request.state.size >= AT_ONCE:
            needed.append(self._long if request.state.size >= LONG else self._texts)
        if "messages" in asked or request.scope["path"] == "/v1/responses":
            needed.append(served.conversations)
        if offers.may_be_held(asked):  # last, as others wait least for it
            needed.append(self._formats)
        async with contextlib.AsyncExitStack() as stack:
            for turns in needed:
                await unless_gone(request.receive, stack.enter_async_context(turns.turn(client_of(request))))
            yield

    async def embeddings(self, request: Request) -> Response:
        served, asked, leave = await self._asked(request)
        try:
            async with self._turn(request, served, asked):
                texts = await asyncio.to_thread(embeddings.understand, served, asked)
            work = embeddings.compute(served, texts, client_of(request))
            tokens, found = await unless_gone(request.receive, work)
            request.scope["state"]["tokens"] = tokens, 0
            return Response(found, media_type="application/json")
        finally:
            leave()

    def computing(self, compute: Compute) -> Endpoint:
        """An endpoint whose whole answer a worker thread makes quickly."""

        async def endpoint(request: Request) -> Response:
            served, asked, leave = await self._asked(request)
            try:
                async with self._turn(request, served, asked):
                    return await asyncio.to_thread(lambda: JSONResponse(compute(served, asked)))
            finally:
                leave()

        return endpoint

    async def _asked(self, request: Request) -> tuple[Served, dict[str, Any], Callable[[], None]]:
        """The loaded model, the parsed body, and a function that gives the request's place back."""
        if self.draining:
            raise shutting_down()
        held, client = 0, client_of(request)

        def take(n: int) -> None:
            nonlocal held
            self._bodies.take(n, client)
            held += n

        try:
            data = await body.read(request, self._most_body, take)
            request.state.size = len(data)
            asked = body.parse(data) if len(data) < AT_ONCE else await asyncio.to_thread(body.parse, data)
        finally:
            self._bodies.give(held, client)
        served, leave = await self._entered(request, asked)
        return served, asked, leave

    async def _entered(self, request: Request, asked: Mapping[str, Any]) -> tuple[Served, Callable[[], None]]:
        served, adapter = self._shelf.asked(asked)
        request.scope["state"]["model"] = served.name if adapter is None else f"{served.name}:{adapter}"
        give_back = served.scheduler.enter(client_of(request))
        try:
            await unless_gone(request.receive, self._shelf.enter(served))
        except BaseException:
            give_back()
            raise

        def leave() -> None:
            self._shelf.leave(served)
            give_back()

        try:
            return served.adapted(adapter), leave
        except BaseException:
            leave()
            raise


class Answer(Response):
    """A generated answer."""

    def __init__(self, work: Work, leave: Callable[[], None]) -> None:
        self._work, self._leave = work, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await respond(self._work, scope, receive, send)
        finally:
            self._leave()


def client_of(request: Request) -> object:
    """Who asks: the API key, or the address."""
    return request.scope["state"].get("client")


def has_pictures(asked: Mapping[str, Any]) -> bool:
    """Whether any part of a request may be a picture, in any of the APIs."""
    parts = _parts(asked)
    return any(map(_may_be_picture, itertools.islice(parts, MOST_PARTS))) or next(parts, None) is not None


def _may_be_picture(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return "image" in part or (isinstance(kind, str) and "image" in kind)


def _parts(asked: Mapping[str, Any]) -> Iterator[object]:
    for given in (asked.get("messages"), asked.get("input")):
        for one in given if isinstance(given, list) else [given]:
            yield one
            content = one.get("content") if isinstance(one, dict) else None
            yield from content if isinstance(content, list) else ()


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", "shutting_down", retry_after=5)


def _instead(path: str, routes: Iterable[BaseRoute]) -> str:
    """A hint for who asked for a path that is not there, such as one of another server."""
    paths = [each.path for each in routes if isinstance(each, Route) and each.path != "/" and "{" not in each.path]
    other = [each for each in (f"/v1{path}", path.removeprefix("/v1")) if each in paths]
    near = other or difflib.get_close_matches(path[:200], paths, 1, 0.75)
    return f"; did you mean {near[0]}?" if near else "; /openapi.json lists what there is"


async def failed(request: Request, error: Exception) -> Response:
    """Any error, in the form of the API."""
    path: str = request.scope["path"]
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        more = f"; there is {headers['Allow']}" if headers else _instead(path, request.app.routes)
        what = f"{request.method} {path[:200]!r}"
        error = ApiError(error.status_code, f"there is no {what}{more}", "wrong_method" if headers else "not_found")
        error.headers |= headers
    told = api_error(error, TEXT_FIELDS.get(path))
    return JSONResponse(told.body(path), told.status, told.headers)


async def nobody(request: Request, error: Exception) -> Response:
    """The client left before the request was complete, so nobody reads this."""
    return Response(status_code=LEFT)
