"""What a server must not do, whoever asks and however: crash, hang, leak, stall others."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runtime_models
from bitnet_runtime import NumericError
from bitnet_runtime.generation import Stream
from bitnet_runtime.session_state import all_sessions
from bitnet_serve import (
    application,
    body,
    chat,
    completions,
    embeddings,
    fields,
    messages,
    responses,
    server,
    sessions,
)
from bitnet_serve.application import Options
from bitnet_serve.server import Serving
from bitnet_serve.sessions import Memory, Sessions
from runtime_models import TEMPLATE, scripted_model, small_model
from servers import as_http, connect, port, post, request, served, until, wait

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    script = scripted_model(folder / "script.bitnet", [b"Good", b" day"], template=TEMPLATE, max_context=256)
    with served(script, small_model(folder)) as serving:
        yield serving


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(runtime_models.slow_model(tmp_path_factory.mktemp("slow")), parallel=2, queue=2) as serving:
        yield serving


def idle(serving: Serving) -> bool:
    """Nothing runs, nobody has a place."""
    schedulers = [each.scheduler for each in serving.models.values()]
    return all(each.load == (0, 0) and each.requests == 0 for each in schedulers)


LONG = {"prompt": [1, 2, 3], "max_tokens": 60_000, "temperature": 0}  # for minutes
BIG = {"prompt": [1, 2] * 32_000, "max_tokens": 5}  # minutes until the first token


# ---- wrong requests ----


@pytest.mark.parametrize(
    ("path", "data", "param", "code"),
    [
        (CHAT, b'{"messages": [{"ro', None, "invalid_json"),
        (CHAT, b"[" * 100_000, None, "invalid_json"),
        (CHAT, b'{"a":' * 100_000, None, "invalid_json"),
        (CHAT, b"[]", None, "invalid_json"),
        (CHAT, b"\xff\xfe\x00", None, "invalid_json"),
        (CHAT, b'{"n": NaN}', None, "invalid_json"),
        (CHAT, b'{"seed": 1' + b"0" * 5000 + b"}", None, "invalid_json"),
        (CHAT, b'{"n": 1, "n": 2}', None, "invalid_json"),
        (CHAT, {}, "messages", "missing_required_parameter"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (CHAT, {"messages": MESSAGES * 1025}, "messages", "invalid_value"),
        (CHAT, {"messages": ["go"]}, "messages", "invalid_value"),
        (CHAT, {"messages": "go"}, "messages", "invalid_type"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "n": 129}, "n", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "n": True}, "n", "invalid_type"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "temperature": "hot"}, "temperature", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "temperature": 1e400}, "temperature", "invalid_json"),
        (CHAT, {"messages": MESSAGES, "max_tokens": -1}, "max_tokens", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2**63}, "max_tokens", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "stop": ["x"] * 17}, "stop", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "stop": ""}, "stop", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "logit_bias": [1]}, "logit_bias", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "temprature": 1}, "temprature", "unknown_parameter"),
        (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream", "invalid_type"),
        (CHAT, {"messages": MESSAGES, "stream_options": {}}, "stream_options", "invalid_value"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format", "invalid_format"),
        (CHAT, {"messages": MESSAGES, "response_format": 5}, "response_format", "invalid_format"),
        (COMPLETE, {"prompt": "x", "json_schema": {"type": "x"}}, "json_schema", "invalid_format"),
        (COMPLETE, {"prompt": "x", "regex": "("}, "regex", "invalid_format"),
        (COMPLETE, {"prompt": "x", "regex": "a", "grammar": "start: x"}, "grammar", "invalid_format"),
        (CHAT, {"messages": MESSAGES, "model": 5}, "model", "invalid_type"),
        (COMPLETE, {}, "prompt", "missing_required_parameter"),
        (COMPLETE, {"prompt": []}, "prompt", "invalid_type"),
        (COMPLETE, {"prompt": [[]]}, "prompt", "invalid_value"),
        (COMPLETE, {"prompt": [1, "x"]}, "prompt", "invalid_type"),
        ("/detokenize", {"tokens": [1, False]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1], "top_k": 5}, "top_k", "unknown_parameter"),
        (COMPLETE, {"prompt": [1, 10**6]}, "prompt", "invalid_value"),
        (COMPLETE, {"prompt": [1, -1]}, "prompt", "invalid_value"),
        (COMPLETE, {"prompt": "\ud800"}, "prompt", "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "invalid_value"),
        (COMPLETE, {"prompt": ["x"] * 100, "n": 2}, "n", "invalid_value"),
        (COMPLETE, {"prompt": "x", "suffix": "y"}, None, "unsupported_by_model"),
        (COMPLETE, {"prompt": [1], "suffix": "y"}, "suffix", "invalid_value"),
        (COMPLETE, {"prompt": "x", "suffix": 5}, "suffix", "invalid_type"),
        ("/infill", {"input_prefix": "x"}, None, "unsupported_by_model"),
        ("/infill", {"input_extra": ["x"]}, "input_extra", "invalid_value"),
        ("/infill", {"input_prefx": "x"}, "input_prefx", "unknown_parameter"),
        ("/v1/fim/completions", {"suffix": "x"}, "prompt", "missing_required_parameter"),
        (COMPLETE, {"prompt": "x", "best_of": 3}, "best_of", "unsupported_parameter"),
        (COMPLETE, {"prompt": "x" * 257}, "prompt", "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 257}]}, "messages", "context_length_exceeded"),
        ("/v1/responses", {"input": "x" * 257}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x" * 257, "pooling": "mean"}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x"}, "pooling", "invalid_value"),
        ("/v1/embeddings", {"input": [], "pooling": "mean"}, "input", "invalid_value"),
        ("/v1/embeddings", {"input": "x", "pooling": "mean", "dimensions": 3}, "dimensions", "invalid_value"),
        ("/tokenize", {"prompt": 5}, "prompt", "invalid_type"),
        ("/detokenize", {"tokens": ["x"]}, "tokens", "invalid_value"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(
    serving: Serving, path: str, data: Any, param: str | None, code: str
) -> None:
    status, answer = post(serving, path, data)
    assert status == 400
    error = answer["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["param"] == param or code == "invalid_json"
    assert len(error["message"]) < 500
    wait(lambda: idle(serving))


def test_too_long_a_prompt_is_told_in_numbers(serving: Serving) -> None:
    _, answer = post(serving, COMPLETE, {"prompt": [1] * 300})
    assert (answer["error"]["n_prompt_tokens"], answer["error"]["n_ctx"]) == (300, 256)
    assert "maximum context length" in answer["error"]["message"]
    assert "shorten prompt" in answer["error"]["message"] and "n_ctx" not in answer["error"]["message"]
    _, answer = post(serving, COMPLETE, {"prompt": ["x", [1] * 300]})
    assert answer["error"]["message"].startswith("prompt 1: 300 tokens")
    _, answer = post(serving, "/v1/embeddings", {"input": ["x", [1] * 300], "pooling": "mean"})
    assert answer["error"]["message"].startswith("input 1: 300 tokens")


def test_other_paths_methods_and_types(serving: Serving) -> None:
    assert request(serving, "GET", "/v1/nothing")[0] == 404
    status, headers, answer = request(serving, "GET", CHAT)
    assert (status, headers["allow"], answer["error"]["code"]) == (405, "POST", "wrong_method")
    assert post(serving, CHAT, {}, **{"content-type": "text/plain"})[0] == 415
    status, answer = post(serving, CHAT, {}, **{"content-encoding": "gzip"})
    assert (status, answer["error"]["message"]) == (415, "content-encoding is 'gzip', expected none")
    assert post(serving, CHAT, {"model": "x\r\ny", "messages": MESSAGES})[0] == 404


def test_images_are_never_read_from_files_or_addresses(serving: Serving) -> None:
    for url in ("/etc/passwd", "http://localhost/x.png", {"url": "file:///etc/passwd"}, 5):
        parts = [{"type": "image_url", "image_url": each} for each in ("data:,x", url)]
        status, answer = post(serving, CHAT, {"messages": [{"role": "user", "content": parts}]})
        assert status == 400
        assert answer["error"]["message"].startswith("images[1] is ")
        assert "expected a data: URL" in answer["error"]["message"]


def test_huge_bodies(serving: Serving) -> None:
    status, answer = post(serving, CHAT, b" " * (application.TEXT_BODY + 1))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    with connect(serving) as connection:  # in chunks, without a length
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(40):
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        except OSError:  # the answer came before the end
            return
        assert b" 413 " in connection.recv(100)
    with connect(serving, b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


# ---- who may ask ----


def test_keys_hosts_and_origins(tmp_path: Path) -> None:
    key = {"authorization": "Bearer geheim"}
    origin = "https://good.example"
    with served(small_model(tmp_path), api_keys=["andere", "geheim"], cors_origins=[origin]) as serving:
        assert request(serving, "GET", "/health")[0] == request(serving, "GET", "/")[0] == 200
        for wrong in ({}, {"authorization": "Bearer x"}, {"authorization": "geheim"}, {"x-api-key": "é" * 5000}):
            status, headers, answer = request(serving, "GET", "/v1/models", headers=wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer" and "geheim" not in json.dumps(answer)
        assert request(serving, "GET", "/v1/models", headers=key)[0] == 200
        assert request(serving, "GET", "/v1/models", headers={"x-api-key": "andere"})[0] == 200
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            assert request(serving, "GET", "/v1/models", headers=key | {"host": host})[0] == 403
        for host in ("localhost", "LOCALHOST:1", "[::1]:8080"):
            assert request(serving, "GET", "/v1/models", headers=key | {"host": host})[0] == 200
        for evil in ("https://evil.example", "null"):
            status, headers, _ = request(serving, "GET", "/v1/models", headers=key | {"origin": evil})
            assert status == 403 and "access-control-allow-origin" not in headers
        _, headers, _ = request(serving, "GET", "/v1/models", headers=key | {"origin": origin})
        assert headers["access-control-allow-origin"] == origin
        status, headers, _ = request(serving, "OPTIONS", CHAT, headers={"origin": origin})
        assert status == 200 and headers["access-control-allow-methods"] == "GET, POST"


def test_an_open_server_may_be_called_by_some_names_alone(tmp_path: Path) -> None:
    """Against pages whose name was made to mean this machine, where no key keeps them out."""
    path = small_model(tmp_path)
    for names, found in (([], 200), (["Server.example"], 403)):
        with served(path, host="0.0.0.0", allow_hosts=names) as serving:
            for host, status in (("server.example", 200), ("127.0.0.1:1", 200), ("evil.example", found)):
                asked = {"host": host, "origin": f"http://{host}"}
                assert request(serving, "GET", "/v1/models", headers=asked)[0] == status


def test_a_unix_socket_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):  # the second time one is there that nobody listens on
        with served(small_model(tmp_path), unix=path):
            assert path.stat().st_mode & 0o777 == 0o600
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(as_http(COMPLETE, {"prompt": "x"}).replace(b"localhost", b"anything"))
                assert b" 200 " in connection.recv(1000)
            with pytest.raises(ValueError, match=r"cannot listen on .*socket: Address already in use"):
                Serving({}, Options(unix=path))
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))


# ---- time ----


def closed_after(connection: socket.socket) -> float:
    begin = time.monotonic()
    connection.settimeout(10)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - begin


def test_slow_clients_are_cut(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS", 0.2)
    monkeypatch.setattr(body, "SECONDS", 0.2)
    whole = as_http(COMPLETE, {"prompt": "x"})
    begun = [b"", b"POST /v1/comp", whole[: whole.index(b"\r\n\r\n") + 2]]
    connections = [connect(serving, begin) for begin in begun * 30]
    late = connect(serving, whole[:-2])  # a body that does not come
    assert request(serving, "GET", "/health")[0] == 200
    for connection in connections:
        assert closed_after(connection) < 8  # not cut: 10 s and more
        connection.close()
    assert b" 408 " in late.recv(1000)
    late.close()
    again = connect(serving, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")  # slow the second time
    assert b" 200 " in again.recv(1000)
    again.sendall(b"GET /hea")
    assert closed_after(again) < 8
    again.close()


def test_slow_ones_of_an_address_take_places_from_each_other(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(server, "MOST_SLOW", 8)
    monkeypatch.setattr(server, "HEADERS", 60)
    whole = as_http(COMPLETE, {"prompt": "x"})
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(serving, (whole[:9], whole[:-2])[i % 2])) for i in range(40)]
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port(serving)), 10, source_address=("127.0.0.2", 0))
        )
        other.sendall(whole)
        assert b" 200 " in other.recv(1000)
        assert request(serving, "GET", "/health")[0] == 200, "the same address, once it is whole"
        for connection in slow[:32]:
            assert closed_after(connection) < 8, "the oldest left"
        slow[-1].sendall(whole[-2:])
        assert b" 200 " in slow[-1].recv(1000), "the latest have their time"


def test_a_reader_that_stalls_is_cut(slow: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """And until then the answer waits for him: no more than a few events are made."""
    monkeypatch.setattr(server, "STALLED", 1.0)
    scheduler = slow.models["slow"].scheduler
    before = scheduler.completion_tokens
    connection = deaf(slow, as_http(COMPLETE, LONG | {"stream": True, "logprobs": 20, "logit_bias": {"65": 100}}))
    wait(lambda: idle(slow) and scheduler.completion_tokens > before, 20)
    assert scheduler.completion_tokens - before < 5000
    connection.close()


def test_answers_that_nobody_reads_hold_no_sockets(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is large, many that were asked for at once, and those whose connection would be closed behind them."""
    monkeypatch.setattr(server, "STALLED", 1.0)
    large, page = as_http("/tokenize", {"prompt": "x" * 900_000}), b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n"
    one = b"connection: close\r\n"
    with contextlib.ExitStack() as stack:
        for data in (large, large.replace(b"\r\n", b"\r\n" + one, 1), (page + b"\r\n") * 20):
            stack.enter_context(deaf(serving, data))
            wait(lambda: any(each.unread for each in connections(serving)))
        wait(lambda: not connections(serving))


