"""Checkpoints: folders of safetensors and JSON, never pickle.

    runs/tiny/step-001200/
        model.safetensors      fp32 master weights, named as in `bitnet.model`
        config.json            ModelConfig
        tokenizer.json         `tokenizers` library
        optimizer.safetensors  AdamW moments, `{parameter}.exp_avg` and so on   (to resume)
        state.json             step, tokens, seconds, losses, settings          (to resume)
        chat_template.jinja    of a model that answers                          (if there is one)
        generation.json        start and end tokens, sampling defaults          (if there are any)

A checkpoint is written under another name, flushed to disk, and renamed: under its own name
it is always whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitnet.config import ModelConfig
from bitnet.model import Transformer

TEMPLATE, GENERATION = "chat_template.jinja", "generation.json"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not what its configuration says."""


def find(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest one of a run folder."""
    folder = Path(path)
    if (folder / "model.safetensors").is_file():
        return folder
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist, expected a checkpoint or a run folder of `bitnet train`")
    steps = all_of(folder)
    if not steps:
        raise CheckpointError(f"{folder} has no model.safetensors and no step-* folder, expected a checkpoint")
    return steps[-1]


def all_of(run: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    found = [p for p in run.iterdir() if re.fullmatch(r"step-\d+", p.name)] if run.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def load_config(path: str | Path) -> ModelConfig:
    values = read_json(find(path) / "config.json")
    if "architectures" in values:
        raise CheckpointError(
            f"{path} is a Hugging Face folder, expected a checkpoint; bitnet convert and bitnet finetune read those"
        )
    return ModelConfig.from_dict(values)


def load_state(path: str | Path) -> dict[str, Any]:
    """state.json: at least `step`, `tokens`, `seconds` and `settings` of the run that wrote it."""
    return read_json(find(path) / "state.json")


def load_template(path: str | Path) -> str | None:
    """The chat template, None where there is none."""
    file = find(path) / TEMPLATE
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 (byte {error.start})") from None


def load_generation(path: str | Path) -> dict[str, Any]:
    """`generation` of the packed file's METADATA (FORMAT.md §5), empty where nothing is known."""
    file = find(path) / GENERATION
    return read_json(file) if file.is_file() else {}


def load_model(path: str | Path) -> Transformer:
    """The model in evaluation mode, fp32, after checking that file and configuration agree exactly."""
    folder = find(path)
    model = Transformer(load_config(folder))
    load_weights(model, folder)
    return model.eval()


def load_weights(model: Transformer, folder: Path) -> None:
    found, expected = _read_tensors(folder / "model.safetensors"), model.state_dict()
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise CheckpointError(f"{folder}: tensor {name} is missing, config.json calls for it")
        if name not in expected:
            raise CheckpointError(f"{folder}: tensor {name} is there, config.json does not call for it")
        if found[name].shape != expected[name].shape:
            raise CheckpointError(
                f"{folder}: tensor {name} is {_shape(found[name])}, config.json calls for {_shape(expected[name])}"
            )
        if not found[name].isfinite().all():
            raise CheckpointError(f"{folder}: tensor {name} holds NaN or infinity")
    model.load_state_dict(found)


def load_optimizer(optimizer: torch.optim.Optimizer, model: Transformer, folder: Path) -> None:
    """Restore the moments written by `save`."""
    tensors = _read_tensors(folder / "optimizer.safetensors")
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition(".")
        if parameter not in parameters:
            raise CheckpointError(f"{folder}: optimizer state for {parameter}, which the model does not have")
        optimizer.state[parameters[parameter]][key] = tensor


def save(
    run: Path,
    model: Transformer,
    tokenizer_json: str,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    template: str | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Write `run/step-<state["step"]>` in one atomic move; returns it."""
    final = run / f"step-{state['step']:06d}"
    work = run / f".{final.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        save_file({name: t.contiguous() for name, t in model.state_dict().items()}, work / "model.safetensors")
        save_file(_moments(optimizer, model), work / "optimizer.safetensors")
        (work / "config.json").write_text(model.config.to_json() + "\n", encoding="utf-8")
        (work / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        (work / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        if template is not None:
            (work / TEMPLATE).write_text(template, encoding="utf-8")
        if generation:
            (work / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        for file in work.iterdir():
            _flush(file)
        _flush(work)
        if final.exists():  # a checkpoint of the same step, written before a resume
            _remove(final)
        work.rename(final)
        _flush(run)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final


def keep_newest(run: Path, n: int) -> None:
    """Remove all checkpoints but the newest n, and what a killed run left of writing or removing one."""
    for old in all_of(run)[:-n]:
        _remove(old)
    for left in run.glob(".step-*.partial"):
        shutil.rmtree(left)


def _remove(checkpoint: Path) -> None:
    """Under another name first: a process may be killed at any file, and what has its own name is whole."""
    work = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    shutil.rmtree(work, ignore_errors=True)
    checkpoint.rename(work)
    shutil.rmtree(work)


def _moments(optimizer: torch.optim.Optimizer, model: Transformer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises CheckpointError: missing, damaged, or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__}, expected an object")
    return value


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))


def _flush(path: Path) -> None:
    """fsync a file, or the entries of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
