"""Steps of `bitnet train` at four sizes: how long they take, what share of the GPU they use, where the time goes.

gpu.py runs this in separate processes, because a failure on a GPU may take the process with it. For each case in the
given JSON list it prints one JSON object per line. The steps are those of `bitnet.train.loop.loop`, on random tokens:
batches prepared ahead, passes, clipping, optimizer, results read one step late.

    python benchmarks/gpu_steps.py --device cuda '[{"shape": "100m", "kind": "ternary", "mode": "replayed"}]'
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_profile
import numpy as np
import torch
from shapes import TRAINED
from training_speed import flops_per_token, peak_flops

from bitnet.config import ModelConfig
from bitnet.data import dataset, tokenizer, views
from bitnet.model import compiler
from bitnet.settings import Settings
from bitnet.setup import building, hardware
from bitnet.train import loop, optimizers, runlog
from bitnet.train.horizon import Horizon
from bitnet.train.objectives import Learnt
from bitnet.train.run import Run
from bitnet.train.schedule import Place
from bitnet.train.state import beginning

WARM = 3  # warm-up steps: they compile, record, and settle
NO_TIME = "left out, no time"
N_TOKENS = 1 << 18  # tokens of the text


@dataclass(frozen=True)
class Case:
    """kind: ternary, full precision, or being phased in (λ = 0.5). mode: eager, compiled, or replayed, which is also
    compiled.

    documents: their mean length in tokens, if attention is restricted to them; 0: it is not. job: time it, warm the
    compiler's cache for it (one layer suffices), or profile it.
    """

    shape: str
    kind: str = "ternary"
    mode: str = "replayed"
    recompute: bool = False
    documents: int = 0
    job: str = "time"

    @property
    def config(self) -> ModelConfig:
        config = TRAINED[self.shape]
        config = config.replace(n_layers=1) if self.job == "warm" else config
        return config.replace(ternary=(), head_format="f32") if self.kind == "full precision" else config

    def __str__(self) -> str:
        more = " recomputing" * self.recompute + f" documents of {self.documents}" * (self.documents > 0)
        return f"{self.shape} {self.kind} {self.mode}{more}"

    @property
    def begins(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether a document begins at each token of the text; lengths are random."""
        return np.random.default_rng(1).random(N_TOKENS) < (1 / self.documents if self.documents else 0.0)

    @property
    def visible(self) -> float:
        """How many tokens a token sees on average, itself included."""
        context = self.config.max_context
        begins = self.begins[: N_TOKENS // context * context].reshape(-1, context)
        places = np.arange(context)
        return float((places - np.maximum.accumulate(np.where(begins, places, 0), axis=1) + 1).mean())


@dataclass(frozen=True)
class Size:
    """Tokens per sequence, per forward pass and per step, and how many steps count."""

    pass_tokens: int = 16_384
    step_tokens: int = 65_536
    steps: int = 8
    threads: int = 8


class Halfway(Run):
    """A run that stays in the middle of its schedule until its steps are done, and is not saved."""

    @property
    def progress(self) -> float:
        return 0.45 if self.state["step"] < self.settings.steps else 1.0

    @property
    def place(self) -> Place:
        return Place(self.progress, self.progress)

    def save(self) -> None:
        pass


class Clock(runlog.Silent):
    """A log that reports when each step was read."""

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self._seen = seen

    def write(self, record: dict[str, Any]) -> None:
        self._seen()

    def close(self) -> None:
        pass


def steps(case: Case, size: Size, device: str, seen: Callable[[], None], wanted: int, folder: Path) -> Run:
    """Run `wanted` steps of the trainer; seen: called when each was read."""
    config = case.config
    context = config.max_context
    settings = Settings(
        device=device, precision="bf16" if device == "cuda" else "fp32", compile=case.mode != "eager",
        batch=size.pass_tokens // context, batch_tokens=size.step_tokens, context=context, steps=wanted,
        quantize_warmup=0.9 if case.kind == "coming in" else 0.0, recompute=case.recompute, layers_every=0,
        out=str(folder), save_every=10**9, save_minutes=0, eval_every=10**9, lr=1e-3, threads=size.threads,
    )  # fmt: skip
    hardware.set_threads(settings.threads)
    ids = np.random.default_rng(0).integers(1, config.vocab_size, size=N_TOKENS, dtype=np.uint16)
    ids[case.begins] = 0
    tokens = dataset.Tokens(ids, len(ids), "random")
    batches = dataset.Batches(tokens, settings.batch, context, 0, views.Apart(0) if case.documents else None)
    with torch.device(device):  # drawing a billion weights is fast there
        model, forward = building.build_model(settings, config, None, batches)
    model.recompute = settings.recompute
    if settings.compile:
        compiler.compile_layers(model)
    data = Learnt(tokenizer.build("byte", [], 257), None, {}, batches, tokens)
    state = beginning(settings.to_dict(), config.to_dict(), 0)
    horizon = Horizon(wanted * settings.batch_tokens, 0.0, settings.batch_tokens)
    run = Halfway(
        settings, data, settings.batch_tokens // context, horizon, model, forward,
        optimizers.build(model, settings), state,
    )  # fmt: skip
    with without_replay() if case.mode == "compiled" else contextlib.nullcontext():
        loop.loop(run, Clock(seen), None)
    if case.mode == "replayed" and not run.replay:
        raise RuntimeError("the passes were not replayed")
    return run


@contextlib.contextmanager
def without_replay() -> Iterator[None]:
    """In this context, passes are launched kernel by kernel."""
    before = loop.replay.possible
    try:
        loop.replay.possible = lambda *_: False
        yield
    finally:
        loop.replay.possible = before


def timed(case: Case, size: Size, device: str, peak: float, folder: Path) -> dict[str, Any]:
    """Seconds of each counted step, and derived figures. peak: FLOP/s of a large product."""
    read: list[float] = []
    run = steps(case, size, device, lambda: read.append(time.perf_counter()), WARM + size.steps, folder)
    seconds = [after - before for before, after in zip(read[WARM - 1 :], read[WARM:], strict=False)]
    middle, config = statistics.median(seconds), case.config
    flops = flops_per_token(config) + attention_flops(config, case.visible)
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "parameters": sum(p.numel() for p in run.model.parameters()), "tokens": size.step_tokens, "seconds": seconds,
        "ms": 1e3 * middle, "tok_s": size.step_tokens / middle, "utilisation": flops * size.step_tokens / middle / peak,
        "memory_gb": memory / 1e9,
    }  # fmt: skip


