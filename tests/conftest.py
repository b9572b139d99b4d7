"""Fixtures and settings for all tests, and one training run that many of them share."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from bitnet_runtime import Model, available_isas

# Tests run in several processes: one torch thread each. The models are too small for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Results depend neither on the clock nor on chance: slow machines pass, and failures are reproducible.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# A shell without job control starts background jobs with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# With the usual 700 the collector looks at all that tests import ten times as often: 2 % of their time more.
gc.set_threshold(10_000)


def pytest_collection_finish() -> None:
    """Modules stay as they are: to look at all that was imported takes the collector 0.3 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_gc() -> None:
    """The same for all that tests have left since then, where a test collects many times."""
    pytest_collection_finish()


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """Records of all loggers. pytest's own `caplog` is off: it costs every test two milliseconds."""
    handler = BufferingHandler(10_000)
    logging.getLogger().addHandler(handler)
    yield handler.buffer
    logging.getLogger().removeHandler(handler)


@pytest.fixture(autouse=True)
def no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no loss.png, which takes 0.12 s, unless a test is marked `plots`; fixtures of a module do."""
    if "plots" not in request.keywords and (runlog := sys.modules.get("bitnet.train.runlog")):
        monkeypatch.setattr(runlog, "plot", lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def one_engine_thread() -> Iterator[None]:
    """Models have one thread where a test asks for no number: with models this small a second one only keeps a CPU
    from other tests. Programs that tests start have what users have."""
    whole = Model.load

    def load(path: Any, *, threads: int | None = None, **options: Any) -> Model:
        return whole(path, threads=1 if threads is None else threads, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "load", staticmethod(load))
        yield


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, for tests that compare bits with those of compiled layers, which consist of torch's operations."""
    monkeypatch.setattr("bitnet.kernels.possible", lambda *_, **__: False)


@pytest.fixture(params=[isa for isa in available_isas() if isa not in ("scalar", "avxvnni", "avx512vnni")])
def engine_multiplies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine multiplies ternary codes in training, be they ever so few, by each tier that is used for it."""
    kernels = importlib.import_module("bitnet.kernels")
    monkeypatch.setenv("BITNET_ISA", request.param)
    of_tier = kernels._kernels.__wrapped__()
    monkeypatch.setattr(kernels, "_kernels", lambda: of_tier)
    monkeypatch.setattr(kernels, "FEW", 1)


@pytest.fixture
def usual_depth() -> Iterator[None]:
    """Python's usual limit of recursion: other tests may have left more."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of `bitnet report` as HTML have words alone: to draw the figures of one takes 2 s."""
    monkeypatch.setattr("bitnet.report.page._encoded", lambda *_: "")


PEAKS: dict[tuple[str, int], float] = {}


@pytest.fixture
def bench_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bitnet bench` measures in this process, reads 32 MB where no cache holds 2 GB, and measures the int8 peak once:
    both take seconds."""
    from bitnet_runtime import bench, machine, measuring

    measure_peak = machine.int8_peak

    def int8_peak(isa: str, threads: int) -> float:
        if (isa, threads) not in PEAKS:
            PEAKS[isa, threads] = measure_peak(isa, threads)
        return PEAKS[isa, threads]

    def run(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=0, stdout=json.dumps(measuring.measure(**json.loads(command[-1]))))

    monkeypatch.setattr(machine, "buffer_bytes", lambda: 32 << 20)
    monkeypatch.setattr(machine, "int8_peak", int8_peak)
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: for matrices this small a second one costs more than it gains."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def no_spinning() -> Iterator[None]:
    """Threads of onnxruntime sleep while they wait: by default they keep the CPUs from other tests, half the time."""
    import onnxruntime

    class Patient(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.intra_op.allow_spinning", "0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", Patient)
        yield


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of made-up sentences: enough structure to learn something in 20 steps."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(30):
        words = [rng.choice(["the", "cat", "dog", "sees", "a", "red", "house", "and", "runs"]) for _ in range(400)]
        (folder / f"{i}.txt").write_text(" ".join(words), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def finished(sentences: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps with the checkpoints of steps 10 and 20. Copy it to change it."""
    from training import TINY, bitnet

    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert bitnet("train", *TINY, "--data", sentences, "--out", folder) == 0
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small seeded model after 60 steps. Copy it to change it."""
    from seeded_checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("run"), steps=60)


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """A checkpoint of that model before its first step, without a manifest, so that a test may change it."""
    from seeded_checkpoints import make_checkpoint

    folder = make_checkpoint(tmp_path / "run")
    (folder / "manifest.json").unlink()
    return folder


@pytest.fixture(scope="module")
def client(serving: Any) -> Any:
    """The official client of OpenAI's API, for the `serving` of the module."""
    from openai import OpenAI

    return OpenAI(base_url=f"{serving.address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(serving: Any) -> Any:
    """The same of Anthropic. Imported here alone, as it takes seconds of each process that collects tests."""
    from anthropic import Anthropic

    return Anthropic(base_url=serving.address, api_key="none", max_retries=0)


@pytest.fixture
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of the server send each token by itself, as they do when they keep up."""
    from bitnet_serve.models import generation
    from bitnet_serve.models.generation import Event, Mailbox

    monkeypatch.setattr(generation, "PACE", 0.0)
    all_that_come = Mailbox.get

    async def get(mailbox: Mailbox) -> list[tuple[int, Event]]:
        first, *others = await all_that_come(mailbox)
        mailbox._events.extendleft(reversed(others))
        return [first]

    monkeypatch.setattr(Mailbox, "get", get)
