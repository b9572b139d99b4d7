"""What `bitnet generate` and `bitnet chat` write of an answer beside its text: thoughts, why it ended, what it cost,
what allows more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bitnet_runtime import Model, Result, Stream


def written(stream: Stream) -> Iterator[str]:
    """The texts of an answer as they come, its thoughts between their tags."""
    from bitnet_runtime.chat.thoughts import CLOSE, OPEN

    thinks = False
    for piece in stream:
        if piece.reasoning:
            yield piece.reasoning if thinks else f"{OPEN}\n{piece.reasoning}"
            thinks = True
        if piece.text:
            yield f"\n{CLOSE}\n\n{piece.text}" if thinks else piece.text
            thinks = False


def cut_off(result: Result, model: Model, n_ctx: int) -> str:
    """Why an answer is not complete and what allows more, in one line; "" for a complete one. n_ctx: of its session."""
    if result.finish_reason != "length":
        return ""
    if result.usage.total_tokens >= n_ctx:
        return f"[stopped: the context of {n_ctx:,} tokens is full{larger_context(model, n_ctx)}]"
    n = result.usage.completion_tokens
    return f"[stopped after {n:,} token{'s' * (n != 1)}; -n N allows more]"


def too_long(what: str, tokens: int, model: Model, n_ctx: int, images: str = "") -> str:
    """The error for a text that does not fit the context. images: a remark on its images."""
    found = f"the {what} has {tokens:,} tokens, the context holds {n_ctx:,}; {images and f'{images}; '}"
    return f"{found}shorten it{larger_context(model, n_ctx)}"


def larger_context(model: Model, n_ctx: int) -> str:
    """How to get a larger context, as the end of a sentence; "": there is none, or a session file sets the size."""
    allowed = n_ctx == model.n_ctx < model.info.max_context
    return f"; -c N allows up to {model.info.max_context:,}" if allowed else ""


def end_line(result: Result) -> str:
    """Speed, memory and seed of a result in one line."""
    from bitnet_runtime.machine import peak_memory

    usage, timings = result.usage, result.timings
    return (
        f"Prompt: {usage.prompt_tokens} tokens, {timings.prompt_tokens_per_second:.1f} tok/s · "
        f"Generation: {usage.completion_tokens} tokens, {timings.generation_tokens_per_second:.1f} tok/s · "
        f"Peak memory: {peak_memory() / 1e9:.2f} GB · Seed: {result.seed}"
    )
