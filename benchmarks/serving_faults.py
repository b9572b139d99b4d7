"""Faults that `bitnet serve` withstands: more requests than places, clients that disconnect or are slow, and many of
them.

    python benchmarks/serving_faults.py                         # all, about 8 minutes, with a small random model
    python benchmarks/serving_faults.py --shape 100m overload   # one part, with a larger one

Results go to results/serving_faults; parts that were not requested stay unchanged there.

overload: answers a second of 8 times as many clients as fit, against as many as fit. Who is refused asks again
          when he was told to, as OpenAI's client does.
cancel:   from when a client leaves to when nothing runs any more.
slow:     sockets that 1,000 clients of one address hold, who send a part of their headers or body: once a
          client of another address has its answer, and after 60 seconds.
memory:   bytes of the server's memory that a short request leaves behind.
term:     SIGTERM while clients ask: all that were accepted have whole answers, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import report
from serving import with_words
from shapes import SHAPES

PLACES = 16  # --parallel and --queue together


class Server:
    """`bitnet serve`, as a process."""

    def __init__(self, model: Path, threads: int, *options: str) -> None:
        words = [sys.executable, "-m", "bitnet", "serve", str(model), "--port", "0", "--threads", str(threads)]
        self.process = subprocess.Popen([*words, *options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        while not (found := re.search(r"Listening on http://[^:]+:(\d+)\n", said)):
            if not (line := self.process.stderr.readline()):
                sys.exit(said)
            said += line
        self.port = int(found[1])
        self.ask(1)  # from now on everything it needs is loaded

    def ask(self, n_tokens: int, prompt: int = 8, source: str = "") -> tuple[int, float]:
        """Status of an answer, and after how many seconds to retry if there was no place."""
        body = json.dumps({"prompt": [3] * prompt, "max_tokens": n_tokens, "seed": 1})
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120, source_address=(source, 0) if source else None)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        whole = json.loads(answer.read() or b"{}")
        connection.close()
        if answer.status == 200 and whole["usage"]["completion_tokens"] != n_tokens:
            raise AssertionError(f"an answer has {whole['usage']}, expected {n_tokens} tokens")
        return answer.status, float(answer.headers.get("retry-after-ms", 0)) / 1000

    def gauge(self, name: str) -> float:
        page = urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()
        return sum(map(float, re.findall(rf"^bitnet_{name}{{.*}} (\S+)$", page, re.M)))

    def sockets(self) -> int:
        n = 0
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                n += str(link.readlink()).startswith("socket:")
        return n

    def resident(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0])

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def crowd(n: int, work: Callable[[], Any]) -> None:
    """Run `work` in n threads, which use only CPU time that the server leaves, as if on other machines."""

    def behind() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux for this thread only
        work()

    threads = [threading.Thread(target=behind, daemon=True) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def overload(args: argparse.Namespace) -> dict[str, Any]:
    server = Server(args.model, args.threads, "--parallel", str(PLACES // 2), "--queue", str(PLACES // 2))

    def rate(clients: int) -> tuple[float, int]:
        end, good, refused = time.perf_counter() + args.seconds, [], []

        def ask() -> None:
            while time.perf_counter() < end:
                status, wait = server.ask(args.gen)
                (good if status == 200 else refused).append(status)
                if status != 200:
                    assert status == 503
                    time.sleep(wait)

        crowd(clients, ask)
        return len(good) / args.seconds, len(refused)

    at_capacity, _ = rate(PLACES)
    beyond, refused = rate(8 * PLACES)
    server.stop()
    return {"answers_s": at_capacity, "answers_s_at_8_times": beyond, "kept": beyond / at_capacity, "refused": refused}


def cancel(args: argparse.Namespace) -> dict[str, Any]:
    server, waits = Server(args.model, args.threads), []
    body = json.dumps({"prompt": [3] * 8, "max_tokens": args.long, "stream": True, "logit_bias": {"5": 100}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    for _ in range(args.times):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        connection.recv(100)
        begin = time.perf_counter()
        connection.close()
        while server.gauge("requests_processing"):
            pass
        waits.append(1e3 * (time.perf_counter() - begin))
    server.stop()
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return {"times": args.times, "ms_p50": cuts[49], "ms_p99": cuts[98]}


def slow(args: argparse.Namespace) -> dict[str, Any]:
    server = Server(args.model, args.threads)
    time.sleep(1)  # until its first answer is over
    before, clients = server.sockets(), []
    for i in range(1000):
        client = socket.create_connection(("127.0.0.1", server.port))
        part = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        more = b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{" if i % 2 else b""
        client.sendall(part + more)
        clients.append(client)
    begin = time.perf_counter()
    status, waited = server.ask(1, source="127.0.0.2")[0], time.perf_counter() - begin
    time.sleep(1)
    held = server.sockets() - before
    time.sleep(60)
    left = server.sockets() - before
    server.stop()
    return {
        "clients": len(clients),
        "sockets_at_first": held,
        "another_address": status,
        "another_waited_ms": 1e3 * waited,
        "sockets_after_60_s": left,
    }


def memory(args: argparse.Namespace) -> dict[str, Any]:
    server = Server(args.model, args.threads)
    left, lock, done = [args.requests], threading.Lock(), list[tuple[int, int]]()

    def ask() -> None:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = json.dumps({"prompt": [3], "max_tokens": 1, "seed": 1})
        while True:
            with lock:
                left[0] -= 1
                n = args.requests - left[0]
                if n % (args.requests // 20) == 0:
                    done.append((n, server.resident()))
            if n > args.requests:
                return
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()

    begin = time.perf_counter()
    crowd(8, ask)
    seconds = time.perf_counter() - begin
    server.stop()
    half = done[len(done) // 2 :]
    slope = statistics.linear_regression([n for n, _ in half], [rss for _, rss in half]).slope
    return {"requests": args.requests, "requests_s": args.requests / seconds, "bytes_each_in_second_half": slope}


def term(args: argparse.Namespace) -> dict[str, Any]:
    server, whole, refused, broken = Server(args.model, args.threads), [], [], []

    def ask() -> None:
        while True:
            try:
                status, _ = server.ask(args.gen)
            except ConnectionRefusedError:
                return
            except (OSError, HTTPException) as error:
                broken.append(repr(error))
                return
            (whole if status == 200 else refused).append(status)
            if status != 200:
                return

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(PLACES)]
    for thread in threads:
        thread.start()
    time.sleep(min(args.seconds, 3))
    code = server.stop()
    for thread in threads:
        thread.join(60)
    accepted = [each for each in broken if "reset" not in each.lower()]  # a reset one was never read
    return {"exit_code": code, "whole": len(whole), "refused": len(refused), "never_read": len(broken) - len(accepted),
            "lost": len(accepted)}  # fmt: skip


ASKED = {
    "overload": ("answers a second with 8 times as many clients as fit, of those with as many", "kept", "≥ 0.9"),
    "cancel": ("ms until nothing runs, after a client left: 99 % within", "ms_p99", "≤ 250"),
    "slow": ("sockets that 1,000 slow clients hold after 60 seconds", "sockets_after_60_s", "0"),
    "memory": ("bytes that a short request leaves in memory, of the second half of {requests:,}",
               "bytes_each_in_second_half", "< 1,024"),
    "term": ("answers lost by SIGTERM under load", "lost", "0"),
}  # fmt: skip
PARTS = {"overload": overload, "cancel": cancel, "slow": slow, "memory": memory, "term": term}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="none: all of them")
    parser.add_argument("--model", type=Path, help="default: a random one")
    parser.add_argument("--shape", choices=SHAPES, default="10m", help="of that")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gen", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--long", type=int, default=200, help="tokens of one that is cancelled")
    parser.add_argument("--seconds", type=float, default=15, help="of each half of overload")
    parser.add_argument("--times", type=int, default=200, help="that a client leaves")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    args = parser.parse_args()
    for name, least in (("gen", 1), ("long", 1), ("times", 2), ("requests", 20)):
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}, expected {least} or more")
    words = ["--model", args.model.name] if args.model else ["--shape", args.shape]
    for name in ("threads", "gen", "long", "seconds", "times", "requests"):
        words += [f"--{name}", f"{getattr(args, name):g}" if name == "seconds" else str(getattr(args, name))]
    command = shlex.join(["python", "benchmarks/serving_faults.py", *args.part, *words])
    origin, file = report.origin(command), args.out / "serving_faults.json"
    found = json.loads(file.read_text())["parts"] if file.exists() else {}
    told = {"model": args.model.name if args.model else args.shape, "date": origin["date"], "commit": origin["commit"]}
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            args.model = Path(folder) / "model.bitnet"
            with_words(SHAPES[args.shape], args.model)
        for name in args.part or PARTS:
            print(f"{name} …", file=sys.stderr)
            found[name] = PARTS[name](args) | told
            print(json.dumps(found[name]), file=sys.stderr)
            report.write(args.out, "serving_faults", {"origin": origin, "parts": found}, page(found), None)


def page(found: dict[str, Any]) -> str:
    """The page of results."""
    rows = []
    for name, (what, key, asked) in ASKED.items():
        if name in found:
            rows.append(
                [what.format(**found[name]), found[name][key], asked, found[name]["model"], found[name]["commit"]]
            )
    return f"# What the server stands\n\n{report.table(['', 'found', 'goal', 'model', 'commit'], rows)}"


if __name__ == "__main__":
    report.run(main)
