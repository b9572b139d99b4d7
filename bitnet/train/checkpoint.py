"""Checkpoints: folders of safetensors and JSON, never pickle.

    runs/tiny/step-001200/
        model.safetensors      fp32 master weights, named as in `bitnet.model.transformer`
        config.json            ModelConfig
        tokenizer.json         `tokenizers` library
        optimizer.safetensors  optimizer state, `{parameter}.exp_avg` and so on (to resume)
        state.json             step, tokens, seconds, losses, settings          (to resume)
        chat_template.jinja    chat template of the model                       (if there is one)
        generation.json        start and end tokens, sampling defaults          (if there are any)
        manifest.json          size and SHA-256 of the others (`bitnet.train.manifest`)

A checkpoint is written under another name, flushed to disk, and renamed, so that under its own name
it is always complete. The manifest reveals later damage; the newest intact checkpoint of a run counts.
A run has one from before its first step, that of step 0.

It does not depend on the number of processes that wrote it, and any number can read it. With a sharded model
(`bitnet.model.parallel`) each process writes its own rows, which the first then joins tensor by tensor;
each reads tensor by tensor and keeps its rows. No process ever holds the whole model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from bitnet.config import ModelConfig
from bitnet.data import tokenizer
from bitnet.model import parallel
from bitnet.model.transformer import Transformer
from bitnet.train import manifest, optimizers, runlog
from bitnet.train.state import State
from bitnet_runtime import terminal
from bitnet_runtime.errors import json_kind

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
CONFIG, STATE, TOKENIZER = "config.json", "state.json", "tokenizer.json"
COUNTS = ("step", "tokens", "seconds", "evaluated", "parameters", "fall", "quantized")  # numbers in the state of a run
TEMPLATE, GENERATION = "chat_template.jinja", "generation.json"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or does not match its configuration."""


