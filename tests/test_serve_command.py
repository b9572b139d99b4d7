"""`bitnet serve` as a process: where it listens, how it ends running answers when told to stop, and its page of
docs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import logging
import re
import resource
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.request import Request, urlopen

import pytest

import bitnet_cli
import runtime_models
from bitnet_serve.server import Serving, _Scarcity
from docs_text import blocks, commands_of
from runtime_models import TEMPLATE, scripted_model, small_model
from servers import as_http, connect, idle, request, served, until, wait

FILES = 256  # that a program may have open unless it asks for more, as on macOS
PAGE = (Path(__file__).parent.parent / "docs/server.md").read_text(encoding="utf-8")


@contextlib.contextmanager
def command(*args: object, first: str = "true", then: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address. first: of the shell that starts it. then: what is redirected."""
    words = [sys.executable, "-m", "bitnet", "serve", *map(str, args), "--port", "0", "--threads", "1"]
    words = ["sh", "-c", f"{first}; ulimit -S -n {FILES}; exec {shlex.join(words)} {then}"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (found := re.search(r"Listening on (http\S+)\n", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield process, found[1]
        finally:
            process.kill()


def ask(address: str, **body: Any) -> Any:
    data = json.dumps(body).encode()
    with urlopen(Request(f"{address}/v1/completions", data, {"content-type": "application/json"})) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_what_runs_may_end(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Requests that came before the signal lose nothing; later ones are refused."""
    with command(runtime_models.slow_model(tmp_path)) as (process, address):
        found: list[Any] = []
        asked = {"prompt": [1, 2, 3], "max_tokens": 600, "temperature": 0}
        threads = [threading.Thread(target=lambda: found.append(ask(address, **asked))) for _ in range(5)]
        for thread in threads:
            thread.start()
        while 'bitnet_requests_processing{model="slow"} 5' not in urlopen(f"{address}/metrics").read().decode():
            time.sleep(0.01)
        process.send_signal(sent)
        with pytest.raises(Exception, match=r"503|refused|reset"):
            while True:
                urlopen(f"{address}/health").read()
        for thread in threads:
            thread.join()
        assert [each["usage"]["completion_tokens"] for each in found] == [600] * 5
        assert len({each["choices"][0]["text"] for each in found}) == 1
        assert process.wait(10) == code
        assert process.stderr is not None
        assert (
            "Stopping: answers that run (5) have up to 30 s more, and new requests are refused" in process.stderr.read()
        )


def test_what_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    with command(runtime_models.slow_model(tmp_path), "--grace", 0, "--log-requests") as (process, address):
        body = json.dumps({"prompt": [1], "max_tokens": 60_000, "stream": True}).encode()
        with urlopen(Request(f"{address}/v1/completions", body, {"content-type": "application/json"})) as stream:
            assert stream.readline().startswith(b"data: ")
            process.terminate()
            last = stream.read().rstrip().rpartition(b"data: ")[2]
            assert json.loads(last)["error"]["code"] == "shutting_down"
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert re.search(r" tokens_out=[1-9]\d* .* status=503\n", process.stderr.read()), "and not 200"


def test_a_program_in_the_background_of_a_script(tmp_path: Path) -> None:
    """Ctrl-C is ignored there, and stays so; and nothing is said on standard output, which may be closed."""
    with command(small_model(tmp_path), first="trap '' INT", then=">&-") as (process, address):
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        assert ask(address, prompt=[1], max_tokens=2)["usage"]["completion_tokens"] == 2
        process.terminate()
        assert process.wait(10) == 0


def test_a_client_that_leaves_is_nothing_to_speak_of(tmp_path: Path) -> None:
    with command(small_model(tmp_path)) as (process, address):
        body = json.dumps({"prompt": [1], "max_tokens": 200, "stream": True}).encode()
        for _ in range(60):
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
                client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
                assert client.recv(1000)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets
        while not re.search(
            r'answers_total\{model="small-0-256"\} 60\n', urlopen(f"{address}/metrics").read().decode()
        ):
            time.sleep(0.01)
        process.terminate()
        assert process.stderr is not None and process.stderr.read() == ""


def test_a_lack_of_files_is_one_line(tmp_path: Path) -> None:
    """asyncio writes seven lines for each connection that it cannot accept, as often as it tries: 50 MB a minute."""
    with command(small_model(tmp_path)) as (process, address), contextlib.ExitStack() as stack:
        assert urlopen(f"{address}/health").status == 200
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] > FILES, "it has asked for more"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (40, 40))
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        held = [stack.enter_context(socket.create_connection(place)) for _ in range(60)]
        assert process.stderr is not None
        assert process.stderr.readline().startswith("New connections wait: Too many open files; raise the limit")
        for each in held:
            each.close()
        assert urlopen(f"{address}/health").status == 200
        process.terminate()
        assert process.stderr.read() == ""


def test_a_lack_of_files_as_the_server_stops_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    """asyncio then tries to listen again at sockets that are closed, and wrote a traceback for each try."""

    class Lacking(socket.socket):
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_Scarcity())
        with Lacking() as listening:
            listening.bind(("127.0.0.1", 0))
            server = await loop.create_server(asyncio.Protocol, sock=listening)
            with socket.create_connection(listening.getsockname()):
                while not logged:
                    await asyncio.sleep(0)
                server.close()
                await asyncio.sleep(0.01)
        loop.call_soon(int, "no number")  # other mistakes are told as before
        await asyncio.sleep(0)

    asyncio.run(run())
    told, mistake = (each.getMessage() for each in logged)
    assert told.startswith("New connections wait: Too many open files") and "no number" in mistake


def test_a_log_of_requests_tells_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each answer: one that is whole, a stream, a refused one, one whose client left, and vectors."""
    asked: Any = {"prompt": "geheim", "max_tokens": 3, "temperature": 0}
    with served(runtime_models.slow_model(tmp_path), log_requests=True, api_keys=["key"]) as serving:
        key = {"authorization": "Bearer key"}
        complete = "/v1/completions"
        _, headers, _ = request(serving, "POST", complete, asked, key)
        assert request(serving, "POST", complete, asked | {"stream": True}, key)[0] == 200
        assert request(serving, "POST", complete, asked | {"prompt": ["a", "bc"], "n": 2}, key)[0] == 200
        assert request(serving, "POST", "/v1/embeddings", {"input": "geheim", "pooling": "mean"}, key)[0] == 200
        assert request(serving, "POST", complete, asked | {"model": "geheim"}, key)[0] == 404
        assert request(serving, "POST", complete, asked)[0] == 401
        assert request(serving, "POST", "/a%0Ab%20c", asked, key)[0] == 404
        assert request(serving, "GET", "/v1/models", headers=key)[0] == 200
        _, own, _ = request(serving, "POST", "/v1/messages", {}, key)
        endless = as_http(complete, asked | {"max_tokens": 60_000, "stream": True})
        client = connect(serving, endless.replace(b"\r\n", b"\r\nauthorization: Bearer key\r\n", 1))
        until(client, b"data: {")
        client.close()
        wait(lambda: idle(serving))
    made = serving.models["slow"].scheduler.completion_tokens
    lines = [line for line in capsys.readouterr().err.splitlines() if " id=req_" in line]
    assert "geheim" not in str(lines)
    found = [dict(word.split("=", 1) for word in line.split(" ")[1:]) for line in lines]
    assert [(each["status"], each["model"], each["tokens_in"], each["tokens_out"]) for each in found] == [
        ("200", "slow", "6", "3"), ("200", "slow", "6", "3"), ("200", "slow", "3", "12"), ("200", "slow", "6", "0"),
        ("404", "-", "-", "-"), ("401", "-", "-", "-"), ("404", "-", "-", "-"), ("400", "slow", "-", "-"),
        ("499", "slow", "6", ANY),
    ]  # fmt: skip
    assert 0 < int(found[-1]["tokens_out"]) <= made - 3 - 3 - 12, "of an answer whose client left, those that came"
    assert found[0]["id"] == headers["x-request-id"] and len({each["id"] for each in found}) == len(found)
    assert found[7]["id"] == own["x-request-id"] == own["request-id"], "Anthropic's client knows this one"
    assert found[6]["path"] == "/a\\nb%20c" and found[0]["address"] == "127.0.0.1"


def test_a_log_that_nobody_reads_ends_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("bitnet_serve.request_log.say", broken)
    with served(small_model(tmp_path), log_requests=True) as serving:
        connection = connect(serving)
        for _ in range(3):
            connection.sendall(as_http("/v1/completions", {"prompt": [1], "max_tokens": 1}))
            until(connection, b'"seed"')


def test_wrong_usage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model(tmp_path)
    for args, code, message in (
        ([], 2, "arguments are required: MODEL"),
        ([model, model], 2, "two models have the same name, small-0-256;"),
        ([model, "--api-key", ""], 2, "--api-key is empty"),
        ([tmp_path / "no.bitnet"], 1, "No such file"),
        (
            [model, "--host", "203.0.113.7"],
            1,
            "cannot listen on 203.0.113.7:8080: Cannot assign requested address; --host",
        ),
        ([model, "--port", "99999"], 2, "--port: '99999', expected an integer from 0 to 65535"),
        ([model, "--cors-origin", "my.example"], 2, "'my.example', expected scheme and host, such as https://"),
        ([model, "--port", "0", "--unix", "x"], 2, "--unix: not allowed with argument --port"),
        ([model, "--host", "127.0.0.1", "--unix", "x"], 2, "--host is an address of the network, and --unix"),
        ([model, "--no-reuse", "--cache-dir", "x"], 2, "--cache-dir keeps the prefix cache, which --no-reuse turns"),
        ([model, "--cache-dir-size", "5"], 2, "--cache-dir-size is of the folder that --cache-dir names"),
        ([model, "--allow-host", "http://my.example"], 2, "'http://my.example', expected a name or an address alone"),
        ([model, "--allow-host", "my.example:80"], 2, "'my.example:80', expected a name or an address alone"),
        ([model, "--max-cache", "0"], 2, "'0', expected an integer from 1 to 2147483647"),
        ([model, "--models-memory", "0"], 2, "'0', expected an integer from 1 to 2147483647"),
        ([model, "--ctx", "999"], 1, "--ctx is 999, expected an integer from 1 to 256"),
    ):
        assert bitnet_cli.main(["serve", *map(str, args)]) == code
        said = capsys.readouterr().err
        assert message in said
    assert "anyone who reaches" not in said


def test_each_model_has_the_context_that_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much for one of several is no error: the smallest would decide for all."""
    wide, contexts = small_model(tmp_path, config=runtime_models.SMALL.replace(max_context=1024)), []

    def run(serving: Serving) -> bool:
        contexts.append([each.model.n_ctx for each in serving.models.values()])
        contexts.append([each.entry()["context_length"] for each in serving.models.values()])
        return False

    monkeypatch.setattr(Serving, "run", run)
    command = ["serve", str(small_model(tmp_path)), str(wide), "--port", "0", "--ctx"]
    assert [bitnet_cli.main([*command, n]) for n in ("512", "64", "9999")] == [0, 0, 0]
    assert contexts == [each for each in ([256, 512], [64, 64], [256, 1024]) for _ in range(2)]


def test_a_template_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    given = ("--chat-template", tmp_path / "chat.jinja")
    model = scripted_model(tmp_path / "model.bitnet", [b"Good", b" day"])
    with command(model, *given) as (_, address):
        data = json.dumps({"messages": [{"role": "user", "content": "go"}]}).encode()
        asked = Request(f"{address}/v1/chat/completions", data, {"content-type": "application/json"})
        with urlopen(asked) as answer:
            assert json.loads(answer.read())["choices"][0]["message"]["content"] == "Good day"
    assert bitnet_cli.main(["serve", str(model), str(tmp_path / "b"), *map(str, given)]) == 2
    assert "--chat-template goes with one model, and 2 are given" in capsys.readouterr().err


def test_an_empty_key_is_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITNET_API_KEY", "")
    assert bitnet_cli.main(["serve", str(small_model(tmp_path))]) == 2
    assert "BITNET_API_KEY is empty, expected a key; unset it" in capsys.readouterr().err
    monkeypatch.setenv("BITNET_API_KEY", "secret ")
    monkeypatch.setattr(Serving, "run", lambda _: True)
    assert bitnet_cli.main(["serve", "--port", "0", str(small_model(tmp_path))]) == 2
    assert "an API key begins or ends with a space, and no header of a request can" in capsys.readouterr().err


def test_an_open_server_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in (([], True), (["--api-key", "x"], False)):
        args = [small_model(tmp_path), "--host", "203.0.113.7", *more]
        assert bitnet_cli.main(["serve", *map(str, args)]) == 1  # it is no address of this machine
        assert ("anyone who reaches 203.0.113.7 may send requests" in capsys.readouterr().err) == said


def test_the_page_of_docs_works(tmp_path: Path) -> None:
    shutil.copy(small_model(tmp_path), tmp_path / "model.bitnet")
    done = 0
    with served(tmp_path / "model.bitnet") as serving:

        def here(text: str) -> str:
            return text.replace("http://127.0.0.1:8080", serving.address)

        for block in blocks(PAGE):
            if block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(here(block.text), {})
                assert out.getvalue().strip()
                done += 1
            for words in map(shlex.split, commands_of(block)):
                if words[0] == "curl":
                    url, *rest = words[1:]
                    options = dict(zip(rest[::2], rest[1::2], strict=True))
                    assert set(options) <= {"-H", "-d"}
                    headers = dict([options["-H"].split(": ")]) if "-H" in options else {}
                    with urlopen(Request(here(url), options.get("-d", "").encode() or None, headers)) as answer:
                        assert answer.status == 200 and answer.read()
                    done += 1
    assert done == 7
