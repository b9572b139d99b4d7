"""Whether `bitnet train` computes the same on a GPU as on the CPU, and all its features work there.

Each check returns whether it passed and one line with its findings. Runs are ordinary commands in separate processes,
on sources of Python's standard library.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from shapes import TRAINED
from torch import Tensor

from bitnet.data import dataset
from bitnet.evaluate import loss
from bitnet.model.transformer import Transformer
from bitnet.quant import activation_codes, integer_product, row_codes, ternary_codes
from bitnet.train import checkpoint, runlog

Found = tuple[bool, str]
MODEL = ("vocab_size=300", "dim=128", "n_layers=2", "n_heads=2", "n_kv_heads=1", "head_dim=64", "ffn_dim=256",
         "max_context=256")  # fmt: skip
FLOAT = "ternary = []\nhead_format = 'f32'\n"
FIRST, NORM = 1e-5, 1e-4
"""Tolerances at the first step, whose weights are the same: nats of the loss, relative error of the gradient's norm."""
EXACT, SAME_CODES = 1e-3, 0.999
"""Tolerance of any loss in nats, and the share of equal codes; or three times the noise, the difference of two CPU runs
whose learning rates differ by one in a million. Once one code rounds the other way, everything after it differs."""
RATE = 3e-4
OPTIMIZERS = "adamw", "muon"
RESUMED = 1e-4
LIMIT = 300  # seconds per run
ALONE = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where runs are made. steps: per run; threads: per run, on the CPU."""

    folder: Path
    device: str
    steps: int = 300
    threads: int = 2

    @property
    def compiled(self) -> list[str]:
        return ["--compile"] if self.device == "cuda" else []

    def text(self) -> Path:
        """A folder with some 300 kB of text."""
        folder = self.folder / "text"
        if not folder.exists():
            partial = self.folder / "text.partial"
            partial.mkdir(parents=True, exist_ok=True)
            for file in sorted(Path(os.__file__).parent.glob("[ab]*.py")):
                shutil.copy(file, partial)
            with contextlib.suppress(OSError):  # another check created it
                partial.rename(folder)
        return folder

    def words(self, verb: str, name: str, *more: object, device: str = "") -> list[str]:
        """The command of a run."""
        few = ["--batch", 8, "--context", 128, "--layers-every", 0, "--eval-every", 10**6, "--save-every", 10**6]
        where = ["--out", self.folder / name, "--device", device or self.device, "--threads", self.threads]
        words = [sys.executable, "-m", "bitnet", verb, *more, *few, "--eval-tokens", 4096, *where, "--json"]
        return [str(word) for word in words]

    def train(self, name: str, *more: object, device: str = "") -> list[str]:
        model = [word for option in MODEL for word in ("--set", option)]
        new = [*model, "--tokenizer", "byte", "--data", self.text(), "--lr", 2e-3]
        return self.words("train", name, *new, *more, device=device)


def run(words: list[str]) -> dict[str, Any]:
    """What a command prints. Raises RuntimeError with the end of its output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[2:5])} … ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def together(commands: list[list[str]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(run, commands))


def losses(folder: Path) -> list[float]:
    """Loss of each step, from the log."""
    return [record["loss"] for record in runlog.read(folder / "log.jsonl") if "loss" in record]


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# ---- numbers ----


def codes(place: Place) -> Found:
    """The quantizers and the integer product on the GPU, against the CPU, on the same random tensors."""
    generator, wrong, near, n = torch.Generator().manual_seed(0), [], 0, 0
    for rows, columns in ((1, 1), (3, 130), (17, 129), (64, 384), (255, 1000), (40, 2049)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            w = torch.randn(rows, columns, generator=generator).to(dtype)
            x = torch.randn(33, columns, generator=generator).to(dtype)
            what = f"{rows} × {columns} {dtype}"
            q, s = same(activation_codes, x, place.device, f"activations {what}", wrong)
            same(row_codes, w, place.device, f"rows {what}", wrong)
            for scope in ("tensor", "row", "group"):
                here, there = ternary_codes(w, scope), ternary_codes(w.to(place.device), scope)
                n += w.numel()
                differ = int((here[0] != there[0].cpu()).sum())
                close = torch.allclose(here[1], there[1].cpu(), rtol=1e-6 if scope != "group" else 2**-10)
                near += differ
                if not close or differ > max(1, 1e-5 * w.numel()):
                    wrong.append(f"{scope} {what}: {differ} codes")
                product = integer_product(q, *here, s)
                on_device = (tensor.to(place.device) for tensor in (q, *here, s))
                if not torch.equal(product, integer_product(*on_device).cpu()):
                    wrong.append(f"product {scope} {what}")
    said = f"{near} of {n:,} ternary codes differ, where γ rounds otherwise; "
    return not wrong, said + ("all else is equal bit for bit" if not wrong else f"wrong: {', '.join(wrong[:5])}")


def same(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, device: str, what: str, wrong: list[str]
) -> tuple[Tensor, Tensor]:
    here, there = quantize(x), quantize(x.to(device))
    if not all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True)):
        wrong.append(what)
    return here


