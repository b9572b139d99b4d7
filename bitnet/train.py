"""`bitnet train`: from text to a checkpoint.

There is no random state to restore when a run is resumed: initial weights come from the seed,
and batch i is a pure function of the seed and i (`bitnet.data`). So on one CPU, with the same
number of threads, a run that was interrupted ends in the same bits as one that was not. Only a
budget of --minutes cannot promise that, since its schedule follows the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from bitnet import chat, checkpoint, data, finetune, process, runlog, schedule, telemetry, tokenizer
from bitnet.bitlinear import BitLinear
from bitnet.config import ModelConfig
from bitnet.evaluate import Result, check_vocabulary, evaluate
from bitnet.model import Transformer
from bitnet.quant import ternary_codes
from bitnet.settings import Settings, resolve

RECENT = 20  # losses that a spike is held against
SKIPPED = 10  # bad steps in a row that no more data will cure


class TrainingError(ValueError):
    """The run cannot begin or go on."""


@dataclasses.dataclass
class Run:
    """What a run is made of. `state` is what a checkpoint records besides model and optimizer."""

    settings: Settings
    folder: Path
    words: Tokenizer
    batches: data.Batches | chat.Batches
    held_out: data.Tokens | chat.Dialogues
    model: Transformer
    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    template: str | None = None  # of a model that answers
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    teacher: Transformer | None = None
    terms: dict[str, float] = dataclasses.field(default_factory=dict)  # of the newest loss, and λ; for the log

    @property
    def progress(self) -> float:
        """Below 1 while the budget of steps or minutes lasts."""
        if self.settings.minutes:
            return float(self.state["seconds"] / (60 * self.settings.minutes))
        return float((self.state["step"] + 0.5) / self.settings.steps)

    def now(self) -> dict[str, Any]:
        return {name: self.state[name] for name in ("step", "tokens", "seconds")}

    def save(self) -> None:
        broken = [name for name, p in self.model.named_parameters() if not p.isfinite().all()]
        if broken:
            raise TrainingError(f"{broken[0]} holds NaN or infinity, not saved; {self.last_good()}; lower --lr")
        more = self.template, self.generation
        checkpoint.save(self.folder, self.model, self.words.to_str(), self.optimizer, self.state, *more)
        checkpoint.keep_newest(self.folder, self.settings.keep)

    def last_good(self) -> str:
        saved = checkpoint.all_of(self.folder)
        return f"{saved[-1]} is the last good checkpoint" if saved else "no checkpoint was saved"

    def evaluate(self, log: runlog.Log, limit: int = 0) -> Result:
        """Loss on the validation text, logged; `limit` 0: on all of it, which ends a run."""
        result = evaluate(self.model, self.held_out, self.batches.context, self.settings.batch, limit)
        record = self.now() | {"validation": dataclasses.asdict(result), "zeros": zero_fraction(self.model)}
        log.write(record if limit else record | {"final": True})
        return result


def command(args: argparse.Namespace, read: Callable[[str], finetune.Start] | None = None) -> int:
    """`bitnet train`, and with `read`, which opens a source, `bitnet finetune`.

    Returns 0, or 130 / 143 after saving on Ctrl-C / SIGTERM.
    """
    start = read(args.source) if read else None
    base = start.defaults() if start else None
    folder = resolve(args, base=base)[0].run_folder
    folder.mkdir(parents=True, exist_ok=True)
    with process.locked(folder):
        saved = checkpoint.all_of(folder)
        if saved and not args.resume:
            raise TrainingError(
                f"{folder} already holds {saved[-1].name}; add --resume to go on, or name another --out"
            )
        newest = saved[-1] if saved else None
        settings, config = resolve(args, checkpoint.load_state(newest) if newest else None, base)
        other = read(settings.teacher) if read and settings.teacher and settings.distill else start
        return train(settings, config, newest, as_json=args.json, start=start, teacher=other)


def train(
    settings: Settings,
    config: ModelConfig,
    newest: Path | None = None,
    as_json: bool = False,
    start: finetune.Start | None = None,
    teacher: finetune.Start | None = None,
) -> int:
    """A whole run. `newest`: the checkpoint to go on from; `start`: the model to begin with. Returns the exit code."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    process.keep_freed_memory()
    run = prepare(settings, config, newest, start)
    if settings.distill:
        if teacher is None:
            raise TrainingError("a run that is distilled goes on with its teacher: `bitnet finetune SRC --resume`")
        run.teacher = finetune.teacher(teacher, run.settings, run.model.config, run.words)
    with contextlib.closing(runlog.Log(run.folder / "log.jsonl", run.state["step"], settings.tensorboard)) as log:
        stopped_by = loop(run, log)
        if stopped_by:
            say(f"stopped and saved at step {run.state['step']:,}; --resume goes on from here")
            return 128 + stopped_by
        result = run.evaluate(log)
    runlog.plot(log.records, run.folder / "loss.png", f"{run.folder.name}: {describe(result)}")
    folder = checkpoint.find(run.folder)
    if as_json:
        print(json.dumps({"checkpoint": str(folder)} | run.now() | {"validation": dataclasses.asdict(result)}))
    else:
        spent = f"{run.state['tokens']:,} tokens, {run.state['seconds']:.0f} s"
        print(f"{folder}: validation {describe(result)} after {spent}")
    return 0


