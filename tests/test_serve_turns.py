"""What takes long before an answer begins: it stops nobody else, and whoever leaves does not wait for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bitnet_runtime.sandbox.worker import Worker
from bitnet_serve.endpoints import embeddings
from bitnet_serve.server import Serving
from image_models import VOCAB, packed
from runtime_models import SMALL, TEMPLATE
from servers import as_http, connect, idle, post, served, wait

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with served(packed(tmp_path / "m.bitnet", SMALL.replace(vocab_size=VOCAB), template=TEMPLATE)) as serving:
        yield serving


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Processes of chat templates give no answer before this is set."""
    gate, ask = threading.Event(), Worker.ask

    def waiting(worker: Worker, *args: Any, **named: Any) -> bytes:
        assert gate.wait(60)
        return ask(worker, *args, **named)

    monkeypatch.setattr(Worker, "ask", waiting)
    yield gate
    gate.set()


def test_slow_templates_leave_threads_to_others(serving: Serving, gate: threading.Event) -> None:
    """Of a pool of 6 on two cores, or of 32 at most; all stood still for as long as these took."""
    (each,) = serving.models.values()
    with ThreadPoolExecutor(40) as pool:
        chats = [pool.submit(post, serving, CHAT, ASKED) for _ in range(40)]
        wait(lambda: each.scheduler.requests == 40)
        assert post(serving, COMPLETE, {"prompt": "x", "max_tokens": 2})[0] == 200
        assert not any(chat.done() for chat in chats)
        gate.set()
        assert {chat.result()[0] for chat in chats} == {200}


def test_texts_of_some_length_leave_threads_to_others(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 64 requests of one client took 9 s, in which nobody else was answered."""
    (each,) = serving.models.values()
    gate, understand = threading.Event(), embeddings.understand

    def waiting(*given: Any) -> embeddings.Asked:
        assert gate.wait(60)
        return understand(*given)

    monkeypatch.setattr(embeddings, "understand", waiting)
    asked = {"input": ["x"] * 5000}  # which is refused, and no work
    with ThreadPoolExecutor(40) as pool:
        found = [pool.submit(post, serving, "/v1/embeddings", asked) for _ in range(40)]
        wait(lambda: each.scheduler.requests == 40)
        assert post(serving, COMPLETE, {"prompt": "x", "max_tokens": 2})[0] == 200
        gate.set()
        assert {each.result()[0] for each in found} == {400}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_who_leaves_while_he_waits_for_a_turn_has_no_place(serving: Serving, gate: threading.Event, path: str) -> None:
    (each,) = serving.models.values()
    asked = ASKED if path == CHAT else {"input": "x"}
    with connect(serving, as_http(path, asked)), connect(serving, as_http(path, asked)):
        wait(lambda: each.scheduler.requests == 2)
        with connect(serving, as_http(path, asked)):
            wait(lambda: each.scheduler.requests == 3)
        wait(lambda: each.scheduler.requests == 2, 20)  # of 30
        gate.set()
    wait(lambda: idle(serving))


def test_a_template_whose_process_stands_still(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the request, and the next one has another."""
    (each,) = serving.models.values()
    assert post(serving, CHAT, ASKED)[0] == 200
    template = each.model._template
    assert template is not None and template._worker._process is not None
    os.kill(template._worker._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("bitnet_runtime.sandbox.worker.PATIENCE", 0.5)
        status, answer = post(serving, CHAT, ASKED)
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert "took less than 1.0 s of CPU time" in answer["error"]["message"]
    assert post(serving, CHAT, ASKED)[0] == 200
