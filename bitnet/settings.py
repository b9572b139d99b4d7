"""The options of a training run, and their defaults. Imports no torch: the command line is built from these fields."""

# ruff: noqa: RUF009  (`option` is `field`)
from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bitnet.other_names import placed
from bitnet.settings_rules import CHOICES as CHOICES
from bitnet.settings_rules import CONVERSION as CONVERSION
from bitnet.settings_rules import SOURCES as SOURCES
from bitnet.settings_rules import TEXT as TEXT
from bitnet.settings_rules import check, check_values
from bitnet.settings_rules import flag_of as flag_of
from bitnet.sizes import SIZES, training_of

ALTERNATIVES = (("steps", "minutes", "tokens", "tokens_per_parameter"), ("accumulate", "batch_tokens"))
"""Mutually exclusive options: the one given last counts. The first of a group applies if none is given."""


def option(default: Any, text: str) -> Any:
    """A field with the sentence that --help prints for it."""
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**factory, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every option of `bitnet train` and `bitnet finetune` except the model's own (`ModelConfig`)."""

    preset: str = option(
        "tiny",
        "defaults of model and training: tiny, gguf, mini-gpt, mini-gpt-learned, thinker, thinker-moe, "
        "transformer-2017, transformer-2017-encoder, bitnet-2b4t, siglip-tiny or paligemma-tiny; of these only gguf, "
        "with the tokenizer llama-bpe, can become a GGUF file that takes text; or by size: 1m, 3m, 10m, 30m, 100m, "
        "300m, 1b",
    )
    data: list[str] = option(
        [],
        "text: files, globs, folders (their .txt .md .rst .py .jsonl .parquet files, also as .gz and .zst), "
        "hf:NAME:SPLIT, or a folder from bitnet tokenize; none: for finetune the data of SRC, otherwise Python's "
        "standard library; for a model with vision: .jsonl, .csv or folders of images and texts",
    )
    column: str = option("text", "the field of a line, or of a table's row, that holds the text")
    mixture: str = option(
        "", "instead of --data: a TOML file of sources, their shares and stages; docs/data.md describes it"
    )
    documents: bool = option(
        False, "document masking: attention stays within a document; for the next token, without prefixes"
    )
    chat: list[str] = option([], "instead of --data: .jsonl files of conversations, to learn the answers (SFT)")
    preference: list[str] = option(
        [],
        "instead of --data: .jsonl files of prompts with a preferred and a rejected answer, for DPO; see "
        "docs/finetune.md",
    )
    out: str = option("", "run folder; none: runs/<preset>, or for finetune runs/<name of SRC>")
    draft: bool = option(
        False,
        "also train a draft head, for speculative decoding, without changing the model; see docs/drafts.md",
    )
    draft_only: bool = option(False, "train only the draft; the model stays as it is")
    self_written: int = option(
        0, "with --draft-only, tokens that the model writes: the draft learns from them and from as many of --data"
    )
    tokenizer: str = option(
        "bpe", "bpe, llama-bpe (which llama.cpp supports), byte or char, or the path of a tokenizer.json"
    )
    validation: float = option(0.05, "share of the documents kept for validation")

    objective: str = option(
        "next",
        "next: the next token, with images that of the answer; mlm: masked tokens, for a bidirectional model; "
        "contrastive: which texts, or texts and images, belong together, for a model without a head",
    )
    fim: float = option(
        0.0, "share of the documents whose middle is moved to the end, to learn to fill gaps; usual: 0.5"
    )
    temperature: float = option(0.05, "divisor of the similarities of texts; for contrastive")
    contrastive_loss: str = option(
        "sigmoid",
        "for texts and images: sigmoid judges each pair by itself, softmax one among all; the scale is learnt",
    )
    augment: str = option(
        "none",
        "what is done to images each time: crop to four fifths of the area or more; crop-flip: mirror half, too",
    )
    vision: str = option("", "a run, a checkpoint or a Hugging Face folder whose vision stack the model begins with")
    freeze_vision: bool = option(False, "keep that stack as it is, except for its projector")

    steps: int = option(1000, "optimizer steps; a finished run goes on with more of them and --resume")
    minutes: float = option(0.0, "train this long instead of --steps; the schedule follows the clock; 0: --steps")
    tokens: float = option(0.0, "tokens to learn from instead of --steps, such as 20e6; 0: --steps")
    tokens_per_parameter: float = option(
        0.0, "tokens for each parameter, counted as in the first line of a run; usual: 20; 0: --steps"
    )
    batch: int = option(16, "sequences in a forward pass of one process, at most")
    accumulate: int = option(
        1, "gradient accumulation: forward passes in an optimizer step; several processes share them"
    )
    batch_tokens: int = option(0, "tokens in an optimizer step, instead of --accumulate; 0: use --accumulate")
    context: int = option(0, "tokens in a sequence; 0: the model's max_context")
    seed: int = option(0, "seed of initial weights and of the order of the data")

    optimizer: str = option("muon", "adamw, or muon for the matrices of the layers and adamw for the rest")
    lr: float = option(4e-3, "peak learning rate")
    embedding_lr: float = option(
        0.0, "learning rate of embeddings, head, gains and biases, which AdamW trains; 0: --lr"
    )
    schedule: str = option(
        "constant", "constant: then down to 0 over --warmdown (WSD); cosine; two_stage: as in the BitNet paper"
    )
    warmup: float = option(0.02, "share of the run, or number of tokens, in which the learning rate rises")
    warmdown: float = option(0.3, "share of the run, or number of tokens, in which the learning rate falls to zero")
    weight_decay: float = option(0.1, "weight decay of matrices, in the first half of the run; then 0")
    quantize_warmup: float = option(
        0.7,
        "share of the run, or number of tokens, in which weights and activations change from float to quantized; "
        "as a share 0.9 at most, in finetune 0.5",
    )
    beta: float = option(
        0.1,
        "for --preference: the reward of a nat that an answer gains; a larger one stays nearer to the source",
    )
    balance_loss: float = option(
        0.0, "weight of the load-balancing loss, which is from 1 to the number of experts; usual: 0.01"
    )
    clip: float = option(1.0, "largest norm of the gradient; 0: no limit")
    spike: float = option(0.0, "nats by which a loss may exceed the median of the 20 before it; 0: any number")
    on_bad_step: str = option("stop", "after NaN, infinity or a spike: stop, or skip the step (10 in a row also stop)")

    source: str = option("", "a checkpoint or run folder, or a Hugging Face folder with float weights")
    distill: float = option(0.0, "share of the loss, 0 to 1, that is the KL divergence from a teacher's probabilities")
    distill_temperature: float = option(1.0, "divisor of both models' logits before they are compared")
    distill_relations: float = option(
        0.0,
        "share of the loss, 0 to 1, that is the distance from the relations between tokens in a layer of the teacher",
    )
    distill_layer: int = option(0, "that layer, counted from the last, which is 1; 0: a third of the way to the first")
    distill_features: float = option(
        0.0, "share of the loss, 0 to 1, that is the distance from the teacher's features of images"
    )
    teacher: str = option(
        "",
        "model to distill from, as SRC, with the same tokenizer; for features any that sees images; none: the source",
    )

    lora: int = option(
        0, "rank of LoRA adapters to train instead of the model, which must be ternary and stays as it is; 0: none"
    )
    lora_alpha: float = option(0.0, "the adapters' weight is alpha / rank; 0: twice the rank")
    lora_linears: list[str] = option(
        [], "linear layers with an adapter, of q k v o gate up down; none: all that are ternary"
    )

    precision: str = option("auto", "precision of the backward products; auto: bf16 if the CPU or GPU multiplies it")
    device: str = option("auto", "cpu or cuda; auto: cuda when there is one")
    parallel: str = option("auto", "under torchrun: ddp (data parallel) or fsdp (fully sharded, ZeRO-3); auto: ddp")
    threads: int = option(0, "CPU threads, at most one for each core; 0: torch's default, or OMP_NUM_THREADS")
    compile: bool = option(False, "compile the layers: a minute at the start, then faster steps; see docs/train.md")
    recompute: bool = option(False, "activation checkpointing in the backward pass: a quarter more time, less memory")
    eval_every: int = option(
        0,
        "steps between evaluations; 0: 200, or ten in a shorter run, or fewer, so that they and the last one read no "
        "more tokens than training",
    )
    eval_tokens: int = option(32_768, "tokens of an evaluation; the last one takes up to eight times as many")
    tasks: str = option(
        "",
        "tasks to evaluate during the run: names of lm-evaluation-harness, or .yaml and .yml files, comma-separated",
    )
    tasks_every: int = option(0, "steps between these tasks; 0: only before the first step and after the last")
    tasks_limit: int = option(100, "questions of each task, the first ones; 0: all")
    save_every: int = option(500, "steps between checkpoints")
    save_minutes: float = option(10.0, "most minutes between checkpoints; 0: by steps alone")
    keep: int = option(2, "checkpoints to keep, besides the one from before the learning rate falls")
    keep_best: bool = option(False, "save at each best evaluation, and keep that checkpoint; the same for tasks")
    patience: int = option(0, "end the run after this many evaluations in a row without a better one; 0: never")
    layers_every: int = option(20, "steps between records of each layer's codes, scales and inputs; 0: none")
    profile: int = option(
        0, "steps to record with torch.profiler, after the first eleven, as a table and in trace.json; 0: none"
    )
    report_to: str = option("none", "also send the numbers of log.jsonl to tensorboard, wandb or trackio")

    def __post_init__(self) -> None:
        check(self)

    @property
    def distilled(self) -> float:
        return self.distill + self.distill_relations + self.distill_features

    @property
    def budget(self) -> tuple[str, float]:
        """The length of the run: the option that sets it, and its value."""
        return next((name, value) for name in reversed(ALTERNATIVES[0]) if (value := getattr(self, name)))

    @property
    def run_folder(self) -> Path:
        return Path(self.out or f"runs/{Path(self.source).resolve().name if self.source else self.preset}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Strict, as `check_given` is."""
        cls.check_given(values)
        return cls(**values)

    @classmethod
    def check_given(cls, values: dict[str, Any]) -> None:
        """Raises ValueError: an unknown name, with the nearest valid one; a wrong type, with the right one; or a value
        that no run has."""
        types = {name: type(value) for name, value in vars(cls()).items()}
        for name, value in values.items():
            if name not in types:
                from bitnet_runtime.errors import did_you_mean  # loads the engine

                near = placed(name) or did_you_mean(name, types)
                raise ValueError(f"unknown training option {name!r}{near or '; docs/options.md lists them'}")
            if types[name] is float and type(value) is int:
                continue
            if types[name] is list:
                _check_list(name, value)
            elif type(value) is not types[name]:
                raise ValueError(f"{name} is {value!r:.60}, expected {WORDS[types[name]]}")
        check_values(values)


WORDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _check_list(name: str, value: object) -> None:
    """Raises ValueError: it is no list of strings."""
    if isinstance(value, str):
        raise ValueError(f'{name} is {value!r}, expected a list, such as ["{value}"]')
    if type(value) is not list:
        found = " ".join(f"{value!r:.60}".split())  # a dataset takes several lines
        more = " of files, folders, globs or hf:NAME; put texts that you have into a .jsonl file"
        raise ValueError(f"{name} is {found}, expected a list" + more * (name in SOURCES))
    if strange := [each for each in value if not isinstance(each, str)]:
        raise ValueError(f"{name} has {strange[0]!r:.60}, expected strings")


PRESET_SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 8e-3, "batch": 8, "steps": 1500},
    "gguf": {"lr": 8e-3, "batch": 8, "steps": 1500, "tokenizer": "llama-bpe"},
    "mini-gpt": {"lr": 8e-3, "batch": 8, "steps": 1500, "tokenizer": "char"},
    "mini-gpt-learned": {"lr": 8e-3, "batch": 8, "steps": 1500, "tokenizer": "char"},
    "thinker": {"batch": 8, "steps": 5000},
    "thinker-moe": {"batch": 8, "steps": 5000},
    "transformer-2017": {"batch": 8, "accumulate": 6, "steps": 100_000},
    "transformer-2017-encoder": {"objective": "mlm", "batch": 8, "accumulate": 6, "steps": 100_000},
    "bitnet-2b4t": {  # as published
        "lr": 1.2e-3, "optimizer": "adamw", "schedule": "two_stage", "quantize_warmup": 0.0, "batch": 1,
        "accumulate": 256, "steps": 100_000,
    },
    "siglip-tiny": {"objective": "contrastive", "lr": 3e-3, "batch": 64, "steps": 2000},
    "paligemma-tiny": {"lr": 3e-3, "batch": 64, "steps": 4000, "quantize_warmup": 0.0},
}  # fmt: skip
PRESET_SETTINGS |= {name: training_of(parameters) for name, parameters in SIZES.items()}
"""How the training options of a preset differ from the defaults."""


FINETUNE_SETTINGS: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.0}
"""How the defaults of `bitnet finetune` differ: gentler, so that the source is not forgotten."""

CONTEXT = 1024  # default of finetuning: published models state what they support, not what fits into memory
