"""/metrics, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bitnet_serve.histogram import LATENCIES
from bitnet_serve.models import Served

KIND = "text/plain; version=0.0.4; charset=utf-8"


def page(models: Iterable[Served]) -> str:
    each = list(models)
    rows = [
        (
            "prompt_tokens_total",
            "counter",
            "tokens of prompts of ended answers",
            [s.scheduler.prompt_tokens for s in each],
        ),
        ("tokens_predicted_total", "counter", "tokens generated", [s.scheduler.completion_tokens for s in each]),
        ("requests_processing", "gauge", "answers being computed", [s.scheduler.load[0] for s in each]),
        ("requests_deferred", "gauge", "answers that wait", [s.scheduler.load[1] for s in each]),
        ("answers_total", "counter", "answers that ended, for any reason", [s.scheduler.finished for s in each]),
        (
            "answers_cancelled_total",
            "counter",
            "ended answers that were cancelled",
            [s.scheduler.cancelled for s in each],
        ),
        ("answers_failed_total", "counter", "ended answers that failed", [s.scheduler.failed for s in each]),
        (
            "requests_refused_total",
            "counter",
            "requests refused because no place was free for them",
            [s.scheduler.refused for s in each],
        ),
        ("model_loaded", "gauge", "whether the model is in memory", [int(s.loaded) for s in each]),
        ("model_loads_total", "counter", "attempts to load the model", [s.loads for s in each]),
        ("model_load_failures_total", "counter", "attempts to load the model that failed", [s.failures for s in each]),
        ("model_bytes", "gauge", "bytes of the model file", [s.nbytes for s in each]),
        ("cache_bytes", "gauge", "bytes of the caches of texts", [_cache(s).bytes for s in each]),
        ("cache_texts", "gauge", "texts kept for reuse", [_cache(s).texts for s in each]),
    ]
    lines = []
    for name, kind, help, values in rows:
        lines += [f"# HELP bitnet_{name} {help}", f"# TYPE bitnet_{name} {kind}"]
        lines += [f'bitnet_{name}{{model="{_label(s.name)}"}} {n}' for s, n in zip(each, values, strict=True)]
    for name, help in LATENCIES.items():
        lines += [f"# HELP bitnet_{name} {help}", f"# TYPE bitnet_{name} histogram"]
        for s in each:
            lines += s.scheduler.latencies[name].lines(f"bitnet_{name}", f'model="{_label(s.name)}"')
    return "\n".join(lines) + "\n"


class _Cache(NamedTuple):
    bytes: int
    texts: int


def _cache(served: Served) -> _Cache:
    loaded = served.loaded and served.model.has_text
    return _Cache(served.model.cache_bytes, served.sessions.kept) if loaded else _Cache(0, 0)


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
