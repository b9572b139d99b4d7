"""Fill-in-the-middle for editors: /infill as in llama.cpp, and /v1/fim/completions as in Mistral's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.errors import shown
from bitnet_runtime.tokenizer.infilling import prompt_around
from bitnet_serve.endpoints import fields
from bitnet_serve.endpoints.answers import Block, Choice, Shape, Work
from bitnet_serve.endpoints.chat import Chat, several
from bitnet_serve.endpoints.wording import timings
from bitnet_serve.errors import refuse
from bitnet_serve.models.generation import Ask
from bitnet_serve.models.registry import Served

KNOWN = frozenset([
    "model", "input_prefix", "input_suffix", "input_extra", "prompt", "stream", "response_fields",
    "samplers", "n_indent", "id_slot", "t_max_prompt_ms", "t_max_predict_ms",  # hints to another sampler: ignored
])  # fmt: skip
KNOWN_FIM = frozenset(["model", "prompt", "suffix", "stream", "stream_options", "n"])
MOST_EXTRA = 256  # texts of other files


def understand(served: Served, body: Mapping[str, Any]) -> Work:
    """/infill. Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN)
    model, options = served.model, fields.sampling(body, served.model, None)
    before = extra(body) + fields.take(body, "input_prefix", str, "")
    line = model.tokenize(fields.take(body, "prompt", str, ""), add_bos=False)  # the middle begins so
    kept = line[-(model.n_ctx // 4) :]  # of one that does not fit, too, the end
    most = options.max_tokens
    room = len(kept) + (model.n_ctx // 4 if most is None else most)
    tokens, cut = prompt_around(model, before, fields.take(body, "input_suffix", str, ""), room)
    wanted = [str(path) for path in fields.take(body, "response_fields", list, [])]
    shape = Infill(served, wanted, cut or len(kept) < len(line))
    return Work(served, several(model, [Ask(tokens + kept, options)]), shape, fields.take(body, "stream", bool, False))


def extra(body: Mapping[str, Any]) -> str:
    """Texts of other files, before all else."""
    given: list[Any] = fields.take(body, "input_extra", list, [])
    if len(given) > MOST_EXTRA:
        raise refuse(f"input_extra has {len(given)} texts, expected at most {MOST_EXTRA}", "input_extra")
    parts = []
    for each in given:
        if not isinstance(each, dict) or not isinstance(each.get("text"), str):
            raise refuse(f'input_extra has {shown(each)}, expected {{"filename": "…", "text": "…"}}', "input_extra")
        name = each.get("filename")
        parts.append(f"{name}\n{each['text']}\n\n" if isinstance(name, str) else f"{each['text']}\n\n")
    whole = "".join(parts)
    fields.check_unicode("input_extra", whole)
    return whole


@dataclass
class Infill(Shape):
    """The form of its answers. wanted: fields, by their paths; none: all. cut: of the texts not all fitted."""

    served: Served
    wanted: Sequence[str] = ()
    cut: bool = False

    def piece(self, choice: Choice, block: Block, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        yield {"index": choice.index, "content": text, "stop": False}

    def end(self, choice: Choice) -> Iterable[Any]:
        yield self._chosen(self._all(choice) | {"content": ""})

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._chosen(self._all(choices[0]))

    def _all(self, choice: Choice) -> dict[str, Any]:
        end, taken = choice.ended(), timings([choice])
        for name in ("prompt", "predicted"):
            taken[f"{name}_per_token_ms"] = round(taken[f"{name}_ms"] / (taken[f"{name}_n"] or 1), 3)
        ended = "limit" if end.finish_reason == "length" else "word" if end.stopped_by else "eos"
        return {
            "index": choice.index,
            "content": choice.text,
            "stop": True,
            "model": self.served.name,
            "tokens_predicted": end.completion_tokens,
            "tokens_evaluated": end.prompt_tokens,
            "tokens_cached": end.reused,
            "truncated": self.cut,
            "stop_type": ended,
            "stopping_word": end.stopped_by,
            "timings": taken,
        }

    def _chosen(self, found: dict[str, Any]) -> dict[str, Any]:
        if not self.wanted:
            return found
        flat = found | {f"timings/{name}": value for name, value in found["timings"].items()}
        return {path: flat[path] for path in self.wanted if path in flat}


def understand_fim(served: Served, body: Mapping[str, Any]) -> Work:
    """/v1/fim/completions, answered in the form of a chat. Raises ApiError, or an error of the runtime."""
    fields.check_known(body, KNOWN_FIM)
    options, n = fields.sampling(body, served.model, None), fields.choices(body)
    asks = [between(served, fields.text(body, "prompt"), body, options)]
    with_usage = fields.with_usage(body)
    return Work(served, several(served.model, asks, n), Chat(served, with_usage), with_usage is not None)


def between(served: Served, prompt: str, body: Mapping[str, Any], options: Sampling) -> Ask:
    """What is asked for: the text from a prompt to the `suffix` of a request."""
    suffix = fields.take(body, "suffix", str, "")
    return Ask(served.model.infill_prompt(prompt, suffix, options.max_tokens), options)
