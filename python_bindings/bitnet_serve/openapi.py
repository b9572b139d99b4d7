"""/openapi.json: the fields of each path, from the tables that requests are checked against."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from bitnet_runtime.answers.logprobs import MOST
from bitnet_runtime.chat.tools import MOST as MOST_TOOLS
from bitnet_runtime.defaults import ALIASES, FIELDS, is_whole
from bitnet_runtime.shape import POOLING
from bitnet_serve.endpoints import chat, completions, embeddings, fields, infill, messages, responses, tokens

TEXT, FLAG, OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
TEXTS = {"anyOf": [TEXT, {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": fields.MOST_STOPS}]}
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = {"anyOf": [TEXT, TOKENS, {"type": "array", "items": {"anyOf": [TEXT, TOKENS]}, "minItems": 1}]}
IMAGE = {"type": "object", "required": ["image"], "properties": {"image": {"type": "string", "pattern": "^data:"}}}
INPUT = {
    "anyOf": [
        TEXT, TOKENS, IMAGE,
        {"type": "array", "items": {"anyOf": [TEXT, TOKENS]}, "minItems": 1, "maxItems": embeddings.MOST_TEXTS},
        {"type": "array", "items": IMAGE, "minItems": 1, "maxItems": embeddings.MOST_IMAGES},
    ],
}  # fmt: skip
MESSAGES = {"type": "array", "items": OBJECT, "minItems": 1, "maxItems": chat.MOST_MESSAGES}
TOOLS = {"type": "array", "items": OBJECT, "maxItems": MOST_TOOLS}
CHOICES = {"type": "integer", "minimum": 1, "maximum": fields.MOST_CHOICES}
ALTERNATIVES = {"type": "integer", "minimum": 0, "maximum": MOST}
NOTHING = {"enum": ["", []]}  # what is not done here
EXTRA = {"type": "object", "required": ["text"], "properties": {"text": TEXT, "filename": TEXT}}

COMMON: dict[str, Any] = {
    "model": TEXT, "stream": FLAG, "stream_options": OBJECT, "n": CHOICES, "receipt": FLAG, "prompt": TEXT,
    "suffix": TEXT, "messages": MESSAGES, "modalities": {"type": "array", "items": {"const": "text"}},
    "tools": TOOLS, "functions": TOOLS, "chat_template_kwargs": OBJECT, "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
}  # fmt: skip
"""Fields that several paths have; those of no table may be anything."""

GET = {
    "/health": "whether it runs", "/v1/health": "the same", "/version": "of bitnet-edge", "/v1/models": "the models",
    "/metrics": "counters and histograms for Prometheus",
    "/v1/models/{model}": "one model", "/tokenizer_info": "special tokens and chat template",
}  # fmt: skip


def _post() -> dict[str, tuple[Collection[str], list[str], dict[str, Any], bool]]:
    """By path: the fields, the required ones, the types of some, and whether sampling options are allowed."""
    own = {"echo": FLAG, "logprobs": ALTERNATIVES, "best_of": CHOICES, "prompt": PROMPT}
    editors = {
        "input_prefix": TEXT, "input_suffix": TEXT, "response_fields": {"type": "array"},
        "input_extra": {"type": "array", "items": EXTRA, "maxItems": infill.MOST_EXTRA},
    }  # fmt: skip
    vectors = {
        "encoding_format": {"enum": ["float", "base64"]}, "pooling": {"enum": [*POOLING]},
        "dimensions": {"type": "integer", "minimum": 1},
    }  # fmt: skip
    return {
        "/v1/chat/completions": (
            chat.KNOWN, ["messages"],
            {"logprobs": FLAG, "top_logprobs": ALTERNATIVES, "audio": NOTHING, "web_search_options": NOTHING}, True,
        ),
        "/v1/completions": (completions.KNOWN, ["prompt"], own, True),
        "/v1/responses": (responses.KNOWN, ["input"], {"prompt": {}, "top_logprobs": {}}, True),
        "/v1/messages": (messages.KNOWN, ["messages", "max_tokens"], {}, True),
        "/v1/messages/count_tokens": (messages.KNOWN, ["messages"], {}, True),
        "/v1/fim/completions": (infill.KNOWN_FIM, ["prompt"], {}, True),
        "/infill": (infill.KNOWN, [], editors, True),
        "/v1/embeddings": (embeddings.KNOWN, ["input"], vectors | {"input": INPUT}, False),
        "/tokenize": (tokens.KNOWN, [], {"add_special_tokens": FLAG}, False),
        "/detokenize": (("model", "tokens"), [], {"tokens": TOKENS | {"minItems": 0}}, False),
    }  # fmt: skip


def document() -> dict[str, Any]:
    paths: dict[str, Any] = {
        path: {"get": {"summary": what, "responses": _responses(what)}} for path, what in GET.items()
    }
    paths["/v1/models/{model}"]["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": TEXT}]
    for path, (known, needed, types, samples) in _post().items():
        names = {*known, *fields.IGNORED, *(fields.SAMPLING if samples else ())}
        properties = {name: (COMMON | _sampling() | types).get(name, {}) for name in sorted(names)}
        properties = {name: schema if name in needed else _or_null(schema) for name, schema in properties.items()}
        schema = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body, "responses": _responses("the answer")}}
    about = {"title": "bitnet serve", "version": "1", "description": "Packed ternary models over HTTP."}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": {"Error": ERROR}}}


ERROR = {
    "type": "object", "required": ["error"],
    "properties": {
        "error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": TEXT,
            },
        },
    },
}  # fmt: skip


def _responses(what: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"200": {"description": what}, "default": {"description": "an error", "content": error}}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A field that is null counts as missing."""
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}


def _sampling() -> dict[str, Any]:
    """Sampling options, by all of their names."""
    known: dict[str, Any] = {
        "stop": TEXTS, "regex": TEXT, "grammar": TEXT,
        "logit_bias": {
            "type": "object", "additionalProperties": {"type": "number"}, "maxProperties": fields.MOST_BIASES,
        },
        "json_schema": {"type": ["object", "string", "boolean"]}, "ignore_eos": FLAG,
        "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": fields.MOST_STOPS},
    }  # fmt: skip
    for name, field in FIELDS.items():
        if name not in known:
            limits = {"minimum": field.metadata["low"], "maximum": field.metadata["high"]}
            known[name] = {"type": "integer" if is_whole(name) else "number", "description": field.metadata["help"]}
            known[name] |= {word: value for word, value in limits.items() if math.isfinite(value)}
    return known | {alias: known[name] for alias, name in ALIASES.items()}