def prepare(settings: Settings, config: ModelConfig, newest: Path | None, start: finetune.Start | None = None) -> Run:
    """Text, tokenizer, token ids, model and optimizer, new or as `newest` or `start` has them."""
    device = choose_device(settings.device)
    settings = dataclasses.replace(settings, device=device, precision=choose_precision(settings.precision, device))
    folder = settings.run_folder
    folder.mkdir(parents=True, exist_ok=True)

    words, template, generation, batches, held_out = read_data(settings, config, newest, start)
    if newest is None and (start or settings.chat):  # a template may have brought tokens
        config = config.replace(vocab_size=max(config.vocab_size, words.get_vocab_size()))
    if newest is None and not start and not Path(settings.tokenizer).is_file():
        config = config.replace(vocab_size=words.get_vocab_size())
    check_vocabulary(words, config, start.what if start else settings.tokenizer)

    torch.manual_seed(settings.seed)
    if start is None or newest is not None:
        model = Transformer(config).to(device)
    else:
        model = begin(start, config, batches, device)
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.95), fused=True)
    state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "data": batches.tokens.digest}
    state |= {"recent": [], "skipped": 0}  # losses of the last good steps; bad steps since
    if newest is not None:
        before = checkpoint.load_state(newest)
        if before["data"] != batches.tokens.digest:
            raise TrainingError(f"{newest} was trained on other text; start another run with --out")
        checkpoint.load_weights(model, newest)
        checkpoint.load_optimizer(optimizer, model, newest)
        state |= {name: before[name] for name in state.keys() & before.keys()}
    state |= {"settings": settings.to_dict(), "model": config.to_dict()}
    say(
        f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {config.ternary_weights:,} ternary; "
        f"{batches.tokens.n_tokens:,} training tokens, vocabulary {config.vocab_size:,}; "
        f"{settings.precision} on {device}, from step {state['step']:,}"
    )
    return Run(settings, folder, words, batches, held_out, model, optimizer, state, template, generation)