def exactness(place: Place) -> Found:
    """Fifty steps in fp32: losses and final codes on the GPU, eager and compiled, against the CPU's."""
    fp32 = ["--precision", "fp32", "--steps", min(50, place.steps)]
    modes: dict[str, list[str]] = {"eager": []} | ({"compiled": place.compiled} if place.compiled else {})
    commands = []
    for optimizer in OPTIMIZERS:
        options = [*fp32, "--optimizer", optimizer, "--lr"]
        commands.append(place.train(f"cpu-{optimizer}", *options, RATE, device="cpu"))
        commands.append(place.train(f"noise-{optimizer}", *options, RATE * (1 + 1e-6), device="cpu"))
        commands += [place.train(f"{mode}-{optimizer}", *options, RATE, *more) for mode, more in modes.items()]
    together(commands)
    passed, said = True, []
    for optimizer in OPTIMIZERS:
        (_, _, noise, noisy), *found = [compared(place, f"{mode}-{optimizer}", optimizer) for mode in ("noise", *modes)]
        for mode, (first, norm, distance, equal) in zip(modes, found, strict=True):
            passed &= first <= FIRST and norm <= NORM and distance <= max(EXACT, 3 * noise)
            passed &= equal >= min(SAME_CODES, 1 - 3 * (1 - noisy))
            said.append(
                f"{optimizer} {mode} {first:.0e} nats and {norm:.0e} of the gradient at first, {distance:.1e} nats at "
                f"most, codes {equal:.3%}"
            )
        said.append(f"the CPU's own noise with {optimizer} {noise:.1e} nats, codes {noisy:.3%}")
    return passed, "; ".join(said)


def compared(place: Place, name: str, optimizer: str) -> tuple[float, float, float, float]:
    """Differences between a run and the CPU's: of first losses, first gradients and all losses; and the share of equal
    codes at the end."""
    folders = place.folder / f"cpu-{optimizer}", place.folder / name
    here, there = (losses(folder) for folder in folders)
    norm, other = (runlog.read(folder / "log.jsonl")[0]["gradient_norm"] for folder in folders)
    return abs(here[0] - there[0]), abs(other / norm - 1), apart(here, there), equal_codes(*folders)


