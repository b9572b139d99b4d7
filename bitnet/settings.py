"""What a training run is told: a preset, then a TOML file, then flags; each wins over the one before.

    preset = "tiny"
    [train]
    lr = 0.004
    [model]
    dim = 256

Imports no torch: the command line is built from these fields.
"""

# ruff: noqa: RUF009  (`option` is `field`)
from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bitnet.config import PRESETS, ModelConfig

CHOICES = {
    "optimizer": ("adamw", "muon"),
    "schedule": ("constant", "cosine", "two_stage"),
    "precision": ("auto", "fp32", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "on_bad_step": ("stop", "skip"),
    "parallel": ("auto", "ddp", "fsdp"),
}


def option(default: Any, text: str) -> Any:
    """A field with the sentence that --help prints for it."""
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**factory, metadata={"help": text})


CONVERSION = ("source", "distill", "distill_temperature", "distill_relations", "distill_layer", "teacher")
"""Options of `bitnet finetune` alone."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every option of `bitnet train` and `bitnet finetune` except the model's own (`ModelConfig`)."""

    preset: str = option(
        "tiny",
        f"where model and training start from: {', '.join(PRESETS)}; of those to train only gguf, with the tokenizer "
        "llama-bpe, becomes a GGUF file that takes text",
    )
    data: list[str] = option(
        [], "files, folders or globs of .txt .py .md .jsonl, or hf:NAME:SPLIT; none: Python's standard library"
    )
    chat: list[str] = option([], "instead of --data: .jsonl files of conversations, to learn the answers")
    out: str = option("", "run folder; none: runs/<preset>, or runs/<name of the source>")
    tokenizer: str = option(
        "bpe", "bpe, llama-bpe (which llama.cpp has too), byte or char, or the path of a tokenizer.json"
    )
    validation: float = option(0.05, "share of the documents kept for validation")

    steps: int = option(1000, "optimizer steps")
    minutes: float = option(0.0, "train this long instead of a number of steps; the schedule follows the clock")
    batch: int = option(16, "sequences in a forward pass of one process, at most")
    accumulate: int = option(1, "forward passes in an optimizer step; several processes share them")
    batch_tokens: int = option(0, "tokens in an optimizer step, instead of --accumulate; 0: as that says")
    context: int = option(0, "tokens in a sequence; 0: the model's max_context")
    seed: int = option(0, "of initial weights and of the order of the data")

    optimizer: str = option("muon", "adamw, or muon for the matrices of the layers and adamw for the rest")
    lr: float = option(4e-3, "peak learning rate")
    schedule: str = option(
        "constant", "constant: then down to 0 over --warmdown; cosine; two_stage: of the BitNet paper"
    )
    warmup: float = option(0.02, "share of the run in which the learning rate rises")
    warmdown: float = option(0.3, "share of the run in which the learning rate falls to zero")
    weight_decay: float = option(0.1, "of matrices, in the first half of the run; then 0")
    quantize_warmup: float = option(
        0.7, "share of the run in which weights and activations go over from float to quantized; finetune: 0.5 at most"
    )
    clip: float = option(1.0, "largest norm of the gradient; 0: no limit")
    spike: float = option(0.0, "nats by which a loss may exceed the median of the 20 before it; 0: any number")
    on_bad_step: str = option("stop", "after NaN, infinity or a spike: stop, or skip the step (10 in a row stop, too)")

    source: str = option("", "a checkpoint or run folder, or a Hugging Face folder with float weights")
    distill: float = option(0.0, "share of the loss, 0 to 1, that is the divergence from a teacher's probabilities")
    distill_temperature: float = option(1.0, "by which logits are divided before they are compared")
    distill_relations: float = option(
        0.0, "share of the loss, 0 to 1, that is the distance from how a layer of the teacher relates the tokens"
    )
    distill_layer: int = option(0, "that layer, counted from the last, which is 1; 0: a third of the way to the first")
    teacher: str = option("", "whom to distill from, as SRC with the same tokenizer; none: the source itself")

    precision: str = option("auto", "of the backward products; auto: bf16 where the CPU or GPU multiplies it")
    device: str = option("auto", "cpu or cuda; auto: cuda when there is one")
    parallel: str = option("auto", "under torchrun: ddp, or fsdp to shard the model; auto: ddp")
    threads: int = option(0, "CPU threads; 0: as many as torch finds")
    compile: bool = option(False, "compile the layers: a minute at the start, then faster steps; see TRAINING.md")
    recompute: bool = option(False, "compute activations again in the backward pass: a quarter more time, less memory")
    eval_every: int = option(200, "steps between evaluations")
    eval_tokens: int = option(32_768, "tokens of an evaluation; the last one takes all")
    save_every: int = option(500, "steps between checkpoints")
    keep: int = option(2, "checkpoints to keep")
    layers_every: int = option(20, "steps between records of each layer's codes, scales and inputs; 0: none")
    tensorboard: str = option("", "folder to write the log to for TensorBoard, too; none: log.jsonl alone")

    def __post_init__(self) -> None:
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(words)}")
        ranges: dict[str, tuple[float, float]] = {
            "validation": (1e-6, 0.5), "steps": (1, 1e9), "minutes": (0, 1e6), "batch": (1, 1e6),
            "accumulate": (1, 1e6), "context": (0, 1 << 24), "seed": (0, 1 << 31), "lr": (1e-9, 10),
            "warmup": (0, 1), "warmdown": (0, 1), "quantize_warmup": (0, 0.5 if self.source else 0.9),
            "distill": (0, 1), "distill_temperature": (0.1, 100), "distill_relations": (0, 1),
            "distill_layer": (0, 1e4), "weight_decay": (0, 10), "clip": (0, 1e9), "spike": (0, 1e9),
            "threads": (0, 1024), "eval_every": (1, 1e9), "eval_tokens": (1, 1e12), "save_every": (1, 1e9),
            "keep": (1, 1e9), "layers_every": (0, 1e9), "batch_tokens": (0, 1e9),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {low:g} to {high:g}")
        if self.chat and self.data:
            raise ValueError("both --data and --chat are given; a run learns from text or from conversations")
        if self.distill + self.distill_relations > 1:
            raise ValueError(
                f"distill {self.distill:g} and distill_relations {self.distill_relations:g} are shares of one loss, "
                "expected at most 1 together"
            )
        if self.teacher and not self.distilled:
            raise ValueError("teacher is given and nothing to learn from it; add --distill or --distill-relations")
        for f in dataclasses.fields(self):
            if f.name in CONVERSION and not self.source and getattr(self, f.name) != f.default:
                raise ValueError(f"{f.name} is an option of `bitnet finetune`, which begins with a model")

    @property
    def distilled(self) -> bool:
        return self.distill + self.distill_relations > 0

    @property
    def run_folder(self) -> Path:
        return Path(self.out or f"runs/{Path(self.source).resolve().name if self.source else self.preset}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Strict: an unknown name raises with the nearest valid one, a wrong type with the right one."""
        types = {f.name: type(getattr(cls(), f.name)) for f in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in types:
                raise ValueError(f"unknown training option {name!r}" + did_you_mean(name, list(types)))
            if types[name] is float and type(value) is int:
                continue
            if type(value) is not types[name]:
                raise ValueError(f"{name} is {value!r}, expected {types[name].__name__}")
        return cls(**values)


PRESET_SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 8e-3, "batch": 8, "steps": 1500},
    "gguf": {"lr": 8e-3, "batch": 8, "steps": 1500, "tokenizer": "llama-bpe"},
    "mini-gpt": {"lr": 8e-3, "batch": 8, "steps": 1500, "tokenizer": "char"},
    "bitnet-2b4t": {  # as published
        "lr": 1.2e-3, "optimizer": "adamw", "schedule": "two_stage", "quantize_warmup": 0.0, "batch": 1,
        "accumulate": 256, "steps": 100_000,
    },
}  # fmt: skip
"""How the training options of a preset differ from the defaults."""


FINETUNE_SETTINGS: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.0}
"""How those of `bitnet finetune` do: what it begins with should not be forgotten."""