def read_data(
    settings: Settings, config: ModelConfig, newest: Path | None, start: finetune.Start | None
) -> tuple[Tokenizer, str | None, dict[str, Any], data.Batches | chat.Batches, data.Tokens | chat.Dialogues]:
    """Tokenizer, chat template, generation defaults, training batches and validation tokens."""
    texts: tuple[list[str], list[str]] = [], []
    talks: tuple[list[chat.Conversation], list[chat.Conversation]] = [], []
    if settings.chat:
        talks = chat.split(chat.read(data.files_of(settings.chat)), settings.validation)
        texts = [m["content"] for talk in talks[0] for m in talk.messages], []
    else:
        texts = data.split(data.documents(data.files_of(settings.data)), settings.validation)
    words = start.words if start and newest is None else choose_tokenizer(settings, config, texts[0], newest)
    template, generation = (start.template, start.generation) if start else (None, {})
    if newest is not None:
        template, generation = checkpoint.load_template(newest), checkpoint.load_generation(newest)
    context = settings.context or config.max_context
    if settings.chat:
        template, generation = chat.with_template(words, template, generation)
        encoder = chat.Encoder(words, template, generation)
        dialogues, others = (chat.Dialogues(side, encoder, words) for side in talks)
        if cut := dialogues.too_long(context):
            say(f"{cut:,} conversations are longer than {context:,} tokens and lose their end; see --context")
        return words, template, generation, chat.Batches(dialogues, settings.batch, context, settings.seed), others
    first = tokenizer.separator(words, generation)
    tokens, held_out = (
        data.tokenize(side, words, settings.run_folder, name, first)
        for side, name in zip(texts, ("train", "validation"), strict=True)
    )
    return words, template, generation, data.Batches(tokens, settings.batch, context, settings.seed), held_out


def begin(start: finetune.Start, config: ModelConfig, batches: data.Batches | chat.Batches, device: str) -> Transformer:
    """The model that a finetuning begins with; norms that were added are calibrated on the first batch."""
    model, inserted = finetune.build(start, config)
    model = model.to(device)
    if inserted:
        inputs, _, *documents = (t.to(device) for t in batches[0])
        finetune.calibrate(model, inserted, inputs, *documents)
    for line in (start.what, *start.assumptions, *[f"added {len(inserted)} norms, calibrated"][: len(inserted)]):
        say(line)
    return model


def loop(run: Run, log: runlog.Log) -> int:
    """Steps, evaluations and checkpoints until the budget is spent. Returns the signal that stopped it, or 0."""
    settings, state = run.settings, run.state
    started, last_saved = time.monotonic() - state["seconds"], state["step"]
    bar = tqdm(total=settings.steps, initial=state["step"], unit="step", disable=None, file=sys.stderr)
    with process.Interruption() as interruption, bar:
        while run.progress < 1 and not interruption.signal:
            due = settings.layers_every and (state["step"] + 1) % settings.layers_every == 0
            with telemetry.Probe(run.model) if due else contextlib.nullcontext() as probe:
                loss, norm = update(run)
            problem = bad_step(run, loss, norm)
            if problem:
                skip_or_stop(run, problem)
            state["step"] += 1
            state["tokens"] += settings.batch * settings.accumulate * run.batches.context
            state["seconds"] = time.monotonic() - started
            rate = run.optimizer.param_groups[0]["lr"]
            speed = f"{state['tokens'] / state['seconds']:,.0f} tokens/s"
            if problem:
                log.write(run.now() | {"skipped": problem})
            else:
                state |= {"recent": [*state["recent"], loss][-RECENT:], "skipped": 0}
                layers = {"layers": probe.record()} if probe else {}
                log.write(run.now() | {"loss": loss, "lr": rate, "gradient_norm": norm} | run.terms | layers)
            if settings.minutes:
                bar.total = round(state["step"] / run.progress)
            bar.set_postfix_str(f"loss {loss:.3f}, {speed}", refresh=False)
            bar.update()
            if state["step"] % settings.eval_every == 0:
                result = run.evaluate(log, settings.eval_tokens)
                say(f"step {state['step']:,}: loss {loss:.3f}, validation {describe(result)}, lr {rate:.2g}, {speed}")
            if state["step"] % settings.save_every == 0:
                run.save()
                last_saved = state["step"]
    if last_saved != state["step"]:
        run.save()
    return interruption.signal