def attention_flops(config: ModelConfig, visible: float) -> float:
    """Per token: q·k and p·v with the tokens that it sees, 2 forward and 4 backward."""
    return config.n_layers * 6 * 2 * config.n_heads * config.head_dim * visible


def profiled(case: Case, size: Size, device: str, folder: Path) -> dict[str, Any]:
    """Where the time of steps goes, as text, and how often a step waits for the GPU."""
    watch = gpu_profile.Watch(WARM)
    steps(case, size, device, watch.seen, WARM + watch.steps + 1, folder)
    return watch.summary()


def result_of(case: Case, size: Size, device: str, peak: float) -> dict[str, Any]:
    torch._dynamo.reset()  # it keeps only a few graphs per layer
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as scratch:
        if case.job == "profile":
            return profiled(case, size, device, Path(scratch))
        if case.job == "warm":
            small = Size(size.pass_tokens, size.pass_tokens, size.steps, threads=2)
            steps(case, small, device, lambda: None, 1, Path(scratch))
            return {}
        return timed(case, size, device, peak, Path(scratch))


def results_of(cases: list[Case], size: Size, device: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Results one by one, until there is no time for more. A failure other than out of memory ends the process."""
    peak = peak_flops("bf16" if device == "cuda" else "fp32", device) if any(c.job == "time" for c in cases) else 0.0
    longest = 0.0
    for case in cases:
        began = time.time()
        told = asdict(case) | {"peak_tflops": peak / 1e12}
        if began + longest > deadline:
            yield told | {"error": NO_TIME}
            continue
        try:
            yield told | result_of(case, size, device, peak) | {"took": time.time() - began}
        except torch.OutOfMemoryError as error:
            yield told | {"error": f"memory ran out: {str(error).partition(' Of the')[0]}"}
        except Exception as error:
            yield told | {"error": f"{type(error).__name__}: {str(error).strip()[:600]}", "last": True}
            return
        longest = max(longest, time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="a JSON list of cases")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="{}", help="a JSON object: tokens and steps")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds of the clock, for the last start")
    args = parser.parse_args()
    cases = [Case(**case) for case in json.loads(args.cases)]
    for found in results_of(cases, Size(**json.loads(args.size)), args.device, args.deadline):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
