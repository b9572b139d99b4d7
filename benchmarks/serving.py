"""`bitnet serve` under load: tokens a second of all clients, and how long each waits for its first.

    python benchmarks/serving.py --shape bitnet-2b4t             # a random model of this shape
    python benchmarks/serving.py --model build/demo/model.bitnet
    python benchmarks/serving.py --url http://127.0.0.1:8081     # another server with OpenAI's completions

For each number of clients: all ask at once, each with a prompt of its own. Then one client asks again and
again for a single token while four others get long answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import report
from shapes import SHAPES
from tokenizers import Tokenizer, decoders, models

from bitnet_export import random_model


class Client(threading.Thread):
    """One request as a stream. `first`: seconds to the first text; `seconds`: to the end; `tokens`: as counted."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self.first, self.seconds, self.tokens = urlsplit(url), 0.0, 0.0, 0
        self._body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip

    def run(self) -> None:
        begin = time.perf_counter()
        connection = HTTPConnection(self._url.hostname or "", self._url.port, timeout=3600)
        connection.request("POST", "/v1/completions", json.dumps(self._body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            if not self.first and data["choices"]:  # text, or the end where a token has none
                self.first = time.perf_counter() - begin
            if data.get("usage"):
                self.tokens = data["usage"]["completion_tokens"]
        self.seconds = time.perf_counter() - begin
        connection.close()


def together(url: str, prompts: list[list[int]], max_tokens: int) -> tuple[list[Client], float]:
    """All at once: the clients, and seconds until the last had its answer."""
    clients = [Client(url, prompt, max_tokens) for prompt in prompts]
    begin = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return clients, time.perf_counter() - begin


def measure(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(1)

    def prompts(n: int) -> list[list[int]]:
        return [[rng.randrange(3, 256) for _ in range(args.prompt)] for _ in range(n)]

    together(url, prompts(1), 4)  # what is loaded on first use
    rows = []
    for n in args.clients:
        print(f"{n} clients …", file=sys.stderr)
        speeds, firsts = [], list[float]()
        for _ in range(args.repeat):
            clients, seconds = together(url, prompts(n), args.gen)
            speeds.append(sum(client.tokens for client in clients) / seconds)
            firsts += [client.first for client in clients]
        rows.append({"name": f"{n} clients", "tok_s": statistics.median(speeds)} | waits(firsts))
    print("first token beside 4 answers …", file=sys.stderr)
    others = [Client(url, prompt, 100 * args.gen) for prompt in prompts(4)]
    for other in others:
        other.start()
    time.sleep(1)
    firsts = [together(url, prompts(1), 1)[0][0].first for _ in range(args.probes)]
    running = sum(other.is_alive() for other in others)
    rows.append({"name": f"first token beside {running} answers", "tok_s": None} | waits(firsts))
    return rows


def waits(firsts: list[float]) -> dict[str, float]:
    """Milliseconds to the first token."""
    cuts = statistics.quantiles(firsts, n=100, method="inclusive") if len(firsts) > 1 else firsts * 99
    return {f"first_ms_p{p}": 1e3 * cuts[p - 1] for p in (50, 95, 99)}


def with_words(shape: str, path: Path) -> None:
    """A random model of a shape, each token of which is a word."""
    config = SHAPES[shape]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, "w0"))
    words.decoder = decoders.Fuse()
    random_model(config, path, tokenizer=words.to_str().encode())


@contextlib.contextmanager
def serving(model: Path, threads: int) -> Iterator[str]:
    """The address of `bitnet serve`."""
    command = [sys.executable, "-m", "bitnet", "serve", model, "--port", "0", "--threads", threads, "--grace", "0"]
    with subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"Listening on (http\S+)\n", said)):
            if not (line := process.stderr.readline()):
                sys.exit(said)
            said += line
        try:
            yield found[1]
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="bitnet-2b4t")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--gen", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--probes", type=int, default=50, help="requests beside four answers")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = args.url
        if not url:
            path = args.model or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.bitnet"
            if not args.model:
                with_words(args.shape, path)
            url = stack.enter_context(serving(path, args.threads))
        rows = measure(url, args)
    print(json.dumps({"origin": report.origin(shlex.join(["python", *sys.argv])), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
