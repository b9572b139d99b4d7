"""The body of a request: read within limits of time and size, and parsed strictly."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from starlette.requests import Request

from bitnet_runtime.errors import shown, unique_keys
from bitnet_serve.errors import ApiError, refuse
from bitnet_serve.models.scheduler import PATIENCE, OverloadedError

SECONDS = 30.0  # for a whole body
MOST_VALUES = 1 << 20  # as many as fit into a body of texts: what has room for pictures takes Python seconds for lists
MOST_DIGITS = 4000  # of a whole number; Python reads 4,300


class Room:
    """Memory for bodies that come, before their requests have places: which model they ask stands in them.

    Nobody has more of it than he leaves to others, so one alone may have half."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[object] = Counter()  # bytes of each client

    def take(self, n: int, client: object) -> None:
        """Raises OverloadedError: there is not enough room."""
        if self._held[client] + n > self._most - self._held.total() - n:
            raise OverloadedError("bodies of other requests are being read; try again later", PATIENCE)
        self._held[client] += n

    def give(self, n: int, client: object) -> None:
        self._held -= Counter({client: n})  # drops those who have none


async def read(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    """The whole body. take: reserves that many bytes. Raises ApiError, OverloadedError or ClientDisconnect."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form on another site could send other types, without the browser asking us first
        told = f"content-type is {kind[:80]!r}, expected application/json; "
        told += "with curl add -H 'content-type: application/json'"
        raise ApiError(415, told, "unsupported_media_type")
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise ApiError(415, f"content-encoding is {packed[:80]!r}, expected none", "unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise _too_large(most)
                take(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {SECONDS:g} s", "timeout") from None
    return b"".join(chunks)


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object; fields that are null count as missing. Raises ApiError."""
    if len(data) > MOST_VALUES and (found := sum(map(data.count, (b",", b"[", b"{")))) > MOST_VALUES:
        told = f"the body has {found:,} commas and brackets, expected at most {MOST_VALUES:,}"
        raise ApiError(413, told, "body_too_large")
    try:
        value = json.loads(
            data, object_pairs_hook=unique_keys, parse_constant=_no_constant, parse_int=_whole, parse_float=_float
        )
    except RecursionError:
        raise refuse("the body is nested too deeply, expected a JSON object", code="invalid_json") from None
    except ValueError as error:
        raise refuse(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise refuse(f"the body is {shown(value)}, expected a JSON object", code="invalid_json")
    return {key: item for key, item in value.items() if item is not None}


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most:,} bytes, the most this server takes", "body_too_large")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits, expected at most {MOST_DIGITS:,}")
    return int(digits)


def _float(digits: str) -> float:
    """Infinity would come back where a request is repeated in its answer, and no JSON has it."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:40]} is larger than all numbers of 64 bits")
    return number


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")
