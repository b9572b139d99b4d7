"""What several APIs word alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bitnet_serve.endpoints.answers import Choice
from bitnet_serve.models.registry import Served


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of a request: of a prompt with several answers once, and of these what was there before any of them."""
    prompts = {id(choice.ask.prompt): len(choice.ask.prompt) for choice in choices}
    found = dict(prompts)
    for choice in choices:
        found[id(choice.ask.prompt)] = min(found[id(choice.ask.prompt)], choice.ended().reused)
    made = sum(choice.ended().completion_tokens for choice in choices)
    prompt, reused = sum(prompts.values()), sum(found.values())
    details = {"prompt_tokens_details": {"cached_tokens": reused}} if reused else {}
    if thought := sum(choice.ended().reasoning_tokens for choice in choices):
        details["completion_tokens_details"] = {"reasoning_tokens": thought}
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, **details}


def receipt_of(choice: Choice) -> dict[str, Any]:
    """That of an answer, if it was asked for."""
    receipt = choice.ended().receipt
    return {} if receipt is None else {"receipt": json.loads(receipt.to_json())}


def timings(choices: Sequence[Choice]) -> dict[str, Any]:
    """How long it took, in the names of llama.cpp; of several answers until the last, and the first one's seed."""
    ends = [choice.ended() for choice in choices]
    prompt, made = sum(end.prompt_tokens - end.reused for end in ends), sum(end.completion_tokens for end in ends)
    waited = max(end.timings.queue_seconds for end in ends)
    read, wrote = (max(getattr(end.timings, name) for end in ends) for name in ("prompt_seconds", "generation_seconds"))
    return {
        "queue_ms": round(1e3 * waited, 3),
        "prompt_n": prompt,
        "prompt_ms": round(1e3 * read, 3),
        "prompt_per_second": round(prompt / (read or 1), 3),
        "predicted_n": made,
        "predicted_ms": round(1e3 * wrote, 3),
        "predicted_per_second": round(made / (wrote or 1), 3),
        "seed": ends[0].timings.seed,
    }


def head_of(kind: str, name: str, created: int, served: Served) -> dict[str, Any]:
    """The beginning of an answer, and of each chunk of a stream. name: its id."""
    names = {"id": name, "object": kind, "created": created, "model": served.name}
    return names | {"system_fingerprint": served.fingerprint}


def chunk_of(
    head: dict[str, Any], choice: Choice, more: dict[str, Any], logprobs: Any, reason: str | None, counts: bool | None
) -> dict[str, Any]:
    """A chunk of a stream. more: what it adds; reason: why the choice ends with it; counts: whether the stream ends
    with a chunk of the usage."""
    one = {"index": choice.index, **more, "logprobs": logprobs, "finish_reason": reason}
    chunk = head | {"choices": [one]}
    if counts:
        chunk["usage"] = None
    elif reason:
        chunk["timings"] = timings([choice])
    if reason:
        one |= receipt_of(choice)
    return chunk
