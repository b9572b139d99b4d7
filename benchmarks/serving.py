"""`bitnet serve` under load: tokens per second of all clients, and how long each waits for its first token.

    python benchmarks/serving.py --shape bitnet-2b4t             # a random model of this shape
    python benchmarks/serving.py --model build/demo/model.bitnet
    python benchmarks/serving.py --llama-server PATH [--gguf FILE]   # and llama.cpp's server, in turn
    python benchmarks/serving.py --url http://127.0.0.1:8081     # another server with OpenAI's completions

For each number of clients: all send requests at once, each with its own prompts; then as many processes, each with its
own copy of the model, do the same. Then one client repeatedly requests a single token while four others get long
answers. Servers take turns, round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import report
from shapes import SHAPES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bitnet.config import ModelConfig
from bitnet_export import random_model
from bitnet_export.foreign.gguf.write import write_gguf
from bitnet_runtime import Model
from bitnet_runtime.tokenizer.text import byte_level_alphabet

# Random weights repeat themselves more than any text: guesses would be right too often. All answers are equally long.
PASSES: dict[str, Any] = {"draft": 0, "ignore_eos": True}
SETTINGS = ("prompt", "gen", "long", "probes", "each", "repeat", "threads")


class Server(NamedTuple):
    name: str
    url: str
    more: dict[str, Any] = {}  # noqa: RUF012  # additional fields of its requests


class Client(threading.Thread):
    """Streamed requests, one after another. `firsts`: seconds to their first texts; `tokens`: the server's count;
    `failed`: why they ended early."""

    def __init__(self, server: Server, prompts: list[list[int]], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.firsts, self.tokens, url = list[float](), 0, urlsplit(server.url)
        self.failed: Exception | None = None
        self._connection = HTTPConnection(url.hostname or "", url.port, timeout=3600)
        fixed = {
            "max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            **server.more,
        }  # fmt: skip
        self._bodies = [json.dumps({"prompt": prompt} | fixed) for prompt in prompts]

    def run(self) -> None:
        try:
            for body in self._bodies:
                self._ask(body)
        except Exception as error:
            self.failed = error
        self._connection.close()

    def _ask(self, body: str) -> None:
        begin, first = time.perf_counter(), 0.0
        self._connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status != 200:
            said = answer.read(300).decode(errors="replace")
            raise report.BenchmarkError(f"a request was answered with {answer.status}: {said}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            if not first and data["choices"]:  # text, or the end if a token has no text
                first = time.perf_counter() - begin
                self.firsts.append(first)
            if data.get("usage"):
                self.tokens += data["usage"]["completion_tokens"]
        answer.read()  # to the end of its last chunk: the connection is used again

    def leave(self) -> None:
        """Disconnect before the end: the remaining tokens are not computed."""
        with contextlib.suppress(AttributeError, OSError):  # there is no socket between two answers
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.join()


class Restless(Client):
    """Sends the next request as soon as it has its answer, until it leaves, or one fails."""

    left = False

    def run(self) -> None:
        while not self.left and not self.failed:
            super().run()

    def leave(self) -> None:
        self.left = True
        super().leave()


def together(server: Server, prompts: list[list[list[int]]], max_tokens: int) -> tuple[list[Client], float]:
    """All clients at once, each with its prompts. Returns them, and the seconds until the last one had its answers."""
    clients = [Client(server, each, max_tokens) for each in prompts]
    begin = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    check(clients)
    return clients, time.perf_counter() - begin


def check(clients: Sequence[Client]) -> None:
    """Raise the failure of one: there would be figures of requests that were never answered."""
    for client in clients:
        if client.failed:
            raise client.failed


def alone(path: str, threads: int, prompts: list[list[int]], gen: int, ready: Any) -> None:
    """A process with its own copy of the model. It waits for the others twice: to start, and to end."""
    with Model.load(path, threads=threads, verify=False) as model:
        model.generate(prompts[0][:2], max_tokens=1)
        ready.wait()
        for prompt in prompts:
            model.generate(prompt, max_tokens=gen, temperature=0, **PASSES)
        ready.wait()


def apart(path: Path, threads: int, prompts: list[list[list[int]]], gen: int) -> float:
    """Seconds for as many separate processes."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(len(prompts) + 1)
    processes = [context.Process(target=alone, args=(str(path), threads, each, gen, ready)) for each in prompts]
    watchers = [threading.Thread(target=watch, args=(process, ready)) for process in processes]
    for process, watcher in zip(processes, watchers, strict=True):
        process.start()
        watcher.start()
    try:
        ready.wait()
        begin = time.perf_counter()
        ready.wait()
        seconds = time.perf_counter() - begin
    except threading.BrokenBarrierError:
        raise report.BenchmarkError(f"one of {len(prompts)} processes with a copy of the model each failed") from None
    finally:
        for watcher in watchers:
            watcher.join()
    return seconds