def equal_codes(one: Path, other: Path) -> float:
    """Share of ternary weights with equal codes in two finished runs."""
    weights = [load_file(checkpoint.all_of(folder)[-1] / checkpoint.WEIGHTS) for folder in (one, other)]
    names = [name for name, w in weights[0].items() if name.startswith("layers.") and w.dim() == 2]
    pairs = [[ternary_codes(each[name])[0] for each in weights] for name in names]
    return sum(int((a == b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


# ---- features of a run ----


def resume(place: Place) -> Found:
    """A run stopped by SIGTERM resumes like one that was not stopped; two of the latter show the noise."""
    options = ["--steps", place.steps, *place.compiled]
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(run, place.train(name, *options)) for name in ("whole", "again")]
        cut = pool.submit(stopped, place.train("cut", *options), place.folder / "cut", place.steps // 4)
        at = cut.result()
        run([*place.train("cut", *options), "--resume"])
        for other in others:
            other.result()
    whole, again, resumed = (losses(place.folder / name) for name in ("whole", "again", "cut"))
    noise, distance = apart(whole, again), apart(whole, resumed)
    how = "bit for bit the losses" if distance == 0 else f"{distance:.1e} nats at most from the losses"
    return distance <= max(RESUMED, 3 * noise), (
        f"stopped at step {at} of {place.steps}, went on with {how} of an uninterrupted run (two of those: {noise:.1e})"
    )


def stopped(words: list[str], folder: Path, after: int) -> int:
    """The step at which a run saved that got SIGTERM after some steps."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = folder / "log.jsonl"
    while process.poll() is None:
        if log.exists() and log.read_bytes().count(b"\n") >= after:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.002)
    _, said = process.communicate(timeout=60)
    if process.returncode != 128 + signal.SIGTERM:
        raise RuntimeError(f"SIGTERM: a run ended with {process.returncode}, expected 143: {said.strip()[-600:]}")
    return int(checkpoint.all_of(folder)[-1].name.removeprefix("step-"))


def context(place: Place, n_tokens: int = 4096, rows: int = 2) -> Found:
    """Memory of the loss at a long context in fp32, against twice as many rows of half the length."""
    config = TRAINED["100m" if place.device == "cuda" else "quick"].replace(vocab_size=512, max_context=n_tokens)
    torch.manual_seed(0)
    model = Transformer(config).to(place.device)
    ids = torch.randint(512, (4 * n_tokens + 1,), generator=torch.Generator().manual_seed(0)).numpy().astype("uint16")
    tokens, peaks = dataset.Tokens(ids, len(ids), "random"), []
    for length, batch in ((n_tokens // 2, 2 * rows), (n_tokens, rows)):
        if place.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result = loss.evaluate(model, tokens, length, batch)
        peaks.append(torch.cuda.max_memory_allocated() if place.device == "cuda" else 0)
    scores = 4 * rows * config.n_heads * n_tokens**2
    return math.isfinite(result.nats_per_token) and peaks[1] <= 1.1 * peaks[0], (
        f"{result.nats_per_token:.3f} nats/token at {n_tokens:,} tokens, peak {peaks[1] / 1e9:.2f} GB; at half the "
        f"length {peaks[0] / 1e9:.2f} GB; scores of one layer would take {scores / 1e9:.2f} GB"
    )


def chat(place: Place) -> Found:
    """Conversations are learned, several packed into a row, each independently."""
    talks = place.folder / "talks.jsonl"
    numbers = [(i % 10, i // 10 % 10) for i in range(100)]
    turns = [[("user", f"{a} and {b}?"), ("assistant", f"{a} plus {b} is {a + b}.")] for a, b in numbers]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in turns]
    talks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = ["--steps", 2, "--quantize-warmup", 0]
    run(place.train("beginning", *start))
    options = ["--chat", talks, "--steps", max(20, place.steps // 4), "--lr", 3e-3, *place.compiled]
    found = run(place.words("finetune", "assistant", place.folder / "beginning", *options))
    curve = losses(place.folder / "assistant")
    first, last = statistics.mean(curve[:3]), statistics.mean(curve[-3:])
    return last < 0.8 * first, (
        f"{first:.2f} nats/token at first, {last:.2f} after {len(curve)} steps, "
        f"{found['validation']['nats_per_token']:.2f} on held-out conversations"
    )


def distil(place: Place) -> Found:
    """A full-precision model becomes ternary and learns from the original."""
    place.folder.mkdir(parents=True, exist_ok=True)
    toml = place.folder / "float.toml"
    toml.write_text("[model]\n" + FLOAT)
    before = run(place.train("float", "--config", toml, "--steps", place.steps, *place.compiled))
    options = ["--data", place.text(), "--distill", 0.5, "--steps", place.steps, "--lr", 1e-3, *place.compiled]
    after = run(place.words("finetune", "distilled", place.folder / "float", *options))
    teacher, student = (each["validation"]["nats_per_token"] for each in (before, after))
    records = [r for r in runlog.read(place.folder / "distilled" / "log.jsonl") if "divergence" in r]
    last = statistics.mean(r["divergence"] for r in records[-5:])
    return math.isfinite(student) and student < teacher + 0.3, (
        f"teacher {teacher:.3f} nats/token, ternary student {student:.3f}, divergence {last:.3f} at the end"
    )


def alone(check: Callable[[Place], Found], place: Place) -> Found:
    """Checks computed in this process run one at a time, or the memory of one would count for the other."""
    with ALONE:
        found = check(place)
        if place.device == "cuda":
            torch.cuda.empty_cache()
        return found


CHECKS: dict[str, Callable[[Place], Found]] = {
    "codes": functools.partial(alone, codes), "exactness": exactness, "resume": resume, "distil": distil,
    "context": functools.partial(alone, context), "chat": chat,
}  # fmt: skip
