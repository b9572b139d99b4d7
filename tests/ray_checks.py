"""`make ray`: the examples for Ray, on a local cluster with two workers, in a separate environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

os.environ |= {  # before Ray is imported
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_raylet_start_wait_time_s": "120", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",  # for busy machines
}  # fmt: skip

import ray
from ray.cluster_utils import Cluster
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bitnet.config import ModelConfig
from bitnet_export import random_model
from bitnet_runtime import Model
from bitnet_runtime.tokenizer.text import byte_level_alphabet

EXAMPLES = Path(__file__).parents[1] / "python_bindings/examples"
PROMPTS = [f"def number_{i}(" + "x" * (i % 7) for i in range(41)]  # an odd number: two replicas that share them differ

SMALL = ModelConfig(
    vocab_size=256, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, max_context=256
)


def letters() -> Tokenizer:
    """A token for each byte."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(byte_level_alphabet())}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def check_batch(address: str, path: Path, expected: list[str]) -> None:
    """Each line gets the same text as from the model alone."""
    source, out = path.with_name("in.jsonl"), path.with_name("out")
    source.write_text("".join(json.dumps({"prompt": prompt, "id": i}) + "\n" for i, prompt in enumerate(PROMPTS)))
    command = [sys.executable, EXAMPLES / "ray_batch.py", path, source, out, "--max-tokens", "12"]
    subprocess.run([str(word) for word in command], env=os.environ | {"RAY_ADDRESS": address}, check=True)
    lines = [json.loads(line) for file in out.iterdir() for line in file.read_text().splitlines()]
    assert sorted((line["id"], line["text"]) for line in lines) == [*enumerate(expected)]


def check_serve(address: str, path: Path, expected: list[str]) -> None:
    """Both replicas answer, whole and as streams, and one that is killed is soon replaced."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "ray_serve.py", path, "--port", port]
    with subprocess.Popen([str(word) for word in command], env=os.environ | {"RAY_ADDRESS": address}) as process:
        try:
            wait(lambda: ask(port, "GET", "/health")[0] == 200)
            counts, rounds = set[int](), 0
            while len(counts) < 2 and rounds < 50:  # the proxy may hear of the second replica later
                with ThreadPoolExecutor(8) as pool:
                    assert list(pool.map(lambda prompt: complete(port, prompt), PROMPTS)) == expected
                counts, rounds = {int(tokens(port)) for _ in range(100)}, rounds + 1
            assert len(counts) == 2 and sum(counts) == 12 * len(PROMPTS) * rounds, counts
            assert streamed(port, PROMPTS[0]) == expected[0]
            assert ask(port, "POST", "/v1/completions", {"prompt": "x", "temprature": 1})[0] == 400
            ray.init(address, log_to_driver=False)
            replicas = [each for each in ray.util.list_named_actors(all_namespaces=True) if "Replica" in each["name"]]
            assert len(replicas) == 2, replicas
            ray.kill(ray.get_actor(replicas[0]["name"], replicas[0]["namespace"]), no_restart=False)
            wait(lambda: complete(port, PROMPTS[1]) == expected[1])
            wait(lambda: len({int(tokens(port)) for _ in range(50)}) == 2)
            ray.shutdown()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def complete(port: int, prompt: str) -> str:
    asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    status, data = ask(port, "POST", "/v1/completions", asked)
    assert status == 200, data
    return str(json.loads(data)["choices"][0]["text"])


def streamed(port: int, prompt: str) -> str:
    asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
    lines = ask(port, "POST", "/v1/completions", asked)[1].splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert len(pieces) > 1 and lines[-2] == b"data: [DONE]", lines
    return "".join(piece["choices"][0]["text"] for piece in pieces)


def tokens(port: int) -> float:
    """Tokens generated so far by the replica that answers."""
    page = ask(port, "GET", "/metrics")[1].decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("bitnet_tokens_predicted"))


def wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError, AssertionError):
            if done():
                return
        assert time.monotonic() < end, "waited 120 s"
        time.sleep(0.2)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "small.bitnet"
            random_model(SMALL, path, tokenizer=letters().to_str().encode())
            with Model.load(path, threads=1) as model:
                expected = [answer.text for answer in model.generate(PROMPTS, max_tokens=12, temperature=0)]
            for check in (check_batch, check_serve):
                check(cluster.address, path, expected)
                print(f"{check.__name__.removeprefix('check_')}: passed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