def test_the_rest_of_what_was_refused_has_its_time(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SECONDS", 0.5)
    with connect(
        serving, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    ) as c:
        until(c, b" 415 ")
        c.setblocking(False)
        with pytest.raises(OSError, match=r"reset|[Pp]ipe"):  # it is cut, though something comes all the time
            for _ in range(1000):
                c.sendall(b"1\r\nx\r\n")
                time.sleep(0.01)


def test_what_is_no_request_behind_its_answer(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """An early refusal, and then chunks that are none."""
    with connect(
        serving, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    ) as c:
        until(c, b" 415 ")
        c.sendall(b"no chunk\r\n")
        assert closed_after(c) < 8
    assert not caplog.records


def connections(serving: Serving) -> list[server.Protocol]:
    return [each for each in serving._server.server_state.connections if isinstance(each, server.Protocol)]


def deaf(serving: Serving, data: bytes) -> socket.socket:
    """A client that sends this, and for which the system keeps little of what comes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port(serving)))
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [LONG, BIG], ids=["decode", "prefill"])
def test_a_client_that_leaves_stops_the_work(slow: Serving, asked: dict[str, Any], stream: bool) -> None:
    scheduler = slow.models["slow"].scheduler
    for _ in range(10):
        before = scheduler.cancelled
        connection = connect(slow, as_http(COMPLETE, asked | {"stream": stream}))
        wait(lambda: scheduler.load[0] == 1)
        if stream and asked is LONG:
            until(connection, b"data: ")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        wait(lambda: idle(slow))  # seconds, of minutes
        assert scheduler.cancelled == before + 1
    assert sum("closed" not in repr(session) for session in all_sessions()) <= sessions.MOST


def test_overload_is_refused_at_once(slow: Serving) -> None:
    running = [connect(slow, as_http(COMPLETE, LONG)) for _ in range(4)]
    scheduler = slow.models["slow"].scheduler
    wait(lambda: scheduler.load == (2, 2))
    begin = time.monotonic()
    status, headers, answer = request(slow, "POST", COMPLETE, LONG)
    assert time.monotonic() - begin < 20  # of minutes, on a machine that has other things to do
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert 1 <= int(headers["retry-after"]) <= 120
    assert 0.25 <= int(headers["retry-after-ms"]) / 1000 / int(headers["retry-after"]) <= 1
    assert request(slow, "GET", "/health")[0] == 200
    running[3].close()  # it never ran
    wait(lambda: scheduler.load == (2, 1))
    running[0].close()
    wait(lambda: scheduler.load == (2, 0))  # who waited runs
    for connection in running:
        connection.close()
    wait(lambda: idle(slow))


def test_a_long_prompt_does_not_stop_who_runs(slow: Serving) -> None:
    """Tokens keep coming while a prompt of minutes is read, and the next in line is read when it is gone."""
    with connect(slow, as_http(COMPLETE, LONG | {"stream": True, "logit_bias": {"65": 100}})) as running:
        until(running, b"data: ")
        with connect(slow, as_http(COMPLETE, BIG)) as reading:
            scheduler = slow.models["slow"].scheduler
            wait(lambda: scheduler.load == (2, 0))
            got = 0
            while got < 20_000:  # many tokens
                got += len(running.recv(10_000))
            assert scheduler.load == (2, 0)
            reading.close()
    wait(lambda: idle(slow))


def test_a_short_prompt_does_not_wait_for_a_long_one(slow: Serving) -> None:
    with connect(slow, as_http(COMPLETE, BIG)) as reading:
        wait(lambda: slow.models["slow"].scheduler.load == (1, 0))
        assert post(slow, COMPLETE, {"prompt": [1] * 300, "max_tokens": 2})[0] == 200
        assert slow.models["slow"].scheduler.load == (1, 0)
        reading.close()
    wait(lambda: idle(slow))


def test_a_request_for_many_answers_leaves_places_to_others(slow: Serving) -> None:
    with connect(slow, as_http(COMPLETE, LONG | {"n": 50, "max_tokens": 300})) as many:
        wait(lambda: slow.models["slow"].scheduler.load == (2, 48))
        assert post(slow, COMPLETE, {"prompt": [1] * 3, "max_tokens": 2})[0] == 200
        assert slow.models["slow"].scheduler.load[1] > 40
        many.close()
    wait(lambda: idle(slow))


def test_memory_is_promised_once(tmp_path: Path) -> None:
    """Answers wait for that of others, and one that can never have enough is told."""
    with served(small_model(tmp_path)) as serving:
        (each,) = serving.models.values()
        with each.model.session() as session:
            most = session.nbytes
        memory = Memory(2 * most + most // 2)
        each._sessions = Sessions(each.model, memory, 0.5)
        found: list[int] = []
        peak = 0
        asked = {"prompt": [1], "max_tokens": 255}
        threads = [threading.Thread(target=lambda: found.append(post(serving, COMPLETE, asked)[0])) for _ in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, each.scheduler.load[0])
        assert found == [200] * 6 and 1 <= peak <= 3  # one may be made and not kept
        assert not memory.take(2 * most + most // 2 - 1)  # some is kept,
        assert memory.take(most)  # and the rest came back
        each._sessions = Sessions(each.model, Memory(most // 2), 0)
        status, answer = post(serving, COMPLETE, asked)
        assert (status, answer["error"]["code"]) == (503, "out_of_memory")


def test_an_error_of_one_answer_is_its_own(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    pop = Stream.pop

    def sometimes(stream: Stream) -> Any:
        if len(stream._prompt) == 3 and len(stream._tokens) == 5:
            raise NumericError("the logits are not numbers")
        return pop(stream)

    monkeypatch.setattr(Stream, "pop", sometimes)
    found: dict[int, tuple[int, Any]] = {}
    sizes = [3, 4, 3, 5, 6, 7]

    def ask(index: int) -> None:
        asked = {"model": "small-0-256", "prompt": [1] * sizes[index], "max_tokens": 50, "stream": index == 0}
        asked["seed"] = 1  # five tokens whose bytes are not all the beginning of a character: a stream has begun
        found[index] = post(serving, COMPLETE, asked)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0][0] == 200 and json.loads(found[0][1].split("data: ")[-1])["error"]["code"] == "engine_error"
    assert (found[2][0], found[2][1]["error"]["type"]) == (500, "server_error")
    assert [found[index][1]["usage"]["completion_tokens"] for index in (1, 3, 4, 5)] == [50] * 4
    wait(lambda: idle(serving))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(chat.KNOWN | completions.KNOWN | embeddings.KNOWN | messages.KNOWN | responses.KNOWN | fields.SAMPLING)
STARTS = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    COMPLETE: {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/embeddings": {"input": "x", "pooling": "mean"},
    "/tokenize": {"prompt": "x"},
}


@given(st.sampled_from(sorted(STARTS)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_fields_say_is_answered_or_refused(serving: Serving, path: str, more: dict[str, Any]) -> None:
    status, answer = post(serving, path, STARTS[path] | more)
    assert status in (200, 400, 404), answer
