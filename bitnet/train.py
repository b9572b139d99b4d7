"""`bitnet train`: from text to a checkpoint.

There is no random state to restore when a run is resumed: initial weights come from the seed,
and batch i is a pure function of the seed and i (`bitnet.data`). So on one CPU, with the same
number of threads, a run that was interrupted ends in the same bits as one that was not. Only a
budget of --minutes cannot promise that, since its schedule follows the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from bitnet import checkpoint, data, runlog, schedule, tokenizer
from bitnet.config import ModelConfig
from bitnet.evaluate import Result, check_vocabulary, evaluate
from bitnet.model import Transformer
from bitnet.quant import ternary_codes
from bitnet.settings import Settings, resolve


class TrainingError(ValueError):
    """The run cannot go on."""


def command(args: argparse.Namespace) -> int:
    """`bitnet train`. Returns 0, or 130 / 143 after saving on Ctrl-C / SIGTERM."""
    run = resolve(args)[0].run_folder
    run.mkdir(parents=True, exist_ok=True)
    with locked(run):
        saved = checkpoint.all_of(run)
        if saved and not args.resume:
            raise TrainingError(f"{run} already holds {saved[-1].name}: add --resume to go on, or name another --out")
        newest = saved[-1] if saved else None
        settings, config = resolve(args, checkpoint.load_state(newest) if newest else None)
        return train(settings, config, newest, as_json=args.json)


def train(settings: Settings, config: ModelConfig, newest: Path | None = None, as_json: bool = False) -> int:
    """The whole run, top to bottom. `newest`: the checkpoint to go on from."""
    # How and where
    settings = dataclasses.replace(settings, device=choose_device(settings.device))
    settings = dataclasses.replace(settings, precision=choose_precision(settings.precision, settings.device))
    run, device = settings.run_folder, torch.device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    keep_freed_memory()

    # Text, tokenizer, token ids
    train_texts, held_out_texts = data.split(data.documents(data.files_of(settings.data)), settings.validation)
    words = choose_tokenizer(settings, config, train_texts, newest)
    if newest is None and not Path(settings.tokenizer).is_file():
        config = config.replace(vocab_size=words.get_vocab_size())
    check_vocabulary(words, config, settings.tokenizer)
    train_tokens = data.tokenize(train_texts, words, run, "train")
    held_out = data.tokenize(held_out_texts, words, run, "validation")
    context = settings.context or config.max_context
    batches = data.Batches(train_tokens, settings.batch, context, settings.seed)

    # Model and optimizer
    torch.manual_seed(settings.seed)
    model = Transformer(config).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.95), fused=True)
    state: dict[str, Any] = {
        "step": 0, "tokens": 0, "seconds": 0.0, "data": train_tokens.digest,
        "settings": settings.to_dict(), "model": config.to_dict(),
    }  # fmt: skip
    if newest is not None:
        before = checkpoint.load_state(newest)
        if before["data"] != train_tokens.digest:
            raise TrainingError(f"{newest} was trained on other text; start another run with --out")
        checkpoint.load_weights(model, newest)
        checkpoint.load_optimizer(optimizer, model, newest)
        state |= {name: before[name] for name in ("step", "tokens", "seconds")}
    say(f"{run}: {sum(p.numel() for p in model.parameters()):,} parameters, {config.ternary_weights:,} ternary; "
        f"{len(train_tokens.ids):,} training tokens, vocabulary {config.vocab_size:,}; "
        f"{settings.precision} on {settings.device}, step {state['step']:,}")  # fmt: skip

    # The loop
    log = runlog.Log(run / "log.jsonl", state["step"])
    bar = tqdm(total=settings.steps, initial=state["step"], unit="step", disable=None, file=sys.stderr)
    started, last_saved = time.monotonic() - state["seconds"], state["step"]
    with Interruption() as interruption, contextlib.closing(log), bar:
        while (progress := progress_of(settings, state)) < 1 and not interruption.signal:
            loss, norm = update(model, optimizer, batches, settings, state["step"], progress)
            if not math.isfinite(loss + norm):
                raise TrainingError(
                    f"loss is {loss}, gradient norm {norm} at step {state['step'] + 1}; lower --lr ({settings.lr:g}); "
                    + (
                        f"the last good checkpoint is {run}/step-{last_saved:06d}"
                        if last_saved
                        else "nothing was saved"
                    )
                )
            state["step"] += 1
            state["tokens"] += settings.batch * settings.accumulate * context
            state["seconds"] = time.monotonic() - started
            rate = optimizer.param_groups[0]["lr"]
            at = {name: state[name] for name in ("step", "tokens", "seconds")}
            log.write(at | {"loss": loss, "lr": rate, "gradient_norm": norm})
            show(bar, settings, state, loss)
            if state["step"] % settings.eval_every == 0:
                result = evaluate(model, held_out, context, settings.batch, settings.eval_tokens)
                log.write(at | {"validation": dataclasses.asdict(result), "zeros": zero_fraction(model)})
                say(f"step {state['step']:,}  loss {loss:.3f}  validation {describe(result)}  lr {rate:.2g}  "
                    f"{state['tokens'] / state['seconds']:,.0f} tokens/s")  # fmt: skip
            if state["step"] % settings.save_every == 0:
                save(run, model, words, optimizer, state, settings)
                last_saved = state["step"]

        if last_saved != state["step"]:
            save(run, model, words, optimizer, state, settings)
        if interruption.signal:
            say(f"stopped and saved at step {state['step']:,}; `--resume` goes on from here")
            return 128 + interruption.signal
        result = evaluate(model, held_out, context, settings.batch)
        at = {name: state[name] for name in ("step", "tokens", "seconds")}
        log.write(at | {"validation": dataclasses.asdict(result), "zeros": zero_fraction(model)})
    runlog.plot(log.records, run / "loss.png", f"{run.name}: {describe(result)}")
    folder = checkpoint.find(run)
    if as_json:
        print(json.dumps({"checkpoint": str(folder)} | at | {"validation": dataclasses.asdict(result)}))
    else:
        print(f"{folder}: validation {describe(result)} after {state['tokens']:,} tokens, {state['seconds']:.0f} s")
    return 0


def update(
    model: Transformer, optimizer: torch.optim.Optimizer, batches: data.Batches, settings: Settings, step: int,
    progress: float,
) -> tuple[float, float]:  # fmt: skip
    """One optimizer step. Returns the loss (nats per token) and the norm of the gradient before clipping."""
    optimizer.zero_grad(set_to_none=True)
    device = model.embedding.weight.device
    total = 0.0
    for i in range(settings.accumulate):
        inputs, targets = (t.to(device) for t in batches[step * settings.accumulate + i])
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            loss = model.loss(inputs, targets) / settings.accumulate
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf).item()
    if math.isfinite(total + norm):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(settings, progress)
            group["weight_decay"] = schedule.weight_decay(settings, progress) if group["decays"] else 0.0
        optimizer.step()
    return total, norm


def progress_of(settings: Settings, state: dict[str, Any]) -> float:
    """0 at the start, 1 at the end of the budget of steps or minutes."""
    done: float = state["seconds"] / (60 * settings.minutes) if settings.minutes else state["step"] / settings.steps
    return done


def parameter_groups(model: Transformer) -> list[dict[str, Any]]:
    """Weight decay is for the matrices of the layers, not for gains, biases and embeddings."""
    named = list(model.named_parameters())
    decays = [p for name, p in named if p.dim() == 2 and name.startswith("layers.")]
    others = [p for name, p in named if p.dim() != 2 or not name.startswith("layers.")]
    return [{"params": decays, "decays": True}, {"params": others, "decays": False}]


def choose_tokenizer(settings: Settings, config: ModelConfig, texts: list[str], newest: Path | None) -> Tokenizer:
    """That of the checkpoint, of the file named, or a new one."""
    if newest is not None:
        return tokenizer.load(newest / "tokenizer.json")
    if Path(settings.tokenizer).is_file():
        return tokenizer.load(settings.tokenizer)
    return tokenizer.build(settings.tokenizer, texts, config.vocab_size)


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TrainingError("--device cuda, but torch finds no CUDA device; use --device cpu")
    return wanted


def choose_precision(wanted: str, device: str) -> str:
    """bf16 where there are instructions for it; elsewhere it would be slower than fp32, not faster."""
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return "bf16" if probe is not None and probe() else "fp32"


def zero_fraction(model: Transformer) -> float:
    """Share of the ternary weights that are 0."""
    roles = model.config.ternary
    codes = [
        ternary_codes(p, model.config.weight_scale)[0]
        for name, p in model.named_parameters()
        if name.startswith("layers.") and name.split(".")[2] in roles and p.dim() == 2
    ]
    return sum((c == 0).sum().item() for c in codes) / max(1, sum(c.numel() for c in codes))


def save(
    run: Path, model: Transformer, words: Tokenizer, optimizer: torch.optim.Optimizer, state: dict[str, Any],
    settings: Settings,
) -> None:  # fmt: skip
    checkpoint.save(run, model, words.to_str(), optimizer, state)
    checkpoint.keep_newest(run, settings.keep)


def show(bar: Any, settings: Settings, state: dict[str, Any], loss: float) -> None:
    if settings.minutes:
        bar.total = max(state["step"], round(state["step"] / max(progress_of(settings, state), 1e-9)))
    bar.set_postfix_str(f"loss {loss:.3f}, {state['tokens'] / state['seconds']:,.0f} tokens/s", refresh=False)
    bar.update()


def describe(result: Result) -> str:
    return f"{result.nats_per_token:.4f} nats/token, {result.bits_per_byte:.4f} bits/byte"


def say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


class Interruption:
    """While entered, the first Ctrl-C or SIGTERM is noted in `signal`; a second Ctrl-C acts at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> Interruption:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Refuse a second run in the same folder. The lock ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        yield
        return
    with (run / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"another run is writing to {run}; wait for it, or name another --out") from None
        yield


def keep_freed_memory() -> None:
    """Ask glibc to reuse large blocks instead of returning them to the kernel.

    Every step allocates the same activations; getting them zeroed again, page by page, costs
    up to half of the time of a step.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
