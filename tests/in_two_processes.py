"""`bitnet train` in two processes on one CPU, joined by gloo: forked with the variables that torchrun sets."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import bitnet_cli
from bitnet.train import runlog

torch.set_num_threads(1)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "bitnet.setup.start",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
    ]
)

MODEL = ("vocab_size=257", "dim=32", "n_layers=2", "n_heads=2", "n_kv_heads=1", "head_dim=16", "ffn_dim=48")
TINY = [word for option in (*MODEL, "max_context=32") for word in ("--set", option)]
TINY += ["--quantize-warmup", "0", "--tokenizer", "byte", "--threads", "1", "--precision", "fp32"]
TINY += ["--batch", "2", "--batch-tokens", "256"]
TINY += ["--save-every", "4", "--eval-every", "4", "--layers-every", "1"]
TINY += ["--steps", "8"]  # the last, to be left out where --minutes is given
FLOAT = ["--set", "ternary=[]", "--set", "head_format=f32", "--optimizer", "adamw"]

Process = multiprocessing.process.BaseProcess


def some_text(folder: Path) -> str:
    rng = random.Random(0)
    for i in range(20):
        words = " ".join(rng.choice(["the", "cat", "sees", "a", "red", "house"]) for _ in range(200))
        (folder / f"{i}.txt").write_text(words)
    return str(folder)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def in_group(rank: int, port: int, errors: Path, work: Callable[..., Any], *args: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    gc.freeze()  # all that was imported: to collect it, which also copies its pages, takes 0.3 s each time
    torch.set_num_threads(1)
    mock.patch.object(runlog, "plot").start()  # nobody looks at it, and it takes a process a second
    sys.exit(work(*args))


def start(folder: Path, work: Callable[..., Any], *args: Any) -> list[Process]:
    """Start two processes that do `work`; their stderr goes to `folder`/.errors."""
    return start_at(free_port(), folder, work, *args)


def start_at(port: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Process]:
    """The same, with the port at which they meet."""
    folder.mkdir(exist_ok=True)
    pair = [processes.Process(target=in_group, args=(i, port, folder / ".errors", work, *args)) for i in range(2)]
    for each in pair:
        each.start()
    return pair


def finish(pair: list[Process]) -> list[int | None]:
    """Their exit codes, with a time limit."""
    deadline = time.monotonic() + 120
    try:
        for each in pair:
            each.join(max(0.0, deadline - time.monotonic()))
        return [each.exitcode for each in pair]
    finally:
        for each in pair:
            each.kill()


def run_pair(run: Path, *argv: str, work: Callable[[list[str]], int] = bitnet_cli.main) -> tuple[list[int | None], str]:
    """Exit codes and stderr of `bitnet train` in two processes."""
    codes = finish(start(run, work, ["train", "--out", str(run), *argv]))
    return codes, (run / ".errors").read_text()


def steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in runlog.read(run / "log.jsonl") if "loss" in record]
