"""What a supervisor sees: before the models are loaded, and when the server cannot answer any more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from bitnet_runtime import Model
from bitnet_serve import server
from bitnet_serve.options import Options
from bitnet_serve.server import Serving
from runtime_models import small_model
from servers import post, request, served, wait

ASKED = {"prompt": "x", "max_tokens": 2}
PROBE = b"GET /health HTTP/1.1\r\nhost: 10.1.2.3\r\nconnection: close\r\n\r\n"


def test_whoever_comes_while_models_are_loaded_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe within its own limit of time fails until then, and a request is answered after it."""
    path, connections, listening = small_model(tmp_path), list[socket.socket](), list[socket.socket]()
    own = server.listen

    def listen(options: Options) -> tuple[socket.socket, str]:
        listening.append(own(options)[0])
        return listening[0], ""

    def load(look: bool, without: Collection[str]) -> Model:
        if not look:
            connections.append(socket.create_connection(listening[0].getsockname(), 20))
            connections[0].sendall(PROBE)
            connections[0].settimeout(0.2)
            with pytest.raises(TimeoutError):
                connections[0].recv(1)
        return Model.load(path, threads=1)

    monkeypatch.setattr(server, "listen", listen)
    serving = Serving({"m": load}, Options(port=0, grace=0))
    running = threading.Thread(target=serving.run)
    running.start()
    with connections[0] as probe:
        probe.settimeout(20)
        assert b" 200 " in probe.recv(1000)
    serving.stop()
    running.join(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_cannot_answer_any_more_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(small_model(tmp_path)) as serving:
        (each,) = serving.models.values()
        assert request(serving, "GET", "/health")[0] == 200

        def mistake() -> None:
            raise AssertionError

        monkeypatch.setattr(each.scheduler, "_join", mistake)
        ended = threading.Thread(target=post, args=(serving, "/v1/completions", ASKED))
        ended.start()
        wait(lambda: not each.scheduler._thread.is_alive())
        status, _, answer = request(serving, "GET", "/health")
        assert (status, answer["error"]["code"]) == (503, "internal_error")
        assert "restart the server" in answer["error"]["message"]
    ended.join(60)