def watch(process: Any, ready: Any) -> None:
    """Wait for the end of a process. One that fails releases those who wait for it."""
    process.join()
    if process.exitcode:
        ready.abort()


def measure(servers: list[Server], path: Path | None, args: argparse.Namespace) -> list[dict[str, Any]]:
    """path: the model for separate processes."""
    rng = random.Random(1)

    def prompts(n: int, each: int = 1) -> list[list[list[int]]]:
        return [[[rng.randrange(3, 256) for _ in range(args.prompt)] for _ in range(each)] for _ in range(n)]

    for server in servers:
        together(server, prompts(1), 4)  # warm-up: some code is loaded on first use
    rows = []
    for n in args.clients:
        named = f"{n} client{'s' * (n > 1)}"
        print(f"{named} …", file=sys.stderr)
        found: dict[str, tuple[list[float], ...]] = {server.name: ([], [], []) for server in servers}
        separate = []
        for _ in range(args.repeat):
            for server in servers:
                clients, seconds = together(server, prompts(n, args.each), args.gen)
                speeds, rates, firsts = found[server.name]
                speeds.append(sum(client.tokens for client in clients) / seconds)
                rates.append(n * args.each / seconds)
                firsts += [first for client in clients for first in client.firsts]
            if path:
                seconds = apart(path, args.threads, prompts(n, args.each), args.gen)
                separate.append(n * args.each * args.gen / seconds)
        for name, (speeds, rates, firsts) in found.items():
            middle = {"tok_s": statistics.median(speeds), "answers_s": statistics.median(rates)}
            rows.append({"name": named, "server": name} | middle | waits(firsts))
        if separate:
            rows.append({"name": named, "server": "separate processes", "tok_s": statistics.median(separate)})
    return rows + [beside_others(server, prompts, args) for server in servers]


def beside_others(
    server: Server, prompts: Callable[[int], list[list[list[int]]]], args: argparse.Namespace
) -> dict[str, Any]:
    """Time to a first token while four answers are generated."""
    print(f"first token beside 4 answers, {server.name} …", file=sys.stderr)
    others = [Restless(server, prompt, args.long) for prompt in prompts(4)]
    for other in others:
        other.start()
    time.sleep(1)
    firsts = [together(server, prompts(1), 1)[0][0].firsts[0] for _ in range(args.probes)]
    check(others)  # before they leave, which ends their answers
    for other in others:
        other.leave()
    return {"name": "first token beside 4 answers", "server": server.name} | waits(firsts)


def waits(firsts: list[float]) -> dict[str, float]:
    """Milliseconds to the first token."""
    cuts = statistics.quantiles(firsts, n=100, method="inclusive") if len(firsts) > 1 else firsts * 99
    return {f"first_ms_p{p}": 1e3 * cuts[p - 1] for p in (50, 95, 99)}


def with_words(config: ModelConfig, path: Path) -> None:
    """A random model whose tokens are bytes and words, with a tokenizer that llama.cpp also supports."""
    letters = byte_level_alphabet()
    vocabulary = [*letters, "he", *(f"w{i}" for i in range(config.vocab_size - len(letters) - 1))]
    words = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, [("h", "e")]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    random_model(config, path, tokenizer=words.to_str().encode())