def bad_step(run: Run, loss: float, norm: float) -> str:
    """Why the weights must not follow this gradient; "" when they may."""
    if not math.isfinite(loss + norm):
        return f"loss is {loss}, gradient norm {norm}"
    limit, recent = run.settings.spike, run.state["recent"]
    if limit and len(recent) == RECENT and loss > (usual := statistics.median(recent)) + limit:
        return f"loss is {loss:.3f}, {loss - usual:.3f} above the median of {RECENT} steps"
    return ""


def skip_or_stop(run: Run, problem: str) -> None:
    """Count a bad step, whose gradient `update` has not applied. Raises TrainingError unless it may be skipped."""
    settings, state = run.settings, run.state
    problem += f" at step {state['step'] + 1:,}"
    state["skipped"] += 1
    advice = f"lower --lr (now {settings.lr:g}); {run.last_good()}"
    if settings.on_bad_step == "stop":
        raise TrainingError(f"{problem}; {advice}")
    if state["skipped"] >= SKIPPED:
        raise TrainingError(f"{problem}, the {SKIPPED}th bad step in a row; {advice}")
    say(f"{problem}; skipped")


def update(run: Run) -> tuple[float, float]:
    """One optimizer step. Returns the loss (nats per token) and the norm of the gradient before clipping."""
    settings, model, optimizer = run.settings, run.model, run.optimizer
    device = torch.device(settings.device)
    optimizer.zero_grad(set_to_none=True)
    first, total = run.state["step"] * settings.accumulate, 0.0
    batches = [run.batches[first + i] for i in range(settings.accumulate)]
    counted = sum(int((targets != data.IGNORED).sum()) for _, targets, *_ in batches)
    amount = schedule.quantization(settings, run.progress)
    shares = {"cross_entropy": 1 - settings.distill} | ({"divergence": settings.distill} if run.teacher else {})
    run.terms = {"quantized": amount} if settings.quantize_warmup else {}
    run.terms |= dict.fromkeys(shares, 0.0) if run.teacher else {}
    for batch in batches:
        on_device = [tensor.to(device) for tensor in batch]
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
        with model.partly_quantized(amount), autocast:
            terms = loss_terms(run, *on_device)
        means = {name: term / counted for name, term in terms.items()}
        loss = torch.stack([share * means[name] for name, share in shares.items()]).sum()
        loss.backward()
        total += loss.item()
        for name in means if run.teacher else ():
            run.terms[name] += means[name].item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf).item()
    if not bad_step(run, total, norm):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(settings, run.progress)
            group["weight_decay"] = schedule.weight_decay(settings, run.progress) if group["decays"] else 0.0
        optimizer.step()
    return total, norm


def loss_terms(run: Run, inputs: Tensor, targets: Tensor, *documents: Tensor) -> dict[str, Tensor]:
    """Sums over the targets that count, in nats: cross-entropy, and with a teacher the divergence from it."""
    logits_NV, targets_N = run.model(inputs, *documents).flatten(0, 1), targets.flatten()
    terms = {"cross_entropy": F.cross_entropy(logits_NV, targets_N, reduction="sum")}
    if run.teacher is not None:
        with torch.no_grad():
            taught_NV = run.teacher(inputs, *documents).flatten(0, 1)
        temperature = run.settings.distill_temperature
        terms["divergence"] = finetune.divergence(logits_NV, taught_NV, targets_N, temperature)
    return terms


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
    layers = [m for m in model.modules() if isinstance(m, BitLinear)]
    zeros = sum(int((ternary_codes(m.weight, m.scope)[0] == 0).sum()) for m in layers)
    return zeros / max(1, sum(m.weight.numel() for m in layers))


def describe(result: Result) -> str:
    return f"{result.nats_per_token:.4f} nats/token, {result.bits_per_byte:.4f} bits/byte"


def say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
