"""What a training run is made of, and how it is put together from its settings."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from bitnet import chat, checkpoint, compiler, corpus, data, distill, finetune, optimizers, parallel, runlog, tokenizer
from bitnet.bitlinear import BitLinear
from bitnet.config import ModelConfig
from bitnet.evaluate import Result, check_vocabulary, evaluate
from bitnet.model import Transformer
from bitnet.quant import ternary_codes
from bitnet.settings import Settings


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
    sequences: int  # in an optimizer step, of all processes together
    model: Transformer
    forward: nn.Module  # what a step calls: the model, or DDP around it
    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    template: str | None = None  # of a model that answers
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    distillation: distill.Distillation | None = None
    terms: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the newest loss, and λ; for the log

    @property
    def progress(self) -> float:
        """Below 1 while the budget of steps or minutes lasts."""
        if self.settings.minutes:
            return float(self.state["seconds"] / (60 * self.settings.minutes))
        return float((self.state["step"] + 0.5) / self.settings.steps)

    def now(self) -> dict[str, Any]:
        return {name: self.state[name] for name in ("step", "tokens", "seconds")}

    def save(self) -> None:
        parameters = dict(self.model.named_parameters())
        broken = parallel.largest([float(not parallel.kept(p).isfinite().all()) for p in parameters.values()])
        if any(broken):
            name = list(parameters)[broken.index(1)]
            raise TrainingError(f"{name} holds NaN or infinity, not saved; {self.last_good()}; lower --lr")
        more = self.template, self.generation
        checkpoint.save(self.folder, self.model, self.words.to_str(), self.optimizer, self.state, *more)
        if parallel.is_first():
            checkpoint.keep_newest(self.folder, self.settings.keep)

    def open_log(self) -> runlog.Log:
        """Going on after the steps that were made."""
        if not parallel.is_first():
            return runlog.Silent()
        return runlog.Log(self.folder / "log.jsonl", self.state["step"], self.settings.tensorboard)

    def last_good(self) -> str:
        saved = checkpoint.all_of(self.folder)
        return f"{saved[-1]} is the last good checkpoint" if saved else "no checkpoint was saved"

    def evaluate(self, log: runlog.Log, limit: int = 0) -> Result:
        """Loss on the validation text, logged; `limit` 0: on all of it, which ends a run."""
        with compiler.eagerly():
            result = evaluate(self.model, self.held_out, self.batches.context, self.settings.batch, limit)
        record = self.now() | {"validation": dataclasses.asdict(result), "zeros": zero_fraction(self.model)}
        log.write(record if limit else record | {"final": True})
        return result


def prepare(settings: Settings, config: ModelConfig, newest: Path | None, start: finetune.Start | None = None) -> Run:
    """Text, tokenizer, token ids, model and optimizer, new or as `newest` or `start` has them."""
    device = choose_device(settings.device)
    if device == "cuda" and parallel.launched():
        parallel.take_gpu()
    settings = dataclasses.replace(settings, device=device, precision=choose_precision(settings.precision, device))
    folder = settings.run_folder
    folder.mkdir(parents=True, exist_ok=True)

    words, template, generation, batches, held_out = read_data(settings, config, newest, start)
    if newest is None and (start or settings.chat):  # a template may have brought tokens
        config = config.replace(vocab_size=max(config.vocab_size, words.get_vocab_size()))
    if newest is None and not start and not Path(settings.tokenizer).is_file():
        config = config.replace(vocab_size=words.get_vocab_size())
    check_vocabulary(words, config, start.what if start else settings.tokenizer)

    sequences = sequences_of_step(settings, batches.context)
    model, forward = build_model(settings, config, None if newest else start, batches)
    model.recompute = settings.recompute
    if settings.compile:
        compiler.compile_layers(model)
    optimizer = optimizers.build(model, settings)
    state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "data": batches.tokens.digest}
    state |= {"recent": [], "skipped": 0}  # losses of the last good steps; bad steps since
    state |= {"sizes": {}}  # running means of the loss's terms, where they are balanced
    if newest is not None:
        before = checkpoint.load_state(newest)
        if before["data"] != batches.tokens.digest:
            raise TrainingError(f"{newest} was trained on other text; start another run with --out")
        if (kept := before["settings"].get("optimizer", "adamw")) != settings.optimizer:
            raise TrainingError(f"{newest} holds the moments of {kept}; go on without --optimizer {settings.optimizer}")
        checkpoint.load_weights(model, newest)
        checkpoint.load_optimizer(optimizer, model, newest)
        state |= {name: before[name] for name in state.keys() & before.keys()}
    state |= {"settings": settings.to_dict(), "model": config.to_dict()}
    say(
        f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {config.ternary_weights:,} ternary; "
        f"{batches.tokens.n_tokens:,} training tokens, vocabulary {config.vocab_size:,}; "
        f"{settings.precision} on {device}, from step {state['step']:,}"
    )
    parts = words, batches, held_out, sequences, model, forward, optimizer
    return Run(settings, folder, *parts, state, template, generation)


def read_data(
    settings: Settings, config: ModelConfig, newest: Path | None, start: finetune.Start | None
) -> tuple[Tokenizer, str | None, dict[str, Any], data.Batches | chat.Batches, data.Tokens | chat.Dialogues]:
    """Tokenizer, chat template, generation defaults, training batches and validation tokens."""
    template, generation = (start.template, start.generation) if start else (None, {})
    if newest is not None:
        template, generation = checkpoint.load_template(newest), checkpoint.load_generation(newest)
    context = settings.context or config.max_context

    def choose(texts: Iterable[str]) -> Tokenizer:
        return start.words if start and newest is None else choose_tokenizer(settings, config, texts, newest)

    if settings.chat:
        talks = chat.split(chat.read(corpus.files_of(settings.chat)), settings.validation)
        words = parallel.from_first(lambda: choose(m["content"] for talk in talks[0] for m in talk.messages))
        words.encode_special_tokens = True  # which does not go from one process to another
        template, generation = chat.with_template(words, template, generation)
        encoder = chat.Encoder(words, template, generation)
        dialogues, others = (chat.Dialogues(side, encoder, words) for side in talks)
        if cut := dialogues.too_long(context):
            say(f"{cut:,} conversations are longer than {context:,} tokens and lose their end; see --context")
        return words, template, generation, chat.Batches(dialogues, settings.batch, context, settings.seed), others

    def read() -> tuple[Tokenizer, data.Tokens, data.Tokens]:
        sides = corpus.split(corpus.Documents(settings.data), settings.validation)
        words = choose(sides[0])
        first, folder = tokenizer.separator(words, generation), settings.run_folder
        train = data.tokenize(sides[0], words, folder, "train", first)
        held_out = data.tokenize(sides[1], words, folder, "validation", first)
        return words, train, held_out

    words, tokens, held_out = parallel.from_first(read)  # the others map the files
    words.encode_special_tokens = True
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


def choose_tokenizer(settings: Settings, config: ModelConfig, texts: Iterable[str], newest: Path | None) -> Tokenizer:
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


def sequences_of_step(settings: Settings, context: int) -> int:
    """How many an optimizer step has. Raises TrainingError when they cannot be dealt out to the processes."""
    tokens, processes = settings.batch_tokens or settings.batch * settings.accumulate * context, parallel.size()
    if tokens % (context * processes):
        what = "--batch-tokens" if settings.batch_tokens else "--batch or --accumulate"
        raise TrainingError(
            f"an optimizer step has {tokens:,} tokens, expected a multiple of {context * processes:,}: "
            f"sequences of {context:,} tokens, dealt out to {processes} processes; change {what}"
        )
    return tokens // context


def build_model(
    settings: Settings, config: ModelConfig, start: finetune.Start | None, batches: data.Batches | chat.Batches
) -> tuple[Transformer, nn.Module]:
    """The model at the start of a run, and what a training step calls. The seed gives the same in every process."""
    sharded = parallel.launched() and settings.parallel == "fsdp"
    torch.manual_seed(settings.seed)
    with torch.device("meta") if sharded and not parallel.is_first() else contextlib.nullcontext():
        if start and (parallel.is_first() or not sharded):
            model = begin(start, config, batches, "cpu" if sharded else settings.device)
        else:
            model = Transformer(config)
    if sharded:
        rows = min(len(weight) for weight in optimizers.of_layers(model)[0])
        if settings.optimizer == "muon" and rows < parallel.size():
            raise TrainingError(
                f"--optimizer muon cannot share a matrix of {rows} rows among {parallel.size()} processes; "
                "take fewer of them, --parallel ddp, or --optimizer adamw"
            )
        parallel.shard(model, settings.device)
        return model, model
    model = model.to(settings.device)
    return model, parallel.replicated(model, settings.device) if parallel.launched() else model


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
    zeros = sum(int((ternary_codes(parallel.whole(m.weight), m.scope)[0] == 0).sum()) for m in layers)
    return zeros / max(1, sum(m.weight.numel() for m in layers))


def describe(result: Result) -> str:
    return f"{result.nats_per_token:.4f} nats/token, {result.bits_per_byte:.4f} bits/byte"


def say(line: str) -> None:
    if parallel.is_first():
        tqdm.write(line, file=sys.stderr)