def resolve(
    given: argparse.Namespace,
    saved: dict[str, Any] | None = None,
    base: tuple[dict[str, Any], ModelConfig] | None = None,
) -> tuple[Settings, ModelConfig]:
    """Settings and model of a run from parsed flags.

    saved: the state of a run to resume, instead of a preset. base: defaults and model of a source, instead of one.
    """
    file = _read(given.config) if given.config else {}
    names = [f.name for f in dataclasses.fields(Settings)]
    flags = {name: getattr(given, name) for name in names if getattr(given, name, None) is not None}
    overrides: dict[str, Any] = file.get("model", {}) | dict(_assignment(text) for text in given.set or [])
    train = {k: v for k, v in file.items() if k == "preset"} | file.get("train", {}) | flags
    if saved is not None:
        settings = Settings.from_dict(saved["settings"] | train)
        model = ModelConfig.from_dict(saved["model"])
        if overrides and model.replace(**overrides) != model:
            raise ValueError("a resumed run keeps its model; start another with --out to change it")
        return settings, model
    if base is not None:
        return Settings.from_dict(base[0] | train), base[1].replace(**overrides)
    preset = train.get("preset", "tiny")
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}, expected {', '.join(PRESETS)}" + did_you_mean(preset, [*PRESETS]))
    settings = Settings.from_dict(PRESET_SETTINGS[preset] | train)
    return settings, PRESETS[preset].replace(**overrides)


def did_you_mean(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f", did you mean {near[0]!r}?" if near else ""


def add_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """One flag for each field of Settings; absent flags are None, so that the file below them shows."""
    parser.add_argument("--config", metavar="FILE.toml", help="options in tables [train] and [model]; flags win")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", help="an option of the model, such as dim=256; repeatable"
    )
    defaults = Settings()
    for f in dataclasses.fields(Settings):
        if f.name in without:
            continue
        default = getattr(defaults, f.name)
        text = f.metadata["help"] + (f" [{default}]" if default not in ("", []) else "")
        if isinstance(default, bool):
            parser.add_argument(f"--{f.name}", action=argparse.BooleanOptionalAction, help=f.metadata["help"])
            continue
        kind: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {"type": type(default)}
        if f.name in CHOICES:
            kind["choices"] = CHOICES[f.name]
        parser.add_argument(
            f"--{f.name.replace('_', '-')}", default=None, help=text, metavar=None if f.name in CHOICES else "", **kind
        )


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as handle:
            values = tomllib.load(handle)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for name in values:
        if name not in ("preset", "train", "model"):
            raise ValueError(f"{path}: unknown name {name!r}, expected preset, [train] or [model]")
    return values


def _assignment(text: str) -> tuple[str, Any]:
    """`dim=256` as TOML would read it; a bare word is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r}, expected NAME=VALUE")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value
