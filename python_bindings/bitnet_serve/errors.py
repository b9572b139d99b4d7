"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}, with the right status.

Anthropic's has the same, and "type": "error" beside it.
"""

from __future__ import annotations

import random
import re
from typing import Any

from bitnet_runtime.errors import (
    BitnetError,
    CacheFullError,
    ContextLengthError,
    GrammarError,
    ImageError,
    InvalidParameterError,
    MissingDependencyError,
    ModelTooLargeError,
    TemplateError,
    ThreadError,
    TokenizerError,
    UnsupportedModelError,
)
from bitnet_serve.models.scheduler import OverloadedError
from bitnet_serve.models.sessions import NeverError

MESSAGES = "/v1/messages"  # Anthropic's
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    503: "overloaded_error",
}  # fmt: skip
OWN_KINDS = {413: "request_too_large", 500: "api_error"}  # Anthropic's, where it has other words
CODES: dict[type[Exception], str] = {
    UnsupportedModelError: "unsupported_by_model",
    TokenizerError: "tokenizer_error",
    TemplateError: "template_error",
    ImageError: "invalid_image",
}
"""Codes of errors that the client can do something about."""
OF_TEXTS = ("text", "messages", "images")
"""What the runtime calls the contents of the text field, whatever the API calls that field."""


class ApiError(Exception):
    """An error as a client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        *,
        retry_after: int | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.more = status, code, more or {}
        self.param = param and param.encode(errors="backslashreplace").decode()  # as a client has named it
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def body(self, path: str = "") -> dict[str, Any]:
        """The body in the form of the path's API."""
        of_messages = path.startswith(MESSAGES)
        kind = (KINDS | OWN_KINDS if of_messages else KINDS).get(self.status, "server_error")
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code, **self.more}
        return ({"type": "error"} if of_messages else {}) | {"error": told}


def refuse(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that is wrong."""
    return ApiError(400, message, code, param)


def api_error(error: Exception, field: str | None = None) -> ApiError:
    """Any error, for the client. Internal errors become one general sentence. field: the one that holds the text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        told = ApiError(503, str(error), "overloaded", retry_after=error.seconds)
        # OpenAI's client looks at this first. With whole seconds, all refused clients would come back at the same
        # moment, and the server would idle until then.
        told.headers["retry-after-ms"] = str(random.randint(250, 1000) * error.seconds)
        return told
    if isinstance(error, ContextLengthError):
        numbers = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
        larger = f", or start the server with --ctx {error.most}" if error.most > error.n_ctx else ""
        message = f"{str(error).removesuffix(error.advice)}; shorten {field or 'the text'}{larger}"
        return ApiError(400, message, "context_length_exceeded", field, more=numbers)
    if isinstance(error, GrammarError):
        return refuse(str(error), error.param or None, "invalid_format")
    if isinstance(error, InvalidParameterError):
        unknown = str(error).startswith("unknown parameter")
        message, param = str(error), error.param or None
        if field and param in OF_TEXTS:
            message, param = re.sub(f"^{param}(?= has )", field, message), field
        return refuse(message, param, "unknown_parameter" if unknown else "invalid_value")
    if isinstance(error, CacheFullError | ThreadError):
        return ApiError(503, str(error), "overloaded", retry_after=10)
    if isinstance(error, NeverError):  # no use to ask again
        return refuse(str(error), None, "out_of_memory")
    if isinstance(error, ModelTooLargeError):
        return ApiError(503, str(error), "out_of_memory", retry_after=10)
    if isinstance(error, MissingDependencyError):
        return ApiError(500, str(error), "missing_dependency")
    for kind, code in CODES.items():
        if isinstance(error, kind):
            return refuse(str(error), field if kind in (TemplateError, ImageError) else None, code)
    if isinstance(error, BitnetError):
        return ApiError(500, str(error), "engine_error")
    return ApiError(500, "an internal error of the server; its log says more", "internal_error")