class Checkpoint:
    """A checkpoint that was found and checked; each part is read on first access, and cached.

    Each property raises CheckpointError or an OSError that names the file.
    """

    def __init__(self, folder: Path) -> None:
        """folder: one that is known to be intact; `open` is for any other."""
        self.folder = folder

    @property
    def run(self) -> Path:
        """The folder that it is in: that of its run."""
        return self.folder.resolve().parent

    @classmethod
    def open(cls, path: str | os.PathLike[str], say: Callable[[str], object] = terminal.say) -> Self:
        """The checkpoint at `path`, or the newest intact one of a run folder.

        say: called with a line for each newer one that is damaged. Raises CheckpointError if there is none, or it is
        damaged; OSError if one cannot be read now, as continuing from an older one would lose its progress.
        """
        folder, steps = Path(path), there(path)
        if steps == [folder]:
            if problem := manifest.damage(folder):
                raise CheckpointError(
                    f"{folder} is damaged: {problem}; name another checkpoint, or the run folder for its newest whole "
                    f"one (if you changed it on purpose, remove {manifest.NAME})"
                )
            return cls(folder)
        problems: list[str] = []
        for step in reversed(steps):
            problem = manifest.damage(step)
            if not problem:
                for line in problems:
                    say(f"{line}; taking {step.name}")
                return cls(step)
            problems.append(f"{step} is damaged: {problem}")
        raise CheckpointError(f"no checkpoint is whole: {'; '.join(problems)}")

    def check_kept(self) -> None:
        """Raises CheckpointError if its run has removed it since it was opened."""
        if not self.folder.exists():
            raise _missing(self.folder / WEIGHTS)

    @functools.cached_property
    def config(self) -> ModelConfig:
        values = read_json(self.folder / CONFIG)
        if "architectures" in values:
            raise CheckpointError(
                f"{self.folder} is a Hugging Face folder, expected a checkpoint; "
                "bitnet convert and bitnet finetune read those"
            )
        try:
            return ModelConfig.from_dict(values)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.folder / CONFIG}: {error}") from None

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        """state.json: counters and settings of the run that wrote it."""
        return read_json(self.folder / STATE)

    @property
    def state_of_run(self) -> State:
        """`state`, checked to have the `model` and `settings` needed to resume the run or evaluate as it did."""
        for name in ("model", "settings"):
            if not isinstance(self.state.get(name), dict):
                raise CheckpointError(f"{self.folder / STATE} has no {name!r}, expected what `bitnet train` writes")
        for name in COUNTS:
            if isinstance(found := self.state.get(name, 0), bool) or not isinstance(found, int | float):
                raise CheckpointError(f"{self.folder / STATE}: {name} is {found!r:.40}, expected a number")
        return cast(State, self.state)

    @property
    def state_if_any(self) -> dict[str, Any]:
        """`state`; empty if there is none, as in a checkpoint from elsewhere."""
        return self.state if (self.folder / STATE).is_file() else {}

    @property
    def measured(self) -> dict[str, Any]:
        """The newest evaluation at this step in the log of its run; empty if there is none."""
        log, step = self.run / "log.jsonl", self.state_if_any.get("step")
        found = [record for record in runlog.read(log) if record["step"] == step and "validation" in record]
        return dict(found[-1]["validation"]) if found and isinstance(found[-1]["validation"], dict) else {}

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / TOKENIZER).is_file()

    @functools.cached_property
    def words(self) -> Tokenizer:
        return tokenizer.load(self.folder / TOKENIZER)

    @functools.cached_property
    def template(self) -> str | None:
        """The chat template, None if there is none."""
        file = self.folder / TEMPLATE
        try:
            return file.read_text(encoding="utf-8") if file.is_file() else None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8 (byte {error.start})") from None

    @functools.cached_property
    def generation(self) -> dict[str, Any]:
        """`generation` of the packed file's METADATA (FORMAT.md §5), empty if unknown."""
        file = self.folder / GENERATION
        return read_json(file) if file.is_file() else {}

    @functools.cached_property
    def model(self) -> Transformer:
        """The model in evaluation mode, fp32; file and configuration are checked to agree exactly."""
        model = Transformer(self.config)
        self.load_weights(model)
        return model.eval()

    def tensor_names(self) -> list[str]:
        """The names of the weights."""
        with _opened(self.folder / WEIGHTS) as tensors:
            return list(tensors.keys())

    def tensor(self, name: str) -> Tensor:
        """A weight as stored; no other is read."""
        with _opened(self.folder / WEIGHTS) as tensors:
            return cast(Tensor, tensors.get_tensor(name))

    def load_weights(self, model: Transformer) -> None:
        """Load the weights into a model, which may be sharded."""
        expected, seen = model.state_dict(), set()
        for name, tensor in _read_tensors(self.folder / WEIGHTS):
            if name not in expected:
                raise CheckpointError(f"{self.folder}: tensor {name} is there, config.json does not call for it")
            if tensor.shape != expected[name].shape:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} is {_shape(tensor)}, config.json calls for {_shape(expected[name])}"
                )
            if not tensor.isfinite().all():
                raise CheckpointError(f"{self.folder}: tensor {name} holds NaN or infinity")
            expected[name].copy_(parallel.like(tensor, expected[name]))
            seen.add(name)
        for name in sorted(expected.keys() - seen):
            raise CheckpointError(f"{self.folder}: tensor {name} is missing, config.json calls for it")

    def load_optimizer(self, optimizer: torch.optim.Optimizer, model: Transformer) -> None:
        """Restore the optimizer state of a model, which may be sharded. Raises CheckpointError if any is missing."""
        parameters = dict(model.named_parameters())
        updated = self.state["step"] > self.state.get("skipped", 0)  # no state before the first unskipped step
        names = {p: name for name, p in parameters.items()}
        moments = ((names[p], key) for p, keys in optimizers.moments(optimizer) for key in keys)
        missing = {f"{name}.{key}" for name, key in moments} if updated else set()
        for name, tensor in _read_tensors(self.folder / OPTIMIZER):
            owner, _, key = name.rpartition(".")
            if owner not in parameters:
                raise CheckpointError(f"{self.folder}: optimizer state for {owner}, which the model does not have")
            parameter = parameters[owner]
            if tensor.numel() == 1 and tensor.shape != parameter.shape:  # AdamW's count of steps
                optimizer.state[parameter][key] = tensor.reshape(()).to(parameter.device)
            elif tensor.shape == parameter.shape:
                optimizer.state[parameter][key] = parallel.like(tensor, parameter)
            else:
                raise CheckpointError(f"{self.folder}: {name} is {_shape(tensor)}, its parameter {_shape(parameter)}")
            missing.discard(name)
        if missing:
            raise CheckpointError(f"{self.folder}: {OPTIMIZER} lacks {min(missing)}; it cannot be gone on from")


def all_of(run: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    found = [p for p in run.iterdir() if re.fullmatch(r"step-\d+", p.name)] if run.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def there(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoint at `path`, or those of a run folder, whole or not. Raises CheckpointError: there is none."""
    folder = Path(path)
    if (folder / WEIGHTS).is_file() or (folder / manifest.NAME).is_file():
        return [folder]
    if not folder.exists():
        if others := all_of(folder.parent):
            names = ", ".join(each.name for each in others)
            raise CheckpointError(f"{folder} does not exist, expected one of {names}; --keep says how many stay")
        raise CheckpointError(
            f"{folder} does not exist, expected a checkpoint or a run folder of `bitnet train`; a model to begin "
            "with may also be a folder of Hugging Face's: hf download OWNER/MODEL --local-dir FOLDER"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file, expected a checkpoint or a run folder; of a packed file name the run it came from"
        )
    if not (steps := all_of(folder)):
        raise CheckpointError(f"{folder} has no {WEIGHTS} and no step-* folder, expected a checkpoint")
    return steps


def _read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file, read one by one."""
    with _opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a dict)
            yield name, tensors.get_tensor(name)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise _missing(file) from None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {error}") from None


def _missing(file: Path) -> CheckpointError:
    if re.fullmatch(r"step-\d+", file.parent.name) and file.parent.parent.is_dir() and not file.parent.exists():
        return CheckpointError(
            f"{file.parent} is gone: its run goes on, and keeps the newest; try again, or have it keep more: --keep"
        )
    return CheckpointError(f"{file} is missing")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises CheckpointError: missing, damaged, or not an object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _missing(file) from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {json_kind(value)}, expected an object")
    return value


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))
