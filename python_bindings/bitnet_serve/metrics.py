"""/metrics, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from bitnet_serve.histogram import LATENCIES
from bitnet_serve.models.registry import Served

KIND = "text/plain; version=0.0.4; charset=utf-8"


def page(models: Iterable[Served]) -> str:
    each = list(models)
    lines = []
    for name, help, number in ROWS:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP bitnet_{name} {help}", f"# TYPE bitnet_{name} {kind}"]
        lines += [f'bitnet_{name}{{model="{_label(s.name)}"}} {number(s)}' for s in each]
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


ROWS: tuple[tuple[str, str, Callable[[Served], int]], ...] = (
    ("prompt_tokens_total", "tokens of prompts of ended answers", lambda s: s.scheduler.prompt_tokens),
    ("tokens_predicted_total", "tokens generated", lambda s: s.scheduler.completion_tokens),
    ("requests_processing", "answers that have begun", lambda s: s.scheduler.load[0]),
    ("requests_deferred", "answers that wait", lambda s: s.scheduler.load[1]),
    ("answers_total", "answers that ended, for any reason", lambda s: s.scheduler.finished),
    ("answers_cancelled_total", "ended answers that were cancelled", lambda s: s.scheduler.cancelled),
    ("answers_failed_total", "ended answers that failed", lambda s: s.scheduler.failed),
    ("requests_refused_total", "requests refused because no place was free for them", lambda s: s.scheduler.refused),
    ("model_loaded", "whether the model is in memory", lambda s: int(s.loaded)),
    ("model_loads_total", "attempts to load the model", lambda s: s.loads),
    ("model_load_failures_total", "attempts to load the model that failed", lambda s: s.failures),
    ("model_bytes", "bytes of the files of the model and its adapters", lambda s: s.nbytes),
    ("cache_bytes", "bytes of the KV caches of texts", lambda s: _cache(s).bytes),
    ("cache_texts", "texts in the prefix cache", lambda s: _cache(s).texts),
)
"""Name, help, and the number of a model. What only grows is a counter, and its name says so."""