@contextlib.contextmanager
def running(command: Sequence[object], listens: str) -> Iterator[str]:
    """Run a server process; yields the first group of `listens` matched in its output."""
    with subprocess.Popen([*map(str, command)], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = ""
        while not (found := re.search(listens, said)):
            if not (line := process.stdout.readline()):
                sys.exit(said)
            said += line
        threading.Thread(target=process.stdout.read, daemon=True).start()  # it may print more
        try:
            yield found[1]
        finally:
            process.terminate()


def ours(model: Path, args: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    command = [sys.executable, "-m", "bitnet", "serve", model, "--port", "0", "--threads", args.threads, "--grace", "0"]
    return running(command, r"Listening on (http\S+)\n")


def theirs(gguf: Path, args: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    """llama.cpp's server with as many slots as ours, and as much context as an answer needs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = 16 * max(args.prompt + args.gen, args.prompt + args.long)
    command = [args.llama_server, "-m", gguf, "--port", port, "-t", args.threads, "-np", 16, "-c", context]
    return running(command, r"listening on (http://[\d.:]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="bitnet-2b4t")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--gen", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--long", type=int, default=2000, help="tokens of the answers beside which others come")
    parser.add_argument("--probes", type=int, default=50, help="requests beside four answers")
    parser.add_argument("--each", type=int, default=1, help="answers of each client, one after another")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's, which you built")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="its model (default: ours, written as GGUF)")
    args = parser.parse_args()
    report.check_program(parser, "--llama-server", args.llama_server)
    if args.url and not re.match(r"http://[^/]", args.url):
        parser.error(f"--url is {args.url}, expected such as http://127.0.0.1:8081")
    if min(*args.clients, args.prompt, args.gen, args.long, args.probes, args.each, args.repeat) < 1:
        parser.error("numbers of clients, tokens, probes, answers and repetitions: expected 1 or more")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = None if args.url else args.model or folder / "model.bitnet"
        if path and not args.model:
            config = SHAPES[args.shape]
            with_words(config.replace(activation="silu") if args.llama_server else config, path)  # as in llama.cpp
        servers = [Server("at --url", args.url)] if args.url else []
        if path:
            servers.append(Server("bitnet serve", stack.enter_context(ours(path, args)), PASSES))
        if args.llama_server:
            gguf = args.gguf or folder / "model.gguf"
            if not args.gguf and path:
                write_gguf(path, gguf, head="Q6_K", exact_scales=False)  # as its own tools do
            url = stack.enter_context(theirs(gguf, args))
            servers.append(Server("llama-server", url, {"ignore_eos": True, "cache_prompt": False}))
        rows = measure(servers, path, args)
    what = f"--model {args.model.name}" if args.model else f"--url {args.url}" if args.url else f"--shape {args.shape}"
    peer = f" --llama-server {args.llama_server.name}" if args.llama_server else ""
    settings = {name: getattr(args, name) for name in SETTINGS}
    clients = " ".join(map(str, args.clients))
    words = [f"python benchmarks/serving.py {what}{peer} --clients {clients}"]
    words += [f"--{name} {value}" for name, value in settings.items()]
    results = {"origin": report.origin(" ".join(words)), "settings": settings, "rows": rows}
    text = page(results)
    if args.url:
        print(text)
    else:
        report.write(args.out, f"serving-{args.model.stem if args.model else args.shape}", results, text, panels(rows))


def page(results: dict[str, Any]) -> str:
    head = ["", "", "tok/s", "answers/s", "first token, ms: p50", "p95", "p99"]
    keys = ("name", "server", "tok_s", "answers_s", "first_ms_p50", "first_ms_p95", "first_ms_p99")
    cells = [[row.get(key, "") for key in keys] for row in results["rows"]]
    has = results["settings"]
    each = f", {has['each']} for each client" if has["each"] > 1 else ""
    lengths = f"Prompts of {has['prompt']} tokens, answers of {has['gen']}{each}"
    said = f"{lengths}, {has['threads']} threads; medians of {has['repeat']}."
    return f"# Requests to a server\n\n{said}\n\n{report.table(head, cells)}\n"


def panels(rows: list[dict[str, Any]]) -> list[report.Panel]:
    speeds = [row for row in rows if "tok_s" in row]
    series: dict[str, list[float]] = {}
    for row in speeds:
        series.setdefault(row["server"], []).append(row["tok_s"])
    return [report.Panel("tokens a second", list(dict.fromkeys(row["name"] for row in speeds)), series)]


if __name__ == "__main__":
    report.run(main)
